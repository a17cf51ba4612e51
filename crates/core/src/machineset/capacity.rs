//! The annotations from which the cluster's autoscaler reads the capacity of a machine of an empty set. Pure.

use std::collections::BTreeMap;

/// On a MachineSet: the CPUs of one machine, for the autoscaler.
const CPU: &str = "machine.openshift.io/vCPU";
/// On a MachineSet: the memory of one machine in MiB, for the autoscaler.
const MEMORY: &str = "machine.openshift.io/memoryMb";
/// On a MachineSet: the GPUs of one machine, for the autoscaler.
const GPU: &str = "machine.openshift.io/GPU";
const LABELS: &str = "capacity.cluster-autoscaler.kubernetes.io/labels";
const ARCHITECTURE: &str = "kubernetes.io/arch";

/// What a machine of a set offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub v_cpus: u32,
    pub memory_mib: u64,
    pub gpus: u32,
    /// In Azure's spelling.
    pub architecture: Option<String>,
}

/// Returns the annotations that are missing or differ.
pub fn annotations(current: &BTreeMap<String, String>, capacity: &Capacity) -> BTreeMap<String, String> {
    let wanted = [
        (CPU, capacity.v_cpus.to_string()),
        (MEMORY, capacity.memory_mib.to_string()),
        (GPU, capacity.gpus.to_string()),
        (LABELS, labels(current.get(LABELS).map(String::as_str), capacity)),
    ];
    wanted
        .into_iter()
        .filter(|(name, value)| current.get(*name) != Some(value))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

/// Returns the labels of the set's nodes: those that users wrote, and the architecture.
fn labels(current: Option<&str>, capacity: &Capacity) -> String {
    let pairs = current.unwrap_or_default().split(',').filter(|pair| !pair.is_empty());
    let mut labels: BTreeMap<&str, &str> = pairs.filter_map(|pair| pair.split_once('=')).collect();
    let architecture = match capacity.architecture.as_deref() {
        Some(name) if name.eq_ignore_ascii_case("arm64") => "arm64",
        Some(_) | None => "amd64",
    };
    labels.insert(ARCHITECTURE, architecture);
    let pairs: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    pairs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d4s() -> Capacity {
        Capacity {
            v_cpus: 4,
            memory_mib: 16384,
            gpus: 0,
            architecture: Some("x64".into()),
        }
    }

    #[test]
    fn an_empty_set_tells_what_its_machines_would_offer() {
        let expected = [
            (
                "capacity.cluster-autoscaler.kubernetes.io/labels",
                "kubernetes.io/arch=amd64",
            ),
            ("machine.openshift.io/GPU", "0"),
            ("machine.openshift.io/memoryMb", "16384"),
            ("machine.openshift.io/vCPU", "4"),
        ];
        let made = annotations(&BTreeMap::new(), &d4s());
        let made: Vec<(&str, &str)> = made
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(made, expected);
        let current = annotations(&BTreeMap::new(), &d4s());
        assert!(annotations(&current, &d4s()).is_empty(), "nothing is written twice");
    }

    #[test]
    fn another_size_changes_what_differs_and_labels_of_users_stay() {
        let mut current = annotations(&BTreeMap::new(), &d4s());
        current.insert(LABELS.into(), "disktype=ultrassd,kubernetes.io/arch=amd64".into());
        let arm = Capacity {
            v_cpus: 8,
            gpus: 1,
            architecture: Some("Arm64".into()),
            ..d4s()
        };
        let expected = [
            (CPU, "8"),
            (GPU, "1"),
            (LABELS, "disktype=ultrassd,kubernetes.io/arch=arm64"),
        ];
        let expected: BTreeMap<String, String> = expected
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(annotations(&current, &arm), expected);
    }
}
