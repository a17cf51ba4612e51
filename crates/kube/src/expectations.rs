//! What a controller's own writes must have changed in its cache before it plans again.
//!
//! Invariant: between a write and the moment the cache has shown it, [`Expectations::pending`] is true for its owner, so
//! a plan never counts a machine twice or misses one it made. Only our own writes are expected; the world may do as it
//! likes.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The version of an object. Servers hand out growing numbers per resource; what is not a number is only ever equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(String);

impl Version {
    pub fn new(version: impl Into<String>) -> Self {
        Self(version.into())
    }

    /// Whether an object at `self` already shows a write that produced `other`.
    pub fn shows(&self, other: &Version) -> bool {
        match (self.0.parse::<u64>(), other.0.parse::<u64>()) {
            (Ok(mine), Ok(theirs)) => mine >= theirs,
            _ => self.0 == other.0,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Expected {
    /// The object exists in at least this version (or has come and gone: a later deletion is seen as `Gone` elsewhere).
    Version(Version),
    /// The object is being deleted or gone.
    Deleting,
}

/// What the cache says of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub version: Version,
    pub deleting: bool,
}

/// By the UID of the object written: what is expected, and since when.
type Writes = HashMap<String, (Expected, Instant)>;

/// The writes of each owner `O` that its cache has not shown yet, by the UID of the object written.
pub struct Expectations<O> {
    owners: Mutex<HashMap<O, Writes>>,
}

impl<O> Default for Expectations<O> {
    fn default() -> Self {
        Self {
            owners: Mutex::default(),
        }
    }
}

impl<O: Hash + Eq + Clone> Expectations<O> {
    /// We created or changed an object; the API server called the result `version`.
    pub fn wrote(&self, owner: &O, uid: impl Into<String>, version: impl Into<String>) {
        let expected = Expected::Version(Version::new(version));
        self.lock()
            .entry(owner.clone())
            .or_default()
            .insert(uid.into(), (expected, Instant::now()));
    }

    /// We asked for an object's deletion.
    pub fn deleted(&self, owner: &O, uid: impl Into<String>) {
        self.lock()
            .entry(owner.clone())
            .or_default()
            .insert(uid.into(), (Expected::Deleting, Instant::now()));
    }

    /// Note that the cache has dropped this object: whatever was expected of it has come to pass. Feed every deletion
    /// that the cache reports, or a created object that is deleted at once by somebody else is waited for in vain.
    pub fn gone(&self, uid: &str) {
        let mut owners = self.lock();
        owners.values_mut().for_each(|expected| drop(expected.remove(uid)));
        owners.retain(|_, expected| !expected.is_empty());
    }

    /// Whether the cache still lags behind the owner's writes. `look` is asked what it shows for a UID.
    pub fn pending(&self, owner: &O, look: impl Fn(&str) -> Option<Shown>) -> bool {
        let mut owners = self.lock();
        let Some(expected) = owners.get_mut(owner) else {
            return false;
        };
        expected.retain(|uid, (expected, _)| match (expected, look(uid)) {
            (Expected::Version(wanted), Some(shown)) => !shown.version.shows(wanted),
            (Expected::Version(_), None) => true,
            (Expected::Deleting, Some(shown)) => !shown.deleting,
            (Expected::Deleting, None) => false,
        });
        let pending = !expected.is_empty();
        if !pending {
            owners.remove(owner);
        }
        pending
    }

    /// Whether a write has been waited for longer than `limit`: what was made and deleted while a watch was interrupted
    /// is never shown, so that the owner has to read live.
    pub fn overdue(&self, owner: &O, limit: Duration) -> bool {
        self.lock()
            .get(owner)
            .is_some_and(|expected| expected.values().any(|(_, since)| since.elapsed() >= limit))
    }

    /// The owner is gone, or was read live.
    pub fn forget(&self, owner: &O) {
        self.lock().remove(owner);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<O, Writes>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(version: &str, deleting: bool) -> Option<Shown> {
        Some(Shown {
            version: Version::new(version),
            deleting,
        })
    }

    #[test]
    fn a_create_is_pending_until_the_cache_shows_that_version_or_a_later_one() {
        let expectations = Expectations::default();
        expectations.wrote(&"set", "u1", "10");
        assert!(expectations.pending(&"set", |_| None));
        assert!(expectations.pending(&"set", |_| shown("9", false)));
        assert!(!expectations.pending(&"set", |_| shown("11", false)));
        assert!(
            !expectations.pending(&"set", |_| None),
            "once shown it is not expected again"
        );
    }

    #[test]
    fn a_delete_is_pending_until_the_object_is_marked_or_gone() {
        let expectations = Expectations::default();
        expectations.deleted(&"set", "u1");
        assert!(expectations.pending(&"set", |_| shown("12", false)));
        assert!(!expectations.pending(&"set", |_| shown("13", true)));
        expectations.deleted(&"set", "u2");
        assert!(!expectations.pending(&"set", |_| None));
    }

    #[test]
    fn an_object_that_somebody_deleted_is_not_waited_for() {
        let expectations = Expectations::default();
        expectations.wrote(&"set", "u1", "10");
        expectations.gone("u1");
        assert!(!expectations.pending(&"set", |_| None));
    }

    #[test]
    fn a_write_that_is_never_shown_is_overdue_at_last() {
        let expectations = Expectations::default();
        expectations.wrote(&"set", "u1", "10");
        assert!(!expectations.overdue(&"set", Duration::from_secs(60)));
        assert!(expectations.overdue(&"set", Duration::ZERO));
        expectations.forget(&"set");
        assert!(!expectations.overdue(&"set", Duration::ZERO));
    }

    #[test]
    fn versions_that_are_not_numbers_are_compared_as_they_are() {
        assert!(Version::new("a").shows(&Version::new("a")));
        assert!(!Version::new("b").shows(&Version::new("a")));
        assert!(Version::new("100").shows(&Version::new("99")));
    }
}
