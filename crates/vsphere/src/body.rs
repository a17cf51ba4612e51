//! Reads the bodies of answers.
//!
//! Invariant: no server makes the client keep more than a fixed number of bytes of one answer.

use reqwest::Response;

/// Bytes of a SOAP answer at most. The largest answers of a vCenter, thousands of machines at once, have some MiB.
pub(crate) const MAX_SOAP: usize = 32 << 20;
/// Bytes of a REST answer at most: lists of tags and modules, with less than 100 bytes each.
pub(crate) const MAX_REST: usize = 4 << 20;

pub(crate) enum Body {
    Text(String),
    /// The answer is longer than the limit; the rest of it was not read.
    TooLarge,
}

/// Reads an answer to its end, or to the limit. Bytes that are not UTF-8 are replaced.
pub(crate) async fn read(mut answer: Response, limit: usize) -> reqwest::Result<Body> {
    let announced = answer.content_length().unwrap_or_default();
    if announced > limit as u64 {
        return Ok(Body::TooLarge);
    }
    let mut bytes = Vec::with_capacity(announced as usize);
    while let Some(chunk) = answer.chunk().await? {
        if bytes.len() + chunk.len() > limit {
            return Ok(Body::TooLarge);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Body::Text(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }))
}
