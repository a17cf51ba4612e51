//! Reads a VSphereClusterIdentity and its Secret.

use capstan_api::vsphere::{VSphereCluster, VSphereClusterIdentity, VSphereIdentityKind};
use capstan_core::cluster::identity::ObservedIdentity;
use capstan_core::cluster::secrets::NamedSecret;
use capstan_kube::runtime::{ObjectKey, Scope};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;

use super::Controller;
use crate::error::Error;
use crate::owner_cluster::paused;

impl Controller {
    pub(super) async fn observe_identity(
        &self,
        scope: &Scope<VSphereClusterIdentity>,
    ) -> Result<ObservedIdentity, Error> {
        let identity = scope.object.as_ref();
        if let Some(reason) = paused(identity, None) {
            return Ok(ObservedIdentity::Paused(reason));
        }
        let uid = &scope.key.uid;
        if scope.is_deleting() {
            let users = self.users(&scope.key.name);
            let secrets = match users.is_empty() {
                true => self.credentials.secrets_of_identity(identity, uid).await?,
                false => Vec::new(),
            };
            return Ok(ObservedIdentity::Deleting {
                uid: uid.clone(),
                users,
                secrets: secrets.into_iter().map(NamedSecret::new).collect(),
            });
        }
        match self.credentials.check_identity(identity).await {
            Ok(secret) => Ok(ObservedIdentity::Usable {
                former: self.former(identity, uid, &secret.name_any()).await?,
                secret: NamedSecret(secret),
                owner: Box::new(OwnerReference {
                    api_version: VSphereClusterIdentity::API_VERSION.to_owned(),
                    kind: VSphereClusterIdentity::KIND.to_owned(),
                    name: scope.key.name.clone(),
                    uid: scope.key.uid.clone(),
                    ..OwnerReference::default()
                }),
            }),
            Err(error) if error.is_reported() => Ok(ObservedIdentity::Unusable(error.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Returns the VSphereClusters that name an identity, with their namespaces.
    fn users(&self, identity: &str) -> Vec<String> {
        let named = |cluster: &VSphereCluster| {
            let reference = cluster.spec.identity_ref.as_ref();
            reference.is_some_and(|r| r.kind == VSphereIdentityKind::VSphereClusterIdentity && r.name == identity)
        };
        let users = self.clusters.select(None, named);
        let keys = users.iter().filter_map(|cluster| ObjectKey::of(cluster.as_ref()).ok());
        let mut names: Vec<String> = keys.map(|key| format!("{}/{}", key.namespace, key.name)).collect();
        names.sort();
        names
    }

    /// Returns the Secrets that an identity owns and does not name any more.
    async fn former(
        &self,
        identity: &VSphereClusterIdentity,
        uid: &str,
        named: &str,
    ) -> Result<Vec<NamedSecret>, Error> {
        let all = self.credentials.secrets_of_identity(identity, uid).await?;
        let former = all.into_iter().filter(|secret| secret.name_any() != named);
        Ok(former.map(NamedSecret::new).collect())
    }
}
