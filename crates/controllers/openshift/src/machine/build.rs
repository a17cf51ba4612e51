//! Builds Azure's requests from a machine's spec. Pure: the same spec always makes the same request.

mod disks;
mod guest;

pub use disks::{data_disk, delete_option, disk, made_first};

use super::ids::Ids as _;
use capstan_api::openshift::{
    AzureMachineProviderSpec, BootDiagnosticsStorage, ImageType, SecureBootPolicy, SecurityType,
    UefiSettings as UefiSpec, VirtualizedTpmPolicy,
};
use capstan_azure::ResourceId;
use capstan_azure::model::*;
use capstan_core::disks::azure::ultra_enabled;
use capstan_core::machine::names::{MACHINE_TAG, Names, UID_TAG};
use disks::os_disk;
use guest::os_profile;
use std::collections::BTreeMap;

/// Nearly every region has two fault domains.
const FAULT_DOMAINS: i32 = 2;

/// Input of the requests besides the spec.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// The user data, encoded.
    pub custom_data: String,
    /// Only where the spec has no SSH key; Azure wants one or the other.
    pub admin_password: Option<String>,
    pub availability_set: Option<String>,
    pub backend_pools: Vec<String>,
    pub backend_pools_v6: Vec<String>,
    pub nat_rules: Vec<String>,
    /// The subnet has IPv6 addresses too.
    pub ipv6: bool,
    /// The size takes disks by NVMe only.
    pub nvme: bool,
    /// Names of the kept disks that are attached instead of new ones, by `nameSuffix`.
    pub kept: BTreeMap<String, String>,
}

impl Extras {
    /// Whether the interface is a member of a balancer's pool, or behind one of its rules.
    pub fn joins_a_balancer(&self) -> bool {
        !(self.backend_pools.is_empty() && self.backend_pools_v6.is_empty() && self.nat_rules.is_empty())
    }

    /// As they are, but behind no balancer.
    pub fn without_balancers(&self) -> Self {
        Self {
            ipv6: self.ipv6,
            ..Self::default()
        }
    }
}

fn text(value: &Option<String>) -> Option<String> {
    value.clone().filter(|value| !value.is_empty())
}

fn word(value: Option<&str>) -> Option<String> {
    value.filter(|value| !value.is_empty()).map(ToOwned::to_owned)
}

pub fn public_ip(names: &Names, spec: &AzureMachineProviderSpec) -> PublicIpAddress {
    PublicIpAddress {
        location: Some(names.location.clone()),
        tags: Some(names.tags(spec)),
        sku: Some(Sku {
            name: Some("Standard".into()),
            ..Sku::default()
        }),
        properties: Some(PublicIpAddressProperties {
            public_ip_address_version: Some("IPv4".into()),
            public_ip_allocation_method: Some("Static".into()),
            dns_settings: names.dns_label().map(|label| PublicIpDns {
                domain_name_label: Some(label),
                ..PublicIpDns::default()
            }),
            ..PublicIpAddressProperties::default()
        }),
        ..PublicIpAddress::default()
    }
}

/// Returns the pools that interfaces join with their IPv4 and with their IPv6 address: all of the balancer's. Installers end
/// the names of IPv6 pools with `-v6`; a pool whose name does not tell serves the frontend of its place. Public frontends do
/// not tell their family.
pub fn backend_pools(balancer: &LoadBalancerProperties) -> (Vec<String>, Vec<String>) {
    let pools = balancer.backend_address_pools.as_deref().unwrap_or_default();
    let frontends = balancer.frontend_ip_configurations.as_deref().unwrap_or_default();
    let named_ipv6 = |pool: &BackendAddressPool| {
        let name = pool.name.as_deref().unwrap_or_default().to_lowercase();
        name.ends_with("-v6") || name.ends_with("-ipv6")
    };
    let (mut ipv4, mut ipv6) = (Vec::new(), Vec::new());
    for (index, pool) in pools.iter().enumerate() {
        let Some(id) = pool.id.clone() else { continue };
        let properties = frontends.get(index).and_then(|frontend| frontend.properties.as_ref());
        let version = properties.and_then(|properties| properties.private_ip_address_version.as_deref());
        if named_ipv6(pool) || version.is_some_and(|version| version.eq_ignore_ascii_case("IPv6")) {
            ipv6.push(id);
        } else {
            ipv4.push(id);
        }
    }
    (ipv4, ipv6)
}

pub fn nic(names: &Names, spec: &AzureMachineProviderSpec, extras: &Extras) -> NetworkInterface {
    // Only the network itself may be in another group; what guards and feeds the interface is in the machine's.
    let own = |kind: &str, name: &str| ResourceId::network(&names.subscription, &names.group, kind, name);
    let vnet = spec.vnet.clone().unwrap_or_default();
    let references = |ids: &[String]| (!ids.is_empty()).then(|| ids.iter().map(SubResource::of).collect::<Vec<_>>());
    let groups: Vec<String> = spec
        .application_security_groups
        .iter()
        .map(|name| full_id(name, &own("applicationSecurityGroups", name)))
        .collect();
    let address = own("publicIPAddresses", &names.public_ip());
    let network = ResourceId::network(&names.subscription, &names.network_group, "virtualNetworks", &vnet);
    let subnet = network.child("subnets", &spec.subnet);
    let ipv4 = IpConfiguration {
        name: Some("pipConfig".into()),
        properties: Some(IpConfigurationProperties {
            primary: Some(true),
            private_ip_allocation_method: Some("Dynamic".into()),
            subnet: Some(SubResource::of(&subnet)),
            public_ip_address: spec.public_ip.then(|| SubResource::of(address)),
            load_balancer_backend_address_pools: references(&extras.backend_pools),
            load_balancer_inbound_nat_rules: references(&extras.nat_rules),
            application_security_groups: references(&groups),
            ..IpConfigurationProperties::default()
        }),
        ..IpConfiguration::default()
    };
    let ipv6 = extras.ipv6.then(|| IpConfiguration {
        name: Some("pipConfig-v6".into()),
        properties: Some(IpConfigurationProperties {
            primary: Some(false),
            private_ip_allocation_method: Some("Dynamic".into()),
            private_ip_address_version: Some("IPv6".into()),
            subnet: Some(SubResource::of(&subnet)),
            load_balancer_backend_address_pools: references(&extras.backend_pools_v6),
            ..IpConfigurationProperties::default()
        }),
        ..IpConfiguration::default()
    });
    NetworkInterface {
        location: Some(names.location.clone()),
        tags: Some(names.tags(spec)),
        properties: Some(NetworkInterfaceProperties {
            enable_accelerated_networking: spec.accelerated_networking.then_some(true),
            network_security_group: text(&spec.security_group)
                .map(|name| SubResource::of(full_id(&name, &own("networkSecurityGroups", &name)))),
            ip_configurations: Some(std::iter::once(ipv4).chain(ipv6).collect()),
            ..NetworkInterfaceProperties::default()
        }),
        ..NetworkInterface::default()
    }
}

/// A name stands for a resource of the machine's own group; a full id stands for itself.
fn full_id(given: &str, named: &ResourceId) -> String {
    if given.starts_with("/subscriptions/") {
        given.to_owned()
    } else {
        named.to_string()
    }
}

pub fn virtual_machine(names: &Names, spec: &AzureMachineProviderSpec, extras: &Extras) -> VirtualMachine {
    let spot = spec.spot_vm_options.as_ref();
    let security = spec.security_profile.as_ref();
    VirtualMachine {
        location: Some(names.location.clone()),
        tags: Some(names.tags(spec)),
        zones: text(&spec.zone).map(|zone| vec![zone]),
        identity: text(&spec.managed_identity).map(|identity| identities(names, &identity)),
        plan: plan(spec),
        properties: Some(VirtualMachineProperties {
            hardware_profile: Some(HardwareProfile {
                vm_size: text(&spec.vm_size),
                ..HardwareProfile::default()
            }),
            storage_profile: Some(StorageProfile {
                image_reference: Some(image(names, spec)),
                os_disk: Some(os_disk(names, spec)),
                disk_controller_type: extras.nvme.then(|| "NVMe".into()),
                data_disks: (!spec.data_disks.is_empty()).then(|| {
                    spec.data_disks
                        .iter()
                        .map(|disk| data_disk(names, disk, &extras.kept))
                        .collect()
                }),
                ..StorageProfile::default()
            }),
            os_profile: Some(os_profile(names, spec, extras)),
            network_profile: Some(network_profile(names)),
            security_profile: security.and_then(security_profile),
            diagnostics_profile: diagnostics(spec),
            additional_capabilities: ultra_enabled(spec).map(|enabled| AdditionalCapabilities {
                ultra_ssd_enabled: Some(enabled),
                ..AdditionalCapabilities::default()
            }),
            availability_set: extras.availability_set.as_ref().map(SubResource::of),
            capacity_reservation: text(&spec.capacity_reservation_group_id).map(|id| CapacityReservationProfile {
                capacity_reservation_group: Some(SubResource::of(id)),
                ..CapacityReservationProfile::default()
            }),
            priority: spot.map(|_| "Spot".into()),
            eviction_policy: spot.map(|_| "Delete".into()),
            billing_profile: spot.and_then(|spot| {
                let price = spot.max_price.as_ref()?.value()?;
                Some(BillingProfile {
                    max_price: Some(price),
                    ..BillingProfile::default()
                })
            }),
            ..VirtualMachineProperties::default()
        }),
        ..VirtualMachine::default()
    }
}

fn identities(names: &Names, identity: &str) -> ManagedIdentities {
    let named = ResourceId::new(
        &names.subscription,
        &names.group,
        "Microsoft.ManagedIdentity",
        "userAssignedIdentities",
        identity,
    );
    ManagedIdentities {
        kind: Some("UserAssigned".into()),
        user_assigned_identities: Some(
            [(full_id(identity, &named), serde_json::Value::Object(Default::default()))].into(),
        ),
        ..ManagedIdentities::default()
    }
}

fn plan(spec: &AzureMachineProviderSpec) -> Option<Plan> {
    (spec.image.type_ == Some(ImageType::MarketplaceWithPlan)).then(|| Plan {
        name: Some(spec.image.sku.clone()),
        publisher: Some(spec.image.publisher.clone()),
        product: Some(spec.image.offer.clone()),
        ..Plan::default()
    })
}

fn image(names: &Names, spec: &AzureMachineProviderSpec) -> ImageReference {
    let image = &spec.image;
    let id = image.resource_id.as_str();
    if id.is_empty() {
        return ImageReference {
            publisher: word(Some(&image.publisher)),
            offer: word(Some(&image.offer)),
            sku: word(Some(&image.sku)),
            version: word(Some(&image.version)),
            ..ImageReference::default()
        };
    }
    let lower = id.to_lowercase();
    if lower.starts_with("/communitygalleries/") {
        return ImageReference {
            community_gallery_image_id: Some(id.to_owned()),
            ..ImageReference::default()
        };
    }
    if lower.starts_with("/sharedgalleries/") {
        return ImageReference {
            shared_gallery_image_id: Some(id.to_owned()),
            ..ImageReference::default()
        };
    }
    // Installers write the id from the group on.
    let full = if lower.starts_with("/resourcegroups/") {
        format!("/subscriptions/{}{id}", names.subscription)
    } else {
        id.to_owned()
    };
    ImageReference {
        id: Some(full),
        ..ImageReference::default()
    }
}

fn network_profile(names: &Names) -> NetworkProfile {
    NetworkProfile {
        network_interfaces: Some(vec![NetworkInterfaceReference {
            id: Some(names.nic_id().to_string()),
            properties: Some(NetworkInterfaceReferenceProperties {
                primary: Some(true),
                delete_option: Some("Delete".into()),
                ..NetworkInterfaceReferenceProperties::default()
            }),
            ..NetworkInterfaceReference::default()
        }]),
        ..NetworkProfile::default()
    }
}

fn security_profile(profile: &capstan_api::openshift::SecurityProfile) -> Option<SecurityProfile> {
    let settings = &profile.settings;
    let uefi = match &settings.security_type {
        Some(SecurityType::ConfidentialVm) => settings.confidential_vm.as_ref().map(|vm| &vm.uefi_settings),
        Some(SecurityType::TrustedLaunch) => settings.trusted_launch.as_ref().map(|launch| &launch.uefi_settings),
        _ => None,
    };
    let made = SecurityProfile {
        encryption_at_host: profile.encryption_at_host,
        security_type: settings
            .security_type
            .as_ref()
            .and_then(|kind| word(Some(kind.as_str()))),
        uefi_settings: uefi.map(uefi_settings),
        ..SecurityProfile::default()
    };
    (made != SecurityProfile::default()).then_some(made)
}

fn uefi_settings(spec: &UefiSpec) -> UefiSettings {
    UefiSettings {
        secure_boot_enabled: spec
            .secure_boot
            .as_ref()
            .map(|policy| *policy == SecureBootPolicy::Enabled),
        v_tpm_enabled: spec
            .virtualized_trusted_platform_module
            .as_ref()
            .map(|policy| *policy == VirtualizedTpmPolicy::Enabled),
        ..UefiSettings::default()
    }
}

fn diagnostics(spec: &AzureMachineProviderSpec) -> Option<DiagnosticsProfile> {
    let boot = spec.diagnostics.boot.as_ref()?;
    let storage_uri = match boot.storage_account_type {
        Some(BootDiagnosticsStorage::CustomerManaged) => Some(
            boot.customer_managed
                .as_ref()
                .map(|own| own.storage_account_uri.clone())
                .unwrap_or_default(),
        ),
        Some(BootDiagnosticsStorage::AzureManaged) => None,
        _ => return None,
    };
    Some(DiagnosticsProfile {
        boot_diagnostics: Some(BootDiagnostics {
            enabled: Some(true),
            storage_uri,
            ..BootDiagnostics::default()
        }),
        ..DiagnosticsProfile::default()
    })
}

/// An availability set with as many fault domains as the region has, at most [`FAULT_DOMAINS`] where that is not known.
pub fn availability_set(names: &Names, spec: &AzureMachineProviderSpec, fault_domains: Option<i32>) -> AvailabilitySet {
    let mut tags = names.tags(spec);
    // It is shared by the machines of a set, so it names none of them.
    tags.retain(|key, _| key != MACHINE_TAG && key != UID_TAG);
    AvailabilitySet {
        location: Some(names.location.clone()),
        tags: Some(tags),
        sku: Some(Sku {
            name: Some("Aligned".into()),
            ..Sku::default()
        }),
        properties: Some(AvailabilitySetProperties {
            platform_fault_domain_count: Some(fault_domains.unwrap_or(FAULT_DOMAINS)),
            platform_update_domain_count: Some(5),
            ..AvailabilitySetProperties::default()
        }),
        ..AvailabilitySet::default()
    }
}

#[cfg(test)]
mod tests;
