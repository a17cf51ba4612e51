//! The controller is killed after every single effect of a machine's creation and deletion, and another one goes on.

use crate::support;

use anyhow::{Context as _, Result, ensure};
use capstan_sim::azure::{Action, Config, Fault};
use capstan_testkit::interceptors::{LoseAnswer, StopAfter};
use futures::StreamExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use std::io::Write as _;
use std::time::Duration;
use support::{World, disk};

/// How many of these lives run at the same time.
const AT_ONCE: usize = 6;

/// A machine with a disk of every kind.
fn manifest(world: &World, name: &str) -> serde_json::Value {
    let disks = json!([
        disk("gone", 0, "Delete", "Premium_LRS"),
        disk("kept", 1, "Detach", "Premium_LRS"),
        {"nameSuffix": "fast", "lun": 2, "diskSizeGB": 8, "deletionPolicy": "Delete", "diskIOPSReadWrite": 500,
         "managedDisk": {"storageAccountType": "UltraSSD_LRS"}},
    ]);
    world.manifest(name, json!({"dataDisks": disks, "publicIP": true}))
}

/// The part of a machine's life in which the process stops.
#[derive(Clone, Copy, PartialEq)]
enum Chapter {
    Creation,
    Deletion,
    /// The spec has lost its disks meanwhile, and Azure deletes none of them by itself.
    DeletionOfTheForgotten,
}

/// Whether the process stopped before the machine was there (creation) or gone (deletion).
async fn life(n: usize, chapter: Chapter) -> Result<bool> {
    let world = World::new("crash", Config::quick()).await?;
    let name = world.name("m");
    let manifest = manifest(&world, &name);
    let stop = StopAfter::new(n);
    let struck;
    if chapter != Chapter::Creation {
        let first = world.start().await?;
        world.create(manifest).await?;
        let machine = world.until_phase(&name, "Provisioned").await?;
        world.join(&machine).await?;
        world.until_phase(&name, "Running").await?;
        first.kill().await;
        if chapter == Chapter::DeletionOfTheForgotten {
            world.sim.fault(Fault::new(Action::KeepDisks))?;
            forget_disks(&world, &name).await?;
        }
        let doomed = world.start_behind(vec![stop.clone()]).await?;
        world.delete(&name).await?;
        struck = tokio::select! {
            () = stop.stopped() => true,
            gone = world.until_gone(&name) => { gone?; false }
        };
        doomed.kill().await;
    } else {
        let doomed = world.start_behind(vec![stop.clone()]).await?;
        world.create(manifest).await?;
        struck = tokio::select! {
            () = stop.stopped() => true,
            there = world.until_phase(&name, "Provisioned") => { there?; false }
        };
        // Events come last: give them the time to be struck too.
        if !struck {
            let _ = tokio::time::timeout(Duration::from_millis(300), stop.stopped()).await;
        }
        doomed.kill().await;
        let next = world.start().await?;
        world.until_phase(&name, "Provisioned").await?;
        check_there(&world, &name)?;
        world.delete(&name).await?;
        world.until_gone(&name).await?;
        next.kill().await;
        check_gone(&world, &name).context("after creation")?;
        return Ok(stop.has_stopped());
    }
    let next = world.start().await?;
    world.until_gone(&name).await?;
    next.kill().await;
    check_gone(&world, &name)?;
    Ok(struck)
}

/// As an older version would have left the object.
async fn forget_disks(world: &World, name: &str) -> Result<()> {
    world
        .patch(name, json!({"spec": {"providerSpec": {"value": {"dataDisks": null}}}}))
        .await?;
    let status = Patch::Merge(json!({"status": {"providerStatus": {"dataDisks": null}}}));
    world
        .machines()
        .patch_status(name, &PatchParams::default(), &status)
        .await?;
    Ok(())
}

fn check_there(world: &World, name: &str) -> Result<()> {
    ensure!(
        world.azure("virtualMachines") == [name],
        "{:?}",
        world.azure("virtualMachines")
    );
    ensure!(world.azure("networkInterfaces") == [format!("{name}-nic")]);
    ensure!(world.azure("disks").len() == 4, "{:?}", world.azure("disks"));
    Ok(())
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

/// A whole life in which the answer to the n-th write is lost; whether there were so many.
async fn life_with_a_lost_answer(n: usize) -> Result<bool> {
    let world = World::new("lost", Config::quick()).await?;
    let name = world.name("m");
    let lose = LoseAnswer::new(n);
    let controller = world.start_behind(vec![lose.clone()]).await?;
    world.create(manifest(&world, &name)).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    check_there(&world, &name)?;
    world.join(&machine).await?;
    world.until_phase(&name, "Running").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    controller.kill().await;
    check_gone(&world, &name)?;
    Ok(lose.has_lost())
}

/// Runs lives with trouble at the first, second, third effect, until there are no more effects. How many there were.
async fn every_point<F: Future<Output = Result<bool>>>(life: impl Fn(usize) -> F) -> Result<usize> {
    let mut struck = 0;
    let mut lives = futures::stream::iter(1..60)
        .map(|n| {
            let life = life(n);
            async move { (n, life.await) }
        })
        .buffered(AT_ONCE);
    while let Some((n, outcome)) = lives.next().await {
        if !outcome.with_context(|| format!("trouble at effect {n}"))? {
            break;
        }
        struck += 1;
    }
    Ok(struck)
}

/// Past the test's captured output, so that it stands in every log.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_a_machine_is_made_once() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::Creation)).await?;
    tell(&format!(
        "creation: killed after each of {struck} effects, each time one machine and no orphan"
    ));
    ensure!(struck >= 6);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_a_machine_goes_and_its_kept_disk_stays() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::Deletion)).await?;
    tell(&format!(
        "deletion: killed after each of {struck} effects, each time no orphan and no lost disk"
    ));
    ensure!(struck >= 5);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_disks_that_the_spec_lost_go_or_stay_as_they_were_made() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::DeletionOfTheForgotten)).await?;
    tell(&format!(
        "deletion with forgotten disks: killed after each of {struck} effects, each time no orphan and no lost disk"
    ));
    ensure!(struck >= 8);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn whichever_answer_is_lost_one_machine_is_made_and_goes_without_a_trace() -> Result<()> {
    let struck = every_point(life_with_a_lost_answer).await?;
    tell(&format!(
        "creation and deletion: the answer lost after each of {struck} effects, each time one machine and no orphan"
    ));
    ensure!(struck >= 11);
    Ok(())
}
