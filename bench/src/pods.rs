//! A Deployment with a pod on every node, under a disruption budget that lets one of them go at a time. Nobody else runs a
//! scheduler here: the benchmark binds the pods.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use capstan_kube::nodes::{is_ready, takes_pods};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, ListParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;

/// A scheduler needs less than this.
const LOOK: Duration = Duration::from_millis(200);
const NAME: &str = "web";

/// Creates the Deployment and its budget, and binds pods until the task is aborted.
pub async fn run(client: &Client, namespace: &str, count: usize) -> Result<tokio::task::JoinHandle<()>> {
    let labels = json!({ "app": NAME });
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let deployment = serde_json::from_value(json!({
        "metadata": { "name": NAME },
        "spec": { "replicas": count, "selector": { "matchLabels": labels }, "template": {
            "metadata": { "labels": labels },
            "spec": { "terminationGracePeriodSeconds": 1, "containers": [{ "name": "c", "image": "none" }] }
        } }
    }))?;
    deployments.create(&PostParams::default(), &deployment).await?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(client.clone(), namespace);
    let budget = serde_json::from_value(json!({
        "metadata": { "name": NAME },
        "spec": { "maxUnavailable": 1, "selector": { "matchLabels": labels } }
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    let (client, namespace) = (client.clone(), namespace.to_owned());
    Ok(tokio::spawn(async move {
        loop {
            if let Err(error) = bind(&client, &namespace).await {
                eprintln!("cannot bind pods: {error:#}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }))
}

/// Binds every pod that has no node to the open node with the fewest of them.
async fn bind(client: &Client, namespace: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = pods
        .list(&ListParams::default().labels(&format!("app={NAME}")))
        .await?
        .items;
    let node_of = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let waiting: Vec<&Pod> = all.iter().filter(|pod| node_of(pod).is_none()).collect();
    if waiting.is_empty() {
        return Ok(());
    }
    let nodes = Api::<Node>::all(client.clone())
        .list(&ListParams::default())
        .await?
        .items;
    let open = nodes.iter().filter(|node| is_ready(node) && takes_pods(node));
    let mut load: BTreeMap<String, usize> = open.map(|node| (node.name_any(), 0)).collect();
    for node in all.iter().filter_map(node_of) {
        load.entry(node).and_modify(|pods| *pods += 1);
    }
    for pod in waiting {
        let Some((node, pods_there)) = load.iter_mut().min_by_key(|(_, pods)| **pods) else {
            return Ok(());
        };
        let (name, target) = (
            pod.name_any(),
            json!({ "apiVersion": "v1", "kind": "Node", "name": node }),
        );
        let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name }, "target": target });
        let _: serde_json::Value = pods
            .create_subresource("binding", &name, &PostParams::default(), &binding)
            .await?;
        *pods_there += 1;
    }
    Ok(())
}
