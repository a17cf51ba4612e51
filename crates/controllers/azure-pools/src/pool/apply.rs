//! Carries out the steps of a plan. Each step holds its subject; nothing is decided here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_core::Class;
use capstan_core::pool::{DrainedInstance, Selected, Step};
use futures::StreamExt;
use kube::ResourceExt;

use super::drain::{self, Terms};
use super::member::{MODEL_ANNOTATION, Member, NodeState};
use super::observe::View;
use super::report::applied_tags;
use super::state::Make;
use super::{Actor, BOOTSTRAP_AGE};
use crate::error::Error;

/// Before new instances are asked for, bootstrap data must be at least this fresh: tokens expire.
const FRESH_BOOTSTRAP: Duration = Duration::from_secs(5);
/// So many nodes are drained at once.
const DRAINS: usize = 16;
/// So many objects are written at once.
pub(super) const WRITES: usize = 8;

impl Actor<'_> {
    pub(super) async fn apply(&mut self, step: Step, view: &mut View) -> Result<(), Error> {
        match step {
            Step::CreateScaleSet { capacity } => self.create_scale_set(view, capacity).await,
            Step::AdoptScaleSet => self.adopt_scale_set(view).await,
            Step::CreateObjects(names) => self.create_objects(view, &names).await,
            Step::ReleaseObjects(names) => self.release_objects(view, &names).await,
            Step::RecordModels(names) => self.record_models(view, &names).await,
            Step::DeleteStray(name) => self.delete_stray(view, &name).await,
            Step::DeleteOwner(name) => match view.member(&name).and_then(|member| member.owner.as_ref()) {
                Some(owner) => self.writer().delete_owner(owner).await,
                None => Ok(()),
            },
            Step::Drain(names) => self.drain(view, &names).await,
            Step::DeleteInstances(drained) => self.cloud().await?.delete(drained).await,
            Step::UpdateInstances(drained) => self.update_instances(view, drained).await,
            Step::FinishUpdate(name) => self.finish_update(view, &name).await,
            Step::AbandonUpdate { name, reason } => match view.member(&name) {
                Some(member) => self.writer().abandon_update(member, reason).await,
                None => Ok(()),
            },
            Step::Remove(selected) => self.remove(view, &selected).await,
            Step::StartUpdate(selected) => self.start_update(view, &selected).await,
            Step::ApplyScaleSet { model, capacity, grows } => self.apply_scale_set(view, model, capacity, grows).await,
            Step::RefreshBootstrap => self.refresh_bootstrap(view).await,
            Step::SetReplicas(replicas) => self.set_replicas(replicas).await,
            Step::DeleteScaleSet => {
                if self.cloud().await?.remove().await? {
                    self.state.set_stale = true;
                    view.requeue(Duration::ZERO);
                }
                Ok(())
            }
            Step::ReleasePool => {
                super::orphan::release(self.controller, self.pool).await?;
                self.controller.forget(self.pool);
                view.released = true;
                Ok(())
            }
        }
    }

    async fn create_scale_set(&mut self, view: &mut View, capacity: usize) -> Result<(), Error> {
        let Some(model) = view.model.clone() else { return Ok(()) };
        self.cloud().await?.create(&model, capacity).await?;
        let message = format!("created scale set {} with {capacity} instances", model.name);
        self.controller
            .recorder
            .normal(self.pool, "ScaleSetCreated", message)
            .await;
        view.created = true;
        view.requeue(Duration::ZERO);
        Ok(())
    }

    /// Takes a scale set over. Which of its instances are what is wanted is recorded on their machines before the set
    /// gets its mark: Azure's `latestModelApplied` cannot tell, because every new bootstrap token is a newer model.
    async fn adopt_scale_set(&mut self, view: &mut View) -> Result<(), Error> {
        let Some(model) = view.model.clone() else { return Ok(()) };
        let (wanted, writer) = (Make::of(&model.set), self.writer());
        let old = self.scale_set().and_then(|set| set.model);
        for member in &view.members {
            let Some(instance) = member.instance.as_ref().filter(|instance| !instance.is("Deleting")) else {
                continue;
            };
            let same = (instance.make == wanted).then_some(model.hash.as_str());
            let noted = member.annotation(MODEL_ANNOTATION);
            match (&member.object, same) {
                (None, same) => drop(writer.create(&member.name, instance, same).await?),
                // A machine of an older model than the scale set's stays one.
                (Some(_), Some(hash)) if noted.is_none() || noted == old.as_ref() => {
                    writer.record_model(member, hash).await?;
                }
                (Some(_), Some(_) | None) => {}
            }
        }
        self.cloud().await?.adopt(&model).await?;
        let message = format!("took over scale set {} as it is", model.name);
        self.controller
            .recorder
            .normal(self.pool, "ScaleSetAdopted", message)
            .await;
        // The next reconcile waits until the cache shows the records.
        view.requeue(Duration::ZERO);
        Ok(())
    }

    async fn create_objects(&mut self, view: &mut View, names: &[String]) -> Result<(), Error> {
        let (writer, set) = (self.writer(), self.scale_set().unwrap_or_default());
        let members: Vec<usize> = view.places(names);
        let creations = members.into_iter().filter_map(|n| {
            let (writer, member, set) = (&writer, &view.members[n], &set);
            let instance = member.instance.as_ref()?;
            Some(async move { (n, writer.create(&member.name, instance, member.model(set)).await) })
        });
        let creations: Vec<_> = creations.collect();
        let created: Vec<_> = futures::stream::iter(creations).buffered(WRITES).collect().await;
        for (n, object) in created {
            view.members[n].object = object?.map(Arc::new);
        }
        Ok(())
    }

    async fn release_objects(&mut self, view: &mut View, names: &[String]) -> Result<(), Error> {
        let writer = self.writer();
        let members = view.places(names);
        let releases: Vec<_> = members.iter().map(|n| writer.release(&view.members[*n])).collect();
        let released: Vec<_> = futures::stream::iter(releases).buffer_unordered(WRITES).collect().await;
        released.into_iter().collect::<Result<Vec<_>, _>>()?;
        view.members.retain(|member| !names.contains(&member.name));
        Ok(())
    }

    async fn record_models(&mut self, view: &mut View, names: &[String]) -> Result<(), Error> {
        let set = self.scale_set().unwrap_or_default();
        for n in view.places(names) {
            let member = &view.members[n];
            if let Some(model) = member.model(&set) {
                self.writer().record_model(member, model).await?;
            }
        }
        Ok(())
    }

    /// Deletes a Machine that stands for nothing: Cluster API makes one for every machine of a pool that it sees, and it
    /// may see one that has just gone. Nobody else would ever delete it.
    async fn delete_stray(&mut self, view: &View, name: &str) -> Result<(), Error> {
        match view.strays.iter().find(|machine| machine.name_any() == name) {
            Some(machine) => self.writer().delete_owner(machine).await,
            None => Ok(()),
        }
    }

    fn terms(&self) -> Terms {
        let own = self
            .pool
            .spec
            .node_drain_timeout
            .filter(|timeout| !timeout.is_negative())
            .map(Duration::from);
        let timeout = self.owners.machine_pool.spec.template.spec.drain_timeout().or(own);
        Terms {
            timeout: timeout.filter(|timeout| !timeout.is_zero()),
            cluster_deleted: self.owners.cluster.metadata.deletion_timestamp.is_some(),
            wake: self.wake(),
        }
    }

    /// Cordons and drains the nodes of these machines, and notes how far that is.
    async fn drain(&mut self, view: &mut View, names: &[String]) -> Result<(), Error> {
        let terms = self.terms();
        let members = view.places(names);
        self.confirm_missing(view, &members, &terms).await;
        let pool_deleted = self.pool.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let work = members.into_iter().filter_map(|n| {
            let (member, workload, terms) = (&view.members[n], &self.workload, &terms);
            let since = member.drain_since().or(pool_deleted)?;
            Some(async move { (n, drain::run(member, workload, terms, since).await) })
        });
        let work: Vec<_> = work.collect();
        let outcomes: Vec<_> = futures::stream::iter(work).buffer_unordered(DRAINS).collect().await;
        for (n, outcome) in outcomes {
            let outcome = outcome?;
            view.requeue(outcome.again);
            (view.members[n].drain, view.members[n].stuck) = (outcome.drain, outcome.stuck);
        }
        Ok(())
    }

    /// A node that the cache does not have counts as missing only once a list of the cluster itself says so: one list for
    /// all of them.
    async fn confirm_missing(&self, view: &mut View, members: &[usize], terms: &Terms) {
        let missing = |n: &&usize| matches!(view.members[**n].node, NodeState::Missing);
        let unconfirmed: Vec<usize> = members.iter().filter(missing).copied().collect();
        if unconfirmed.is_empty() || terms.cluster_deleted {
            return;
        }
        let listed = drain::listed(&self.workload).await;
        for n in unconfirmed {
            if let Some(why) = drain::not_missing(view.members[n].provider_id(), &listed) {
                view.members[n].node = NodeState::Unknown(why);
            }
        }
    }

    async fn update_instances(&mut self, view: &View, drained: Vec<DrainedInstance>) -> Result<(), Error> {
        let ids: BTreeSet<String> = drained.iter().map(|instance| instance.id.clone()).collect();
        match self.cloud().await?.update(drained).await {
            Err(Error::Azure(error)) if error.class() == Class::Terminal => {
                self.controller
                    .recorder
                    .warning(self.pool, "UpdateRefused", error.to_string())
                    .await;
                let theirs = |m: &&Member| m.instance.as_ref().is_some_and(|i| ids.contains(&i.id));
                for member in view.members.iter().filter(theirs) {
                    self.writer().abandon_update(member, "UpdateRefused").await?;
                }
                Ok(())
            }
            done => done,
        }
    }

    async fn finish_update(&mut self, view: &View, name: &str) -> Result<(), Error> {
        let (Some(member), Some(model)) = (view.member(name), &view.model) else {
            return Ok(());
        };
        if let Some(node) = member.node.node() {
            self.workload.connection().await?.drainer.uncordon(node).await?;
        }
        self.writer().finish_update(member, &model.hash).await
    }

    /// Marks machines as deleted. One that has become available since it was observed, and was chosen because it was
    /// not, is left for the next plan.
    async fn remove(&mut self, view: &View, selected: &[Selected]) -> Result<(), Error> {
        let by_name: BTreeMap<&str, &Member> = view.members.iter().map(|m| (m.name.as_str(), m)).collect();
        let mut condemned = Vec::new();
        for one in selected {
            if let Some(member) = by_name.get(one.name.as_str())
                && !(one.unless_available && self.is_available(member).await)
            {
                condemned.push(*member);
            }
        }
        self.writer().delete_all(&condemned).await
    }

    async fn start_update(&mut self, view: &View, selected: &Selected) -> Result<(), Error> {
        let Some(member) = view.member(&selected.name) else {
            return Ok(());
        };
        if selected.unless_available && self.is_available(member).await {
            return Ok(());
        }
        self.writer().start_update(member).await
    }

    /// Gives the scale set its model and its capacity, in one call that Azure refuses if somebody else was first.
    async fn apply_scale_set(
        &mut self,
        view: &mut View,
        new_model: bool,
        capacity: usize,
        grows: bool,
    ) -> Result<(), Error> {
        let (Some(mut model), Some(set)) = (view.model.clone(), self.scale_set()) else {
            return Ok(());
        };
        if self.cloud().await?.capacity_changed().await? {
            view.requeue(Duration::ZERO);
            return Ok(());
        }
        if grows && !new_model && self.bootstrap_age() > FRESH_BOOTSTRAP {
            model = self.with_fresh_bootstrap(model).await?;
        }
        let fresh = grows && set.custom_data.as_deref() != Some(&model.custom_data_hash);
        let done = match new_model {
            true => {
                let applied = applied_tags(self.pool);
                self.cloud().await?.replace(&model, capacity, &applied).await
            }
            false => self.cloud().await?.scale(&model, capacity, fresh).await,
        };
        if let Err(Error::Azure(error)) = &done {
            if error.is_precondition_failed() {
                view.requeue(Duration::ZERO);
                return Ok(());
            }
            let refused = |arm: &capstan_azure::ArmError| arm.status < 500 && (arm.status != 409 || is_quota(arm));
            if error.class() == Class::Transient && error.arm().is_some_and(refused) {
                let why = error.to_string();
                self.state.retry.failed(why, false, capacity, Instant::now());
            }
        }
        done?;
        if new_model {
            let message = format!("model {} is rolled out", model.hash);
            self.controller
                .recorder
                .normal(self.pool, "ModelChanged", message)
                .await;
            view.requeue(Duration::ZERO);
        }
        // New instances show at once, and so do their machines.
        if capacity > set.capacity {
            self.controller
                .trigger
                .poke(kube::runtime::reflector::ObjectRef::from_obj(self.pool));
        } else {
            self.state.instances_stale = false;
        }
        Ok(())
    }

    /// The same model with newer bootstrap data. A change of more than a token is left for the next reconcile.
    async fn with_fresh_bootstrap(&mut self, model: crate::model::Model) -> Result<crate::model::Model, Error> {
        let Some(bootstrap) = self.bootstrap(FRESH_BOOTSTRAP).await? else {
            return Ok(model);
        };
        let reread = self.model(&bootstrap).await?;
        Ok(if reread.hash == model.hash { reread } else { model })
    }

    /// Whoever else adds instances makes them from the scale set as it is: its bootstrap data must not be old.
    async fn refresh_bootstrap(&mut self, view: &View) -> Result<(), Error> {
        match &view.model {
            Some(model) => self.cloud().await?.refresh_custom_data(model).await,
            None => Ok(()),
        }
    }

    fn bootstrap_age(&self) -> Duration {
        self.state
            .bootstrap
            .as_ref()
            .map_or(BOOTSTRAP_AGE, |(_, _, at)| at.elapsed())
    }
}

/// Whether Azure had no room for more instances.
fn is_quota(arm: &capstan_azure::ArmError) -> bool {
    arm.code.contains("Quota") || arm.code == "OperationNotAllowed" || arm.message.contains("quota")
}
