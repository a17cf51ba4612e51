//! Carries out the steps of a VSphereClusterIdentity.

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_core::cluster::identity::IdentityStep;
use capstan_kube::runtime::{Outcome, Scope};

use super::Controller;
use crate::conditions as names;
use crate::error::Error;

impl Controller {
    pub(super) async fn apply_step(
        &self,
        step: IdentityStep,
        scope: &mut Scope<VSphereClusterIdentity>,
    ) -> Result<Outcome, Error> {
        match step {
            IdentityStep::AddFinalizer => {
                scope.add_finalizer(names::IDENTITY_FINALIZER).await?;
            }
            IdentityStep::ReleaseSecret { secret, released } => {
                self.credentials.patch_identity_secret(&secret, &released).await?;
            }
            IdentityStep::Release => {
                scope.remove_finalizer(names::IDENTITY_FINALIZER).await?;
            }
            IdentityStep::Protect { secret, protected } => {
                match self.credentials.patch_identity_secret(&secret, &protected).await {
                    // Another client has changed the Secret, or removed it: the watch asks for the next reconcile.
                    Err(error) if error.is_conflict() || error.is_not_found() => {}
                    // The identity works with a Secret that nobody protects, and that clusterctl does not move.
                    Err(error) if error.code() == Some(403) => {
                        tracing::warn!(secret = secret.name(), %error, "cannot patch the Secret of an identity: the identity does not own it");
                    }
                    result => result?,
                }
            }
        }
        Ok(Outcome::Done)
    }
}
