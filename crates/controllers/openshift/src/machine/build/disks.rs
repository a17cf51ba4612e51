//! The disks of a machine's requests.

use super::super::ids::Ids as _;
use super::{text, word};
use capstan_api::disk::{DeletionPolicy, StorageAccountType};
use capstan_api::openshift::{AzureMachineProviderSpec, DataDisk as DiskSpec, DiskEncryptionSet};
use capstan_azure::model::*;
use capstan_core::machine::disks::policy_of;
use capstan_core::machine::names::{Names, POLICY_TAG};
use std::collections::BTreeMap;

pub fn delete_option(disk: &DiskSpec) -> &'static str {
    if policy_of(disk) == DeletionPolicy::Delete {
        "Delete"
    } else {
        "Detach"
    }
}

/// Azure takes IOPS and MB/s only on disks of their own, not within a machine's request: those are made first, unless a
/// kept disk takes their place.
pub fn made_first(disk: &DiskSpec, kept: &BTreeMap<String, String>) -> bool {
    let own = disk.disk_iops_read_write.is_some() || disk.disk_mbps_read_write.is_some();
    own && !kept.contains_key(&disk.name_suffix)
}

fn encryption_set(set: Option<&DiskEncryptionSet>) -> Option<SubResource> {
    set.and_then(|set| text(&set.id)).map(SubResource::of)
}

pub(super) fn os_disk(names: &Names, spec: &AzureMachineProviderSpec) -> OsDisk {
    let disk = &spec.os_disk;
    let profile = &disk.managed_disk.security_profile;
    let local = disk
        .disk_settings
        .ephemeral_storage_location
        .as_ref()
        .and_then(|place| word(Some(place.as_str())));
    OsDisk {
        name: Some(names.os_disk()),
        os_type: word(Some(&disk.os_type)),
        create_option: Some("FromImage".into()),
        delete_option: Some("Delete".into()),
        caching: disk
            .caching_type
            .as_ref()
            .and_then(|caching| word(Some(caching.as_str()))),
        disk_size_gb: Some(disk.disk_size_gb),
        managed_disk: Some(ManagedDiskParameters {
            storage_account_type: disk
                .managed_disk
                .storage_account_type
                .as_ref()
                .and_then(|kind| word(Some(kind.as_str()))),
            disk_encryption_set: encryption_set(disk.managed_disk.disk_encryption_set.as_ref()),
            security_profile: profile
                .security_encryption_type
                .as_ref()
                .map(|kind| DiskSecurityProfile {
                    security_encryption_type: Some(kind.as_str().to_owned()),
                    disk_encryption_set: encryption_set(Some(&profile.disk_encryption_set)),
                    ..DiskSecurityProfile::default()
                }),
            ..ManagedDiskParameters::default()
        }),
        diff_disk_settings: local.map(|option| DiffDiskSettings {
            option: Some(option),
            placement: disk
                .disk_settings
                .placement
                .as_ref()
                .and_then(|placement| word(Some(placement.as_str()))),
            ..DiffDiskSettings::default()
        }),
        ..OsDisk::default()
    }
}

pub fn data_disk(names: &Names, disk: &DiskSpec, kept: &BTreeMap<String, String>) -> DataDisk {
    let found = kept.get(&disk.name_suffix).cloned();
    let first = found.is_some() || made_first(disk, kept);
    let name = found.unwrap_or_else(|| names.data_disk(&disk.name_suffix));
    let managed = ManagedDiskParameters {
        id: first.then(|| names.disk_id(&name).to_string()),
        storage_account_type: (!first).then(|| storage_type(disk)).flatten(),
        disk_encryption_set: (!first)
            .then(|| encryption_set(disk.managed_disk.disk_encryption_set.as_ref()))
            .flatten(),
        ..ManagedDiskParameters::default()
    };
    DataDisk {
        create_option: Some(if first { "Attach" } else { "Empty" }.into()),
        delete_option: Some(delete_option(disk).into()),
        name: Some(name),
        lun: Some(disk.lun),
        caching: disk
            .caching_type
            .as_ref()
            .and_then(|caching| word(Some(caching.as_str()))),
        disk_size_gb: (!first).then_some(disk.disk_size_gb),
        managed_disk: (managed != ManagedDiskParameters::default()).then_some(managed),
        ..DataDisk::default()
    }
}

fn storage_type(disk: &DiskSpec) -> Option<String> {
    disk.managed_disk
        .storage_account_type
        .as_ref()
        .and_then(|kind: &StorageAccountType| word(Some(kind.as_str())))
}

/// A disk that is made before its machine.
pub fn disk(names: &Names, spec: &AzureMachineProviderSpec, disk: &DiskSpec) -> Disk {
    let mut tags = names.tags(spec);
    tags.insert(POLICY_TAG.to_owned(), delete_option(disk).to_owned());
    Disk {
        location: Some(names.location.clone()),
        tags: Some(tags),
        zones: text(&spec.zone).map(|zone| vec![zone]),
        sku: storage_type(disk).map(|name| Sku {
            name: Some(name),
            ..Sku::default()
        }),
        properties: Some(DiskProperties {
            creation_data: Some(CreationData {
                create_option: Some("Empty".into()),
                ..CreationData::default()
            }),
            disk_size_gb: Some(disk.disk_size_gb),
            disk_iops_read_write: disk.disk_iops_read_write,
            disk_mbps_read_write: disk.disk_mbps_read_write,
            encryption: disk
                .managed_disk
                .disk_encryption_set
                .as_ref()
                .and_then(|set| text(&set.id))
                .map(|id| DiskEncryption {
                    kind: Some("EncryptionAtRestWithCustomerKey".into()),
                    disk_encryption_set_id: Some(id),
                    ..DiskEncryption::default()
                }),
            ..DiskProperties::default()
        }),
        ..Disk::default()
    }
}
