//! The explorer: whole controllers on an in-process API server and a simulated cloud, under tokio's paused time.
//!
//! A seed decides what happens: what users edit, which requests fail, which answers are lost or late, when a
//! watch lags or is cut, and after which write the process stops and starts again. The promises of the product are checked
//! at every request that it sends, and in the end the desired state must be reached and nothing more be written.
//!
//! One seed is one process with one thread, and everything that happens in it follows from the seed, the order of hash maps
//! included (`random.c`): the same program does the same again.
//!
//! `EXPLORE_SEED=7 cargo test -p capstan-explore pools -- --nocapture` replays one seed and prints what happened.

mod faults;
mod machines;
mod pools;
mod trace;
mod vcenter;
mod vms;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use capstan_testkit::apiserver::Rng;
use futures::future::BoxFuture;

pub use machines::Machines;
pub use pools::Pools;
pub use trace::Trace;
pub use vms::Vms;
pub use world::{Clouds, Process, World};

/// A seed takes no longer than this in simulated time; a healthy one is done long before.
const LONGEST: Duration = Duration::from_secs(3 * 24 * 3600);
/// So many times things are done to the world before it is left alone.
const STEPS: usize = 14;
/// From the last edit until the desired state must be reached.
const PATIENCE: Duration = Duration::from_secs(4 * 3600);
/// How often the world is asked whether it has reached the desired state.
const ASK: Duration = Duration::from_secs(15);
/// So long nothing may be written after the desired state is reached.
const QUIET: Duration = Duration::from_secs(45 * 60);

/// A kind of machine to be explored.
pub trait Scenario: Send + Sized + 'static {
    const NAME: &'static str;

    /// Prepares the world, and draws what is constant in it.
    fn prepare(seed: u64, trace: Trace) -> BoxFuture<'static, Result<(Self, World)>>;

    /// Does one thing that a user, or somebody else, may do at any time.
    fn edit<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>>;

    /// Disturbs the cloud.
    fn disturb(&mut self, world: &mut World, rng: &mut Rng) -> Result<()> {
        world.disturb_azure(rng)
    }

    /// Returns what is missing to the desired state.
    fn missing(&self, world: &World) -> Vec<String>;

    /// Stops everything that somebody else does, so that the desired state can be reached.
    fn settle<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>>;
}

/// What one seed was worth.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub requests: usize,
    pub writes: usize,
    pub crashes: usize,
    pub simulated: Duration,
}

/// Runs one seed. The error has the trace.
pub fn run<S: Scenario>(seed: u64) -> Result<(Stats, Trace)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    let trace = Trace::default();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async {
            trace.start();
            let explored = explore::<S>(seed, &trace);
            match tokio::time::timeout(LONGEST, explored).await {
                Ok(done) => done,
                Err(_) => bail!("the seed does not come to an end"),
            }
        })
    }));
    let outcome = outcome.unwrap_or_else(|panic| Err(anyhow!("panicked: {}", text(panic.as_ref()))));
    // Tasks that hang on purpose end with their runtime.
    runtime.shutdown_background();
    match outcome {
        Ok(stats) => Ok((stats, trace)),
        Err(error) => Err(anyhow!(
            "{} broke a promise at seed {seed}: {error:#}\n{trace}\nreplay: EXPLORE_SEED={seed} cargo test -p \
             capstan-explore {} -- --nocapture",
            S::NAME,
            S::NAME
        )),
    }
}

fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let plain = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    plain
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}

async fn explore<S: Scenario>(seed: u64, trace: &Trace) -> Result<Stats> {
    let began = tokio::time::Instant::now();
    let (mut scenario, mut world) = S::prepare(seed, trace.clone()).await?;
    let mut rng = Rng::new(seed ^ 0x5eed);
    world.start(None)?;
    let first = Duration::from_secs(rng.below(600) as u64);
    world.wait(first).await?;
    for _ in 0..STEPS {
        match rng.below(10) {
            0..4 => scenario.edit(&mut world).await?,
            4 => world.crash_after(rng.below(12) + 1).await?,
            5 => world.crash().await?,
            6 => world.disturb_watches(&mut rng),
            7 => scenario.disturb(&mut world, &mut rng)?,
            _ => world.disturb_requests(&mut rng),
        }
        let most = if rng.chance(50) { 20_000 } else { 900_000 };
        world.wait(Duration::from_millis(rng.below(most) as u64)).await?;
    }
    world.calm()?;
    scenario.settle(&mut world).await?;
    settled(&scenario, &mut world).await?;
    world.stop().await;
    Ok(Stats {
        requests: world.requests(),
        writes: world.written(),
        crashes: world.crashes,
        simulated: began.elapsed(),
    })
}

/// In the end the desired state is reached, and then nothing more is written.
async fn settled<S: Scenario>(scenario: &S, world: &mut World) -> Result<()> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let missing = scenario.missing(world);
        if missing.is_empty() {
            let before = world.written();
            world.wait(QUIET).await?;
            let (after, missing) = (world.written(), scenario.missing(world));
            if after == before && missing.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                bail!("{} writes in {QUIET:?} although nothing is missing", after - before);
            }
            continue;
        }
        if tokio::time::Instant::now() > deadline {
            bail!("not reached {PATIENCE:?} after the last change: {}", missing.join("; "));
        }
        world.wait(ASK).await?;
    }
}
