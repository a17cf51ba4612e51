//! What a virtual machine is cloned from and into; shared by VSphereMachine and VSphereVM.

use crate::cel::{Rule, rule};
use crate::common::{Quantity, is_default, is_false};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// How a disk's space is set aside: on demand, at once, or at once and wiped.
    pub enum ProvisioningMode {
        Thin = "Thin",
        Thick = "Thick",
        EagerlyZeroed = "EagerlyZeroed",
    }
}

string_enum! {
    /// Encryption of fault tolerance traffic.
    pub enum FtEncryptionMode {
        Disabled = "ftEncryptionDisabled",
        Opportunistic = "ftEncryptionOpportunistic",
        Required = "ftEncryptionRequired",
    }
}

string_enum! {
    /// Encryption of a machine that is being migrated.
    pub enum MigrateEncryption {
        Disabled = "disabled",
        Opportunistic = "opportunistic",
        Required = "required",
    }
}

/// A static route.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkRouteSpec {
    /// Where to, in CIDR form.
    pub to: String,
    /// Through which gateway.
    pub via: String,
    /// Which route is preferred: the lower.
    pub metric: i32,
}

/// What to take over from DHCP.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpOverrides {
    /// Host name to send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Metric of the routes received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route_metric: Option<i64>,
    /// Whether the host name is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_hostname: Option<bool>,
    /// Whether name servers are taken over.
    #[serde(rename = "useDNS", skip_serializing_if = "Option::is_none")]
    pub use_dns: Option<bool>,
    /// Whether search domains are taken over: true, false or route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_domains: Option<String>,
    /// Whether the host name is taken over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_hostname: Option<bool>,
    /// Whether the MTU is taken over.
    #[serde(rename = "useMTU", skip_serializing_if = "Option::is_none")]
    pub use_mtu: Option<bool>,
    /// Whether time servers are taken over.
    #[serde(rename = "useNTP", skip_serializing_if = "Option::is_none")]
    pub use_ntp: Option<bool>,
    /// Whether routes are taken over: true, false or gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_routes: Option<String>,
}

/// A network card and its addresses.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkDeviceSpec {
    /// Network that it is connected to.
    pub network_name: String,
    /// Name of the card in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// Whether IPv4 addresses come from DHCP.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp4: bool,
    /// Whether IPv6 addresses come from DHCP.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp6: bool,
    /// Gateway for IPv4, with static addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway4: Option<String>,
    /// Gateway for IPv6, with static addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway6: Option<String>,
    /// Static addresses, in CIDR form.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "items" = short_text(), "x-kubernetes-validations" = address_rules()))]
    pub ip_addrs: Vec<String>,
    /// Largest packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i64>,
    /// Hardware address; made up by vCenter when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_addr: Option<String>,
    /// DNS servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Static routes of this card.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    /// DNS search domains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    /// IP pools that addresses are claimed from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
    /// What to take over from DHCP for IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    /// What to take over from DHCP for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    /// Leaves addresses to somebody else.
    #[serde(rename = "skipIPAllocation", default, skip_serializing_if = "is_false")]
    pub skip_ip_allocation: bool,
}

/// The network of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Its network cards.
    #[schemars(extend("maxItems" = 64))]
    pub devices: Vec<NetworkDeviceSpec>,
    /// Static routes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    /// Which address the API server listens on, when there are several.
    #[serde(rename = "preferredAPIServerCidr", skip_serializing_if = "Option::is_none")]
    pub preferred_api_server_cidr: Option<String>,
}

/// An amount of CPU and memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceSpec {
    /// CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Quantity>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

/// Relative weight of CPU and memory when a host is short of them.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceShares {
    /// CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub cpu: Option<i32>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub memory: Option<i32>,
}

/// Reservations, limits and shares.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResources {
    /// What is kept free for the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub requests: VirtualMachineResourceSpec,
    /// What the machine cannot go beyond.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: VirtualMachineResourceSpec,
    /// Its weight against other machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shares: VirtualMachineResourceShares,
}

/// A device of the host passed through, by ids or by vGPU profile.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pci_rules()))]
pub struct PciDevice {
    /// Device ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_id: Option<i32>,
    /// Vendor ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor_id: Option<i32>,
    /// Profile of a virtual GPU.
    #[serde(rename = "vGPUProfile", skip_serializing_if = "Option::is_none")]
    pub vgpu_profile: Option<String>,
    /// A label by which the device is found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_label: Option<String>,
}

/// What a virtual machine is cloned from and what it becomes.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneSpec {
    /// Template or virtual machine to clone, by name, inventory path or UUID.
    #[schemars(extend("minLength" = 1))]
    pub template: String,
    /// Linked when there is a snapshot and nothing is said; else full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_mode: Option<CloneMode>,
    /// Snapshot to clone from; the current one when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// vCenter's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// SHA-1 thumbprint of vCenter's certificate; unchecked against a CA when given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    /// Datacenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datacenter: Option<String>,
    /// Folder of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// Datastore of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Storage policy of the machine; picks a datastore when none is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_policy_name: Option<String>,
    /// Resource pool of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    /// Its network.
    pub network: NetworkSpec,
    /// Number of CPUs; 2 when unset or less.
    #[serde(rename = "numCPUs", skip_serializing_if = "Option::is_none")]
    pub num_cpus: Option<i32>,
    /// Cores per socket; the template's when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cores_per_socket: Option<i32>,
    /// Reservations, limits and shares.
    #[serde(default, skip_serializing_if = "is_default")]
    pub resources: VirtualMachineResources,
    /// Memory in MiB; 2048 when unset.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i64>,
    /// Size of the first disk in GiB; the template's when unset, never less than it.
    #[serde(rename = "diskGiB", skip_serializing_if = "Option::is_none")]
    pub disk_gib: Option<i32>,
    /// Sizes of the template's further disks in GiB.
    #[serde(rename = "additionalDisksGiB", default, skip_serializing_if = "Vec::is_empty")]
    pub additional_disks_gib: Vec<i32>,
    /// Further VMX settings.
    #[serde(rename = "customVMXKeys", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub custom_vmx_keys: BTreeMap<String, String>,
    /// Tags to attach.
    #[serde(rename = "tagIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub tag_ids: Vec<String>,
    /// Devices of the host passed through.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci_devices: Vec<PciDevice>,
    /// Family of the guest's operating system; Linux when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<Os>,
    /// Virtual hardware, as in vmx-17; never lower than the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = hardware_rules()))]
    pub hardware_version: Option<String>,
    /// Disks made with the machine, after those of the template and in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 256))]
    #[schemars(extend("x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    /// Whether the guest can run virtual machines itself.
    #[serde(rename = "nestedHV", skip_serializing_if = "Option::is_none")]
    pub nested_hv: Option<bool>,
    /// Encryption of fault tolerance traffic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ft_encryption_mode: Option<FtEncryptionMode>,
    /// Encryption while the machine is being migrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrate_encryption: Option<MigrateEncryption>,
    /// Key that the machine is encrypted with.
    #[serde(rename = "cryptoKeyID", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 128))]
    pub crypto_key_id: Option<String>,
    /// Storage policy that the machine is encrypted by.
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
