//! AzureMachineProviderSpec: the settings of a machine on Azure, the content of `providerSpec.value`.

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
    /// The type of an image: by resource ID, or of the marketplace without or with a purchase plan.
    pub enum ImageType {
        Id = "ID",
        MarketplaceNoPlan = "MarketplaceNoPlan",
        MarketplaceWithPlan = "MarketplaceWithPlan",
    }
}

string_enum! {
    /// The parts of a confidential VM that Azure encrypts: the guest state, or the guest state and the OS disk.
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    /// The location of an ephemeral OS disk.
    pub enum EphemeralStorageLocation {
        Local = "Local",
    }
}

string_enum! {
    /// The storage of the host that holds an ephemeral OS disk.
    pub enum EphemeralPlacement {
        CacheDisk = "CacheDisk",
        ResourceDisk = "ResourceDisk",
        NvmeDisk = "NvmeDisk",
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
    /// Whether the machine boots only signed software (secure boot).
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
    /// The storage account that receives boot diagnostics.
    pub enum BootDiagnosticsStorage {
        AzureManaged = "AzureManaged",
        CustomerManaged = "CustomerManaged",
    }
}

/// The image from which a machine boots: by resource ID, or by publisher, offer, SKU and version.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// Publisher of the image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub publisher: String,
    /// Offer of the publisher.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub offer: String,
    /// SKU within the offer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sku: String,
    /// Version of the image, or latest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Resource ID of the image. Leave out the other fields with it.
    #[serde(rename = "resourceID", default, skip_serializing_if = "String::is_empty")]
    pub resource_id: String,
    /// Type of the image: ID, MarketplaceNoPlan or MarketplaceWithPlan.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ImageType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A disk encryption set, which holds the key that encrypts a disk.
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

/// Security settings of a confidential VM's disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    /// Disk encryption set whose key encrypts the disk and the guest state.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_encryption_set: DiskEncryptionSet,
    /// Parts that Azure encrypts: VMGuestStateOnly or DiskWithVMGuestState.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of the OS disk as a managed disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDiskManagedDisk {
    /// Storage account type of the disk, such as Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    /// Disk encryption set whose key encrypts the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// Security settings of the disk. Used for confidential VMs.
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
    /// Local makes the OS disk ephemeral.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral_storage_location: Option<EphemeralStorageLocation>,
    /// Storage of the host that holds an ephemeral disk. Azure chooses one that the VM size has when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<EphemeralPlacement>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// The OS disk of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDisk {
    /// Operating system on the disk: Linux or Windows.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub os_type: String,
    /// Settings of the managed disk.
    #[serde(default)]
    pub managed_disk: OsDiskManagedDisk,
    /// Size of the disk in GB.
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    /// Settings of an ephemeral OS disk.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_settings: DiskSettings,
    /// Host caching of the disk: None, ReadOnly or ReadWrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a data disk as a managed disk.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskManagedDisk {
    /// Storage account type of the disk, such as Premium_LRS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    /// Disk encryption set whose key encrypts the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A data disk of a machine. The deletion policy decides whether it outlives the machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDisk {
    /// Suffix of the disk's name, after the name of the machine. Must be unique within the machine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name_suffix: String,
    /// Size of the disk in GB.
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    /// Settings of the managed disk.
    #[serde(default, skip_serializing_if = "is_default")]
    pub managed_disk: DataDiskManagedDisk,
    /// Logical unit number of the disk, 0 to 63. Must be unique within the machine.
    #[serde(default)]
    pub lun: i32,
    /// Host caching of the disk: None, ReadOnly or ReadWrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    /// Action on the disk when the machine is deleted: Delete or Detach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
    /// I/O operations per second of an Ultra or Premium SSD v2 disk.
    #[serde(rename = "diskIOPSReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_iops_read_write: Option<i64>,
    /// Throughput in MB/s of an Ultra or Premium SSD v2 disk.
    #[serde(rename = "diskMBpsReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_mbps_read_write: Option<i64>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a spot machine, which runs on spare capacity of Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    /// Maximum price per hour in US dollars. Azure charges at most the price of an ordinary machine when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Secure boot and virtual TPM settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    /// Whether the machine boots only signed software (secure boot).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<SecureBootPolicy>,
    /// Whether the machine has a virtual TPM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtualized_trusted_platform_module: Option<VirtualizedTpmPolicy>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a confidential VM.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfidentialVm {
    /// Secure boot and virtual TPM settings.
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a machine with trusted launch.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustedLaunch {
    /// Secure boot and virtual TPM settings.
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Security type of a machine, with its settings.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecuritySettings {
    /// Security type of the machine: ConfidentialVM or TrustedLaunch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    /// Settings of a confidential VM. Used with securityType ConfidentialVM only.
    #[serde(rename = "confidentialVM", skip_serializing_if = "Option::is_none")]
    pub confidential_vm: Option<ConfidentialVm>,
    /// Settings of trusted launch. Used with securityType TrustedLaunch only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_launch: Option<TrustedLaunch>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Security settings of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    /// Whether the host encrypts temporary disks and caches, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    /// Security type of the machine, with its settings.
    #[serde(default, skip_serializing_if = "is_default")]
    pub settings: SecuritySettings,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A storage account of the user that receives boot diagnostics.
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

/// Boot diagnostics: console output and screenshots of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BootDiagnostics {
    /// Storage that receives the boot diagnostics: AzureManaged or CustomerManaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<BootDiagnosticsStorage>,
    /// Storage account of the user. Used with storageAccountType CustomerManaged only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub customer_managed: Option<CustomerManagedBootDiagnostics>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Diagnostics settings of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    /// Boot diagnostics settings of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Settings of a machine on Azure: the typed content of `providerSpec.value`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderSpec {
    /// Group and version of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Metadata of this content. Capstan keeps it and does not read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    /// Reference to the Secret that holds the bootstrap data under the key userData.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data_secret: Option<SecretReference>,
    /// Reference to the Secret with the credentials for Azure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<SecretReference>,
    /// Azure region of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Azure VM size of the machine, such as Standard_D4s_v3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_size: Option<String>,
    /// Image from which the machine boots.
    #[serde(default)]
    pub image: Image,
    /// OS disk of the machine.
    #[serde(default)]
    pub os_disk: OsDisk,
    /// Data disks of the machine, beside the OS disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_disks: Vec<DataDisk>,
    /// Public SSH key of the administrator, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    /// Whether the machine has a public IP address.
    #[serde(rename = "publicIP", default)]
    pub public_ip: bool,
    /// Azure tags of the machine's resources.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
    /// Network security group of the machine's network interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_group: Option<String>,
    /// Application security groups of the machine's network interface.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    /// Name of the subnet of the machine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subnet: String,
    /// Public load balancer whose backend pool includes the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_load_balancer: Option<String>,
    /// Internal load balancer whose backend pool includes the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_load_balancer: Option<String>,
    /// Index of the load balancer's inbound NAT rule for the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat_rule: Option<i64>,
    /// User-assigned identity of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_identity: Option<String>,
    /// Name of the virtual network of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Availability zone of the machine. No zone when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Resource group of the virtual network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_resource_group: Option<String>,
    /// Resource group of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    /// Settings of a spot machine. The machine is an ordinary one when unset.
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    /// Security settings of the machine: encryption at host, confidential VM and trusted launch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    /// Whether Ultra disks can be attached to the machine. Derived from the data disks when unset.
    #[serde(rename = "ultraSSDCapability", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_capability: Option<UltraSsdCapability>,
    /// Whether the network interface uses accelerated networking.
    #[serde(default, skip_serializing_if = "is_false")]
    pub accelerated_networking: bool,
    /// Availability set that the machine belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub availability_set: Option<String>,
    /// Diagnostics settings of the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub diagnostics: Diagnostics,
    /// Resource ID of the capacity reservation group of the machine.
    #[serde(rename = "capacityReservationGroupID", skip_serializing_if = "Option::is_none")]
    pub capacity_reservation_group_id: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Observed state of a machine on Azure: the typed content of `status.providerStatus`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderStatus {
    /// Group and version of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of this content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Metadata of this content. Capstan keeps it and does not read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    /// Resource ID of the virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_id: Option<String>,
    /// State of the virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_state: Option<String>,
    /// Conditions of the virtual machine, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<meta::Condition>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub extra: Extra,
}

impl AzureMachineProviderSpec {
    pub const API_VERSION: &'static str = "machine.openshift.io/v1beta1";
    pub const KIND: &'static str = "AzureMachineProviderSpec";

    /// Reads the content of `providerSpec.value` as leniently as Go. An error names the path of the field.
    pub fn from_raw(value: &Value) -> Result<Self, FieldError> {
        static SCHEMA: LazyLock<Value> = LazyLock::new(crate::schema::plain::<AzureMachineProviderSpec>);
        read(value, &SCHEMA, "providerSpec.value")
    }

    /// Returns the content without the fields that cannot be read, and the errors of those fields.
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

    /// Returns the exact form for `providerSpec.value`.
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

    /// Returns the exact form for `status.providerStatus`.
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
