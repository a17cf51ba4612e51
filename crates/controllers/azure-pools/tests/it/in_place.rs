//! Updates in place: what reaches an instance, and how long its drain and its node are waited for.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{Pool, Still};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io";

fn in_place(more: Value) -> Pool {
    let update = json!({ "mode": "InPlace", "maxSurge": 0, "maxUnavailable": 1 });
    let mut object = json!({ "spec": { "strategy": { "rollingUpdate": update } } });
    crate::harness::merge(&mut object, &more);
    Pool {
        replicas: 2,
        object,
        ..Pool::default()
    }
}

#[rstest]
#[case::with_another_size(Some(json!({ "spec": { "template": { "vmSize": "Standard_D4s_v3" } } })))]
#[case::alone(None)]
#[tokio::test(start_paused = true)]
async fn other_bootstrap_data_reaches_every_machine(#[case] with: Option<Value>) -> Result<()> {
    let (still, _running) = Still::ready(in_place(json!({}))).await?;
    let before = still.vm_ids();
    tokio::time::sleep(Duration::from_secs(120)).await;
    let data = "#cloud-config\nrun: something-else\n";
    still.set_bootstrap(data).await?;
    let size = with.as_ref().map_or(json!("Standard_D2s_v3"), |with| {
        with["spec"]["template"]["vmSize"].clone()
    });
    if let Some(with) = with {
        still.patch_pool(with).await?;
    }
    still
        .until("the new data", |still| {
            let has = |id: &String| {
                let instance = format!("{}/virtualMachines/{id}", still.set_id());
                still.azure.instance_custom_data(&instance) == Some(BASE64.encode(data))
            };
            let ids = still.instance_ids();
            ids.len() == 2 && ids.iter().all(has)
        })
        .await;
    still.until_ready(2).await;
    assert!(still.instances().iter().all(|instance| instance["sku"]["name"] == size));
    assert!(still.vm_ids().is_disjoint(&before), "only a new disk brings the data");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_update_that_somebody_else_asks_for_ends_by_the_timeout_of_its_drain() -> Result<()> {
    let pause = format!("{ANNOTATION}/pause-rollout");
    let (still, _running) = Still::ready(in_place(json!({
        "metadata": { "annotations": { pause: "true" } }, "spec": { "nodeDrainTimeout": "60s" } })))
    .await?;
    still.hold_pods().await?;
    still.upgrade(2).await?;
    still
        .until("the new model", |still| {
            Still::condition(&still.pool(), "ScaleSetModelUpdated")["status"] == "False"
        })
        .await;
    let name = still.machines()[0]["metadata"]["name"].clone();
    let asked = json!({ "annotations": { format!("{ANNOTATION}/updateInstance"): "true" }, "name": name });
    still
        .patch(json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePoolMachine", "metadata": asked }))
        .await?;
    let begun = tokio::time::Instant::now();
    still
        .until("the update", |still| {
            let updated = |machine: &Value| {
                machine["metadata"]["name"] == name
                    && machine["metadata"]["annotations"][format!("{ANNOTATION}/updateInstance")].is_null()
                    && machine["status"]["latestModelApplied"] == true
            };
            still.machines().iter().any(updated)
        })
        .await;
    let took = begun.elapsed();
    assert!(
        took > Duration::from_secs(60) && took < Duration::from_secs(300),
        "{took:?}"
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_takes_long_is_no_reason_to_replace_the_machine() -> Result<()> {
    let (still, _running) = Still::ready(in_place(json!({}))).await?;
    let before = still.vm_ids();
    still.hold_pods().await?;
    still.upgrade(2).await?;
    let given_up = |still: &Still| {
        let machines = still.machines();
        machines
            .iter()
            .any(|m| !m["metadata"]["annotations"][format!("{ANNOTATION}/replaceInstance")].is_null())
    };
    for _ in 0..1200 {
        assert!(!given_up(&still));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    still.free_pods().await?;
    still
        .until("the updates", |still| {
            assert!(!given_up(still));
            still.all_have(2, 2)
        })
        .await;
    still.until_ready(2).await;
    assert_eq!(still.vm_ids(), before, "in place");
    Ok(())
}
