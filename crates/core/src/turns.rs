//! Turns: what is large is in memory one at a time, whoever sends it.
//!
//! Invariant: one turn is taken at a time. Each tenant waits for one turn at a time, whatever number of peers it has, so that a
//! tenant has its turn after at most one turn of each other. A peer that wastes its turn gets no other one for a while, and for
//! twice as long the next time; the other peers of its tenant do.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backoff::exponential;
use crate::clock::Clock;

/// A peer that wasted its turn gets no other one for this long; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(30 * 60);

/// The turns of the large answers of all servers that somebody else runs: workload clusters and vCenters.
pub fn of_answers() -> &'static Arc<Turns> {
    static ANSWERS: LazyLock<Arc<Turns>> = LazyLock::new(Arc::default);
    &ANSWERS
}

pub struct Turns {
    turn: Arc<Semaphore>,
    known: Mutex<Known>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            known: Mutex::default(),
        }
    }
}

#[derive(Default)]
struct Known {
    /// By tenant: one waits for the turn, or has it; the others of the tenant wait for that one.
    queues: BTreeMap<String, Arc<Semaphore>>,
    /// By peer: how many turns in a row it wasted, and until when it gets no other one.
    wasted: BTreeMap<String, (u32, Instant)>,
}

impl Known {
    fn bars(&self, now: Instant, peer: &str) -> bool {
        let wasted = self.wasted.get(&peer.to_ascii_lowercase());
        wasted.is_some_and(|(_, until)| now < *until)
    }

    /// Drops what is not worth keeping.
    fn forget(&mut self, now: Instant) {
        self.queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        self.wasted.retain(|_, (_, until)| now < *until + LONGEST_PAUSE);
    }
}

impl Turns {
    /// Waits for a turn of this tenant's peer. Returns `None` for a peer that gets none for now.
    pub async fn take(self: &Arc<Self>, clock: Clock, tenant: &str, peer: &str) -> Option<Turn> {
        // Nobody closes a semaphore.
        let queue = self.queue(clock.instant(), tenant, peer)?.acquire_owned().await.ok()?;
        // The peer may have wasted the turn before this one.
        if self.bars(clock.instant(), peer) {
            return None;
        }
        let turn = self.turn.clone().acquire_owned().await.ok()?;
        Some(Turn {
            turns: self.clone(),
            peer: peer.to_ascii_lowercase(),
            _turn: turn,
            _queue: queue,
        })
    }

    /// Whether the peer gets no turn for now.
    pub fn bars(&self, now: Instant, peer: &str) -> bool {
        self.known.lock().bars(now, peer)
    }

    fn queue(&self, now: Instant, tenant: &str, peer: &str) -> Option<Arc<Semaphore>> {
        let mut known = self.known.lock();
        known.forget(now);
        if known.bars(now, peer) {
            return None;
        }
        let queue = known.queues.entry(tenant.to_ascii_lowercase());
        Some(queue.or_insert_with(|| Arc::new(Semaphore::new(1))).clone())
    }
}

/// The turn of one peer, until it is dropped.
pub struct Turn {
    turns: Arc<Turns>,
    peer: String,
    _turn: OwnedSemaphorePermit,
    _queue: OwnedSemaphorePermit,
}

impl Turn {
    /// The peer made good use of it: what it wasted before is forgiven.
    pub fn used(&self) {
        self.turns.known.lock().wasted.remove(&self.peer);
    }

    /// Ends the turn of a peer that let the others wait for nothing.
    pub fn waste(self, now: Instant) {
        let wasted = &mut self.turns.known.lock().wasted;
        let times = wasted.get(&self.peer).map_or(0, |(times, _)| *times).saturating_add(1);
        let until = now + exponential(FIRST_PAUSE, LONGEST_PAUSE, times);
        wasted.insert(self.peer.clone(), (times, until));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(20);

    /// Holds a turn for as long as a peer that stalls can, for each answer that it has sent.
    async fn stall(turns: Arc<Turns>, peer: String) {
        let clock = Clock::system();
        while let Some(turn) = turns.take(clock, &peer, &peer).await {
            tokio::time::sleep(STALL).await;
            turn.waste(clock.instant());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn peers_that_stall_cost_a_good_one_a_turn_each_and_then_nothing() {
        let (turns, clock) = (Arc::new(Turns::default()), Clock::system());
        for peer in 0..5 {
            for _ in 0..10 {
                tokio::spawn(stall(turns.clone(), format!("stalling-{peer}")));
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = clock.instant();
        drop(turns.take(clock, "good", "good").await.expect("a turn"));
        let waited = clock.since(began);
        assert!(waited <= STALL * 5, "one turn of each: {waited:?}");
        for _ in 0..100 {
            drop(turns.take(clock, "good", "good").await.expect("a turn"));
        }
        assert!(clock.since(began) == waited, "nobody else wants a turn");
        assert!(
            turns.take(clock, "Stalling-4", "Stalling-4").await.is_none(),
            "it is barred"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_wastes_its_turns_waits_twice_as_long_until_it_uses_one() {
        let (turns, clock) = (Arc::new(Turns::default()), Clock::system());
        for times in 0..3 {
            turns
                .take(clock, "a", "a")
                .await
                .expect("a turn")
                .waste(clock.instant());
            tokio::time::sleep(FIRST_PAUSE * (1 << times) - Duration::from_secs(1)).await;
            assert!(turns.take(clock, "a", "a").await.is_none() && turns.bars(clock.instant(), "A"));
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(!turns.bars(clock.instant(), "a"));
        }
        turns.take(clock, "a", "a").await.expect("a turn").used();
        turns
            .take(clock, "a", "a")
            .await
            .expect("a turn")
            .waste(clock.instant());
        tokio::time::sleep(FIRST_PAUSE).await;
        assert!(turns.take(clock, "a", "a").await.is_some(), "the count began again");
        tokio::time::sleep(LONGEST_PAUSE).await;
        drop(turns.take(clock, "b", "b").await);
        let known = turns.known.lock();
        assert!(known.wasted.is_empty(), "nothing is kept of peers that send nothing");
        assert!(known.queues.keys().eq(["b"]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_many_peers_costs_the_others_one_turn_at_a_time() {
        let (turns, clock) = (Arc::new(Turns::default()), Clock::system());
        for peer in 0..50 {
            let turns = turns.clone();
            tokio::spawn(async move {
                let turn = turns.take(clock, "stalling", &peer.to_string()).await.expect("a turn");
                tokio::time::sleep(STALL).await;
                turn.waste(clock.instant());
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = clock.instant();
        for times in 1..4 {
            drop(turns.take(clock, "good", "good").await.expect("a turn"));
            assert!(clock.since(began) <= STALL * times, "one turn of the other before each");
        }
        assert!(turns.bars(clock.instant(), "0") && !turns.bars(clock.instant(), "49"));
    }
}
