//! Virtual devices: read as far as disks and networks need them; those are kept whole beside that, so that nothing is lost
//! when one is sent back.

use capstan_core::disks::vsphere as disks;
use capstan_core::disks::vsphere::ControllerKind;

use crate::xml::Element;
use capstan_core::vm::MoRef;

/// One virtual device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub key: i32,
    pub controller_key: Option<i32>,
    pub unit: Option<i32>,
    pub label: String,
    /// The vim25 type, such as `VirtualDisk`.
    pub type_name: String,
    pub kind: DeviceKind,
    /// The device as vCenter reported it, or a reference for those that are never sent back with their content.
    pub(crate) raw: Element,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Disk(Disk),
    Controller(Controller),
    Nic(Nic),
    PciPassthrough,
    /// Anything else: a reference that takes up a unit, no more.
    Other,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub capacity_kib: i64,
    /// `[datastore] folder/name.vmdk`.
    pub path: String,
    pub datastore: Option<MoRef>,
    pub uuid: String,
    pub mode: String,
    pub thin_provisioned: Option<bool>,
    pub eagerly_scrub: Option<bool>,
    /// Whether the disk is a delta on another one, as linked clones have it.
    pub has_parent: bool,
    /// The id of a first class disk: one that outlives machines, such as a CSI volume.
    pub first_class_id: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    pub kind: ControllerKind,
    pub bus: i32,
    pub own_unit: Option<i32>,
    pub pci_slot: Option<i32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    pub mac: String,
    pub network: Option<MoRef>,
    pub portgroup_key: Option<String>,
    pub opaque_network_id: Option<String>,
    pub connected: bool,
}

impl Device {
    /// Reads a device from `<VirtualDevice xsi:type="…">`.
    pub(crate) fn read(element: &Element) -> Option<Self> {
        let type_name = element.kind.clone().unwrap_or_else(|| element.name.clone());
        let kind = match controller_kind(&type_name) {
            Some(kind) => DeviceKind::Controller(Controller {
                kind,
                bus: element.number_at("busNumber").unwrap_or_default(),
                own_unit: element.number_at("scsiCtlrUnitNumber"),
                pci_slot: element.number_at("slotInfo.pciSlotNumber"),
            }),
            None if type_name == "VirtualDisk" => DeviceKind::Disk(read_disk(element)),
            None if is_nic(&type_name) => DeviceKind::Nic(read_nic(element)),
            None if type_name == "VirtualPCIPassthrough" => DeviceKind::PciPassthrough,
            None => DeviceKind::Other,
        };
        Some(Self {
            key: element.number_at("key")?,
            controller_key: element.number_at("controllerKey"),
            unit: element.number_at("unitNumber"),
            label: element.string_at("deviceInfo.label").unwrap_or_default(),
            raw: match kind {
                DeviceKind::Disk(_) | DeviceKind::Nic(_) | DeviceKind::PciPassthrough => element.clone(),
                DeviceKind::Controller(_) | DeviceKind::Other => reference_to(element),
            },
            type_name,
            kind,
        })
    }

    pub fn disk(&self) -> Option<&Disk> {
        match &self.kind {
            DeviceKind::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    pub fn controller(&self) -> Option<&Controller> {
        match &self.kind {
            DeviceKind::Controller(controller) => Some(controller),
            _ => None,
        }
    }

    pub fn nic(&self) -> Option<&Nic> {
        match &self.kind {
            DeviceKind::Nic(nic) => Some(nic),
            _ => None,
        }
    }
}

/// Type and key, which are enough to name a device: a machine has a dozen that nobody ever changes.
fn reference_to(element: &Element) -> Element {
    let key = element.child("key").cloned();
    Element {
        name: element.name.clone(),
        kind: element.kind.clone(),
        children: key.into_iter().collect(),
        ..Element::default()
    }
}

fn read_disk(element: &Element) -> Disk {
    let backing = element.child("backing");
    let text = |path: &str| backing.and_then(|backing| backing.string_at(path));
    let bytes: Option<i64> = element.number_at("capacityInBytes");
    Disk {
        capacity_kib: element
            .number_at("capacityInKB")
            .or(bytes.map(|bytes| bytes / 1024))
            .unwrap_or_default(),
        path: text("fileName").unwrap_or_default(),
        datastore: backing.and_then(|backing| backing.moref_at("datastore")),
        uuid: text("uuid").unwrap_or_default(),
        mode: text("diskMode").unwrap_or_default(),
        thin_provisioned: backing.and_then(|backing| backing.bool_at("thinProvisioned")),
        eagerly_scrub: backing.and_then(|backing| backing.bool_at("eagerlyScrub")),
        has_parent: backing.is_some_and(|backing| backing.child("parent").is_some()),
        first_class_id: element.string_at("vDiskId.id"),
    }
}

fn read_nic(element: &Element) -> Nic {
    let backing = element.child("backing");
    let text = |path: &str| backing.and_then(|backing| backing.string_at(path));
    Nic {
        mac: element.string_at("macAddress").unwrap_or_default(),
        network: backing.and_then(|backing| backing.moref_at("network")),
        portgroup_key: text("port.portgroupKey"),
        opaque_network_id: text("opaqueNetworkId"),
        connected: element.bool_at("connectable.connected").unwrap_or(false),
    }
}

fn is_nic(type_name: &str) -> bool {
    matches!(
        type_name,
        "VirtualVmxnet"
            | "VirtualVmxnet2"
            | "VirtualVmxnet3"
            | "VirtualVmxnet3Vrdma"
            | "VirtualE1000"
            | "VirtualE1000e"
            | "VirtualPCNet32"
            | "VirtualSriovEthernetCard"
    )
}

fn controller_kind(type_name: &str) -> Option<ControllerKind> {
    Some(match type_name {
        "ParaVirtualSCSIController" => ControllerKind::ParaVirtual,
        "VirtualLsiLogicController" => ControllerKind::LsiLogic,
        "VirtualLsiLogicSASController" => ControllerKind::LsiLogicSas,
        "VirtualBusLogicController" => ControllerKind::BusLogic,
        "VirtualAHCIController" | "VirtualSATAController" => ControllerKind::Sata,
        "VirtualNVMEController" => ControllerKind::Nvme,
        "VirtualIDEController" => ControllerKind::Ide,
        _ => return None,
    })
}

pub(crate) fn controller_type(kind: ControllerKind) -> &'static str {
    match kind {
        ControllerKind::ParaVirtual => "ParaVirtualSCSIController",
        ControllerKind::LsiLogic => "VirtualLsiLogicController",
        ControllerKind::LsiLogicSas => "VirtualLsiLogicSASController",
        ControllerKind::BusLogic => "VirtualBusLogicController",
        ControllerKind::Sata => "VirtualAHCIController",
        ControllerKind::Nvme => "VirtualNVMEController",
        ControllerKind::Ide => "VirtualIDEController",
    }
}

/// The devices as the decisions about disks want them.
pub fn hardware(version: u32, devices: &[Device]) -> disks::Hardware {
    let controllers = devices
        .iter()
        .filter_map(|device| {
            device.controller().map(|controller| disks::Controller {
                key: device.key,
                kind: controller.kind,
                bus: controller.bus,
                own_unit: controller.own_unit,
                pci_slot: controller.pci_slot,
            })
        })
        .collect();
    let placed = devices
        .iter()
        .filter(|device| device.controller().is_none())
        .filter_map(|device| {
            Some(disks::Device {
                key: device.key,
                controller_key: device.controller_key?,
                unit: device.unit,
                disk: device.disk().map(|disk| disks::Disk {
                    capacity_kib: disk.capacity_kib,
                    path: disk.path.clone(),
                    uuid: disk.uuid.clone(),
                }),
            })
        })
        .collect();
    disks::Hardware {
        version,
        controllers,
        devices: placed,
    }
}
