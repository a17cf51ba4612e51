//! A simulated Azure Resource Manager that real clients cannot tell from Azure.
//!
//! One lock guards the state in memory. Everything that takes time is queued, and happens when tokio's clock reaches its time.
//! Answers have ARM's status codes, headers, error bodies and operation URLs, for any api-version.

pub mod access;
pub mod admin;
pub mod cli;
pub mod clock;
pub mod compute;
pub mod config;
pub mod faults;
pub mod joiner;
pub mod log;
pub mod network;
pub mod operations;
pub mod policy;
mod pools;
pub mod resources;
pub mod router;
pub mod server;
pub mod state;
pub mod throttle;
pub mod tls;
pub mod tokens;
pub mod wire;
pub mod world;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use access::OPENSHIFTS_ROLE;
pub use cli::{AzureArgs, run};
pub use clock::Span;
pub use config::{Config, Network, Strict, Times};
pub use faults::{Action, Fault};
pub use log::Request;
use server::Shared;
use wire::{Answer, Call, same};
use world::World;

/// The simulator; start it with [`Azure::start`].
pub struct Azure;

impl Azure {
    /// Starts a simulator in this process. It ends when the handle is dropped.
    pub async fn start(config: Config) -> anyhow::Result<Handle> {
        Self::start_with(config, None).await
    }

    /// Starts a simulator without a listener: requests come through [`Handle::answer`]. Time is tokio's, which a test may
    /// pause, and no token is asked for.
    pub async fn in_process(config: Config) -> anyhow::Result<Handle> {
        let saved = config.state.as_deref().map(state::Saved::load).transpose()?.flatten();
        let config = Config {
            require_token: false,
            state: None,
            ..config
        };
        let joiner = match config.joiner.clone() {
            Some(options) => Some(joiner::Joiner::new(options).await?),
            None => None,
        };
        let known = config.clone();
        let world = match saved {
            Some(saved) => saved.into_world(config),
            None => World::new(config),
        };
        let shared = Arc::new(Shared::new(world, None));
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().drive());
        if let Some(joiner) = joiner {
            tasks.spawn(joiner.run(shared.clone()));
        }
        Ok(Handle {
            url: "https://azure.in-process".into(),
            address: known.listen,
            ca_pem: String::new(),
            ca_file: PathBuf::new(),
            keep_ca_file: true,
            subscription: known.subscription,
            tenant: known.tenant,
            client_id: known.client_id,
            client_secret: known.client_secret,
            state: None,
            authority: None,
            shared,
            tasks,
        })
    }

    async fn start_with(config: Config, lines: Option<cli::Lines>) -> anyhow::Result<Handle> {
        anyhow::ensure!(
            config.listen.ip().is_loopback() || config.admin_token.as_deref().is_some_and(|token| !token.is_empty()),
            "listening on {} lets others reach the admin API: give --admin-token",
            config.listen
        );
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {}", config.listen))?;
        let address = listener.local_addr()?;
        let saved = config.state.as_deref().map(state::Saved::load).transpose()?.flatten();
        let mut names = vec![
            "localhost".to_owned(),
            "127.0.0.1".into(),
            "::1".into(),
            address.ip().to_string(),
        ];
        if config.public_hosts {
            names.extend(tls::PUBLIC_HOSTS.map(str::to_owned));
        }
        let kept = saved.as_ref().map(|saved| saved.authority.clone());
        let authority = match kept.filter(|kept| kept.covers(&names)) {
            Some(kept) => kept,
            None => tls::Authority::new(&names)?,
        };
        let tls = tokio_rustls::TlsAcceptor::from(authority.server(&names)?);
        let host = if address.ip().is_loopback() {
            "localhost".into()
        } else {
            address.ip().to_string()
        };
        let own = || std::env::temp_dir().join(format!("capstan-sim-{}-{}.pem", std::process::id(), address.port()));
        let ca_file = config.ca_file.clone().unwrap_or_else(own);
        tokio::fs::write(&ca_file, &authority.certificate)
            .await
            .with_context(|| format!("cannot write {}", ca_file.display()))?;
        let joiner = match config.joiner.clone() {
            Some(options) => Some(joiner::Joiner::new(options).await?),
            None => None,
        };
        let known = config.clone();
        let world = match saved {
            Some(saved) => saved.into_world(config),
            None => World::new(config),
        };
        let shared = Arc::new(Shared::new(world, lines));
        let mut tasks = JoinSet::new();
        tasks.spawn(server::listen(shared.clone(), listener, tls));
        tasks.spawn(shared.clone().drive());
        if let Some(joiner) = joiner {
            tasks.spawn(joiner.run(shared.clone()));
        }
        let handle = Handle {
            url: format!("https://{host}:{}", address.port()),
            address,
            ca_pem: authority.certificate.clone(),
            ca_file,
            keep_ca_file: known.ca_file.is_some(),
            subscription: known.subscription,
            tenant: known.tenant,
            client_id: known.client_id,
            client_secret: known.client_secret,
            state: known.state,
            authority: Some(authority),
            shared,
            tasks,
        };
        handle.keep()
    }
}

/// A running simulator, with the addresses for clients and the functions for tests.
pub struct Handle {
    /// Resource Manager and sign-in authority in one.
    pub url: String,
    /// The address that it listens on.
    pub address: SocketAddr,
    pub ca_pem: String,
    /// The same certificate as a file, for `SSL_CERT_FILE`. Removed with the handle unless a place was given for it.
    pub ca_file: PathBuf,
    keep_ca_file: bool,
    pub subscription: String,
    pub tenant: String,
    pub client_id: String,
    pub client_secret: String,
    state: Option<PathBuf>,
    authority: Option<tls::Authority>,
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

impl Handle {
    /// Saves now, so that a file that cannot be written is an error at the start, and from then on whenever something has
    /// changed.
    fn keep(mut self) -> anyhow::Result<Self> {
        if let (Some(path), Some(authority)) = (self.state.clone(), self.authority.clone()) {
            self.save()?;
            self.tasks.spawn(state::keep(path, authority, self.shared.clone()));
        }
        Ok(self)
    }

    /// Answers a request without a network.
    pub fn answer(
        &self,
        request: http::Request<bytes::Bytes>,
    ) -> impl Future<Output = Result<http::Response<bytes::Bytes>, server::Dropped>> + Send + use<> {
        server::answer(self.shared.clone(), request)
    }

    /// Every request so far, sign-ins included, the admin API's not.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.lock().log.all()
    }

    /// Requests to Resource Manager, without sign-ins.
    pub fn arm_requests(&self) -> Vec<Request> {
        self.requests()
            .into_iter()
            .filter(|request| request.policy != "SignIn" && request.policy != "Metadata")
            .collect()
    }

    pub fn clear_requests(&self) {
        self.shared.lock().log.clear();
    }

    /// Tokens issued so far.
    pub fn sign_ins(&self) -> u64 {
        self.shared.lock().tokens.sign_ins
    }

    /// Adds a fault rule; the id removes it.
    pub fn fault(&self, fault: Fault) -> Result<u64, regex::Error> {
        self.shared.lock().world.faults.add(fault)
    }

    pub fn remove_fault(&self, id: u64) -> bool {
        self.shared.lock().world.faults.remove(id)
    }

    pub fn clear_faults(&self) {
        self.shared.lock().world.faults.clear();
    }

    /// Lets stalled operations complete.
    pub fn release(&self) -> usize {
        self.changing(World::release)
    }

    /// Looks at the state.
    pub fn state<T>(&self, look: impl FnOnce(&World) -> T) -> T {
        look(&self.shared.lock().world)
    }

    /// Changes the state directly, and notifies everything that waits for a change.
    pub fn changing<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let result = change(&mut self.shared.lock().world);
        self.shared.wake.notify_one();
        self.shared.changed.notify_one();
        result
    }

    /// A resource's document, if it exists.
    pub fn get(&self, id: &str) -> Option<Value> {
        self.state(|world| world.get(id).map(|doc| doc.body.clone()))
    }

    /// Ids of all resources of a kind, such as `disks`.
    pub fn ids(&self, kind: &str) -> Vec<String> {
        let of_kind = |world: &World| {
            let docs = world
                .docs
                .values()
                .filter(|doc| doc.kind().rsplit('/').next().is_some_and(|last| same(last, kind)));
            docs.map(|doc| doc.id().to_owned()).collect()
        };
        self.state(of_kind)
    }

    /// Instances of a Uniform scale set, with instance view.
    pub fn instances(&self, set: &str) -> Vec<Value> {
        let render = |fleet: &compute::fleet::Fleet| {
            fleet
                .instances
                .values()
                .map(|instance| fleet.render(instance, true))
                .collect()
        };
        self.state(|world| world.fleets.get(&set.to_lowercase()).map(render).unwrap_or_default())
    }

    /// Custom data of a VM or of a scale set's newest model, which Azure never shows.
    pub fn custom_data(&self, id: &str) -> Option<String> {
        let key = id.to_lowercase();
        self.state(|world| {
            let model = world.fleets.get(&key).and_then(|fleet| {
                wire::text(fleet.newest(), "/properties/virtualMachineProfile/osProfile/customData").map(str::to_owned)
            });
            model.or_else(|| {
                world
                    .docs
                    .get(&key)?
                    .hidden
                    .get("customData")?
                    .as_str()
                    .map(str::to_owned)
            })
        })
    }

    /// Custom data that an instance of a Uniform scale set was last provisioned with.
    pub fn instance_custom_data(&self, id: &str) -> Option<String> {
        let key = id.to_lowercase();
        let (set, number) = key.rsplit_once("/virtualmachines/")?;
        let number: u64 = number.parse().ok()?;
        self.state(|world| world.fleets.get(set)?.instances.get(&number)?.custom_data.clone())
    }

    /// Deletes a resource without a call of a client.
    pub fn vanish(&self, id: &str) -> bool {
        self.changing(|world| world.vanish(id))
    }

    /// Evicts a spot VM or instance now.
    pub fn evict(&self, id: &str) {
        self.changing(|world| world.evicted(&id.to_lowercase()));
    }

    /// Creates a resource group with a network in it.
    pub fn network(&self, network: &Network) {
        self.changing(|world| world.make_network(network));
    }

    /// A call past network, token, log and faults: for preparing and for looking.
    pub fn direct(&self, method: http::Method, path: &str, body: Value) -> Answer {
        let raw = if body.is_null() {
            bytes::Bytes::new()
        } else {
            bytes::Bytes::from(body.to_string())
        };
        let call = Call::new(method, path, http::HeaderMap::new(), raw, self.url.clone());
        let answer = {
            let mut core = self.shared.lock();
            let server::Core { world, tokens, .. } = &mut *core;
            let guarded = std::mem::replace(&mut world.config.require_token, false);
            let answer = router::route(world, tokens, &call).unwrap_or_else(|fail| fail.answer());
            world.config.require_token = guarded;
            answer
        };
        self.shared.wake.notify_one();
        self.shared.changed.notify_one();
        answer
    }

    /// Writes the state to its file, if it has one.
    pub fn save(&self) -> anyhow::Result<()> {
        let (Some(path), Some(authority)) = (&self.state, &self.authority) else {
            return Ok(());
        };
        let saved = state::Saved::of(&self.shared.lock().world, authority);
        saved.store(path)
    }

    /// Ends the simulator; its state is saved if it has a file.
    pub fn stop(self) -> anyhow::Result<()> {
        self.save()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.keep_ca_file {
            let _ = std::fs::remove_file(&self.ca_file);
        }
    }
}
