//! Pools from end to end: real API server and controllers of Kubernetes, simulated Azure.

mod harness;

use anyhow::Result;
use harness::{Options, World};
use kube::ResourceExt;

#[tokio::test(flavor = "multi_thread")]
async fn a_new_image_rolls_through_within_both_bounds() -> Result<()> {
    let mut world = World::with_pool(Options::default()).await?;
    let before: Vec<String> = world.machines().await?.iter().map(ResourceExt::name_any).collect();
    world.watch_bounds(3, 4);
    world.sim.clear_requests();
    world.upgrade(2).await?;
    world
        .until("the rollout's begin", async || {
            Ok(world
                .condition("ScaleSetModelUpdated")
                .await?
                .filter(|(status, _)| status == "False"))
        })
        .await?;
    let after = world.until_ready(3).await?;
    assert!(
        after.iter().all(|machine| !before.contains(&machine.name_any())),
        "every machine was replaced"
    );
    world.bounds.assert_kept();
    let calls = world.sim.arm_requests();
    println!("{} ARM calls for 3 replaced instances", calls.len());
    Ok(())
}
