//! How long a rollout takes against the ideal, and what it costs. Run with
//! `cargo test --release -p capstan-azure-pools --test it benchmark -- --ignored --nocapture`.
//! `POOL`, `SURGE` and `SPEED` (how many times faster than Azure's usual 20 s and 5 s) change what is measured.

use crate::harness;

use std::time::{Duration, Instant};

use anyhow::Result;
use capstan_core::interceptor::Interceptors;
use capstan_sim::azure::{Config, Span, Times};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use harness::{Options, World};
use serde_json::json;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes"]
async fn a_rollout_against_the_ideal() -> Result<()> {
    let (pool, surge, speed) = (number("POOL", 20), number("SURGE", 2), number("SPEED", 4));
    let (create, delete) = (
        Duration::from_secs(20) / speed as u32,
        Duration::from_secs(5) / speed as u32,
    );
    let millis = |time: Duration| Span::millis(time.as_millis() as u64);
    let times = Times {
        instance_create: millis(create),
        instance_delete: millis(delete),
        ..Times::quick()
    };
    let sim = Config {
        times,
        retry_after: (10 / speed).max(1) as u64,
        ..Config::default()
    };
    let options = Options {
        replicas: pool,
        surge: json!(surge),
        sim,
        ..Options::default()
    };
    let mut world = World::prepare(options).await?;
    world.patience = Duration::from_secs(3600);
    let writes = Ledger::of(kube_writes);
    let begun = Instant::now();
    world.run(Interceptors::new(vec![writes.clone()])).await?;
    world.until_ready(pool).await?;
    let created = begun.elapsed();
    println!(
        "created: {:.1} s, {:.2} x the ideal",
        created.as_secs_f64(),
        created.as_secs_f64() / create.as_secs_f64()
    );

    world.watch_bounds(pool, pool + surge);
    world.sim.clear_requests();
    writes.clear();
    let begun = Instant::now();
    world.upgrade(2).await?;
    world.until_rolling().await?;
    world.until_ready(pool).await?;
    let took = begun.elapsed();
    let ideal = (create + delete) * (pool.div_ceil(surge)) as u32;
    world.bounds.assert_kept();
    println!(
        "rolled: {:.1} s, {:.2} x the ideal",
        took.as_secs_f64(),
        took.as_secs_f64() / ideal.as_secs_f64()
    );
    println!(
        "ARM calls per instance: {:.2}",
        world.sim.arm_requests().len() as f64 / pool as f64
    );
    println!("kube writes per machine: {:.2}", writes.len() as f64 / pool as f64);
    Ok(())
}
