//! AzureClusterIdentity: credentials for Azure, and the namespaces that may use them.

use super::names;
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, is_default};
use k8s_openapi::api::core::v1::SecretReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// An AzureClusterIdentity holds credentials for Azure, and the namespaces that may use them.
    pub struct AzureClusterIdentity { spec: AzureClusterIdentitySpec, status: AzureClusterIdentityStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azureclusteridentities"
}

string_enum! {
    /// The way in which an identity signs in to Azure.
    pub enum IdentityType {
        ServicePrincipal = "ServicePrincipal",
        UserAssignedMsi = "UserAssignedMSI",
        ManualServicePrincipal = "ManualServicePrincipal",
        ServicePrincipalCertificate = "ServicePrincipalCertificate",
        WorkloadIdentity = "WorkloadIdentity",
        UserAssignedIdentityCredential = "UserAssignedIdentityCredential",
    }
}

/// The namespaces whose clusters may use an identity: those listed and those selected. An object without both fields
/// allows all namespaces; an empty list or an empty selector names none.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllowedNamespaces {
    /// Names of the allowed namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list: Option<Vec<String>>,
    /// Label selector of the allowed namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// Desired state of an identity: its credentials, and the namespaces that may use it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = identity_rules()))]
pub struct AzureClusterIdentitySpec {
    /// Type of the identity: the way in which it signs in to Azure.
    #[serde(rename = "type")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub type_: IdentityType,
    /// Deprecated: resource ID of a user-assigned managed identity. Used with type UserAssignedMSI only.
    #[serde(rename = "resourceID", skip_serializing_if = "Option::is_none")]
    pub resource_id: Option<String>,
    /// Client ID of the application or of the managed identity.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Reference to the Secret that holds the password or the certificate under the key clientSecret. A Secret of
    /// another namespace must allow the namespace of the identity by its annotation capstan.dev/allowed-namespaces.
    #[serde(default, skip_serializing_if = "is_default")]
    pub client_secret: SecretReference,
    /// Path of a certificate file. The file must be in a folder that the operator of Capstan allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_path: Option<String>,
    /// Path of a file with the credentials of a user-assigned identity. The file must be in a folder that the operator
    /// of Capstan allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_path: Option<String>,
    /// Azure cloud in which the credentials of userAssignedIdentityCredentialsPath are valid: public, china or
    /// usgovernment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_cloud_type: Option<String>,
    /// ID of the tenant to sign in to.
    #[serde(rename = "tenantID")]
    #[schemars(extend("pattern" = names::TENANT))]
    pub tenant_id: String,
    /// Namespaces whose clusters may use the identity. No namespace may when unset, not even the identity's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

/// Observed state of an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterIdentityStatus {
    /// Conditions of the identity, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

fn identity_rules() -> [Rule; 3] {
    const CREDENTIAL: &str = "can only be set when AzureClusterIdentity is of type UserAssignedIdentityCredential";
    let only_credential = |field: &str| {
        let expression = format!("self.type == 'UserAssignedIdentityCredential' || self.?{field}.orValue('') == ''");
        rule(expression, CREDENTIAL).at(format!(".{field}")).forbidden()
    };
    [
        rule(
            "self.type == 'UserAssignedMSI' || self.?resourceID.orValue('') == ''",
            "can only be set when AzureClusterIdentity is of type UserAssignedMSI",
        )
        .at(".resourceID")
        .forbidden(),
        only_credential("userAssignedIdentityCredentialsPath"),
        only_credential("userAssignedIdentityCredentialsCloudType"),
    ]
}
