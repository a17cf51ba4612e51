//! The network of an Azure cluster.

use crate::cel::immutable;
use crate::common::{is_default, is_false};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    pub enum SecurityGroupProtocol {
        Tcp = "Tcp",
        Udp = "Udp",
        Icmp = "Icmp",
        Any = "*",
    }
}

string_enum! {
    pub enum SecurityRuleDirection {
        Inbound = "Inbound",
        Outbound = "Outbound",
    }
}

string_enum! {
    pub enum SecurityRuleAccess {
        Allow = "Allow",
        Deny = "Deny",
    }
}

string_enum! {
    pub enum SubnetRole {
        Node = "node",
        ControlPlane = "control-plane",
        Bastion = "bastion",
        Cluster = "cluster",
    }
}

string_enum! {
    pub enum PrivateDnsZoneMode {
        System = "System",
        None = "None",
    }
}

string_enum! {
    pub enum BastionHostSkuName {
        Basic = "Basic",
        Standard = "Standard",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringProperties {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_forwarded_traffic: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_gateway_transit: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_virtual_network_access: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_remote_gateways: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    pub remote_vnet_name: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub forward_peering_properties: VnetPeeringProperties,
    #[serde(default, skip_serializing_if = "is_default")]
    pub reverse_peering_properties: VnetPeeringProperties,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peerings: Vec<VnetPeeringSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityRule {
    pub name: String,
    pub description: String,
    pub protocol: SecurityGroupProtocol,
    pub direction: SecurityRuleDirection,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_ports: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Allow"))]
    pub action: Option<SecurityRuleAccess>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityGroup {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub security_rules: Vec<SecurityRule>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteTable {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub name: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IpTag {
    #[serde(rename = "type")]
    pub type_: String,
    pub tag: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PublicIpSpec {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_tags: Vec<IpTag>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NatGateway {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub ip: PublicIpSpec,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    pub name: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEndpointSpec {
    pub service: String,
    pub locations: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateLinkServiceConnection {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(rename = "privateLinkServiceID", skip_serializing_if = "Option::is_none")]
    pub private_link_service_id: Option<String>,
    #[serde(rename = "groupIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub group_ids: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 140))]
    pub request_message: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateEndpointSpec {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_link_service_connections: Vec<PrivateLinkServiceConnection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_network_interface_name: Option<String>,
    #[serde(rename = "privateIPAddresses", default, skip_serializing_if = "Vec::is_empty")]
    pub private_ip_addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub manual_approval: bool,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SubnetSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub security_group: SecurityGroup,
    #[serde(default, skip_serializing_if = "is_default")]
    pub route_table: RouteTable,
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat_gateway: NatGateway,
    pub name: String,
    pub role: SubnetRole,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["service"]))]
    pub service_endpoints: Vec<ServiceEndpointSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub private_endpoints: Vec<PrivateEndpointSpec>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendIp {
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    #[serde(rename = "publicIP", skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<PublicIpSpec>,
    #[serde(rename = "privateIP", skip_serializing_if = "Option::is_none")]
    pub private_ip: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendPool {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(rename = "frontendIPs", default, skip_serializing_if = "Vec::is_empty")]
    pub frontend_ips: Vec<FrontendIp>,
    #[serde(rename = "frontendIPsCount", skip_serializing_if = "Option::is_none")]
    pub frontend_ips_count: Option<i32>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub backend_pool: BackendPool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_in_minutes: Option<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"), extend("maxItems" = 3))]
    pub availability_zones: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerPort {
    pub name: String,
    pub port: i32,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    #[serde(default, skip_serializing_if = "is_default")]
    pub vnet: VnetSpec,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub subnets: Vec<SubnetSpec>,
    #[serde(rename = "apiServerLB", skip_serializing_if = "Option::is_none")]
    pub api_server_lb: Option<LoadBalancerSpec>,
    #[serde(rename = "nodeOutboundLB", skip_serializing_if = "Option::is_none")]
    pub node_outbound_lb: Option<LoadBalancerSpec>,
    #[serde(rename = "controlPlaneOutboundLB", skip_serializing_if = "Option::is_none")]
    pub control_plane_outbound_lb: Option<LoadBalancerSpec>,
    #[serde(
        rename = "additionalAPIServerLBPorts",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    pub additional_api_server_lb_ports: Vec<LoadBalancerPort>,
    #[serde(rename = "privateDNSZone", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub private_dns_zone: Option<PrivateDnsZoneMode>,
    #[serde(rename = "privateDNSZoneName", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub private_dns_zone_name: Option<String>,
    #[serde(rename = "privateDNSZoneResourceGroup", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub private_dns_zone_resource_group: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureBastion {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub subnet: SubnetSpec,
    #[serde(rename = "publicIP", default, skip_serializing_if = "is_default")]
    pub public_ip: PublicIpSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Basic"))]
    pub sku: Option<BastionHostSkuName>,
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("x-default" = false))]
    pub enable_tunneling: bool,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BastionSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub azure_bastion: Option<AzureBastion>,
}
