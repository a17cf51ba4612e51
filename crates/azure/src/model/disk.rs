//! Managed disks.

use super::{Sku, SubResource, Tags, model};

model! {
    Disk {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        zones: Vec<String>,
        sku: Sku,
        /// The virtual machine that has it attached.
        managed_by: String,
        properties: DiskProperties,
    }
    DiskProperties {
        creation_data: CreationData,
        #[serde(rename = "diskSizeGB")]
        disk_size_gb: i32,
        #[serde(rename = "diskIOPSReadWrite")]
        disk_iops_read_write: i64,
        #[serde(rename = "diskMBpsReadWrite")]
        disk_mbps_read_write: i64,
        /// `Unattached`, `Attached`, `Reserved`, …
        disk_state: String,
        provisioning_state: String,
        encryption: DiskEncryption,
        time_created: String,
    }
    CreationData { create_option: String, logical_sector_size: i32, source_resource_id: String }
    DiskEncryption {
        #[serde(rename = "type")]
        kind: String,
        disk_encryption_set_id: String,
    }
    DiskEncryptionSet { id: String, name: String, location: String, properties: DiskEncryptionSetProperties }
    DiskEncryptionSetProperties { active_key: SubResource, encryption_type: String }
}
