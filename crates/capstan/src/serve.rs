//! Health, readiness and metrics over HTTP.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use capstan_kube::Metrics;
use tokio::net::TcpListener;

/// What the program says about itself.
#[derive(Default)]
pub struct Status {
    started: AtomicBool,
    leading: AtomicBool,
    /// Those of the present term; a new term counts from zero, as a new process would.
    metrics: Mutex<Option<Metrics>>,
}

impl Status {
    pub fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    pub fn leading(&self, metrics: Metrics) {
        *self.metrics.lock().unwrap_or_else(PoisonError::into_inner) = Some(metrics);
        self.leading.store(true, Ordering::Relaxed);
    }

    pub fn standing_by(&self) {
        self.leading.store(false, Ordering::Relaxed);
    }

    fn encode(&self) -> String {
        let metrics = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let own = format!(
            "# HELP capstan_leading Whether this process holds the lease.\n# TYPE capstan_leading gauge\n\
             capstan_leading {}\n",
            u8::from(self.leading.load(Ordering::Relaxed))
        );
        own + &metrics.map_or_else(|| "# EOF\n".to_owned(), |metrics| metrics.encode())
    }
}

/// Binds first, so that a wrong address is an error at the start. Port 0 takes a free one.
pub async fn listen(address: SocketAddr, routes: Router) -> Result<SocketAddr> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    let bound = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(bound)
}

pub fn health(status: Arc<Status>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state(status)
}

pub fn metrics(status: Arc<Status>) -> Router {
    Router::new().route("/metrics", get(scrape)).with_state(status)
}

async fn ready(State(status): State<Arc<Status>>) -> Response {
    if status.started.load(Ordering::Relaxed) {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting").into_response()
    }
}

async fn scrape(State(status): State<Arc<Status>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], status.encode()).into_response()
}
