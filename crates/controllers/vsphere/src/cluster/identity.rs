//! VSphereClusterIdentity: reports whether its Secret can be used.

use std::sync::Arc;

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_core::plan::{Describe, Impact};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use futures::StreamExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;

use super::secret::NamedSecret;

/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
    credentials: Arc<Credentials>,
}

enum Observed {
    Deleting,
    /// The Secret can be used.
    Usable(IdentitySecret),
    /// The Secret cannot be used, and why.
    Unusable(String),
}

enum IdentitySecret {
    Owned,
    Unowned(NamedSecret),
}

#[derive(Debug)]
enum Step {
    /// Remove the finalizers that CAPV left on the identity and on its Secret; Capstan puts none there.
    Release,
    /// Make the identity an owner of its Secret, as CAPV does: clusterctl then moves the Secret along, and leaves it at its source
    /// for the clusters that stay there.
    Own(NamedSecret),
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Release => f.write_str("takes the finalizers of a predecessor off the identity and its Secret"),
            Self::Own(secret) => write!(f, "makes the identity an owner of Secret {secret:?}"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::Release => Impact::Ensures,
            Self::Own(_) => Impact::Cluster,
        }
    }
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
            Ok(secret) if secret.owner_references().iter().any(|owner| owner.uid == scope.key.uid) => {
                Ok(Some(Observed::Usable(IdentitySecret::Owned)))
            }
            Ok(secret) => Ok(Some(Observed::Usable(IdentitySecret::Unowned(NamedSecret(secret))))),
            Err(error) if error.is_reported() => Ok(Some(Observed::Unusable(error.to_string()))),
            Err(error) => Err(error),
        }
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        match observed {
            Observed::Deleting => Plan::step(Step::Release),
            Observed::Usable(IdentitySecret::Unowned(secret)) => Plan::step(Step::Own(secret.clone())),
            Observed::Usable(IdentitySecret::Owned) | Observed::Unusable(_) => Plan::idle(),
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
            Step::Own(secret) => self.credentials.own_identity_secret(&scope.key, &secret.0).await?,
        }
        Ok(Outcome::Done)
    }

    fn status(
        identity: &VSphereClusterIdentity,
        observed: Option<&Observed>,
        _: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereClusterIdentity> {
        let fault = match observed {
            Some(Observed::Usable(_)) => None,
            Some(Observed::Unusable(fault)) => Some(fault),
            Some(Observed::Deleting) | None => return Report::nothing(),
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
