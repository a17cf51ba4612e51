//! The network of an Azure cluster.

use super::names;
use crate::cel::immutable;
use crate::common::{is_default, is_false};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// A protocol that a security rule is for.
    pub enum SecurityGroupProtocol {
        Tcp = "Tcp",
        Udp = "Udp",
        Icmp = "Icmp",
        Any = "*",
    }
}

string_enum! {
    /// Which way traffic goes.
    pub enum SecurityRuleDirection {
        Inbound = "Inbound",
        Outbound = "Outbound",
    }
}

string_enum! {
    /// What is done with traffic.
    pub enum SecurityRuleAccess {
        Allow = "Allow",
        Deny = "Deny",
    }
}

string_enum! {
    /// What a subnet is for.
    pub enum SubnetRole {
        Node = "node",
        ControlPlane = "control-plane",
        Bastion = "bastion",
        Cluster = "cluster",
    }
}

string_enum! {
    /// Who looks after the private DNS zone.
    pub enum PrivateDnsZoneMode {
        System = "System",
        None = "None",
    }
}

string_enum! {
    /// Size of a bastion host.
    pub enum BastionHostSkuName {
        Basic = "Basic",
        Standard = "Standard",
    }
}

/// What one side of a peering lets through.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringProperties {
    /// Lets traffic through that was only passed on by the other side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_forwarded_traffic: Option<bool>,
    /// Lets the other side use our gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_gateway_transit: Option<bool>,
    /// Lets machines reach each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_virtual_network_access: Option<bool>,
    /// Uses the other side's gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_remote_gateways: Option<bool>,
}

/// A peering with another virtual network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringSpec {
    /// Resource group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE_GROUP))]
    pub resource_group: Option<String>,
    /// The other virtual network.
    #[schemars(extend("pattern" = names::VIRTUAL_NETWORK))]
    pub remote_vnet_name: String,
    /// From us to the other.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forward_peering_properties: VnetPeeringProperties,
    /// From the other to us.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reverse_peering_properties: VnetPeeringProperties,
}

/// The virtual network of a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetSpec {
    /// Resource group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE_GROUP))]
    pub resource_group: Option<String>,
    /// Resource ID of a virtual network that exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its name.
    #[schemars(extend("pattern" = names::VIRTUAL_NETWORK))]
    pub name: String,
    /// Other virtual networks to connect with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peerings: Vec<VnetPeeringSpec>,
    /// Address ranges.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    /// Tags in Azure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// One rule of a network security group.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityRule {
    /// Its name.
    pub name: String,
    /// What the rule is for.
    pub description: String,
    /// Protocol of the traffic.
    pub protocol: SecurityGroupProtocol,
    /// Which way the traffic goes.
    pub direction: SecurityRuleDirection,
    /// Rules with a lower number come first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Ports that the traffic comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<String>,
    /// Ports that the traffic goes to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_ports: Option<String>,
    /// Addresses or tag that the traffic comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Several addresses that the traffic comes from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Addresses or tag that the traffic goes to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// What is done with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Allow"))]
    pub action: Option<SecurityRuleAccess>,
}

/// A network security group.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityGroup {
    /// Its resource ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its name.
    pub name: String,
    /// Its rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub security_rules: Vec<SecurityRule>,
    /// Tags in Azure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// A route table.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteTable {
    /// Its resource ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its name.
    pub name: String,
}

/// A tag of a public address.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IpTag {
    /// Kind of tag.
    #[serde(rename = "type")]
    pub type_: String,
    /// Value of the tag.
    pub tag: String,
}

/// A public address.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PublicIpSpec {
    /// Its name.
    pub name: String,
    /// DNS name of the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_name: Option<String>,
    /// Tags of the address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_tags: Vec<IpTag>,
}

/// A NAT gateway for a subnet's way out.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NatGateway {
    /// Its resource ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Address that traffic leaves by.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ip: PublicIpSpec,
    /// Zones that the gateway is in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// Its name.
    pub name: String,
}

/// A service that a subnet reaches directly.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEndpointSpec {
    /// The service, as in Microsoft.Storage.
    pub service: String,
    /// Regions of the service; * for all.
    pub locations: Vec<String>,
}

/// A service behind a private endpoint.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateLinkServiceConnection {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Resource ID of the service.
    #[serde(rename = "privateLinkServiceID", skip_serializing_if = "Option::is_none")]
    pub private_link_service_id: Option<String>,
    /// Parts of the service.
    #[serde(rename = "groupIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub group_ids: Vec<String>,
    /// A word to whoever approves the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 140))]
    pub request_message: Option<String>,
}

/// A private endpoint in a subnet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateEndpointSpec {
    /// Its name.
    pub name: String,
    /// Azure region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Services behind the endpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_link_service_connections: Vec<PrivateLinkServiceConnection>,
    /// Name of its network interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_network_interface_name: Option<String>,
    /// Fixed addresses.
    #[serde(rename = "privateIPAddresses", default, skip_serializing_if = "Vec::is_empty")]
    pub private_ip_addresses: Vec<String>,
    /// Application security groups that it belongs to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    /// Whether somebody has to approve the connection.
    #[serde(default, skip_serializing_if = "is_false")]
    pub manual_approval: bool,
}

/// A subnet of the virtual network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SubnetSpec {
    /// Its resource ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Security group of the subnet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub security_group: SecurityGroup,
    /// Route table of the subnet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub route_table: RouteTable,
    /// The way out.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat_gateway: NatGateway,
    /// Its name.
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: String,
    /// Which machines go there.
    pub role: SubnetRole,
    /// Address ranges.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    /// Services reached directly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["service"]))]
    pub service_endpoints: Vec<ServiceEndpointSpec>,
    /// Private endpoints in the subnet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub private_endpoints: Vec<PrivateEndpointSpec>,
}

/// An address that a load balancer answers on.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendIp {
    /// Its name.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// A public address.
    #[serde(rename = "publicIP", skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<PublicIpSpec>,
    /// A private address.
    #[serde(rename = "privateIP", skip_serializing_if = "Option::is_none")]
    pub private_ip: Option<String>,
}

/// The machines behind a load balancer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendPool {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: Option<String>,
}

/// A load balancer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerSpec {
    /// Its resource ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: Option<String>,
    /// Addresses that it answers on.
    #[serde(rename = "frontendIPs", default, skip_serializing_if = "Vec::is_empty")]
    pub frontend_ips: Vec<FrontendIp>,
    /// How many addresses to make.
    #[serde(rename = "frontendIPsCount", skip_serializing_if = "Option::is_none")]
    pub frontend_ips_count: Option<i32>,
    /// The machines behind it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backend_pool: BackendPool,
    /// Size of the load balancer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
    /// Public or Internal.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// When an idle connection is closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_in_minutes: Option<i32>,
    /// Zones that its addresses are in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"), extend("maxItems" = 3))]
    pub availability_zones: Vec<String>,
}

/// A further port of the API server's load balancer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerPort {
    /// Its name.
    pub name: String,
    /// TCP port.
    pub port: i32,
}

/// The network of a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// The virtual network.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vnet: VnetSpec,
    /// Its subnets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub subnets: Vec<SubnetSpec>,
    /// Load balancer of the API server.
    #[serde(rename = "apiServerLB", skip_serializing_if = "Option::is_none")]
    pub api_server_lb: Option<LoadBalancerSpec>,
    /// The nodes' way out.
    #[serde(rename = "nodeOutboundLB", skip_serializing_if = "Option::is_none")]
    pub node_outbound_lb: Option<LoadBalancerSpec>,
    /// The control plane's way out, when the API server is private.
    #[serde(rename = "controlPlaneOutboundLB", skip_serializing_if = "Option::is_none")]
    pub control_plane_outbound_lb: Option<LoadBalancerSpec>,
    /// Further ports of the API server's load balancer.
    #[serde(
        rename = "additionalAPIServerLBPorts",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    pub additional_api_server_lb_ports: Vec<LoadBalancerPort>,
    /// Who looks after the private DNS zone.
    #[serde(rename = "privateDNSZone", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub private_dns_zone: Option<PrivateDnsZoneMode>,
    /// Name of the private DNS zone.
    #[serde(rename = "privateDNSZoneName", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub private_dns_zone_name: Option<String>,
    /// Resource group of the private DNS zone.
    #[serde(rename = "privateDNSZoneResourceGroup", skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("pattern" = names::RESOURCE_GROUP),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub private_dns_zone_resource_group: Option<String>,
}

/// A bastion host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureBastion {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Subnet of the bastion host.
    #[serde(default, skip_serializing_if = "is_default")]
    pub subnet: SubnetSpec,
    /// Address of the bastion host.
    #[serde(rename = "publicIP", default, skip_serializing_if = "is_default")]
    pub public_ip: PublicIpSpec,
    /// Size of the bastion host.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Basic"))]
    pub sku: Option<BastionHostSkuName>,
    /// Whether native clients can be used.
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("x-default" = false))]
    pub enable_tunneling: bool,
}

/// The way in for administrators.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BastionSpec {
    /// A bastion host run by Azure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub azure_bastion: Option<AzureBastion>,
}
