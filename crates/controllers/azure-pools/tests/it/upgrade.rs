//! A newer Capstan takes up a pool that an older one has made.
//!
//! `recorded/` holds a pool of three machines as commit 04aa0bf of this program left it: its objects, and the state of the
//! simulated Azure of the same commit. It was made with that commit's `capstan up --controllers azure-pools --no-examples
//! --dir DIR`, the manifests of a cluster `c` and a pool `np` with a data disk, two zones and tags of its own, one change of the
//! image, and, once the rollout was over, `kubectl get … -o json` and DIR/azure.json. Fields that the API server sets, the
//! simulator's certificate and operations that are over were left out. That commit's models have no version.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use capstan_sim::azure::Config;
use serde_json::Value;

use crate::still::Still;

const RECORDED_MODEL: &str = "a5ba4eba8b52cb91";

async fn recorded() -> Result<Still> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/recorded");
    let still = Still::empty(Config {
        state: Some(folder.join("azure.json")),
        ..Config::default()
    })
    .await?;
    still.make_secrets().await?;
    let mut text = std::fs::read_to_string(folder.join("objects.json"))?;
    let count = serde_json::from_str::<Vec<Value>>(&text)?.len();
    for n in 0..count {
        let objects: Vec<Value> = serde_json::from_str(&text)?;
        let old = objects[n]["metadata"]["uid"].as_str().unwrap_or_default();
        let new = still.restore(&objects[n]).await?;
        // Owner references name the uid.
        text = text.replace(old, &new);
    }
    still
        .until("the nodes", |still| still.server.objects("nodes").len() == 3)
        .await;
    Ok(still)
}

fn uids(still: &Still) -> Vec<Value> {
    let machines = still.machines();
    machines
        .iter()
        .map(|machine| machine["metadata"]["uid"].clone())
        .collect()
}

fn vms(still: &Still) -> Vec<Value> {
    let instances = still.instances();
    instances
        .iter()
        .map(|instance| instance["properties"]["vmId"].clone())
        .collect()
}

fn has_recorded_model(still: &Still) -> bool {
    still.set()["tags"]["capstan-model"] == RECORDED_MODEL
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_an_older_version_is_taken_up_and_no_machine_is_replaced() -> Result<()> {
    let still = recorded().await?;
    let (machines, before) = (uids(&still), vms(&still));
    assert_eq!(before.len(), 3);
    assert!(has_recorded_model(&still));
    let _running = still.start()?;
    for _ in 0..1800 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(vms(&still), before);
    }
    assert_eq!(uids(&still), machines);
    assert_eq!(still.set()["sku"]["capacity"], 3);
    assert!(!has_recorded_model(&still), "its model has a version now");
    let labelled = |machine: &Value| machine["metadata"]["labels"]["c"] == "owned";
    assert!(still.machines().iter().all(labelled), "CAPZ would not find them");
    assert_eq!(still.set()["tags"]["capstan-pool"], "default/np");
    let called = still.azure.arm_requests();
    assert!(
        called
            .iter()
            .all(|call| call.method != "POST" && call.method != "DELETE"),
        "{called:?}"
    );
    still.until_ready(3).await;
    still.assert_settled().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_an_older_version_rolls_when_it_is_asked_to() -> Result<()> {
    let still = recorded().await?;
    let before = vms(&still);
    let _running = still.start()?;
    still
        .until("a model with a version", |still| !has_recorded_model(still))
        .await;
    still.upgrade(3).await?;
    still
        .until("a rollout", |still| vms(still).iter().all(|vm| !before.contains(vm)))
        .await;
    still.until_ready(3).await;
    Ok(())
}
