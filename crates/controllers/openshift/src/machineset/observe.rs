//! Reads a set, its machines and their nodes into what the plan depends on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::openshift::{DeletePolicy, Machine, MachineSet};
use capstan_core::machine::is_machine_apis;
use capstan_core::machineset::{self, Desired, Member, Owner, capacity};
use capstan_core::validate::openshift::is_azure;
use capstan_kube::nodes;
use capstan_kube::runtime::Scope;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};

use super::state::Lookup;
use super::{Controller, Error, Managed, Observed, State};

/// Annotations that ask for a machine to be deleted first; the second is the older name.
const DELETE_ANNOTATIONS: [&str; 2] = [
    "machine.openshift.io/delete-machine",
    "machine.openshift.io/cluster-api-delete-machine",
];

impl Controller {
    pub(super) async fn observe_set(
        &self,
        scope: &mut Scope<MachineSet>,
        state: &mut State,
    ) -> Result<Option<Observed>, Error> {
        let set = scope.object.clone();
        if scope.is_deleting() || !is_of_azure(&set) {
            return Ok(None);
        }
        if !is_managed(&set) {
            return Ok(Some(Observed::Paused));
        }
        let selector = selector(&set)?;
        let machines = if scope.live {
            self.list_live(scope, &selector).await?
        } else {
            let matches = |machine: &Machine| selector.matches(machine.labels());
            self.machines.select(Some(&scope.key.namespace), matches)
        };
        let members: Vec<_> = machines
            .iter()
            .filter_map(|machine| {
                let node = node_name(machine).and_then(|name| self.nodes.get(None, name));
                member(&set, machine, node.as_deref())
            })
            .collect();
        let orphans = members.iter().any(|member| member.owner == Owner::Nobody);
        let capacity = self.capacity(scope, state).await;
        let annotations = match &capacity {
            Lookup::Known(capacity) => capacity::annotations(set.annotations(), capacity),
            Lookup::UnknownSize(_) | Lookup::Failed => BTreeMap::new(),
        };
        Ok(Some(Observed::Managed(Managed {
            plan: machineset::Observed {
                desired: desired(&set),
                members,
                set_confirmed: orphans && is_there(scope).await?,
                annotations,
            },
            selector,
            capacity,
            resync: scope.context.resync,
        })))
    }

    /// Lists the machines from the API server, and waits from then on until the cache shows them.
    async fn list_live(&self, scope: &mut Scope<MachineSet>, selector: &Selector) -> Result<Vec<Arc<Machine>>, Error> {
        let params = ListParams::default().labels(&selector.to_string());
        let listed = scope.api_of::<Machine>().list(&params).await;
        let machines = listed.map_err(capstan_kube::Error::from)?.items;
        for machine in &machines {
            if owner(&scope.object, machine) == Owner::Set {
                scope.wrote(&self.machines, machine);
            }
        }
        Ok(machines.into_iter().map(Arc::new).collect())
    }
}

/// Whether the API server says that the set is there and stays.
async fn is_there(scope: &Scope<MachineSet>) -> Result<bool, Error> {
    let live = scope.api_of::<MachineSet>().get_opt(&scope.key.name).await;
    let live = live.map_err(capstan_kube::Error::from)?;
    Ok(live.is_some_and(|live| {
        live.metadata.uid.as_ref() == Some(&scope.key.uid) && live.metadata.deletion_timestamp.is_none()
    }))
}

/// Whether the set is for this controller: sets of other platforms, and those that Cluster API manages, are not. Another
/// controller reconciles them; two would each create what is missing.
fn is_managed(set: &MachineSet) -> bool {
    let status = set.status.as_ref().and_then(|status| status.authoritative_api.as_ref());
    is_of_azure(set) && is_machine_apis(set.spec.authoritative_api.as_ref(), status)
}

fn is_of_azure(set: &MachineSet) -> bool {
    let value = set.spec.template.spec.provider_spec.value.as_ref();
    value.is_none_or(is_azure)
}

pub fn node_name(machine: &Machine) -> Option<&str> {
    machine.status.as_ref()?.node_ref.as_ref()?.name.as_deref()
}

/// The set's selector. One that would create machines without end is invalid.
pub fn selector(set: &MachineSet) -> Result<Selector, Error> {
    let invalid = |detail: String| Error::Invalid {
        path: "spec.selector",
        detail,
    };
    let selector = Selector::try_from(set.spec.selector.clone()).map_err(|error| invalid(error.to_string()))?;
    if selector.selects_all() {
        return Err(invalid("an empty selector would match every machine".to_owned()));
    }
    if !selector.matches(&set.spec.template.metadata.labels) {
        let detail = format!("`{selector}` does not match the labels of spec.template.metadata");
        return Err(invalid(detail));
    }
    Ok(selector)
}

fn desired(set: &MachineSet) -> Desired {
    let seconds = set.spec.min_ready_seconds.unwrap_or_default().max(0).unsigned_abs();
    Desired {
        // The CRD's default, for objects made before it had one.
        replicas: usize::try_from(set.spec.replicas.unwrap_or(1)).unwrap_or_default(),
        policy: set.spec.delete_policy.clone().unwrap_or(DeletePolicy::Random),
        min_ready: Duration::from_secs(seconds.into()),
    }
}

fn owner(set: &MachineSet, machine: &Machine) -> Owner {
    match machine
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true))
    {
        None => Owner::Nobody,
        Some(owner) if Some(&owner.uid) == set.metadata.uid.as_ref() => Owner::Set,
        Some(_) => Owner::Other,
    }
}

fn member(set: &MachineSet, machine: &Machine, node: Option<&Node>) -> Option<Member> {
    let status = machine.status.as_ref();
    let labels = machine.labels();
    Some(Member {
        name: machine.name_any(),
        uid: machine.uid()?,
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
    })
}

fn ready_since(node: &Node) -> Option<Timestamp> {
    let ready = nodes::ready(node).filter(|condition| condition.status == "True")?;
    let since = ready.last_transition_time.as_ref();
    Some(since.map_or(Timestamp::UNIX_EPOCH, |time| time.0))
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
    fn sets_of_other_platforms_and_of_cluster_api_are_left_alone() {
        let of = |kind: &str, spec: Option<&str>, status: Option<&str>| {
            let mut set = set(json!({"matchLabels": {"a": "b"}}), json!({"a": "b"}));
            set.spec.template.spec.provider_spec.value = Some(json!({"kind": kind}));
            set.spec.authoritative_api = spec.map(Into::into);
            set.status = status.map(|status| serde_json::from_value(json!({"authoritativeAPI": status})).unwrap());
            is_managed(&set)
        };
        assert!(of("AzureMachineProviderSpec", None, None));
        assert!(of("AzureMachineProviderSpec", Some("MachineAPI"), Some("MachineAPI")));
        assert!(!of("VSphereMachineProviderSpec", None, None));
        assert!(!of("AzureMachineProviderSpec", Some("ClusterAPI"), None));
        assert!(!of("AzureMachineProviderSpec", Some("MachineAPI"), Some("Migrating")));
    }

    #[test]
    fn replicas_are_one_by_default() {
        assert_eq!(desired(&set(json!({}), json!({}))).replicas, 1);
    }
}
