//! Others that change the scale set, answers that are wrong, and models that do not land.

use crate::harness;

use anyhow::Result;
use capstan_api::azure::AzureMachinePoolMachine;
use capstan_core::interceptor::Interceptors;
use capstan_kube::capi::MachinePool;
use capstan_sim::azure::Fault;
use harness::{Options, World};
use http::Method;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use serde_json::{Value, json};

const MODEL_TAG: &str = "capstan-model";
const MODEL_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/model";

/// Changes the scale set behind Capstan's back.
fn outside(world: &World, body: Value) -> u16 {
    let answer = world.sim.direct(Method::PATCH, &world.set_id(), body);
    answer.status.as_u16()
}

fn capacity(world: &World) -> u64 {
    let set = world.sim.get(&world.set_id()).unwrap_or_default();
    set["sku"]["capacity"].as_u64().unwrap_or_default()
}

fn uids(machines: &[AzureMachinePoolMachine]) -> Vec<Option<String>> {
    machines.iter().map(ResourceExt::uid).collect()
}

async fn managed_externally(replicas: usize) -> Result<World> {
    let world = World::prepare(Options {
        replicas,
        ..Options::default()
    })
    .await?;
    let managed = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/replicas-managed-by": "autoscaler" } } });
    world.patch::<MachinePool>(&world.name, managed).await?;
    let world = world.started().await?;
    world.until_ready(replicas).await?;
    Ok(world)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capacity_that_somebody_else_has_just_set_survives_a_model_change() -> Result<()> {
    let world = managed_externally(2).await?;
    assert_eq!(outside(&world, json!({ "sku": { "capacity": 4 } })), 200);
    // Nothing has told Capstan yet.
    world.upgrade(2).await?;
    let follows = async || {
        let pool: MachinePool = world.api().get(&world.name).await?;
        Ok((pool.replicas() == 4).then_some(()))
    };
    world.until("4 replicas in the MachinePool", follows).await?;
    world.until_ready(4).await?;
    assert_eq!(capacity(&world), 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_somebody_else_adds_start_with_fresh_bootstrap_data() -> Result<()> {
    let mut world = managed_externally(1).await?;
    let tag = |world: &World| world.sim.get(&world.set_id()).unwrap()["tags"]["capstan-custom-data"].clone();
    let (before, machines) = (tag(&world), uids(&world.machines().await?));
    world.crash().await;
    let rotated = json!({ "stringData": { "value": "#cloud-config\ntoken: zyxwvu.fedcba9876543210\n" } });
    world.patch::<Secret>("boot", rotated).await?;
    world.run(Interceptors::default()).await?;
    world
        .until("the new token", async || Ok((tag(&world) != before).then_some(())))
        .await?;
    world.until_ready(1).await?;
    world.assert_quiet().await?;
    assert_eq!(uids(&world.machines().await?), machines, "a token replaces no machine");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_model_stops_no_scale_down() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(1, 3);
    world.sim.fault(Fault::answer(400).method("PUT"))?;
    world.upgrade(2).await?;
    let refused = async || {
        let reported = world.condition("ScaleSetRunning").await?;
        Ok(reported.filter(|(status, message)| status == "False" && message.contains("400")))
    };
    world.until("the refusal", refused).await?;
    world.scale(1).await?;
    world
        .until("one instance", async || {
            Ok((world.instance_ids().len() == 1).then_some(()))
        })
        .await?;
    world.until("the refusal, still", refused).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_wrong_list_ends_no_machine() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    let before = uids(&world.machines().await?);
    world
        .sim
        .fault(Fault::answer(404).policy("ListVMScaleSetVMs").times(1))?;
    world.scale(3).await?;
    let machines = world.until_ready(3).await?;
    let after = uids(&machines);
    assert!(before.iter().all(|uid| after.contains(uid)), "{before:?} {after:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_of_capstan_replaces_no_machine() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.crash().await;
    // As the version before left it: a hash without a version, on the scale set and on the machines.
    let old = "0123456789abcdef";
    let mut tags = world.sim.get(&world.set_id()).unwrap()["tags"].clone();
    tags[MODEL_TAG] = json!(old);
    assert_eq!(outside(&world, json!({ "tags": tags })), 200);
    let machines = world.machines().await?;
    for machine in &machines {
        let noted = json!({ "metadata": { "annotations": { MODEL_ANNOTATION: old } } });
        world
            .patch::<AzureMachinePoolMachine>(&machine.name_any(), noted)
            .await?;
    }
    let instances = world.instance_ids();
    world.run(Interceptors::default()).await?;
    let marked = async || {
        let tag = world.sim.get(&world.set_id()).unwrap()["tags"][MODEL_TAG].clone();
        Ok(tag.as_str().is_some_and(|tag| tag.starts_with("3-")).then_some(()))
    };
    world.until("the new hash", marked).await?;
    world.until_ready(2).await?;
    world.assert_quiet().await?;
    assert_eq!(uids(&world.machines().await?), uids(&machines));
    assert_eq!(world.instance_ids(), instances);
    // A change of the model still reaches them.
    world.upgrade(2).await?;
    world
        .until("the new model", async || Ok(world.all_have(2)?.then_some(())))
        .await?;
    Ok(())
}
