//! Read your writes. Invariant: between a write of ours and the moment a cache shows it, [`Writes::pending`] is true, so
//! a plan never counts a machine twice and never misses one that it made. Only our own writes are waited for, and none for
//! longer than [`FORGOTTEN`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kube::{Resource, ResourceExt};

use crate::cache::{Cache, Object};

/// A cache shows a write within milliseconds. After this long its watch may be dead without an error: read live.
pub const READ_YOUR_WRITES: Duration = Duration::from_secs(30);

/// An API server ends each watch after five minutes, and the next one shows everything. A write that is not shown by now never
/// will be, because its object was gone before a list.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// The resourceVersion of an object. API servers hand out growing numbers; anything else is only ever equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(String);

impl Version {
    pub fn new(version: impl Into<String>) -> Self {
        Self(version.into())
    }

    pub fn of<K: Resource>(object: &K) -> Self {
        Self(object.meta().resource_version.clone().unwrap_or_default())
    }

    /// Whether an object at `self` contains a write that produced `other`.
    pub fn shows(&self, other: &Version) -> bool {
        match (self.0.parse::<u64>(), other.0.parse::<u64>()) {
            (Ok(mine), Ok(theirs)) => mine >= theirs,
            _ => self.0 == other.0,
        }
    }
}

/// Whether a cache shows a write by now.
type Shown = Box<dyn Fn() -> bool + Send + Sync>;

/// Our writes that the caches do not show yet, by the UID of the object and whether it was deleted: the last one of each, and when
/// it was first waited for.
#[derive(Default)]
pub struct Writes(HashMap<(Option<String>, bool), (Instant, Shown)>);

impl Writes {
    /// The API server answered a create or a patch with `object`.
    pub fn wrote<K: Object>(&mut self, cache: &Cache<K>, object: &K, now: Instant) {
        let (cache, uid, version) = (cache.clone(), object.meta().uid.clone(), Version::of(object));
        let (namespace, name) = (object.namespace(), object.name_any());
        let shown = move || match cache.get(namespace.as_deref(), &name) {
            Some(cached) if cached.meta().uid == uid => Version::of(cached.as_ref()).shows(&version),
            // Another object has its name by now.
            Some(_) => true,
            // It may have been shown and removed again.
            None => uid.as_deref().is_some_and(|uid| cache.has_removed(uid)),
        };
        self.wait_for((object.uid(), false), now, Box::new(shown));
    }

    /// The API server took a delete of `object`.
    pub fn deleted<K: Object>(&mut self, cache: &Cache<K>, object: &K, now: Instant) {
        let (cache, uid) = (cache.clone(), object.meta().uid.clone());
        let (namespace, name) = (object.namespace(), object.name_any());
        let shown = move || {
            let cached = cache.get(namespace.as_deref(), &name);
            cached.is_none_or(|cached| cached.meta().uid != uid || cached.meta().deletion_timestamp.is_some())
        };
        self.wait_for((object.uid(), true), now, Box::new(shown));
    }

    fn wait_for(&mut self, write: (Option<String>, bool), now: Instant, shown: Shown) {
        let since = self.0.get(&write).map_or(now, |(since, _)| *since);
        self.0.insert(write, (since, shown));
    }

    /// Whether a cache still lags behind. Forgets what has been shown.
    pub fn pending(&mut self, now: Instant) -> bool {
        self.0
            .retain(|_, (written, shown)| !shown() && now.saturating_duration_since(*written) < FORGOTTEN);
        !self.0.is_empty()
    }

    /// How long the oldest write has been waited for.
    pub fn age(&self, now: Instant) -> Duration {
        let oldest = self.0.values().map(|(written, _)| *written).min();
        oldest.map_or(Duration::ZERO, |oldest| now.saturating_duration_since(oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_are_not_numbers_are_only_ever_equal() {
        assert!(Version::new("100").shows(&Version::new("99")));
        assert!(!Version::new("99").shows(&Version::new("100")));
        assert!(Version::new("a").shows(&Version::new("a")));
        assert!(!Version::new("b").shows(&Version::new("a")));
    }

    #[test]
    fn a_write_is_pending_until_it_is_shown_and_its_age_counts_from_the_oldest() {
        let (mut writes, now) = (Writes::default(), Instant::now());
        assert!(!writes.pending(now));
        let later = now + Duration::from_secs(1);
        writes.wait_for((Some("a".to_owned()), false), now, Box::new(|| true));
        // A later write of the same object is waited for in the place of the first.
        writes.wait_for((Some("a".to_owned()), false), later, Box::new(|| false));
        writes.wait_for((Some("b".to_owned()), false), later, Box::new(|| true));
        assert!(writes.pending(now));
        assert_eq!(writes.0.len(), 1, "the write that was shown is forgotten");
        assert_eq!(writes.age(now + Duration::from_secs(5)), Duration::from_secs(5));
        assert!(
            !writes.pending(now + FORGOTTEN),
            "a write that no cache will show is forgotten"
        );
    }
}
