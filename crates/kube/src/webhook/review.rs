//! Reviews as they arrive. Invariant: reviews cost bounded memory, whoever sends them: nobody proves to be the API server. One
//! large review is in memory at a time, what becomes of it is bounded by [`Limits`], and addresses take turns: one whose reviews
//! are slow costs the others one turn.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use capstan_core::Clock;
use capstan_core::turns::{Turn, Turns};
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::bounds::{Limits, Scan};
use crate::serve::Client;

/// An admission review: an object of at most 1.5 MiB, as it was and as it is to be. A machine has a few hundred objects in it.
const ADMISSION: Limits = Limits {
    bytes: 2 << 20,
    objects: 5_000,
    entries: 20_000,
    items: usize::MAX,
    depth: 0,
};
/// A review with more bytes is large: large ones take turns, because a few of them fill the memory.
pub(super) const SMALL: usize = 128 << 10;
/// A large review waits this long for its turn. The API server waits for 30 s in all.
const TURN_WAIT: Duration = Duration::from_secs(10);
/// The rest of a large review must come within this time, and its answer must be taken within it, because others wait.
pub(super) const TURN_TIME: Duration = Duration::from_secs(8);
/// The answer to a large review is sent in parts of this size.
const PART: usize = 64 << 10;

/// A review that is refused before it is read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    TooLarge,
    /// Another large review takes its turn.
    Busy,
    TooSlow,
    Unreadable,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "the review is too large"),
            Self::Busy => (StatusCode::TOO_MANY_REQUESTS, "other large reviews take their turns"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "the review does not end in time"),
            Self::Unreadable => (StatusCode::BAD_REQUEST, "the request is no review"),
        }
        .into_response()
    }
}

/// A review as it was sent, and its turn if it is large.
pub(super) struct Sent {
    pub text: Vec<u8>,
    turn: Option<Turn>,
}

impl Sent {
    pub async fn read(
        mut body: Body,
        limits: Limits,
        turns: &Arc<Turns>,
        client: Option<IpAddr>,
    ) -> Result<Self, Refusal> {
        let (mut text, mut scan) = (Vec::new(), Scan::new(limits));
        let mut read = async |text: &mut Vec<u8>, most: usize| {
            while text.len() <= most
                && let Some(frame) = body.frame().await
            {
                let Ok(data) = frame.map_err(|_| Refusal::Unreadable)?.into_data() else {
                    continue;
                };
                if !scan.is_within_bounds(&data) {
                    return Err(Refusal::TooLarge);
                }
                text.extend_from_slice(&data);
            }
            Ok(())
        };
        read(&mut text, SMALL).await?;
        let mut turn = None;
        if text.len() > SMALL {
            let client = client.map(|address| address.to_string()).unwrap_or_default();
            let taken = timeout(TURN_WAIT, turns.take(Clock::system(), &client, &client)).await;
            let taken = taken.ok().flatten().ok_or(Refusal::Busy)?;
            match timeout(TURN_TIME, read(&mut text, usize::MAX)).await {
                Ok(rest) => rest?,
                Err(_) => {
                    taken.waste(Clock::system().instant());
                    return Err(Refusal::TooSlow);
                }
            }
            turn = Some(taken);
        }
        Ok(Self { text, turn })
    }

    /// Sends an answer, and keeps the turn until the client has taken it.
    pub fn answer(self, answer: Vec<u8>) -> Response {
        let Some(turn) = self.turn else {
            return json(Body::from(answer));
        };
        let clock = Clock::system();
        let ends = clock.instant() + TURN_TIME;
        let parts = futures::stream::unfold((Bytes::from(answer), Some(turn)), move |(mut rest, turn)| async move {
            let turn = turn?;
            if rest.is_empty() {
                turn.used();
                return None;
            }
            if clock.instant() >= ends {
                turn.waste(clock.instant());
                return Some((Err(Late), (rest, None)));
            }
            let part = rest.split_to(rest.len().min(PART));
            Some((Ok(part), (rest, Some(turn))))
        });
        json(Body::from_stream(parts))
    }
}

/// The client does not take its answer in time.
#[derive(Debug, thiserror::Error)]
#[error("the client does not take the answer in time")]
pub(super) struct Late;

fn json(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Returns the address of a request's client.
pub(super) fn client(request: &Request) -> Option<IpAddr> {
    request.extensions().get::<Client>().map(|client| client.0)
}

/// Bounds the admission reviews that these routes take.
pub fn bounded(routes: Router) -> Router {
    routes.layer(middleware::from_fn_with_state(Arc::<Turns>::default(), take_in))
}

async fn take_in(State(turns): State<Arc<Turns>>, request: Request, next: Next) -> Result<Response, Refusal> {
    let client = client(&request);
    let (parts, body) = request.into_parts();
    let Sent { text, turn } = Sent::read(body, ADMISSION, &turns, client).await?;
    let response = next.run(Request::from_parts(parts, Body::from(text))).await;
    if let Some(turn) = turn {
        turn.used();
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::post;
    use rstest::rstest;
    use tower::ServiceExt;

    #[rstest]
    #[case::a_review("{}".to_owned(), StatusCode::OK)]
    #[case::a_large_one(format!("\"{}\"", "x".repeat(2 * SMALL)), StatusCode::OK)]
    #[case::many_bytes(" ".repeat(ADMISSION.bytes + 1), StatusCode::PAYLOAD_TOO_LARGE)]
    #[case::many_objects(format!("[{}", "{\"\":0},".repeat(ADMISSION.objects + 1)), StatusCode::PAYLOAD_TOO_LARGE)]
    #[case::many_arrays(format!("[{}", "[0],".repeat(ADMISSION.objects + 1)), StatusCode::PAYLOAD_TOO_LARGE)]
    #[case::deep_arrays(format!("[{}", format!("{}0{},", "[".repeat(100), "]".repeat(100)).repeat(100)), StatusCode::PAYLOAD_TOO_LARGE)]
    #[case::many_entries(format!("[{}", "0,".repeat(ADMISSION.entries + 1)), StatusCode::PAYLOAD_TOO_LARGE)]
    #[tokio::test]
    async fn an_admission_review_that_would_fill_the_memory_is_refused(
        #[case] text: String,
        #[case] expected: StatusCode,
    ) {
        let routes = bounded(Router::new().route("/", post(|body: Bytes| async move { body })));
        let request = Request::post("/").body(Body::from(text.clone())).unwrap();
        let response = routes.oneshot(request).await.unwrap();
        assert_eq!(response.status(), expected);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert!(expected != StatusCode::OK || body == text.as_bytes());
    }
}
