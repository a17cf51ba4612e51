//! Bounds on the answers of an API server that somebody else runs. Invariant: an answer that is read in full has at most
//! [`ANSWER_BYTES`] and takes at most [`ANSWER_TIME`]; an event of a watch has at most [`EVENT_BYTES`]; and the number of
//! JSON objects in them is bounded too, because an empty object of two bytes becomes a struct of a thousand. All API servers
//! together send [`LARGE_ANSWERS`] large answers at a time, and each of them one; the others wait for their turn, for
//! [`ANSWER_TIME`] at most. An API server that does not use its turn gets no further one for some time.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use capstan_core::Clock;
use capstan_core::backoff::exponential;
use futures::future::{MapOk, TryFutureExt};
use http::{Request, Response};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::Sleep;
use tower::{BoxError, Layer, Service};

/// A page of 50 Nodes with their image lists has 0.5 to 2.5 MiB.
const ANSWER_BYTES: usize = 4 << 20;
/// etcd takes objects up to 1.5 MiB.
const EVENT_BYTES: usize = 2 << 20;
/// JSON objects in one answer: a page of 50 Nodes has 5,000 to 15,000, most of them in managedFields.
const ANSWER_OBJECTS: usize = 100_000;
/// JSON objects in one event of a watch.
const EVENT_OBJECTS: usize = 20_000;
/// Items in one list: no page that we ask for has more than 500.
const ITEMS: usize = 1_000;
/// An answer that is not complete after this long is given up; the wait for its beginning and for its turn have the same limit.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// An answer with more bytes is large. Any number of small ones is read at a time.
const SMALL: usize = 1 << 20;
/// Large answers that are read at a time.
const LARGE_ANSWERS: usize = 2;
/// The rest of a large answer must come within this time, because others wait for it. It is enough at 1 MiB a second.
const LARGE_TIME: Duration = Duration::from_secs(5);

/// An API server that lost its turn by time gets no other one for this long; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(30 * 60);

/// How much a document of somebody else may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub bytes: usize,
    /// JSON objects.
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
    entries: usize::MAX,
    items: ITEMS,
    // The list is the outermost object, and `items` an array in it.
    depth: 2,
};
const EVENT: Limits = Limits {
    bytes: EVENT_BYTES,
    objects: EVENT_OBJECTS,
    entries: usize::MAX,
    items: usize::MAX,
    depth: 0,
};

/// The turns of the large answers.
static TURNS: Semaphore = Semaphore::const_new(LARGE_ANSWERS);

/// An answer beyond the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unbounded {
    #[error("the answer of the API server is too large")]
    TooLarge,
    #[error("the answer of the API server does not end in time")]
    TooLong,
}

/// Bounds the answers of one API server; the large ones take turns with those of all others. Clones are of the same one.
#[derive(Clone)]
pub(crate) struct Bounds {
    turns: &'static Semaphore,
    queue: Arc<Queue>,
}

impl Bounds {
    /// The bounds of one API server that somebody else runs.
    pub fn new() -> Self {
        Self::with(&TURNS)
    }

    fn with(turns: &'static Semaphore) -> Self {
        let queue = Arc::new(Queue {
            own: Arc::new(Semaphore::new(1)),
            lost: Mutex::default(),
        });
        Self { turns, queue }
    }
}

/// The large answers of one API server: one of them at a time waits for a turn or takes it.
struct Queue {
    own: Arc<Semaphore>,
    /// How many turns in a row it lost by time, and until when it gets no other one.
    lost: Mutex<(u32, Option<Instant>)>,
}

impl Queue {
    fn is_barred(&self) -> bool {
        self.lost.lock().1.is_some_and(|until| now() < until)
    }

    fn lost_turn(&self) {
        let mut lost = self.lost.lock();
        lost.0 = lost.0.saturating_add(1);
        lost.1 = Some(now() + exponential(FIRST_PAUSE, LONGEST_PAUSE, lost.0));
    }

    fn used_turn(&self) {
        *self.lost.lock() = Default::default();
    }
}

fn now() -> Instant {
    Clock::system().instant()
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
    turn: Turn,
    failed: bool,
}

/// The place in the API server's own queue, and the turn.
type Permits = Option<(OwnedSemaphorePermit, SemaphorePermit<'static>)>;

/// The turn of an answer that is read in full.
enum Turn {
    NotNeeded,
    Waiting(Pin<Box<dyn Future<Output = Permits> + Send>>),
    /// Other large answers wait until this one ends.
    Taken {
        _turn: Permits,
    },
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
            scan,
            deadline: (!watch).then(|| Box::pin(tokio::time::sleep(ANSWER_TIME))),
            turn: Turn::NotNeeded,
            failed: false,
        }
    }

    fn fail<T>(&mut self, error: Unbounded) -> Poll<Option<Result<T, BoxError>>> {
        if error == Unbounded::TooLong && matches!(self.turn, Turn::Taken { .. }) {
            self.bounds.queue.lost_turn();
        }
        self.failed = true;
        self.turn = Turn::NotNeeded;
        Poll::Ready(Some(Err(error.into())))
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
        if let Turn::Waiting(turn) = &mut self.turn {
            let turn = ready!(turn.as_mut().poll(cx));
            if self.bounds.queue.is_barred() {
                return self.fail(Unbounded::TooLong);
            }
            let mut deadline = Box::pin(tokio::time::sleep(LARGE_TIME));
            // The deadline wakes this task only once it was polled.
            let _ = deadline.as_mut().poll(cx);
            (self.turn, self.deadline) = (Turn::Taken { _turn: turn }, Some(deadline));
        }
        match ready!(self.inner.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => {
                let data = frame.data_ref().map(AsRef::<[u8]>::as_ref).unwrap_or_default();
                if !self.scan.is_within_bounds(data) {
                    return self.fail(Unbounded::TooLarge);
                }
                if self.scan.is_large() && matches!(self.turn, Turn::NotNeeded) {
                    if self.bounds.queue.is_barred() {
                        return self.fail(Unbounded::TooLong);
                    }
                    // Nobody closes the semaphores.
                    let (turns, own) = (self.bounds.turns, self.bounds.queue.own.clone());
                    self.turn = Turn::Waiting(Box::pin(async move {
                        let own = own.acquire_owned().await.ok()?;
                        Some((own, turns.acquire().await.ok()?))
                    }));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            None => {
                if matches!(self.turn, Turn::Taken { .. }) {
                    self.bounds.queue.used_turn();
                }
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

    /// Whether the answer is one that is read in full, and takes a turn.
    fn is_large(&self) -> bool {
        !self.lines && self.bytes > SMALL
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
            (false, b'{') => {
                self.objects += 1;
                self.depth += 1;
            }
            // One more entry follows.
            (false, b',') => {
                self.entries += 1;
                self.items += usize::from(self.depth == self.limits.depth);
            }
            (false, b'[') => self.depth += 1,
            (false, b'}' | b']') => self.depth = self.depth.saturating_sub(1),
            (false, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use k8s_openapi::api::core::v1::Node;
    use kube::api::{Api, ListParams, WatchParams};
    use rstest::rstest;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// So many turns of a test's own.
    fn turns(number: usize) -> &'static Semaphore {
        Box::leak(Box::new(Semaphore::new(number)))
    }

    /// Bounds with turns of their own.
    fn bounds() -> Bounds {
        Bounds::with(turns(LARGE_ANSWERS))
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
        assert_eq!((list.items, list.objects, list.depth), (ITEMS, 2 * ITEMS + 1, 2));
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
        let (turns, most) = (turns(LARGE_ANSWERS), Arc::default());
        let servers: Vec<_> = (0..6).map(|_| large(&Bounds::with(turns), None, &most)).collect();
        let began = tokio::time::Instant::now();
        let ended = futures::future::join_all(servers.iter().map(list)).await;
        assert_eq!(ended, vec![Err(Unbounded::TooLong.to_string()); 6]);
        assert_eq!(began.elapsed().as_secs(), 3 * LARGE_TIME.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn one_api_server_waits_for_one_turn_and_gets_none_for_a_while_after_it_lost_one() {
        let (turns, most) = (turns(1), Arc::default());
        let bounds = Bounds::with(turns);
        let (bad, good) = (large(&bounds, None, &most), large(&Bounds::with(turns), Some(3), &most));
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
        tokio::time::sleep(FIRST_PAUSE).await;
        assert!(list(&bad).await.is_err());
        assert_eq!(bounds.queue.lost.lock().0, 2, "it had a second turn");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_does_not_wait_for_its_turn_for_ever() {
        let began = tokio::time::Instant::now();
        let nodes = large(&Bounds::with(turns(0)), Some(1), &Arc::default());
        assert_eq!(list(&nodes).await, Err(Unbounded::TooLong.to_string()));
        assert_eq!(began.elapsed(), ANSWER_TIME);
    }
}
