//! The clusters whose nodes our machines are. Invariant: one connection and one trimmed Node watch per cluster, made
//! from its `<cluster>-kubeconfig` Secret and replaced when that changes; a cluster that does not answer is never taken
//! for one without the node that was asked for.
//!
//! A tenant writes the Secret and runs the cluster: [`kubeconfig`] takes only data from the first, [`connection`] bounds
//! the answers of the second, and no answer is repeated in a reason, because reasons go into conditions.

mod connection;
mod events;
mod kubeconfig;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::watcher;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::Instrument;

pub use self::connection::{Connection, MAX_NODES};
use self::events::Events;
pub use self::events::NodeEvent;
use crate::cache::{Cache, Object};
use crate::context::Context;
use crate::error::Error;
pub use crate::nodes::is_ready;
use crate::nodes::{self, NodeIndex};

/// A cluster that has not answered its first list after this long counts as unreachable.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

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

/// The answer to a search for a node.
#[derive(Clone, Debug)]
pub enum Lookup {
    Found(Arc<Node>),
    /// The cluster answers, and has no such node.
    Missing,
    /// The cluster does not answer, for this reason; the node may exist or not.
    Unreachable(String),
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

    /// Returns the connection; waits a little for the first one.
    pub async fn connection(&self) -> Result<Arc<Connection>, Error> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| !matches!(state, State::Starting));
        let state = match capstan_core::clock::timeout(FIRST_ANSWER, settled).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => State::Down("its Cluster object does not exist any more".to_owned()),
            Err(_) => State::Down(format!("Secret {} cannot be read", self.key.secret())),
        };
        match state {
            State::Up(connection) => Ok(connection),
            State::Down(reason) => Err(self.unreachable(reason)),
            State::Starting => Err(self.unreachable("the connection is not made yet".to_owned())),
        }
    }

    pub async fn by_provider_id(&self, id: &str) -> Lookup {
        let normal = id.to_ascii_lowercase();
        let matches = |node: &Node| nodes::provider_id(node).as_deref() == Some(&normal);
        self.find(|index| index.by_provider_id(id), matches).await
    }

    pub async fn by_name(&self, name: &str) -> Lookup {
        let matches = |node: &Node| node.name_any() == name;
        self.find(|_| Some(name.to_owned()), matches).await
    }

    /// A node in the cache is found. One that is not there is missing only if the watch is healthy or a live list shows
    /// no such node.
    async fn find(&self, indexed: impl Fn(&NodeIndex) -> Option<String>, matches: impl Fn(&Node) -> bool) -> Lookup {
        let connection = match self.connection().await {
            Ok(connection) => connection,
            Err(error) => return Lookup::Unreachable(error.to_string()),
        };
        connection.first_list().await;
        match connection.cached(indexed, &matches) {
            Some(node) => Lookup::Found(node),
            None if connection.is_current() => Lookup::Missing,
            None => match connection.live(matches).await {
                Ok(Some(node)) => Lookup::Found(Arc::new(node)),
                Ok(None) => Lookup::Missing,
                Err(reason) => Lookup::Unreachable(self.unreachable(reason).to_string()),
            },
        }
    }

    /// Returns the provider ids of all nodes, in lower case, and the names of those without one, read past the cache.
    pub async fn live_provider_ids(&self) -> Result<BTreeSet<String>, Error> {
        let ids = self.connection().await?.live_provider_ids().await;
        ids.map_err(|reason| self.unreachable(reason))
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable {
            cluster: self.key.to_string(),
            reason,
        }
    }
}

struct Entry {
    cluster: Cluster,
    keeper: tokio::task::AbortHandle,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// All clusters that this program's machines belong to. Cheap to clone.
#[derive(Clone)]
pub struct Workloads(Arc<Inner>);

struct Inner {
    context: Context,
    clusters: Mutex<HashMap<ClusterKey, Entry>>,
    events: Events,
}

impl Workloads {
    pub fn new(context: &Context) -> Self {
        Self(Arc::new(Inner {
            context: context.clone(),
            clusters: Mutex::default(),
            events: Events::default(),
        }))
    }

    /// Returns the workload cluster of the Cluster object `namespace`/`name`.
    pub fn cluster(&self, namespace: &str, name: &str) -> Cluster {
        let key = ClusterKey {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let mut clusters = self.0.clusters.lock();
        let entry = clusters.entry(key.clone()).or_insert_with(|| {
            let (sender, state) = watch::channel(State::Starting);
            // The connection lasts longer than the reconcile that begins it.
            let span = tracing::info_span!(parent: None, "workload", cluster = %key);
            let keep = keep(self.0.context.clone(), key.clone(), sender, self.0.events.clone());
            Entry {
                cluster: Cluster { key, state },
                keeper: tokio::spawn(keep.instrument(span)).abort_handle(),
            }
        });
        entry.cluster.clone()
    }

    /// Returns why a cluster that a controller asked for cannot be connected to: its Secret is missing or refused.
    pub fn refusal(&self, namespace: &str, name: &str) -> Option<String> {
        let key = ClusterKey {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let clusters = self.0.clusters.lock();
        match &*clusters.get(&key)?.cluster.state.borrow() {
            State::Down(reason) => Some(reason.clone()),
            State::Starting | State::Up(_) => None,
        }
    }

    /// Closes the connection of every cluster whose object is removed from `objects`, from now on.
    pub fn forget_with<K: Object>(&self, objects: &Cache<K>) {
        let (inner, shutdown) = (Arc::downgrade(&self.0), self.0.context.shutdown.clone());
        let mut changes = Box::pin(objects.subscribe());
        let forgetting = async move {
            while let Some(change) = changes.next().await {
                let Some(inner) = inner.upgrade() else { return };
                if change.gone
                    && let Some(namespace) = change.object.namespace()
                {
                    let name = change.object.name_any();
                    inner.clusters.lock().remove(&ClusterKey { namespace, name });
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

    /// Returns every change of a node that concerns machines, and of a connection, from now on.
    pub fn events(&self) -> impl Stream<Item = NodeEvent> + Send + use<> {
        self.0.events.listen()
    }
}

/// Follows the Secret and keeps the connection that it describes.
async fn keep(context: Context, key: ClusterKey, state: watch::Sender<State>, events: Events) {
    let name = format!("{}-kubeconfig", key.name);
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &key.namespace);
    let secrets = Cache::start(api, config, kubeconfig::trim, context.shutdown.clone());
    let mut changes = Box::pin(secrets.subscribe());
    let missing = || format!("Secret {} does not exist", key.secret());
    let mut used: Option<Result<String, String>> = None;
    if secrets.ready().await.is_ok() && secrets.get(Some(&key.namespace), &name).is_none() {
        state.send_replace(State::Down(missing()));
        events.send(&NodeEvent::Cluster(key.clone()));
    }
    while let Some(change) = changes.next().await {
        let kubeconfig = match change.gone {
            true => Err(missing()),
            false => kubeconfig::of_secret(&change.object, &key),
        };
        if used.as_ref() == Some(&kubeconfig) {
            continue;
        }
        let connection = match &kubeconfig {
            Ok(text) => Connection::open(&context, &key, text, &events).await,
            Err(reason) => Err(reason.clone()),
        };
        used = Some(kubeconfig);
        state.send_replace(connection.map_or_else(State::Down, State::Up));
        events.send(&NodeEvent::Cluster(key.clone()));
    }
}

#[cfg(test)]
mod tests;
