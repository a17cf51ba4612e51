//! What Azure does not take together. Each rule is known beforehand, so a machine is refused before its first resource.

use capstan_api::disk::StorageAccountType;
use capstan_api::openshift::{
    AzureMachineProviderSpec, BootDiagnosticsStorage, SecureBootPolicy, SecurityEncryptionType, SecurityProfile,
    SecurityType, VirtualizedTpmPolicy,
};

use super::{FieldError, kind_of};
use crate::disks::azure::ultra_enabled;

const SETTINGS: &str = "providerSpec.securityProfile.settings";
const ENCRYPTION_TYPE: &str = "providerSpec.osDisk.managedDisk.securityProfile.securityEncryptionType";

/// Azure takes this many tags on a resource; the controller needs some of them.
const MAX_TAGS: usize = 50 - OWN_TAGS;

/// The cluster's tag, the machine's, its UID, and the deletion policy of a disk.
const OWN_TAGS: usize = 4;

pub fn validate(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    availability_set(spec, errors);
    disks(spec, errors);
    security(spec, errors);
    diagnostics(spec, errors);
    tags(spec, errors);
    price(spec, errors);
}

fn is_set(value: Option<&String>) -> bool {
    value.is_some_and(|value| !value.is_empty())
}

fn availability_set(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let Some(set) = spec.availability_set.as_deref().filter(|set| !set.is_empty()) else {
        return;
    };
    for other in kept_out_of_sets(spec) {
        let detail = format!("Azure takes no machine with {other} into an availability set: leave one of them out");
        errors.push(FieldError::invalid("providerSpec.availabilitySet", set, detail));
    }
}

/// Returns what keeps a machine out of every availability set.
pub fn kept_out_of_sets(spec: &AzureMachineProviderSpec) -> Vec<&'static str> {
    let excluded = [
        (is_set(spec.zone.as_ref()), "a zone"),
        (spec.spot_vm_options.is_some(), "spotVMOptions"),
        (
            ultra_enabled(spec) == Some(true),
            "Ultra disks or ultraSSDCapability Enabled",
        ),
        (has_premium_v2(spec), "PremiumV2_LRS disks"),
        (
            is_set(spec.capacity_reservation_group_id.as_ref()),
            "capacityReservationGroupID",
        ),
    ];
    let given = excluded.into_iter().filter(|(given, _)| *given);
    given.map(|(_, other)| other).collect()
}

pub fn has_premium_v2(spec: &AzureMachineProviderSpec) -> bool {
    spec.data_disks
        .iter()
        .any(|disk| kind_of(disk) == StorageAccountType::PremiumV2Lrs)
}

fn disks(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    if spec.os_disk.managed_disk.storage_account_type == Some(StorageAccountType::PremiumV2Lrs) {
        errors.push(FieldError::invalid(
            "providerSpec.osDisk.managedDisk.storageAccountType",
            "PremiumV2_LRS",
            "PremiumV2_LRS can be used for data disks only, choose another type for the OS disk",
        ));
    }
}

fn security(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let profile = spec.security_profile.clone().unwrap_or_default();
    let given = |kind: &&SecurityType| !kind.as_str().is_empty();
    let kind = profile.settings.security_type.as_ref().filter(given);
    let encryption = &spec.os_disk.managed_disk.security_profile.security_encryption_type;
    let encryption = encryption.as_ref().filter(|given| !given.as_str().is_empty());
    if let Some(unknown) = encryption.filter(|encryption| !encryption.is_known()) {
        let detail = "must be VMGuestStateOnly, DiskWithVMGuestState or omitted";
        errors.push(FieldError::invalid(ENCRYPTION_TYPE, unknown.as_str(), detail));
        return;
    }
    if encryption.is_some() && spec.security_profile.is_none() {
        errors.push(FieldError::required(
            "providerSpec.securityProfile",
            "securityProfile should be set when osDisk.managedDisk.securityProfile.securityEncryptionType is defined",
        ));
        return;
    }
    match kind {
        Some(SecurityType::ConfidentialVm) => confidential(&profile, encryption, errors),
        Some(SecurityType::TrustedLaunch) if profile.settings.trusted_launch.is_none() => {
            errors.push(FieldError::required(
                format!("{SETTINGS}.trustedLaunch"),
                "trustedLaunch should be set when securityType is set to TrustedLaunch",
            ));
        }
        Some(SecurityType::Other(value)) => errors.push(FieldError::invalid(
            format!("{SETTINGS}.securityType"),
            value.as_str(),
            "must be ConfidentialVM, TrustedLaunch or omitted",
        )),
        Some(SecurityType::TrustedLaunch) | None => {}
    }
    let found = kind.map_or("", SecurityType::as_str);
    let mut wrong_type = |detail: &str| {
        errors.push(FieldError::invalid(format!("{SETTINGS}.securityType"), found, detail));
    };
    if encryption.is_some() && kind != Some(&SecurityType::ConfidentialVm) {
        wrong_type("securityType should be set to ConfidentialVM when securityEncryptionType is defined");
    }
    let launch = profile
        .settings
        .trusted_launch
        .as_ref()
        .map(|launch| &launch.uefi_settings);
    let enabled = launch.is_some_and(|uefi| {
        uefi.secure_boot == Some(SecureBootPolicy::Enabled)
            || uefi.virtualized_trusted_platform_module == Some(VirtualizedTpmPolicy::Enabled)
    });
    if enabled && kind != Some(&SecurityType::TrustedLaunch) {
        wrong_type("securityType should be set to TrustedLaunch when uefiSettings are enabled");
    }
}

/// What Azure asks of a confidential machine.
fn confidential(profile: &SecurityProfile, encryption: Option<&SecurityEncryptionType>, errors: &mut Vec<FieldError>) {
    if encryption.is_none() {
        let detail = "securityEncryptionType should be set when securityType is set to ConfidentialVM";
        errors.push(FieldError::required(ENCRYPTION_TYPE, detail));
    }
    let Some(vm) = &profile.settings.confidential_vm else {
        let detail = "confidentialVM should be set when securityType is set to ConfidentialVM";
        errors.push(FieldError::required(format!("{SETTINGS}.confidentialVM"), detail));
        return;
    };
    let uefi = format!("{SETTINGS}.confidentialVM.uefiSettings");
    let tpm = vm.uefi_settings.virtualized_trusted_platform_module.as_ref();
    if tpm != Some(&VirtualizedTpmPolicy::Enabled) {
        errors.push(FieldError::invalid(
            format!("{uefi}.virtualizedTrustedPlatformModule"),
            tpm.map_or("", VirtualizedTpmPolicy::as_str),
            "virtualizedTrustedPlatformModule should be enabled when securityType is set to ConfidentialVM",
        ));
    }
    if encryption != Some(&SecurityEncryptionType::DiskWithVmGuestState) {
        return;
    }
    if profile.encryption_at_host == Some(true) {
        let detail =
            "encryptionAtHost cannot be set to true when securityEncryptionType is set to DiskWithVMGuestState";
        errors.push(FieldError::invalid(
            "providerSpec.securityProfile.encryptionAtHost",
            true,
            detail,
        ));
    }
    let boot = vm.uefi_settings.secure_boot.as_ref();
    if boot != Some(&SecureBootPolicy::Enabled) {
        errors.push(FieldError::invalid(
            format!("{uefi}.secureBoot"),
            boot.map_or("", SecureBootPolicy::as_str),
            "secureBoot should be enabled when securityEncryptionType is set to DiskWithVMGuestState",
        ));
    }
}

fn diagnostics(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let Some(boot) = &spec.diagnostics.boot else { return };
    let account = boot
        .customer_managed
        .as_ref()
        .map(|own| own.storage_account_uri.as_str());
    match &boot.storage_account_type {
        Some(BootDiagnosticsStorage::CustomerManaged) if account.unwrap_or_default().is_empty() => {
            errors.push(FieldError::required(
                "providerSpec.diagnostics.boot.customerManaged.storageAccountURI",
                "storageAccountURI must be provided when storageAccountType is CustomerManaged",
            ));
        }
        Some(BootDiagnosticsStorage::AzureManaged) if boot.customer_managed.is_some() => {
            errors.push(FieldError::invalid(
                "providerSpec.diagnostics.boot.customerManaged",
                account.unwrap_or_default(),
                "customerManaged may not be set when storageAccountType is AzureManaged",
            ));
        }
        Some(BootDiagnosticsStorage::Other(value)) => errors.push(FieldError::invalid(
            "providerSpec.diagnostics.boot.storageAccountType",
            value.as_str(),
            "must be AzureManaged or CustomerManaged",
        )),
        Some(BootDiagnosticsStorage::AzureManaged | BootDiagnosticsStorage::CustomerManaged) | None => {}
    }
}

fn tags(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    if spec.tags.len() > MAX_TAGS {
        let detail =
            format!("at most {MAX_TAGS} tags: Azure takes 50 on a resource, and {OWN_TAGS} are the machine's own");
        errors.push(FieldError::invalid("providerSpec.tags", spec.tags.len(), detail));
    }
}

fn price(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let price = spec.spot_vm_options.as_ref().and_then(|spot| spot.max_price.as_ref());
    if let Some(price) = price.filter(|price| !price.0.is_empty() && price.value().is_none()) {
        let detail = "must be a price in dollars per hour, such as 0.25 or 250m, or -1 for the normal price";
        errors.push(FieldError::invalid(
            "providerSpec.spotVMOptions.maxPrice",
            price.0.as_str(),
            detail,
        ));
    }
}
