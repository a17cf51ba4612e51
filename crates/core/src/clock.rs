//! The clock. Invariant: nothing else in the product asks for the time, sleeps or sets a deadline, which a test of this crate
//! checks in the sources. Whatever waits, waits on tokio's time.
//!
//! A process has one clock, made at its start and handed to every client and controller. Under tokio's paused time the
//! whole product stands still with it, so a test decides when time goes on.

use std::time::{Duration, Instant};

use jiff::Timestamp;
pub use tokio::time::{Sleep, sleep, sleep_until, timeout, timeout_at};

/// Tells the time, as a time of day and as an instant that never goes back. Cheap to copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    /// The time of day at one instant, from which a test's clock counts on.
    origin: Option<(Timestamp, Instant)>,
}

impl Clock {
    /// The clock of the operating system.
    pub fn system() -> Self {
        Self { origin: None }
    }

    /// A clock that shows `start` now and goes on with tokio's time, which a test can pause and advance.
    pub fn starting_at(start: Timestamp) -> Self {
        Self {
            origin: Some((start, monotonic())),
        }
    }

    /// Returns the time of day: for objects, conditions and whatever another process reads.
    pub fn now(&self) -> Timestamp {
        match self.origin {
            Some((start, began)) => start + monotonic().duration_since(began),
            None => Timestamp::now(),
        }
    }

    /// Returns an instant: for ages and deadlines inside this process.
    pub fn instant(&self) -> Instant {
        monotonic()
    }

    /// Returns the time since `earlier`.
    pub fn since(&self, earlier: Instant) -> Duration {
        self.instant().saturating_duration_since(earlier)
    }

    pub async fn sleep(&self, time: Duration) {
        sleep(time).await;
    }
}

/// tokio's instant is the operating system's, unless a test has paused it.
fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tests_clock_goes_on_with_tokios_time_only() {
        let clock = Clock::starting_at(Timestamp::UNIX_EPOCH);
        let began = clock.instant();
        assert_eq!(clock.now(), Timestamp::UNIX_EPOCH);
        clock.sleep(Duration::from_secs(90)).await;
        assert_eq!(clock.now().as_second(), 90);
        assert_eq!(clock.since(began), Duration::from_secs(90));
    }
}
