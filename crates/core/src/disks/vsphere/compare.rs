//! What vCenter made of the data disks that a request named.
//!
//! A successful clone task is no proof: device changes may have been dropped in silence. So the devices are read back and
//! compared by controller family, bus and unit, since vCenter hands out its own keys.

use super::{DataDisk, Hardware, Placement};

/// One disk that is not as asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deviation {
    /// There is no disk at its unit: add it.
    Missing { index: usize },
    /// It is smaller than asked for: grow it.
    Smaller { index: usize, key: i32, capacity_kib: i64 },
    /// It is larger than asked for, so it is not the disk that was asked for.
    Larger { index: usize, capacity_kib: i64 },
}

impl Deviation {
    pub fn index(&self) -> usize {
        match self {
            Self::Missing { index } | Self::Smaller { index, .. } | Self::Larger { index, .. } => *index,
        }
    }

    /// Says it with the disk's name.
    pub fn describe(&self, disks: &[DataDisk], placements: &[Placement]) -> String {
        let index = self.index();
        let name = disks.get(index).map(|disk| disk.name.as_str()).unwrap_or_default();
        let wanted = disks.get(index).map(DataDisk::capacity_kib).unwrap_or_default();
        let place = placements
            .iter()
            .find(|placement| placement.index == index)
            .map(|p| format!("unit {} of {} controller {}", p.unit, p.kind, p.bus))
            .unwrap_or_else(|| "its unit".into());
        match self {
            Self::Missing { .. } => {
                format!("dataDisks[{index}] {name:?}: vCenter did not create the disk: nothing at {place}")
            }
            Self::Smaller { capacity_kib, .. } => {
                format!("dataDisks[{index}] {name:?}: {place} has {capacity_kib}KiB instead of {wanted}KiB")
            }
            Self::Larger { capacity_kib, .. } => format!(
                "dataDisks[{index}] {name:?}: {place} has {capacity_kib}KiB instead of {wanted}KiB and a disk cannot shrink"
            ),
        }
    }
}

/// Compares the devices of a VM with what was asked for.
pub fn compare(hardware: &Hardware, disks: &[DataDisk], placements: &[Placement]) -> Vec<Deviation> {
    placements
        .iter()
        .filter_map(|placement| {
            let index = placement.index;
            let wanted = disks.get(index)?.capacity_kib();
            let Some(device) = hardware.disk_at(placement.kind, placement.bus, placement.unit) else {
                return Some(Deviation::Missing { index });
            };
            let capacity_kib = device.disk.as_ref().map(|disk| disk.capacity_kib).unwrap_or_default();
            match capacity_kib.cmp(&wanted) {
                std::cmp::Ordering::Equal => None,
                std::cmp::Ordering::Less => Some(Deviation::Smaller {
                    index,
                    key: device.key,
                    capacity_kib,
                }),
                std::cmp::Ordering::Greater => Some(Deviation::Larger { index, capacity_kib }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Controller, ControllerKind, Device, Disk, KIB_PER_GIB, allocate};
    use super::*;
    use rstest::rstest;

    fn hardware(disks: &[(i32, i64)]) -> Hardware {
        Hardware {
            version: 19,
            controllers: vec![Controller {
                key: 1000,
                kind: ControllerKind::ParaVirtual,
                bus: 0,
                own_unit: Some(7),
                pci_slot: None,
            }],
            devices: disks
                .iter()
                .enumerate()
                .map(|(i, (unit, gib))| Device {
                    key: 2000 + i as i32,
                    controller_key: 1000,
                    unit: Some(*unit),
                    disk: Some(Disk {
                        capacity_kib: gib * KIB_PER_GIB,
                        ..Disk::default()
                    }),
                })
                .collect(),
        }
    }

    #[rstest]
    #[case::as_asked(&[(0, 10), (1, 50), (2, 90)], vec![])]
    #[case::all_dropped(&[(0, 10)], vec![Deviation::Missing { index: 0 }, Deviation::Missing { index: 1 }])]
    #[case::one_dropped(&[(0, 10), (2, 90)], vec![Deviation::Missing { index: 0 }])]
    #[case::smaller(&[(0, 10), (1, 50), (2, 1)], vec![Deviation::Smaller { index: 1, key: 2002, capacity_kib: KIB_PER_GIB }])]
    #[case::larger(&[(0, 10), (1, 51), (2, 90)], vec![Deviation::Larger { index: 0, capacity_kib: 51 * KIB_PER_GIB }])]
    #[case::swapped(&[(0, 10), (1, 90), (2, 50)], vec![
        Deviation::Larger { index: 0, capacity_kib: 90 * KIB_PER_GIB },
        Deviation::Smaller { index: 1, key: 2002, capacity_kib: 50 * KIB_PER_GIB },
    ])]
    fn what_is_not_as_asked_is_found(#[case] found: &[(i32, i64)], #[case] expected: Vec<Deviation>) {
        let disks = vec![
            DataDisk {
                name: "images".into(),
                size_gib: 50,
                ..DataDisk::default()
            },
            DataDisk {
                name: "swap".into(),
                size_gib: 90,
                ..DataDisk::default()
            },
        ];
        let placements = allocate(&hardware(&[(0, 10)]), &disks).unwrap().placements;
        assert_eq!(compare(&hardware(found), &disks, &placements), expected);
    }

    #[test]
    fn a_dropped_disk_is_named() {
        let disks = vec![DataDisk {
            name: "images".into(),
            size_gib: 50,
            ..DataDisk::default()
        }];
        let placements = allocate(&hardware(&[(0, 10)]), &disks).unwrap().placements;
        let text = compare(&hardware(&[(0, 10)]), &disks, &placements)[0].describe(&disks, &placements);
        assert_eq!(
            text,
            "dataDisks[0] \"images\": vCenter did not create the disk: nothing at unit 1 of PVSCSI controller 0"
        );
    }
}
