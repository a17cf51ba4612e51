//! Look-ups that many machines share: asked once, kept for a short time, never asked twice at the same time.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::session::lock;

/// Inventory (folders, pools, networks, templates) changes by an administrator's hand: a minute late is soon enough.
const KEEP: Duration = Duration::from_secs(60);
/// Something that is missing may be made any moment; a burst of machines asks for it once all the same.
const KEEP_MISSING: Duration = Duration::from_secs(3);

type Value = Result<Arc<dyn Any + Send + Sync>>;

#[derive(Default)]
pub(crate) struct Cache {
    entries: Mutex<HashMap<String, Arc<Entry>>>,
}

#[derive(Default)]
struct Entry {
    value: tokio::sync::Mutex<Option<(Value, Instant)>>,
}

impl Cache {
    /// The value for a key, asked for by `look_up` when there is none that is fresh.
    pub async fn get<T: Send + Sync + 'static>(
        &self,
        key: String,
        look_up: impl Future<Output = Result<T>>,
    ) -> Result<Arc<T>> {
        let entry = lock(&self.entries).entry(key).or_default().clone();
        let mut value = entry.value.lock().await;
        if let Some((kept, at)) = &*value {
            let keep = if kept.is_ok() { KEEP } else { KEEP_MISSING };
            if at.elapsed() < keep
                && let Some(found) = downcast(kept)
            {
                return found;
            }
        }
        let found = look_up.await.map(Arc::new);
        let kept: Value = match &found {
            Ok(found) => Ok(found.clone()),
            Err(error @ (Error::NotFound { .. } | Error::Ambiguous { .. })) => Err(error.clone()),
            Err(_) => {
                *value = None;
                return found;
            }
        };
        *value = Some((kept, Instant::now()));
        found
    }

    /// Drops everything: vCenter has said that something we remembered is gone.
    pub fn forget(&self) {
        lock(&self.entries).clear();
    }
}

fn downcast<T: Send + Sync + 'static>(kept: &Value) -> Option<Result<Arc<T>>> {
    match kept {
        Ok(any) => any.clone().downcast::<T>().ok().map(Ok),
        Err(error) => Some(Err(error.clone())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn fifty_that_ask_at_once_make_one_look_up_and_it_ages() {
        let cache = Cache::default();
        let asked = AtomicUsize::new(0);
        let look_up = || async {
            asked.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok::<_, Error>(7)
        };
        let all = futures::future::join_all((0..50).map(|_| cache.get("a".into(), look_up()))).await;
        assert!(all.into_iter().all(|found| *found.unwrap() == 7));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        tokio::time::sleep(KEEP).await;
        cache.get("a".into(), look_up()).await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_missing_is_remembered_for_a_moment_only_and_an_outage_not_at_all() {
        let cache = Cache::default();
        let missing = || async {
            Err::<u8, _>(Error::NotFound {
                kind: "folder",
                path: "x".into(),
            })
        };
        assert!(cache.get("a".into(), missing()).await.is_err());
        assert!(cache.get("a".into(), async { Ok(1u8) }).await.is_err());
        tokio::time::sleep(KEEP_MISSING).await;
        assert_eq!(*cache.get("a".into(), async { Ok(1u8) }).await.unwrap(), 1);
        assert!(
            cache
                .get("b".into(), async { Err::<u8, _>(Error::Xml("cut".into())) })
                .await
                .is_err()
        );
        assert_eq!(*cache.get("b".into(), async { Ok(2u8) }).await.unwrap(), 2);
    }
}
