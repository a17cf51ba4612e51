//! Specs that tests start from.

use capstan_api::disk::{DeletionPolicy, StorageAccountType};
use capstan_api::openshift::{AzureMachineProviderSpec, DataDisk};

/// Nothing is wrong with it.
pub fn good() -> AzureMachineProviderSpec {
    serde_json::from_value(serde_json::json!({
        "vmSize": "Standard_D4s_v3", "vnet": "v", "subnet": "s", "image": {"resourceID": "/resourceGroups/i"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        "userDataSecret": {"name": "u"}, "credentialsSecret": {"name": "c", "namespace": "n"},
    }))
    .unwrap()
}

pub fn ultra(lun: i32) -> DataDisk {
    let mut disk = DataDisk {
        name_suffix: format!("d{lun}"),
        disk_size_gb: 4,
        lun,
        deletion_policy: Some(DeletionPolicy::Delete),
        ..DataDisk::default()
    };
    disk.managed_disk.storage_account_type = Some(StorageAccountType::UltraSsdLrs);
    disk
}
