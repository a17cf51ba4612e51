//! The parts of the virtual machine profile.

use capstan_api::azure::{
    AzureMachinePool, BootDiagnosticsStorage, Image, ManagedDisk, NetworkInterface, SpotEvictionPolicy, SubnetRole,
    SubnetSpec,
};
use capstan_azure::model::{
    BillingProfile, BootDiagnostics, DiagnosticsProfile, DiffDiskSettings, DiskSecurityProfile, Extension,
    ExtensionProfile, ExtensionProperties, ImageReference, LinuxConfiguration, ManagedDiskParameters, Plan,
    ScaleSetDataDisk, ScaleSetIpConfiguration, ScaleSetIpConfigurationProperties, ScaleSetNetworkConfiguration,
    ScaleSetNetworkConfigurationProperties, ScaleSetNetworkProfile, ScaleSetOsDisk, ScaleSetOsProfile,
    ScaleSetStorageProfile, ScheduledEventsProfile, SecurityProfile, SshConfiguration, SshPublicKey, SubResource,
    TerminateNotificationProfile, UefiSettings, VirtualMachineProfile, WindowsConfiguration,
};

use kube::ResourceExt;

use super::{Input, NETWORK_API, encode, marketplace};
use crate::error::Error;

const ADMIN: &str = "capi";
/// Azure adds six characters of its own. Linux has names of up to 64, Windows of up to 15. A shorter prefix for Linux
/// would give the machines of two pools the same names.
const LINUX_PREFIX: usize = 58;
const WINDOWS_PREFIX: usize = 9;
/// Where Cluster API publishes images for every Kubernetes version.
const COMMUNITY_GALLERY: &str = "ClusterAPI-f72ceb4f-5159-4c26-a0fe-2ea738f0d019";

/// Names the edition of Windows Server for the default image, as CAPZ has it.
const WINDOWS_ANNOTATION: &str = "windowsServerVersion";
/// The edition of Windows Server where the pool names none.
const DEFAULT_WINDOWS: &str = "2022";

/// The image as the user means it, as Azure wants it, and the plan that it is sold under.
pub fn image(input: &Input<'_>) -> Result<(Image, ImageReference, Option<Plan>), Error> {
    let image = match &input.pool.spec.template.image {
        Some(image) => image.clone(),
        None => default_image(input)?,
    };
    let (reference, plan) = reference(&image, input.subscription)?;
    Ok((image, reference, plan))
}

fn default_image(input: &Input<'_>) -> Result<Image, Error> {
    let version = input
        .machine_pool
        .spec
        .template
        .spec
        .version
        .as_deref()
        .unwrap_or_default();
    let version = version.trim_start_matches('v');
    if version.is_empty() {
        let text =
            "spec.template.image: Required value: the MachinePool has no version that an image could be chosen by";
        return Err(Error::Invalid(text.to_owned()));
    }
    let windows = input.pool.spec.template.os_disk.os_type.as_deref() == Some("Windows");
    if let Some(image) = marketplace::image(version, windows) {
        return Ok(image);
    }
    let name = if windows {
        let year = windows_year(input.pool)?;
        format!("capi-win-{year}-containerd")
    } else {
        "capi-ubun2-2404".to_owned()
    };
    Ok(Image {
        compute_gallery: Some(capstan_api::azure::ComputeGalleryImage {
            gallery: COMMUNITY_GALLERY.to_owned(),
            name,
            version: version.to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// Returns the annotation that names the edition of Windows Server, if it counts: it is about default images of Windows.
pub fn windows_annotation(pool: &AzureMachinePool) -> Option<&str> {
    let windows = pool.spec.template.os_disk.os_type.as_deref() == Some("Windows");
    let text = pool.annotations().get(WINDOWS_ANNOTATION)?;
    Some(text.as_str()).filter(|text| windows && !text.is_empty())
}

/// Returns the edition of Windows Server that the annotation of the pool names, as CAPZ reads it: `windows-2019`.
fn windows_year(pool: &AzureMachinePool) -> Result<&str, Error> {
    let Some(text) = windows_annotation(pool) else {
        return Ok(DEFAULT_WINDOWS);
    };
    let year = text.strip_prefix("windows-").unwrap_or_default();
    if year.len() == 4 && year.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(year);
    }
    Err(Error::Invalid(format!(
        "metadata.annotations[{WINDOWS_ANNOTATION}]: Invalid value: {text:?}: write it as windows-2022"
    )))
}

fn reference(image: &Image, subscription: &str) -> Result<(ImageReference, Option<Plan>), Error> {
    let mut reference = ImageReference::default();
    let mut plan = None;
    let sold = |publisher: &str, offer: &str, sku: &str| Plan {
        name: Some(sku.to_owned()),
        publisher: Some(publisher.to_owned()),
        product: Some(offer.to_owned()),
        ..Default::default()
    };
    if let Some(id) = &image.id {
        reference.id = Some(id.clone());
    } else if let Some(market) = &image.marketplace {
        reference.publisher = Some(market.publisher.clone());
        reference.offer = Some(market.offer.clone());
        reference.sku = Some(market.sku.clone());
        reference.version = Some(market.version.clone());
        plan = market
            .third_party_image
            .then(|| sold(&market.publisher, &market.offer, &market.sku));
    } else if let Some(gallery) = &image.compute_gallery {
        let version = format!(
            "{}/images/{}/versions/{}",
            gallery.gallery, gallery.name, gallery.version
        );
        match &gallery.resource_group {
            Some(group) => {
                let owner = gallery.subscription_id.as_deref().unwrap_or(subscription);
                reference.id = Some(gallery_id(owner, group, &version));
            }
            // CAPZ reads this spelling only, and replaces every machine of a pool whose image it cannot read.
            None => {
                let id = format!(
                    "/CommunityGalleries/{}/Images/{}/Versions/{}",
                    gallery.gallery, gallery.name, gallery.version
                );
                reference.community_gallery_image_id = Some(id);
            }
        }
        plan = gallery
            .plan
            .as_ref()
            .map(|plan| sold(&plan.publisher, &plan.offer, &plan.sku));
    } else if let Some(shared) = &image.shared_gallery {
        let version = format!("{}/images/{}/versions/{}", shared.gallery, shared.name, shared.version);
        reference.id = Some(gallery_id(&shared.subscription_id, &shared.resource_group, &version));
        if let (Some(publisher), Some(offer), Some(sku)) = (&shared.publisher, &shared.offer, &shared.sku) {
            plan = Some(sold(publisher, offer, sku));
        }
    } else {
        return Err(Error::Invalid(
            "spec.template.image: Required value: names no image".to_owned(),
        ));
    }
    Ok((reference, plan))
}

fn gallery_id(subscription: &str, group: &str, version: &str) -> String {
    format!("/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute/galleries/{version}")
}

pub fn os(input: &Input<'_>) -> ScaleSetOsProfile {
    let template = &input.pool.spec.template;
    let windows = template.os_disk.os_type.as_deref() == Some("Windows");
    let prefix: String = input
        .name()
        .chars()
        .take(if windows { WINDOWS_PREFIX } else { LINUX_PREFIX })
        .collect();
    let key = template.ssh_public_key.as_deref().and_then(super::ssh::decode);
    let linux = || LinuxConfiguration {
        disable_password_authentication: Some(true),
        ssh: key.map(|key| SshConfiguration {
            public_keys: Some(vec![SshPublicKey {
                path: Some(format!("/home/{ADMIN}/.ssh/authorized_keys")),
                key_data: Some(key),
                ..Default::default()
            }]),
            ..Default::default()
        }),
        ..Default::default()
    };
    ScaleSetOsProfile {
        computer_name_prefix: Some(prefix.trim_end_matches('-').to_owned()),
        admin_username: Some(ADMIN.to_owned()),
        custom_data: Some(encode(input.bootstrap)),
        linux_configuration: (!windows).then(linux),
        windows_configuration: windows.then(|| WindowsConfiguration {
            enable_automatic_updates: Some(false),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn managed_disk(disk: Option<&ManagedDisk>) -> Option<ManagedDiskParameters> {
    let disk = disk?;
    let set = |set: &Option<capstan_api::azure::DiskEncryptionSet>| {
        set.as_ref().and_then(|set| set.id.as_ref()).map(SubResource::of)
    };
    Some(ManagedDiskParameters {
        storage_account_type: disk.storage_account_type.as_ref().map(|kind| kind.as_str().to_owned()),
        disk_encryption_set: set(&disk.disk_encryption_set),
        security_profile: disk.security_profile.as_ref().map(|profile| DiskSecurityProfile {
            security_encryption_type: profile.security_encryption_type.as_ref().map(ToString::to_string),
            disk_encryption_set: set(&profile.disk_encryption_set),
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub fn storage(input: &Input<'_>, image: ImageReference) -> ScaleSetStorageProfile {
    let template = &input.pool.spec.template;
    let os = &template.os_disk;
    let os_disk = ScaleSetOsDisk {
        os_type: Some(os.os_type.clone().unwrap_or_else(|| "Linux".to_owned())),
        create_option: Some("FromImage".to_owned()),
        caching: os.caching_type.as_ref().map(ToString::to_string),
        disk_size_gb: os.disk_size_gb,
        managed_disk: managed_disk(os.managed_disk.as_ref()),
        diff_disk_settings: os.diff_disk_settings.as_ref().map(|settings| DiffDiskSettings {
            option: Some(settings.option.to_string()),
            placement: settings.placement.as_ref().map(ToString::to_string),
            ..Default::default()
        }),
        ..Default::default()
    };
    let taken: Vec<i32> = template.data_disks.iter().filter_map(|disk| disk.lun).collect();
    let mut free = (0..).filter(|lun| !taken.contains(lun));
    let disks = template.data_disks.iter().map(|disk| ScaleSetDataDisk {
        name: Some(format!("{}_{}", input.name(), disk.name_suffix)),
        lun: disk.lun.or_else(|| free.next()),
        create_option: Some("Empty".to_owned()),
        caching: disk.caching_type.as_ref().map(ToString::to_string),
        disk_size_gb: Some(disk.disk_size_gb),
        disk_iops_read_write: disk.disk_iops_read_write,
        disk_mbps_read_write: disk.disk_mbps_read_write,
        managed_disk: managed_disk(disk.managed_disk.as_ref()),
        ..Default::default()
    });
    let disks: Vec<_> = disks.collect();
    ScaleSetStorageProfile {
        image_reference: Some(image),
        os_disk: Some(os_disk),
        data_disks: (!disks.is_empty()).then_some(disks),
        ..Default::default()
    }
}

pub fn network(input: &Input<'_>) -> Result<ScaleSetNetworkProfile, Error> {
    let template = &input.pool.spec.template;
    let plain = [NetworkInterface {
        subnet_name: template.subnet_name.clone(),
        accelerated_networking: template.accelerated_networking,
        private_ip_configs: None,
    }];
    let wanted = if template.network_interfaces.is_empty() {
        &plain[..]
    } else {
        &template.network_interfaces[..]
    };
    let made = wanted
        .iter()
        .enumerate()
        .map(|(n, interface)| network_interface(input, n, interface));
    Ok(ScaleSetNetworkProfile {
        network_api_version: input.flexible().then(|| NETWORK_API.to_owned()),
        network_interface_configurations: Some(made.collect::<Result<_, _>>()?),
        ..Default::default()
    })
}

fn network_interface(
    input: &Input<'_>,
    n: usize,
    interface: &NetworkInterface,
) -> Result<ScaleSetNetworkConfiguration, Error> {
    let primary = n == 0;
    let subnet = subnet_id(input, interface.subnet_name.as_deref().filter(|name| !name.is_empty()))?;
    let balancer = primary.then(|| outbound_pool(input)).flatten();
    let count = interface.private_ip_configs.unwrap_or(1).max(1);
    let ipv6 = has_ipv6(input).then(|| ScaleSetIpConfiguration {
        name: Some("ipConfigv6".to_owned()),
        properties: Some(ScaleSetIpConfigurationProperties {
            primary: Some(false),
            private_ip_address_version: Some("IPv6".to_owned()),
            subnet: Some(SubResource::of(&subnet)),
            ..Default::default()
        }),
        ..Default::default()
    });
    let ips = (0..count).map(|ip| ScaleSetIpConfiguration {
        name: Some(format!("ipConfig{ip}")),
        properties: Some(ScaleSetIpConfigurationProperties {
            primary: Some(ip == 0),
            private_ip_address_version: Some("IPv4".to_owned()),
            subnet: Some(SubResource::of(&subnet)),
            load_balancer_backend_address_pools: balancer.clone().filter(|_| ip == 0).map(|pool| vec![pool]),
            ..Default::default()
        }),
        ..Default::default()
    });
    Ok(ScaleSetNetworkConfiguration {
        name: Some(format!("{}-nic-{n}", input.name())),
        properties: Some(ScaleSetNetworkConfigurationProperties {
            primary: Some(primary),
            enable_accelerated_networking: Some(
                interface.accelerated_networking.unwrap_or(input.accelerated_networking),
            ),
            // Network plugins without encapsulation route pods' packets through the interfaces.
            enable_ip_forwarding: Some(true),
            ip_configurations: Some(ips.chain(ipv6).collect()),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// Whether the cluster's virtual network has an IPv6 range: every node of such a cluster needs an address of both kinds.
fn has_ipv6(input: &Input<'_>) -> bool {
    let vnet = &input.azure_cluster.spec.network_spec.vnet;
    vnet.cidr_blocks.iter().any(|block| block.contains(':'))
}

/// The subnet of that name, or the first that nodes may live in.
fn subnet_id(input: &Input<'_>, name: Option<&str>) -> Result<String, Error> {
    let network = &input.azure_cluster.spec.network_spec;
    let for_nodes = |subnet: &&SubnetSpec| matches!(subnet.role, SubnetRole::Node | SubnetRole::Cluster);
    let found = match name {
        Some(name) => network.subnets.iter().find(|subnet| subnet.name == name),
        None => network.subnets.iter().find(for_nodes),
    };
    if let Some(id) = found.and_then(|subnet| subnet.id.clone()).filter(|id| !id.is_empty()) {
        return Ok(id);
    }
    let Some(subnet) = found.map(|subnet| subnet.name.as_str()).or(name) else {
        let text = "networkSpec.subnets of the AzureCluster has none with the role node: add one, or name a subnet";
        return Err(Error::NotReady(text.to_owned()));
    };
    let group = network.vnet.resource_group.clone().filter(|group| !group.is_empty());
    let group = group.unwrap_or_else(|| input.group());
    let vnet = input.id("Microsoft.Network", &group, "virtualNetworks", &vnet_name(input));
    Ok(vnet.child("subnets", subnet).to_string())
}

fn vnet_name(input: &Input<'_>) -> String {
    let name = input.azure_cluster.spec.network_spec.vnet.name.as_str();
    if name.is_empty() {
        format!("{}-vnet", input.cluster_name)
    } else {
        name.to_owned()
    }
}

/// The backend pool through which nodes reach the outside, where the cluster has one.
fn outbound_pool(input: &Input<'_>) -> Option<SubResource> {
    let balancer = input.azure_cluster.spec.network_spec.node_outbound_lb.as_ref()?;
    let name = balancer
        .name
        .as_deref()
        .filter(|name| !name.is_empty())
        .unwrap_or(input.cluster_name);
    let pool = balancer
        .backend_pool
        .name
        .clone()
        .unwrap_or_else(|| format!("{name}-outboundBackendPool"));
    let id = match balancer.id.as_deref().filter(|id| !id.is_empty()) {
        Some(id) => format!("{id}/backendAddressPools/{pool}"),
        None => input
            .id("Microsoft.Network", &input.group(), "loadBalancers", name)
            .child("backendAddressPools", &pool)
            .to_string(),
    };
    Some(SubResource::of(id))
}

pub fn security(input: &Input<'_>) -> Option<SecurityProfile> {
    let profile = input.pool.spec.template.security_profile.as_ref()?;
    Some(SecurityProfile {
        encryption_at_host: profile.encryption_at_host,
        security_type: profile.security_type.as_ref().map(ToString::to_string),
        uefi_settings: profile.uefi_settings.as_ref().map(|settings| UefiSettings {
            secure_boot_enabled: settings.secure_boot_enabled,
            v_tpm_enabled: settings.vtpm_enabled,
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// Boot diagnostics, which Azure stores by itself unless the pool says otherwise.
pub fn diagnostics(input: &Input<'_>) -> Option<DiagnosticsProfile> {
    let managed = DiagnosticsProfile {
        boot_diagnostics: Some(BootDiagnostics {
            enabled: Some(true),
            ..Default::default()
        }),
        ..Default::default()
    };
    let diagnostics = input.pool.spec.template.diagnostics.as_ref();
    let Some(boot) = diagnostics.and_then(|diagnostics| diagnostics.boot.as_ref()) else {
        return Some(managed);
    };
    let storage_uri = boot
        .user_managed
        .as_ref()
        .map(|managed| managed.storage_account_uri.clone());
    Some(DiagnosticsProfile {
        boot_diagnostics: Some(BootDiagnostics {
            enabled: Some(boot.storage_account_type != BootDiagnosticsStorage::Disabled),
            storage_uri,
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub fn extensions(input: &Input<'_>) -> Option<ExtensionProfile> {
    let wanted = &input.pool.spec.template.vm_extensions;
    let object = |map: &std::collections::BTreeMap<String, String>| {
        (!map.is_empty()).then(|| {
            map.iter()
                .map(|(k, v)| (k.clone(), serde_json::Value::from(v.clone())))
                .collect()
        })
    };
    let extensions = wanted.iter().map(|extension| Extension {
        name: Some(extension.name.clone()),
        properties: Some(ExtensionProperties {
            publisher: Some(extension.publisher.clone()),
            kind: Some(extension.name.clone()),
            type_handler_version: Some(extension.version.clone()),
            settings: object(&extension.settings),
            protected_settings: object(&extension.protected_settings),
            ..Default::default()
        }),
        ..Default::default()
    });
    let extensions: Vec<_> = extensions.collect();
    (!extensions.is_empty()).then(|| ExtensionProfile {
        extensions: Some(extensions),
        ..Default::default()
    })
}

pub fn terminate_notification(input: &Input<'_>) -> Option<ScheduledEventsProfile> {
    let minutes = input.pool.spec.template.terminate_notification_timeout?;
    Some(ScheduledEventsProfile {
        terminate_notification_profile: Some(TerminateNotificationProfile {
            enable: Some(true),
            not_before_timeout: Some(format!("PT{minutes}M")),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// A profile with only the fields of spot machines set, if any.
pub fn spot(input: &Input<'_>) -> Result<VirtualMachineProfile, Error> {
    let Some(spot) = &input.pool.spec.template.spot_vm_options else {
        return Ok(VirtualMachineProfile::default());
    };
    let price = match spot.max_price.as_ref().filter(|price| !price.to_string().is_empty()) {
        None => None,
        Some(price) => Some(price.value().ok_or_else(|| {
            let text = price.to_string();
            Error::Invalid(format!(
                "spec.template.spotVMOptions.maxPrice: Invalid value: {text:?}: must be a number, such as 0.25 or 250m"
            ))
        })?),
    };
    // Azure refuses to deallocate an instance whose OS disk is on its host.
    let ephemeral = input.pool.spec.template.os_disk.diff_disk_settings.is_some();
    let default = match ephemeral {
        true => SpotEvictionPolicy::Delete,
        false => SpotEvictionPolicy::Deallocate,
    };
    let policy = spot.eviction_policy.as_ref().unwrap_or(&default);
    Ok(VirtualMachineProfile {
        priority: Some("Spot".to_owned()),
        eviction_policy: Some(policy.to_string()),
        billing_profile: price.map(|price| BillingProfile {
            max_price: Some(price),
            ..Default::default()
        }),
        ..Default::default()
    })
}
