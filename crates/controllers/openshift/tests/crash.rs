//! The controller is killed after every single effect of a machine's creation and deletion, and another one goes on.

mod support;

use anyhow::{Context as _, Result, ensure};
use capstan_sim::azure::Config;
use futures::StreamExt as _;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{Killer, World, disk};

/// How many of these lives run at the same time.
const AT_ONCE: usize = 6;

/// Whether the killer struck, before the machine was there (creation) or gone (deletion).
async fn life(n: usize, deleting: bool) -> Result<bool> {
    let world = World::new("crash", Config::quick()).await?;
    let name = world.name("m");
    let disks = json!([
        disk("gone", 0, "Delete", "Premium_LRS"),
        disk("kept", 1, "Detach", "Premium_LRS"),
        {"nameSuffix": "fast", "lun": 2, "diskSizeGB": 8, "deletionPolicy": "Delete", "diskIOPSReadWrite": 500,
         "managedDisk": {"storageAccountType": "UltraSSD_LRS"}},
    ]);
    let manifest = world.manifest(&name, json!({"dataDisks": disks, "publicIP": true}));
    let killer = Killer::after(n);
    let struck;
    if deleting {
        let first = world.start().await?;
        world.create(manifest).await?;
        let machine = world.until_phase(&name, "Provisioned").await?;
        world.join(&machine).await?;
        world.until_phase(&name, "Running").await?;
        first.kill().await;
        let doomed = world.start_killed(killer.clone()).await?;
        world.delete(&name).await?;
        struck = tokio::select! {
            () = killer.dead.notified() => true,
            gone = world.until_gone(&name) => { gone?; false }
        };
        doomed.kill().await;
    } else {
        let doomed = world.start_killed(killer.clone()).await?;
        world.create(manifest).await?;
        struck = tokio::select! {
            () = killer.dead.notified() => true,
            there = world.until_phase(&name, "Provisioned") => { there?; false }
        };
        // Events come last: give them the time to be struck too.
        if !struck {
            let _ = tokio::time::timeout(Duration::from_millis(300), killer.dead.notified()).await;
        }
        doomed.kill().await;
        let next = world.start().await?;
        world.until_phase(&name, "Provisioned").await?;
        ensure!(
            world.azure("virtualMachines") == [name.clone()],
            "{:?}",
            world.azure("virtualMachines")
        );
        ensure!(world.azure("networkInterfaces") == [format!("{name}-nic")]);
        ensure!(world.azure("disks").len() == 4, "{:?}", world.azure("disks"));
        world.delete(&name).await?;
        world.until_gone(&name).await?;
        next.kill().await;
        check_gone(&world, &name).context("after creation")?;
        return Ok(killer.writes.load(Ordering::SeqCst) >= n);
    }
    let next = world.start().await?;
    world.until_gone(&name).await?;
    next.kill().await;
    check_gone(&world, &name)?;
    Ok(struck)
}

fn check_gone(world: &World, name: &str) -> Result<()> {
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        ensure!(world.azure(kind).is_empty(), "{kind} left: {:?}", world.azure(kind));
    }
    ensure!(
        world.azure("disks") == [format!("{name}_kept")],
        "disks: {:?}",
        world.azure("disks")
    );
    Ok(())
}

async fn every_point(deleting: bool) -> Result<usize> {
    let mut struck = 0;
    let mut lives = futures::stream::iter(1..40)
        .map(|n| async move { (n, life(n, deleting).await) })
        .buffered(AT_ONCE);
    while let Some((n, outcome)) = lives.next().await {
        if !outcome.with_context(|| format!("killed after effect {n}"))? {
            break;
        }
        struck += 1;
    }
    Ok(struck)
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_a_machine_is_made_once() -> Result<()> {
    let struck = every_point(false).await?;
    println!("creation: killed at {struck} points, each time one machine and no orphan");
    ensure!(struck >= 6);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_a_machine_goes_and_its_kept_disk_stays() -> Result<()> {
    let struck = every_point(true).await?;
    println!("deletion: killed at {struck} points, each time no orphan and no lost disk");
    ensure!(struck >= 5);
    Ok(())
}
