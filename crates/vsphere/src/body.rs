//! Reads the bodies of answers.
//!
//! Invariant: no server makes the client keep more than a fixed number of bytes of one answer. Large answers take turns with
//! those of all other servers, workload clusters included, and keep their turn until they are dropped.

use std::time::{Duration, Instant};

use capstan_core::clock::Clock;
use capstan_core::turns::{self, Turn};
use reqwest::Response;

use crate::session::Login;

/// Bytes of an answer to the first requests at most: a vCenter describes itself in some KiB.
pub(crate) const MAX_HELLO: usize = SMALL;
/// Bytes of a SOAP answer at most. The largest answers of a vCenter, thousands of machines at once, have some MiB.
pub(crate) const MAX_SOAP: usize = 8 << 20;
/// Bytes of a REST answer at most: lists of tags and modules, with less than 100 bytes each.
pub(crate) const MAX_REST: usize = 4 << 20;
/// An answer with more bytes is large. Any number of small ones is read at a time.
const SMALL: usize = 256 << 10;
/// The rest of a large answer must come within this time, because other large answers wait for it. It is enough at
/// 1 MiB a second.
const LARGE_TIME: Duration = Duration::from_secs(10);

/// An answer whose head has come.
pub(crate) struct Answer {
    pub response: Response,
    /// When the answer has to be there; the time that it waits for its turn does not count.
    pub deadline: Option<Instant>,
}

/// The text of an answer. A large one keeps its turn until it is dropped.
pub(crate) struct Text {
    text: String,
    _turn: Option<Turn>,
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
    /// The server has wasted its turns, and gets none for now.
    Barred,
}

/// Reads an answer to its end, or to the limit. Bytes that are not UTF-8 are replaced.
pub(crate) async fn read(clock: Clock, login: &Login, answer: Answer, limit: usize) -> reqwest::Result<Body> {
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
                    waste(turn, clock);
                    return Ok(Body::TooSlow);
                }
            },
        };
        let Some(chunk) = chunk else { break };
        if bytes.len() + chunk.len() > limit {
            waste(turn, clock);
            return Ok(Body::TooLarge);
        }
        if bytes.len() + chunk.len() > SMALL && turn.is_none() {
            turn = turns::of_answers().take(clock, login.tenant(), &login.server).await;
            if turn.is_none() {
                return Ok(Body::Barred);
            }
            end = Some(clock.instant() + LARGE_TIME);
            // All of it at once: a buffer that grows is there twice while it is copied. Memory that is not written costs nothing.
            bytes.reserve_exact(limit - bytes.len());
        }
        bytes.extend_from_slice(&chunk);
    }
    if let Some(turn) = &turn {
        turn.used();
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
    Ok(Body::Text(Text { text, _turn: turn }))
}

fn waste(turn: Option<Turn>, clock: Clock) {
    if let Some(turn) = turn {
        turn.waste(clock.instant());
    }
}
