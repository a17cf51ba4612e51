//! The TLS listener, and the way of a call: log, faults, limits, work, answer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request as HttpRequest, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

use super::cli::Lines;
use super::faults::{self, Action};
use super::log::{Log, UNANSWERED};
use super::throttle::{self, Buckets};
use super::tokens::Tokens;
use super::wire::{Answer, Call, FAILURE_CAUSE, Fail};
use super::world::World;
use super::{admin, policy, router};

/// Bytes of a request's body that are read at most, as Resource Manager does.
const MAX_BODY: usize = 4 << 20;

/// A client has so long for its TLS handshake and for the head of a request; longer than clients keep idle connections.
const HEADER_TIME: Duration = Duration::from_secs(90);

/// Connections that are served at once; more wait.
const MOST_CONNECTIONS: usize = 1024;

/// Everything behind the one lock.
pub struct Core {
    pub world: World,
    pub tokens: Tokens,
    pub buckets: Buckets,
    pub log: Log,
}

impl Core {
    /// Grows with every request and every change in time.
    pub fn changes(&self) -> u64 {
        self.log.counts.values().sum::<u64>() + self.world.ticket + self.world.queue.len() as u64
    }
}

pub struct Shared {
    core: Mutex<Core>,
    /// The queue of effects has changed.
    pub wake: Notify,
    /// Something came, changed or went: for the joiner.
    pub changed: Notify,
    lines: Option<Lines>,
}

/// The connection closes without an answer.
#[derive(Debug)]
pub struct Dropped;

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the answer was dropped by a fault rule")
    }
}

impl std::error::Error for Dropped {}

impl Shared {
    pub fn new(world: World, lines: Option<Lines>) -> Self {
        let core = Core {
            world,
            tokens: Tokens::default(),
            buckets: Buckets::default(),
            log: Log::default(),
        };
        Self {
            core: Mutex::new(core),
            wake: Notify::new(),
            changed: Notify::new(),
            lines,
        }
    }

    /// The state as of now.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.world.advance();
        core
    }

    /// Works on a call as a client would see it.
    pub async fn call(&self, mut call: Call) -> Result<Answer, Dropped> {
        if call.segment(0).eq_ignore_ascii_case("sim") {
            return Ok(admin::handle(self, &call));
        }
        let policy = policy::of(&call);
        let (n, struck, latency) = {
            let mut core = self.lock();
            let Core { world, log, .. } = &mut *core;
            let n = log.open(&call, policy, world.clock.stamp());
            (
                n,
                world.faults.strike(&call, policy),
                world.config.times.latency.draw(&mut world.chance),
            )
        };
        let mut drops = false;
        let mut refusal = None;
        for action in struck {
            match action {
                Action::Delay { millis } => tokio::time::sleep(Duration::from_millis(millis)).await,
                Action::Answer {
                    status,
                    code,
                    message,
                    retry_after,
                } => {
                    refusal.get_or_insert(faults::refusal(
                        status,
                        code.as_deref(),
                        message.as_deref(),
                        retry_after,
                    ));
                }
                Action::Refuse => {
                    self.close(n, UNANSWERED);
                    return Err(Dropped);
                }
                Action::Drop => drops = true,
                Action::Stall => call.ordeal.stall = true,
                Action::KeepDisks => call.ordeal.keep_disks = true,
                Action::FailProvisioning { .. } | Action::NoCapacity { .. } | Action::NeverJoin => {}
            }
        }
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let answer = match refusal {
            Some(fail) => fail.answer(),
            None => self.work(&call, policy),
        };
        self.close(n, if drops { UNANSWERED } else { answer.status.as_u16() });
        if drops { Err(Dropped) } else { Ok(answer) }
    }

    fn work(&self, call: &Call, policy: &str) -> Answer {
        let answer = {
            let mut core = self.lock();
            let Core {
                world, tokens, buckets, ..
            } = &mut *core;
            let limits = limits(world, buckets, call, policy);
            match limits {
                Ok(mut headers) => {
                    let mut answer = router::route(world, tokens, call).unwrap_or_else(|fail| fail.answer());
                    if answer.headers.iter().any(|(name, _)| *name == FAILURE_CAUSE) {
                        headers.retain(|(name, _)| *name != throttle::REMAINING);
                    }
                    answer.headers.extend(headers);
                    answer
                }
                Err(refusal) => refusal.answer(),
            }
        };
        self.wake.notify_one();
        self.changed.notify_one();
        answer
    }

    fn close(&self, n: u64, status: u16) {
        let request = self.lock().log.close(n, status);
        if let (Some(lines), Some(request)) = (&self.lines, request) {
            lines.print(&request);
        }
    }

    /// Lets things happen in their time, for as long as the simulator lives.
    pub async fn drive(self: Arc<Self>) {
        loop {
            let due = self.lock().world.next_due();
            let happened = match due {
                Some(due) => tokio::select! {
                    () = tokio::time::sleep_until(due) => true,
                    () = self.wake.notified() => false,
                },
                None => {
                    self.wake.notified().await;
                    false
                }
            };
            if happened {
                drop(self.lock());
                self.changed.notify_one();
            }
        }
    }
}

fn limits(
    world: &World,
    buckets: &mut Buckets,
    call: &Call,
    policy: &str,
) -> Result<throttle::Headers, Box<throttle::Refusal>> {
    if !call.segment(0).eq_ignore_ascii_case("subscriptions") {
        return Ok(Vec::new());
    }
    if !world.config.throttle {
        return Ok(throttle::full(call));
    }
    let region = region(world, call);
    buckets.count(call, policy, &region, world.now())
}

/// The region a call is counted in: its operation's, its resource's, its group's, or none.
fn region(world: &World, call: &Call) -> String {
    if call.segment(4).eq_ignore_ascii_case("locations") {
        return call.segment(5).to_lowercase();
    }
    let mut parts: Vec<&str> = call.key.split('/').collect();
    for depth in [9, 5] {
        parts.truncate(depth);
        if let Some(doc) = world.docs.get(&parts.join("/")) {
            return doc.location().to_lowercase();
        }
    }
    "global".into()
}

/// Accepts connections until it is dropped.
pub async fn listen(shared: Arc<Shared>, listener: TcpListener, tls: TlsAcceptor) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => {
                let Ok((stream, _)) = accepted else { continue };
                let (shared, tls) = (shared.clone(), tls.clone());
                connections.spawn(async move {
                    let _ = stream.set_nodelay(true);
                    let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIME, tls.accept(stream)).await else { return };
                    let service = service_fn(move |request| receive(shared.clone(), request));
                    let mut http = hyper::server::conn::http1::Builder::new();
                    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME);
                    // A connection that a fault rule or a client cuts is no error.
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn receive(shared: Arc<Shared>, request: HttpRequest<Incoming>) -> Result<Response<Full<Bytes>>, Dropped> {
    let (head, body) = request.into_parts();
    let raw = match Limited::new(body, MAX_BODY).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            let fail = Fail::new(
                413,
                "RequestContentTooLarge",
                format!("The request content exceeds the maximum size of '{MAX_BODY}' bytes."),
            );
            return Ok(respond(fail.answer(), None, false).map(Full::new));
        }
        Err(_) => return Err(Dropped),
    };
    let answer = answer(shared, HttpRequest::from_parts(head, raw)).await?;
    Ok(answer.map(Full::new))
}

/// Answers a request, however it came.
pub async fn answer(shared: Arc<Shared>, request: HttpRequest<Bytes>) -> Result<Response<Bytes>, Dropped> {
    let (head, raw) = request.into_parts();
    let host = head
        .headers
        .get("host")
        .and_then(|host| host.to_str().ok())
        .unwrap_or("localhost")
        .to_owned();
    let target = head
        .uri
        .path_and_query()
        .map_or_else(|| "/".to_owned(), ToString::to_string);
    let call = Call::new(head.method, &target, head.headers, raw, format!("https://{host}"));
    let client_request = call.header("x-ms-client-request-id").map(str::to_owned);
    let reads = call.method == http::Method::GET;
    let answer = shared.call(call).await?;
    Ok(respond(answer, client_request, reads))
}

/// Only answers to reads have their ETag in a header, too.
fn respond(answer: Answer, client_request: Option<String>, reads: bool) -> Response<Bytes> {
    let body = if answer.body.is_null() {
        Bytes::new()
    } else {
        Bytes::from(answer.body.to_string())
    };
    let id = uuid::Uuid::new_v4().to_string();
    let mut builder = Response::builder()
        .status(answer.status)
        .header("cache-control", "no-cache")
        .header("x-ms-request-id", &id)
        .header("x-ms-correlation-request-id", &id);
    if let Some(client_request) = client_request {
        builder = builder.header("x-ms-client-request-id", client_request);
    }
    if !body.is_empty() {
        builder = builder.header("content-type", "application/json; charset=utf-8");
    }
    let etag = answer.body.get("etag").and_then(serde_json::Value::as_str);
    if let Some(etag) = etag.filter(|_| reads) {
        builder = builder.header("etag", etag);
    }
    for (name, value) in &answer.headers {
        builder = builder.header(*name, value);
    }
    let failed = |_| {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    };
    builder.body(body).unwrap_or_else(failed)
}
