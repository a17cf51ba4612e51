//! The client against a simulated vCenter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use capstan_core::Class;
use capstan_core::disks::vsphere::ControllerKind;
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_testkit::vcsim::{Fault, Options};
use capstan_testkit::{Vcsim, vcsim};
use capstan_vsphere::{
    CloneSpec, ConfigSpec, Datacenter, DeviceChange, DiskMove, Error, Login, MoRef, NewDisk, NewNic, PowerState,
    Sessions, Settings, Task, Trust, Vcenter, VmInfo,
};
use futures::future::try_join_all;

const PATIENCE: Duration = Duration::from_secs(180);

pub fn login(sim: &Vcsim, trust: Trust) -> Login {
    Login {
        server: sim.server.clone(),
        username: sim.username.clone(),
        password: sim.password.clone().into(),
        trust,
        tenant: None,
    }
}

pub async fn start(options: Options) -> Result<(Vcsim, Sessions, Vcenter)> {
    let sim = vcsim(options).await?;
    let sessions = Sessions::default();
    let vcenter = sessions.get(&login(&sim, Trust::Ca(sim.ca.clone()))).await?;
    Ok((sim, sessions, vcenter))
}

/// Runs a test with an end, so that a lost answer fails instead of hanging.
pub async fn in_time<T>(test: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PATIENCE, test).await.context("took too long")?
}

async fn spec(vcenter: &Vcenter, datacenter: &Datacenter, template: &VmInfo, disks: i32) -> Result<CloneSpec> {
    let primary = template
        .devices
        .iter()
        .find(|device| device.disk().is_some())
        .context("no disk")?;
    let network = vcenter.network(datacenter, "DC0_DVPG0").await?;
    let mut devices: Vec<DeviceChange> = template
        .devices
        .iter()
        .filter(|device| device.nic().is_some())
        .cloned()
        .map(DeviceChange::Remove)
        .collect();
    devices.push(DeviceChange::AddNic(NewNic {
        key: -300,
        backing: network.backing.clone(),
        mac: None,
    }));
    for n in 0..disks {
        devices.push(DeviceChange::AddDisk(NewDisk {
            key: -400 - n,
            controller_key: primary.controller_key.context("no controller")?,
            unit: 1 + n,
            capacity_kib: i64::from(n + 1) << 20,
            thin_provisioned: Some(n == 0),
            eagerly_scrub: (n == 1).then_some(true),
            ..NewDisk::default()
        }));
    }
    Ok(CloneSpec {
        pool: Some(vcenter.resource_pool(datacenter, None).await?.reference.clone()),
        datastore: Some(
            vcenter
                .datastore(datacenter, Some("LocalDS_0"))
                .await?
                .reference
                .clone(),
        ),
        config: ConfigSpec {
            disk_uuid_enabled: Some(true),
            num_cpus: Some(4),
            memory_mib: Some(2048),
            devices,
            extra_config: vec![("guestinfo.metadata".into(), "a<b>&\"c\"".into())],
            ..ConfigSpec::default()
        },
        ..CloneSpec::default()
    })
}

pub async fn clone(vcenter: &Vcenter, template: &str, name: &str, disks: i32, linked: bool) -> Result<MoRef> {
    let task = start_clone(vcenter, template, name, disks, linked).await?;
    task.wait().await?.context("the clone task made nothing")
}

async fn start_clone(vcenter: &Vcenter, template: &str, name: &str, disks: i32, linked: bool) -> Result<Task> {
    let folder = vcenter.datacenter(None).await?.vm_folder.clone();
    start_clone_into(vcenter, template, name, &folder, (disks, linked, "LocalDS_0")).await
}

/// Makes a linked clone without data disks in a folder, on the second datastore.
pub async fn clone_into(vcenter: &Vcenter, template: &str, name: &str, folder: &MoRef) -> Result<MoRef> {
    let task = start_clone_into(vcenter, template, name, folder, (0, true, "LocalDS_1")).await?;
    task.wait().await?.context("the clone task made nothing")
}

async fn start_clone_into(
    vcenter: &Vcenter,
    template: &str,
    name: &str,
    folder: &MoRef,
    (disks, linked, datastore): (i32, bool, &str),
) -> Result<Task> {
    let datacenter = vcenter.datacenter(None).await?;
    let template = vcenter.template(&datacenter, template).await?;
    let mut spec = spec(vcenter, &datacenter, &template, disks).await?;
    let datastore = vcenter.datastore(&datacenter, Some(datastore)).await?;
    spec.datastore = Some(datastore.reference.clone());
    if linked {
        spec.disk_move = DiskMove::Linked;
        spec.snapshot = template.current_snapshot.clone();
    }
    Ok(vcenter.clone_vm(&template.reference, folder, name, &spec).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_tells_the_version_and_every_way_of_trust_works_but_the_wrong_thumbprint() -> Result<()> {
    in_time(async {
        let sim = vcsim(Options {
            api_version: Some("8.0.3.0".into()),
            ..Options::default()
        })
        .await?;
        let trusts = [
            Trust::Insecure,
            Trust::Thumbprint(sim.thumbprint.clone()),
            Trust::Thumbprint(sim.thumbprint_sha256.replace(':', "").to_lowercase()),
            Trust::Ca(sim.ca.clone()),
        ];
        let sessions = Sessions::default();
        for trust in trusts {
            let vcenter = sessions.get(&login(&sim, trust)).await?;
            assert_eq!(vcenter.about().api_version, "8.0.3.0");
        }
        let wrong = "AA:".repeat(20);
        let error = sessions
            .get(&login(&sim, Trust::Thumbprint(wrong)))
            .await
            .expect_err("a wrong thumbprint");
        let Error::Thumbprint { seen, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*seen, sim.thumbprint);
        assert_eq!(error.class(), Class::Terminal);
        assert!(matches!(
            sessions.get(&login(&sim, Trust::System)).await,
            Err(Error::Certificate { .. })
        ));
        sessions.close().await;
        assert_eq!(sim.admin.counters().await?["Logout"], 4);
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_refused_once_and_not_tried_again_at_once() -> Result<()> {
    in_time(async {
        let sim = vcsim(Options::default()).await?;
        let sessions = Sessions::default();
        let wrong = Login {
            password: "wrong".into(),
            ..login(&sim, Trust::Insecure)
        };
        for _ in 0..5 {
            let error = sessions.get(&wrong).await.expect_err("wrong password");
            assert!(matches!(error, Error::Login { .. }), "{error}");
            assert_eq!(error.class(), Class::Terminal);
            assert!(
                !error.to_string().contains("wrong"),
                "the password is not told: {error}"
            );
        }
        assert_eq!(sim.admin.counters().await?["Login"], 1);
        let right = sessions.get(&login(&sim, Trust::Insecure)).await?;
        sessions.get(&wrong).await.expect_err("still wrong");
        right.find_vm_by_instance_uuid(None, "nobody").await?;
        assert!(
            !right.is_closed(),
            "who has the right password is not logged out by who has not"
        );
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn one_session_is_shared_by_all_and_renewed_when_vcenter_forgets_it() -> Result<()> {
    in_time(async {
        let (sim, sessions, _) = start(Options::default()).await?;
        let login = login(&sim, Trust::Ca(sim.ca.clone()));
        let all = try_join_all((0..20).map(|_| sessions.get(&login))).await?;
        assert_eq!(sim.admin.counters().await?["Login"], 1);
        sim.admin.drop_sessions().await?;
        let found = try_join_all(
            all.iter()
                .map(|vcenter| vcenter.find_vm_by_instance_uuid(None, "nobody")),
        )
        .await?;
        assert!(found.iter().all(Option::is_none));
        assert_eq!(sim.admin.counters().await?["Login"], 2, "renewed once for all");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_linked_clone_has_its_data_disks_and_is_configured_powered_and_destroyed() -> Result<()> {
    in_time(async {
        let (_sim, _sessions, vcenter) = start(Options::default()).await?;
        let vm = clone(&vcenter, "pvscsi", "linked-1", 2, true).await?;
        let info = vcenter.vm(&vm).await?;
        assert_eq!(
            (info.state.name.as_str(), info.num_cpus, info.memory_mib),
            ("linked-1", 4, 2048)
        );
        assert_eq!(info.extra_config("guestinfo.metadata"), Some("a<b>&\"c\""));
        assert_eq!(info.hardware_version(), 19);
        let disks: Vec<_> = info
            .devices
            .iter()
            .filter_map(|d| d.disk().map(|disk| (d.unit, disk)))
            .collect();
        assert_eq!(
            disks.iter().map(|(unit, _)| *unit).collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!(
            disks.iter().map(|(_, d)| d.capacity_kib >> 20).collect::<Vec<_>>(),
            [10, 1, 2]
        );
        assert_eq!(
            (disks[1].1.thin_provisioned, disks[2].1.eagerly_scrub),
            (Some(true), Some(true))
        );
        assert!(
            disks
                .iter()
                .all(|(_, disk)| !disk.uuid.is_empty() && disk.path.contains("linked-1/"))
        );
        let hardware = info.hardware();
        assert!(hardware.disk_at(ControllerKind::ParaVirtual, 0, 2).is_some());

        let more = ConfigSpec {
            devices: vec![
                DeviceChange::AddController {
                    key: -9,
                    kind: ControllerKind::Nvme,
                    bus: 0,
                },
                DeviceChange::AddDisk(NewDisk {
                    key: -10,
                    controller_key: -9,
                    unit: 0,
                    capacity_kib: 1 << 20,
                    ..NewDisk::default()
                }),
            ],
            extra_config: vec![("guestinfo.userdata".into(), "x".into())],
            ..ConfigSpec::default()
        };
        vcenter.reconfigure(&vm, &more).await?.wait().await?;
        let info = vcenter.vm(&vm).await?;
        assert!(
            info.hardware().disk_at(ControllerKind::Nvme, 0, 0).is_some(),
            "{:?}",
            info.hardware()
        );

        let mut watch = vcenter.watch_vm(&vm);
        assert_eq!(watch.next().await?.power, PowerState::Off);
        vcenter.power_on(&vm).await?.wait().await?;
        let state = loop {
            let state = watch.next().await?;
            if state.nics.iter().any(|nic| !nic.addresses.is_empty()) {
                break state;
            }
        };
        assert_eq!((state.power, state.tools_running), (PowerState::On, true));
        assert!(state.host.is_some());
        vcenter.shutdown_guest(&vm).await?;
        while watch.next().await?.power != PowerState::Off {}
        vcenter.destroy(&vm).await?.wait().await?;
        let error = loop {
            if let Err(error) = watch.next().await {
                break error;
            }
        };
        assert!(error.is_gone(), "{error}");
        assert!(vcenter.vm(&vm).await.expect_err("destroyed").is_gone());
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn full_clones_of_every_template_get_disks_and_can_grow_them() -> Result<()> {
    in_time(async {
        let (_sim, _sessions, vcenter) = start(Options::default()).await?;
        for (template, disks) in [
            ("lsi", 3),
            ("lsisas", 2),
            ("sata", 4),
            ("nvme", 3),
            ("ide", 1),
            ("no-snapshot", 1),
        ] {
            let vm = clone(&vcenter, template, &format!("full-{template}"), disks, false).await?;
            let info = vcenter.vm(&vm).await?;
            let found = info.devices.iter().filter(|device| device.disk().is_some()).count();
            assert_eq!(found, 1 + disks as usize, "{template}: {:?}", info.hardware());
            let primary = info
                .devices
                .iter()
                .find(|device| device.disk().is_some())
                .cloned()
                .context("no disk")?;
            let grown = DeviceChange::EditDisk {
                storage_policy: None,
                device: primary.clone(),
                capacity_kib: Some(20 << 20),
            };
            let spec = ConfigSpec {
                devices: vec![grown],
                ..ConfigSpec::default()
            };
            vcenter.reconfigure(&vm, &spec).await?.wait().await?;
            let info = vcenter.vm(&vm).await?;
            let grown = info.devices.iter().find(|device| device.key == primary.key);
            assert_eq!(
                grown.and_then(|d| d.disk()).map(|disk| disk.capacity_kib),
                Some(20 << 20)
            );
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_task_keeps_its_reason_word_for_word() -> Result<()> {
    in_time(async {
        let (sim, _sessions, vcenter) = start(Options::default()).await?;
        let message = "Insufficient disk space on datastore 'LocalDS_0'.";
        sim.admin
            .inject(&Fault::task("CloneVM_Task", "NoDiskSpace", message))
            .await?;
        let error = clone(&vcenter, "pvscsi", "a", 0, true).await.expect_err("no space");
        let error: &Error = error.downcast_ref().context("another error")?;
        assert_eq!(error.fault().map(|fault| fault.message.as_str()), Some(message));
        assert_eq!(
            (error.fault().map(|f| f.kind.as_str()), error.class()),
            (Some("NoDiskSpace"), Class::Terminal)
        );
        assert!(error.to_string().contains(message));

        clone(&vcenter, "pvscsi", "a", 0, true).await?;
        let error = clone(&vcenter, "pvscsi", "a", 0, true)
            .await
            .expect_err("the name is taken");
        let error: &Error = error.downcast_ref().context("another error")?;
        assert_eq!(error.fault().and_then(|fault| fault.subject.as_deref()), Some("a"));
        assert!(
            error
                .fault()
                .is_some_and(|fault| fault.is("DuplicateName") && fault.object.is_some())
        );

        let error = clone(&vcenter, "lsi", "b", 20, true).await.expect_err("16 units only");
        let error: &Error = error.downcast_ref().context("another error")?;
        assert!(
            error.fault().is_some_and(|fault| fault.is("InvalidDeviceSpec")),
            "{error}"
        );

        sim.admin
            .inject(&Fault::call("PowerOnVM_Task", "NoPermission", "Permission was denied."))
            .await?;
        let vm = clone(&vcenter, "pvscsi", "c", 0, true).await?;
        let error = vcenter.power_on(&vm).await.expect_err("no permission");
        assert_eq!(
            (error.fault().map(|f| f.kind.as_str()), error.class()),
            (Some("NoPermission"), Class::Terminal)
        );
        assert!(matches!(
            vcenter.task(MoRef::task("task-999")).wait().await,
            Err(Error::TaskGone { .. })
        ));
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_inventory_is_found_by_path_name_and_uuid() -> Result<()> {
    in_time(async {
        let (sim, _sessions, vcenter) = start(Options {
            opaque_networks: 1,
            ..Options::default()
        })
        .await?;
        for path in [None, Some("DC0"), Some("/DC0")] {
            assert_eq!(vcenter.datacenter(path).await?.path, "/DC0");
        }
        assert!(matches!(
            vcenter.datacenter(Some("nowhere")).await,
            Err(Error::NotFound { kind: "datacenter", .. })
        ));
        let dc = vcenter.datacenter(None).await?;
        let template = vcenter.template(&dc, "pvscsi").await?;
        for path in [
            "/DC0/vm/pvscsi",
            "./pvscsi",
            "DC0/vm/pvscsi",
            template.instance_uuid.as_str(),
            &template.bios_uuid,
        ] {
            assert_eq!(
                vcenter.template(&dc, path).await?.reference,
                template.reference,
                "{path}"
            );
        }
        assert_eq!(
            template.snapshot("base")?.reference,
            template.current_snapshot.clone().context("no snapshot")?
        );
        assert!(matches!(
            template.snapshot("none"),
            Err(Error::NotFound { kind: "snapshot", .. })
        ));
        let pool = vcenter.resource_pool(&dc, None).await?;
        for path in [
            "/DC0/host/DC0_C0",
            "DC0_C0",
            "/DC0/host/DC0_C0/Resources",
            "DC0_C0/Resources",
        ] {
            assert_eq!(
                vcenter.resource_pool(&dc, Some(path)).await?.reference,
                pool.reference,
                "{path}"
            );
        }
        let small = vcenter.resource_pool(&dc, Some("DC0_C0_RP1")).await?;
        assert_eq!(
            (small.owner.clone(), small.reference != pool.reference),
            (pool.owner.clone(), true)
        );
        let stores = vcenter.datastores_of(pool.owner.as_ref().context("no owner")?).await?;
        assert_eq!(
            stores.iter().map(|store| store.name.as_str()).collect::<Vec<_>>(),
            ["LocalDS_0", "LocalDS_1"]
        );
        for path in ["LocalDS_1", "/DC0/datastore/LocalDS_1"] {
            assert_eq!(vcenter.datastore(&dc, Some(path)).await?.name, "LocalDS_1");
        }
        assert!(matches!(vcenter.datastore(&dc, None).await, Err(Error::Ambiguous { found, .. }) if found.len() == 2));
        assert!(matches!(
            vcenter.datastore(&dc, Some("gone")).await,
            Err(Error::NotFound { kind: "datastore", .. })
        ));
        for network in ["VM Network", "/DC0/network/VM Network", "DC0_DVPG0", "DC0_NSX0"] {
            vcenter
                .network(&dc, network)
                .await
                .with_context(|| network.to_owned())?;
        }
        assert!(vcenter.vm_folder(&dc, Some("/DC0/vm")).await? == dc.vm_folder);
        assert!(matches!(
            vcenter.vm_folder(&dc, Some("/DC0/vm/x")).await,
            Err(Error::NotFound { kind: "folder", .. })
        ));

        sim.admin.reset_counters().await?;
        try_join_all((0..50).map(|_| vcenter.template(&dc, "pvscsi"))).await?;
        assert_eq!(sim.admin.calls().await?, 0, "remembered");
        Ok(())
    })
    .await
}

/// Returns the references that a search of ours found: one, none, or all that an error names.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_inventory_is_listed_in_pages() -> Result<()> {
    in_time(async {
        let (sim, _sessions, vcenter) = start(Options {
            machines: 250,
            ..Options::default()
        })
        .await?;
        let dc = vcenter.datacenter(None).await?;
        let found = vcenter.find_vm(&dc, "DC0_C0_RP1_VM249").await?;
        assert_eq!(found.kind(), "VirtualMachine");
        let calls = sim.admin.counters().await?;
        // The first 200 objects, and the rest.
        assert_eq!(calls.get("ContinueRetrievePropertiesEx"), Some(&1), "{calls:?}");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn tags_modules_and_storage_policies_work_and_survive_lost_sessions() -> Result<()> {
    in_time(async {
        let (sim, _sessions, vcenter) = start(Options::default()).await?;
        let vm = clone(&vcenter, "pvscsi", "tagged", 0, true).await?;
        let category = vcenter.create_tag_category("rack").await?;
        let tag = vcenter.create_tag(&category, "r1").await?;
        sim.admin.drop_sessions().await?;
        vcenter.attach_tags(&vm, std::slice::from_ref(&tag)).await?;
        vcenter.attach_tags(&vm, std::slice::from_ref(&tag)).await?;
        assert_eq!(vcenter.attached_tags(&vm).await?, std::slice::from_ref(&tag));
        assert_eq!(vcenter.tag(&tag).await?.name, "r1");
        assert!(vcenter.attach_tags(&vm, &["urn:none".to_owned()]).await.is_err());

        let policy = vcenter.storage_policy("vSAN Default Storage Policy").await?;
        assert_eq!(vcenter.storage_policy(&policy).await?, policy);
        assert!(matches!(
            vcenter.storage_policy("none").await,
            Err(Error::NotFound { .. })
        ));
        let dc = vcenter.datacenter(None).await?;
        let store = vcenter.datastore(&dc, Some("LocalDS_0")).await?;
        let fitting = vcenter
            .compatible_datastores(&policy, std::slice::from_ref(&store.reference))
            .await?;
        assert!(fitting.len() <= 1);

        let cluster = vcenter.cluster(&dc, None).await?;
        let module = vcenter.create_cluster_module(&cluster).await?;
        vcenter.add_to_cluster_module(&module, &vm).await?;
        assert!(vcenter.cluster_modules().await?.iter().any(|m| m.module == module));
        vcenter.remove_from_cluster_module(&module, &vm).await?;
        vcenter.delete_cluster_module(&module).await?;
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_are_made_found_and_removed() -> Result<()> {
    in_time(async {
        let (_sim, _sessions, vcenter) = start(Options::default()).await?;
        let vm = clone(&vcenter, "pvscsi", "a", 0, true).await?;
        let first = vcenter.create_snapshot(&vm, "first", "").await?.wait().await?;
        vcenter.create_snapshot(&vm, "second", "on top").await?.wait().await?;
        let info = vcenter.vm(&vm).await?;
        assert_eq!(Some(&info.snapshot("first")?.reference), first.as_ref());
        assert_eq!(info.snapshot("first/second")?.name, "second");
        let first = first.context("nothing was made")?;
        vcenter.remove_snapshot(&first, true).await?.wait().await?;
        assert!(vcenter.vm(&vm).await?.snapshots.is_empty());
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_go_on_through_dropped_sessions_and_a_restart() -> Result<()> {
    in_time(async {
        let options = Options {
            clone_delay: Duration::from_millis(1500),
            ..Options::default()
        };
        let (sim, _sessions, vcenter) = start(options).await?;
        for (name, restart) in [("a", false), ("b", true)] {
            let task = start_clone(&vcenter, "pvscsi", name, 1, true).await?;
            let cloning = tokio::spawn(async move { task.wait().await });
            tokio::time::sleep(Duration::from_millis(300)).await;
            match restart {
                false => sim.admin.drop_sessions().await?,
                true => sim.admin.restart(Duration::from_millis(1200)).await?,
            }
            let vm = cloning.await??.context("the clone task made nothing")?;
            assert_eq!(vcenter.vm(&vm).await?.state.name, name);
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_machines_cost_few_calls_and_waiting_costs_none() -> Result<()> {
    in_time(async {
        let options = Options {
            clone_delay: Duration::from_secs(2),
            guest_ip_delay: Some(Duration::from_secs(6)),
            ..Options::default()
        };
        let (sim, _sessions, vcenter) = start(options).await?;
        let make = |n: usize| {
            let vcenter = vcenter.clone();
            async move {
                let vm = clone(&vcenter, "pvscsi", &format!("m{n}"), 2, true).await?;
                vcenter.power_on(&vm).await?.wait().await?;
                let mut watch = vcenter.watch_vm(&vm);
                while watch.next().await?.nics.iter().all(|nic| nic.addresses.is_empty()) {}
                anyhow::Ok(())
            }
        };
        let started = std::time::Instant::now();
        try_join_all((0..50).map(make)).await?;
        let (took, counters) = (started.elapsed(), sim.admin.counters().await?);
        let calls: u64 = counters.values().sum();
        println!(
            "50 machines: {took:?}, {:.1} calls each: {counters:?}",
            calls as f64 / 50.0
        );
        // How many waits share an answer of the poll, and how often others are read meanwhile, depends on the speed of the
        // machine under the test; that each of the three costs one change of the view and two answers does not.
        let poll = ["ModifyListView", "WaitForUpdatesEx"];
        let polled: u64 = poll.iter().filter_map(|method| counters.get(*method)).sum();
        assert!(polled <= 9 * 50 + 20, "{polled}: {counters:?}");
        assert!(
            calls - polled <= 4 * 50 + 7 * took.as_secs() + 20,
            "{calls}: {counters:?}"
        );

        let vm = clone(&vcenter, "pvscsi", "silent", 0, true).await?;
        let mut watches: Vec<_> = (0..3).map(|_| vcenter.watch_vm(&vm)).collect();
        for watch in &mut watches {
            watch.next().await?;
        }
        // Quiet sets in, on a busy machine a little later.
        loop {
            sim.admin.reset_counters().await?;
            tokio::time::sleep(Duration::from_secs(3)).await;
            if sim.admin.calls().await? <= 1 {
                return Ok(());
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_back_or_stands_behind_idle_waiters_is_told_all_the_same() -> Result<()> {
    in_time(async {
        let (_sim, _sessions, vcenter) = start(Options::default()).await?;
        let vms = try_join_all((0..12).map(|n| {
            let vcenter = vcenter.clone();
            async move { clone(&vcenter, "pvscsi", &format!("idle-{n}"), 0, true).await }
        }))
        .await?;
        for _ in 0..3 {
            let mut watch = vcenter.watch_vm(&vms[0]);
            assert_eq!(watch.next().await?.name, "idle-0");
        }
        let mut idle: Vec<_> = vms.iter().map(|vm| vcenter.watch_vm(vm)).collect();
        for watch in &mut idle {
            watch.next().await?;
        }
        // Well before the poll ends by itself and everybody is read anew; on a busy machine not always.
        for n in [11, 10, 9] {
            let started = std::time::Instant::now();
            vcenter.power_on(&vms[n]).await?.wait().await?;
            while idle[n].next().await?.power != PowerState::On {}
            if started.elapsed() < Duration::from_secs(45) {
                return Ok(());
            }
        }
        anyhow::bail!("told only by the read that ends a long wait")
    })
    .await
}

#[derive(Default)]
struct Counting {
    writes: AtomicUsize,
    refuse: bool,
}

impl Interceptor for Counting {
    fn before(&self, effect: &Effect) -> Verdict {
        if effect.write {
            self.writes.fetch_add(1, Ordering::SeqCst);
            if self.refuse {
                return Verdict::Refuse("lease lost".into());
            }
        }
        Verdict::Pass
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn interceptors_see_every_write_and_can_refuse_it() -> Result<()> {
    in_time(async {
        let sim = vcsim(Options::default()).await?;
        for refuse in [false, true] {
            let interceptor = Arc::new(Counting {
                refuse,
                ..Counting::default()
            });
            let sessions = Sessions::new(Settings {
                interceptors: Interceptors::new(vec![interceptor.clone()]),
                ..Settings::default()
            });
            let vcenter = sessions.get(&login(&sim, Trust::Insecure)).await?;
            match clone(&vcenter, "pvscsi", &format!("interceptor-{refuse}"), 0, true).await {
                Ok(vm) => vcenter.destroy(&vm).await?.wait().await.map(|_| ())?,
                Err(error) => {
                    let error: &Error = error.downcast_ref().context("another error")?;
                    assert!(
                        matches!(error, Error::Refused { .. }) && error.class() == Class::Transient,
                        "{error}"
                    );
                }
            }
            assert_eq!(interceptor.writes.load(Ordering::SeqCst), if refuse { 1 } else { 2 });
        }
        assert_eq!(sim.admin.counters().await?["CloneVM_Task"], 1);
        Ok(())
    })
    .await
}
