//! Pools whose pods let go slowly: disruption budgets, one pod on each node, and more asked for meanwhile.

use crate::harness;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use harness::{Options, World};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, ResourceExt};
use serde_json::json;

fn is_up(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready" && condition.status == "True");
    pod.metadata.deletion_timestamp.is_none() && ready.next().is_some()
}

/// A deployment in miniature: so many pods, each on a node of its own that takes pods.
struct Deployment {
    task: tokio::task::JoinHandle<()>,
    /// The fewest pods that were ever up at once, once all were.
    fewest: Arc<AtomicUsize>,
}

impl Drop for Deployment {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Deployment {
    async fn start(world: &World, count: usize, may_be_missing: usize) -> Result<Self> {
        let budget = json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web" },
            "spec": { "minAvailable": count - may_be_missing, "selector": { "matchLabels": { "app": "web" } } }
        });
        world.create::<PodDisruptionBudget>(budget).await?;
        let fewest = Arc::new(AtomicUsize::new(usize::MAX));
        let (client, namespace, prefix, seen) = (
            world.client.clone(),
            world.namespace.clone(),
            format!("azure://{}/", world.set_id()).to_lowercase(),
            fewest.clone(),
        );
        let task = tokio::spawn(async move {
            let (mut number, mut complete) = (0, false);
            loop {
                // A refused or lost request is made again the next time.
                if let Ok(up) = tend(&client, &namespace, &prefix, count, &mut number).await {
                    complete |= up == count;
                    if complete {
                        seen.fetch_min(up, Ordering::SeqCst);
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let this = Self { task, fewest };
        let budgets = world.api::<PodDisruptionBudget>();
        world
            .until("a budget that counts all pods", async || {
                let status = budgets.get("web").await?.status.unwrap_or_default();
                Ok((status.current_healthy == Some(count as i32)).then_some(()))
            })
            .await?;
        Ok(this)
    }
}

/// Makes pods that are missing; how many are up.
async fn tend(client: &Client, namespace: &str, prefix: &str, count: usize, number: &mut usize) -> Result<usize> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = pods.list(&ListParams::default().labels("app=web")).await?.items;
    let live: Vec<&Pod> = all
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .collect();
    let taken: BTreeSet<String> = all
        .iter()
        .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
        .collect();
    let nodes: Api<Node> = Api::all(client.clone());
    let free = nodes
        .list(&ListParams::default())
        .await?
        .items
        .into_iter()
        .filter(|node| {
            let spec = node.spec.clone().unwrap_or_default();
            let ours = spec.provider_id.unwrap_or_default().to_lowercase().starts_with(prefix);
            let takes = capstan_kube::workload::is_ready(node) && spec.unschedulable != Some(true);
            ours && takes && !taken.contains(&node.name_any())
        });
    for node in free.take(count.saturating_sub(live.len())) {
        *number += 1;
        let pod = serde_json::from_value(json!({
            "metadata": { "name": format!("web-{number}"), "labels": { "app": "web" } },
            "spec": { "nodeName": node.name_any(), "containers": [{ "name": "c", "image": "none" }] }
        }))?;
        pods.create(&Default::default(), &pod).await?;
    }
    Ok(all.iter().filter(|pod| is_up(pod)).count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_under_a_budget_keeps_its_pods_up() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 6,
        surge: json!("30%"),
        ..Options::default()
    })
    .await?;
    let deployment = Deployment::start(&world, 6, 1).await?;
    let before: Vec<String> = world.instance_ids();
    world.watch_bounds(6, 8);
    world.upgrade(2).await?;
    world.until_rolling().await?;
    world.until_ready(6).await?;
    assert!(world.instance_ids().iter().all(|id| !before.contains(id)));
    world.bounds.assert_kept();
    let fewest = deployment.fewest.load(Ordering::SeqCst);
    assert!(fewest >= 5, "only {fewest} of 6 pods were up, 5 had to be");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scale_down_with_slow_drains_takes_exactly_as_many_as_asked() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 6,
        ..Options::default()
    })
    .await?;
    let deployment = Deployment::start(&world, 6, 0).await?;
    let before = world.instance_ids();
    world.watch_bounds(4, 7);
    let leaving = async || -> Result<BTreeSet<String>> {
        let machines = world.machines().await?.into_iter();
        let going = machines.filter(|machine| machine.metadata.deletion_timestamp.is_some());
        Ok(going.map(|machine| machine.name_any()).collect())
    };
    world.scale(4).await?;
    let two = world
        .until("two machines that leave", async || {
            Ok(Some(leaving().await?).filter(|two| two.len() == 2))
        })
        .await?;
    for name in &two {
        world.until_blocked(name).await?;
    }
    // Whatever else calls for another look: it comes to the same.
    for round in 0..10 {
        let note = json!({ "metadata": { "annotations": { "round": round.to_string() } } });
        world
            .patch::<capstan_api::azure::AzureMachinePool>(&world.name, note)
            .await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(leaving().await?, two);
        assert_eq!(world.instance_ids(), before);
    }
    // Once the pods may go, exactly those go.
    drop(deployment);
    let budgets = world.api::<PodDisruptionBudget>();
    budgets.delete("web", &DeleteParams::default()).await?;
    world.until_ready(4).await?;
    let stayed = world.instance_ids();
    assert!(stayed.iter().all(|id| before.contains(id)), "none was made");
    world.bounds.assert_kept();
    Ok(())
}
