//! Failure domains and deployment zones.

use super::clone::DhcpOverrides;
use crate::common::{Condition, V1Beta2Status};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// A place in vCenter that fails as one.
    pub struct VSphereFailureDomain { spec: VSphereFailureDomainSpec }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vspherefailuredomains"
}

resource! {
    /// A failure domain that machines may be put into.
    pub struct VSphereDeploymentZone { spec: VSphereDeploymentZoneSpec, status: VSphereDeploymentZoneStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vspheredeploymentzones"
}

string_enum! {
    pub enum FailureDomainType {
        Datacenter = "Datacenter",
        ComputeCluster = "ComputeCluster",
        HostGroup = "HostGroup",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomain {
    pub name: String,
    #[serde(rename = "type")]
    pub type_: FailureDomainType,
    pub tag_category: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_configure: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomainHosts {
    pub vm_group_name: String,
    pub host_group_name: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfiguration {
    pub network_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    pub datacenter: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_cluster: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<FailureDomainHosts>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["networkName"]))]
    pub network_configurations: Vec<NetworkConfiguration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereFailureDomainSpec {
    pub region: FailureDomain,
    pub zone: FailureDomain,
    pub topology: Topology,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementConstraint {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane: Option<bool>,
    pub placement_constraint: PlacementConstraint,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}
