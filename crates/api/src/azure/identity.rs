//! AzureClusterIdentity: who signs in to Azure, and which namespaces may use it.

use super::names;
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, is_default};
use k8s_openapi::api::core::v1::SecretReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// Who Capstan is towards Azure.
    pub struct AzureClusterIdentity { spec: AzureClusterIdentitySpec, status: AzureClusterIdentityStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azureclusteridentities"
}

string_enum! {
    /// How to sign in to Azure.
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
    /// Names of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub list: Option<Vec<String>>,
    /// Labels of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// Who signs in, and how.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = identity_rules()))]
pub struct AzureClusterIdentitySpec {
    /// How to sign in.
    #[serde(rename = "type")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub type_: IdentityType,
    /// Resource ID of a user assigned identity; deprecated with its type.
    #[serde(rename = "resourceID", skip_serializing_if = "Option::is_none")]
    pub resource_id: Option<String>,
    /// Client ID of the application or managed identity.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Secret with the password or certificate, in its key clientSecret. A Secret of another namespace must allow the
    /// namespace of the identity by its annotation capstan.dev/allowed-namespaces.
    #[serde(default, skip_serializing_if = "is_default")]
    pub client_secret: SecretReference,
    /// Path of a mounted certificate, in a folder that the operator of Capstan allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_path: Option<String>,
    /// Path of the mounted credentials of a user assigned identity, in a folder that the operator of Capstan allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_path: Option<String>,
    /// Which Azure those credentials are for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_cloud_type: Option<String>,
    /// Tenant to sign in to.
    #[serde(rename = "tenantID")]
    #[schemars(extend("pattern" = names::TENANT))]
    pub tenant_id: String,
    /// Namespaces whose clusters may use the identity. Unset allows none, not even the identity's own namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

/// What is known of an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterIdentityStatus {
    /// Conditions, one per type.
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
