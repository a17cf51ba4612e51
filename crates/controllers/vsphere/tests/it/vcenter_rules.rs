//! Rules of a vCenter that the simulator follows: guests with bridges, machines whose files cannot be read, sessions that run out,
//! datastore clusters. And the pause of Cluster API.

use std::time::Duration;

use anyhow::{Context, Result};
use capstan_api::vsphere::{VSphereCluster, VSphereMachine, VSphereVM};
use capstan_kube::capi::Cluster;
use capstan_testkit::vcsim::Options;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::{World, spec};

async fn annotate(world: &World, name: &str, value: &str) -> Result<()> {
    let mark = json!({"metadata": {"annotations": {"example.com/read": value}}});
    let vms = world.api::<VSphereVM>();
    vms.patch(name, &PatchParams::default(), &Patch::Merge(mark)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_of_a_card_may_be_on_a_bridge_with_its_mac_address() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    let (_, vm, _) = world.ready("m").await?;
    let status = vm.status.context("no status")?;
    assert_eq!((status.addresses.len(), status.network.len()), (1, 1));
    assert!(status.addresses[0].starts_with("10.16."), "{:?}", status.addresses);
    assert_eq!(status.network[0].ip_addrs, status.addresses);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_cannot_be_read_is_neither_destroyed_nor_released() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    world.vcsim.admin.set_accessible("m", false).await?;
    annotate(&world, "m", "1").await?;
    let unreadable = |vm: &VSphereVM| {
        let status = vm.status.clone().unwrap_or_default();
        let said = |c: &capstan_api::Condition| c.message.as_deref().is_some_and(|text| text.contains("inaccessible"));
        status.ready && status.conditions.iter().any(said)
    };
    world.until::<VSphereVM>("m", unreadable).await?;
    let machine = world.api::<VSphereMachine>().get("m").await?;
    assert!(machine.status.is_some_and(|status| status.ready));
    let machines = world.api::<VSphereMachine>();
    machines.delete("m", &DeleteParams::default()).await?;
    world.condition_of_vm("m", "inaccessible").await?;
    let calls = world.vcsim.admin.counters().await?;
    assert_eq!(calls.get("Destroy_Task"), None, "{calls:?}");
    assert_eq!(calls.get("PowerOffVM_Task"), None, "{calls:?}");
    world.vcsim.admin.set_accessible("m", true).await?;
    annotate(&world, "m", "2").await?;
    world.gone::<VSphereMachine>("m").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vcenter_without_free_sessions_is_reported_and_one_session_is_enough() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("running", spec("pvscsi", json!({}))).await?;
    world.ready("running").await?;
    // Somebody else takes the only session.
    world.vcsim.admin.limit_sessions(1).await?;
    let other = loop {
        world.vcsim.admin.drop_sessions().await?;
        // Capstan may be faster.
        if let Ok(other) = world.vcenter().await {
            break other;
        }
    };
    world.machine("new", spec("pvscsi", json!({}))).await?;
    let available = |vm: &VSphereVM| {
        let conditions = vm.status.clone().unwrap_or_default().conditions;
        conditions.into_iter().find(|c| c.type_ == "VCenterAvailable")
    };
    let refused = world.until::<VSphereVM>("new", move |vm| available(vm).is_some_and(|c| c.status == "False"));
    let refused = refused.await?;
    let message = available(&refused).and_then(|c| c.message).unwrap_or_default();
    assert!(message.contains("503"), "{message}");
    let running = world.api::<VSphereMachine>().get("running").await?;
    assert!(running.status.is_some_and(|status| status.ready));
    other.logout().await?;
    let ready = |machine: &VSphereMachine| machine.status.as_ref().is_some_and(|status| status.ready);
    world.until::<VSphereMachine>("new", ready).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_datastore_cluster_gives_each_machine_a_datastore_with_room() -> Result<()> {
    let world = World::start(Options {
        datastores: 5,
        datastore_clusters: 1,
        ..Options::default()
    })
    .await?;
    let admin = &world.vcsim.admin;
    admin.set_datastore("LocalDS_1", 0, "normal").await?;
    admin.set_datastore("LocalDS_3", 900, "inMaintenance").await?;
    let names: Vec<String> = (0..6).map(|n| format!("m{n}")).collect();
    let wanted =
        |datastore: &str| json!({"datastore": datastore, "dataDisks": [{"sizeGiB": 1, "datastore": datastore}]});
    for name in &names {
        world.machine(name, spec("pvscsi", wanted("DC0_POD0"))).await?;
    }
    let with_room = |path: &str| path.starts_with("[LocalDS_2]") || path.starts_with("[LocalDS_4]");
    for name in &names {
        let (_, vm, info) = world.ready(name).await?;
        assert!(with_room(&info.path), "{}", info.path);
        let disks = vm.status.context("no status")?.data_disks;
        assert!(disks[0].datastore_path.as_deref().is_some_and(with_room), "{disks:?}");
    }
    for n in 1..5 {
        admin
            .set_datastore(&format!("LocalDS_{n}"), 900, "inMaintenance")
            .await?;
    }
    // Another name of the same cluster, which nobody has asked for in the last minute.
    world
        .machine("none", spec("pvscsi", wanted("/DC0/datastore/DC0_POD0")))
        .await?;
    world
        .condition_of_vm("none", "has no datastore that is accessible")
        .await?;
    world.delete("none").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_datastore_of_a_cluster_takes_no_machine_in_maintenance() -> Result<()> {
    let world = World::start(Options {
        datastores: 2,
        datastore_clusters: 1,
        ..Options::default()
    })
    .await?;
    world
        .vcsim
        .admin
        .set_datastore("LocalDS_1", 900, "inMaintenance")
        .await?;
    world
        .machine("m", spec("pvscsi", json!({"datastore": "DC0_POD0"})))
        .await?;
    world
        .condition_of_vm("m", "has no datastore that is accessible")
        .await?;
    world.delete("m").await
}

#[tokio::test(flavor = "multi_thread")]
async fn data_disks_of_a_machine_that_another_controller_cloned_are_recognized() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    let disks = json!({"dataDisks": [{"name": "etcd", "sizeGiB": 2}, {"name": "logs", "sizeGiB": 3}]});
    world.machine("m", spec("two-disks", disks)).await?;
    let recorded = world.ready("m").await?.1.status.context("no status")?.data_disks;
    assert_eq!(recorded.len(), 2);
    world.crash().await;
    let forgotten = json!({"status": {"dataDisks": null}});
    let vms = world.api::<VSphereVM>();
    vms.patch_status("m", &PatchParams::default(), &Patch::Merge(forgotten))
        .await?;
    world.run(Default::default()).await?;
    let found = |vm: &VSphereVM| vm.status.as_ref().is_some_and(|status| !status.data_disks.is_empty());
    let vm = world.until::<VSphereVM>("m", found).await?;
    assert_eq!(vm.status.context("no status")?.data_disks, recorded);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_clones_are_under_way_than_allowed() -> Result<()> {
    let mut world = World::start(Options {
        clone_delay: Duration::from_secs(1),
        ..Options::default()
    })
    .await?;
    world.crash().await;
    world.clones = capstan_vsphere_machines::CloneLimits {
        per_vcenter: None,
        per_datastore: Some(1),
    };
    world.run(Default::default()).await?;
    for n in 0..4 {
        world.machine(&format!("m{n}"), spec("pvscsi", json!({}))).await?;
    }
    for n in 0..4 {
        world.ready(&format!("m{n}")).await?;
    }
    assert_eq!(world.vcsim.admin.most_clones().await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_cloned_from_an_item_of_a_content_library() -> Result<()> {
    let world = World::start(Options {
        libraries: vec!["name=golden,item=ubuntu,template=pvscsi".into()],
        ..Options::default()
    })
    .await?;
    let wanted = |template: &str| {
        spec(
            template,
            json!({"cloneMode": "fullClone", "dataDisks": [{"sizeGiB": 1}]}),
        )
    };
    world.machine("m", wanted("library:golden/ubuntu")).await?;
    world.machine("none", wanted("library:golden/debian")).await?;
    let (_, _, info) = world.ready("m").await?;
    assert_eq!(info.devices.iter().filter(|device| device.disk().is_some()).count(), 2);
    world
        .condition_of_vm("none", "library item \"golden/debian\" does not exist")
        .await?;
    world.delete("none").await
}

/// The condition `Paused` of an object with these conditions.
fn paused(conditions: Option<&capstan_api::common::V1Beta2Status>) -> Option<Condition> {
    let mut all = conditions?.conditions.iter();
    all.find(|condition| condition.type_ == "Paused").cloned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_cluster_is_shown_by_machines_and_vms_until_it_ends() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let of_machine = |machine: &VSphereMachine| paused(machine.status.as_ref().and_then(|s| s.v1beta2.as_ref()));
    let of_vm = |vm: &VSphereVM| paused(vm.status.as_ref().and_then(|s| s.v1beta2.as_ref()));
    let machine = world.api::<VSphereMachine>().get("m").await?;
    let shown = of_machine(&machine).context("no condition")?;
    assert_eq!((shown.status.as_str(), shown.reason.as_str()), ("False", "NotPaused"));
    assert_eq!(shown.observed_generation, machine.metadata.generation);
    let set = async |value: Value| {
        let change = json!({"spec": {"paused": value}});
        let clusters = world.api::<Cluster>();
        clusters
            .patch("c", &PatchParams::default(), &Patch::Merge(change))
            .await
    };
    set(json!(true)).await?;
    let is = |status: &'static str, found: Option<Condition>| found.is_some_and(|c| c.status == status);
    let vm = world.until::<VSphereVM>("m", move |vm| is("True", of_vm(vm))).await?;
    let shown = of_vm(&vm).context("no condition")?;
    assert_eq!(
        (shown.reason.as_str(), shown.message.as_str()),
        ("Paused", "Cluster spec.paused is set to true")
    );
    assert!(vm.status.is_some_and(|status| status.ready), "all else stays");
    world
        .until::<VSphereMachine>("m", move |m| is("True", of_machine(m)))
        .await?;
    let of_cluster = |cluster: &VSphereCluster| paused(cluster.status.as_ref().and_then(|s| s.v1beta2.as_ref()));
    world
        .until::<VSphereCluster>("c", move |c| is("True", of_cluster(c)))
        .await?;
    set(json!(false)).await?;
    let cluster = world
        .until::<VSphereCluster>("c", move |c| is("False", of_cluster(c)))
        .await?;
    let shown = of_cluster(&cluster).context("no condition")?;
    assert_eq!(shown.observed_generation, cluster.metadata.generation);
    world.until::<VSphereVM>("m", move |vm| is("False", of_vm(vm))).await?;
    world
        .until::<VSphereMachine>("m", move |m| is("False", of_machine(m)))
        .await?;
    Ok(())
}
