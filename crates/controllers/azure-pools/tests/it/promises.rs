//! What a pool promises about its machines, tags, deletes and status, each from the user's act to the state in Azure.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use capstan_sim::azure::compute::fleet::State;
use capstan_sim::azure::{Action, Fault};
use rstest::rstest;
use serde_json::{Value, json};

use crate::harness::merge;
use crate::still::{NAME, Pool, Still};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn machine(name: &Value) -> Value {
    json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePoolMachine", "metadata": { "name": name } })
}

/// Whether pods may be put on a node.
fn takes_pods(node: &Value) -> bool {
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let ready = conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let mut taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let leaves = taints.any(|taint| taint["key"] == "ToBeDeletedByClusterAutoscaler");
    ready && node["spec"]["unschedulable"] != true && !leaves
}

#[rstest]
#[case::cordoned(json!({ "unschedulable": true }))]
#[case::chosen_by_the_autoscaler(
    json!({ "taints": [{ "key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule" }] }))]
#[tokio::test(start_paused = true)]
async fn a_node_that_takes_no_pods_goes_first_and_no_other_goes_too_early(#[case] spec: Value) -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 5,
        ..Pool::default()
    })
    .await?;
    let before: BTreeSet<String> = still.instance_ids().into_iter().collect();
    // By age and by name it would be the last one to go.
    let chosen = before.last().cloned().unwrap_or_default();
    let suffix = format!("/virtualMachines/{chosen}");
    let nodes = still.server.objects("nodes");
    let node = nodes
        .iter()
        .find(|node| text(&node["spec"]["providerID"]).ends_with(&suffix));
    let name = node.map(|node| node["metadata"]["name"].clone()).unwrap_or_default();
    still
        .patch(json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": spec }))
        .await?;
    still.upgrade(2).await?;
    let mut first = None;
    while !still.all_have(2, 5) {
        let nodes = still.server.objects("nodes");
        let available = nodes.iter().filter(|node| takes_pods(node)).count();
        assert!(available >= 4, "{available} nodes take pods");
        let now = still.instance_ids();
        first = first.or_else(|| before.iter().find(|id| !now.contains(id)).cloned());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(first, Some(chosen));
    still.until_ready(5).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn machines_that_all_fail_at_once_are_replaced_one_after_the_other() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 5,
        ..Pool::default()
    })
    .await?;
    let before = still.vm_ids();
    still.azure.changing(|azure| {
        let fleet = azure.fleets.get_mut(&still.set_id().to_lowercase());
        for instance in fleet.into_iter().flat_map(|fleet| fleet.instances.values_mut()) {
            instance.state = State::Failed;
        }
    });
    for node in still.server.objects("nodes") {
        let lost = json!([{ "type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown" }]);
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node["metadata"]["name"] },
            "status": { "conditions": lost } });
        still.patch_status(node).await?;
    }
    while !(still.vm_ids().len() == 5 && still.vm_ids().is_disjoint(&before)) {
        let leaving = |machine: &&Value| !machine["metadata"]["deletionTimestamp"].is_null();
        let machines = still.machines();
        let leaving = machines.iter().filter(leaving).count();
        assert!(leaving <= 1, "{leaving} machines go at once");
        assert!(still.instances().len() <= 7, "one surge, and one that Azure deletes");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    still.until_ready(5).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_windows_pool_is_made_scaled_and_rolled() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 2,
        object: json!({ "spec": { "template": { "osDisk": { "osType": "Windows" } } } }),
        ..Pool::default()
    })
    .await?;
    still.scale(3).await?;
    still.until_ready(3).await;
    still.upgrade(2).await?;
    still.until("the rollout", |still| still.all_have(2, 3)).await;
    still.until_ready(3).await;
    assert_eq!(Still::condition(&still.pool(), "Ready")["status"], "True");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn tags_of_pool_and_cluster_come_and_go_without_a_new_machine() -> Result<()> {
    let tags = |pool: Value, cluster: Value| {
        let pool = json!({ "spec": { "additionalTags": pool } });
        (pool, json!({ "spec": { "additionalTags": cluster } }))
    };
    let (object, cluster) = tags(json!({ "cost": "1" }), json!({ "team": "a" }));
    let (still, _running) = Still::ready(Pool {
        object,
        cluster,
        ..Pool::default()
    })
    .await?;
    let before = still.vm_ids();
    still.azure.clear_requests();
    let found =
        |still: &Still| ["cost", "team", "more"].map(|tag| still.set()["tags"][tag].as_str().map(str::to_owned));
    let some = |value: &str| Some(value.to_owned());
    let steps = [
        (
            json!({ "cost": "2", "more": "x" }),
            json!({ "team": "b" }),
            [some("2"), some("b"), some("x")],
        ),
        (
            json!({ "cost": null, "more": null }),
            json!({ "team": null }),
            [None, None, None],
        ),
    ];
    for (pool, cluster, expected) in steps {
        let (pool, cluster) = tags(pool, cluster);
        still.patch_pool(pool).await?;
        let mut object = json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": { "name": "c" } });
        merge(&mut object, &cluster);
        still.patch(object).await?;
        still.until("the tags", |still| found(still) == expected).await;
    }
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.vm_ids(), before);
    let calls = still.azure.arm_requests();
    assert!(
        !calls.iter().any(|call| call.method == "POST" || call.method == "PUT"),
        "{calls:?}"
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_autoscalers_choice_of_a_machine_makes_no_other_one() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let before = still.vm_ids();
    let chosen = still.machines()[1].clone();
    let mut change = machine(&chosen["metadata"]["name"]);
    merge(
        &mut change,
        &json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "true" } } }),
    );
    still.patch(change).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    still.scale(2).await?;
    for _ in 0..600 {
        let capacity = still.set()["sku"]["capacity"].as_u64().unwrap_or_default();
        assert!(capacity <= 3, "a capacity of {capacity}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    still.until_ready(2).await;
    assert!(still.vm_ids().is_subset(&before), "none was made");
    let left = still.machines();
    assert!(
        !left
            .iter()
            .any(|one| one["metadata"]["name"] == chosen["metadata"]["name"])
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_ready_before_its_nodes_are() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    still.azure.fault(Fault::new(Action::NeverJoin))?;
    let _running = still.start()?;
    still
        .until("a ready pool", |still| still.pool()["status"]["ready"] == true)
        .await;
    assert_eq!(still.pool()["status"]["replicas"].as_u64().unwrap_or_default(), 0);
    assert!(still.server.objects("nodes").is_empty());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_pool_with_a_long_name_has_machines() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    let mut pool = still.server.objects("machinepools").remove(0);
    let name = "machine-pool-".repeat(6);
    let name = name.trim_end_matches('-');
    assert!(name.len() > 70);
    still
        .delete(
            json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": NAME } }),
        )
        .await?;
    merge(
        &mut pool,
        &json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool" }),
    );
    pool["metadata"] = json!({ "name": name });
    still.create(pool).await?;
    let _running = still.start()?;
    still.until_ready(3).await;
    for machine in still.machines() {
        let label = text(&machine["metadata"]["labels"]["cluster.x-k8s.io/pool-name"]).to_owned();
        assert!(label.starts_with("hash_") && label.len() <= 63, "{label}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn with_on_delete_a_machine_gets_the_new_model_when_it_is_deleted() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        object: json!({ "spec": { "strategy": { "type": "OnDelete" } } }),
        ..Pool::default()
    })
    .await?;
    let before = still.vm_ids();
    still.upgrade(2).await?;
    let counts = |still: &Still, count: &str| {
        let updated = Still::condition(&still.pool(), "ScaleSetModelUpdated");
        text(&updated["message"]).contains(count)
    };
    still.until("the count", |still| counts(still, "3 machines")).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.vm_ids(), before);
    still.delete(machine(&still.machines()[0]["metadata"]["name"])).await?;
    still.until("the count", |still| counts(still, "2 machines")).await;
    still
        .until("its successor", |still| {
            let machines = still.machines();
            machines.len() == 3 && machines.iter().all(|machine| machine["status"]["ready"] == true)
        })
        .await;
    let new: Vec<Value> = still
        .instances()
        .into_iter()
        .filter(|instance| !before.contains(text(&instance["properties"]["vmId"])))
        .collect();
    assert_eq!(new.len(), 1);
    let image = new[0].pointer("/properties/storageProfile/imageReference/id");
    assert_eq!(image, Some(&json!(crate::harness::image(2))));
    Ok(())
}
