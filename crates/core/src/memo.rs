//! Values that many callers share and that are costly to get.
//!
//! Invariant: for one key at most one caller asks at a time and the others wait for its answer; an error is handed to
//! the caller that asked and is not kept, unless the caller makes it part of the value; at most `capacity` keys are kept.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::clock::Clock;

type Slot<V> = Arc<tokio::sync::Mutex<Option<(Instant, V)>>>;

pub struct Memo<K, V> {
    clock: Clock,
    capacity: usize,
    slots: Mutex<HashMap<K, (Slot<V>, Instant)>>,
}

impl<K: Hash + Eq + Clone, V: Clone> Memo<K, V> {
    pub fn new(clock: Clock, capacity: usize) -> Self {
        Self {
            clock,
            capacity,
            slots: Mutex::default(),
        }
    }

    /// Returns the value for `key`, from `ask` when there is none younger than `max_age`.
    pub async fn get<E>(&self, key: &K, max_age: Duration, ask: impl Future<Output = Result<V, E>>) -> Result<V, E> {
        self.get_if(key, |age, _| age < max_age, ask).await
    }

    /// As [`Memo::get`]; `fresh` judges a kept value by its age.
    pub async fn get_if<E>(
        &self,
        key: &K,
        fresh: impl Fn(Duration, &V) -> bool,
        ask: impl Future<Output = Result<V, E>>,
    ) -> Result<V, E> {
        let slot = self.slot(key);
        let mut kept = slot.lock().await;
        if let Some((asked, value)) = &*kept
            && fresh(self.clock.since(*asked), value)
        {
            return Ok(value.clone());
        }
        // The age counts from the question: what the answer says may be as old as that.
        let asked = self.clock.instant();
        *kept = None;
        let value = ask.await?;
        *kept = Some((asked, value.clone()));
        Ok(value)
    }

    /// Whether a value is kept that `fresh` accepts. A key that is being asked about has none.
    pub fn has(&self, key: &K, fresh: impl Fn(Duration, &V) -> bool) -> bool {
        let slot = self.slots.lock().get(key).map(|(slot, _)| slot.clone());
        let Some(slot) = slot else { return false };
        let kept = slot.try_lock();
        kept.is_ok_and(|kept| {
            let accepts = |(asked, value): &(_, V)| fresh(self.clock.since(*asked), value);
            kept.as_ref().is_some_and(accepts)
        })
    }

    pub fn forget(&self, key: &K) {
        self.slots.lock().remove(key);
    }

    pub fn clear(&self) {
        self.slots.lock().clear();
    }

    fn slot(&self, key: &K) -> Slot<V> {
        let now = self.clock.instant();
        let mut slots = self.slots.lock();
        if !slots.contains_key(key) && slots.len() >= self.capacity {
            let oldest = slots
                .iter()
                .min_by_key(|(_, (_, used))| *used)
                .map(|(key, _)| key.clone());
            oldest.map(|key| slots.remove(&key));
        }
        let (slot, used) = slots.entry(key.clone()).or_insert_with(|| (Slot::default(), now));
        *used = now;
        slot.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU32, Ordering};

    const AGE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn callers_at_the_same_time_share_one_answer_until_it_is_old() {
        let clock = Clock::starting_at(jiff::Timestamp::UNIX_EPOCH);
        let (memo, asked) = (Memo::new(clock, 10), AtomicU32::new(0));
        let ask = || async {
            clock.sleep(Duration::from_secs(1)).await;
            Ok::<_, Infallible>(asked.fetch_add(1, Ordering::SeqCst))
        };
        let (a, b) = tokio::join!(memo.get(&"k", AGE, ask()), memo.get(&"k", AGE, ask()));
        assert_eq!((a, b), (Ok(0), Ok(0)));
        clock.sleep(AGE).await;
        assert_eq!(memo.get(&"k", AGE, ask()).await, Ok(1));
        memo.forget(&"k");
        assert_eq!(memo.get(&"k", AGE, ask()).await, Ok(2));
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_is_not_kept_and_the_key_least_recently_used_goes_first() {
        let clock = Clock::starting_at(jiff::Timestamp::UNIX_EPOCH);
        let memo = Memo::new(clock, 2);
        assert_eq!(memo.get(&1, AGE, async { Err("no") }).await, Err("no"));
        for key in [1, 2] {
            assert_eq!(memo.get(&key, AGE, async { Ok::<_, &str>(key) }).await, Ok(key));
            clock.sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(memo.get(&1, AGE, async { Err("asked") }).await, Ok(1));
        clock.sleep(Duration::from_secs(1)).await;
        assert_eq!(memo.get(&3, AGE, async { Ok::<_, &str>(3) }).await, Ok(3));
        assert_eq!(memo.get(&1, AGE, async { Err("asked") }).await, Ok(1));
        assert_eq!(memo.get(&2, AGE, async { Err("asked") }).await, Err("asked"));
    }
}
