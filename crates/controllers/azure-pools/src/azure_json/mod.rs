//! The Secret `<pool>-azure-json`, for KubeadmConfigs that put it into a file of each node. CAPZ makes it only while it runs the pools
//! itself. The plan is `capstan_core::cluster::azure_json`.
//!
//! Invariant: a client secret is copied only within its namespace: nobody reads in a Secret of a pool what others keep elsewhere.

mod apply;
mod observe;
mod status;

use std::sync::Arc;
use std::time::Instant;

use capstan_api::azure::AzureMachinePool;
use capstan_core::cluster::azure_json::{self, Step};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Report, Scope};
use jiff::Timestamp;

use crate::Controller;
use crate::error::Error;

/// Reconciles the Secrets of AzureMachinePools.
pub struct AzureJson(pub Arc<Controller>);

/// When the Secret was last found to be as wanted, and for which objects.
#[derive(Default)]
pub struct State {
    settled: Option<(Instant, Of)>,
}

/// The pool and the cluster that a Secret is for, by what changes with their specs.
#[derive(Clone, PartialEq)]
struct Of {
    pool: Option<i64>,
    cluster: (Option<String>, Option<i64>),
}

/// What the plan depends on.
pub enum Observed {
    /// Nothing has changed since the Secret was as wanted.
    Settled,
    Secret {
        secret: azure_json::Observed,
        /// Whether it holds a client secret, which every node gets.
        has_credential: bool,
    },
}

impl Reconcile for AzureJson {
    type Object = AzureMachinePool;
    type State = State;
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "azurejson";
    const COMPONENT: &'static str = crate::COMPONENT;

    async fn observe(&self, scope: &mut Scope<AzureMachinePool>, state: &mut State) -> Result<Option<Observed>, Error> {
        observe::observe(&self.0, scope, state).await
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        match observed {
            Observed::Settled => Plan::idle(),
            Observed::Secret { secret, .. } => azure_json::plan(secret),
        }
    }

    async fn apply(
        &self,
        step: Step,
        _: &mut Observed,
        scope: &mut Scope<AzureMachinePool>,
        _: &mut State,
    ) -> Result<Outcome, Error> {
        apply::apply(step, scope).await
    }

    fn status(
        pool: &AzureMachinePool,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        _: Timestamp,
    ) -> Report<AzureMachinePool> {
        status::status(pool, observed, result)
    }
}
