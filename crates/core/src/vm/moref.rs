//! References to managed objects, parsed once at the edge.

use std::fmt;
use std::str::FromStr;

/// A managed object reference, written `Type:value` (`VirtualMachine:vm-42`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct MoRef {
    kind: String,
    value: String,
}

impl MoRef {
    pub fn new(kind: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            value: value.into(),
        }
    }

    pub fn kind(&self) -> &str {
        &self.kind
    }

    pub fn value(&self) -> &str {
        &self.value
    }

    /// A task from its bare value, as `status.taskRef` keeps it (`task-42`), or from its full form.
    pub fn task(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self::new("Task", text))
    }

    /// A virtual machine from its bare value, as `status.vmRef` keeps it, or from its full form.
    pub fn vm(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self::new("VirtualMachine", text))
    }
}

impl fmt::Display for MoRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.value)
    }
}

impl FromStr for MoRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            Some((kind, value)) if !kind.is_empty() && !value.is_empty() => Ok(Self::new(kind, value)),
            _ => Err(format!(
                "{text:?} is not a managed object reference of the form Type:value"
            )),
        }
    }
}
