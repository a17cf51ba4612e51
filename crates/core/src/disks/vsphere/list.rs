//! The list by which a guest, or its administrator, distinguishes the data disks: disks of the same size have nothing else.
//!
//! The same list stands in the VM's status and in its guestinfo, so that bootstrap can find each disk by its own path.

use serde::{Deserialize, Serialize};

use super::controller::Family;
use super::{Controller, ControllerKind, DataDisk, Hardware, Placement};

/// The guestinfo key that carries the list, as JSON.
pub const GUESTINFO_KEY: &str = "guestinfo.capstan.disks";

/// A data disk as it came to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub index: usize,
    pub name: String,
    pub size_gib: i64,
    pub kind: ControllerKind,
    pub bus: i32,
    pub unit: i32,
    pub uuid: String,
    /// `[datastore] folder/name.vmdk`.
    pub path: String,
    /// `/dev/disk/by-id/wwn-0x…`, where the guest has it.
    pub by_id: Option<String>,
    /// `/dev/disk/by-path/pci-…`, where the controller's PCI slot is known.
    pub by_path: Option<String>,
}

/// One entry of the guestinfo document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub name: String,
    #[serde(rename = "sizeGiB")]
    pub size_gib: i64,
    pub controller: String,
    pub bus: i32,
    pub unit_number: i32,
    pub uuid: String,
    pub path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_path: Option<String>,
}

/// The data disks that exist, in the order of the spec.
pub fn list(hardware: &Hardware, disks: &[DataDisk], placements: &[Placement]) -> Vec<Listed> {
    placements
        .iter()
        .filter_map(|placement| {
            let wanted = disks.get(placement.index)?;
            let device = hardware.disk_at(placement.kind, placement.bus, placement.unit)?;
            let disk = device.disk.as_ref()?;
            let controller = hardware.controller(device.controller_key)?;
            Some(Listed {
                index: placement.index,
                name: wanted.name.clone(),
                size_gib: disk.capacity_kib / super::KIB_PER_GIB,
                kind: controller.kind,
                bus: controller.bus,
                unit: placement.unit,
                uuid: disk.uuid.clone(),
                path: disk.path.clone(),
                by_id: (controller.kind != ControllerKind::Nvme)
                    .then(|| wwn(&disk.uuid))
                    .flatten(),
                by_path: by_path(controller, placement.unit),
            })
        })
        .collect()
}

/// The guestinfo document: the same list as JSON, in one line.
pub fn document(listed: &[Listed]) -> String {
    let entries: Vec<Entry> = listed
        .iter()
        .map(|disk| Entry {
            name: disk.name.clone(),
            size_gib: disk.size_gib,
            controller: disk.kind.to_string(),
            bus: disk.bus,
            unit_number: disk.unit,
            uuid: disk.uuid.clone(),
            path: disk.path.clone(),
            by_id: disk.by_id.clone(),
            by_path: disk.by_path.clone(),
        })
        .collect();
    serde_json::to_string(&entries).unwrap_or_else(|_| "[]".into())
}

/// The guest's path by a disk's UUID; needs disk.EnableUUID, which the clone sets.
pub fn wwn(uuid: &str) -> Option<String> {
    let hex: String = uuid
        .chars()
        .filter(|c| *c != '-')
        .collect::<String>()
        .to_ascii_lowercase();
    (hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit())).then(|| format!("/dev/disk/by-id/wwn-0x{hex}"))
}

/// The guest's path by controller and unit, when it is known where the controller sits.
pub fn by_path(controller: &Controller, unit: i32) -> Option<String> {
    let address = pci_address(controller.pci_slot?)?;
    Some(format!(
        "/dev/disk/by-path/pci-{address}-{}",
        path_suffix(controller.kind, unit)?
    ))
}

/// The path that a disk will have on the first controller of its type, where vSphere puts it by default.
pub fn predicted_by_path(kind: ControllerKind, bus: i32, unit: i32) -> Option<String> {
    let pci_slot = match (kind, bus) {
        (ControllerKind::ParaVirtual | ControllerKind::LsiLogicSas, 0) => 160,
        (ControllerKind::LsiLogic | ControllerKind::BusLogic, 0) => 16,
        _ => return None,
    };
    by_path(
        &Controller {
            key: 0,
            kind,
            bus,
            own_unit: None,
            pci_slot: Some(pci_slot),
        },
        unit,
    )
}

fn path_suffix(kind: ControllerKind, unit: i32) -> Option<String> {
    match kind.family() {
        Family::Scsi => Some(format!("scsi-0:0:{unit}:0")),
        Family::Sata => Some(format!("ata-{}", unit.checked_add(1)?)),
        Family::Nvme => Some(format!("nvme-{}", unit.checked_add(1)?)),
        Family::Ide => None,
    }
}

/// vSphere's slot numbers count the device in the low five bits, the bridge in the next five, the function above.
fn pci_address(slot: i32) -> Option<String> {
    let slot = u32::try_from(slot).ok()?;
    let (device, bridge, function) = (slot & 0x1f, (slot >> 5) & 0x1f, slot >> 10);
    match bridge {
        0 if function == 0 => Some(format!("0000:00:{device:02x}.0")),
        1 if function == 0 => Some(format!("0000:02:{device:02x}.0")),
        5..=8 if device == 0 && function < 8 => Some(format!("0000:{:02x}:00.0", 3 + 8 * (bridge - 5) + function)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Device, Disk, KIB_PER_GIB, allocate};
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        "6000C298-595b-f457-0efa-b1a8d3f2e4c5",
        Some("/dev/disk/by-id/wwn-0x6000c298595bf4570efab1a8d3f2e4c5")
    )]
    #[case("", None)]
    #[case("6000C298", None)]
    #[case("6000C298-595b-f457-0efa-b1a8d3f2e4cg", None)]
    fn a_disk_is_found_by_its_uuid(#[case] uuid: &str, #[case] path: Option<&str>) {
        assert_eq!(wwn(uuid).as_deref(), path);
    }

    #[rstest]
    #[case(16, Some("0000:00:10.0"))]
    #[case(33, Some("0000:02:01.0"))]
    #[case(160, Some("0000:03:00.0"))]
    #[case(192, Some("0000:0b:00.0"))]
    #[case(224, Some("0000:13:00.0"))]
    #[case(256, Some("0000:1b:00.0"))]
    #[case(1184, Some("0000:04:00.0"))]
    #[case(-1, None)]
    #[case(i32::MAX, None)]
    fn a_slot_stands_for_a_pci_address(#[case] slot: i32, #[case] address: Option<&str>) {
        assert_eq!(pci_address(slot).as_deref(), address);
    }

    #[test]
    fn same_size_disks_are_told_apart() {
        let controller = Controller {
            key: 1000,
            kind: ControllerKind::ParaVirtual,
            bus: 0,
            own_unit: Some(7),
            pci_slot: Some(160),
        };
        let device = |unit: i32| Device {
            key: 2000 + unit,
            controller_key: 1000,
            unit: Some(unit),
            disk: Some(Disk {
                capacity_kib: 20 * KIB_PER_GIB,
                path: format!("[ds] vm/vm_{unit}.vmdk"),
                uuid: format!("6000C298-595b-f457-0efa-b1a8d3f2e4c{unit}"),
            }),
        };
        let template = Hardware {
            version: 19,
            controllers: vec![controller],
            devices: vec![device(0)],
        };
        let disks: Vec<DataDisk> = ["etcd", "images"]
            .iter()
            .map(|name| DataDisk {
                name: (*name).into(),
                size_gib: 20,
                ..DataDisk::default()
            })
            .collect();
        let placements = allocate(&template, &disks).unwrap().placements;
        let vm = Hardware {
            devices: vec![device(0), device(1), device(2)],
            ..template
        };
        let listed = list(&vm, &disks, &placements);
        assert_eq!(
            listed[0].by_id.as_deref(),
            Some("/dev/disk/by-id/wwn-0x6000c298595bf4570efab1a8d3f2e4c1")
        );
        assert_eq!(
            listed[1].by_path.as_deref(),
            Some("/dev/disk/by-path/pci-0000:03:00.0-scsi-0:0:2:0")
        );
        assert_eq!(predicted_by_path(ControllerKind::ParaVirtual, 0, 2), listed[1].by_path);
        let read: Vec<Entry> = serde_json::from_str(&document(&listed)).unwrap();
        assert_eq!(read[1].name, "images");
        assert_eq!(read[1].unit_number, 2);
        assert_eq!(read[1].path, "[ds] vm/vm_2.vmdk");
    }
}
