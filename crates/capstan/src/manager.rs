//! Runs the controllers while this process leads.
//!
//! Invariant: controllers run only while this process holds the lease. The end of a term stops its controllers and caches, and
//! from the same moment the fence in every client rejects their writes. The Azure client outlives terms: its tokens and request
//! budgets belong to the process, admission included. A controller that ends with an error is started again, and the other
//! controllers do not notice. A controller does not run beside the one that it replaces: [`Guard`].

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use capstan_azure::Clients;
use capstan_core::interceptor::{Interceptor, Interceptors};
use capstan_core::{Clock, Memory};
use capstan_kube::lease::{Elector, Fence, Group, Identity};
use capstan_kube::webhook::{self, Conversion, Hook};
use capstan_kube::{Context, Options, lease};
use capstan_openshift::webhook as admission;
use kube::Client;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::controllers::{self, Name};
use crate::guard::Guard;
use crate::serve::Status;

/// How long controllers may take to finish; then they are dropped, which is safe at any point.
pub const STOP_GRACE: Duration = Duration::from_secs(15);
/// A controller that failed is started again after this long.
const RESTART_PAUSE: Duration = Duration::from_secs(5);
/// How often a controller looks whether its definition has been installed.
const DEFINITION_POLL: Duration = Duration::from_secs(5);

/// The settings of a manager.
pub struct Manager {
    pub config: kube::Config,
    pub controllers: Vec<Name>,
    pub namespace: Option<String>,
    pub watch_filter: Option<String>,
    pub azure: capstan_azure::Settings,
    pub azure_sign_in: capstan_azure_pools::SignIn,
    pub azure_json: bool,
    pub vsphere: capstan_vsphere_machines::Options,
    /// How often every controller observes its objects again although nothing has changed; the runtime's default when `None`.
    pub resync: Option<Duration>,
    /// For what workload clusters and vCenters make this process keep.
    pub memory: Arc<Memory>,
    /// `None`: no leader election, this is the only one.
    pub lease: Option<lease::Settings>,
    /// Leases of controllers that Capstan replaces, by namespace and name: it acts only while it holds them, too.
    pub hold: Vec<(String, String)>,
    /// Where webhooks are served, if at all.
    pub webhook: Option<webhook::Options>,
    /// How OpenShift's machines are admitted.
    pub admission: admission::Options,
    /// Whether the definitions of vSphere's kinds are pointed at the webhook of this process.
    pub convert: bool,
    /// The access that creates and deletes the webhook configurations, where no installation provides them.
    pub registrar: Option<kube::Config>,
    pub status: Arc<Status>,
}

impl Manager {
    /// Runs until `stop` is cancelled.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        self.status.started();
        let fence = self.lease.as_ref().map(|_| Fence::default());
        let peers = self.peers()?;
        let own = fence
            .iter()
            .map(|fence| Arc::new(fence.clone()) as Arc<dyn Interceptor>);
        let interceptors = own.chain(peers.fences()).collect();
        let interceptors = Interceptors::new(interceptors);
        let azure = Clients::new(capstan_azure::Settings {
            interceptors: interceptors.clone(),
            ..self.azure.clone()
        })?;
        let webhooks = self.serve_webhooks(azure.clone(), stop.clone())?;
        let result = self.terms(fence, peers, interceptors, azure, stop).await;
        if let Some(webhooks) = webhooks {
            let _ = capstan_core::clock::timeout(STOP_GRACE, webhooks).await;
        }
        result
    }

    /// Every replica answers webhooks, the leader and the standbys: the Service spreads requests over all of them.
    fn serve_webhooks(&self, azure: Clients, stop: CancellationToken) -> Result<Option<JoinHandle<()>>> {
        let Some(options) = self.webhook.clone() else {
            return Ok(None);
        };
        let (openshift, convert) = (self.runs(Name::Openshift), self.convert && self.runs(Name::Vsphere));
        if !openshift && !convert {
            return Ok(None);
        }
        let admission = admission::Options {
            azure: Some(azure),
            ..self.admission.clone()
        };
        let context = Options {
            namespace: self.namespace.clone(),
            shutdown: stop,
            ..Options::default()
        };
        let config = self.registrar.as_ref().unwrap_or(&self.config).clone();
        let context = Context::new(config, context).context("cannot make a client for the webhooks")?;
        Ok(Some(tokio::spawn(async move {
            let mut hooks: Vec<Arc<dyn Hook>> = Vec::new();
            if convert {
                hooks.push(Arc::new(Conversion::default()));
            }
            if openshift {
                hooks.push(Arc::new(admission::Admission::new(&context, admission).await));
            }
            if let Err(error) = webhook::run(context, options, hooks).await {
                error!(%error, "webhooks are not served: only the controller rejects invalid machines, and v1beta1 of vSphere's kinds cannot be read");
            }
        })))
    }

    fn runs(&self, name: Name) -> bool {
        self.controllers.contains(&name)
    }

    async fn terms(
        &self,
        fence: Option<Fence>,
        mut peers: Group,
        interceptors: Interceptors,
        azure: Clients,
        stop: CancellationToken,
    ) -> Result<()> {
        let (Some(settings), Some(fence)) = (self.lease.clone(), fence) else {
            return self.term(interceptors, azure, stop).await;
        };
        let mut elector = Elector::new(self.lease_client()?, settings, fence);
        let result = self.lead(&mut elector, &mut peers, &interceptors, &azure, &stop).await;
        elector.release().await;
        result
    }

    /// A request about a lease is not retried: late is worse than failed.
    fn lease_client(&self) -> Result<Client> {
        let mut config = self.config.clone();
        config.default_retry = false;
        Client::try_from(config).context("cannot make a client for the lease")
    }

    /// Returns the leases of the controllers that Capstan replaces.
    fn peers(&self) -> Result<Group> {
        ensure!(
            self.hold.is_empty() || self.lease.is_some(),
            "--hold-leases needs the leader election: one replica holds them"
        );
        let client = self.lease_client()?;
        Ok(Group::of_peers(&client, &self.hold, &self.holder(), Clock::system()))
    }

    /// Returns who holds the leases of peers: this installation.
    fn holder(&self) -> Identity {
        match &self.lease {
            Some(lease) => Identity::of_installation(&lease.namespace, &lease.name),
            None => Identity::of_single_installation(),
        }
    }

    /// Runs one term for each time that this process gets the lease, until `stop`.
    async fn lead(
        &self,
        elector: &mut Elector,
        peers: &mut Group,
        interceptors: &Interceptors,
        azure: &Clients,
        stop: &CancellationToken,
    ) -> Result<()> {
        while !stop.is_cancelled() {
            tokio::select! {
                () = elector.win() => {}
                () = stop.cancelled() => break,
            }
            tokio::select! {
                () = win(peers) => {}
                () = elector.keep() => continue,
                () = stop.cancelled() => break,
            }
            let term = stop.child_token();
            let work = self.term(interceptors.clone(), azure.clone(), term.clone());
            tokio::pin!(work);
            tokio::select! {
                result = &mut work => result?,
                // The fence rejects its writes already; the controllers only have to end.
                () = elector.keep() => {
                    term.cancel();
                    work.await?;
                }
                () = peers.keep() => {
                    warn!("another controller took its lease back: Capstan writes nothing until it holds the lease again");
                    term.cancel();
                    work.await?;
                }
            }
        }
        Ok(())
    }

    /// Users separate two controllers of one cluster by namespaces or by a label: then both may run.
    fn guard(&self, name: Name, context: &Context) -> Option<Guard> {
        let all = self.namespace.is_none() && self.watch_filter.is_none();
        all.then(|| Guard::of(name, &self.hold, &context.client, context.shutdown.clone()))?
    }

    fn options(&self, interceptors: Interceptors, shutdown: CancellationToken) -> Options {
        let default = Options::default();
        Options {
            interceptors,
            namespace: self.namespace.clone(),
            watch_filter: self.watch_filter.clone(),
            holder: self.holder(),
            shutdown,
            resync: self.resync.unwrap_or(default.resync),
            memory: self.memory.clone(),
            ..default
        }
    }

    /// Runs all controllers until `end`.
    async fn term(&self, interceptors: Interceptors, azure: Clients, end: CancellationToken) -> Result<()> {
        let context = Context::new(self.config.clone(), self.options(interceptors, end.clone()))
            .context("cannot make a Kubernetes client")?;
        context
            .metrics
            .register(|registry| self.azure.metrics.register(registry));
        self.status.leading(context.metrics.clone());
        let settings = controllers::Settings {
            azure,
            azure_sign_in: self.azure_sign_in.clone(),
            azure_json: self.azure_json,
            vsphere: self.vsphere.clone(),
        };
        let mut tasks = JoinSet::new();
        for name in &self.controllers {
            let guard = self.guard(*name, &context);
            let status = self.status.clone();
            tasks.spawn(supervise(*name, context.clone(), settings.clone(), guard, status));
        }
        end.cancelled().await;
        self.status.standing_by();
        let all = async { while tasks.join_next().await.is_some() {} };
        if capstan_core::clock::timeout(STOP_GRACE, all).await.is_err() {
            warn!(
                "some controllers did not end within {} s and are dropped",
                STOP_GRACE.as_secs()
            );
        }
        Ok(())
    }
}

/// Waits until the leases of the peers are ours, where there are some.
async fn win(peers: &mut Group) {
    if !peers.is_empty() {
        peers.win().await;
    }
}

/// Starts a controller once its kinds exist, and again after each failure.
async fn supervise(
    name: Name,
    context: Context,
    settings: controllers::Settings,
    mut guard: Option<Guard>,
    status: Arc<Status>,
) {
    let stop = context.shutdown.clone();
    tokio::select! {
        () = wait_for_definition(name, &context.client) => {}
        () = stop.cancelled() => return,
    }
    while !stop.is_cancelled() {
        let (context, settings) = (context.clone(), settings.clone());
        let result = match &mut guard {
            Some(guard) => guarded(name, context, settings, guard, &status).await,
            None => {
                info!(controller = %name, "starting");
                controllers::run(name, context, settings).await
            }
        };
        match result {
            // Its peer runs again.
            Ok(()) if guard.is_some() => continue,
            Ok(()) => return,
            Err(error) => {
                error!(controller = %name, error = format!("{error:#}"), "the controller failed and will be started again")
            }
        }
        tokio::select! {
            () = capstan_core::clock::sleep(RESTART_PAUSE) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// Runs a controller once, from when the one that it replaces has stopped until that one starts again.
async fn guarded(
    name: Name,
    context: Context,
    settings: controllers::Settings,
    guard: &mut Guard,
    status: &Status,
) -> Result<()> {
    let stop = context.shutdown.clone();
    let recorder = context.recorder("capstan");
    let mut known = None;
    loop {
        let reason = tokio::select! {
            reason = guard.reason(known.as_deref()) => reason,
            () = stop.cancelled() => return Ok(()),
        };
        status.waits_for_peer(name, reason.is_some());
        let Some((deployment, reason)) = reason else { break };
        warn!(controller = %name, reason, "waits for the controller that it replaces");
        let message = format!("Capstan does not run controller {name}: {reason}");
        recorder.warning(&*deployment, "CapstanWaits", message).await;
        known = Some(reason);
    }
    let end = stop.child_token();
    let _ended = end.clone().drop_guard();
    let fence = vec![Arc::new(guard.clone()) as Arc<dyn Interceptor>];
    let settings = controllers::Settings {
        azure: settings.azure.behind(fence.clone()),
        ..settings
    };
    let context = context
        .narrowed(fence, context.namespace.clone(), end.clone())
        .context("cannot make a Kubernetes client")?;
    info!(controller = %name, "starting");
    let work = controllers::run(name, context, settings);
    tokio::pin!(work);
    tokio::select! {
        result = &mut work => result,
        () = guard.blocked() => {
            warn!(controller = %name, "stops: the controller that it replaces runs again");
            end.cancel();
            work.await
        }
    }
}

/// Discovery shows a kind once its definition is established. Everybody who is signed in may read discovery.
async fn wait_for_definition(name: Name, client: &Client) {
    let mut reported = false;
    while !is_served(name, client).await.unwrap_or_default() {
        if !std::mem::replace(&mut reported, true) {
            info!(controller = %name, crd = name.crd(), "the controller waits for its definition; install it with: capstan crds | kubectl apply --server-side -f -");
        }
        capstan_core::clock::sleep(DEFINITION_POLL).await;
    }
}

/// Whether the API server serves the kind in the version that the controller requests.
pub async fn is_served(name: Name, client: &Client) -> Result<bool> {
    serves(name, name.version(), client).await
}

/// Whether the API server serves the kind in this version.
pub async fn serves(name: Name, version: &str, client: &Client) -> Result<bool> {
    let Some((plural, group)) = name.crd().split_once('.') else {
        return Ok(false);
    };
    let resources = client.list_api_group_resources(&format!("{group}/{version}")).await;
    match resources {
        Ok(list) => Ok(list.resources.iter().any(|resource| resource.name == plural)),
        Err(error) if capstan_kube::error::code(&error) == Some(404) => Ok(false),
        Err(error) => Err(capstan_kube::Error::from(error)).context("cannot read which kinds the API server serves"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager(resync: Option<Duration>) -> Manager {
        Manager {
            config: kube::Config::new("http://127.0.0.1:1".parse().unwrap()),
            controllers: Name::ALL.to_vec(),
            namespace: Some("one".to_owned()),
            watch_filter: Some("value".to_owned()),
            azure: capstan_azure::Settings::new(capstan_azure::Cloud::named("AzurePublicCloud").unwrap()),
            azure_sign_in: Default::default(),
            azure_json: false,
            vsphere: Default::default(),
            resync,
            memory: Arc::default(),
            lease: None,
            hold: Vec::new(),
            webhook: None,
            admission: admission::Options::default(),
            convert: false,
            registrar: None,
            status: Arc::new(Status::new("default/capstan")),
        }
    }

    #[test]
    fn the_resync_of_the_command_line_reaches_all_controllers() {
        let options = |resync| manager(resync).options(Interceptors::default(), CancellationToken::new());
        let asked = Duration::from_secs(90);
        assert_eq!(options(Some(asked)).resync, asked);
        assert_eq!(options(None).resync, Options::default().resync);
        let limited = options(None);
        assert_eq!(limited.namespace.as_deref(), Some("one"));
        assert_eq!(limited.watch_filter.as_deref(), Some("value"));
    }
}
