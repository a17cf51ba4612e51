//! Decides what to do next for a VSphereClusterIdentity.
//!
//! Invariant: Capstan puts no finalizer on an identity or on its Secret; it removes those that CAPV left.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::secrets::{NamedSecret, SECRET_FINALIZER};
use crate::plan::{Describe, Impact, Plan};

/// A VSphereClusterIdentity with everything that the plan depends on.
#[derive(Clone, Debug)]
pub enum ObservedIdentity {
    Deleting {
        secret: Option<NamedSecret>,
    },
    /// The Secret can be used.
    Usable {
        secret: NamedSecret,
        /// The identity, as an owner.
        owner: Box<OwnerReference>,
    },
    /// The Secret cannot be used, and why.
    Unusable(String),
}

/// One effect for a VSphereClusterIdentity.
#[derive(Clone, Debug, PartialEq)]
pub enum IdentityStep {
    /// Remove the finalizer that CAPV left on the Secret.
    ReleaseSecret { secret: NamedSecret, released: NamedSecret },
    /// Remove the finalizer that CAPV left on the identity.
    Release,
    /// Make the identity an owner of its Secret, as CAPV does: clusterctl then moves the Secret along, and leaves it at its source
    /// for the clusters that stay there.
    OwnSecret { secret: NamedSecret, owned: NamedSecret },
}

impl fmt::Display for IdentityStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReleaseSecret { secret, .. } => {
                write!(f, "takes the finalizer of a predecessor off Secret {secret:?}")
            }
            Self::Release => f.write_str("takes the finalizer of a predecessor off the identity"),
            Self::OwnSecret { secret, .. } => write!(f, "makes the identity an owner of Secret {secret:?}"),
        }
    }
}

impl Describe for IdentityStep {
    fn impact(&self) -> Impact {
        match self {
            Self::Release => Impact::Ensures,
            Self::ReleaseSecret { .. } | Self::OwnSecret { .. } => Impact::Cluster,
        }
    }
}

/// Returns the next steps.
pub fn plan(observed: &ObservedIdentity) -> Plan<IdentityStep> {
    match observed {
        ObservedIdentity::Deleting { secret } => {
            let held = secret.as_ref().map(|secret| IdentityStep::ReleaseSecret {
                secret: secret.clone(),
                released: secret.without_finalizers(&[SECRET_FINALIZER]),
            });
            let differs = |step: &IdentityStep| match step {
                IdentityStep::ReleaseSecret { secret, released } => secret != released,
                IdentityStep::Release | IdentityStep::OwnSecret { .. } => true,
            };
            Plan {
                steps: held
                    .into_iter()
                    .filter(differs)
                    .chain([IdentityStep::Release])
                    .collect(),
                requeue: None,
            }
        }
        ObservedIdentity::Usable { secret, owner } if !secret.is_owned_by(&owner.uid) => {
            Plan::step(IdentityStep::OwnSecret {
                secret: secret.clone(),
                owned: secret.owned_by(owner),
            })
        }
        ObservedIdentity::Usable { .. } | ObservedIdentity::Unusable(_) => Plan::idle(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::secrets::tests::{owner, secret};
    use super::*;

    fn usable(owners: &[&str]) -> ObservedIdentity {
        ObservedIdentity::Usable {
            secret: secret("a", owners, &[]),
            owner: Box::new(owner("1")),
        }
    }

    #[rstest]
    #[case::new(usable(&[]), &["own"])]
    #[case::of_another(usable(&["2"]), &["own"])]
    #[case::owned(usable(&["1"]), &[])]
    #[case::unusable(ObservedIdentity::Unusable("no password".into()), &[])]
    #[case::deleted(ObservedIdentity::Deleting { secret: Some(secret("a", &["1"], &[])) }, &["release"])]
    #[case::deleted_after_capv(
        ObservedIdentity::Deleting { secret: Some(secret("a", &["1"], &[SECRET_FINALIZER])) }, &["release secret", "release"])]
    #[case::deleted_without_a_secret(ObservedIdentity::Deleting { secret: None }, &["release"])]
    fn an_identity_owns_its_secret_and_releases_it(#[case] observed: ObservedIdentity, #[case] expected: &[&str]) {
        let word = |step| match step {
            IdentityStep::ReleaseSecret { released, .. } => {
                assert_eq!(released.0.metadata.finalizers, Some(Vec::new()));
                "release secret"
            }
            IdentityStep::Release => "release",
            IdentityStep::OwnSecret { owned, .. } => {
                assert!(owned.is_owned_by("1"));
                "own"
            }
        };
        let steps: Vec<&str> = plan(&observed).steps.into_iter().map(word).collect();
        assert_eq!(steps, expected);
    }
}
