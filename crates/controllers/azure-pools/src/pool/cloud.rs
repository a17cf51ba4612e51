//! The Azure side of a pool: read as seldom as possible. `change.rs` writes the scale set, `instances.rs` its instances.
//!
//! Invariant: a scale set of somebody else is never in the snapshot, so that nothing is planned for it, and every write
//! proves again whose the scale set is.
//!
//! Invariant: what Azure was asked for is remembered before anything else happens, and an operation is over only when
//! Azure says so, or when the list shows its whole effect.

mod change;
mod instances;

pub use instances::Renewal;

use std::collections::BTreeSet;

use capstan_azure::model::{ScaleSet, VirtualMachine};
use capstan_azure::{ArmError, Client, Operation, Owned, Progress};
use capstan_core::clock::Clock;
use capstan_core::pool::Claim;
use capstan_core::{Class, Classified};

use super::snapshot::{InstanceSnapshot, ScaleSetSnapshot, Snapshot};
use super::state::{Kind, State, Tracked};
use crate::error::Error;

/// One pool's place in Azure.
pub struct Cloud<'a> {
    pub client: Client,
    pub clock: Clock,
    pub group: String,
    pub name: String,
    /// Who the pool is: its scale set's tags say the same.
    pub claim: Claim,
    pub state: &'a mut State,
}

/// An operation that Azure ended with an error.
#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    pub ids: BTreeSet<String>,
    pub message: String,
    /// Whether Azure had no room for more instances.
    pub no_room: bool,
}

impl Cloud<'_> {
    /// Polls what is due, then reads the scale set and its instances as far as anything may have changed.
    pub async fn refresh(&mut self, resync: std::time::Duration) -> Result<Vec<Failure>, Error> {
        let failures = self.poll().await?;
        let now = self.clock.instant();
        self.state.check_untracked(now);
        if self.state.recheck_in(now).is_some_and(|left| left.is_zero()) {
            (self.state.instances_stale, self.state.recheck_at) = (true, None);
        }
        let due = self
            .state
            .snapshot
            .as_ref()
            .is_none_or(|snapshot| now.saturating_duration_since(snapshot.at) >= resync);
        if due || self.state.set_stale {
            self.read_set().await?;
        }
        if due || self.state.instances_stale {
            self.list().await?;
        }
        Ok(failures)
    }

    /// Reads the scale set for its deletion; whatever else was under way ends with it.
    pub async fn refresh_set(&mut self) -> Result<(), Error> {
        self.poll().await?;
        self.state.operations.retain(|tracked| tracked.kind == Kind::Remove);
        match self.state.busy(Kind::Remove) {
            true => Ok(()),
            false => self.read_set().await,
        }
    }

    async fn poll(&mut self) -> Result<Vec<Failure>, Error> {
        let mut failures = Vec::new();
        let mut kept = Vec::new();
        let mut trouble = None;
        for mut tracked in std::mem::take(&mut self.state.operations) {
            if trouble.is_some() || !tracked.operation.due_in(self.clock.now()).is_zero() {
                kept.push(tracked);
                continue;
            }
            match self.client.poll(&mut tracked.operation).await {
                Ok(Progress::Running(interval)) => {
                    tracked.put_off(interval, self.clock.now());
                    kept.push(tracked);
                }
                Ok(Progress::Done(_)) => self.ended(&tracked, false),
                Err(error) if is_outcome(&error) => {
                    self.ended(&tracked, true);
                    let Tracked { kind, ids, .. } = tracked;
                    failures.push(Failure {
                        kind,
                        ids,
                        message: error.to_string(),
                        no_room: error.arm().is_some_and(ArmError::has_no_room),
                    });
                }
                Err(error) => {
                    trouble = Some(error);
                    kept.push(tracked);
                }
            }
        }
        self.state.operations = kept;
        match trouble {
            Some(error) => Err(error.into()),
            None => Ok(failures),
        }
    }

    fn ended(&mut self, tracked: &Tracked, failed: bool) {
        if tracked.kind == Kind::Delete {
            self.state.retry.room_again(self.clock.instant());
        }
        self.state.etag_stale = true;
        self.state.instances_stale = true;
        self.state.ambiguous |= failed;
        // A change that ended well needs no second read: the list shows the rest.
        self.state.set_stale |= failed || tracked.kind == Kind::Remove || self.flexible();
        if let (Kind::Change, Some(snapshot)) = (tracked.kind, self.state.snapshot.as_mut())
            && let Some(set) = snapshot.set.as_mut()
        {
            set.state = "Succeeded".to_owned();
        }
    }

    async fn read_set(&mut self) -> Result<(), Error> {
        let set = self.client.get_scale_set(&self.group, &self.name).await?;
        let set = set.as_ref().map(|set| self.state.read(set));
        let foreign = set.as_ref().and_then(|set| set.refusal(&self.claim));
        let mut set = set.filter(|_| foreign.is_none());
        self.state.foreign = foreign.map(|why| self.foreign(&why));
        (self.state.set_stale, self.state.etag_stale) = (false, false);
        let ambiguous = self.state.ambiguous;
        self.state.ambiguous &= set.as_ref().is_some_and(ScaleSetSnapshot::in_progress);
        let capacity = |set: &Option<ScaleSetSnapshot>| set.as_ref().map(|set| set.capacity);
        let old = self
            .state
            .snapshot
            .as_ref()
            .and_then(|snapshot| capacity(&snapshot.set));
        if let (Some(old), Some(set)) = (old, set.as_mut()) {
            // Azure may lower the capacity only when a delete of ours ends.
            let ours = set.capacity.saturating_sub(old).min(self.state.deleting().len());
            set.capacity -= ours;
        }
        let more = capacity(&set)
            .unwrap_or_default()
            .saturating_sub(old.unwrap_or_default());
        let kept = more.min(self.state.kept);
        self.state.kept = match self.state.busy(Kind::Delete) {
            true => self.state.kept - kept,
            false => 0,
        };
        match self.state.snapshot.as_mut() {
            Some(snapshot) => {
                // What we did not do ourselves, somebody else did.
                if let (Some(old), Some(new)) = (capacity(&snapshot.set), capacity(&set))
                    && !ambiguous
                    && let Some(external) = self.state.external.as_mut()
                {
                    *external = (*external + new).saturating_sub(old + kept);
                }
                // Instances that somebody else adds are of the model that the scale set has now: they are listed, and so
                // recorded, before it gets another one.
                let live = snapshot.instances.iter().filter(|instance| !instance.is("Deleting"));
                let listed = Some(live.count());
                self.state.instances_stale |= capacity(&set) != capacity(&snapshot.set) && capacity(&set) != listed;
                snapshot.set = set;
            }
            None => {
                self.state.snapshot = Some(Snapshot::new(set, self.clock.instant()));
                self.state.instances_stale = true;
            }
        }
        Ok(())
    }

    async fn list(&mut self) -> Result<(), Error> {
        let Some(set) = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.clone()) else {
            self.state.instances_stale = false;
            if let Some(snapshot) = self.state.snapshot.as_mut() {
                snapshot.listed(Vec::new(), self.clock.instant());
            }
            return Ok(());
        };
        let instances = self.instances(&set).await?;
        self.state.instances_stale = false;
        if let Some(snapshot) = self.state.snapshot.as_mut() {
            snapshot.listed(instances, self.clock.instant());
        }
        self.settle();
        self.check_capacity();
        if self.state.set_stale {
            self.read_set().await?;
        }
        Ok(())
    }

    async fn instances(&mut self, set: &ScaleSetSnapshot) -> Result<Vec<InstanceSnapshot>, Error> {
        if set.flexible {
            let vms = self.client.list_flexible_vms(&self.group, &set.id).await?;
            let owned = set.owned(&self.claim).ok();
            let member = |vm: &VirtualMachine| InstanceSnapshot::flexible(vm, &set.id, owned.as_ref());
            return Ok(vms.iter().filter_map(member).collect());
        }
        let listed = match self.client.list_instances(&self.group, &self.name).await {
            // The list belongs to the scale set: without it there are no instances, with it the answer is wrong.
            Err(error) if error.is_not_found() => match self.client.get_scale_set(&self.group, &self.name).await? {
                Some(_) => return Err(error.into()),
                None => {
                    self.state.set_stale = true;
                    Vec::new()
                }
            },
            listed => listed?,
        };
        Ok(listed.iter().filter_map(InstanceSnapshot::uniform).collect())
    }

    /// Returns the message about a scale set of this name that is somebody else's.
    fn foreign(&self, why: &str) -> String {
        let (name, group, remedy) = (&self.name, &self.group, self.claim.remedy());
        format!("scale set {name} in resource group {group} is not this pool's: {why}; {remedy}")
    }

    /// Proof that the scale set, as last read, belongs to this pool.
    fn owned(&self) -> Result<Owned<ScaleSet>, Error> {
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let set = set.ok_or_else(|| Error::NotReady(format!("scale set {} was not read yet", self.name)))?;
        Ok(set.owned(&self.claim)?)
    }

    fn flexible(&self) -> bool {
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        set.is_some_and(|set| set.flexible)
    }

    /// Ends operations whose whole effect the list shows: that saves polling them.
    fn settle(&mut self) {
        let Some(snapshot) = &self.state.snapshot else { return };
        let capacity = snapshot.set.as_ref().map_or(0, |set| set.capacity);
        let deleting = self.state.deleting();
        let gone = |ids: &BTreeSet<String>| !snapshot.instances.iter().any(|instance| ids.contains(&instance.id));
        let live = snapshot
            .instances
            .iter()
            .filter(|i| !i.is("Deleting") && !deleting.contains(&i.id));
        let made = live.clone().count() == capacity && live.clone().all(|instance| instance.is("Succeeded"));
        let updated = |ids: &BTreeSet<String>| {
            let mut theirs = snapshot.instances.iter().filter(|instance| ids.contains(&instance.id));
            theirs.all(|instance| instance.latest && instance.is("Succeeded"))
        };
        let before = self.state.operations.len();
        let deletes = self
            .state
            .operations
            .iter()
            .filter(|tracked| tracked.kind == Kind::Delete);
        if deletes.clone().any(|tracked| gone(&tracked.ids)) {
            self.state.retry.room_again(self.clock.instant());
        }
        self.state.operations.retain(|tracked| match tracked.kind {
            Kind::Change => !made,
            Kind::Delete => !gone(&tracked.ids),
            Kind::Update => !updated(&tracked.ids),
            // No list shows how far a reimage is.
            Kind::Reimage | Kind::Remove => true,
        });
        let changed = self.state.operations.len() != before;
        self.state.etag_stale |= changed;
        // A VM that goes by itself need not lower its set's capacity.
        self.state.set_stale |= changed && self.flexible();
        if let Some(set) = self
            .state
            .snapshot
            .as_mut()
            .and_then(|snapshot| snapshot.set.as_mut())
            .filter(|_| changed && made)
        {
            set.state = "Succeeded".to_owned();
        }
    }

    /// When the instances are not as many as were asked for and nothing is under way, the capacity may have been changed
    /// behind our back.
    fn check_capacity(&mut self) {
        let Some(snapshot) = &self.state.snapshot else { return };
        let capacity = snapshot.set.as_ref().map_or(0, |set| set.capacity);
        let live = snapshot
            .instances
            .iter()
            .filter(|instance| !instance.is("Deleting"))
            .count();
        let differs = (self.state.operations.is_empty() && live != capacity) || live > capacity;
        let confirmed = snapshot.confirmed;
        self.state.set_stale |= differs;
        if differs && !confirmed {
            self.state.recheck_instances(self.clock.instant());
        }
    }

    fn track(&mut self, kind: Kind, ids: BTreeSet<String>, operation: Option<Operation>) {
        self.state.instances_stale = true;
        if let Some(operation) = operation {
            let tracked = Tracked::new(kind, ids, operation, self.clock.now());
            self.state.operations.push(tracked);
        }
    }

    fn remember(&mut self, set: &ScaleSet) {
        self.state.kept = 0;
        let set = Some(self.state.read(set));
        match self.state.snapshot.as_mut() {
            Some(snapshot) => snapshot.set = set,
            None => {
                self.state.snapshot = Some(Snapshot::new(set, self.clock.instant()));
            }
        }
    }

    /// The answer to what we asked for may have been lost after the work was done: what is different now is our doing.
    fn mark_ambiguous(&mut self) {
        (self.state.set_stale, self.state.instances_stale, self.state.ambiguous) = (true, true, true);
    }

    /// Returns Azure's message about instances that it did not create.
    pub async fn shortage(&self) -> Result<String, Error> {
        let view = self.client.get_scale_set_view(&self.group, &self.name).await?;
        let statuses = view.and_then(|view| view.statuses).unwrap_or_default();
        let failed = statuses
            .into_iter()
            .find(|status| status.level.as_deref() == Some("Error"));
        let message = failed.and_then(|status| status.message.or(status.display_status));
        let why = message.unwrap_or_else(|| "provisioningState is Failed".to_owned());
        Ok(format!(
            "Azure did not create all instances of scale set {}: {why}",
            self.name
        ))
    }
}

/// Whether an error of a poll is how the operation ended, and not trouble in asking.
fn is_outcome(error: &capstan_azure::Error) -> bool {
    match error.arm() {
        Some(arm) => arm.status == 0 || matches!(error.class(), Class::Terminal),
        None => false,
    }
}

#[cfg(test)]
mod tests;
