//! How machines are brought down, by their mode.

use crate::world;

use anyhow::Result;
use capstan_testkit::vcsim::{Fault, Options};
use serde_json::json;
use world::{World, spec};

/// How often guests were asked, and how often machines were powered off.
async fn asked_and_forced(world: &World) -> Result<(u64, u64)> {
    let counters = world.vcsim.admin.counters().await?;
    let count = |method: &str| counters.get(method).copied().unwrap_or_default();
    world.vcsim.admin.reset_counters().await?;
    Ok((count("ShutdownGuest"), count("PowerOffVM_Task")))
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_are_asked_and_waited_for_as_their_mode_says() -> Result<()> {
    let options = Options {
        method_delays: vec!["ShutdownGuest:1000".into()],
        ..Options::default()
    };
    let world = World::start(options).await?;
    let modes = [
        ("hard", json!({"powerOffMode": "hard"})),
        ("soft", json!({"powerOffMode": "soft"})),
        ("cannot", json!({"powerOffMode": "trySoft"})),
    ];
    for (name, mode) in &modes {
        world.machine(name, spec("pvscsi", mode.clone())).await?;
    }
    for (name, _) in &modes {
        world.ready(name).await?;
    }
    world.vcsim.admin.reset_counters().await?;
    world.delete("hard").await?;
    assert_eq!(asked_and_forced(&world).await?, (0, 1), "hard is not asked");
    world.delete("soft").await?;
    assert_eq!(asked_and_forced(&world).await?, (1, 0), "soft is waited for");
    let fault = Fault::call("ShutdownGuest", "ToolsUnavailable", "VMware Tools are not running.");
    world.vcsim.admin.inject(&fault).await?;
    world.delete("cannot").await?;
    assert_eq!(asked_and_forced(&world).await?, (1, 1), "who cannot be asked is forced");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_does_not_go_in_its_time_is_forced() -> Result<()> {
    let options = Options {
        method_delays: vec!["ShutdownGuest:600000".into()],
        ..Options::default()
    };
    let world = World::start(options).await?;
    let mode = json!({"powerOffMode": "trySoft", "guestSoftPowerOffTimeout": "1s"});
    world.machine("try", spec("pvscsi", mode)).await?;
    world.ready("try").await?;
    world.vcsim.admin.reset_counters().await?;
    world.delete("try").await?;
    assert_eq!(
        asked_and_forced(&world).await?,
        (1, 1),
        "trySoft is forced when its time is over"
    );
    Ok(())
}
