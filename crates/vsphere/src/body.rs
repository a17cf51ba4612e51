//! Reads the bodies of answers.
//!
//! Invariant: no server makes the client keep more than a fixed number of bytes of one answer, and all servers together
//! make it keep one large answer at a time.

use std::time::{Duration, Instant};

use capstan_core::clock::Clock;
use reqwest::Response;
use tokio::sync::{Semaphore, SemaphorePermit};

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

/// The turn of the one large answer that is being read or parsed.
static TURN: Semaphore = Semaphore::const_new(1);

/// The text of an answer. A large one keeps its turn until it is dropped.
pub(crate) struct Text {
    text: String,
    _turn: Option<SemaphorePermit<'static>>,
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
    /// The answer is large and did not end in time.
    TooSlow,
}

/// Reads an answer to its end, or to the limit. Bytes that are not UTF-8 are replaced.
pub(crate) async fn read(clock: Clock, mut answer: Response, limit: usize) -> reqwest::Result<Body> {
    let announced = answer.content_length().unwrap_or_default();
    if announced > limit as u64 {
        return Ok(Body::TooLarge);
    }
    let mut bytes = Vec::with_capacity((announced as usize).min(SMALL));
    let mut turn = None;
    let mut end: Option<Instant> = None;
    loop {
        let chunk = match end {
            None => answer.chunk().await?,
            Some(end) => match tokio::time::timeout_at(end.into(), answer.chunk()).await {
                Ok(chunk) => chunk?,
                Err(_) => return Ok(Body::TooSlow),
            },
        };
        let Some(chunk) = chunk else { break };
        if bytes.len() + chunk.len() > limit {
            return Ok(Body::TooLarge);
        }
        if bytes.len() + chunk.len() > SMALL && turn.is_none() {
            // Nobody closes the semaphore.
            turn = TURN.acquire().await.ok();
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
