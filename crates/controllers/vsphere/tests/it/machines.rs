//! Machines with data disks, end to end: a real API server, a simulated vCenter.

use crate::world;

use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use capstan_api::vsphere::{VSphereCluster, VSphereMachine, VSphereMachineTemplate, VSphereVM};
use capstan_kube::capi::Machine;
use capstan_testkit::vcsim::{Fault, Options};
use capstan_vsphere::{CloneSpec, ConfigSpec, DeviceChange, DeviceKind, NewDisk, PowerState};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use world::{World, disks, spec};

#[tokio::test(flavor = "multi_thread")]
async fn a_control_plane_machine_gets_a_disk_for_etcd() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let etcd = json!([{"name": "etcd", "sizeGiB": 20, "provisioningMode": "Thin"}]);
    world
        .machine("cp-0", spec("pvscsi", json!({"dataDisks": etcd})))
        .await?;
    let (machine, vm, info) = world.ready("cp-0").await?;
    assert_eq!(
        disks(&info).iter().map(|d| (d.0, d.1)).collect::<Vec<_>>(),
        [(0, 10), (1, 20)]
    );
    assert_eq!(disks(&info)[1].2, Some(true));
    assert_eq!(machine.spec.provider_id, Some(format!("vsphere://{}", info.bios_uuid)));
    assert_eq!(info.state.power, PowerState::On);
    let status = machine.status.unwrap();
    assert!(
        status
            .addresses
            .iter()
            .any(|a| a.type_ == "ExternalIP" && a.address.starts_with("10."))
    );
    let of_vm = vm.status.unwrap();
    assert_eq!(of_vm.clone_mode.as_deref(), Some("linkedClone"));
    assert_eq!(of_vm.host.as_deref().map(|h| h.starts_with("DC0_")), Some(true));
    assert!(of_vm.task_ref.is_none());
    let disk = &of_vm.data_disks[0];
    assert_eq!(
        (disk.name.as_str(), disk.unit_number, disk.controller.type_.as_str()),
        ("etcd", 1, "PVSCSI")
    );
    let uuid = disk.uuid.clone().unwrap();
    let listed = info.extra_config("guestinfo.capstan.disks").unwrap();
    assert!(
        listed.contains(&uuid) && listed.contains("/dev/disk/by-id/wwn-0x"),
        "{listed}"
    );
    world.event("cp-0", "Provisioned").await?;

    let vcenter = world.vcenter().await?;
    vcenter.power_off(&info.reference).await?.wait().await?;
    let look = json!({"metadata": {"annotations": {"look": "again"}}});
    let vms = world.api::<VSphereVM>();
    vms.patch("cp-0", &PatchParams::default(), &Patch::Merge(look)).await?;
    let mut watch = vcenter.watch_vm(&info.reference);
    let on = async {
        while watch.next().await?.power != PowerState::On {}
        anyhow::Ok(())
    };
    tokio::time::timeout(world::PATIENCE, on).await?
}

#[tokio::test(flavor = "multi_thread")]
async fn every_worker_gets_its_own_disk_for_images_and_goes_with_it() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let images = json!([{"name": "images", "sizeGiB": 50}]);
    for name in ["w-0", "w-1", "w-2"] {
        world
            .machine(name, spec("pvscsi", json!({"dataDisks": images})))
            .await?;
    }
    let mut paths = Vec::new();
    for name in ["w-0", "w-1", "w-2"] {
        let (_, vm, info) = world.ready(name).await?;
        assert_eq!(disks(&info).len(), 2);
        paths.push(vm.status.unwrap().data_disks[0].datastore_path.clone().unwrap());
    }
    paths.dedup();
    assert_eq!(paths.len(), 3, "{paths:?}");
    let vm = world.api::<VSphereVM>().get("w-1").await?;
    world.delete("w-1").await?;
    let again = world.api::<VSphereMachine>().get_opt("w-1").await?;
    assert!(again.is_none(), "{again:?}");
    assert!(world.in_vcenter(&vm).await?.is_none());
    assert!(world.api::<VSphereVM>().get_opt("w-1").await?.is_none());
    Ok(())
}

/// The proposal's machine, with its field name put right and the names of the simulated vCenter.
#[tokio::test(flavor = "multi_thread")]
async fn the_proposals_machine_gets_its_disks_and_its_spelling_is_refused() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let example = |field: &str| {
        json!({
            "cloneMode": "linkedClone", "datacenter": "DC0", "datastore": "/DC0/datastore/LocalDS_0", "diskGiB": 128,
            "folder": "/DC0/vm", "memoryMiB": 16384, "numCPUs": 4, "resourcePool": "/DC0/host/DC0_C0",
            "server": world.vcsim.server, "template": "two-disks",
            "network": {"devices": [{"dhcp4": true, "networkName": "DC0_DVPG0"}]},
            "dataDisks": [
                {"name": "images", "sizeGiB": 50, field: "Thin"},
                {"name": "swap", "sizeGiB": 90, field: "Thick"},
            ],
        })
    };
    let refused = world
        .machine("misspelt", example("provisioningType"))
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("provisioningMode"), "{refused}");
    world.machine("example", example("provisioningMode")).await?;
    let (_, vm, info) = world.ready("example").await?;
    let found = disks(&info);
    assert_eq!(
        found.iter().map(|d| (d.0, d.1)).collect::<Vec<_>>(),
        [(0, 10), (1, 10), (2, 50), (3, 90)]
    );
    assert_eq!((found[2].2, found[3].2), (Some(true), Some(false)));
    assert_eq!((info.num_cpus, info.memory_mib), (4, 16384));
    let names: Vec<_> = vm
        .status
        .unwrap()
        .data_disks
        .iter()
        .map(|d| (d.name.clone(), d.unit_number))
        .collect();
    assert_eq!(names, [("images".to_owned(), 2), ("swap".to_owned(), 3)]);
    let metadata = STANDARD.decode(info.extra_config("guestinfo.metadata").unwrap())?;
    let mac = info.devices.iter().find_map(|d| d.nic()).unwrap().mac.clone();
    assert!(String::from_utf8(metadata)?.contains(&format!("macaddress: \"{mac}\"")));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_examples_are_accepted_as_they_stand() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/vsphere");
    let mut templates = 0;
    for file in std::fs::read_dir(folder)? {
        let text = std::fs::read_to_string(file?.path())?.replace("${VSPHERE_SERVER}", &world.vcsim.server);
        for object in capstan_testkit::manifests::parse(&text)? {
            if object.types.as_ref().unwrap().kind != VSphereMachineTemplate::KIND {
                continue;
            }
            let mut value = serde_json::to_value(&object)?;
            value["metadata"]["namespace"] = json!(world.namespace);
            let template: VSphereMachineTemplate = world.create(value).await?;
            let findings = capstan_core::validate::vsphere::machine_template(&template.spec);
            assert_eq!(findings, Default::default(), "{}", template.name_any());
            world
                .machine(
                    &template.name_any(),
                    serde_json::to_value(&template.spec.template.spec)?,
                )
                .await?;
            templates += 1;
        }
    }
    for name in ["control-plane-etcd", "workers-images", "disks-placed-by-hand"] {
        let (_, vm, _) = world.ready(name).await?;
        let disks = vm.status.unwrap().data_disks;
        assert!(
            !disks.is_empty() && disks.iter().all(|disk| disk.uuid.is_some()),
            "{name}: {disks:?}"
        );
    }
    assert_eq!(templates, 3);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn modes_become_backing_flags_in_full_and_linked_clones() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let all = json!([
        {"name": "a", "sizeGiB": 1, "provisioningMode": "Thin"}, {"name": "b", "sizeGiB": 2, "provisioningMode": "Thick"},
        {"name": "c", "sizeGiB": 3, "provisioningMode": "EagerlyZeroed"}, {"name": "d", "sizeGiB": 4},
    ]);
    let full = json!({"cloneMode": "fullClone", "diskGiB": 25, "dataDisks": all, "customVMXKeys": {"my.key": "mine"}});
    world
        .machine("linked", spec("pvscsi", json!({"dataDisks": all})))
        .await?;
    let ignition = json!({"format": "ignition", "value": "{\"ignition\":{\"version\":\"3.4.0\"}}"});
    world.machine_with("full", spec("pvscsi", full), ignition).await?;
    for (name, primary) in [("linked", 10), ("full", 25)] {
        let (_, vm, info) = world.ready(name).await?;
        let found = disks(&info);
        assert_eq!(found[0].1, primary, "{name}");
        let flags: Vec<_> = found[1..].iter().map(|d| (d.1, d.2, d.3)).collect();
        // What is not sent reads as false in the simulator.
        let expected = [
            (1, Some(true), Some(false)),
            (2, Some(false), Some(false)),
            (3, Some(false), Some(true)),
            (4, Some(false), Some(false)),
        ];
        assert_eq!(flags, expected, "{name}");
        assert_eq!(vm.status.unwrap().clone_mode, Some(format!("{name}Clone")));
        assert_eq!(
            info.extra_config("guestinfo.ignition.config.data").is_some(),
            name == "full"
        );
        assert_eq!(info.extra_config("guestinfo.userdata").is_some(), name == "linked");
        assert_eq!(info.extra_config("my.key"), (name == "full").then_some("mine"));
    }
    let moves = world.vcsim.admin.moves().await?;
    assert_eq!(moves["linked"], ["createNewChildDiskBacking"; 2], "no disk is copied");
    assert_eq!(moves["full"], ["moveAllDiskBackingsAndConsolidate"; 2]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_linked_clone_grows_from_the_snapshot_named_and_becomes_full_where_there_is_none() -> Result<()> {
    let world = World::start(Options::default()).await?;
    for (name, snapshot) in [("named", "base"), ("unknown", "no-such-snapshot")] {
        let wanted = json!({"snapshot": snapshot, "diskGiB": 500, "dataDisks": [{"name": "a", "sizeGiB": 1}]});
        world.machine(name, spec("pvscsi", wanted)).await?;
    }
    let vcenter = world.vcenter().await?;
    let template = vcenter.template(&*vcenter.datacenter(None).await?, "pvscsi").await?;
    let base = template.snapshot("base")?.reference.value().to_owned();
    let status = world.ready("named").await?.1.status.context("no status")?;
    assert_eq!(
        (status.clone_mode.as_deref(), status.snapshot),
        (Some("linkedClone"), Some(base))
    );
    let (_, vm, info) = world.ready("unknown").await?;
    let status = vm.status.context("no status")?;
    assert_eq!(
        (status.clone_mode.as_deref(), status.snapshot),
        (Some("fullClone"), None)
    );
    assert_eq!(disks(&info).len(), 2);
    let events = world.events("unknown").await?;
    let told = |(reason, text): &(String, String)| reason == "SnapshotNotFound" && text.contains("no-such-snapshot");
    assert!(events.iter().any(told), "{events:?}");
    let not_grown = |(reason, text): &(String, String)| reason == "DiskNotGrown" && text.contains("diskGiB: 500");
    assert!(!events.iter().any(not_grown), "a full clone grows: {events:?}");
    let events = world.events("named").await?;
    assert!(events.iter().any(not_grown), "{events:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_that_vcenter_dropped_in_silence_are_named_and_put_right() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let drop = Fault {
        method: "CloneVM_Task".into(),
        kind: "drop-devices".into(),
        ..Fault::default()
    };
    world.vcsim.admin.inject(&drop).await?;
    let two =
        json!([{"name": "images", "sizeGiB": 50}, {"name": "swap", "sizeGiB": 9, "controller": {"type": "NVMe"}}]);
    world
        .machine("mended", spec("pvscsi", json!({"dataDisks": two})))
        .await?;
    let (_, vm, info) = world.ready("mended").await?;
    assert_eq!(
        disks(&info).iter().map(|d| (d.0, d.1)).collect::<Vec<_>>(),
        [(0, 9), (0, 10), (1, 50)]
    );
    assert!(vm.status.unwrap().data_disks.iter().all(|disk| disk.uuid.is_some()));
    let text = world.event("mended", "DevicesDropped").await?;
    assert!(
        text.contains("dataDisks[0] \"images\"") && text.contains("dataDisks[1] \"swap\""),
        "{text}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn more_disks_than_a_controller_has_units_for_are_refused_before_anything_is_cloned() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let many = |count: usize| {
        (0..count)
            .map(|i| json!({"name": format!("d{i}"), "sizeGiB": 1}))
            .collect::<Vec<_>>()
    };
    world
        .machine("too-many", spec("lsi", json!({"dataDisks": many(16)})))
        .await?;
    world
        .machine("sixty", spec("pvscsi", json!({"dataDisks": many(60)})))
        .await?;
    let text = world.condition_of_vm("too-many", "no free unit").await?;
    assert!(
        text.contains("dataDisks[14] \"d14\": LSI Logic SCSI controller 0 has no free unit"),
        "{text}"
    );
    assert!(text.contains("dataDisks[15] \"d15\""), "{text}");
    assert!(
        world
            .events("too-many")
            .await?
            .iter()
            .any(|(_, text)| text.contains("dataDisks[15]"))
    );
    let vm = world.api::<VSphereVM>().get("too-many").await?;
    assert!(world.in_vcenter(&vm).await?.is_none());
    let (_, _, info) = world.ready("sixty").await?;
    let units: Vec<i32> = disks(&info).iter().map(|disk| disk.0).collect();
    assert_eq!(units, (0..=61).filter(|unit| *unit != 7).collect::<Vec<_>>());
    world.delete("too-many").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_machine_of_the_same_name_is_never_adopted_nor_destroyed() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(Some("DC0")).await?;
    let template = vcenter.template(&datacenter, "pvscsi").await?;
    let pool = vcenter
        .resource_pool(&datacenter, Some("/DC0/host/DC0_C0/Resources"))
        .await?;
    let place = CloneSpec {
        pool: Some(pool.reference.clone()),
        ..CloneSpec::default()
    };
    let foreign = vcenter
        .clone_vm(&template.reference, &datacenter.vm_folder, "taken", &place)
        .await?
        .wait()
        .await?
        .unwrap();
    world.machine("taken", spec("pvscsi", json!({}))).await?;
    let text = world.condition_of_vm("taken", "exists in folder").await?;
    assert!(text.contains("left alone"), "{text}");
    world.delete("taken").await?;
    assert_eq!(vcenter.vm(&foreign).await?.state.name, "taken");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_of_others_survive_their_machine() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let options = json!({"dataDisks": [{"name": "own", "sizeGiB": 1}], "powerOffMode": "trySoft"});
    world.machine("goes", spec("pvscsi", options)).await?;
    let (_, _, info) = world.ready("goes").await?;
    let vcenter = world.vcenter().await?;
    let controller = info
        .devices
        .iter()
        .find(|d| d.disk().is_some())
        .unwrap()
        .controller_key
        .unwrap();
    // A volume that lies in another machine's folder stands for one of a CSI driver.
    world.machine("stays", spec("pvscsi", json!({}))).await?;
    let (_, _, other) = world.ready("stays").await?;
    let new = NewDisk {
        key: -1,
        controller_key: controller,
        unit: 9,
        capacity_kib: 1024,
        ..NewDisk::default()
    };
    let config = ConfigSpec {
        devices: vec![DeviceChange::AddDisk(new)],
        ..ConfigSpec::default()
    };
    vcenter.reconfigure(&other.reference, &config).await?.wait().await?;
    let volume = vcenter
        .vm(&other.reference)
        .await?
        .devices
        .into_iter()
        .find(|d| d.unit == Some(9))
        .unwrap();
    let path = volume.disk().unwrap().path.clone();
    let detach = ConfigSpec {
        devices: vec![DeviceChange::Remove(volume)],
        ..ConfigSpec::default()
    };
    vcenter.reconfigure(&other.reference, &detach).await?.wait().await?;
    let attach = ConfigSpec {
        devices: vec![DeviceChange::AttachDisk {
            key: -1,
            controller_key: controller,
            unit: 9,
            path: path.clone(),
        }],
        ..ConfigSpec::default()
    };
    vcenter.reconfigure(&info.reference, &attach).await?.wait().await?;
    // One in the machine's own folder is known by its id alone.
    let volume = NewDisk {
        key: -1,
        controller_key: controller,
        unit: 10,
        capacity_kib: 1024,
        ..NewDisk::default()
    };
    let config = ConfigSpec {
        devices: vec![DeviceChange::AddDisk(volume)],
        ..ConfigSpec::default()
    };
    vcenter.reconfigure(&info.reference, &config).await?.wait().await?;
    world.vcsim.admin.make_volume("goes", 10).await?;
    world.delete("goes").await?;
    assert!(vcenter.vm(&info.reference).await.unwrap_err().is_gone());
    let again = ConfigSpec {
        devices: vec![DeviceChange::AttachDisk {
            key: -1,
            controller_key: controller,
            unit: 9,
            path,
        }],
        ..ConfigSpec::default()
    };
    vcenter.reconfigure(&other.reference, &again).await?.wait().await?;
    // The simulator removes the whole folder of a machine, so that of the other one only the detaching can be seen.
    let events = world.events("goes").await?;
    let detached =
        |(reason, text): &(String, String)| reason == "VolumesDetached" && text.contains("detaching 2 disks");
    assert!(events.iter().any(detached), "{events:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn gates_hold_a_machine_back_and_a_pause_holds_everything() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let machines = world.api::<VSphereMachine>();
    let waiting = json!({"status": {"initialization": {"infrastructureProvisioned": false}}});
    let clusters = world.api::<capstan_kube::capi::Cluster>();
    clusters
        .patch_status("c", &PatchParams::default(), &Patch::Merge(waiting))
        .await?;
    world.machine("gated", spec("pvscsi", json!({}))).await?;
    let reason = |machine: &VSphereMachine| {
        let conditions = machine
            .status
            .as_ref()
            .map(|s| s.conditions.clone())
            .unwrap_or_default();
        conditions
            .iter()
            .find(|c| c.type_ == "VMProvisioned")
            .and_then(|c| c.reason.clone())
    };
    let is_gated = move |m: &VSphereMachine| reason(m).as_deref() == Some("WaitingForClusterInfrastructure");
    world.until("gated", is_gated).await?;
    let paused = json!({"metadata": {"annotations": {"cluster.x-k8s.io/paused": ""}}});
    machines
        .patch("gated", &PatchParams::default(), &Patch::Merge(paused))
        .await?;
    // Machines come by one watch, in order: whoever has seen this one knows of the pause.
    world.machine("after", spec("pvscsi", json!({}))).await?;
    world.until("after", is_gated).await?;
    let open = json!({"status": {"initialization": {"infrastructureProvisioned": true}}});
    clusters
        .patch_status("c", &PatchParams::default(), &Patch::Merge(open))
        .await?;
    world.ready("after").await?;
    assert!(
        world.api::<VSphereVM>().get_opt("gated").await?.is_none(),
        "paused all that time"
    );
    let go = json!({"metadata": {"annotations": {"cluster.x-k8s.io/paused": null}}});
    machines
        .patch("gated", &PatchParams::default(), &Patch::Merge(go))
        .await?;
    world.ready("gated").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_go_where_they_are_asked_to_and_hardware_is_as_asked() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let vcenter = world.vcenter().await?;
    let tag = vcenter
        .create_tag(&vcenter.create_tag_category("team").await?, "blue")
        .await?;
    let options = json!({
        "hardwareVersion": "vmx-19", "numCPUs": 8, "memoryMiB": 8192, "tagIDs": [tag],
        "network": {"devices": [
            {"networkName": "VM Network", "ipAddrs": ["192.168.7.7/24"], "gateway4": "192.168.7.1", "nameservers": ["192.168.7.2"]},
            {"networkName": "DC0_DVPG0", "dhcp4": true, "macAddr": "00:50:56:01:02:03"},
        ]},
        "dataDisks": [
            {"name": "plain", "sizeGiB": 1},
            {"name": "other-store", "sizeGiB": 2, "datastore": "LocalDS_1"},
            {"name": "other-bus", "sizeGiB": 3, "controller": {"type": "PVSCSI", "bus": 1}, "unitNumber": 12},
            {"name": "fast", "sizeGiB": 4, "controller": {"type": "NVMe"}},
        ],
    });
    world.machine("special", spec("pvscsi-13", options)).await?;
    let (_, vm, info) = world.ready("special").await?;
    assert_eq!(
        (info.version.as_str(), info.num_cpus, info.memory_mib),
        ("vmx-19", 8, 8192)
    );
    let listed = vm.status.unwrap().data_disks;
    let places: Vec<_> = listed
        .iter()
        .map(|d| (d.controller.type_.as_str(), d.controller.bus, d.unit_number))
        .collect();
    assert_eq!(
        places,
        [("PVSCSI", 0, 1), ("PVSCSI", 0, 2), ("PVSCSI", 1, 12), ("NVMe", 0, 0)]
    );
    assert!(
        listed[1].datastore_path.as_deref().unwrap().starts_with("[LocalDS_1]"),
        "{listed:?}"
    );
    assert!(
        listed[0].datastore_path.as_deref().unwrap().starts_with("[LocalDS_0]"),
        "{listed:?}"
    );
    let nics: Vec<_> = info.devices.iter().filter_map(|d| d.nic()).collect();
    assert_eq!((nics.len(), nics[1].mac.as_str()), (2, "00:50:56:01:02:03"));
    let metadata = String::from_utf8(STANDARD.decode(info.extra_config("guestinfo.metadata").unwrap())?)?;
    assert!(
        metadata.contains("192.168.7.7/24") && metadata.contains("gateway4: \"192.168.7.1\""),
        "{metadata}"
    );
    assert_eq!(vcenter.attached_tags(&info.reference).await?, [tag]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storage_policy_chooses_the_datastore_and_an_unknown_one_is_named() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let by_policy = |name: &str| {
        let mut wanted = spec(
            "pvscsi",
            json!({"storagePolicyName": name, "dataDisks": [{"name": "a", "sizeGiB": 1}]}),
        );
        wanted.as_object_mut().unwrap().remove("datastore");
        wanted
    };
    world
        .machine("by-policy", by_policy("vSAN Default Storage Policy"))
        .await?;
    world.machine("unknown", by_policy("no such policy")).await?;
    let (_, vm, info) = world.ready("by-policy").await?;
    assert!(info.path.starts_with("[LocalDS_"), "{}", info.path);
    // The simulator refuses policies in a clone, as a vCenter does for those with data services.
    let vcenter = world.vcenter().await?;
    let policy = vcenter.storage_policy("vSAN Default Storage Policy").await?;
    let keys = info.devices.iter().filter(|device| device.disk().is_some());
    let keys: Vec<i32> = keys.map(|device| device.key).collect();
    let found = vcenter.policies_of(&info.reference, &keys).await?;
    assert_eq!(found.home.as_ref(), Some(&policy));
    assert_eq!((found.disks.len(), keys.len()), (2, 2));
    assert!(found.disks.values().all(|id| *id == policy), "{found:?}");
    assert!(
        vm.status.unwrap().data_disks[0]
            .datastore_path
            .as_deref()
            .unwrap()
            .starts_with("[LocalDS_")
    );
    world
        .condition_of_vm("unknown", "storage policy \"no such policy\" does not exist")
        .await?;
    world.delete("unknown").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_whose_task_was_lost_is_taken_up_and_not_made_twice() -> Result<()> {
    let options = Options {
        clone_delay: Duration::from_secs(3),
        ..Options::default()
    };
    let mut world = World::start(options).await?;
    let lost = Fault {
        method: "CloneVM_Task".into(),
        kind: "lose-answer".into(),
        times: 1,
        ..Fault::default()
    };
    world.vcsim.admin.inject(&lost).await?;
    let disks = json!({"dataDisks": [{"name": "etcd", "sizeGiB": 1}]});
    world.machine("answer-lost", spec("pvscsi", disks.clone())).await?;
    world.ready("answer-lost").await?;
    world.machine("crashed", spec("pvscsi", disks.clone())).await?;
    world.machine("deleted", spec("pvscsi", disks)).await?;
    let started = |vm: &VSphereVM| vm.status.as_ref().is_some_and(|status| status.task_ref.is_some());
    for name in ["crashed", "deleted"] {
        world.until::<VSphereVM>(name, started).await?;
    }
    world.crash().await;
    let forgotten = json!({"status": {"taskRef": null, "cloneMode": null, "dataDisks": null}});
    let vms = world.api::<VSphereVM>();
    for name in ["crashed", "deleted"] {
        vms.patch_status(name, &PatchParams::default(), &Patch::Merge(forgotten.clone()))
            .await?;
    }
    world.run(Default::default()).await?;
    let deleted = vms.get("deleted").await?;
    world.delete("deleted").await?;
    assert!(
        world.in_vcenter(&deleted).await?.is_none(),
        "a clone must not outlive its object"
    );
    for name in ["answer-lost", "crashed"] {
        let (_, vm, _) = world.ready(name).await?;
        let disks = vm.status.unwrap().data_disks;
        assert_eq!(
            (disks.len(), disks[0].unit_number, disks[0].uuid.is_some()),
            (1, 1, true)
        );
    }
    let clones = world.vcsim.admin.counters().await?["CloneVM_Task"];
    assert_eq!(clones, 3, "one clone for each object");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_and_devices_of_hosts_are_taken_over_and_the_host_is_told_to_the_node() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let settings = json!({
        "resources": {"requests": {"cpu": "500M", "memory": "1Gi"}, "limits": {"cpu": "4G"}, "shares": {"memory": 2000}},
        "pciDevices": [{"deviceId": 7864, "vendorId": 4318}, {"vGPUProfile": "grid_t4-1q"}],
        "dataDisks": [{"name": "a", "sizeGiB": 1, "storagePolicyName": "VVol No Requirements Policy"}],
        "nestedHV": true, "migrateEncryption": "opportunistic", "ftEncryptionMode": "ftEncryptionOpportunistic",
        "numCPUs": 4,
    });
    world.machine("m", spec("pvscsi", settings)).await?;
    let (_, vm, info) = world.ready("m").await?;
    assert_eq!(
        (info.num_cpus, info.cores_per_socket),
        (4, 1),
        "the cores per socket are the template's"
    );
    assert_eq!(
        (info.cpu_allocation.reservation, info.cpu_allocation.limit),
        (Some(500), Some(4000))
    );
    assert_eq!((info.memory_allocation.shares, info.nested_hv), (Some(2000), true));
    let devices = info.devices.iter();
    let passed_through = devices.filter(|device| matches!(device.kind, DeviceKind::PciPassthrough));
    assert_eq!((passed_through.count(), disks(&info).len()), (2, 2));
    world
        .set_status::<Machine>("m", json!({"nodeRef": {"name": "m"}}))
        .await?;
    let host = vm.status.unwrap().host.unwrap();
    let labelled = move |machine: &Machine| machine.labels().get("node.cluster.x-k8s.io/esxi-host") == Some(&host);
    world.until::<Machine>("m", labelled).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_vm_is_not_adopted_by_a_bios_uuid_that_somebody_wrote() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(None).await?;
    let template = vcenter.template(&datacenter, "pvscsi").await?;
    let pool = vcenter
        .resource_pool(&datacenter, Some("/DC0/host/DC0_C0/Resources"))
        .await?;
    let clone = CloneSpec {
        pool: Some(pool.reference.clone()),
        ..CloneSpec::default()
    };
    let folder = &datacenter.vm_folder;
    let made = vcenter
        .clone_vm(&template.reference, folder, "database", &clone)
        .await?
        .wait()
        .await?;
    let foreign = vcenter.vm(&made.context("no VM")?).await?;
    let adopting = json!({
        "kind": "VSphereVM",
        "metadata": {
            "name": "database", "labels": {"cluster.x-k8s.io/cluster-name": "c"},
            "finalizers": ["vspherevm.infrastructure.cluster.x-k8s.io"],
        },
        "spec": spec("pvscsi", json!({"biosUUID": foreign.bios_uuid})),
    });
    world.create::<VSphereVM>(adopting).await?;
    world.condition_of_vm("database", "cannot be found in vCenter").await?;
    world.api::<VSphereVM>().delete("database", &Default::default()).await?;
    world.gone::<VSphereVM>("database").await?;
    assert_eq!(
        vcenter.vm(&foreign.reference).await?.bios_uuid,
        foreign.bios_uuid,
        "it is still there"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_machine_stays_ready_when_its_secret_is_missing() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let secrets = world.api::<Secret>();
    secrets.delete("vcenter", &Default::default()).await?;
    // The finalizer keeps it until the cluster is gone; somebody takes it off by force.
    let none = json!({"metadata": {"finalizers": null}});
    secrets
        .patch("vcenter", &PatchParams::default(), &Patch::Merge(none))
        .await?;
    let mark = json!({"metadata": {"annotations": {"example.com/look": "now"}}});
    world
        .api::<VSphereVM>()
        .patch("m", &PatchParams::default(), &Patch::Merge(mark))
        .await?;
    let reported = |vm: &VSphereVM| {
        let conditions = vm.status.clone().unwrap_or_default().conditions;
        let mut found = conditions.iter().filter(|c| c.type_ == "VCenterAvailable");
        found.any(|c| c.status == "False" && c.message.as_deref().is_some_and(|text| text.contains("vcenter")))
    };
    let vm = world.until::<VSphereVM>("m", reported).await?;
    let provisioned = vm
        .status
        .unwrap()
        .conditions
        .into_iter()
        .find(|c| c.type_ == "VMProvisioned");
    assert_eq!(provisioned.unwrap().status, "True");
    let machine = world.api::<VSphereMachine>().get("m").await?.status.unwrap();
    let ready = machine.conditions.into_iter().find(|c| c.type_ == "Ready");
    assert_eq!((ready.unwrap().status.as_str(), machine.ready), ("True", true));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_of_another_namespace_is_not_adopted_by_its_name_and_bios_uuid() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    let filter = world.namespace.clone();
    let label = json!({"metadata": {"labels": {"cluster.x-k8s.io/watch-filter": filter}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(label));
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    world.crash().await;
    world.api::<VSphereCluster>().patch("c", &params, &patch).await?;
    world.api::<VSphereMachine>().patch("m", &params, &patch).await?;
    let vm = world.api::<VSphereVM>().patch("m", &params, &patch).await?;
    let info = world.in_vcenter(&vm).await?.unwrap();

    let other = world.plane.namespace("other").await?;
    let victim = std::mem::replace(&mut world.namespace, other);
    world.make_cluster().await?;
    world.api::<VSphereCluster>().patch("c", &params, &patch).await?;
    world.watch_filter = Some(filter.clone());
    world.run(Default::default()).await?;
    let labels = json!({"cluster.x-k8s.io/cluster-name": "c", "cluster.x-k8s.io/watch-filter": filter});
    world
        .create::<VSphereVM>(json!({
            "kind": "VSphereVM", "metadata": {"name": "m", "labels": labels},
            "spec": spec("pvscsi", json!({"biosUUID": info.bios_uuid})),
        }))
        .await?;
    world.condition_of_vm("m", "cannot be found in vCenter").await?;
    let vms = world.api::<VSphereVM>();
    let taken = vms.get("m").await?.status.unwrap_or_default();
    assert!(
        !taken.ready && taken.vm_ref.is_none() && taken.addresses.is_empty(),
        "{taken:?}"
    );
    vms.delete("m", &Default::default()).await?;
    world.gone::<VSphereVM>("m").await?;
    world.namespace = victim;
    let left = world.in_vcenter(&vm).await?.unwrap();
    assert_eq!(left.state.power, info.state.power, "it runs on");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_naming_template_capstan_cannot_fill_goes_with_its_vm() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let template = "{{ printf \"%s-x\" .machine.name }}";
    let named = spec("pvscsi", json!({"namingStrategy": {"template": template}}));
    world.machine("m", named).await?;
    let refused = |machine: &VSphereMachine| {
        let conditions = machine.status.clone().unwrap_or_default().conditions;
        let mut messages = conditions.iter().filter_map(|c| c.message.as_deref());
        messages.any(|text| text.contains("\"printf\" is not known"))
    };
    let machine = world.until::<VSphereMachine>("m", refused).await?;
    // The predecessor, which knows the function, has put its finalizer on the machine and made the VSphereVM.
    let held = json!({"metadata": {"finalizers": ["vspheremachine.infrastructure.cluster.x-k8s.io"]}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(held));
    world.api::<VSphereMachine>().patch("m", &params, &patch).await?;
    let owner =
        json!({"apiVersion": VSphereMachine::API_VERSION, "kind": "VSphereMachine", "name": "m", "uid": machine.uid()});
    let vm = json!({
        "kind": "VSphereVM",
        "metadata": {
            "name": "m-x", "labels": {"cluster.x-k8s.io/cluster-name": "c"}, "ownerReferences": [owner],
            "finalizers": ["vspherevm.infrastructure.cluster.x-k8s.io"],
        },
        "spec": spec("pvscsi", json!({"bootstrapRef": {"kind": "Secret", "name": "m-boot"}})),
    });
    world.create::<VSphereVM>(vm).await?;
    let ready = |vm: &VSphereVM| vm.status.as_ref().is_some_and(|status| status.ready);
    let vm = world.until::<VSphereVM>("m-x", ready).await?;
    world.delete("m").await?;
    assert!(world.api::<VSphereVM>().get_opt("m-x").await?.is_none());
    assert!(world.in_vcenter(&vm).await?.is_none(), "the VM is gone, too");
    Ok(())
}
