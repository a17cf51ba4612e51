//! One pool and its machines. One actor does all the work for them, so that one look at Azure serves all.
//!
//! A pass observes (caches, Azure as far as anything may have changed, nodes), plans (the pure planner of `capstan-core`)
//! and applies. It may be killed anywhere: the next one sees what was done.

mod apply;
mod cloud;
mod delete;
mod drain;
mod foreign;
mod look;
mod machines;
mod memory;
mod observe;
mod owners;
mod report;
mod status;

pub use memory::Memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::azure::AzureMachinePool;
use capstan_core::Class;
use capstan_core::validate::azure_pool;
use capstan_kube::expectations::{Expectations, Shown, Version};
use capstan_kube::workload::Cluster as Workload;
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::MutexGuard;

use crate::World;
use crate::error::Error;
use crate::model::{self, Model};
use cloud::Cloud;
use machines::Writer;
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
/// A pool that cannot go on is not looked at more often than this by itself: what it asks for is refused each time.
const NOT_SOONER: Duration = Duration::from_secs(15);
/// What a cache has not shown by then it never will: it was made and removed while nobody watched.
const OVERDUE: Duration = Duration::from_secs(60);

/// One pass over a pool.
pub async fn pass(world: Arc<World>, pool: Arc<AzureMachinePool>) -> Result<Next, Error> {
    // What asked for the pass may be older than what the cache has by now.
    let Some(pool) = world.pools.get(pool.namespace().as_deref(), &pool.name_any()) else {
        return Ok(Next::Wait);
    };
    let memory = world.memory(&pool);
    let mut memory = memory.lock().await;
    let owners = match owners::find(&world, &pool) {
        Found::All(owners) => owners,
        Found::Paused => return Ok(Next::Wait),
        Found::Missing(what) if pool.metadata.deletion_timestamp.is_none() => {
            tracing::debug!(pool = %pool.name_any(), "{what}");
            return Ok(Next::Wait);
        }
        Found::Missing(what) => return delete::orphaned(&world, &pool, &mut memory, &what).await,
    };
    let mut draft = Draft::new(&pool);
    let mut actor = Actor::new(&world, &pool, &owners, memory);
    let result = actor.attempt(&mut draft).await;
    if let Err(error) = &result {
        draft.trouble(error);
        if error.is_about_credentials() {
            actor.memory.client = None;
        }
        if error.class() == Class::Terminal || error.is_about_the_identity() {
            let message = error.to_string();
            world.recorder.warning(pool.as_ref(), error.reason(), message).await;
        }
    }
    draft.operations(&actor.memory, &actor.group());
    let unsaid = actor.tell(&draft, result.is_err()).await?;
    // What only a change of the spec can mend does not hold up what has begun.
    let next = match result {
        Err(error) if error.class() == Class::Terminal => Next::After(actor.again),
        result => result?,
    };
    Ok(sooner(next, unsaid))
}

/// Whether what was written is not shown yet, and may still be.
fn lags(
    expectations: &Expectations<String>,
    uid: &String,
    patience: Duration,
    look: impl Fn(&str) -> Option<Shown>,
) -> bool {
    if expectations.overdue(uid, patience) {
        expectations.forget(uid);
    }
    expectations.pending(uid, look)
}

/// Comes back in time to say what could not be said yet.
fn sooner(next: Next, unsaid: Option<Instant>) -> Next {
    let Some(due) = unsaid else { return next };
    let wait = due.saturating_duration_since(Instant::now());
    match next {
        Next::After(other) => Next::After(other.min(wait)),
        Next::Wait => Next::After(wait),
    }
}

/// A pool with everything that a pass needs at hand.
struct Actor<'a> {
    world: &'a Arc<World>,
    pool: &'a AzureMachinePool,
    owners: &'a Owners,
    memory: MutexGuard<'a, Memory>,
    workload: Workload,
    /// When the list of provider ids may be written, if it has changed and was not written yet.
    ids_again: Option<Instant>,
    /// When to look again at what goes on while the rest of the pass cannot be carried out.
    again: Duration,
}

impl<'a> Actor<'a> {
    fn new(
        world: &'a Arc<World>,
        pool: &'a AzureMachinePool,
        owners: &'a Owners,
        mut memory: MutexGuard<'a, Memory>,
    ) -> Self {
        let namespace = pool.namespace().unwrap_or_default();
        let workload = world.workloads.cluster(&namespace, &owners.cluster.name_any());
        if !memory.resumed {
            let kept = pool
                .status
                .iter()
                .flat_map(|status| &status.long_running_operation_states);
            memory.operations = kept.filter_map(memory::Tracked::resume).collect();
            memory.resumed = true;
        }
        Self {
            world,
            pool,
            owners,
            memory,
            workload,
            ids_again: None,
            again: world.options.resync,
        }
    }

    fn group(&self) -> String {
        model::group(&self.owners.azure_cluster, &self.owners.cluster.name_any())
    }

    fn subscription(&self) -> Result<String, Error> {
        self.world.options.sign_in.subscription(&self.owners.azure_cluster)
    }

    async fn client(&mut self) -> Result<capstan_azure::Client, Error> {
        if let Some((client, read)) = &self.memory.client
            && read.elapsed() < CREDENTIAL_AGE
        {
            return Ok(client.clone());
        }
        let credential = self
            .world
            .options
            .sign_in
            .credential(&self.world.context.client, &self.owners.azure_cluster)
            .await?;
        let client = self
            .world
            .azure
            .client(&credential, &self.subscription()?)
            .at(&self.pool.spec.location);
        self.memory.client = Some((client.clone(), Instant::now()));
        Ok(client)
    }

    async fn cloud(&mut self) -> Result<Cloud<'_>, Error> {
        let (client, group, name) = (self.client().await?, self.group(), model::set_name(self.pool));
        Ok(Cloud {
            client,
            group,
            name,
            memory: &mut self.memory,
        })
    }

    fn writer(&self) -> Writer<'a> {
        Writer {
            world: self.world,
            pool: self.pool,
            cluster_name: self.owners.cluster.metadata.name.as_deref().unwrap_or_default(),
            machine_pool: self.owners.machine_pool.metadata.name.as_deref().unwrap_or_default(),
        }
    }

    fn wake(&self) -> capstan_kube::drain::Wake {
        let (trigger, pool) = (self.world.trigger.clone(), ObjectRef::from_obj(self.pool));
        Arc::new(move || trigger.poke(pool.clone()))
    }

    /// A whole pass; while Azure asks for patience, as much of one as needs nothing of Azure.
    async fn attempt(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if self.lagging() {
            return Ok(Next::After(LAG));
        }
        if let Some(left) = self.memory.held_for(Instant::now()) {
            return Ok(Next::After(self.go_on().await?.min(left)));
        }
        let error = match self.run(draft).await {
            Err(error) if !matches!(error, Error::Kube(_)) => error,
            done => return done,
        };
        let wait = match &error {
            Error::Invalid(_) => self.carry_on().await?,
            _ => self.go_on().await?,
        };
        let poll = self.memory.next_poll(Timestamp::now()).unwrap_or(wait);
        self.again = wait.min(poll).max(NOT_SOONER);
        let Class::Throttled(after) = error.class() else {
            return Err(error);
        };
        tracing::warn!(pool = %self.pool.name_any(), %error, retry = ?after, "azure is not asked for a while");
        self.memory.held = Some(Instant::now() + after);
        draft.trouble(&error);
        Ok(Next::After(wait.min(after)))
    }

    async fn run(&mut self, draft: &mut Draft) -> Result<Next, Error> {
        if self.pool.metadata.deletion_timestamp.is_some() {
            return self.delete(draft).await;
        }
        let api = self
            .world
            .context
            .api::<AzureMachinePool>(&self.pool.namespace().unwrap_or_default());
        if let Some(written) = patch::add_finalizer(&api, self.pool, FINALIZER).await? {
            self.world.wrote(self.pool, Some(&written));
            return Ok(Next::Wait);
        }
        let findings = azure_pool::validate(self.pool);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
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
        self.reconcile(draft, &model).await
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
        lags(&self.world.expectations, &uid, OVERDUE, |written| {
            let namespace = namespace.as_deref();
            let machine = || {
                self.world
                    .machines
                    .select(namespace, |m| m.uid().as_deref() == Some(written))
            };
            let owner = || {
                self.world
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
        self.world.wrote(self.pool, written.as_ref());
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
        if let Some((read, data, at)) = &self.memory.bootstrap
            && *read == name
            && at.elapsed() < age
        {
            return Ok(Some(data.clone()));
        }
        let namespace = self.pool.namespace().unwrap_or_default();
        let api = self.world.context.api::<k8s_openapi::api::core::v1::Secret>(&namespace);
        let Some(secret) = api.get_opt(&name).await? else {
            return Err(Error::NotReady(format!(
                "bootstrap secret {namespace}/{name} does not exist"
            )));
        };
        let value = secret.data.unwrap_or_default().remove("value").map(|bytes| bytes.0);
        let data =
            value.ok_or_else(|| Error::NotReady(format!("bootstrap secret {namespace}/{name} has no key value")))?;
        self.memory.bootstrap = Some((name, data.clone(), Instant::now()));
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
