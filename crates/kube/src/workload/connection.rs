//! The connection to one cluster. Invariant: a workload cluster costs bounded memory, however many Nodes it has and
//! whatever it answers; a reason never repeats an answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_core::Memory;
use capstan_core::clock::Clock;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::watcher;
use parking_lot::Mutex;
use tracing::Instrument;

use super::events::{Events, NodeEvent};
use super::{ClusterKey, FIRST_ANSWER, kubeconfig};
use crate::bounds::Bounds;
use crate::cache::{Cache, Most, Overfull, shortened};
use crate::client::{self, Profile};
use crate::context::Context;
use crate::drain::Drainer;
use crate::error::{self, Error};
use crate::nodes::{self, NodeIndex};
use crate::pages;

/// A workload cluster with more Nodes than this is refused. Kubernetes itself is tested with 5,000.
pub const MAX_NODES: usize = 10_000;
/// Text of a workload cluster's Nodes that is kept at most: some 600 bytes each.
pub(crate) const NODES_BYTES: usize = 8 << 20;
/// Nodes in one answer: with their image lists they are large before they are trimmed.
pub(crate) const PAGE: u32 = 50;
/// A silently dead watch is noticed after this long; kube's own default is five minutes.
const WATCH_SECONDS: u32 = 120;
/// A list of all Nodes past the cache takes seconds, or a minute over a slow line; a reconcile waits no longer for all pages.
const LIST_TIME: Duration = Duration::from_secs(180);
/// A cluster that just failed to answer is not asked again for this long: its machines share the answer.
const FAILED_PROBE: Duration = Duration::from_secs(5);

/// A live connection to one cluster.
pub struct Connection {
    pub client: kube::Client,
    /// For evictions.
    pub no_retry: kube::Client,
    pub nodes: Cache<Node>,
    pub drainer: Drainer,
    key: ClusterKey,
    memory: Arc<Memory>,
    clock: Clock,
    index: Arc<Mutex<NodeIndex>>,
    failed: Mutex<Option<(Instant, String)>>,
    feeder: tokio::task::AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.feeder.abort();
    }
}

impl Connection {
    /// Connects to the cluster that the kubeconfig describes, or returns why it is refused.
    pub(super) async fn open(
        context: &Context,
        key: &ClusterKey,
        text: &str,
        events: &Events,
    ) -> Result<Arc<Self>, String> {
        let refused = |reason: String| format!("the kubeconfig in Secret {} is refused: {reason}", key.secret());
        let config = kubeconfig::config(text).await.map_err(refused)?;
        let bounds = Bounds::of(&key.namespace, &key.to_string());
        let client = |profile| {
            let (interceptors, transport) = (&context.interceptors, context.transport.as_ref());
            let config = config.clone();
            let client = client::connect_bounded(config, profile, interceptors, &context.metrics, transport, &bounds);
            client.map_err(|error| match error {
                Error::Api(error) => refused(error::classified(&error)),
                _ => refused("the client cannot be built".to_owned()),
            })
        };
        let clients = (client(Profile::Retrying)?, client(Profile::Once)?);
        Ok(Self::with_clients(context, key, clients, events))
    }

    /// Connects by these clients to a workload cluster.
    pub(super) fn with_clients(
        context: &Context,
        key: &ClusterKey,
        (client, no_retry): (kube::Client, kube::Client),
        events: &Events,
    ) -> Arc<Self> {
        let config = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE);
        let (api, shutdown) = (Api::all(client.clone()), context.shutdown.clone());
        let most = Most {
            objects: MAX_NODES,
            bytes: NODES_BYTES,
            size: nodes::text,
            holder: Some(Arc::new(context.memory.giving_holder(&key.namespace))),
        };
        let nodes = Cache::start_bounded(api, config, nodes::trim_foreign, most, shutdown);
        let drainer = Drainer::of_cluster(context, (client.clone(), no_retry.clone()), key.clone());
        let index = Arc::<Mutex<NodeIndex>>::default();
        let mut changes = Box::pin(nodes.subscribe());
        let (feed, events, cluster) = (index.clone(), events.clone(), key.clone());
        let feeding = async move {
            while let Some(change) = changes.next().await {
                let concerns_machines = feed.lock().apply(&change);
                if concerns_machines {
                    events.send(&NodeEvent::Node {
                        cluster: cluster.clone(),
                        node: change.object,
                        gone: change.gone,
                    });
                }
            }
        };
        let feeder = tokio::spawn(feeding.in_current_span());
        Arc::new(Self {
            client,
            no_retry,
            nodes,
            drainer,
            key: key.clone(),
            memory: context.memory.clone(),
            clock: context.clock,
            index,
            failed: Mutex::default(),
            feeder: feeder.abort_handle(),
        })
    }

    /// Returns the node that the cache shows.
    pub(super) fn cached(
        &self,
        indexed: impl Fn(&NodeIndex) -> Option<String>,
        matches: impl Fn(&Node) -> bool,
    ) -> Option<Arc<Node>> {
        let name = indexed(&self.index.lock());
        let node = name.and_then(|name| self.nodes.get(None, &name));
        // The index follows the cache by a moment: a node may be listed already and not be indexed yet.
        node.or_else(|| self.nodes.store().find(|node| matches(node)))
    }

    /// Waits for the first list, unless the cluster is known not to answer.
    pub(super) async fn first_list(&self) {
        if self.nodes.trouble().is_none() {
            let _ = capstan_core::clock::timeout(FIRST_ANSWER, self.nodes.ready()).await;
        }
    }

    /// Whether the cache shows all nodes.
    pub(super) fn is_current(&self) -> bool {
        let ready = self.nodes.ready().now_or_never().is_some_and(|ready| ready.is_ok());
        ready && self.nodes.trouble().is_none()
    }

    /// Finds a node past the cache.
    pub(super) async fn live(&self, matches: impl Fn(&Node) -> bool) -> Result<Option<Node>, String> {
        if let Some((at, reason)) = self.failed.lock().clone()
            && self.clock.since(at) < FAILED_PROBE
        {
            return Err(reason);
        }
        let mut found = None;
        self.list(|node| {
            if matches(&node) {
                found = Some(node);
            }
            found.is_none()
        })
        .await?;
        Ok(found)
    }

    pub(super) async fn live_provider_ids(&self) -> Result<BTreeSet<String>, String> {
        let (mut ids, mut bytes) = (BTreeSet::new(), 0);
        let (holder, mut memory) = (self.memory.holder(&self.key.namespace), Ok(()));
        self.list(|node| {
            bytes += nodes::text(&node);
            let id = nodes::provider_id(&node).unwrap_or_else(|| node.name_any());
            memory = holder.set(bytes + ids.len() * size_of::<String>());
            ids.insert(id);
            bytes <= NODES_BYTES && memory.is_ok()
        })
        .await?;
        memory.map_err(|full| self.keep(full.to_string()))?;
        if bytes > NODES_BYTES {
            return Err(too_many());
        }
        Ok(ids)
    }

    /// Lists the nodes past the cache, page by page, for as long as `next` returns true.
    async fn list(&self, mut next: impl FnMut(Node) -> bool) -> Result<(), String> {
        match self.nodes.overfull() {
            Some(Overfull::TooMany) => return Err(too_many()),
            Some(Overfull::NoMemory(full)) => return Err(full.to_string()),
            None => {}
        }
        let api: Api<Node> = Api::all(self.no_retry.clone());
        let mut count = 0;
        let listed = pages::list(&api, ListParams::default(), PAGE, |page| {
            count += page.len();
            let mut trimmed = page.into_iter().map(|mut node| {
                nodes::trim_foreign(&mut node);
                node
            });
            count <= MAX_NODES && trimmed.all(&mut next)
        });
        let listed = capstan_core::clock::timeout(LIST_TIME, listed).await;
        let listed = listed.map_err(|_| self.keep("the list of its Nodes does not end in time".to_owned()))?;
        listed.map_err(|error| self.failed(&error))?;
        if count > MAX_NODES {
            return Err(too_many());
        }
        Ok(())
    }

    /// Returns why the cluster did not list its nodes, and keeps it for a moment.
    fn failed(&self, error: &kube::Error) -> String {
        tracing::info!(cluster = %self.key, error = shortened(error), "cannot list the nodes of the cluster");
        let reason = error::classified(error);
        let reason = match error::code(error) {
            Some(401 | 403) => format!("{reason}: renew the kubeconfig in Secret {}", self.key.secret()),
            _ => reason,
        };
        self.keep(reason)
    }

    fn keep(&self, reason: String) -> String {
        *self.failed.lock() = Some((self.clock.instant(), reason.clone()));
        reason
    }
}

fn too_many() -> String {
    let text = NODES_BYTES >> 20;
    format!(
        "it has more than {MAX_NODES} Nodes, or {text} MiB of them, and Capstan manages no machines of such a cluster"
    )
}
