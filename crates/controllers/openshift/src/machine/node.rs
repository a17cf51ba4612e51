//! A machine and its Node: which Node it is, and the machine's metadata on it. Pure.

use capstan_api::openshift::Machine;
use capstan_kube::nodes;
use capstan_kube::runtime::ObjectKey;
use k8s_openapi::api::core::v1::{Node, NodeAddress, ObjectReference, Taint};
use kube::ResourceExt as _;

/// On a Node: namespace and name of its Machine.
pub const MACHINE_ANNOTATION: &str = "machine.openshift.io/machine";

pub fn provider_id(node: &Node) -> Option<&str> {
    node.spec.as_ref()?.provider_id.as_deref().filter(|id| !id.is_empty())
}

fn addresses(node: &Node) -> &[NodeAddress] {
    node.status
        .as_ref()
        .and_then(|status| status.addresses.as_deref())
        .unwrap_or_default()
}

fn internal_ips(addresses: &[NodeAddress]) -> impl Iterator<Item = &str> {
    addresses
        .iter()
        .filter(|address| address.type_ == "InternalIP")
        .map(|address| address.address.as_str())
}

/// Whether this is the machine's Node: by provider id where both have one, else by internal address.
pub fn belongs(node: &Node, provider: &str, machine_addresses: &[NodeAddress]) -> bool {
    match provider_id(node) {
        Some(id) if !provider.is_empty() => id.eq_ignore_ascii_case(provider),
        Some(_) => false,
        None => internal_ips(addresses(node)).any(|ip| internal_ips(machine_addresses).any(|own| own == ip)),
    }
}

/// Whether the machine lists no addresses, or not all of its Node's: certificates of the kubelet are approved only for addresses
/// that the machine lists.
pub fn lacks_addresses(machine: &Machine, node: Option<&Node>) -> bool {
    let known = machine.status.as_ref().map(|status| status.addresses.as_slice());
    let known = known.unwrap_or_default();
    let of_node = node.map(addresses).unwrap_or_default();
    let is_ip = |address: &&NodeAddress| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP");
    let is_known = |ip: &NodeAddress| known.iter().any(|own| own.address == ip.address);
    known.is_empty() || of_node.iter().filter(is_ip).any(|ip| !is_known(ip))
}

/// Whether the Node is not ready, or its kubelet does not report.
pub fn is_unwell(node: &Node) -> bool {
    nodes::ready(node).is_some_and(|condition| condition.status != "True")
}

pub fn is_control_plane(node: &Node) -> bool {
    [
        "node-role.kubernetes.io/control-plane",
        "node-role.kubernetes.io/master",
    ]
    .iter()
    .any(|role| node.labels().contains_key(*role))
}

/// Returns the Node with the machine's annotation, labels, annotations and taints. What others put there stays.
pub fn with_machine_metadata(key: &ObjectKey, machine: &Machine, node: &Node) -> Node {
    let mut after = node.clone();
    let owner = format!("{}/{}", key.namespace, key.name);
    let annotations = after.annotations_mut();
    annotations.extend(machine.spec.metadata.annotations.clone());
    annotations.insert(MACHINE_ANNOTATION.to_owned(), owner);
    after.labels_mut().extend(machine.spec.metadata.labels.clone());
    if !machine.spec.taints.is_empty() {
        let taints = after.spec.get_or_insert_default().taints.get_or_insert_default();
        for taint in &machine.spec.taints {
            let same = |other: &Taint| other.key == taint.key && other.effect == taint.effect;
            if !taints.iter().any(same) {
                taints.push(taint.clone());
            }
        }
    }
    after
}

pub fn reference(node: &Node) -> ObjectReference {
    ObjectReference {
        kind: Some("Node".to_owned()),
        name: Some(node.name_any()),
        uid: node.uid(),
        ..ObjectReference::default()
    }
}

/// Returns a hash of what matters to the Node's machine. Heartbeats do not change it.
pub fn fingerprint(node: &Node) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable);
    (node.uid(), provider_id(node), is_unwell(node), cordoned).hash(&mut hasher);
    (node.labels(), node.annotations().get(MACHINE_ANNOTATION)).hash(&mut hasher);
    internal_ips(addresses(node)).for_each(|ip| ip.hash(&mut hasher));
    let taints = node
        .spec
        .as_ref()
        .and_then(|spec| spec.taints.as_deref())
        .unwrap_or_default();
    taints
        .iter()
        .for_each(|taint| (&taint.key, &taint.effect).hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn node(value: serde_json::Value) -> Node {
        serde_json::from_value(value).unwrap()
    }

    fn internal(ip: &str) -> Vec<NodeAddress> {
        vec![NodeAddress {
            type_: "InternalIP".into(),
            address: ip.into(),
        }]
    }

    #[rstest]
    #[case::by_id(json!({"spec": {"providerID": "AZURE:///A"}}), "azure:///a", true)]
    #[case::another_id_with_our_address(
        json!({"spec": {"providerID": "azure:///b"}, "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}), "azure:///a", false)]
    #[case::by_address(json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}), "azure:///a", true)]
    #[case::another_address(json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.2"}]}}), "azure:///a", false)]
    fn a_node_is_known_by_provider_id_and_then_by_address(
        #[case] value: serde_json::Value,
        #[case] provider: &str,
        #[case] ours: bool,
    ) {
        assert_eq!(belongs(&node(value), provider, &internal("10.0.0.1")), ours);
    }

    #[test]
    fn a_node_gets_what_the_machine_says_and_keeps_the_rest() {
        let machine: Machine = serde_json::from_value(json!({
            "metadata": {"name": "m", "namespace": "n"},
            "spec": {"metadata": {"labels": {"disktype": "ultrassd"}, "annotations": {"a": "b"}},
                     "taints": [{"key": "k", "effect": "NoSchedule"}, {"key": "x", "effect": "NoExecute"}]},
        }))
        .unwrap();
        let before = node(json!({
            "metadata": {"name": "node", "labels": {"other": "1"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule", "value": "kept"}]},
        }));
        let key = ObjectKey {
            namespace: "n".into(),
            name: "m".into(),
            uid: "u".into(),
        };
        let after = with_machine_metadata(&key, &machine, &before);
        assert_eq!(after.annotations()[MACHINE_ANNOTATION], "n/m");
        assert_eq!(
            (after.labels()["other"].as_str(), after.labels()["disktype"].as_str()),
            ("1", "ultrassd")
        );
        let taints = after.spec.as_ref().unwrap().taints.as_ref().unwrap();
        assert_eq!((taints.len(), taints[0].value.as_deref()), (2, Some("kept")));
        assert_eq!(
            with_machine_metadata(&key, &machine, &after),
            after,
            "doing it again changes nothing"
        );
    }
}
