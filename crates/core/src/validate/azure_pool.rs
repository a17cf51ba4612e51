//! What an AzureMachinePool must fulfil beyond its schema, before anything is created in Azure.
//!
//! Rules that the API server checks by CEL are repeated here: `capstan check` has no API server, and an object may be
//! older than its CRD.

use std::collections::BTreeSet;

use capstan_api::azure::{
    AzureMachinePool, AzureMachinePoolSpec, AzureMachinePoolTemplate, BootDiagnosticsStorage, CachingType, DataDisk,
    Image, OrchestrationMode, OsDisk, SecurityType, SpotEvictionPolicy, StorageAccountType, VmIdentity,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::azure_cluster::name_error;
use super::{FieldError, Findings};
use crate::azure_names::AzureName;
use crate::disks::azure::{iops_range, is_name_suffix, mbps_range, size_range};
use crate::pool::{Amount, Budget, BudgetError};

/// Azure names instances after the pool: the longest computer name prefix for Linux leaves room for six characters.
const LONGEST_NAME: usize = 57;
const LARGEST_LUN: i32 = 63;
const SMALLEST_DISK: i32 = 4;

/// Everything that is wrong with a pool.
pub fn validate(pool: &AzureMachinePool) -> Findings {
    let mut findings = Findings::default();
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    if name.len() > LONGEST_NAME {
        findings.errors.push(FieldError::invalid(
            "metadata.name",
            name,
            format!("must be no more than {LONGEST_NAME} characters: Azure names the instances after it"),
        ));
    }
    spec(&pool.spec, &mut findings);
    names(&pool.spec.template, &mut findings.errors);
    findings
}

/// Names that become part of Resource Manager addresses.
fn names(template: &AzureMachinePoolTemplate, errors: &mut Vec<FieldError>) {
    let own = ("spec.template.subnetName".to_owned(), template.subnet_name.as_deref());
    let interfaces = template.network_interfaces.iter().enumerate();
    let interfaces = interfaces.map(|(n, interface)| {
        let path = format!("spec.template.networkInterfaces[{n}].subnetName");
        (path, interface.subnet_name.as_deref())
    });
    let named = std::iter::once(own).chain(interfaces);
    errors.extend(named.filter_map(|(path, name)| name_error(path, AzureName::Subnet, name)));
}

/// The two bounds of a rollout as written, or their defaults.
pub fn amounts(spec: &AzureMachinePoolSpec) -> Result<(Amount, Amount), BudgetError> {
    let rolling = spec.strategy.rolling_update.as_ref();
    let read = |field: &'static str, value: Option<&IntOrString>, default: u32| {
        let amount = match value {
            None => return Ok(Amount::Number(default)),
            Some(IntOrString::Int(number)) => Amount::try_from(i64::from(*number)),
            Some(IntOrString::String(text)) => text.parse(),
        };
        amount.map_err(|value| BudgetError::Unreadable { field, value })
    };
    let surge = read("maxSurge", rolling.and_then(|r| r.max_surge.as_ref()), 1)?;
    let unavailable = read("maxUnavailable", rolling.and_then(|r| r.max_unavailable.as_ref()), 0)?;
    Budget::check(surge, unavailable)?;
    Ok((surge, unavailable))
}

/// Whether the pool's instances need the Ultra capability: as written, else when a disk is one.
pub fn ultra_enabled(template: &AzureMachinePoolTemplate) -> Option<bool> {
    let written = template
        .additional_capabilities
        .as_ref()
        .and_then(|capabilities| capabilities.ultra_ssd_enabled);
    written.or_else(|| template.data_disks.iter().any(is_ultra).then_some(true))
}

fn is_ultra(disk: &DataDisk) -> bool {
    storage(disk) == Some(&StorageAccountType::UltraSsdLrs)
}

fn storage(disk: &DataDisk) -> Option<&StorageAccountType> {
    disk.managed_disk.as_ref()?.storage_account_type.as_ref()
}

fn spec(spec: &AzureMachinePoolSpec, findings: &mut Findings) {
    let errors = &mut findings.errors;
    if let Err(error) = amounts(spec) {
        errors.push(FieldError::forbidden("spec.strategy.rollingUpdate", error.to_string()));
    }
    let timeouts = [
        ("spec.nodeDrainTimeout", spec.node_drain_timeout),
        ("spec.nodeStartupTimeout", spec.node_startup_timeout),
    ];
    for (path, timeout) in timeouts {
        if timeout.is_some_and(|timeout| timeout.is_negative()) {
            let reason = "must not be negative; 0 means no limit";
            errors.push(FieldError::invalid(path, "negative", reason));
        }
    }
    identity(spec, errors);
    if spec.orchestration_mode == Some(OrchestrationMode::Flexible) && spec.zone_balance == Some(true) {
        errors.push(FieldError::forbidden(
            "spec.zoneBalance",
            "a Flexible scale set balances its zones by itself",
        ));
    }
    template(&spec.template, findings);
}

fn identity(spec: &AzureMachinePoolSpec, errors: &mut Vec<FieldError>) {
    let assigned = !spec.user_assigned_identities.is_empty();
    match &spec.identity {
        Some(VmIdentity::UserAssigned) if !assigned => errors.push(FieldError::required(
            "spec.userAssignedIdentities",
            "must name at least one identity when identity is UserAssigned",
        )),
        Some(VmIdentity::UserAssigned) => {}
        _ if assigned => errors.push(FieldError::forbidden(
            "spec.userAssignedIdentities",
            "can be set only when identity is UserAssigned",
        )),
        _ => {}
    }
    let role = spec.system_assigned_identity_role.is_some() || spec.role_assignment_name.is_some();
    if role && spec.identity != Some(VmIdentity::SystemAssigned) {
        errors.push(FieldError::forbidden(
            "spec.systemAssignedIdentityRole",
            "can be set only when identity is SystemAssigned",
        ));
    }
    let named = |name: Option<&String>| name.is_some_and(|name| !name.is_empty());
    let role_name = spec
        .system_assigned_identity_role
        .as_ref()
        .and_then(|role| role.name.as_ref());
    if named(spec.role_assignment_name.as_ref()) && named(role_name) {
        errors.push(FieldError::forbidden(
            "spec.roleAssignmentName",
            "cannot set both roleAssignmentName and systemAssignedIdentityRole.name",
        ));
    }
    for (n, identity) in spec.user_assigned_identities.iter().enumerate() {
        if identity.provider_id.is_empty() {
            let path = format!("spec.userAssignedIdentities[{n}].providerID");
            errors.push(FieldError::required(path, "must be the resource id of an identity"));
        }
    }
}

fn template(template: &AzureMachinePoolTemplate, findings: &mut Findings) {
    let errors = &mut findings.errors;
    let at = |field: &str| format!("spec.template.{field}");
    if template.vm_size.is_empty() {
        errors.push(FieldError::required(
            at("vmSize"),
            "name a size, such as Standard_D4s_v3",
        ));
    }
    image(template.image.as_ref(), errors);
    os_disk(&template.os_disk, errors);
    data_disks(template, errors);
    ssh_key(template.ssh_public_key.as_deref(), errors);
    if let Some(timeout) = template
        .terminate_notification_timeout
        .filter(|minutes| !(5..=15).contains(minutes))
    {
        errors.push(FieldError::invalid(
            at("terminateNotificationTimeout"),
            timeout,
            "must be between 5 and 15 minutes",
        ));
    }
    if !template.network_interfaces.is_empty() {
        if template.subnet_name.as_deref().is_some_and(|name| !name.is_empty()) {
            errors.push(FieldError::forbidden(
                at("subnetName"),
                "cannot be set together with networkInterfaces",
            ));
        }
        if template.accelerated_networking.is_some() {
            errors.push(FieldError::forbidden(
                at("acceleratedNetworking"),
                "cannot be set together with networkInterfaces",
            ));
        }
    }
    for (n, interface) in template.network_interfaces.iter().enumerate() {
        if let Some(count) = interface.private_ip_configs.filter(|count| *count < 1) {
            let path = at(&format!("networkInterfaces[{n}].privateIPConfigs"));
            errors.push(FieldError::invalid(path, count, "must be at least 1"));
        }
    }
    let evicted = template.spot_vm_options.as_ref();
    let kept = evicted.and_then(|spot| spot.eviction_policy.as_ref()) == Some(&SpotEvictionPolicy::Deallocate);
    if kept && template.os_disk.diff_disk_settings.is_some() {
        errors.push(FieldError::invalid(
            at("spotVMOptions.evictionPolicy"),
            "Deallocate",
            "Azure cannot deallocate a machine whose operating system disk is ephemeral: use Delete",
        ));
    }
    security(template, errors);
    diagnostics(template, errors);
    if template.disable_vm_bootstrap_extension == Some(false) {
        findings.warnings.push(format!(
            "{}: Capstan adds no extension that reports how bootstrapping went: it waits for the Node, and reports one that does not join",
            at("disableVMBootstrapExtension")
        ));
    }
}

fn image(image: Option<&Image>, errors: &mut Vec<FieldError>) {
    let Some(image) = image else { return };
    let kinds = [
        image.id.is_some(),
        image.shared_gallery.is_some(),
        image.marketplace.is_some(),
        image.compute_gallery.is_some(),
    ];
    match kinds.iter().filter(|set| **set).count() {
        1 => {}
        0 => errors.push(FieldError::required(
            "spec.template.image",
            "set one of id, marketplace, sharedGallery and computeGallery",
        )),
        _ => errors.push(FieldError::forbidden(
            "spec.template.image",
            "only one of id, marketplace, sharedGallery and computeGallery can be set",
        )),
    }
    if image.id.as_deref() == Some("") {
        errors.push(FieldError::required(
            "spec.template.image.id",
            "must be an image's resource id",
        ));
    }
}

fn os_disk(disk: &OsDisk, errors: &mut Vec<FieldError>) {
    let at = |field: &str| format!("spec.template.osDisk.{field}");
    if let Some(size) = disk.disk_size_gb.filter(|size| !(1..=2048).contains(size)) {
        errors.push(FieldError::invalid(
            at("diskSizeGB"),
            size,
            "must be between 1 and 2048",
        ));
    }
    let managed = disk.managed_disk.as_ref();
    let kind = managed.and_then(|managed| managed.storage_account_type.as_ref());
    if kind.is_some_and(StorageAccountType::is_provisioned) {
        let kind = kind.map(StorageAccountType::as_str).unwrap_or_default();
        errors.push(FieldError::invalid(
            at("managedDisk.storageAccountType"),
            kind,
            "cannot be used for an operating system disk",
        ));
    }
    let encrypted = managed.is_some_and(|managed| managed.disk_encryption_set.is_some());
    if disk.diff_disk_settings.is_some() && encrypted {
        errors.push(FieldError::forbidden(
            at("managedDisk.diskEncryptionSet"),
            "an ephemeral disk cannot be encrypted with a key of your own",
        ));
    }
}

fn data_disks(template: &AzureMachinePoolTemplate, errors: &mut Vec<FieldError>) {
    let (mut suffixes, mut luns) = (BTreeSet::new(), BTreeSet::new());
    for (n, disk) in template.data_disks.iter().enumerate() {
        let at = |field: &str| format!("spec.template.dataDisks[{n}].{field}");
        if !is_name_suffix(&disk.name_suffix) {
            let detail = "must be 1 to 80 letters, digits, '_', '.' or '-', not starting or ending with punctuation";
            errors.push(FieldError::invalid(at("nameSuffix"), disk.name_suffix.as_str(), detail));
        } else if !suffixes.insert(disk.name_suffix.as_str()) {
            errors.push(FieldError::invalid(
                at("nameSuffix"),
                disk.name_suffix.as_str(),
                "must be unique",
            ));
        }
        if let Some(lun) = disk.lun {
            if !(0..=LARGEST_LUN).contains(&lun) {
                errors.push(FieldError::invalid(at("lun"), lun, "must be between 0 and 63"));
            } else if !luns.insert(lun) {
                errors.push(FieldError::invalid(at("lun"), lun, "must be unique"));
            }
        }
        data_disk(disk, &at, errors);
    }
    let refused = template
        .additional_capabilities
        .as_ref()
        .and_then(|c| c.ultra_ssd_enabled)
        == Some(false);
    if refused && template.data_disks.iter().any(is_ultra) {
        errors.push(FieldError::invalid(
            "spec.template.additionalCapabilities.ultraSSDEnabled",
            false,
            "must be true or unset when a data disk is UltraSSD_LRS",
        ));
    }
}

fn data_disk(disk: &DataDisk, at: &dyn Fn(&str) -> String, errors: &mut Vec<FieldError>) {
    let standard = StorageAccountType::PremiumLrs;
    let kind = storage(disk).unwrap_or(&standard);
    let (least, most) = size_range(kind);
    let least = if kind.is_provisioned() {
        least
    } else {
        least.max(SMALLEST_DISK)
    };
    if !(least..=most).contains(&disk.disk_size_gb) {
        let detail = format!("must be between {least} and {most}");
        errors.push(FieldError::invalid(at("diskSizeGB"), disk.disk_size_gb, detail));
    }
    let caching = disk
        .caching_type
        .as_ref()
        .filter(|caching| **caching != CachingType::None);
    if let Some(caching) = caching.filter(|_| kind.is_provisioned()) {
        let detail = format!(
            "cachingType '{caching}' is not supported when storageAccountType is '{kind}'. Allowed values are: 'None'"
        );
        errors.push(FieldError::invalid(at("cachingType"), caching.as_str(), detail));
    }
    performance(disk, kind, at, errors);
}

fn performance(disk: &DataDisk, kind: &StorageAccountType, at: &dyn Fn(&str) -> String, errors: &mut Vec<FieldError>) {
    let only = "can be set only for UltraSSD_LRS and PremiumV2_LRS";
    if let Some(iops) = disk.disk_iops_read_write {
        match iops_range(kind, disk.disk_size_gb) {
            None => errors.push(FieldError::forbidden(at("diskIOPSReadWrite"), only)),
            Some((least, most)) if !(least..=most).contains(&iops) => {
                let detail = format!("must be between {least} and {most} for {} GiB", disk.disk_size_gb);
                errors.push(FieldError::invalid(at("diskIOPSReadWrite"), iops, detail));
            }
            Some(_) => {}
        }
    }
    if let Some(mbps) = disk.disk_mbps_read_write {
        let iops = disk
            .disk_iops_read_write
            .or_else(|| iops_range(kind, disk.disk_size_gb).map(|(_, most)| most));
        match mbps_range(kind, iops.unwrap_or_default()) {
            None => errors.push(FieldError::forbidden(at("diskMBpsReadWrite"), only)),
            Some((least, most)) if !(least..=most).contains(&mbps) => {
                let detail = format!("must be between {least} and {most}");
                errors.push(FieldError::invalid(at("diskMBpsReadWrite"), mbps, detail));
            }
            Some(_) => {}
        }
    }
}

/// The key is base64 around the line that ssh-keygen writes: kind, base64 blob that begins with the kind again, comment.
fn ssh_key(key: Option<&str>, errors: &mut Vec<FieldError>) {
    let Some(key) = key.filter(|key| !key.is_empty()) else {
        return;
    };
    let wrong = |detail: &str| FieldError::invalid("spec.template.sshPublicKey", "…", detail);
    let Some(line) = base64(key).and_then(|bytes| String::from_utf8(bytes).ok()) else {
        errors.push(wrong(
            "must be the base64 encoding of a public key: base64 -w0 < ~/.ssh/id_rsa.pub",
        ));
        return;
    };
    let mut words = line.split_whitespace();
    let (kind, blob) = (
        words.next().unwrap_or_default(),
        words.next().and_then(base64).unwrap_or_default(),
    );
    let named = blob.get(4..4 + kind.len()) == Some(kind.as_bytes());
    if kind.is_empty() || !named {
        errors.push(wrong("is not an SSH public key once decoded"));
    }
}

/// Standard base64 with padding. Small enough to keep this crate free of one more dependency.
fn base64(text: &str) -> Option<Vec<u8>> {
    let text: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let body = text
        .strip_suffix(b"==")
        .or_else(|| text.strip_suffix(b"="))
        .unwrap_or(&text);
    if !text.len().is_multiple_of(4) || body.is_empty() {
        return None;
    }
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => Some(u32::from(byte - b'A')),
        b'a'..=b'z' => Some(u32::from(byte - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(byte - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(body.len() * 3 / 4);
    for chunk in body.chunks(4) {
        let bits = chunk.iter().try_fold(0, |bits, byte| Some(bits << 6 | value(*byte)?))?;
        let bits: u32 = bits << (6 * (4 - chunk.len()));
        bytes.extend(&bits.to_be_bytes()[1..chunk.len()]);
    }
    Some(bytes)
}

fn security(template: &AzureMachinePoolTemplate, errors: &mut Vec<FieldError>) {
    let Some(profile) = &template.security_profile else {
        return;
    };
    let trusted = matches!(
        profile.security_type,
        Some(SecurityType::TrustedLaunch | SecurityType::ConfidentialVm)
    );
    if profile.uefi_settings.is_some() && !trusted {
        errors.push(FieldError::forbidden(
            "spec.template.securityProfile.uefiSettings",
            "can be set only when securityType is TrustedLaunch or ConfidentialVM",
        ));
    }
    let vtpm = profile
        .uefi_settings
        .as_ref()
        .and_then(|settings| settings.vtpm_enabled);
    if profile.security_type == Some(SecurityType::ConfidentialVm) && vtpm != Some(true) {
        errors.push(FieldError::required(
            "spec.template.securityProfile.uefiSettings.vTpmEnabled",
            "must be true when securityType is ConfidentialVM",
        ));
    }
}

fn diagnostics(template: &AzureMachinePoolTemplate, errors: &mut Vec<FieldError>) {
    let Some(boot) = template
        .diagnostics
        .as_ref()
        .and_then(|diagnostics| diagnostics.boot.as_ref())
    else {
        return;
    };
    let user_managed = boot.storage_account_type == BootDiagnosticsStorage::UserManaged;
    if user_managed != boot.user_managed.is_some() {
        errors.push(FieldError::invalid(
            "spec.template.diagnostics.boot.userManaged",
            boot.storage_account_type.as_str(),
            "must be set exactly when storageAccountType is UserManaged",
        ));
    }
}

#[cfg(test)]
#[path = "azure_pool_tests.rs"]
mod tests;
