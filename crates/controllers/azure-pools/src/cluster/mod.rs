//! AzureCluster: ready when the network that it names exists. The plan is `capstan_core::cluster::azure`; Capstan changes nothing
//! but the status.

mod observe;
mod status;

use std::convert::Infallible;
use std::sync::Arc;

use capstan_api::azure::AzureCluster;
use capstan_core::cluster::azure::{self, Network};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Report, Scope};
use jiff::Timestamp;

use crate::Controller;
use crate::error::Error;

/// Reconciles AzureClusters.
pub struct Clusters(pub Arc<Controller>);

impl Reconcile for Clusters {
    type Object = AzureCluster;
    type State = ();
    type Observed = Network;
    type Step = Infallible;
    type Error = Error;

    const NAME: &'static str = "azurecluster";
    const COMPONENT: &'static str = crate::COMPONENT;

    async fn observe(&self, scope: &mut Scope<AzureCluster>, _: &mut ()) -> Result<Option<Network>, Error> {
        observe::observe(&self.0, &scope.object).await
    }

    fn plan(observed: &Network, _: Timestamp) -> Plan<Infallible> {
        azure::plan(observed)
    }

    async fn apply(
        &self,
        step: Infallible,
        _: &mut Network,
        _: &mut Scope<AzureCluster>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        match step {}
    }

    fn status(
        object: &AzureCluster,
        observed: Option<&Network>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<AzureCluster> {
        status::status(object, observed, result, now)
    }
}
