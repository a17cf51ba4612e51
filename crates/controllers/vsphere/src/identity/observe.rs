//! Reads a VSphereClusterIdentity and its Secret.

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_core::cluster::identity::ObservedIdentity;
use capstan_core::cluster::secrets::NamedSecret;
use capstan_kube::runtime::Scope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::Controller;
use crate::error::Error;

impl Controller {
    pub(super) async fn observe_identity(
        &self,
        scope: &Scope<VSphereClusterIdentity>,
    ) -> Result<ObservedIdentity, Error> {
        let identity = scope.object.as_ref();
        if scope.is_deleting() {
            let secret = self.credentials.read_identity_secret(identity).await?;
            return Ok(ObservedIdentity::Deleting {
                secret: secret.map(NamedSecret::new),
            });
        }
        match self.credentials.check_identity(identity).await {
            Ok(secret) => Ok(ObservedIdentity::Usable {
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
}
