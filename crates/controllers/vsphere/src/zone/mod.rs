//! VSphereDeploymentZone: reports whether machines can be placed where it says. The plan is `capstan_core::cluster::zone`.

mod apply;
mod observe;
mod status;

use std::sync::Arc;

use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine};
use capstan_core::cluster::zone::{self, ObservedZone, ZoneStep};
use capstan_kube::capi::Machine;
use capstan_kube::objects::references;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::cluster::reaches;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::Clusters;

/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
    context: Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
    machines: Cache<Machine>,
    owners: Cache<VSphereMachine>,
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
    own: Cache<VSphereDeploymentZone>,
    (machines, owners): (Cache<Machine>, Cache<VSphereMachine>),
) -> Result<(), Error> {
    domains.ready().await?;
    machines.ready().await?;
    owners.ready().await?;
    let (of_domain, of_cluster) = (own.clone(), own.clone());
    let reconciler = Reconciler::cluster_wide(context, own)
        .watches(&domains, move |domain: &VSphereFailureDomain| {
            let name = domain.name_any();
            references(&of_domain.select(None, |zone| zone.spec.failure_domain.as_ref() == Some(&name)))
        })
        .watches(&clusters.infrastructure, move |cluster: &VSphereCluster| {
            let waits = |zone: &VSphereDeploymentZone| zone.status.as_ref().and_then(|s| s.ready) != Some(true);
            references(&of_cluster.select(None, |zone| waits(zone) && reaches(cluster, zone)))
        });
    let controller = Controller {
        context: context.clone(),
        clusters,
        credentials,
        domains,
        machines,
        owners,
    };
    reconciler.run(Arc::new(controller)).await;
    Ok(())
}

impl Reconcile for Controller {
    type Object = VSphereDeploymentZone;
    type State = ();
    type Observed = ObservedZone;
    type Step = ZoneStep;
    type Error = Error;

    const NAME: &'static str = "vspheredeploymentzone";
    const COMPONENT: &'static str = "vspheredeploymentzone-controller";

    async fn observe(
        &self,
        scope: &mut Scope<VSphereDeploymentZone>,
        _: &mut (),
    ) -> Result<Option<ObservedZone>, Error> {
        self.observe_zone(scope).await
    }

    fn plan(observed: &ObservedZone, now: Timestamp) -> Plan<ZoneStep> {
        zone::plan(observed, now)
    }

    async fn apply(
        &self,
        step: ZoneStep,
        _: &mut ObservedZone,
        scope: &mut Scope<VSphereDeploymentZone>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        self.apply_step(step, scope).await
    }

    fn status(
        zone: &VSphereDeploymentZone,
        observed: Option<&ObservedZone>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereDeploymentZone> {
        status::status(zone, observed, result, now)
    }
}
