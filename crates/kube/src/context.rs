//! What every controller gets. Invariant: cheap to clone; all clones share clients, caches, metrics and the shutdown
//! token.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::capi::{GROUP, WATCH_FILTER_LABEL};
use capstan_core::interceptor::{Interceptor, Interceptors};
use capstan_core::{Clock, Memory};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher;
use kube::{Api, Resource};
use tokio_util::sync::CancellationToken;

use crate::cache::{self, Cache, Caches, Object};
use crate::client::{self, Profile, Transport};
use crate::error::Error;
use crate::events::Recorder;
use crate::lease::Identity;
use crate::metrics::Metrics;
use crate::runtime::Preview;

/// A cloud sends no event when others change it: every controller observes its objects again this often.
const RESYNC: Duration = Duration::from_secs(10 * 60);

/// How to reach a cluster and what to do on the way.
#[derive(Clone, Debug)]
pub struct Options {
    pub interceptors: Interceptors,
    /// How requests reach the API server, if not over the network.
    pub transport: Option<Transport>,
    /// Work in this namespace only; all of them when `None`.
    pub namespace: Option<String>,
    /// Reconcile only those objects of Cluster API whose label `cluster.x-k8s.io/watch-filter` has this value; all when `None`.
    pub watch_filter: Option<String>,
    pub metrics: Metrics,
    pub shutdown: CancellationToken,
    pub clock: Clock,
    /// Who holds the leases of controllers that Capstan replaces.
    pub holder: Identity,
    /// How often every controller observes its objects again although nothing has changed.
    pub resync: Duration,
    /// Controllers plan into it and carry nothing out: every write of every client is refused.
    pub preview: Option<Preview>,
    /// For what workload clusters and vCenters make this process keep.
    pub memory: Arc<Memory>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            interceptors: Interceptors::default(),
            transport: None,
            namespace: None,
            watch_filter: None,
            metrics: Metrics::default(),
            shutdown: CancellationToken::default(),
            clock: Clock::system(),
            holder: Identity::of_single_installation(),
            resync: RESYNC,
            preview: None,
            memory: Arc::default(),
        }
    }
}

#[derive(Clone)]
pub struct Context {
    pub client: kube::Client,
    /// For evictions and leases: a refusal is handed back at once.
    pub no_retry: kube::Client,
    pub namespace: Option<String>,
    watch_filter: Option<String>,
    pub interceptors: Interceptors,
    pub transport: Option<Transport>,
    pub metrics: Metrics,
    pub shutdown: CancellationToken,
    pub clock: Clock,
    pub holder: Identity,
    pub resync: Duration,
    pub preview: Option<Preview>,
    pub memory: Arc<Memory>,
    config: kube::Config,
    recorder: Recorder,
    caches: Arc<Caches>,
}

impl Context {
    /// Needs a running tokio runtime.
    pub fn new(config: kube::Config, options: Options) -> Result<Self, Error> {
        let Options {
            interceptors,
            transport,
            namespace,
            watch_filter,
            metrics,
            shutdown,
            clock,
            holder,
            resync,
            preview,
            memory,
        } = options;
        let interceptors = match &preview {
            Some(preview) => interceptors.and(vec![preview.read_only()]),
            None => interceptors,
        };
        let client = client::connect(
            config.clone(),
            Profile::Retrying,
            &interceptors,
            &metrics,
            transport.as_ref(),
        )?;
        let no_retry = client::connect(
            config.clone(),
            Profile::Once,
            &interceptors,
            &metrics,
            transport.as_ref(),
        )?;
        let recorder = Recorder::new(client.clone(), "capstan", clock);
        Ok(Self {
            client,
            no_retry,
            namespace,
            watch_filter,
            interceptors,
            transport,
            metrics,
            shutdown,
            clock,
            holder,
            resync,
            preview,
            memory,
            config,
            recorder,
            caches: Arc::default(),
        })
    }

    /// Returns a context with clients, caches and metrics of its own: its requests pass these interceptors too, it works in
    /// `namespace`, and `shutdown` ends it.
    pub fn narrowed(
        &self,
        interceptors: Vec<Arc<dyn Interceptor>>,
        namespace: Option<String>,
        shutdown: CancellationToken,
    ) -> Result<Self, Error> {
        let options = Options {
            interceptors: self.interceptors.and(interceptors),
            transport: self.transport.clone(),
            namespace,
            watch_filter: self.watch_filter.clone(),
            metrics: self.metrics.section(),
            shutdown,
            clock: self.clock,
            holder: self.holder.clone(),
            resync: self.resync,
            preview: self.preview.clone(),
            memory: self.memory.clone(),
        };
        Self::new(self.config.clone(), options)
    }

    /// Returns a client whose requests pass no fence and are not retried: for leases.
    pub fn unfenced(&self) -> Result<kube::Client, Error> {
        let interceptors = self.preview.iter().map(Preview::read_only).collect();
        client::connect(
            self.config.clone(),
            Profile::Once,
            &Interceptors::new(interceptors),
            &self.metrics,
            self.transport.as_ref(),
        )
    }

    /// Whether the controllers of this context reconcile an object. The watch filter concerns the kinds of Cluster API and of its
    /// providers. Caches hold objects that the filter leaves out, too: they may own, or have the same owner as, those that are reconciled, and
    /// whatever is not in a cache counts as deleted.
    pub fn reconciles<K: Resource<DynamicType = ()>>(&self, object: &K) -> bool {
        let Some(value) = &self.watch_filter else { return true };
        let group = K::group(&());
        let is_cluster_api = group == GROUP || group.ends_with(&format!(".{GROUP}"));
        !is_cluster_api
            || object
                .meta()
                .labels
                .as_ref()
                .and_then(|labels| labels.get(WATCH_FILTER_LABEL))
                == Some(value)
    }

    /// Records events as `component`.
    pub fn recorder(&self, component: &str) -> Recorder {
        self.recorder.named(component)
    }

    pub fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self, namespace: &str) -> Api<K> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The shared cache of a namespaced kind, in the namespace that this program works in.
    pub fn cache<K: Object + Resource<Scope = NamespaceResourceScope>>(&self) -> Cache<K> {
        self.cache_where(watcher::Config::default(), cache::trim)
    }

    /// As [`Context::cache`], of the objects that the selectors in `config` pick, trimmed by `trim`.
    pub fn cache_where<K: Object + Resource<Scope = NamespaceResourceScope>>(
        &self,
        config: watcher::Config,
        trim: fn(&mut K),
    ) -> Cache<K> {
        let api = match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        self.caches.get(config, |config| {
            Cache::start_overlaid(api, config, trim, self.preview.clone(), self.shutdown.clone())
        })
    }

    /// The shared cache of a cluster-wide kind.
    pub fn cache_cluster_wide<K: Object>(&self, trim: fn(&mut K)) -> Cache<K> {
        let api = Api::all(self.client.clone());
        self.caches.get(watcher::Config::default(), |config| {
            Cache::start_overlaid(api, config, trim, self.preview.clone(), self.shutdown.clone())
        })
    }

    /// The shared cache of the cluster-wide objects that the selectors in `config` pick.
    pub fn cache_cluster_wide_where<K: Object>(&self, config: watcher::Config) -> Cache<K> {
        let api = Api::all(self.client.clone());
        self.caches.get(config, |config| {
            Cache::start_overlaid(api, config, cache::trim, self.preview.clone(), self.shutdown.clone())
        })
    }

    /// The shared cache of this cluster's own Nodes.
    pub fn nodes(&self) -> Cache<Node> {
        self.cache_cluster_wide(cache::trim_node)
    }
}
