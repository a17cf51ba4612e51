//! Everything that can go wrong with a vCenter, and whether it may go away by itself.

use capstan_core::Class;

use crate::xml::Element;
use capstan_core::vm::MoRef;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Characters of a fault's message and of other texts of a server at most: they go into conditions and logs, and are kept.
const LONGEST: usize = 1000;
/// Characters of names at most. Managed object ids, types and privileges have some dozens.
const LONGEST_NAME: usize = 200;
/// So many of the objects that a name may stand for are listed.
const LISTED: usize = 10;

/// A fault that vCenter reported: its type, and its message word for word, as far as it goes into a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The vim25 type without the `Fault` suffix, such as `InvalidDeviceSpec`.
    pub kind: String,
    pub message: String,
    /// What the fault names: a property, a duplicate's name, a privilege, a file.
    pub subject: Option<String>,
    /// The object the fault is about, such as the machine that already has a name.
    pub object: Option<MoRef>,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.message, &self.subject) {
            (message, _) if !message.is_empty() => write!(f, "{message} ({})", self.kind),
            (_, Some(subject)) => write!(f, "{}: {subject}", self.kind),
            _ => f.write_str(&self.kind),
        }
    }
}

impl Fault {
    /// Reads a fault's detail element (`<XFault xsi:type="X">`) with the message that came beside it.
    pub(crate) fn read(detail: Option<&Element>, message: &str) -> Self {
        let kind = detail
            .map(|detail| {
                detail
                    .kind
                    .clone()
                    .unwrap_or_else(|| detail.name.trim_end_matches("Fault").to_owned())
            })
            .unwrap_or_else(|| "RuntimeFault".to_owned());
        let named = [
            "invalidProperty",
            "name",
            "privilegeId",
            "file",
            "datastore",
            "reason",
            "property",
        ];
        let subject = detail.and_then(|detail| named.iter().find_map(|name| detail.string_at(name)));
        let message = match detail.and_then(|detail| detail.text_at("faultMessage.message")) {
            Some(inner) if message.trim().is_empty() => inner,
            _ => message.trim(),
        };
        let object = detail.and_then(|detail| detail.moref_at("object").or_else(|| detail.moref_at("obj")));
        Self {
            kind: cut(&kind, LONGEST_NAME),
            message: cut(without_go_type(message), LONGEST),
            subject: subject.map(|subject| cut(&subject, LONGEST)),
            object: object.filter(|object| object.kind().len().max(object.value().len()) <= LONGEST_NAME),
        }
    }

    /// Reads a `LocalizedMethodFault`, as a failed task carries it.
    pub(crate) fn localized(element: &Element) -> Self {
        Self::read(
            element.child("fault"),
            element.text_at("localizedMessage").unwrap_or_default(),
        )
    }

    pub fn is(&self, kind: &str) -> bool {
        self.kind == kind
    }

    pub fn class(&self) -> Class {
        match self.kind.as_str() {
            // The object, its host or its pool is busy or away for now; another try may find it otherwise.
            "TaskInProgress"
            | "ConcurrentAccess"
            | "ResourceInUse"
            | "InvalidState"
            | "InvalidPowerState"
            | "HostNotConnected"
            | "HostCommunication"
            | "HostNotReachable"
            | "NotAuthenticated"
            | "RequestCanceled"
            | "Timedout"
            | "NetworkDisruptedAndConfigRolledBack"
            | "InsufficientResourcesFault"
            | "InsufficientCpuResourcesFault"
            | "InsufficientMemoryResourcesFault"
            | "NoCompatibleHost"
            | "InsufficientHostCapacityFault"
            | "VcAgentNotResponding"
            | "AgentNotResponding"
            | "FileLocked"
            | "GenericVmConfigFault"
            | "CannotAccessFile"
            | "CannotAccessDatastore"
            | "InaccessibleDatastore"
            | "SystemError"
            | "RuntimeFault"
            | "MethodFault"
            | "PlatformConfigFault"
            | "HostConfigFault"
            | "LimitExceeded"
            | "ManagedObjectNotFound"
            | "ToolsUnavailable"
            | "MethodDisabled"
            | "VimFault" => Class::Transient,
            _ => Class::Terminal,
        }
    }
}

/// The simulator gives the Go type of a fault where vCenter has a sentence; it says nothing that `kind` does not.
fn without_go_type(message: &str) -> &str {
    if message.starts_with("*types.") { "" } else { message }
}

/// Returns the beginning of a text of a server.
pub(crate) fn shown(text: &str) -> String {
    cut(text, LONGEST)
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

fn listed(found: &[String]) -> String {
    let first: Vec<String> = found.iter().take(LISTED).map(|name| cut(name, LONGEST_NAME)).collect();
    match found.len().saturating_sub(LISTED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("vCenter {server} cannot be reached: {cause}")]
    Unreachable { server: String, cause: String },
    #[error(
        "vCenter {server} shows a certificate with thumbprint {seen}, not {expected}: set the thumbprint to what it shows if that is its own certificate"
    )]
    Thumbprint {
        server: String,
        seen: String,
        expected: String,
    },
    #[error(
        "the certificate of vCenter {server} is not trusted ({cause}): set spec.thumbprint, or put the CA into the key \"ca.crt\" of the identity's Secret"
    )]
    Certificate { server: String, cause: String },
    /// The answer is not quoted: it may come from any server that a manifest names.
    #[error("server {server} did not answer as a vCenter does ({answer}): check spec.server")]
    NotVcenter { server: String, answer: String },
    #[error("vCenter {server} answered {method} with more than {limit} bytes: the answer was dropped")]
    TooLarge {
        server: String,
        method: String,
        limit: usize,
    },
    #[error(
        "vCenter {server} has a large answer to {method}, which is not read for some minutes: the last one had more than the allowed bytes or did not end in time"
    )]
    Barred { server: String, method: String },
    #[error(transparent)]
    NoMemory(#[from] capstan_core::memory::Full),
    #[error("vCenter {server} answered {method} with HTTP {status}: {body}")]
    Http {
        server: String,
        method: String,
        status: u16,
        body: String,
    },
    #[error("vCenter {server} refused the login of {user}: check user name and password of the identity ({fault})")]
    Login {
        server: String,
        user: String,
        fault: Box<Fault>,
    },
    #[error("{method} of {target}: {fault}")]
    Fault {
        method: String,
        target: String,
        fault: Box<Fault>,
    },
    /// Told without the task's number: the same failure reads the same each time.
    #[error("task {name} failed: {fault}")]
    TaskFailed {
        task: MoRef,
        name: String,
        fault: Box<Fault>,
    },
    #[error("{task} is not known to vCenter any more")]
    TaskGone { task: MoRef },
    #[error("{kind} {path:?} does not exist")]
    NotFound { kind: &'static str, path: String },
    #[error("{kind} {path:?} is ambiguous: it matches {}; give a full inventory path", listed(.found))]
    Ambiguous {
        kind: &'static str,
        path: String,
        found: Vec<String>,
    },
    #[error("{method} was not sent: {reason}")]
    Refused { method: String, reason: String },
    #[error("answer cannot be read as XML: {0}")]
    Xml(String),
    #[error("answer to {method} has no {what}")]
    Incomplete { method: String, what: &'static str },
    #[error("{field} {value:?} is not valid: {reason}")]
    Invalid {
        field: &'static str,
        value: String,
        reason: String,
    },
    #[error("the session with vCenter {server} was closed")]
    Closed { server: String },
}

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Error::Unreachable { .. } | Error::Refused { .. } | Error::Xml(_) | Error::Incomplete { .. } => {
                Class::Transient
            }
            Error::NotVcenter { .. } | Error::TooLarge { .. } | Error::Barred { .. } | Error::NoMemory(_) => {
                Class::Transient
            }
            Error::Certificate { .. } => Class::Terminal,
            Error::Closed { .. } | Error::TaskGone { .. } => Class::Transient,
            Error::Http { status, .. } => match status {
                400 | 403 | 404 | 405 => Class::Terminal,
                _ => Class::Transient,
            },
            Error::Fault { fault, .. } | Error::TaskFailed { fault, .. } => fault.class(),
            Error::Login { .. } | Error::Thumbprint { .. } | Error::Invalid { .. } => Class::Terminal,
            Error::NotFound { .. } | Error::Ambiguous { .. } => Class::Terminal,
        }
    }

    /// The fault behind this error, if vCenter reported one.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Fault { fault, .. } | Error::TaskFailed { fault, .. } | Error::Login { fault, .. } => Some(fault),
            _ => None,
        }
    }

    /// Whether vCenter said that the object itself does not exist (any more).
    pub fn is_gone(&self) -> bool {
        matches!(self, Error::NotFound { .. }) || self.fault().is_some_and(|fault| fault.is("ManagedObjectNotFound"))
    }

    pub(crate) fn is_not_authenticated(&self) -> bool {
        match self {
            Error::Fault { fault, .. } => fault.is("NotAuthenticated"),
            Error::Http { status, .. } => *status == 401,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_server_are_cut_before_they_are_kept() {
        let long = "ö".repeat(1 << 20);
        let text = |name: &str| Element {
            name: name.to_owned(),
            text: long.clone(),
            ..Element::default()
        };
        let detail = Element {
            name: "XFault".to_owned(),
            kind: Some(long.clone()),
            children: vec![
                text("name"),
                Element {
                    reference: Some("VirtualMachine".to_owned()),
                    ..text("object")
                },
            ],
            ..Element::default()
        };
        let fault = Fault::read(Some(&detail), &long);
        assert_eq!(fault.kind.chars().count(), LONGEST_NAME + 3);
        assert_eq!(fault.message.chars().count(), LONGEST + 3);
        assert_eq!(fault.subject.map(|subject| subject.chars().count()), Some(LONGEST + 3));
        assert_eq!(fault.object, None);
        let found = vec![long.clone(); 100];
        let ambiguous = Error::Ambiguous {
            kind: "folder",
            path: "x".to_owned(),
            found,
        };
        let text = ambiguous.to_string();
        assert!(
            text.len() < 10 * LISTED * LONGEST_NAME && text.contains("and 90 more"),
            "{text}"
        );
        let end = Element::parse(&format!("<a></{long}>")).map_err(|error| error.to_string().len());
        assert!(end.is_err_and(|length| length < 3 * LONGEST));
        let short = Fault::read(None, "The name 'vm' already exists.");
        assert_eq!(short.to_string(), "The name 'vm' already exists. (RuntimeFault)");
    }
}
