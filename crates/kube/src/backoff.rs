//! Per-object back-off. Invariants: an object whose last reconcile was throttled is not reconciled before the time in the
//! answer, whatever triggers it; the waits after temporary failures grow; after a permanent failure the object is
//! reconciled only after a change.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::time::{Duration, Instant};

use capstan_core::Class;
use capstan_core::backoff::{exponential, jittered};
use parking_lot::Mutex;

/// The first retry comes soon: most transient faults are conflicts and passing network errors.
const FIRST: Duration = Duration::from_millis(250);
/// Nothing transient is left alone for longer than this.
const LONGEST: Duration = Duration::from_secs(60);

/// How long to wait after the `failures`-th failure in a row (1 is the first); `None`: until something changes.
/// `jitter` in 0..1 spreads equal waits over the upper half of the time.
pub fn delay(class: Class, failures: u32, jitter: f64) -> Option<Duration> {
    match class {
        Class::Terminal => None,
        Class::Throttled(after) => Some(after.max(FIRST) + FIRST.mul_f64(jitter.clamp(0.0, 1.0))),
        Class::Transient => Some(jittered(exponential(FIRST, LONGEST, failures), jitter)),
    }
}

struct Entry {
    failures: u32,
    until: Option<Instant>,
    strict: bool,
    fingerprint: u64,
}

/// The failures in a row of each object.
pub struct Backoff<K> {
    entries: Mutex<HashMap<K, Entry>>,
}

impl<K> Default for Backoff<K> {
    fn default() -> Self {
        Self {
            entries: Mutex::default(),
        }
    }
}

impl<K: Hash + Eq + Clone> Backoff<K> {
    /// Notes a failure. Returns when to try again. `fingerprint` distinguishes versions of the object that its
    /// user wrote: a new one breaks the back-off.
    pub fn failed(&self, key: &K, class: Class, fingerprint: u64, now: Instant) -> Option<Duration> {
        let mut entries = self.entries.lock();
        let entry = entries.entry(key.clone()).or_insert(Entry {
            failures: 0,
            until: None,
            strict: false,
            fingerprint,
        });
        entry.failures = if entry.fingerprint == fingerprint {
            entry.failures.saturating_add(1)
        } else {
            1
        };
        entry.fingerprint = fingerprint;
        entry.strict = matches!(class, Class::Throttled(_));
        let wait = delay(class, entry.failures, self.jitter(key, entry.failures));
        entry.until = wait.map(|wait| now + wait);
        wait
    }

    /// How long this object has still to wait.
    pub fn remaining(&self, key: &K, fingerprint: u64, now: Instant) -> Option<Duration> {
        let entries = self.entries.lock();
        let entry = entries
            .get(key)
            .filter(|entry| entry.strict || entry.fingerprint == fingerprint)?;
        entry.until?.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    /// Something that may end the object's failure has changed: do not wait, unless the answer named a time.
    pub fn nudge(&self, key: &K) {
        if let Some(entry) = self.entries.lock().get_mut(key).filter(|entry| !entry.strict) {
            entry.until = None;
        }
    }

    /// The last reconcile succeeded, or the object does not exist any more.
    pub fn forget(&self, key: &K) {
        self.entries.lock().remove(key);
    }

    /// Spreads objects by their names; the same in every process, so that a test can be replayed.
    fn jitter(&self, key: &K, failures: u32) -> f64 {
        let noise = BuildHasherDefault::<DefaultHasher>::default();
        (noise.hash_one((key, failures)) % 1000) as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(Class::Transient, 1, 1.0, Some(250))]
    #[case(Class::Transient, 1, 0.0, Some(125))]
    #[case(Class::Transient, 4, 1.0, Some(2_000))]
    #[case(Class::Transient, 400, 1.0, Some(60_000))]
    #[case(Class::Throttled(Duration::from_secs(30)), 9, 0.0, Some(30_000))]
    #[case(Class::Terminal, 1, 0.5, None)]
    fn the_class_decides_how_long_to_wait(
        #[case] class: Class,
        #[case] failures: u32,
        #[case] jitter: f64,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(delay(class, failures, jitter), expected.map(Duration::from_millis));
    }

    #[test]
    fn a_throttled_object_waits_even_when_it_changes_or_is_nudged() {
        let (backoff, now) = (Backoff::default(), Instant::now());
        backoff.failed(&"a", Class::Throttled(Duration::from_secs(30)), 1, now);
        backoff.nudge(&"a");
        assert!(backoff.remaining(&"a", 2, now + Duration::from_secs(29)).is_some());
        assert!(backoff.remaining(&"a", 1, now + Duration::from_secs(31)).is_none());
    }

    #[test]
    fn a_change_or_a_nudge_breaks_a_transient_wait() {
        let (backoff, now) = (Backoff::default(), Instant::now());
        backoff.failed(&"a", Class::Transient, 1, now);
        assert!(backoff.remaining(&"a", 1, now).is_some());
        assert!(backoff.remaining(&"a", 2, now).is_none());
        backoff.nudge(&"a");
        assert!(backoff.remaining(&"a", 1, now).is_none());
    }

    #[test]
    fn success_starts_the_count_anew() {
        let (backoff, now) = (Backoff::default(), Instant::now());
        let first = (0..5)
            .map(|_| backoff.failed(&"a", Class::Transient, 1, now))
            .collect::<Vec<_>>();
        assert!(first[4] > first[0].map(|d| d * 3));
        backoff.forget(&"a");
        assert!(backoff.failed(&"a", Class::Transient, 1, now) <= Some(FIRST));
    }
}
