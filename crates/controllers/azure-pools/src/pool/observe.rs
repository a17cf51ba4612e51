//! Instances, machine objects and nodes put together, and read as the planner wants them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use capstan_api::azure::{AzureMachinePoolMachine, UPDATE_INSTANCE_ANNOTATION};
use capstan_api::capi::DELETE_MACHINE_ANNOTATION;
use capstan_core::rollout::{Health, Machine, Motion};
use capstan_kube::capi::Machine as OwnerMachine;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::memory::Seen;

/// Which model the instance was made from, or updated to.
pub const MODEL_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/model";
/// Which virtual machine the object stands for: instance numbers may be used again.
pub const VM_ID_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/vmID";
/// The same, to name many machines at once by it.
pub const VM_ID_LABEL: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/vm-id";
/// Why an update in place is not tried again.
pub const IRREPARABLE_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/replaceInstance";

/// What is known of a machine's node.
#[derive(Clone, Debug)]
pub enum NodeState {
    Ready(Arc<Node>),
    NotReady(Arc<Node>),
    Missing,
    /// The cluster does not answer, and why.
    Unknown(String),
}

impl NodeState {
    pub fn node(&self) -> Option<&Arc<Node>> {
        match self {
            Self::Ready(node) | Self::NotReady(node) => Some(node),
            Self::Missing | Self::Unknown(_) => None,
        }
    }

    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }
}

/// One machine of the pool: its instance, its object, or both.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub instance: Option<Seen>,
    pub object: Option<Arc<AzureMachinePoolMachine>>,
    /// The Cluster API Machine that owns the object.
    pub owner: Option<Arc<OwnerMachine>>,
    pub node: NodeState,
    /// What the drain is waiting for.
    pub blocked: Option<String>,
    /// Whether that needs more than a moment.
    pub stuck: bool,
}

impl Member {
    pub fn provider_id(&self) -> &str {
        match (&self.instance, &self.object) {
            (Some(instance), _) => &instance.provider_id,
            (None, Some(object)) => &object.spec.provider_id,
            (None, None) => "",
        }
    }

    pub fn annotation(&self, name: &str) -> Option<&String> {
        self.object.as_ref()?.annotations().get(name)
    }

    /// Whether its object is marked as deleted.
    pub fn object_deleting(&self) -> bool {
        self.object
            .as_ref()
            .is_some_and(|object| object.metadata.deletion_timestamp.is_some())
    }

    pub fn owner_deleting(&self) -> bool {
        self.owner
            .as_ref()
            .is_some_and(|owner| owner.metadata.deletion_timestamp.is_some())
    }

    /// Whether somebody wants it gone.
    pub fn leaving(&self) -> bool {
        self.object_deleting() || self.owner_deleting()
    }

    pub fn updating(&self) -> bool {
        self.annotation(UPDATE_INSTANCE_ANNOTATION).is_some()
    }

    /// Which model it runs: the scale set's own when Azure says it is the latest, else what was noted when it was.
    pub fn model<'a>(&'a self, set_model: Option<&'a str>) -> Option<&'a str> {
        match &self.instance {
            Some(instance) if instance.latest => set_model,
            _ => self.annotation(MODEL_ANNOTATION).map(String::as_str),
        }
    }

    fn was_ready(&self) -> bool {
        let status = self.object.as_ref().and_then(|object| object.status.as_ref());
        status.is_some_and(|status| status.node_ref.is_some())
    }

    fn health(&self) -> Health {
        match &self.node {
            NodeState::Ready(_) => Health::Ready,
            NodeState::NotReady(_) => Health::NotReady,
            NodeState::Missing if self.was_ready() => Health::NotReady,
            NodeState::Missing => Health::Creating,
            NodeState::Unknown(_) if self.was_ready() => Health::Unknown,
            NodeState::Unknown(_) => Health::Creating,
        }
    }
}

/// What the planner has to know beyond the members.
pub struct Frame<'a> {
    /// The model that is wanted.
    pub model: &'a str,
    /// The model that the scale set has now.
    pub set_model: Option<&'a str>,
    /// Instances that Azure has been asked to delete.
    pub deleting: &'a BTreeSet<String>,
    /// Spot instances that Azure took away stay behind, deallocated.
    pub spot: bool,
}

/// A member as the planner sees it; nothing when its instance is gone.
pub fn machine(member: &Member, frame: &Frame<'_>) -> Option<Machine> {
    let instance = member.instance.as_ref()?;
    let evicted = frame.spot && matches!(instance.power.as_deref(), Some("deallocated" | "deallocating"));
    let blocked = member.blocked.clone();
    let motion = if instance.is("Deleting") || frame.deleting.contains(&instance.id) {
        Motion::Deleting
    } else if member.leaving() {
        Motion::Leaving { blocked }
    } else if member.updating() {
        Motion::Updating { blocked }
    } else {
        Motion::Resting
    };
    let marks = [
        member.object.as_ref().map(|o| o.annotations()),
        member.owner.as_ref().map(|o| o.annotations()),
    ];
    Some(Machine {
        name: member.name.clone(),
        created: instance.created,
        health: if evicted { Health::NotReady } else { member.health() },
        failed: instance.is("Failed") || evicted,
        outdated: member.model(frame.set_model) != Some(frame.model),
        marked: marks
            .iter()
            .flatten()
            .any(|all| all.contains_key(DELETE_MACHINE_ANNOTATION)),
        irreparable: member.annotation(IRREPARABLE_ANNOTATION).is_some(),
        motion,
    })
}

/// What the object of an instance is called. The instances of Flexible sets have names that Kubernetes does not take.
fn name(pool: &str, instance: &str) -> String {
    format!("{pool}-{}", instance.replace('_', "-").to_ascii_lowercase())
}

/// Pairs instances with the objects that stand for them; the rest of either stands alone.
pub fn join(
    pool: &str,
    instances: &[Seen],
    objects: &[Arc<AzureMachinePoolMachine>],
) -> Vec<(String, Option<Seen>, Option<Arc<AzureMachinePoolMachine>>)> {
    let key = |id: &str| id.to_ascii_lowercase();
    let mut by_id: BTreeMap<String, Arc<AzureMachinePoolMachine>> = objects
        .iter()
        .map(|object| (key(&object.spec.provider_id), object.clone()))
        .collect();
    let mut pairs: Vec<_> = instances
        .iter()
        .map(|instance| {
            let stands_for = |object: &Arc<AzureMachinePoolMachine>| {
                let noted = object.annotations().get(VM_ID_ANNOTATION);
                noted.is_none() || instance.vm_id.is_none() || noted == instance.vm_id.as_ref()
            };
            let id = key(&instance.provider_id);
            let object = by_id
                .get(&id)
                .is_some_and(stands_for)
                .then(|| by_id.remove(&id))
                .flatten();
            let name = object
                .as_ref()
                .map_or_else(|| name(pool, &instance.id), |object| object.name_any());
            (name, Some(instance.clone()), object)
        })
        .collect();
    pairs.extend(
        by_id
            .into_values()
            .map(|object| (object.name_any(), None, Some(object))),
    );
    pairs.sort_by(|a, b| a.0.cmp(&b.0));
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn object(name: &str, change: Value) -> Arc<AzureMachinePoolMachine> {
        let mut object: AzureMachinePoolMachine =
            serde_json::from_value(json!({ "metadata": { "name": name }, "spec": { "providerID": name } })).unwrap();
        if let Value::Object(annotations) = change {
            let annotations = annotations
                .into_iter()
                .map(|(k, v)| (k, v.as_str().unwrap_or_default().to_owned()));
            object.metadata.annotations = Some(annotations.collect());
        }
        Arc::new(object)
    }

    fn member(latest: bool, annotations: Value) -> Member {
        let instance = Seen {
            id: "1".into(),
            provider_id: "p".into(),
            latest,
            ..Seen::default()
        };
        Member {
            name: "m".into(),
            instance: Some(instance),
            object: Some(object("m", annotations)),
            owner: None,
            node: NodeState::Missing,
            blocked: None,
            stuck: false,
        }
    }

    #[rstest]
    #[case::azure_says_so(true, json!({}), false)]
    #[case::noted_when_it_was(false, json!({ MODEL_ANNOTATION: "new" }), false)]
    #[case::noted_before(false, json!({ MODEL_ANNOTATION: "old" }), true)]
    #[case::never_noted(false, json!({}), true)]
    fn an_instance_is_outdated_by_its_own_record(#[case] latest: bool, #[case] notes: Value, #[case] outdated: bool) {
        let frame = Frame {
            model: "new",
            set_model: Some("new"),
            deleting: &BTreeSet::new(),
            spot: false,
        };
        assert_eq!(machine(&member(latest, notes), &frame).unwrap().outdated, outdated);
    }

    #[test]
    fn a_model_that_azure_has_not_got_yet_makes_all_outdated() {
        let frame = Frame {
            model: "new",
            set_model: Some("old"),
            deleting: &BTreeSet::new(),
            spot: false,
        };
        assert!(machine(&member(true, json!({})), &frame).unwrap().outdated);
    }

    #[test]
    fn an_evicted_spot_instance_has_failed() {
        let mut member = member(true, json!({}));
        member.instance.as_mut().unwrap().power = Some("deallocated".into());
        let frame = Frame {
            model: "new",
            set_model: Some("new"),
            deleting: &BTreeSet::new(),
            spot: true,
        };
        assert!(machine(&member, &frame).unwrap().failed);
    }

    #[rstest]
    #[case("7", "pool-7")]
    #[case("pool_1A2b3c4d", "pool-pool-1a2b3c4d")]
    fn a_machine_is_named_after_its_instance_as_kubernetes_takes_it(#[case] instance: &str, #[case] expected: &str) {
        assert_eq!(name("pool", instance), expected);
    }

    #[test]
    fn instances_and_objects_meet_by_provider_id_whatever_its_case() {
        let seen = |id: &str| Seen {
            id: id.into(),
            provider_id: format!("azure:///X/{id}"),
            ..Seen::default()
        };
        let objects = [object("azure:///x/1", Value::Null), object("azure:///x/7", Value::Null)];
        let pairs = join("pool", &[seen("1"), seen("2")], &objects);
        let told: Vec<_> = pairs
            .iter()
            .map(|(n, i, o)| (n.as_str(), i.is_some(), o.is_some()))
            .collect();
        assert_eq!(
            told,
            [
                ("azure:///x/1", true, true),
                ("azure:///x/7", false, true),
                ("pool-2", true, false)
            ]
        );
    }
}
