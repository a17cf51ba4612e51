//! The parts of a virtual machine: image, disks, network interfaces, identity.

use super::names;
use crate::cel::{Rule, rule};
use crate::common::Quantity;
use crate::disk::{CachingType, StorageAccountType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// The parts of a confidential VM that Azure encrypts: the guest state, or the guest state and the OS disk.
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    /// The option of an ephemeral OS disk.
    pub enum DiffDiskOption {
        Local = "Local",
    }
}

string_enum! {
    /// The storage of the host that holds an ephemeral OS disk.
    pub enum DiffDiskPlacement {
        CacheDisk = "CacheDisk",
        NvmeDisk = "NvmeDisk",
        ResourceDisk = "ResourceDisk",
    }
}

string_enum! {
    /// The storage account that receives boot diagnostics.
    pub enum BootDiagnosticsStorage {
        Managed = "Managed",
        UserManaged = "UserManaged",
        Disabled = "Disabled",
    }
}

string_enum! {
    /// The security type of a virtual machine.
    pub enum SecurityType {
        ConfidentialVm = "ConfidentialVM",
        TrustedLaunch = "TrustedLaunch",
    }
}

string_enum! {
    /// The action of Azure when it evicts a spot machine.
    pub enum SpotEvictionPolicy {
        Deallocate = "Deallocate",
        Delete = "Delete",
    }
}

/// An image of a shared image gallery.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SharedGalleryImage {
    /// ID of the subscription of the gallery.
    #[serde(rename = "subscriptionID")]
    #[schemars(extend("minLength" = 1))]
    pub subscription_id: String,
    /// Resource group of the gallery.
    #[schemars(extend("minLength" = 1))]
    pub resource_group: String,
    /// Name of the gallery.
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    /// Name of the image definition.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// Version of the image, or latest.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// Publisher of the image's plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    /// Offer of the image's plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offer: Option<String>,
    /// SKU of the image's plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sku: Option<String>,
}

/// An image of the Azure Marketplace.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MarketplaceImage {
    /// Publisher of the image.
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    /// Offer of the publisher.
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    /// SKU within the offer.
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
    /// Version of the image, or latest.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// Whether the image has a purchase plan, which the machine must then name.
    #[serde(default)]
    #[schemars(extend("x-default" = false))]
    pub third_party_image: bool,
}

/// The purchase plan of an image.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePlan {
    /// Publisher of the plan.
    #[schemars(extend("minLength" = 1))]
    pub publisher: String,
    /// Offer of the publisher.
    #[schemars(extend("minLength" = 1))]
    pub offer: String,
    /// SKU within the offer.
    #[schemars(extend("minLength" = 1))]
    pub sku: String,
}

/// An image of an Azure Compute Gallery.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeGalleryImage {
    /// Name of the gallery.
    #[schemars(extend("minLength" = 1))]
    pub gallery: String,
    /// Name of the image definition.
    #[schemars(extend("minLength" = 1))]
    pub name: String,
    /// Version of the image, or latest.
    #[schemars(extend("minLength" = 1))]
    pub version: String,
    /// ID of the subscription of the gallery. Leave it out for a community gallery.
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    pub subscription_id: Option<String>,
    /// Resource group of the gallery. Leave it out for a community gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// Purchase plan of the image, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<ImagePlan>,
}

/// The image from which machines boot. Set exactly one field.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = image_rules()))]
pub struct Image {
    /// Resource ID of an image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Deprecated: image of a shared image gallery. Use computeGallery instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_gallery: Option<SharedGalleryImage>,
    /// Image of the Azure Marketplace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marketplace: Option<MarketplaceImage>,
    /// Image of an Azure Compute Gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_gallery: Option<ComputeGalleryImage>,
}

/// A disk encryption set, which holds the key that encrypts a disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskEncryptionSet {
    /// Resource ID of the disk encryption set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// Security settings of a confidential VM's disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    /// Disk encryption set whose key encrypts the disk and the guest state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// Parts that Azure encrypts: VMGuestStateOnly or DiskWithVMGuestState.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
}

/// Settings of a managed disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedDisk {
    /// Storage account type of the disk, such as Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 64))]
    pub storage_account_type: Option<StorageAccountType>,
    /// Disk encryption set whose key encrypts the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// Security settings of the disk. Used for confidential VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<DiskSecurityProfile>,
}

/// Settings of an ephemeral OS disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiffDiskSettings {
    /// Local makes the OS disk ephemeral.
    pub option: DiffDiskOption,
    /// Storage of the host that holds the disk: CacheDisk, NvmeDisk or ResourceDisk. Azure chooses when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<DiffDiskPlacement>,
}

/// The OS disk of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = os_disk_rules()))]
pub struct OsDisk {
    /// Operating system on the disk: Linux or Windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Linux"))]
    pub os_type: Option<String>,
    /// Size of the disk in GB.
    #[serde(rename = "diskSizeGB", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1, "maximum" = 2048))]
    pub disk_size_gb: Option<i32>,
    /// Settings of the managed disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    /// Settings of an ephemeral OS disk. The disk is persistent when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff_disk_settings: Option<DiffDiskSettings>,
    /// Host caching of the disk: None, ReadOnly or ReadWrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub caching_type: Option<CachingType>,
}

/// A data disk of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = data_disk_rules()))]
pub struct DataDisk {
    /// Suffix of the disk's name, after the name of the machine. Must be unique within the machine.
    #[schemars(extend("minLength" = 1, "maxLength" = 80))]
    pub name_suffix: String,
    /// Size of the disk in GB.
    #[serde(rename = "diskSizeGB")]
    #[schemars(extend("minimum" = 4, "maximum" = 65536))]
    pub disk_size_gb: i32,
    /// Settings of the managed disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_disk: Option<ManagedDisk>,
    /// Logical unit number of the disk, 0 to 63. Must be unique within the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 63))]
    pub lun: Option<i32>,
    /// Host caching of the disk: None, ReadOnly or ReadWrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// I/O operations per second of an Ultra or Premium SSD v2 disk.
    #[serde(rename = "diskIOPSReadWrite", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub disk_iops_read_write: Option<i64>,
    /// Throughput in MB/s of an Ultra or Premium SSD v2 disk.
    #[serde(rename = "diskMBpsReadWrite", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub disk_mbps_read_write: Option<i64>,
}

/// Additional capabilities of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdditionalCapabilities {
    /// Whether Ultra disks can be attached to the machine. Derived from the data disks when unset.
    #[serde(rename = "ultraSSDEnabled", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_enabled: Option<bool>,
}

/// A storage account of the user that receives boot diagnostics.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserManagedBootDiagnostics {
    /// Blob endpoint of the storage account.
    #[serde(rename = "storageAccountURI")]
    #[schemars(extend("pattern" = r"^https://"), extend("maxLength" = 1024))]
    pub storage_account_uri: String,
}

/// Boot diagnostics: console output and screenshots of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = boot_diagnostics_rules()))]
pub struct BootDiagnostics {
    /// Storage that receives the boot diagnostics: Managed, UserManaged or Disabled.
    pub storage_account_type: BootDiagnosticsStorage,
    /// Storage account of the user. Used with storageAccountType UserManaged only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_managed: Option<UserManagedBootDiagnostics>,
}

/// Diagnostics settings of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    /// Boot diagnostics settings of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
}

/// Secure boot and virtual TPM settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    /// Whether the machine boots only signed software (secure boot).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot_enabled: Option<bool>,
    /// Whether the machine has a virtual TPM.
    #[serde(rename = "vTpmEnabled", skip_serializing_if = "Option::is_none")]
    pub vtpm_enabled: Option<bool>,
}

/// Security settings of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    /// Whether the host encrypts temporary disks and caches, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    /// Security type of the machine: ConfidentialVM or TrustedLaunch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    /// Secure boot and virtual TPM settings. Used with a securityType only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uefi_settings: Option<UefiSettings>,
}

/// Settings of a spot machine, which runs on spare capacity of Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    /// Maximum price per hour in US dollars. Azure charges at most the price of an ordinary machine when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    /// Action of Azure when it evicts the machine: Deallocate or Delete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_policy: Option<SpotEvictionPolicy>,
}

/// A VM extension that Azure installs on the machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VmExtension {
    /// Name of the extension.
    pub name: String,
    /// Publisher of the extension.
    pub publisher: String,
    /// Version of the extension.
    pub version: String,
    /// Settings of the extension. Azure shows them to every reader of the VM.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// Settings of the extension that Azure encrypts and never shows.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub protected_settings: BTreeMap<String, String>,
}

/// A network interface of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterface {
    /// Name of the subnet of the interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub subnet_name: Option<String>,
    /// Number of private IP addresses of the interface. 1 when unset.
    #[serde(rename = "privateIPConfigs", skip_serializing_if = "Option::is_none")]
    pub private_ip_configs: Option<i64>,
    /// Whether the interface uses accelerated networking. Enabled when unset and the VM size supports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
}

/// The role of a system-assigned identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SystemAssignedIdentityRole {
    /// Name of the role assignment, a UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Resource ID of the role definition.
    #[serde(rename = "definitionID", skip_serializing_if = "Option::is_none")]
    pub definition_id: Option<String>,
    /// Scope at which the role is assigned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// An existing user-assigned identity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UserAssignedIdentity {
    /// Provider ID of the identity: azure:/// followed by its resource ID.
    #[serde(rename = "providerID")]
    pub provider_id: String,
}

/// An operation that Azure has not completed yet. A controller that restarts uses it to continue to wait.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Future {
    /// HTTP method of the operation: PUT, PATCH or DELETE.
    #[serde(rename = "type")]
    pub type_: String,
    /// Resource group of the resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// Azure service of the resource.
    pub service_name: String,
    /// Name of the resource.
    pub name: String,
    /// Data with which a controller polls the operation, in base64.
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
