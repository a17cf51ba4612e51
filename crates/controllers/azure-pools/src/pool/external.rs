//! Replicas that somebody else manages.
//!
//! Invariant: a capacity that whoever manages the replicas has set is never set back.

use capstan_kube::{capi, patch};
use kube::ResourceExt;

use super::Actor;
use super::member::Member;
use super::observe::View;
use crate::error::Error;

impl Actor<'_> {
    /// Where the replicas are managed from outside, a pool that is seen for the first time has as many as are wanted,
    /// unless it is in the middle of something of ours: then it is on its way to what the MachinePool says.
    pub(super) fn note_external(&mut self, view: &View) {
        if !self.owners.machine_pool.replicas_managed_externally() {
            self.state.external = None;
            return;
        }
        if self.state.external.is_some() {
            return;
        }
        let (Some(set), Some(model)) = (self.scale_set(), &view.model) else {
            return;
        };
        let settled = |m: &Member| {
            let going = m.leaving() || m.updating() || m.instance.as_ref().is_some_and(|i| i.is("Deleting"));
            let current = m.object.is_none() || m.model(&set) == Some(&model.hash);
            current && !going
        };
        let ours = !self.state.operations.is_empty() || !view.members.iter().all(settled);
        let said = usize::try_from(self.owners.machine_pool.replicas()).unwrap_or_default();
        self.state.external = Some(if ours { said } else { set.capacity });
    }

    /// Writes the replica count into the MachinePool.
    pub(super) async fn set_replicas(&mut self, replicas: usize) -> Result<(), Error> {
        let machine_pool = &self.owners.machine_pool;
        let mut after = machine_pool.as_ref().clone();
        after.0.spec.replicas = i32::try_from(replicas).ok();
        let api = self
            .controller
            .context
            .api::<capi::MachinePool>(&self.pool.namespace().unwrap_or_default());
        patch::object(&api, machine_pool.as_ref(), &after, patch::Lock::Version).await?;
        Ok(())
    }
}
