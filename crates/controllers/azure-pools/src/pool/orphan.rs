//! The teardown of a pool whose cluster is gone, and the finalizers of a pool.

use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool, AzureMachinePoolMachine};
use capstan_azure::ResourceId;
use capstan_core::Class;
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use kube::ResourceExt;

use super::FINALIZER;
use super::cloud::Cloud;
use super::machines::{FINALIZER as MACHINE_FINALIZER, delete as delete_object};
use super::state::State;
use crate::Controller;
use crate::error::Error;
use crate::model;

/// While objects of ours go away, their watch tells; this is for a watch that was cut off.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What the provider that ran the pool before has left on it.
const PREDECESSORS_FINALIZER: &str = "machinepool.cluster.x-k8s.io";

pub fn is_ours(pool: &AzureMachinePool) -> bool {
    let ours = |finalizer: &String| [FINALIZER, PREDECESSORS_FINALIZER].contains(&finalizer.as_str());
    pool.finalizers().iter().any(ours)
}

/// The end of a pool whose cluster is gone already: there is nowhere left to move anything to, but its scale set would
/// run on. While Azure can be asked it goes first; else the object stays, and says what is left.
pub async fn orphaned(
    controller: &Controller,
    pool: &AzureMachinePool,
    state: &mut State,
    missing: &str,
) -> Result<Next, Error> {
    if !is_ours(pool) {
        return Ok(Next::Wait);
    }
    if let Some(set) = scale_set(pool, state) {
        match end(controller, pool, state, &set).await {
            Ok(Some(true)) => {}
            Ok(Some(false)) => {
                let poll = state.next_poll(Timestamp::now());
                return Ok(Next::After(poll.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)));
            }
            Ok(None) => {
                let message = format!(
                    "scale set {set} may still run, and nothing tells how to sign in to Azure: {missing}; create it \
                     again, or delete the scale set and then the finalizer {FINALIZER}"
                );
                controller.recorder.warning(pool, "ScaleSetLeft", message).await;
                return Ok(Next::After(LOOK_AGAIN));
            }
            Err(error) => {
                let message = format!("scale set {set} is not deleted yet: {error}");
                controller.recorder.warning(pool, "ScaleSetLeft", message).await;
                if error.class() != Class::Terminal {
                    return Err(error);
                }
                return Ok(Next::After(controller.options.resync));
            }
        }
    }
    let namespace = pool.namespace().unwrap_or_default();
    let machines = controller.machines.select(Some(&namespace), |machine| {
        let mut owners = machine.owner_references().iter();
        owners.any(|owner| Some(&owner.uid) == pool.metadata.uid.as_ref())
    });
    let api = controller.context.api::<AzureMachinePoolMachine>(&namespace);
    for machine in machines {
        patch::remove_finalizer(&api, machine.as_ref(), MACHINE_FINALIZER).await?;
        delete_object(&api, machine.as_ref()).await?;
    }
    release(controller, pool).await?;
    controller.forget(pool);
    Ok(Next::Wait)
}

/// The scale set of a pool, as far as it was ever noted. Another's, whoever wrote it there, is never touched.
fn scale_set(pool: &AzureMachinePool, state: &State) -> Option<ResourceId> {
    let seen = || state.snapshot.as_ref()?.set.as_ref().map(|set| set.id.clone());
    let id: ResourceId = pool.spec.provider_id.clone().or_else(seen)?.parse().ok()?;
    let named = id.name().eq_ignore_ascii_case(&model::set_name(pool));
    (named && id.kind().eq_ignore_ascii_case("virtualMachineScaleSets")).then_some(id)
}

/// Deletes the scale set. Whether it is gone; nothing when nobody knows how to sign in.
async fn end(
    controller: &Controller,
    pool: &AzureMachinePool,
    state: &mut State,
    set: &ResourceId,
) -> Result<Option<bool>, Error> {
    let known = state.client.as_ref().map(|(client, _)| client.clone());
    let client = match known {
        Some(client) => client,
        None => {
            // The AzureCluster may have outlived its Cluster: it is known by where it keeps its machines.
            let theirs = |cluster: &AzureCluster| {
                let subscription = cluster.spec.subscription_id.as_deref().unwrap_or_default();
                model::group(cluster, &cluster.name_any()).eq_ignore_ascii_case(&set.group)
                    && subscription.eq_ignore_ascii_case(&set.subscription)
            };
            let clusters = controller.azure_clusters.select(pool.namespace().as_deref(), theirs);
            let Some(cluster) = clusters.first() else {
                return Ok(None);
            };
            let credential = controller
                .options
                .sign_in
                .credential(&controller.context.client, cluster)
                .await?;
            let client = controller.azure.client(&credential, &set.subscription);
            client.at(&pool.spec.location)
        }
    };
    let mut cloud = Cloud {
        client,
        group: set.group.clone(),
        name: set.name().to_owned(),
        state,
    };
    cloud.end().await.map(Some)
}

/// Lets go of the pool's object, for whoever made it: nobody else is left to do so.
pub async fn release(controller: &Controller, pool: &AzureMachinePool) -> Result<(), Error> {
    let api = controller
        .context
        .api::<AzureMachinePool>(&pool.namespace().unwrap_or_default());
    let mut last = pool.clone();
    if let Some(without) = patch::remove_finalizer(&api, pool, PREDECESSORS_FINALIZER).await? {
        last = without;
    }
    patch::remove_finalizer(&api, &last, FINALIZER).await?;
    Ok(())
}
