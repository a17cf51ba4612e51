//! Pools beside the real Cluster API core manager: it owns every machine by a Machine, and drains.

mod harness;

use anyhow::Result;
use capstan_api::azure::AzureMachinePoolMachine;
use capstan_kube::capi::{Cluster, Machine};
use capstan_testkit::ControlPlane;
use harness::{Options, World};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn core_owns_the_machines_and_drains_them() -> Result<()> {
    let plane = capstan_testkit::Options {
        capi_core: true,
        ..Default::default()
    };
    let plane = ControlPlane::start(plane).await?;
    let world = World::prepare_on(
        plane,
        Options {
            replicas: 2,
            ..Options::default()
        },
    )
    .await?;
    // No control plane provider runs here; core connects to clusters whose control plane is said to be up.
    let up = json!({ "status": { "initialization": { "controlPlaneInitialized": true } } });
    world
        .api::<Cluster>()
        .patch_status("c", &PatchParams::default(), &Patch::Merge(up))
        .await?;
    let mut world = world.started().await?;
    world.until_ready(2).await?;
    let owned = |machine: &AzureMachinePoolMachine| machine.owner_references().iter().any(|o| o.kind == "Machine");
    let all_owned = async || Ok(world.machines().await?.iter().all(owned).then_some(()));
    if let Err(error) = world.until("a Machine for each", all_owned).await {
        let log = std::fs::read_to_string(world.plane.dir().join("cluster-api.log")).unwrap_or_default();
        let about: Vec<&str> = log.lines().filter(|line| line.contains("achine")).collect();
        println!("{}", about[about.len().saturating_sub(12)..].join("\n"));
        return Err(error);
    }

    world.watch_bounds(2, 3);
    world.upgrade(2).await?;
    world.until_rolling().await?;
    world.until_ready(2).await?;
    world
        .until("Machines for the new ones only", async || {
            let machines = world.api::<Machine>().list(&ListParams::default()).await?.items;
            Ok((machines.len() == 2).then_some(()))
        })
        .await?;
    world.bounds.assert_kept();
    Ok(())
}
