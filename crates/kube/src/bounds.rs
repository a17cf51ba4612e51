//! Bounds on the answers of an API server that somebody else runs. Invariant: an answer that is read in full has at most
//! [`ANSWER_BYTES`] and takes at most [`ANSWER_TIME`]; an event of a watch has at most [`EVENT_BYTES`]; and the number of
//! JSON objects in them is bounded too, because an empty object of two bytes becomes a struct of a thousand. All API servers
//! together send [`LARGE_ANSWERS`] large answers at a time; the others wait for their turn.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::{MapOk, TryFutureExt};
use http::{Request, Response};
use http_body::{Body, Frame};
use tokio::sync::{Semaphore, SemaphorePermit};
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
/// An answer that is not complete after this long is given up; the wait for its beginning has the same limit.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// An answer with more bytes is large. Any number of small ones is read at a time.
const SMALL: usize = 1 << 20;
/// Large answers that are read at a time.
const LARGE_ANSWERS: usize = 2;
/// The rest of a large answer must come within this time, because others wait for it. It is enough at 1 MiB a second.
const LARGE_TIME: Duration = Duration::from_secs(5);

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

/// Bounds answers; the large ones take these turns.
pub(crate) struct Bounds(&'static Semaphore);

impl Bounds {
    /// The bounds of all API servers that others run.
    pub fn shared() -> Self {
        Self(&TURNS)
    }
}

impl<S> Layer<S> for Bounds {
    type Service = Bounded<S>;

    fn layer(&self, inner: S) -> Bounded<S> {
        Bounded { inner, turns: self.0 }
    }
}

pub(crate) struct Bounded<S> {
    inner: S,
    turns: &'static Semaphore,
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
        let (watch, turns) = (is_watch(&request), self.turns);
        let bound = move |response: Response<B>| response.map(|body| BoundedBody::new(body, watch, turns));
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
    turns: &'static Semaphore,
    turn: Turn,
    failed: bool,
}

/// The turn of an answer that is read in full.
enum Turn {
    NotNeeded,
    Waiting(Pin<Box<dyn Future<Output = Option<SemaphorePermit<'static>>> + Send>>),
    /// Other large answers wait until this one ends.
    Taken {
        _turn: Option<SemaphorePermit<'static>>,
    },
}

impl<B> BoundedBody<B> {
    fn new(inner: B, watch: bool, turns: &'static Semaphore) -> Self {
        Self {
            inner: Box::pin(inner),
            turns,
            scan: Scan::new(watch),
            deadline: (!watch).then(|| Box::pin(tokio::time::sleep(ANSWER_TIME))),
            turn: Turn::NotNeeded,
            failed: false,
        }
    }

    fn fail<T>(&mut self, error: Unbounded) -> Poll<Option<Result<T, BoxError>>> {
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
        if let Turn::Waiting(turn) = &mut self.turn {
            let turn = ready!(turn.as_mut().poll(cx));
            self.turn = Turn::Taken { _turn: turn };
            self.deadline = Some(Box::pin(tokio::time::sleep(LARGE_TIME)));
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return self.fail(Unbounded::TooLong);
        }
        match ready!(self.inner.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => {
                let data = frame.data_ref().map(AsRef::<[u8]>::as_ref).unwrap_or_default();
                if !self.scan.is_within_bounds(data) {
                    return self.fail(Unbounded::TooLarge);
                }
                if self.scan.is_large() && matches!(self.turn, Turn::NotNeeded) {
                    // Nobody closes the semaphore.
                    let turns = self.turns;
                    self.turn = Turn::Waiting(Box::pin(async move { turns.acquire().await.ok() }));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            None => Poll::Ready(None),
        }
    }
}

/// Counts the bytes and the JSON objects of an answer, or of each event of a watch, as they arrive.
struct Scan {
    watch: bool,
    bytes: usize,
    objects: usize,
    items: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    fn new(watch: bool) -> Self {
        Self {
            watch,
            bytes: 0,
            objects: 0,
            items: 0,
            depth: 0,
            in_string: false,
            escaped: false,
        }
    }

    fn is_within_bounds(&mut self, data: &[u8]) -> bool {
        data.iter().all(|byte| {
            self.read(*byte);
            match self.watch {
                true => self.bytes <= EVENT_BYTES && self.objects <= EVENT_OBJECTS,
                false => self.bytes <= ANSWER_BYTES && self.objects <= ANSWER_OBJECTS && self.items <= ITEMS,
            }
        })
    }

    /// Whether the answer is one that is read in full, and takes a turn.
    fn is_large(&self) -> bool {
        !self.watch && self.bytes > SMALL
    }

    fn read(&mut self, byte: u8) {
        if self.watch && byte == b'\n' {
            *self = Self::new(true);
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
                // The list is the outermost object, and `items` an array in it.
                self.items += usize::from(self.depth == 2);
                self.objects += 1;
                self.depth += 1;
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Bounds with turns of their own.
    fn bounds() -> Bounds {
        Bounds(Box::leak(Box::new(Semaphore::new(LARGE_ANSWERS))))
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
        let mut scan = Scan::new(true);
        let event = [b"{\"a\": {\"b\": \"}{\\\"{\"}}".as_slice(), b"\n"].concat();
        assert!((0..2 * EVENT_OBJECTS).all(|_| scan.is_within_bounds(&event)));
        let mut list = Scan::new(false);
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

    #[tokio::test(start_paused = true)]
    async fn large_answers_take_turns_and_one_that_stalls_gives_its_turn_back() {
        let reading = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let (now, peak) = (reading.clone(), most.clone());
        let service = tower::service_fn(move |_: Request<kube::client::Body>| {
            // Large at once; after that the server sends a byte a second, and never ends.
            let (now, peak) = (now.clone(), peak.clone());
            let parts = futures::stream::unfold(0, move |part| {
                let (now, peak) = (now.clone(), peak.clone());
                async move {
                    if part > 0 {
                        if part == 1 {
                            peak.fetch_max(1 + now.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                        }
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    let text = if part == 0 {
                        " ".repeat(SMALL + 1)
                    } else {
                        " ".to_owned()
                    };
                    Some((Ok::<_, BoxError>(Frame::data(bytes::Bytes::from(text))), part + 1))
                }
            });
            let body = http_body_util::StreamBody::new(Box::pin(parts));
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        });
        let nodes: Api<Node> = Api::all(kube::Client::new(bounds().layer(service), "default"));
        let began = tokio::time::Instant::now();
        let lists = (0..6).map(|_| async {
            let error = nodes.list(&ListParams::default()).await.unwrap_err();
            reading.fetch_sub(1, Ordering::SeqCst);
            crate::error::classified(&error)
        });
        let errors = futures::future::join_all(lists).await;
        assert_eq!(errors, vec![Unbounded::TooLong.to_string(); 6]);
        assert_eq!(most.load(Ordering::SeqCst), LARGE_ANSWERS);
        assert_eq!(began.elapsed().as_secs(), 3 * LARGE_TIME.as_secs());
    }
}
