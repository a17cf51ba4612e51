//! Reads everything that the plan depends on. Writes nothing.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::azure::{AzureMachinePoolMachine, RollingUpdateMode};
use capstan_core::pool::{self, Budget, DeletePolicy, Drain, Drained, Mode, Observed, Retry, Scaling, Strategy};
use capstan_core::validate::azure_pool;
use capstan_kube::capi;
use jiff::Timestamp;
use kube::ResourceExt;

use super::Actor;
use super::cloud::Failure;
use super::drain;
use super::member::{Frame, Member, machine};
use super::state::{Kind, Make, ScaleSetSnapshot};
use crate::error::Error;
use crate::model::{self, Model};

/// While Cluster API drains, nobody wakes us for certain.
const BY_CLUSTER_API: Duration = Duration::from_secs(15);
/// An instance that ran and that Azure calls Failed may recover by itself within this time.
const FAILED_PATIENCE: Duration = Duration::from_secs(120);

/// One reconcile's view of a pool.
pub struct View {
    pub mode: Mode,
    /// The scale set that is wanted; `None` where the spec cannot say.
    pub model: Option<Model>,
    pub members: Vec<Member>,
    pub strays: Vec<Arc<capi::Machine>>,
    /// When to reconcile again although nothing has changed.
    pub requeue: Duration,
    /// The scale set was just created.
    pub created: bool,
    /// The pool's object was let go.
    pub released: bool,
    /// The first error of Azure's in a step.
    pub failed: Option<Error>,
    /// Warnings to record.
    pub events: Vec<(&'static str, String)>,
    failed_updates: BTreeSet<String>,
}

impl View {
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    /// The places of these members in the list.
    pub fn places(&self, names: &[String]) -> Vec<usize> {
        let names: BTreeSet<&String> = names.iter().collect();
        let members = self.members.iter().enumerate();
        members
            .filter(|(_, member)| names.contains(&member.name))
            .map(|(n, _)| n)
            .collect()
    }

    /// The members that have an instance.
    pub fn existing(&self) -> Vec<Member> {
        let members = self.members.iter().filter(|member| member.instance.is_some());
        members.cloned().collect()
    }

    pub fn requeue(&mut self, after: Duration) {
        self.requeue = self.requeue.min(after);
    }
}

impl Actor<'_> {
    pub(super) fn scale_set(&self) -> Option<ScaleSetSnapshot> {
        self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.clone())
    }

    /// Observes the pool: Azure as far as anything may have changed (not at all without the cloud), objects and nodes.
    pub(super) async fn observe(&mut self, mode: Mode, model: Option<Model>) -> Result<View, Error> {
        let failures = match mode {
            Mode::Full | Mode::FinishOnly | Mode::Teardown => self.refresh().await?,
            Mode::WithoutCloud => Vec::new(),
        };
        let mut members = self.members().await;
        let mut view = View {
            mode,
            model,
            members: Vec::new(),
            strays: Vec::new(),
            requeue: self.controller.options.resync,
            created: false,
            released: false,
            failed: None,
            events: Vec::new(),
            failed_updates: BTreeSet::new(),
        };
        for member in &mut members {
            if let Some(owner) = member.owner.as_ref().filter(|_| member.leaving()) {
                member.drain = drain_by_cluster_api(owner);
                if matches!(member.drain, Drain::Running { .. }) {
                    view.requeue(BY_CLUSTER_API);
                }
            }
        }
        view.members = members;
        if mode == Mode::Full {
            view.strays = self.strays().await?;
        }
        self.note_instances(&mut view);
        self.note_external(&view);
        if mode != Mode::WithoutCloud {
            self.note_failures(failures, &mut view).await?;
        }
        Ok(view)
    }

    /// Reads Azure as far as needed, and once more when the nodes show something newer.
    async fn refresh(&mut self) -> Result<Vec<Failure>, Error> {
        let resync = self.controller.options.resync;
        let mut failures = self.cloud().await?.refresh(resync).await?;
        let members = self.members().await;
        if self.nodes_show_changes(&members).await {
            self.state.instances_stale = true;
            failures.extend(self.cloud().await?.refresh(resync).await?);
        }
        Ok(failures)
    }

    /// Cluster API Machines of this pool whose AzureMachinePoolMachine is gone.
    async fn strays(&self) -> Result<Vec<Arc<capi::Machine>>, Error> {
        let (namespace, pool) = (self.pool.namespace().unwrap_or_default(), &self.owners.machine_pool);
        let stray = |machine: &capi::Machine| {
            let reference = &machine.spec.infrastructure_ref;
            let mut owners = machine.owner_references().iter();
            reference.kind == AzureMachinePoolMachine::KIND
                && machine.metadata.deletion_timestamp.is_none()
                && owners.any(|owner| owner.kind == "MachinePool" && Some(&owner.uid) == pool.metadata.uid.as_ref())
                && self
                    .controller
                    .machines
                    .get(Some(&namespace), &reference.name)
                    .is_none()
        };
        let api = self.controller.context.api::<AzureMachinePoolMachine>(&namespace);
        let mut strays = Vec::new();
        for machine in self.controller.owner_machines.select(Some(&namespace), stray) {
            // The cache may be late.
            if api.get_opt(&machine.spec.infrastructure_ref.name).await?.is_none() {
                strays.push(machine);
            }
        }
        Ok(strays)
    }

    /// Notes how long instances have been in a state that may pass by itself.
    fn note_instances(&mut self, view: &mut View) {
        let now = Instant::now();
        let lists = self.state.snapshot.as_ref().map_or(0, |snapshot| snapshot.lists);
        let confirmed = self.state.snapshot.as_ref().is_some_and(|snapshot| snapshot.confirmed);
        let wanted = view.model.as_ref().map(|model| model.hash.clone());
        let set_model = self.scale_set().and_then(|set| set.model);
        let applied = wanted.is_some() && wanted == set_model;
        let mut failed = HashMap::new();
        let mut updated = HashMap::new();
        let mut again = None;
        for member in &mut view.members {
            let id = member.provider_id().to_owned();
            let Some(instance) = &member.instance else {
                member.confirmed_missing = confirmed;
                continue;
            };
            if instance.is("Failed") {
                let (since, first) = *self.state.failed_since.get(&id).unwrap_or(&(now, lists));
                let left = FAILED_PATIENCE.saturating_sub(now.duration_since(since));
                member.failed = !member.has_run() || (left.is_zero() && lists > first);
                if !member.failed {
                    // A second list decides.
                    self.state.instances_stale |= left.is_zero();
                    again = again.min(Some(left)).or(Some(left));
                }
                failed.insert(id.clone(), (since, first));
            }
            if member.updating() {
                let known = self
                    .state
                    .updated_since
                    .get(&id)
                    .filter(|(model, _)| Some(model) == wanted.as_ref());
                let since = known
                    .map(|(_, since)| *since)
                    .or((instance.latest && applied).then_some(now));
                updated.extend(since.zip(wanted.clone()).map(|(since, model)| (id, (model, since))));
            }
        }
        (self.state.failed_since, self.state.updated_since) = (failed, updated);
        if let Some(left) = again {
            view.requeue(left);
        }
        // One list may be late: a second one confirms what the first one lacks.
        let suspect = view
            .members
            .iter()
            .any(|m| m.instance.is_none() && !m.object_deleting());
        if suspect && !confirmed {
            self.state.recheck_instances(now);
        }
    }

    /// Everything that the plan depends on.
    pub(super) fn observed(&mut self, view: &View) -> Observed {
        self.note_drained(view);
        let state = &self.state;
        let set = self.scale_set().unwrap_or_default();
        let wanted = view.model.as_ref().map(|model| model.hash.as_str());
        let (deleting, updating) = (state.deleting(), state.ids(Kind::Update));
        let waited = |since: &Instant| since.elapsed();
        let updated = state.updated_since.iter();
        let updated = updated.map(|(id, (_, since))| (id.clone(), waited(since))).collect();
        let frame = Frame {
            model: wanted.or(set.model.as_deref()).unwrap_or_default(),
            set: &set,
            deleting: &deleting,
            updating: &updating,
            failed_updates: &view.failed_updates,
            updated: &updated,
            spot: self.pool.spec.template.spot_vm_options.is_some(),
            teardown: view.mode == Mode::Teardown,
        };
        let rolling = self.pool.spec.strategy.rolling_update.clone().unwrap_or_default();
        let desired = self.desired();
        let budget = azure_pool::amounts(&self.pool.spec)
            .and_then(|(surge, unavailable)| Budget::resolve(surge, unavailable, desired));
        let policy = rolling
            .delete_policy
            .as_ref()
            .and_then(|policy| policy.as_str().parse().ok());
        let in_place = rolling.mode == Some(RollingUpdateMode::InPlace) && !set.flexible;
        let replicas = self.owners.machine_pool.spec.replicas;
        Observed {
            mode: view.mode,
            desired,
            budget: budget.unwrap_or(Budget {
                surge: 1,
                unavailable: 0,
            }),
            policy: policy.unwrap_or(DeletePolicy::Oldest),
            strategy: if in_place { Strategy::InPlace } else { Strategy::Replace },
            seed: seed(&self.pool.uid().unwrap_or_default()),
            scale_set: self.scale_set().map(|set| self.observed_set(&set, view)),
            machines: view.members.iter().map(|member| machine(member, &frame)).collect(),
            strays: view.strays.iter().map(|machine| machine.name_any()).collect(),
            drained_for: state.drained_since.map_or(Duration::ZERO, |since| since.elapsed()),
            replicas: state.external.filter(|count| i32::try_from(*count).ok() != replicas),
        }
    }

    fn observed_set(&self, set: &ScaleSetSnapshot, view: &View) -> pool::ScaleSet {
        let now = Instant::now();
        let busy = self.state.busy(Kind::Change);
        let failed = set.state.eq_ignore_ascii_case("Failed");
        let external = self.owners.machine_pool.replicas_managed_externally();
        let stale = |model: &Model| set.custom_data.as_deref() != Some(&model.custom_data_hash);
        pool::ScaleSet {
            capacity: set.capacity,
            model: self.observed_model(set, view.model.as_ref()),
            scaling: if busy { Scaling::Running } else { Scaling::Idle },
            retry: match () {
                () if self.state.retry.due(now) && failed => Retry::Due,
                () => match self.state.retry.refused(now) {
                    Some(refused) => Retry::Waiting { refused },
                    None => Retry::NotNeeded,
                },
            },
            flexible: set.flexible,
            quiet: self.state.operations.is_empty(),
            confirmed: self.state.snapshot.as_ref().is_some_and(|snapshot| snapshot.confirmed),
            stale_bootstrap: external && !busy && view.model.as_ref().is_some_and(stale),
            deleting: self.state.busy(Kind::Remove),
        }
    }

    fn observed_model(&self, set: &ScaleSetSnapshot, wanted: Option<&Model>) -> pool::Model {
        let Some(wanted) = wanted else {
            return pool::Model::Current;
        };
        match set.model.as_deref() {
            Some(model) if model == wanted.hash => pool::Model::Current,
            Some(model) if model::is_of_this_version(model) => self.pending(wanted),
            Some(_) | None if fits(set, wanted) => pool::Model::Unmarked,
            Some(_) | None => self.pending(wanted),
        }
    }

    fn pending(&self, wanted: &Model) -> pool::Model {
        match self.state.refused_model(&wanted.hash) {
            Some(_) => pool::Model::Refused,
            None => pool::Model::Outdated,
        }
    }

    /// Notes since when machines have been drained that wait for others.
    fn note_drained(&mut self, view: &View) {
        let deleting = self.state.deleting();
        let waits = |m: &&Member| {
            let going = m
                .instance
                .as_ref()
                .is_none_or(|i| i.is("Deleting") || deleting.contains(&i.id));
            m.object_deleting() && !going && matches!(m.drain, Drain::Done(_))
        };
        let since = self.state.drained_since.unwrap_or_else(Instant::now);
        self.state.drained_since = view.members.iter().any(|m| waits(&m)).then_some(since);
    }

    /// When there is reason to reconcile again, nothing else happening.
    pub(super) fn next(&self) -> Duration {
        let resync = self.controller.options.resync;
        let now = Instant::now();
        let listed = self
            .state
            .snapshot
            .as_ref()
            .map_or(Duration::ZERO, |snapshot| snapshot.at.elapsed());
        let poll = self.state.next_poll(Timestamp::now()).unwrap_or(resync);
        let retry = self.state.retry.remaining(now).unwrap_or(resync);
        let stale = self.state.instances_stale || self.state.set_stale;
        let stale = if stale { Duration::ZERO } else { resync };
        let untracked = self.state.untracked_in(now).unwrap_or(resync);
        let recheck = self.state.recheck_in(now).unwrap_or(resync);
        let times = [resync.saturating_sub(listed), poll, retry, stale, untracked, recheck];
        times.into_iter().min().unwrap_or(resync)
    }

    /// Returns how many machines there should be: as the MachinePool says, or as whoever manages its replicas has set.
    pub(super) fn desired(&self) -> usize {
        let machine_pool = &self.owners.machine_pool;
        let external = self
            .state
            .external
            .filter(|_| machine_pool.replicas_managed_externally());
        external.unwrap_or_else(|| usize::try_from(machine_pool.replicas()).unwrap_or_default())
    }

    /// Failed creations slow the next one down; failed updates in place become replacements.
    async fn note_failures(&mut self, failures: Vec<Failure>, view: &mut View) -> Result<(), Error> {
        let capacity = self.scale_set().map_or(0, |set| set.capacity);
        for failure in failures {
            view.events.push(("OperationFailed", failure.message.clone()));
            match failure.kind {
                Kind::Change => self
                    .state
                    .retry
                    .failed(failure.message, false, capacity, Instant::now()),
                Kind::Update => view.failed_updates.extend(failure.ids),
                Kind::Delete | Kind::Remove => {}
            }
        }
        if view.mode == Mode::Teardown {
            return Ok(());
        }
        for member in &view.members {
            let Some(instance) = &member.instance else { continue };
            let new = !member.has_run() && instance.is("Failed");
            if new && self.state.failures_counted.insert(instance.provider_id.clone()) {
                let why = instance
                    .message
                    .clone()
                    .unwrap_or_else(|| format!("instance {} failed", instance.id));
                view.events.push(("InstanceFailed", format!("{}: {why}", member.name)));
                self.state.retry.failed(why, true, capacity, Instant::now());
            }
        }
        self.note_shortage(view).await
    }

    /// A scale operation that ended without all its instances is a failure, whoever was told: we may have been away.
    async fn note_shortage(&mut self, view: &mut View) -> Result<(), Error> {
        let Some(set) = self.scale_set() else { return Ok(()) };
        let exists = |m: &&Member| m.instance.as_ref().is_some_and(|instance| !instance.is("Deleting"));
        let short = view.members.iter().filter(exists).count() < set.capacity;
        let over = set.state.eq_ignore_ascii_case("Failed") && !self.state.busy(Kind::Change);
        if short && over && !self.state.retry.failing() {
            let why = self.cloud().await?.shortage().await?;
            view.events.push(("InstancesNotCreated", why.clone()));
            self.state.retry.failed(why, false, set.capacity, Instant::now());
        }
        Ok(())
    }

    /// Once as many machines as desired are ready, creation has not failed any more. Failed ones that are deleted prove
    /// nothing.
    pub(super) fn note_success(&mut self, members: &[Member]) {
        let failing = members
            .iter()
            .any(|m| m.instance.as_ref().is_some_and(|i| i.is("Failed")));
        let ready = members.iter().filter(|member| member.node.is_ready()).count();
        let waiting = self.state.retry.remaining(Instant::now()).is_some();
        if self.state.retry.failing() && !waiting && !failing && ready >= self.desired() {
            self.state.failures_counted.clear();
            self.state.retry.succeeded();
        }
    }
}

/// Whether a scale set that somebody else made is what is wanted, as far as that can be told.
fn fits(set: &ScaleSetSnapshot, model: &Model) -> bool {
    let mut zones = set.zones.clone();
    zones.sort();
    set.make == Make::of(&model.set) && zones == model.set.zones.clone().unwrap_or_default()
}

/// Cluster API drains a Machine's node before it deletes the Machine's infrastructure. Where it skips the drain, we drain.
fn drain_by_cluster_api(owner: &Arc<capi::Machine>) -> Drain {
    if !drain::core_is_done(owner) {
        let why = format!("Machine {} is being drained by Cluster API", owner.name_any());
        return Drain::Running { why };
    }
    match drain::core_did_not_drain(owner) {
        true => Drain::NotRun,
        false => Drain::Done(Drained::ByClusterApi),
    }
}

fn seed(uid: &str) -> u64 {
    uid.bytes()
        .fold(0, |seed, byte| seed.wrapping_mul(131).wrapping_add(byte.into()))
}
