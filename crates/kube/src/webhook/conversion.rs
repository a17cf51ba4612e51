//! The conversion webhook of the vSphere kinds: converts objects for the API server, and keeps the definitions pointed at it.
//!
//! Invariant: only definitions with the label [`CONVERTED_LABEL`] are changed, and only the way to the webhook in them. Nobody
//! else writes the CA there: [`release_ca`] takes cert-manager's order off a definition. Reviews cost bounded memory, whoever sends
//! them: one large review is in memory at a time, and one of its objects at a time as more than text.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use capstan_api::vsphere::v1beta2::{self, CONVERT_PATH, CONVERTED, CONVERTED_LABEL};
use capstan_core::Clock;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use k8s_openapi::ByteString;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, ServiceReference, WebhookClientConfig,
};
use kube::api::{Api, ListParams};
use kube::core::Status;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::{Address, Error, Hook};
use crate::bounds::{Limits, Scan};
use crate::patch::{self, Lock};

/// The API server sends all objects of a list in one review: thousands of objects of some KiB each. Everybody in the cluster can
/// send one: nobody proves who he is.
const REVIEW: Limits = Limits {
    bytes: 32 << 20,
    objects: usize::MAX,
    entries: usize::MAX,
    items: 20_000,
    // The review, its request, and the array of objects.
    depth: 3,
};
/// One object of a review. etcd takes 1.5 MiB; a value in memory is up to fifty times as large as its text.
const OBJECT: Limits = Limits {
    bytes: 2 << 20,
    objects: 20_000,
    entries: 100_000,
    items: usize::MAX,
    depth: 0,
};
/// A review with more bytes is large: large ones take turns, because a few of them fill the memory.
const SMALL: usize = 128 << 10;
/// A large review waits this long for its turn. The API server waits for 30 s in all.
const TURN_WAIT: Duration = Duration::from_secs(10);
/// The rest of a large review must come within this time, and its answer must be taken within it, because others wait.
const TURN_TIME: Duration = Duration::from_secs(8);
/// The answer to a large review is sent in parts of this size.
const PART: usize = 64 << 10;

/// Lets cert-manager write a CA into a definition. CAPV's manifests have it, and applying others over them keeps it.
const INJECT_CA: &str = "cert-manager.io/inject-ca-from";
/// On a definition: the value of cert-manager's own annotation before Capstan took it off, for the way back.
const INJECTED_CA: &str = "capstan.dev/inject-ca-from";

/// Converts for all definitions whose label has this value.
pub struct Conversion(String);

impl Default for Conversion {
    fn default() -> Self {
        Self(CONVERTED.to_owned())
    }
}

impl Conversion {
    /// For definitions whose label has another value.
    pub fn labeled(value: &str) -> Self {
        Self(value.to_owned())
    }

    async fn point_definitions_here(
        &self,
        client: &kube::Client,
        address: &Address,
        bundle: &str,
    ) -> Result<(), Error> {
        let api: Api<CustomResourceDefinition> = Api::all(client.clone());
        let labeled = ListParams::default().labels(&format!("{CONVERTED_LABEL}={}", self.0));
        let all = api.list(&labeled).await.map_err(crate::Error::from)?;
        for crd in &all.items {
            let mut after = crd.clone();
            let conversion = after.spec.conversion.as_mut();
            if let Some(webhook) = conversion.and_then(|conversion| conversion.webhook.as_mut()) {
                webhook.client_config = Some(client_config(address, bundle));
                // The one who carries the order out may do so right now: then both are read again.
                let lock = if release_ca(&mut after) {
                    Lock::Version
                } else {
                    Lock::Open
                };
                patch::object(&api, crd, &after, lock).await?;
            }
        }
        Ok(())
    }
}

impl Hook for Conversion {
    fn routes(&self) -> Router {
        Router::new()
            .route(CONVERT_PATH, post(convert))
            .with_state(Arc::new(Semaphore::new(1)))
    }

    fn register<'a>(
        &'a self,
        client: &'a kube::Client,
        address: &'a Address,
        bundle: &'a str,
    ) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(self.point_definitions_here(client, address, bundle))
    }

    /// The definitions keep the address: without a webhook the API server can convert nothing anyway.
    fn remove<'a>(&'a self, _: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

/// A review that is refused before it is read.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
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
            Self::Busy => (StatusCode::TOO_MANY_REQUESTS, "other large reviews are being converted"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "the review does not end in time"),
            Self::Unreadable => (StatusCode::BAD_REQUEST, "the request is no ConversionReview"),
        }
        .into_response()
    }
}

/// The turn of the large reviews.
type Turns = Arc<Semaphore>;

/// A review as it was sent, and its turn if it is large.
struct Sent {
    text: Vec<u8>,
    turn: Option<OwnedSemaphorePermit>,
}

impl Sent {
    async fn read(mut body: Body, turns: &Turns) -> Result<Self, Refusal> {
        let (mut text, mut scan) = (Vec::new(), Scan::new(REVIEW));
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
            let waiting = timeout(TURN_WAIT, turns.clone().acquire_owned()).await;
            turn = waiting.map_err(|_| Refusal::Busy)?.ok();
            let rest = timeout(TURN_TIME, read(&mut text, usize::MAX)).await;
            rest.map_err(|_| Refusal::TooSlow)??;
        }
        Ok(Self { text, turn })
    }

    /// Sends an answer, and keeps the turn until the client has taken it.
    fn answer(self, answer: Vec<u8>) -> Response {
        let Some(turn) = self.turn else {
            return json(Body::from(answer));
        };
        let clock = Clock::system();
        let ends = clock.instant() + TURN_TIME;
        let parts = futures::stream::unfold((Bytes::from(answer), turn), move |(mut rest, turn)| async move {
            if rest.is_empty() {
                return None;
            }
            let part = rest.split_to(rest.len().min(PART));
            let part = if clock.instant() < ends { Ok(part) } else { Err(Late) };
            Some((part, (rest, turn)))
        });
        json(Body::from_stream(parts))
    }
}

/// The client does not take its answer in time.
#[derive(Debug, thiserror::Error)]
#[error("the client does not take the answer in time")]
struct Late;

fn json(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// A review whose objects are read one at a time.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: Option<ReviewRequest<'a>>,
}

#[derive(Deserialize)]
struct ReviewRequest<'a> {
    uid: String,
    #[serde(rename = "desiredAPIVersion")]
    desired: String,
    #[serde(borrow)]
    objects: Vec<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reviewed {
    api_version: String,
    kind: String,
    response: ReviewResponse,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReviewResponse {
    uid: String,
    result: Status,
    converted_objects: Vec<Box<RawValue>>,
}

async fn convert(State(turns): State<Turns>, request: Request) -> Result<Response, Refusal> {
    let mut sent = Sent::read(request.into_body(), &turns).await?;
    let answer = review(&sent.text)?;
    sent.text = Vec::new();
    let answer = serde_json::to_vec(&answer).map_err(|_| Refusal::Unreadable)?;
    Ok(sent.answer(answer))
}

/// Keeps cert-manager from replacing the CA in a definition by the one of CAPV's webhook. The definition keeps the order under
/// another name. Returns whether there was one.
fn release_ca(crd: &mut CustomResourceDefinition) -> bool {
    let Some(annotations) = &mut crd.metadata.annotations else {
        return false;
    };
    let order = annotations.remove(INJECT_CA);
    let was_there = order.is_some();
    annotations.extend(order.map(|order| (INJECTED_CA.to_owned(), order)));
    was_there
}

/// Converts all objects of a review, or none of them.
fn review(text: &[u8]) -> Result<Reviewed, Refusal> {
    let review: Review<'_> = serde_json::from_slice(text).map_err(|_| Refusal::Unreadable)?;
    let request = review.request.ok_or(Refusal::Unreadable)?;
    let objects = request.objects.into_iter();
    let converted: Result<Vec<_>, _> = objects.map(|object| convert_one(object, &request.desired)).collect();
    let (result, converted_objects) = match converted {
        Ok(objects) => (Status::success(), objects),
        Err(reason) => (Status::failure(&reason, "ConversionFailed"), Vec::new()),
    };
    Ok(Reviewed {
        api_version: review.api_version,
        kind: review.kind,
        response: ReviewResponse {
            uid: request.uid,
            result,
            converted_objects,
        },
    })
}

fn convert_one(object: &RawValue, desired: &str) -> Result<Box<RawValue>, String> {
    if !Scan::new(OBJECT).is_within_bounds(object.get().as_bytes()) {
        return Err("an object of the review is too large".to_owned());
    }
    let object = serde_json::from_str(object.get()).map_err(|error| error.to_string())?;
    let converted = v1beta2::convert(object, desired).map_err(|error| error.to_string())?;
    serde_json::value::to_raw_value(&converted).map_err(|error| error.to_string())
}

fn client_config(address: &Address, bundle: &str) -> WebhookClientConfig {
    let ca_bundle = Some(ByteString(bundle.as_bytes().to_vec()));
    match address {
        Address::Url(host) => WebhookClientConfig {
            ca_bundle,
            url: Some(format!("https://{host}{CONVERT_PATH}")),
            service: None,
        },
        Address::Service { namespace, name, port } => WebhookClientConfig {
            ca_bundle,
            url: None,
            service: Some(ServiceReference {
                namespace: namespace.clone(),
                name: name.clone(),
                path: Some(CONVERT_PATH.to_owned()),
                port: Some(i32::from(*port)),
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http;
    use rstest::rstest;
    use serde_json::{Value, json};
    use tokio::time::Instant;
    use tower::ServiceExt;

    fn ask(body: Body) -> Request {
        http::Request::post(CONVERT_PATH).body(body).unwrap()
    }

    async fn answer(routes: &Router, body: impl Into<Body>) -> (StatusCode, Value) {
        let response = routes.clone().oneshot(ask(body.into())).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    fn request(objects: &[Value]) -> String {
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": {
            "uid": "u", "desiredAPIVersion": "infrastructure.cluster.x-k8s.io/v1beta2", "objects": objects}})
        .to_string()
    }

    fn identity(text: &str) -> Value {
        json!({"apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "VSphereClusterIdentity",
            "metadata": {"name": "i", "annotations": {"text": text}}, "spec": {"secretName": "s"}})
    }

    #[rstest]
    #[case::small(1, 1)]
    #[case::large(3, SMALL)]
    #[tokio::test]
    async fn all_objects_of_a_review_are_converted(#[case] objects: usize, #[case] size: usize) {
        let routes = Conversion::default().routes();
        let (status, review) = answer(&routes, request(&vec![identity(&"x".repeat(size)); objects])).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(review["response"]["result"]["status"], "Success", "{review}");
        assert_eq!(review["response"]["uid"], "u");
        let converted = review["response"]["convertedObjects"].as_array().unwrap();
        assert_eq!(converted.len(), objects);
        assert_eq!(converted[0]["apiVersion"], "infrastructure.cluster.x-k8s.io/v1beta2");
        let (_, review) = answer(&routes, request(&[identity(""), json!({"kind": "Pod"})])).await;
        assert_eq!(review["response"]["result"]["reason"], "ConversionFailed", "{review}");
        assert_eq!(review["response"]["convertedObjects"], json!([]));
    }

    #[rstest]
    #[case::bytes("", " ", REVIEW.bytes)]
    #[case::objects(r#"{"request": {"objects": ["#, "{},", REVIEW.items * 3)]
    #[case::numbers(r#"{"request": {"objects": ["#, "0,", REVIEW.items * 2)]
    #[tokio::test]
    async fn a_review_that_would_fill_the_memory_is_refused(
        #[case] first: &str,
        #[case] part: &str,
        #[case] bytes: usize,
    ) {
        let body = first.to_owned() + &part.repeat(bytes / part.len() + 2);
        let (status, _) = answer(&Conversion::default().routes(), body).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn an_object_that_would_fill_the_memory_is_not_read() {
        let mut object = identity("");
        object["spec"]["many"] = json!(vec![0; OBJECT.entries + 1]);
        let (status, review) = answer(&Conversion::default().routes(), request(&[object])).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            review["response"]["result"]["message"],
            "an object of the review is too large"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn large_reviews_take_turns_and_none_keeps_its_turn() {
        let routes = Conversion::default().routes();
        // Large at once, and then without end.
        let slow = || {
            let first = futures::stream::iter([Ok::<_, Late>(Bytes::from(" ".repeat(SMALL + 1)))]);
            Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()))
        };
        let began = Instant::now();
        let (a, b, c, small) = tokio::join!(
            answer(&routes, slow()),
            answer(&routes, slow()),
            answer(&routes, slow()),
            answer(&routes, request(&[identity("")])),
        );
        assert_eq!(small.0, StatusCode::OK);
        let refused = [a.0, b.0, c.0].map(|status| status.as_u16());
        assert_eq!(refused, [408, 408, 429], "the third waits for its turn in vain");
        assert_eq!(began.elapsed(), TURN_TIME * 2);
        // The answer to a large review keeps the turn until it is taken.
        let large = request(&vec![identity(&"x".repeat(SMALL)); 2]);
        let held = routes.clone().oneshot(ask(large.clone().into())).await.unwrap();
        assert_eq!(answer(&routes, large.clone()).await.0, StatusCode::TOO_MANY_REQUESTS);
        assert!(held.into_body().collect().await.is_err(), "it is too late to take it");
        assert_eq!(answer(&routes, large).await.0, StatusCode::OK);
    }
}
