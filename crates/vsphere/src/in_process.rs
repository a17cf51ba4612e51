//! A vCenter inside the process of a test: requests reach it without a network.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

/// Answers requests.
#[derive(Clone)]
pub struct InProcess(Arc<dyn Fn(reqwest::Request) -> BoxFuture<'static, http::Response<String>> + Send + Sync>);

impl InProcess {
    pub fn new(
        answer: impl Fn(reqwest::Request) -> BoxFuture<'static, http::Response<String>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(answer))
    }

    pub(crate) async fn send(&self, request: reqwest::Request) -> reqwest::Response {
        (self.0)(request).await.into()
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InProcess")
    }
}
