//! Which pods of a node have to go before its machine may, in which order, and when the node counts as drained.
//!
//! Invariant: [`Plan::finished`] gives the proof only when a live list shows that every pod that has to go is gone, or
//! when the deadline has passed; a terminating pod is evicted again only to shorten the grace period that nobody waits out
//! on an unreachable node; the order is stable, and a pod that its
//! disruption budget holds back does not delay the others.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

use super::obstacle::Obstacle;
use super::proof::Drained;

/// The grace period of pods on an unreachable node: no kubelet is there to end them gracefully.
const UNREACHABLE_GRACE_SECONDS: i64 = 1;
/// A pod of an unreachable node that long past its deletion will never be reported gone by its kubelet, as Cluster API has it.
pub const UNREACHABLE_PATIENCE: Duration = Duration::from_secs(300);
/// At most this many evictions in one reconcile, so that it ends and other objects get their turn.
pub const EVICTIONS_PER_RECONCILE: usize = 40;

/// The facts about a pod that a drain depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The kubelet's shadow of a static pod: it cannot be evicted.
    pub mirror: bool,
    /// Succeeded or Failed.
    pub finished: bool,
    pub owner: Owner,
    /// The end of the grace period, once deletion was asked for.
    pub deleted_by: Option<Timestamp>,
    pub empty_dir: bool,
    pub label: Label,
}

/// What a pod's label asks of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Label {
    #[default]
    None,
    /// The pod stays and does not count.
    Skip,
    /// The pod is not evicted: the drain waits until it completes.
    WaitCompleted,
}

impl Label {
    /// Reads the value of Cluster API's label. Any other value asks for nothing.
    pub fn read(value: &str) -> Self {
        match value.to_ascii_lowercase().as_str() {
            "skip" => Self::Skip,
            "wait-completed" | "waitcompleted" => Self::WaitCompleted,
            _ => Self::None,
        }
    }
}

/// The controller that replaces a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    #[default]
    Nobody,
    /// A DaemonSet that exists.
    DaemonSet,
    /// A DaemonSet that was deleted: the pod is not replaced.
    GoneDaemonSet,
    Other,
}

/// How to drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether the kubelet does not answer (Ready is Unknown).
    pub unreachable: bool,
    /// How long past its deletion the drain waits for a pod of an unreachable node.
    pub patience: Duration,
    /// Whether a terminating pod of an unreachable node is evicted again with a shorter grace period.
    pub shorten: bool,
    /// When the drain times out.
    pub deadline: Option<Timestamp>,
    /// At most so many evictions now.
    pub limit: usize,
}

impl Options {
    /// Returns the options of machine-api-operator: pods of an unreachable node are waited for no longer than their
    /// shortened grace period.
    pub fn openshift() -> Self {
        Self {
            patience: Duration::from_secs(UNREACHABLE_GRACE_SECONDS.unsigned_abs()),
            shorten: true,
            ..Self::default()
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            unreachable: false,
            patience: UNREACHABLE_PATIENCE,
            shorten: false,
            deadline: None,
            limit: EVICTIONS_PER_RECONCILE,
        }
    }
}

/// What a drain does about one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodAction {
    /// It stays on the node and does not count.
    Keep,
    /// It is being deleted: wait for it.
    Await,
    /// It completes by itself: wait for it.
    Complete,
    /// It is being deleted, and its unreachable kubelet will never report that: do not wait for it.
    Abandon,
    Evict,
}

/// A consequence of an eviction that a user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Warning {
    EmptyDir,
    Unmanaged,
    OrphanedDaemonSet,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EmptyDir => "loses the data in its emptyDir volumes",
            Self::Unmanaged => "is not managed by a controller: no controller creates it again",
            Self::OrphanedDaemonSet => "belongs to a DaemonSet that no longer exists",
        })
    }
}

/// A pod to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eviction {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Overrides the pod's own grace period.
    pub grace_seconds: Option<i64>,
    pub warnings: Vec<Warning>,
}

/// One pod, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The last refusal of one pod's eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub at: Timestamp,
    /// Trying before this is of no use.
    pub until: Timestamp,
}

/// Where the pods of a plan come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// A cache, which may be late.
    #[default]
    Cache,
    /// A list read from the API server after the node was cordoned.
    Live,
}

/// The next actions of a drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Evict these, in this order.
    pub evict: Vec<Eviction>,
    /// The API server refused these (by UID) a moment ago: retry later.
    pub refused: Vec<String>,
    /// Evict these in a later reconcile.
    pub later: Vec<PodName>,
    /// Wait for these: they are terminating.
    pub terminating: Vec<PodName>,
    /// Wait for these: they complete by themselves.
    pub completing: Vec<PodName>,
    /// Whether no pod is left that has to go.
    empty: bool,
    deadline_passed: Option<(Timestamp, Timestamp)>,
    source: Source,
}

impl Plan {
    /// Whether the source shows no pod that has to go. A cache that shows none has to be confirmed by a live list.
    pub fn is_empty(&self) -> bool {
        self.empty
    }

    /// Whether the drain's deadline has passed with pods still there.
    pub fn is_timed_out(&self) -> bool {
        self.deadline_passed.is_some() && !self.empty
    }

    /// Returns the proof that `machine` is drained: a live list shows its node empty, or the deadline has passed.
    pub fn finished(&self, machine: &str, obstacles: &[Obstacle]) -> Option<Drained> {
        match self.deadline_passed {
            _ if self.empty => (self.source == Source::Live).then(|| Drained::empty(machine)),
            Some((deadline, now)) => Drained::timed_out(machine, Some(deadline), now, obstacles.to_vec()),
            None => None,
        }
    }
}

/// Decides about one pod.
pub fn decide(pod: &Pod, options: &Options, now: Timestamp) -> PodAction {
    if pod.mirror || pod.label == Label::Skip {
        return PodAction::Keep;
    }
    if let Some(end) = pod.deleted_by {
        let past = Duration::try_from(now.duration_since(end)).unwrap_or_default();
        let shortened = now + Duration::from_secs(UNREACHABLE_GRACE_SECONDS.unsigned_abs());
        let stays = pod.owner == Owner::DaemonSet && !pod.finished;
        return if stays {
            PodAction::Keep
        } else if options.unreachable && past > options.patience {
            PodAction::Abandon
        } else if options.unreachable && options.shorten && end > shortened {
            PodAction::Evict
        } else {
            PodAction::Await
        };
    }
    match pod.owner {
        Owner::DaemonSet if !pod.finished => PodAction::Keep,
        _ if pod.label == Label::WaitCompleted && !pod.finished => PodAction::Complete,
        _ => PodAction::Evict,
    }
}

fn warnings(pod: &Pod) -> Vec<Warning> {
    if pod.finished {
        return Vec::new();
    }
    let owner = match pod.owner {
        Owner::Nobody => Some(Warning::Unmanaged),
        Owner::GoneDaemonSet => Some(Warning::OrphanedDaemonSet),
        Owner::DaemonSet | Owner::Other => None,
    };
    pod.empty_dir
        .then_some(Warning::EmptyDir)
        .into_iter()
        .chain(owner)
        .collect()
}

/// Plans the drain of a node with these pods. `refusals` holds the last refusal of each pod (by UID): those come last.
pub fn plan(
    pods: &[Pod],
    source: Source,
    refusals: &BTreeMap<String, Refusal>,
    options: &Options,
    now: Timestamp,
) -> Plan {
    let name = |pod: &Pod| PodName {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
    };
    let with = |action: PodAction| pods.iter().filter(move |pod| decide(pod, options, now) == action);
    let mut terminating: Vec<PodName> = with(PodAction::Await).map(name).collect();
    terminating.sort();
    let mut completing: Vec<PodName> = with(PodAction::Complete).map(name).collect();
    completing.sort();
    let mut evictable: Vec<&Pod> = with(PodAction::Evict).collect();
    let empty = terminating.is_empty() && completing.is_empty() && evictable.is_empty();
    let deadline_passed = options
        .deadline
        .filter(|deadline| now >= *deadline)
        .map(|deadline| (deadline, now));
    evictable.sort_by_key(|pod| {
        (
            refusals.get(&pod.uid).map(|refusal| refusal.at),
            &pod.namespace,
            &pod.name,
            &pod.uid,
        )
    });
    let (refused, evictable): (Vec<&Pod>, Vec<&Pod>) = evictable
        .into_iter()
        .partition(|pod| refusals.get(&pod.uid).is_some_and(|refusal| refusal.until > now));
    let (first, later) = evictable.split_at(evictable.len().min(options.limit));
    let grace_seconds = options.unreachable.then_some(UNREACHABLE_GRACE_SECONDS);
    let evict = first.iter().map(|pod| Eviction {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        grace_seconds,
        warnings: warnings(pod),
    });
    Plan {
        empty,
        refused: refused.iter().map(|pod| pod.uid.clone()).collect(),
        evict: if deadline_passed.is_some() {
            Vec::new()
        } else {
            evict.collect()
        },
        later: later.iter().copied().map(name).collect(),
        terminating,
        completing,
        deadline_passed,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const NOW: Timestamp = Timestamp::constant(1_000_000, 0);

    fn pod(change: impl FnOnce(&mut Pod)) -> Pod {
        let mut pod = Pod {
            namespace: "ns".into(),
            name: "a".into(),
            uid: "u".into(),
            owner: Owner::Other,
            ..Pod::default()
        };
        change(&mut pod);
        pod
    }

    fn before(seconds: u64) -> Option<Timestamp> {
        Some(NOW - Duration::from_secs(seconds))
    }

    #[rstest]
    #[case::ordinary(pod(|_| ()), PodAction::Evict)]
    #[case::mirror(pod(|p| p.mirror = true), PodAction::Keep)]
    #[case::labelled_to_stay(pod(|p| p.label = Label::Skip), PodAction::Keep)]
    #[case::labelled_to_complete(pod(|p| p.label = Label::WaitCompleted), PodAction::Complete)]
    #[case::labelled_to_complete_and_deleted(pod(|p| (p.label, p.deleted_by) = (Label::WaitCompleted, before(1))), PodAction::Await)]
    #[case::labelled_to_complete_and_completed(pod(|p| (p.label, p.finished) = (Label::WaitCompleted, true)), PodAction::Evict)]
    #[case::daemon(pod(|p| p.owner = Owner::DaemonSet), PodAction::Keep)]
    #[case::finished_daemon(pod(|p| { p.owner = Owner::DaemonSet; p.finished = true }), PodAction::Evict)]
    #[case::orphaned_daemon(pod(|p| p.owner = Owner::GoneDaemonSet), PodAction::Evict)]
    #[case::terminating_daemon(pod(|p| { p.owner = Owner::DaemonSet; p.deleted_by = before(1) }), PodAction::Keep)]
    #[case::unmanaged(pod(|p| p.owner = Owner::Nobody), PodAction::Evict)]
    #[case::terminating(pod(|p| p.deleted_by = before(1)), PodAction::Await)]
    #[case::terminating_for_long(pod(|p| p.deleted_by = before(9_000)), PodAction::Await)]
    fn each_kind_of_pod_has_its_action(#[case] pod: Pod, #[case] action: PodAction) {
        assert_eq!(decide(&pod, &Options::default(), NOW), action);
    }

    #[rstest]
    #[case::just_deleted(1, PodAction::Await)]
    #[case::long_past(301, PodAction::Abandon)]
    fn on_an_unreachable_node_pods_long_past_deletion_are_skipped(#[case] past: u64, #[case] action: PodAction) {
        let options = Options {
            unreachable: true,
            ..Options::default()
        };
        assert_eq!(decide(&pod(|p| p.deleted_by = before(past)), &options, NOW), action);
    }

    #[rstest]
    #[case::an_hour_of_grace(3600, false, PodAction::Evict)]
    #[case::a_second_of_grace(1, false, PodAction::Await)]
    #[case::just_past(1, true, PodAction::Await)]
    #[case::past(2, true, PodAction::Abandon)]
    fn on_openshift_a_dead_node_is_drained_in_seconds(
        #[case] seconds: u64,
        #[case] past: bool,
        #[case] action: PodAction,
    ) {
        let options = Options {
            unreachable: true,
            ..Options::openshift()
        };
        let end = match past {
            true => before(seconds),
            false => Some(NOW + Duration::from_secs(seconds)),
        };
        assert_eq!(decide(&pod(|p| p.deleted_by = end), &options, NOW), action);
        let reachable = Options::openshift();
        assert_eq!(decide(&pod(|p| p.deleted_by = end), &reachable, NOW), PodAction::Await);
        let daemon = pod(|p| (p.deleted_by, p.owner) = (end, Owner::DaemonSet));
        assert_eq!(decide(&daemon, &options, NOW), PodAction::Keep);
    }

    #[test]
    fn pods_of_an_unreachable_node_get_a_grace_period_of_one_second() {
        let options = Options {
            unreachable: true,
            ..Options::default()
        };
        let plan = plan(&[pod(|_| ())], Source::Live, &BTreeMap::new(), &options, NOW);
        assert_eq!(plan.evict[0].grace_seconds, Some(1));
        assert_eq!(
            super::plan(&[pod(|_| ())], Source::Live, &BTreeMap::new(), &Options::default(), NOW).evict[0]
                .grace_seconds,
            None
        );
    }

    #[rstest]
    #[case("skip", Label::Skip)]
    #[case("Skip", Label::Skip)]
    #[case("wait-completed", Label::WaitCompleted)]
    #[case("WaitCompleted", Label::WaitCompleted)]
    #[case("later", Label::None)]
    fn a_label_is_read_as_cluster_api_reads_it(#[case] value: &str, #[case] expected: Label) {
        assert_eq!(Label::read(value), expected);
    }

    #[test]
    fn the_consequences_of_an_eviction_are_named() {
        let lost = pod(|p| {
            p.owner = Owner::Nobody;
            p.empty_dir = true;
        });
        assert_eq!(warnings(&lost), [Warning::EmptyDir, Warning::Unmanaged]);
        assert_eq!(
            warnings(&pod(|p| p.owner = Owner::GoneDaemonSet)),
            [Warning::OrphanedDaemonSet]
        );
        assert!(warnings(&pod(|p| p.finished = true)).is_empty());
    }

    #[test]
    fn a_refused_pod_is_evicted_after_the_others() {
        let names = ["a", "b", "c"];
        let pods: Vec<Pod> = names
            .iter()
            .map(|n| pod(|p| (p.name, p.uid) = ((*n).into(), (*n).into())))
            .collect();
        let tried = BTreeMap::from([("a".to_owned(), Refusal { at: NOW, until: NOW })]);
        let options = Options {
            limit: 2,
            ..Options::default()
        };
        let plan = plan(&pods, Source::Live, &tried, &options, NOW);
        assert_eq!(
            plan.evict.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(),
            ["b", "c"]
        );
        assert_eq!(plan.later.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_pod_that_was_just_refused_is_not_tried_again_and_is_still_an_obstacle() {
        let tried = BTreeMap::from([(
            "u".to_owned(),
            Refusal {
                at: NOW,
                until: NOW + Duration::from_secs(1),
            },
        )]);
        let plan = plan(&[pod(|_| ())], Source::Live, &tried, &Options::default(), NOW);
        assert!(plan.evict.is_empty() && !plan.is_empty());
        assert_eq!(plan.refused, ["u"]);
    }

    #[test]
    fn after_the_deadline_no_pod_is_evicted_and_the_proof_names_those_that_are_left() {
        let pods = [pod(|_| ()), pod(|p| p.deleted_by = before(1))];
        let options = Options {
            deadline: Some(NOW),
            ..Options::default()
        };
        let plan = plan(&pods, Source::Live, &BTreeMap::new(), &options, NOW);
        assert!(plan.is_timed_out() && !plan.is_empty() && plan.evict.is_empty());
        assert!(plan.finished("m", &[]).is_some());
    }

    #[rstest]
    #[case::empty_by_a_live_list(&[], Source::Live, true)]
    #[case::empty_by_a_cache(&[], Source::Cache, false)]
    #[case::a_pod_is_left(&[pod(|_| ())], Source::Live, false)]
    #[case::a_terminating_pod_is_left(&[pod(|p| p.deleted_by = before(1))], Source::Live, false)]
    #[case::a_pod_completes(&[pod(|p| p.label = Label::WaitCompleted)], Source::Live, false)]
    #[case::daemons_may_stay(&[pod(|p| p.owner = Owner::DaemonSet)], Source::Live, true)]
    fn only_a_live_list_without_pods_is_a_proof(#[case] pods: &[Pod], #[case] source: Source, #[case] proof: bool) {
        let plan = plan(pods, source, &BTreeMap::new(), &Options::default(), NOW);
        assert_eq!(plan.finished("m", &[]).is_some(), proof);
    }

    fn any_pod() -> impl Strategy<Value = Pod> {
        let owner = prop_oneof![
            Just(Owner::Nobody),
            Just(Owner::DaemonSet),
            Just(Owner::GoneDaemonSet),
            Just(Owner::Other)
        ];
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
        (0u8..12, owner, flags, proptest::option::of(0u64..600)).prop_map(|(id, owner, flags, deleted)| Pod {
            namespace: "ns".into(),
            name: format!("p{id}"),
            uid: format!("u{id}"),
            mirror: flags.0 && flags.1,
            finished: flags.2,
            owner,
            deleted_by: deleted.and_then(before),
            empty_dir: flags.3,
            label: Label::None,
        })
    }

    proptest! {
        #[test]
        fn every_pod_is_planned_for_once_and_drained_means_none_is_left(
            pods in proptest::collection::vec(any_pod(), 0..12),
            unreachable: bool,
            limit in 1usize..5,
        ) {
            let options = Options { unreachable, limit, ..Options::default() };
            let plan = plan(&pods, Source::Live, &BTreeMap::new(), &options, NOW);
            let count = |action| pods.iter().filter(|p| decide(p, &options, NOW) == action).count();
            prop_assert_eq!(plan.evict.len() + plan.later.len(), count(PodAction::Evict));
            prop_assert_eq!(plan.terminating.len(), count(PodAction::Await));
            prop_assert!(plan.evict.len() <= limit);
            prop_assert_eq!(plan.is_empty(), count(PodAction::Evict) + count(PodAction::Await) == 0);
        }

        #[test]
        fn the_order_of_the_list_does_not_matter(
            pods in proptest::collection::vec(any_pod(), 0..12),
            turn in 0usize..12,
        ) {
            let mut turned = pods.clone();
            turned.sort_by(|a, b| (&a.uid, a.finished, a.mirror).cmp(&(&b.uid, b.finished, b.mirror)));
            turned.dedup_by(|a, b| a.uid == b.uid);
            let once = turned.clone();
            if !turned.is_empty() {
                let by = turn % turned.len();
                turned.rotate_left(by);
            }
            let (tried, options) = (BTreeMap::new(), Options { limit: 3, ..Options::default() });
            prop_assert_eq!(plan(&once, Source::Live, &tried, &options, NOW), plan(&turned, Source::Live, &tried, &options, NOW));
        }
    }
}
