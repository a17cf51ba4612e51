//! The lease against a real API server that goes away.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use capstan_core::Clock;
use capstan_core::interceptor::{Effect, Interceptors, System, Verdict};
use capstan_kube::lease::{Elector, Fence, Identity, Settings};
use capstan_testkit::{ControlPlane, Options};

const RENEW_DEADLINE: Duration = Duration::from_secs(5);
/// How long a program with many threads may take to stand still; with it, still within the lease.
const STOPPING: Duration = Duration::from_millis(500);
const LIMIT: Duration = Duration::from_secs(180);

fn settings(identity: &str) -> Settings {
    Settings {
        namespace: "default".into(),
        name: "capstan".into(),
        identity: Identity::new(identity),
        duration: Duration::from_secs(8),
        renew_deadline: RENEW_DEADLINE,
        retry_period: Duration::from_millis(300),
        renew_period: Duration::from_millis(300),
        clock: Clock::system(),
    }
}

/// Writes to a cloud as fast as it may, and notes when each write that got through was begun.
fn write_all_the_time(fence: &Fence) -> Arc<Mutex<Vec<Instant>>> {
    let passed = Arc::new(Mutex::new(Vec::new()));
    let (noted, interceptors) = (passed.clone(), Interceptors::new(vec![Arc::new(fence.clone())]));
    tokio::spawn(async move {
        let effect = Effect {
            system: System::Azure,
            method: "PUT".into(),
            target: "/subscriptions/s/vm".into(),
            write: true,
        };
        loop {
            // Taken first: a thread that loses its turn in between has not written late.
            let at = Instant::now();
            if interceptors.before(&effect) == Verdict::Pass {
                noted.lock().expect("no writer panics").push(at);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    passed
}

async fn candidate(plane: &ControlPlane, identity: &str) -> Result<(Arc<Mutex<Vec<Instant>>>, Fence)> {
    let mut config = plane.config().await?;
    config.default_retry = false;
    let fence = Fence::default();
    let mut elector = Elector::new(kube::Client::try_from(config)?, settings(identity), fence.clone());
    tokio::spawn(async move {
        loop {
            elector.win().await;
            elector.keep().await;
        }
    });
    Ok((write_all_the_time(&fence), fence))
}

async fn until(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let since = Instant::now();
    while !done() {
        ensure!(since.elapsed() < LIMIT, "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cloud_write_passes_once_the_lease_has_expired_while_the_api_server_is_away() -> Result<()> {
    let options = Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    };
    let mut plane = ControlPlane::start(options).await?;
    let (first_writes, first_fence) = candidate(&plane, "first").await?;
    until("the first to lead", || first_fence.is_open()).await?;
    let (second_writes, second_fence) = candidate(&plane, "second").await?;
    tokio::time::sleep(RENEW_DEADLINE + Duration::from_secs(1)).await;
    ensure!(
        first_fence.is_open() && second_writes.lock().unwrap().is_empty(),
        "renewals keep the first in office"
    );

    // The API server hangs: connections stay open and nothing is answered.
    plane.process("kube-apiserver").expect("our own").pause()?;
    let away = Instant::now();
    until("the fence to close", || !first_fence.is_open()).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let last = *first_writes.lock().unwrap().last().expect("it wrote while it led");
    ensure!(last > away, "the lease outlives a short absence of the API server");
    // A renewal that was on its way when it was stopped may still have been answered.
    ensure!(
        last <= away + RENEW_DEADLINE + STOPPING,
        "a write passed {:?} after the API server went away",
        last - away
    );

    // It comes back: exactly one leads, and their writes never interleave.
    plane.process("kube-apiserver").expect("our own").resume()?;
    until("one to lead", || first_fence.is_open() || second_fence.is_open()).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    ensure!(first_fence.is_open() != second_fence.is_open(), "exactly one leads");
    let mut owners: Vec<(Instant, u8)> = first_writes.lock().unwrap().iter().map(|at| (*at, 1)).collect();
    owners.extend(second_writes.lock().unwrap().iter().map(|at| (*at, 2)));
    owners.sort();
    owners.dedup_by_key(|(_, owner)| *owner);
    ensure!(owners.len() <= 2, "writes of the two interleave");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_lease_is_taken_at_once() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let namespace = plane.namespace("lease").await?;
    // Whoever waits it out does not come back in time.
    let settings = |identity: &str| Settings {
        namespace: namespace.clone(),
        duration: LIMIT * 10,
        ..settings(identity)
    };
    let client = plane.client().await?;
    let fence = Fence::default();
    let mut first = Elector::new(client.clone(), settings("first"), fence.clone());
    tokio::time::timeout(LIMIT, first.win()).await?;
    first.release().await;
    ensure!(!fence.is_open());
    let mut second = Elector::new(client, settings("second"), Fence::default());
    tokio::time::timeout(LIMIT, second.win()).await?;
    Ok(())
}
