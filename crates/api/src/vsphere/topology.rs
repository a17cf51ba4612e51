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
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspherefailuredomains"
}

resource! {
    /// A failure domain that machines may be put into.
    pub struct VSphereDeploymentZone { spec: VSphereDeploymentZoneSpec, status: VSphereDeploymentZoneStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheredeploymentzones"
}

string_enum! {
    /// What in vCenter makes up a failure domain.
    pub enum FailureDomainType {
        Datacenter = "Datacenter",
        ComputeCluster = "ComputeCluster",
        HostGroup = "HostGroup",
    }
}

/// A region or zone, marked by a tag.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomain {
    /// Name of the tag.
    pub name: String,
    /// What carries the tag.
    #[serde(rename = "type")]
    pub type_: FailureDomainType,
    /// Category of the tag.
    pub tag_category: String,
    /// Whether tag and category are made when they are not there; deprecated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_configure: Option<bool>,
}

/// Hosts and machines that belong together.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomainHosts {
    /// Group of virtual machines.
    pub vm_group_name: String,
    /// Group of hosts.
    pub host_group_name: String,
}

/// A network of the failure domain and how machines get addresses on it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfiguration {
    /// Network that it is connected to.
    pub network_name: String,
    /// Whether IPv4 addresses come from DHCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4: Option<bool>,
    /// Whether IPv6 addresses come from DHCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6: Option<bool>,
    /// DNS servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// DNS search domains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    /// What to take over from DHCP for IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    /// What to take over from DHCP for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    /// IP pools that addresses are claimed from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
}

/// What of vCenter belongs to the failure domain.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// Datacenter.
    pub datacenter: String,
    /// Compute cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_cluster: Option<String>,
    /// Hosts within the compute cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<FailureDomainHosts>,
    /// Networks of the failure domain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    /// Networks of the failure domain, with settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["networkName"]))]
    pub network_configurations: Vec<NetworkConfiguration>,
    /// Datastore of the failure domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
}

/// A region, a zone in it, and what belongs to them.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = failure_domain_rules()))]
pub struct VSphereFailureDomainSpec {
    /// The region.
    pub region: FailureDomain,
    /// The zone within it.
    pub zone: FailureDomain,
    /// What belongs to them.
    pub topology: Topology,
}

/// Where in vCenter machines are put.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementConstraint {
    /// Resource pool for machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    /// Folder for machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
}

/// A failure domain with the place for machines in it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneSpec {
    /// vCenter's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Name of the VSphereFailureDomain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// Whether control plane machines may go there.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = true))]
    pub control_plane: Option<bool>,
    /// Where in vCenter machines are put.
    #[serde(default)]
    pub placement_constraint: PlacementConstraint,
}

/// A zone as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneStatus {
    /// Whether the zone can be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The same as Cluster API v1beta2 wants it.
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
