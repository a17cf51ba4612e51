//! The last lines of the log, so that a test that runs out of patience can say what went on.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

const KEPT: usize = 2000;
static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

#[derive(Clone, Copy)]
struct Tail;

impl Write for Tail {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let mut lines = lines();
        lines.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
        if lines.len() > KEPT {
            lines.pop_front();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn lines() -> MutexGuard<'static, VecDeque<String>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts to keep lines; what `RUST_LOG` asks for is printed as well.
pub fn keep() {
    let ours = EnvFilter::new("warn,capstan_vsphere=debug,capstan_vsphere_machines=debug,capstan_kube=debug");
    let printed = tracing_subscriber::fmt::layer().with_test_writer();
    let kept = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| Tail);
    let _ = tracing_subscriber::registry()
        .with(printed.with_filter(EnvFilter::from_default_env()))
        .with(kept.with_filter(ours))
        .try_init();
}

/// The last lines that are about one of these, or about the poll.
pub fn about(names: &[&str], count: usize) -> Vec<String> {
    let lines = lines();
    let is_about = |line: &&String| names.iter().any(|name| line.contains(name)) || line.contains("watching vCenter");
    let mut found: Vec<String> = lines.iter().rev().filter(is_about).take(count).cloned().collect();
    found.reverse();
    found
}
