//! The words of the vSphere plans, free of the version of the API that asks for a machine and of the wire format of vCenter.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::MoRef;
use crate::disks::vsphere::{DataDisk, Hardware, Placement};

/// How a machine is powered off before it is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerOff {
    #[default]
    Hard,
    Soft,
    TrySoft,
}

/// A static route of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    pub to: String,
    pub via: String,
    pub metric: i32,
}

/// How the guest treats a DHCP answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DhcpOverrides {
    pub hostname: Option<String>,
    pub route_metric: Option<i64>,
    pub send_hostname: Option<bool>,
    pub use_dns: Option<bool>,
    pub use_domains: Option<String>,
    pub use_hostname: Option<bool>,
    pub use_mtu: Option<bool>,
    pub use_ntp: Option<bool>,
    pub use_routes: Option<String>,
}

/// A desired network card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkDevice {
    pub network: String,
    pub device_name: Option<String>,
    pub dhcp4: bool,
    pub dhcp6: bool,
    pub gateway4: Option<String>,
    pub gateway6: Option<String>,
    pub addresses: Vec<String>,
    pub mtu: Option<i64>,
    pub mac: Option<String>,
    pub nameservers: Vec<String>,
    pub search_domains: Vec<String>,
    pub routes: Vec<Route>,
    pub dhcp4_overrides: Option<DhcpOverrides>,
    pub dhcp6_overrides: Option<DhcpOverrides>,
    /// Whether an IPAM provider allocates the addresses from a pool.
    pub pooled: bool,
    pub skip_allocation: bool,
}

/// A PCI device to pass through, or a slice of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pci {
    Device {
        vendor: i32,
        device: i32,
        label: Option<String>,
    },
    VGpu {
        profile: String,
    },
}

/// The share of a host's CPU in MHz, or of its memory in MiB. vCenter keeps its value of a field that is unset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    pub reservation: Option<i64>,
    pub limit: Option<i64>,
    pub shares: Option<i32>,
}

/// The virtual machine that a VSphereVM describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredVm {
    pub name: String,
    /// The VSphereVM's UID, which the VM carries as its instance UUID.
    pub instance_uuid: String,
    pub template: String,
    pub linked: bool,
    pub snapshot: Option<String>,
    pub datacenter: Option<String>,
    pub folder: Option<String>,
    pub pool: Option<String>,
    pub datastore: Option<String>,
    pub storage_policy: Option<String>,
    pub networks: Vec<NetworkDevice>,
    pub routes: Vec<Route>,
    pub cpus: i32,
    pub cores_per_socket: Option<i32>,
    pub memory_mib: i64,
    pub cpu_allocation: Allocation,
    pub memory_allocation: Allocation,
    /// Whether the guest can run virtual machines itself.
    pub nested_hv: Option<bool>,
    pub migrate_encryption: Option<String>,
    pub ft_encryption: Option<String>,
    pub primary_gib: Option<i64>,
    pub additional_gib: Vec<i64>,
    pub vmx: BTreeMap<String, String>,
    pub tags: Vec<String>,
    pub pci: Vec<Pci>,
    pub hardware_version: Option<String>,
    pub disks: Vec<DataDisk>,
    pub power_off: PowerOff,
    pub soft_timeout: Duration,
}

impl DesiredVm {
    /// Whether a guest that cannot be asked to shut down may be powered off.
    pub fn may_be_forced(&self) -> bool {
        self.power_off == PowerOff::TrySoft
    }
}

/// The bootstrap data of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserData {
    CloudInit(Vec<u8>),
    Ignition(Vec<u8>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerState {
    On,
    #[default]
    Off,
    Suspended,
}

/// A network card of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    pub key: i32,
    pub mac: String,
    /// The network of the card, in the form that the controller resolves desired networks to.
    pub backing: String,
    pub connected: bool,
}

/// A network card as the guest reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestNic {
    pub mac: String,
    pub network: Option<String>,
    pub connected: bool,
    pub addresses: Vec<IpAddr>,
}

/// The storage policies of a VM, by their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Of the files that are no disks.
    pub home: Option<String>,
    /// Of the disks, by device key.
    pub disks: BTreeMap<i32, String>,
}

/// The vCenter objects that the names in a spec stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedNames {
    /// The backings of the network cards, in the order of the spec.
    pub networks: Vec<String>,
    /// The storage policy of the VM and of the disks that it has from its template.
    pub policy: Option<String>,
    /// The storage policies of the data disks, in the order of the spec.
    pub disk_policies: Vec<Option<String>>,
}

impl ResolvedNames {
    /// Whether the spec names any storage policy.
    pub fn has_policies(&self) -> bool {
        self.policy.is_some() || self.disk_policies.iter().any(Option::is_some)
    }
}

/// A VM as vCenter reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVm {
    pub reference: MoRef,
    /// Why vCenter cannot read the configuration of the VM; everything but the reference is unknown then.
    pub unreadable: Option<String>,
    /// The storage policies, once they have been read.
    pub policies: Option<Policies>,
    pub name: String,
    pub instance_uuid: String,
    pub bios_uuid: String,
    pub power: PowerState,
    pub hardware: Hardware,
    /// The keys of disks that are first-class objects of their own, such as volumes of a CSI driver.
    pub volumes: Vec<i32>,
    /// `[datastore] folder/name.vmx`.
    pub vmx_path: String,
    pub cpus: i32,
    pub cores_per_socket: i32,
    pub memory_mib: i64,
    pub cpu_allocation: Allocation,
    pub memory_allocation: Allocation,
    pub nested_hv: bool,
    pub nics: Vec<Nic>,
    pub pci_devices: usize,
    pub extra_config: BTreeMap<String, String>,
    pub guest: Vec<GuestNic>,
    pub tools_running: bool,
    pub host: Option<String>,
}

impl ObservedVm {
    /// Returns a VM of which nothing but the reference is known.
    pub fn new(reference: MoRef) -> Self {
        Self {
            reference,
            unreadable: Default::default(),
            policies: Default::default(),
            name: Default::default(),
            instance_uuid: Default::default(),
            bios_uuid: Default::default(),
            power: Default::default(),
            hardware: Default::default(),
            volumes: Default::default(),
            vmx_path: Default::default(),
            cpus: Default::default(),
            cores_per_socket: Default::default(),
            memory_mib: Default::default(),
            cpu_allocation: Default::default(),
            memory_allocation: Default::default(),
            nested_hv: Default::default(),
            nics: Default::default(),
            pci_devices: Default::default(),
            extra_config: Default::default(),
            guest: Default::default(),
            tools_running: Default::default(),
            host: Default::default(),
        }
    }
}

/// The part of a VSphereVM's status that the plan needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Whether the VM was ready once: it is never cloned again, and its hardware is not changed any more.
    pub was_ready: bool,
    /// The BIOS UUID in the spec.
    pub bios_uuid: Option<String>,
    /// The units that the data disks were given before the clone.
    pub placements: Vec<Placement>,
    pub linked: bool,
}
