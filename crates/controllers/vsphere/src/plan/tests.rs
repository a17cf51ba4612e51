//! Tables over the whole plan: what each state of a VM leads to.

use std::collections::BTreeMap;
use std::time::Duration;

use capstan_core::disks::vsphere::{
    Controller, ControllerKind, DataDisk, Device, Disk, Hardware, KIB_PER_GIB, allocate,
};
use jiff::Timestamp;
use rstest::rstest;

use super::*;
use crate::domain::{Allocation, GuestNic, NetworkDevice, Nic, PowerOff};

pub fn wanted() -> Wanted {
    Wanted {
        name: "node-1".into(),
        instance_uuid: "0f3c".into(),
        cpus: 4,
        memory_mib: 8192,
        networks: vec![NetworkDevice {
            network: "net".into(),
            dhcp4: true,
            ..NetworkDevice::default()
        }],
        disks: vec![
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
        ],
        ..Wanted::default()
    }
}

fn networks() -> Vec<String> {
    vec!["network:net".into()]
}

fn user() -> UserData {
    UserData::CloudInit(b"#cloud-config\n".to_vec())
}

fn disk(unit: i32, gib: i64) -> Device {
    let disk = Disk {
        capacity_kib: gib * KIB_PER_GIB,
        path: format!("[ds] node-1/disk{unit}.vmdk"),
        uuid: format!("6000C298-595b-f457-0efa-b1a8d3f2e4c{unit}"),
    };
    Device {
        key: 2000 + unit,
        controller_key: 1000,
        unit: Some(unit),
        disk: Some(disk),
    }
}

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
        devices: disks.iter().map(|(unit, gib)| disk(*unit, *gib)).collect(),
    }
}

fn memory() -> Memory {
    let placements = allocate(&hardware(&[(0, 10)]), &wanted().disks).unwrap().placements;
    Memory {
        placements,
        ..Memory::default()
    }
}

/// A clone that is all that was asked for, metadata and disk list included, powered off.
fn finished() -> Facts {
    let mut facts = Facts {
        name: "node-1".into(),
        instance_uuid: "0f3c".into(),
        bios_uuid: "4210".into(),
        hardware: hardware(&[(0, 10), (1, 50), (2, 90)]),
        vmx_path: "[ds] node-1/node-1.vmx".into(),
        cpus: 4,
        memory_mib: 8192,
        nics: vec![Nic {
            key: 4000,
            mac: "00:50:56:01:02:03".into(),
            backing: "network:net".into(),
            connected: true,
        }],
        ..Facts::default()
    };
    let changes = changes(&wanted(), &networks(), Some(&user()), &memory(), &facts);
    facts.extra_config = changes.extra_config;
    facts
}

fn next(memory: &Memory, facts: Option<&Facts>) -> Step {
    plan(&wanted(), &networks(), Some(&user()), memory, facts)
}

#[test]
fn what_never_was_is_cloned_and_what_was_once_is_not() {
    assert_eq!(next(&memory(), None), Step::Clone);
    assert_eq!(next(&Memory { seen: true, ..memory() }, None), Step::Lost);
}

#[test]
fn a_clone_as_asked_is_powered_on_and_waits_for_an_address() {
    let mut facts = finished();
    assert_eq!(next(&memory(), Some(&facts)), Step::PowerOn);
    facts.power = Power::On;
    assert!(matches!(next(&memory(), Some(&facts)), Step::AwaitAddresses(_)));
    let addresses = ["fe80::1", "169.254.1.1", "127.0.0.1", "10.0.0.9", "fd00::9"]
        .map(|a| a.parse().unwrap())
        .to_vec();
    facts.guest = vec![GuestNic {
        mac: "00:50:56:01:02:03".into(),
        connected: true,
        addresses,
        ..GuestNic::default()
    }];
    let Step::Up(report) = next(&memory(), Some(&facts)) else {
        panic!("it has an address")
    };
    assert_eq!(report.addresses, ["10.0.0.9", "fd00::9"]);
}

#[test]
fn dropped_devices_are_named_and_put_right_before_the_first_power_on() {
    let mut facts = finished();
    facts.hardware = hardware(&[(0, 10)]);
    facts.nics[0].backing = "network:template".into();
    let Step::Reconfigure(changes) = next(&memory(), Some(&facts)) else {
        panic!("disks are missing")
    };
    assert_eq!(
        changes
            .add_disks
            .iter()
            .map(|p| (p.unit, p.controller_key))
            .collect::<Vec<_>>(),
        [(1, 1000), (2, 1000)]
    );
    assert_eq!(
        (changes.remove_nics.clone(), changes.add_nics.clone()),
        (vec![4000], vec![0])
    );
    assert!(changes.dropped[0].starts_with("dataDisks[0] \"images\": vCenter did not create the disk"));
    assert!(
        !changes.extra_config.contains_key("guestinfo.metadata"),
        "the MAC address is not known yet"
    );
}

#[test]
fn a_disk_that_is_larger_than_asked_for_is_not_ours_and_nothing_is_started() {
    let mut facts = finished();
    facts.hardware = hardware(&[(0, 10), (1, 500), (2, 90)]);
    let Step::Wrong(text) = next(&memory(), Some(&facts)) else {
        panic!("a disk cannot shrink")
    };
    assert!(text.contains("dataDisks[0] \"images\""), "{text}");
}

#[test]
fn settings_that_vcenter_dropped_are_named_and_sent_again_before_the_first_power_on() {
    let mut wanted = wanted();
    wanted.cpu_allocation = Allocation {
        reservation: Some(500),
        limit: Some(4000),
        shares: None,
    };
    wanted.memory_allocation.shares = Some(2000);
    wanted.nested_hv = Some(true);
    let mut facts = finished();
    facts.cpu_allocation.limit = Some(-1);
    facts.memory_allocation.shares = Some(2000);
    let next = |facts: &Facts| plan(&wanted, &networks(), Some(&user()), &memory(), Some(facts));
    let Step::Reconfigure(changes) = next(&facts) else {
        panic!("{:?}", next(&facts));
    };
    let expected = [
        "resources.requests.cpu (MHz) is unset instead of 500",
        "resources.limits.cpu (MHz) is -1 instead of 4000",
        "nestedHV is false instead of true",
    ];
    assert_eq!(changes.settings, expected);
    facts.power = Power::On;
    assert!(
        matches!(next(&facts), Step::AwaitAddresses(_)),
        "they cannot be changed any more"
    );
    facts.power = Power::Off;
    (facts.cpu_allocation, facts.nested_hv) = (wanted.cpu_allocation, true);
    assert_eq!(next(&facts), Step::PowerOn);
}

#[test]
fn a_machine_that_was_ready_keeps_the_hardware_it_has() {
    let mut facts = finished();
    facts.hardware = hardware(&[(0, 10)]);
    facts.extra_config.clear();
    let memory = Memory { seen: true, ..memory() };
    assert_eq!(next(&memory, Some(&facts)), Step::PowerOn);
}

#[test]
fn what_a_guest_took_away_after_its_first_start_is_not_written_back() {
    let mut facts = finished();
    facts.extra_config.remove("guestinfo.userdata");
    assert!(matches!(next(&memory(), Some(&facts)), Step::Reconfigure(_)));
    facts.power = Power::On;
    assert!(matches!(next(&memory(), Some(&facts)), Step::AwaitAddresses(_)));
    facts.power = Power::Suspended;
    assert_eq!(next(&memory(), Some(&facts)), Step::PowerOn);
}

#[test]
fn the_metadata_and_the_list_of_disks_are_written_once() {
    let facts = Facts {
        extra_config: BTreeMap::new(),
        ..finished()
    };
    let Step::Reconfigure(changes) = next(&memory(), Some(&facts)) else {
        panic!("metadata is missing")
    };
    assert!(changes.extra_config["guestinfo.capstan.disks"].contains("\"name\":\"swap\""));
    assert!(
        changes.extra_config.contains_key("guestinfo.metadata")
            && changes.extra_config.contains_key("guestinfo.userdata")
    );
    assert!(changes.dropped.is_empty());
    let after = Facts {
        extra_config: changes.extra_config.clone(),
        ..facts
    };
    assert_eq!(next(&memory(), Some(&after)), Step::PowerOn);
}

#[rstest]
#[case(Some("vmx-21"), true)]
#[case(Some("vmx-19"), false)]
#[case(Some("vmx-9"), false)]
#[case(None, false)]
fn hardware_is_upgraded_and_never_downgraded(#[case] version: Option<&str>, #[case] upgraded: bool) {
    let wanted = Wanted {
        hardware_version: version.map(Into::into),
        ..wanted()
    };
    let step = plan(&wanted, &networks(), Some(&user()), &memory(), Some(&finished()));
    assert_eq!(matches!(step, Step::Upgrade { .. }), upgraded, "{step:?}");
}

#[rstest]
#[case::unset(None, &[], &[10, 10], Ok(()))]
#[case::up(Some(20), &[30], &[10, 10], Ok(()))]
#[case::more_sizes_than_disks(Some(20), &[30, 40], &[10], Ok(()))]
#[case::down(Some(5), &[], &[10], Err("diskGiB: can't resize template disk down, initial capacity is larger: 10485760KiB > 5242880KiB"))]
#[case::second_down(None, &[5], &[10, 10], Err("additionalDisksGiB[0]: can't resize template disk down, initial capacity is larger: 10485760KiB > 5242880KiB"))]
#[case::no_disk(Some(20), &[], &[], Err("Invalid disk count: 0: the template has no disk"))]
fn sizes_are_checked_before_a_full_clone(
    #[case] primary: Option<i64>,
    #[case] additional: &[i64],
    #[case] template: &[i64],
    #[case] expected: Result<(), &str>,
) {
    let wanted = Wanted {
        primary_gib: primary,
        additional_gib: additional.to_vec(),
        ..wanted()
    };
    let disks: Vec<(i32, i64)> = template.iter().enumerate().map(|(i, gib)| (i as i32, *gib)).collect();
    assert_eq!(
        check_template(&wanted, &hardware(&disks), false),
        expected.map_err(str::to_owned)
    );
    assert_eq!(
        check_template(&wanted, &hardware(&disks), true),
        Ok(()),
        "a linked clone keeps its template's sizes"
    );
}

#[test]
fn template_disks_grow_after_a_full_clone_only() {
    let wanted = Wanted {
        primary_gib: Some(20),
        ..wanted()
    };
    let grow = |linked| {
        changes(
            &wanted,
            &networks(),
            Some(&user()),
            &Memory { linked, ..memory() },
            &finished(),
        )
        .grow
    };
    assert_eq!(grow(false), [(2000, 20 * KIB_PER_GIB)]);
    assert_eq!(grow(true), []);
}

#[rstest]
#[case::hard(PowerOff::Hard, false, None, Farewell::PowerOff)]
#[case::soft(PowerOff::Soft, true, None, Farewell::ShutDownGuest)]
#[case::soft_waits_as_long_as_it_takes(PowerOff::Soft, true, Some(9999), Farewell::AwaitShutdown { until: None })]
#[case::soft_without_tools(PowerOff::Soft, false, None, Farewell::CannotShutDown)]
#[case::try_soft(PowerOff::TrySoft, true, None, Farewell::ShutDownGuest)]
#[case::try_soft_waits(PowerOff::TrySoft, true, Some(100), Farewell::AwaitShutdown { until: Some(Timestamp::from_second(10_200).unwrap()) })]
#[case::try_soft_gives_up(PowerOff::TrySoft, true, Some(300), Farewell::PowerOff)]
#[case::try_soft_without_tools(PowerOff::TrySoft, false, None, Farewell::PowerOff)]
fn a_machine_is_powered_off_by_its_mode(
    #[case] mode: PowerOff,
    #[case] tools: bool,
    #[case] asked_ago: Option<i64>,
    #[case] expected: Farewell,
) {
    let now = Timestamp::from_second(10_000).unwrap();
    let asked = asked_ago.map(|ago| Timestamp::from_second(10_000 - ago).unwrap());
    let facts = Facts {
        power: Power::On,
        tools_running: tools,
        ..finished()
    };
    assert_eq!(
        farewell(Some(&facts), &memory(), mode, Duration::from_secs(300), asked, now),
        expected
    );
}

#[test]
fn foreign_volumes_are_detached_before_the_machine_is_destroyed() {
    let now = Timestamp::UNIX_EPOCH;
    let end = |facts: Option<&Facts>| farewell(facts, &memory(), PowerOff::Hard, Duration::ZERO, None, now);
    let mut facts = finished();
    assert_eq!(end(Some(&facts)), Farewell::Destroy);
    facts.hardware.devices.push(Device {
        key: 2010,
        ..disk(3, 5)
    });
    facts.volumes = vec![2010];
    let mut elsewhere = Device {
        key: 2011,
        ..disk(4, 5)
    };
    elsewhere.disk = Some(Disk {
        path: "[ds] kubevols/pvc-1.vmdk".into(),
        ..Disk::default()
    });
    facts.hardware.devices.push(elsewhere);
    assert_eq!(end(Some(&facts)), Farewell::Detach(vec![2010, 2011]));
    assert_eq!(end(None), Farewell::Gone);
}

#[rstest]
#[case(NetworkDevice { dhcp4: true, ..NetworkDevice::default() }, false)]
#[case(NetworkDevice { addresses: vec!["10.0.0.1/24".into()], ..NetworkDevice::default() }, false)]
#[case(NetworkDevice { skip_allocation: true, ..NetworkDevice::default() }, false)]
#[case(NetworkDevice { pooled: true, ..NetworkDevice::default() }, false)]
#[case(NetworkDevice::default(), true)]
fn a_card_without_any_address_is_waited_for(#[case] device: NetworkDevice, #[case] waits: bool) {
    assert_eq!(waits_for_static_address(&[device]), waits);
}
