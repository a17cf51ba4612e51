//! The controller is killed after every single effect of a machine's creation and deletion, and another one goes on.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use capstan_core::interceptor::{Interceptor, Interceptors};
use capstan_sim::azure::{Action, Config, Fault};
use capstan_testkit::interceptors::{LoseAnswer, StopAfter};
use capstan_testkit::print_line;
use serde_json::json;

use crate::still::{Running, Still, machine};
use crate::support::disk;

const NAME: &str = "m0";
/// More effects than any life has.
const MOST: usize = 100;
/// Events come last: this long after everything else all of them are sent.
const EVENTS: Duration = Duration::from_secs(30);

/// The part of a machine's life in which the process stops.
#[derive(Clone, Copy, PartialEq)]
enum Chapter {
    Creation,
    Deletion,
    /// The spec has lost its disks meanwhile, and Azure deletes none of them by itself.
    DeletionOfTheForgotten,
}

/// Creates a machine with a disk of every kind.
async fn create(still: &Still) -> Result<()> {
    let disks = json!([
        disk("gone", 0, "Delete", "Premium_LRS"),
        disk("kept", 1, "Detach", "Premium_LRS"),
        {"nameSuffix": "fast", "lun": 2, "diskSizeGB": 8, "deletionPolicy": "Delete", "diskIOPSReadWrite": 500,
         "managedDisk": {"storageAccountType": "UltraSSD_LRS"}},
    ]);
    let spec = json!({"dataDisks": disks, "publicIP": true});
    still.create(still.machine(NAME, spec)).await
}

fn start(still: &Still, interceptor: Arc<dyn Interceptor>) -> Result<Running> {
    still.start_behind(None, Interceptors::new(vec![interceptor]))
}

fn is_running(still: &Still) -> bool {
    let machine = still.get("machine.openshift.io", "machines", NAME);
    machine.is_some_and(|machine| machine["status"]["phase"] == "Running")
}

fn is_gone(still: &Still) -> bool {
    still.get("machine.openshift.io", "machines", NAME).is_none()
}

/// Returns whether the process stopped before the machine ran (creation) or was gone (deletion).
async fn life(n: usize, chapter: Chapter) -> Result<bool> {
    let still = Still::new(Config::quick()).await?;
    let stop = StopAfter::new(n);
    if chapter == Chapter::Creation {
        let doomed = start(&still, stop.clone())?;
        create(&still).await?;
        still
            .until("an end", |still| stop.has_stopped() || is_running(still))
            .await;
        tokio::time::sleep(EVENTS).await;
        drop(doomed);
        let next = still.start(None)?;
        still.until("a machine that runs", is_running).await;
        check_there(&still)?;
        still.delete_machine(NAME).await?;
        still.until_gone(NAME).await;
        drop(next);
        check_gone(&still).context("after creation")?;
        return Ok(stop.has_stopped());
    }
    let first = still.start(None)?;
    create(&still).await?;
    still.until("a machine that runs", is_running).await;
    drop(first);
    if chapter == Chapter::DeletionOfTheForgotten {
        still.azure.fault(Fault::new(Action::KeepDisks))?;
        forget_disks(&still).await?;
    }
    let doomed = start(&still, stop.clone())?;
    still.delete_machine(NAME).await?;
    still
        .until("an end", |still| stop.has_stopped() || is_gone(still))
        .await;
    drop(doomed);
    let next = still.start(None)?;
    still.until_gone(NAME).await;
    drop(next);
    check_gone(&still)?;
    Ok(stop.has_stopped())
}

/// As an older version would have left the object.
async fn forget_disks(still: &Still) -> Result<()> {
    let none = json!({"providerSpec": {"value": {"dataDisks": null}}});
    still.patch_machine(NAME, json!({"spec": none})).await?;
    let mut none = machine(NAME);
    none["status"] = json!({"providerStatus": {"dataDisks": null}});
    still.patch_status(none).await
}

fn check_there(still: &Still) -> Result<()> {
    let vms = still.resources("virtualMachines");
    ensure!(vms == [NAME], "{vms:?}");
    let interfaces = still.resources("networkInterfaces");
    ensure!(interfaces == [format!("{NAME}-nic")], "{interfaces:?}");
    let disks = still.resources("disks");
    ensure!(disks.len() == 4, "{disks:?}");
    Ok(())
}

fn check_gone(still: &Still) -> Result<()> {
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        let left = still.resources(kind);
        ensure!(left.is_empty(), "{kind} left: {left:?}");
    }
    let disks = still.resources("disks");
    ensure!(disks == [format!("{NAME}_kept")], "disks: {disks:?}");
    Ok(())
}

/// A whole life in which the answer to the n-th write is lost; whether there were so many.
async fn life_with_a_lost_answer(n: usize) -> Result<bool> {
    let still = Still::new(Config::quick()).await?;
    let lose = LoseAnswer::new(n);
    let controller = start(&still, lose.clone())?;
    create(&still).await?;
    still.until("a machine that runs", is_running).await;
    check_there(&still)?;
    still.delete_machine(NAME).await?;
    still.until_gone(NAME).await;
    drop(controller);
    check_gone(&still)?;
    Ok(lose.has_lost())
}

/// Runs lives with trouble at the first, second, third effect, until there are no more effects. Returns how many there were.
async fn every_point<F: Future<Output = Result<bool>>>(life: impl Fn(usize) -> F) -> Result<usize> {
    for n in 1..MOST {
        if !life(n).await.with_context(|| format!("trouble at effect {n}"))? {
            return Ok(n - 1);
        }
    }
    anyhow::bail!("a life has more than {MOST} effects")
}

#[tokio::test(start_paused = true)]
async fn killed_after_any_effect_a_machine_is_made_once() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::Creation)).await?;
    print_line(&format!(
        "creation: killed after each of {struck} effects, each time one machine and no orphan"
    ));
    ensure!(struck >= 6);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn killed_after_any_effect_a_machine_goes_and_its_kept_disk_stays() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::Deletion)).await?;
    print_line(&format!(
        "deletion: killed after each of {struck} effects, each time no orphan and no lost disk"
    ));
    ensure!(struck >= 5);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn killed_after_any_effect_disks_that_the_spec_lost_go_or_stay_as_they_were_made() -> Result<()> {
    let struck = every_point(|n| life(n, Chapter::DeletionOfTheForgotten)).await?;
    print_line(&format!(
        "deletion with forgotten disks: killed after each of {struck} effects, each time no orphan and no lost disk"
    ));
    ensure!(struck >= 8);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn whichever_answer_is_lost_one_machine_is_made_and_goes_without_a_trace() -> Result<()> {
    let struck = every_point(life_with_a_lost_answer).await?;
    print_line(&format!(
        "creation and deletion: the answer lost after each of {struck} effects, each time one machine and no orphan"
    ));
    ensure!(struck >= 11);
    Ok(())
}
