//! Decides about the Secrets that the accounts of VSphereClusters are in.
//!
//! Invariants: only a Secret that has the shape of an identity gets an owner and a finalizer, because the garbage collector
//! deletes what the cluster owns; a cluster that names another Secret releases its former one; the finalizer stays for as long
//! as another cluster needs the Secret; a cluster records the name of a Secret before it owns it.

use std::fmt;
use std::sync::Arc;

use capstan_api::vsphere::{VSphereCluster, VSphereIdentityKind};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// On a VSphereCluster: the Secret that it owns. Capstan releases the Secret when the cluster names another.
pub const IDENTITY_SECRET: &str = "capstan.dev/identity-secret";
/// Keeps the Secret of a cluster until the cluster is gone; CAPV uses the same.
pub const SECRET_FINALIZER: &str = "vspherecluster/infrastructure.cluster.x-k8s.io";
/// CAPV's finalizer of VSphereClusters. Earlier versions of CAPV put it on Secrets, too.
pub const CLUSTER_FINALIZER: &str = "vspherecluster.infrastructure.cluster.x-k8s.io";

/// A Secret that a step is about. Logs show its name only.
#[derive(Clone, PartialEq)]
pub struct NamedSecret(pub Arc<Secret>);

impl NamedSecret {
    pub fn new(secret: Secret) -> Self {
        Self(Arc::new(secret))
    }

    pub fn name(&self) -> &str {
        self.0.metadata.name.as_deref().unwrap_or_default()
    }

    /// Whether the object with this UID is an owner of the Secret.
    pub fn is_owned_by(&self, uid: &str) -> bool {
        let mut owners = self.0.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.uid == uid)
    }

    /// Whether another object than the one with this UID is an owner of the Secret.
    pub fn has_other_owners(&self, uid: &str) -> bool {
        let mut owners = self.0.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.uid != uid)
    }

    /// Returns the Secret with one more owner.
    pub fn owned_by(&self, owner: &OwnerReference) -> Self {
        let mut after = Secret::clone(&self.0);
        if !self.is_owned_by(&owner.uid) {
            let owners = after.metadata.owner_references.get_or_insert_default();
            owners.push(owner.clone());
        }
        Self::new(after)
    }

    /// Returns the Secret without an owner.
    pub fn disowned_by(&self, uid: &str) -> Self {
        let mut after = Secret::clone(&self.0);
        if let Some(owners) = &mut after.metadata.owner_references {
            owners.retain(|owner| owner.uid != uid);
        }
        Self::new(after)
    }

    /// Returns the Secret without these finalizers.
    pub fn without_finalizers(&self, names: &[&str]) -> Self {
        let mut after = Secret::clone(&self.0);
        if let Some(finalizers) = &mut after.metadata.finalizers {
            finalizers.retain(|name| !names.contains(&name.as_str()));
        }
        Self::new(after)
    }

    pub fn with_finalizer(&self, name: &str) -> Self {
        let mut after = Secret::clone(&self.0);
        let finalizers = after.metadata.finalizers.get_or_insert_default();
        if !finalizers.iter().any(|finalizer| finalizer == name) {
            finalizers.push(name.to_owned());
        }
        Self::new(after)
    }
}

impl fmt::Debug for NamedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Secret that a cluster may hold, as the API server has it.
#[derive(Clone, Debug)]
pub struct HeldSecret {
    pub secret: NamedSecret,
    /// Whether another cluster needs it.
    pub is_shared: bool,
}

/// The Secrets of a cluster that is not being deleted.
#[derive(Clone, Debug)]
pub struct ObservedSecrets {
    /// The cluster, as an owner.
    pub owner: OwnerReference,
    /// The Secret that the cluster names, if it has the shape of an identity.
    pub identity: Option<NamedSecret>,
    /// The Secret that the cluster records as its own.
    pub recorded: Option<String>,
    /// The Secrets of [`former`] that exist.
    pub former: Vec<HeldSecret>,
}

/// One effect for a Secret.
#[derive(Clone, Debug, PartialEq)]
pub enum SecretStep {
    /// Write on the cluster which Secret it owns.
    Record(Option<String>),
    /// Make the cluster an owner of its Secret, so that clusterctl moves it along, and add the finalizer that CAPV uses:
    /// machines whose Secret is gone could not be deleted in vCenter.
    Protect {
        secret: NamedSecret,
        protected: NamedSecret,
    },
    Release {
        secret: NamedSecret,
        released: NamedSecret,
        /// Whether no cluster needs the Secret any more, so that Capstan stops to watch it.
        is_unused: bool,
    },
}

impl fmt::Display for SecretStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record(Some(name)) => write!(f, "records on the VSphereCluster that it owns Secret {name}"),
            Self::Record(None) => f.write_str("records on the VSphereCluster that it owns no Secret"),
            Self::Protect { secret, .. } => write!(f, "makes the VSphereCluster an owner of Secret {secret:?}"),
            Self::Release { secret, .. } => write!(f, "releases Secret {secret:?}"),
        }
    }
}

/// Returns the steps for the Secrets of a cluster that is not being deleted.
pub fn plan(observed: &ObservedSecrets) -> Vec<SecretStep> {
    let ObservedSecrets {
        owner,
        identity,
        recorded,
        former,
    } = observed;
    let released = former.iter().filter_map(|held| {
        let owned = held.secret.is_owned_by(&owner.uid);
        owned.then(|| release(held, |secret| secret.disowned_by(&owner.uid)))
    });
    let mut steps: Vec<SecretStep> = released.collect();
    let usable = identity.as_ref().filter(|secret| !is_deleting(secret));
    let record = match (usable, identity) {
        (Some(secret), _) => Some(secret.name().to_owned()),
        (None, Some(deleting)) => recorded.clone().filter(|name| name == deleting.name()),
        (None, None) => None,
    };
    if record != *recorded {
        steps.push(SecretStep::Record(record));
    }
    if let Some(secret) = usable {
        let protected = secret.owned_by(owner).with_finalizer(SECRET_FINALIZER);
        if protected != *secret {
            steps.push(SecretStep::Protect {
                secret: secret.clone(),
                protected,
            });
        }
    }
    steps
}

/// Returns the steps for the Secrets of a cluster that is deleted: the one that it names, and a former one that it still owns.
/// The garbage collector deletes a Secret with its last cluster; for another cluster it stays as it is.
pub fn teardown(uid: &str, named: Option<&HeldSecret>, former: &[HeldSecret]) -> Vec<SecretStep> {
    let named = named.map(|held| match held.is_shared {
        true => release(held, |secret| secret.disowned_by(uid)),
        false => release(held, NamedSecret::clone),
    });
    let former = former.iter().filter(|held| held.secret.is_owned_by(uid));
    let former = former.map(|held| release(held, |secret| secret.disowned_by(uid)));
    let differs = |step: &SecretStep| match step {
        SecretStep::Release {
            secret,
            released,
            is_unused,
        } => *is_unused || secret != released,
        SecretStep::Record(_) | SecretStep::Protect { .. } => true,
    };
    former.chain(named).filter(differs).collect()
}

fn release(held: &HeldSecret, change: impl FnOnce(&NamedSecret) -> NamedSecret) -> SecretStep {
    let changed = change(&held.secret);
    SecretStep::Release {
        secret: held.secret.clone(),
        released: match held.is_shared {
            true => changed,
            false => changed.without_finalizers(&[CLUSTER_FINALIZER, SECRET_FINALIZER]),
        },
        is_unused: !held.is_shared,
    }
}

/// Returns the Secrets that a cluster may own and does not use any more: the one that it records, and the one that it names
/// (`other`) and owns, where that has not the shape of an identity.
pub fn former(cluster: &VSphereCluster, identity: Option<&NamedSecret>, other: Option<&NamedSecret>) -> Vec<String> {
    let uid = cluster.metadata.uid.as_deref();
    let owned = other.filter(|secret| uid.is_some_and(|uid| secret.is_owned_by(uid)));
    let owned = owned.map(|secret| secret.name().to_owned());
    let mut former: Vec<String> = recorded(cluster).into_iter().chain(owned).collect();
    former.dedup();
    former.retain(|name| identity.is_none_or(|secret| secret.name() != name));
    former
}

/// Returns the Secret that a cluster records as its own.
pub fn recorded(cluster: &VSphereCluster) -> Option<String> {
    cluster.metadata.annotations.as_ref()?.get(IDENTITY_SECRET).cloned()
}

/// Returns the Secret in its namespace that a cluster names.
pub fn named_secret(cluster: &VSphereCluster) -> Option<&str> {
    let identity = cluster.spec.identity_ref.as_ref();
    let own = identity.filter(|identity| identity.kind == VSphereIdentityKind::Secret);
    own.map(|own| own.name.as_str())
}

/// Whether another cluster than the one with this UID needs a Secret. Of two clusters that are deleted at the same time the
/// second one finds that the first one owns the Secret no more.
pub fn is_shared<'a>(secret: &NamedSecret, uid: &str, clusters: impl IntoIterator<Item = &'a VSphereCluster>) -> bool {
    clusters.into_iter().any(|other| {
        let Some(other_uid) = other.metadata.uid.as_deref().filter(|other| *other != uid) else {
            return false;
        };
        let is_needed = other.metadata.deletion_timestamp.is_none() || secret.is_owned_by(other_uid);
        is_needed && named_secret(other) == Some(secret.name())
    })
}

pub fn is_deleting(secret: &NamedSecret) -> bool {
    secret.0.metadata.deletion_timestamp.is_some()
}

#[cfg(test)]
pub(super) mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    pub fn secret(name: &str, owners: &[&str], finalizers: &[&str]) -> NamedSecret {
        let owners = owners
            .iter()
            .map(|uid| json!({"apiVersion": "v1", "kind": "VSphereCluster", "name": uid, "uid": uid}));
        let secret = json!({"metadata": {
            "name": name, "ownerReferences": owners.collect::<Vec<_>>(), "finalizers": finalizers,
        }});
        NamedSecret::new(serde_json::from_value(secret).unwrap())
    }

    fn held(name: &str, owners: &[&str], is_shared: bool) -> HeldSecret {
        HeldSecret {
            secret: secret(name, owners, &[SECRET_FINALIZER]),
            is_shared,
        }
    }

    pub fn owner(uid: &str) -> OwnerReference {
        OwnerReference {
            uid: uid.to_owned(),
            name: uid.to_owned(),
            ..OwnerReference::default()
        }
    }

    /// Returns steps as `record a`, `protect a`, `release a: owners/finalizers`.
    fn words(steps: Vec<SecretStep>) -> Vec<String> {
        let word = |step| match step {
            SecretStep::Record(name) => format!("record {}", name.unwrap_or_default()),
            SecretStep::Protect { protected, .. } => {
                assert!(protected.is_owned_by("1"));
                format!("protect {protected:?}")
            }
            SecretStep::Release {
                released, is_unused, ..
            } => {
                let meta = &released.0.metadata;
                let count = |number: Option<usize>| number.unwrap_or_default();
                let owners = count(meta.owner_references.as_ref().map(Vec::len));
                let finalizers = count(meta.finalizers.as_ref().map(Vec::len));
                assert_eq!(is_unused, finalizers == 0);
                format!("release {released:?}: {owners}/{finalizers}")
            }
        };
        steps.into_iter().map(word).collect()
    }

    fn observed(identity: Option<NamedSecret>, recorded: Option<&str>, former: Vec<HeldSecret>) -> ObservedSecrets {
        ObservedSecrets {
            owner: owner("1"),
            identity,
            recorded: recorded.map(str::to_owned),
            former,
        }
    }

    const HELD: &[&str] = &[SECRET_FINALIZER];

    #[rstest]
    #[case::new(Some(secret("a", &[], &[])), None, vec![], &["record a", "protect a"])]
    #[case::of_two_clusters(Some(secret("a", &["2"], HELD)), None, vec![], &["record a", "protect a"])]
    #[case::kept(Some(secret("a", &["1"], HELD)), Some("a"), vec![], &[])]
    #[case::finalizer_lost(Some(secret("a", &["1"], &[])), Some("a"), vec![], &["protect a"])]
    #[case::another_one(Some(secret("a", &[], &[])), Some("b"), vec![held("b", &["1"], false)],
        &["release b: 0/0", "record a", "protect a"])]
    #[case::another_cluster_needs_the_former(Some(secret("a", &["1"], HELD)), Some("b"), vec![held("b", &["1", "2"], true)],
        &["release b: 1/1", "record a"])]
    #[case::the_former_is_gone(Some(secret("a", &["1"], HELD)), Some("b"), vec![], &["record a"])]
    #[case::not_owned(None, None, vec![held("a", &["2"], false)], &[])]
    #[case::no_more_an_account(None, Some("a"), vec![held("a", &["1"], false)], &["release a: 0/0", "record "])]
    #[case::no_more_named(None, Some("a"), vec![], &["record "])]
    fn a_cluster_owns_the_account_that_it_names_and_no_other_secret(
        #[case] identity: Option<NamedSecret>,
        #[case] recorded: Option<&str>,
        #[case] former: Vec<HeldSecret>,
        #[case] expected: &[&str],
    ) {
        assert_eq!(words(plan(&observed(identity, recorded, former))), expected);
    }

    #[test]
    fn a_secret_that_is_deleted_is_not_protected_again() {
        let mut deleting = Secret::clone(&secret("a", &[], &[]).0);
        deleting.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        let deleting = NamedSecret::new(deleting);
        assert!(plan(&observed(Some(deleting.clone()), None, vec![])).is_empty());
        assert!(plan(&observed(Some(deleting), Some("a"), vec![])).is_empty());
    }

    #[rstest]
    #[case::the_last(Some(held("a", &["1"], false)), vec![], &["release a: 1/0"])]
    #[case::shared(Some(held("a", &["1", "2"], true)), vec![], &["release a: 1/1"])]
    #[case::shared_and_never_owned(Some(held("a", &["2"], true)), vec![], &[])]
    #[case::another_named_a_moment_ago(None, vec![held("b", &["1"], false)], &["release b: 0/0"])]
    #[case::former_of_another(None, vec![held("b", &["2"], false)], &[])]
    fn a_deleted_cluster_releases_every_secret_that_it_holds(
        #[case] named: Option<HeldSecret>,
        #[case] former: Vec<HeldSecret>,
        #[case] expected: &[&str],
    ) {
        assert_eq!(words(teardown("1", named.as_ref(), &former)), expected);
    }

    fn cluster(uid: &str, named: Option<&str>, recorded: Option<&str>) -> VSphereCluster {
        let identity = named.map(|name| json!({"kind": "Secret", "name": name}));
        let annotations = recorded.map(|name| json!({IDENTITY_SECRET: name}));
        let cluster = json!({"metadata": {"name": "c", "uid": uid, "annotations": annotations},
            "spec": {"identityRef": identity}});
        serde_json::from_value(cluster).unwrap()
    }

    #[rstest]
    #[case::never_had_one(None, None, None, &[])]
    #[case::kept(Some("a"), Some("a"), None, &[])]
    #[case::another_one(Some("b"), Some("a"), None, &["b"])]
    #[case::named_for_another_purpose(None, None, Some(&[][..]), &[])]
    #[case::named_for_another_purpose_of_another(None, None, Some(&["2"][..]), &[])]
    #[case::owned_for_another_purpose(None, None, Some(&["1"][..]), &["a"])]
    #[case::no_more_an_account(Some("a"), None, Some(&["1"][..]), &["a"])]
    #[case::both(Some("b"), None, Some(&["1"][..]), &["b", "a"])]
    fn a_secret_that_is_recorded_or_owned_and_not_used_is_a_former_one(
        #[case] recorded: Option<&str>,
        #[case] identity: Option<&str>,
        #[case] other: Option<&[&str]>,
        #[case] expected: &[&str],
    ) {
        let identity = identity.map(|name| secret(name, &[], &[]));
        let other = other.map(|owners| secret("a", owners, &[]));
        let cluster = cluster("1", Some("a"), recorded);
        assert_eq!(former(&cluster, identity.as_ref(), other.as_ref()), expected);
    }

    #[test]
    fn a_cluster_that_lives_or_still_owns_a_secret_needs_it() {
        let deleting = |mut cluster: VSphereCluster| {
            cluster.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
            cluster
        };
        let shared = |owners: &[&str], other: VSphereCluster| {
            is_shared(&secret("a", owners, &[]), "1", [&cluster("1", Some("a"), None), &other])
        };
        assert!(!shared(&["1"], cluster("2", Some("b"), None)));
        assert!(!shared(&["1", "2"], cluster("2", None, None)));
        assert!(shared(&["1"], cluster("2", Some("a"), None)));
        assert!(shared(&["1", "2"], deleting(cluster("2", Some("a"), None))));
        assert!(!shared(&["1"], deleting(cluster("2", Some("a"), None))));
    }

    #[test]
    fn a_secret_in_a_log_is_its_name() {
        let mut inner = Secret::clone(&secret("a", &[], &[]).0);
        inner.string_data = Some([("password".to_owned(), "hunter2".to_owned())].into());
        let step = SecretStep::Release {
            secret: NamedSecret::new(inner.clone()),
            released: NamedSecret::new(inner),
            is_unused: true,
        };
        assert!(!format!("{step:?} {step}").contains("hunter2"));
    }
}
