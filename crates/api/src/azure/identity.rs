//! AzureClusterIdentity: who signs in to Azure, and which namespaces may use it.

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
    pub enum IdentityType {
        ServicePrincipal = "ServicePrincipal",
        UserAssignedMsi = "UserAssignedMSI",
        ManualServicePrincipal = "ManualServicePrincipal",
        ServicePrincipalCertificate = "ServicePrincipalCertificate",
        WorkloadIdentity = "WorkloadIdentity",
        UserAssignedIdentityCredential = "UserAssignedIdentityCredential",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllowedNamespaces {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub list: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = identity_rules()))]
pub struct AzureClusterIdentitySpec {
    #[serde(rename = "type")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub type_: IdentityType,
    #[serde(rename = "resourceID", skip_serializing_if = "Option::is_none")]
    pub resource_id: Option<String>,
    #[serde(rename = "clientID")]
    pub client_id: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub client_secret: SecretReference,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_assigned_identity_credentials_cloud_type: Option<String>,
    #[serde(rename = "tenantID")]
    pub tenant_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterIdentityStatus {
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
