//! The Secret in the namespace of a VSphereCluster that its account is in.
//!
//! Invariants: only a Secret that has the shape of an identity gets an owner and a finalizer, because the garbage collector
//! deletes what the cluster owns; a cluster that names another Secret releases its former one; the finalizer stays for as long
//! as another cluster needs the Secret.

use std::sync::Arc;

use capstan_api::vsphere::{VSphereCluster, VSphereIdentityKind};
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::Scope;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ListParams;
use kube::{Resource, ResourceExt};

use super::ClusterController;
use crate::conditions as names;
use crate::credentials::is_identity;
use crate::error::Error;

/// A Secret that a step is about. Logs show its name only.
#[derive(Clone)]
pub(super) struct NamedSecret(pub Arc<Secret>);

impl std::fmt::Debug for NamedSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name_any())
    }
}

/// The Secrets that concern a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Secrets {
    /// The Secret that the cluster names, if it has the shape of an identity.
    pub identity: Option<NamedSecret>,
    /// Secrets that the cluster owns and does not use any more.
    pub former: Vec<String>,
}

impl Secrets {
    /// Returns what to do about the Secret that a cluster names.
    fn of(cluster: &VSphereCluster, named: Option<Arc<Secret>>) -> Self {
        let (identity, other) = match named {
            Some(secret) if is_identity(&secret) => (Some(secret), None),
            other => (None, other),
        };
        let recorded = cluster.annotations().get(names::IDENTITY_SECRET).cloned();
        let uid = cluster.uid().unwrap_or_default();
        let other = other
            .filter(|secret| is_owned(secret, &uid))
            .map(|secret| secret.name_any());
        let mut former: Vec<String> = recorded.into_iter().chain(other).collect();
        former.dedup();
        former.retain(|name| identity.as_ref().is_none_or(|secret| secret.name_any() != *name));
        Self {
            identity: identity.map(NamedSecret),
            former,
        }
    }
}

impl ClusterController {
    pub(super) async fn observe_secrets(&self, cluster: &VSphereCluster) -> Result<Secrets, Error> {
        Ok(Secrets::of(cluster, self.credentials.own_secret(cluster).await?))
    }

    /// Makes a cluster an owner of its Secret, so that clusterctl moves it along, and adds the finalizer that CAPV uses:
    /// machines whose Secret is gone could not be deleted in vCenter.
    pub(super) async fn protect_secret(&self, scope: &mut Scope<VSphereCluster>, secret: &Secret) -> Result<(), Error> {
        if secret.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        // The cluster records the name first: else a process that ends here leaves an owner that nobody removes.
        record(scope, Some(secret.name_any())).await?;
        let mut after = secret.clone();
        if !is_owned(secret, &scope.key.uid) {
            after.owner_references_mut().push(OwnerReference {
                api_version: VSphereCluster::API_VERSION.to_owned(),
                kind: VSphereCluster::KIND.to_owned(),
                name: scope.key.name.clone(),
                uid: scope.key.uid.clone(),
                ..OwnerReference::default()
            });
        }
        if !secret.finalizers().iter().any(|name| name == names::SECRET_FINALIZER) {
            after.finalizers_mut().push(names::SECRET_FINALIZER.to_owned());
        }
        match patch::object(&scope.api_of::<Secret>(), secret, &after, Lock::Version).await {
            // Somebody else has changed the Secret, or removed it: the watch asks for the next reconcile.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
            result => result.map(drop).map_err(Error::from),
        }
    }

    /// Releases a Secret that a cluster does not use any more: it is no longer the cluster's to delete.
    pub(super) async fn release_former(&self, scope: &mut Scope<VSphereCluster>, name: &str) -> Result<(), Error> {
        let secrets = scope.api_of::<Secret>();
        let secret = secrets.get_opt(name).await?;
        if let Some(secret) = secret.filter(|secret| is_owned(secret, &scope.key.uid)) {
            let mut after = secret.clone();
            disown(&mut after, &scope.key.uid);
            if !self.is_shared(scope, &secret).await? {
                remove_finalizers(&mut after);
                self.credentials.forget(&scope.key.namespace, name);
            }
            patch::object(&secrets, &secret, &after, Lock::Version).await?;
        }
        if scope
            .object
            .annotations()
            .get(names::IDENTITY_SECRET)
            .is_some_and(|recorded| recorded == name)
        {
            record(scope, None).await?;
        }
        Ok(())
    }

    /// Releases the Secret of a cluster that is deleted. The garbage collector deletes it with its last cluster; for another
    /// cluster it stays as it is.
    pub(super) async fn release_secret(&self, scope: &Scope<VSphereCluster>) -> Result<(), Error> {
        let secrets = scope.api_of::<Secret>();
        let Some(name) = named_secret(&scope.object) else {
            return Ok(());
        };
        let Some(secret) = secrets.get_opt(name).await? else {
            return Ok(());
        };
        let mut after = secret.clone();
        if self.is_shared(scope, &secret).await? {
            disown(&mut after, &scope.key.uid);
        } else {
            remove_finalizers(&mut after);
            self.credentials.forget(&scope.key.namespace, name);
        }
        patch::object(&secrets, &secret, &after, Lock::Version).await?;
        Ok(())
    }

    /// Whether another cluster needs a Secret. Of two clusters that are deleted at the same time the second one finds that the
    /// first one owns the Secret no more.
    async fn is_shared(&self, scope: &Scope<VSphereCluster>, secret: &Secret) -> Result<bool, Error> {
        let clusters = scope.api_of::<VSphereCluster>().list(&ListParams::default()).await?;
        let name = secret.name_any();
        Ok(clusters.items.iter().any(|other| {
            let uid = other.uid().unwrap_or_default();
            let is_needed = other.meta().deletion_timestamp.is_none() || is_owned(secret, &uid);
            uid != scope.key.uid && is_needed && named_secret(other) == Some(name.as_str())
        }))
    }
}

/// Records on a cluster which Secret it owns.
async fn record(scope: &mut Scope<VSphereCluster>, name: Option<String>) -> Result<(), Error> {
    let mut after = VSphereCluster::clone(&scope.object);
    match name {
        Some(name) => after.annotations_mut().insert(names::IDENTITY_SECRET.to_owned(), name),
        None => after.annotations_mut().remove(names::IDENTITY_SECRET),
    };
    scope.write_object(&after, Lock::Open).await?;
    Ok(())
}

/// Returns the Secret in its namespace that a cluster names.
fn named_secret(cluster: &VSphereCluster) -> Option<&str> {
    let identity = cluster.spec.identity_ref.as_ref();
    let own = identity.filter(|identity| identity.kind == VSphereIdentityKind::Secret);
    own.map(|own| own.name.as_str())
}

fn is_owned(secret: &Secret, uid: &str) -> bool {
    secret.owner_references().iter().any(|owner| owner.uid == uid)
}

fn disown(secret: &mut Secret, uid: &str) {
    if let Some(owners) = &mut secret.metadata.owner_references {
        owners.retain(|owner| owner.uid != uid);
    }
}

fn remove_finalizers(secret: &mut Secret) {
    let ours = [names::CLUSTER_FINALIZER, names::SECRET_FINALIZER];
    if let Some(finalizers) = &mut secret.metadata.finalizers {
        finalizers.retain(|name| !ours.contains(&name.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rstest::rstest;

    use super::*;

    fn cluster(recorded: Option<&str>) -> VSphereCluster {
        let mut cluster = VSphereCluster::new("c", Default::default());
        cluster.meta_mut().uid = Some("1".into());
        if let Some(recorded) = recorded {
            cluster
                .annotations_mut()
                .insert(names::IDENTITY_SECRET.into(), recorded.into());
        }
        cluster
    }

    fn secret(keys: &[&str], owner: Option<&str>) -> Arc<Secret> {
        let data = keys
            .iter()
            .map(|key| ((*key).to_owned(), ByteString(b"value".to_vec())));
        let mut secret = Secret {
            data: Some(data.collect()),
            ..Secret::default()
        };
        secret.metadata.name = Some("a".into());
        secret.owner_references_mut().extend(owner.map(|uid| OwnerReference {
            uid: uid.to_owned(),
            ..OwnerReference::default()
        }));
        Arc::new(secret)
    }

    const ACCOUNT: &[&str] = &["username", "password"];
    const TLS: &[&str] = &["tls.crt", "tls.key"];

    #[rstest]
    #[case::new(None, Some((ACCOUNT, None)), true, &[])]
    #[case::kept(Some("a"), Some((ACCOUNT, Some("1"))), true, &[])]
    #[case::another_one(Some("b"), Some((ACCOUNT, None)), true, &["b"])]
    #[case::for_another_purpose(None, Some((TLS, None)), false, &[])]
    #[case::for_another_purpose_of_another(None, Some((TLS, Some("2"))), false, &[])]
    #[case::owned_for_another_purpose(None, Some((TLS, Some("1"))), false, &["a"])]
    #[case::no_more_an_account(Some("a"), Some((TLS, Some("1"))), false, &["a"])]
    #[case::no_more_named(Some("a"), None, false, &["a"])]
    fn a_cluster_owns_the_account_that_it_names_and_no_other_secret(
        #[case] recorded: Option<&str>,
        #[case] named: Option<(&[&str], Option<&str>)>,
        #[case] is_protected: bool,
        #[case] former: &[&str],
    ) {
        let found = Secrets::of(&cluster(recorded), named.map(|(keys, owner)| secret(keys, owner)));
        assert_eq!(found.identity.is_some(), is_protected);
        assert_eq!(found.former, former);
    }
}
