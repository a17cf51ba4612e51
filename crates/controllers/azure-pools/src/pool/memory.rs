//! What a pool's actor remembers between passes: the last look at Azure, and what is under way there.
//!
//! Invariant: nothing here is needed to be safe. A new process that finds it empty looks at Azure and at the operations
//! kept in the pool's status, and goes on from there.

use std::collections::{BTreeSet, HashSet};
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
const FOLLOW: Duration = Duration::from_secs(12);
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
pub struct Set {
    pub id: String,
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

    pub fn of(set: &ScaleSet) -> Self {
        let profile = set.properties.as_ref().and_then(|p| p.virtual_machine_profile.as_ref());
        let image = profile.and_then(|profile| profile.storage_profile.as_ref()?.image_reference.as_ref());
        Self::new(image, set.sku.as_ref().and_then(|sku| sku.name.as_deref()))
    }
}

impl Set {
    pub fn read(set: &ScaleSet) -> Self {
        let tag = |name: &str| set.tags.as_ref().and_then(|tags| tags.get(name)).cloned();
        Self {
            id: set.id.clone().unwrap_or_default(),
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
    pub fn moves(&self) -> bool {
        moves(&self.state)
    }
}

/// Whether this is a state that passes.
fn moves(state: &str) -> bool {
    let resting = ["", "Succeeded", "Failed", "Canceled"];
    !resting.iter().any(|rest| rest.eq_ignore_ascii_case(state))
}

/// What Azure was asked to make of the scale set: nothing that it refused is asked for again soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    model: String,
    custom_data: String,
    capacity: i64,
}

impl Ask {
    pub fn new(model: &Model, capacity: i64) -> Self {
        Self {
            model: model.hash.clone(),
            custom_data: model.custom_data_hash.clone(),
            capacity,
        }
    }
}

/// One instance as last listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
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

impl Seen {
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
            provider_id: format!("azure://{id}"),
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
            provider_id: format!("azure://{}", vm.id.as_ref()?),
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

fn seconds(time: &str) -> Option<i64> {
    time.parse::<jiff::Timestamp>().ok().map(|time| time.as_second())
}

/// The last look at Azure.
#[derive(Clone, Debug)]
pub struct Look {
    pub set: Option<Set>,
    pub instances: Vec<Seen>,
    pub at: Instant,
}

/// Creation that keeps failing is tried ever more slowly.
#[derive(Clone, Debug, Default)]
pub struct Retry {
    failures: u32,
    until: Option<Instant>,
    pub why: Option<String>,
}

impl Retry {
    /// Notes a failure. A single instance that failed is replaced at once; only further ones wait.
    pub fn failed(&mut self, why: String, one_instance: bool, now: Instant) {
        let lenient = one_instance && self.failures == 0;
        let wait = FIRST_RETRY.saturating_mul(1 << self.failures.min(8)).min(LONGEST_RETRY);
        let wait = if lenient { Duration::ZERO } else { wait };
        self.failures += 1;
        self.until = Some(now + wait);
        self.why = Some(why);
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

/// When something was last written, and since when there has been more to say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    pub unsaid: Option<Instant>,
    pub written: Option<Instant>,
}

/// Everything that one pool's actor remembers.
#[derive(Default)]
pub struct Memory {
    pub client: Option<(Client, Instant)>,
    pub bootstrap: Option<(String, Vec<u8>, Instant)>,
    pub look: Option<Look>,
    /// The instances have changed since they were listed.
    pub stale: bool,
    /// So may have the scale set itself.
    pub reread: bool,
    pub operations: Vec<Tracked>,
    /// Whether operations were read from the status already.
    pub resumed: bool,
    pub retry: Retry,
    /// Provider ids of instances whose node was ready when last seen.
    pub ready: HashSet<String>,
    /// Failed instances that were already counted against creation.
    pub counted: HashSet<String>,
    /// When the first of the machines drained now was drained.
    pub drained: Option<Instant>,
    /// Azure is not asked for anything before this.
    pub held: Option<Instant>,
    /// The model that was last wanted.
    pub wanted: Option<String>,
    pub status_pace: Pace,
    pub ids_pace: Pace,
    /// How many machines whoever manages the replicas from outside wants.
    pub external: Option<usize>,
    /// Nodes of the scale set that the last list did not explain.
    pub strangers: BTreeSet<String>,
    /// Whether a difference that the next read of the scale set shows may be our own doing.
    pub unsure: bool,
    /// When work in Azure that no operation of ours accounts for was last looked at.
    pub followed: Option<Instant>,
    /// What Azure refused for good, in which words, and when.
    pub refused: Vec<(Ask, String, Instant)>,
}

impl Memory {
    /// Instances that Azure has been asked to delete.
    pub fn deleting(&self) -> BTreeSet<String> {
        let operations = self.operations.iter().filter(|tracked| tracked.kind == Kind::Delete);
        operations.flat_map(|tracked| tracked.ids.iter().cloned()).collect()
    }

    /// Whether the scale set is at work, and whether instances are, while nothing of ours is under way: an answer was
    /// lost, or somebody else has asked.
    fn untracked(&self) -> (bool, bool) {
        let Some(look) = self.look.as_ref().filter(|_| self.operations.is_empty()) else {
            return (false, false);
        };
        let instance = look.instances.iter().any(|instance| moves(&instance.state));
        (look.set.as_ref().is_some_and(Set::moves), instance)
    }

    /// Looks again after such work, now and then: nobody else tells of its end.
    pub fn follow(&mut self, now: Instant) {
        let (set, instances) = self.untracked();
        if !set && !instances {
            self.followed = None;
        } else if now.duration_since(*self.followed.get_or_insert(now)) >= FOLLOW {
            self.reread |= set;
            self.stale |= instances;
            self.followed = Some(now);
        }
    }

    /// When such work is to be looked at again.
    pub fn follow_in(&self, now: Instant) -> Option<Duration> {
        let since = self.followed.map_or(Duration::ZERO, |at| now.duration_since(at));
        (self.untracked() != (false, false)).then(|| FOLLOW.saturating_sub(since))
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
    pub fn held_for(&self, now: Instant) -> Option<Duration> {
        self.held?.checked_duration_since(now).filter(|left| !left.is_zero())
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

    fn memory(set: &str, instance: &str) -> Memory {
        let set = Set {
            state: set.to_owned(),
            ..Set::default()
        };
        let instance = Seen {
            state: instance.to_owned(),
            ..Seen::default()
        };
        let look = Look {
            set: Some(set),
            instances: vec![instance],
            at: Instant::now(),
        };
        Memory {
            look: Some(look),
            ..Memory::default()
        }
    }

    #[rstest]
    #[case::at_rest("Succeeded", "Succeeded", None, (false, false))]
    #[case::failed("Failed", "Failed", None, (false, false))]
    #[case::a_scale_operation("Updating", "Succeeded", Some(FOLLOW), (true, false))]
    #[case::an_instance_that_is_made("Succeeded", "Creating", Some(FOLLOW), (false, true))]
    #[case::one_that_is_deleted("Updating", "Deleting", Some(FOLLOW), (true, true))]
    fn work_that_nobody_tracks_is_looked_at_after_a_while(
        #[case] set: &str,
        #[case] instance: &str,
        #[case] wait: Option<Duration>,
        #[case] looked: (bool, bool),
    ) {
        let (mut memory, begun) = (memory(set, instance), Instant::now());
        memory.follow(begun);
        assert_eq!(memory.follow_in(begun), wait);
        assert_eq!((memory.reread, memory.stale), (false, false), "not at once");
        memory.follow(begun + FOLLOW);
        assert_eq!((memory.reread, memory.stale), looked);
        assert_eq!(memory.follow_in(begun + FOLLOW), wait, "and again, no sooner");
    }

    #[test]
    fn an_operation_of_ours_needs_no_second_watcher() {
        let mut memory = memory("Updating", "Creating");
        let mut headers = http::HeaderMap::new();
        headers.insert("azure-asyncoperation", "https://a/operations/1".parse().unwrap());
        let operation = Operation::started("PUT", "/r", 201, &headers, b"", jiff::Timestamp::UNIX_EPOCH).unwrap();
        memory.operations.push(Tracked {
            kind: Kind::Change,
            ids: BTreeSet::new(),
            operation,
        });
        assert_eq!(memory.follow_in(Instant::now()), None);
    }
}
