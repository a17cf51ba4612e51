//! What a rollout costs: calls of Azure and writes to Kubernetes, counted under paused time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use capstan_core::interceptor::Interceptors;
use capstan_sim::azure::{Config, Span, Times, joiner};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use k8s_openapi::api::core::v1::Taint;
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{Pool, Still};

/// Kubernetes gives it to every Node, and removes it when the Node is ready.
const BORN_WITH: &str = "node.kubernetes.io/not-ready";
/// Kubernetes takes one Node after the other.
const TAINT_PACE: Duration = Duration::from_millis(50);

fn usual(create: u64, delete: u64, retry_after: u64) -> Config {
    let taint = Taint {
        key: BORN_WITH.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    Config {
        times: Times {
            instance_create: Span::millis(create * 1000),
            instance_delete: Span::millis(delete * 1000),
            latency: Span::millis(50),
            ..Times::default()
        },
        retry_after,
        joiner: Some(joiner::Options {
            taints: vec![taint],
            ..joiner::Options::default()
        }),
        ..Config::default()
    }
}

impl Still {
    /// Removes the taint from one Node after the other.
    async fn remove_taints(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TAINT_PACE).await;
            let tainted = |node: &&Value| node.pointer("/spec/taints/0/key").is_some_and(|key| key == BORN_WITH);
            let nodes = self.server.objects("nodes");
            let Some(node) = nodes.iter().find(tainted) else {
                continue;
            };
            let name = &node["metadata"]["name"];
            let free =
                json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": { "taints": null } });
            if let Err(error) = self.patch(free).await {
                eprintln!("{name} is gone: {error:#}");
            }
        }
    }
}

/// The goals of the benchmark. A machine costs less where more of them go together.
#[rstest]
#[case::two_at_a_time(20, usual(20, 5, 10), 3.5, 1.08)]
#[case::ten_at_a_time(100, usual(8, 4, 2), 1.2, 1.25)]
#[tokio::test(start_paused = true)]
async fn a_rollout_makes_few_calls_and_few_writes(
    #[case] machines: usize,
    #[case] sim: Config,
    #[case] most_calls: f64,
    #[case] longest: f64,
) -> Result<()> {
    const MOST_WRITES: f64 = 5.5;
    let provisioning = 10.0 * sim.times.instance_create.max.as_secs_f64();
    let still = Still::new(Pool {
        replicas: machines,
        object: json!({ "spec": { "strategy": { "rollingUpdate": { "maxSurge": "10%" } } } }),
        sim,
        ..Pool::default()
    })
    .await?;
    let still = Arc::new(still);
    let taints = tokio::spawn(still.clone().remove_taints());
    let writes = Ledger::of(kube_writes);
    let _running = still.start_behind(Interceptors::new(vec![writes.clone()]))?;
    still.until_ready(machines).await;
    tokio::time::sleep(Duration::from_secs(120)).await;

    still.azure.clear_requests();
    writes.clear();
    let begun = tokio::time::Instant::now();
    still.upgrade(2).await?;
    still.until("the rollout", |still| still.all_have(2, machines)).await;
    still.until_ready(machines).await;
    let took = begun.elapsed().as_secs_f64() / provisioning;
    tokio::time::sleep(Duration::from_secs(5)).await;
    taints.abort();

    let calls = still.azure.arm_requests();
    let story: Vec<String> = calls
        .iter()
        .map(|call| format!("{} {} {} {}", call.time, call.method, call.path, call.status))
        .collect();
    let each = |count: usize| count as f64 / machines as f64;
    let (called, written) = (each(calls.len()), each(writes.len()));
    println!("{took:.2} of the provisioning, {called:.2} calls and {written:.2} writes for each machine");
    assert!(called <= most_calls, "{called} calls each:\n{}", story.join("\n"));
    assert!(
        written <= MOST_WRITES,
        "{written} writes each: {}\n{writes}",
        writes.summary()
    );
    assert!(
        took <= longest,
        "{took} of the provisioning alone:\n{}",
        story.join("\n")
    );
    Ok(())
}
