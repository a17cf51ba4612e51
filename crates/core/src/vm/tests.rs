//! Tables over the whole plan: each state of a VM and the step that it leads to.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::disks::vsphere::{Controller, ControllerKind, DataDisk, Device, Disk, Hardware, KIB_PER_GIB, allocate};
use jiff::Timestamp;
use rstest::rstest;

use super::*;

pub fn desired() -> DesiredVm {
    DesiredVm {
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
        ..DesiredVm::default()
    }
}

fn names() -> ResolvedNames {
    ResolvedNames {
        networks: vec!["network:net".into()],
        ..ResolvedNames::default()
    }
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

fn recorded() -> Recorded {
    let placements = allocate(&hardware(&[(0, 10)]), &desired().disks).unwrap().placements;
    Recorded {
        placements,
        ..Recorded::default()
    }
}

/// A clone that is all that was asked for, metadata and disk list included, powered off.
fn vm() -> MoRef {
    MoRef::vm("vm-1")
}

fn finished() -> ObservedVm {
    let mut observed = ObservedVm {
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
        ..ObservedVm::new(vm())
    };
    let changes = changes(&desired(), &names(), Some(&user()), &recorded(), &observed);
    observed.extra_config = changes.extra_config;
    observed
}

fn next(recorded: &Recorded, observed: Option<&ObservedVm>) -> Step {
    next_step(&desired(), &names(), Some(&user()), recorded, observed)
}

#[test]
fn a_vm_that_was_ready_once_is_never_cloned_again() {
    assert_eq!(next(&recorded(), None), Step::Clone);
    assert_eq!(
        next(
            &Recorded {
                was_ready: true,
                ..recorded()
            },
            None
        ),
        Step::Lost
    );
}

#[test]
fn a_clone_as_asked_is_powered_on_and_waits_for_an_address() {
    let mut observed = finished();
    assert_eq!(next(&recorded(), Some(&observed)), Step::PowerOn(vm()));
    observed.power = PowerState::On;
    assert!(matches!(
        next(&recorded(), Some(&observed)),
        Step::AwaitAddresses { .. }
    ));
    let addresses = ["fe80::1", "169.254.1.1", "127.0.0.1", "10.0.0.9", "fd00::9"]
        .map(|a| a.parse().unwrap())
        .to_vec();
    observed.guest = vec![GuestNic {
        mac: "00:50:56:01:02:03".into(),
        connected: true,
        addresses,
        ..GuestNic::default()
    }];
    let Step::Up { report, .. } = next(&recorded(), Some(&observed)) else {
        panic!("it has an address")
    };
    assert_eq!(report.addresses, ["10.0.0.9", "fd00::9"]);
}

#[test]
fn dropped_devices_are_named_and_put_right_before_the_first_power_on() {
    let mut observed = finished();
    observed.hardware = hardware(&[(0, 10)]);
    observed.nics[0].backing = "network:template".into();
    let Step::Reconfigure { changes, .. } = next(&recorded(), Some(&observed)) else {
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
    let mut observed = finished();
    observed.hardware = hardware(&[(0, 10), (1, 500), (2, 90)]);
    let Step::Wrong(text) = next(&recorded(), Some(&observed)) else {
        panic!("a disk cannot shrink")
    };
    assert!(text.contains("dataDisks[0] \"images\""), "{text}");
}

#[test]
fn settings_that_vcenter_dropped_are_named_and_sent_again_before_the_first_power_on() {
    let mut desired = desired();
    desired.cpu_allocation = Allocation {
        reservation: Some(500),
        limit: Some(4000),
        shares: None,
    };
    desired.memory_allocation.shares = Some(2000);
    desired.nested_hv = Some(true);
    let mut observed = finished();
    observed.cpu_allocation.limit = Some(-1);
    observed.memory_allocation.shares = Some(2000);
    let next = |observed: &ObservedVm| next_step(&desired, &names(), Some(&user()), &recorded(), Some(observed));
    let Step::Reconfigure { changes, .. } = next(&observed) else {
        panic!("{:?}", next(&observed));
    };
    let expected = [
        "resources.requests.cpu (MHz) is unset instead of 500",
        "resources.limits.cpu (MHz) is -1 instead of 4000",
        "nestedHV is false instead of true",
    ];
    assert_eq!(changes.settings, expected);
    observed.power = PowerState::On;
    assert!(
        matches!(next(&observed), Step::AwaitAddresses { .. }),
        "they cannot be changed any more"
    );
    observed.power = PowerState::Off;
    (observed.cpu_allocation, observed.nested_hv) = (desired.cpu_allocation, true);
    assert_eq!(next(&observed), Step::PowerOn(vm()));
}

#[test]
fn a_machine_that_was_ready_keeps_the_hardware_it_has() {
    let mut observed = finished();
    observed.hardware = hardware(&[(0, 10)]);
    observed.extra_config.clear();
    let recorded = Recorded {
        was_ready: true,
        ..recorded()
    };
    assert_eq!(next(&recorded, Some(&observed)), Step::PowerOn(vm()));
}

#[test]
fn what_a_guest_took_away_after_its_first_start_is_not_written_back() {
    let mut observed = finished();
    observed.extra_config.remove("guestinfo.userdata");
    assert!(matches!(next(&recorded(), Some(&observed)), Step::Reconfigure { .. }));
    observed.power = PowerState::On;
    assert!(matches!(
        next(&recorded(), Some(&observed)),
        Step::AwaitAddresses { .. }
    ));
    observed.power = PowerState::Suspended;
    assert_eq!(next(&recorded(), Some(&observed)), Step::PowerOn(vm()));
}

#[test]
fn the_metadata_and_the_list_of_disks_are_written_once() {
    let observed = ObservedVm {
        extra_config: BTreeMap::new(),
        ..finished()
    };
    let Step::Reconfigure { changes, .. } = next(&recorded(), Some(&observed)) else {
        panic!("metadata is missing")
    };
    assert!(changes.extra_config["guestinfo.capstan.disks"].contains("\"name\":\"swap\""));
    assert!(
        changes.extra_config.contains_key("guestinfo.metadata")
            && changes.extra_config.contains_key("guestinfo.userdata")
    );
    assert!(changes.dropped.is_empty());
    let after = ObservedVm {
        extra_config: changes.extra_config.clone(),
        ..observed
    };
    assert_eq!(next(&recorded(), Some(&after)), Step::PowerOn(vm()));
}

#[rstest]
#[case(Some("vmx-21"), true)]
#[case(Some("vmx-19"), false)]
#[case(Some("vmx-9"), false)]
#[case(None, false)]
fn hardware_is_upgraded_and_never_downgraded(#[case] version: Option<&str>, #[case] upgraded: bool) {
    let desired = DesiredVm {
        hardware_version: version.map(Into::into),
        ..desired()
    };
    let step = next_step(&desired, &names(), Some(&user()), &recorded(), Some(&finished()));
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
    let desired = DesiredVm {
        primary_gib: primary,
        additional_gib: additional.to_vec(),
        ..desired()
    };
    let disks: Vec<(i32, i64)> = template.iter().enumerate().map(|(i, gib)| (i as i32, *gib)).collect();
    assert_eq!(
        check_template(&desired, &hardware(&disks), false),
        expected.map_err(str::to_owned)
    );
    assert_eq!(
        check_template(&desired, &hardware(&disks), true),
        Ok(()),
        "a linked clone keeps its template's sizes"
    );
}

#[test]
fn template_disks_grow_after_a_full_clone_only() {
    let desired = DesiredVm {
        primary_gib: Some(20),
        ..desired()
    };
    let grow = |linked| {
        changes(
            &desired,
            &names(),
            Some(&user()),
            &Recorded { linked, ..recorded() },
            &finished(),
        )
        .grow
    };
    assert_eq!(grow(false), [(2000, 20 * KIB_PER_GIB)]);
    assert_eq!(grow(true), []);
    let ignored = |linked| ignored_sizes(&desired, &finished().hardware, linked);
    assert_eq!(ignored(false), Vec::<String>::new());
    assert!(
        ignored(true)[0].starts_with("diskGiB: 20 has no effect"),
        "{:?}",
        ignored(true)
    );
}

#[rstest]
#[case::hard(PowerOff::Hard, false, None, TeardownStep::PowerOff(vm()))]
#[case::soft(PowerOff::Soft, true, None, TeardownStep::ShutDownGuest(vm()))]
#[case::soft_waits_as_long_as_it_takes(PowerOff::Soft, true, Some(9999), TeardownStep::AwaitShutdown { vm: vm(), until: None })]
#[case::soft_without_tools(PowerOff::Soft, false, None, TeardownStep::CannotShutDown)]
#[case::try_soft(PowerOff::TrySoft, true, None, TeardownStep::ShutDownGuest(vm()))]
#[case::try_soft_waits(PowerOff::TrySoft, true, Some(100), TeardownStep::AwaitShutdown { vm: vm(), until: Some(Timestamp::from_second(10_200).unwrap()) })]
#[case::try_soft_gives_up(PowerOff::TrySoft, true, Some(300), TeardownStep::PowerOff(vm()))]
#[case::try_soft_without_tools(PowerOff::TrySoft, false, None, TeardownStep::PowerOff(vm()))]
fn a_machine_is_powered_off_by_its_mode(
    #[case] mode: PowerOff,
    #[case] tools: bool,
    #[case] asked_ago: Option<i64>,
    #[case] expected: TeardownStep,
) {
    let now = Timestamp::from_second(10_000).unwrap();
    let asked = asked_ago.map(|ago| Timestamp::from_second(10_000 - ago).unwrap());
    let observed = ObservedVm {
        power: PowerState::On,
        tools_running: tools,
        ..finished()
    };
    let shutdown = Shutdown {
        mode,
        timeout: Duration::from_secs(300),
        asked,
    };
    let step = teardown(Some(&observed), &recorded(), shutdown, Some(now), now);
    assert_eq!(step, Some(expected));
}

fn torn_down(observed: Option<&ObservedVm>, mode: PowerOff) -> Option<TeardownStep> {
    let now = Timestamp::UNIX_EPOCH;
    let shutdown = Shutdown {
        mode,
        ..Shutdown::default()
    };
    teardown(observed, &recorded(), shutdown, Some(now), now)
}

#[test]
fn a_vm_whose_object_nobody_has_deleted_is_not_torn_down() {
    for observed in [Some(&finished()), None] {
        let step = teardown(observed, &recorded(), Shutdown::default(), None, Timestamp::UNIX_EPOCH);
        assert_eq!(step, None);
    }
}

#[test]
fn foreign_volumes_are_detached_before_the_machine_is_destroyed() {
    let end = |observed: Option<&ObservedVm>| torn_down(observed, PowerOff::Hard).unwrap();
    let mut observed = finished();
    let TeardownStep::Destroy { vm: destroyed, drained } = end(Some(&observed)) else {
        panic!("it is not destroyed")
    };
    assert_eq!((destroyed, drained.machine()), (vm(), vm().to_string().as_str()));
    observed.hardware.devices.push(Device {
        key: 2010,
        ..disk(3, 5)
    });
    observed.volumes = vec![2010];
    let mut elsewhere = Device {
        key: 2011,
        ..disk(4, 5)
    };
    elsewhere.disk = Some(Disk {
        path: "[ds] kubevols/pvc-1.vmdk".into(),
        ..Disk::default()
    });
    observed.hardware.devices.push(elsewhere);
    assert_eq!(
        end(Some(&observed)),
        TeardownStep::Detach {
            vm: vm(),
            disks: vec![2010, 2011]
        }
    );
    assert_eq!(end(None), TeardownStep::Release);
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

#[test]
fn a_card_has_the_addresses_of_all_interfaces_with_its_mac() {
    let mut observed = ObservedVm {
        power: PowerState::On,
        ..finished()
    };
    let interface = |address: &str| GuestNic {
        mac: "00:50:56:01:02:03".into(),
        connected: true,
        addresses: vec![address.parse().unwrap()],
        ..GuestNic::default()
    };
    observed.guest = vec![
        interface("fe80::1"),
        interface("10.0.0.9"),
        interface("10.0.0.9"),
        interface("10.0.1.9"),
    ];
    let Step::Up { report, .. } = next(&recorded(), Some(&observed)) else {
        panic!("the second interface has an address")
    };
    assert_eq!(report.addresses, ["10.0.0.9", "10.0.1.9"]);
}

#[test]
fn storage_policies_are_set_after_the_clone_and_read_back_before_the_first_power_on() {
    let names = ResolvedNames {
        policy: Some("gold".into()),
        disk_policies: vec![Some("gold".into()), Some("silver".into())],
        ..names()
    };
    let mut observed = ObservedVm {
        policies: Some(Policies {
            home: Some("gold".into()),
            disks: BTreeMap::from([(2000, "gold".into())]),
        }),
        ..finished()
    };
    let next = |observed: &ObservedVm| next_step(&desired(), &names, Some(&user()), &recorded(), Some(observed));
    let Step::Reconfigure { changes, .. } = next(&observed) else {
        panic!("two disks lack their policies: {:?}", next(&observed))
    };
    assert_eq!(changes.policy, None);
    assert_eq!(changes.disk_policies, [(2001, "gold".into()), (2002, "silver".into())]);
    let all = [(2000, "gold".into()), (2001, "gold".into()), (2002, "silver".into())];
    observed.policies = Some(Policies {
        home: Some("gold".into()),
        disks: BTreeMap::from(all),
    });
    assert_eq!(next(&observed), Step::PowerOn(vm()));
    observed.policies = None;
    let Step::Reconfigure { changes, .. } = next(&observed) else {
        panic!("nothing has a policy")
    };
    assert_eq!(
        (changes.policy.as_deref(), changes.disk_policies.len()),
        (Some("gold"), 3)
    );
}

#[test]
fn nothing_is_decided_about_a_vm_whose_configuration_cannot_be_read() {
    let observed = ObservedVm {
        unreadable: Some("inaccessible".into()),
        ..ObservedVm::new(vm())
    };
    assert_eq!(
        next(&recorded(), Some(&observed)),
        Step::Unreadable("inaccessible".into())
    );
    let step = torn_down(Some(&observed), PowerOff::Hard);
    assert_eq!(step, Some(TeardownStep::Unreadable("inaccessible".into())));
}

#[test]
fn a_suspended_machine_is_powered_off_before_anything_is_detached_or_destroyed() {
    let observed = ObservedVm {
        power: PowerState::Suspended,
        ..finished()
    };
    for mode in [PowerOff::Hard, PowerOff::Soft, PowerOff::TrySoft] {
        assert_eq!(torn_down(Some(&observed), mode), Some(TeardownStep::PowerOff(vm())));
    }
}
