//! Nodes that do not join, and fields of pool and cluster that Capstan must not ignore in silence.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use capstan_sim::azure::{Action, Fault};
use serde_json::{Value, json};

use crate::still::{Pool, Still};

fn never_join(still: &Still, times: u64) -> Result<()> {
    still.azure.fault(Fault::new(Action::NeverJoin).times(times))?;
    Ok(())
}

fn replicas(still: &Still) -> Value {
    Still::condition(&still.pool(), "ScaleSetDesiredReplicas")
}

#[tokio::test(start_paused = true)]
async fn a_node_that_never_joins_is_reported_within_minutes_and_its_machine_replaced() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    never_join(&still, 1)?;
    let _running = still.start()?;
    still.until("the instances", |still| still.instances().len() == 3).await;
    let made = still.instance_ids();
    still
        .until("the report", |still| replicas(still)["reason"] == "NodeNotJoined")
        .await;
    assert_eq!(still.instance_ids(), made, "not replaced yet");
    let message = replicas(&still)["message"].to_string();
    assert!(
        message.contains("boot diagnostics") && message.contains("1200 s"),
        "{message}"
    );
    let late = still.machines().into_iter().filter(|machine| {
        let node = Still::condition(machine, "NodeHealthy");
        node["reason"] == "NodeNotJoined" && node["severity"] == "Warning"
    });
    assert_eq!(late.count(), 1);
    assert_eq!(still.events("NodeNotJoined").len(), 1);
    still.until_ready(3).await;
    let kept = still.instance_ids().iter().filter(|id| made.contains(id)).count();
    assert_eq!(kept, 2, "exactly one machine was replaced");
    still.assert_settled().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_may_wait_for_a_node_for_ever() -> Result<()> {
    let object = json!({ "spec": { "nodeStartupTimeout": "0s" } });
    let still = Still::new(Pool {
        object,
        ..Pool::default()
    })
    .await?;
    never_join(&still, 1)?;
    let _running = still.start()?;
    still
        .until("the report", |still| replicas(still)["reason"] == "NodeNotJoined")
        .await;
    let made = still.instance_ids();
    tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
    assert_eq!(still.instance_ids(), made);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_surge_machine_that_never_joins_delays_a_rollout_and_does_not_end_it() -> Result<()> {
    let object = json!({ "spec": { "nodeStartupTimeout": "10m" } });
    let (still, _running) = Still::ready(Pool {
        object,
        ..Pool::default()
    })
    .await?;
    never_join(&still, 1)?;
    still.upgrade(2).await?;
    still.until("the rollout", |still| still.instances().len() > 3).await;
    still.until_ready(3).await;
    let image = |instance: &Value| {
        instance
            .pointer("/properties/storageProfile/imageReference/id")
            .cloned()
    };
    assert!(
        still
            .instances()
            .iter()
            .all(|i| image(i) == Some(json!(crate::harness::image(2))))
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_field_that_is_not_followed_is_reported_for_as_long_as_it_is_there() -> Result<()> {
    let field = |value: Value| json!({ "spec": { "template": { "disableVMBootstrapExtension": value } } });
    let (still, _running) = Still::ready(Pool {
        object: field(json!(false)),
        ..Pool::default()
    })
    .await?;
    let supported = |still: &Still| Still::condition(&still.pool(), "FieldsSupported");
    let told = supported(&still);
    assert_eq!((&told["status"], &told["severity"]), (&json!("False"), &json!("Info")));
    assert!(
        told["message"].to_string().contains("disableVMBootstrapExtension"),
        "{told}"
    );
    assert_eq!(Still::condition(&still.pool(), "Ready")["status"], "True");
    still.patch_pool(field(Value::Null)).await?;
    still
        .until("the end of the report", |still| supported(still).is_null())
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn no_scale_set_is_made_in_the_region_of_an_edge_zone() -> Result<()> {
    let zone = json!({ "name": "losangeles", "type": "EdgeZone" });
    let still = Still::new(Pool {
        cluster: json!({ "spec": { "extendedLocation": zone } }),
        ..Pool::default()
    })
    .await?;
    let _running = still.start()?;
    still
        .until("the report", |still| {
            let running = Still::condition(&still.pool(), "ScaleSetRunning");
            running["message"].to_string().contains("spec.extendedLocation")
        })
        .await;
    assert!(still.set().is_null());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_identity_without_a_role_is_reported() -> Result<()> {
    let role = json!({ "scope": "/subscriptions/s", "definitionID": "reader" });
    let object = json!({ "spec": { "identity": "SystemAssigned", "systemAssignedIdentityRole": role } });
    let (still, _running) = Still::ready(Pool {
        object,
        ..Pool::default()
    })
    .await?;
    let assigned = Still::condition(&still.pool(), "RoleAssignmentReady");
    assert_eq!(
        (&assigned["status"], &assigned["severity"]),
        (&json!("False"), &json!("Warning"))
    );
    let message = assigned["message"].as_str().unwrap_or_default();
    assert!(message.contains("reader at /subscriptions/s"), "{message}");
    assert_eq!(
        Still::condition(&still.pool(), "Ready")["status"],
        "True",
        "the pool works"
    );
    Ok(())
}

/// Makes the Nodes of all instances without a provider id, as their kubelets do before a cloud controller manager comes.
async fn join_without_provider_ids(still: &Still) -> Result<()> {
    for instance in still.instances() {
        let name = instance.pointer("/properties/osProfile/computerName").cloned();
        let ready = json!([{ "type": "Ready", "status": "True", "reason": "KubeletReady" }]);
        still
            .create(
                json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": {},
                "status": { "conditions": ready } }),
            )
            .await?;
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_node_without_a_provider_id_has_joined_and_is_drained() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    never_join(&still, 3)?;
    let _running = still.start()?;
    let made = |still: &Still| {
        let done = |instance: &&Value| instance["properties"]["provisioningState"] == "Succeeded";
        still.instances().iter().filter(done).count() == 3
    };
    still.until("the instances", made).await;
    join_without_provider_ids(&still).await?;
    still.until_ready(3).await;
    let before = still.instance_ids();
    tokio::time::sleep(Duration::from_secs(3 * 3600)).await;
    assert_eq!(still.instance_ids(), before, "machines whose nodes run pods stay");

    let machine = still.machines().remove(0);
    let node = machine["status"]["nodeRef"]["name"].clone();
    assert!(node.is_string(), "{machine}");
    still
        .create(
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web", "labels": { "app": "web" } },
            "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "none" }] },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } }),
        )
        .await?;
    let budget = json!({ "minAvailable": 1, "selector": { "matchLabels": { "app": "web" } } });
    let budget = json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web" },
        "spec": budget });
    still.create(budget.clone()).await?;
    let (api, kind) = ("infrastructure.cluster.x-k8s.io/v1beta1", "AzureMachinePoolMachine");
    still
        .delete(json!({ "apiVersion": api, "kind": kind, "metadata": { "name": machine["metadata"]["name"] } }))
        .await?;
    tokio::time::sleep(Duration::from_secs(1800)).await;
    for id in &before {
        assert!(
            still.instance_ids().contains(id),
            "{id} went before its node was drained"
        );
    }
    still.delete(budget).await?;
    still
        .until("its end", |still| {
            !before.iter().all(|id| still.instance_ids().contains(id))
        })
        .await;
    assert_eq!(still.server.objects("pods"), Vec::<Value>::new());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_whose_nodes_all_stay_away_is_replaced_ever_more_slowly() -> Result<()> {
    let still = Still::new(Pool {
        replicas: 4,
        ..Pool::default()
    })
    .await?;
    never_join(&still, u64::MAX)?;
    let _running = still.start()?;
    still.until("the instances", |still| still.instances().len() == 4).await;
    let (mut known, mut last) = (BTreeSet::new(), still.instance_ids());
    for _ in 0..24 * 360 {
        let now = still.instance_ids();
        let lost = last.iter().filter(|id| !now.contains(id)).count();
        assert!(lost <= 1, "{lost} machines went at once");
        known.extend(now.iter().cloned());
        last = now;
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    // One after 20, 40, 80, 160, 320 minutes, then each after 640. Without that it would be four every 20 minutes.
    assert!((6..=16).contains(&known.len()), "{} instances in a day", known.len());
    Ok(())
}
