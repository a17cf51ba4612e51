//! The documented role of Azure allows all that pools do.

use std::collections::BTreeSet;

use anyhow::Result;
use capstan_sim::azure::{Action, Config, Fault};
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{NAME, Pool, Still};

fn actions() -> Vec<String> {
    let role: Value =
        serde_json::from_str(include_str!("../../../../../deploy/azure/role-pools.json")).unwrap_or_default();
    serde_json::from_value(role["Actions"].clone()).unwrap_or_default()
}

fn flexible() -> Value {
    json!({ "spec": { "orchestrationMode": "Flexible" } })
}

fn in_place() -> Value {
    let update = json!({ "mode": "InPlace", "maxSurge": 0, "maxUnavailable": 1 });
    json!({ "spec": { "strategy": { "rollingUpdate": update } } })
}

#[rstest]
#[case::of_a_uniform_set(json!({}))]
#[case::that_is_updated_in_place(in_place())]
#[case::of_a_flexible_set(flexible())]
#[tokio::test(start_paused = true)]
async fn the_role_allows_the_whole_life_of_a_pool(#[case] object: Value) -> Result<()> {
    let (still, running) = Still::ready(Pool {
        object,
        sim: Config {
            allowed_actions: Some(actions()),
            ..Config::default()
        },
        ..Pool::default()
    })
    .await?;
    still.upgrade(2).await?;
    still.until("the rollout", |still| still.all_have(2, 3)).await;
    still.until_ready(3).await;
    still.scale(2).await?;
    still.until_ready(2).await;

    // Azure has no room, and the process that has read so is gone.
    let fault = still.azure.fault(Fault::new(Action::NoCapacity {
        zone: None,
        vm_size: None,
        code: None,
    }))?;
    still.scale(3).await?;
    still
        .until("the failure", |still| {
            still.set()["properties"]["provisioningState"] == "Failed"
        })
        .await;
    drop(running);
    let _running = still.start()?;
    still
        .until("the report", |still| {
            let running = Still::condition(&still.pool(), "ScaleSetRunning");
            running["reason"] == "InstancesNotCreated" || running["reason"] == "CapacityUnavailable"
        })
        .await;
    still.azure.remove_fault(fault);
    still.until_ready(3).await;

    let pool = json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
        "metadata": { "name": NAME } });
    still.delete(pool).await?;
    still.until("the end", |still| still.pool().is_null()).await;
    assert!(still.set().is_null() && still.instances().is_empty());
    let refused: Vec<_> = still
        .azure
        .arm_requests()
        .into_iter()
        .filter(|call| call.status == 403)
        .map(|call| format!("{} {}", call.method, call.path))
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
    Ok(())
}

/// Calls that only few pools make.
#[test]
fn the_role_names_each_action_of_the_calls() {
    let calls = [
        ("the scale set is read", "virtualMachineScaleSets/read"),
        ("it is made and changed", "virtualMachineScaleSets/write"),
        ("it goes", "virtualMachineScaleSets/delete"),
        ("its failure is read", "virtualMachineScaleSets/instanceView/read"),
        ("instances go", "virtualMachineScaleSets/delete/action"),
        ("they are updated", "virtualMachineScaleSets/manualupgrade/action"),
        ("they are reimaged", "virtualMachineScaleSets/reimage/action"),
        ("they are listed", "virtualMachineScaleSets/virtualMachines/read"),
        ("those of a Flexible set are listed", "virtualMachines/read"),
        ("they go", "virtualMachines/delete"),
        ("sizes are listed", "skus/read"),
    ];
    let allowed: BTreeSet<String> = actions().into_iter().collect();
    for (call, action) in calls {
        assert!(
            allowed.contains(&format!("Microsoft.Compute/{action}")),
            "{call}: {action}"
        );
    }
}
