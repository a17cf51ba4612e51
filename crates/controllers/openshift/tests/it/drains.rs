//! What users see of a deletion. Under paused time.

use anyhow::Result;
use capstan_sim::azure::Config;
use http::Method;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const API: &str = "machine.openshift.io";

fn named(name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name}})
}

fn is_gone(still: &Still, name: &str) -> bool {
    still.get(API, "machines", name).is_none()
}

/// Reasons of the events of a machine.
fn events(still: &Still, machine: &str) -> Vec<String> {
    let all = still.server.objects_of("", "events");
    let of_machine = all.iter().filter(|event| event["involvedObject"]["name"] == machine);
    of_machine
        .filter_map(|event| event["reason"].as_str().map(str::to_owned))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn events_and_vm_state_tell_of_updates_drains_and_deletions() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still
        .create(still.machine("bad", json!({"vmSize": "Standard_Nope"})))
        .await?;
    still.until_phase("m", "Running").await;
    still.until_phase("bad", "Failed").await;
    assert!(!events(&still, "m").contains(&"Updated".to_owned()));
    let vm = still.id("Microsoft.Compute/virtualMachines", "m");
    let path = format!("{vm}/deallocate?api-version=2024-07-01");
    let stopped = still.azure.direct(Method::POST, &path, json!({}));
    assert!(stopped.status.is_success(), "{stopped:?}");
    still
        .until("Updated", |still| events(still, "m").contains(&"Updated".to_owned()))
        .await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "db-0", "namespace": "shop"},
        "spec": {"nodeName": "m", "containers": [{"name": "c", "image": "i"}]}});
    still.create(pod).await?;
    still.delete(named("bad")).await?;
    still.delete(named("m")).await?;
    still
        .until("Deleting", |still| {
            let machine = still.get(API, "machines", "m").unwrap_or_default();
            machine["status"]["providerStatus"]["vmState"] == "Deleting"
        })
        .await;
    still
        .until("gone", |still| is_gone(still, "m") && is_gone(still, "bad"))
        .await;
    let seen = events(&still, "m");
    for reason in ["DrainProceeds", "DrainSucceeded", "Deleted"] {
        assert_eq!(
            seen.iter().filter(|seen| *seen == reason).count(),
            1,
            "{reason}: {seen:?}"
        );
    }
    let seen = events(&still, "bad");
    assert!(seen.contains(&"DrainSkipped".to_owned()), "{seen:?}");
    assert!(!seen.contains(&"DrainProceeds".to_owned()), "{seen:?}");
    Ok(())
}
