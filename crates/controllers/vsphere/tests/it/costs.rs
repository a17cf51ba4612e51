//! What machines cost in calls to vCenter and in writes to Kubernetes: coming up, and waiting.

use crate::world;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use capstan_api::vsphere::VSphereMachine;
use capstan_testkit::vcsim::Options;
use serde_json::json;
use world::{World, spec};

#[tokio::test(flavor = "multi_thread")]
async fn machines_cost_few_calls_and_few_writes_however_long_they_wait() -> Result<()> {
    const MACHINES: u64 = 20;
    let options = Options {
        clone_delay: Duration::from_secs(2),
        guest_ip_delay: Some(Duration::from_secs(1)),
        ..Options::default()
    };
    let world = World::start(options).await?;
    // What is as old as the controllers, to the second, may have been begun by others: they look for that.
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.vcsim.admin.reset_counters().await?;
    let started = Instant::now();
    let two = json!([{"name": "a", "sizeGiB": 1}, {"name": "b", "sizeGiB": 1}]);
    for i in 0..MACHINES {
        world
            .machine(&format!("m-{i}"), spec("pvscsi", json!({"dataDisks": two})))
            .await?;
    }
    for i in 0..MACHINES {
        let ready = |machine: &VSphereMachine| machine.status.as_ref().is_some_and(|status| status.ready);
        world.until::<VSphereMachine>(&format!("m-{i}"), ready).await?;
    }
    let counters = world.vcsim.admin.counters().await?;
    let machines = |target: &str| target.contains("/m-") || target.contains("/events") || target.ends_with("vms");
    let writes = world.ledger.effects();
    let writes: Vec<_> = writes.iter().filter(|w| w.write && machines(&w.target)).collect();
    let written = writes.len() as u64;
    let calls: u64 = counters.values().sum();
    let told = format!(
        "vSphere, {MACHINES} machines: {} calls and {} writes for each\n",
        calls as f64 / MACHINES as f64,
        written as f64 / MACHINES as f64
    );
    std::io::stderr().write_all(told.as_bytes())?;
    // How many waits share an answer of the poll depends on how fast the machine under the test is; that each of the four
    // costs one change of the view and two answers at most, and that those outside are read seven times a second, does not.
    let count = |methods: &[&str]| -> u64 { methods.iter().filter_map(|method| counters.get(*method)).sum() };
    let (polled, read) = (
        count(&["ModifyListView", "WaitForUpdatesEx"]),
        count(&["RetrievePropertiesEx"]),
    );
    assert!(polled <= 12 * MACHINES + 20, "{polled} calls of the poll: {counters:?}");
    assert!(
        read <= 3 * MACHINES + 7 * (1 + started.elapsed().as_secs()),
        "{read} reads: {counters:?}"
    );
    assert!(
        calls - polled - read <= 4 * MACHINES + 20,
        "{calls} calls: {counters:?}"
    );
    // On a busy machine a step may take so long that it is told of: the condition, the event, and the machine's copy.
    let slow_steps = ["Cloning", "PoweringOn", "WaitingForIPAllocation"];
    let mut told = 0;
    for i in 0..MACHINES {
        let events = world.events(&format!("m-{i}")).await?;
        told += events
            .iter()
            .filter(|(reason, _)| slow_steps.contains(&reason.as_str()))
            .count() as u64;
    }
    assert!(
        written <= 8 * MACHINES + 1 + 3 * told,
        "{written} writes: {:#?}",
        writes.iter().filter(|w| w.target.contains("m-7")).collect::<Vec<_>>()
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_an_address_costs_no_calls_and_no_writes_however_many_wait() -> Result<()> {
    const MACHINES: usize = 40;
    const WINDOW: Duration = Duration::from_secs(10);
    let options = Options {
        guest_ip_delay: None,
        ..Options::default()
    };
    let world = World::start(options).await?;
    for i in 0..MACHINES {
        world.machine(&format!("m-{i}"), spec("pvscsi", json!({}))).await?;
    }
    for i in 0..MACHINES {
        let text = "waiting for the guest to report an address";
        world.condition_of_vm(&format!("m-{i}"), text).await?;
    }
    // The view may still be arranged in the first of them.
    let mut windows = 0;
    loop {
        world.vcsim.admin.reset_counters().await?;
        world.ledger.clear();
        tokio::time::sleep(WINDOW).await;
        let counters = world.vcsim.admin.counters().await?;
        let written = world.ledger.about("/vspherevms/");
        let calls: u64 = counters.values().sum();
        if calls <= 2 && written.is_empty() {
            return Ok(());
        }
        windows += 1;
        assert!(windows < 4, "the long poll alone, not {counters:?}; {written:#?}");
    }
}
