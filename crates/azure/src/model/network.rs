//! Network interfaces, public addresses, subnets, and references to load balancers and security groups.

use super::{Sku, SubResource, Tags, model};

model! {
    NetworkInterface {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        etag: String,
        properties: NetworkInterfaceProperties,
    }
    NetworkInterfaceProperties {
        provisioning_state: String,
        ip_configurations: Vec<IpConfiguration>,
        enable_accelerated_networking: bool,
        #[serde(rename = "enableIPForwarding")]
        enable_ip_forwarding: bool,
        network_security_group: SubResource,
        virtual_machine: SubResource,
        dns_settings: NetworkInterfaceDns,
    }
    NetworkInterfaceDns { internal_dns_name_label: String, internal_domain_name_suffix: String, internal_fqdn: String }
    IpConfiguration { name: String, properties: IpConfigurationProperties }
    IpConfigurationProperties {
        primary: bool,
        #[serde(rename = "privateIPAddress")]
        private_ip_address: String,
        #[serde(rename = "privateIPAddressVersion")]
        private_ip_address_version: String,
        #[serde(rename = "privateIPAllocationMethod")]
        private_ip_allocation_method: String,
        subnet: SubResource,
        #[serde(rename = "publicIPAddress")]
        public_ip_address: SubResource,
        load_balancer_backend_address_pools: Vec<SubResource>,
        load_balancer_inbound_nat_rules: Vec<SubResource>,
        application_security_groups: Vec<SubResource>,
    }
    PublicIpAddress {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        zones: Vec<String>,
        sku: Sku,
        etag: String,
        properties: PublicIpAddressProperties,
    }
    PublicIpAddressProperties {
        provisioning_state: String,
        #[serde(rename = "publicIPAddressVersion")]
        public_ip_address_version: String,
        #[serde(rename = "publicIPAllocationMethod")]
        public_ip_allocation_method: String,
        ip_address: String,
        dns_settings: PublicIpDns,
    }
    PublicIpDns { domain_name_label: String, fqdn: String }
    Subnet { id: String, name: String, etag: String, properties: SubnetProperties }
    SubnetProperties { provisioning_state: String, address_prefix: String, address_prefixes: Vec<String> }
    LoadBalancer { id: String, name: String, location: String, tags: Tags, etag: String, properties: LoadBalancerProperties }
    LoadBalancerProperties {
        provisioning_state: String,
        #[serde(rename = "frontendIPConfigurations")]
        frontend_ip_configurations: Vec<FrontendIpConfiguration>,
        backend_address_pools: Vec<BackendAddressPool>,
        inbound_nat_rules: Vec<SubResource>,
    }
    FrontendIpConfiguration { id: String, name: String, properties: FrontendIpConfigurationProperties }
    FrontendIpConfigurationProperties {
        #[serde(rename = "privateIPAddressVersion")]
        private_ip_address_version: String,
        #[serde(rename = "publicIPAddress")]
        public_ip_address: SubResource,
    }
    BackendAddressPool { id: String, name: String }
}

impl NetworkInterface {
    pub fn ip_configurations(&self) -> &[IpConfiguration] {
        self.properties
            .as_ref()
            .and_then(|properties| properties.ip_configurations.as_deref())
            .unwrap_or_default()
    }

    /// The addresses that it got inside its network, the primary configuration's first.
    pub fn private_addresses(&self) -> Vec<&str> {
        let mut found: Vec<_> = self
            .ip_configurations()
            .iter()
            .filter_map(|config| config.properties.as_ref())
            .filter_map(|properties| {
                Some((
                    properties.primary != Some(true),
                    properties.private_ip_address.as_deref()?,
                ))
            })
            .collect();
        found.sort_by_key(|(secondary, _)| *secondary);
        found.into_iter().map(|(_, address)| address).collect()
    }
}
