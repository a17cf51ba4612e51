//! Replicas that somebody else manages.
//!
//! Invariant: a capacity that whoever manages the replicas has set is never set back.

use capstan_kube::{capi, patch};

use super::Actor;
use super::member::Member;
use super::observe::Observed;
use crate::error::Error;

impl Actor<'_> {
    /// Where the replicas are managed from outside, a pool that is observed for the first time has as many as are wanted,
    /// unless work of ours is under way: then it is on its way to the MachinePool's replicas.
    pub(super) fn note_external(&mut self, observed: &Observed) {
        if !self.owners.machine_pool.replicas_managed_externally() {
            self.state.external = None;
            return;
        }
        if self.state.external.is_some() {
            return;
        }
        let (Some(set), Some(model)) = (self.scale_set(), &observed.model) else {
            return;
        };
        let settled = |m: &Member| {
            // An instance that is deleted although nobody has deleted its object goes because of the capacity that others set.
            let current = m.object.is_none() || m.model(&set) == Some(&model.hash);
            current && !m.leaving() && !m.updating()
        };
        let ours = !self.state.operations.is_empty() || !observed.members.iter().all(settled);
        let written = usize::try_from(self.owners.machine_pool.replicas()).unwrap_or_default();
        self.state.external = Some(if ours { written } else { set.capacity });
    }

    /// Writes the replica count into the MachinePool.
    pub(super) async fn set_replicas(&mut self, replicas: usize) -> Result<(), Error> {
        let machine_pool = &self.owners.machine_pool;
        let mut after = machine_pool.as_ref().clone();
        after.0.spec.replicas = i32::try_from(replicas).ok();
        let api = self.scope.api_of::<capi::MachinePool>();
        if let Some(written) = patch::object(&api, machine_pool.as_ref(), &after, patch::Lock::Version).await? {
            self.scope.wrote(&self.controller.machine_pools, &written);
        }
        Ok(())
    }
}
