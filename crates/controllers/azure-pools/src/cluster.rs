//! AzureCluster: ready when the network that it names exists.
//!
//! Its network is managed by others; we only look. Invariant: an AzureCluster that another manager looks after
//! (`cluster.x-k8s.io/managed-by`) is never written.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureClusterStatus};
use capstan_api::capi::PAUSED_ANNOTATION;
use capstan_core::Class;
use capstan_kube::capi::Cluster;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::World;
use crate::error::Error;

const NETWORK_READY: &str = "NetworkInfrastructureReady";
const MANAGED_BY: &str = "cluster.x-k8s.io/managed-by";
/// A network that is not there yet is looked for this often; nothing tells us of it.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// One pass over an AzureCluster.
pub async fn pass(world: Arc<World>, object: Arc<AzureCluster>) -> Result<Next, Error> {
    let Some(cluster) = owner(&world, &object) else {
        return Ok(Next::Wait);
    };
    let notes = object.annotations();
    let gone = object.metadata.deletion_timestamp.is_some();
    if gone || notes.contains_key(MANAGED_BY) || notes.contains_key(PAUSED_ANNOTATION) {
        return Ok(Next::Wait);
    }
    if cluster.is_paused() {
        return Ok(Next::Wait);
    }
    if object.status.as_ref().is_some_and(|status| status.ready) {
        return Ok(Next::Wait);
    }
    let found = missing(&world, &object, &cluster.name_any()).await;
    let mut after = object.as_ref().clone();
    mark(after.status.get_or_insert_default(), &found, Timestamp::now());
    let api = world
        .context
        .api::<AzureCluster>(&object.namespace().unwrap_or_default());
    patch::status(&api, object.as_ref(), &after, patch::Lock::Open).await?;
    if let Err(error) = &found
        && (error.class() == Class::Terminal || error.is_about_the_identity())
    {
        let message = error.to_string();
        world.recorder.warning(object.as_ref(), error.reason(), message).await;
    }
    match found? {
        None => Ok(Next::Wait),
        Some(_) => Ok(Next::After(LOOK_AGAIN)),
    }
}

/// The Cluster that owns it. Core sets the owner reference; without core the Cluster's own reference tells.
fn owner(world: &World, object: &AzureCluster) -> Option<Arc<Cluster>> {
    let namespace = object.namespace();
    let namespace = namespace.as_deref();
    if let Some(owner) = object.owner_references().iter().find(|owner| owner.kind == "Cluster") {
        return world.clusters.get(namespace, &owner.name);
    }
    let refers = |cluster: &Cluster| {
        let reference = cluster.spec.infrastructure_ref.as_ref();
        reference.is_some_and(|r| r.is(AzureCluster::GROUP, AzureCluster::KIND) && r.name == object.name_any())
    };
    world.clusters.select(namespace, refers).into_iter().next()
}

fn mark(status: &mut AzureClusterStatus, found: &Result<Option<String>, Error>, now: Timestamp) {
    let list = &mut status.conditions;
    match found {
        Ok(None) => {
            conditions::mark_true(list, NETWORK_READY, now);
            status.ready = true;
        }
        Ok(Some(what)) => {
            let message = format!("{what} does not exist");
            conditions::mark_false(list, NETWORK_READY, Severity::Info, "WaitingForNetwork", &message, now);
        }
        Err(error) => {
            let text = error.to_string();
            conditions::mark_false(list, NETWORK_READY, Severity::Warning, error.reason(), &text, now);
        }
    }
    conditions::summarize(&mut status.conditions, &[NETWORK_READY], now);
}

/// The first part of the network that is not there.
async fn missing(world: &World, object: &AzureCluster, cluster_name: &str) -> Result<Option<String>, Error> {
    let spec = &object.spec;
    let sign_in = &world.options.sign_in;
    let subscription = sign_in.subscription(object)?;
    let credential = sign_in.credential(&world.context.client, object).await?;
    let client = world.azure.client(&credential, &subscription).at(&spec.location);
    let vnet = &spec.network_spec.vnet;
    let group = vnet.resource_group.clone().filter(|group| !group.is_empty());
    let group = group.unwrap_or_else(|| crate::model::group(object, cluster_name));
    let name = if vnet.name.is_empty() {
        format!("{cluster_name}-vnet")
    } else {
        vnet.name.clone()
    };
    for subnet in &spec.network_spec.subnets {
        if client.get_subnet(&group, &name, &subnet.name).await?.is_none() {
            return Ok(Some(format!(
                "subnet {} of virtual network {group}/{name}",
                subnet.name
            )));
        }
    }
    Ok(None)
}
