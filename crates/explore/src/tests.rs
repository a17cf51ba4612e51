//! Runs seeds. The ordinary test command runs a few; `just explore` sets `EXPLORE_SEEDS` and runs many.

use std::io::Write;
use std::time::{Duration, Instant};

use super::*;

/// Seeds that the ordinary test command runs of each scenario.
const SEEDS: u64 = 10;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Past the test runner, which keeps back what a passing test prints.
fn report(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn seeds<S: Scenario>() {
    if let Some(seed) = number("EXPLORE_SEED") {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        match run::<S>(seed) {
            Ok((stats, trace)) => report(&format!("{}\n{stats:?}", trace.lines().join("\n"))),
            Err(error) => panic!("{error:#}"),
        }
        return;
    }
    let (first, count) = (
        number("EXPLORE_FROM").unwrap_or(1),
        number("EXPLORE_SEEDS").unwrap_or(SEEDS),
    );
    let (began, mut broken, mut all) = (Instant::now(), Vec::new(), Stats::default());
    for seed in first..first + count {
        match run::<S>(seed) {
            Ok((stats, _)) => {
                all.requests += stats.requests;
                all.writes += stats.writes;
                all.crashes += stats.crashes;
                all.simulated += stats.simulated;
            }
            Err(error) => {
                report(&format!("{error:#}"));
                broken.push(seed);
            }
        }
    }
    let took = began.elapsed().max(Duration::from_millis(1));
    report(&format!(
        "explored {}: {count} seeds in {:.1} s, {:.0} seeds per minute, {} requests, {} writes, {} crashes, {:.0} simulated hours",
        S::NAME,
        took.as_secs_f64(),
        count as f64 * 60.0 / took.as_secs_f64(),
        all.requests,
        all.writes,
        all.crashes,
        all.simulated.as_secs_f64() / 3600.0,
    ));
    assert!(
        broken.is_empty(),
        "{} of {count} seeds broke a promise: {broken:?}",
        broken.len()
    );
}

#[test]
fn pools_keep_their_promises() {
    seeds::<Pools>();
}

#[test]
fn machines_keep_their_promises() {
    seeds::<Machines>();
}

#[test]
fn vms_keep_their_promises() {
    seeds::<Vms>();
}
