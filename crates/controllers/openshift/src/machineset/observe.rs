//! Reads a set, its machines and their nodes into what the planner needs.

use capstan_api::openshift::{DeletePolicy, Machine, MachineSet};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::plan::{Member, Owner, Wanted};
use super::{Error, invalid};

/// Annotations that ask for a machine to be deleted first; the second is the older name.
const DELETE_ANNOTATIONS: [&str; 2] = [
    "machine.openshift.io/delete-machine",
    "machine.openshift.io/cluster-api-delete-machine",
];

/// The set's selector, refused where it would make machines without end.
pub fn selector(set: &MachineSet) -> Result<Selector, Error> {
    let selector =
        Selector::try_from(set.spec.selector.clone()).map_err(|error| invalid("spec.selector", error.to_string()))?;
    if selector.selects_all() {
        return Err(invalid(
            "spec.selector",
            "an empty selector would take in every machine".to_owned(),
        ));
    }
    if !selector.matches(&set.spec.template.metadata.labels) {
        let detail = format!("`{selector}` does not match the labels of spec.template.metadata");
        return Err(invalid("spec.selector", detail));
    }
    Ok(selector)
}

pub fn wanted(set: &MachineSet) -> Wanted {
    let seconds = set.spec.min_ready_seconds.unwrap_or_default().max(0).unsigned_abs();
    Wanted {
        // The CRD's default, for objects made before it had one.
        replicas: usize::try_from(set.spec.replicas.unwrap_or(1)).unwrap_or_default(),
        policy: set.spec.delete_policy.clone().unwrap_or(DeletePolicy::Random),
        min_ready: std::time::Duration::from_secs(seconds.into()),
    }
}

pub fn owner(set: &MachineSet, machine: &Machine) -> Owner {
    match machine
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true))
    {
        None => Owner::Nobody,
        Some(owner) if Some(&owner.uid) == set.metadata.uid.as_ref() => Owner::Us,
        Some(_) => Owner::Other,
    }
}

pub fn member(set: &MachineSet, machine: &Machine, node: Option<&Node>) -> Member {
    let status = machine.status.as_ref();
    let labels = machine.labels();
    Member {
        name: machine.name_any(),
        uid: machine.uid().unwrap_or_default(),
        created: machine
            .creation_timestamp()
            .map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        owner: owner(set, machine),
        deleting: machine.metadata.deletion_timestamp.is_some(),
        marked: DELETE_ANNOTATIONS
            .iter()
            .any(|name| machine.annotations().contains_key(*name)),
        failed: status.is_some_and(|status| status.error_reason.is_some() || status.error_message.is_some()),
        has_node: status.is_some_and(|status| status.node_ref.is_some()),
        ready_since: node.and_then(ready_since),
        fully_labeled: set
            .spec
            .template
            .metadata
            .labels
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value)),
    }
}

fn ready_since(node: &Node) -> Option<Timestamp> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions
        .iter()
        .find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    Some(
        ready
            .last_transition_time
            .as_ref()
            .map_or(Timestamp::UNIX_EPOCH, |time| time.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(selector: serde_json::Value, labels: serde_json::Value) -> MachineSet {
        let spec = json!({"selector": selector, "template": {"metadata": {"labels": labels}}});
        MachineSet::new("s", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_selector_that_does_not_match_its_template_is_refused() {
        let good = set(json!({"matchLabels": {"a": "b"}}), json!({"a": "b", "c": "d"}));
        assert!(selector(&good).is_ok());
        assert!(selector(&set(json!({"matchLabels": {"a": "b"}}), json!({"a": "x"}))).is_err());
        assert!(selector(&set(json!({}), json!({"a": "b"}))).is_err());
    }

    #[test]
    fn replicas_are_one_by_default() {
        assert_eq!(wanted(&set(json!({}), json!({}))).replicas, 1);
    }
}
