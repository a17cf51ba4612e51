//! The machines of a pool: instance, object and node of each, in the form that the plan reads.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureMachinePoolMachine, UPDATE_INSTANCE_ANNOTATION};
use capstan_api::capi::{CLUSTER_NAME_LABEL, DELETE_MACHINE_ANNOTATION};
use capstan_core::pool::{Activity, Drain, Health, Instance, Machine, Object, Owner, Update};
use capstan_kube::capi::Machine as OwnerMachine;
use capstan_kube::nodes::takes_pods;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::snapshot::{InstanceSnapshot, Make, ScaleSetSnapshot, in_progress};
use crate::model::bootstrap_part;

/// The hash of the model that the instance was created from, or updated to.
pub const MODEL_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/model";
/// The ID of the virtual machine that the object represents. Azure may use an instance number again.
pub const VM_ID_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/vmID";
/// The ID of the virtual machine as a label, so that one call can delete several machines.
pub const VM_ID_LABEL: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/vm-id";
/// The node was cordoned before Capstan updated its instance in place: Capstan does not uncordon it afterwards.
pub const CORDONED_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/cordoned";
/// Capstan reimages the instance after its update in place: `due`, then `begun`.
pub const REIMAGE_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/reimageInstance";
pub const REIMAGE_DUE: &str = "due";
pub const REIMAGE_BEGUN: &str = "begun";
/// The reason for which Capstan replaces the instance instead of another update in place.
pub const IRREPARABLE_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/replaceInstance";

/// The node of a machine.
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

    /// Whether somebody has cordoned the node.
    pub fn is_cordoned(&self) -> bool {
        let spec = self.node().and_then(|node| node.spec.as_ref());
        spec.and_then(|spec| spec.unschedulable).unwrap_or_default()
    }

    /// Whether the node is ready and takes ordinary pods.
    pub fn is_available(&self) -> bool {
        matches!(self, Self::Ready(node) if takes_pods(node))
    }
}

/// One machine of the pool: its instance, its object, or both.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub instance: Option<InstanceSnapshot>,
    pub object: Option<Arc<AzureMachinePoolMachine>>,
    /// The Cluster API Machine that owns the object.
    pub owner: Option<Arc<OwnerMachine>>,
    /// Whether only Cluster API may drain its node.
    pub guarded: bool,
    pub node: NodeState,
    pub drain: Drain,
    /// Whether the drain waits for more than pods that are terminating.
    pub stuck: bool,
    /// Whether Azure gave up on the instance, and not only for a moment.
    pub failed: bool,
    /// Whether a second list lacks the instance, too.
    pub confirmed_missing: bool,
    /// How long its instance has run without a node; `None` where it has or had one, or the cluster does not answer.
    pub joining: Option<Duration>,
}

impl Member {
    /// A machine whose node is not looked up yet.
    pub fn new(
        name: String,
        instance: Option<InstanceSnapshot>,
        object: Option<Arc<AzureMachinePoolMachine>>,
        owner: Option<Arc<OwnerMachine>>,
    ) -> Self {
        Self {
            name,
            instance,
            object,
            owner,
            guarded: false,
            node: NodeState::Missing,
            drain: Drain::NotRun,
            stuck: false,
            failed: false,
            confirmed_missing: false,
            joining: None,
        }
    }

    pub fn provider_id(&self) -> &str {
        match (&self.instance, &self.object) {
            (Some(instance), _) => &instance.provider_id,
            (None, Some(object)) => &object.spec.provider_id,
            (None, None) => "",
        }
    }

    /// Returns the name that the Node of its instance has, before a cloud controller manager gives the Node a provider id.
    pub fn node_name(&self) -> Option<String> {
        let name = self.instance.as_ref()?.computer_name.as_ref()?;
        Some(name.to_ascii_lowercase())
    }

    /// Returns the id by which Azure knows the instance: a proof that its node is drained names it.
    pub fn id(&self) -> &str {
        self.instance.as_ref().map_or("", |instance| &instance.id)
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

    /// Whether somebody has deleted the machine.
    pub fn leaving(&self) -> bool {
        self.object_deleting() || self.owner_deleting()
    }

    pub fn updating(&self) -> bool {
        self.annotation(UPDATE_INSTANCE_ANNOTATION).is_some()
    }

    /// Whether its instance is to be reimaged once it is updated.
    pub fn awaits_reimage(&self) -> bool {
        self.annotation(REIMAGE_ANNOTATION)
            .is_some_and(|stage| stage == REIMAGE_DUE)
    }

    /// Whether its object lacks the label by which the Azure provider of Cluster API would find it. Earlier versions of Capstan
    /// did not set it.
    pub fn lacks_cluster_label(&self) -> bool {
        let Some(object) = &self.object else { return false };
        let cluster = object.labels().get(CLUSTER_NAME_LABEL);
        cluster.is_some_and(|cluster| !object.labels().contains_key(cluster))
    }

    /// Returns when its drain began.
    pub fn drain_since(&self, now: Timestamp) -> Option<Timestamp> {
        let object = self.object.as_ref()?;
        if let Some(time) = &object.metadata.deletion_timestamp {
            return Some(time.0);
        }
        self.updating().then(|| self.update_since().unwrap_or(now))
    }

    /// Returns when its update in place was asked for. Anybody may set the annotation, to any value.
    fn update_since(&self) -> Option<Timestamp> {
        self.annotation(UPDATE_INSTANCE_ANNOTATION)?.parse().ok()
    }

    /// Returns the model that the instance runs: the scale set's own when Azure calls it the latest, else the recorded
    /// one. Without a record, an instance of the scale set's image and size has the scale set's model, unless it is older than
    /// that: a list may show an instance late, and image and size are not the whole model.
    pub fn model<'a>(&'a self, set: &'a ScaleSetSnapshot) -> Option<&'a str> {
        let instance = self.instance.as_ref()?;
        let current = || set.model.as_deref();
        let older = instance.created != 0 && set.model_since.is_some_and(|since| instance.created < since);
        match self.annotation(MODEL_ANNOTATION) {
            _ if instance.latest => current(),
            Some(recorded) => Some(recorded),
            None if instance.make.is_known() && instance.make == set.make && !older => current(),
            None => None,
        }
    }

    /// Whether the machine ever had a node.
    pub fn has_run(&self) -> bool {
        let status = self.object.as_ref().and_then(|object| object.status.as_ref());
        status.is_some_and(|status| status.node_ref.is_some())
    }

    /// Whether its instance runs, its cluster answers, and it has never had a node.
    pub fn is_joining(&self) -> bool {
        let runs = self.instance.as_ref().is_some_and(|instance| instance.is("Succeeded"));
        runs && matches!(self.node, NodeState::Missing) && !self.has_run()
    }

    /// Whether its node is ready and takes no pods yet, because of a taint that nodes have when they join.
    pub fn is_arriving(&self) -> bool {
        let is_there = matches!(self.node, NodeState::Ready(_)) && !self.node.is_available();
        is_there && !self.node.is_cordoned() && !self.leaving() && !self.updating()
    }

    fn health(&self) -> Health {
        match &self.node {
            NodeState::Ready(node) if takes_pods(node) => Health::Ready,
            NodeState::Ready(_) if self.has_run() => Health::Unschedulable,
            // A new node that is not set up yet.
            NodeState::Ready(_) => Health::Creating,
            NodeState::NotReady(_) => Health::NotReady,
            NodeState::Missing if self.has_run() => Health::NotReady,
            NodeState::Missing => Health::Creating,
            NodeState::Unknown(_) if self.has_run() => Health::Unknown,
            NodeState::Unknown(_) => Health::Creating,
        }
    }
}

/// What the plan has to know beyond the members.
pub struct Frame<'a> {
    /// The model that is wanted.
    pub model: &'a str,
    pub set: &'a ScaleSetSnapshot,
    /// Image and size that are wanted.
    pub make: &'a Make,
    /// Instances that Azure has been asked to delete.
    pub deleting: &'a BTreeSet<String>,
    /// Instances that Azure updates.
    pub updating: &'a BTreeSet<String>,
    /// Instances whose update failed, and why.
    pub failed_updates: &'a BTreeMap<String, &'static str>,
    /// Whether updates in place end with the model that the scale set has.
    pub updates_end: bool,
    /// The model that instances have after an update, and for how long, by provider id.
    pub updated: &'a HashMap<String, (String, Duration)>,
    /// Spot instances that Azure took away stay behind, deallocated.
    pub spot: bool,
    /// Whether the zones of the pool stay even.
    pub balanced: bool,
    pub teardown: bool,
}

/// Returns a member in the form that the plan reads.
pub fn machine(member: &Member, frame: &Frame<'_>) -> Machine {
    let instance = member.instance.as_ref();
    let evicted =
        frame.spot && instance.is_some_and(|i| matches!(i.power.as_deref(), Some("deallocated" | "deallocating")));
    let going = instance.is_some_and(|i| i.is("Deleting") || frame.deleting.contains(&i.id));
    // An instance for which nobody made an object yet leaves with its pool all the same.
    let orphan = frame.teardown && member.object.is_none();
    let activity = if going {
        Activity::Deleting
    } else if member.leaving() || orphan {
        Activity::Draining
    } else if member.updating() {
        Activity::Updating(update(member, frame))
    } else {
        Activity::Idle
    };
    let marks = [
        member.object.as_ref().map(|o| o.annotations()),
        member.owner.as_ref().map(|o| o.annotations()),
    ];
    let model = member.model(frame.set);
    let recorded = member.annotation(MODEL_ANNOTATION).map(String::as_str);
    Machine {
        name: member.name.clone(),
        instance: match instance {
            Some(instance) => Instance::Listed {
                id: instance.id.clone(),
            },
            None => Instance::Missing {
                confirmed: member.confirmed_missing,
            },
        },
        object: match &member.object {
            None => Object::Missing,
            Some(_) if member.object_deleting() => Object::Deleting,
            Some(_) => Object::Active,
        },
        owner: match &member.owner {
            None => Owner::None,
            Some(_) if member.owner_deleting() => Owner::Deleting,
            Some(_) if member.guarded => Owner::Guarded,
            Some(_) => Owner::Active,
        },
        created: instance.map(|i| i.created).unwrap_or_default(),
        health: if evicted { Health::NotReady } else { member.health() },
        failed: member.failed || evicted,
        outdated: model != Some(frame.model),
        unrecorded: model.is_some() && (model != recorded || member.lacks_cluster_label()),
        matches_model: instance.is_some_and(|instance| instance.make == *frame.make),
        recorded_earlier: recorded.is_some() && recorded != frame.set.model.as_deref(),
        marked: marks
            .iter()
            .flatten()
            .any(|all| all.contains_key(DELETE_MACHINE_ANNOTATION)),
        joining: member.joining,
        irreparable: member.annotation(IRREPARABLE_ANNOTATION).is_some(),
        needs_new_disk: needs_new_disk(member, model, frame),
        new_image: instance.is_some_and(|instance| instance.make.has_other_image(frame.make)),
        cordoned: member.annotation(CORDONED_ANNOTATION).is_some(),
        undated: member.updating() && member.update_since().is_none(),
        zone: instance
            .filter(|_| frame.balanced)
            .and_then(|instance| instance.zone.clone()),
        activity,
        drain: member.drain.clone(),
    }
}

/// Whether bootstrap data or SSH key have changed, and nothing else gives the instance a new OS disk. Another size does not.
fn needs_new_disk(member: &Member, model: Option<&str>, frame: &Frame<'_>) -> bool {
    let instance = member.instance.as_ref();
    let same_image = instance.is_some_and(|instance| !instance.make.has_other_image(frame.make));
    same_image && model.is_none_or(|model| bootstrap_part(model) != bootstrap_part(frame.model))
}

fn update(member: &Member, frame: &Frame<'_>) -> Update {
    let Some(instance) = &member.instance else {
        return Update::Pending;
    };
    if frame.updating.contains(&instance.id) {
        return Update::Running;
    }
    if let Some(why) = frame.failed_updates.get(&instance.id) {
        return Update::Failed(why);
    }
    // The answer was lost, or a process died before it could keep the operation: to ask again is a second outage.
    if in_progress(&instance.state) {
        return Update::Running;
    }
    match frame.updated.get(&instance.provider_id) {
        Some((model, waited)) => Update::Applied {
            model: model.clone(),
            ready: member.node.is_ready(),
            waited: *waited,
        },
        None if instance.is("Failed") => Update::Failed("InstanceFailed"),
        None if member.awaits_reimage() && instance.latest && frame.updates_end => Update::Upgraded,
        None => Update::Pending,
    }
}

/// Returns the name of an instance's object. The instances of Flexible sets have names that Kubernetes does not take.
fn name(pool: &str, instance: &str) -> String {
    format!("{pool}-{}", instance.replace('_', "-").to_ascii_lowercase())
}

/// Pairs instances with the objects that stand for them; the rest of either stands alone.
pub fn join(
    pool: &str,
    instances: &[InstanceSnapshot],
    objects: &[Arc<AzureMachinePoolMachine>],
) -> Vec<(String, Option<InstanceSnapshot>, Option<Arc<AzureMachinePoolMachine>>)> {
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
        let instance = InstanceSnapshot {
            id: "1".into(),
            provider_id: "p".into(),
            latest,
            ..InstanceSnapshot::default()
        };
        Member::new("m".into(), Some(instance), Some(object("m", annotations)), None)
    }

    fn planned(member: &Member, set: &ScaleSetSnapshot, spot: bool) -> Machine {
        let none = BTreeSet::new();
        let frame = Frame {
            model: "new",
            set,
            make: &set.make,
            deleting: &none,
            updating: &none,
            failed_updates: &BTreeMap::new(),
            updates_end: true,
            updated: &HashMap::new(),
            spot,
            balanced: false,
            teardown: false,
        };
        machine(member, &frame)
    }

    fn set(model: &str) -> ScaleSetSnapshot {
        ScaleSetSnapshot {
            model: Some(model.to_owned()),
            make: make("2"),
            ..ScaleSetSnapshot::default()
        }
    }

    fn make(version: &str) -> Make {
        sized(version, "Standard_D2s_v3")
    }

    fn sized(version: &str, size: &str) -> Make {
        let image = capstan_azure::model::ImageReference {
            version: Some(version.to_owned()),
            ..Default::default()
        };
        Make::new(Some(&image), Some(size))
    }

    #[rstest]
    #[case::azure_says_so(true, json!({}), None, false)]
    #[case::recorded_when_it_was(false, json!({ MODEL_ANNOTATION: "new" }), None, false)]
    #[case::recorded_before(false, json!({ MODEL_ANNOTATION: "old" }), Some("2"), true)]
    #[case::never_recorded(false, json!({}), None, true)]
    #[case::never_recorded_and_of_another_image(false, json!({}), Some("1"), true)]
    #[case::never_recorded_and_of_the_same_image(false, json!({}), Some("2"), false)]
    fn an_instance_is_outdated_by_its_own_record(
        #[case] latest: bool,
        #[case] notes: Value,
        #[case] image: Option<&str>,
        #[case] outdated: bool,
    ) {
        let mut member = member(latest, notes);
        member.instance.as_mut().unwrap().make = image.map(make).unwrap_or_default();
        assert_eq!(planned(&member, &set("new"), false).outdated, outdated);
    }

    #[rstest]
    #[case::made_before(99, Some(100), true)]
    #[case::made_with_it(100, Some(100), false)]
    #[case::made_nobody_knows_when(0, Some(100), false)]
    #[case::a_model_of_an_earlier_process(99, None, false)]
    fn an_instance_that_is_listed_after_a_change_of_the_model_is_of_the_old_one_if_it_is_older(
        #[case] created: i64,
        #[case] model_since: Option<i64>,
        #[case] outdated: bool,
    ) {
        let mut member = member(false, json!({}));
        let instance = member.instance.as_mut().unwrap();
        (instance.make, instance.created) = (make("2"), created);
        let set = ScaleSetSnapshot {
            model_since,
            ..set("new")
        };
        assert_eq!(planned(&member, &set, false).outdated, outdated);
    }

    #[rstest]
    #[case::without_a_record(json!({}), Some("2"), true, false)]
    #[case::of_the_scale_sets_model(json!({ MODEL_ANNOTATION: "old" }), Some("2"), true, false)]
    #[case::of_an_earlier_model(json!({ MODEL_ANNOTATION: "older" }), Some("2"), true, true)]
    #[case::of_another_image(json!({}), Some("1"), false, false)]
    #[case::of_an_image_that_azure_does_not_name(json!({}), None, false, false)]
    fn a_machine_is_recognized_when_its_scale_set_is_taken_over(
        #[case] notes: Value,
        #[case] image: Option<&str>,
        #[case] matches_model: bool,
        #[case] recorded_earlier: bool,
    ) {
        let mut member = member(false, notes);
        member.instance.as_mut().unwrap().make = image.map(make).unwrap_or_default();
        let machine = planned(&member, &set("old"), false);
        assert_eq!(
            (machine.matches_model, machine.recorded_earlier),
            (matches_model, recorded_earlier)
        );
    }

    #[test]
    fn a_model_that_azure_has_not_got_yet_makes_all_outdated() {
        assert!(planned(&member(true, json!({})), &set("old"), false).outdated);
    }

    #[rstest]
    #[case::other_data("3-a-old", make("2"), true)]
    #[case::the_same_data("3-b-new", make("2"), false)]
    #[case::another_image_brings_a_new_disk("3-a-old", make("1"), false)]
    #[case::another_size_does_not("3-a-old", sized("2", "Standard_D4s_v3"), true)]
    #[case::another_size_with_the_same_data("3-b-new", sized("2", "Standard_D4s_v3"), false)]
    #[case::an_image_that_azure_does_not_name("3-a-old", Make::default(), true)]
    fn bootstrap_data_needs_a_new_disk(#[case] recorded: &str, #[case] made: Make, #[case] needed: bool) {
        let mut member = member(false, json!({ MODEL_ANNOTATION: recorded }));
        member.instance.as_mut().unwrap().make = made;
        let frame = Frame {
            model: "3-a-new",
            set: &set("3-a-new"),
            make: &make("2"),
            deleting: &BTreeSet::new(),
            updating: &BTreeSet::new(),
            failed_updates: &BTreeMap::new(),
            updates_end: true,
            updated: &HashMap::new(),
            spot: false,
            balanced: false,
            teardown: false,
        };
        assert_eq!(machine(&member, &frame).needs_new_disk, needed);
    }

    #[test]
    fn an_evicted_spot_instance_has_failed() {
        let mut member = member(true, json!({}));
        member.instance.as_mut().unwrap().power = Some("deallocated".into());
        assert!(planned(&member, &set("new"), true).failed);
    }

    #[rstest]
    #[case("7", "pool-7")]
    #[case("pool_1A2b3c4d", "pool-pool-1a2b3c4d")]
    fn a_machine_is_named_after_its_instance_as_kubernetes_takes_it(#[case] instance: &str, #[case] expected: &str) {
        assert_eq!(name("pool", instance), expected);
    }

    #[test]
    fn instances_and_objects_meet_by_provider_id_whatever_its_case() {
        let seen = |id: &str| InstanceSnapshot {
            id: id.into(),
            provider_id: format!("azure:///X/{id}"),
            ..InstanceSnapshot::default()
        };
        let objects = [object("azure:///x/1", Value::Null), object("azure:///x/7", Value::Null)];
        let pairs = join("pool", &[seen("1"), seen("2")], &objects);
        let names: Vec<_> = pairs
            .iter()
            .map(|(n, i, o)| (n.as_str(), i.is_some(), o.is_some()))
            .collect();
        assert_eq!(
            names,
            [
                ("azure:///x/1", true, true),
                ("azure:///x/7", false, true),
                ("pool-2", true, false)
            ]
        );
    }
}
