//! VSphereCluster, its template and its identity.

use crate::cel::immutable;
use crate::common::{ApiEndpoint, ClusterFailureDomain, Condition, V1Beta2Status, is_false};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

resource! {
    /// The vSphere side of a cluster.
    pub struct VSphereCluster { spec: VSphereClusterSpec, status: VSphereClusterStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vsphereclusters"
}

resource! {
    /// A template that VSphereClusters are made from.
    pub struct VSphereClusterTemplate { spec: VSphereClusterTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vsphereclustertemplates"
}

resource! {
    /// Who Capstan is towards vCenter.
    pub struct VSphereClusterIdentity { spec: VSphereClusterIdentitySpec, status: VSphereClusterIdentityStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vsphereclusteridentities"
}

string_enum! {
    pub enum VSphereIdentityKind {
        VSphereClusterIdentity = "VSphereClusterIdentity",
        Secret = "Secret",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereIdentityReference {
    pub kind: VSphereIdentityKind,
    #[schemars(extend("minLength" = 1))]
    pub name: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterModule {
    pub control_plane: bool,
    pub target_object_name: String,
    #[serde(rename = "moduleUUID")]
    pub module_uuid: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    #[serde(default)]
    pub control_plane_endpoint: ApiEndpoint,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<VSphereIdentityReference>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_modules: Vec<ClusterModule>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub disable_cluster_module: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain_selector: Option<LabelSelector>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterStatus {
    #[serde(default)]
    pub ready: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    #[serde(rename = "vCenterVersion", skip_serializing_if = "Option::is_none")]
    pub vcenter_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateResource {
    #[schemars(extend("x-kubernetes-validations" = [immutable("VSphereClusterTemplate spec is immutable").forbidden()]))]
    pub spec: VSphereClusterSpec,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateSpec {
    pub template: VSphereClusterTemplateResource,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllowedNamespaces {
    #[serde(default)]
    pub selector: LabelSelector,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentitySpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1))]
    pub secret_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentityStatus {
    #[serde(default)]
    pub ready: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}
