//! The Azure side of a pool: read as seldom as possible, and changed in batches.
//!
//! Invariant: what Azure was asked for is remembered before anything else happens, and an operation is over only when
//! Azure says so, or when the list shows its whole effect.

use std::collections::BTreeSet;

use capstan_azure::client::When;
use capstan_azure::model::{
    ScaleSet, ScaleSetOsProfile, ScaleSetProperties, Tags, VirtualMachine, VirtualMachineProfile,
};
use capstan_azure::{Client, Operation, Owned, Progress};
use capstan_core::clock::Clock;
use capstan_core::drain::Drained;
use capstan_core::{Class, Classified};

use super::snapshot::{InstanceSnapshot, ScaleSetSnapshot, Snapshot};
use super::state::{Ask, Kind, State, Tracked};
use crate::error::Error;
use crate::model::{self, CUSTOM_DATA_TAG, HASH_TAG, Model};

/// One pool's place in Azure.
pub struct Cloud<'a> {
    pub client: Client,
    pub clock: Clock,
    pub group: String,
    pub name: String,
    pub state: &'a mut State,
}

/// An operation that Azure ended with an error.
#[derive(Debug)]
pub struct Failure {
    pub kind: Kind,
    pub ids: BTreeSet<String>,
    pub message: String,
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
                Ok(Progress::Running(_)) => kept.push(tracked),
                Ok(Progress::Done(_)) => self.ended(&tracked, false),
                Err(error) if is_outcome(&error) => {
                    self.ended(&tracked, true);
                    let Tracked { kind, ids, .. } = tracked;
                    failures.push(Failure {
                        kind,
                        ids,
                        message: error.to_string(),
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
        let mut set = set.as_ref().map(ScaleSetSnapshot::read);
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
        match self.state.snapshot.as_mut() {
            Some(snapshot) => {
                // What we did not do ourselves, somebody else did.
                if let (Some(old), Some(new)) = (capacity(&snapshot.set), capacity(&set))
                    && !ambiguous
                    && let Some(external) = self.state.external.as_mut()
                {
                    *external = (*external + new).saturating_sub(old);
                }
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
            let owned = set.owned().ok();
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

    /// Proof that the scale set, as last read, belongs to a cluster of ours.
    fn owned(&self) -> Result<Owned<ScaleSet>, Error> {
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let set = set.ok_or_else(|| Error::NotReady(format!("scale set {} was not read yet", self.name)))?;
        Ok(set.owned()?)
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
            Kind::Remove => true,
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
            self.state.operations.push(Tracked { kind, ids, operation });
        }
    }

    fn remember(&mut self, set: &ScaleSet) {
        let set = Some(ScaleSetSnapshot::read(set));
        match self.state.snapshot.as_mut() {
            Some(snapshot) => snapshot.set = set,
            None => {
                self.state.snapshot = Some(Snapshot::new(set, self.clock.instant()));
            }
        }
    }

    /// Creates the scale set with that capacity.
    pub async fn create(&mut self, model: &Model, capacity: usize) -> Result<(), Error> {
        let mut wanted = with_capacity(&model.set, capacity);
        model::set_admin_password(&mut wanted)?;
        self.put(model, wanted, When::Absent).await
    }

    /// Gives the scale set a new model, with that capacity. Azure keeps what a PUT does not name: what is not wanted any
    /// more is named, and of the tags only those that we `applied` before go.
    pub async fn replace(&mut self, model: &Model, capacity: usize, applied: &BTreeSet<String>) -> Result<(), Error> {
        let when = self.unchanged().await?;
        let mut wanted = with_capacity(&model.set, capacity);
        if let Some(set) = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref()) {
            let mut tags = set.tags.clone();
            tags.retain(|name, _| !applied.contains(name));
            tags.extend(wanted.tags.take().unwrap_or_default());
            wanted.tags = Some(tags);
            wanted = model::replacing(wanted, &set.whole);
        }
        self.put(model, wanted, when).await
    }

    /// Only if nobody has changed the scale set since it was last read. What our own operations have changed is read
    /// first.
    async fn unchanged(&mut self) -> Result<When, Error> {
        if self.state.etag_stale {
            self.read_set().await?;
        }
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        Ok(set
            .and_then(|set| set.etag.clone())
            .map_or(When::Always, When::Unchanged))
    }

    /// Reads the scale set again where our own operations have changed it since the last read. Whether its capacity is
    /// another one than the plan was made for: somebody else has set it.
    pub async fn capacity_changed(&mut self) -> Result<bool, Error> {
        let capacity = |state: &State| Some(state.snapshot.as_ref()?.set.as_ref()?.capacity);
        let planned = capacity(&*self.state);
        if self.state.etag_stale {
            self.read_set().await?;
        }
        Ok(capacity(&*self.state) != planned)
    }

    async fn put(&mut self, model: &Model, wanted: ScaleSet, when: When) -> Result<(), Error> {
        let ask = Ask::new(model, wanted.capacity(), true);
        self.state.check_refused(&ask, self.clock.instant())?;
        let put = self.client.put_scale_set(&self.group, &self.name, &wanted, when).await;
        self.changed(put, Some(ask))?;
        self.none_is_latest();
        Ok(())
    }

    /// Sets the capacity; new custom data goes along, so that new instances never start with stale bootstrap data.
    pub async fn scale(&mut self, model: &Model, capacity: usize, custom_data: bool) -> Result<(), Error> {
        let ask = Ask::new(model, i64::try_from(capacity).unwrap_or(i64::MAX), false);
        self.state.check_refused(&ask, self.clock.instant())?;
        let mut change = ScaleSet {
            sku: with_capacity(&model.set, capacity).sku,
            ..ScaleSet::default()
        };
        if custom_data {
            change.properties = Some(custom_data_only(&model.set));
            change.tags = Some(self.tags(model));
        }
        let when = self.unchanged().await?;
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, Some(ask))?;
        if custom_data {
            self.none_is_latest();
        }
        Ok(())
    }

    /// Gives new instances newer custom data, and changes nothing else.
    pub async fn refresh_custom_data(&mut self, model: &Model) -> Result<(), Error> {
        let change = ScaleSet {
            properties: Some(custom_data_only(&model.set)),
            tags: Some(self.tags(model)),
            ..ScaleSet::default()
        };
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, When::Always)
            .await;
        self.changed(patched, None)?;
        self.none_is_latest();
        Ok(())
    }

    /// Gives the scale set the tags that pool and cluster have, and removes those that we `applied` before. No instance is
    /// replaced for it.
    pub async fn apply_tags(&mut self, model: &Model, applied: &BTreeSet<String>) -> Result<(), Error> {
        let when = self.unchanged().await?;
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let mut tags = set.map(|set| set.tags.clone()).unwrap_or_default();
        tags.retain(|name, _| !applied.contains(name));
        let wanted = model.set.tags.clone().unwrap_or_default();
        // A change of tags brings no other model.
        tags.extend(
            wanted
                .into_iter()
                .filter(|(name, _)| !model::OWN_TAGS.contains(&name.as_str())),
        );
        let change = ScaleSet {
            tags: Some(tags),
            ..ScaleSet::default()
        };
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, None)
    }

    /// A new model makes every instance that exists one of an older model, as the next list will say.
    fn none_is_latest(&mut self) {
        let instances = self
            .state
            .snapshot
            .iter_mut()
            .flat_map(|snapshot| &mut snapshot.instances);
        instances.for_each(|instance| instance.latest = false);
    }

    /// Notes the model on a scale set that somebody else made and that fits: nothing else is touched.
    pub async fn adopt(&mut self, model: &Model) -> Result<(), Error> {
        let change = ScaleSet {
            tags: Some(self.tags(model)),
            ..ScaleSet::default()
        };
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, When::Always)
            .await;
        self.changed(patched, None)
    }

    /// All tags that are there, whoever set them, and ours.
    fn tags(&self, model: &Model) -> Tags {
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let mut tags = set.map(|set| set.tags.clone()).unwrap_or_default();
        tags.extend(model.set.tags.clone().unwrap_or_default());
        tags.insert(HASH_TAG.to_owned(), model.hash.clone());
        tags.insert(CUSTOM_DATA_TAG.to_owned(), model.custom_data_hash.clone());
        tags
    }

    fn changed(
        &mut self,
        put: Result<capstan_azure::Put<ScaleSet>, capstan_azure::Error>,
        ask: Option<Ask>,
    ) -> Result<(), Error> {
        let put = match put {
            Ok(put) => put,
            Err(error) => {
                if error.is_precondition_failed() {
                    self.state.set_stale = true;
                    return Err(error.into());
                }
                self.mark_ambiguous();
                if error.class() == Class::Terminal {
                    self.state.refused.retain(|(refused, ..)| Some(refused) != ask.as_ref());
                    let refused = ask.map(|ask| (ask, error.to_string(), self.clock.instant()));
                    self.state.refused.extend(refused);
                }
                return Err(error.into());
            }
        };
        // A capacity that Azure takes does not make it take a model that it refused.
        let whole = ask.is_some_and(|ask| ask.is_whole());
        self.state.refused.retain(|(refused, ..)| refused.is_whole() && !whole);
        self.remember(&put.value);
        self.state.operations.retain(|tracked| tracked.kind != Kind::Change);
        self.track(Kind::Change, BTreeSet::new(), put.operation);
        Ok(())
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

    /// Deletes these instances, all in one call where Azure offers one.
    pub async fn delete(&mut self, drained: Vec<Drained>) -> Result<(), Error> {
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
            }
        }
        let over = operation.is_none();
        self.track(Kind::Delete, ids, operation);
        self.state.instances_stale = over;
    }

    /// Brings these instances to the newest model.
    pub async fn update(&mut self, drained: Vec<Drained>) -> Result<(), Error> {
        let ids: BTreeSet<String> = drained.iter().map(|proof| proof.machine().to_owned()).collect();
        let list: Vec<String> = ids.iter().cloned().collect();
        let upgrade = self.client.upgrade_instances(&self.group, &self.name, &list).await;
        let operation = upgrade.inspect_err(|_| self.mark_ambiguous())?;
        let over = operation.is_none();
        self.track(Kind::Update, ids, operation);
        self.state.instances_stale = over;
        Ok(())
    }

    /// Deletes the scale set. Whether it is gone.
    pub async fn remove(&mut self) -> Result<bool, Error> {
        if self.state.busy(Kind::Remove) {
            return Ok(false);
        }
        let operation = self.client.delete_scale_set(&self.owned()?).await?;
        let gone = operation.is_none();
        self.track(Kind::Remove, BTreeSet::new(), operation);
        Ok(gone)
    }
}

/// The same scale set, with that capacity.
fn with_capacity(set: &ScaleSet, capacity: usize) -> ScaleSet {
    let size = set.sku.as_ref().and_then(|sku| sku.name.clone()).unwrap_or_default();
    ScaleSet {
        sku: Some(model::sku(&size, Some(capacity))),
        ..set.clone()
    }
}

fn custom_data_only(set: &ScaleSet) -> ScaleSetProperties {
    let profile = set
        .properties
        .as_ref()
        .and_then(|properties| properties.virtual_machine_profile.as_ref());
    let custom_data = profile
        .and_then(|profile| profile.os_profile.as_ref())
        .and_then(|os| os.custom_data.clone());
    ScaleSetProperties {
        virtual_machine_profile: Some(VirtualMachineProfile {
            os_profile: Some(ScaleSetOsProfile {
                custom_data,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Whether an error of a poll is how the operation ended, and not trouble in asking.
fn is_outcome(error: &capstan_azure::Error) -> bool {
    match error.arm() {
        Some(arm) => arm.status == 0 || matches!(error.class(), Class::Terminal),
        None => false,
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

#[cfg(test)]
mod tests;
