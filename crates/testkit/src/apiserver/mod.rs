//! A Kubernetes API server inside the test process, for one client per call and no sockets.
//!
//! It has the verbs that Capstan uses, with the answers of the real one: a conformance test runs the same cases against
//! both. It adds the parts of a cluster that Capstan depends on: garbage collection, the status of disruption budgets, and
//! a kubelet that starts and ends Pods. It has no validation by schema, no CEL rules, no admission, no server-side apply,
//! and no foreground deletion.
//!
//! Invariant: the same seed and the same requests at the same tokio times give the same objects, uids, names and times.

mod answer;
mod delete;
mod evict;
mod kinds;
mod merge;
mod rng;
mod schema;
mod selector;
mod store;
mod watch;
mod write;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt, StreamBody};
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower::BoxError;

pub use answer::Answer;
use answer::{Failure, no_such_path, respond, with_body};
use kinds::{Query, Target};
pub use rng::Rng;
use selector::Selector;
use store::{FollowUp, Store};

/// The latencies of the parts of a cluster.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    /// The time of day at the start.
    pub start: Timestamp,
    /// From a request to its answer.
    pub latency: Duration,
    /// From a change to its event in a watch.
    pub lag: RangeInclusive<Duration>,
    /// From the deletion of a Pod to its end.
    pub pod_end: Duration,
    /// From the end of an owner to that of its dependents.
    pub collection: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 1,
            start: Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(24 * 365 * 50),
            latency: Duration::from_millis(1),
            lag: Duration::ZERO..=Duration::ZERO,
            pod_end: Duration::from_secs(1),
            collection: Duration::from_millis(500),
        }
    }
}

/// The server. Clones are the same server.
#[derive(Clone)]
pub struct ApiServer {
    store: Arc<Mutex<Store>>,
    changed: Arc<Notify>,
    settings: Arc<Settings>,
}

impl ApiServer {
    /// A server with Kubernetes' own kinds, Capstan's definitions, and Cluster API's kinds without their schemas.
    pub fn new(settings: Settings) -> Self {
        let mut store = Store::new(settings.seed, settings.start);
        store.lag = settings.lag.clone();
        capstan_api::crds()
            .iter()
            .for_each(|definition| store.kinds.define(definition));
        for (kind, plural) in [
            ("Cluster", "clusters"),
            ("Machine", "machines"),
            ("MachinePool", "machinepools"),
            ("MachineSet", "machinesets"),
            ("MachineDeployment", "machinedeployments"),
        ] {
            store.kinds.define_free("cluster.x-k8s.io", "v1beta2", kind, plural);
        }
        Self {
            store: Arc::new(Mutex::new(store)),
            changed: Arc::default(),
            settings: Arc::new(settings),
        }
    }

    pub fn define(&self, definition: &CustomResourceDefinition) {
        self.store.lock().kinds.define(definition);
    }

    /// A client without interceptors, for tests.
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }

    /// From now on watches show changes this much later.
    pub fn set_lag(&self, lag: RangeInclusive<Duration>) {
        self.store.lock().lag = lag;
    }

    /// Ends all watches; clients watch again from where they were.
    pub fn cut_watches(&self) {
        self.store.lock().epoch += 1;
        self.changed.notify_waiters();
    }

    /// Forgets the history: clients that are behind must list again.
    pub fn compact(&self) {
        self.store.lock().compact();
        self.changed.notify_waiters();
    }

    /// All objects of a kind by its plural name, past all clients.
    pub fn objects(&self, plural: &str) -> Vec<Value> {
        let store = self.store.lock();
        let Some(kind) = store.kinds.by_plural(plural) else {
            return Vec::new();
        };
        store.all(&kind.key()).map(|(_, object)| object.clone()).collect()
    }

    /// As [`Self::objects`], of a kind whose plural name is not unique.
    pub fn objects_of(&self, group: &str, plural: &str) -> Vec<Value> {
        let key = (group.to_owned(), plural.to_owned());
        let store = self.store.lock();
        store.all(&key).map(|(_, object)| object.clone()).collect()
    }

    /// Returns the version of the newest change. It does not change without a write.
    pub fn version(&self) -> u64 {
        self.store.lock().version()
    }

    async fn answer(&self, request: Request<Body>) -> Result<Response<Answer>, BoxError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        tokio::time::sleep(self.settings.latency).await;
        let (target, served) = {
            let (store, path) = (self.store.lock(), head.uri.path());
            (store.kinds.resolve(path), store.kinds.serves(path))
        };
        let Some(target) = target else {
            return Ok(match served {
                true => respond(404, &Failure::no_such_kind().status()),
                false => no_such_path(),
            });
        };
        let query = Query::parse(&head.uri);
        if head.method == Method::GET && query.is_true("watch") {
            let changes = StreamBody::new(watch::watch(self.clone(), target, &query)).map_err(|never| match never {});
            return Ok(with_body(200, "application/json", Answer::new(changes)));
        }
        let value = match body.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&body).unwrap_or_default(),
        };
        let text = |name: header::HeaderName| {
            head.headers
                .get(name)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default()
        };
        let (media_type, accept) = (text(header::CONTENT_TYPE), text(header::ACCEPT));
        let (done, follow_ups) = {
            let mut store = self.store.lock();
            let done = execute(&mut store, &head.method, &target, &query, media_type, &value);
            (done, std::mem::take(&mut store.follow_ups))
        };
        self.changed.notify_waiters();
        self.later(follow_ups);
        if head.method == Method::POST && target.kind.plural == "pods" && target.subresource.is_none() {
            self.start_pod(&target, done.as_ref().ok().map(|(_, pod)| pod));
        }
        Ok(match done {
            Ok((code, object)) if accept.contains("as=PartialObjectMetadata") => respond(code, &partial(&object)),
            Ok((code, object)) => respond(code, &object),
            Err(failure) => respond(failure.code, &failure.status()),
        })
    }

    fn later(&self, follow_ups: Vec<FollowUp>) {
        for follow_up in follow_ups {
            let server = self.clone();
            let wait = match follow_up {
                FollowUp::PodEnds { .. } => self.settings.pod_end,
                FollowUp::Collect { .. } | FollowUp::RemovePods { .. } => self.settings.collection,
            };
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                let next = {
                    let mut store = server.store.lock();
                    store.follow_up(follow_up);
                    std::mem::take(&mut store.follow_ups)
                };
                server.changed.notify_waiters();
                server.later(next);
            });
        }
    }

    /// The kubelet runs a Pod that is bound to its Node.
    fn start_pod(&self, target: &Target, pod: Option<&Value>) {
        let Some(pod) = pod.filter(|pod| pod["spec"]["nodeName"].is_string()) else {
            return;
        };
        let mut target = target.clone();
        target.name = pod["metadata"]["name"].as_str().map(str::to_owned);
        target.subresource = Some("status".to_owned());
        let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        // A Pod that was deleted at once is not started.
        let _ = self
            .store
            .lock()
            .patch(&target, "application/merge-patch+json", &status);
        self.changed.notify_waiters();
    }
}

fn execute(
    store: &mut Store,
    method: &Method,
    target: &Target,
    query: &Query,
    media_type: &str,
    body: &Value,
) -> Result<(u16, Value), Failure> {
    let evicts = target.subresource.as_deref() == Some("eviction");
    if *method == Method::GET && target.name.is_none() {
        return Ok((200, store.list(target, query)));
    }
    if *method == Method::GET {
        return Ok((200, target.show(&store.existing(target)?)));
    }
    if *method == Method::POST && evicts {
        return Ok((201, store.evict(target, body)?));
    }
    if *method == Method::POST && target.name.is_none() {
        return Ok((201, target.show(&store.create(target, body.clone())?)));
    }
    if *method == Method::PUT {
        return Ok((200, target.show(&store.update(target, body.clone())?)));
    }
    if *method == Method::PATCH {
        return Ok((200, target.show(&store.patch(target, media_type, body)?)));
    }
    if *method == Method::DELETE && target.name.is_some() {
        return Ok((200, store.delete(target, body)?));
    }
    if *method == Method::DELETE {
        let items = store.delete_all(target, &Selector::of(query), body);
        let list = store.list(target, &Query::default());
        return Ok((
            200,
            json!({"kind": list["kind"], "apiVersion": list["apiVersion"], "metadata": list["metadata"], "items": items}),
        ));
    }
    Err(Failure::not_allowed())
}

/// Returns the metadata of an object only.
fn partial(object: &Value) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]})
}

impl tower::Service<Request<Body>> for ApiServer {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Answer>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move { server.answer(request).await })
    }
}
