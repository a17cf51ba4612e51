//! One pool and its machines. One actor does all the work for them, so that one read of Azure serves all.
//!
//! A reconcile observes (caches, Azure as far as anything may have changed, nodes), plans (`capstan_core::pool`) and
//! applies the steps. It may be killed anywhere: the next one observes what was done.

mod apply;
mod cloud;
mod drain;
mod external;
mod machines;
mod member;
mod nodes;
mod observe;
mod orphan;
mod owners;
mod report;
mod state;
mod status;

pub use state::State;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::azure::AzureMachinePool;
use capstan_core::Class;
use capstan_core::pool::{self, Mode, Plan};
use capstan_core::validate::{azure_cluster, azure_pool};
use capstan_kube::expectations::{Expectations, Shown, Version};
use capstan_kube::workload::Cluster as Workload;
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::MutexGuard;

use crate::Controller;
use crate::error::Error;
use crate::model::{self, Model};
use cloud::Cloud;
use machines::Writer;
use member::Member;
use observe::View;
use owners::{Found, Owners};
use status::Draft;

pub const FINALIZER: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io";
/// The key that was made for a pool without one of its own.
const SSH_KEY_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/sshPublicKey";
/// A rotated secret is noticed after this long at the latest; a refused sign-in is noticed at once.
const CREDENTIAL_AGE: Duration = Duration::from_secs(300);
/// Bootstrap data is read again when it is older than this.
const BOOTSTRAP_AGE: Duration = Duration::from_secs(30);
/// The cache shows our own writes within milliseconds; this is for a watch that was cut off.
const LAG: Duration = Duration::from_secs(2);
/// A pool that cannot go on is not reconciled more often than this by itself: what it asks for is refused each time.
const NOT_SOONER: Duration = Duration::from_secs(15);
/// While objects go away, their watch wakes us; this is for a watch that was cut off.
const DELETION_RECHECK: Duration = Duration::from_secs(30);
/// What a cache has not shown by then it never will: it was made and removed while nobody watched.
const OVERDUE: Duration = Duration::from_secs(60);

/// Reconciles a pool.
pub async fn reconcile(controller: Arc<Controller>, pool: Arc<AzureMachinePool>) -> Result<Next, Error> {
    // The object that asked for the reconcile may be older than what the cache has by now.
    let Some(pool) = controller.pools.get(pool.namespace().as_deref(), &pool.name_any()) else {
        return Ok(Next::Wait);
    };
    let state = controller.state(&pool);
    let mut state = state.lock().await;
    let owners = match owners::find(&controller, &pool) {
        Found::All(owners) => owners,
        Found::Paused => return Ok(Next::Wait),
        Found::Missing(what) if pool.metadata.deletion_timestamp.is_none() => {
            tracing::debug!(pool = %pool.name_any(), "{what}");
            return Ok(Next::Wait);
        }
        Found::Missing(what) => return orphan::orphaned(&controller, &pool, &mut state, &what).await,
    };
    let mut draft = Draft::new(&pool);
    let mut actor = Actor::new(&controller, &pool, &owners, state);
    let result = actor.attempt(&mut draft).await;
    if let Err(error) = &result {
        draft.trouble(error);
        if error.is_about_credentials() {
            actor.state.client = None;
        }
        if error.class() == Class::Terminal || error.is_about_the_identity() {
            let message = error.to_string();
            controller
                .recorder
                .warning(pool.as_ref(), error.reason(), message)
                .await;
        }
    }
    draft.operations(&actor.state, &actor.group());
    let pending = actor.write_status(&draft, result.is_err()).await?;
    // An error that only a change of the spec can mend holds up nothing that is under way.
    let next = match result {
        Err(error) if error.class() == Class::Terminal => Next::After(actor.again),
        result => result?,
    };
    Ok(sooner(next, pending))
}

/// Whether the caches do not show our last writes yet, and may still do.
fn lags(
    expectations: &Expectations<String>,
    uid: &String,
    patience: Duration,
    shown: impl Fn(&str) -> Option<Shown>,
) -> bool {
    if expectations.overdue(uid, patience) {
        expectations.forget(uid);
    }
    expectations.pending(uid, shown)
}

/// Reconciles again in time to write what waits.
fn sooner(next: Next, pending: Option<Instant>) -> Next {
    let Some(due) = pending else { return next };
    let wait = due.saturating_duration_since(Instant::now());
    match next {
        Next::After(other) => Next::After(other.min(wait)),
        Next::Wait => Next::After(wait),
    }
}

/// A pool with everything that a reconcile needs.
struct Actor<'a> {
    controller: &'a Arc<Controller>,
    pool: &'a AzureMachinePool,
    owners: &'a Owners,
    state: MutexGuard<'a, State>,
    workload: Workload,
    /// When the list of provider ids may be written, if it has changed and was not written yet.
    ids_again: Option<Instant>,
    /// When to reconcile again while a part of the plan cannot be carried out.
    again: Duration,
    /// When to reconcile again, once the whole plan was carried out as far as Azure let us.
    executed: Option<Duration>,
}

impl<'a> Actor<'a> {
    fn new(
        controller: &'a Arc<Controller>,
        pool: &'a AzureMachinePool,
        owners: &'a Owners,
        mut state: MutexGuard<'a, State>,
    ) -> Self {
        let namespace = pool.namespace().unwrap_or_default();
        let workload = controller.workloads.cluster(&namespace, &owners.cluster.name_any());
        if !state.resumed {
            let kept = pool
                .status
                .iter()
                .flat_map(|status| &status.long_running_operation_states);
            state.operations = kept.filter_map(state::Tracked::resume).collect();
            state.resumed = true;
        }
        Self {
            controller,
            pool,
            owners,
            state,
            workload,
            ids_again: None,
            again: controller.options.resync,
            executed: None,
        }
    }

    fn group(&self) -> String {
        model::group(&self.owners.azure_cluster, &self.owners.cluster.name_any())
    }

    fn subscription(&self) -> Result<String, Error> {
        self.controller.options.sign_in.subscription(&self.owners.azure_cluster)
    }

    async fn client(&mut self) -> Result<capstan_azure::Client, Error> {
        if let Some((client, read)) = &self.state.client
            && read.elapsed() < CREDENTIAL_AGE
        {
            return Ok(client.clone());
        }
        let credential = self
            .controller
            .options
            .sign_in
            .credential(&self.controller.context.client, &self.owners.azure_cluster)
            .await?;
        let client = self
            .controller
            .azure
            .client(&credential, &self.subscription()?)
            .at(&self.pool.spec.location);
        self.state.client = Some((client.clone(), Instant::now()));
        Ok(client)
    }

    async fn cloud(&mut self) -> Result<Cloud<'_>, Error> {
        let (client, group, name) = (self.client().await?, self.group(), model::set_name(self.pool));
        Ok(Cloud {
            client,
            group,
            name,
            state: &mut self.state,
        })
    }

    fn writer(&self) -> Writer<'a> {
        Writer {
            controller: self.controller,
            pool: self.pool,
            cluster_name: self.owners.cluster.metadata.name.as_deref().unwrap_or_default(),
            machine_pool: self.owners.machine_pool.metadata.name.as_deref().unwrap_or_default(),
        }
    }

    fn wake(&self) -> capstan_kube::drain::Wake {
        let (trigger, pool) = (self.controller.trigger.clone(), ObjectRef::from_obj(self.pool));
        Arc::new(move || trigger.poke(pool.clone()))
    }

    /// Reconciles as much as possible: without the cloud while Azure asks for patience or does not answer, and only what
    /// is under way while the spec is invalid.
    async fn attempt(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if self.lagging() {
            return Ok(Next::After(LAG));
        }
        if let Some(left) = self.state.throttled_for(Instant::now()) {
            return Ok(Next::After(self.carry_on(Mode::WithoutCloud).await?.min(left)));
        }
        let error = match self.run(draft).await {
            Err(error) if !matches!(error, Error::Kube(_)) => error,
            done => return done,
        };
        let mode = match &error {
            Error::Invalid(_) => Mode::FinishOnly,
            Error::Azure(_) | Error::Kube(_) | Error::Identity { .. } | Error::NotReady(_) => Mode::WithoutCloud,
        };
        let wait = match self.executed {
            Some(wait) => wait,
            None => self.carry_on(mode).await?,
        };
        let poll = self.state.next_poll(Timestamp::now()).unwrap_or(wait);
        self.again = wait.min(poll).max(NOT_SOONER);
        let Class::Throttled(after) = error.class() else {
            return Err(error);
        };
        tracing::warn!(pool = %self.pool.name_any(), %error, retry = ?after, "Azure throttles the pool");
        self.state.throttled_until = Some(Instant::now() + after);
        draft.trouble(&error);
        Ok(Next::After(wait.min(after)))
    }

    /// Carries out a part of the plan where the whole cannot be. Returns when to reconcile again.
    async fn carry_on(&mut self, mode: Mode) -> Result<Duration, Error> {
        let known = self.state.snapshot.is_some();
        let exists = known || self.pool.spec.provider_id.is_some();
        let deleted = self.pool.metadata.deletion_timestamp.is_some();
        let finish = mode == Mode::FinishOnly && exists && !deleted;
        if finish {
            match self.execute(Mode::FinishOnly, None).await {
                Ok((view, _)) => return Ok(view.requeue),
                Err(error @ Error::Kube(_)) => return Err(error),
                Err(error) => {
                    if let Class::Throttled(after) = error.class() {
                        self.state.throttled_until = Some(Instant::now() + after);
                    }
                    tracing::debug!(pool = %self.pool.name_any(), %error, "Azure does not answer, drains go on");
                }
            }
        }
        if !known {
            return Ok(self.controller.options.resync);
        }
        let (view, _) = self.execute(Mode::WithoutCloud, None).await?;
        Ok(view.requeue)
    }

    /// Observes, plans and applies until nothing more follows, and writes the machines' status. An error of Azure's in
    /// one step stops no other step.
    async fn execute(&mut self, mode: Mode, model: Option<Model>) -> Result<(View, Plan), Error> {
        let mut view = self.observe(mode, model).await?;
        let mut failed = None;
        let plan = loop {
            let mut plan = pool::plan(&self.observed(&view));
            for step in std::mem::take(&mut plan.steps) {
                match self.apply(step, &mut view).await {
                    Ok(()) => {}
                    Err(error @ (Error::Azure(_) | Error::Invalid(_)))
                        if !matches!(error.class(), Class::Throttled(_)) =>
                    {
                        failed = failed.or(Some(error));
                    }
                    Err(error) => return Err(error),
                }
            }
            if !plan.again || failed.is_some() {
                break plan;
            }
        };
        if let Some(requeue) = plan.requeue {
            view.requeue(requeue);
        }
        self.write_machines(&mut view, plan.rolling).await?;
        view.failed = failed;
        Ok((view, plan))
    }

    /// Writes the status of the machines, and the events.
    async fn write_machines(&mut self, view: &mut View, rolling: bool) -> Result<(), Error> {
        self.sync_members(view);
        for (reason, message) in std::mem::take(&mut view.events) {
            self.controller.recorder.warning(self.pool, reason, message).await;
        }
        let existing: Vec<Member> = view.existing();
        if view.mode == Mode::Teardown {
            return self.report_drains(&existing).await;
        }
        let current = self.scale_set().and_then(|set| set.model);
        let wanted = view.model.as_ref().map(|model| model.hash.clone());
        let wanted = wanted.or_else(|| self.state.wanted_model.clone()).or(current);
        if let Some(wanted) = wanted {
            let again = self.report(&existing, &wanted, rolling).await?;
            view.requeue(again);
        }
        Ok(())
    }

    /// Brings the members up to what the steps have changed.
    fn sync_members(&self, view: &mut View) {
        let instances = self.state.snapshot.iter().flat_map(|snapshot| &snapshot.instances);
        let known: BTreeMap<&str, _> = instances
            .map(|instance| (instance.provider_id.as_str(), instance))
            .collect();
        for instance in view.members.iter_mut().filter_map(|member| member.instance.as_mut()) {
            if let Some(now) = known.get(instance.provider_id.as_str()) {
                (instance.latest, instance.state) = (now.latest, now.state.clone());
            }
        }
    }

    async fn report_drains(&self, members: &[Member]) -> Result<(), Error> {
        for member in members.iter().filter(|member| member.stuck) {
            let status = member.object.as_ref().and_then(|object| object.status.as_ref());
            let latest = status.is_some_and(|status| status.latest_model_applied);
            self.writer().report(member, latest, None).await?;
        }
        Ok(())
    }

    async fn full(&mut self, draft: &mut Draft, model: Model) -> Result<Next, Error> {
        self.state.wanted_model = Some(model.hash.clone());
        let (view, plan) = self.execute(Mode::Full, Some(model.clone())).await?;
        if view.created {
            draft.creating(&model);
            return Ok(Next::After(Duration::ZERO));
        }
        let existing = view.existing();
        self.note_success(&existing);
        draft.observed(self, &existing, &plan, &model);
        self.spec(&view.members, draft.at_rest()).await?;
        let wait = view.requeue.min(self.next());
        self.executed = Some(wait);
        let refused = self.state.refused_model(&model.hash).map(Error::Invalid);
        match view.failed.or(refused) {
            Some(error) => Err(error),
            None => Ok(Next::After(wait)),
        }
    }

    async fn teardown(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if !orphan::is_ours(self.pool) {
            return Ok(Next::Wait);
        }
        let (view, plan) = self.execute(Mode::Teardown, None).await?;
        if view.released {
            return Ok(Next::Wait);
        }
        let exists = self.scale_set().is_some();
        draft.deleting(&match (exists, view.existing().len()) {
            (false, _) => "the scale set is gone".to_owned(),
            (true, 0) => "the scale set is being deleted".to_owned(),
            (true, count) => plan
                .waiting
                .unwrap_or_else(|| format!("{count} machines are to be deleted first")),
        });
        match view.failed {
            Some(error) => Err(error),
            None => Ok(Next::After(view.requeue.min(self.next()).min(DELETION_RECHECK))),
        }
    }

    async fn run(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if self.pool.metadata.deletion_timestamp.is_some() {
            return self.teardown(draft).await;
        }
        let api = self
            .controller
            .context
            .api::<AzureMachinePool>(&self.pool.namespace().unwrap_or_default());
        if let Some(written) = patch::add_finalizer(&api, self.pool, FINALIZER).await? {
            self.controller.wrote(self.pool, Some(&written));
            return Ok(Next::Wait);
        }
        let findings = azure_pool::validate(self.pool);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let cluster = &self.owners.azure_cluster;
        let findings = azure_cluster::validate(&cluster.spec);
        if !findings.is_ok() {
            let (name, message) = (cluster.name_any(), findings.message());
            return Err(Error::Invalid(format!("AzureCluster {name}: {message}")));
        }
        if self.needs_ssh_key(&api).await? {
            return Ok(Next::Wait);
        }
        if !self.owners.cluster.infrastructure_provisioned() && !self.azure_cluster_ready() {
            draft.waiting_for(
                "WaitingForClusterInfrastructure",
                "the cluster's infrastructure is not ready yet",
            );
            return Ok(Next::Wait);
        }
        let Some(bootstrap) = self.bootstrap(BOOTSTRAP_AGE).await? else {
            draft.waiting_for("WaitingForBootstrapData", "the MachinePool has no bootstrap data yet");
            return Ok(Next::Wait);
        };
        let model = self.model(&bootstrap).await?;
        draft.bootstrapped(&model);
        self.full(draft, model).await
    }

    fn azure_cluster_ready(&self) -> bool {
        self.owners
            .azure_cluster
            .status
            .as_ref()
            .is_some_and(|status| status.ready)
    }

    /// Whether the cache has not shown our last writes yet.
    fn lagging(&self) -> bool {
        let uid = self.pool.uid().unwrap_or_default();
        let namespace = self.pool.namespace();
        lags(&self.controller.expectations, &uid, OVERDUE, |written| {
            let namespace = namespace.as_deref();
            let machine = || {
                self.controller
                    .machines
                    .select(namespace, |m| m.uid().as_deref() == Some(written))
            };
            let owner = || {
                self.controller
                    .owner_machines
                    .select(namespace, |m| m.uid().as_deref() == Some(written))
            };
            let meta = match () {
                () if written == uid => Some(self.pool.metadata.clone()),
                () => machine().first().map(|machine| machine.metadata.clone()),
            };
            let meta = meta.or_else(|| owner().first().map(|machine| machine.metadata.clone()))?;
            Some(Shown {
                version: Version::new(meta.resource_version.unwrap_or_default()),
                deleting: meta.deletion_timestamp.is_some(),
            })
        })
    }

    /// A Linux pool without a key gets one, kept in its spec so that it stays the same, and in an annotation for the day
    /// when a manifest without a key is applied again: that must not roll the pool.
    async fn needs_ssh_key(&self, api: &kube::Api<AzureMachinePool>) -> Result<bool, Error> {
        let template = &self.pool.spec.template;
        let windows = template.os_disk.os_type.as_deref() == Some("Windows");
        if windows || template.ssh_public_key.as_deref().is_some_and(|key| !key.is_empty()) {
            return Ok(false);
        }
        let mut after = self.pool.clone();
        let kept = self.pool.annotations().get(SSH_KEY_ANNOTATION).cloned();
        let Some(key) = kept.or_else(model::generate_ssh_key) else {
            return Ok(false);
        };
        after
            .annotations_mut()
            .insert(SSH_KEY_ANNOTATION.to_owned(), key.clone());
        after.spec.template.ssh_public_key = Some(key);
        let written = patch::object(api, self.pool, &after, patch::Lock::Version).await?;
        self.controller.wrote(self.pool, written.as_ref());
        Ok(written.is_some())
    }

    /// The bootstrap data, no older than `age`; nothing while there is none.
    async fn bootstrap(&mut self, age: Duration) -> Result<Option<Vec<u8>>, Error> {
        let named = self
            .owners
            .machine_pool
            .spec
            .template
            .spec
            .bootstrap
            .data_secret_name
            .clone();
        let Some(name) = named.filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        if let Some((read, data, at)) = &self.state.bootstrap
            && *read == name
            && at.elapsed() < age
        {
            return Ok(Some(data.clone()));
        }
        let namespace = self.pool.namespace().unwrap_or_default();
        let api = self
            .controller
            .context
            .api::<k8s_openapi::api::core::v1::Secret>(&namespace);
        let Some(secret) = api.get_opt(&name).await? else {
            return Err(Error::NotReady(format!(
                "bootstrap secret {namespace}/{name} does not exist"
            )));
        };
        let value = secret.data.unwrap_or_default().remove("value").map(|bytes| bytes.0);
        let data =
            value.ok_or_else(|| Error::NotReady(format!("bootstrap secret {namespace}/{name} has no key value")))?;
        self.state.bootstrap = Some((name, data.clone(), Instant::now()));
        Ok(Some(data))
    }

    /// The scale set that is wanted, after what only Azure's catalogue can tell has been checked.
    async fn model(&mut self, bootstrap: &[u8]) -> Result<Model, Error> {
        let subscription = self.subscription()?;
        let client = self.client().await?;
        let spec = &self.pool.spec;
        let size = match client.size(&spec.location, &spec.template.vm_size).await {
            Ok(size) => size,
            // Only the check for Ultra needs the catalogue; without it Azure itself will judge.
            Err(error) if azure_pool::ultra_enabled(&spec.template) != Some(true) => {
                tracing::debug!(%error, "the catalogue of sizes cannot be read");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let cluster_name = self.owners.cluster.name_any();
        let input = model::Input {
            pool: self.pool,
            machine_pool: &self.owners.machine_pool,
            cluster_name: &cluster_name,
            azure_cluster: &self.owners.azure_cluster,
            subscription: &subscription,
            bootstrap,
            accelerated_networking: size.as_ref().is_some_and(|size| size.accelerated_networking),
        };
        if let Some(size) = &size {
            model::check_size(&input, size)?;
        }
        model::build(&input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_watch_will_ever_show_is_not_waited_for_any_longer() {
        let (expectations, pool) = (Expectations::default(), "pool".to_owned());
        expectations.wrote(&pool, "removed before it was seen", "7");
        assert!(lags(&expectations, &pool, OVERDUE, |_| None));
        assert!(!lags(&expectations, &pool, Duration::ZERO, |_| None));
        assert!(!lags(&expectations, &pool, OVERDUE, |_| None), "it is forgotten");
    }
}
