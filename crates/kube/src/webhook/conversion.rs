//! The conversion webhook of the vSphere kinds: converts objects for the API server, and keeps the definitions pointed at it.
//!
//! Invariant: only definitions with the label [`CONVERTED_LABEL`] are changed, and only the way to the webhook in them. Nobody
//! else writes the CA there: [`release_ca`] takes cert-manager's order off a definition. Of the objects of a review, one at a
//! time is in memory as more than text.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use capstan_api::vsphere::v1beta2::{self, CONVERT_PATH, CONVERTED, CONVERTED_LABEL};
use capstan_core::turns::Turns;
use futures::future::BoxFuture;
use k8s_openapi::ByteString;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, ServiceReference, WebhookClientConfig,
};
use kube::api::{Api, ListParams};
use kube::core::Status;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::review::{self, Refusal, Sent};
use super::{Address, Error, Hook, Place, Proof};
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

/// Lets cert-manager write a CA into a definition. CAPV's manifests have it, and applying others over them keeps it.
const INJECT_CA: &str = "cert-manager.io/inject-ca-from";
/// On a definition: the value of cert-manager's annotation, which Capstan has removed. The way back restores it.
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
        Place { address, bundle, .. }: Place<'_>,
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
    /// A conversion costs nobody else anything. The API server shows its address to users when it fails, so it proves nothing.
    fn routes(&self, _: &Proof) -> Router {
        Router::new()
            .route(CONVERT_PATH, post(convert))
            .with_state(Arc::<Turns>::default())
    }

    fn register<'a>(&'a self, client: &'a kube::Client, place: Place<'a>) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(self.point_definitions_here(client, place))
    }

    /// The definitions keep the address: without a webhook the API server can convert nothing anyway.
    fn remove<'a>(&'a self, _: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
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

async fn convert(State(turns): State<Arc<Turns>>, request: Request) -> Result<Response, Refusal> {
    let client = review::client(&request);
    let mut sent = Sent::read(request.into_body(), REVIEW, &turns, client).await?;
    let answer = converted(&sent.text)?;
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
fn converted(text: &[u8]) -> Result<Reviewed, Refusal> {
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
    use super::super::review::{Late, SMALL, TURN_TIME};
    use super::*;
    use crate::serve::Client;
    use axum::body::{Body, Bytes};
    use axum::http::{self, StatusCode};
    use http_body_util::BodyExt;
    use rstest::rstest;
    use serde_json::{Value, json};
    use tokio::time::Instant;
    use tower::ServiceExt;

    /// A request of the client with this number.
    fn ask(client: u8, body: Body) -> Request {
        let request = http::Request::post(CONVERT_PATH).extension(Client([10, 0, 0, client].into()));
        request.body(body).unwrap()
    }

    async fn answer(routes: &Router, body: impl Into<Body>) -> (StatusCode, Value) {
        answer_to(1, routes, body).await
    }

    async fn answer_to(client: u8, routes: &Router, body: impl Into<Body>) -> (StatusCode, Value) {
        let response = routes.clone().oneshot(ask(client, body.into())).await.unwrap();
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
        let routes = Conversion::default().routes(&Proof::default());
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
        let (status, _) = answer(&Conversion::default().routes(&Proof::default()), body).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[rstest]
    #[case::of_many_entries(json!(vec![0; OBJECT.entries + 1]))]
    #[case::of_many_objects(json!(vec![json!({}); OBJECT.objects + 1]))]
    #[case::of_many_arrays(json!(vec![json!([]); OBJECT.objects + 1]))]
    #[tokio::test]
    async fn an_object_that_would_fill_the_memory_is_not_read(#[case] many: Value) {
        let mut object = identity("");
        object["spec"]["many"] = many;
        let (status, review) = answer(&Conversion::default().routes(&Proof::default()), request(&[object])).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            review["response"]["result"]["message"],
            "an object of the review is too large"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn large_reviews_take_turns_and_none_keeps_its_turn() {
        let routes = Conversion::default().routes(&Proof::default());
        // Large at once, and then without end.
        let slow = || {
            let first = futures::stream::iter([Ok::<_, Late>(Bytes::from(" ".repeat(SMALL + 1)))]);
            Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()))
        };
        let large = request(&vec![identity(&"x".repeat(SMALL)); 2]);
        let began = Instant::now();
        let (a, b, c, other, small) = tokio::join!(
            answer(&routes, slow()),
            answer(&routes, slow()),
            answer(&routes, slow()),
            answer_to(2, &routes, large.clone()),
            answer(&routes, request(&[identity("")])),
        );
        assert_eq!(small.0, StatusCode::OK);
        let refused = [a.0, b.0, c.0].map(|status| status.as_u16());
        assert_eq!(refused, [408, 429, 429], "its other reviews get no turn");
        assert_eq!(other.0, StatusCode::OK, "another client waits for one turn");
        assert_eq!(began.elapsed(), TURN_TIME);
        assert_eq!(answer(&routes, large.clone()).await.0, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(began.elapsed(), TURN_TIME, "nobody waits for a client that is slow");
        // The answer to a large review keeps the turn until it is taken.
        let held = routes.clone().oneshot(ask(3, large.clone().into())).await.unwrap();
        let (status, _) = answer_to(2, &routes, large.clone()).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert!(held.into_body().collect().await.is_err(), "it is too late to take it");
        assert_eq!(answer_to(2, &routes, large).await.0, StatusCode::OK);
    }
}
