//! The end of a pool: its machines are drained and deleted first, then the scale set, then the object.

use std::time::Duration;

use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine};
use capstan_kube::{Next, patch};
use kube::ResourceExt;

use super::machines::FINALIZER as MACHINE_FINALIZER;
use super::memory::Kind;
use super::status::Draft;
use super::{Actor, FINALIZER};
use crate::World;
use crate::error::Error;

/// While objects of ours go away, their watch tells; this is for a watch that was cut off.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What the provider that ran the pool before has left on it.
const PREDECESSORS_FINALIZER: &str = "machinepool.cluster.x-k8s.io";

/// A pool whose cluster is gone can only be let go of.
pub async fn orphaned(world: &World, pool: &AzureMachinePool) -> Result<Next, Error> {
    let namespace = pool.namespace().unwrap_or_default();
    let machines = world.machines.select(Some(&namespace), |machine| {
        let mut owners = machine.owner_references().iter();
        owners.any(|owner| Some(&owner.uid) == pool.metadata.uid.as_ref())
    });
    let api = world.context.api::<AzureMachinePoolMachine>(&namespace);
    for machine in machines {
        patch::remove_finalizer(&api, machine.as_ref(), MACHINE_FINALIZER).await?;
    }
    release(world, pool).await?;
    Ok(Next::Wait)
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
        let ours = |finalizer: &String| [FINALIZER, PREDECESSORS_FINALIZER].contains(&finalizer.as_str());
        if !self.pool.finalizers().iter().any(ours) {
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
            let staying: Vec<_> = members.iter().filter(|member| !member.leaving()).collect();
            writer.delete_all(&staying).await?;
            wait = wait.min(self.drain(&mut members).await?);
            self.mark_undescribed(&mut members);
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

    /// An instance for which nobody made an object yet has no node that was ever used by us: it goes undrained only when
    /// its node does not exist.
    fn mark_undescribed(&self, members: &mut [super::observe::Member]) {
        for member in members.iter_mut().filter(|member| member.object.is_none()) {
            if let Some(node) = member.node.node() {
                member.blocked = Some(format!("node {} has no machine object yet", node.name_any()));
            }
        }
    }

    async fn report_drains(&self, members: &[super::observe::Member]) -> Result<(), Error> {
        for member in members.iter().filter(|member| member.stuck).collect::<Vec<_>>() {
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
