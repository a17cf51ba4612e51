//! Look-ups that many machines share: asked once, kept for a short time, never asked twice at the same time.

use std::any::Any;
use std::fmt::{Debug, Write};
use std::sync::Arc;
use std::time::Duration;

use capstan_core::clock::Clock;
use capstan_core::memo::Memo;
use capstan_core::memory::{Holder, Memory};

use crate::error::{Error, Result};

/// Administrators change the inventory (folders, pools, networks, templates) by hand: a minute late is soon enough.
const KEEP: Duration = Duration::from_secs(60);
/// A missing object may be created at any moment; a burst of machines asks for it once all the same.
const KEEP_MISSING: Duration = Duration::from_secs(3);
/// More names than a vCenter has that machines use. The oldest are asked for again.
const CAPACITY: usize = 10_000;
/// Templates are kept with all their devices, and machines of one vCenter use a few.
const TEMPLATES: usize = 32;
/// The keys of templates start with this.
const TEMPLATE: &str = "template:";

/// A value, and the memory that it takes.
#[derive(Clone)]
struct Found {
    value: Arc<dyn Any + Send + Sync>,
    _holder: Arc<Holder>,
}

/// Takes memory for values.
pub(crate) struct Holders {
    pub memory: Arc<Memory>,
    pub tenant: Arc<str>,
}

impl Holders {
    fn keep<T: Debug + Send + Sync + 'static>(&self, key: &str, value: T) -> Result<Found> {
        let holder = self.memory.holder(&self.tenant);
        let mut text = Length(0);
        // It writes into a number.
        let _ = write!(text, "{value:?}");
        holder.set(size_of::<T>() + key.len() + text.0)?;
        Ok(Found {
            value: Arc::new(value),
            _holder: Arc::new(holder),
        })
    }
}

/// Counts the bytes of a text: about what the texts of a value take in memory.
struct Length(usize);

impl Write for Length {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}

pub(crate) struct Cache {
    holders: Holders,
    found: Memo<String, Result<Found>>,
    templates: Memo<String, Result<Found>>,
}

impl Cache {
    pub fn new(clock: Clock, holders: Holders) -> Self {
        Self {
            holders,
            found: Memo::new(clock, CAPACITY),
            templates: Memo::new(clock, TEMPLATES),
        }
    }

    /// Returns the value for a key, from `look_up` when there is none that is fresh. That an object is missing, or that a
    /// name is ambiguous, is a value too.
    pub async fn get<T: Debug + Send + Sync + 'static>(
        &self,
        key: String,
        look_up: impl Future<Output = Result<T>>,
    ) -> Result<Arc<T>> {
        let fresh = |age: Duration, kept: &Result<Found>| age < if kept.is_ok() { KEEP } else { KEEP_MISSING };
        // Look-ups nest: on the heap they do not add up on the stack.
        let look_up = Box::pin(look_up);
        let ask = async {
            match look_up.await {
                Ok(found) => Ok(Ok(self.holders.keep(&key, found)?)),
                Err(error @ (Error::NotFound { .. } | Error::Ambiguous { .. })) => Ok(Err(error)),
                Err(error) => Err(error),
            }
        };
        let memo = match key.starts_with(TEMPLATE) {
            true => &self.templates,
            false => &self.found,
        };
        let found = memo.get_if(&key, fresh, ask).await??;
        // Keys start with the kind of object, so values of one key are of one type.
        found.value.downcast::<T>().map_err(|_| Error::Incomplete {
            method: key,
            what: "value of the kind that was asked for",
        })
    }

    /// Drops everything: vCenter has said that an object that we remembered is gone.
    pub fn forget(&self) {
        self.found.clear();
        self.templates.clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_missing_object_is_remembered_for_a_moment_only_and_an_outage_not_at_all() {
        let clock = Clock::system();
        let holders = Holders {
            memory: Arc::default(),
            tenant: "ns".into(),
        };
        let cache = Cache::new(clock, holders);
        let missing = || async {
            Err::<u8, _>(Error::NotFound {
                kind: "folder",
                path: "x".into(),
            })
        };
        assert!(cache.get("a".into(), missing()).await.is_err());
        assert!(cache.get("a".into(), async { Ok(1u8) }).await.is_err());
        clock.sleep(KEEP_MISSING).await;
        assert_eq!(*cache.get("a".into(), async { Ok(1u8) }).await.unwrap(), 1);
        let cut = async { Err::<u8, _>(Error::Xml("cut".into())) };
        assert!(cache.get("b".into(), cut).await.is_err());
        assert_eq!(*cache.get("b".into(), async { Ok(2u8) }).await.unwrap(), 2);
    }
}
