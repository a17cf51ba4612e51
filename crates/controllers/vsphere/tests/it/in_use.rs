//! What others still need stays: zones with machines, machines that run, and whatever is paused or moved.

use anyhow::{Context, Result, ensure};
use capstan_api::common::V1Beta2Status;
use capstan_api::vsphere::{VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_kube::capi::{Cluster, Machine};
use capstan_testkit::vcsim::Options;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::world::{PATIENCE, World, spec};

const MOVED: &str = "clusterctl.cluster.x-k8s.io/delete-for-move";

async fn merge<K>(api: &Api<K>, name: &str, patch: Value) -> Result<()>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// The message of the condition `Paused`, where that is true.
fn paused(conditions: Option<&V1Beta2Status>) -> Option<String> {
    let mut all = conditions?.conditions.iter();
    let paused = all.find(|condition| condition.type_ == "Paused" && condition.status == "True")?;
    Some(paused.message.clone())
}

async fn until_zone(
    zones: &Api<VSphereDeploymentZone>,
    name: &str,
    is_so: impl Fn(Option<&VSphereDeploymentZone>) -> bool,
) -> Result<()> {
    let waited = tokio::time::timeout(PATIENCE, await_condition(zones.clone(), name, is_so)).await;
    let now = zones.get_opt(name).await?;
    waited.with_context(|| format!("{now:?}"))??;
    Ok(())
}

/// Makes a zone of the compute cluster and a datastore cluster, with its failure domain; returns when it is ready.
async fn make_zone(world: &World, name: &str) -> Result<()> {
    let side = |kind: &str| json!({"name": name, "type": kind, "tagCategory": kind, "autoConfigure": true});
    let domain: VSphereFailureDomain = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"region": side("Datacenter"), "zone": side("ComputeCluster"), "topology": {
            "datacenter": "DC0", "computeCluster": "DC0_C0", "datastore": "DC0_POD0",
        }},
    }))?;
    let zone: VSphereDeploymentZone = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"server": world.vcsim.server, "failureDomain": name, "placementConstraint": {}},
    }))?;
    let params = PostParams::default();
    Api::all(world.client.clone()).create(&params, &domain).await?;
    Api::all(world.client.clone()).create(&params, &zone).await?;
    ensure!(world.zone_says(name, "").await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zone_stays_while_a_machine_is_in_it_and_a_machine_stays_ready_without_its_failure_domain() -> Result<()> {
    let world = World::start_alone(Options {
        datastores: 3,
        datastore_clusters: 1,
        ..Options::default()
    })
    .await?;
    make_zone(&world, "east").await?;
    world
        .machine("m", spec("pvscsi", json!({"failureDomain": "east"})))
        .await?;
    let (_, _, info) = world.ready("m").await?;
    assert!(!info.path.starts_with("[LocalDS_0]"), "{}", info.path);

    let domains: Api<VSphereFailureDomain> = Api::all(world.client.clone());
    domains.delete("east", &DeleteParams::default()).await?;
    world.zone_says("east", "does not exist").await?;
    let machines = world.api::<VSphereMachine>();
    merge(
        &machines,
        "m",
        json!({"metadata": {"annotations": {"example.com/read": "1"}}}),
    )
    .await?;
    let text = world.event("m", "MachineNotFollowed").await?;
    assert!(text.contains("VSphereFailureDomain \"east\""), "{text}");
    let status = machines.get("m").await?.status.context("no status")?;
    assert!(status.conditions.iter().all(|c| c.status == "True"), "{status:?}");

    let zones: Api<VSphereDeploymentZone> = Api::all(world.client.clone());
    zones.delete("east", &DeleteParams::default()).await?;
    let text = world.event_of_all("east", "StillInUse").await?;
    assert!(text.contains(&format!("{}/m", world.namespace)), "{text}");
    assert!(zones.get("east").await?.metadata.deletion_timestamp.is_some());
    world.delete("m").await?;
    until_zone(&zones, "east", |zone| zone.is_none()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zone_is_left_alone_while_it_is_paused() -> Result<()> {
    let world = World::start_alone(Options {
        datastores: 3,
        datastore_clusters: 1,
        ..Options::default()
    })
    .await?;
    make_zone(&world, "west").await?;
    let zones: Api<VSphereDeploymentZone> = Api::all(world.client.clone());
    let shown = |zone: Option<&VSphereDeploymentZone>| {
        paused(
            zone.and_then(|zone| zone.status.as_ref())
                .and_then(|s| s.v1beta2.as_ref()),
        )
        .is_some()
    };
    merge(
        &zones,
        "west",
        json!({"metadata": {"annotations": {"cluster.x-k8s.io/paused": ""}}}),
    )
    .await?;
    until_zone(&zones, "west", shown).await?;
    merge(
        &zones,
        "west",
        json!({"metadata": {"annotations": {"cluster.x-k8s.io/paused": null}}}),
    )
    .await?;
    until_zone(&zones, "west", move |zone| !shown(zone)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_deleted_for_a_paused_cluster_or_a_move_without_the_machine() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let (machines, vms) = (world.api::<VSphereMachine>(), world.api::<VSphereVM>());
    let pause = async |value: bool| merge(&world.api::<Cluster>(), "c", json!({"spec": {"paused": value}})).await;
    pause(true).await?;
    let says = |text: &'static str, count: usize| {
        move |machine: &VSphereMachine| {
            let shown = paused(machine.status.as_ref().and_then(|status| status.v1beta2.as_ref()));
            shown.is_some_and(|shown| shown.contains(text) && shown.split(", ").count() == count)
        }
    };
    world.until("m", says("spec.paused", 1)).await?;
    world.api::<Machine>().delete("m", &DeleteParams::default()).await?;
    world.gone::<Machine>("m").await?;
    machines.delete("m", &DeleteParams::default()).await?;
    // The status that shows this annotation comes after the reconcile of the deletion.
    let moved = json!({"metadata": {"annotations": {MOVED: ""}}});
    merge(&machines, "m", moved.clone()).await?;
    world.until("m", says(MOVED, 2)).await?;
    assert!(vms.get("m").await?.metadata.deletion_timestamp.is_none());
    pause(false).await?;
    world.until("m", says(MOVED, 1)).await?;
    assert!(vms.get("m").await?.metadata.deletion_timestamp.is_none());

    merge(&vms, "m", moved).await?;
    vms.delete("m", &DeleteParams::default()).await?;
    let shown = |vm: &VSphereVM| {
        let shown = paused(vm.status.as_ref().and_then(|status| status.v1beta2.as_ref()));
        vm.metadata.deletion_timestamp.is_some() && shown.is_some()
    };
    let vm = world.until::<VSphereVM>("m", shown).await?;
    assert!(!vm.finalizers().is_empty());
    // It goes for nobody, and when its own annotation is removed it goes.
    let calls = world.vcsim.admin.counters().await?;
    assert_eq!(calls.get("PowerOffVM_Task"), None, "{calls:?}");
    let back = json!({"metadata": {"annotations": {MOVED: null}}});
    merge(&vms, "m", back).await?;
    world.gone::<VSphereVM>("m").await
}
