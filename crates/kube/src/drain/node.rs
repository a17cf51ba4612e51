//! The drain of one node: its pods, the refusals of the API server and who to wake.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use capstan_core::backoff::exponential;
use capstan_core::clock::Clock;
use capstan_core::drain::{
    self, Eviction, Obstacle, ObstacleReason, Options, Plan, PodAction, PodName, Refusal, Source,
};
use jiff::Timestamp;
use parking_lot::Mutex;

use super::Wake;
use super::evict::Answer;
use super::pod::Pod;
use crate::cache::Cache;
use crate::metrics::{BlockedLabels, Metrics};

/// A refused pod is tried again after this long, twice as long each time; a change of its budget cuts it short.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest pause between two tries of a refused pod.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// A person has to change one of several budgets on a pod.
const SEVERAL_BUDGETS_RETRY: Duration = Duration::from_secs(30);
/// Pods of one node in the metrics at most: a workload cluster of somebody else names them.
pub(super) const SHOWN: usize = 50;
/// The caller asks again after this long even if the watch reports nothing: a watch may be silently dead.
pub(super) const FALLBACK: Duration = Duration::from_secs(30);
/// Times of deletion are in whole seconds.
const DELETION_STEP: Duration = Duration::from_secs(1);
/// A pod that was evicted and that the cache still shows without a deletion after this long is evicted again.
const CACHE_LAG: Duration = Duration::from_secs(10);

/// A pod whose eviction the API server refused.
struct RefusedPod {
    pod: PodName,
    refusal: Refusal,
    times: u32,
    reason: ObstacleReason,
}

pub(super) struct NodeDrain {
    pub(super) pods: Cache<Pod>,
    clock: Clock,
    refused: Mutex<BTreeMap<String, RefusedPod>>,
    /// When these pods (by UID) were evicted: the cache may still show them without a deletion.
    evicted: Mutex<HashMap<String, Instant>>,
    reported: Mutex<Vec<BlockedLabels>>,
    asked: Mutex<(Instant, Wake)>,
    watcher: Mutex<Option<tokio::task::AbortHandle>>,
    metrics: Metrics,
}

impl Drop for NodeDrain {
    fn drop(&mut self) {
        // However the drain ended, it has no obstacles any more.
        self.metrics.blocked_pods(self.reported.get_mut(), &[]);
        if let Some(watcher) = self.watcher.get_mut().take() {
            watcher.abort();
        }
    }
}

impl NodeDrain {
    pub(super) fn new(pods: Cache<Pod>, wake: Wake, clock: Clock, metrics: Metrics) -> Self {
        Self {
            pods,
            clock,
            refused: Mutex::default(),
            evicted: Mutex::default(),
            reported: Mutex::default(),
            asked: Mutex::new((clock.instant(), wake)),
            watcher: Mutex::default(),
            metrics,
        }
    }

    pub(super) fn watched_by(&self, watcher: tokio::task::AbortHandle) {
        *self.watcher.lock() = Some(watcher);
    }

    pub(super) fn asked_now(&self, wake: Wake) {
        *self.asked.lock() = (self.clock.instant(), wake);
    }

    /// Returns how long ago the caller asked about this drain.
    pub(super) fn idle_for(&self) -> Duration {
        self.clock.since(self.asked.lock().0)
    }

    pub(super) fn wake(&self) {
        let wake = self.asked.lock().1.clone();
        wake();
    }

    pub(super) fn plan(&self, mut pods: Vec<drain::Pod>, source: Source, options: &Options) -> Plan {
        let now = self.clock.now();
        let mut evicted = self.evicted.lock();
        evicted.retain(|_, at| self.clock.since(*at) < CACHE_LAG);
        for pod in pods.iter_mut().filter(|pod| evicted.contains_key(&pod.uid)) {
            pod.deleted_by = pod.deleted_by.or(Some(now));
        }
        let mut refused = self.refused.lock();
        // A pod that may stay by now (somebody labelled it, for example) is no obstacle any more.
        let must_go = |pod: &drain::Pod| drain::decide(pod, options, now) == PodAction::Evict;
        refused.retain(|uid, _| pods.iter().any(|pod| pod.uid == *uid && must_go(pod)));
        let refusals = refused.iter().map(|(uid, pod)| (uid.clone(), pod.refusal)).collect();
        drain::plan(&pods, source, &refusals, options, now)
    }

    /// Returns the obstacles that the plan does not evict now.
    pub(super) fn obstacles(&self, plan: &Plan) -> Vec<Obstacle> {
        let obstacle = |pod: &PodName, reason| Obstacle {
            pod: pod.clone(),
            reason,
        };
        let terminating = plan
            .terminating
            .iter()
            .map(|pod| obstacle(pod, ObstacleReason::Terminating));
        let completing = plan
            .completing
            .iter()
            .map(|pod| obstacle(pod, ObstacleReason::Completing));
        let later = plan.later.iter().map(|pod| obstacle(pod, ObstacleReason::Queued));
        let refused = self.refused.lock();
        let held = plan.refused.iter().filter_map(|uid| refused.get(uid));
        let held = held.map(|held| obstacle(&held.pod, held.reason.clone()));
        terminating.chain(completing).chain(later).chain(held).collect()
    }

    /// Records the answer to one eviction and returns the obstacle that it leaves.
    pub(super) fn record(&self, eviction: &Eviction, answer: Answer) -> Option<Obstacle> {
        let pod = PodName {
            namespace: eviction.namespace.clone(),
            name: eviction.name.clone(),
        };
        if matches!(answer, Answer::Gone | Answer::Evicted) {
            self.evicted.lock().insert(eviction.uid.clone(), self.clock.instant());
        }
        let (reason, pause) = match answer {
            Answer::Gone => return None,
            Answer::Evicted => {
                let reason = ObstacleReason::Terminating;
                return Some(Obstacle { pod, reason });
            }
            Answer::Blocked { budget, after } => (ObstacleReason::DisruptionBudget(budget), after),
            Answer::SeveralBudgets => (ObstacleReason::SeveralDisruptionBudgets, Some(SEVERAL_BUDGETS_RETRY)),
            Answer::NamespaceTerminating => (ObstacleReason::NamespaceTerminating, Some(LONGEST_RETRY)),
            Answer::Refused { reason, after, .. } => (ObstacleReason::Refused(reason), after),
        };
        let now = self.clock.now();
        let mut refused = self.refused.lock();
        let times = refused.get(&eviction.uid).map_or(0, |pod| pod.times) + 1;
        let pause = pause.unwrap_or_else(|| exponential(FIRST_RETRY, LONGEST_RETRY, times));
        let entry = RefusedPod {
            pod: pod.clone(),
            refusal: Refusal {
                at: now,
                until: now + pause,
            },
            times,
            reason: reason.clone(),
        };
        refused.insert(eviction.uid.clone(), entry);
        Some(Obstacle { pod, reason })
    }

    /// Lets the pods that `budget` held back be tried at once. Returns whether there are any.
    pub(super) fn retry_now(&self, budget: &str) -> bool {
        let blocked = ObstacleReason::DisruptionBudget(budget.to_owned());
        let mut refused = self.refused.lock();
        let held = refused.values_mut().filter(|pod| pod.reason == blocked);
        held.map(|pod| pod.refusal.until = pod.refusal.at).count() > 0
    }

    /// Shows the blocked pods as metrics.
    pub(super) fn report(&self, node: &str, obstacles: &[Obstacle]) {
        let labels = |obstacle: &Obstacle| {
            let reason = match obstacle.reason {
                ObstacleReason::Terminating | ObstacleReason::Queued => return None,
                ObstacleReason::Completing => "Completing",
                ObstacleReason::DisruptionBudget(_) => "Budget",
                ObstacleReason::SeveralDisruptionBudgets => "SeveralBudgets",
                ObstacleReason::NamespaceTerminating => "NamespaceTerminating",
                ObstacleReason::Refused(_) => "Refused",
            };
            Some(BlockedLabels {
                node: node.to_owned(),
                namespace: obstacle.pod.namespace.clone(),
                pod: obstacle.pod.name.clone(),
                reason,
            })
        };
        let now: Vec<BlockedLabels> = obstacles.iter().filter_map(labels).take(SHOWN).collect();
        let mut reported = self.reported.lock();
        self.metrics.blocked_pods(&reported, &now);
        *reported = now;
    }

    /// Returns when the caller has to ask again if nothing wakes it.
    pub(super) fn again(&self, plan: &Plan, options: &Options, now: Timestamp) -> Duration {
        if !plan.later.is_empty() {
            return Duration::ZERO;
        }
        let next_try = self.refused.lock().values().map(|pod| pod.refusal.until).min();
        let until = |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
        // No event says that the drain waits no more for the pods of an unreachable node.
        let left = !plan.terminating.is_empty() || !plan.evict.is_empty();
        let abandoned = (options.unreachable && left).then(|| now + options.patience + DELETION_STEP);
        let times = [next_try, options.deadline, abandoned].into_iter().flatten().map(until);
        times.fold(FALLBACK, Duration::min)
    }

    #[cfg(test)]
    pub(super) fn retry_all_now(&self) {
        let mut refused = self.refused.lock();
        refused.values_mut().for_each(|pod| pod.refusal.until = pod.refusal.at);
    }
}
