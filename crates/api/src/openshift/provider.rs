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
    pub enum ImageType {
        Id = "ID",
        MarketplaceNoPlan = "MarketplaceNoPlan",
        MarketplaceWithPlan = "MarketplaceWithPlan",
    }
}

string_enum! {
    pub enum SecurityEncryptionType {
        VmGuestStateOnly = "VMGuestStateOnly",
        DiskWithVmGuestState = "DiskWithVMGuestState",
    }
}

string_enum! {
    pub enum EphemeralStorageLocation {
        Local = "Local",
    }
}

string_enum! {
    pub enum SecurityType {
        ConfidentialVm = "ConfidentialVM",
        TrustedLaunch = "TrustedLaunch",
    }
}

string_enum! {
    pub enum SecureBootPolicy {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    pub enum VirtualizedTpmPolicy {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    pub enum UltraSsdCapability {
        Enabled = "Enabled",
        Disabled = "Disabled",
    }
}

string_enum! {
    pub enum BootDiagnosticsStorage {
        AzureManaged = "AzureManaged",
        CustomerManaged = "CustomerManaged",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub publisher: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub offer: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sku: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    #[serde(rename = "resourceID", default, skip_serializing_if = "String::is_empty")]
    pub resource_id: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ImageType>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskEncryptionSet {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSecurityProfile {
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_encryption_set: DiskEncryptionSet,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_encryption_type: Option<SecurityEncryptionType>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDiskManagedDisk {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub security_profile: DiskSecurityProfile,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral_storage_location: Option<EphemeralStorageLocation>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OsDisk {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub os_type: String,
    #[serde(default)]
    pub managed_disk: OsDiskManagedDisk,
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_settings: DiskSettings,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskManagedDisk {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<StorageAccountType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_encryption_set: Option<DiskEncryptionSet>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDisk {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name_suffix: String,
    #[serde(rename = "diskSizeGB", default)]
    pub disk_size_gb: i32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub managed_disk: DataDiskManagedDisk,
    #[serde(default)]
    pub lun: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caching_type: Option<CachingType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
    /// Input/output operations per second of an Ultra or Premium v2 disk.
    #[serde(rename = "diskIOPSReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_iops_read_write: Option<i64>,
    /// Throughput in MB/s of an Ultra or Premium v2 disk.
    #[serde(rename = "diskMBpsReadWrite", skip_serializing_if = "Option::is_none")]
    pub disk_mbps_read_write: Option<i64>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpotVmOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_price: Option<Quantity>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UefiSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<SecureBootPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtualized_trusted_platform_module: Option<VirtualizedTpmPolicy>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfidentialVm {
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustedLaunch {
    #[serde(default)]
    pub uefi_settings: UefiSettings,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecuritySettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_type: Option<SecurityType>,
    #[serde(rename = "confidentialVM", skip_serializing_if = "Option::is_none")]
    pub confidential_vm: Option<ConfidentialVm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_launch: Option<TrustedLaunch>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityProfile {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption_at_host: Option<bool>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub settings: SecuritySettings,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CustomerManagedBootDiagnostics {
    #[serde(rename = "storageAccountURI", default, skip_serializing_if = "String::is_empty")]
    pub storage_account_uri: String,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BootDiagnostics {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_account_type: Option<BootDiagnosticsStorage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub customer_managed: Option<CustomerManagedBootDiagnostics>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnostics {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootDiagnostics>,
    #[serde(flatten)]
    pub extra: Extra,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data_secret: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_size: Option<String>,
    #[serde(default)]
    pub image: Image,
    #[serde(default)]
    pub os_disk: OsDisk,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_disks: Vec<DataDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    #[serde(rename = "publicIP", default)]
    pub public_ip: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_group: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub application_security_groups: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subnet: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_load_balancer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_load_balancer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat_rule: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed_identity: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_resource_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_group: Option<String>,
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    #[serde(rename = "ultraSSDCapability", skip_serializing_if = "Option::is_none")]
    pub ultra_ssd_capability: Option<UltraSsdCapability>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub accelerated_networking: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub availability_set: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub diagnostics: Diagnostics,
    #[serde(rename = "capacityReservationGroupID", skip_serializing_if = "Option::is_none")]
    pub capacity_reservation_group_id: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// What the Azure provider knows of a machine: the typed content of `status.providerStatus`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachineProviderStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_state: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<meta::Condition>,
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
