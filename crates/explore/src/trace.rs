//! What happened, in order, with simulated times: printed when a seed fails.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

/// So many of the last lines are printed.
const PRINTED: usize = 160;

#[derive(Clone, Default)]
pub struct Trace(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    began: Option<Instant>,
    lines: Vec<String>,
    wrong: Vec<String>,
}

impl Trace {
    pub fn start(&self) {
        self.0.lock().began = Some(Instant::now());
    }

    pub fn note(&self, line: impl fmt::Display) {
        let mut all = self.0.lock();
        let passed = all.began.map(|began| began.elapsed()).unwrap_or_default();
        all.lines.push(format!("{:>10.3} {line}", passed.as_secs_f64()));
    }

    /// Notes a promise that was broken.
    pub fn wrong(&self, line: String) {
        self.note(format!("BROKEN {line}"));
        self.0.lock().wrong.push(line);
    }

    pub fn broken(&self) -> Vec<String> {
        self.0.lock().wrong.clone()
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().lines.clone()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.0.lock();
        let skipped = all.lines.len().saturating_sub(PRINTED);
        if skipped > 0 {
            writeln!(f, "… {skipped} lines before")?;
        }
        all.lines[skipped..].iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}
