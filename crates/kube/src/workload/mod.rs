//! The clusters whose nodes our machines are. Invariant: one connection and one trimmed Node watch per cluster, made
//! from its `<cluster>-kubeconfig` Secret and replaced when that changes; a cluster that does not answer is never taken
//! for one without the node that was asked for.
//!
//! A tenant writes the Secret and runs the cluster: [`kubeconfig`] takes from the first only data, and no answer of the
//! second is repeated in a reason, because reasons go into conditions.

mod kubeconfig;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::{FutureExt, Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::watcher;
use tokio::sync::{broadcast, watch};

use crate::cache::{self, Cache, Change, Object};
use crate::client::{self, Profile};
use crate::context::Context;
use crate::drain::Drainer;
use crate::error::{self, Error};

/// How long the first list of a cluster is waited for before it counts as unreachable.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// A silently dead watch is noticed after this long; kube's own default is five minutes.
const WATCH_SECONDS: u32 = 120;
/// A cluster that just failed to answer is not asked again for this long: its machines share the answer.
const FAILED_PROBE: Duration = Duration::from_secs(5);
/// A listener that lags behind by more than this is told to look at everything again.
const BACKLOG: usize = 1024;
/// At most so many characters of an error of a cluster are logged.
const LOGGED: usize = 300;

/// A cluster, by the namespace and name of its Cluster object; the management cluster itself has neither.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClusterKey {
    pub namespace: String,
    pub name: String,
}

impl ClusterKey {
    /// Whether this is the cluster that Capstan runs in.
    pub(crate) fn is_itself(&self) -> bool {
        self.name.is_empty()
    }

    /// The namespace and name of the Secret with the cluster's kubeconfig.
    fn secret(&self) -> String {
        format!("{}/{}-kubeconfig", self.namespace, self.name)
    }
}

impl std::fmt::Display for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_itself() {
            f.write_str("itself")
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// Something about a cluster's nodes changed.
#[derive(Clone, Debug)]
pub enum NodeEvent {
    /// This node changed, or is gone.
    Node {
        cluster: ClusterKey,
        node: Arc<Node>,
        gone: bool,
    },
    /// The connection was made, lost or replaced: look at all machines of the cluster.
    Cluster(ClusterKey),
    /// The listener was too slow: look at everything.
    Missed,
}

/// A node looked for.
#[derive(Clone, Debug)]
pub enum Lookup {
    Found(Arc<Node>),
    /// The cluster answers, and has no such node.
    Missing,
    /// The cluster does not answer; nothing is known about the node.
    Unreachable(String),
}

/// A live connection to one cluster.
pub struct Connection {
    pub client: kube::Client,
    /// For evictions.
    pub no_retry: kube::Client,
    pub nodes: Cache<Node>,
    pub drainer: Drainer,
    key: ClusterKey,
    index: Arc<Mutex<Index>>,
    failed: Mutex<Option<(Instant, String)>>,
    feeder: tokio::task::AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.feeder.abort();
    }
}

/// Node names by what machines know of them.
#[derive(Default)]
struct Index {
    by_provider_id: HashMap<String, BTreeSet<String>>,
    by_internal_ip: HashMap<String, BTreeSet<String>>,
    keys: HashMap<String, (Option<String>, Vec<String>)>,
}

impl Index {
    fn apply(&mut self, change: &Change<Node>) {
        let name = change.object.name_any();
        if let Some((provider_id, ips)) = self.keys.remove(&name) {
            provider_id
                .iter()
                .for_each(|id| unlink(&mut self.by_provider_id, id, &name));
            ips.iter().for_each(|ip| unlink(&mut self.by_internal_ip, ip, &name));
        }
        if change.gone {
            return;
        }
        let (provider_id, ips) = (provider_id(&change.object), internal_ips(&change.object));
        if let Some(id) = &provider_id {
            self.by_provider_id.entry(id.clone()).or_default().insert(name.clone());
        }
        for ip in &ips {
            self.by_internal_ip.entry(ip.clone()).or_default().insert(name.clone());
        }
        self.keys.insert(name, (provider_id, ips));
    }
}

fn unlink(map: &mut HashMap<String, BTreeSet<String>>, key: &str, name: &str) {
    if let Some(names) = map.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            map.remove(key);
        }
    }
}

/// Provider IDs are compared without case: Azure's own services disagree on it, and UUIDs have none.
fn normal(provider_id: &str) -> String {
    provider_id.to_ascii_lowercase()
}

fn provider_id(node: &Node) -> Option<String> {
    node.spec
        .as_ref()?
        .provider_id
        .as_deref()
        .filter(|id| !id.is_empty())
        .map(normal)
}

fn internal_ips(node: &Node) -> Vec<String> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    addresses
        .filter(|address| address.type_ == "InternalIP")
        .map(|address| address.address.clone())
        .collect()
}

/// Whether the node's kubelet says that it is ready.
pub fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[derive(Clone)]
enum State {
    Starting,
    Down(String),
    Up(Arc<Connection>),
}

/// One cluster, connected or not. Cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    key: ClusterKey,
    state: watch::Receiver<State>,
}

impl Cluster {
    pub fn key(&self) -> &ClusterKey {
        &self.key
    }

    /// The connection; waits for the first one a little.
    pub async fn connection(&self) -> Result<Arc<Connection>, Error> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| !matches!(state, State::Starting));
        let state = match tokio::time::timeout(FIRST_ANSWER, settled).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => State::Down("no longer watched".to_owned()),
            Err(_) => State::Down(format!("Secret {} cannot be read", self.key.secret())),
        };
        match state {
            State::Up(connection) => Ok(connection),
            State::Down(reason) => Err(self.unreachable(reason)),
            State::Starting => Err(self.unreachable("still connecting".to_owned())),
        }
    }

    pub async fn by_provider_id(&self, id: &str) -> Lookup {
        let id = normal(id);
        let indexed = |index: &Index| index.by_provider_id.get(&id).and_then(BTreeSet::first).cloned();
        self.find(indexed, |node| provider_id(node).as_deref() == Some(&id))
            .await
    }

    pub async fn by_internal_ip(&self, ip: &str) -> Lookup {
        let indexed = |index: &Index| index.by_internal_ip.get(ip).and_then(BTreeSet::first).cloned();
        self.find(indexed, |node| internal_ips(node).iter().any(|address| address == ip))
            .await
    }

    pub async fn by_name(&self, name: &str) -> Lookup {
        self.find(|_| Some(name.to_owned()), |node| node.name_any() == name)
            .await
    }

    /// What the cache has is found; what it has not is missing only if the watch is well, or a live list says so.
    async fn find(&self, indexed: impl Fn(&Index) -> Option<String>, matches: impl Fn(&Node) -> bool) -> Lookup {
        let connection = match self.connection().await {
            Ok(connection) => connection,
            Err(error) => return Lookup::Unreachable(error.to_string()),
        };
        connection.first_list().await;
        let name = indexed(&lock(&connection.index));
        let cached = name.and_then(|name| connection.nodes.get(None, &name));
        // The index follows the cache by a moment: a node that is listed already may not be indexed yet.
        let cached = cached.or_else(|| connection.nodes.store().find(|node| matches(node)));
        match cached {
            Some(node) => Lookup::Found(node),
            None if connection.is_current() => Lookup::Missing,
            None => match connection.live(matches).await {
                Ok(Some(node)) => Lookup::Found(Arc::new(node)),
                Ok(None) => Lookup::Missing,
                Err(reason) => Lookup::Unreachable(self.unreachable(reason).to_string()),
            },
        }
    }

    /// Returns the provider ids of all nodes, in lower case, read past the cache.
    pub async fn live_provider_ids(&self) -> Result<BTreeSet<String>, Error> {
        let connection = self.connection().await?;
        let nodes = connection.list().await.map_err(|reason| self.unreachable(reason))?;
        Ok(nodes.iter().filter_map(provider_id).collect())
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable {
            cluster: self.key.to_string(),
            reason,
        }
    }
}

impl Connection {
    /// Wait for the first list, unless the cluster is known not to answer.
    async fn first_list(&self) {
        if self.nodes.trouble().is_none() {
            let _ = tokio::time::timeout(FIRST_ANSWER, self.nodes.ready()).await;
        }
    }

    fn is_current(&self) -> bool {
        let ready = self.nodes.ready().now_or_never().is_some_and(|ready| ready.is_ok());
        ready && self.nodes.trouble().is_none()
    }

    /// Finds a node past the cache.
    async fn live(&self, matches: impl Fn(&Node) -> bool) -> Result<Option<Node>, String> {
        if let Some((at, reason)) = lock(&self.failed).clone()
            && at.elapsed() < FAILED_PROBE
        {
            return Err(reason);
        }
        let mut found = self.list().await?.into_iter().find(matches);
        found.iter_mut().for_each(cache::trim_node);
        Ok(found)
    }

    /// Lists the nodes past the cache.
    async fn list(&self) -> Result<Vec<Node>, String> {
        let nodes: Api<Node> = Api::all(self.no_retry.clone());
        match nodes.list(&ListParams::default()).await {
            Ok(nodes) => Ok(nodes.items),
            Err(error) => {
                tracing::info!(cluster = %self.key, error = %shortened(&error), "the cluster does not list its nodes");
                let reason = self.explain(&error);
                *lock(&self.failed) = Some((Instant::now(), reason.clone()));
                Err(reason)
            }
        }
    }

    fn explain(&self, error: &kube::Error) -> String {
        let reason = error::classified(error);
        match error::code(error) {
            Some(401 | 403) => format!("{reason}: renew the kubeconfig in Secret {}", self.key.secret()),
            _ => reason,
        }
    }
}

/// An answer for the log: it may be long and of many lines.
fn shortened(error: &kube::Error) -> String {
    let text = error.to_string();
    text.chars().filter(|c| !c.is_control()).take(LOGGED).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Entry {
    cluster: Cluster,
    keeper: Option<tokio::task::AbortHandle>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.abort();
        }
    }
}

/// All clusters that this program's machines belong to. Cheap to clone.
#[derive(Clone)]
pub struct Workloads(Arc<Inner>);

struct Inner {
    context: Context,
    clusters: Mutex<HashMap<ClusterKey, Entry>>,
    events: broadcast::Sender<NodeEvent>,
}

impl Workloads {
    pub fn new(context: &Context) -> Self {
        let (events, _) = broadcast::channel(BACKLOG);
        Self(Arc::new(Inner {
            context: context.clone(),
            clusters: Mutex::default(),
            events,
        }))
    }

    /// The cluster that we run in: where OpenShift's machines have their nodes.
    pub fn itself(&self) -> Cluster {
        let key = ClusterKey::default();
        let mut clusters = lock(&self.0.clusters);
        let entry = clusters.entry(key.clone()).or_insert_with(|| {
            let context = &self.0.context;
            let clients = (context.client.clone(), context.no_retry.clone());
            let connection = connection(context, &key, clients, context.nodes(), self.0.events.clone());
            let (_, state) = watch::channel(State::Up(connection));
            Entry {
                cluster: Cluster { key, state },
                keeper: None,
            }
        });
        entry.cluster.clone()
    }

    /// The workload cluster of the Cluster object `namespace`/`name`.
    pub fn cluster(&self, namespace: &str, name: &str) -> Cluster {
        let key = ClusterKey {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let mut clusters = lock(&self.0.clusters);
        let entry = clusters.entry(key.clone()).or_insert_with(|| {
            let (sender, state) = watch::channel(State::Starting);
            let keep = keep(self.0.context.clone(), key.clone(), sender, self.0.events.clone());
            Entry {
                cluster: Cluster { key, state },
                keeper: Some(tokio::spawn(keep).abort_handle()),
            }
        });
        entry.cluster.clone()
    }

    /// From now on lets go of every cluster whose object is gone from `objects`.
    pub fn forget_with<K: Object>(&self, objects: &Cache<K>) {
        let (inner, shutdown) = (Arc::downgrade(&self.0), self.0.context.shutdown.clone());
        let mut changes = Box::pin(objects.subscribe());
        let forgetting = async move {
            while let Some(change) = changes.next().await {
                let Some(inner) = inner.upgrade() else { return };
                if change.gone {
                    let (namespace, name) = (change.object.namespace().unwrap_or_default(), change.object.name_any());
                    lock(&inner.clusters).remove(&ClusterKey { namespace, name });
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = forgetting => {}
                () = shutdown.cancelled() => {}
            }
        });
    }

    /// Every change of a node, and of a connection, from now on.
    pub fn events(&self) -> impl Stream<Item = NodeEvent> + Send + use<> {
        futures::stream::unfold(self.0.events.subscribe(), |mut events| async move {
            match events.recv().await {
                Ok(event) => Some((event, events)),
                Err(broadcast::error::RecvError::Lagged(_)) => Some((NodeEvent::Missed, events)),
                Err(broadcast::error::RecvError::Closed) => None,
            }
        })
    }
}

/// Follow the Secret and keep the connection that it describes.
async fn keep(context: Context, key: ClusterKey, state: watch::Sender<State>, events: broadcast::Sender<NodeEvent>) {
    let name = format!("{}-kubeconfig", key.name);
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &key.namespace);
    let secrets = Cache::start(api, config, cache::trim, context.shutdown.clone());
    let mut changes = Box::pin(secrets.subscribe());
    let missing = || Err(format!("Secret {} does not exist", key.secret()));
    let mut used: Option<Result<String, String>> = None;
    if secrets.ready().await.is_ok() && secrets.get(Some(&key.namespace), &name).is_none() {
        state.send_replace(State::Down(format!("Secret {} does not exist", key.secret())));
        let _ = events.send(NodeEvent::Cluster(key.clone()));
    }
    while let Some(change) = changes.next().await {
        let kubeconfig = match change.gone {
            true => missing(),
            false => kubeconfig::of_secret(&change.object, &key),
        };
        if used.as_ref() == Some(&kubeconfig) {
            continue;
        }
        let connection = match &kubeconfig {
            Ok(text) => connect(&context, &key, text, &events).await,
            Err(reason) => Err(reason.clone()),
        };
        used = Some(kubeconfig);
        state.send_replace(connection.map_or_else(State::Down, State::Up));
        let _ = events.send(NodeEvent::Cluster(key.clone()));
    }
}

/// Connects to the cluster that the kubeconfig describes, or returns why it is refused.
async fn connect(
    context: &Context,
    key: &ClusterKey,
    text: &str,
    events: &broadcast::Sender<NodeEvent>,
) -> Result<Arc<Connection>, String> {
    let refused = |reason: String| format!("the kubeconfig in Secret {} is refused: {reason}", key.secret());
    let config = kubeconfig::config(text).await.map_err(refused)?;
    let client = |profile| {
        let client = client::connect(config.clone(), profile, &context.interceptors, &context.metrics);
        client.map_err(|error| match error {
            Error::Api(error) => refused(error::classified(&error)),
            _ => refused("the client cannot be built".to_owned()),
        })
    };
    let (client, no_retry) = (client(Profile::Retrying)?, client(Profile::Once)?);
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let nodes = Cache::start(
        Api::all(client.clone()),
        config,
        cache::trim_node,
        context.shutdown.clone(),
    );
    Ok(connection(context, key, (client, no_retry), nodes, events.clone()))
}

fn connection(
    context: &Context,
    key: &ClusterKey,
    (client, no_retry): (kube::Client, kube::Client),
    nodes: Cache<Node>,
    events: broadcast::Sender<NodeEvent>,
) -> Arc<Connection> {
    let drainer = Drainer::of_cluster(context, (client.clone(), no_retry.clone()), key.clone());
    let index = Arc::new(Mutex::new(Index::default()));
    let (mut changes, feed, cluster) = (Box::pin(nodes.subscribe()), index.clone(), key.clone());
    let feeder = tokio::spawn(async move {
        while let Some(change) = changes.next().await {
            lock(&feed).apply(&change);
            let Change { object: node, gone } = change;
            let _ = events.send(NodeEvent::Node {
                cluster: cluster.clone(),
                node,
                gone,
            });
        }
    });
    let (failed, feeder) = (Mutex::default(), feeder.abort_handle());
    Arc::new(Connection {
        client,
        no_retry,
        nodes,
        drainer,
        key: key.clone(),
        index,
        failed,
        feeder,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Options;
    use crate::stub;
    use k8s_openapi::api::core::v1::{ConfigMap, NodeAddress, NodeSpec, NodeStatus};
    use serde_json::json;

    fn node(name: &str, provider_id: &str, ip: &str) -> Arc<Node> {
        let mut node = Node::default();
        node.metadata.name = Some(name.into());
        node.spec = Some(NodeSpec {
            provider_id: Some(provider_id.into()),
            ..NodeSpec::default()
        });
        let address = NodeAddress {
            type_: "InternalIP".into(),
            address: ip.into(),
        };
        node.status = Some(NodeStatus {
            addresses: Some(vec![address]),
            ..NodeStatus::default()
        });
        Arc::new(node)
    }

    #[test]
    fn a_node_is_found_by_what_it_has_now_and_not_by_what_it_had() {
        let mut index = Index::default();
        let change = |object, gone| Change { object, gone };
        index.apply(&change(node("a", "azure:///Subscriptions/X", "10.0.0.1"), false));
        assert!(index.by_provider_id.contains_key("azure:///subscriptions/x"));
        index.apply(&change(node("a", "azure:///Subscriptions/X", "10.0.0.2"), false));
        assert!(!index.by_internal_ip.contains_key("10.0.0.1") && index.by_internal_ip.contains_key("10.0.0.2"));
        index.apply(&change(node("a", "", ""), true));
        assert!(index.by_provider_id.is_empty() && index.by_internal_ip.is_empty() && index.keys.is_empty());
    }

    #[tokio::test]
    async fn a_cluster_whose_object_is_gone_is_let_go() {
        // Anything stands for the Cluster objects: one of the two is deleted, and then nothing more happens.
        let (client, _) = stub::client(|request| match request {
            0 => Some((200, stub::config_maps(&["gone", "kept"]))),
            1 => Some((
                200,
                json!({"type": "DELETED", "object": {"kind": "ConfigMap", "apiVersion": "v1",
                    "metadata": {"name": "gone", "namespace": "default", "resourceVersion": "2"}}}),
            )),
            _ => None,
        });
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let context = Context::new(nowhere, Options::default()).unwrap();
        let workloads = Workloads::new(&context);
        for name in ["gone", "kept"] {
            workloads.cluster("default", name);
        }
        let shutdown = context.shutdown.clone();
        let objects = Cache::<ConfigMap>::start(Api::all(client), watcher::Config::default(), cache::trim, shutdown);
        workloads.forget_with(&objects);
        let known = || {
            lock(&workloads.0.clusters)
                .keys()
                .map(|key| key.name.clone())
                .collect::<Vec<_>>()
        };
        let forgotten = async {
            while known() != ["kept"] {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), forgotten).await.unwrap();
        context.shutdown.cancel();
    }
}
