//! VSphereCluster, its template and its identity.

use crate::cel::immutable;
use crate::common::{ApiEndpoint, ClusterFailureDomain, Condition, TemplateMeta, V1Beta2Status, is_default, is_false};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

resource! {
    /// The vSphere side of a cluster.
    pub struct VSphereCluster { spec: VSphereClusterSpec, status: VSphereClusterStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclusters"
}

resource! {
    /// A template that VSphereClusters are made from.
    pub struct VSphereClusterTemplate { spec: VSphereClusterTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclustertemplates"
}

resource! {
    /// Who Capstan is towards vCenter.
    pub struct VSphereClusterIdentity { spec: VSphereClusterIdentitySpec, status: VSphereClusterIdentityStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclusteridentities"
}

string_enum! {
    /// Where an identity is kept.
    pub enum VSphereIdentityKind {
        VSphereClusterIdentity = "VSphereClusterIdentity",
        Secret = "Secret",
    }
}

/// The identity that signs in to vCenter.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereIdentityReference {
    /// Secret or VSphereClusterIdentity.
    pub kind: VSphereIdentityKind,
    /// Its name.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
}

/// A group of machines that are kept on different hosts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterModule {
    /// Whether its machines are those of the control plane.
    pub control_plane: bool,
    /// Whose machines they are.
    pub target_object_name: String,
    /// UUID of the module.
    #[serde(rename = "moduleUUID")]
    pub module_uuid: String,
}

/// Where a cluster is on vSphere.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterSpec {
    /// vCenter's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// SHA-1 or SHA-256 thumbprint of vCenter's certificate. Only that certificate is accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    /// Where the API server answers.
    #[serde(default)]
    pub control_plane_endpoint: ApiEndpoint,
    /// The identity that signs in to vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<VSphereIdentityReference>,
    /// Groups of machines kept on different hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_modules: Vec<ClusterModule>,
    /// Does without such groups.
    #[serde(default, skip_serializing_if = "is_false")]
    pub disable_cluster_module: bool,
    /// Which deployment zones the cluster uses; none when unset, all when empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain_selector: Option<LabelSelector>,
}

/// What has been found and done for a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterStatus {
    /// Whether machines can be made.
    #[serde(default)]
    pub ready: bool,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Zones that machines can be put into.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// Version of vCenter.
    #[serde(rename = "vCenterVersion", skip_serializing_if = "Option::is_none")]
    pub vcenter_version: Option<String>,
    /// The same as Cluster API v1beta2 wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

/// The cluster to be made.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateResource {
    /// Labels and annotations of the cluster.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: TemplateMeta,
    /// The cluster's spec.
    #[schemars(extend("x-kubernetes-validations" = [immutable("VSphereClusterTemplate spec is immutable").forbidden()]))]
    pub spec: VSphereClusterSpec,
}

/// A template of clusters.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateSpec {
    /// The cluster to be made.
    pub template: VSphereClusterTemplateResource,
}

/// The namespaces whose clusters may use an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllowedNamespaces {
    /// Labels of namespaces.
    #[serde(default)]
    pub selector: LabelSelector,
}

/// Who signs in, and for whom.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentitySpec {
    /// Name of the Secret with username and password, in the namespace of the controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1))]
    pub secret_name: Option<String>,
    /// The namespaces whose clusters may use the identity; none when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

/// What is known of an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentityStatus {
    /// Whether the identity can be used.
    #[serde(default)]
    pub ready: bool,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The same as Cluster API v1beta2 wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}
