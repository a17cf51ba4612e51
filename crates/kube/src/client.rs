//! Client profiles. Invariant: every request on the wire, each retry included, passes the [`Interceptors`] and is counted, and
//! every request but a watch is answered or fails within [`REQUEST_TIMEOUT`].
//!
//! kube's own retry layer is off: it is below any layer of ours, which would not see the retries, and it may retry for
//! minutes. The retrying profile retries a request that an overloaded API server rejected, a few times; then the caller
//! gets the error with its class.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use capstan_core::backoff::exponential;
use capstan_core::interceptor::{Effect, Interceptors, System};
use futures::future::BoxFuture;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use kube::client::{Body, ClientBuilder};
use tokio::sync::{Mutex, Semaphore};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service, ServiceExt};

use crate::bounds::{Bounds, is_watch};
use crate::error::Error;
use crate::metrics::Metrics;
use crate::served::{self, Served};

/// A request that is not a watch and has no answer after this long counts as lost; the API server's own limit is 60 s.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A connection to an address that does not answer fails after this long, so that an unreachable cluster is reported soon.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// So many requests besides watches are sent at once: each has its own connection, which costs memory here and on the API
/// server, and the API server does not answer more of them sooner.
const AT_ONCE: usize = 16;
/// How often the retrying profile retries a request that an overloaded server rejected.
const RETRIES: u32 = 4;
/// First pause between two tries when the server names none; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The client does not wait for a longer Retry-After than this: the caller gets the error as throttled.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How a client treats requests that an overloaded server rejects (429, 503, 504).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Retry them a few times.
    Retrying,
    /// Return them to the caller at once: for evictions, where 429 is an answer, and leases, where late is worse than failed.
    Once,
}

/// An interceptor that refused a request.
#[derive(Debug, thiserror::Error)]
#[error("request refused: {0}")]
pub struct Refused(pub String);

/// A request that got no answer in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer from the API server within {} s", REQUEST_TIMEOUT.as_secs())]
pub struct TimedOut;

/// The name of the writer in audit logs and `managedFields`: the API server takes the part before the slash as the manager.
const USER_AGENT: &str = concat!("capstan/", env!("CARGO_PKG_VERSION"));

/// Carries requests to an API server in the place of the network: a test's API server is in its own process.
pub type Transport = BoxCloneSyncService<Request<Body>, Response<UnsyncBoxBody<Bytes, BoxError>>, BoxError>;

/// Returns a client whose every request passes `interceptors`.
pub fn connect(
    config: kube::Config,
    profile: Profile,
    interceptors: &Interceptors,
    metrics: &Metrics,
    transport: Option<&Transport>,
) -> Result<kube::Client, Error> {
    let (config, layer) = prepared(config, profile, interceptors, metrics);
    if let Some(transport) = transport {
        return Ok(in_process(config, &layer, transport));
    }
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
}

fn in_process(config: kube::Config, layer: &InterceptorLayer, transport: &Transport) -> kube::Client {
    kube::Client::new(layer.layer(transport.clone()), config.default_namespace)
}

/// As [`connect`], to the API server of a tenant: its answers are bounded.
pub(crate) fn connect_bounded(
    config: kube::Config,
    profile: Profile,
    interceptors: &Interceptors,
    metrics: &Metrics,
    transport: Option<&Transport>,
    bounds: &Bounds,
) -> Result<kube::Client, Error> {
    let (config, layer) = prepared(config, profile, interceptors, metrics);
    if let Some(transport) = transport {
        return Ok(in_process(config, &layer, transport));
    }
    let builder = ClientBuilder::try_from(config)?.with_layer(bounds);
    Ok(builder.with_layer(&layer).build())
}

fn prepared(
    mut config: kube::Config,
    profile: Profile,
    interceptors: &Interceptors,
    metrics: &Metrics,
) -> (kube::Config, InterceptorLayer) {
    config.default_retry = false;
    config
        .headers
        .push((http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT)));
    config.connect_timeout = Some(
        config
            .connect_timeout
            .map_or(CONNECT_TIMEOUT, |t| t.min(CONNECT_TIMEOUT)),
    );
    let layer = InterceptorLayer {
        interceptors: interceptors.clone(),
        metrics: metrics.clone(),
        profile,
        served: Arc::default(),
    };
    (config, layer)
}

struct InterceptorLayer {
    interceptors: Interceptors,
    metrics: Metrics,
    profile: Profile,
    served: Arc<Served>,
}

impl<S> Layer<S> for InterceptorLayer {
    type Service = InterceptorService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        InterceptorService {
            inner: Arc::new(Mutex::new(inner)),
            interceptors: self.interceptors.clone(),
            metrics: self.metrics.clone(),
            profile: self.profile,
            served: self.served.clone(),
            slots: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }
}

/// The inner service is not `Clone`: it is locked for the moment of `call` only, never while an answer is awaited.
struct InterceptorService<S> {
    inner: Arc<Mutex<S>>,
    interceptors: Interceptors,
    metrics: Metrics,
    profile: Profile,
    served: Arc<Served>,
    slots: Arc<Semaphore>,
}

impl<S> Clone for InterceptorService<S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            interceptors: self.interceptors.clone(),
            metrics: self.metrics.clone(),
            profile: self.profile,
            served: self.served.clone(),
            slots: self.slots.clone(),
        }
    }
}

impl<S, B> Service<Request<Body>> for InterceptorService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError> + Send + 'static,
    S::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<B>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.answer(request).await })
    }
}

impl<S, B> InterceptorService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
{
    /// Answers in the version of Cluster API that is served, whichever the request names.
    async fn answer(&self, mut request: Request<Body>) -> Result<Response<B>, BoxError> {
        let Some(kind) = served::kind(request.uri().path()) else {
            return self.send(request).await;
        };
        let version = self.served.version(&kind);
        let spare = duplicate(&request).filter(|_| kind.proves_absence(request.method()));
        served::set_version(&mut request, version);
        let answer = self.send(request).await?;
        let Some(mut spare) = spare.filter(|_| answer.status() == StatusCode::NOT_FOUND) else {
            return Ok(answer);
        };
        let other = served::other(version);
        served::set_version(&mut spare, other);
        let second = self.send(spare).await?;
        if second.status() == StatusCode::NOT_FOUND {
            return Ok(answer);
        }
        self.served.remember(&kind, other);
        Ok(second)
    }

    async fn send(&self, mut request: Request<Body>) -> Result<Response<B>, BoxError> {
        let watch = is_watch(&request);
        let effect = effect_of(&request);
        for attempt in 0.. {
            let spare = if self.profile == Profile::Retrying {
                duplicate(&request)
            } else {
                None
            };
            // A watch lasts: it must not take the place of other requests.
            let slot = if watch { None } else { self.slots.acquire().await.ok() };
            // After the wait for a place: the fence may have closed meanwhile.
            self.interceptors.before(&effect).enforce().await.map_err(Refused)?;
            let answer = once(&self.inner, &self.metrics, &effect, watch, request).await;
            drop(slot);
            self.interceptors.after(&effect).enforce().await.map_err(Refused)?;
            let answer = answer?;
            match (spare, pause(&answer, attempt)) {
                (Some(again), Some(pause)) => {
                    capstan_core::clock::sleep(pause).await;
                    request = again;
                }
                _ => return Ok(answer),
            }
        }
        Err(TimedOut.into())
    }
}

async fn once<S, B>(
    inner: &Mutex<S>,
    metrics: &Metrics,
    effect: &Effect,
    watch: bool,
    request: Request<Body>,
) -> Result<Response<B>, BoxError>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
{
    let answer = {
        let mut service = inner.lock().await;
        service.ready().await?.call(request)
    };
    let answer = match capstan_core::clock::timeout(REQUEST_TIMEOUT, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(TimedOut.into()),
    };
    let code = answer.as_ref().map(|a| a.status().as_u16()).unwrap_or_default();
    metrics.kube_request(verb(effect, watch), code);
    answer
}

fn effect_of(request: &Request<Body>) -> Effect {
    Effect {
        system: System::Kube,
        method: request.method().to_string(),
        target: request.uri().path().to_owned(),
        write: !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) && !is_dry_run(request),
    }
}

/// Whether the API server answers as if it had done the request, and changes nothing.
fn is_dry_run(request: &Request<Body>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.split('&').any(|pair| pair == "dryRun=All")
}

fn verb(effect: &Effect, watch: bool) -> &'static str {
    match effect.method.as_str() {
        "GET" if watch => "watch",
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "other",
    }
}

fn duplicate(request: &Request<Body>) -> Option<Request<Body>> {
    let body = request.body().try_clone()?;
    let mut copy = Request::new(body);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    Some(copy)
}

/// Returns how long to wait before the next try; `None` when this answer is final.
fn pause<B>(answer: &Response<B>, attempt: u32) -> Option<Duration> {
    let overloaded = matches!(
        answer.status(),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    );
    if !overloaded || attempt >= RETRIES {
        return None;
    }
    let asked = answer.headers().get(http::header::RETRY_AFTER);
    let asked = asked
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok())
        .map(Duration::from_secs);
    let pause = asked.unwrap_or_else(|| exponential(FIRST_PAUSE, LONGEST_PAUSE, attempt + 1));
    (pause <= LONGEST_PAUSE).then_some(pause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_core::interceptor::{Interceptor, Verdict};
    use rstest::rstest;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    /// Refuses writes from the first answer on.
    #[derive(Default)]
    struct Closing(AtomicBool);

    impl Interceptor for Closing {
        fn before(&self, _: &Effect) -> Verdict {
            if self.0.load(SeqCst) {
                return Verdict::Refuse("closed".to_owned());
            }
            Verdict::Pass
        }

        fn after(&self, _: &Effect) -> Verdict {
            self.0.store(true, SeqCst);
            Verdict::Pass
        }
    }

    #[tokio::test]
    async fn a_request_that_waits_for_a_place_while_the_interceptor_closes_is_never_sent() {
        let (interceptor, sent) = (Arc::new(Closing::default()), Arc::new(AtomicUsize::new(0)));
        let layer = InterceptorLayer {
            interceptors: Interceptors::new(vec![interceptor.clone()]),
            metrics: Metrics::default(),
            profile: Profile::Once,
            served: Arc::default(),
        };
        let counted = sent.clone();
        let service = layer.layer(tower::service_fn(move |_: Request<Body>| {
            counted.fetch_add(1, SeqCst);
            async {
                tokio::task::yield_now().await;
                Ok::<_, BoxError>(Response::new(()))
            }
        }));
        let write = || {
            let request = Request::builder().method(Method::PUT).uri("/api/v1/nodes/n");
            service.clone().oneshot(request.body(Body::empty()).unwrap())
        };
        let crowd = |number| futures::future::join_all((0..number).map(|_| write()));
        let answers = crowd(AT_ONCE + 5).await;
        assert_eq!(sent.load(SeqCst), AT_ONCE, "only those that had a place when it closed");
        assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 5);
        // The refused requests have released their places.
        assert!(crowd(AT_ONCE + 5).await.iter().all(Result::is_err));
        interceptor.0.store(false, SeqCst);
        assert!(write().await.is_ok());
        assert_eq!(sent.load(SeqCst), AT_ONCE + 1);
    }

    fn answer(code: u16, retry_after: Option<&str>) -> Response<()> {
        let mut builder = Response::builder().status(code);
        if let Some(value) = retry_after {
            builder = builder.header("retry-after", value);
        }
        builder.body(()).unwrap()
    }

    #[rstest]
    #[case::an_answer_is_final(200, None, 0, None)]
    #[case::a_refusal_is_final(403, None, 0, None)]
    #[case::rejected_without_a_time(503, None, 0, Some(100))]
    #[case::doubled(503, None, 2, Some(400))]
    #[case::the_server_names_the_time(429, Some("1"), 3, Some(1000))]
    #[case::too_long_to_sleep_out(429, Some("30"), 0, None)]
    #[case::given_up(429, Some("1"), RETRIES, None)]
    fn only_a_request_that_an_overloaded_server_rejected_is_retried(
        #[case] code: u16,
        #[case] after: Option<&str>,
        #[case] attempt: u32,
        #[case] expected: Option<u64>,
    ) {
        assert_eq!(
            pause(&answer(code, after), attempt),
            expected.map(Duration::from_millis)
        );
    }
}
