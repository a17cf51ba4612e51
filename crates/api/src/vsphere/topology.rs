//! Failure domains and deployment zones.

use super::clone::DhcpOverrides;
use crate::cel::{Rule, immutable, rule};
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
#[schemars(extend("x-kubernetes-validations" = failure_domain_rules()))]
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
    #[schemars(extend("x-default" = true))]
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

fn failure_domain_rules() -> [Rule; 6] {
    const CLUSTER: &str = ".topology.computeCluster";
    [
        immutable("VSphereFailureDomainSpec is immutable").forbidden(),
        rule(
            "!has(self.topology.hosts) || self.topology.?computeCluster.orValue('') != ''",
            "cannot be empty if Hosts is not empty",
        )
        .at(CLUSTER)
        .forbidden(),
        rule(
            "self.region.type != 'HostGroup'",
            "region's Failure Domain type cannot be HostGroup",
        )
        .at(".region.type")
        .forbidden(),
        rule(
            "self.zone.type != 'HostGroup' || has(self.topology.hosts)",
            "cannot be nil if zone's Failure Domain type is HostGroup",
        )
        .at(".topology.hosts")
        .forbidden(),
        rule(
            "(self.region.type != 'ComputeCluster' && self.zone.type != 'ComputeCluster') || \
             self.topology.?computeCluster.orValue('') != ''",
            "cannot be nil if the Failure Domain type of region or zone is ComputeCluster",
        )
        .at(CLUSTER)
        .forbidden(),
        rule(
            "!has(self.topology.networkConfigurations) || size(self.topology.networkConfigurations) == 0 || \
             !has(self.topology.networks) || size(self.topology.networks) == 0",
            "cannot be set if spec.topology.networkConfigurations is already set",
        )
        .at(".topology.networks")
        .forbidden(),
    ]
}
