//! Decides what to do next for a VSphereClusterIdentity.
//!
//! Invariants: an identity and its Secret stay until no cluster uses the identity, because without them a VM could not be deleted
//! in vCenter; a Secret that has another owner keeps its finalizer.

use std::fmt;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::secrets::{NamedSecret, SECRET_FINALIZER, is_deleting};
use crate::plan::{Describe, Impact, Plan};

/// The clusters of an identity that is deleted are read from the cache, so that reading them again costs nothing.
const DELETING: Duration = Duration::from_secs(10);

/// A VSphereClusterIdentity with everything that the plan depends on.
#[derive(Clone, Debug)]
pub enum ObservedIdentity {
    /// A user has paused the identity, for this reason.
    Paused(String),
    Deleting {
        uid: String,
        /// The VSphereClusters that name the identity.
        users: Vec<String>,
        /// The Secrets that the identity names or owns.
        secrets: Vec<NamedSecret>,
    },
    /// The Secret can be used.
    Usable {
        secret: NamedSecret,
        /// The identity, as an owner.
        owner: Box<OwnerReference>,
        /// The Secrets that the identity owns and does not name any more.
        former: Vec<NamedSecret>,
    },
    /// The Secret cannot be used, and why.
    Unusable(String),
}

/// One effect for a VSphereClusterIdentity.
#[derive(Clone, Debug, PartialEq)]
pub enum IdentityStep {
    AddFinalizer,
    /// Make the identity an owner of its Secret, as CAPV does: clusterctl then moves the Secret along, and leaves it at its source
    /// for the clusters that stay there. And add CAPV's finalizer.
    Protect {
        secret: NamedSecret,
        protected: NamedSecret,
    },
    ReleaseSecret {
        secret: NamedSecret,
        released: NamedSecret,
    },
    /// Remove the finalizer.
    Release,
}

impl fmt::Display for IdentityStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the identity"),
            Self::Protect { secret, .. } => write!(f, "makes the identity an owner of Secret {secret:?}"),
            Self::ReleaseSecret { secret, .. } => write!(f, "releases Secret {secret:?}"),
            Self::Release => f.write_str("takes its finalizer off the identity"),
        }
    }
}

impl Describe for IdentityStep {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::Release => Impact::Ensures,
            Self::Protect { .. } | Self::ReleaseSecret { .. } => Impact::Cluster,
        }
    }
}

/// Returns the next steps.
pub fn plan(observed: &ObservedIdentity) -> Plan<IdentityStep> {
    let steps = match observed {
        ObservedIdentity::Paused(_) | ObservedIdentity::Unusable(_) => Vec::new(),
        ObservedIdentity::Deleting { users, .. } if !users.is_empty() => return Plan::after(DELETING),
        ObservedIdentity::Deleting { uid, secrets, .. } => {
            // The garbage collector deletes what only this identity owns.
            let released = secrets
                .iter()
                .filter_map(|secret| release(uid, secret, NamedSecret::clone));
            released.chain([IdentityStep::Release]).collect()
        }
        ObservedIdentity::Usable { secret, owner, former } => {
            let mut steps = vec![IdentityStep::AddFinalizer];
            let disown = |secret: &NamedSecret| secret.disowned_by(&owner.uid);
            steps.extend(former.iter().filter_map(|secret| release(&owner.uid, secret, disown)));
            steps.extend(protect(secret, owner));
            steps
        }
    };
    Plan { steps, requeue: None }
}

/// Returns the step that releases a Secret, unless there is nothing to release. For another owner it stays protected.
fn release(uid: &str, secret: &NamedSecret, last: impl Fn(&NamedSecret) -> NamedSecret) -> Option<IdentityStep> {
    let released = match secret.has_other_owners(uid) {
        true => secret.disowned_by(uid),
        false => last(secret).without_finalizers(&[SECRET_FINALIZER]),
    };
    (released != *secret).then(|| IdentityStep::ReleaseSecret {
        secret: secret.clone(),
        released,
    })
}

/// Returns the step that protects a Secret, unless it is protected or deleted.
fn protect(secret: &NamedSecret, owner: &OwnerReference) -> Option<IdentityStep> {
    let protected = secret.owned_by(owner).with_finalizer(SECRET_FINALIZER);
    (protected != *secret && !is_deleting(secret)).then(|| IdentityStep::Protect {
        secret: secret.clone(),
        protected,
    })
}
#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::secrets::tests::{owner, secret};
    use super::*;

    fn usable(owners: &[&str], finalizers: &[&str], former: Vec<NamedSecret>) -> ObservedIdentity {
        ObservedIdentity::Usable {
            secret: secret("a", owners, finalizers),
            owner: Box::new(owner("1")),
            former,
        }
    }

    fn deleting(users: &[&str], secrets: Vec<NamedSecret>) -> ObservedIdentity {
        ObservedIdentity::Deleting {
            uid: "1".into(),
            users: users.iter().map(|user| (*user).to_owned()).collect(),
            secrets,
        }
    }

    const HELD: &[&str] = &[SECRET_FINALIZER];

    #[rstest]
    #[case::new(usable(&[], &[], vec![]), &["finalizer", "protect a"])]
    #[case::of_another(usable(&["2"], HELD, vec![]), &["finalizer", "protect a"])]
    #[case::owned(usable(&["1"], &[], vec![]), &["finalizer", "protect a"])]
    #[case::protected(usable(&["1"], HELD, vec![]), &["finalizer"])]
    #[case::another_secret_than_before(
        usable(&["1"], HELD, vec![secret("b", &["1"], HELD)]), &["finalizer", "release b: owners 0, finalizers 0"])]
    #[case::unusable(ObservedIdentity::Unusable("no password".into()), &[])]
    #[case::paused(ObservedIdentity::Paused("why".into()), &[])]
    #[case::deleted_in_use(deleting(&["ns/c"], vec![secret("a", &["1"], HELD)]), &[])]
    #[case::deleted(deleting(&[], vec![secret("a", &["1"], HELD)]), &["release a: owners 1, finalizers 0", "release"])]
    #[case::deleted_with_a_secret_of_two(
        deleting(&[], vec![secret("a", &["1", "2"], HELD)]), &["release a: owners 1, finalizers 1", "release"])]
    #[case::deleted_and_never_protected(deleting(&[], vec![secret("a", &["1"], &[])]), &["release"])]
    #[case::deleted_without_a_secret(deleting(&[], vec![]), &["release"])]
    fn an_identity_protects_its_secret_until_no_cluster_uses_it(
        #[case] observed: ObservedIdentity,
        #[case] expected: &[&str],
    ) {
        let word = |step| match step {
            IdentityStep::AddFinalizer => "finalizer".to_owned(),
            IdentityStep::Protect { protected, .. } => {
                assert!(protected.is_owned_by("1"));
                assert_eq!(
                    protected.0.metadata.finalizers.as_deref(),
                    Some(&[SECRET_FINALIZER.to_owned()][..])
                );
                format!("protect {}", protected.name())
            }
            IdentityStep::ReleaseSecret { released, .. } => {
                let count = |list: Option<usize>| list.unwrap_or_default();
                let meta = &released.0.metadata;
                let owners = count(meta.owner_references.as_ref().map(Vec::len));
                let finalizers = count(meta.finalizers.as_ref().map(Vec::len));
                format!("release {}: owners {owners}, finalizers {finalizers}", released.name())
            }
            IdentityStep::Release => "release".to_owned(),
        };
        let steps: Vec<String> = plan(&observed).steps.into_iter().map(word).collect();
        assert_eq!(steps, expected);
    }
}
