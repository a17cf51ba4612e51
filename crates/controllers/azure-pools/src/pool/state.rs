//! What is kept of a pool between reconciles: the last snapshot of Azure, and the operations under way there.
//!
//! Invariant: losing it is safe. A new process reads Azure and the operations kept in the pool's status, and goes on from
//! there.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_api::azure::Future;
use capstan_azure::model::{ImageReference, Instance, ScaleSet, Tags, VirtualMachine};
use capstan_azure::{Client, Operation, Owned, ResourceId};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::model::{CLUSTER_TAG_PREFIX, CUSTOM_DATA_TAG, HASH_TAG, Model};

/// The name under which operations stand in the status.
const SERVICE: &str = "scalesets";
/// After a failed creation the next try waits this long, twice as long each time.
const FIRST_RETRY: Duration = Duration::from_secs(30);
const LONGEST_RETRY: Duration = Duration::from_secs(600);
/// Work in Azure that no operation of ours accounts for is looked at this often: as often as Azure wants to be asked.
const UNTRACKED_RECHECK: Duration = Duration::from_secs(12);
/// A list may lag behind: what it lacks counts as gone once a list after this long lacks it, too.
const CONFIRM: Duration = Duration::from_secs(10);
/// What Azure has refused for good is asked for again after this long: what it lacked may have been made meanwhile.
const REFUSED: Duration = Duration::from_secs(600);

/// What an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The model or the capacity changes.
    Change,
    /// Instances are deleted.
    Delete,
    /// Instances are brought to the newest model.
    Update,
    /// The whole scale set goes.
    Remove,
}

/// An operation under way, and the instances that it is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracked {
    pub kind: Kind,
    pub ids: BTreeSet<String>,
    pub operation: Operation,
}

impl Tracked {
    /// As it is kept in the status.
    pub fn persist(&self, group: &str, set: &str) -> Future {
        let data = serde_json::to_vec(self).unwrap_or_default();
        Future {
            type_: self.operation.method.clone(),
            resource_group: Some(group.to_owned()),
            service_name: SERVICE.to_owned(),
            name: set.to_owned(),
            data: BASE64.encode(data),
        }
    }

    /// Reads one back; what others wrote is not understood and not needed.
    pub fn resume(future: &Future) -> Option<Self> {
        serde_json::from_slice(&BASE64.decode(&future.data).ok()?).ok()
    }
}

/// The scale set as last seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScaleSetSnapshot {
    pub id: String,
    /// Changes with every change of the scale set.
    pub etag: Option<String>,
    pub capacity: usize,
    pub state: String,
    pub model: Option<String>,
    pub custom_data: Option<String>,
    pub make: Make,
    pub zones: Vec<String>,
    pub tags: Tags,
    pub flexible: bool,
    /// All that Azure said of it.
    pub whole: Arc<ScaleSet>,
}

/// Image and size: what somebody else's model can be known by, and an instance of it. Azure does not keep the case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Make(String);

impl Make {
    pub fn new(image: Option<&ImageReference>, size: Option<&str>) -> Self {
        let image = image.cloned().unwrap_or_default();
        let parts = [
            image.id,
            image.community_gallery_image_id,
            image.shared_gallery_image_id,
            image.publisher,
            image.offer,
            image.sku,
            image.version,
            size.map(str::to_owned),
        ];
        let parts: Vec<String> = parts.into_iter().map(Option::unwrap_or_default).collect();
        Self(parts.join(" ").to_ascii_lowercase())
    }

    /// Whether Azure named an image and a size.
    pub fn is_known(&self) -> bool {
        !self.0.trim().is_empty()
    }

    pub fn of(set: &ScaleSet) -> Self {
        let profile = set.properties.as_ref().and_then(|p| p.virtual_machine_profile.as_ref());
        let image = profile.and_then(|profile| profile.storage_profile.as_ref()?.image_reference.as_ref());
        Self::new(image, set.sku.as_ref().and_then(|sku| sku.name.as_deref()))
    }
}

impl ScaleSetSnapshot {
    pub fn read(set: &ScaleSet) -> Self {
        let tag = |name: &str| set.tags.as_ref().and_then(|tags| tags.get(name)).cloned();
        Self {
            id: set.id.clone().unwrap_or_default(),
            etag: set.etag.clone().filter(|etag| !etag.is_empty()),
            capacity: usize::try_from(set.capacity()).unwrap_or_default(),
            state: set.provisioning_state().to_string(),
            model: tag(HASH_TAG),
            custom_data: tag(CUSTOM_DATA_TAG),
            make: Make::of(set),
            zones: set.zones.clone().unwrap_or_default(),
            tags: set.tags.clone().unwrap_or_default(),
            flexible: set.is_flexible(),
            whole: Arc::new(set.clone()),
        }
    }

    /// Proof by its tags that the scale set belongs to a cluster of ours.
    pub fn owned(&self) -> Result<Owned<ScaleSet>, capstan_azure::Error> {
        Owned::by_tags(self.whole.as_ref(), |tags| {
            tags.iter()
                .any(|(key, value)| key.starts_with(CLUSTER_TAG_PREFIX) && value == "owned")
        })
    }

    /// Whether Azure is at work on it.
    pub fn in_progress(&self) -> bool {
        in_progress(&self.state)
    }
}

/// Whether this is a state that passes.
fn in_progress(state: &str) -> bool {
    let resting = ["", "Succeeded", "Failed", "Canceled"];
    !resting.iter().any(|rest| rest.eq_ignore_ascii_case(state))
}

/// What Azure was asked to make of the scale set: nothing that it refused is asked for again soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Whether the whole model was sent, or a capacity alone.
    whole: bool,
    model: String,
    custom_data: String,
    capacity: i64,
}

impl Ask {
    pub fn new(model: &Model, capacity: i64, whole: bool) -> Self {
        Self {
            whole,
            model: model.hash.clone(),
            custom_data: model.custom_data_hash.clone(),
            capacity,
        }
    }

    pub fn is_whole(&self) -> bool {
        self.whole
    }
}

/// One instance as last listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceSnapshot {
    /// Its number in a Uniform set, its VM's name in a Flexible one.
    pub id: String,
    pub name: String,
    pub provider_id: String,
    pub state: String,
    pub power: Option<String>,
    pub latest: bool,
    pub created: i64,
    /// What Azure says of a failure.
    pub message: Option<String>,
    /// Numbers may be used again; this never is.
    pub vm_id: Option<String>,
    pub make: Make,
    /// Proof that the VM of a Flexible set may be deleted.
    pub vm: Option<Owned<VirtualMachine>>,
}

impl InstanceSnapshot {
    pub fn uniform(instance: &Instance) -> Option<Self> {
        let id = instance.id.as_ref()?;
        let properties = instance.properties.as_ref();
        let statuses = properties
            .and_then(|p| p.instance_view.as_ref())
            .and_then(|view| view.statuses.as_ref());
        let created = properties.and_then(|p| p.time_created.as_deref());
        let failure = statuses
            .into_iter()
            .flatten()
            .find(|status| status.level.as_deref() == Some("Error"));
        Some(Self {
            id: instance
                .instance_id
                .clone()
                .or_else(|| id.rsplit('/').next().map(str::to_owned))?,
            name: instance.name.clone().unwrap_or_default(),
            provider_id: provider_id(id),
            state: instance.provisioning_state().to_string(),
            power: instance.power_state().map(|power| power.to_string()),
            latest: instance.latest_model_applied(),
            created: created.and_then(seconds).unwrap_or_default(),
            message: failure.and_then(|status| status.message.clone().or_else(|| status.display_status.clone())),
            vm_id: properties.and_then(|p| p.vm_id.clone()),
            make: Make::new(
                properties.and_then(|p| p.storage_profile.as_ref()?.image_reference.as_ref()),
                instance.sku.as_ref().and_then(|sku| sku.name.as_deref()),
            ),
            vm: None,
        })
    }

    /// A VM of a Flexible set, if it is one of `set`.
    pub fn flexible(vm: &VirtualMachine, set: &str, owned: Option<&Owned<ScaleSet>>) -> Option<Self> {
        let properties = vm.properties.as_ref()?;
        let owner: ResourceId = properties
            .virtual_machine_scale_set
            .as_ref()?
            .id
            .as_ref()?
            .parse()
            .ok()?;
        if owner != set.parse().ok()? {
            return None;
        }
        let statuses = properties
            .instance_view
            .as_ref()
            .and_then(|view| view.statuses.as_ref());
        let power = statuses.and_then(|statuses| capstan_azure::model::power_state(statuses));
        Some(Self {
            id: vm.name.clone()?,
            name: vm.name.clone()?,
            provider_id: provider_id(vm.id.as_ref()?),
            state: properties.provisioning_state.clone().unwrap_or_default(),
            power: power.map(|power| power.to_string()),
            // Azure does not say; the hash kept on the machine object does.
            latest: false,
            created: properties.time_created.as_deref().and_then(seconds).unwrap_or_default(),
            message: None,
            vm_id: properties.vm_id.clone(),
            make: Make::new(
                properties
                    .storage_profile
                    .as_ref()
                    .and_then(|storage| storage.image_reference.as_ref()),
                properties
                    .hardware_profile
                    .as_ref()
                    .and_then(|hardware| hardware.vm_size.as_deref()),
            ),
            vm: owned.and_then(|set| Owned::member(vm, set).ok()),
        })
    }

    pub fn is(&self, state: &str) -> bool {
        self.state.eq_ignore_ascii_case(state)
    }
}

/// Returns the provider id of a resource as the cloud provider writes it on Nodes: subscription and group in lower case,
/// whatever case Azure answers with. Cluster API compares provider ids byte by byte.
pub fn provider_id(id: &str) -> String {
    let mut segments: Vec<String> = id.split('/').map(str::to_owned).collect();
    for n in 1..segments.len() {
        if matches!(
            segments[n - 1].to_ascii_lowercase().as_str(),
            "subscriptions" | "resourcegroups"
        ) {
            segments[n] = segments[n].to_lowercase();
        }
    }
    format!("azure://{}", segments.join("/"))
}

fn seconds(time: &str) -> Option<i64> {
    time.parse::<jiff::Timestamp>().ok().map(|time| time.as_second())
}

/// The last read of Azure.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub set: Option<ScaleSetSnapshot>,
    pub instances: Vec<InstanceSnapshot>,
    /// When the instances were listed.
    pub at: Instant,
    /// How many lists there were.
    pub lists: u64,
    /// Since when the lists have named the same instances.
    pub same_since: Instant,
    /// Whether a list that was made a while after the first one names the same instances.
    pub confirmed: bool,
}

impl Snapshot {
    pub fn new(set: Option<ScaleSetSnapshot>, now: Instant) -> Self {
        Self {
            set,
            instances: Vec::new(),
            at: now,
            lists: 0,
            same_since: now,
            confirmed: false,
        }
    }

    /// Takes a new list in.
    pub fn listed(&mut self, instances: Vec<InstanceSnapshot>, now: Instant) {
        let ids = |list: &[InstanceSnapshot]| -> BTreeSet<String> {
            let live = list.iter().filter(|instance| !instance.is("Deleting"));
            live.map(|instance| instance.provider_id.clone()).collect()
        };
        let same = self.lists > 0 && ids(&self.instances) == ids(&instances);
        if !same {
            self.same_since = now;
        }
        self.confirmed = same && (self.confirmed || now.duration_since(self.same_since) >= CONFIRM);
        (self.instances, self.at) = (instances, now);
        self.lists += 1;
    }
}

/// Creation that keeps failing is tried ever more slowly.
#[derive(Clone, Debug, Default)]
pub struct Retry {
    failures: u32,
    /// The capacity that could not be had.
    refused: usize,
    until: Option<Instant>,
    pub why: Option<String>,
}

impl Retry {
    /// Notes a failure. A single instance that failed is replaced at once; only further ones wait.
    pub fn failed(&mut self, why: String, one_instance: bool, capacity: usize, now: Instant) {
        let lenient = one_instance && self.failures == 0;
        let wait = FIRST_RETRY.saturating_mul(1 << self.failures.min(8)).min(LONGEST_RETRY);
        let wait = if lenient { Duration::ZERO } else { wait };
        self.failures += 1;
        self.until = Some(now + wait);
        self.why = Some(why);
        self.refused = capacity;
    }

    /// Returns the capacity that could not be had, while it is not to be asked for.
    pub fn refused(&self, now: Instant) -> Option<usize> {
        self.remaining(now).map(|_| self.refused)
    }

    /// How long to wait still.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        self.until?.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Whether the last try failed.
    pub fn failing(&self) -> bool {
        self.failures > 0
    }

    /// Whether a try is due after at least one failure.
    pub fn due(&self, now: Instant) -> bool {
        self.until.is_some() && self.remaining(now).is_none()
    }
}

/// When something was last written, and since when a change has waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    pub pending: Option<Instant>,
    pub written: Option<Instant>,
}

/// What is kept of one pool between reconciles.
#[derive(Default)]
pub struct State {
    pub client: Option<(Client, Instant)>,
    pub bootstrap: Option<(String, Vec<u8>, Instant)>,
    pub snapshot: Option<Snapshot>,
    /// The instances have changed since they were listed.
    pub instances_stale: bool,
    /// So may have the scale set itself.
    pub set_stale: bool,
    pub operations: Vec<Tracked>,
    /// Whether operations were read from the status already.
    pub resumed: bool,
    pub retry: Retry,
    /// Provider ids of instances whose node was ready when last seen.
    pub ready: HashSet<String>,
    /// Failed instances that were already counted against creation.
    pub failures_counted: HashSet<String>,
    /// When the first of the machines drained now was drained.
    pub drained_since: Option<Instant>,
    /// Azure is not asked for anything before this.
    pub throttled_until: Option<Instant>,
    /// The model that was last wanted.
    pub wanted_model: Option<String>,
    pub status_pace: Pace,
    pub ids_pace: Pace,
    /// How many machines whoever manages the replicas from outside wants.
    pub external: Option<usize>,
    /// Nodes of the scale set that the last list did not explain.
    pub unknown_nodes: BTreeSet<String>,
    /// Whether a difference that the next read of the scale set shows may be our own doing.
    pub ambiguous: bool,
    /// When work in Azure that no operation of ours accounts for was last looked at.
    pub untracked_at: Option<Instant>,
    /// Since when an instance that ran is Failed, and the number of the list that showed it first, by provider id.
    pub failed_since: HashMap<String, (Instant, u64)>,
    /// Since when an instance that is updated in place has had this model, by provider id.
    pub updated_since: HashMap<String, (String, Instant)>,
    /// When to list the instances again to confirm the last list.
    pub recheck_at: Option<Instant>,
    /// Whether the scale set's ETag may be older than our own last change.
    pub etag_stale: bool,
    /// What Azure refused for good, in which words, and when.
    pub refused: Vec<(Ask, String, Instant)>,
}

impl State {
    /// Instances that Azure has been asked to delete.
    pub fn deleting(&self) -> BTreeSet<String> {
        self.ids(Kind::Delete)
    }

    /// Instances that operations of this kind are about.
    pub fn ids(&self, kind: Kind) -> BTreeSet<String> {
        let operations = self.operations.iter().filter(|tracked| tracked.kind == kind);
        operations.flat_map(|tracked| tracked.ids.iter().cloned()).collect()
    }

    /// Whether the scale set is at work, and whether instances are, while nothing of ours is under way: an answer was
    /// lost, or somebody else has asked.
    fn untracked(&self) -> (bool, bool) {
        let Some(snapshot) = self.snapshot.as_ref().filter(|_| self.operations.is_empty()) else {
            return (false, false);
        };
        let instance = snapshot.instances.iter().any(|instance| in_progress(&instance.state));
        (
            snapshot.set.as_ref().is_some_and(ScaleSetSnapshot::in_progress),
            instance,
        )
    }

    /// Looks again after such work, now and then: nobody else tells of its end.
    pub fn check_untracked(&mut self, now: Instant) {
        let (set, instances) = self.untracked();
        if !set && !instances {
            self.untracked_at = None;
        } else if now.duration_since(*self.untracked_at.get_or_insert(now)) >= UNTRACKED_RECHECK {
            self.set_stale |= set;
            self.instances_stale |= instances;
            self.untracked_at = Some(now);
        }
    }

    /// When such work is to be looked at again.
    pub fn untracked_in(&self, now: Instant) -> Option<Duration> {
        let since = self.untracked_at.map_or(Duration::ZERO, |at| now.duration_since(at));
        (self.untracked() != (false, false)).then(|| UNTRACKED_RECHECK.saturating_sub(since))
    }

    /// Asks for a second list that confirms the last one.
    pub fn recheck_instances(&mut self, now: Instant) {
        self.recheck_at.get_or_insert(now + CONFIRM);
    }

    /// Returns how long until that list is due.
    pub fn recheck_in(&self, now: Instant) -> Option<Duration> {
        self.recheck_at.map(|at| at.saturating_duration_since(now))
    }

    /// Returns Azure's words if it refused this model not long ago.
    pub fn refused_model(&self, hash: &str) -> Option<String> {
        let same = |(ask, _, at): &&(Ask, String, Instant)| ask.whole && ask.model == hash && at.elapsed() < REFUSED;
        self.refused.iter().find(same).map(|(_, why, _)| why.clone())
    }

    /// What Azure said when it was asked the same not long ago.
    pub fn refusal(&self, ask: &Ask) -> Result<(), Error> {
        let mut same = self.refused.iter().filter(|(refused, ..)| refused == ask);
        match same.next() {
            Some((_, why, at)) if at.elapsed() < REFUSED => Err(Error::Invalid(why.clone())),
            _ => Ok(()),
        }
    }

    /// How long Azure is still to be left alone.
    pub fn throttled_for(&self, now: Instant) -> Option<Duration> {
        self.throttled_until?
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    pub fn busy(&self, kind: Kind) -> bool {
        self.operations.iter().any(|tracked| tracked.kind == kind)
    }

    /// When the next poll is due.
    pub fn next_poll(&self, now: jiff::Timestamp) -> Option<Duration> {
        self.operations
            .iter()
            .map(|tracked| tracked.operation.due_in(now))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn state(set: &str, instance: &str) -> State {
        let set = ScaleSetSnapshot {
            state: set.to_owned(),
            ..ScaleSetSnapshot::default()
        };
        let instance = InstanceSnapshot {
            state: instance.to_owned(),
            ..InstanceSnapshot::default()
        };
        let mut snapshot = Snapshot::new(Some(set), Instant::now());
        snapshot.instances = vec![instance];
        State {
            snapshot: Some(snapshot),
            ..State::default()
        }
    }

    #[rstest]
    #[case(
        "/subscriptions/ABC/resourceGroups/MY-RG/providers/Microsoft.Compute/virtualMachineScaleSets/Np/virtualMachines/0",
        "azure:///subscriptions/abc/resourceGroups/my-rg/providers/Microsoft.Compute/virtualMachineScaleSets/Np/virtualMachines/0"
    )]
    #[case(
        "/subscriptions/abc/resourcegroups/My-Rg/providers/Microsoft.Compute/virtualMachines/np_1A",
        "azure:///subscriptions/abc/resourcegroups/my-rg/providers/Microsoft.Compute/virtualMachines/np_1A"
    )]
    fn provider_ids_are_those_of_the_cloud_provider(#[case] id: &str, #[case] expected: &str) {
        assert_eq!(provider_id(id), expected);
    }

    #[test]
    fn a_list_is_confirmed_by_a_later_one_that_names_the_same_instances() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let instance = |id: &str| InstanceSnapshot {
            provider_id: id.to_owned(),
            ..InstanceSnapshot::default()
        };
        let mut snapshot = Snapshot::new(None, begun);
        let mut listed = |ids: &[&str], at: Instant| {
            snapshot.listed(ids.iter().map(|id| instance(id)).collect(), at);
            snapshot.confirmed
        };
        assert!(!listed(&["a", "b"], begun));
        assert!(!listed(&["a", "b"], begun + second), "too soon");
        assert!(listed(&["b", "a"], begun + CONFIRM));
        assert!(listed(&["a", "b"], begun + CONFIRM + second), "it stays confirmed");
        assert!(
            !listed(&[], begun + CONFIRM + 2 * second),
            "an empty list is none until it is confirmed"
        );
        assert!(listed(&[], begun + 3 * CONFIRM));
    }

    #[rstest]
    #[case::at_rest("Succeeded", "Succeeded", None, (false, false))]
    #[case::failed("Failed", "Failed", None, (false, false))]
    #[case::a_scale_operation("Updating", "Succeeded", Some(UNTRACKED_RECHECK), (true, false))]
    #[case::an_instance_that_is_made("Succeeded", "Creating", Some(UNTRACKED_RECHECK), (false, true))]
    #[case::one_that_is_deleted("Updating", "Deleting", Some(UNTRACKED_RECHECK), (true, true))]
    fn work_that_nobody_tracks_is_looked_at_after_a_while(
        #[case] set: &str,
        #[case] instance: &str,
        #[case] wait: Option<Duration>,
        #[case] looked: (bool, bool),
    ) {
        let (mut state, begun) = (state(set, instance), Instant::now());
        state.check_untracked(begun);
        assert_eq!(state.untracked_in(begun), wait);
        assert_eq!((state.set_stale, state.instances_stale), (false, false), "not at once");
        state.check_untracked(begun + UNTRACKED_RECHECK);
        assert_eq!((state.set_stale, state.instances_stale), looked);
        assert_eq!(
            state.untracked_in(begun + UNTRACKED_RECHECK),
            wait,
            "and again, no sooner"
        );
    }

    #[test]
    fn an_operation_of_ours_needs_no_second_watcher() {
        let mut state = state("Updating", "Creating");
        let mut headers = http::HeaderMap::new();
        headers.insert("azure-asyncoperation", "https://a/operations/1".parse().unwrap());
        let operation = Operation::started("PUT", "/r", 201, &headers, b"", jiff::Timestamp::UNIX_EPOCH).unwrap();
        state.operations.push(Tracked {
            kind: Kind::Change,
            ids: BTreeSet::new(),
            operation,
        });
        assert_eq!(state.untracked_in(Instant::now()), None);
    }
}
