//! Facts about Nodes, in one place for all controllers, and the index that finds a Node by what its machine knows.

use std::collections::{BTreeSet, HashMap};

use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeSpec, NodeStatus, NodeSystemInfo, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

use crate::cache::{Change, name_bytes};

/// Taints that keep pods away for a while: the node is not initialized, not healthy or about to be removed. Other taints
/// reserve a node for some pods; such a node takes the pods that it is there for.
const TEMPORARY_TAINTS: [&str; 7] = [
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "node.cluster.x-k8s.io/",
    "ToBeDeletedByClusterAutoscaler",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "karpenter.sh/",
];
/// The taints of network plugins and drivers that do not run yet end so.
const STARTING_TAINTS: [&str; 2] = ["not-ready", "uninitialized"];
/// A trimmed Node of a workload cluster has less than 1 KiB of text; one with more than this is reduced to its name.
const NODE_BYTES: usize = 8 * 1024;

/// Returns the node's condition `Ready`.
pub fn ready(node: &Node) -> Option<&NodeCondition> {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.find(|condition| condition.type_ == "Ready")
}

/// Whether the node's kubelet reports that it is ready.
pub fn is_ready(node: &Node) -> bool {
    ready(node).is_some_and(|condition| condition.status == "True")
}

/// Whether the node's kubelet has not reported for a while.
pub fn is_unreachable(node: &Node) -> bool {
    ready(node).is_some_and(|condition| condition.status == "Unknown")
}

pub fn is_cordoned(node: &Node) -> bool {
    node.spec
        .as_ref()
        .and_then(|spec| spec.unschedulable)
        .unwrap_or_default()
}

/// Whether new pods can start on the node: it is ready, not cordoned, and no taint keeps pods away for a while.
pub fn takes_pods(node: &Node) -> bool {
    is_ready(node) && !is_cordoned(node) && !taints(node).any(repels_for_a_while)
}

fn taints(node: &Node) -> impl Iterator<Item = &Taint> {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten())
}

fn repels_for_a_while(taint: &Taint) -> bool {
    let repels = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    let temporary = TEMPORARY_TAINTS.iter().any(|prefix| taint.key.starts_with(prefix));
    let starting = STARTING_TAINTS.iter().any(|suffix| taint.key.ends_with(suffix));
    repels && (temporary || starting)
}

/// Returns the provider id in lower case: Azure's own services disagree on the case, and UUIDs have none.
pub fn provider_id(node: &Node) -> Option<String> {
    let id = node.spec.as_ref()?.provider_id.as_deref()?;
    (!id.is_empty()).then(|| id.to_ascii_lowercase())
}

/// Keeps of a workload cluster's Node what controllers read, within [`NODE_BYTES`]: the cluster may be hostile.
pub(crate) fn trim_foreign(node: &mut Node) {
    let meta = std::mem::take(&mut node.metadata);
    node.metadata = ObjectMeta {
        name: meta.name,
        uid: meta.uid,
        resource_version: meta.resource_version,
        creation_timestamp: meta.creation_timestamp,
        deletion_timestamp: meta.deletion_timestamp,
        ..ObjectMeta::default()
    };
    node.spec = node.spec.take().map(|spec| NodeSpec {
        provider_id: spec.provider_id,
        unschedulable: spec.unschedulable,
        taints: spec.taints,
        ..NodeSpec::default()
    });
    node.status = node.status.take().map(|status| NodeStatus {
        conditions: status.conditions.map(|conditions| {
            let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
            let ready = ready.map(|condition| NodeCondition {
                type_: condition.type_,
                status: condition.status,
                ..NodeCondition::default()
            });
            ready.into_iter().collect()
        }),
        node_info: status.node_info.map(|info| NodeSystemInfo {
            kubelet_version: info.kubelet_version,
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    });
    if text(node) > NODE_BYTES {
        (node.spec, node.status) = (None, None);
    }
}

/// Returns how many bytes of text a trimmed Node has, with a few for each entry of a list.
pub(crate) fn text(node: &Node) -> usize {
    let spec = node.spec.iter();
    let id = spec
        .clone()
        .filter_map(|spec| spec.provider_id.as_ref())
        .map(String::len);
    let taints = spec.flat_map(|spec| spec.taints.iter().flatten());
    let taints = taints.map(|t| 64 + t.key.len() + t.effect.len() + t.value.as_ref().map_or(0, String::len));
    let status = node.status.iter();
    let conditions = status.clone().flat_map(|status| status.conditions.iter().flatten());
    let conditions = conditions.map(|c| 64 + c.type_.len() + c.status.len());
    let info = status.filter_map(|status| status.node_info.as_ref());
    let info = info.map(|info| info.kubelet_version.len());
    let names = [name_bytes(&node.metadata)];
    id.chain(taints).chain(conditions).chain(info).chain(names).sum()
}

/// The state of a Node that machines depend on: a change of anything else (heartbeats, above all) concerns no machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    provider_id: Option<String>,
    ready: bool,
    cordoned: bool,
    /// Key and effect.
    taints: Vec<(String, String)>,
    deleting: bool,
}

/// Node names by provider id. It grows and shrinks with the cache that feeds it.
#[derive(Default)]
pub struct NodeIndex {
    by_provider_id: HashMap<String, BTreeSet<String>>,
    known: HashMap<String, Facts>,
}

impl NodeIndex {
    /// Takes a change in, and returns whether it concerns machines.
    pub fn apply(&mut self, change: &Change<Node>) -> bool {
        let (name, node) = (change.object.name_any(), &change.object);
        let before = self.known.remove(&name);
        if let Some(before) = &before {
            let id = before.provider_id.iter();
            id.for_each(|id| unlink(&mut self.by_provider_id, id, &name));
        }
        if change.gone {
            return true;
        }
        let facts = Facts {
            provider_id: provider_id(node),
            ready: is_ready(node),
            cordoned: is_cordoned(node),
            taints: taints(node)
                .map(|taint| (taint.key.clone(), taint.effect.clone()))
                .collect(),
            deleting: node.metadata.deletion_timestamp.is_some(),
        };
        if let Some(id) = &facts.provider_id {
            self.by_provider_id.entry(id.clone()).or_default().insert(name.clone());
        }
        let changed = before.as_ref() != Some(&facts);
        self.known.insert(name, facts);
        changed
    }

    /// Returns the name of the node with this provider id, whatever its case; the first by name if there are several.
    pub fn by_provider_id(&self, id: &str) -> Option<String> {
        self.by_provider_id.get(&id.to_ascii_lowercase())?.first().cloned()
    }
}

fn unlink(map: &mut HashMap<String, BTreeSet<String>>, key: &str, name: &str) {
    if let Some(names) = map.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            map.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn node(spec: Value, conditions: Value) -> Node {
        let node = json!({"metadata": {"name": "a"}, "spec": spec, "status": {"conditions": conditions}});
        serde_json::from_value(node).unwrap()
    }

    fn ready() -> Value {
        json!([{"type": "Ready", "status": "True"}])
    }

    fn tainted(key: &str, effect: &str) -> Value {
        json!({"taints": [{"key": key, "effect": effect}]})
    }

    #[rstest]
    #[case::ready(json!({}), ready(), true)]
    #[case::not_ready(json!({}), json!([{"type": "Ready", "status": "False"}]), false)]
    #[case::unreachable(json!({}), json!([{"type": "Ready", "status": "Unknown"}]), false)]
    #[case::no_condition(json!({}), json!([]), false)]
    #[case::cordoned(json!({"unschedulable": true}), ready(), false)]
    #[case::uninitialized(tainted("node.cluster.x-k8s.io/uninitialized", "NoSchedule"), ready(), false)]
    #[case::no_network_yet(tainted("node.cilium.io/agent-not-ready", "NoExecute"), ready(), false)]
    #[case::about_to_be_removed(tainted("ToBeDeletedByClusterAutoscaler", "NoSchedule"), ready(), false)]
    #[case::under_pressure(tainted("node.kubernetes.io/disk-pressure", "NoSchedule"), ready(), false)]
    #[case::a_preference(tainted("node.kubernetes.io/x", "PreferNoSchedule"), ready(), true)]
    #[case::reserved_for_some_pods(tainted("dedicated", "NoSchedule"), ready(), true)]
    fn a_node_takes_pods_when_nothing_keeps_them_away(
        #[case] spec: Value,
        #[case] conditions: Value,
        #[case] takes: bool,
    ) {
        assert_eq!(takes_pods(&node(spec, conditions)), takes);
    }

    fn change(spec: Value, gone: bool) -> Change<Node> {
        let object = json!({"metadata": {"name": "a"}, "spec": spec, "status": {"conditions": ready()}});
        let object = Arc::new(serde_json::from_value(object).unwrap());
        Change { object, gone }
    }

    #[test]
    fn the_index_finds_a_node_by_its_present_facts_only() {
        let mut index = NodeIndex::default();
        let id = json!({"providerID": "azure:///Subscriptions/X"});
        assert!(index.apply(&change(id.clone(), false)));
        assert_eq!(index.by_provider_id("azure:///SUBSCRIPTIONS/x").as_deref(), Some("a"));
        assert!(!index.apply(&change(id.clone(), false)), "a heartbeat");
        assert!(index.apply(&change(json!({"providerID": "azure:///other"}), false)));
        assert_eq!(index.by_provider_id("azure:///subscriptions/x"), None);
        let cordoned = json!({"providerID": "azure:///Subscriptions/X", "unschedulable": true});
        assert!(index.apply(&change(cordoned, false)));
        assert!(index.apply(&change(id, true)));
        assert!(index.by_provider_id.is_empty() && index.known.is_empty());
    }

    #[test]
    fn a_foreign_node_with_too_much_text_is_reduced_to_its_name() {
        let conditions = |message: &str| json!([{"type": "Ready", "status": "True", "message": message}]);
        let mut small = node(json!({"providerID": "a"}), conditions("fine"));
        small.metadata.annotations = Some([("k".to_owned(), "v".repeat(NODE_BYTES))].into());
        trim_foreign(&mut small);
        assert!(is_ready(&small) && small.metadata.annotations.is_none());
        let mut talkative = node(json!({"providerID": "a"}), conditions(&"x".repeat(NODE_BYTES)));
        trim_foreign(&mut talkative);
        assert_eq!(text(&talkative), text(&small), "nobody reads the message");
        let mut large = node(json!({"providerID": "x".repeat(NODE_BYTES)}), conditions("fine"));
        trim_foreign(&mut large);
        assert!(large.spec.is_none() && large.status.is_none() && large.name_any() == "a");
        let mut many = node(
            json!({"taints": vec![json!({"key": "", "effect": ""}); 1000]}),
            json!([]),
        );
        trim_foreign(&mut many);
        assert!(many.spec.is_none());
    }
}
