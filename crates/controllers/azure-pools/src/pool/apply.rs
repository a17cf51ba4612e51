//! A pass over a living pool, step by step.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use capstan_api::azure::{RollingUpdateMode, UPDATE_INSTANCE_ANNOTATION};
use capstan_core::Class;
use capstan_core::rollout::{self, Budget, DeletePolicy, Mode, Plan, Pool, Scaling};
use capstan_core::validate::azure_pool;
use capstan_kube::Next;
use futures::StreamExt;
use jiff::Timestamp;
use kube::ResourceExt;

use super::cloud::Failure;
use super::drain::{self, Progress, Terms};
use super::memory::{Kind, Seen, Set};
use super::observe::{Frame, MODEL_ANNOTATION, Member, NodeState, machine};
use super::report::applied_tags;
use super::status::Draft;
use super::{Actor, BOOTSTRAP_AGE};
use crate::error::Error;
use crate::model::Model;

/// Drains that end within this time of each other share one delete.
const TOGETHER: Duration = Duration::from_secs(1);
/// Before new instances are asked for, bootstrap data must be at least this fresh: tokens expire.
const FRESH_BOOTSTRAP: Duration = Duration::from_secs(5);
/// An instance that was updated in place and is not back by then is replaced.
const UPDATE_PATIENCE: Duration = Duration::from_secs(900);
/// So many nodes are drained at once.
const DRAINS: usize = 16;
/// So many objects are written at once.
pub(super) const WRITES: usize = 8;

impl Actor<'_> {
    pub(super) async fn reconcile(&mut self, draft: &mut Draft, model: &Model) -> Result<Next, Error> {
        self.memory.wanted = Some(model.hash.clone());
        let failures = self.look().await?;
        let Some(set) = self.set() else {
            return self.create(draft, model).await;
        };
        if set.model.is_none() && self.fits(&set, model) {
            return self.adopt(model).await;
        }
        let mut members = self.members().await;
        self.note_external(&members, &set, model);
        self.note_failures(&failures, &members).await?;
        self.tend_objects(&mut members).await?;
        self.sweep().await?;
        let mut wait = self.drain(&mut members).await?;
        wait = wait.min(self.delete_drained(&members).await?);
        wait = wait.min(self.update_drained(&members, model).await?);
        self.catch_up(&mut members);

        let plan = self.plan(&members, model);
        // No machine goes for a model that Azure may refuse; what Azure has no room for holds up no machine.
        if set.model.as_deref() == Some(&model.hash) {
            self.take(&members, &plan).await?;
            self.change(&plan, model, &members).await?;
        } else {
            self.change(&plan, model, &members).await?;
            self.take(&members, &plan).await?;
        }
        self.catch_up(&mut members);
        self.sync_replicas().await?;

        wait = wait.min(self.report(&members, &model.hash, plan.rolling).await?);
        self.note_success(&members);
        draft.observed(self, &members, &plan, model);
        self.spec(&members, draft.at_rest()).await?;
        Ok(Next::After(wait.min(self.next())))
    }

    /// Brings the members up to what this very pass has changed.
    fn catch_up(&self, members: &mut [Member]) {
        let instances = self.memory.look.iter().flat_map(|look| &look.instances);
        let known: BTreeMap<&str, _> = instances
            .map(|instance| (instance.provider_id.as_str(), instance))
            .collect();
        for instance in members.iter_mut().filter_map(|member| member.instance.as_mut()) {
            if let Some(now) = known.get(instance.provider_id.as_str()) {
                (instance.latest, instance.state) = (now.latest, now.state.clone());
            }
        }
    }

    fn set(&self) -> Option<Set> {
        self.memory.look.as_ref().and_then(|look| look.set.clone())
    }

    /// Looks at Azure as far as needed, and once more when the nodes tell of something newer.
    pub(super) async fn look(&mut self) -> Result<Vec<Failure>, Error> {
        let resync = self.world.options.resync;
        let mut failures = self.cloud().await?.refresh(resync).await?;
        let members = self.members().await;
        if self.nodes_tell_news(&members).await {
            self.memory.stale = true;
            failures.extend(self.cloud().await?.refresh(resync).await?);
        }
        Ok(failures)
    }

    /// When there is reason to come back, nothing else happening.
    pub(super) fn next(&self) -> Duration {
        let resync = self.world.options.resync;
        let looked = self
            .memory
            .look
            .as_ref()
            .map_or(Duration::ZERO, |look| look.at.elapsed());
        let poll = self.memory.next_poll(Timestamp::now()).unwrap_or(resync);
        let retry = self.memory.retry.remaining(Instant::now()).unwrap_or(resync);
        let stale = if self.memory.stale { Duration::ZERO } else { resync };
        let follow = self.memory.follow_in(Instant::now()).unwrap_or(resync);
        resync
            .saturating_sub(looked)
            .min(poll)
            .min(retry)
            .min(stale)
            .min(follow)
    }

    /// How many machines there should be: as the MachinePool says, or as whoever manages its replicas has set.
    pub(super) fn desired(&self) -> usize {
        let machine_pool = &self.owners.machine_pool;
        let external = self
            .memory
            .external
            .filter(|_| machine_pool.replicas_managed_externally());
        external.unwrap_or_else(|| usize::try_from(machine_pool.replicas()).unwrap_or_default())
    }

    async fn create(&mut self, draft: &mut Draft, model: &Model) -> Result<Next, Error> {
        let desired = self.desired();
        self.cloud().await?.create(model, desired).await?;
        let message = format!("created scale set {} with {desired} instances", model.name);
        self.world.recorder.normal(self.pool, "ScaleSetCreated", message).await;
        draft.creating(model);
        self.look().await?;
        Ok(Next::After(Duration::ZERO))
    }

    /// Failed creations slow the next one down; failed updates in place become replacements.
    async fn note_failures(&mut self, failures: &[Failure], members: &[Member]) -> Result<(), Error> {
        for failure in failures {
            self.world
                .recorder
                .warning(self.pool, "OperationFailed", failure.message.clone())
                .await;
            match failure.kind {
                Kind::Change => self.memory.retry.failed(failure.message.clone(), false, Instant::now()),
                Kind::Update => {
                    let theirs = |m: &&Member| m.instance.as_ref().is_some_and(|i| failure.ids.contains(&i.id));
                    for member in members.iter().filter(theirs).collect::<Vec<_>>() {
                        self.writer().give_up_update(member, "UpdateFailed").await?;
                    }
                }
                Kind::Delete | Kind::Remove => {}
            }
        }
        for member in members {
            let Some(instance) = &member.instance else { continue };
            let never_ran = member
                .object
                .as_ref()
                .is_none_or(|object| object.status.as_ref().is_none_or(|status| status.node_ref.is_none()));
            if instance.is("Failed") && never_ran && self.memory.counted.insert(instance.provider_id.clone()) {
                let why = instance
                    .message
                    .clone()
                    .unwrap_or_else(|| format!("instance {} failed", instance.id));
                self.world
                    .recorder
                    .warning(self.pool, "InstanceFailed", format!("{}: {why}", member.name))
                    .await;
                self.memory.retry.failed(why, true, Instant::now());
            }
        }
        self.note_shortage(members).await
    }

    /// A scale operation that ended without all its instances is a failure, wherever it was told: we may have been away.
    async fn note_shortage(&mut self, members: &[Member]) -> Result<(), Error> {
        let set = self.set().unwrap_or_default();
        let there = |m: &&Member| m.instance.as_ref().is_some_and(|instance| !instance.is("Deleting"));
        let short = members.iter().filter(there).count() < set.capacity;
        let over = set.state.eq_ignore_ascii_case("Failed") && !self.memory.busy(Kind::Change);
        if short && over && !self.memory.retry.failing() {
            let why = self.cloud().await?.shortage().await?;
            self.world
                .recorder
                .warning(self.pool, "InstancesNotCreated", why.clone())
                .await;
            self.memory.retry.failed(why, false, Instant::now());
        }
        Ok(())
    }

    /// Once all that was asked for is there and well, creation has not failed any more.
    fn note_success(&mut self, members: &[Member]) {
        let capacity = self.set().map_or(0, |set| set.capacity);
        let failing = members
            .iter()
            .any(|m| m.instance.as_ref().is_some_and(|i| i.is("Failed")));
        let waiting = members.len() < capacity || members.iter().any(|member| !member.node.is_ready());
        if self.memory.retry.failing() && !failing && !waiting {
            self.memory.counted.clear();
            self.memory.retry.succeeded();
        }
    }

    /// What needs nothing of Azure, for as long as Azure is not to be asked: drains that have begun go on, and what
    /// nodes tell is told. Nothing new is taken. The answer is when to look again.
    pub(super) async fn go_on(&mut self) -> Result<Duration, Error> {
        if self.memory.look.is_none() {
            return Ok(self.world.options.resync);
        }
        let mut members = self.members().await;
        members.retain(|member| member.instance.is_some());
        let wait = self.drain(&mut members).await?;
        let Some(wanted) = self.memory.wanted.clone() else {
            return Ok(wait);
        };
        Ok(wait.min(self.report(&members, &wanted, true).await?))
    }

    /// All that has begun, to its end, while the spec asks for what cannot be. Nothing new is taken or asked for. The
    /// answer is when to look again.
    pub(super) async fn carry_on(&mut self) -> Result<Duration, Error> {
        let made = self.memory.look.is_some() || self.pool.spec.provider_id.is_some();
        if !made || self.pool.metadata.deletion_timestamp.is_some() {
            return self.go_on().await;
        }
        let error = match self.finish_begun().await {
            Err(error) if !matches!(error, Error::Kube(_)) => error,
            done => return done,
        };
        if let Class::Throttled(after) = error.class() {
            self.memory.held = Some(Instant::now() + after);
        }
        tracing::debug!(pool = %self.pool.name_any(), %error, "what has begun waits");
        self.go_on().await
    }

    async fn finish_begun(&mut self) -> Result<Duration, Error> {
        let failures = self.look().await?;
        let mut members = self.members().await;
        self.note_failures(&failures, &members).await?;
        self.tend_objects(&mut members).await?;
        let wait = self.drain(&mut members).await?;
        let wait = wait.min(self.delete_drained(&members).await?);
        let current = self.set().and_then(|set| set.model);
        let Some(wanted) = self.memory.wanted.clone().or(current) else {
            return Ok(wait);
        };
        Ok(wait.min(self.report(&members, &wanted, true).await?))
    }

    /// An object for every instance, and none without.
    async fn tend_objects(&mut self, members: &mut Vec<Member>) -> Result<(), Error> {
        let (writer, set) = (self.writer(), self.set().unwrap_or_default());
        let missing: Vec<usize> = (0..members.len())
            .filter(|n| {
                let member = &members[*n];
                member.object.is_none() && member.instance.as_ref().is_some_and(|i| !i.is("Deleting"))
            })
            .collect();
        let creations = missing.into_iter().map(|n| {
            let (writer, member, set) = (&writer, &members[n], &set);
            async move {
                let Some(instance) = &member.instance else {
                    return (n, Ok(None));
                };
                let model = set.model.as_deref().filter(|_| instance.latest || set.flexible);
                (n, writer.create(&member.name, instance, model).await)
            }
        });
        let creations: Vec<_> = creations.collect();
        let created: Vec<_> = futures::stream::iter(creations).buffered(WRITES).collect().await;
        for (n, object) in created {
            members[n].object = object?.map(std::sync::Arc::new);
        }
        let gone = members.iter().filter(|member| member.instance.is_none());
        let releases: Vec<_> = gone.map(|member| writer.release(member)).collect();
        let released: Vec<_> = futures::stream::iter(releases).buffer_unordered(WRITES).collect().await;
        released.into_iter().collect::<Result<Vec<_>, _>>()?;
        members.retain(|member| member.instance.is_some());
        self.note_models(members, &set).await
    }

    /// Keeps on each object which model its instance has: once the scale set gets another, Azure only says "not latest".
    async fn note_models(&self, members: &[Member], set: &Set) -> Result<(), Error> {
        let Some(current) = set.model.as_deref() else {
            return Ok(());
        };
        let unnoted = members.iter().filter(|member| {
            let latest = member.instance.as_ref().is_some_and(|instance| instance.latest);
            let noted = member.annotation(MODEL_ANNOTATION).map(String::as_str) == Some(current);
            latest && !noted && !member.leaving() && !member.updating()
        });
        for member in unnoted.collect::<Vec<_>>() {
            self.writer().note_model(member, current).await?;
        }
        Ok(())
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
            pointless: self.owners.cluster.metadata.deletion_timestamp.is_some(),
            wake: self.wake(),
        }
    }

    /// Drains every machine that is to go or to be updated. The answer is when to look again.
    pub(super) async fn drain(&mut self, members: &mut [Member]) -> Result<Duration, Error> {
        let (terms, deleting) = (self.terms(), self.memory.deleting());
        let mut wait = self.world.options.resync;
        let mut work = Vec::new();
        for (n, member) in members.iter().enumerate() {
            let instance_going = member
                .instance
                .as_ref()
                .is_none_or(|i| i.is("Deleting") || deleting.contains(&i.id));
            if instance_going || !(member.leaving() || member.updating()) || self.update_running(member) {
                continue;
            }
            if let Some(owner) = member.owner.as_ref().filter(|_| member.object_deleting()) {
                self.writer().delete_owner(owner).await?;
            }
            if let Some(since) = member.drain_since() {
                work.push((n, since));
            }
        }
        self.confirm_missing(members, &work, &terms).await;
        let passes = work.into_iter().map(|(n, since)| {
            let (member, workload, terms) = (&members[n], &self.workload, &terms);
            async move {
                let outcome = match &member.owner {
                    Some(owner) if member.leaving() && !drain::core_is_done(owner) => Ok(by_core(owner)),
                    Some(owner) if member.leaving() && !drain::core_did_not_drain(owner) => Ok(Progress::Done),
                    _ => drain::pass(member, workload, terms, since).await,
                };
                (n, outcome)
            }
        });
        let passes: Vec<_> = passes.collect();
        let outcomes: Vec<_> = futures::stream::iter(passes).buffer_unordered(DRAINS).collect().await;
        for (n, outcome) in outcomes {
            match outcome? {
                Progress::Done => members[n].blocked = None,
                Progress::Waiting { why, blocked, again } => {
                    members[n].blocked = Some(why);
                    members[n].stuck = blocked;
                    wait = wait.min(again);
                }
            }
        }
        Ok(wait)
    }

    /// A node that the cache does not have counts as missing only once a list of the cluster itself says so: one list for
    /// all of them.
    async fn confirm_missing(&self, members: &mut [Member], work: &[(usize, Timestamp)], terms: &Terms) {
        let missing = |n: &usize| matches!(members[*n].node, NodeState::Missing);
        let doubtful: Vec<usize> = work.iter().map(|(n, _)| *n).filter(missing).collect();
        if doubtful.is_empty() || terms.pointless {
            return;
        }
        let there = drain::listed(&self.workload).await;
        for n in doubtful {
            if let Some(why) = drain::not_missing(members[n].provider_id(), &there) {
                members[n].node = NodeState::Unknown(why);
            }
        }
    }

    fn update_running(&self, member: &Member) -> bool {
        let Some(instance) = &member.instance else { return false };
        let mut updates = self
            .memory
            .operations
            .iter()
            .filter(|tracked| tracked.kind == Kind::Update);
        updates.any(|tracked| tracked.ids.contains(&instance.id))
    }

    /// Deletes the instances of all machines that are drained, in one call.
    pub(super) async fn delete_drained(&mut self, members: &[Member]) -> Result<Duration, Error> {
        let never = self.world.options.resync;
        let deleting = self.memory.deleting();
        let going = |m: &&Member| {
            m.instance
                .as_ref()
                .is_some_and(|i| i.is("Deleting") || deleting.contains(&i.id))
        };
        let leaving = || members.iter().filter(|m| m.leaving()).filter(|m| !going(m));
        let drained: BTreeSet<String> = leaving()
            .filter(|member| member.object_deleting() && member.blocked.is_none())
            .filter_map(|member| member.instance.as_ref().map(|instance| instance.id.clone()))
            .collect();
        if drained.is_empty() {
            self.memory.drained = None;
            return Ok(never);
        }
        let since = *self.memory.drained.get_or_insert_with(Instant::now);
        let others = leaving().any(|member| member.blocked.is_some());
        if others && since.elapsed() < TOGETHER {
            return Ok(TOGETHER.saturating_sub(since.elapsed()));
        }
        self.memory.drained = None;
        self.cloud().await?.delete(drained).await?;
        Ok(never)
    }

    /// Updates drained machines in place, and finishes with those that are back.
    async fn update_drained(&mut self, members: &[Member], model: &Model) -> Result<Duration, Error> {
        let mut wait = self.world.options.resync;
        let mut start = BTreeSet::new();
        let set_is_new = self.set().and_then(|set| set.model).as_deref() == Some(&model.hash);
        for member in members
            .iter()
            .filter(|member| member.updating() && !member.leaving())
            .collect::<Vec<_>>()
        {
            let Some(instance) = &member.instance else { continue };
            if self.update_running(member) {
                continue;
            }
            if instance.latest && set_is_new {
                wait = wait.min(self.finish_update(member, model).await?);
            } else if instance.is("Failed") {
                self.writer().give_up_update(member, "InstanceFailed").await?;
            } else if member.blocked.is_none() && set_is_new {
                start.insert(instance.id.clone());
            }
        }
        if start.is_empty() {
            return Ok(wait);
        }
        match self.cloud().await?.update(start.clone()).await {
            Err(Error::Azure(error)) if error.class() == Class::Terminal => {
                self.world
                    .recorder
                    .warning(self.pool, "UpdateRefused", error.to_string())
                    .await;
                let theirs = |m: &&Member| m.instance.as_ref().is_some_and(|i| start.contains(&i.id));
                for member in members.iter().filter(theirs).collect::<Vec<_>>() {
                    self.writer().give_up_update(member, "UpdateRefused").await?;
                }
                Ok(wait)
            }
            done => done.map(|()| wait),
        }
    }

    async fn finish_update(&self, member: &Member, model: &Model) -> Result<Duration, Error> {
        if let NodeState::Ready(node) = &member.node {
            self.workload.connection().await?.drainer.uncordon(node).await?;
            self.writer().finish_update(member, &model.hash).await?;
            return Ok(self.world.options.resync);
        }
        let begun = member
            .annotation(UPDATE_INSTANCE_ANNOTATION)
            .and_then(|time| time.parse::<Timestamp>().ok());
        let age = begun.and_then(|begun| Duration::try_from(Timestamp::now().duration_since(begun)).ok());
        let left = UPDATE_PATIENCE.saturating_sub(age.unwrap_or_default());
        if left.is_zero() && !matches!(member.node, NodeState::Unknown(_)) {
            self.writer().give_up_update(member, "NodeDidNotComeBack").await?;
        }
        Ok(left.max(Duration::from_secs(1)))
    }

    /// Asks the planner.
    fn plan(&self, members: &[Member], model: &Model) -> Plan {
        let set = self.set().unwrap_or_default();
        let deleting = self.memory.deleting();
        let spot = self.pool.spec.template.spot_vm_options.is_some();
        let frame = Frame {
            model: &model.hash,
            set_model: set.model.as_deref(),
            deleting: &deleting,
            spot,
        };
        let strategy = self.pool.spec.strategy.rolling_update.clone().unwrap_or_default();
        let desired = self.desired();
        let budget = azure_pool::amounts(&self.pool.spec)
            .and_then(|(surge, unavailable)| Budget::resolve(surge, unavailable, desired))
            .unwrap_or(Budget {
                surge: 1,
                unavailable: 0,
            });
        let policy = strategy
            .delete_policy
            .as_ref()
            .and_then(|policy| policy.as_str().parse().ok());
        let in_place = strategy.mode == Some(RollingUpdateMode::InPlace) && !set.flexible;
        rollout::plan(&Pool {
            desired,
            budget,
            policy: policy.unwrap_or(DeletePolicy::Oldest),
            mode: if in_place { Mode::InPlace } else { Mode::Replace },
            seed: seed(&self.pool.uid().unwrap_or_default()),
            capacity: self.asked(&set, members),
            scaling: if self.memory.busy(Kind::Change) {
                Scaling::Running
            } else {
                Scaling::Idle
            },
            machines: members.iter().filter_map(|member| machine(member, &frame)).collect(),
        })
    }

    /// The capacity that was asked for. A Flexible set makes nothing by itself of a capacity that it already has.
    fn asked(&self, set: &Set, members: &[Member]) -> usize {
        if !set.flexible || self.memory.busy(Kind::Change) {
            return set.capacity;
        }
        let deleting = self.memory.deleting();
        let live = |i: &&Seen| !i.is("Deleting") && !deleting.contains(&i.id);
        members.iter().filter_map(|m| m.instance.as_ref()).filter(live).count()
    }

    /// Marks the machines that the plan takes. One that has become available since it was looked at, and was chosen
    /// because it was not, is left for the next plan.
    async fn take(&self, members: &[Member], plan: &Plan) -> Result<(), Error> {
        let writer = self.writer();
        let by_name: BTreeMap<&str, &Member> = members.iter().map(|member| (member.name.as_str(), member)).collect();
        let mut leaving = Vec::new();
        for name in &plan.delete {
            if let Some(member) = by_name.get(name.as_str())
                && !self.has_recovered(member).await
            {
                leaving.push(*member);
            }
        }
        writer.delete_all(&leaving).await?;
        for name in &plan.update {
            if let Some(member) = by_name.get(name.as_str())
                && !self.has_recovered(member).await
            {
                writer.start_update(member).await?;
            }
        }
        Ok(())
    }

    /// Gives the scale set its model and its capacity, in one call.
    async fn change(&mut self, plan: &Plan, model: &Model, members: &[Member]) -> Result<(), Error> {
        let Some(set) = self.set() else { return Ok(()) };
        let now = Instant::now();
        let new_model = set.model.as_deref() != Some(&model.hash);
        let held = self.memory.retry.remaining(now).is_some();
        let wanted = plan.capacity.or_else(|| self.spare(&set, members));
        let wanted = wanted.filter(|capacity| *capacity < set.capacity || !held);
        // A scale operation that failed is over: asking for the same again is the retry.
        let again =
            self.memory.retry.due(now) && !self.memory.busy(Kind::Change) && set.state.eq_ignore_ascii_case("Failed");
        if !new_model && wanted.is_none() && !again {
            return Ok(());
        }
        let capacity = wanted.unwrap_or(set.capacity);
        let (mut fresh, mut model) = (false, model.clone());
        let old = capacity > set.capacity && !new_model && self.bootstrap_age() > FRESH_BOOTSTRAP;
        let bootstrap = if old {
            self.bootstrap(FRESH_BOOTSTRAP).await?
        } else {
            None
        };
        if let Some(bootstrap) = bootstrap {
            let reread = self.model(&bootstrap).await?;
            // A change of more than a token is the next pass's business.
            if reread.hash == model.hash {
                model = reread;
            }
        }
        if capacity > set.capacity || again {
            fresh = set.custom_data.as_deref() != Some(&model.custom_data_hash);
        }
        let done = match new_model {
            true => {
                let applied = applied_tags(self.pool);
                self.cloud().await?.replace(&model, capacity, &applied).await
            }
            false => self.cloud().await?.scale(&model, capacity, fresh).await,
        };
        if let Err(Error::Azure(error)) = &done
            && error.class() == Class::Transient
            && error.arm().is_some_and(|arm| arm.status < 500 && arm.status != 409)
        {
            self.memory.retry.failed(error.to_string(), false, Instant::now());
        }
        done?;
        if new_model {
            let message = format!("model {} is rolled out", model.hash);
            self.world.recorder.normal(self.pool, "ModelChanged", message).await;
        }
        // New instances show at once, and so do their machines.
        if capacity > set.capacity {
            self.world
                .trigger
                .poke(kube::runtime::reflector::ObjectRef::from_obj(self.pool));
        } else {
            self.memory.stale = false;
        }
        Ok(())
    }

    /// What a Flexible set's capacity comes down to once its machines are gone and nothing else is under way.
    fn spare(&self, set: &Set, members: &[Member]) -> Option<usize> {
        let quiet = set.flexible && self.memory.operations.is_empty();
        let going = |m: &Member| m.leaving() || m.instance.as_ref().is_some_and(|i| i.is("Deleting"));
        (quiet && members.len() < set.capacity && !members.iter().any(going)).then_some(members.len())
    }

    fn bootstrap_age(&self) -> Duration {
        self.memory
            .bootstrap
            .as_ref()
            .map_or(BOOTSTRAP_AGE, |(_, _, at)| at.elapsed())
    }
}

impl Member {
    /// Since when its drain has been on.
    fn drain_since(&self) -> Option<Timestamp> {
        let object = self.object.as_ref()?;
        if let Some(time) = &object.metadata.deletion_timestamp {
            return Some(time.0);
        }
        let begun = self.annotation(UPDATE_INSTANCE_ANNOTATION)?;
        // Anybody may set the annotation, to any value.
        Some(begun.parse().unwrap_or(Timestamp::now()))
    }
}

/// Core drains a Machine's node before it deletes what the Machine stands on.
fn by_core(owner: &std::sync::Arc<capstan_kube::capi::Machine>) -> Progress {
    let why = format!("Machine {} is being drained by Cluster API", owner.name_any());
    Progress::Waiting {
        why,
        blocked: false,
        again: Duration::from_secs(15),
    }
}

fn seed(uid: &str) -> u64 {
    uid.bytes()
        .fold(0, |seed, byte| seed.wrapping_mul(131).wrapping_add(byte.into()))
}
