//! Empties nodes. Invariant: a node is called drained only after a live list, read after it was cordoned, has shown
//! nothing that has to go; an eviction names the pod's UID, so that a new pod of the same name is never hit.
//!
//! A pass never waits: it cordons, evicts what may go now and says who is in the way. While a node is being drained
//! its pods are watched (that node's only), and so are the disruption budgets once one has said no; a change wakes the
//! caller for the next pass.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use capstan_core::drain::{self, Eviction, Fate, InTheWay, Obstacle, Options, Plan, PodName, Refusal};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, PodStatus};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cache::{self, Cache};
use crate::error::{self, Error, code};
use crate::evict::{Answer, evict};
use crate::metrics::{BlockedLabels, Metrics};
use crate::owners::Owners;
use crate::workload::ClusterKey;

/// A refused pod is tried again after this long, twice as long each time; a change of its budget cuts it short.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest pause between two tries of a refused pod.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// Several budgets on a pod take a person to mend.
const SEVERAL_BUDGETS_RETRY: Duration = Duration::from_secs(30);
/// Look again after this long even if the watch tells nothing: a watch may be silently dead.
const FALLBACK: Duration = Duration::from_secs(30);
/// Listing a node's pods takes milliseconds; a cluster that needs longer than this does not answer.
const LIST_TIMEOUT: Duration = Duration::from_secs(15);
/// A pod that was told to go and is still shown as staying after this long is told again.
const CACHE_LAG: Duration = Duration::from_secs(10);
/// A drain that nobody has asked about for this long was given up.
const ABANDONED: Duration = Duration::from_secs(600);
/// So many evictions are under way at once.
const PARALLEL: usize = 8;

/// Calls the controller back for another pass.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Where a node's drain stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is left that has to go; the node may be gone itself.
    Drained,
    /// Pods are in the way. The caller is woken by changes, and should look again after `again` at the latest.
    InProgress {
        in_the_way: Vec<InTheWay>,
        warnings: Vec<String>,
        again: Duration,
    },
    /// The deadline has passed with these pods still there.
    TimedOut { in_the_way: Vec<InTheWay> },
}

/// What is remembered of one pod that would not go.
struct Stubborn {
    pod: PodName,
    refusal: Refusal,
    times: u32,
    why: Obstacle,
}

struct Draining {
    pods: Cache<Pod>,
    stubborn: Mutex<BTreeMap<String, Stubborn>>,
    /// Pods (by UID) that were told to go and that the cache may still show as staying.
    told: Mutex<HashMap<String, Instant>>,
    shown: Mutex<Vec<BlockedLabels>>,
    asked: Mutex<Instant>,
    wake: Mutex<Wake>,
    watcher: Mutex<Option<tokio::task::AbortHandle>>,
    metrics: Metrics,
}

impl Drop for Draining {
    fn drop(&mut self) {
        // However the drain ended, nothing is in its way any more.
        self.metrics.in_the_way(&lock(&self.shown), &[]);
        if let Some(watcher) = lock(&self.watcher).take() {
            watcher.abort();
        }
    }
}

/// Drains the nodes of one cluster. Clones share their state.
#[derive(Clone)]
pub struct Drainer(Arc<Inner>);

struct Inner {
    client: kube::Client,
    no_retry: kube::Client,
    metrics: Metrics,
    shutdown: CancellationToken,
    /// The cluster of the nodes. The answers of a workload cluster are classified and never repeated.
    cluster: ClusterKey,
    nodes: Mutex<HashMap<String, Arc<Draining>>>,
    owners: Owners,
    budgets: Mutex<Option<tokio::task::AbortHandle>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(watcher) = lock(&self.budgets).take() {
            watcher.abort();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Serialize)]
struct Schedulable {
    spec: Unschedulable,
}

#[derive(Debug, Serialize)]
struct Unschedulable {
    unschedulable: Option<bool>,
}

impl Drainer {
    /// Drains nodes of the cluster that Capstan runs in.
    pub fn new(client: kube::Client, no_retry: kube::Client, metrics: Metrics, shutdown: CancellationToken) -> Self {
        Self::build(client, no_retry, metrics, shutdown, ClusterKey::default())
    }

    pub(crate) fn build(
        client: kube::Client,
        no_retry: kube::Client,
        metrics: Metrics,
        shutdown: CancellationToken,
        cluster: ClusterKey,
    ) -> Self {
        let owners = Owners::new(client.clone());
        let (nodes, budgets) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Inner {
            client,
            no_retry,
            metrics,
            shutdown,
            cluster,
            nodes,
            owners,
            budgets,
        }))
    }

    /// One pass over `node`. `wake` is called when another pass is worth while.
    pub async fn pass(&self, node: &Node, options: Options, wake: Wake) -> Result<Outcome, Error> {
        self.once(node, options, wake)
            .await
            .map_err(|error| self.explained(error))
    }

    /// Returns an error that may be shown to users.
    fn explained(&self, error: Error) -> Error {
        let cluster = &self.0.cluster;
        match error {
            Error::Api(error) if !cluster.is_itself() => {
                tracing::info!(%cluster, code = error::code(&error), "the cluster refuses a request of a drain");
                Error::Unreachable {
                    cluster: cluster.to_string(),
                    reason: error::classified(&error),
                }
            }
            error => error,
        }
    }

    async fn once(&self, node: &Node, options: Options, wake: Wake) -> Result<Outcome, Error> {
        let name = node.name_any();
        if !self.cordon(node).await? {
            self.stop(&name);
            return Ok(Outcome::Drained);
        }
        let options = Options {
            unreachable: options.unreachable || is_unreachable(node),
            ..options
        };
        let draining = self.draining(&name, wake).await?;
        let pods = draining.pods.select(None, |_| true);
        let plan = self.plan(&draining, pods.iter().map(Arc::as_ref), &options).await?;
        let plan = if plan.drained {
            self.plan_live(&draining, &name, &options).await?
        } else {
            plan
        };
        if plan.drained {
            self.stop(&name);
            return Ok(Outcome::Drained);
        }
        let warnings = warnings(&plan);
        let in_the_way = self.carry_out(&draining, plan.clone()).await?;
        self.show(&draining, &name, &in_the_way);
        if plan.timed_out {
            self.stop(&name);
            return Ok(Outcome::TimedOut { in_the_way });
        }
        let again = self.again(&draining, &plan, &options);
        Ok(Outcome::InProgress {
            in_the_way,
            warnings,
            again,
        })
    }

    /// Let pods onto the node again.
    pub async fn uncordon(&self, node: &Node) -> Result<(), Error> {
        self.stop(&node.name_any());
        if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
            let done = self.set_unschedulable(node, None).await;
            done.map_err(|error| self.explained(error))?;
        }
        Ok(())
    }

    /// Forget a drain that is over or no longer wanted. To be called by whoever goes on without [`Outcome::Drained`].
    pub fn stop(&self, node: &str) {
        let over = lock(&self.0.nodes).remove(node);
        drop(over);
    }

    /// Whether the node is still there, and cordoned.
    async fn cordon(&self, node: &Node) -> Result<bool, Error> {
        if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
            return Ok(true);
        }
        self.set_unschedulable(node, Some(true)).await
    }

    async fn set_unschedulable(&self, node: &Node, unschedulable: Option<bool>) -> Result<bool, Error> {
        let api: Api<Node> = Api::all(self.0.client.clone());
        let patch = Patch::Merge(Schedulable {
            spec: Unschedulable { unschedulable },
        });
        match api.patch(&node.name_any(), &PatchParams::default(), &patch).await {
            Ok(_) => Ok(true),
            Err(error) if code(&error) == Some(404) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn draining(&self, node: &str, wake: Wake) -> Result<Arc<Draining>, Error> {
        let draining = {
            let mut nodes = lock(&self.0.nodes);
            nodes
                .entry(node.to_owned())
                .or_insert_with(|| self.start(node, wake.clone()))
                .clone()
        };
        *lock(&draining.asked) = Instant::now();
        *lock(&draining.wake) = wake;
        match tokio::time::timeout(LIST_TIMEOUT, draining.pods.ready()).await {
            Ok(ready) => ready?,
            Err(_) => {
                if let Some(error) = draining.pods.trouble() {
                    tracing::info!(node, error, "the pods of the node cannot be listed");
                }
                self.stop(node);
                return Err(Error::Unreachable {
                    cluster: self.0.cluster.to_string(),
                    reason: format!("it does not list the pods on node {node}"),
                });
            }
        }
        Ok(draining)
    }

    fn start(&self, node: &str, wake: Wake) -> Arc<Draining> {
        let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let pods = Cache::start(
            Api::all(self.0.client.clone()),
            config,
            trim_pod,
            self.0.shutdown.clone(),
        );
        let mut changes = Box::pin(pods.subscribe());
        let draining = Arc::new(Draining {
            pods,
            stubborn: Mutex::default(),
            told: Mutex::default(),
            shown: Mutex::default(),
            asked: Mutex::new(Instant::now()),
            wake: Mutex::new(wake),
            watcher: Mutex::default(),
            metrics: self.0.metrics.clone(),
        });
        let (weak, inner, node) = (Arc::downgrade(&draining), Arc::downgrade(&self.0), node.to_owned());
        let watcher = tokio::spawn(async move {
            loop {
                let change = tokio::time::timeout(ABANDONED, changes.next()).await;
                let (Some(draining), Some(inner)) = (weak.upgrade(), inner.upgrade()) else {
                    return;
                };
                if lock(&draining.asked).elapsed() >= ABANDONED {
                    return inner.give_up(&node, &draining);
                }
                match change {
                    Ok(None) => return,
                    Ok(Some(change)) if change.gone => {
                        let wake = lock(&draining.wake).clone();
                        wake();
                    }
                    Ok(Some(_)) | Err(_) => {}
                }
            }
        });
        *lock(&draining.watcher) = Some(watcher.abort_handle());
        draining
    }

    async fn plan<'a>(
        &self,
        draining: &Draining,
        pods: impl Iterator<Item = &'a Pod>,
        options: &Options,
    ) -> Result<Plan, Error> {
        let mut seen = Vec::new();
        for pod in pods {
            seen.push(self.0.owners.describe(pod).await?);
        }
        let now = Timestamp::now();
        let mut told = lock(&draining.told);
        told.retain(|_, at| at.elapsed() < CACHE_LAG);
        for pod in seen.iter_mut().filter(|pod| told.contains_key(&pod.uid)) {
            pod.deleted_by = pod.deleted_by.or(Some(now));
        }
        let mut stubborn = lock(&draining.stubborn);
        // Whoever does not have to go any more (it was labelled to stay, say) is not waited for either.
        let must_go = |pod: &drain::Pod| drain::decide(pod, options, now) == Fate::Evict;
        stubborn.retain(|uid, _| seen.iter().any(|pod| pod.uid == *uid && must_go(pod)));
        let refused = stubborn
            .iter()
            .map(|(uid, stubborn)| (uid.clone(), stubborn.refusal))
            .collect();
        Ok(drain::plan(&seen, &refused, options, now))
    }

    async fn plan_live(&self, draining: &Draining, node: &str, options: &Options) -> Result<Plan, Error> {
        let api: Api<Pod> = Api::all(self.0.client.clone());
        let pods = api
            .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
            .await?;
        self.plan(draining, pods.items.iter(), options).await
    }

    /// Ask for the planned evictions; the answer is everything that is in the way now.
    async fn carry_out(&self, draining: &Draining, plan: Plan) -> Result<Vec<InTheWay>, Error> {
        let name = |pod: &PodName, why: Obstacle| InTheWay { pod: pod.clone(), why };
        let mut in_the_way: Vec<InTheWay> = plan.leaving.iter().map(|pod| name(pod, Obstacle::Leaving)).collect();
        in_the_way.extend(plan.later.iter().map(|pod| name(pod, Obstacle::Queued)));
        {
            let stubborn = lock(&draining.stubborn);
            let held = plan.held.iter().filter_map(|uid| stubborn.get(uid));
            in_the_way.extend(held.map(|held| name(&held.pod, held.why.clone())));
        }
        let answers = futures::stream::iter(plan.evict)
            .map(|eviction| async {
                let answer = evict(&self.0.no_retry, &eviction).await;
                (eviction, answer)
            })
            .buffer_unordered(PARALLEL)
            .collect::<Vec<_>>()
            .await;
        let mut failed = None;
        for (eviction, answer) in answers {
            match answer {
                Ok(answer) => in_the_way.extend(self.note(draining, &eviction, answer)),
                Err(error) => failed = Some(error),
            }
        }
        in_the_way.sort_by(|a, b| a.pod.cmp(&b.pod));
        failed.map_or(Ok(in_the_way), Err)
    }

    /// Remember what became of one eviction.
    fn note(&self, draining: &Draining, eviction: &Eviction, answer: Answer) -> Option<InTheWay> {
        self.0.metrics.evicted(answer.label());
        let pod = PodName {
            namespace: eviction.namespace.clone(),
            name: eviction.name.clone(),
        };
        if matches!(answer, Answer::Gone | Answer::Going) {
            lock(&draining.told).insert(eviction.uid.clone(), Instant::now());
        }
        let (why, pause) = match answer {
            Answer::Gone => return None,
            Answer::Going => {
                return Some(InTheWay {
                    pod,
                    why: Obstacle::Leaving,
                });
            }
            Answer::Blocked { budget, after } => {
                self.watch_budgets();
                (Obstacle::Budget(budget), after)
            }
            Answer::SeveralBudgets => (Obstacle::SeveralBudgets, Some(SEVERAL_BUDGETS_RETRY)),
            Answer::NamespaceEnding => (Obstacle::NamespaceEnding, Some(LONGEST_RETRY)),
            Answer::Refused { code, reason, after } => {
                let reason = match self.0.cluster.is_itself() {
                    true => reason,
                    false => format!("the API server answers {code}"),
                };
                (Obstacle::Refused(reason), after)
            }
        };
        let now = Timestamp::now();
        let mut stubborn = lock(&draining.stubborn);
        let times = stubborn.get(&eviction.uid).map_or(0, |stubborn| stubborn.times);
        let pause = pause.unwrap_or_else(|| (FIRST_RETRY * 2u32.pow(times.min(10))).min(LONGEST_RETRY));
        let refusal = Refusal {
            at: now,
            until: now + pause,
        };
        let entry = Stubborn {
            pod: pod.clone(),
            refusal,
            times: times + 1,
            why: why.clone(),
        };
        stubborn.insert(eviction.uid.clone(), entry);
        Some(InTheWay { pod, why })
    }

    /// From the first refusal on, budgets are watched: one that allows a disruption again wakes those it refused.
    fn watch_budgets(&self) {
        let mut watcher = lock(&self.0.budgets);
        if watcher.is_some() {
            return;
        }
        let api = Api::<PodDisruptionBudget>::all(self.0.client.clone());
        let budgets = Cache::start(api, watcher::Config::default(), trim_budget, self.0.shutdown.clone());
        let inner = Arc::downgrade(&self.0);
        let task = tokio::spawn(async move {
            let mut changes = Box::pin(budgets.subscribe());
            while let Some(change) = changes.next().await {
                let Some(inner) = inner.upgrade() else { return };
                let allowed = change
                    .object
                    .status
                    .as_ref()
                    .and_then(|status| status.disruptions_allowed)
                    .unwrap_or_default();
                if change.gone || allowed > 0 {
                    let namespace = change.object.namespace().unwrap_or_default();
                    inner.opened(&format!("{namespace}/{}", change.object.name_any()));
                }
            }
        });
        *watcher = Some(task.abort_handle());
    }

    fn show(&self, draining: &Draining, node: &str, in_the_way: &[InTheWay]) {
        let labels = |entry: &InTheWay| {
            let reason = match entry.why {
                Obstacle::Leaving | Obstacle::Queued => return None,
                Obstacle::Budget(_) => "Budget",
                Obstacle::SeveralBudgets => "SeveralBudgets",
                Obstacle::NamespaceEnding => "NamespaceTerminating",
                Obstacle::Refused(_) => "Refused",
            };
            let (namespace, pod) = (entry.pod.namespace.clone(), entry.pod.name.clone());
            Some(BlockedLabels {
                node: node.to_owned(),
                namespace,
                pod,
                reason,
            })
        };
        let now: Vec<BlockedLabels> = in_the_way.iter().filter_map(labels).collect();
        let mut shown = lock(&draining.shown);
        self.0.metrics.in_the_way(&shown, &now);
        *shown = now;
    }

    /// When to look again if nothing wakes us.
    fn again(&self, draining: &Draining, plan: &Plan, options: &Options) -> Duration {
        if !plan.later.is_empty() {
            return Duration::ZERO;
        }
        let now = Timestamp::now();
        let next_try = lock(&draining.stubborn)
            .values()
            .map(|stubborn| stubborn.refusal.until)
            .min();
        let until = |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
        let times = [next_try, options.deadline].into_iter().flatten().map(until);
        times.fold(FALLBACK, Duration::min)
    }
}

impl Inner {
    /// Forget this drain, but not one that was begun since.
    fn give_up(&self, node: &str, abandoned: &Arc<Draining>) {
        let mut nodes = lock(&self.nodes);
        if nodes.get(node).is_some_and(|draining| Arc::ptr_eq(draining, abandoned)) {
            nodes.remove(node);
        }
    }

    fn opened(&self, budget: &str) {
        let nodes: Vec<Arc<Draining>> = lock(&self.nodes).values().cloned().collect();
        for draining in nodes {
            let mut stubborn = lock(&draining.stubborn);
            let held = stubborn
                .values_mut()
                .filter(|held| held.why == Obstacle::Budget(budget.to_owned()));
            let opened = held.map(|held| held.refusal.until = held.refusal.at).count();
            drop(stubborn);
            if opened > 0 {
                let wake = lock(&draining.wake).clone();
                wake();
            }
        }
    }
}

fn warnings(plan: &Plan) -> Vec<String> {
    let texts = |eviction: &Eviction| {
        let pod = format!("{}/{}", eviction.namespace, eviction.name);
        eviction
            .warnings
            .iter()
            .map(move |warning| format!("pod {pod} {warning}"))
            .collect::<Vec<_>>()
    };
    plan.evict.iter().flat_map(texts).collect()
}

/// Nobody has heard of the node's kubelet for a while.
pub fn is_unreachable(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "Unknown")
}

/// Keep what [`Owners::describe`] reads.
fn trim_pod(pod: &mut Pod) {
    cache::trim(pod);
    if let Some(spec) = pod.spec.take() {
        pod.spec = Some(PodSpec {
            node_name: spec.node_name,
            volumes: spec.volumes,
            ..PodSpec::default()
        });
    }
    pod.status = pod.status.take().map(|status| PodStatus {
        phase: status.phase,
        ..PodStatus::default()
    });
}

fn trim_budget(budget: &mut PodDisruptionBudget) {
    cache::trim(budget);
    budget.meta_mut().annotations = None;
    budget.spec = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing listens there: these are about what is remembered between two passes.
    fn drainer() -> Drainer {
        let client = kube::Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        Drainer::new(client.clone(), client, Metrics::default(), CancellationToken::new())
    }

    fn named(name: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.uid = Some(format!("uid-{name}"));
        pod
    }

    fn blocked() -> Answer {
        Answer::Blocked {
            budget: "ns/web".to_owned(),
            after: None,
        }
    }

    #[tokio::test]
    async fn a_pod_that_was_told_to_go_is_not_told_again_while_the_cache_lags() {
        let drainer = drainer();
        let draining = drainer.start("node", Arc::new(|| ()));
        let pods = ["blocked", "going", "gone"].map(named);
        let options = Options::default();
        let first = drainer.plan(&draining, pods.iter(), &options).await.unwrap();
        assert_eq!(first.evict.len(), 3);
        let answers = [blocked(), Answer::Going, Answer::Gone];
        for (eviction, answer) in first.evict.iter().zip(answers) {
            drainer.note(&draining, eviction, answer);
        }
        let second = drainer.plan(&draining, pods.iter(), &options).await.unwrap();
        assert_eq!(second.evict, []);
        assert_eq!(second.held, ["uid-blocked"]);
        assert_eq!(second.leaving.len(), 2);
        assert!(!second.drained);
    }

    #[tokio::test]
    async fn a_refused_pod_that_may_stay_after_all_calls_for_no_further_look() {
        let drainer = drainer();
        let draining = drainer.start("node", Arc::new(|| ()));
        let options = Options::default();
        let mut pods = ["refused", "going"].map(named);
        let first = drainer.plan(&draining, pods.iter(), &options).await.unwrap();
        for (eviction, answer) in first.evict.iter().zip([Answer::Going, blocked()]) {
            drainer.note(&draining, eviction, answer);
        }
        for refused in lock(&draining.stubborn).values_mut() {
            refused.refusal.until = refused.refusal.at;
        }
        let skip = ("cluster.x-k8s.io/drain".to_owned(), "skip".to_owned());
        pods[0].labels_mut().extend([skip]);
        let second = drainer.plan(&draining, pods.iter(), &options).await.unwrap();
        assert_eq!((second.evict.len(), second.leaving.len()), (0, 1));
        assert_eq!(drainer.again(&draining, &second, &options), FALLBACK);
    }

    #[tokio::test]
    async fn a_drain_that_is_given_up_shows_nothing_in_the_way_and_watches_no_pods() {
        let drainer = drainer();
        let draining = drainer.start("node", Arc::new(|| ()));
        lock(&drainer.0.nodes).insert("node".to_owned(), draining.clone());
        let (pod, why) = (
            PodName {
                namespace: "ns".to_owned(),
                name: "a".to_owned(),
            },
            Obstacle::SeveralBudgets,
        );
        drainer.show(&draining, "node", &[InTheWay { pod, why }]);
        let shown = || drainer.0.metrics.encode().contains("capstan_drain_pod_in_the_way{");
        assert!(shown());
        let watching = Arc::downgrade(&draining);
        drop(draining);
        drainer.stop("node");
        assert!(!shown() && watching.upgrade().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_that_nobody_asks_about_any_more_ends_by_itself() {
        let drainer = drainer();
        let draining = drainer.start("node", Arc::new(|| ()));
        let watching = Arc::downgrade(&draining);
        lock(&drainer.0.nodes).insert("node".to_owned(), draining);
        tokio::time::sleep(ABANDONED / 2).await;
        if let Some(draining) = watching.upgrade() {
            *lock(&draining.asked) = Instant::now();
        }
        tokio::time::sleep(ABANDONED - FALLBACK).await;
        assert!(watching.upgrade().is_some(), "it was asked about");
        tokio::time::sleep(ABANDONED).await;
        assert!(watching.upgrade().is_none() && lock(&drainer.0.nodes).is_empty());
    }
}
