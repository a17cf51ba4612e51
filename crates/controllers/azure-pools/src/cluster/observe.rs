//! Reads an AzureCluster and its network.

use std::sync::Arc;

use capstan_api::azure::AzureCluster;
use capstan_core::adopt::Peer;
use capstan_core::cluster::azure::{CAPZ_FIRST, Network, is_left_alone};
use capstan_core::validate::azure_cluster;
use capstan_kube::capi::Cluster;
use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use crate::Controller;
use crate::error::Error;

/// Returns whether the network of an AzureCluster exists; `None` for one that is left alone.
pub async fn observe(controller: &Controller, object: &AzureCluster) -> Result<Option<Network>, Error> {
    let Some(cluster) = owner(controller, object) else {
        return Ok(None);
    };
    if is_left_alone(object) || cluster.is_paused() {
        return Ok(None);
    }
    if is_new(controller, object) && capz_runs(controller).await {
        return Ok(Some(Network::LeftToCapz));
    }
    network(controller, object, &cluster.name_any()).await.map(Some)
}

/// Whether CAPZ may not have seen an AzureCluster yet.
fn is_new(controller: &Controller, object: &AzureCluster) -> bool {
    let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let age = created.map(|created| controller.context.clock.now().duration_since(created).unsigned_abs());
    age.is_some_and(|age| age < CAPZ_FIRST)
}

/// Whether a CAPZ runs in this cluster, with or without its machine pools.
async fn capz_runs(controller: &Controller) -> bool {
    let deployments: Api<Deployment> = Api::all(controller.context.client.clone());
    let named = ListParams::default().fields(&format!("metadata.name={}", Peer::Capz.deployment()));
    let runs = |found: &Deployment| found.spec.as_ref().is_some_and(|spec| spec.replicas != Some(0));
    match deployments.list(&named).await {
        Ok(found) => found.iter().any(runs),
        Err(error) => {
            tracing::debug!(%error, "cannot list Deployments: CAPZ counts as absent");
            false
        }
    }
}

/// Returns the Cluster that owns it. Core sets the owner reference; without core the Cluster itself refers to it.
fn owner(controller: &Controller, object: &AzureCluster) -> Option<Arc<Cluster>> {
    let namespace = object.namespace();
    let namespace = namespace.as_deref();
    if let Some(owner) = object.owner_references().iter().find(|owner| owner.kind == "Cluster") {
        return controller.clusters.get(namespace, &owner.name);
    }
    let refers = |cluster: &Cluster| {
        let reference = cluster.spec.infrastructure_ref.as_ref();
        reference.is_some_and(|r| r.is(AzureCluster::GROUP, AzureCluster::KIND) && r.name == object.name_any())
    };
    controller.clusters.select(namespace, refers).into_iter().next()
}

/// Checks every part of the network.
async fn network(controller: &Controller, object: &AzureCluster, cluster_name: &str) -> Result<Network, Error> {
    let spec = &object.spec;
    let findings = azure_cluster::validate(spec);
    if !findings.is_ok() {
        return Err(Error::Invalid(findings.message()));
    }
    let sign_in = &controller.options.sign_in;
    let subscription = sign_in.subscription(object)?;
    let credential = sign_in.credential(&controller.context.client, object).await?;
    let clients = controller.azure.of(object)?;
    let client = clients.client(&credential, &subscription).at(&spec.location);
    let vnet = &spec.network_spec.vnet;
    let group = vnet.resource_group.clone().filter(|group| !group.is_empty());
    let group = group.unwrap_or_else(|| crate::model::group(object, cluster_name));
    let name = if vnet.name.is_empty() {
        format!("{cluster_name}-vnet")
    } else {
        vnet.name.clone()
    };
    if spec.network_spec.subnets.is_empty() {
        return Ok(Network::Lacks("a subnet in spec.networkSpec.subnets".to_owned()));
    }
    for subnet in &spec.network_spec.subnets {
        if client.get_subnet(&group, &name, &subnet.name).await?.is_none() {
            let what = format!("subnet {} of virtual network {group}/{name}", subnet.name);
            return Ok(Network::Lacks(what));
        }
    }
    Ok(Network::Exists)
}
