//! Azure machine pools whose machines have a life of their own: AzureMachinePool, AzureMachinePoolMachine, and as much of
//! AzureCluster as a cluster needs.
//!
//! One reconcile does the cloud work for a pool and all its machines; see [`pool`].

mod azure_json;
mod clouds;
mod cluster;
mod error;
mod identity;
pub mod model;
pub mod pool;

pub use error::Error;
pub use identity::SignIn;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool, AzureMachinePoolMachine};
use capstan_kube::runtime::{Reconcile, Reconciler, Trigger};
use capstan_kube::workload::{NodeEvent, Workloads};
use capstan_kube::{Cache, Context, capi};
use futures::StreamExt;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

/// Nodes that change within this time of each other ask for one reconcile.
const TOGETHER: Duration = Duration::from_millis(250);
const COMPONENT: &str = "azuremachinepool-controller";

/// The names of the controllers that [`run`] runs.
pub const CONTROLLERS: [&str; 2] = [<pool::Pools as Reconcile>::NAME, <cluster::Clusters as Reconcile>::NAME];

/// The name of the controller that [`run`] runs only with [`Options::azure_json`].
pub const AZURE_JSON: &str = <azure_json::AzureJson as Reconcile>::NAME;

/// The settings of these controllers.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub sign_in: SignIn,
    /// Whether the Secret `<pool>-azure-json` is made for each pool.
    pub azure_json: bool,
}

/// What all reconciles share.
pub struct Controller {
    pub(crate) context: Context,
    pub(crate) options: Options,
    pub(crate) azure: clouds::Clouds,
    pub(crate) workloads: Workloads,
    pub(crate) pools: Cache<AzureMachinePool>,
    pub(crate) machines: Cache<AzureMachinePoolMachine>,
    pub(crate) machine_pools: Cache<capi::MachinePool>,
    pub(crate) owner_machines: Cache<capi::Machine>,
    pub(crate) clusters: Cache<capi::Cluster>,
    pub(crate) azure_clusters: Cache<AzureCluster>,
    trigger: Trigger<AzureMachinePool>,
}

impl Controller {
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

impl Controller {
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
    let object = ours.then(|| object(&reference.name, pool.namespace()));
    object.into_iter().collect()
}

/// The pool that a machine belongs to.
fn owner(machine: &AzureMachinePoolMachine) -> Vec<ObjectRef<AzureMachinePool>> {
    let owners = machine
        .owner_references()
        .iter()
        .filter(|owner| owner.kind == AzureMachinePool::KIND);
    owners.map(|owner| object(&owner.name, machine.namespace())).collect()
}

fn object<K: Resource<DynamicType = ()>>(name: &str, namespace: Option<String>) -> ObjectRef<K> {
    let mut object = ObjectRef::new(name);
    object.namespace = namespace;
    object
}

/// Runs the controllers until the context is shut down.
pub async fn run(context: Context, azure: capstan_azure::Clients, options: Options) -> Result<(), Error> {
    let pools = context.cache::<AzureMachinePool>();
    let clusters = context.cache::<AzureCluster>();
    let reconciler = Reconciler::new(&context, pools.clone());
    let azure_clusters = Reconciler::new(&context, clusters.clone());
    let azure_json = options.azure_json.then(|| Reconciler::new(&context, pools.clone()));
    let controller = Arc::new(Controller {
        azure: clouds::Clouds::new(azure),
        options,
        workloads: Workloads::new(&context),
        pools,
        machines: context.cache(),
        machine_pools: context.cache(),
        owner_machines: context.cache(),
        clusters: context.cache(),
        azure_clusters: clusters,
        trigger: reconciler.trigger(),
        context,
    });
    let metrics = pool::metrics::Pools {
        machine_pools: controller.machine_pools.clone(),
        pools: controller.pools.clone(),
    };
    controller
        .context
        .metrics
        .register(|registry| registry.register_collector(Box::new(metrics)));
    controller.ready().await?;
    controller.workloads.forget_with(&controller.clusters);
    tokio::select! {
        () = pools_controller(controller.clone(), reconciler) => {}
        () = clusters_controller(controller.clone(), azure_clusters) => {}
        () = azure_json_controller(controller.clone(), azure_json) => {}
        () = follow_nodes(controller.clone()) => {}
    }
    Ok(())
}

impl Controller {
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

async fn pools_controller(controller: Arc<Controller>, reconciler: Reconciler<AzureMachinePool>) {
    let (of_cluster, of_azure) = (controller.clone(), controller.clone());
    let of_owner = controller.clone();
    let reconciler = reconciler
        .watches(&controller.machines, owner)
        .watches(&controller.machine_pools, infrastructure)
        .watches(&controller.clusters, move |cluster: &capi::Cluster| {
            of_cluster.pools_of(cluster.namespace().as_deref(), &cluster.name_any())
        })
        .watches(&controller.azure_clusters, move |cluster: &AzureCluster| {
            of_azure.pools_on(cluster)
        })
        .watches(&controller.owner_machines, move |machine: &capi::Machine| {
            let (namespace, reference) = (machine.namespace(), &machine.spec.infrastructure_ref);
            match of_owner.machines.get(namespace.as_deref(), &reference.name) {
                Some(found) => owner(&found),
                None => of_owner.pool_of(machine),
            }
        });
    reconciler.run(Arc::new(pool::Pools(controller))).await;
}

async fn clusters_controller(controller: Arc<Controller>, reconciler: Reconciler<AzureCluster>) {
    let reconciler = reconciler.watches(&controller.clusters, |cluster: &capi::Cluster| {
        let reference = cluster
            .spec
            .infrastructure_ref
            .iter()
            .filter(|r| r.is(AzureCluster::GROUP, AzureCluster::KIND));
        reference
            .map(|reference| object(&reference.name, cluster.namespace()))
            .collect()
    });
    reconciler.run(Arc::new(cluster::Clusters(controller))).await;
}

/// Without the option there is nothing to do.
async fn azure_json_controller(controller: Arc<Controller>, reconciler: Option<Reconciler<AzureMachinePool>>) {
    let Some(reconciler) = reconciler else {
        return std::future::pending().await;
    };
    let (of_cluster, of_azure) = (controller.clone(), controller.clone());
    let reconciler = reconciler
        .watches(&controller.machine_pools, infrastructure)
        .watches(&controller.clusters, move |cluster: &capi::Cluster| {
            of_cluster.pools_of(cluster.namespace().as_deref(), &cluster.name_any())
        })
        .watches(&controller.azure_clusters, move |cluster: &AzureCluster| {
            of_azure.pools_on(cluster)
        });
    reconciler.run(Arc::new(azure_json::AzureJson(controller))).await;
}

/// A node that comes, goes or changes its readiness asks for a reconcile of its pool; many at once ask for one.
async fn follow_nodes(controller: Arc<Controller>) {
    let mut events = std::pin::pin!(controller.workloads.events());
    let mut concerned = HashSet::new();
    loop {
        let Some(event) = events.next().await else {
            return std::future::pending().await;
        };
        concerned.extend(concerned_pools(&controller, event));
        if concerned.is_empty() {
            continue;
        }
        let pause = controller.context.clock.sleep(TOGETHER);
        let mut pause = std::pin::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                Some(event) = events.next() => concerned.extend(concerned_pools(&controller, event)),
            }
        }
        concerned.drain().for_each(|pool| controller.trigger.wake(pool));
    }
}

/// Returns the pools that an event concerns; a heartbeat is no event.
fn concerned_pools(controller: &Controller, event: NodeEvent) -> Vec<ObjectRef<AzureMachinePool>> {
    match event {
        NodeEvent::Node { cluster, node, .. } => {
            let id = capstan_kube::nodes::provider_id(&node).unwrap_or_default();
            let mut pools = controller.pools_of(Some(&cluster.namespace), &cluster.name);
            // A node of a scale set that is named after one of the pools concerns that pool only.
            let named = |pool: &ObjectRef<AzureMachinePool>| {
                id.contains(&format!("/virtualmachinescalesets/{}/", pool.name.to_ascii_lowercase()))
            };
            if pools.iter().any(named) {
                pools.retain(named);
            }
            pools
        }
        NodeEvent::Cluster(cluster) => controller.pools_of(Some(&cluster.namespace), &cluster.name),
    }
}
