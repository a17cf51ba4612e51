//! Bounds on the answers of an API server that somebody else runs. Invariant: an answer that is read in full has at most
//! [`ANSWER_BYTES`] and takes at most [`ANSWER_TIME`]; an event of a watch has at most [`EVENT_BYTES`]; and the number of
//! JSON objects in them is bounded too, because an empty object of two bytes becomes a struct of a thousand.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::{MapOk, TryFutureExt};
use http::{Request, Response};
use http_body::{Body, Frame};
use tokio::time::Sleep;
use tower::{BoxError, Layer, Service};

/// A page of 100 Nodes with their image lists has 1 to 5 MiB.
const ANSWER_BYTES: usize = 8 << 20;
/// etcd takes objects up to 1.5 MiB.
const EVENT_BYTES: usize = 2 << 20;
/// JSON objects in one answer: a page of 100 Nodes has 10,000 to 30,000, most of them in managedFields.
const ANSWER_OBJECTS: usize = 200_000;
/// JSON objects in one event of a watch.
const EVENT_OBJECTS: usize = 20_000;
/// Items in one list: no page that we ask for has more than 500.
const ITEMS: usize = 1_000;
/// An answer that is not complete after this long is given up; the wait for its beginning has the same limit.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// An answer beyond the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unbounded {
    #[error("the answer of the API server is too large")]
    TooLarge,
    #[error("the answer of the API server does not end in time")]
    TooLong,
}

pub(crate) struct Bounds;

impl<S> Layer<S> for Bounds {
    type Service = Bounded<S>;

    fn layer(&self, inner: S) -> Bounded<S> {
        Bounded(inner)
    }
}

pub(crate) struct Bounded<S>(S);

impl<S, Q, B> Service<Request<Q>> for Bounded<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
{
    type Response = Response<BoundedBody<B>>;
    type Error = S::Error;
    type Future = MapOk<S::Future, fn(Response<B>) -> Response<BoundedBody<B>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let bound: fn(Response<B>) -> Response<BoundedBody<B>> = match is_watch(&request) {
            true => |response| response.map(|body| BoundedBody::new(body, true)),
            false => |response| response.map(|body| BoundedBody::new(body, false)),
        };
        self.0.call(request).map_ok(bound)
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
    failed: bool,
}

impl<B> BoundedBody<B> {
    fn new(inner: B, watch: bool) -> Self {
        Self {
            inner: Box::pin(inner),
            scan: Scan::new(watch),
            deadline: (!watch).then(|| Box::pin(tokio::time::sleep(ANSWER_TIME))),
            failed: false,
        }
    }

    fn fail<T>(&mut self, error: Unbounded) -> Poll<Option<Result<T, BoxError>>> {
        self.failed = true;
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
        match ready!(self.inner.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => {
                let data = frame.data_ref().map(AsRef::<[u8]>::as_ref).unwrap_or_default();
                if self.scan.is_within_bounds(data) {
                    return Poll::Ready(Some(Ok(frame)));
                }
                self.fail(Unbounded::TooLarge)
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
        (kube::Client::new(Bounds.layer(service), "default"), sent)
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
        let nodes: Api<Node> = Api::all(kube::Client::new(Bounds.layer(service), "default"));
        let error = nodes.list(&ListParams::default()).await.unwrap_err();
        assert_eq!(crate::error::classified(&error), Unbounded::TooLong.to_string());
    }
}
