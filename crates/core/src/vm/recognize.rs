//! Recognizes the data disks of a VM that another controller cloned.
//!
//! Such a VM has no record of the units of its disks. They are on the controller of the primary disk, after the disks of the
//! template, in the order of the spec. Only disks that go with the VM count, so that a mistake cannot put others' disks at risk.

use super::teardown::foreign_disks;
use super::types::{ObservedVm, Recorded};
use crate::disks::vsphere::{DataDisk, Device, Placement};

/// Returns the places of all data disks, or `None` if the disks of the VM are not those of the spec.
pub fn recognize_disks(observed: &ObservedVm, disks: &[DataDisk]) -> Option<Vec<Placement>> {
    // Only Capstan has these fields, and it records what it clones.
    if disks.is_empty()
        || disks
            .iter()
            .any(|disk| disk.controller.is_some() || disk.unit.is_some())
    {
        return None;
    }
    let controller = observed
        .hardware
        .controller(observed.hardware.primary()?.controller_key)?;
    let foreign = foreign_disks(observed, &Recorded::default());
    let mut own: Vec<(i32, &Device)> = observed
        .hardware
        .devices
        .iter()
        .filter(|device| device.controller_key == controller.key && device.disk.is_some())
        .filter(|device| !foreign.contains(&device.key))
        .filter_map(|device| Some((device.unit?, device)))
        .collect();
    own.sort_by_key(|(unit, _)| *unit);
    // At least one disk is the template's.
    let first = own.len().checked_sub(disks.len()).filter(|template| *template > 0)?;
    let found = own.split_off(first);
    let fits = |((_, device), disk): (&(i32, &Device), &DataDisk)| {
        device
            .disk
            .as_ref()
            .is_some_and(|found| found.capacity_kib == disk.capacity_kib())
    };
    if !found.iter().zip(disks).all(fits) {
        return None;
    }
    let places = found.iter().enumerate().map(|(index, (unit, device))| Placement {
        index,
        key: device.key,
        controller_key: controller.key,
        kind: controller.kind,
        bus: controller.bus,
        unit: *unit,
    });
    Some(places.collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::disks::vsphere::{Controller, ControllerKind, Disk, Hardware, KIB_PER_GIB};
    use crate::vm::MoRef;

    /// A VM with disks of these sizes at units 0, 1, …; the last one is a volume of a CSI driver if `volume`.
    fn vm(sizes: &[i64], volume: bool) -> ObservedVm {
        let controller = Controller {
            key: 1000,
            kind: ControllerKind::ParaVirtual,
            bus: 0,
            own_unit: Some(7),
            pci_slot: None,
        };
        let devices = sizes.iter().zip(0..).map(|(size, unit)| Device {
            key: 2000 + unit,
            controller_key: 1000,
            unit: Some(unit),
            disk: Some(Disk {
                capacity_kib: size * KIB_PER_GIB,
                path: format!("[ds] m/m_{unit}.vmdk"),
                uuid: String::new(),
            }),
        });
        let last = 1999 + i32::try_from(sizes.len()).unwrap();
        ObservedVm {
            hardware: Hardware {
                controllers: vec![controller],
                devices: devices.collect(),
                ..Hardware::default()
            },
            volumes: volume.then_some(last).into_iter().collect(),
            vmx_path: "[ds] m/m.vmx".into(),
            ..ObservedVm::new(MoRef::vm("vm-1"))
        }
    }

    #[rstest]
    #[case::after_the_template(&[40, 10, 20], false, &[10, 20], Some(vec![1, 2]))]
    #[case::after_two_of_the_template(&[40, 5, 10], false, &[10], Some(vec![2]))]
    #[case::before_a_volume(&[40, 10, 20, 10], true, &[10, 20], Some(vec![1, 2]))]
    #[case::of_another_size(&[40, 10, 21], false, &[10, 20], None)]
    #[case::in_another_order(&[40, 20, 10], false, &[10, 20], None)]
    #[case::too_few(&[10, 20], false, &[10, 20], None)]
    #[case::none(&[40], false, &[], None)]
    fn data_disks_are_the_last_ones_of_the_machine(
        #[case] sizes: &[i64],
        #[case] volume: bool,
        #[case] wanted: &[i64],
        #[case] units: Option<Vec<i32>>,
    ) {
        let disks: Vec<DataDisk> = wanted
            .iter()
            .map(|size| DataDisk {
                size_gib: *size,
                ..DataDisk::default()
            })
            .collect();
        let found = recognize_disks(&vm(sizes, volume), &disks);
        assert_eq!(found.map(|found| found.iter().map(|place| place.unit).collect()), units);
    }
}
