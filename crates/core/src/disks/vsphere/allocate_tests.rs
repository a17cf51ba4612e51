use super::super::{ControllerChoice, Device, Disk};
use super::*;
use proptest::prelude::*;
use rstest::rstest;

const ALL: [ControllerKind; 7] = [
    ControllerKind::ParaVirtual,
    ControllerKind::LsiLogic,
    ControllerKind::LsiLogicSas,
    ControllerKind::BusLogic,
    ControllerKind::Sata,
    ControllerKind::Nvme,
    ControllerKind::Ide,
];

fn controller(key: i32, kind: ControllerKind, bus: i32) -> Controller {
    Controller {
        key,
        kind,
        bus,
        own_unit: kind.own_unit(),
        pci_slot: None,
    }
}

fn disk_at(controller_key: i32, unit: i32) -> Device {
    Device {
        key: 2000_i32.wrapping_add(unit),
        controller_key,
        unit: Some(unit),
        disk: Some(Disk::default()),
    }
}

fn template(kind: ControllerKind, version: u32, units: &[i32]) -> Hardware {
    Hardware {
        version,
        controllers: vec![controller(1000, kind, 0)],
        devices: units.iter().map(|unit| disk_at(1000, *unit)).collect(),
    }
}

fn disks(count: usize) -> Vec<DataDisk> {
    (0..count)
        .map(|i| DataDisk {
            name: format!("disk-{i}"),
            size_gib: 1,
            ..DataDisk::default()
        })
        .collect()
}

fn named(name: &str, kind: Option<ControllerKind>, bus: Option<i32>, unit: Option<i32>) -> DataDisk {
    let controller = kind.map(|kind| ControllerChoice { kind: Some(kind), bus });
    DataDisk {
        name: name.into(),
        size_gib: 1,
        controller,
        unit,
        ..DataDisk::default()
    }
}

fn units(allocation: &Allocation) -> Vec<i32> {
    allocation.placements.iter().map(|placement| placement.unit).collect()
}

#[rstest]
#[case::one_template_disk(&[0], 2, &[1, 2])]
#[case::two_template_disks(&[0, 1], 2, &[2, 3])]
#[case::gaps_are_left(&[0, 2], 3, &[3, 4, 5])]
#[case::gaps_are_filled_without_room_after(&[0, 62], 3, &[1, 2, 3])]
#[case::own_unit_is_skipped(&[0], 8, &[1, 2, 3, 4, 5, 6, 8, 9])]
#[case::odd_units_do_no_harm(&[0, 99, -3, i32::MAX, i32::MIN], 2, &[1, 2])]
fn disks_get_the_next_free_units_in_the_order_of_the_spec(
    #[case] taken: &[i32],
    #[case] count: usize,
    #[case] expected: &[i32],
) {
    let allocation = allocate(&template(ControllerKind::ParaVirtual, 19, taken), &disks(count)).unwrap();
    assert_eq!(units(&allocation), expected);
    assert!(allocation.placements.iter().all(|p| p.controller_key == 1000));
    assert!(allocation.new_controllers.is_empty());
}

#[rstest]
#[case(ControllerKind::LsiLogic, 19, 14)]
#[case(ControllerKind::LsiLogicSas, 19, 14)]
#[case(ControllerKind::BusLogic, 19, 14)]
#[case(ControllerKind::ParaVirtual, 13, 14)]
#[case(ControllerKind::ParaVirtual, 14, 63)]
#[case(ControllerKind::Sata, 19, 29)]
#[case(ControllerKind::Nvme, 20, 14)]
#[case(ControllerKind::Nvme, 21, 63)]
#[case(ControllerKind::Ide, 19, 1)]
fn a_controller_holds_what_it_really_holds_and_no_more(
    #[case] kind: ControllerKind,
    #[case] version: u32,
    #[case] room: usize,
) {
    let hardware = template(kind, version, &[0]);
    assert_eq!(allocate(&hardware, &disks(room)).unwrap().placements.len(), room);
    let problems = allocate(&hardware, &disks(room + 2)).unwrap_err().0;
    assert_eq!(
        problems.iter().map(|p| p.index).collect::<Vec<_>>(),
        [Some(room), Some(room + 1)]
    );
}

#[test]
fn every_disk_without_room_is_named_with_what_to_do() {
    let mut spec = disks(16);
    spec[15].name = "swap".into();
    let problems = allocate(&template(ControllerKind::ParaVirtual, 13, &[0]), &spec).unwrap_err();
    assert_eq!(problems.0.len(), 2);
    assert_eq!(
        problems.0[1].to_string(),
        "dataDisks[15] \"swap\": PVSCSI controller 0 has no free unit: all unit numbers are already in-use (16 units at \
         hardware version 13, one of them the controller's own); remove disks, use a template of hardware version 14 or \
         later (65 units), or put it on another controller with dataDisks[15].controller"
    );
    assert!(
        problems
            .to_string()
            .starts_with("dataDisks[14] \"disk-14\": PVSCSI controller 0 has no free unit")
    );
}

#[rstest]
#[case::no_disk(Hardware { version: 19, ..Hardware::default() }, "Invalid disk count: 0")]
#[case::no_controller(Hardware { version: 19, devices: vec![disk_at(55, 0)], ..Hardware::default() }, "unable to find controller with key=55")]
fn an_unfit_template_is_refused(#[case] hardware: Hardware, #[case] text: &str) {
    assert!(
        allocate(&hardware, &disks(1))
            .unwrap_err()
            .to_string()
            .starts_with(text)
    );
    assert_eq!(allocate(&hardware, &[]), Ok(Allocation::default()));
}

#[test]
fn units_asked_for_by_number_are_set_aside_first() {
    let spec = vec![
        named("a", None, None, None),
        named("b", None, None, Some(1)),
        named("c", None, None, None),
        named("d", None, None, Some(15)),
    ];
    let allocation = allocate(&template(ControllerKind::LsiLogic, 19, &[0]), &spec).unwrap();
    assert_eq!(units(&allocation), [2, 1, 3, 15]);
}

#[rstest]
#[case(7, "is taken by the controller itself")]
#[case(0, "is taken by a disk of the template")]
#[case(16, "does not exist: LSI Logic SCSI controller 0 has units 0 to 15")]
#[case(-1, "does not exist")]
#[case(3, "is taken by dataDisks[0] \"first\"")]
fn a_unit_that_cannot_be_had_is_refused(#[case] unit: i32, #[case] text: &str) {
    let spec = vec![
        named("first", None, None, Some(3)),
        named("second", None, None, Some(unit)),
    ];
    let error = allocate(&template(ControllerKind::LsiLogic, 19, &[0]), &spec)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("dataDisks[1] \"second\": ") && error.contains(text),
        "{error}"
    );
}

#[test]
fn new_controllers_are_made_once_and_shared() {
    use ControllerKind::{Nvme, ParaVirtual, Sata};
    let spec = vec![
        named("a", Some(ParaVirtual), Some(1), None),
        named("b", Some(ParaVirtual), Some(1), None),
        named("c", Some(Nvme), None, None),
        named("d", Some(Nvme), None, None),
        named("e", Some(ParaVirtual), None, None),
        named("f", Some(Sata), Some(3), Some(29)),
    ];
    let allocation = allocate(&template(ParaVirtual, 19, &[0]), &spec).unwrap();
    let made: Vec<_> = allocation.new_controllers.iter().map(|c| (c.kind, c.bus)).collect();
    assert_eq!(made, [(ParaVirtual, 1), (Nvme, 0), (Sata, 3)]);
    assert_eq!(units(&allocation), [0, 1, 0, 1, 1, 29]);
    assert_eq!(allocation.placements[4].controller_key, 1000);
}

#[test]
fn a_new_controller_without_a_bus_goes_where_its_family_has_room() {
    use ControllerKind::{LsiLogic, ParaVirtual};
    let allocation = allocate(
        &template(ParaVirtual, 19, &[0]),
        &[named("a", Some(LsiLogic), None, None)],
    )
    .unwrap();
    assert_eq!(allocation.new_controllers[0].bus, 1);
}

#[rstest]
#[case(ControllerKind::LsiLogic, Some(0), 19, "has a PVSCSI controller, not LSI Logic SCSI")]
#[case(ControllerKind::ParaVirtual, Some(4), 19, "controller bus 4 does not exist")]
#[case(ControllerKind::ParaVirtual, Some(-1), 19, "controller bus -1 does not exist")]
#[case(
    ControllerKind::Nvme,
    None,
    12,
    "NVMe controllers need hardware version 13 or later, the template has 12"
)]
#[case(ControllerKind::Ide, Some(1), 19, "none can be added")]
fn a_controller_that_cannot_be_had_is_refused(
    #[case] kind: ControllerKind,
    #[case] bus: Option<i32>,
    #[case] version: u32,
    #[case] text: &str,
) {
    let hardware = template(ControllerKind::ParaVirtual, version, &[0]);
    let error = allocate(&hardware, &[named("x", Some(kind), bus, None)])
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("dataDisks[0] \"x\": ") && error.contains(text),
        "{error}"
    );
}

fn any_kind() -> impl Strategy<Value = ControllerKind> {
    (0..ALL.len()).prop_map(|i| ALL[i])
}

prop_compose! {
    fn any_hardware()(
        version in 4u32..23,
        kinds in prop::collection::vec((any_kind(), -1i32..5), 0..5),
        devices in prop::collection::vec((990i32..1006, prop::option::of(-5i32..80), any::<bool>()), 0..12),
    ) -> Hardware {
        Hardware {
            version,
            controllers: kinds.iter().enumerate().map(|(i, (kind, bus))| controller(1000 + i as i32, *kind, *bus)).collect(),
            devices: devices.iter().enumerate().map(|(i, (controller_key, unit, disk))| Device {
                key: 2000 + i as i32,
                controller_key: *controller_key,
                unit: *unit,
                disk: disk.then(Disk::default),
            }).collect(),
        }
    }
}

prop_compose! {
    fn any_spec()(
        entries in prop::collection::vec(
            (prop::option::weighted(0.4, (any_kind(), prop::option::of(-1i32..5))), prop::option::weighted(0.3, -2i32..70)),
            0..70,
        ),
    ) -> Vec<DataDisk> {
        entries.into_iter().enumerate().map(|(i, (choice, unit))| DataDisk {
            name: format!("d{i}"),
            size_gib: 1,
            controller: choice.map(|(kind, bus)| ControllerChoice { kind: Some(kind), bus }),
            unit,
            ..DataDisk::default()
        }).collect()
    }
}

proptest! {
    #[test]
    fn whatever_the_template_no_unit_is_shared_out_of_range_or_the_controllers_own(
        hardware in any_hardware(),
        spec in any_spec(),
    ) {
        let Ok(allocation) = allocate(&hardware, &spec) else { return Ok(()) };
        prop_assert_eq!(allocation.placements.len(), spec.len());
        let mut taken: BTreeSet<(i32, i32)> =
            hardware.devices.iter().filter_map(|d| Some((d.controller_key, d.unit?))).collect();
        for placement in &allocation.placements {
            prop_assert!(taken.insert((placement.controller_key, placement.unit)));
            prop_assert!((0..placement.kind.units(hardware.version)).contains(&placement.unit));
            prop_assert_ne!(Some(placement.unit), placement.kind.own_unit());
            let there = hardware.controller(placement.controller_key).map(|c| (c.kind, c.bus));
            let made = allocation.new_controllers.iter().find(|c| c.key == placement.controller_key).map(|c| (c.kind, c.bus));
            prop_assert_eq!(there.or(made), Some((placement.kind, placement.bus)));
        }
    }

    #[test]
    fn disks_without_wishes_rise_in_the_order_of_the_spec(hardware in any_hardware(), count in 0usize..70) {
        if let Ok(allocation) = allocate(&hardware, &disks(count)) {
            prop_assert!(allocation.placements.windows(2).all(|pair| pair[0].unit < pair[1].unit));
        }
    }

    #[test]
    fn the_same_input_gives_the_same_answer(hardware in any_hardware(), spec in any_spec()) {
        prop_assert_eq!(allocate(&hardware, &spec), allocate(&hardware, &spec));
    }
}
