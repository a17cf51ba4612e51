//! Drains nodes. Invariant: a node counts as drained only after a live list, read after the node was cordoned, shows no
//! pod that has to go; an eviction names the pod's UID, so that a new pod of the same name is never evicted.
//!
//! [`Drainer::drain`] does one step and never waits: it cordons, evicts the pods that may go now and returns the obstacles.
//! While a node is being drained, its own pods are watched, and the disruption budgets from the first refusal on; a change
//! wakes the caller for the next step. The end is [`Outcome::Drained`] with the proof that deleting or reimaging the
//! machine takes by value; `capstan_core::drain` describes who makes such a proof and when no drain is needed.

mod evict;
mod node;
mod owners;
mod pod;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_core::Memory;
use capstan_core::clock::Clock;
use capstan_core::drain::{self, Assessment, Drained, NodeState, Obstacle, Options, Plan, Request, Source};
use capstan_core::memory::Holder;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use parking_lot::Mutex;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use self::evict::evict;
use self::node::NodeDrain;
use self::owners::Owners;
use self::pod::Pod;
use crate::cache::{self, Cache, Most};
use crate::context::Context;
use crate::error::{self, Error, code};
use crate::metrics::Metrics;
use crate::nodes::is_unreachable;
use crate::pages;
use crate::workload::ClusterKey;

/// Listing a node's pods takes milliseconds; a cluster that needs longer than this does not answer.
const LIST_TIMEOUT: Duration = Duration::from_secs(15);
/// A pod may cost a request about its DaemonSet; a cluster that needs longer than this for all of a node keeps others waiting.
const OWNERS_TIMEOUT: Duration = Duration::from_secs(60);
/// A drain that no caller asked about for this long has been abandoned.
const ABANDONED: Duration = Duration::from_secs(600);
/// Pods or disruption budgets in one answer: many nodes have no more pods.
const PAGE: u32 = 50;
/// A node with more pods than this is not drained; kubelets run at most a few hundred.
const MAX_PODS: usize = 2_000;
/// Text of the pods of one node that is kept at most: some 300 bytes each.
const PODS_BYTES: usize = 2 << 20;
/// Disruption budgets that are watched at most. Pods under any other are tried again after a while.
const MAX_BUDGETS: usize = 10_000;
/// Text of the disruption budgets that is kept at most: some 200 bytes each.
const BUDGETS_BYTES: usize = 4 << 20;
/// So many evictions are sent at once.
const PARALLEL: usize = 8;

/// Asks the controller for another reconcile.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// The state of a machine's drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// These pods are still there. The caller is woken by changes, and asks again after `again` at the latest.
    Draining {
        obstacles: Vec<Obstacle>,
        warnings: Vec<String>,
        again: Duration,
    },
    /// The node is empty or gone, or the deadline has passed.
    Drained(Drained),
}

/// Drains the nodes of one cluster. Clones share their state.
#[derive(Clone)]
pub struct Drainer(Arc<Inner>);

struct Inner {
    client: kube::Client,
    no_retry: kube::Client,
    clock: Clock,
    metrics: Metrics,
    shutdown: CancellationToken,
    memory: Arc<Memory>,
    /// The cluster of the nodes. The answers of a workload cluster are classified and never repeated.
    cluster: ClusterKey,
    nodes: Mutex<HashMap<String, Arc<NodeDrain>>>,
    owners: Owners,
    budgets: Mutex<Option<tokio::task::AbortHandle>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(watcher) = self.budgets.get_mut().take() {
            watcher.abort();
        }
    }
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
    pub fn new(context: &Context) -> Self {
        let clients = (context.client.clone(), context.no_retry.clone());
        Self::of_cluster(context, clients, ClusterKey::default())
    }

    /// Drains nodes of `cluster`, which these clients reach.
    pub(crate) fn of_cluster(
        context: &Context,
        (client, no_retry): (kube::Client, kube::Client),
        cluster: ClusterKey,
    ) -> Self {
        Self(Arc::new(Inner {
            owners: Owners::new(client.clone(), context.clock),
            client,
            no_retry,
            clock: context.clock,
            metrics: context.metrics.clone(),
            shutdown: context.shutdown.clone(),
            memory: context.memory.clone(),
            cluster,
            nodes: Mutex::default(),
            budgets: Mutex::default(),
        }))
    }

    /// Does one step of the drain of `machine`, whose node is `node`. `wake` is called when another step is worth while.
    pub async fn drain(&self, machine: &str, node: &Node, options: Options, wake: Wake) -> Result<Outcome, Error> {
        match self.step(machine, node, options, wake).await {
            Ok(outcome) => Ok(outcome),
            Err(error) => {
                // A cluster that does not answer holds a machine until the deadline only.
                let now = self.0.clock.now();
                let late = Drained::timed_out(machine, options.deadline, now, Vec::new());
                late.iter().for_each(|_| self.stop(&node.name_any()));
                late.map(Outcome::Drained).ok_or_else(|| self.explained(error))
            }
        }
    }

    async fn step(&self, machine: &str, node: &Node, options: Options, wake: Wake) -> Result<Outcome, Error> {
        let name = node.name_any();
        if !self.cordon(node).await? {
            self.stop(&name);
            return self.without_node(machine);
        }
        let options = Options {
            unreachable: options.unreachable || is_unreachable(node),
            ..options
        };
        let draining = self.node_drain(&name, wake).await?;
        let pods = draining.pods.select(None, |_| true);
        let cached = pods.iter().map(Arc::as_ref);
        let mut plan = self.plan(&draining, cached, Source::Cache, &options).await?;
        if plan.is_empty() {
            plan = self.plan_live(&draining, &name, &options).await?;
        }
        let warnings = warnings(&plan);
        let obstacles = self.evict(&draining, &plan).await?;
        draining.report(&name, &obstacles);
        if let Some(drained) = plan.finished(machine, &obstacles) {
            self.stop(&name);
            return Ok(Outcome::Drained(drained));
        }
        let again = draining.again(&plan, &options, self.0.clock.now());
        Ok(Outcome::Draining {
            obstacles,
            warnings,
            again,
        })
    }

    fn without_node(&self, machine: &str) -> Result<Outcome, Error> {
        match drain::assess(&Request::new(machine, NodeState::Missing), self.0.clock.now()) {
            Assessment::Drained(drained) => Ok(Outcome::Drained(drained)),
            Assessment::Wait(reason) => Err(self.unreachable(reason)),
            Assessment::Drain => Err(self.unreachable("its node does not exist any more".to_owned())),
        }
    }

    /// Makes the node schedulable again.
    pub async fn uncordon(&self, node: &Node) -> Result<(), Error> {
        self.stop(&node.name_any());
        if node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
            let done = self.set_unschedulable(node, None).await;
            done.map_err(|error| self.explained(error))?;
        }
        Ok(())
    }

    /// Forgets a drain that is over or no longer needed. A caller that goes on without [`Outcome::Drained`] calls it.
    pub fn stop(&self, node: &str) {
        let over = self.0.nodes.lock().remove(node);
        drop(over);
    }

    /// Returns an error that may be shown to users.
    fn explained(&self, error: Error) -> Error {
        match error {
            Error::Api(error) if !self.0.cluster.is_itself() => {
                let (cluster, code) = (&self.0.cluster, error::code(&error));
                tracing::info!(%cluster, code, "the cluster rejects a request of a drain");
                self.unreachable(error::classified(&error))
            }
            error => error,
        }
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable {
            cluster: self.0.cluster.to_string(),
            reason,
        }
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

    /// Returns the state of the node's drain, once its pods are listed.
    async fn node_drain(&self, node: &str, wake: Wake) -> Result<Arc<NodeDrain>, Error> {
        let draining = {
            let mut nodes = self.0.nodes.lock();
            let start = || self.start(node, wake.clone());
            nodes.entry(node.to_owned()).or_insert_with(start).clone()
        };
        draining.asked_now(wake);
        match capstan_core::clock::timeout(LIST_TIMEOUT, draining.pods.ready()).await {
            Ok(ready) => ready?,
            Err(_) => {
                let (cluster, error) = (&self.0.cluster, draining.pods.trouble());
                tracing::info!(%cluster, node, error, "cannot list the pods of the node for its drain");
                self.stop(node);
                return Err(self.unreachable(format!("it does not list the pods on node {node}")));
            }
        }
        Ok(draining)
    }

    fn start(&self, node: &str, wake: Wake) -> Arc<NodeDrain> {
        let config = watcher::Config::default()
            .fields(&format!("spec.nodeName={node}"))
            .page_size(PAGE);
        let (api, shutdown) = (Api::all(self.0.client.clone()), self.0.shutdown.clone());
        let most = Most {
            objects: MAX_PODS,
            bytes: PODS_BYTES,
            size: Pod::bytes,
            holder: self.0.holder(),
        };
        let pods = Cache::start_bounded(api, config, Pod::trim, most, shutdown);
        let mut changes = Box::pin(pods.subscribe());
        let draining = Arc::new(NodeDrain::new(pods, wake, self.0.clock, self.0.metrics.clone()));
        let (weak, inner, node) = (Arc::downgrade(&draining), Arc::downgrade(&self.0), node.to_owned());
        let watching = async move {
            loop {
                let change = capstan_core::clock::timeout(ABANDONED, changes.next()).await;
                let (Some(draining), Some(inner)) = (weak.upgrade(), inner.upgrade()) else {
                    return;
                };
                if draining.idle_for() >= ABANDONED {
                    return inner.abandon(&node, &draining);
                }
                match change {
                    Ok(None) => return,
                    Ok(Some(change)) if change.gone => draining.wake(),
                    Ok(Some(_)) | Err(_) => {}
                }
            }
        };
        let watcher = tokio::spawn(watching.in_current_span());
        draining.watched_by(watcher.abort_handle());
        draining
    }

    async fn plan<'a>(
        &self,
        draining: &NodeDrain,
        pods: impl Iterator<Item = &'a Pod>,
        source: Source,
        options: &Options,
    ) -> Result<Plan, Error> {
        let describe = async {
            let mut facts = Vec::new();
            for pod in pods {
                facts.push(self.0.owners.describe(pod).await?);
            }
            Ok::<_, Error>(facts)
        };
        let Ok(facts) = capstan_core::clock::timeout(OWNERS_TIMEOUT, describe).await else {
            return Err(self.unreachable("it does not answer about the DaemonSets of pods in time".to_owned()));
        };
        Ok(draining.plan(facts?, source, options))
    }

    async fn plan_live(&self, draining: &NodeDrain, node: &str, options: &Options) -> Result<Plan, Error> {
        let api: Api<Pod> = Api::all(self.0.client.clone());
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let (mut pods, mut bytes) = (Vec::new(), 0);
        let (holder, mut memory) = (self.0.memory.holder(&self.0.cluster.namespace), Ok(()));
        pages::list(&api, on_node, PAGE, |page| {
            for mut pod in page {
                pod.trim();
                bytes += pod.bytes();
                pods.push(pod);
            }
            let needed = bytes + pods.len() * size_of::<Pod>();
            memory = if self.0.cluster.is_itself() {
                Ok(())
            } else {
                holder.set(needed)
            };
            pods.len() <= MAX_PODS && bytes <= PODS_BYTES && memory.is_ok()
        })
        .await?;
        memory.map_err(|full| self.unreachable(full.to_string()))?;
        if pods.len() > MAX_PODS || bytes > PODS_BYTES {
            return Err(self.unreachable(format!("node {node} has more than {MAX_PODS} pods")));
        }
        self.plan(draining, pods.iter(), Source::Live, options).await
    }

    /// Sends the planned evictions and returns all obstacles.
    async fn evict(&self, draining: &NodeDrain, plan: &Plan) -> Result<Vec<Obstacle>, Error> {
        let mut obstacles = draining.obstacles(plan);
        let answers = futures::stream::iter(plan.evict.clone())
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
                Ok(answer) => {
                    let answer = match self.0.cluster.is_itself() {
                        true => answer,
                        false => answer.without_words(),
                    };
                    self.0.metrics.evicted(answer.label());
                    if answer.is_blocked() {
                        self.watch_budgets();
                    }
                    obstacles.extend(draining.record(&eviction, answer));
                }
                Err(error) => failed = Some(error),
            }
        }
        obstacles.sort_by(|a, b| a.pod.cmp(&b.pod));
        failed.map_or(Ok(obstacles), Err)
    }

    /// Watches the disruption budgets from the first refusal on: one that allows a disruption again wakes its drains.
    fn watch_budgets(&self) {
        let mut watcher = self.0.budgets.lock();
        if watcher.is_some() {
            return;
        }
        let api = Api::<PodDisruptionBudget>::all(self.0.client.clone());
        let (config, shutdown) = (watcher::Config::default(), self.0.shutdown.clone());
        // This lasts longer than the reconcile that begins it.
        let span = tracing::info_span!(parent: None, "disruption budgets", cluster = %self.0.cluster);
        let most = Most {
            objects: MAX_BUDGETS,
            bytes: BUDGETS_BYTES,
            size: |budget: &PodDisruptionBudget| cache::name_bytes(budget.meta()),
            holder: self.0.holder(),
        };
        let budgets = span.in_scope(|| Cache::start_bounded(api, config, trim_budget, most, shutdown));
        let inner = Arc::downgrade(&self.0);
        let watching = async move {
            let mut changes = Box::pin(budgets.subscribe());
            while let Some(change) = changes.next().await {
                let Some(inner) = inner.upgrade() else { return };
                let allowed = change
                    .object
                    .status
                    .as_ref()
                    .and_then(|status| status.disruptions_allowed);
                if let Some(namespace) = change.object.namespace()
                    && (change.gone || allowed.is_some_and(|allowed| allowed > 0))
                {
                    inner.budget_allows(&format!("{namespace}/{}", change.object.name_any()));
                }
            }
        };
        *watcher = Some(tokio::spawn(watching.instrument(span)).abort_handle());
    }
}

impl Inner {
    /// Returns what takes memory for objects of the cluster, unless that is the one that Capstan runs in.
    fn holder(&self) -> Option<Arc<Holder>> {
        let is_foreign = !self.cluster.is_itself();
        is_foreign.then(|| Arc::new(self.memory.giving_holder(&self.cluster.namespace)))
    }

    /// Forgets this drain, but not one that was started since.
    fn abandon(&self, node: &str, abandoned: &Arc<NodeDrain>) {
        let mut nodes = self.nodes.lock();
        if nodes.get(node).is_some_and(|draining| Arc::ptr_eq(draining, abandoned)) {
            nodes.remove(node);
        }
    }

    fn budget_allows(&self, budget: &str) {
        let nodes: Vec<Arc<NodeDrain>> = self.nodes.lock().values().cloned().collect();
        for draining in nodes.iter().filter(|draining| draining.retry_now(budget)) {
            draining.wake();
        }
    }
}

fn warnings(plan: &Plan) -> Vec<String> {
    let texts = |eviction: &drain::Eviction| {
        let pod = format!("{}/{}", eviction.namespace, eviction.name);
        eviction
            .warnings
            .iter()
            .map(move |warning| format!("pod {pod} {warning}"))
            .collect::<Vec<_>>()
    };
    plan.evict.iter().flat_map(texts).collect()
}

fn trim_budget(budget: &mut PodDisruptionBudget) {
    cache::trim(budget);
    (budget.meta_mut().annotations, budget.meta_mut().labels) = (None, None);
    budget.spec = None;
    budget.status = budget.status.take().map(|status| PodDisruptionBudgetStatus {
        disruptions_allowed: status.disruptions_allowed,
        ..PodDisruptionBudgetStatus::default()
    });
}

#[cfg(test)]
mod tests;
