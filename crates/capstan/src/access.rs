//! Who may read the metrics: accounts that the API server lets `get` the path `/metrics`.
//!
//! Invariant: without a valid token, and without the right, nothing of the metrics leaves the process. One answer serves all
//! requests of an account for a while, and few reviews run at a time, so that scrapers cannot make Capstan flood the API server.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use capstan_core::clock::Clock;
use capstan_core::memo::Memo;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Client;
use kube::api::{Api, PostParams};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tracing::warn;

/// A token that is revoked, or a right that is taken away, still works for this long.
const ALLOWED_FOR: Duration = Duration::from_secs(60);
/// A right that is given works after this long.
const DENIED_FOR: Duration = Duration::from_secs(5);
/// Reviews at a time.
const REVIEWS: usize = 4;
/// Accounts that are remembered.
const ACCOUNTS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Allowed,
    Unknown,
    Forbidden,
}

pub struct Access {
    client: Client,
    /// By the digest of the token: no token is kept.
    answers: Memo<[u8; 32], Answer>,
    reviews: Semaphore,
}

impl Access {
    pub fn new(client: Client) -> Self {
        Self {
            client,
            answers: Memo::new(Clock::system(), ACCOUNTS),
            reviews: Semaphore::new(REVIEWS),
        }
    }

    async fn answer(&self, token: &str) -> Result<Answer, kube::Error> {
        let fresh = |age: Duration, answer: &Answer| match answer {
            Answer::Allowed => age < ALLOWED_FOR,
            Answer::Unknown | Answer::Forbidden => age < DENIED_FOR,
        };
        let key = Sha256::digest(token).into();
        self.answers.get_if(&key, fresh, self.review(token)).await
    }

    async fn review(&self, token: &str) -> Result<Answer, kube::Error> {
        // The semaphore is never closed.
        let _turn = self.reviews.acquire().await;
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let reviewed = Api::all(self.client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        let status = reviewed.status.unwrap_or_default();
        let (Some(true), Some(user)) = (status.authenticated, status.user) else {
            return Ok(Answer::Unknown);
        };
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username,
                uid: user.uid,
                groups: user.groups,
                extra: user.extra,
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some("/metrics".to_owned()),
                    verb: Some("get".to_owned()),
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let reviewed = Api::all(self.client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        let allowed = reviewed.status.is_some_and(|status| status.allowed);
        Ok(if allowed { Answer::Allowed } else { Answer::Forbidden })
    }
}

fn token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// Lets a request pass whose token belongs to an account with the right to read the metrics.
pub async fn authorize(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let answer = match token(request.headers()) {
        Some(token) => access.answer(token).await,
        None => Ok(Answer::Unknown),
    };
    match answer {
        Ok(Answer::Allowed) => next.run(request).await,
        Ok(Answer::Unknown) => (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")]).into_response(),
        Ok(Answer::Forbidden) => StatusCode::FORBIDDEN.into_response(),
        Err(error) => {
            warn!(%error, "cannot ask the API server whether an account may read the metrics");
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        }
    }
}
