//! Azure machine pools whose machines have a life of their own: AzureMachinePool, AzureMachinePoolMachine, and as much of
//! AzureCluster as a cluster needs.
//!
//! One actor per pool does the cloud work for the pool and all its machines; see [`pool`].

mod cluster;
mod error;
mod identity;
pub mod model;
pub mod pool;

pub use error::Error;
pub use identity::{Namespaces, SignIn};

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool, AzureMachinePoolMachine};
use capstan_kube::expectations::Expectations;
use capstan_kube::workload::{NodeEvent, Workloads};
use capstan_kube::{Cache, Context, Reconciler, Recorder, Trigger, capi};
use futures::StreamExt;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

/// Nodes that change within this time of each other are looked at together.
const TOGETHER: Duration = Duration::from_millis(250);
const COMPONENT: &str = "azuremachinepool-controller";

/// The settings of these controllers.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often a pool is read from Azure when nothing else calls for it.
    pub resync: Duration,
    pub sign_in: SignIn,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            resync: Duration::from_secs(600),
            sign_in: SignIn::default(),
        }
    }
}

/// What all passes share.
pub struct World {
    pub(crate) context: Context,
    pub(crate) options: Options,
    pub(crate) azure: capstan_azure::Clients,
    pub(crate) workloads: Workloads,
    pub(crate) recorder: Recorder,
    pub(crate) pools: Cache<AzureMachinePool>,
    pub(crate) machines: Cache<AzureMachinePoolMachine>,
    pub(crate) machine_pools: Cache<capi::MachinePool>,
    pub(crate) owner_machines: Cache<capi::Machine>,
    pub(crate) clusters: Cache<capi::Cluster>,
    pub(crate) azure_clusters: Cache<AzureCluster>,
    pub(crate) expectations: Expectations<String>,
    pub(crate) trigger: Trigger<AzureMachinePool>,
    memories: Mutex<HashMap<String, Arc<tokio::sync::Mutex<pool::Memory>>>>,
}

impl World {
    pub(crate) fn memory(&self, pool: &AzureMachinePool) -> Arc<tokio::sync::Mutex<pool::Memory>> {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories.entry(pool.uid().unwrap_or_default()).or_default().clone()
    }

    pub(crate) fn forget(&self, pool: &AzureMachinePool) {
        let uid = pool.uid().unwrap_or_default();
        self.memories
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&uid);
        self.expectations.forget(&uid);
    }

    /// The pool itself was written: the next pass waits until the cache shows it.
    pub(crate) fn wrote(&self, pool: &AzureMachinePool, written: Option<&AzureMachinePool>) {
        if let (Some(uid), Some(version)) = (pool.uid(), written.and_then(ResourceExt::resource_version)) {
            self.expectations.wrote(&uid, uid.clone(), version);
        }
    }

    /// The pool that a Machine of Cluster API was made for.
    fn pool_of(&self, machine: &capi::Machine) -> Vec<ObjectRef<AzureMachinePool>> {
        let mut owners = machine.owner_references().iter();
        let owner = owners.find(|owner| owner.kind == "MachinePool");
        let pool = owner.and_then(|owner| self.machine_pools.get(machine.namespace().as_deref(), &owner.name));
        pool.iter().flat_map(|pool| infrastructure(pool)).collect()
    }

    /// The pools of a cluster.
    fn pools_of(&self, namespace: Option<&str>, cluster: &str) -> Vec<ObjectRef<AzureMachinePool>> {
        let machine_pools = self
            .machine_pools
            .select(namespace, |pool| pool.spec.cluster_name == cluster);
        machine_pools.iter().flat_map(|pool| infrastructure(pool)).collect()
    }
}

impl World {
    /// The pools of the clusters that stand on an AzureCluster.
    fn pools_on(&self, azure_cluster: &AzureCluster) -> Vec<ObjectRef<AzureMachinePool>> {
        let namespace = azure_cluster.namespace();
        let on = |cluster: &capi::Cluster| {
            let reference = cluster.spec.infrastructure_ref.as_ref();
            reference.is_some_and(|r| r.kind == AzureCluster::KIND && r.name == azure_cluster.name_any())
        };
        let clusters = self.clusters.select(namespace.as_deref(), on);
        clusters
            .iter()
            .flat_map(|cluster| self.pools_of(namespace.as_deref(), &cluster.name_any()))
            .collect()
    }
}

/// The AzureMachinePool that a MachinePool refers to.
fn infrastructure(pool: &capi::MachinePool) -> Vec<ObjectRef<AzureMachinePool>> {
    let reference = &pool.spec.template.spec.infrastructure_ref;
    let ours = reference.is(AzureMachinePool::GROUP, AzureMachinePool::KIND);
    let namespace = pool.namespace().unwrap_or_default();
    ours.then(|| ObjectRef::new(&reference.name).within(&namespace))
        .into_iter()
        .collect()
}

/// The pool that a machine belongs to.
fn owner(machine: &AzureMachinePoolMachine) -> Vec<ObjectRef<AzureMachinePool>> {
    let namespace = machine.namespace().unwrap_or_default();
    let owners = machine
        .owner_references()
        .iter()
        .filter(|owner| owner.kind == AzureMachinePool::KIND);
    owners
        .map(|owner| ObjectRef::new(&owner.name).within(&namespace))
        .collect()
}

/// Runs the controllers until the context is shut down.
pub async fn run(context: Context, azure: capstan_azure::Clients, options: Options) -> Result<(), Error> {
    let pools = context.cache::<AzureMachinePool>();
    let clusters = context.cache::<AzureCluster>();
    let reconciler = Reconciler::new("azuremachinepool", &context, pools.clone());
    let azure_clusters = Reconciler::new("azurecluster", &context, clusters.clone());
    let world = Arc::new(World {
        azure,
        options,
        workloads: Workloads::new(&context),
        recorder: context.recorder(COMPONENT),
        pools,
        machines: context.cache(),
        machine_pools: context.cache(),
        owner_machines: context.cache(),
        clusters: context.cache(),
        azure_clusters: clusters,
        expectations: Expectations::default(),
        trigger: reconciler.trigger(),
        memories: Mutex::default(),
        context,
    });
    world.ready().await?;
    world.workloads.forget_with(&world.clusters);
    tokio::select! {
        () = pools_controller(world.clone(), reconciler) => {}
        () = clusters_controller(world.clone(), azure_clusters) => {}
        () = follow_nodes(world.clone()) => {}
        () = follow_deletions(world.clone()) => {}
    }
    Ok(())
}

impl World {
    /// Decisions are made from complete caches only.
    async fn ready(&self) -> Result<(), Error> {
        let all = async {
            tokio::try_join!(
                self.pools.ready(),
                self.machines.ready(),
                self.machine_pools.ready(),
                self.owner_machines.ready(),
                self.clusters.ready(),
                self.azure_clusters.ready(),
            )
        };
        tokio::select! {
            ready = all => { ready?; }
            () = self.context.shutdown.cancelled() => {}
        }
        Ok(())
    }
}

async fn pools_controller(world: Arc<World>, reconciler: Reconciler<AzureMachinePool>) {
    let (of_cluster, of_azure) = (world.clone(), world.clone());
    let of_owner = world.clone();
    let reconciler = reconciler
        .watches(&world.machines, owner)
        .watches(&world.machine_pools, infrastructure)
        .watches(&world.clusters, move |cluster: &capi::Cluster| {
            of_cluster.pools_of(cluster.namespace().as_deref(), &cluster.name_any())
        })
        .watches(&world.azure_clusters, move |cluster: &AzureCluster| {
            of_azure.pools_on(cluster)
        })
        .watches(&world.owner_machines, move |machine: &capi::Machine| {
            let (namespace, reference) = (machine.namespace(), &machine.spec.infrastructure_ref);
            match of_owner.machines.get(namespace.as_deref(), &reference.name) {
                Some(found) => owner(&found),
                None => of_owner.pool_of(machine),
            }
        });
    reconciler.run(move |pool| pool::pass(world.clone(), pool)).await;
}

async fn clusters_controller(world: Arc<World>, reconciler: Reconciler<AzureCluster>) {
    let reconciler = reconciler.watches(&world.clusters, |cluster: &capi::Cluster| {
        let namespace = cluster.namespace().unwrap_or_default();
        let reference = cluster
            .spec
            .infrastructure_ref
            .iter()
            .filter(|r| r.is(AzureCluster::GROUP, AzureCluster::KIND));
        reference
            .map(|reference| ObjectRef::new(&reference.name).within(&namespace))
            .collect()
    });
    reconciler.run(move |object| cluster::pass(world.clone(), object)).await;
}

/// A node that comes, goes or changes its readiness calls for a look at its pool; many at once call for one.
async fn follow_nodes(world: Arc<World>) {
    let mut events = std::pin::pin!(world.workloads.events());
    let mut readiness: HashMap<String, (bool, bool)> = HashMap::new();
    let mut poke: HashSet<ObjectRef<AzureMachinePool>> = HashSet::new();
    let mut due: Option<tokio::time::Instant> = None;
    loop {
        let flush = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = events.next() => {
                let Some(event) = event else { return std::future::pending().await };
                poke.extend(concerned(&world, event, &mut readiness));
                due = due.or_else(|| (!poke.is_empty()).then(|| tokio::time::Instant::now() + TOGETHER));
            }
            () = flush => {
                poke.drain().for_each(|pool| world.trigger.poke(pool));
                due = None;
            }
        }
    }
}

/// The pools that an event is news for: heartbeats are none.
fn concerned(
    world: &World,
    event: NodeEvent,
    readiness: &mut HashMap<String, (bool, bool)>,
) -> Vec<ObjectRef<AzureMachinePool>> {
    match event {
        NodeEvent::Node { cluster, node, gone } => {
            let unschedulable = node
                .spec
                .as_ref()
                .and_then(|spec| spec.unschedulable)
                .unwrap_or_default();
            let now = (capstan_kube::workload::is_ready(&node), unschedulable);
            let key = format!("{cluster}/{}", node.name_any());
            let before = if gone {
                readiness.remove(&key)
            } else {
                readiness.insert(key, now)
            };
            if before == Some(now) && !gone {
                return Vec::new();
            }
            let id = node
                .spec
                .as_ref()
                .and_then(|spec| spec.provider_id.clone())
                .unwrap_or_default();
            let id = id.to_ascii_lowercase();
            let mut pools = world.pools_of(Some(&cluster.namespace), &cluster.name);
            // A node of a scale set that is named after one of the pools concerns that pool only.
            let named = |pool: &ObjectRef<AzureMachinePool>| {
                id.contains(&format!("/virtualmachinescalesets/{}/", pool.name.to_ascii_lowercase()))
            };
            if pools.iter().any(named) {
                pools.retain(named);
            }
            pools
        }
        NodeEvent::Cluster(cluster) => world.pools_of(Some(&cluster.namespace), &cluster.name),
        NodeEvent::Missed => world
            .pools
            .select(None, |_| true)
            .iter()
            .map(|pool| ObjectRef::from_obj(pool.as_ref()))
            .collect(),
    }
}

/// Machines that are gone are not waited for any more.
async fn follow_deletions(world: Arc<World>) {
    let machines = world
        .machines
        .subscribe()
        .filter(|change| std::future::ready(change.gone));
    let owners = world
        .owner_machines
        .subscribe()
        .filter(|change| std::future::ready(change.gone));
    let machines = machines.map(|change| change.object.uid());
    let owners = owners.map(|change| change.object.uid());
    let mut gone = std::pin::pin!(futures::stream::select(machines, owners));
    while let Some(uid) = gone.next().await {
        world.expectations.gone(&uid.unwrap_or_default());
    }
    std::future::pending().await
}
