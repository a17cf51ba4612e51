//! VSphereCluster, its template and its identity.

use crate::cel::immutable;
use crate::common::{ApiEndpoint, ClusterFailureDomain, Condition, TemplateMeta, V1Beta2Status, is_default, is_false};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

resource! {
    /// A VSphereCluster describes a cluster's infrastructure on vSphere.
    pub struct VSphereCluster { spec: VSphereClusterSpec, status: VSphereClusterStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclusters"
}

resource! {
    /// A VSphereClusterTemplate is a template from which VSphereClusters are created.
    pub struct VSphereClusterTemplate { spec: VSphereClusterTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclustertemplates"
}

resource! {
    /// A VSphereClusterIdentity holds credentials for vCenter, and the namespaces that may use them.
    pub struct VSphereClusterIdentity { spec: VSphereClusterIdentitySpec, status: VSphereClusterIdentityStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vsphereclusteridentities"
}

string_enum! {
    /// The kind of object that holds the credentials for vCenter.
    pub enum VSphereIdentityKind {
        VSphereClusterIdentity = "VSphereClusterIdentity",
        Secret = "Secret",
    }
}

/// A reference to the identity with which controllers sign in to vCenter.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereIdentityReference {
    /// Kind of the object: Secret or VSphereClusterIdentity.
    pub kind: VSphereIdentityKind,
    /// Name of the object.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
}

/// A cluster module: a group of virtual machines that vCenter keeps on different hosts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterModule {
    /// Whether the module is for control plane machines.
    pub control_plane: bool,
    /// Name of the object whose machines belong to the module, such as a MachineDeployment.
    pub target_object_name: String,
    /// UUID of the module in vCenter.
    #[serde(rename = "moduleUUID")]
    pub module_uuid: String,
}

/// Desired state of a cluster's infrastructure on vSphere.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterSpec {
    /// Host name or IP address of vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// SHA-1 or SHA-256 thumbprint of vCenter's certificate. Only that certificate is accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    /// Host and port at which clients reach the API server.
    #[serde(default)]
    pub control_plane_endpoint: ApiEndpoint,
    /// Identity with which controllers sign in to vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<VSphereIdentityReference>,
    /// Cluster modules of the cluster's machines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_modules: Vec<ClusterModule>,
    /// Whether the cluster has no cluster modules.
    #[serde(default, skip_serializing_if = "is_false")]
    pub disable_cluster_module: bool,
    /// Label selector of the VSphereDeploymentZones that the cluster uses. No zone when unset, all zones when empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain_selector: Option<LabelSelector>,
}

/// Observed state of a cluster's infrastructure on vSphere.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterStatus {
    /// Whether the infrastructure is complete, so that machines can be created.
    #[serde(default)]
    pub ready: bool,
    /// Conditions of the cluster, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Failure domains in which machines can be created.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// Version of vCenter that Capstan found.
    #[serde(rename = "vCenterVersion", skip_serializing_if = "Option::is_none")]
    pub vcenter_version: Option<String>,
    /// Conditions in the form of Cluster API v1beta2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

/// Template of a VSphereCluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateResource {
    /// Labels and annotations of the created cluster.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: TemplateMeta,
    /// Spec of the created cluster.
    #[schemars(extend("x-kubernetes-validations" = [immutable("VSphereClusterTemplate spec is immutable").forbidden()]))]
    pub spec: VSphereClusterSpec,
}

/// Desired state of a VSphereClusterTemplate.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterTemplateSpec {
    /// Template of the clusters.
    pub template: VSphereClusterTemplateResource,
}

/// Namespaces whose clusters may use an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllowedNamespaces {
    /// Label selector of the allowed namespaces.
    #[serde(default)]
    pub selector: LabelSelector,
}

/// Desired state of an identity: its credentials, and the namespaces that may use it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentitySpec {
    /// Name of the Secret that holds username and password, in the namespace of the controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1))]
    pub secret_name: Option<String>,
    /// Namespaces whose clusters may use the identity. No namespace may when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
}

/// Observed state of an identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereClusterIdentityStatus {
    /// Whether clusters can use the identity.
    #[serde(default)]
    pub ready: bool,
    /// Conditions of the identity, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Conditions in the form of Cluster API v1beta2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}
