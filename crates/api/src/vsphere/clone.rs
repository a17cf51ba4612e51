//! What a virtual machine is cloned from and into; shared by VSphereMachine and VSphereVM.

use crate::cel::{Rule, rule};
use crate::common::{Quantity, is_default, is_false};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    pub enum ProvisioningMode {
        Thin = "Thin",
        Thick = "Thick",
        EagerlyZeroed = "EagerlyZeroed",
    }
}

string_enum! {
    pub enum FtEncryptionMode {
        Disabled = "ftEncryptionDisabled",
        Opportunistic = "ftEncryptionOpportunistic",
        Required = "ftEncryptionRequired",
    }
}

string_enum! {
    pub enum MigrateEncryption {
        Disabled = "disabled",
        Opportunistic = "opportunistic",
        Required = "required",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkRouteSpec {
    pub to: String,
    pub via: String,
    pub metric: i32,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpOverrides {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route_metric: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_hostname: Option<bool>,
    #[serde(rename = "useDNS", skip_serializing_if = "Option::is_none")]
    pub use_dns: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_domains: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_hostname: Option<bool>,
    #[serde(rename = "useMTU", skip_serializing_if = "Option::is_none")]
    pub use_mtu: Option<bool>,
    #[serde(rename = "useNTP", skip_serializing_if = "Option::is_none")]
    pub use_ntp: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_routes: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkDeviceSpec {
    pub network_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp4: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp6: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway4: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway6: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "items" = short_text(), "x-kubernetes-validations" = address_rules()))]
    pub ip_addrs: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_addr: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    #[serde(rename = "skipIPAllocation", default, skip_serializing_if = "is_false")]
    pub skip_ip_allocation: bool,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    #[schemars(extend("maxItems" = 64))]
    pub devices: Vec<NetworkDeviceSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    #[serde(rename = "preferredAPIServerCidr", skip_serializing_if = "Option::is_none")]
    pub preferred_api_server_cidr: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceShares {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub cpu: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub memory: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResources {
    #[serde(default, skip_serializing_if = "is_default")]
    pub requests: VirtualMachineResourceSpec,
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: VirtualMachineResourceSpec,
    #[serde(default, skip_serializing_if = "is_default")]
    pub shares: VirtualMachineResourceShares,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pci_rules()))]
pub struct PciDevice {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_id: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor_id: Option<i32>,
    #[serde(rename = "vGPUProfile", skip_serializing_if = "Option::is_none")]
    pub vgpu_profile: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_label: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneSpec {
    #[schemars(extend("minLength" = 1))]
    pub template: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_mode: Option<CloneMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datacenter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_policy_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    pub network: NetworkSpec,
    #[serde(rename = "numCPUs", skip_serializing_if = "Option::is_none")]
    pub num_cpus: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cores_per_socket: Option<i32>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub resources: VirtualMachineResources,
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i64>,
    #[serde(rename = "diskGiB", skip_serializing_if = "Option::is_none")]
    pub disk_gib: Option<i32>,
    #[serde(rename = "additionalDisksGiB", default, skip_serializing_if = "Vec::is_empty")]
    pub additional_disks_gib: Vec<i32>,
    #[serde(rename = "customVMXKeys", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub custom_vmx_keys: BTreeMap<String, String>,
    #[serde(rename = "tagIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub tag_ids: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci_devices: Vec<PciDevice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<Os>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = hardware_rules()))]
    pub hardware_version: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 256))]
    #[schemars(extend("x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    #[serde(rename = "nestedHV", skip_serializing_if = "Option::is_none")]
    pub nested_hv: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ft_encryption_mode: Option<FtEncryptionMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrate_encryption: Option<MigrateEncryption>,
    #[serde(rename = "cryptoKeyID", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 128))]
    pub crypto_key_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 128))]
    pub crypto_profile: Option<String>,
}

string_enum! {
    /// Whether a clone has disks of its own or grows from a snapshot.
    pub open enum CloneMode {
        FullClone = "fullClone",
        LinkedClone = "linkedClone",
    }
}

string_enum! {
    /// The guest's family of operating systems.
    pub open enum Os {
        Linux = "Linux",
        Windows = "Windows",
    }
}

string_enum! {
    /// A kind of disk controller.
    pub enum ControllerType {
        Pvscsi = "PVSCSI",
        LsiLogic = "LSILogic",
        LsiLogicSas = "LSILogicSAS",
        BusLogic = "BusLogic",
        Sata = "SATA",
        Nvme = "NVMe",
        Ide = "IDE",
    }
}

/// The controller that a data disk goes to; it is made when the machine does not have it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskController {
    /// The kind of controller; the primary disk's own kind when unset.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ControllerType>,
    /// Bus number among controllers of the kind; 0 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 3))]
    pub bus: Option<i32>,
}

/// A disk that is made with the machine, beside those of its template.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = data_disk_rules()))]
pub struct DataDisk {
    /// What the disk is called in status and guestinfo; free to be empty or shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 1024))]
    pub name: Option<String>,
    /// Size in GiB.
    #[serde(rename = "sizeGiB")]
    #[schemars(extend("minimum" = 1))]
    pub size_gib: i32,
    /// How space is set aside; what the storage policy says when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_mode: Option<ProvisioningMode>,
    /// Not a field: known only so that the API server can name the right one, `provisioningMode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_type: Option<String>,
    /// The controller to attach to; the primary disk's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<DataDiskController>,
    /// Unit number on the controller; the next free one when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 63))]
    pub unit_number: Option<i32>,
    /// Datastore of this disk; the primary disk's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Storage policy of this disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_policy_name: Option<String>,
}

/// An address with its prefix length is never longer.
fn short_text() -> serde_json::Value {
    serde_json::json!({ "type": "string", "maxLength": 64 })
}

fn address_rules() -> [Rule; 1] {
    [rule(
        "self.all(address, isCIDR(address))",
        "ip addresses should be in the CIDR format",
    )]
}

fn hardware_rules() -> [Rule; 1] {
    [rule(
        "self == '' || self.matches('^vmx-[1-9][0-9]?$')",
        "should be a valid VM hardware version, example vmx-17",
    )]
}

fn pci_rules() -> [Rule; 1] {
    const EITHER: &str = "self.?vGPUProfile.orValue('') == '' ? has(self.deviceId) && has(self.vendorId) : \
        !has(self.deviceId) && !has(self.vendorId)";
    [rule(
        EITHER,
        "should have either deviceId + vendorId or vGPUProfile set",
    )]
}

fn data_disk_rules() -> [Rule; 1] {
    [rule(
        "!has(self.provisioningType)",
        "provisioningType is not a field of a data disk: use provisioningMode (Thin, Thick or EagerlyZeroed)",
    )
    .at(".provisioningType")]
}

fn data_disks_rules() -> [Rule; 1] {
    const APART: &str = "self.all(a, !has(a.unitNumber) || self.exists_one(b, has(b.unitNumber) && \
        a.unitNumber == b.unitNumber && has(a.controller) == has(b.controller) && \
        (!has(a.controller) || a.controller == b.controller)))";
    [rule(
        APART,
        "two data disks must not have the same unitNumber on the same controller",
    )]
}

/// Waiting for a guest makes sense in one mode only; for VSphereMachine and VSphereVM.
pub(super) fn power_rules() -> [Rule; 1] {
    const SOFT: &str = "self.?guestSoftPowerOffTimeout.orValue('0s') == '0s' || \
        self.?powerOffMode.orValue('hard') == 'trySoft'";
    [rule(
        SOFT,
        "should not be set in templates unless the powerOffMode is trySoft",
    )
    .at(".guestSoftPowerOffTimeout")]
}
