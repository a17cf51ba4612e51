//! What is kept of a pool between reconciles: the last snapshot of Azure, and the operations under way there.
//!
//! Invariant: losing it is safe. A new process reads Azure and the operations kept in the pool's status, and goes on from
//! there.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_api::azure::{AzureMachinePool, Future};
use capstan_azure::model::ScaleSet;
use capstan_azure::{Client, Operation};
use capstan_core::backoff::exponential;
use capstan_core::pool::{self, Cause, TRIES, refused, wait};
use capstan_kube::runtime::EventNote;
use serde::{Deserialize, Serialize};

use super::drain::Progress;
use super::owners::SetName;
use super::snapshot::{CONFIRM, ScaleSetSnapshot, Snapshot, in_progress};
use crate::error::Error;
use crate::model::Model;

/// The service's name in the operations that the status keeps.
const SERVICE: &str = "scalesets";
/// Work in Azure that no operation of ours accounts for is refreshed this often: as often as Azure wants to be asked.
const UNTRACKED_RECHECK: Duration = Duration::from_secs(12);
/// Between two polls of an operation whose effect nodes show there is no more time than this, unless Azure asks for more.
const SELDOM_POLL: Duration = Duration::from_secs(60);
/// The first poll about instances that are made or deleted comes after so many times the wait that Azure asks for.
const FIRST_POLL: u32 = 3;
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
    /// Instances are provisioned again.
    Reimage,
    /// The whole scale set goes.
    Remove,
}

/// An operation under way, and the instances that it is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracked {
    pub kind: Kind,
    pub ids: BTreeSet<String>,
    pub operation: Operation,
    /// How often Azure has said that it is not over.
    #[serde(default)]
    pub polls: u32,
}

impl Tracked {
    /// An operation that has just begun. Nodes show instances that are made and deleted, mostly before a poll does: the first
    /// poll comes later than Azure asks for.
    pub fn new(kind: Kind, ids: BTreeSet<String>, mut operation: Operation, now: jiff::Timestamp) -> Self {
        let wait = operation.due_in(now);
        match kind {
            Kind::Change | Kind::Delete => operation.not_before = now + (FIRST_POLL * wait).min(SELDOM_POLL).max(wait),
            Kind::Update | Kind::Reimage | Kind::Remove => {}
        }
        Self {
            kind,
            ids,
            operation,
            polls: 0,
        }
    }

    /// Puts the next poll off after Azure has said that the operation is not over. Nodes that come and go show instances that
    /// are made and deleted, mostly before a poll does: the longer it takes, the more seldom Azure is asked.
    pub fn put_off(&mut self, interval: Duration, now: jiff::Timestamp) {
        self.polls += 1;
        match self.kind {
            Kind::Change | Kind::Delete => {
                let wait = exponential(interval, SELDOM_POLL.max(interval), self.polls + 1);
                self.operation.not_before = now + wait;
            }
            Kind::Update | Kind::Reimage | Kind::Remove => {}
        }
    }

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
    /// The capacity that Azure had no room for; `None` where new instances have failed.
    refused: Option<usize>,
    until: Option<Instant>,
    /// Whether a quota is used up.
    quota: bool,
    /// Whether Azure was asked again since the last failure.
    asked: bool,
    pub why: Option<String>,
}

impl Retry {
    /// Notes a failure. A failure within the wait belongs to the same try.
    pub fn failed(&mut self, why: String, cause: Cause, now: Instant) {
        (self.why, self.asked) = (Some(why), false);
        if self.remaining(now).is_some() {
            let refused = refused(self.failures, cause);
            self.refused = self.refused.zip(refused).map(|(one, other)| one.min(other));
            return;
        }
        self.until = Some(now + wait(self.failures, cause));
        self.failures += 1;
        self.quota = false;
        self.refused = refused(self.failures, cause);
    }

    /// Whether Azure had no room so often that the pool asks for no more.
    pub fn given_up(&self) -> bool {
        self.refused.is_some() && self.failures >= TRIES
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

    /// Returns whether more instances may be asked for, where no scale operation has to be repeated.
    pub fn planned(&self, now: Instant) -> pool::Retry {
        match (self.remaining(now), self.refused) {
            (None, _) => pool::Retry::NotNeeded,
            (Some(_), None) => pool::Retry::Paused,
            (Some(_), Some(refused)) => pool::Retry::Waiting {
                refused,
                tries: self.failures,
            },
        }
    }

    /// Returns how long to wait still.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        self.until?.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Azure was asked for instances.
    pub fn asked(&mut self) {
        self.asked = true;
    }

    /// Whether the last failure that Azure shows was counted.
    pub fn is_counted(&self) -> bool {
        self.failing() && !self.asked
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

/// How long an instance has run without a node, as far as its cluster answered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Joining {
    waited: Duration,
    /// When it was last observed so, unless the cluster has not answered since.
    at: Option<Instant>,
}

impl Joining {
    /// Counts on from the last observation.
    pub fn observed(self, now: Instant) -> Self {
        Self {
            waited: self.waited + self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)),
            at: Some(now),
        }
    }

    /// The time until it is observed again does not count.
    pub fn paused(self) -> Self {
        Self { at: None, ..self }
    }

    pub fn waited(self) -> Duration {
        self.waited
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
    /// Since when a rollout has gone on.
    pub rolling_since: Option<Instant>,
    /// Failed instances that were already counted against creation.
    pub failures_counted: HashSet<String>,
    /// The outcomes of the drains of this reconcile, by machine; the next observation takes them.
    pub drains: HashMap<String, Progress>,
    /// When the first of the machines drained now was drained.
    pub drained_since: Option<Instant>,
    /// Since when nodes have been ready that take no pods yet, by the provider ids of their instances.
    pub arriving: HashMap<String, Instant>,
    /// Azure is not called before this; and the message of its refusal.
    pub throttled: Option<(Instant, String)>,
    /// The model that was last wanted.
    pub wanted_model: Option<String>,
    /// The number of machines that was last wanted.
    pub wanted: Option<usize>,
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
    /// How long instances have run without a node, by provider id. A restart begins to count again.
    pub joining: HashMap<String, Joining>,
    /// Provider ids of machines that went because their nodes did not join, since a node last did.
    pub unjoined: HashSet<String>,
    /// When to list the instances again to confirm the last list.
    pub recheck_at: Option<Instant>,
    /// Whether the scale set's ETag may be older than our own last change.
    pub etag_stale: bool,
    /// How much more capacity a Flexible set has than its snapshot says: it keeps its capacity when machines of it are deleted.
    pub kept: usize,
    /// The last model that replaced another one, and when we asked for it, in seconds since the epoch.
    pub replaced_model: Option<(String, i64)>,
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
    /// Whether Azure has no room for them, and the pool asks for no more.
    pub given_up: bool,
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
            updating: self.busy(Kind::Update) || self.busy(Kind::Reimage),
            shortage: self.retry.why.clone(),
            given_up: self.retry.given_up(),
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

    /// Reads a scale set, and since when it has its model.
    pub fn read(&self, set: &ScaleSet) -> ScaleSetSnapshot {
        let mut set = ScaleSetSnapshot::read(set);
        let asked = self.replaced_model.as_ref();
        let asked = asked.filter(|(model, _)| Some(model) == set.model.as_ref());
        set.model_since = asked.map(|(_, at)| *at);
        set
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
            polls: 0,
        });
        assert_eq!(state.untracked_in(Instant::now()), None);
    }

    #[rstest]
    #[case::instances_are_made(Kind::Change, [20, 40, 60, 60])]
    #[case::instances_are_deleted(Kind::Delete, [20, 40, 60, 60])]
    #[case::only_a_poll_tells_of_a_reimage(Kind::Reimage, [10, 10, 10, 10])]
    fn azure_is_asked_more_seldom_about_what_nodes_show(#[case] kind: Kind, #[case] expected: [i64; 4]) {
        let mut headers = http::HeaderMap::new();
        headers.insert("azure-asyncoperation", "https://a/operations/1".parse().unwrap());
        let now = jiff::Timestamp::UNIX_EPOCH;
        let operation = Operation::started("PATCH", "/r", 202, &headers, b"", now).unwrap();
        let mut tracked = Tracked {
            kind,
            ids: BTreeSet::new(),
            operation,
            polls: 0,
        };
        let ten = Duration::from_secs(10);
        let waits = expected.map(|_| {
            tracked.operation.not_before = now + ten;
            tracked.put_off(ten, now);
            tracked.operation.not_before.as_second()
        });
        assert_eq!(waits, expected);
    }

    #[rstest]
    #[case::instances_are_made(Kind::Change, 10, 30)]
    #[case::instances_are_deleted(Kind::Delete, 10, 30)]
    #[case::not_too_late(Kind::Change, 30, 60)]
    #[case::not_before_azure_allows_it(Kind::Change, 90, 90)]
    #[case::only_a_poll_shows_an_update(Kind::Update, 10, 10)]
    fn azure_is_asked_first_when_nodes_should_have_shown_it(
        #[case] kind: Kind,
        #[case] asked: i64,
        #[case] expected: i64,
    ) {
        let (mut headers, now) = (http::HeaderMap::new(), jiff::Timestamp::UNIX_EPOCH);
        headers.insert("azure-asyncoperation", "https://a/operations/1".parse().unwrap());
        headers.insert("retry-after", asked.into());
        let operation = Operation::started("PATCH", "/r", 202, &headers, b"", now).unwrap();
        let tracked = Tracked::new(kind, BTreeSet::new(), operation, now);
        assert_eq!(tracked.operation.not_before.as_second(), expected);
    }

    #[test]
    fn time_in_which_the_cluster_does_not_answer_does_not_count_for_a_node_that_joins() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let joining = Joining::default().observed(begun).observed(begun + 600 * second);
        assert_eq!(joining.waited(), 600 * second);
        let silent = joining.paused().paused();
        let again = silent.observed(begun + 5000 * second);
        assert_eq!(again.waited(), 600 * second, "it goes on where it was");
        assert_eq!(again.observed(begun + 5060 * second).waited(), 660 * second);
    }

    const NO_ROOM: fn(usize) -> Cause = |capacity| Cause::Refused { capacity };

    #[test]
    fn creation_slows_down_with_every_try_and_not_with_every_instance() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        let first = wait(0, NO_ROOM(6));
        let fail = |retry: &mut Retry, at: Instant| retry.failed("no room".to_owned(), NO_ROOM(6), at);
        for _ in 0..6 {
            fail(&mut retry, begun);
        }
        assert_eq!(retry.remaining(begun), Some(first));
        fail(&mut retry, begun + first);
        assert_eq!(retry.remaining(begun + first), Some(2 * first));
        retry.failed("no room".to_owned(), NO_ROOM(5), begun + first);
        let least = pool::Retry::Waiting { refused: 5, tries: 2 };
        assert_eq!(retry.planned(begun + first), least, "the least that was refused");
    }

    #[test]
    fn without_room_a_pool_asks_for_no_more_than_it_has_after_some_tries() {
        let (mut retry, mut now) = (Retry::default(), Instant::now());
        for _ in 0..TRIES {
            now += retry.remaining(now).unwrap_or_default();
            assert!(!retry.given_up());
            let (capacity, existing) = (6, 2);
            retry.failed("no room".to_owned(), Cause::NotMade { capacity, existing }, now);
        }
        assert!(retry.given_up());
        let tries = TRIES;
        assert_eq!(retry.planned(now), pool::Retry::Waiting { refused: 3, tries });
    }

    #[test]
    fn instances_that_fail_are_waited_for_and_not_asked_for_one_by_one() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        retry.failed("broken".to_owned(), Cause::Instances, begun);
        assert_eq!(retry.planned(begun), pool::Retry::Paused);
        retry.failed("no room".to_owned(), NO_ROOM(3), begun);
        assert_eq!(retry.planned(begun), pool::Retry::Paused, "within the same wait");
    }

    #[test]
    fn a_used_up_quota_is_tried_again_when_an_instance_is_gone() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        retry.failed("no room".to_owned(), NO_ROOM(3), begun);
        retry.room_again(begun);
        assert!(retry.remaining(begun).is_some(), "it was no quota");
        retry.out_of_quota();
        retry.room_again(begun);
        assert_eq!(retry.remaining(begun), None);
    }

    #[test]
    fn a_single_instance_that_failed_is_replaced_at_once_and_the_second_one_is_not() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        retry.failed("broken".to_owned(), Cause::Instance, begun);
        assert_eq!(retry.planned(begun), pool::Retry::NotNeeded);
        retry.failed("broken".to_owned(), Cause::Instance, begun);
        assert_eq!(retry.planned(begun), pool::Retry::Paused);
    }
}
