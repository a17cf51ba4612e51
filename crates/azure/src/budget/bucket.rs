//! One token bucket: pure, the caller gives the time. It never allows more than its limit, even if the headers of an
//! answer claim more.

use super::policy::Limit;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct Bucket {
    limit: Limit,
    tokens: f64,
    at: Instant,
    stopped_until: Option<Instant>,
}

impl Bucket {
    pub fn new(limit: Limit, now: Instant) -> Self {
        Self {
            limit,
            tokens: f64::from(limit.burst),
            at: now,
            stopped_until: None,
        }
    }

    fn refill(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.limit.per_second();
        self.tokens = (self.tokens + gained).min(f64::from(self.limit.burst));
        self.at = self.at.max(now);
    }

    /// Returns the time until a call with `ahead` others before it may be sent; zero when it may be sent now.
    pub fn wait(&mut self, ahead: u32, now: Instant) -> Duration {
        self.refill(now);
        let stop = self.stopped(now).unwrap_or_default();
        let needed = f64::from(ahead) + 1.0;
        if self.tokens >= needed {
            return stop;
        }
        // A microsecond more, so that rounding never wakes a caller just too early.
        let missing = Duration::from_secs_f64((needed - self.tokens) / self.limit.per_second());
        stop + missing + Duration::from_micros(1)
    }

    /// Takes one call; only after [`Bucket::wait`] returned zero.
    pub fn take(&mut self) {
        self.tokens -= 1.0;
    }

    /// Returns the time for which the bucket is still stopped.
    pub fn stopped(&self, now: Instant) -> Option<Duration> {
        self.stopped_until
            .map(|until| until.saturating_duration_since(now))
            .filter(|left| !left.is_zero())
    }

    /// Azure reports how much is left. Others spend from the same bucket, so the lower figure counts.
    pub fn correct(&mut self, remaining: u32, now: Instant) {
        self.refill(now);
        self.tokens = self.tokens.min(f64::from(remaining));
    }

    /// Stops the bucket after a 429. Then one call may go, and more as the bucket refills: the answer to the first shows
    /// whether Azure accepts calls again.
    pub fn stop(&mut self, until: Instant) {
        self.stopped_until = Some(self.stopped_until.map_or(until, |current| current.max(until)));
        self.tokens = self.tokens.min(1.0);
        self.at = self.at.max(until);
    }

    /// The part of the bucket that is used up: 0 for a full one, 1 for an empty one.
    pub fn spent(&self) -> f64 {
        1.0 - self.tokens / f64::from(self.limit.burst)
    }

    pub fn tokens(&self) -> f64 {
        self.tokens
    }

    /// As good as new: may be forgotten.
    pub fn is_idle(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.stopped(now).is_none() && self.tokens >= f64::from(self.limit.burst)
    }
}
