//! Nodes that do not join, and fields of pool and cluster that Capstan must not ignore in silence.

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
