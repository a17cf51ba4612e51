//! Runs seeds. The ordinary test command runs a few; `just explore` sets `EXPLORE_SEEDS` and runs many.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use capstan_explore::{Machines, Pools, Scenario, Stats, Vms, run};
use capstan_testkit::print_line;

/// Seeds that the ordinary test command runs of each scenario.
const SEEDS: u64 = 10;
/// Starts the line of a seed that kept all promises.
const KEPT: &str = "kept all promises:";
/// Set in the process of one seed.
const ALONE: &str = "EXPLORE_ALONE";

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs one seed in this process and prints what happened.
fn replay<S: Scenario>(seed: u64) {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    match run::<S>(seed) {
        Ok((stats, trace)) => {
            let Stats {
                requests,
                writes,
                crashes,
                simulated,
            } = stats;
            let lines = trace.lines().join("\n");
            print_line(&format!(
                "{lines}\n{KEPT} {requests} {writes} {crashes} {}",
                simulated.as_secs()
            ));
        }
        Err(error) => panic!("{error:#}"),
    }
}

/// Runs one seed in a process of its own. Some hash maps take addresses for random numbers, so the process has the same ones every
/// time, where the machine can do that.
fn spawn<S: Scenario>(seed: u64) -> Output {
    let test = format!("{}_keep_their_promises", S::NAME);
    let this = std::env::current_exe().unwrap();
    let fixed = Command::new("setarch").args(["-R", "true"]).status();
    let mut command = match fixed.is_ok_and(|status| status.success()) {
        true => {
            let mut command = Command::new("setarch");
            command.arg("-R").arg(this);
            command
        }
        false => Command::new(this),
    };
    command.args(["--exact", &test, "--nocapture"]);
    command.env("EXPLORE_SEED", seed.to_string());
    command.env(ALONE, "true").output().unwrap()
}

fn stats(output: &Output) -> Option<Stats> {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.strip_prefix(KEPT))?;
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let &[requests, writes, crashes, simulated] = numbers.as_slice() else {
        return None;
    };
    Some(Stats {
        requests: requests as usize,
        writes: writes as usize,
        crashes: crashes as usize,
        simulated: Duration::from_secs(simulated),
    })
}

fn seeds<S: Scenario>() {
    if let Some(seed) = number("EXPLORE_SEED") {
        if std::env::var_os(ALONE).is_some() {
            return replay::<S>(seed);
        }
        let output = spawn::<S>(seed);
        print_line(&String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "seed {seed} broke a promise");
        return;
    }
    let (first, count) = (
        number("EXPLORE_FROM").unwrap_or(1),
        number("EXPLORE_SEEDS").unwrap_or(SEEDS),
    );
    let (began, mut broken, mut all) = (Instant::now(), Vec::new(), Stats::default());
    for seed in first..first + count {
        let output = spawn::<S>(seed);
        match stats(&output) {
            Some(stats) => {
                all.requests += stats.requests;
                all.writes += stats.writes;
                all.crashes += stats.crashes;
                all.simulated += stats.simulated;
            }
            None => {
                print_line(&String::from_utf8_lossy(&output.stderr));
                broken.push(seed);
            }
        }
    }
    let took = began.elapsed().max(Duration::from_millis(1));
    print_line(&format!(
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

/// A failure that shows only now and then cannot be understood.
#[test]
fn a_seed_does_the_same_again() {
    fn same<S: Scenario>(seed: u64) {
        let (one, other) = (spawn::<S>(seed), spawn::<S>(seed));
        let lines = |output: &Output| -> Vec<String> {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            text.lines().map(str::to_owned).collect()
        };
        let (one, other) = (lines(&one), lines(&other));
        let differs = one.iter().zip(&other).position(|(one, other)| one != other);
        if let Some(line) = differs {
            panic!(
                "{} seed {seed} differs at line {line} of {}:\n{}\n{}",
                S::NAME,
                one.len(),
                one[line],
                other[line]
            );
        }
        assert_eq!(one.len(), other.len());
        assert!(one.len() > 50, "{} lines", one.len());
    }
    if number("EXPLORE_SEED").is_some() {
        return;
    }
    same::<Machines>(3);
    same::<Pools>(3);
    same::<Vms>(3);
}
