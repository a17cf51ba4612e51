//! Bounds on the answers of an API server that somebody else runs. Invariant: an answer that is read in full has at most
//! [`ANSWER_BYTES`] and takes at most [`ANSWER_TIME`]; an event of a watch has at most [`EVENT_BYTES`]; and the number of
//! JSON objects, arrays and entries in them is bounded too, because an object or array of two bytes becomes some hundred. Large
//! answers and events take turns with those of all other servers, vCenters included; they wait for [`ANSWER_TIME`] at most.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use capstan_core::Clock;
use capstan_core::turns::{self, Turn, Turns};
use futures::future::{MapOk, TryFutureExt};
use http::{Request, Response};
use http_body::{Body, Frame};
use tokio::time::Sleep;
use tower::{BoxError, Layer, Service};

/// A page of 50 Nodes with their image lists has 0.5 to 2.5 MiB.
const ANSWER_BYTES: usize = 4 << 20;
/// etcd takes objects up to 1.5 MiB.
const EVENT_BYTES: usize = 2 << 20;
/// JSON objects and arrays in one answer: a page of 50 Nodes has 5,000 to 15,000 objects, most of them in managedFields, and
/// 3,000 arrays, most of them names of images. One with an entry takes some 700 bytes in memory.
const ANSWER_OBJECTS: usize = 25_000;
/// JSON objects and arrays in one event of a watch: a Node has a few hundred.
const EVENT_OBJECTS: usize = 5_000;
/// Entries of objects and arrays in one answer: a Node has some 500 to 1,000. One takes up to 200 bytes in memory.
const ANSWER_ENTRIES: usize = 100_000;
const EVENT_ENTRIES: usize = 20_000;
/// Items in one list: no page that we ask for has more than 500.
const ITEMS: usize = 1_000;
/// An answer that is not complete after this long is given up; the wait for its beginning and for its turn have the same limit.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// An answer or an event with more bytes, objects or entries is large. Any number of small ones is read at a time.
const SMALL: usize = 256 << 10;
const SMALL_OBJECTS: usize = 2_000;
const SMALL_ENTRIES: usize = 5_000;
/// The rest of a large answer must come within this time, because others wait for it. It is enough at 1 MiB a second.
const LARGE_TIME: Duration = Duration::from_secs(5);

/// How much a document of somebody else may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub bytes: usize,
    /// JSON objects and arrays.
    pub objects: usize,
    /// Entries of arrays and objects at any depth.
    pub entries: usize,
    /// Entries of one depth.
    pub items: usize,
    /// How many brackets are open around an item.
    pub depth: usize,
}

const ANSWER: Limits = Limits {
    bytes: ANSWER_BYTES,
    objects: ANSWER_OBJECTS,
    entries: ANSWER_ENTRIES,
    items: ITEMS,
    // The list is the outermost object, and `items` an array in it.
    depth: 2,
};
const EVENT: Limits = Limits {
    bytes: EVENT_BYTES,
    objects: EVENT_OBJECTS,
    entries: EVENT_ENTRIES,
    items: usize::MAX,
    depth: 0,
};

/// An answer beyond the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unbounded {
    #[error("the answer of the API server is too large")]
    TooLarge,
    #[error("the answer of the API server does not end in time")]
    TooLong,
}

/// Bounds the answers of one API server. Clones are of the same one.
#[derive(Clone)]
pub(crate) struct Bounds {
    turns: Arc<Turns>,
    tenant: Arc<str>,
    server: Arc<str>,
}

impl Bounds {
    /// The bounds of the API server of a cluster that the owner of this namespace runs.
    pub fn of(namespace: &str, cluster: &str) -> Self {
        Self::with(turns::of_answers(), namespace, cluster)
    }

    fn with(turns: &Arc<Turns>, tenant: &str, server: &str) -> Self {
        Self {
            turns: turns.clone(),
            tenant: tenant.into(),
            server: server.into(),
        }
    }

    /// Waits for a turn, unless the API server gets none for now.
    async fn turn(self) -> Option<Turn> {
        self.turns.take(Clock::system(), &self.tenant, &self.server).await
    }
}

impl<S> Layer<S> for Bounds {
    type Service = Bounded<S>;

    fn layer(&self, inner: S) -> Bounded<S> {
        Bounded {
            inner,
            bounds: self.clone(),
        }
    }
}

pub(crate) struct Bounded<S> {
    inner: S,
    bounds: Bounds,
}

impl<S, Q, B> Service<Request<Q>> for Bounded<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
{
    type Response = Response<BoundedBody<B>>;
    type Error = S::Error;
    type Future = MapOk<S::Future, Box<dyn FnOnce(Response<B>) -> Response<BoundedBody<B>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (watch, bounds) = (is_watch(&request), self.bounds.clone());
        let bound = move |response: Response<B>| response.map(|body| BoundedBody::new(body, watch, bounds));
        self.inner.call(request).map_ok(Box::new(bound))
    }
}

/// Whether the answer is a stream of events, one in each line.
pub(crate) fn is_watch<B>(request: &Request<B>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.split('&').any(|part| part == "watch=true")
}

pub(crate) struct BoundedBody<B> {
    inner: Pin<Box<B>>,
    scan: Scan,
    deadline: Option<Pin<Box<Sleep>>>,
    bounds: Bounds,
    turn: Waiting,
    failed: bool,
}

enum Waiting {
    NotNeeded,
    For(Pin<Box<dyn Future<Output = Option<Turn>> + Send>>),
    /// Other large answers wait until this one, or this event, ends.
    Over(Turn),
}

impl<B> BoundedBody<B> {
    fn new(inner: B, watch: bool, bounds: Bounds) -> Self {
        let scan = match watch {
            true => Scan::of_lines(EVENT),
            false => Scan::new(ANSWER),
        };
        Self {
            inner: Box::pin(inner),
            bounds,
            deadline: (!watch).then(|| Box::pin(tokio::time::sleep(ANSWER_TIME))),
            scan,
            turn: Waiting::NotNeeded,
            failed: false,
        }
    }

    fn fail<T>(&mut self, error: Unbounded) -> Poll<Option<Result<T, BoxError>>> {
        self.failed = true;
        if let Waiting::Over(turn) = std::mem::replace(&mut self.turn, Waiting::NotNeeded) {
            turn.waste(Clock::system().instant());
        }
        Poll::Ready(Some(Err(error.into())))
    }

    /// Asks for the turn of what has become large, and ends the turn of an event that is over.
    fn take_turns(&mut self) {
        match &self.turn {
            Waiting::NotNeeded if self.scan.is_large() => {
                if self.scan.lines {
                    self.deadline = Some(Box::pin(tokio::time::sleep(ANSWER_TIME)));
                }
                self.turn = Waiting::For(Box::pin(self.bounds.clone().turn()));
            }
            Waiting::For(_) | Waiting::Over(_) if self.scan.lines && !self.scan.is_large() => self.end_turn(),
            Waiting::NotNeeded | Waiting::For(_) | Waiting::Over(_) => {}
        }
    }

    fn end_turn(&mut self) {
        if let Waiting::Over(turn) = std::mem::replace(&mut self.turn, Waiting::NotNeeded) {
            turn.used();
        }
        self.deadline = None;
    }
}

impl<B> Body for BoundedBody<B>
where
    B: Body,
    B::Data: AsRef<[u8]>,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        if self.failed {
            return Poll::Ready(None);
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return self.fail(Unbounded::TooLong);
        }
        if let Waiting::For(turn) = &mut self.turn {
            let Some(turn) = ready!(turn.as_mut().poll(cx)) else {
                return self.fail(Unbounded::TooLong);
            };
            let mut deadline = Box::pin(tokio::time::sleep(LARGE_TIME));
            // The deadline wakes this task only once it was polled.
            let _ = deadline.as_mut().poll(cx);
            (self.turn, self.deadline) = (Waiting::Over(turn), Some(deadline));
        }
        match ready!(self.inner.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => {
                let data = frame.data_ref().map(AsRef::<[u8]>::as_ref).unwrap_or_default();
                if !self.scan.is_within_bounds(data) {
                    return self.fail(Unbounded::TooLarge);
                }
                self.take_turns();
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            None => {
                self.end_turn();
                Poll::Ready(None)
            }
        }
    }
}

/// Counts what is in a JSON document, or in each line of a watch, as it arrives.
pub(crate) struct Scan {
    limits: Limits,
    /// Whether each line is a document.
    lines: bool,
    bytes: usize,
    objects: usize,
    entries: usize,
    items: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            lines: false,
            bytes: 0,
            objects: 0,
            entries: 0,
            items: 0,
            depth: 0,
            in_string: false,
            escaped: false,
        }
    }

    fn of_lines(limits: Limits) -> Self {
        Self {
            lines: true,
            ..Self::new(limits)
        }
    }

    pub(crate) fn is_within_bounds(&mut self, data: &[u8]) -> bool {
        data.iter().all(|byte| {
            self.read(*byte);
            self.bytes <= self.limits.bytes
                && self.objects <= self.limits.objects
                && self.entries <= self.limits.entries
                && self.items <= self.limits.items
        })
    }

    /// Whether the answer, or the event that is being read, takes a turn.
    fn is_large(&self) -> bool {
        self.bytes > SMALL || self.objects > SMALL_OBJECTS || self.entries > SMALL_ENTRIES
    }

    fn read(&mut self, byte: u8) {
        if self.lines && byte == b'\n' {
            *self = Self::of_lines(self.limits);
            return;
        }
        self.bytes += 1;
        match (self.in_string, byte) {
            (true, _) if self.escaped => self.escaped = false,
            (true, b'\\') => self.escaped = true,
            (true, b'"') => self.in_string = false,
            (true, _) => {}
            (false, b'"') => self.in_string = true,
            (false, b'{' | b'[') => {
                self.objects += 1;
                self.depth += 1;
            }
            // One more entry follows.
            (false, b',') => {
                self.entries += 1;
                self.items += usize::from(self.depth == self.limits.depth);
            }
            (false, b'}' | b']') => self.depth = self.depth.saturating_sub(1),
            (false, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};
    use k8s_openapi::api::core::v1::Node;
    use kube::api::{Api, ListParams, WatchParams};
    use rstest::rstest;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Bounds with turns of their own.
    fn bounds() -> Bounds {
        Bounds::with(&Arc::default(), "tenant", "server")
    }

    /// A body of the same part over and over, without end.
    struct Endless {
        first: Option<&'static str>,
        part: &'static str,
        sent: Arc<AtomicUsize>,
    }

    impl Body for Endless {
        type Data = bytes::Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<bytes::Bytes>, BoxError>>> {
            let part = match self.first.take() {
                Some(first) => first.to_owned(),
                None => self.part.repeat(1 + 65_536 / self.part.len()),
            };
            self.sent.fetch_add(part.len(), Ordering::SeqCst);
            Poll::Ready(Some(Ok(Frame::data(part.into()))))
        }
    }

    fn hostile(first: &'static str, part: &'static str) -> (kube::Client, Arc<AtomicUsize>) {
        let sent = Arc::new(AtomicUsize::new(0));
        let count = sent.clone();
        let service = tower::service_fn(move |_: Request<kube::client::Body>| {
            let body = Endless {
                first: Some(first),
                part,
                sent: count.clone(),
            };
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        });
        (kube::Client::new(bounds().layer(service), "default"), sent)
    }

    #[rstest]
    #[case::text(r#"{"items": [{"metadata": {"name": ""#, "x", ANSWER_BYTES)]
    #[case::empty_items(r#"{"items": ["#, "{},", ITEMS * 3)]
    #[case::empty_objects_in_an_item(r#"{"items": [{"metadata": {"managedFields": ["#, "{},", ANSWER_OBJECTS * 3)]
    #[case::arrays_in_an_item(r#"{"items": [{"metadata": {"managedFields": [{"fieldsV1": ["#, "[0],", ANSWER_OBJECTS * 4)]
    #[case::nested_arrays(r#"{"items": [{"metadata": {"managedFields": [{"fieldsV1": ["#, "[[[[[[[[0]]]]]]]],", ANSWER_OBJECTS * 3)]
    #[case::numbers_in_an_item(r#"{"items": [{"metadata": {"managedFields": [{"fieldsV1": ["#, "0,", ANSWER_ENTRIES * 2)]
    #[case::texts_in_an_item(r#"{"items": [{"metadata": {"finalizers": ["#, r#""","#, ANSWER_ENTRIES * 3)]
    #[case::lines(r#"{"items": ["#, "\n", ANSWER_BYTES)]
    #[tokio::test]
    async fn an_answer_without_end_is_given_up(
        #[case] first: &'static str,
        #[case] part: &'static str,
        #[case] bytes: usize,
    ) {
        let (client, sent) = hostile(first, part);
        let nodes: Api<Node> = Api::all(client);
        let error = nodes.list(&ListParams::default()).await.unwrap_err();
        assert_eq!(crate::error::classified(&error), Unbounded::TooLarge.to_string());
        let read = sent.load(Ordering::SeqCst);
        assert!(read <= bytes + 2 * 65_540, "{read} bytes were read");
    }

    #[tokio::test]
    async fn an_event_without_end_ends_the_watch() {
        let (client, sent) = hostile(r#"{"type": "ADDED", "object": {"metadata": {"name": ""#, "x");
        let nodes: Api<Node> = Api::all(client);
        let mut events = nodes.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        assert!(events.next().await.unwrap().is_err());
        assert!(sent.load(Ordering::SeqCst) <= EVENT_BYTES + 2 * 65_540);
    }

    #[test]
    fn the_events_of_a_watch_are_bounded_one_by_one() {
        let mut scan = Scan::of_lines(EVENT);
        let event = [b"{\"a\": {\"b\": \"}{\\\"{\"}}".as_slice(), b"\n"].concat();
        assert!((0..2 * EVENT_OBJECTS).all(|_| scan.is_within_bounds(&event)));
        let mut list = Scan::new(ANSWER);
        assert!(list.is_within_bounds(&[b"{\"items\": [".to_vec(), b"{\"x\": [{}]},".repeat(ITEMS)].concat()));
        assert_eq!((list.items, list.objects, list.depth), (ITEMS, 3 * ITEMS + 2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_trickles_is_given_up_in_time() {
        let service = tower::service_fn(|_: Request<kube::client::Body>| {
            let drops = futures::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Some((Ok::<_, BoxError>(Frame::data(bytes::Bytes::from_static(b" "))), ()))
            });
            let body = http_body_util::StreamBody::new(Box::pin(drops));
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        });
        let nodes: Api<Node> = Api::all(kube::Client::new(bounds().layer(service), "default"));
        let error = nodes.list(&ListParams::default()).await.unwrap_err();
        assert_eq!(crate::error::classified(&error), Unbounded::TooLong.to_string());
    }

    /// An API server whose answers are large at once. After that it sends a byte a second: `seconds` of them, or without end.
    fn large(bounds: &Bounds, seconds: Option<u64>, most: &Arc<AtomicUsize>) -> Api<Node> {
        let (reading, most) = (Arc::new(AtomicUsize::new(0)), most.clone());
        let service = tower::service_fn(move |_: Request<kube::client::Body>| {
            let (reading, most) = (reading.clone(), most.clone());
            let parts = futures::stream::unfold(0, move |part| {
                let (reading, most) = (reading.clone(), most.clone());
                async move {
                    if part == 1 {
                        most.fetch_max(1 + reading.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                    }
                    if seconds.is_some_and(|seconds| part > seconds) {
                        reading.fetch_sub(1, Ordering::SeqCst);
                        return None;
                    }
                    if part > 0 {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    let text = match part {
                        0 => r#"{"metadata": {}, "items": []}"#.to_owned() + &" ".repeat(SMALL),
                        _ => " ".to_owned(),
                    };
                    Some((Ok::<_, BoxError>(Frame::data(bytes::Bytes::from(text))), part + 1))
                }
            });
            let body = http_body_util::StreamBody::new(Box::pin(parts));
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        });
        Api::all(kube::Client::new(bounds.layer(service), "default"))
    }

    async fn list(nodes: &Api<Node>) -> Result<usize, String> {
        let listed = nodes.list(&ListParams::default()).await;
        listed
            .map(|list| list.items.len())
            .map_err(|error| crate::error::classified(&error))
    }

    #[tokio::test(start_paused = true)]
    async fn large_answers_take_turns_and_one_that_stalls_gives_its_turn_back() {
        let (turns, most) = (Arc::default(), Arc::default());
        let servers: Vec<_> = (0..6)
            .map(|n| large(&Bounds::with(&turns, &n.to_string(), &n.to_string()), None, &most))
            .collect();
        let began = tokio::time::Instant::now();
        let ended = futures::future::join_all(servers.iter().map(list)).await;
        assert_eq!(ended, vec![Err(Unbounded::TooLong.to_string()); 6]);
        assert_eq!(began.elapsed(), 6 * LARGE_TIME);
    }

    #[tokio::test(start_paused = true)]
    async fn one_api_server_waits_for_one_turn_and_gets_none_for_a_while_after_it_lost_one() {
        let (turns, most) = (Arc::default(), Arc::default());
        let bad = large(&Bounds::with(&turns, "bad", "bad"), None, &most);
        let good = large(&Bounds::with(&turns, "good", "good"), Some(3), &most);
        let began = tokio::time::Instant::now();
        let many = futures::future::join_all((0..6).map(|_| list(&bad)));
        let (many, one) = tokio::join!(many, list(&good));
        assert_eq!(many, vec![Err(Unbounded::TooLong.to_string()); 6]);
        assert_eq!(one, Ok(0));
        assert_eq!(
            began.elapsed(),
            LARGE_TIME + Duration::from_secs(3),
            "one turn for the six"
        );
        assert_eq!(most.load(Ordering::SeqCst), 1);
        // Not even when nobody else wants a turn.
        let began = tokio::time::Instant::now();
        assert!(list(&bad).await.is_err());
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(turns.bars(Clock::system().instant(), "bad"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_clusters_of_one_tenant_take_one_turn_together() {
        let (turns, most) = (Arc::default(), Arc::default());
        let stalling: Vec<_> = (0..20)
            .map(|n| large(&Bounds::with(&turns, "bad", &n.to_string()), None, &most))
            .collect();
        let good = large(&Bounds::with(&turns, "good", "good"), Some(3), &most);
        let many = futures::future::join_all(stalling.iter().map(list));
        let one = async {
            let began = tokio::time::Instant::now();
            let listed = (list(&good).await, list(&good).await);
            (listed, began.elapsed())
        };
        let (many, (listed, took)) = tokio::join!(many, one);
        assert!(many.iter().all(Result::is_err));
        assert_eq!(listed, (Ok(0), Ok(0)));
        let most = 2 * (LARGE_TIME + Duration::from_secs(3));
        assert!(took <= most, "one turn of the other before each: {took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_too_large_wastes_its_turn() {
        use http_body_util::BodyExt;
        let turns = Arc::default();
        let text = vec!["x".repeat(SMALL + 1), "x".repeat(ANSWER_BYTES)];
        let mut body = BoundedBody::new(parts(text), false, Bounds::with(&turns, "server", "server"));
        assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        let end = body.frame().await.and_then(Result::err).map(|error| error.to_string());
        assert_eq!(end, Some(Unbounded::TooLarge.to_string()));
        assert!(turns.bars(Clock::system().instant(), "server"));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_does_not_wait_for_its_turn_for_ever() {
        let turns = Arc::default();
        let _taken = Bounds::with(&turns, "other", "other").turn().await;
        let began = tokio::time::Instant::now();
        let nodes = large(&Bounds::with(&turns, "server", "server"), Some(1), &Arc::default());
        assert_eq!(list(&nodes).await, Err(Unbounded::TooLong.to_string()));
        assert_eq!(began.elapsed(), ANSWER_TIME);
    }

    /// A body of these parts; after them nothing comes, and the body does not end.
    fn parts(parts: Vec<String>) -> impl Body<Data = bytes::Bytes, Error = BoxError> {
        let frames = parts.into_iter().map(|part| Ok(Frame::data(bytes::Bytes::from(part))));
        http_body_util::StreamBody::new(futures::stream::iter(frames).chain(futures::stream::pending()))
    }

    #[rstest]
    #[case::of_many_bytes("x".repeat(SMALL + 1))]
    #[case::of_many_objects("{}".repeat(SMALL_OBJECTS + 1))]
    #[case::of_many_arrays("[".repeat(SMALL_OBJECTS + 1))]
    #[case::of_many_entries("0,".repeat(SMALL_ENTRIES + 1))]
    #[tokio::test(start_paused = true)]
    async fn a_large_event_takes_a_turn_until_its_end(#[case] text: String) {
        use http_body_util::BodyExt;
        let turns = Arc::default();
        let is_taken = || Bounds::with(&turns, "other", "other").turn().now_or_never().is_none();
        let frames = vec![text.clone(), " ".into(), "\n".into(), text.clone(), " ".into()];
        let mut body = BoundedBody::new(parts(frames), true, Bounds::with(&turns, "server", "server"));
        for taken in [false, true, false, false, true] {
            assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
            assert_eq!(is_taken(), taken);
        }
        let began = tokio::time::Instant::now();
        let end = body.frame().await.and_then(Result::err).map(|error| error.to_string());
        assert_eq!(end, Some(Unbounded::TooLong.to_string()));
        assert_eq!(began.elapsed(), LARGE_TIME);
        assert!(!is_taken() && turns.bars(Clock::system().instant(), "server"));
        // A watch in which little happens has all the time in the world.
        let mut body = BoundedBody::new(parts(vec!["{}\n".into()]), true, Bounds::with(&turns, "quiet", "quiet"));
        assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        let silence = tokio::time::timeout(ANSWER_TIME * 100, body.frame()).await;
        assert!(silence.is_err());
    }
}
