//! Reads the bodies of answers.
//!
//! Invariant: no server makes the client keep more than a fixed number of bytes of one answer, and all servers together
//! make it keep one large answer at a time. A server that stalls costs the others one turn, and then none for minutes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_core::clock::Clock;
use parking_lot::Mutex;
use reqwest::Response;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Bytes of an answer to the first requests at most: a vCenter describes itself in some KiB.
pub(crate) const MAX_HELLO: usize = SMALL;
/// Bytes of a SOAP answer at most. The largest answers of a vCenter, thousands of machines at once, have some MiB.
pub(crate) const MAX_SOAP: usize = 16 << 20;
/// Bytes of a REST answer at most: lists of tags and modules, with less than 100 bytes each.
pub(crate) const MAX_REST: usize = 4 << 20;
/// An answer with more bytes is large. Each session may read a small one at any time.
const SMALL: usize = 1 << 20;
/// The rest of a large answer must come within this time, because other large answers wait for it. It is enough at
/// 1 MiB a second.
const LARGE_TIME: Duration = Duration::from_secs(20);
/// A server whose large answer did not come in time has no turn for this long: else a few such servers would take all of them.
const BARRED: Duration = Duration::from_secs(5 * 60);

static TURNS: Turns = Turns::new();

/// The turns of large answers: one at a time, and of each server one that waits, so that every server has its turn after one turn
/// of each other.
struct Turns {
    turn: Semaphore,
    servers: Mutex<Option<HashMap<String, Server>>>,
}

#[derive(Default)]
struct Server {
    /// Whether an answer of the server has the turn, or waits for it.
    queue: Option<Arc<Semaphore>>,
    barred_until: Option<Instant>,
}

/// The turn of the one large answer that is being read or parsed.
struct Turn<'a> {
    _turn: SemaphorePermit<'a>,
    _queue: OwnedSemaphorePermit,
}

impl Turns {
    const fn new() -> Self {
        Self {
            turn: Semaphore::const_new(1),
            servers: Mutex::new(None),
        }
    }

    /// Waits for a turn. Returns `None` for a server that has none for now.
    async fn take(&self, clock: Clock, server: &str) -> Option<Turn<'_>> {
        // Nobody closes a semaphore.
        let queue = self.queue(clock.instant(), server)?.acquire_owned().await.ok()?;
        // An answer before this one may have lost its turn.
        self.queue(clock.instant(), server)?;
        let turn = self.turn.acquire().await.ok()?;
        Some(Turn {
            _turn: turn,
            _queue: queue,
        })
    }

    fn queue(&self, now: Instant, server: &str) -> Option<Arc<Semaphore>> {
        let mut servers = self.servers.lock();
        let servers = servers.get_or_insert_default();
        servers.retain(|_, known| {
            known.barred_until = known.barred_until.filter(|until| *until > now);
            let is_used = known.queue.as_ref().is_some_and(|queue| Arc::strong_count(queue) > 1);
            is_used || known.barred_until.is_some()
        });
        let known = servers.entry(server.to_ascii_lowercase()).or_default();
        if known.barred_until.is_some() {
            return None;
        }
        let new = || Arc::new(Semaphore::new(1));
        Some(known.queue.get_or_insert_with(new).clone())
    }

    /// Gives a server no turn for a while.
    fn bar(&self, now: Instant, server: &str) {
        let mut servers = self.servers.lock();
        let known = servers.get_or_insert_default().entry(server.to_ascii_lowercase());
        known.or_default().barred_until = Some(now + BARRED);
    }
}

/// An answer whose head has come.
pub(crate) struct Answer {
    pub response: Response,
    /// When the answer has to be there; the time that it waits for its turn does not count.
    pub deadline: Option<Instant>,
}

/// The text of an answer. A large one keeps its turn until it is dropped.
pub(crate) struct Text {
    text: String,
    _turn: Option<Turn<'static>>,
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

pub(crate) enum Body {
    Text(Text),
    /// The answer is longer than the limit; the rest of it was not read.
    TooLarge,
    /// The answer did not end in time.
    TooSlow,
}

/// Reads an answer to its end, or to the limit. Bytes that are not UTF-8 are replaced.
pub(crate) async fn read(clock: Clock, server: &str, answer: Answer, limit: usize) -> reqwest::Result<Body> {
    let Answer { mut response, deadline } = answer;
    let announced = response.content_length().unwrap_or_default();
    if announced > limit as u64 {
        return Ok(Body::TooLarge);
    }
    let mut bytes = Vec::with_capacity((announced as usize).min(SMALL));
    let mut turn = None;
    let mut end = deadline;
    loop {
        let chunk = match end {
            None => response.chunk().await?,
            Some(end) => match tokio::time::timeout_at(end.into(), response.chunk()).await {
                Ok(chunk) => chunk?,
                Err(_) => {
                    if turn.is_some() {
                        TURNS.bar(clock.instant(), server);
                    }
                    return Ok(Body::TooSlow);
                }
            },
        };
        let Some(chunk) = chunk else { break };
        if bytes.len() + chunk.len() > limit {
            return Ok(Body::TooLarge);
        }
        if bytes.len() + chunk.len() > SMALL && turn.is_none() {
            turn = TURNS.take(clock, server).await;
            if turn.is_none() {
                return Ok(Body::TooSlow);
            }
            end = Some(clock.instant() + LARGE_TIME);
            // All of it at once: a buffer that grows is there twice while it is copied. Memory that is not written costs nothing.
            bytes.reserve_exact(limit - bytes.len());
        }
        bytes.extend_from_slice(&chunk);
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
    Ok(Body::Text(Text { text, _turn: turn }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds a turn for as long as a server that stalls can, for each answer that the server has sent.
    async fn stall(turns: Arc<Turns>, server: String) {
        let clock = Clock::system();
        while let Some(turn) = turns.take(clock, &server).await {
            tokio::time::sleep(LARGE_TIME).await;
            turns.bar(clock.instant(), &server);
            drop(turn);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_stall_cost_a_good_one_a_turn_each_and_then_nothing() {
        let (turns, clock) = (Arc::new(Turns::new()), Clock::system());
        for server in 0..5 {
            for _ in 0..10 {
                tokio::spawn(stall(turns.clone(), format!("stalling-{server}")));
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = clock.instant();
        drop(turns.take(clock, "good").await.expect("a turn"));
        assert!(
            clock.since(began) <= LARGE_TIME * 5,
            "one turn of each: {:?}",
            clock.since(began)
        );
        let began = clock.instant();
        for _ in 0..100 {
            drop(turns.take(clock, "good").await.expect("a turn"));
        }
        assert_eq!(clock.since(began), Duration::ZERO);
        assert!(turns.take(clock, "Stalling-0").await.is_none(), "it is barred");
        tokio::time::sleep(BARRED).await;
        assert!(turns.take(clock, "stalling-0").await.is_some(), "it may try again");
        let known = turns.servers.lock().as_ref().map(HashMap::len);
        assert_eq!(known, Some(1), "nothing is kept of servers that read nothing");
    }
}
