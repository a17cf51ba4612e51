//! Cluster API machines on vSphere, with data disks: VSphereCluster, VSphereMachine and VSphereVM.
//!
//! The plans are in `capstan_core::vm` and `capstan_core::cluster`; this crate observes, asks for a plan, and applies its steps.

mod affinity;
mod cluster;
mod credentials;
mod owner_cluster;

mod desired;
mod error;
mod identity;
mod ipam;
mod machine;
pub mod migration;
mod observed;

mod conditions;
mod quantity;
mod secrets;
mod vm;
mod zone;

use std::sync::Arc;

use capstan_api::vsphere::{VSphereClusterIdentity, VSphereMachine, VSphereVM};
pub use capstan_core::vm::CloneLimits;
use capstan_kube::capi::Machine;
use capstan_kube::workload::Workloads;
use capstan_kube::{Cache, Context, cache};
use capstan_vsphere::{InProcess, Sessions, Settings};

use affinity::Affinity;
use credentials::Credentials;
pub use credentials::{ALLOWED_SERVERS, Account, Policy};
pub use error::Error;
use owner_cluster::Clusters;

/// The names of the controllers that [`run`] runs.
pub const CONTROLLERS: [&str; 5] = [vm::NAME, machine::NAME, cluster::NAME, zone::NAME, identity::NAME];

/// The settings of the vSphere controllers, from flags and the environment.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many machines are reconciled at once. A reconcile never waits for vCenter's tasks, so this bounds requests.
    pub concurrency: u16,
    /// How many clones may be under way.
    pub clones: CloneLimits,
    /// Where the secrets of VSphereClusterIdentities are.
    pub identity_namespace: String,
    /// Who may use which credentials for which servers.
    pub credentials: Policy,
    /// Whether the machines of every control plane and MachineDeployment are kept on different hosts, by cluster modules.
    pub anti_affinity: bool,
    /// Answers instead of the vCenters, in tests.
    pub in_process: Option<InProcess>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            concurrency: 64,
            clones: CloneLimits::default(),
            identity_namespace: "capstan-system".into(),
            credentials: Policy::default(),
            anti_affinity: false,
            in_process: None,
        }
    }
}

impl Options {
    /// Returns the settings of the environment: `POD_NAMESPACE`, `VSPHERE_USERNAME`, `VSPHERE_PASSWORD` and `EXP_NODE_ANTI_AFFINITY`.
    pub fn from_env() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let defaults = Self::default();
        let account = variable("VSPHERE_USERNAME").zip(variable("VSPHERE_PASSWORD"));
        Self {
            identity_namespace: variable("POD_NAMESPACE").unwrap_or(defaults.identity_namespace),
            credentials: Policy {
                account: account.map(|(username, password)| Account {
                    username,
                    password: password.into(),
                    ca: None,
                    tenant: None,
                }),
                ..Policy::default()
            },
            anti_affinity: variable("EXP_NODE_ANTI_AFFINITY").is_some_and(|value| value == "true"),
            ..defaults
        }
    }
}

/// Runs all controllers for vSphere until the context's shutdown token is cancelled; then logs out everywhere.
pub async fn run(context: Context, options: Options) -> Result<(), Error> {
    let metrics = capstan_vsphere::Metrics::default();
    // The section ends with this call: the controllers may be started again.
    let section = context.metrics.section();
    section.register(|registry| metrics.register(registry));
    let sessions = Sessions::new(Settings {
        interceptors: context.interceptors.clone(),
        clock: context.clock,
        metrics,
        memory: context.memory.clone(),
        in_process: options.in_process.clone(),
    });
    let identities: Cache<VSphereClusterIdentity> = context.cache_cluster_wide(cache::trim);
    let credentials = Credentials::new(
        &context,
        sessions.clone(),
        identities.clone(),
        options.identity_namespace.clone(),
        options.credentials.clone(),
    );
    let credentials = Arc::new(credentials);
    let clusters = Clusters::new(&context);
    let machines: Cache<Machine> = context.cache();
    let own: Cache<VSphereMachine> = context.cache();
    let vms: Cache<VSphereVM> = context.cache();
    let affinity = Affinity::new(&context, clusters.clone(), options.anti_affinity);
    let started = async {
        clusters.ready().await?;
        machines.ready().await?;
        affinity.ready().await?;
        vms.ready().await?;
        Ok::<(), Error>(())
    };
    tokio::select! {
        started = started => started?,
        () = context.shutdown.cancelled() => return Ok(()),
    }
    let workloads = Workloads::new(&context);
    workloads.forget_with(&clusters.clusters);
    let (zones, domains) = (
        context.cache_cluster_wide(cache::trim),
        context.cache_cluster_wide(cache::trim),
    );
    let all = tokio::join!(
        vm::run(
            &context,
            clusters.clone(),
            credentials.clone(),
            workloads.clone(),
            affinity.clone(),
            vms.clone(),
            vm::Limits {
                concurrency: options.concurrency,
                clones: options.clones,
            }
        ),
        machine::run(
            &context,
            clusters.clone(),
            machines.clone(),
            vms.clone(),
            own.clone(),
            options.concurrency
        ),
        cluster::run(
            &context,
            clusters.clone(),
            credentials.clone(),
            (own.clone(), vms.clone()),
            affinity,
            identities.clone(),
            workloads
        ),
        zone::run(
            &context,
            clusters.clone(),
            credentials.clone(),
            domains,
            zones,
            (machines.clone(), own.clone())
        ),
        identity::run(&context, identities, clusters.infrastructure.clone(), credentials),
        migration::run(&context),
    );
    sessions.close().await;
    drop(section);
    all.1.and(all.2).and(all.3)
}
