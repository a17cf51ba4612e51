//! What Azure does not take together. Each rule is known beforehand, so a machine is refused before its first resource.

use capstan_api::disk::StorageAccountType;
use capstan_api::openshift::{AzureMachineProviderSpec, BootDiagnosticsStorage, SecurityType};

use super::{FieldError, kind_of};
use crate::disks::azure::ultra_enabled;

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
    for (_, other) in excluded.iter().filter(|(given, _)| *given) {
        let detail = format!("Azure takes no machine with {other} into an availability set: leave one of them out");
        errors.push(FieldError::invalid("providerSpec.availabilitySet", set, detail));
    }
}

fn has_premium_v2(spec: &AzureMachineProviderSpec) -> bool {
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
    let settings = spec.security_profile.as_ref().map(|profile| &profile.settings);
    let kind = settings.and_then(|settings| settings.security_type.as_ref());
    if let Some(SecurityType::Other(value)) = kind
        && !value.is_empty()
    {
        errors.push(FieldError::invalid(
            "providerSpec.securityProfile.settings.securityType",
            value.as_str(),
            "must be ConfidentialVM, TrustedLaunch or omitted",
        ));
    }
    let encryption = &spec.os_disk.managed_disk.security_profile.security_encryption_type;
    let Some(encryption) = encryption.as_ref().filter(|given| !given.as_str().is_empty()) else {
        return;
    };
    let path = "providerSpec.osDisk.managedDisk.securityProfile.securityEncryptionType";
    if !encryption.is_known() {
        let detail = "must be VMGuestStateOnly, DiskWithVMGuestState or omitted";
        errors.push(FieldError::invalid(path, encryption.as_str(), detail));
    } else if kind != Some(&SecurityType::ConfidentialVm) {
        let detail = "can be set only when securityProfile.settings.securityType is ConfidentialVM";
        errors.push(FieldError::invalid(path, encryption.as_str(), detail));
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
