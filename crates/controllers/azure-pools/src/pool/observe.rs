//! Reads everything that the plan depends on. Writes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::azure::{AzureMachinePoolMachine, AzureMachinePoolSpec, RollingUpdateMode, StrategyType};
use capstan_core::order;
use capstan_core::pool::{self, Budget, DeletePolicy, Drain, Mode, Retry, Scaling, Strategy};
use capstan_core::validate::azure_pool;
use capstan_kube::capi;
use capstan_kube::runtime::EventNote;
use futures::future::BoxFuture;
use kube::ResourceExt;
use kube::api::ListParams;

use super::Actor;
use super::cloud::Failure;
use super::desired::{BOOTSTRAP_AGE, Intent};
use super::drain::{self, Progress};
use super::member::{Frame, Member, machine};
use super::owners::Owners;
use super::snapshot::{Make, ScaleSetSnapshot};
use super::state::{Kind, Summary};
use crate::error::Error;
use crate::model::{self, Model};

/// Pauses the rollout of a pool. Capstan still scales the pool and deletes machines.
const PAUSE_ROLLOUT_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/pause-rollout";
/// While Cluster API drains, nobody wakes us for certain.
const BY_CLUSTER_API: Duration = Duration::from_secs(15);
/// Whoever else adds instances makes them from the scale set as it is, so that a new bootstrap token has to reach it while the
/// old one lasts. Those of kubeadm live for 15 minutes, and Cluster API makes the next one when half of that has passed.
const BOOTSTRAP_RECHECK: Duration = Duration::from_secs(120);

/// One observation of a pool.
pub struct Observed {
    /// What the plan depends on.
    pub plan: pool::Observed,
    pub owners: Owners,
    /// The scale set that is wanted; `None` where the spec cannot say.
    pub model: Option<Model>,
    /// The scale set's own model with the newest bootstrap data, where the spec cannot say another one.
    pub present: Option<Model>,
    pub members: Vec<Member>,
    pub strays: Vec<Arc<capi::Machine>>,
    /// When to reconcile again although nothing has changed.
    pub requeue: Duration,
    /// Others have to bring something first: the reason and the message of the condition.
    pub waiting_for: Option<(&'static str, &'static str)>,
    /// Azure's message while it asks for patience.
    pub throttled: Option<String>,
    /// The first error that stopped no other step.
    pub error: Option<Error>,
    /// The scale set was just created.
    pub created: bool,
    /// What the pool waits for, when it is not in its desired state.
    pub waiting: Option<String>,
    pub events: Vec<EventNote>,
    pub cloud: Summary,
    /// The outcomes of this reconcile's drains so far, by machine.
    pub drains: HashMap<String, Progress>,
    pub(super) failed_updates: BTreeMap<String, &'static str>,
}

impl Observed {
    pub fn new(owners: Owners, mode: Mode, requeue: Duration) -> Self {
        Self {
            plan: pool::Observed {
                mode,
                ..pool::Observed::default()
            },
            owners,
            model: None,
            present: None,
            members: Vec::new(),
            strays: Vec::new(),
            requeue,
            waiting_for: None,
            throttled: None,
            error: None,
            created: false,
            waiting: None,
            events: Vec::new(),
            cloud: Summary::default(),
            drains: HashMap::new(),
            failed_updates: BTreeMap::new(),
        }
    }

    /// A pool that another provider manages: nothing is done for it but to say so.
    pub fn unsupported(why: String, requeue: Duration) -> Self {
        let mut observed = Self::new(Owners::default(), Mode::WithoutCloud, requeue);
        observed.error = Some(Error::Invalid(why));
        observed
    }

    pub fn mode(&self) -> Mode {
        self.plan.mode
    }

    /// Whether nothing can be done before others bring what the pool waits for. A scale set that exists goes on without.
    pub fn is_idle(&self) -> bool {
        self.waiting_for.is_some() && self.mode() == Mode::Full
    }

    /// The model that new instances are made from.
    pub fn newest(&self) -> Option<&Model> {
        self.model.as_ref().or(self.present.as_ref())
    }

    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    /// Returns the places of these members in the list.
    pub fn places(&self, names: &[String]) -> Vec<usize> {
        let names: BTreeSet<&String> = names.iter().collect();
        let members = self.members.iter().enumerate();
        members
            .filter(|(_, member)| names.contains(&member.name))
            .map(|(n, _)| n)
            .collect()
    }

    /// The members that have an instance.
    pub fn existing(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.instance.is_some())
    }

    pub fn requeue(&mut self, after: Duration) {
        self.requeue = self.requeue.min(after);
    }
}

impl Actor<'_> {
    /// Observes as much as possible: without the cloud while Azure asks for patience or does not answer, and for the model that
    /// the scale set has while the spec is invalid or waits for others.
    pub(super) async fn observe_pool(&mut self, drains: HashMap<String, Progress>) -> Result<Observed, Error> {
        let mut observed = self.observe_mode(&drains).await?;
        observed.drains = drains;
        observed.cloud = self.state.summary(&self.owners.set);
        if !observed.is_idle() {
            observed.plan = self.observed_plan(&observed);
            self.note_drain_rules(&mut observed).await;
            self.note_foreign(&mut observed);
        }
        Ok(observed)
    }

    /// Reports a scale set of the pool's name that is somebody else's. Only its owner or the pool's can end that; a deleted
    /// pool goes without it.
    pub(super) fn note_foreign(&mut self, observed: &mut Observed) {
        let Some(why) = self.state.foreign.clone() else { return };
        match self.scope.is_deleting() {
            true => {
                tracing::warn!("the scale set is not deleted: {why}");
                let message = format!("the scale set is not deleted: {why}");
                self.state.events.push(EventNote::warning("ScaleSetLeft", message));
            }
            false => observed.error = Some(Error::Invalid(why)),
        }
    }

    async fn observe_mode(&mut self, drains: &HashMap<String, Progress>) -> Result<Observed, Error> {
        if let Some((left, message)) = self.state.throttled_for(self.now()) {
            let mut observed = self.observe(Mode::WithoutCloud, None, drains).await?;
            observed.throttled = Some(message);
            observed.requeue(left);
            return Ok(observed);
        }
        let observed = match self.intent().await {
            Ok(Intent::Setup(setup)) => {
                let mut observed = self.empty(Mode::Full);
                observed.plan.setup = Some(setup);
                return Ok(observed);
            }
            Ok(Intent::WaitingFor(reason, message)) => {
                let mut observed = match self.has_scale_set() {
                    true => self.observe_to_finish(drains).await?,
                    false => self.empty(Mode::Full),
                };
                observed.waiting_for = Some((reason, message));
                return Ok(observed);
            }
            Ok(Intent::Model(model)) => {
                self.note_wanted(&model);
                self.observe(Mode::Full, Some(*model), drains).await
            }
            Ok(Intent::Teardown) => self.observe(Mode::Teardown, None, drains).await,
            Err(error) => Err(error),
        };
        match observed {
            Err(error @ Error::Kube(_)) => Err(error),
            Err(error) => self.observe_in_part(error, drains).await,
            Ok(observed) => Ok(observed),
        }
    }

    /// Notes what is wanted now. What Azure could not make before is asked for at once when the user wants something else.
    fn note_wanted(&mut self, model: &Model) {
        let (hash, count) = (Some(model.hash.clone()), Some(self.desired()));
        let known = self.state.wanted_model.is_some();
        if known && (self.state.wanted_model != hash || self.state.wanted != count) {
            self.state.retry.succeeded();
        }
        (self.state.wanted_model, self.state.wanted) = (hash, count);
    }

    fn empty(&self, mode: Mode) -> Observed {
        Observed::new(self.owners.clone(), mode, self.controller.context.resync)
    }

    /// Observes for a part of the plan, where the whole cannot be made for this error.
    async fn observe_in_part(&mut self, error: Error, drains: &HashMap<String, Progress>) -> Result<Observed, Error> {
        self.note_error(&error);
        let of_the_spec = matches!(error, Error::Invalid(_) | Error::NotReady(_));
        let finish = of_the_spec && self.has_scale_set() && !self.scope.is_deleting();
        let mut observed = match finish {
            true => self.observe_to_finish(drains).await?,
            false => self.observe_without_cloud(drains).await?,
        };
        match self.state.throttled_for(self.now()) {
            Some((left, message)) => {
                observed.throttled = Some(message);
                observed.requeue(left);
            }
            None => observed.error = Some(error),
        }
        Ok(observed)
    }

    fn has_scale_set(&self) -> bool {
        self.state.snapshot.is_some() || self.pool().spec.provider_id.is_some()
    }

    /// Observes a pool that cannot have the model that its spec asks for. Boxed, as it is seldom needed and takes much of a stack.
    fn observe_to_finish<'a>(
        &'a mut self,
        drains: &'a HashMap<String, Progress>,
    ) -> BoxFuture<'a, Result<Observed, Error>> {
        Box::pin(async move {
            match self.observe(Mode::FinishOnly, None, drains).await {
                Err(error @ Error::Kube(_)) => Err(error),
                Err(error) => {
                    self.note_error(&error);
                    tracing::debug!(%error, "Azure does not answer, drains go on");
                    self.observe_without_cloud(drains).await
                }
                Ok(mut observed) => {
                    if let Some(set) = self.scale_set() {
                        observed.present = self.present_model(&set, BOOTSTRAP_AGE).await.ok();
                    }
                    Ok(observed)
                }
            }
        })
    }

    async fn observe_without_cloud(&mut self, drains: &HashMap<String, Progress>) -> Result<Observed, Error> {
        match self.state.snapshot {
            Some(_) => self.observe(Mode::WithoutCloud, None, drains).await,
            None => Ok(self.empty(Mode::WithoutCloud)),
        }
    }

    /// Observes Azure as far as anything may have changed (not at all without the cloud), objects and nodes.
    fn observe<'a>(
        &'a mut self,
        mode: Mode,
        model: Option<Model>,
        drains: &'a HashMap<String, Progress>,
    ) -> BoxFuture<'a, Result<Observed, Error>> {
        Box::pin(async move {
            let failures = match mode {
                Mode::Full | Mode::FinishOnly | Mode::Teardown | Mode::Orphaned => self.refresh().await?,
                Mode::WithoutCloud => Vec::new(),
            };
            let mut observed = self.empty(mode);
            (observed.model, observed.members) = (model, self.members().await?);
            for member in &mut observed.members {
                member.guarded = member.owner.as_ref().is_some_and(|owner| drain::is_guarded(owner));
            }
            for n in 0..observed.members.len() {
                let again = self.note_drain(&mut observed.members[n], drains);
                observed.requeue = observed.requeue.min(again);
            }
            if mode == Mode::Full {
                observed.strays = self.strays().await?;
            }
            self.note_instances(&mut observed);
            self.note_external(&observed);
            if mode != Mode::WithoutCloud {
                self.note_failures(failures, &mut observed).await;
            }
            Ok(observed)
        })
    }

    /// Guards the machines that are about to leave and that a rule for drains is about: only Cluster API follows such rules, and
    /// it drains only a Machine whose object nobody has deleted yet.
    async fn note_drain_rules(&self, observed: &mut Observed) {
        let leaving = pool::leaving_owned(&observed.plan);
        if leaving.is_empty() {
            return;
        }
        let rules = self.drain_rules().await;
        let cluster = self.owners.cluster.labels();
        for machine in observed.plan.machines.iter_mut().filter(|m| leaving.contains(&m.name)) {
            let member = observed.members.iter().find(|member| member.name == machine.name);
            let Some(owner) = member.and_then(|member| member.owner.as_ref()) else {
                continue;
            };
            let rules = rules.as_ref();
            if rules.is_none_or(|rules| rules.iter().any(|rule| drain::is_about(rule, owner, cluster))) {
                machine.owner = pool::Owner::Guarded;
            }
        }
    }

    /// Returns the rules for drains; `None` where they cannot be read.
    async fn drain_rules(&self) -> Option<Vec<capi::MachineDrainRule>> {
        let rules = self.scope.api_of::<capi::MachineDrainRule>();
        match rules.list(&ListParams::default()).await {
            Ok(found) => Some(found.items),
            Err(kube::Error::Api(status)) if status.code == 404 => Some(Vec::new()),
            Err(error) => {
                tracing::info!(%error, "cannot list MachineDrainRules: Cluster API drains");
                None
            }
        }
    }

    /// Notes how far the drain of a machine is. Returns when to check it again.
    fn note_drain(&self, member: &mut Member, drains: &HashMap<String, Progress>) -> Duration {
        if let Some(owner) = member.owner.as_ref().filter(|_| member.owner_deleting()) {
            let object = member.object.as_ref();
            let deleted = object.and_then(|object| object.metadata.deletion_timestamp.as_ref().map(|time| time.0));
            member.drain = drain::by_cluster_api(member.id(), owner, deleted, self.scope.now());
            member.stuck = matches!(member.drain, Drain::Running { .. }) && drain::is_held_up(owner);
        }
        if let Some(progress) = drains.get(&member.name).filter(|_| member.drain == Drain::NotRun) {
            (member.drain, member.stuck) = (progress.drain.clone(), progress.stuck);
            return progress.again;
        }
        match member.drain {
            Drain::Running { .. } => BY_CLUSTER_API,
            Drain::NotRun | Drain::Done(_) => Duration::MAX,
        }
    }

    /// Reads Azure as far as needed, and once more when the nodes show something newer.
    async fn refresh(&mut self) -> Result<Vec<Failure>, Error> {
        let resync = self.controller.context.resync;
        let mut failures = self.cloud().await?.refresh(resync).await?;
        let members = self.members().await?;
        if self.nodes_show_changes(&members).await {
            self.state.instances_stale = true;
            failures.extend(self.cloud().await?.refresh(resync).await?);
            let members = self.members().await?;
            self.unknown_nodes(&members).await;
        }
        if !self.state.unknown_nodes.is_empty() {
            let now = self.now();
            self.state.recheck_instances(now);
        }
        Ok(failures)
    }

    /// Returns Cluster API Machines of this pool whose AzureMachinePoolMachine is gone.
    async fn strays(&self) -> Result<Vec<Arc<capi::Machine>>, Error> {
        let (namespace, pool) = (Some(self.scope.key.namespace.as_str()), &self.owners.machine_pool);
        let stray = |machine: &capi::Machine| {
            let reference = &machine.spec.infrastructure_ref;
            let mut owners = machine.owner_references().iter();
            reference.kind == AzureMachinePoolMachine::KIND
                && machine.metadata.deletion_timestamp.is_none()
                && owners.any(|owner| owner.kind == "MachinePool" && Some(&owner.uid) == pool.metadata.uid.as_ref())
                && self.controller.machines.get(namespace, &reference.name).is_none()
        };
        let api = self.scope.api_of::<AzureMachinePoolMachine>();
        let mut strays = Vec::new();
        for machine in self.controller.owner_machines.select(namespace, stray) {
            // The cache may be late.
            if api.get_opt(&machine.spec.infrastructure_ref.name).await?.is_none() {
                strays.push(machine);
            }
        }
        Ok(strays)
    }

    pub(super) fn scale_set(&self) -> Option<ScaleSetSnapshot> {
        self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.clone())
    }

    /// Returns everything that the plan depends on.
    fn observed_plan(&mut self, observed: &Observed) -> pool::Observed {
        self.note_drained(observed);
        self.note_arriving(observed);
        let state = &self.state;
        let set = self.scale_set().unwrap_or_default();
        let wanted = observed.model.as_ref().map(|model| model.hash.as_str());
        let (deleting, mut updating) = (state.deleting(), state.ids(Kind::Update));
        updating.extend(state.ids(Kind::Reimage));
        let make = observed.model.as_ref().map(|model| Make::of(&model.set));
        let updated = state.updated_since.iter();
        let updated = updated
            .map(|(id, (model, since))| (id.clone(), (model.clone(), self.since(*since))))
            .collect();
        let frame = Frame {
            model: wanted.or(set.model.as_deref()).unwrap_or_default(),
            set: &set,
            make: make.as_ref().unwrap_or(&set.make),
            deleting: &deleting,
            updating: &updating,
            failed_updates: &observed.failed_updates,
            updates_end: self.update_target(observed.model.as_ref()).is_some(),
            updated: &updated,
            spot: self.pool().spec.template.spot_vm_options.is_some() || set.is_spot(),
            balanced: self.pool().spec.zone_balance == Some(true),
            teardown: observed.mode() == Mode::Teardown,
        };
        let rolling = self.pool().spec.strategy.rolling_update.clone().unwrap_or_default();
        let desired = self.desired();
        let budget = azure_pool::amounts(&self.pool().spec)
            .and_then(|(surge, unavailable)| Budget::resolve(surge, unavailable, desired));
        let policy = rolling
            .delete_policy
            .as_ref()
            .and_then(|policy| policy.as_str().parse().ok());
        let budget = budget.unwrap_or(Budget {
            surge: 1,
            unavailable: 0,
        });
        let in_place = rolling.mode == Some(RollingUpdateMode::InPlace) && !set.flexible;
        let paused = self.pool().annotations().contains_key(PAUSE_ROLLOUT_ANNOTATION);
        let on_delete = self.pool().spec.strategy.type_ == Some(StrategyType::OnDelete);
        let strategy = match in_place {
            _ if on_delete || paused || budget.is_closed() => Strategy::OnDelete,
            true => Strategy::InPlace,
            false => Strategy::Replace,
        };
        let replicas = self.owners.machine_pool.spec.replicas;
        pool::Observed {
            mode: observed.mode(),
            setup: observed.plan.setup,
            desired,
            budget,
            policy: policy.unwrap_or(DeletePolicy::Oldest),
            strategy,
            startup_timeout: startup_timeout(&self.pool().spec),
            unjoined: state.unjoined.len(),
            seed: order::random(&self.scope.key.uid),
            scale_set: self.scale_set().map(|set| self.observed_set(&set, observed)),
            name_taken: state.foreign.is_some(),
            machines: observed.members.iter().map(|member| machine(member, &frame)).collect(),
            strays: observed.strays.iter().map(|machine| machine.name_any()).collect(),
            drained_for: state.drained_since.map_or(Duration::ZERO, |since| self.since(since)),
            arriving: state.arriving.values().max().map(|since| self.since(*since)),
            replicas: state.external.filter(|count| i32::try_from(*count).ok() != replicas),
        }
    }

    fn observed_set(&self, set: &ScaleSetSnapshot, observed: &Observed) -> pool::ScaleSet {
        let now = self.now();
        let busy = self.state.busy(Kind::Change);
        let failed = set.state.eq_ignore_ascii_case("Failed");
        let external = self.owners.machine_pool.replicas_managed_externally();
        let stale = |model: &Model| set.custom_data.as_deref() != Some(&model.custom_data_hash);
        let retry = match self.state.retry.due(now) && failed {
            true => Retry::Due,
            false => self.state.retry.planned(now),
        };
        pool::ScaleSet {
            capacity: set.capacity,
            model: self.observed_model(set, observed.model.as_ref()),
            scaling: if busy { Scaling::Running } else { Scaling::Idle },
            retry,
            flexible: set.flexible,
            quiet: self.state.operations.is_empty(),
            confirmed: self.state.snapshot.as_ref().is_some_and(|snapshot| snapshot.confirmed),
            stale_bootstrap: observed.newest().is_some_and(stale),
            scaled_by_others: external,
            stale_tags: !busy
                && observed
                    .model
                    .as_ref()
                    .is_some_and(|model| self.has_stale_tags(set, model)),
            deleting: self.state.busy(Kind::Remove),
        }
    }

    /// Whether the scale set lacks tags of pool or cluster, or has tags that they had before.
    fn has_stale_tags(&self, set: &ScaleSetSnapshot, model: &Model) -> bool {
        let wanted = model.set.tags.iter().flatten();
        let mut wanted = wanted.filter(|(name, _)| !model::OWN_TAGS.contains(&name.as_str()));
        let lacks = wanted.any(|(name, value)| set.tags.get(name) != Some(value));
        let wants = |name: &String| model.set.tags.as_ref().is_some_and(|tags| tags.contains_key(name));
        let applied = super::report::applied_tags(self.pool());
        lacks || applied.iter().any(|name| set.tags.contains_key(name) && !wants(name))
    }

    fn observed_model(&self, set: &ScaleSetSnapshot, wanted: Option<&Model>) -> pool::Model {
        let Some(wanted) = wanted else {
            // The spec is invalid: the scale set keeps the model that it has.
            return set
                .model
                .as_ref()
                .map_or(pool::Model::Unmarked, |_| pool::Model::Current);
        };
        match set.model.as_deref() {
            Some(model) if model == wanted.hash => pool::Model::Current,
            Some(model) if model::is_of_this_version(model) => self.pending(wanted),
            Some(_) | None if fits(set, wanted) => pool::Model::Unmarked,
            Some(_) | None => self.pending(wanted),
        }
    }

    /// Returns the model with which updates in place end: the scale set's, unless it gets another one first.
    pub(super) fn update_target(&self, wanted: Option<&Model>) -> Option<String> {
        let set = self.scale_set()?;
        match self.observed_model(&set, wanted) {
            pool::Model::Current | pool::Model::Refused => set.model,
            pool::Model::Outdated | pool::Model::Unmarked => None,
        }
    }

    fn pending(&self, wanted: &Model) -> pool::Model {
        match self.state.refused_model(&wanted.hash, self.now()) {
            Some(_) => pool::Model::Refused,
            None => pool::Model::Outdated,
        }
    }

    /// Notes since when drained machines have waited for others.
    fn note_drained(&mut self, observed: &Observed) {
        let deleting = self.state.deleting();
        let waits = |m: &&Member| {
            let going = m
                .instance
                .as_ref()
                .is_none_or(|i| i.is("Deleting") || deleting.contains(&i.id));
            m.object_deleting() && !going && matches!(m.drain, Drain::Done(_))
        };
        let since = self.state.drained_since.unwrap_or(self.now());
        self.state.drained_since = observed.members.iter().any(|m| waits(&m)).then_some(since);
    }

    /// Notes since when new nodes have been ready that take no pods yet.
    fn note_arriving(&mut self, observed: &Observed) {
        let (now, known) = (self.now(), std::mem::take(&mut self.state.arriving));
        let arriving = observed.members.iter().filter(|member| member.is_arriving());
        let since = |member: &Member| {
            let id = member.provider_id().to_owned();
            let since = known.get(&id).copied().unwrap_or(now);
            (id, since)
        };
        self.state.arriving = arriving.map(since).collect();
    }

    /// Returns when there is reason to reconcile again although nothing else happens.
    pub(super) fn next(&self) -> Duration {
        let (now, resync) = (self.now(), self.controller.context.resync);
        let age = |at: Instant| now.saturating_duration_since(at);
        let listed = self.state.snapshot.as_ref().map(|snapshot| age(snapshot.at));
        let poll = self.state.next_poll(self.scope.now()).unwrap_or(resync);
        let retry = self.state.retry.remaining(now).unwrap_or(resync);
        let stale = self.state.instances_stale || self.state.set_stale;
        let stale = if stale { Duration::ZERO } else { resync };
        let untracked = self.state.untracked_in(now).unwrap_or(resync);
        let recheck = self.state.recheck_in(now).unwrap_or(resync);
        let list = resync.saturating_sub(listed.unwrap_or_default());
        let external = self.owners.machine_pool.replicas_managed_externally();
        let bootstrap = if external { BOOTSTRAP_RECHECK } else { resync };
        let throttled = self.state.throttled_for(now).map_or(Duration::ZERO, |(left, _)| left);
        // Azure is not called before its patience is over.
        let cloud = [list, poll, retry, stale, untracked, recheck, bootstrap]
            .into_iter()
            .min();
        cloud.unwrap_or(resync).max(throttled)
    }
}

/// Whether a scale set that somebody else made is what is wanted, as far as Azure's answer shows that.
fn fits(set: &ScaleSetSnapshot, model: &Model) -> bool {
    let mut zones = set.zones.clone();
    zones.sort();
    set.make == Make::of(&model.set) && zones == model.set.zones.clone().unwrap_or_default()
}

/// Returns after how long a machine without a node is replaced; 0 means never.
pub(super) fn startup_timeout(spec: &AzureMachinePoolSpec) -> Option<Duration> {
    let own = spec.node_startup_timeout.filter(|timeout| !timeout.is_negative());
    let timeout = own.map_or(pool::STARTUP_TIMEOUT, Duration::from);
    (!timeout.is_zero()).then_some(timeout)
}
