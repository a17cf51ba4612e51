//! The network of an Azure cluster.

use super::names;
use crate::cel::immutable;
use crate::common::{is_default, is_false};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// The protocol that a security rule matches.
    pub enum SecurityGroupProtocol {
        Tcp = "Tcp",
        Udp = "Udp",
        Icmp = "Icmp",
        Any = "*",
    }
}

string_enum! {
    /// The direction of the traffic that a security rule matches.
    pub enum SecurityRuleDirection {
        Inbound = "Inbound",
        Outbound = "Outbound",
    }
}

string_enum! {
    /// The action of a security rule.
    pub enum SecurityRuleAccess {
        Allow = "Allow",
        Deny = "Deny",
    }
}

string_enum! {
    /// The role of a subnet: the machines that are created in it.
    pub enum SubnetRole {
        Node = "node",
        ControlPlane = "control-plane",
        Bastion = "bastion",
        Cluster = "cluster",
    }
}

string_enum! {
    /// Whether the cluster controller creates a private DNS zone (System) or creates none (None).
    pub enum PrivateDnsZoneMode {
        System = "System",
        None = "None",
    }
}

string_enum! {
    /// The SKU of a bastion host.
    pub enum BastionHostSkuName {
        Basic = "Basic",
        Standard = "Standard",
    }
}

/// Permissions of one direction of a peering between virtual networks.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringProperties {
    /// Whether traffic that the remote virtual network forwards, but does not send itself, is allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_forwarded_traffic: Option<bool>,
    /// Whether the remote virtual network may use this network's gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_gateway_transit: Option<bool>,
    /// Whether machines of both virtual networks can reach each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_virtual_network_access: Option<bool>,
    /// Whether this virtual network uses the gateway of the remote one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_remote_gateways: Option<bool>,
}

/// A peering with a remote virtual network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetPeeringSpec {
    /// Resource group of the remote virtual network.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE_GROUP))]
    pub resource_group: Option<String>,
    /// Name of the remote virtual network.
    #[schemars(extend("pattern" = names::VIRTUAL_NETWORK))]
    pub remote_vnet_name: String,
    /// Permissions of the peering from this virtual network to the remote one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forward_peering_properties: VnetPeeringProperties,
    /// Permissions of the peering from the remote virtual network to this one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reverse_peering_properties: VnetPeeringProperties,
}

/// The virtual network of a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VnetSpec {
    /// Resource group of the virtual network.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE_GROUP))]
    pub resource_group: Option<String>,
    /// Resource ID of an existing virtual network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the virtual network.
    #[schemars(extend("pattern" = names::VIRTUAL_NETWORK))]
    pub name: String,
    /// Peerings with other virtual networks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peerings: Vec<VnetPeeringSpec>,
    /// Address ranges of the virtual network, in CIDR notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    /// Azure tags of the virtual network.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// One rule of a network security group.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityRule {
    /// Name of the security rule.
    pub name: String,
    /// Description of the security rule. At most 140 characters.
    pub description: String,
    /// Protocol that the rule matches.
    pub protocol: SecurityGroupProtocol,
    /// Direction of the traffic that the rule matches.
    pub direction: SecurityRuleDirection,
    /// Priority of the rule. Azure evaluates rules with a lower number first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Source port or range of ports. An asterisk matches all ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<String>,
    /// Destination port or range of ports. An asterisk matches all ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_ports: Option<String>,
    /// Source of the traffic: an address range, a service tag or an asterisk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Sources of the traffic: a list of address ranges.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Destination of the traffic: an address range, a service tag or an asterisk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// Action of the rule: Allow or Deny.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Allow"))]
    pub action: Option<SecurityRuleAccess>,
}

/// A network security group of a subnet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityGroup {
    /// Resource ID of the security group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the security group.
    pub name: String,
    /// Rules of the security group, unique by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub security_rules: Vec<SecurityRule>,
    /// Azure tags of the security group.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// A route table of a subnet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteTable {
    /// Resource ID of the route table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the route table.
    pub name: String,
}

/// A tag of a public IP address.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IpTag {
    /// Type of the tag, such as FirstPartyUsage.
    #[serde(rename = "type")]
    pub type_: String,
    /// Value of the tag, such as /Sql.
    pub tag: String,
}

/// A public IP address.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PublicIpSpec {
    /// Name of the public IP address.
    pub name: String,
    /// DNS name of the public IP address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_name: Option<String>,
    /// IP tags of the public IP address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_tags: Vec<IpTag>,
}

/// A NAT gateway, through which a subnet's machines reach the internet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NatGateway {
    /// Resource ID of the NAT gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Public IP address of the NAT gateway.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ip: PublicIpSpec,
    /// Availability zones of the NAT gateway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// Name of the NAT gateway.
    pub name: String,
}

/// A service endpoint: an Azure service that machines of a subnet reach through Azure's own network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEndpointSpec {
    /// Name of the service, such as Microsoft.Storage.
    pub service: String,
    /// Regions of the service. An asterisk allows all regions.
    pub locations: Vec<String>,
}

/// A connection of a private endpoint to a private link service.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateLinkServiceConnection {
    /// Name of the connection to the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Resource ID of the private link service.
    #[serde(rename = "privateLinkServiceID", skip_serializing_if = "Option::is_none")]
    pub private_link_service_id: Option<String>,
    /// Names of the service's subresources that the endpoint connects to.
    #[serde(rename = "groupIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub group_ids: Vec<String>,
    /// Message to the owner of the service, who approves the connection. At most 140 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 140))]
    pub request_message: Option<String>,
}

/// A private endpoint in a subnet.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrivateEndpointSpec {
    /// Name of the private endpoint.
    pub name: String,
    /// Azure region of the private endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Connections of the endpoint to private link services.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_link_service_connections: Vec<PrivateLinkServiceConnection>,
    /// Name of the network interface of the endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_network_interface_name: Option<String>,
    /// Static private IP addresses of the endpoint.
    #[serde(rename = "privateIPAddresses", default, skip_serializing_if = "Vec::is_empty")]
    pub private_ip_addresses: Vec<String>,
    /// Application security groups that the endpoint belongs to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    /// Whether the owner of the service must approve the connection by hand.
    #[serde(default, skip_serializing_if = "is_false")]
    pub manual_approval: bool,
}

/// A subnet of the virtual network.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SubnetSpec {
    /// Resource ID of the subnet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Network security group of the subnet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub security_group: SecurityGroup,
    /// Route table of the subnet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub route_table: RouteTable,
    /// NAT gateway through which the subnet's machines reach the internet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub nat_gateway: NatGateway,
    /// Name of the subnet.
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: String,
    /// Role of the subnet: node, control-plane, bastion or cluster.
    pub role: SubnetRole,
    /// Address ranges of the subnet, in CIDR notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cidr_blocks: Vec<String>,
    /// Service endpoints of the subnet, unique by service.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["service"]))]
    pub service_endpoints: Vec<ServiceEndpointSpec>,
    /// Private endpoints in the subnet, unique by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub private_endpoints: Vec<PrivateEndpointSpec>,
}

/// A frontend IP address of a load balancer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendIp {
    /// Name of the frontend IP address.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// Public IP address of the frontend.
    #[serde(rename = "publicIP", skip_serializing_if = "Option::is_none")]
    pub public_ip: Option<PublicIpSpec>,
    /// Private IP address of the frontend.
    #[serde(rename = "privateIP", skip_serializing_if = "Option::is_none")]
    pub private_ip: Option<String>,
}

/// The backend pool of a load balancer: the machines that receive its traffic.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendPool {
    /// Name of the backend pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: Option<String>,
}

/// A load balancer of the cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerSpec {
    /// Resource ID of the load balancer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the load balancer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub name: Option<String>,
    /// Frontend IP addresses of the load balancer.
    #[serde(rename = "frontendIPs", default, skip_serializing_if = "Vec::is_empty")]
    pub frontend_ips: Vec<FrontendIp>,
    /// Number of frontend IP addresses to create.
    #[serde(rename = "frontendIPsCount", skip_serializing_if = "Option::is_none")]
    pub frontend_ips_count: Option<i32>,
    /// Backend pool of the load balancer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub backend_pool: BackendPool,
    /// SKU of the load balancer, such as Standard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
    /// Type of the load balancer: Public or Internal.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// Minutes after which the load balancer closes an idle TCP connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_in_minutes: Option<i32>,
    /// Availability zones of the frontend IP addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"), extend("maxItems" = 3))]
    pub availability_zones: Vec<String>,
}

/// An additional port of the API server's load balancer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerPort {
    /// Name of the additional port.
    pub name: String,
    /// Number of the TCP port.
    pub port: i32,
}

/// The network of a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Virtual network of the cluster.
    #[serde(default, skip_serializing_if = "is_default")]
    pub vnet: VnetSpec,
    /// Subnets of the virtual network, unique by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub subnets: Vec<SubnetSpec>,
    /// Load balancer of the API server.
    #[serde(rename = "apiServerLB", skip_serializing_if = "Option::is_none")]
    pub api_server_lb: Option<LoadBalancerSpec>,
    /// Load balancer through which the nodes reach the internet.
    #[serde(rename = "nodeOutboundLB", skip_serializing_if = "Option::is_none")]
    pub node_outbound_lb: Option<LoadBalancerSpec>,
    /// Load balancer through which control plane machines reach the internet, when the API server is private.
    #[serde(rename = "controlPlaneOutboundLB", skip_serializing_if = "Option::is_none")]
    pub control_plane_outbound_lb: Option<LoadBalancerSpec>,
    /// Additional ports of the API server's load balancer.
    #[serde(
        rename = "additionalAPIServerLBPorts",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    pub additional_api_server_lb_ports: Vec<LoadBalancerPort>,
    /// Management of the private DNS zone: System creates the zone, None creates no zone.
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

/// A bastion host that Azure runs.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureBastion {
    /// Name of the bastion host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Subnet of the bastion host.
    #[serde(default, skip_serializing_if = "is_default")]
    pub subnet: SubnetSpec,
    /// Public IP address of the bastion host.
    #[serde(rename = "publicIP", default, skip_serializing_if = "is_default")]
    pub public_ip: PublicIpSpec,
    /// SKU of the bastion host: Basic or Standard.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Basic"))]
    pub sku: Option<BastionHostSkuName>,
    /// Whether native clients can connect through the bastion host. Needs the SKU Standard.
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("x-default" = false))]
    pub enable_tunneling: bool,
}

/// Bastion host through which administrators reach the machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BastionSpec {
    /// Bastion host that Azure runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub azure_bastion: Option<AzureBastion>,
}
