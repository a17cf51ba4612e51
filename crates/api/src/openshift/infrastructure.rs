//! `config.openshift.io/v1` Infrastructure: the facts about a cluster that its installer wrote. Read only.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// The cluster's infrastructure; there is one, named `cluster`.
    pub struct Infrastructure { spec: InfrastructureSpec, status: InfrastructureStatus }
    ClusterResourceScope "config.openshift.io" / "v1" / "infrastructures"
}

/// Nothing of the spec is read.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
pub struct InfrastructureSpec {}

/// The facts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InfrastructureStatus {
    /// The name that resources of the cluster begin with.
    pub infrastructure_name: String,
    /// The platform, as older clusters have it.
    pub platform: String,
    /// The platform.
    pub platform_status: Option<PlatformStatus>,
}

/// The facts about a cluster's platform.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PlatformStatus {
    /// The platform's name.
    #[serde(rename = "type")]
    pub type_: String,
    /// The facts about Azure.
    pub azure: Option<AzurePlatformStatus>,
}

/// The facts about a cluster on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AzurePlatformStatus {
    /// The resource group of the cluster.
    pub resource_group_name: String,
    /// The resource group of the cluster's network.
    pub network_resource_group_name: String,
    /// The Azure that the cluster is in.
    pub cloud_name: String,
    /// The address of the Resource Manager, where it is not the cloud's own.
    pub arm_endpoint: String,
    /// Tags of every resource of the cluster.
    pub resource_tags: Vec<ResourceTag>,
}

/// A tag.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default)]
pub struct ResourceTag {
    /// Its name.
    pub key: String,
    /// Its value.
    pub value: String,
}
