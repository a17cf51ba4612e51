//! The objects that a pool belongs to.

use std::sync::Arc;

use capstan_api::azure::{AzureCluster, AzureMachinePool, MACHINE_POOL_LABEL};
use capstan_api::capi::{CLUSTER_NAME_LABEL, DELETE_FOR_MOVE_ANNOTATION, PAUSED_ANNOTATION};
use capstan_core::pool::Claim;
use capstan_kube::capi::{Cluster, MachinePool};
use kube::ResourceExt;

use crate::Controller;
use crate::model;

/// A pool's MachinePool, Cluster and AzureCluster, and the name of its scale set.
#[derive(Clone, Default)]
pub struct Owners {
    pub machine_pool: Arc<MachinePool>,
    pub cluster: Arc<Cluster>,
    pub azure_cluster: Arc<AzureCluster>,
    pub set: SetName,
    /// The name of the cluster, also of one that is gone.
    pub cluster_name: Option<String>,
    /// Whether they are gone, and only the scale set is left.
    pub gone: bool,
}

impl Owners {
    /// Returns who the pool is, as the tags of its scale set say it.
    pub fn claim(&self, pool: &AzureMachinePool) -> Claim {
        Claim {
            cluster: self.cluster_name.clone(),
            pool: model::pool_tag(pool),
        }
    }
}

/// The name of a scale set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetName {
    pub group: String,
    pub name: String,
}

/// Whether all of them exist.
pub enum Found {
    All(Owners),
    /// The pool's own annotation or its cluster says so.
    Paused,
    /// The message names what is missing.
    Missing(String),
    /// The cluster is of a kind that Capstan does not manage pools of.
    Unsupported(String),
}

pub fn find(controller: &Controller, pool: &AzureMachinePool) -> Found {
    let namespace = pool.namespace();
    let namespace = namespace.as_deref();
    let deleting = pool.metadata.deletion_timestamp.is_some();
    if pool.annotations().contains_key(DELETE_FOR_MOVE_ANNOTATION) {
        return Found::Paused;
    }
    // Without core nothing holds the MachinePool back until the pool is gone.
    let Some(machine_pool) = machine_pool(controller, pool).or_else(|| deleting.then(Arc::default)) else {
        return Found::Missing("waiting for the MachinePool that refers to it".to_owned());
    };
    let labelled = || cluster_label(controller, pool, &machine_pool).unwrap_or_default();
    let name = Some(machine_pool.spec.cluster_name.clone())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(labelled);
    let Some(cluster) = controller.clusters.get(namespace, &name) else {
        return Found::Missing(format!("waiting for Cluster {name}"));
    };
    if cluster.is_paused() || pool.annotations().contains_key(PAUSED_ANNOTATION) {
        return Found::Paused;
    }
    let reference = cluster.spec.infrastructure_ref.as_ref();
    let reference = match reference {
        Some(reference) if reference.is(AzureCluster::GROUP, AzureCluster::KIND) => reference,
        Some(other) => {
            return Found::Unsupported(format!(
                "Cluster {name} has a {} as its infrastructureRef: Capstan manages pools of clusters with an AzureCluster \
                 only, and leaves this one to its own provider",
                other.kind
            ));
        }
        None => return Found::Missing(format!("Cluster {name} has no infrastructureRef")),
    };
    let Some(azure_cluster) = controller.azure_clusters.get(namespace, &reference.name) else {
        return Found::Missing(format!("waiting for AzureCluster {}", reference.name));
    };
    let set = SetName {
        group: model::group(&azure_cluster, &name),
        name: model::set_name(pool),
    };
    Found::All(Owners {
        machine_pool,
        cluster,
        azure_cluster,
        set,
        cluster_name: Some(name),
        gone: false,
    })
}

/// The MachinePool that owns the pool. Core sets the owner reference; without core the MachinePool itself refers to the pool.
fn machine_pool(controller: &Controller, pool: &AzureMachinePool) -> Option<Arc<MachinePool>> {
    let namespace = pool.namespace();
    let namespace = namespace.as_deref();
    if let Some(owner) = pool.owner_references().iter().find(|owner| owner.kind == "MachinePool") {
        return controller.machine_pools.get(namespace, &owner.name);
    }
    let refers = |candidate: &MachinePool| {
        let reference = &candidate.spec.template.spec.infrastructure_ref;
        reference.is(AzureMachinePool::GROUP, AzureMachinePool::KIND) && reference.name == pool.name_any()
    };
    controller.machine_pools.select(namespace, refers).into_iter().next()
}

/// Returns the cluster's name by the labels of the MachinePool, of the pool, or of its machines.
pub(super) fn cluster_label(
    controller: &Controller,
    pool: &AzureMachinePool,
    machine_pool: &MachinePool,
) -> Option<String> {
    let own = [machine_pool.labels(), pool.labels()]
        .into_iter()
        .find_map(|labels| labels.get(CLUSTER_NAME_LABEL).cloned());
    own.or_else(|| {
        let name = pool.name_any();
        let machines = controller.machines.select(pool.namespace().as_deref(), |machine| {
            machine.labels().get(MACHINE_POOL_LABEL) == Some(&name)
        });
        machines
            .iter()
            .find_map(|machine| machine.labels().get(CLUSTER_NAME_LABEL).cloned())
    })
}
