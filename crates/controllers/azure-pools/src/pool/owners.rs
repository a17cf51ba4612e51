//! The objects that a pool belongs to.

use std::sync::Arc;

use capstan_api::azure::{AzureCluster, AzureMachinePool};
use capstan_api::capi::{CLUSTER_NAME_LABEL, PAUSED_ANNOTATION};
use capstan_kube::capi::{Cluster, MachinePool};
use kube::ResourceExt;

use crate::World;

/// A pool's MachinePool, Cluster and AzureCluster.
pub struct Owners {
    pub machine_pool: Arc<MachinePool>,
    pub cluster: Arc<Cluster>,
    pub azure_cluster: Arc<AzureCluster>,
}

/// What of them is there.
pub enum Found {
    All(Owners),
    /// Left alone, by its own annotation or its cluster's.
    Paused,
    /// Which is missing.
    Missing(String),
}

pub fn find(world: &World, pool: &AzureMachinePool) -> Found {
    let namespace = pool.namespace();
    let namespace = namespace.as_deref();
    let Some(owner) = pool.owner_references().iter().find(|owner| owner.kind == "MachinePool") else {
        return Found::Missing("waiting for the MachinePool that owns it".to_owned());
    };
    let Some(machine_pool) = world.machine_pools.get(namespace, &owner.name) else {
        return Found::Missing(format!("waiting for MachinePool {}", owner.name));
    };
    let labelled = || {
        machine_pool
            .labels()
            .get(CLUSTER_NAME_LABEL)
            .cloned()
            .unwrap_or_default()
    };
    let name = Some(machine_pool.spec.cluster_name.clone())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(labelled);
    let Some(cluster) = world.clusters.get(namespace, &name) else {
        return Found::Missing(format!("waiting for Cluster {name}"));
    };
    if cluster.is_paused() || pool.annotations().contains_key(PAUSED_ANNOTATION) {
        return Found::Paused;
    }
    let reference = cluster.spec.infrastructure_ref.as_ref();
    let Some(reference) = reference.filter(|reference| reference.is(AzureCluster::GROUP, AzureCluster::KIND)) else {
        return Found::Missing(format!("Cluster {name} has no AzureCluster as its infrastructureRef"));
    };
    let Some(azure_cluster) = world.azure_clusters.get(namespace, &reference.name) else {
        return Found::Missing(format!("waiting for AzureCluster {}", reference.name));
    };
    Found::All(Owners {
        machine_pool,
        cluster,
        azure_cluster,
    })
}
