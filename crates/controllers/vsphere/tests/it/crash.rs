//! Killed after every single effect, from the first write to the last: the next process finishes what was begun, with one
//! virtual machine and no left-overs.

use crate::world;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use capstan_api::vsphere::{VSphereMachine, VSphereVM};
use capstan_core::interceptor::Interceptors;
use capstan_testkit::interceptors::{StopAfter, writes_but_events};
use capstan_testkit::print_line;
use capstan_testkit::vcsim::Options;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use rstest::rstest;
use serde_json::json;
use world::{World, disks, spec};

#[derive(Debug, PartialEq)]
enum Reached {
    Killed,
    Done,
}

/// Until the condition holds or the controllers are dead.
async fn until(stop: &StopAfter, done: impl Future<Output = Result<()>>) -> Result<Reached> {
    tokio::select! {
        () = stop.stopped() => Ok(Reached::Killed),
        done = done => done.map(|()| Reached::Done),
    }
}

/// So many tests share the effects of a machine's life.
const SHARES: usize = 4;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_any_effect_leaves_one_machine_and_no_left_overs(
    #[values(1, 2, 3, 4)] share: usize,
) -> Result<()> {
    let mut world = World::start(Options {
        clone_delay: Duration::from_millis(200),
        host_groups: vec!["vms=vms-a,hosts=hosts-a".to_owned()],
        ..Options::default()
    })
    .await?;
    let zone = world.host_zone("zone", true, "a").await?;
    world.zone_says(&zone, "").await?;
    world.anti_affinity = true;
    world.crash().await;
    world.run(Interceptors::default()).await?;
    let whose = json!({"cluster.x-k8s.io/deployment-name": "md"});
    let boot = json!({"value": "#cloud-config\n{}\n"});
    // The cluster and its module are there before the first machine, so that every effect counted is a machine's.
    let warm_up = spec("pvscsi", json!({"failureDomain": zone}));
    world
        .machine_of("warm-up", whose.clone(), warm_up, boot.clone())
        .await?;
    world.ready("warm-up").await?;
    world
        .until::<VSphereVM>("warm-up", |vm| {
            vm.status.as_ref().is_some_and(|s| s.module_uuid.is_some())
        })
        .await?;
    for writes in (share..).step_by(SHARES) {
        world.crash().await;
        let name = format!("m{writes}");
        let stop = StopAfter::counting(writes, writes_but_events);
        world.run(Interceptors::new(vec![stop.clone()])).await?;
        let disks = json!([{"name": "a", "sizeGiB": 1}, {"name": "b", "sizeGiB": 1}]);
        let wanted = spec("pvscsi", json!({"dataDisks": disks, "failureDomain": zone}));
        world.machine_of(&name, whose.clone(), wanted, boot.clone()).await?;
        let mut reached = until(&stop, async { world.ready(&name).await.map(|_| ()) }).await?;
        if reached == Reached::Done {
            world
                .api::<VSphereMachine>()
                .delete(&name, &DeleteParams::default())
                .await?;
            reached = until(&stop, world.gone::<VSphereMachine>(&name)).await?;
        }
        if reached == Reached::Done {
            print_line(&format!(
                "vSphere machines: killed after effect {share}, and every {SHARES}th from there on, of at most {}",
                writes - 1
            ));
            assert!(writes > 8, "a machine's life has more effects than {writes}");
            return Ok(());
        }
        let last = stop.last().context("killed by nothing")?;
        world.crash().await;
        world.run(Interceptors::default()).await?;
        finish(&world, &name)
            .await
            .with_context(|| format!("killed after effect {writes}, {last:?}"))?;
    }
    bail!("endless")
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_again_and_again_in_the_middle_of_many_clones_each_machine_comes_up_once() -> Result<()> {
    const MACHINES: u64 = 30;
    let mut world = World::start(Options {
        clone_delay: Duration::from_secs(2),
        ..Options::default()
    })
    .await?;
    for n in 0..MACHINES {
        world
            .machine(
                &format!("m{n}"),
                spec("pvscsi", json!({"dataDisks": [{"name": "a", "sizeGiB": 1}]})),
            )
            .await?;
    }
    for begun in [MACHINES / 3, MACHINES / 2, MACHINES] {
        tokio::time::timeout(world::PATIENCE, async {
            while world
                .vcsim
                .admin
                .counters()
                .await?
                .get("CloneVM_Task")
                .copied()
                .unwrap_or_default()
                < begun
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            anyhow::Ok(())
        })
        .await
        .context("no clones")??;
        world.crash().await;
        world.run(Interceptors::default()).await?;
    }
    for n in 0..MACHINES {
        let (_, vm, info) = world.ready(&format!("m{n}")).await?;
        assert_eq!(Some(&info.instance_uuid), vm.uid().as_ref());
        assert_eq!(disks(&info).len(), 2);
    }
    let clones = world.vcsim.admin.counters().await?["CloneVM_Task"];
    assert_eq!(clones, MACHINES, "one clone for each machine");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_was_moved_or_restored_takes_its_machine_up_again() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    let own = json!([{"name": "a", "sizeGiB": 1, "datastore": "LocalDS_1"}]);
    for name in ["m", "goes"] {
        world.machine(name, spec("pvscsi", json!({"dataDisks": own}))).await?;
    }
    let (_, before, there) = world.ready("m").await?;
    let (_, _, goes) = world.ready("goes").await?;
    world.crash().await;
    for name in ["m", "goes"] {
        come_back(&world, name).await?;
    }
    let params = DeleteParams::default();
    world.api::<VSphereMachine>().delete("goes", &params).await?;
    world.api::<VSphereVM>().delete("goes", &params).await?;
    world.vcsim.admin.reset_counters().await?;
    world.run(Interceptors::default()).await?;
    let ready = |vm: &VSphereVM| vm.status.as_ref().is_some_and(|status| status.ready);
    let vm = world.until::<VSphereVM>("m", ready).await?;
    assert_ne!(vm.uid(), before.uid());
    let (status, before) = (vm.status.context("no status")?, before.status.context("no status")?);
    assert_eq!(
        (status.vm_ref, status.data_disks),
        (before.vm_ref, before.data_disks),
        "the same machine with the same disks"
    );
    world.gone::<VSphereMachine>("goes").await?;
    let vcenter = world.vcenter().await?;
    let gone = vcenter.vm(&goes.reference).await;
    assert!(gone.is_err_and(|error| error.is_gone()), "it went with its object");
    let calls = world.vcsim.admin.counters().await?;
    for method in ["CloneVM_Task", "ReconfigVM_Task"] {
        assert!(
            !calls.contains_key(method),
            "a running machine is left as it is: {calls:?}"
        );
    }
    world.delete("m").await?;
    assert!(vcenter.vm(&there.reference).await.is_err_and(|error| error.is_gone()));
    Ok(())
}

/// Puts a VSphereVM away and makes it again as `clusterctl move` and backups do: with another UID and without its status.
async fn come_back(world: &World, name: &str) -> Result<()> {
    let vms = world.api::<VSphereVM>();
    let mut copy = vms.get(name).await?;
    let unheld = json!({"metadata": {"finalizers": null}});
    vms.patch(name, &PatchParams::default(), &Patch::Merge(unheld)).await?;
    vms.delete(name, &DeleteParams::default()).await?;
    world.gone::<VSphereVM>(name).await?;
    copy.status = None;
    let meta = &mut copy.metadata;
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
    vms.create(&PostParams::default(), &copy).await?;
    Ok(())
}

/// Brings a machine to its end after a crash: up with its disks if it is not being deleted, then away.
async fn finish(world: &World, name: &str) -> Result<()> {
    let machine = world.api::<VSphereMachine>().get_opt(name).await?;
    let uid = world.api::<VSphereVM>().get_opt(name).await?.and_then(|vm| vm.uid());
    let Some(machine) = machine else {
        return nothing_left(world, name, uid).await;
    };
    if machine.metadata.deletion_timestamp.is_none() {
        let (machine, vm, info) = world.ready(name).await?;
        assert_eq!(Some(&info.instance_uuid), vm.uid().as_ref());
        assert_eq!(machine.spec.provider_id, Some(format!("vsphere://{}", info.bios_uuid)));
        assert_eq!(disks(&info).iter().map(|disk| disk.0).collect::<Vec<_>>(), [0, 1, 2]);
        let status = vm.status.unwrap();
        assert!(status.task_ref.is_none());
        let vcenter = world.vcenter().await?;
        let members = vcenter
            .cluster_module_members(&status.module_uuid.context("in no module")?)
            .await?;
        assert!(members.iter().any(|id| id == info.reference.value()), "{members:?}");
        let datacenter = vcenter.datacenter(None).await?;
        let groups = vcenter.groups(&vcenter.cluster(&datacenter, None).await?).await?;
        assert!(groups.machines("vms-a").context("no group")?.contains(&info.reference));
        world.delete(name).await?;
    } else {
        world.gone::<VSphereMachine>(name).await?;
    }
    nothing_left(world, name, uid).await
}

async fn nothing_left(world: &World, name: &str, uid: Option<String>) -> Result<()> {
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(None).await?;
    assert!(
        vcenter.find_child(&datacenter.vm_folder, name).await?.is_none(),
        "{name} is still in vCenter"
    );
    if let Some(uid) = uid {
        assert!(vcenter.find_vm_by_instance_uuid(None, &uid).await?.is_none());
    }
    assert!(world.api::<VSphereVM>().get_opt(name).await?.is_none());
    Ok(())
}
