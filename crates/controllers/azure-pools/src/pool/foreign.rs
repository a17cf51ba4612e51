//! What others had or have a hand in: a scale set that somebody else made, and replicas that somebody else manages.
//!
//! Invariant: taking a scale set over replaces no machine that is what is wanted, and a capacity that whoever manages
//! the replicas has set is never set back.

use std::time::Duration;

use capstan_api::azure::AzureMachinePoolMachine;
use capstan_kube::{Next, capi, patch};
use kube::ResourceExt;

use super::Actor;
use super::memory::{Make, Set};
use super::observe::{MODEL_ANNOTATION, Member};
use crate::error::Error;
use crate::model::Model;

impl Actor<'_> {
    /// Whether a scale set that somebody else made is what is wanted, as far as that can be told.
    pub(super) fn fits(&self, set: &Set, model: &Model) -> bool {
        let mut zones = set.zones.clone();
        zones.sort();
        set.make == Make::of(&model.set) && zones == model.set.zones.clone().unwrap_or_default()
    }

    /// Takes such a scale set over. Which of its instances are what is wanted is noted on their machines before the set
    /// gets its mark: Azure's `latestModelApplied` cannot tell, because every new bootstrap token is a newer model.
    pub(super) async fn adopt(&mut self, model: &Model) -> Result<Next, Error> {
        let (wanted, writer) = (Make::of(&model.set), self.writer());
        for member in &self.members().await {
            let Some(instance) = member.instance.as_ref().filter(|instance| !instance.is("Deleting")) else {
                continue;
            };
            let same = (instance.make == wanted).then_some(model.hash.as_str());
            match (&member.object, same) {
                (None, noted) => drop(writer.create(&member.name, instance, noted).await?),
                (Some(_), Some(hash)) if member.annotation(MODEL_ANNOTATION).is_none() => {
                    writer.note_model(member, hash).await?;
                }
                (Some(_), _) => {}
            }
        }
        self.cloud().await?.adopt(model).await?;
        let message = format!("took over scale set {} as it is", model.name);
        self.world.recorder.normal(self.pool, "ScaleSetAdopted", message).await;
        // The next pass waits until the cache shows the notes.
        Ok(Next::After(Duration::ZERO))
    }

    /// Deletes Machines that stand for nothing: Cluster API makes one for every machine of a pool that it sees, and it may
    /// see one that has just gone. Nobody else would ever delete it.
    pub(super) async fn sweep(&self) -> Result<(), Error> {
        let (namespace, pool) = (self.pool.namespace().unwrap_or_default(), &self.owners.machine_pool);
        let stray = |machine: &capi::Machine| {
            let reference = &machine.spec.infrastructure_ref;
            let mut owners = machine.owner_references().iter();
            reference.kind == AzureMachinePoolMachine::KIND
                && machine.metadata.deletion_timestamp.is_none()
                && owners.any(|owner| owner.kind == "MachinePool" && Some(&owner.uid) == pool.metadata.uid.as_ref())
                && self.world.machines.get(Some(&namespace), &reference.name).is_none()
        };
        let api = self.world.context.api::<AzureMachinePoolMachine>(&namespace);
        for machine in self.world.owner_machines.select(Some(&namespace), stray) {
            // The cache may be late.
            if api.get_opt(&machine.spec.infrastructure_ref.name).await?.is_none() {
                self.writer().delete_owner(&machine).await?;
            }
        }
        Ok(())
    }

    /// Where the replicas are managed from outside, a pool that is seen for the first time has as many as are wanted,
    /// unless it is in the middle of something of ours: then it is on its way to what the MachinePool says.
    pub(super) fn note_external(&mut self, members: &[Member], set: &Set, model: &Model) {
        if !self.owners.machine_pool.replicas_managed_externally() {
            self.memory.external = None;
            return;
        }
        if self.memory.external.is_some() {
            return;
        }
        let settled = |m: &Member| {
            let going = m.leaving() || m.updating() || m.instance.as_ref().is_some_and(|i| i.is("Deleting"));
            let current = m.object.is_none() || m.model(set.model.as_deref()) == Some(&model.hash);
            current && !going
        };
        let ours = !self.memory.operations.is_empty() || !members.iter().all(settled);
        let said = usize::try_from(self.owners.machine_pool.replicas()).unwrap_or_default();
        self.memory.external = Some(if ours { said } else { set.capacity });
    }

    /// The MachinePool follows.
    pub(super) async fn sync_replicas(&mut self) -> Result<(), Error> {
        let machine_pool = &self.owners.machine_pool;
        let replicas = self.memory.external.and_then(|count| i32::try_from(count).ok());
        if replicas.is_none() || machine_pool.spec.replicas == replicas {
            return Ok(());
        }
        let mut after = machine_pool.as_ref().clone();
        after.0.spec.replicas = replicas;
        let api = self
            .world
            .context
            .api::<capi::MachinePool>(&self.pool.namespace().unwrap_or_default());
        patch::object(&api, machine_pool.as_ref(), &after, patch::Lock::Version).await?;
        Ok(())
    }
}
