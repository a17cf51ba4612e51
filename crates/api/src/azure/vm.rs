//! The parts of a virtual machine: image, disks, network interfaces, identity.

use super::names;
use crate::cel::{Rule, rule};
use crate::common::Quantity;
use crate::disk::{CachingType, StorageAccountType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// What of a confidential machine is encrypted.
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    /// How an ephemeral disk is kept.
    pub enum DiffDiskOption {
        Local = "Local",
    }
}

string_enum! {
    /// Where on the host an ephemeral disk is kept.
    pub enum DiffDiskPlacement {
        CacheDisk = "CacheDisk",
        NvmeDisk = "NvmeDisk",
        ResourceDisk = "ResourceDisk",
    }
}

string_enum! {
    /// Where boot diagnostics go.
    pub enum BootDiagnosticsStorage {
        Managed = "Managed",
        UserManaged = "UserManaged",
        Disabled = "Disabled",
    }
}

string_enum! {
    /// What kind of protected machine.
    pub enum SecurityType {
        ConfidentialVm = "ConfidentialVM",
        TrustedLaunch = "TrustedLaunch",
    }
}

string_enum! {
    /// What becomes of an evicted spot machine.
    pub enum SpotEvictionPolicy {
        Deallocate = "Deallocate",
        Delete = "Delete",
    }
}

/// An image of a gallery that is shared with us.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SharedGalleryImage {
    /// Subscription that it is in.
    #[serde(rename = "subscriptionID")]
    #[schemars(extend("minLength" = 1))]
    pub subscription_id: String,
    /// Resource group that it is in.
    #[schemars(extend("minLength" = 1))]
    pub resource_group: String,
    /// Name of the gallery.
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    /// Its name.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// Version of the image.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// Who publishes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    /// The publisher's offer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offer: Option<String>,
    /// Variant of the offer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
}

/// An image of the marketplace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MarketplaceImage {
    /// Who publishes it.
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    /// The publisher's offer.
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    /// Variant of the offer.
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
    /// Version of the image.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// Whether it is bought under a plan.
    #[serde(default)]
    #[schemars(extend("x-default" = false))]
    pub third_party_image: bool,
}

/// The plan under which an image is bought.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePlan {
    /// Who publishes it.
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    /// The publisher's offer.
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    /// Variant of the offer.
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
}

/// An image of a compute gallery.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeGalleryImage {
    /// Name of the gallery.
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    /// Its name.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// Version of the image.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// Subscription of a private gallery.
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    pub subscription_id: Option<String>,
    /// Resource group of a private gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// The plan under which it is bought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<ImagePlan>,
}

/// The image that machines start from, given in one of four ways.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = image_rules()))]
pub struct Image {
    /// Resource ID of an image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Deprecated: an image of a shared gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_gallery: Option<SharedGalleryImage>,
    /// An image of the marketplace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marketplace: Option<MarketplaceImage>,
    /// An image of a compute gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_gallery: Option<ComputeGalleryImage>,
}

/// The keys that a disk is encrypted with.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskEncryptionSet {
    /// Resource ID of the disk encryption set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// How a confidential machine's disk is encrypted.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    /// Keys that it is encrypted with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// What is encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
}

/// What a managed disk is made of.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedDisk {
    /// What the disk is made of, as in Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 64))]
    pub storage_account_type: Option<StorageAccountType>,
    /// Keys that it is encrypted with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// How it is protected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<DiskSecurityProfile>,
}

/// Settings of an ephemeral OS disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiffDiskSettings {
    /// How the disk is kept.
    pub option: DiffDiskOption,
    /// Where on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<DiffDiskPlacement>,
}

/// The disk that a machine starts from.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = os_disk_rules()))]
pub struct OsDisk {
    /// Linux or Windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Linux"))]
    pub os_type: Option<String>,
    /// Size in GB.
    #[serde(rename = "diskSizeGB", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 2048))]
    pub disk_size_gb: Option<i32>,
    /// What it is made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    /// Makes the disk ephemeral.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff_disk_settings: Option<DiffDiskSettings>,
    /// How the host caches it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub caching_type: Option<CachingType>,
}

/// A disk beside the OS disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = data_disk_rules()))]
pub struct DataDisk {
    /// What the disk is called after its machine's name; unique within the machine.
    #[schemars(extend("minLength" = 1, "maxLength" = 80))]
    pub name_suffix: String,
    /// Size in GB.
    #[serde(rename = "diskSizeGB")]
    #[schemars(extend("minimum" = 4, "maximum" = 65536))]
    pub disk_size_gb: i32,
    /// What it is made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    /// Logical unit number, 0 to 63; unique within the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 63))]
    pub lun: Option<i32>,
    /// How the host caches it.
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

/// What else a machine's host must be able to do.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdditionalCapabilities {
    /// Whether Ultra disks can be attached; found out from the disks when unset.
    #[serde(rename = "ultraSSDEnabled", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_enabled: Option<bool>,
}

/// A storage account of one's own for boot diagnostics.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserManagedBootDiagnostics {
    /// Blob endpoint of the storage account.
    #[serde(rename = "storageAccountURI")]
    #[schemars(extend("pattern" = r"^https://"), extend("maxLength" = 1024))]
    pub storage_account_uri: String,
}

/// Console output and screenshots of a machine that starts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = boot_diagnostics_rules()))]
pub struct BootDiagnostics {
    /// Where they are kept.
    pub storage_account_type: BootDiagnosticsStorage,
    /// The storage account, with UserManaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_managed: Option<UserManagedBootDiagnostics>,
}

/// Diagnostics of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    /// Console output and screenshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
}

/// Secure boot and virtual TPM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    /// Whether only signed software boots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot_enabled: Option<bool>,
    /// Whether there is a virtual TPM.
    #[serde(rename = "vTpmEnabled", skip_serializing_if = "Option::is_none")]
    pub vtpm_enabled: Option<bool>,
}

/// How a machine is protected.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    /// Whether disks are encrypted on the host too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    /// What kind of protected machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    /// Secure boot and virtual TPM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uefi_settings: Option<UefiSettings>,
}

/// Runs the machine on spare capacity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    /// Highest price per hour in dollars; the normal price when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    /// What becomes of an evicted machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_policy: Option<SpotEvictionPolicy>,
}

/// An extension that runs on the machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VmExtension {
    /// Its name.
    pub name: String,
    /// Who publishes it.
    pub publisher: String,
    /// Version of the image.
    pub version: String,
    /// Settings in the open.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// Settings that Azure keeps secret.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub protected_settings: BTreeMap<String, String>,
}

/// A network interface.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterface {
    /// Subnet that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub subnet_name: Option<String>,
    /// How many private addresses it has; 1 when unset.
    #[serde(rename = "privateIPConfigs", skip_serializing_if = "Option::is_none")]
    pub private_ip_configs: Option<i64>,
    /// Whether packets bypass the host; where the size can when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
}

/// The role that a system assigned identity gets.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SystemAssignedIdentityRole {
    /// Name of the role assignment, a UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Resource ID of the role.
    #[serde(rename = "definitionID", skip_serializing_if = "Option::is_none")]
    pub definition_id: Option<String>,
    /// Where the role holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// An identity that exists already.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserAssignedIdentity {
    /// The identity, as azure:/// and its resource ID.
    #[serde(rename = "providerID")]
    pub provider_id: String,
}

/// An operation that Azure has not finished, so that a restart can go on waiting for it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Future {
    /// PUT, PATCH or DELETE.
    #[serde(rename = "type")]
    pub type_: String,
    /// Resource group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// What kind of resource.
    pub service_name: String,
    /// Name of the resource.
    pub name: String,
    /// What is needed to ask again, in base64.
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

fn data_disk_rules() -> [Rule; 3] {
    const SIZE: &str = "self.diskSizeGB <= 32767 || \
        self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS']";
    const UNCACHED: &str = "self.?cachingType.orValue('None') == 'None' || \
        !(self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS'])";
    const PROVISIONED: &str = "!(has(self.diskIOPSReadWrite) || has(self.diskMBpsReadWrite)) || \
        self.?managedDisk.?storageAccountType.orValue('') in ['UltraSSD_LRS', 'PremiumV2_LRS']";
    [
        rule(
            SIZE,
            "must be at most 32767 unless storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        )
        .at(".diskSizeGB"),
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
