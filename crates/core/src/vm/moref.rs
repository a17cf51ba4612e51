//! References to managed objects, parsed once at the edge.

use std::fmt;
use std::str::FromStr;

/// A managed object reference, written `Type:value` (`VirtualMachine:vm-42`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct MoRef {
    kind: String,
    value: String,
}

/// The types of managed objects, by the start of the ids that vCenter gives them. A longer start goes first.
const ID_TYPES: [(&str, &str); 14] = [
    ("datacenter-", "Datacenter"),
    ("datastore-", "Datastore"),
    ("domain-c", "ClusterComputeResource"),
    ("domain-", "ComputeResource"),
    ("dvportgroup-", "DistributedVirtualPortgroup"),
    ("dvs-", "DistributedVirtualSwitch"),
    ("group-p", "StoragePod"),
    ("group-", "Folder"),
    ("host-", "HostSystem"),
    ("network-o", "OpaqueNetwork"),
    ("network-", "Network"),
    ("resgroup-v", "VirtualApp"),
    ("resgroup-", "ResourcePool"),
    ("vm-", "VirtualMachine"),
];

impl MoRef {
    pub fn new(kind: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            value: value.into(),
        }
    }

    /// Returns the reference that a text is which may also be a name: `VirtualMachine:vm-42`, or the id alone (`vm-42`), whose
    /// start gives the type.
    pub fn from_id(text: &str) -> Option<Self> {
        if let Some((kind, value)) = text.split_once(':') {
            let known = ID_TYPES.iter().any(|(_, known)| *known == kind);
            return (known && !value.is_empty()).then(|| Self::new(kind, value));
        }
        let (_, kind) = ID_TYPES.iter().find(|(start, _)| text.starts_with(start))?;
        Some(Self::new(*kind, text))
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

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("vm-42", Some("VirtualMachine:vm-42"))]
    #[case("VirtualMachine:vm-42", Some("VirtualMachine:vm-42"))]
    #[case("dvportgroup-7", Some("DistributedVirtualPortgroup:dvportgroup-7"))]
    #[case("domain-c8", Some("ClusterComputeResource:domain-c8"))]
    #[case("domain-s8", Some("ComputeResource:domain-s8"))]
    #[case("group-v3", Some("Folder:group-v3"))]
    #[case("group-p3", Some("StoragePod:group-p3"))]
    #[case("resgroup-v9", Some("VirtualApp:resgroup-v9"))]
    #[case("ubuntu-24.04", None)]
    #[case("net:7", None)]
    #[case("", None)]
    fn an_id_shows_its_type(#[case] text: &str, #[case] expected: Option<&str>) {
        assert_eq!(MoRef::from_id(text).map(|found| found.to_string()).as_deref(), expected);
    }
}
