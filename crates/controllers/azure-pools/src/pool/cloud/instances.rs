//! Deletes and updates of instances, and the end of the scale set.

use std::collections::BTreeSet;

use capstan_azure::Operation;
use capstan_core::drain::Drained;

use super::Cloud;
use crate::error::Error;
use crate::pool::state::Kind;

/// How an instance is renewed in place.
#[derive(Clone, Copy, Debug)]
pub enum Renewal {
    /// It is brought to the newest model. It keeps the custom data that it has: Azure gives a scale set's newer custom data to
    /// instances that are made or reimaged, and to no others
    /// (https://learn.microsoft.com/azure/virtual-machines/custom-data#faq).
    Update,
    /// It is provisioned again, with the custom data of the model that it has.
    Reimage,
}

impl Cloud<'_> {
    /// Deletes these instances, all in one call where Azure offers one.
    pub(in crate::pool) async fn delete(&mut self, drained: Vec<Drained>) -> Result<(), Error> {
        let ids: BTreeSet<String> = drained.iter().map(|proof| proof.machine().to_owned()).collect();
        self.state.drained_since = None;
        if self.flexible() {
            for id in &ids {
                let listed = self.state.snapshot.iter().flat_map(|snapshot| &snapshot.instances);
                let found = listed
                    .filter(|instance| instance.id == *id)
                    .find_map(|instance| instance.vm.clone());
                let vm = found.ok_or_else(|| {
                    Error::NotReady(format!(
                        "virtual machine {id} is not a proven member of scale set {}",
                        self.name
                    ))
                })?;
                match self.client.delete_vm(&vm).await {
                    Ok(operation) => self.deleted(BTreeSet::from([id.clone()]), operation),
                    Err(error) => {
                        self.mark_ambiguous();
                        return Err(error.into());
                    }
                }
            }
            return Ok(());
        }
        let list: Vec<String> = ids.iter().cloned().collect();
        let set = self.owned()?;
        match self.client.delete_instances(&set, &list).await {
            Ok(operation) => self.deleted(ids, operation),
            // One of them is gone already: list before asking again.
            Err(error) if is_about_instances(&error) => self.state.instances_stale = true,
            Err(error) => {
                self.mark_ambiguous();
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// The instances are as good as gone, and so is their part of the capacity.
    fn deleted(&mut self, ids: BTreeSet<String>, operation: Option<Operation>) {
        self.state.etag_stale = true;
        if let Some(snapshot) = self.state.snapshot.as_mut() {
            let listed = snapshot
                .instances
                .iter_mut()
                .filter(|i| ids.contains(&i.id) && !i.is("Deleting"));
            let count = listed.map(|instance| instance.state = "Deleting".to_owned()).count();
            if let Some(set) = snapshot.set.as_mut() {
                set.capacity = set.capacity.saturating_sub(count);
                self.state.kept += if set.flexible { count } else { 0 };
            }
        }
        let over = operation.is_none();
        self.track(Kind::Delete, ids, operation);
        self.state.instances_stale = over;
    }

    pub(in crate::pool) async fn renew(&mut self, drained: Vec<Drained>, renewal: Renewal) -> Result<(), Error> {
        let ids: BTreeSet<String> = drained.iter().map(|proof| proof.machine().to_owned()).collect();
        let list: Vec<String> = ids.iter().cloned().collect();
        let set = self.owned()?;
        let (kind, answer) = match renewal {
            Renewal::Update => {
                let upgrade = self.client.upgrade_instances(&self.group, &self.name, &list).await;
                (Kind::Update, upgrade)
            }
            Renewal::Reimage => (Kind::Reimage, self.client.reimage_instances(&set, &list).await),
        };
        let operation = answer.inspect_err(|_| self.mark_ambiguous())?;
        let over = operation.is_none();
        self.track(kind, ids, operation);
        self.state.instances_stale = over;
        Ok(())
    }

    /// Deletes the scale set. Whether it is gone.
    pub(in crate::pool) async fn remove(&mut self) -> Result<bool, Error> {
        if self.state.busy(Kind::Remove) {
            return Ok(false);
        }
        let operation = self.client.delete_scale_set(&self.owned()?).await?;
        let gone = operation.is_none();
        self.track(Kind::Remove, BTreeSet::new(), operation);
        Ok(gone)
    }
}

/// Whether Azure refused because an instance that was named does not exist any more.
fn is_about_instances(error: &capstan_azure::Error) -> bool {
    let Some(arm) = error.arm() else { return false };
    let named = arm
        .target
        .as_deref()
        .is_some_and(|target| target.contains("instanceIds"));
    (arm.status == 400 && (named || arm.message.contains("instanceId"))) || arm.status == 404
}
