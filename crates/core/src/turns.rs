//! Turns: what is large is in memory one at a time, whoever sends it.
//!
//! Invariant: one turn is taken at a time. Each peer waits for one turn at a time, so that a peer has its turn after at most one
//! turn of each other. A peer that wastes its turn gets no other one for a while, and for twice as long the next time.

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
    peers: Mutex<BTreeMap<String, Peer>>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            peers: Mutex::default(),
        }
    }
}

struct Peer {
    /// One waits for the turn, or has it; the others of the peer wait for that one.
    queue: Arc<Semaphore>,
    /// How many turns in a row it wasted, and until when it gets no other one.
    wasted: Option<(u32, Instant)>,
}

impl Peer {
    fn is_barred(&self, now: Instant) -> bool {
        self.wasted.is_some_and(|(_, until)| now < until)
    }

    /// Whether nothing about the peer is worth keeping.
    fn is_idle(&self, now: Instant) -> bool {
        let is_forgiven = |(_, until)| now >= until + LONGEST_PAUSE;
        Arc::strong_count(&self.queue) == 1 && self.wasted.is_none_or(is_forgiven)
    }
}

impl Turns {
    /// Waits for a turn. Returns `None` for a peer that gets none for now.
    pub async fn take(self: &Arc<Self>, clock: Clock, peer: &str) -> Option<Turn> {
        // Nobody closes a semaphore.
        let queue = self.queue(clock.instant(), peer)?.acquire_owned().await.ok()?;
        // The peer may have wasted the turn before this one.
        self.queue(clock.instant(), peer)?;
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
        let peers = self.peers.lock();
        peers
            .get(&peer.to_ascii_lowercase())
            .is_some_and(|peer| peer.is_barred(now))
    }

    fn queue(&self, now: Instant, peer: &str) -> Option<Arc<Semaphore>> {
        let mut peers = self.peers.lock();
        peers.retain(|_, known| !known.is_idle(now));
        let known = peers.entry(peer.to_ascii_lowercase()).or_insert_with(|| Peer {
            queue: Arc::new(Semaphore::new(1)),
            wasted: None,
        });
        (!known.is_barred(now)).then(|| known.queue.clone())
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
        if let Some(peer) = self.turns.peers.lock().get_mut(&self.peer) {
            peer.wasted = None;
        }
    }

    /// Ends the turn of a peer that let the others wait for nothing.
    pub fn waste(self, now: Instant) {
        if let Some(peer) = self.turns.peers.lock().get_mut(&self.peer) {
            let times = peer.wasted.map_or(0, |(times, _)| times).saturating_add(1);
            peer.wasted = Some((times, now + exponential(FIRST_PAUSE, LONGEST_PAUSE, times)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(20);

    /// Holds a turn for as long as a peer that stalls can, for each answer that it has sent.
    async fn stall(turns: Arc<Turns>, peer: String) {
        let clock = Clock::system();
        while let Some(turn) = turns.take(clock, &peer).await {
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
        drop(turns.take(clock, "good").await.expect("a turn"));
        let waited = clock.since(began);
        assert!(waited <= STALL * 5, "one turn of each: {waited:?}");
        for _ in 0..100 {
            drop(turns.take(clock, "good").await.expect("a turn"));
        }
        assert!(clock.since(began) == waited, "nobody else wants a turn");
        assert!(turns.take(clock, "Stalling-4").await.is_none(), "it is barred");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_wastes_its_turns_waits_twice_as_long_until_it_uses_one() {
        let (turns, clock) = (Arc::new(Turns::default()), Clock::system());
        for times in 0..3 {
            turns.take(clock, "a").await.expect("a turn").waste(clock.instant());
            tokio::time::sleep(FIRST_PAUSE * (1 << times) - Duration::from_secs(1)).await;
            assert!(turns.take(clock, "a").await.is_none() && turns.bars(clock.instant(), "A"));
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(!turns.bars(clock.instant(), "a"));
        }
        turns.take(clock, "a").await.expect("a turn").used();
        turns.take(clock, "a").await.expect("a turn").waste(clock.instant());
        tokio::time::sleep(FIRST_PAUSE).await;
        assert!(turns.take(clock, "a").await.is_some(), "the count began again");
        tokio::time::sleep(LONGEST_PAUSE).await;
        drop(turns.take(clock, "b").await);
        let known: Vec<_> = turns.peers.lock().keys().cloned().collect();
        assert_eq!(known, ["b"], "nothing is kept of peers that send nothing");
    }
}
