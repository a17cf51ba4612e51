//! Machines on vSphere in the words of this controller, free of the version of the API that asked for them and of the
//! wire that vCenter speaks.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use capstan_core::disks::vsphere::{DataDisk, Hardware, Placement};

/// How a machine is brought down.
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

/// What the guest does with a DHCP answer.
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

/// A network card that is asked for.
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
    /// Addresses come from a pool that somebody else hands out.
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

/// A machine's part of its host's CPU in MHz, or of its memory in MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    pub reservation: Option<i64>,
    pub limit: Option<i64>,
    pub shares: Option<i32>,
}

/// The virtual machine that a VSphereVM asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    /// The VSphereVM's UID: the VM carries it as its instance UUID, and by nothing else is it ours.
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

/// What the guest is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserData {
    CloudInit(Vec<u8>),
    Ignition(Vec<u8>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Power {
    On,
    #[default]
    Off,
    Suspended,
}

/// A network card that a VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    pub key: i32,
    pub mac: String,
    /// What it is plugged into, in a form that equals what [`crate::vm`] resolves a network to.
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

/// A VM as vCenter has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub name: String,
    pub instance_uuid: String,
    pub bios_uuid: String,
    pub power: Power,
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

/// What is remembered of a VM between passes, in its status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// It was up once: it is never cloned again, and its hardware is its owner's from then on.
    pub seen: bool,
    /// The units that were given out before the clone.
    pub placements: Vec<Placement>,
    pub linked: bool,
}
