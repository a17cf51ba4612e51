//! One pool and its machines. One reconcile does the work for all of them, so that one read of Azure serves all.
//!
//! The plan is `capstan_core::pool`. Invariant: no error of Azure's stops a drain: without an answer of Azure's the pool is
//! planned without it, and the error is reported when everything else is done.

mod apply;
mod cloud;
mod desired;
mod drain;
mod external;
mod failures;
mod machines;
mod member;
pub(crate) mod metrics;
mod nodes;
mod observe;
mod orphan;
pub(crate) mod owners;
mod report;
mod snapshot;
mod state;
mod status;

pub use state::State;

use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::azure::AzureMachinePool;
use capstan_core::plan::{Describe, Forecast, Impact};
use capstan_core::pool;
use capstan_core::{Class, Classified};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Report, Scope};
use capstan_kube::workload::Cluster as Workload;
use jiff::Timestamp;
use kube::ResourceExt;

use crate::Controller;
use crate::error::Error;
use cloud::Cloud;
use machines::Writer;
use observe::Observed;
use owners::{Found, Owners};

/// CAPZ has the same finalizer, so that either of the two can delete a pool that the other one made.
pub const FINALIZER: &str = "machinepool.cluster.x-k8s.io";
/// A rotated secret is noticed after this long at the latest; a refused sign-in is noticed at once.
pub(crate) const CREDENTIAL_AGE: Duration = Duration::from_secs(300);
/// A pool that cannot go on is not reconciled more often than this by itself: Azure refuses its request each time.
const NOT_SOONER: Duration = Duration::from_secs(15);

/// Reconciles AzureMachinePools.
pub struct Pools(pub Arc<Controller>);

/// One effect of a reconcile.
#[derive(Debug)]
pub enum Step {
    Pool(pool::Step),
    /// Writes the status of the machines and the provider ids of the pool.
    Report {
        rolling: bool,
        waiting: Option<String>,
    },
    /// Ends the reconcile with the error that an earlier step has met: it has stopped no other step.
    Finish,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pool(step) => step.fmt(f),
            Self::Report { .. } => f.write_str("writes the status of the machines"),
            Self::Finish => f.write_str("ends the reconcile"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::Pool(step) => step.impact(),
            Self::Report { .. } | Self::Finish => Impact::None,
        }
    }
}

impl Reconcile for Pools {
    type Object = AzureMachinePool;
    type State = State;
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "azuremachinepool";
    const COMPONENT: &'static str = crate::COMPONENT;

    async fn observe(&self, scope: &mut Scope<AzureMachinePool>, state: &mut State) -> Result<Option<Observed>, Error> {
        let drains = std::mem::take(&mut state.drains);
        state.resume(&scope.object);
        match owners::find(&self.0, &scope.object) {
            Found::Paused => Ok(None),
            Found::Unsupported(_) if scope.is_deleting() => Ok(None),
            Found::Unsupported(why) => Ok(Some(Observed::unsupported(why, self.0.context.resync))),
            Found::All(_) | Found::Missing(_) if scope.is_deleting() && !orphan::is_ours(&scope.object) => Ok(None),
            Found::All(owners) => {
                let mut actor = Actor::new(&self.0, scope, state, owners);
                actor.observe_pool(drains).await.map(Some)
            }
            Found::Missing(what) if scope.is_deleting() => {
                orphan::observe(&self.0, scope, state, &what).await.map(Some)
            }
            Found::Missing(what) => {
                tracing::debug!("{what}");
                Ok(None)
            }
        }
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        if observed.is_idle() {
            return Plan::idle();
        }
        let plan = pool::plan(&observed.plan);
        let mut steps: Vec<Step> = plan.steps.into_iter().map(Step::Pool).collect();
        // Machines whose scale set is not the pool's, as its tags say now, keep the status that they have.
        if !observed.plan.name_taken {
            steps.push(Step::Report {
                rolling: plan.rolling,
                waiting: plan.waiting,
            });
        }
        steps.push(Step::Finish);
        Plan {
            steps,
            requeue: plan.requeue,
        }
    }

    fn forecast(observed: &Observed, _: Timestamp) -> Forecast {
        let waiting = observed.waiting_for.map(|(_, message)| message.to_owned());
        let blocked = observed.error.as_ref().map(ToString::to_string);
        match waiting.or(blocked).or(observed.throttled.clone()) {
            Some(blocked) => Forecast {
                blocked: Some(blocked),
                ..Forecast::default()
            },
            None => pool::forecast(&observed.plan),
        }
    }

    async fn apply(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<AzureMachinePool>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let mut actor = Actor::new(&self.0, scope, state, observed.owners.clone());
        let done = match step {
            Step::Pool(step) => actor.apply(step, observed).await,
            Step::Report { rolling, waiting } => actor.report(observed, rolling, waiting).await,
            Step::Finish => return actor.finish(observed),
        };
        observed.cloud = actor.state.summary(&observed.owners.set);
        match done {
            Ok(outcome) => Ok(outcome),
            Err(Error::Kube(error)) => Err(actor.scope.doubt(error).into()),
            Err(error) => Ok(actor.failed(error, observed)),
        }
    }

    fn status(
        pool: &AzureMachinePool,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<AzureMachinePool> {
        status::status(pool, observed, result, now)
    }
}

/// One reconcile of one pool.
struct Actor<'a> {
    controller: &'a Controller,
    scope: &'a mut Scope<AzureMachinePool>,
    state: &'a mut State,
    owners: Owners,
}

impl<'a> Actor<'a> {
    fn new(
        controller: &'a Controller,
        scope: &'a mut Scope<AzureMachinePool>,
        state: &'a mut State,
        owners: Owners,
    ) -> Self {
        Self {
            controller,
            scope,
            state,
            owners,
        }
    }

    fn pool(&self) -> &AzureMachinePool {
        &self.scope.object
    }

    fn workload(&self) -> Workload {
        let (namespace, cluster) = (&self.scope.key.namespace, self.owners.cluster.name_any());
        self.controller.workloads.cluster(namespace, &cluster)
    }

    fn now(&self) -> Instant {
        self.scope.instant()
    }

    fn since(&self, earlier: Instant) -> Duration {
        self.scope.context.clock.since(earlier)
    }

    async fn client(&mut self) -> Result<capstan_azure::Client, Error> {
        if let Some((client, read)) = &self.state.client
            && (self.since(*read) < CREDENTIAL_AGE || self.owners.gone)
        {
            return Ok(client.clone());
        }
        let (sign_in, cluster) = (&self.controller.options.sign_in, &self.owners.azure_cluster);
        let credential = sign_in.credential(&self.controller.context.client, cluster).await?;
        let clients = self.controller.azure.of(cluster)?;
        let client = clients.client(&credential, &sign_in.subscription(cluster)?);
        let client = client.at(&self.pool().spec.location);
        self.state.client = Some((client.clone(), self.now()));
        Ok(client)
    }

    async fn cloud(&mut self) -> Result<Cloud<'_>, Error> {
        Ok(Cloud {
            client: self.client().await?,
            clock: self.scope.context.clock,
            group: self.owners.set.group.clone(),
            name: self.owners.set.name.clone(),
            claim: self.owners.claim(self.pool()),
            state: self.state,
        })
    }

    fn writer(&self) -> Writer {
        Writer {
            machines: self.scope.api_of(),
            owners: self.scope.api_of(),
            pool: self.scope.object.clone(),
            cluster_name: self.owners.cluster.name_any(),
            machine_pool: self.owners.machine_pool.name_any(),
            clock: self.scope.context.clock,
        }
    }

    /// Notes an error that stops no other step. Azure is not called while it asks for patience: the rest is planned again
    /// without it.
    fn failed(&mut self, error: Error, observed: &mut Observed) -> Outcome {
        self.note_error(&error);
        if matches!(error.class(), Class::Throttled(_)) {
            return Outcome::Observe;
        }
        observed.error.get_or_insert(error);
        Outcome::Done
    }

    fn note_error(&mut self, error: &Error) {
        if error.is_about_credentials() {
            self.state.client = None;
        }
        if let Class::Throttled(after) = error.class() {
            tracing::warn!(%error, retry = ?after, "Azure throttles the pool");
            self.state.throttled = Some((self.now() + after, error.to_string()));
        }
    }

    /// Ends a reconcile: with an error that may go away by itself, or with the time of the next one.
    fn finish(&mut self, observed: &mut Observed) -> Result<Outcome, Error> {
        observed.events = std::mem::take(&mut self.state.events);
        observed.cloud = self.state.summary(&self.owners.set);
        let refused = observed
            .model
            .as_ref()
            .and_then(|model| self.state.refused_model(&model.hash, self.now()));
        observed.error = observed.error.take().or(refused.map(Error::Invalid));
        let wait = observed.requeue.min(self.next());
        match observed.error.take() {
            None => Ok(Outcome::Wait(Some(wait))),
            // Only a change of the spec helps; it wakes the pool.
            Some(error) if error.class() == Class::Terminal => {
                observed.error = Some(error);
                Ok(Outcome::Wait(Some(wait.max(NOT_SOONER))))
            }
            Some(error) => Err(error),
        }
    }
}
