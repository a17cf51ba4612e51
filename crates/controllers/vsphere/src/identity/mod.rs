//! VSphereClusterIdentity: reports whether its Secret can be used. The plan is `capstan_core::cluster::identity`.

mod apply;
mod observe;
mod status;

use std::sync::Arc;

use capstan_api::vsphere::{VSphereCluster, VSphereClusterIdentity};
use capstan_core::cluster::identity::{self, IdentityStep, ObservedIdentity};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;

use crate::credentials::Credentials;
use crate::error::Error;

/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
    credentials: Arc<Credentials>,
    clusters: Cache<VSphereCluster>,
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    own: Cache<VSphereClusterIdentity>,
    clusters: Cache<VSphereCluster>,
    credentials: Arc<Credentials>,
) {
    let (known, by_name) = (own.clone(), credentials.clone());
    let by_secret = credentials.changes().flat_map(move |secret| {
        let named = |identity: &VSphereClusterIdentity| by_name.secret_of_identity(identity).as_ref() == Some(&secret);
        let found = known.select(None, named);
        let found: Vec<_> = found.iter().map(|i| ObjectRef::from_obj(i.as_ref())).collect();
        futures::stream::iter(found)
    });
    Reconciler::cluster_wide(context, own)
        .on(by_secret)
        .run(Arc::new(Controller { credentials, clusters }))
        .await;
}

impl Reconcile for Controller {
    type Object = VSphereClusterIdentity;
    type State = ();
    type Observed = ObservedIdentity;
    type Step = IdentityStep;
    type Error = Error;

    const NAME: &'static str = "vsphereclusteridentity";
    const COMPONENT: &'static str = "vsphereclusteridentity-controller";

    async fn observe(
        &self,
        scope: &mut Scope<VSphereClusterIdentity>,
        _: &mut (),
    ) -> Result<Option<ObservedIdentity>, Error> {
        self.observe_identity(scope).await.map(Some)
    }

    fn plan(observed: &ObservedIdentity, _: Timestamp) -> Plan<IdentityStep> {
        identity::plan(observed)
    }

    async fn apply(
        &self,
        step: IdentityStep,
        _: &mut ObservedIdentity,
        scope: &mut Scope<VSphereClusterIdentity>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        self.apply_step(step, scope).await
    }

    fn status(
        identity: &VSphereClusterIdentity,
        observed: Option<&ObservedIdentity>,
        _: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereClusterIdentity> {
        status::status(identity, observed, now)
    }
}
