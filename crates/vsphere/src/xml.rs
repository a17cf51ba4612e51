//! A small XML tree for answers and a small writer for requests.
//!
//! Invariant: no document, however broken, makes this module panic, or keep more than a fixed depth and a fixed number of
//! elements; a document that cannot be read is an [`Error::Xml`].

use quick_xml::Reader;
use quick_xml::events::{BytesRef, BytesStart, Event};

use crate::error::{Error, Result, shown};
use capstan_core::vm::MoRef;

/// vCenter nests snapshots and disk chains some dozens deep at most; anything deeper is not an answer of one.
const MAX_DEPTH: usize = 512;
/// An element takes 150 to 300 bytes, so a limit on the bytes of a document is not enough. A machine with 60 disks has some
/// 3,000 elements, and a read of 100 watched machines some 10,000.
const MAX_ELEMENTS: usize = 100_000;

/// Elements of vim25 have three attributes at most.
const MAX_ATTRIBUTES: usize = 64;

/// One element with its text and children. Namespaces are dropped: vim25 answers need none of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    pub name: String,
    /// `xsi:type`, without its namespace prefix.
    pub kind: Option<String>,
    /// The `type` attribute that managed object references carry.
    pub reference: Option<String>,
    pub text: String,
    pub children: Vec<Element>,
}

impl Element {
    /// Reads a whole document.
    pub fn parse(text: &str) -> Result<Element> {
        let mut reader = Reader::from_str(text);
        let mut stack: Vec<Element> = Vec::new();
        let mut elements = 0;
        loop {
            let event = reader.read_event().map_err(broken)?;
            if matches!(event, Event::Start(_) | Event::Empty(_)) {
                elements += 1;
                if elements > MAX_ELEMENTS {
                    return Err(Error::Xml(format!("more than {MAX_ELEMENTS} elements")));
                }
            }
            match event {
                Event::Start(start) => {
                    if stack.len() >= MAX_DEPTH {
                        return Err(Error::Xml(format!("more than {MAX_DEPTH} elements deep")));
                    }
                    stack.push(open(&start)?);
                }
                Event::Empty(start) => {
                    let element = open(&start)?;
                    match stack.last_mut() {
                        Some(parent) => parent.children.push(element),
                        None => return Ok(element),
                    }
                }
                Event::End(_) => {
                    let Some(element) = stack.pop() else {
                        return Err(Error::Xml("an element ends twice".into()));
                    };
                    match stack.last_mut() {
                        Some(parent) => parent.children.push(element),
                        None => return Ok(element),
                    }
                }
                Event::Text(text) => push_text(&mut stack, &text.xml10_content()),
                Event::CData(text) => push_text(&mut stack, &text.xml10_content()),
                Event::GeneralRef(entity) => push_text(&mut stack, &resolve(&entity)?),
                Event::Eof => return Err(Error::Xml("the document ends too early".into())),
                Event::Decl(_) | Event::PI(_) | Event::DocType(_) | Event::Comment(_) => {}
            }
        }
    }

    pub fn child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Takes a child out of the tree; the rest of the tree is dropped.
    pub fn into_child(self, name: &str) -> Option<Element> {
        self.children.into_iter().find(|child| child.name == name)
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Element> + 'a {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// Returns about how many bytes of memory the tree takes.
    pub fn weight(&self) -> usize {
        let texts = [
            Some(&self.name),
            self.kind.as_ref(),
            self.reference.as_ref(),
            Some(&self.text),
        ];
        let own = size_of::<Self>() + texts.into_iter().flatten().map(String::len).sum::<usize>();
        own + self.children.iter().map(Element::weight).sum::<usize>()
    }

    /// Follows a dotted path of child names.
    pub fn at(&self, path: &str) -> Option<&Element> {
        path.split('.').try_fold(self, |element, name| element.child(name))
    }

    /// The trimmed text at a dotted path, unless it is empty.
    pub fn text_at(&self, path: &str) -> Option<&str> {
        self.at(path)
            .map(|element| element.text.trim())
            .filter(|text| !text.is_empty())
    }

    pub fn string_at(&self, path: &str) -> Option<String> {
        self.text_at(path).map(str::to_owned)
    }

    pub fn number_at<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.text_at(path).and_then(|text| text.parse().ok())
    }

    pub fn bool_at(&self, path: &str) -> Option<bool> {
        self.text_at(path).map(|text| text == "true" || text == "1")
    }

    pub fn moref_at(&self, path: &str) -> Option<MoRef> {
        self.at(path).and_then(Element::moref)
    }

    /// This element as a managed object reference.
    pub fn moref(&self) -> Option<MoRef> {
        let kind = self.reference.as_deref()?;
        let value = self.text.trim();
        (!value.is_empty()).then(|| MoRef::new(kind, value))
    }

    /// All children that are managed object references (an `ArrayOfManagedObjectReference`).
    pub fn morefs(&self) -> Vec<MoRef> {
        self.children.iter().filter_map(Element::moref).collect()
    }
}

fn open(start: &BytesStart<'_>) -> Result<Element> {
    let mut element = Element {
        name: start.local_name().as_ref().to_owned(),
        ..Element::default()
    };
    // To check that each has another name takes the square of their number.
    let mut attributes = start.attributes();
    for (number, attribute) in attributes.with_checks(false).enumerate() {
        if number == MAX_ATTRIBUTES {
            return Err(Error::Xml(format!("more than {MAX_ATTRIBUTES} attributes")));
        }
        let attribute = attribute.map_err(broken)?;
        if attribute.key.local_name().as_ref() != "type" {
            continue;
        }
        let value = attribute
            .normalized_value(quick_xml::XmlVersion::Implicit1_0)
            .map_err(broken)?;
        if attribute.key.prefix().is_some() {
            let bare = value.rsplit(':').next().unwrap_or_default();
            element.kind = Some(bare.to_owned());
        } else {
            element.reference = Some(value.into_owned());
        }
    }
    Ok(element)
}

fn push_text(stack: &mut [Element], text: &str) {
    if let Some(element) = stack.last_mut() {
        element.text.push_str(text);
    }
}

fn resolve(entity: &BytesRef<'_>) -> Result<String> {
    if let Some(c) = entity.resolve_char_ref().map_err(broken)? {
        return Ok(c.to_string());
    }
    Ok(match entity.xml10_content().as_ref() {
        "lt" => "<".into(),
        "gt" => ">".into(),
        "amp" => "&".into(),
        "quot" => "\"".into(),
        "apos" => "'".into(),
        other => format!("&{other};"),
    })
}

fn broken(cause: impl std::fmt::Display) -> Error {
    Error::Xml(shown(&cause.to_string()))
}

/// Writes elements in the order of the calls. vCenter is strict about order: callers follow the type's declaration.
#[derive(Debug, Default)]
pub struct Writer {
    out: String,
}

impl Writer {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn finish(self) -> String {
        self.out
    }

    pub fn text(&mut self, name: &str, value: impl AsRef<str>) -> &mut Self {
        self.out
            .push_str(&format!("<{name}>{}</{name}>", escape(value.as_ref())));
        self
    }

    pub fn value(&mut self, name: &str, value: impl std::fmt::Display) -> &mut Self {
        self.text(name, value.to_string())
    }

    pub fn opt(&mut self, name: &str, value: Option<impl std::fmt::Display>) -> &mut Self {
        if let Some(value) = value {
            self.value(name, value);
        }
        self
    }

    pub fn moref(&mut self, name: &str, reference: &MoRef) -> &mut Self {
        self.out.push_str(&format!(
            "<{name} type=\"{}\">{}</{name}>",
            escape(reference.kind()),
            escape(reference.value())
        ));
        self
    }

    pub fn opt_moref(&mut self, name: &str, reference: Option<&MoRef>) -> &mut Self {
        if let Some(reference) = reference {
            self.moref(name, reference);
        }
        self
    }

    /// A value of a declared simple type, as `OptionValue.value` needs it.
    pub fn typed_text(&mut self, name: &str, xsd: &str, value: &str) -> &mut Self {
        self.out
            .push_str(&format!("<{name} xsi:type=\"xsd:{xsd}\">{}</{name}>", escape(value)));
        self
    }

    pub fn nest(&mut self, name: &str, inner: impl FnOnce(&mut Self)) -> &mut Self {
        self.out.push_str(&format!("<{name}>"));
        inner(self);
        self.out.push_str(&format!("</{name}>"));
        self
    }

    /// An element whose concrete type `xsi:type` names.
    pub fn nest_as(&mut self, name: &str, kind: &str, inner: impl FnOnce(&mut Self)) -> &mut Self {
        self.out.push_str(&format!("<{name} xsi:type=\"{kind}\">"));
        inner(self);
        self.out.push_str(&format!("</{name}>"));
        self
    }

    /// Writes a tree as it was read: for devices that are sent back whole.
    pub fn element(&mut self, element: &Element) -> &mut Self {
        self.element_named(&element.name, element)
    }

    pub fn element_named(&mut self, name: &str, element: &Element) -> &mut Self {
        self.out.push('<');
        self.out.push_str(name);
        if let Some(reference) = &element.reference {
            self.out.push_str(&format!(" type=\"{}\"", escape(reference)));
        }
        if let Some(kind) = &element.kind {
            let prefix = if is_simple(kind) { "xsd:" } else { "" };
            self.out.push_str(&format!(" xsi:type=\"{prefix}{}\"", escape(kind)));
        }
        self.out.push('>');
        if element.children.is_empty() {
            self.out.push_str(&escape(&element.text));
        }
        for child in &element.children {
            self.element(child);
        }
        self.out.push_str(&format!("</{name}>"));
        self
    }
}

fn is_simple(kind: &str) -> bool {
    matches!(
        kind,
        "string" | "int" | "long" | "short" | "boolean" | "byte" | "double" | "float" | "dateTime" | "anyURI"
    )
}

/// Text for an element or attribute; control characters that XML 1.0 has no form for are dropped.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\t' | '\n' => out.push(c),
            '\r' => out.push_str("&#13;"),
            c if (c as u32) < 0x20 || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FAULT: &str = include_str!("../tests/data/fault.xml");
    const UPDATES: &str = include_str!("../tests/data/updates.xml");

    #[test]
    fn a_tree_keeps_types_references_and_text() {
        let tree = Element::parse(UPDATES).unwrap();
        let change = tree
            .at("Body.WaitForUpdatesExResponse.returnval.filterSet.objectSet")
            .unwrap();
        assert_eq!(change.moref_at("obj").unwrap(), MoRef::new("Task", "task-42"));
        let state = change.child("changeSet").unwrap().child("val").unwrap();
        assert_eq!(state.kind.as_deref(), Some("TaskInfoState"));
        assert_eq!(state.text, "success");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(text in "\\PC*", value in "[a-zA-Z0-9:<>&'\" -]{1,20}") {
            let mut writer = Writer::new();
            writer.nest("a", |w| { w.text("b", &text).moref("c", &MoRef::new("Task", &value)); });
            let tree = Element::parse(&writer.finish()).unwrap();
            prop_assert_eq!(&tree.child("b").unwrap().text, &text);
            if !value.trim().is_empty() {
                let read = tree.moref_at("c").unwrap();
                prop_assert_eq!(read.value(), value.trim());
            }
        }

        #[test]
        fn no_mutated_document_makes_it_panic(
            which in any::<bool>(),
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..12),
        ) {
            let mut bytes = if which { FAULT } else { UPDATES }.as_bytes().to_vec();
            for (at, byte, how) in edits {
                if bytes.is_empty() { break; }
                let at = at.index(bytes.len());
                match how {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    2 => { bytes.remove(at); }
                    _ => bytes.truncate(at),
                }
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(tree) = Element::parse(&text) {
                crate::probe_decoders(&tree);
            }
        }

        #[test]
        fn no_soup_of_markup_makes_it_panic(soup in "[<>/a-c=\"'&;#x0-9! \\[\\]?-]{0,200}") {
            let _ = Element::parse(&soup);
        }
    }

    #[test]
    fn a_document_of_many_small_elements_is_refused_after_a_fixed_number_of_them() {
        let many = format!("<a>{}</a>", "<a/>".repeat(6 << 20));
        let refused = Element::parse(&many).unwrap_err().to_string();
        assert!(refused.contains("more than 100000 elements"), "{refused}");
        let allowed = format!("<a>{}</a>", "<a/>".repeat(MAX_ELEMENTS - 1));
        assert_eq!(Element::parse(&allowed).unwrap().children.len(), MAX_ELEMENTS - 1);
    }

    #[test]
    fn an_element_of_many_attributes_is_refused() {
        let attributes: String = (0..1_000_000).map(|n| format!(" a{n}=''")).collect();
        let refused = Element::parse(&format!("<a{attributes}/>")).unwrap_err().to_string();
        assert!(refused.contains("more than 64 attributes"), "{refused}");
    }

    #[test]
    fn a_very_deep_document_is_refused() {
        let deep = "<a>".repeat(100_000);
        assert!(matches!(Element::parse(&deep), Err(Error::Xml(_))));
    }
}
