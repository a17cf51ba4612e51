//! What is kept of a pool between reconciles: the last snapshot of Azure, and the operations under way there.
//!
//! Invariant: losing it is safe. A new process reads Azure and the operations kept in the pool's status, and goes on from
//! there.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_api::azure::{AzureMachinePool, Future};
use capstan_azure::{Client, Operation};
use capstan_core::backoff::exponential;
use capstan_kube::runtime::EventNote;
use serde::{Deserialize, Serialize};

use super::drain::Progress;
use super::owners::SetName;
use super::snapshot::{CONFIRM, ScaleSetSnapshot, Snapshot, in_progress};
use crate::error::Error;
use crate::model::Model;

/// The service's name in the operations that the status keeps.
const SERVICE: &str = "scalesets";
/// After a failed creation the next try waits this long, twice as long each time.
const FIRST_RETRY: Duration = Duration::from_secs(30);
const LONGEST_RETRY: Duration = Duration::from_secs(600);
/// Work in Azure that no operation of ours accounts for is refreshed this often: as often as Azure wants to be asked.
const UNTRACKED_RECHECK: Duration = Duration::from_secs(12);
/// Azure is asked again after this long for what it has refused for good: what it lacked may exist by then.
const REFUSED: Duration = Duration::from_secs(600);

/// The effect of an operation.
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
    /// Returns the operation as the status keeps it.
    pub fn persist(&self, set: &SetName) -> Future {
        let data = serde_json::to_vec(self).unwrap_or_default();
        Future {
            type_: self.operation.method.clone(),
            resource_group: Some(set.group.clone()),
            service_name: SERVICE.to_owned(),
            name: set.name.clone(),
            data: BASE64.encode(data),
        }
    }

    /// Reads an operation of ours; others' are ignored.
    pub fn resume(future: &Future) -> Option<Self> {
        serde_json::from_slice(&BASE64.decode(&future.data).ok()?).ok()
    }
}

/// A change of the scale set that Azure was asked for. It is not asked again soon for one that it has refused.
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

/// Slows down creation that keeps failing.
#[derive(Clone, Debug, Default)]
pub struct Retry {
    failures: u32,
    /// The capacity that could not be had.
    refused: usize,
    until: Option<Instant>,
    /// Whether a quota is used up.
    quota: bool,
    pub why: Option<String>,
}

impl Retry {
    /// Notes a failure. A single instance that failed is replaced at once; only further ones wait. A failure within the
    /// wait belongs to the same try.
    pub fn failed(&mut self, why: String, one_instance: bool, capacity: usize, now: Instant) {
        if self.remaining(now).is_some() {
            self.why = Some(why);
            self.refused = self.refused.min(capacity);
            return;
        }
        let lenient = one_instance && self.failures == 0;
        self.failures += 1;
        let wait = match lenient {
            true => Duration::ZERO,
            false => exponential(FIRST_RETRY, LONGEST_RETRY, self.failures),
        };
        self.quota = false;
        self.until = Some(now + wait);
        self.why = Some(why);
        self.refused = capacity;
    }

    /// An instance is gone: what its quota did not allow before may be had now.
    pub fn room_again(&mut self, now: Instant) {
        if self.quota {
            self.until = self.until.map(|until| until.min(now));
        }
    }

    /// Azure refused a capacity because a quota is used up.
    pub fn out_of_quota(&mut self) {
        self.quota = true;
    }

    /// Returns the capacity that could not be had, while it is not to be asked for.
    pub fn refused(&self, now: Instant) -> Option<usize> {
        self.remaining(now).map(|_| self.refused)
    }

    /// Returns how long to wait still.
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
    /// Why the scale set of the pool's name is not the pool's, and what to do. Then the snapshot has none.
    pub foreign: Option<String>,
    /// The instances have changed since they were listed.
    pub instances_stale: bool,
    /// So may have the scale set itself.
    pub set_stale: bool,
    pub operations: Vec<Tracked>,
    /// Whether operations were read from the status already.
    pub resumed: bool,
    pub retry: Retry,
    /// Provider ids of instances whose node was ready when last observed.
    pub ready: HashSet<String>,
    /// Failed instances that were already counted against creation.
    pub failures_counted: HashSet<String>,
    /// The outcomes of the drains of this reconcile, by machine; the next observation takes them.
    pub drains: HashMap<String, Progress>,
    /// When the first of the machines drained now was drained.
    pub drained_since: Option<Instant>,
    /// Azure is not called before this; and the message of its refusal.
    pub throttled: Option<(Instant, String)>,
    /// The model that was last wanted.
    pub wanted_model: Option<String>,
    pub ids_pace: Pace,
    /// Events that the next report records.
    pub events: Vec<EventNote>,
    /// The number of machines that an outside manager of the replicas wants.
    pub external: Option<usize>,
    /// Nodes of the scale set that the last list did not explain.
    pub unknown_nodes: BTreeSet<String>,
    /// Whether a difference that the next read of the scale set shows may be our own doing.
    pub ambiguous: bool,
    /// When work in Azure that no operation of ours accounts for was last refreshed.
    pub untracked_at: Option<Instant>,
    /// Since when an instance that ran is Failed, and the number of the list that showed it first, by provider id.
    pub failed_since: HashMap<String, (Instant, u64)>,
    /// Since when an instance that is updated in place has had this model, by provider id.
    pub updated_since: HashMap<String, (String, Instant)>,
    /// Instances whose update in place Azure refused to begin, and why.
    pub refused_updates: BTreeMap<String, &'static str>,
    /// Since when the instance has run without a node, by provider id. A restart begins to count anew.
    pub joining_since: HashMap<String, Instant>,
    /// When to list the instances again to confirm the last list.
    pub recheck_at: Option<Instant>,
    /// Whether the scale set's ETag may be older than our own last change.
    pub etag_stale: bool,
    /// The changes that Azure refused for good, with its message, and when.
    pub refused: Vec<(Ask, String, Instant)>,
}

/// What a pool's status shows of Azure.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub set: Option<ScaleSetSnapshot>,
    /// Whether the scale set's model or capacity is being changed.
    pub changing: bool,
    /// Whether instances are being updated in place.
    pub updating: bool,
    /// Why instances were not created.
    pub shortage: Option<String>,
    pub operations: Vec<Future>,
}

impl State {
    /// Reads the operations that an earlier process has kept in the status, once.
    pub fn resume(&mut self, pool: &AzureMachinePool) {
        if !self.resumed {
            let kept = pool
                .status
                .iter()
                .flat_map(|status| &status.long_running_operation_states);
            self.operations = kept.filter_map(Tracked::resume).collect();
            self.resumed = true;
        }
    }

    pub fn summary(&self, set: &SetName) -> Summary {
        Summary {
            set: self.snapshot.as_ref().and_then(|snapshot| snapshot.set.clone()),
            changing: self.busy(Kind::Change),
            updating: self.busy(Kind::Update),
            shortage: self.retry.why.clone(),
            operations: self.operations.iter().map(|tracked| tracked.persist(set)).collect(),
        }
    }

    /// Instances that Azure has been asked to delete.
    pub fn deleting(&self) -> BTreeSet<String> {
        self.ids(Kind::Delete)
    }

    /// Instances that operations of this kind are about.
    pub fn ids(&self, kind: Kind) -> BTreeSet<String> {
        let operations = self.operations.iter().filter(|tracked| tracked.kind == kind);
        operations.flat_map(|tracked| tracked.ids.iter().cloned()).collect()
    }

    /// Whether Azure works on the scale set, and whether on instances, without an operation of ours: an answer was lost,
    /// or somebody else has asked.
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

    /// Asks for a refresh of such work now and then: nobody reports its end.
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

    /// Returns how long until such work is refreshed.
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

    /// Returns Azure's message if it refused this model not long ago.
    pub fn refused_model(&self, hash: &str, now: Instant) -> Option<String> {
        let mut refused = self.refused(now);
        let same = refused.find(|(ask, ..)| ask.whole && ask.model == hash);
        same.map(|(_, why, _)| why.clone())
    }

    /// Fails with Azure's message if it refused the same change not long ago.
    pub fn check_refused(&self, ask: &Ask, now: Instant) -> Result<(), Error> {
        let same = self.refused(now).find(|(refused, ..)| refused == ask);
        same.map_or(Ok(()), |(_, why, _)| Err(Error::Invalid(why.clone())))
    }

    fn refused(&self, now: Instant) -> impl Iterator<Item = &(Ask, String, Instant)> {
        let recent = move |(_, _, at): &&(Ask, String, Instant)| now.saturating_duration_since(*at) < REFUSED;
        self.refused.iter().filter(recent)
    }

    /// Returns how long Azure is not to be called, and why.
    pub fn throttled_for(&self, now: Instant) -> Option<(Duration, String)> {
        let (until, why) = self.throttled.as_ref()?;
        let left = until.checked_duration_since(now).filter(|left| !left.is_zero())?;
        Some((left, why.clone()))
    }

    pub fn busy(&self, kind: Kind) -> bool {
        self.operations.iter().any(|tracked| tracked.kind == kind)
    }

    /// Returns how long until the next poll is due.
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
    use crate::pool::snapshot::InstanceSnapshot;
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
    #[case::at_rest("Succeeded", "Succeeded", None, (false, false))]
    #[case::failed("Failed", "Failed", None, (false, false))]
    #[case::a_scale_operation("Updating", "Succeeded", Some(UNTRACKED_RECHECK), (true, false))]
    #[case::an_instance_that_is_made("Succeeded", "Creating", Some(UNTRACKED_RECHECK), (false, true))]
    #[case::one_that_is_deleted("Updating", "Deleting", Some(UNTRACKED_RECHECK), (true, true))]
    fn work_that_nobody_tracks_is_refreshed_after_a_while(
        #[case] set: &str,
        #[case] instance: &str,
        #[case] wait: Option<Duration>,
        #[case] refreshed: (bool, bool),
    ) {
        let (mut state, begun) = (state(set, instance), Instant::now());
        state.check_untracked(begun);
        assert_eq!(state.untracked_in(begun), wait);
        assert_eq!((state.set_stale, state.instances_stale), (false, false), "not at once");
        state.check_untracked(begun + UNTRACKED_RECHECK);
        assert_eq!((state.set_stale, state.instances_stale), refreshed);
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

    #[test]
    fn creation_slows_down_with_every_try_and_not_with_every_instance() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        let fail = |retry: &mut Retry, at: Instant| retry.failed("no room".to_owned(), false, 6, at);
        for _ in 0..6 {
            fail(&mut retry, begun);
        }
        assert_eq!(retry.remaining(begun), Some(FIRST_RETRY));
        fail(&mut retry, begun + FIRST_RETRY);
        assert_eq!(retry.remaining(begun + FIRST_RETRY), Some(2 * FIRST_RETRY));
        retry.failed("no room".to_owned(), false, 5, begun + FIRST_RETRY);
        assert_eq!(
            retry.refused(begun + FIRST_RETRY),
            Some(5),
            "the least that was refused"
        );
    }

    #[test]
    fn a_used_up_quota_is_tried_again_when_an_instance_is_gone() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        retry.failed("no room".to_owned(), false, 3, begun);
        retry.room_again(begun);
        assert_eq!(retry.remaining(begun), Some(FIRST_RETRY), "it was no quota");
        retry.out_of_quota();
        retry.room_again(begun);
        assert_eq!(retry.remaining(begun), None);
    }

    #[test]
    fn a_single_instance_that_failed_is_replaced_at_once_and_the_second_one_is_not() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        retry.failed("broken".to_owned(), true, 3, begun);
        assert_eq!(retry.remaining(begun), None);
        retry.failed("broken".to_owned(), true, 3, begun);
        assert_eq!(retry.remaining(begun), Some(2 * FIRST_RETRY));
    }
}
