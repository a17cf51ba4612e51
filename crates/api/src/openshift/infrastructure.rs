//! `config.openshift.io/v1` Infrastructure: the facts about a cluster that its installer wrote. Read only.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// The infrastructure of the cluster. There is one object, named `cluster`.
    pub struct Infrastructure { spec: InfrastructureSpec, status: InfrastructureStatus }
    ClusterResourceScope "config.openshift.io" / "v1" / "infrastructures"
}

/// The spec, of which Capstan reads no field.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct InfrastructureSpec {}

/// Observed facts about the cluster's infrastructure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InfrastructureStatus {
    /// Prefix of the names of the cluster's resources.
    pub infrastructure_name: String,
    /// Name of the platform, as older clusters have it.
    pub platform: String,
    /// Facts about the platform.
    pub platform_status: Option<PlatformStatus>,
}

/// Facts about the cluster's platform.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PlatformStatus {
    /// Name of the platform.
    #[serde(rename = "type")]
    pub type_: String,
    /// Facts about the cluster on Azure.
    pub azure: Option<AzurePlatformStatus>,
}

/// Facts about a cluster on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AzurePlatformStatus {
    /// Resource group of the cluster.
    pub resource_group_name: String,
    /// Resource group of the cluster's network.
    pub network_resource_group_name: String,
    /// Name of the Azure cloud.
    pub cloud_name: String,
    /// URL of Azure Resource Manager, where it is not that of the cloud.
    pub arm_endpoint: String,
    /// Tags of every Azure resource of the cluster.
    pub resource_tags: Vec<ResourceTag>,
}

/// An Azure tag.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default)]
pub struct ResourceTag {
    /// Name of the tag.
    pub key: String,
    /// Value of the tag.
    pub value: String,
}
