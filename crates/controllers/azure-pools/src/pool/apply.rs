//! Carries out the steps of a plan. Each step holds its subject; nothing is decided here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use capstan_azure::ArmError;
use capstan_core::Classified;
use capstan_core::drain::Drained;
use capstan_core::pool::{Adoption, Refusal, Selected, Step, cause, refused_update, still_due};
use capstan_kube::patch::Lock;
use capstan_kube::runtime::{EventNote, Outcome};
use futures::StreamExt;
use kube::ResourceExt;

use super::cloud::Renewal;
use super::desired::{BOOTSTRAP_AGE, SSH_KEY_ANNOTATION};
use super::drain::{self, Terms};
use super::machines::Written;
use super::member::{Member, NodeState};
use super::observe::Observed;
use super::orphan::OLD_FINALIZER;
use super::report::applied_tags;
use super::snapshot::ScaleSetSnapshot;
use super::state::Kind;
use super::{Actor, FINALIZER};
use crate::error::Error;
use crate::model::{self, Model};

/// Before new instances are asked for, bootstrap data must be at least this fresh: tokens expire.
const FRESH_BOOTSTRAP: Duration = Duration::from_secs(5);
/// At most this many nodes are drained at once.
const DRAINS: usize = 16;
/// At most this many objects are written at once.
pub(super) const WRITES: usize = 8;

impl Actor<'_> {
    pub(super) async fn apply(&mut self, step: Step, observed: &mut Observed) -> Result<Outcome, Error> {
        match step {
            Step::AddFinalizer => {
                self.scope.add_finalizer(FINALIZER).await?;
                self.scope.remove_finalizer(OLD_FINALIZER).await?;
                return Ok(Outcome::Observe);
            }
            Step::SetSshKey => {
                self.set_ssh_key().await?;
                return Ok(Outcome::Observe);
            }
            Step::CreateScaleSet { capacity } => self.create_scale_set(observed, capacity).await?,
            Step::AdoptScaleSet(adoptions) => self.adopt_scale_set(observed, &adoptions).await?,
            Step::CreateObjects(names) => self.create_objects(observed, &names).await?,
            Step::ReleaseObjects(names) => self.release_objects(observed, &names).await?,
            Step::RecordModels(names) => self.record_models(observed, &names).await?,
            Step::DeleteStray(name) => {
                if let Some(machine) = observed.strays.iter().find(|machine| machine.name_any() == name) {
                    let written = self.writer().delete_owner(machine).await?;
                    self.note(written);
                }
            }
            Step::DeleteOwner { name, skip_drain } => {
                if let Some(owner) = observed.member(&name).and_then(|member| member.owner.as_ref()) {
                    let writer = self.writer();
                    if skip_drain {
                        writer.exclude_drain(owner).await?;
                    }
                    let written = writer.delete_owner(owner).await?;
                    self.note(written);
                }
            }
            Step::Drain(names) => {
                self.drain(observed, &names).await;
                return Ok(Outcome::Observe);
            }
            Step::DeleteInstances(drained) => self.cloud().await?.delete(drained).await?,
            Step::UpdateInstances(drained) => return self.renew(drained, Renewal::Update).await,
            Step::ReimageInstances(drained) => {
                let ids = ids(&drained);
                // Noted first: an instance that a process reimages and forgets would be reimaged again and again.
                for member in observed
                    .members
                    .iter()
                    .filter(|member| ids.iter().any(|id| id == member.id()))
                {
                    let written = self.writer().begin_reimage(member).await?;
                    self.note(written);
                }
                return self.renew(drained, Renewal::Reimage).await;
            }
            Step::FinishUpdate { name, model, uncordon } => {
                self.finish_update(observed, &name, &model, uncordon).await?;
            }
            Step::AbandonUpdate { name, reason } => {
                if let Some(member) = observed.member(&name) {
                    let written = self.writer().abandon_update(member, reason).await?;
                    self.note(written);
                }
            }
            Step::Remove(selected) => self.remove(observed, &selected).await?,
            Step::StartUpdate { machine, reimage } => self.start_update(observed, machine, reimage).await?,
            Step::ApplyScaleSet {
                model,
                capacity,
                grows,
                list,
            } => {
                if self.apply_scale_set(observed, model, capacity, grows).await? {
                    match list {
                        true => observed.requeue(Duration::ZERO),
                        false => self.state.instances_stale = !self.state.busy(Kind::Change),
                    }
                }
            }
            Step::RefreshBootstrap => self.refresh_bootstrap(observed).await?,
            Step::ApplyTags => {
                if let Some(model) = &observed.model {
                    let applied = applied_tags(self.pool());
                    self.cloud().await?.apply_tags(model, &applied).await?;
                }
            }
            Step::SetReplicas(replicas) => self.set_replicas(replicas).await?,
            Step::DeleteScaleSet => {
                if self.cloud().await?.remove().await? {
                    self.state.set_stale = true;
                    observed.requeue(Duration::ZERO);
                }
            }
            Step::ReleasePool => {
                self.scope.remove_finalizer(OLD_FINALIZER).await?;
                self.scope.remove_finalizer(FINALIZER).await?;
                return Ok(Outcome::Wait(None));
            }
        }
        Ok(Outcome::Done)
    }

    /// Notes a write that the caches do not show yet.
    pub(super) fn note(&mut self, written: impl IntoIterator<Item = Written>) {
        let (machines, owners) = (&self.controller.machines, &self.controller.owner_machines);
        for written in written {
            match written {
                Written::Machine(object) => self.scope.wrote(machines, object.as_ref()),
                Written::DeletedMachine(object) => self.scope.deleted(machines, object.as_ref()),
                Written::DeletedOwner(owner) => self.scope.deleted(owners, owner.as_ref()),
            }
        }
    }

    /// Notes the writes of several machines. Fails with the first error, once all writes are noted.
    pub(super) fn note_all(&mut self, results: Vec<Result<Option<Written>, Error>>) -> Result<(), Error> {
        let mut failed = None;
        for result in results {
            match result {
                Ok(written) => self.note(written),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn record(&mut self, reason: &'static str, message: String) {
        self.state.events.push(EventNote::normal(reason, message));
    }

    /// Writes a key into the spec, so that it stays the same, and into an annotation for the day when a manifest without a
    /// key is applied again: that must not roll the pool.
    async fn set_ssh_key(&mut self) -> Result<(), Error> {
        let mut after = self.pool().clone();
        let kept = after.annotations().get(SSH_KEY_ANNOTATION).cloned();
        let made = || Error::NotReady("an SSH key for spec.template.sshPublicKey cannot be generated".to_owned());
        let key = kept.or_else(model::generate_ssh_key).ok_or_else(made)?;
        after
            .annotations_mut()
            .insert(SSH_KEY_ANNOTATION.to_owned(), key.clone());
        after.spec.template.ssh_public_key = Some(key);
        self.scope.write_object(&after, Lock::Version).await?;
        Ok(())
    }

    async fn create_scale_set(&mut self, observed: &mut Observed, capacity: usize) -> Result<(), Error> {
        let Some(model) = observed.model.clone() else {
            return Ok(());
        };
        self.cloud().await?.create(&model, capacity).await?;
        let message = format!("created scale set {} with {capacity} instances", model.name);
        self.record("ScaleSetCreated", message);
        observed.created = true;
        observed.requeue(Duration::ZERO);
        Ok(())
    }

    /// Takes a scale set over. The machines get their records before the set gets its mark.
    async fn adopt_scale_set(&mut self, observed: &mut Observed, adoptions: &[Adoption]) -> Result<(), Error> {
        let Some(model) = observed.model.clone() else {
            return Ok(());
        };
        let writer = self.writer();
        for adoption in adoptions {
            let written = match adoption {
                Adoption::CreateObject { name, has_model } => {
                    let recorded = has_model.then_some(model.hash.as_str());
                    let instance = observed.member(name).and_then(|member| member.instance.as_ref());
                    let Some(instance) = instance else { continue };
                    let created = writer.create(name, instance, recorded).await?;
                    created.map(|object| Written::Machine(Box::new(object)))
                }
                Adoption::RecordModel(name) => match observed.member(name) {
                    Some(member) => writer.record_model(member, &model.hash).await?,
                    None => continue,
                },
            };
            self.note(written);
        }
        self.cloud().await?.adopt(&model).await?;
        let message = format!("took over scale set {} as it is", model.name);
        self.record("ScaleSetAdopted", message);
        // The next reconcile waits until the cache shows the records.
        observed.requeue(Duration::ZERO);
        Ok(())
    }

    async fn create_objects(&mut self, observed: &mut Observed, names: &[String]) -> Result<(), Error> {
        let (writer, set) = (self.writer(), self.scale_set().unwrap_or_default());
        let members: Vec<usize> = observed.places(names);
        let creations = members.into_iter().filter_map(|n| {
            let (writer, member, set) = (&writer, &observed.members[n], &set);
            let instance = member.instance.as_ref()?;
            Some(async move { (n, writer.create(&member.name, instance, member.model(set)).await) })
        });
        let creations: Vec<_> = creations.collect();
        let created: Vec<_> = futures::stream::iter(creations).buffered(WRITES).collect().await;
        let mut failed = None;
        for (n, object) in created {
            match object {
                Ok(Some(object)) => {
                    self.scope.wrote(&self.controller.machines, &object);
                    observed.members[n].object = Some(Arc::new(object));
                }
                Ok(None) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn release_objects(&mut self, observed: &mut Observed, names: &[String]) -> Result<(), Error> {
        let writer = self.writer();
        let members = observed.places(names);
        let releases: Vec<_> = members.iter().map(|n| writer.release(&observed.members[*n])).collect();
        let released: Vec<_> = futures::stream::iter(releases).buffer_unordered(WRITES).collect().await;
        self.note_all(released)?;
        observed.members.retain(|member| !names.contains(&member.name));
        Ok(())
    }

    async fn record_models(&mut self, observed: &mut Observed, names: &[String]) -> Result<(), Error> {
        let (writer, set) = (self.writer(), self.scale_set().unwrap_or_default());
        for n in observed.places(names) {
            let member = &observed.members[n];
            if let Some(model) = member.model(&set) {
                let written = writer.record_model(member, model).await?;
                self.note(written);
            }
        }
        Ok(())
    }

    fn terms(&self) -> Terms {
        let own = self.pool().spec.node_drain_timeout;
        let own = own.filter(|timeout| !timeout.is_negative()).map(Duration::from);
        let timeout = self.owners.machine_pool.spec.template.spec.drain_timeout().or(own);
        Terms {
            timeout: timeout.filter(|timeout| !timeout.is_zero()),
            cluster_deleted: self.owners.cluster.metadata.deletion_timestamp.is_some(),
            wake: self.scope.waker(),
            clock: self.scope.context.clock,
        }
    }

    /// Cordons and drains the nodes of these machines. The next observation takes the outcomes, and those of the drains
    /// before: Cluster API leaves machines to us one after the other.
    async fn drain(&mut self, observed: &mut Observed, names: &[String]) {
        let (terms, workload, now) = (self.terms(), self.workload(), self.scope.now());
        let members = observed.places(names);
        self.confirm_missing(observed, &members, &terms).await;
        let pool_deleted = self.pool().metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let work = members.into_iter().filter_map(|n| {
            let (member, workload, terms) = (&observed.members[n], &workload, &terms);
            let since = member.drain_since(now).or(pool_deleted)?;
            Some(async move { (member.name.clone(), drain::run(member, workload, terms, since).await) })
        });
        let work: Vec<_> = work.collect();
        let drains: Vec<_> = futures::stream::iter(work).buffer_unordered(DRAINS).collect().await;
        self.state.drains = std::mem::take(&mut observed.drains);
        self.state.drains.extend(drains);
    }

    /// A node that the cache lacks counts as missing only once a list of the cluster itself says so: one list for
    /// all of them.
    async fn confirm_missing(&self, observed: &mut Observed, members: &[usize], terms: &Terms) {
        let missing = |n: &&usize| matches!(observed.members[**n].node, NodeState::Missing);
        let unconfirmed: Vec<usize> = members.iter().filter(missing).copied().collect();
        if unconfirmed.is_empty() || terms.cluster_deleted {
            return;
        }
        let listed = drain::listed(&self.workload()).await;
        for n in unconfirmed {
            let member = &mut observed.members[n];
            if let Some(why) = drain::not_missing(member.provider_id(), member.node_name().as_ref(), &listed) {
                member.node = NodeState::Unknown(why);
            }
        }
    }

    /// Updates or reimages instances. The next observation shows which of them Azure has refused.
    async fn renew(&mut self, drained: Vec<Drained>, renewal: Renewal) -> Result<Outcome, Error> {
        let ids = ids(&drained);
        let Err(error) = self.cloud().await?.renew(drained, renewal).await else {
            return Ok(Outcome::Done);
        };
        let Some(why) = refused_update(error.class()) else {
            return Err(error);
        };
        self.state.events.push(EventNote::warning(why, error.to_string()));
        self.state.refused_updates.extend(ids.into_iter().map(|id| (id, why)));
        Ok(Outcome::Observe)
    }

    async fn finish_update(
        &mut self,
        observed: &Observed,
        name: &str,
        model: &str,
        uncordon: bool,
    ) -> Result<(), Error> {
        let Some(member) = observed.member(name) else {
            return Ok(());
        };
        if let Some(node) = member.node.node().filter(|_| uncordon) {
            self.workload().connection().await?.drainer.uncordon(node).await?;
        }
        let written = self.writer().finish_update(member, model).await?;
        self.note(written);
        Ok(())
    }

    /// Returns the machines that are still to go, by a newer look at their nodes.
    async fn still_due(&self, observed: &Observed, selected: &[Selected]) -> Vec<Selected> {
        let mut available = BTreeSet::new();
        for one in selected.iter().filter(|one| one.unless_available) {
            if let Some(member) = observed.member(&one.name)
                && self.is_available(member).await
            {
                available.insert(one.name.clone());
            }
        }
        still_due(selected, &available)
    }

    async fn remove(&mut self, observed: &Observed, selected: &[Selected]) -> Result<(), Error> {
        let due = self.still_due(observed, selected).await;
        let (by_owner, own): (Vec<&Selected>, Vec<&Selected>) = due.iter().partition(|one| one.by_owner);
        let members = |some: Vec<&Selected>| -> Vec<&Member> {
            let found = some.into_iter().filter_map(|one| observed.member(&one.name));
            found.collect()
        };
        let (writer, mut written) = (self.writer(), Vec::new());
        let mut done = writer.delete_all(&members(own), &mut written).await;
        for owner in members(by_owner).into_iter().filter_map(|member| member.owner.as_ref()) {
            match writer.delete_owner(owner).await {
                Ok(deleted) => written.extend(deleted),
                Err(error) => done = done.and(Err(error)),
            }
        }
        self.note(written);
        done
    }

    async fn start_update(&mut self, observed: &Observed, selected: Selected, reimage: bool) -> Result<(), Error> {
        for one in self.still_due(observed, &[selected]).await {
            if let Some(member) = observed.member(&one.name) {
                let written = self.writer().start_update(member, reimage).await?;
                self.note(written);
            }
        }
        Ok(())
    }

    /// Gives the scale set its model and its capacity, in one call that Azure refuses if somebody else was first. Whether Azure
    /// accepted it.
    async fn apply_scale_set(
        &mut self,
        observed: &mut Observed,
        new_model: bool,
        capacity: usize,
        grows: bool,
    ) -> Result<bool, Error> {
        let Some(set) = self.scale_set() else {
            return Ok(false);
        };
        let mut model = match observed.model.clone() {
            Some(model) => model,
            None => self.present_model(&set, FRESH_BOOTSTRAP).await?,
        };
        if self.cloud().await?.capacity_changed().await? {
            observed.requeue(Duration::ZERO);
            return Ok(false);
        }
        if grows && !new_model && observed.model.is_some() && self.bootstrap_age() > FRESH_BOOTSTRAP {
            model = self.with_fresh_bootstrap(model).await?;
        }
        let fresh = grows && set.custom_data.as_deref() != Some(&model.custom_data_hash);
        let done = match new_model {
            true => {
                let applied = applied_tags(self.pool());
                self.cloud().await?.replace(&model, capacity, &applied).await
            }
            false => self.cloud().await?.scale(&model, capacity, fresh).await,
        };
        if let Err(Error::Azure(error)) = &done {
            if error.is_precondition_failed() {
                observed.requeue(Duration::ZERO);
                return Ok(false);
            }
            let refusal = |arm: &ArmError| Refusal {
                class: error.class(),
                status: arm.status,
                no_room: arm.has_no_room(),
            };
            if let Some(cause) = error.arm().and_then(|arm| cause(refusal(arm), capacity)) {
                self.creation_failed(error.to_string(), cause);
                if error.arm().is_some_and(ArmError::is_quota) {
                    self.state.retry.out_of_quota();
                }
            }
        }
        done?;
        self.state.retry.asked();
        if new_model {
            let message = format!("model {} is rolled out", model.hash);
            self.record("ModelChanged", message);
            observed.requeue(Duration::ZERO);
        }
        Ok(true)
    }

    /// The model that the scale set has, where the spec cannot say another one, with bootstrap data no older than `age`.
    pub(super) async fn present_model(&mut self, set: &ScaleSetSnapshot, age: Duration) -> Result<Model, Error> {
        let missing = || Error::NotReady("the MachinePool has no bootstrap data yet".to_owned());
        let bootstrap = self.bootstrap(age).await?.ok_or_else(missing)?;
        let hash = set.model.clone().unwrap_or_default();
        Ok(model::present(&set.whole, &hash, &bootstrap))
    }

    /// The same model with newer bootstrap data. A change of more than a token is left for the next reconcile.
    async fn with_fresh_bootstrap(&mut self, model: Model) -> Result<Model, Error> {
        let Some(bootstrap) = self.bootstrap(FRESH_BOOTSTRAP).await? else {
            return Ok(model);
        };
        let reread = self.model(&bootstrap).await?;
        Ok(if reread.hash == model.hash { reread } else { model })
    }

    /// Whoever else adds instances makes them from the scale set as it is: its bootstrap data must not be old.
    async fn refresh_bootstrap(&mut self, observed: &Observed) -> Result<(), Error> {
        match observed.newest() {
            Some(model) => self.cloud().await?.refresh_custom_data(model).await,
            None => Ok(()),
        }
    }

    fn bootstrap_age(&self) -> Duration {
        let read = self.state.bootstrap.as_ref();
        read.map_or(BOOTSTRAP_AGE, |(_, _, at)| self.since(*at))
    }
}

fn ids(drained: &[Drained]) -> Vec<String> {
    drained.iter().map(|proof| proof.machine().to_owned()).collect()
}
