//! When a watch that failed is tried again. Invariant: the same failures at the same times give the same waits, so a test
//! under paused time can be replayed; kinds that fail together are spread by their names.

use std::time::{Duration, Instant};

use capstan_core::Clock;
use capstan_core::backoff::{exponential, jittered};
use kube::runtime::utils::Backoff;

/// As client-go has them.
const FIRST: Duration = Duration::from_millis(800);
const LONGEST: Duration = Duration::from_secs(30);
/// A watch that has been well for this long starts from the first wait again.
const WELL: Duration = Duration::from_secs(120);

pub(crate) struct Rewatch {
    share: f64,
    failures: u32,
    last: Option<Instant>,
    clock: Clock,
}

impl Rewatch {
    /// Waits for the watch of a kind.
    pub(crate) fn of(kind: &str) -> Self {
        let sum = kind
            .bytes()
            .fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        Self {
            share: f64::from(sum % 1000) / 1000.0,
            failures: 0,
            last: None,
            // Both clocks have the same instants.
            clock: Clock::system(),
        }
    }
}

impl Iterator for Rewatch {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1);
        self.last = Some(self.clock.instant());
        Some(jittered(exponential(FIRST, LONGEST, self.failures), self.share))
    }
}

impl Backoff for Rewatch {
    /// Called at every event: a list that begins proves nothing yet.
    fn reset(&mut self) {
        if self.last.is_some_and(|last| self.clock.since(last) > WELL) {
            self.failures = 0;
            self.last = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_grow_until_the_watch_has_been_well_for_a_while() {
        let mut rewatch = Rewatch::of("Node");
        let first = rewatch.next();
        rewatch.reset();
        assert!(rewatch.next() > first);
        tokio::time::sleep(WELL * 2).await;
        rewatch.reset();
        assert_eq!(rewatch.next(), first);
        assert!(rewatch.by_ref().take(20).all(|wait| wait <= LONGEST));
    }
}
