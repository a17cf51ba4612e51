//! VSphereClusterIdentity: reports whether its Secret can be used.

use std::sync::Arc;

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;

use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;

struct Controller {
    credentials: Arc<Credentials>,
}

enum Observed {
    Deleting,
    /// The Secret was checked, with what is wrong with it.
    Checked(Option<String>),
}

#[derive(Debug)]
enum Step {
    /// Remove the finalizers that CAPV left on the identity and on its Secret; Capstan puts none there.
    Release,
}

/// Runs until the context's shutdown.
pub async fn run(context: &Context, own: Cache<VSphereClusterIdentity>, credentials: Arc<Credentials>) {
    let (known, by_name) = (own.clone(), credentials.clone());
    let by_secret = credentials.changes().flat_map(move |secret| {
        let named = |identity: &VSphereClusterIdentity| by_name.secret_of_identity(identity).as_ref() == Some(&secret);
        let found = known.select(None, named);
        let found: Vec<_> = found.iter().map(|i| ObjectRef::from_obj(i.as_ref())).collect();
        futures::stream::iter(found)
    });
    Reconciler::cluster_wide(context, own)
        .on(by_secret)
        .run(Arc::new(Controller { credentials }))
        .await;
}

impl Reconcile for Controller {
    type Object = VSphereClusterIdentity;
    type State = ();
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "vsphereclusteridentity";
    const COMPONENT: &'static str = "vsphereclusteridentity-controller";

    async fn observe(&self, scope: &mut Scope<VSphereClusterIdentity>, _: &mut ()) -> Result<Option<Observed>, Error> {
        if scope.is_deleting() {
            return Ok(Some(Observed::Deleting));
        }
        match self.credentials.check_identity(&scope.object).await {
            Ok(()) => Ok(Some(Observed::Checked(None))),
            Err(error) if error.is_reported() => Ok(Some(Observed::Checked(Some(error.to_string())))),
            Err(error) => Err(error),
        }
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        match observed {
            Observed::Deleting => Plan::step(Step::Release),
            Observed::Checked(_) => Plan::idle(),
        }
    }

    async fn apply(
        &self,
        step: Step,
        _: &mut Observed,
        scope: &mut Scope<VSphereClusterIdentity>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        match step {
            Step::Release => {
                self.credentials.release_identity(&scope.object).await?;
                scope.remove_finalizer(names::OLD_IDENTITY_FINALIZER).await?;
            }
        }
        Ok(Outcome::Done)
    }

    fn status(
        identity: &VSphereClusterIdentity,
        observed: Option<&Observed>,
        _: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereClusterIdentity> {
        let Some(Observed::Checked(fault)) = observed else {
            return Report::nothing();
        };
        let mut after = identity.clone();
        let status = after.status.get_or_insert_default();
        status.ready = fault.is_none();
        match fault {
            None => conditions::mark_true(&mut status.conditions, names::CREDENTIALS_AVAILABLE, now),
            Some(text) => {
                let (type_, reason) = (names::CREDENTIALS_AVAILABLE, "SecretNotAvailable");
                conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, text, now)
            }
        };
        conditions::summarize(&mut status.conditions, &[names::CREDENTIALS_AVAILABLE], now);
        status.v1beta2 = names::v1beta2(&status.conditions);
        Report::of(after)
    }
}
