//! One control plane per test run, shared by all its test processes.
//!
//! A test run is the process that started the test programs (cargo, nextest). Its control plane lives in a directory
//! with the name of that process. The first test process starts it under a lock, and a keeper ends it with the process
//! of the test run.

use std::fs;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use anyhow::{Context, Result};
use rustix::process::{Pid, test_kill_process};

use crate::controlplane::{ControlPlane, Options};
use crate::files::{self, Lock};
use crate::parts;
use crate::process::Lifeline;

/// The number of ended runs whose logs are kept.
const KEPT_RUNS: usize = 5;

fn runs_dir() -> PathBuf {
    files::cache_dir().join("run")
}

/// Finds this run's control plane, or starts it. Blocks.
pub fn find_or_start() -> Result<PathBuf> {
    let run = run_process();
    let dir = runs_dir().join(format!("test-{run}"));
    let _lock = Lock::take(&runs_dir().join(format!("test-{run}.lock")), || ())?;
    let owner = dir.join("owner");
    let identity = format!("{run} {}", started(run).unwrap_or_default());
    if dir.join("kubeconfig").exists() && fs::read_to_string(&owner).is_ok_and(|text| text == identity) {
        return Ok(dir);
    }
    // The directory may be that of an ended run whose process id came round again.
    let _ = fs::remove_dir_all(&dir);
    prune();
    files::write(&owner, identity)?;
    // Tests call it under their own time limits, which must not include its build.
    parts::KUBECTL.path()?;
    // A runtime of its own: the caller's ends with its test, and the processes must not hang on it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let options = Options::default();
    let data = dir.join("etcd");
    let plane = runtime
        .block_on(ControlPlane::launch(dir, &options, || Lifeline::of_process(run, &data)))
        .context("cannot start the shared control plane")?;
    let dir = plane.dir().to_owned();
    plane.detach();
    Ok(dir)
}

/// Returns the process of the test run: the one that started the test programs, or this one when a shell started it,
/// because a shell lives on for long.
fn run_process() -> u32 {
    let by_runner = std::env::var_os("CARGO").is_some() || std::env::var_os("NEXTEST").is_some();
    if by_runner { parent_id() } else { std::process::id() }
}

/// Returns the start time of a process, in the kernel's count. It distinguishes the process from a later one with the
/// same number.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(19).map(str::to_owned)
}

/// A directory for a control plane of one's own.
pub fn fresh_dir(kind: &str) -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "{kind}-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let dir = runs_dir().join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// Removes what ended runs left, all but the logs of the last few.
fn prune() {
    let Ok(entries) = fs::read_dir(runs_dir()) else { return };
    let (dirs, locks): (Vec<PathBuf>, Vec<PathBuf>) = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| !is_alive(path))
        .partition(|path| path.is_dir());
    for lock in locks {
        let _ = fs::remove_file(lock);
    }
    let mut ended: Vec<(SystemTime, PathBuf)> = dirs
        .into_iter()
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .collect();
    ended.sort();
    ended.reverse();
    for (age, (_, dir)) in ended.iter().enumerate() {
        let doomed = if age < KEPT_RUNS { dir.join("etcd") } else { dir.clone() };
        // Another process may be pruning too.
        let _ = fs::remove_dir_all(doomed);
    }
}

/// Whether the process in the name of a run directory (`KIND-PID…`) still lives. With a start time in the name, a later
/// process with the same number does not count.
fn is_alive(dir: &Path) -> bool {
    let name = dir
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let pid = name
        .split(['-', '.'])
        .nth(1)
        .and_then(|pid| pid.parse().ok())
        .and_then(Pid::from_raw);
    let Some(pid) = pid.filter(|pid| test_kill_process(*pid).is_ok()) else {
        return false;
    };
    let now = pid.as_raw_nonzero().get().unsigned_abs();
    let identity = format!("{now} {}", started(now).unwrap_or_default());
    fs::read_to_string(dir.join("owner")).map_or(true, |owner| owner == identity)
}
