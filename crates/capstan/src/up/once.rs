//! `capstan up --once`: waits until every example is ready.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use kube::api::DynamicObject;
use tokio_util::sync::CancellationToken;

use super::examples;
use super::output::say;
use super::rows::{self, Key, Row, Rows};

/// Fails after `timeout`, with a list of the objects that are not ready.
pub async fn wait(
    timeout: Duration,
    rows: &Rows,
    applied: &[DynamicObject],
    kubeconfig: &Path,
    stop: &CancellationToken,
) -> Result<()> {
    let began = Instant::now();
    let wanted: Vec<Key> = applied
        .iter()
        .filter_map(|o| rows::key(o, examples::NAMESPACE))
        .collect();
    let in_time = tokio::select! {
        done = capstan_core::clock::timeout(timeout, all_ready(rows, &wanted)) => done.is_ok(),
        () = stop.cancelled() => bail!("stopped before everything was ready"),
    };
    let all = rows.of(&wanted);
    if !in_time {
        let late = late(rows, &all, &wanted);
        bail!("not ready after {} s:\n  {}", timeout.as_secs(), late.join("\n  "));
    }
    say(format!(
        "{} machines and pools ready after {:.1} s",
        all.len(),
        began.elapsed().as_secs_f32()
    ));
    say(format!("ready {}", kubeconfig.display()));
    Ok(())
}

/// Reports every change, until all wanted rows exist, and they and everything that they own are ready.
async fn all_ready(rows: &Rows, wanted: &[Key]) {
    let mut changes = rows.changes();
    let mut reported: HashMap<String, String> = HashMap::new();
    loop {
        let all = rows.of(wanted);
        for row in &all {
            let what = format!("{:<24} {:<30}", row.kind, format!("{}/{}", row.namespace, row.name));
            let how = format!("{:<18} {}", row.state, row.detail);
            if reported.get(&what) != Some(&how) {
                say(format!("{what} {}", how.trim_end()));
                reported.insert(what, how);
            }
        }
        let missing = wanted.iter().any(|key| rows.get(key).is_none_or(|row| !row.ready));
        if !missing && all.iter().all(|row| row.ready) {
            return;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn late(rows: &Rows, all: &[Row], wanted: &[Key]) -> Vec<String> {
    let name = |namespace: &str, name: &str| format!("{namespace}/{name}");
    let mut late: Vec<String> = all
        .iter()
        .filter(|row| !row.ready)
        .map(|row| {
            let colon = if row.problem.is_empty() { "" } else { ": " };
            let object = name(&row.namespace, &row.name);
            format!("{} {object} is {}{colon}{}", row.kind, row.state, row.problem)
        })
        .collect();
    let absent = wanted.iter().filter(|key| rows.get(key).is_none());
    late.extend(absent.map(|key| format!("{} {} is not there", rows::KINDS[key.0].1, name(&key.1, &key.2))));
    late
}
