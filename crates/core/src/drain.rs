//! Which pods of a node have to go before its machine may, in which order, and when the node counts as drained.
//!
//! Invariant: [`plan`] answers `drained` only when every pod that has to go is gone; a pod that is on its way out is
//! never evicted twice; the order is stable, and a pod whose budget refuses it does not keep the others waiting.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

/// The pods of an unreachable node are told to go at once: nobody is there to end them gracefully.
const UNREACHABLE_GRACE_SECONDS: i64 = 1;
/// A pod of an unreachable node that long past its deletion will never be reported gone by its kubelet.
pub const UNREACHABLE_PATIENCE: Duration = Duration::from_secs(300);
/// At most this many evictions in one pass, so that a pass ends and others get their turn.
pub const EVICTIONS_PER_PASS: usize = 40;
/// How many pods a message names before it says how many more there are.
const NAMED: usize = 5;

/// What about a pod matters to a drain.
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
    /// Somebody labelled it to be left alone.
    pub skip: bool,
}

/// Who makes a new pod when this one goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    #[default]
    Nobody,
    /// A DaemonSet that exists.
    DaemonSet,
    /// A DaemonSet that is gone: nobody will make the pod anew.
    GoneDaemonSet,
    Other,
}

/// How to drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The kubelet does not answer (Ready is Unknown).
    pub unreachable: bool,
    /// How long past its deletion a pod of an unreachable node is still waited for.
    pub patience: Duration,
    /// When to stop waiting for pods altogether.
    pub deadline: Option<Timestamp>,
    /// At most so many evictions now.
    pub limit: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            unreachable: false,
            patience: UNREACHABLE_PATIENCE,
            deadline: None,
            limit: EVICTIONS_PER_PASS,
        }
    }
}

/// What happens to one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stays and does not count.
    Stays,
    /// It is on its way out.
    Leaving,
    /// It is past saving: its node will not report it gone.
    Lost,
    Evict,
}

/// What a user should know about an eviction.
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
            Self::Unmanaged => "is not managed by a controller and will not come back",
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

/// What to do about a node now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Evict these, in this order.
    pub evict: Vec<Eviction>,
    /// These were refused a moment ago (by UID): do not try them yet.
    pub held: Vec<String>,
    /// Evict these in a later pass: this one has enough to do.
    pub later: Vec<PodName>,
    /// Wait for these to go.
    pub leaving: Vec<PodName>,
    /// Nothing stands in the way.
    pub drained: bool,
    /// The deadline has passed: go on whatever is still there.
    pub timed_out: bool,
}

/// What happens to a pod, looked at alone.
pub fn decide(pod: &Pod, options: &Options, now: Timestamp) -> Fate {
    if pod.mirror || pod.skip {
        return Fate::Stays;
    }
    if let Some(end) = pod.deleted_by {
        let past = Duration::try_from(now.duration_since(end)).unwrap_or_default();
        let stays = pod.owner == Owner::DaemonSet && !pod.finished;
        return match () {
            () if stays => Fate::Stays,
            () if options.unreachable && past > options.patience => Fate::Lost,
            () => Fate::Leaving,
        };
    }
    match pod.owner {
        Owner::DaemonSet if !pod.finished => Fate::Stays,
        _ => Fate::Evict,
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

/// What to do about a node with these pods. `refused` holds the last refusal of each pod (by UID): those come last.
pub fn plan(pods: &[Pod], refused: &BTreeMap<String, Refusal>, options: &Options, now: Timestamp) -> Plan {
    let name = |pod: &Pod| PodName {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
    };
    let with = |fate: Fate| pods.iter().filter(move |pod| decide(pod, options, now) == fate);
    let mut leaving: Vec<PodName> = with(Fate::Leaving).map(name).collect();
    leaving.sort();
    let mut going: Vec<&Pod> = with(Fate::Evict).collect();
    let drained = leaving.is_empty() && going.is_empty();
    let timed_out = options.deadline.is_some_and(|deadline| now >= deadline) && !drained;
    going.sort_by_key(|pod| {
        (
            refused.get(&pod.uid).map(|refusal| refusal.at),
            &pod.namespace,
            &pod.name,
            &pod.uid,
        )
    });
    let (held, going): (Vec<&Pod>, Vec<&Pod>) = going
        .into_iter()
        .partition(|pod| refused.get(&pod.uid).is_some_and(|refusal| refusal.until > now));
    let (now_going, later) = going.split_at(going.len().min(options.limit));
    let grace_seconds = options.unreachable.then_some(UNREACHABLE_GRACE_SECONDS);
    let evict = now_going.iter().map(|pod| Eviction {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        grace_seconds,
        warnings: warnings(pod),
    });
    Plan {
        drained,
        held: held.iter().map(|pod| pod.uid.clone()).collect(),
        evict: if timed_out { Vec::new() } else { evict.collect() },
        later: later.iter().copied().map(name).collect(),
        leaving,
        timed_out,
    }
}

/// Why a pod is still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It was told to go and is not gone yet.
    Leaving,
    /// Evicting it would break this disruption budget.
    Budget(String),
    /// More than one budget covers it, which the eviction API refuses until one of them is changed.
    SeveralBudgets,
    /// Its namespace is being deleted, and it with it.
    NamespaceEnding,
    /// Its turn comes later.
    Queued,
    /// The API server refused the eviction otherwise.
    Refused(String),
}

/// A pod in the way, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InTheWay {
    pub pod: PodName,
    pub why: Obstacle,
}

impl fmt::Display for InTheWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {} ", self.pod)?;
        match &self.why {
            Obstacle::Leaving => f.write_str("is terminating"),
            Obstacle::Budget(budget) => write!(f, "is blocked by budget {budget}"),
            Obstacle::SeveralBudgets => f.write_str("is covered by more than one disruption budget: leave it only one"),
            Obstacle::NamespaceEnding => f.write_str("goes with its terminating namespace"),
            Obstacle::Queued => f.write_str("waits for its turn"),
            Obstacle::Refused(reason) => write!(f, "cannot be evicted: {reason}"),
        }
    }
}

/// The pods in the way as one sentence part, the blocked ones first.
pub fn describe(in_the_way: &[InTheWay]) -> String {
    let rank = |entry: &&InTheWay| match entry.why {
        Obstacle::SeveralBudgets | Obstacle::Refused(_) => 0,
        Obstacle::Budget(_) => 1,
        Obstacle::NamespaceEnding => 2,
        Obstacle::Leaving => 3,
        Obstacle::Queued => 4,
    };
    let mut entries: Vec<&InTheWay> = in_the_way.iter().collect();
    entries.sort_by_key(|entry| (rank(entry), entry.pod.clone()));
    let mut text = entries
        .iter()
        .take(NAMED)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ");
    if entries.len() > NAMED {
        text.push_str(&format!("; and {} more", entries.len() - NAMED));
    }
    text
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
    #[case::ordinary(pod(|_| ()), Fate::Evict)]
    #[case::mirror(pod(|p| p.mirror = true), Fate::Stays)]
    #[case::labelled_to_stay(pod(|p| p.skip = true), Fate::Stays)]
    #[case::daemon(pod(|p| p.owner = Owner::DaemonSet), Fate::Stays)]
    #[case::finished_daemon(pod(|p| { p.owner = Owner::DaemonSet; p.finished = true }), Fate::Evict)]
    #[case::orphaned_daemon(pod(|p| p.owner = Owner::GoneDaemonSet), Fate::Evict)]
    #[case::terminating_daemon(pod(|p| { p.owner = Owner::DaemonSet; p.deleted_by = before(1) }), Fate::Stays)]
    #[case::unmanaged(pod(|p| p.owner = Owner::Nobody), Fate::Evict)]
    #[case::terminating(pod(|p| p.deleted_by = before(1)), Fate::Leaving)]
    #[case::terminating_for_long(pod(|p| p.deleted_by = before(9_000)), Fate::Leaving)]
    fn each_kind_of_pod_has_its_fate(#[case] pod: Pod, #[case] fate: Fate) {
        assert_eq!(decide(&pod, &Options::default(), NOW), fate);
    }

    #[rstest]
    #[case::just_deleted(1, Fate::Leaving)]
    #[case::long_past(301, Fate::Lost)]
    fn on_an_unreachable_node_pods_long_past_deletion_are_skipped(#[case] past: u64, #[case] fate: Fate) {
        let options = Options {
            unreachable: true,
            ..Options::default()
        };
        assert_eq!(decide(&pod(|p| p.deleted_by = before(past)), &options, NOW), fate);
    }

    #[test]
    fn pods_of_an_unreachable_node_get_one_second() {
        let options = Options {
            unreachable: true,
            ..Options::default()
        };
        let plan = plan(&[pod(|_| ())], &BTreeMap::new(), &options, NOW);
        assert_eq!(plan.evict[0].grace_seconds, Some(1));
        assert_eq!(
            super::plan(&[pod(|_| ())], &BTreeMap::new(), &Options::default(), NOW).evict[0].grace_seconds,
            None
        );
    }

    #[test]
    fn what_is_lost_with_a_pod_is_said() {
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
    fn a_refused_pod_lets_the_others_go_first() {
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
        let plan = plan(&pods, &tried, &options, NOW);
        assert_eq!(
            plan.evict.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(),
            ["b", "c"]
        );
        assert_eq!(plan.later.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_pod_refused_a_moment_ago_is_left_alone_and_still_in_the_way() {
        let tried = BTreeMap::from([(
            "u".to_owned(),
            Refusal {
                at: NOW,
                until: NOW + Duration::from_secs(1),
            },
        )]);
        let plan = plan(&[pod(|_| ())], &tried, &Options::default(), NOW);
        assert!(plan.evict.is_empty() && !plan.drained);
        assert_eq!(plan.held, ["u"]);
    }

    #[test]
    fn after_the_deadline_nothing_is_evicted_or_waited_for() {
        let pods = [pod(|_| ()), pod(|p| p.deleted_by = before(1))];
        let options = Options {
            deadline: Some(NOW),
            ..Options::default()
        };
        let plan = plan(&pods, &BTreeMap::new(), &options, NOW);
        assert!(plan.timed_out && !plan.drained && plan.evict.is_empty());
    }

    #[test]
    fn the_pods_in_the_way_are_named_the_blocked_ones_first() {
        let entry = |name: &str, why| InTheWay {
            pod: PodName {
                namespace: "ns".into(),
                name: name.into(),
            },
            why,
        };
        let mut all = vec![
            entry("a", Obstacle::Leaving),
            entry("b", Obstacle::Budget("ns/web".into())),
        ];
        assert_eq!(
            describe(&all),
            "pod ns/b is blocked by budget ns/web; pod ns/a is terminating"
        );
        all.extend((0..5).map(|i| entry(&format!("z{i}"), Obstacle::Queued)));
        assert!(describe(&all).ends_with("; and 2 more"));
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
            skip: false,
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
            let plan = plan(&pods, &BTreeMap::new(), &options, NOW);
            let count = |fate| pods.iter().filter(|p| decide(p, &options, NOW) == fate).count();
            prop_assert_eq!(plan.evict.len() + plan.later.len(), count(Fate::Evict));
            prop_assert_eq!(plan.leaving.len(), count(Fate::Leaving));
            prop_assert!(plan.evict.len() <= limit);
            prop_assert_eq!(plan.drained, count(Fate::Evict) + count(Fate::Leaving) == 0);
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
            prop_assert_eq!(plan(&once, &tried, &options, NOW), plan(&turned, &tried, &options, NOW));
        }
    }
}
