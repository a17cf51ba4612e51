//! The parts of a virtual machine: image, disks, network interfaces, identity.

use crate::cel::{Rule, rule};
use crate::common::Quantity;
use crate::disk::{CachingType, StorageAccountType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    pub enum DiffDiskOption {
        Local = "Local",
    }
}

string_enum! {
    pub enum DiffDiskPlacement {
        CacheDisk = "CacheDisk",
        NvmeDisk = "NvmeDisk",
        ResourceDisk = "ResourceDisk",
    }
}

string_enum! {
    pub enum BootDiagnosticsStorage {
        Managed = "Managed",
        UserManaged = "UserManaged",
        Disabled = "Disabled",
    }
}

string_enum! {
    pub enum SecurityType {
        ConfidentialVm = "ConfidentialVM",
        TrustedLaunch = "TrustedLaunch",
    }
}

string_enum! {
    pub enum SpotEvictionPolicy {
        Deallocate = "Deallocate",
        Delete = "Delete",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SharedGalleryImage {
    #[serde(rename = "subscriptionID")]
    #[schemars(extend("minLength" = 1))]
    pub subscription_id: String,
    #[schemars(extend("minLength" = 1))]
    pub resource_group: String,
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MarketplaceImage {
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    #[serde(default)]
    #[schemars(extend("x-default" = false))]
    pub third_party_image: bool,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePlan {
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeGalleryImage {
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    pub subscription_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<ImagePlan>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = image_rules()))]
pub struct Image {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_gallery: Option<SharedGalleryImage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marketplace: Option<MarketplaceImage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_gallery: Option<ComputeGalleryImage>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskEncryptionSet {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedDisk {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 64))]
    pub storage_account_type: Option<StorageAccountType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<DiskSecurityProfile>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiffDiskSettings {
    pub option: DiffDiskOption,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<DiffDiskPlacement>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = os_disk_rules()))]
pub struct OsDisk {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Linux"))]
    pub os_type: Option<String>,
    #[serde(rename = "diskSizeGB", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 2048))]
    pub disk_size_gb: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff_disk_settings: Option<DiffDiskSettings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub caching_type: Option<CachingType>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = data_disk_rules()))]
pub struct DataDisk {
    #[schemars(extend("minLength" = 1, "maxLength" = 80))]
    pub name_suffix: String,
    #[serde(rename = "diskSizeGB")]
    #[schemars(extend("minimum" = 4, "maximum" = 32767))]
    pub disk_size_gb: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 63))]
    pub lun: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// Input/output operations per second of an Ultra or Premium v2 disk.
    #[serde(rename = "diskIOPSReadWrite", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub disk_iops_read_write: Option<i64>,
    /// Throughput in MB/s of an Ultra or Premium v2 disk.
    #[serde(rename = "diskMBpsReadWrite", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub disk_mbps_read_write: Option<i64>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdditionalCapabilities {
    #[serde(rename = "ultraSSDEnabled", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_enabled: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserManagedBootDiagnostics {
    #[serde(rename = "storageAccountURI")]
    #[schemars(extend("pattern" = r"^https://"), extend("maxLength" = 1024))]
    pub storage_account_uri: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = boot_diagnostics_rules()))]
pub struct BootDiagnostics {
    pub storage_account_type: BootDiagnosticsStorage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_managed: Option<UserManagedBootDiagnostics>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot_enabled: Option<bool>,
    #[serde(rename = "vTpmEnabled", skip_serializing_if = "Option::is_none")]
    pub vtpm_enabled: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uefi_settings: Option<UefiSettings>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_policy: Option<SpotEvictionPolicy>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VmExtension {
    pub name: String,
    pub publisher: String,
    pub version: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub protected_settings: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterface {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subnet_name: Option<String>,
    #[serde(rename = "privateIPConfigs", skip_serializing_if = "Option::is_none")]
    pub private_ip_configs: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SystemAssignedIdentityRole {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(rename = "definitionID", skip_serializing_if = "Option::is_none")]
    pub definition_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserAssignedIdentity {
    #[serde(rename = "providerID")]
    pub provider_id: String,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Future {
    #[serde(rename = "type")]
    pub type_: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    pub service_name: String,
    pub name: String,
    pub data: String,
}

fn image_rules() -> [Rule; 1] {
    const ONE: &str = "[has(self.id), has(self.marketplace), has(self.sharedGallery), has(self.computeGallery)]\
        .exists_one(given, given)";
    [rule(
        ONE,
        "exactly one of id, marketplace, sharedGallery and computeGallery must be set",
    )]
}

fn os_disk_rules() -> [Rule; 1] {
    const KIND: &str = "!(self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS'])";
    [rule(
        KIND,
        "UltraSSD_LRS and PremiumV2_LRS can be used with data disks only, they cannot be used with OS disks",
    )
    .at(".managedDisk.storageAccountType")]
}

fn data_disk_rules() -> [Rule; 2] {
    const UNCACHED: &str = "self.?cachingType.orValue('None') == 'None' || \
        !(self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS'])";
    const PROVISIONED: &str = "!(has(self.diskIOPSReadWrite) || has(self.diskMBpsReadWrite)) || \
        self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS']";
    [
        rule(
            UNCACHED,
            "cachingType must be None when storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        )
        .saying(
            "\"cachingType '\" + self.cachingType + \"' is not supported when storageAccountType is '\" + \
                 self.managedDisk.storageAccountType + \"'. Allowed values are: 'None'\"",
        )
        .at(".cachingType"),
        rule(
            PROVISIONED,
            "diskIOPSReadWrite and diskMBpsReadWrite can be set only when storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        ),
    ]
}

fn boot_diagnostics_rules() -> [Rule; 2] {
    [
        rule(
            "self.storageAccountType != 'UserManaged' || has(self.userManaged)",
            "userManaged must be specified when storageAccountType is 'UserManaged'",
        ),
        rule(
            "self.storageAccountType == 'UserManaged' || !has(self.userManaged)",
            "userManaged can be set only when storageAccountType is 'UserManaged'",
        )
        .at(".userManaged"),
    ]
}
