//! Everything happens on tokio's clock, so that a paused one works.

use std::time::Duration;

use capstan_sim::azure::{Azure, Config, Span, Times};
use http::Method;
use serde_json::{Value, json};

#[tokio::test(start_paused = true)]
async fn an_hour_of_provisioning_passes_in_no_time_and_in_the_same_order() {
    let times = Times {
        disk: Span::between(Duration::from_secs(600), Duration::from_secs(3600)),
        ..Times::default()
    };
    let run = |seed: u64| {
        let times = times.clone();
        async move {
            let sim = Azure::start(Config {
                times,
                seed,
                ..Config::default()
            })
            .await
            .unwrap();
            let id = |name: &str| {
                format!(
                    "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/disks/{name}",
                    sim.subscription
                )
            };
            let body = json!({ "location": "eastus", "properties": { "diskSizeGB": 8, "creationData": { "createOption": "Empty" } } });
            let start = tokio::time::Instant::now();
            for name in ["a", "b", "c"] {
                sim.direct(Method::PUT, &id(name), body.clone());
            }
            let mut order = Vec::new();
            while order.len() < 3 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                for name in ["a", "b", "c"] {
                    let state = sim.direct(Method::GET, &id(name), Value::Null).body;
                    if state["properties"]["provisioningState"] == "Succeeded" && !order.contains(&name) {
                        order.push(name);
                    }
                }
            }
            assert!(start.elapsed() >= Duration::from_secs(600));
            (order, start.elapsed())
        }
    };
    assert_eq!(run(7).await, run(7).await);
}
