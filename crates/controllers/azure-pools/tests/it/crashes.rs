//! The process dies after every effect of a rollout, one run for each, and a new one ends what was begun.

use crate::harness;

use std::time::{Duration, Instant};

use anyhow::Result;
use capstan_core::interceptor::Interceptors;
use capstan_sim::azure::{Config, Span, Times};
use capstan_testkit::interceptors::StopAfter;
use harness::{Options, World, say};

/// All lives together end a rollout of two machines in far less.
const DEADLINE: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_survives_a_crash_after_each_of_its_effects() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 3);
    world.crash().await;
    let mut crashes = 0;
    world.upgrade(2).await?;
    // Each life does one effect and dies; together they end the rollout.
    let begun = Instant::now();
    while !world.all_have(2)? {
        assert!(begun.elapsed() < DEADLINE, "the rollout does not come to an end");
        let stop = StopAfter::new(1);
        world.run(Interceptors::new(vec![stop.clone()])).await?;
        let died = async || Ok(stop.has_stopped().then_some(()));
        let died = world.until_either(died, 15).await?;
        world.crash().await;
        crashes += usize::from(died);
    }
    say(&format!(
        "{crashes} crashes, one after each effect of a rollout of 2 machines"
    ));
    world.run(Interceptors::default()).await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_under_way_is_taken_up_by_the_next_process() -> Result<()> {
    let times = Times {
        instance_create: Span::millis(20_000),
        ..Times::quick()
    };
    let mut world = World::start(Options {
        replicas: 2,
        sim: Config {
            times,
            ..Config::quick()
        },
        ..Options::default()
    })
    .await?;
    world
        .until("an operation in the status", async || {
            let status = world.pool().await?.status.unwrap_or_default();
            Ok((!status.long_running_operation_states.is_empty()).then_some(()))
        })
        .await?;
    world.crash().await;
    world.sim.clear_requests();
    world.run(Interceptors::default()).await?;
    world.until_ready(2).await?;
    let writes = world.sim.arm_requests().into_iter().filter(|call| call.is_write());
    assert_eq!(writes.count(), 0, "what is under way is not asked for again");
    Ok(())
}
