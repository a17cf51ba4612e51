//! Pools to which something happens: models that Azure refuses, answers that get lost, storms of 429, nodes that fall ill,
//! and ends without all that belongs to them.

use crate::harness;

use std::time::Duration;

use anyhow::Result;
use capstan_api::azure::{AzureCluster, AzureClusterIdentity, AzureMachinePool, AzureMachinePoolMachine};
use capstan_core::interceptor::Interceptors;
use capstan_kube::capi::{Cluster, MachinePool};
use capstan_sim::azure::{Action, Fault};
use harness::{Options, World};
use k8s_openapi::api::core::v1::{Event, Node, Secret};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

async fn until_over(world: &World) -> Result<()> {
    let pools = world.api::<AzureMachinePool>();
    let over = async || Ok(pools.get_opt(&world.name).await?.is_none().then_some(()));
    world.until("the pool's end", over).await
}

async fn delete<K>(world: &World, name: &str) -> Result<()>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    K: serde::de::DeserializeOwned + Clone + std::fmt::Debug,
{
    world.api::<K>().delete(name, &DeleteParams::default()).await?;
    Ok(())
}

fn node_of(machine: &AzureMachinePoolMachine) -> String {
    let node = machine.status.clone().and_then(|status| status.node_ref);
    node.and_then(|node| node.name).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_without_a_machine_of_their_own_go_with_their_pool() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.crash().await;
    // As if we had been killed before any was made.
    for machine in world.machines().await? {
        let free = json!({ "metadata": { "finalizers": null } });
        world
            .patch::<AzureMachinePoolMachine>(&machine.name_any(), free)
            .await?;
        delete::<AzureMachinePoolMachine>(&world, &machine.name_any()).await?;
    }
    delete::<AzureMachinePool>(&world, &world.name).await?;
    world.run(Interceptors::default()).await?;
    until_over(&world).await?;
    assert_eq!(world.sim.get(&world.set_id()), None);
    let calls = world.sim.arm_requests();
    let last = |method: &str| calls.iter().rposition(|call| call.method == method);
    assert!(last("POST") < last("DELETE"), "instances went before the scale set");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_cluster_went_first_takes_its_scale_set_along() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    delete::<MachinePool>(&world, &world.name).await?;
    delete::<Cluster>(&world, "c").await?;
    delete::<AzureCluster>(&world, "c").await?;
    delete::<AzureClusterIdentity>(&world, "sp").await?;
    delete::<Secret>(&world, "azure").await?;
    delete::<AzureMachinePool>(&world, &world.name).await?;
    until_over(&world).await?;
    assert_eq!(world.sim.get(&world.set_id()), None);
    let gone = async || Ok(world.machines().await?.is_empty().then_some(()));
    world.until("the machines' end", gone).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_nobody_can_sign_in_for_stays_and_says_what_is_left() -> Result<()> {
    let world = World::prepare(Options::default()).await?;
    let made = json!({
        "metadata": { "finalizers": ["azuremachinepool.infrastructure.cluster.x-k8s.io"] },
        "spec": { "providerID": format!("azure://{}", world.set_id()) }
    });
    world.patch::<AzureMachinePool>(&world.name, made).await?;
    let cluster: AzureCluster = world.api().get("c").await?;
    delete::<Cluster>(&world, "c").await?;
    delete::<AzureCluster>(&world, "c").await?;
    delete::<AzureMachinePool>(&world, &world.name).await?;
    let world = world.started().await?;
    let told = async || {
        let events = world.api::<Event>().list(&ListParams::default()).await?;
        let mut left = events
            .items
            .into_iter()
            .filter(|e| e.reason.as_deref() == Some("ScaleSetLeft"));
        Ok(left.next().and_then(|event| event.message))
    };
    let message = world.until("the warning", told).await?;
    assert!(message.contains(&world.set_id()), "{message}");
    assert!(world.pool().await?.metadata.deletion_timestamp.is_some());

    // With its AzureCluster Azure can be asked again, and knows of no such scale set.
    let again = json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureCluster",
        "metadata": { "name": "c" }, "spec": cluster.spec
    });
    world.create::<AzureCluster>(again).await?;
    let look = json!({ "metadata": { "annotations": { "look": "again" } } });
    world.patch::<AzureMachinePool>(&world.name, look).await?;
    until_over(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_azure_refuses_takes_no_machine_and_stops_no_delete() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        surge: json!(0),
        unavailable: json!(1),
        ..Options::default()
    })
    .await?;
    world.watch_bounds(1, 2);
    world.sim.fault(Fault::answer(400).method("PUT"))?;
    world.sim.clear_requests();
    world.upgrade(2).await?;
    let refused = async || {
        let told = world.condition("ScaleSetRunning").await?;
        Ok(told.filter(|(status, message)| status == "False" && message.contains("400")))
    };
    world.until("the refusal", refused).await?;
    let machines = world.machines().await?;
    let leaving = machines.iter().filter(|m| m.metadata.deletion_timestamp.is_some());
    assert_eq!(leaving.count(), 0, "none goes for a model that is not there");
    // One that its user wants gone is drained and goes all the same.
    let one = machines[0].name_any();
    world.delete_machine(&one).await?;
    world.until_gone(&one).await?;
    let puts = world.sim.arm_requests().into_iter().filter(|call| call.method == "PUT");
    let puts = puts.count();
    assert!(puts <= 3, "{puts}: the same is asked for once, whatever else happens");
    world.sim.clear_faults();
    world.upgrade(3).await?;
    let image = async || Ok(world.all_have(3)?.then_some(()));
    world.until("the next model", image).await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_get_lost_change_nothing_in_the_end() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 4);
    let lost = |method: &str| Fault::new(Action::Drop).method(method).times(1);
    world.sim.fault(lost("PATCH"))?;
    world.scale(3).await?;
    world.until_ready(3).await?;
    world.sim.fault(lost("POST").path("/delete"))?;
    world.scale(2).await?;
    world.until_ready(2).await?;
    assert_eq!(world.instance_ids().len(), 2);
    // The model too.
    world.sim.fault(lost("PUT"))?;
    world.upgrade(2).await?;
    let image = async || Ok(world.all_have(2)?.then_some(()));
    world.until("the new model", image).await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_refusals_delays_a_rollout_and_is_not_answered_in_kind() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 3);
    world.sim.clear_requests();
    world.upgrade(2).await?;
    world.until_rolling().await?;
    let calm = world.sim.arm_requests().len();
    world.sim.fault(Fault::throttle(3))?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    world.sim.clear_faults();
    let stormy = world.sim.arm_requests().len() - calm;
    assert!(stormy <= 12, "{stormy} calls in 10 s, each asked to be patient for 3");
    let image = async || Ok(world.all_have(2)?.then_some(()));
    world.until("the new model", image).await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

/// Takes a node's readiness, or gives it back; kwok leaves it alone meanwhile.
async fn set_ready(world: &World, node: &str, ready: bool) -> Result<()> {
    let nodes: Api<Node> = world.nodes().await?;
    let params = PatchParams::default();
    let label = json!({ "metadata": { "labels": { "capstan.dev/kwok": "off" } } });
    nodes.patch(node, &params, &Patch::Merge(label)).await?;
    let status = if ready { "True" } else { "False" };
    let condition: Value = json!({ "type": "Ready", "status": status, "reason": "Test" });
    let patch = json!({ "status": { "conditions": [condition] } });
    nodes.patch_status(node, &params, &Patch::Strategic(patch)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_falls_ill_and_a_budget_that_holds_a_rollout_up_are_told() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    let machine = world.machines().await?.remove(0);
    let node = node_of(&machine);
    let says = async |ready: bool| {
        set_ready(&world, &node, ready).await?;
        let told = async || {
            let machine: AzureMachinePoolMachine = world.api().get(&machine.name_any()).await?;
            Ok((machine.status.unwrap_or_default().ready == ready).then_some(()))
        };
        world.until(&format!("a machine whose ready is {ready}"), told).await
    };
    says(false).await?;
    says(true).await?;

    for (n, machine) in world.machines().await?.iter().enumerate() {
        world.guarded_pod(&format!("web-{n}"), &node_of(machine)).await?;
    }
    world.upgrade(2).await?;
    let held_up = async || {
        let (_, message) = world.condition("ScaleSetModelUpdated").await?.unwrap_or_default();
        Ok(Some(message).filter(|message| message.contains("is blocked by budget")))
    };
    let message = world.until("the reason of the wait", held_up).await?;
    assert!(message.starts_with("RollingUpdate: waiting for machine "), "{message}");
    assert!(message.contains(&format!("pod {}/web-", world.namespace)), "{message}");
    for budget in ["web-0", "web-1"] {
        delete::<PodDisruptionBudget>(&world, budget).await?;
    }
    world.until_ready(2).await.map(drop)
}
