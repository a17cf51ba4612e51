//! Machines among others: in the VM group of their failure domain, and apart from those of the same owner.

use crate::world;

use anyhow::{Context, Result};
use capstan_api::vsphere::{VSphereCluster, VSphereVM};
use capstan_testkit::vcsim::Options;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use world::{World, spec};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_joins_the_vm_group_of_its_failure_domain_before_it_runs() -> Result<()> {
    let host_groups = vec![
        "vms=vms-a,hosts=hosts-a".to_owned(),
        "vms=vms-b,hosts=hosts-b,enabled=false".to_owned(),
    ];
    let options = Options {
        host_groups,
        ..Options::default()
    };
    let world = World::start(options).await?;
    let good = world.host_zone("good", true, "a").await?;
    let loose = world.host_zone("loose", true, "b").await?;
    let untagged = world.host_zone("untagged", false, "a").await?;
    let nowhere = world.host_zone("nowhere", true, "c").await?;
    assert!(world.zone_says(&good, "").await?);
    assert!(world.zone_says(&loose, "is disabled").await?, "that is warned of only");
    assert!(
        !world
            .zone_says(&untagged, "does not exist: make it and attach it")
            .await?
    );
    assert!(
        !world
            .zone_says(&nowhere, "host group \"hosts-c\" does not exist")
            .await?
    );

    let names: Vec<String> = (0..4).map(|n| format!("m{n}")).collect();
    for name in &names {
        world
            .machine(name, spec("pvscsi", json!({"failureDomain": good})))
            .await?;
    }
    world
        .machine("lost", spec("pvscsi", json!({"failureDomain": nowhere})))
        .await?;
    let mut expected = Vec::new();
    for name in &names {
        expected.push(world.ready(name).await?.2.reference);
    }
    expected.sort();
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(None).await?;
    let cluster = vcenter.cluster(&datacenter, None).await?;
    let mut members = vcenter.groups(&cluster).await?.machines("vms-a").context("no group")?;
    members.sort();
    assert_eq!(members, expected);
    // Somebody takes the machines out of their group; the next read of a machine puts it back.
    world.vcsim.admin.clear_group("vms-a").await?;
    let mark = json!({"metadata": {"annotations": {"example.com/read": "now"}}});
    let vms = world.api::<VSphereVM>();
    for name in &names {
        vms.patch(name, &PatchParams::default(), &Patch::Merge(mark.clone()))
            .await?;
    }
    let restored = async {
        while vcenter
            .groups(&cluster)
            .await?
            .machines("vms-a")
            .map(|found| found.len())
            != Some(names.len())
        {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(world::PATIENCE, restored).await??;
    world
        .condition_of_vm("lost", "VM group \"vms-c\" does not exist")
        .await?;
    let lost = world.api::<VSphereVM>().get("lost").await?;
    let lost = world.in_vcenter(&lost).await?.context("not cloned")?;
    assert_eq!(
        lost.state.power,
        capstan_vsphere::PowerState::Off,
        "it would run on any host"
    );
    world.delete("lost").await
}

/// Module and whom it is for, in the order of the spec.
fn modules(cluster: &VSphereCluster) -> Vec<(String, String)> {
    let modules = cluster.spec.cluster_modules.iter();
    modules
        .map(|m| (m.target_object_name.clone(), m.module_uuid.clone()))
        .collect()
}

async fn merge(world: &World, patch: Value) -> Result<()> {
    let clusters = world.api::<VSphereCluster>();
    clusters
        .patch("c", &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_one_owner_are_kept_apart_by_a_cluster_module() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    world.crash().await;
    world.anti_affinity = true;
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(None).await?;
    let cluster = vcenter.cluster(&datacenter, None).await?;
    let orphan = vcenter.create_cluster_module(&cluster).await?;
    let noted = json!([
        {"controlPlane": false, "targetObjectName": "gone", "moduleUUID": orphan},
        {"controlPlane": false, "targetObjectName": "md", "moduleUUID": "removed-by-hand"},
    ]);
    merge(&world, json!({"spec": {"clusterModules": noted}})).await?;
    world.run(Default::default()).await?;
    let boot = json!({"value": "#cloud-config\n{}\n"});
    let worker = json!({"cluster.x-k8s.io/deployment-name": "md"});
    let control_plane = json!({"cluster.x-k8s.io/control-plane": "", "cluster.x-k8s.io/control-plane-name": "cp"});
    let machines = [
        ("w0", &worker),
        ("w1", &worker),
        ("w2", &worker),
        ("cp0", &control_plane),
    ];
    for (name, whose) in machines {
        world
            .machine_of(name, whose.clone(), spec("pvscsi", json!({})), boot.clone())
            .await?;
    }
    let served = |cluster: &VSphereCluster| {
        let mut names: Vec<String> = modules(cluster).into_iter().map(|(name, _)| name).collect();
        names.sort();
        names == ["cp", "md"]
    };
    let made = modules(&world.until::<VSphereCluster>("c", served).await?);
    let module_of = |whose: &str| made.iter().find(|(name, _)| name == whose).unwrap().1.clone();
    let apart = async |module: String, names: &[&str]| -> Result<()> {
        for name in names {
            let module = module.clone();
            let inside = move |vm: &VSphereVM| {
                let status = vm.status.as_ref();
                status.is_some_and(|status| status.ready && status.module_uuid.as_ref() == Some(&module))
            };
            world.until::<VSphereVM>(name, inside).await?;
        }
        assert_eq!(vcenter.cluster_module_members(&module).await?.len(), names.len());
        Ok(())
    };
    apart(module_of("md"), &["w0", "w1", "w2"]).await?;
    apart(module_of("cp"), &["cp0"]).await?;
    let ids: Vec<String> = vcenter.cluster_modules().await?.into_iter().map(|m| m.module).collect();
    assert!(!ids.contains(&orphan), "nobody has machines in it");

    // Somebody removes a module by hand: its machines move to another.
    vcenter.delete_cluster_module(&module_of("md")).await?;
    merge(&world, json!({"metadata": {"labels": {"look": "again"}}})).await?;
    let old = module_of("md");
    let anew = move |cluster: &VSphereCluster| modules(cluster).iter().any(|(name, id)| name == "md" && *id != old);
    let made = modules(&world.until::<VSphereCluster>("c", anew).await?);
    let module = made.iter().find(|(name, _)| name == "md").unwrap().1.clone();
    apart(module, &["w0", "w1", "w2"]).await?;

    for name in ["w0", "w1", "w2", "cp0"] {
        world.delete(name).await?;
    }
    // There is no such MachineDeployment, so that nothing of it is left; a control plane may come back.
    let rest = |cluster: &VSphereCluster| modules(cluster).iter().all(|(name, _)| name == "cp");
    world.until::<VSphereCluster>("c", rest).await?;
    let clusters = world.api::<VSphereCluster>();
    clusters.delete("c", &DeleteParams::default()).await?;
    world.gone::<VSphereCluster>("c").await?;
    assert!(
        vcenter.cluster_modules().await?.is_empty(),
        "modules go with their cluster"
    );
    Ok(())
}
