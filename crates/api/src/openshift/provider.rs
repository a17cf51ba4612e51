//! AzureMachineProviderSpec: what a machine is to be on Azure, the content of `providerSpec.value`.

use super::lenient::{FieldError, normalise};
use crate::common::{Extra, Quantity, is_default, is_false};
use crate::disk::{CachingType, DeletionPolicy, StorageAccountType};
use k8s_openapi::api::core::v1::SecretReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, sync::LazyLock};

string_enum! {
    /// How an image is licensed.
    pub enum ImageType {
        Id = "ID",
        MarketplaceNoPlan = "MarketplaceNoPlan",
        MarketplaceWithPlan = "MarketplaceWithPlan",
    }
}

string_enum! {
    /// What of a confidential machine is encrypted.
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    /// Where an ephemeral OS disk is kept.
    pub enum EphemeralStorageLocation {
        Local = "Local",
    }
}

string_enum! {
    /// The part of the host that keeps an ephemeral OS disk.
    pub enum EphemeralPlacement {
        CacheDisk = "CacheDisk",
        ResourceDisk = "ResourceDisk",
        NvmeDisk = "NvmeDisk",
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
    /// Whether only signed software boots.
    pub enum SecureBootPolicy {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    /// Whether the machine has a virtual TPM.
    pub enum VirtualizedTpmPolicy {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    /// Whether Ultra disks can be attached to the machine.
    pub enum UltraSsdCapability {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    /// Where boot diagnostics go.
    pub enum BootDiagnosticsStorage {
        AzureManaged = "AzureManaged",
        CustomerManaged = "CustomerManaged",
    }
}

/// The image that a machine starts from: by resource ID, or by publisher, offer, SKU and version.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// Who publishes it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub publisher: String,
    /// The publisher's offer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub offer: String,
    /// Variant of the offer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sku: String,
    /// Version of the image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Resource ID of an image; leave the others out with it.
    #[serde(rename = "resourceID", default, skip_serializing_if = "String::is_empty")]
    pub resource_id: String,
    /// How the image is licensed.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ImageType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// The keys that a disk is encrypted with.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskEncryptionSet {
    /// Resource ID of the disk encryption set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// How a confidential machine's disk is encrypted.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    /// Keys that it is encrypted with.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_encryption_set: DiskEncryptionSet,
    /// What is encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What the OS disk is made of.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDiskManagedDisk {
    /// What the disk is made of, as in Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    /// Keys that it is encrypted with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// How it is protected.
    #[serde(default, skip_serializing_if = "is_default")]
    pub security_profile: DiskSecurityProfile,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of an ephemeral OS disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSettings {
    /// Local makes the disk ephemeral.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral_storage_location: Option<EphemeralStorageLocation>,
    /// The part of the host that keeps an ephemeral disk. Azure chooses one that the size has where this is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<EphemeralPlacement>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// The disk that a machine starts from.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDisk {
    /// Linux or Windows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub os_type: String,
    /// What it is made of.
    #[serde(default)]
    pub managed_disk: OsDiskManagedDisk,
    /// Size in GB.
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    /// Makes the disk ephemeral.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_settings: DiskSettings,
    /// How the host caches it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What a data disk is made of.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskManagedDisk {
    /// What the disk is made of, as in Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    /// Keys that it is encrypted with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A disk beside the OS disk, with a life that its deletion policy decides.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDisk {
    /// What the disk is called after its machine's name; unique within the machine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name_suffix: String,
    /// Size in GB.
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    /// What it is made of.
    #[serde(default, skip_serializing_if = "is_default")]
    pub managed_disk: DataDiskManagedDisk,
    /// Logical unit number, 0 to 63; unique within the machine.
    #[serde(default)]
    pub lun: i32,
    /// How the host caches it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// What becomes of the disk when the machine goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
    /// Input/output operations per second of an Ultra or Premium v2 disk.
    #[serde(rename = "diskIOPSReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_iops_read_write: Option<i64>,
    /// Throughput in MB/s of an Ultra or Premium v2 disk.
    #[serde(rename = "diskMBpsReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_mbps_read_write: Option<i64>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Runs the machine on spare capacity.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    /// Highest price per hour in dollars; the normal price when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Secure boot and virtual TPM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    /// Whether only signed software boots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<SecureBootPolicy>,
    /// Whether there is a virtual TPM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtualized_trusted_platform_module: Option<VirtualizedTpmPolicy>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a confidential machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfidentialVm {
    /// Secure boot and virtual TPM.
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a trusted launch.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustedLaunch {
    /// Secure boot and virtual TPM.
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a protected machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecuritySettings {
    /// What kind of protected machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    /// For a confidential machine.
    #[serde(rename = "confidentialVM", skip_serializing_if = "Option::is_none")]
    pub confidential_vm: Option<ConfidentialVm>,
    /// For a trusted launch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_launch: Option<TrustedLaunch>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// How a machine is protected.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    /// Whether disks are encrypted on the host too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    /// Settings of a protected machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub settings: SecuritySettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A storage account of one's own for boot diagnostics.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomerManagedBootDiagnostics {
    /// Blob endpoint of the storage account.
    #[serde(rename = "storageAccountURI", default, skip_serializing_if = "String::is_empty")]
    pub storage_account_uri: String,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Console output and screenshots of a machine that starts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BootDiagnostics {
    /// Where they are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<BootDiagnosticsStorage>,
    /// The storage account, with CustomerManaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub customer_managed: Option<CustomerManagedBootDiagnostics>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Diagnostics of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    /// Console output and screenshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What a machine is to be on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderSpec {
    /// Group and version of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Kept as it is; nothing is read from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    /// Secret with the first boot's data, in its key userData.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data_secret: Option<SecretReference>,
    /// Secret to sign in to Azure with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<SecretReference>,
    /// Azure region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Azure's name of the machine size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_size: Option<String>,
    /// What the machine starts from.
    #[serde(default)]
    pub image: Image,
    /// The disk that the machine starts from.
    #[serde(default)]
    pub os_disk: OsDisk,
    /// Disks beside the OS disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_disks: Vec<DataDisk>,
    /// Public key for SSH, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    /// Whether the machine has a public address.
    #[serde(rename = "publicIP", default)]
    pub public_ip: bool,
    /// Tags in Azure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
    /// Network security group of its network interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_group: Option<String>,
    /// Application security groups of its network interface.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    /// Subnet that it is in.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subnet: String,
    /// Public load balancer that it is behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_load_balancer: Option<String>,
    /// Internal load balancer that it is behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_load_balancer: Option<String>,
    /// Index of the load balancer's inbound NAT rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat_rule: Option<i64>,
    /// User assigned identity of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_identity: Option<String>,
    /// Virtual network that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Availability zone; none when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Resource group of the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_resource_group: Option<String>,
    /// Resource group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// Runs on spare capacity.
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    /// How it is protected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    /// Whether Ultra disks can be attached; found out from the disks when unset.
    #[serde(rename = "ultraSSDCapability", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_capability: Option<UltraSsdCapability>,
    /// Whether packets bypass the host; where the size can when unset.
    #[serde(default, skip_serializing_if = "is_false")]
    pub accelerated_networking: bool,
    /// Availability set to put the machine into.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub availability_set: Option<String>,
    /// Diagnostics of the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub diagnostics: Diagnostics,
    /// Resource ID of a capacity reservation group.
    #[serde(rename = "capacityReservationGroupID", skip_serializing_if = "Option::is_none")]
    pub capacity_reservation_group_id: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What the Azure provider knows of a machine: the typed content of `status.providerStatus`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderStatus {
    /// Group and version of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Kept as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    /// Resource ID of the virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_id: Option<String>,
    /// The virtual machine's state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_state: Option<String>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<meta::Condition>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

impl AzureMachineProviderSpec {
    pub const API_VERSION: &'static str = "machine.openshift.io/v1beta1";
    pub const KIND: &'static str = "AzureMachineProviderSpec";

    /// Reads the content of `providerSpec.value`, as lenient as Go is; errors name the field's path.
    pub fn from_raw(value: &Value) -> Result<Self, FieldError> {
        static SCHEMA: LazyLock<Value> = LazyLock::new(crate::schema::plain::<AzureMachineProviderSpec>);
        read(value, &SCHEMA, "providerSpec.value")
    }

    /// The content without the fields that cannot be read, and what is wrong with those.
    pub fn legible(value: &Value) -> (Value, Vec<FieldError>) {
        let (mut left, mut errors) = (value.clone(), Vec::new());
        while let Err(error) = Self::from_raw(&left) {
            let bad = error.field().to_owned();
            errors.push(error);
            let fields = left.as_object_mut();
            let Some(fields) = fields.filter(|fields| fields.keys().any(|key| key.eq_ignore_ascii_case(&bad))) else {
                return (Value::Object(Default::default()), errors);
            };
            fields.retain(|key, _| !key.eq_ignore_ascii_case(&bad));
        }
        (left, errors)
    }

    /// The exact form, for `providerSpec.value`.
    pub fn to_raw(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

impl AzureMachineProviderStatus {
    pub const API_VERSION: &'static str = "machine.openshift.io/v1beta1";
    pub const KIND: &'static str = "AzureMachineProviderStatus";

    /// Reads the content of `status.providerStatus`.
    pub fn from_raw(value: &Value) -> Result<Self, FieldError> {
        static SCHEMA: LazyLock<Value> = LazyLock::new(crate::schema::plain::<AzureMachineProviderStatus>);
        read(value, &SCHEMA, "providerStatus")
    }

    /// The exact form, for `status.providerStatus`.
    pub fn to_raw(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

fn read<T: serde::de::DeserializeOwned>(value: &Value, schema: &Value, path: &str) -> Result<T, FieldError> {
    let exact = normalise(value, schema, path)?;
    serde_json::from_value(exact).map_err(|error| FieldError {
        path: path.to_owned(),
        value: error.to_string(),
        expected: "readable as its kind",
    })
}
