//! What users see of a deletion, and one control plane node at a time. Under paused time.

use std::time::Duration;

use anyhow::Result;
use capstan_sim::azure::Config;
use http::Method;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const API: &str = "machine.openshift.io";
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

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

#[tokio::test(start_paused = true)]
async fn events_tell_what_a_drain_waits_for() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let mut hooked = still.machine("m", json!({}));
    hooked["spec"]["lifecycleHooks"] = json!({"preDrain": [{"name": "EtcdQuorum", "owner": "etcd"}]});
    still.create(hooked).await?;
    still.until_phase("m", "Running").await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "db-0", "namespace": "shop", "labels": {"app": "db"}},
        "spec": {"nodeName": "m", "containers": [{"name": "c", "image": "i"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    still.create(pod).await?;
    let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": {"name": "db", "namespace": "shop"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "db"}}}});
    still.create(budget).await?;
    still.delete(named("m")).await?;
    still
        .until("DrainBlocked", |still| {
            events(still, "m").contains(&"DrainBlocked".to_owned())
        })
        .await;
    assert!(!events(&still, "m").contains(&"DrainProceeds".to_owned()));
    let mut free = named("m");
    free["spec"]["lifecycleHooks"] = json!({"preDrain": []});
    still.patch(free).await?;
    still
        .until("DrainRequeued", |still| {
            events(still, "m").contains(&"DrainRequeued".to_owned())
        })
        .await;
    let all = still.server.objects_of("", "events");
    let requeued = all.iter().find(|event| event["reason"] == "DrainRequeued");
    let message = requeued.map(|event| event["message"].to_string()).unwrap_or_default();
    assert!(message.contains("shop/db-0") || message.contains("db-0"), "{message}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_virtual_machine_that_somebody_deletes_in_azure_is_shown_to_be_deleting() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let vm = still.id("Microsoft.Compute/virtualMachines", "m");
    let path = format!("{vm}?api-version=2024-07-01");
    let deleted = still.azure.direct(Method::DELETE, &path, json!({}));
    assert!(deleted.status.is_success(), "{deleted:?}");
    // A change by a user lets the controller ask Azure at once.
    let mut labelled = named("m");
    labelled["metadata"]["labels"] = json!({"changed": "now"});
    still.patch(labelled).await?;
    still
        .until("Deleting", |still| {
            let machine = still.get(API, "machines", "m").unwrap_or_default();
            machine["metadata"]["annotations"]["machine.openshift.io/instance-state"] == "Deleting"
                && machine["status"]["providerStatus"]["vmState"] == "Deleting"
        })
        .await;
    let failed = still.until_phase("m", "Failed").await;
    assert_eq!(failed["status"]["errorMessage"], "can't find created instance");
    Ok(())
}

fn nodes(still: &Still) -> Api<Node> {
    Api::all(still.server.client())
}

async fn cordon(still: &Still, node: &str, cordoned: bool) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
    nodes(still).patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Three control plane machines that run.
async fn control_plane(still: &Still) -> Result<()> {
    for name in ["cp-0", "cp-1", "cp-2"] {
        let mut machine = still.machine(name, json!({}));
        machine["spec"]["metadata"] = json!({"labels": {"node-role.kubernetes.io/control-plane": ""}});
        still.create(machine).await?;
    }
    for name in ["cp-0", "cp-1", "cp-2"] {
        still.until_phase(name, "Running").await;
    }
    Ok(())
}

fn is_cordoned(still: &Still, node: &str) -> bool {
    let node = still.get("", "nodes", node).unwrap_or_default();
    node["spec"]["unschedulable"] == true
}

#[tokio::test(start_paused = true)]
async fn control_plane_nodes_go_one_at_a_time_until_each_is_removed() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    control_plane(&still).await?;
    for name in ["cp-0", "cp-1"] {
        still.delete(named(name)).await?;
        tokio::time::sleep(SECOND).await;
    }
    let mut waited = false;
    for _ in 0..3600 {
        let first_is_there = still.get("", "nodes", "cp-0").is_some();
        waited |= first_is_there && is_cordoned(&still, "cp-0");
        assert!(
            !first_is_there || !is_cordoned(&still, "cp-1"),
            "both are drained at once"
        );
        assert!(still.resources("virtualMachines").contains(&"cp-2".to_owned()));
        if is_gone(&still, "cp-0") && is_gone(&still, "cp-1") {
            break;
        }
        tokio::time::sleep(SECOND).await;
    }
    assert!(waited && is_gone(&still, "cp-0") && is_gone(&still, "cp-1"));
    assert_eq!(still.resources("virtualMachines"), ["cp-2"]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_control_plane_node_that_is_cordoned_by_hand_keeps_the_others() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    control_plane(&still).await?;
    cordon(&still, "cp-2", true).await?;
    tokio::time::sleep(MINUTE).await;
    for name in ["cp-0", "cp-1"] {
        still.delete(named(name)).await?;
    }
    tokio::time::sleep(MINUTE * 30).await;
    assert!(!is_cordoned(&still, "cp-0") && !is_cordoned(&still, "cp-1"));
    assert_eq!(still.resources("virtualMachines"), ["cp-0", "cp-1", "cp-2"]);
    let machine = still.get(API, "machines", "cp-0").unwrap_or_default();
    let conditions = machine["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let drained = conditions.iter().find(|condition| condition["type"] == "Drained");
    let message = drained
        .and_then(|drained| drained["message"].as_str())
        .unwrap_or_default();
    assert!(message.contains("waiting for control plane node cp-2"), "{message}");
    cordon(&still, "cp-2", false).await?;
    still
        .until("both gone", |still| is_gone(still, "cp-0") && is_gone(still, "cp-1"))
        .await;
    Ok(())
}
