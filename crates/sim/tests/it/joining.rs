//! Nodes of running instances join a real cluster and leave it.

use crate::support;

use std::time::Duration;

use capstan_sim::azure::joiner::Options;
use capstan_sim::azure::{Config, Span};
use capstan_testkit::ControlPlane;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use reqwest::Method;
use serde_json::{Value, json};
use support::Client;

const SET: &str = "Microsoft.Compute/virtualMachineScaleSets";

fn ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Waits until the Nodes of this test are as wanted.
async fn until(nodes: &Api<Node>, prefix: &str, what: &str, fits: impl Fn(&[Node]) -> bool) -> Vec<Node> {
    let look = async {
        loop {
            let all = nodes.list(&Default::default()).await.unwrap().items;
            let mine: Vec<Node> = all
                .into_iter()
                .filter(|node| node.metadata.name.as_ref().unwrap().starts_with(prefix))
                .collect();
            if fits(&mine) {
                return mine;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), look)
        .await
        .unwrap_or_else(|_| panic!("not seen: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_comes_with_its_instance_and_goes_with_it() {
    let plane = ControlPlane::shared().await.unwrap();
    let client = plane.client().await.unwrap();
    let prefix = format!("join{}x", std::process::id());
    let labels = [("node-role.kubernetes.io/worker".to_owned(), String::new())].into();
    let options = Options {
        ready_after: Some(Span::millis(500)),
        labels,
        ..Options::client(client.clone())
    };
    let azure = Client::start(Config {
        joiner: Some(options),
        ..Config::instant()
    })
    .await;
    let set = azure.id(SET, "pool");
    let more = json!({ "properties": { "virtualMachineProfile": { "osProfile": { "computerNamePrefix": prefix } } } });
    azure.run(Method::PUT, &set, azure.set_body(2, more)).await;
    let nodes: Api<Node> = Api::all(client);
    until(&nodes, &prefix, "two nodes that are not ready yet", |nodes| {
        nodes.len() == 2
    })
    .await;
    let seen = until(&nodes, &prefix, "two ready nodes", |nodes| {
        nodes.len() == 2 && nodes.iter().all(ready)
    })
    .await;

    let instance = azure.sim.instances(&set)[0].clone();
    let id = instance["id"].as_str().unwrap();
    let provider_id = format!("azure://{}", id);
    let node = seen
        .iter()
        .find(|node| node.spec.as_ref().unwrap().provider_id.as_deref() == Some(&provider_id))
        .unwrap();
    let labels = node.metadata.labels.as_ref().unwrap();
    assert_eq!(
        labels["topology.kubernetes.io/zone"],
        format!("eastus-{}", instance["zones"][0].as_str().unwrap())
    );
    assert!(labels.contains_key("node-role.kubernetes.io/worker"));

    azure.run(Method::POST, &format!("{id}/deallocate"), Value::Null).await;
    until(&nodes, &prefix, "one node not ready", |nodes| {
        nodes.iter().filter(|node| ready(node)).count() == 1
    })
    .await;
    azure.run(Method::POST, &format!("{id}/start"), Value::Null).await;
    until(&nodes, &prefix, "both ready again", |nodes| {
        nodes.iter().filter(|node| ready(node)).count() == 2
    })
    .await;
    azure.run(Method::DELETE, id, Value::Null).await;
    until(&nodes, &prefix, "one node gone", |nodes| nodes.len() == 1).await;
    azure.run(Method::DELETE, &set, Value::Null).await;
    until(&nodes, &prefix, "all nodes gone", <[Node]>::is_empty).await;
}
