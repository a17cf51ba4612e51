//! Failure domains and deployment zones.

use super::clone::DhcpOverrides;
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, V1Beta2Status};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// A VSphereFailureDomain describes a region and a zone of vCenter, and the resources in them.
    pub struct VSphereFailureDomain { spec: VSphereFailureDomainSpec }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspherefailuredomains"
}

resource! {
    /// A VSphereDeploymentZone makes a failure domain available to clusters, with the place for machines in it.
    pub struct VSphereDeploymentZone { spec: VSphereDeploymentZoneSpec, status: VSphereDeploymentZoneStatus }
    ClusterResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheredeploymentzones"
}

string_enum! {
    /// The kind of vCenter object that carries the tag of a failure domain.
    pub enum FailureDomainType {
        Datacenter = "Datacenter",
        ComputeCluster = "ComputeCluster",
        HostGroup = "HostGroup",
    }
}

/// A region or a zone, which a vSphere tag marks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomain {
    /// Name of the tag.
    pub name: String,
    /// Kind of the objects that carry the tag: Datacenter, ComputeCluster or HostGroup.
    #[serde(rename = "type")]
    pub type_: FailureDomainType,
    /// Name of the tag's category.
    pub tag_category: String,
    /// Deprecated: whether Capstan creates the tag and its category when they do not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_configure: Option<bool>,
}

/// The host group of a failure domain, with the VM group of its machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureDomainHosts {
    /// Name of the group of virtual machines.
    pub vm_group_name: String,
    /// Name of the group of hosts.
    pub host_group_name: String,
}

/// A network of the failure domain, with its address settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfiguration {
    /// Name of the vSphere network.
    pub network_name: String,
    /// Whether machines get IPv4 addresses from DHCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4: Option<bool>,
    /// Whether machines get IPv6 addresses from DHCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6: Option<bool>,
    /// DNS servers of the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// DNS search domains of the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    /// DHCP client settings for IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    /// DHCP client settings for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    /// IP pools from which IPAddressClaims get addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
}

/// The vCenter resources of a failure domain.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// Datacenter of the failure domain.
    pub datacenter: String,
    /// Compute cluster of the failure domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_cluster: Option<String>,
    /// Host group within the compute cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<FailureDomainHosts>,
    /// Networks of the failure domain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    /// Networks of the failure domain, with their address settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["networkName"]))]
    pub network_configurations: Vec<NetworkConfiguration>,
    /// Datastore of the failure domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
}

/// Desired state of a failure domain: its region, its zone and their resources.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = failure_domain_rules()))]
pub struct VSphereFailureDomainSpec {
    /// Region of the failure domain.
    pub region: FailureDomain,
    /// Zone within the region.
    pub zone: FailureDomain,
    /// Resources of vCenter that the failure domain consists of.
    pub topology: Topology,
}

/// The place in vCenter where machines are created.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementConstraint {
    /// Resource pool of the machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    /// Folder of the machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
}

/// Desired state of a deployment zone: its failure domain and the place for machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneSpec {
    /// Host name or IP address of vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Name of the VSphereFailureDomain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// Whether control plane machines may be created in the zone.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = true))]
    pub control_plane: Option<bool>,
    /// Place in vCenter where machines are created.
    #[serde(default)]
    pub placement_constraint: PlacementConstraint,
}

/// Observed state of a deployment zone.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereDeploymentZoneStatus {
    /// Whether machines can be created in the zone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// Conditions of the zone, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Conditions in the form of Cluster API v1beta2.
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
