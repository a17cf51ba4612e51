//! The template and the settings of a virtual machine, shared by VSphereMachine and VSphereVM.

use crate::cel::{Rule, rule};
use crate::common::{Quantity, is_default, is_false};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

string_enum! {
    /// The provisioning of a disk's space: on demand, at creation, or at creation and filled with zeros.
    pub enum ProvisioningMode {
        Thin = "Thin",
        Thick = "Thick",
        EagerlyZeroed = "EagerlyZeroed",
    }
}

string_enum! {
    /// The encryption of fault tolerance traffic.
    pub enum FtEncryptionMode {
        Disabled = "ftEncryptionDisabled",
        Opportunistic = "ftEncryptionOpportunistic",
        Required = "ftEncryptionRequired",
    }
}

string_enum! {
    /// The encryption of a virtual machine's migration (vMotion).
    pub enum MigrateEncryption {
        Disabled = "disabled",
        Opportunistic = "opportunistic",
        Required = "required",
    }
}

/// A static route of a guest.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkRouteSpec {
    /// Destination of the route, in CIDR notation.
    pub to: String,
    /// IP address of the gateway.
    pub via: String,
    /// Metric of the route. The guest prefers the lower one.
    pub metric: i32,
}

/// Settings of the guest's DHCP client that differ from its defaults.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpOverrides {
    /// Host name that the guest sends, instead of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Metric of the routes that DHCP provides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route_metric: Option<i64>,
    /// Whether the guest sends its host name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_hostname: Option<bool>,
    /// Whether the guest uses the DNS servers that DHCP provides.
    #[serde(rename = "useDNS", skip_serializing_if = "Option::is_none")]
    pub use_dns: Option<bool>,
    /// Whether the guest uses the DNS domains that DHCP provides: true, false or route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_domains: Option<String>,
    /// Whether the guest uses the host name that DHCP provides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_hostname: Option<bool>,
    /// Whether the guest uses the MTU that DHCP provides.
    #[serde(rename = "useMTU", skip_serializing_if = "Option::is_none")]
    pub use_mtu: Option<bool>,
    /// Whether the guest uses the NTP servers that DHCP provides.
    #[serde(rename = "useNTP", skip_serializing_if = "Option::is_none")]
    pub use_ntp: Option<bool>,
    /// Whether the guest uses the routes that DHCP provides: true, false or gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_routes: Option<String>,
}

/// A network device of a virtual machine, with its addresses.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkDeviceSpec {
    /// Name of the vSphere network that the device is connected to.
    pub network_name: String,
    /// Name of the device in the guest. Derived from the order of the devices when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// Whether the device gets IPv4 addresses from DHCP.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp4: bool,
    /// Whether the device gets IPv6 addresses from DHCP.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dhcp6: bool,
    /// IPv4 gateway of the device. Needed with static IPv4 addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway4: Option<String>,
    /// IPv6 gateway of the device. Needed with static IPv6 addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway6: Option<String>,
    /// Static IP addresses of the device, in CIDR notation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "items" = short_text(), "x-kubernetes-validations" = address_rules()))]
    pub ip_addrs: Vec<String>,
    /// Maximum transmission unit (MTU) of the device, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i64>,
    /// MAC address of the device. vCenter generates one when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_addr: Option<String>,
    /// DNS servers of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Static routes of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    /// DNS search domains of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_domains: Vec<String>,
    /// IP pools from which IPAddressClaims of the device get addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses_from_pools: Vec<TypedLocalObjectReference>,
    /// DHCP client settings of the device for IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp4_overrides: Option<DhcpOverrides>,
    /// DHCP client settings of the device for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp6_overrides: Option<DhcpOverrides>,
    /// Whether the device needs no IP address, from DHCP, IP pools or static configuration.
    #[serde(rename = "skipIPAllocation", default, skip_serializing_if = "is_false")]
    pub skip_ip_allocation: bool,
}

/// Network settings of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Network devices of the virtual machine.
    #[schemars(extend("maxItems" = 64))]
    pub devices: Vec<NetworkDeviceSpec>,
    /// Static routes of the virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<NetworkRouteSpec>,
    /// Address range, in CIDR notation, from which the API server of this machine prefers its address.
    #[serde(rename = "preferredAPIServerCidr", skip_serializing_if = "Option::is_none")]
    pub preferred_api_server_cidr: Option<String>,
}

/// An amount of CPU and memory.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceSpec {
    /// CPU frequency in hertz, such as 2G for 2 GHz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Quantity>,
    /// Amount of memory, such as 4Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

/// Relative priority for CPU and memory when a host is short of them.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResourceShares {
    /// Number of CPU shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub cpu: Option<i32>,
    /// Number of memory shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub memory: Option<i32>,
}

/// Reservations, limits and shares of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineResources {
    /// CPU and memory that the host reserves for the virtual machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub requests: VirtualMachineResourceSpec,
    /// CPU and memory that the virtual machine cannot exceed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: VirtualMachineResourceSpec,
    /// Shares of CPU and memory, relative to other virtual machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shares: VirtualMachineResourceShares,
}

/// A PCI device of the host that is passed through to the virtual machine, by IDs or by vGPU profile.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pci_rules()))]
pub struct PciDevice {
    /// Device ID of the PCI device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_id: Option<i32>,
    /// Vendor ID of the PCI device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor_id: Option<i32>,
    /// Profile name of a virtual GPU.
    #[serde(rename = "vGPUProfile", skip_serializing_if = "Option::is_none")]
    pub vgpu_profile: Option<String>,
    /// Hardware label of the PCI device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_label: Option<String>,
}

/// Template and settings of a virtual machine that is cloned.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineCloneSpec {
    /// Template or virtual machine to clone, by name, inventory path or UUID.
    #[schemars(extend("minLength" = 1))]
    pub template: String,
    /// Clone mode: linkedClone or fullClone. Linked when unset and the template has a snapshot, full otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_mode: Option<CloneMode>,
    /// Name of the snapshot to clone from. The current snapshot when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Host name or IP address of vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// SHA-1 or SHA-256 thumbprint of vCenter's certificate. When set, Capstan accepts only that certificate and does
    /// not verify its CA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<String>,
    /// Datacenter of the virtual machine, by name or inventory path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datacenter: Option<String>,
    /// Folder of the virtual machine, by name or inventory path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// Datastore of the virtual machine, by name or inventory path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Storage policy of the virtual machine. Selects the datastore when datastore is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_policy_name: Option<String>,
    /// Resource pool of the virtual machine, by name or inventory path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_pool: Option<String>,
    /// Network settings of the virtual machine.
    pub network: NetworkSpec,
    /// Number of virtual CPUs. 2 when unset or lower.
    #[serde(rename = "numCPUs", skip_serializing_if = "Option::is_none")]
    pub num_cpus: Option<i32>,
    /// Number of cores per CPU socket. That of the template when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cores_per_socket: Option<i32>,
    /// Reservations, limits and shares of CPU and memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub resources: VirtualMachineResources,
    /// Memory of the virtual machine in MiB. 2048 when unset.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i64>,
    /// Size of the first disk in GiB. That of the template when unset; it cannot be smaller.
    #[serde(rename = "diskGiB", skip_serializing_if = "Option::is_none")]
    pub disk_gib: Option<i32>,
    /// Sizes in GiB of the template's disks after the first one.
    #[serde(rename = "additionalDisksGiB", default, skip_serializing_if = "Vec::is_empty")]
    pub additional_disks_gib: Vec<i32>,
    /// Additional VMX keys (extraConfig) of the virtual machine.
    #[serde(rename = "customVMXKeys", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub custom_vmx_keys: BTreeMap<String, String>,
    /// IDs of the vSphere tags to attach to the virtual machine.
    #[serde(rename = "tagIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub tag_ids: Vec<String>,
    /// PCI devices of the host that are passed through to the virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci_devices: Vec<PciDevice>,
    /// Operating system of the guest: Linux or Windows. Linux when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<Os>,
    /// Hardware version of the virtual machine, such as vmx-17. Never lower than that of the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = hardware_rules()))]
    pub hardware_version: Option<String>,
    /// Data disks that are created with the virtual machine, after the disks of the template and in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 256))]
    #[schemars(extend("x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    /// Whether the guest can run virtual machines itself (nested virtualization).
    #[serde(rename = "nestedHV", skip_serializing_if = "Option::is_none")]
    pub nested_hv: Option<bool>,
    /// Encryption of the virtual machine's fault tolerance traffic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ft_encryption_mode: Option<FtEncryptionMode>,
    /// Encryption of the virtual machine's migration (vMotion).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrate_encryption: Option<MigrateEncryption>,
    /// ID of the key that encrypts the virtual machine.
    #[serde(rename = "cryptoKeyID", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 128))]
    pub crypto_key_id: Option<String>,
    /// Storage policy that encrypts the virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 128))]
    pub crypto_profile: Option<String>,
}

string_enum! {
    /// The clone mode: with disks of its own (fullClone), or based on a snapshot (linkedClone).
    pub open enum CloneMode {
        FullClone = "fullClone",
        LinkedClone = "linkedClone",
    }
}

string_enum! {
    /// The operating system of a guest.
    pub open enum Os {
        Linux = "Linux",
        Windows = "Windows",
    }
}

string_enum! {
    /// The type of a disk controller.
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

/// The controller of a data disk. Capstan adds it when the virtual machine does not have it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskController {
    /// Type of the controller. The type of the first disk's controller when unset.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ControllerType>,
    /// Bus number of the controller, among those of the same type. 0 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 3))]
    pub bus: Option<i32>,
}

/// A disk that is created with the virtual machine, beside the disks of its template.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = data_disk_rules()))]
pub struct DataDisk {
    /// Name of the disk in the status and in guestinfo. It may be empty, and several disks may share it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 1024))]
    pub name: Option<String>,
    /// Size of the disk in GiB.
    #[serde(rename = "sizeGiB")]
    #[schemars(extend("minimum" = 1))]
    pub size_gib: i32,
    /// Provisioning of the disk's space: Thin, Thick or EagerlyZeroed. The storage policy decides when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_mode: Option<ProvisioningMode>,
    /// Not a valid field: the API server rejects it and names the valid one, `provisioningMode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_type: Option<String>,
    /// Controller of the disk. The controller of the first disk when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<DataDiskController>,
    /// Unit number of the disk on its controller. The next free number when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0, "maximum" = 63))]
    pub unit_number: Option<i32>,
    /// Datastore of the disk. That of the first disk when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Storage policy of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_policy_name: Option<String>,
}

/// Bounds the length of an address with its prefix length.
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

/// Returns the rule of VSphereMachine and VSphereVM: a timeout for the guest is valid in one power-off mode only.
pub(super) fn power_rules() -> [Rule; 1] {
    const SOFT: &str = "self.?guestSoftPowerOffTimeout.orValue('0s') == '0s' || \
        self.?powerOffMode.orValue('hard') == 'trySoft'";
    [rule(
        SOFT,
        "should not be set in templates unless the powerOffMode is trySoft",
    )
    .at(".guestSoftPowerOffTimeout")]
}
