//! Azure inside the process of a test: requests reach a simulator without a network and without sign-in.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};

use crate::client::Answer;

type Answered = Pin<Box<dyn Future<Output = Result<Response<Bytes>, String>> + Send>>;

/// Answers requests; an error is an answer that was lost, with the reason.
#[derive(Clone)]
pub struct InProcess(Arc<dyn Fn(Request<Bytes>) -> Answered + Send + Sync>);

impl InProcess {
    pub fn new<F>(answer: impl Fn(Request<Bytes>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Response<Bytes>, String>> + Send + 'static,
    {
        Self(Arc::new(move |request| Box::pin(answer(request))))
    }

    pub(crate) async fn send(&self, request: reqwest::Request) -> Result<Answer, String> {
        let (url, body) = (request.url(), request.body().and_then(reqwest::Body::as_bytes));
        let query = url.query().map(|query| format!("?{query}")).unwrap_or_default();
        let mut copy = Request::new(Bytes::copy_from_slice(body.unwrap_or_default()));
        *copy.method_mut() = request.method().clone();
        *copy.headers_mut() = request.headers().clone();
        *copy.uri_mut() = format!("{}{query}", url.path())
            .parse()
            .map_err(|error| format!("{error}"))?;
        if let Some(host) = url.host_str().and_then(|host| host.parse().ok()) {
            copy.headers_mut().insert(http::header::HOST, host);
        }
        let (head, body) = (self.0)(copy).await?.into_parts();
        Ok(Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        })
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InProcess")
    }
}
