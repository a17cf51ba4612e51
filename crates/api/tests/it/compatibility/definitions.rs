//! The names by which kubectl and other tools know a kind.

use serde_json::Value;

/// How many facts were compared, and what differs.
#[derive(Default)]
pub struct Comparison {
    pub facts: usize,
    pub faults: Vec<String>,
}

pub fn compare(kind: &str, theirs: &Value, ours: &Value) -> Comparison {
    let mut comparison = Comparison::default();
    for pointer in [
        "/group",
        "/scope",
        "/names/plural",
        "/names/singular",
        "/names/listKind",
        "/version/served",
        "/version/subresources/status",
        "/version/subresources/scale",
    ] {
        let (their, our) = (theirs.pointer(pointer), ours.pointer(pointer));
        comparison.expect(their == our, || {
            format!("{kind}{pointer} is {our:?} instead of {their:?}")
        });
    }
    for pointer in ["/names/shortNames", "/names/categories", "/version/selectableFields"] {
        let known = list(ours, pointer);
        for word in list(theirs, pointer) {
            comparison.expect(known.contains(word), || format!("{kind}{pointer} lacks {word}"));
        }
    }
    let columns = list(ours, "/version/additionalPrinterColumns");
    for theirs in list(theirs, "/version/additionalPrinterColumns") {
        let same = columns.iter().any(|ours| column(ours) == column(theirs));
        comparison.expect(same, || format!("{kind} has no column like {theirs}"));
    }
    comparison
}

impl Comparison {
    fn expect(&mut self, holds: bool, fault: impl FnOnce() -> String) {
        self.facts += 1;
        if !holds {
            self.faults.push(fault());
        }
    }
}

fn list<'a>(definition: &'a Value, pointer: &str) -> &'a [Value] {
    let list = definition.pointer(pointer).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

/// Name, type, where it comes from, and whether only `-o wide` shows it.
fn column(column: &Value) -> (&str, &str, String, i64) {
    let text = |key: &str| column[key].as_str().unwrap_or_default();
    // A path may be written in two ways.
    let path = text("jsonPath")
        .replace("['", ".")
        .replace("']", "")
        .replace('\'', "\"");
    let priority = column["priority"].as_i64().unwrap_or_default();
    (text("name"), text("type"), path, priority)
}
