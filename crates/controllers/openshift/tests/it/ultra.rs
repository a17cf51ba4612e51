//! Pods that wait for an Ultra disk: the metric names the machine, whatever the driver's event says.

use anyhow::Result;
use capstan_sim::azure::Config;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const METRIC: &str = "capstan_ultra_attach_failed_timestamp_seconds{";

fn pod(name: &str, node: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
           "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}})
}

fn event(name: &str, pod: &Value, message: &str) -> Value {
    let about =
        json!({"kind": "Pod", "namespace": "shop", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]});
    json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "shop"}, "type": "Warning",
           "reason": "FailedAttachVolume", "message": message, "involvedObject": about,
           "lastTimestamp": "2027-01-15T08:00:00Z"})
}

#[tokio::test(start_paused = true)]
async fn the_machine_comes_from_the_pods_node_even_if_the_event_names_none() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("worker-a", json!({}))).await?;
    let machine = still.until_phase("worker-a", "Running").await;
    let node = machine["status"]["nodeRef"]["name"].as_str().unwrap_or_default();
    let refused =
        "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.";
    let cached =
        "Storage Account type UltraSSD_LRS is not supported with caching type ReadOnly. Please use caching type None.";
    for (name, node, message) in [
        ("db-0", node, refused.to_owned()),
        ("db-1", node, cached.to_owned()),
        // The Node has no Machine, and the driver names one.
        (
            "db-2",
            "elsewhere",
            format!("Attach volume pvc-1 to instance worker-z failed with {refused}"),
        ),
    ] {
        still.create(pod(name, node)).await?;
        let pod = still.get("", "pods", name).unwrap_or_default();
        still.create(event(name, &pod, &message)).await?;
    }
    // A pod that is gone tells no node.
    let gone = json!({"metadata": {"name": "db-3", "uid": "gone"}});
    still.create(event("db-3", &gone, refused)).await?;
    let expected = [
        ("worker-a", "db-0", "capability"),
        ("worker-a", "db-1", "caching"),
        ("worker-z", "db-2", "capability"),
        ("", "db-3", "capability"),
    ];
    let labels = |(name, pod, cause): (&str, &str, &str)| {
        format!("{METRIC}name=\"{name}\",pod=\"{pod}\",pod_namespace=\"shop\",cause=\"{cause}\"}}")
    };
    let metrics = running.2.clone();
    still
        .until("the metric", |_| {
            let text = metrics.encode();
            expected.into_iter().all(|one| text.contains(&labels(one)))
        })
        .await;
    let text = metrics.encode();
    assert_eq!(
        text.lines().filter(|line| line.starts_with(METRIC)).count(),
        expected.len(),
        "{text}"
    );
    Ok(())
}
