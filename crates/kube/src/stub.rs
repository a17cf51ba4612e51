//! An API server that answers as a test says: for what hangs on the order of answers, which a real one does not promise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower::BoxError;

/// A client whose n-th request (from 0) is answered by `answer(n)` with a code and one JSON document; `None` never is.
/// Beside it, how many requests there were.
pub fn client(
    answer: impl Fn(usize) -> Option<(u16, Value)> + Send + Sync + 'static,
) -> (kube::Client, Arc<AtomicUsize>) {
    let (answer, count) = (Arc::new(answer), Arc::new(AtomicUsize::new(0)));
    let counted = count.clone();
    let service = tower::service_fn(move |_: Request<Body>| {
        let answer = answer(counted.fetch_add(1, Ordering::SeqCst));
        async move {
            let Some((code, body)) = answer else {
                return std::future::pending().await;
            };
            let answer = Response::builder().status(code).body(body.to_string().into_bytes());
            Ok::<_, BoxError>(answer?.map(Body::from))
        }
    });
    (kube::Client::new(service, "default"), count)
}

/// A list of ConfigMaps of these names, as version 1.
pub fn config_maps(names: &[&str]) -> Value {
    let map = |name: &&str| json!({"metadata": {"name": name, "namespace": "default", "resourceVersion": "1"}});
    json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"},
        "items": names.iter().map(map).collect::<Vec<_>>()})
}
