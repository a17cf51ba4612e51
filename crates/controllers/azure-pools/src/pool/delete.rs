//! The end of a pool: its machines are drained and deleted first, then the scale set, then the object.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool, AzureMachinePoolMachine};
use capstan_azure::ResourceId;
use capstan_core::Class;
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use kube::ResourceExt;

use super::cloud::Cloud;
use super::machines::{FINALIZER as MACHINE_FINALIZER, delete as delete_object};
use super::memory::{Kind, Memory};
use super::observe::Member;
use super::status::Draft;
use super::{Actor, FINALIZER};
use crate::World;
use crate::error::Error;
use crate::model;

/// While objects of ours go away, their watch tells; this is for a watch that was cut off.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What the provider that ran the pool before has left on it.
const PREDECESSORS_FINALIZER: &str = "machinepool.cluster.x-k8s.io";

fn is_ours(pool: &AzureMachinePool) -> bool {
    let ours = |finalizer: &String| [FINALIZER, PREDECESSORS_FINALIZER].contains(&finalizer.as_str());
    pool.finalizers().iter().any(ours)
}

/// The end of a pool whose cluster is gone already: there is nowhere left to move anything to, but its scale set would
/// run on. While Azure can be asked it goes first; else the object stays, and says what is left.
pub async fn orphaned(
    world: &World,
    pool: &AzureMachinePool,
    memory: &mut Memory,
    missing: &str,
) -> Result<Next, Error> {
    if !is_ours(pool) {
        return Ok(Next::Wait);
    }
    if let Some(set) = scale_set(pool, memory) {
        match end(world, pool, memory, &set).await {
            Ok(Some(true)) => {}
            Ok(Some(false)) => {
                let poll = memory.next_poll(Timestamp::now());
                return Ok(Next::After(poll.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)));
            }
            Ok(None) => {
                let message = format!(
                    "scale set {set} may still run, and nothing tells how to sign in to Azure: {missing}; create it \
                     again, or delete the scale set and then the finalizer {FINALIZER}"
                );
                world.recorder.warning(pool, "ScaleSetLeft", message).await;
                return Ok(Next::After(LOOK_AGAIN));
            }
            Err(error) => {
                let message = format!("scale set {set} is not deleted yet: {error}");
                world.recorder.warning(pool, "ScaleSetLeft", message).await;
                if error.class() != Class::Terminal {
                    return Err(error);
                }
                return Ok(Next::After(world.options.resync));
            }
        }
    }
    let namespace = pool.namespace().unwrap_or_default();
    let machines = world.machines.select(Some(&namespace), |machine| {
        let mut owners = machine.owner_references().iter();
        owners.any(|owner| Some(&owner.uid) == pool.metadata.uid.as_ref())
    });
    let api = world.context.api::<AzureMachinePoolMachine>(&namespace);
    for machine in machines {
        patch::remove_finalizer(&api, machine.as_ref(), MACHINE_FINALIZER).await?;
        delete_object(&api, machine.as_ref()).await?;
    }
    release(world, pool).await?;
    world.forget(pool);
    Ok(Next::Wait)
}

/// The scale set of a pool, as far as it was ever noted. Another's, whoever wrote it there, is never touched.
fn scale_set(pool: &AzureMachinePool, memory: &Memory) -> Option<ResourceId> {
    let seen = || memory.look.as_ref()?.set.as_ref().map(|set| set.id.clone());
    let id: ResourceId = pool.spec.provider_id.clone().or_else(seen)?.parse().ok()?;
    let named = id.name().eq_ignore_ascii_case(&model::set_name(pool));
    (named && id.kind().eq_ignore_ascii_case("virtualMachineScaleSets")).then_some(id)
}

/// Deletes the scale set. Whether it is gone; nothing when nobody knows how to sign in.
async fn end(
    world: &World,
    pool: &AzureMachinePool,
    memory: &mut Memory,
    set: &ResourceId,
) -> Result<Option<bool>, Error> {
    let known = memory.client.as_ref().map(|(client, _)| client.clone());
    let client = match known {
        Some(client) => client,
        None => {
            // The AzureCluster may have outlived its Cluster: it is known by where it keeps its machines.
            let theirs = |cluster: &AzureCluster| {
                let subscription = cluster.spec.subscription_id.as_deref().unwrap_or_default();
                model::group(cluster, &cluster.name_any()).eq_ignore_ascii_case(&set.group)
                    && subscription.eq_ignore_ascii_case(&set.subscription)
            };
            let clusters = world.azure_clusters.select(pool.namespace().as_deref(), theirs);
            let Some(cluster) = clusters.first() else {
                return Ok(None);
            };
            let credential = world.options.sign_in.credential(&world.context.client, cluster).await?;
            let client = world.azure.client(&credential, &set.subscription);
            client.at(&pool.spec.location)
        }
    };
    let mut cloud = Cloud {
        client,
        group: set.group.clone(),
        name: set.name().to_owned(),
        memory,
    };
    cloud.end().await.map(Some)
}

/// Lets go of the pool's object, for whoever made it: nobody else is left to do so.
async fn release(world: &World, pool: &AzureMachinePool) -> Result<(), Error> {
    let api = world
        .context
        .api::<AzureMachinePool>(&pool.namespace().unwrap_or_default());
    let mut last = pool.clone();
    if let Some(without) = patch::remove_finalizer(&api, pool, PREDECESSORS_FINALIZER).await? {
        last = without;
    }
    patch::remove_finalizer(&api, &last, FINALIZER).await?;
    Ok(())
}

impl Actor<'_> {
    pub(super) async fn delete(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if !is_ours(self.pool) {
            return Ok(Next::Wait);
        }
        let removing = self.memory.busy(Kind::Remove);
        for failure in self.look().await? {
            self.world
                .recorder
                .warning(self.pool, "OperationFailed", failure.message)
                .await;
        }
        let exists = self.memory.look.as_ref().is_some_and(|look| look.set.is_some());
        let mut members = self.members().await;
        let writer = self.writer();
        for member in members
            .iter()
            .filter(|member| member.instance.is_none() || !exists)
            .collect::<Vec<_>>()
        {
            writer.release(member).await?;
        }
        if !exists {
            draft.deleting("the scale set is gone");
            if members.is_empty() || self.objects().is_empty() {
                return self.release().await;
            }
            return Ok(Next::After(LOOK_AGAIN));
        }
        members.retain(|member| member.instance.is_some());
        let mut wait = LOOK_AGAIN;
        if !members.is_empty() && !removing {
            members.iter_mut().for_each(|member| stand_in(self.pool, member));
            let staying: Vec<_> = members.iter().filter(|member| !member.leaving()).collect();
            writer.delete_all(&staying).await?;
            wait = wait.min(self.drain(&mut members).await?);
            wait = wait.min(self.delete_drained(&members).await?);
            self.report_drains(&members).await?;
            let waiting = members
                .iter()
                .find_map(|m| m.blocked.as_ref().map(|why| format!("machine {}: {why}", m.name)));
            draft.deleting(&waiting.unwrap_or_else(|| format!("{} machines are to be deleted first", members.len())));
            return Ok(Next::After(wait.min(self.next())));
        }
        draft.deleting("the scale set is deleted");
        if self.cloud().await?.remove().await? {
            self.memory.reread = true;
            return Ok(Next::After(Duration::ZERO));
        }
        Ok(Next::After(wait.min(self.next())))
    }

    async fn report_drains(&self, members: &[Member]) -> Result<(), Error> {
        let told =
            |member: &&Member| member.stuck && member.object.as_ref().is_some_and(|object| object.uid().is_some());
        for member in members.iter().filter(told).collect::<Vec<_>>() {
            let status = member.object.as_ref().and_then(|object| object.status.as_ref());
            let latest = status.is_some_and(|status| status.latest_model_applied);
            self.writer().report(member, latest, None).await?;
        }
        Ok(())
    }

    async fn release(&self) -> Result<Next, Error> {
        release(self.world, self.pool).await?;
        self.world.forget(self.pool);
        Ok(Next::Wait)
    }
}

/// An instance for which nobody made an object yet leaves with its pool all the same: drained since the pool was deleted,
/// as if it had one. None is made for it now, for in a namespace that ends none can be.
fn stand_in(pool: &AzureMachinePool, member: &mut Member) {
    let Some(instance) = member.instance.as_ref().filter(|_| member.object.is_none()) else {
        return;
    };
    let mut object = AzureMachinePoolMachine {
        metadata: Default::default(),
        spec: Default::default(),
        status: None,
    };
    object.metadata.name = Some(member.name.clone());
    object.metadata.deletion_timestamp = pool.metadata.deletion_timestamp.clone();
    object.spec.provider_id = instance.provider_id.clone();
    member.object = Some(Arc::new(object));
}
