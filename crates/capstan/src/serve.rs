//! Health and readiness over HTTP, metrics over HTTPS.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use capstan_core::clock::Clock;
use capstan_kube::Metrics;
use capstan_kube::serve::ServerCertificate;
use parking_lot::Mutex;
use tracing::warn;

use crate::access::{self, Access};
use crate::controllers::Name;

/// Whoever issues a certificate renews it hours or days before it expires.
const CERTIFICATE_REREAD: Duration = Duration::from_secs(60);

/// The state of the program, as its probes and metrics show it.
pub struct Status {
    /// The name of the lease that this process holds or waits for.
    lease: String,
    started: AtomicBool,
    leading: AtomicBool,
    /// The controllers with a peer, and whether they wait for it.
    waiting: Mutex<BTreeMap<String, bool>>,
    /// The metrics of the present term. A new term counts from zero, as a new process does.
    metrics: Mutex<Option<Metrics>>,
}

impl Status {
    pub fn new(lease: &str) -> Self {
        Self {
            lease: lease.to_owned(),
            started: AtomicBool::default(),
            leading: AtomicBool::default(),
            waiting: Mutex::default(),
            metrics: Mutex::default(),
        }
    }

    pub fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    pub fn leading(&self, metrics: Metrics) {
        *self.metrics.lock() = Some(metrics);
        self.leading.store(true, Ordering::Relaxed);
    }

    pub fn standing_by(&self) {
        self.leading.store(false, Ordering::Relaxed);
    }

    /// Whether a controller waits until the one that it replaces has stopped.
    pub fn waits_for_peer(&self, controller: Name, waits: bool) {
        self.waiting.lock().insert(controller.to_string(), waits);
    }

    fn encode(&self) -> String {
        let metrics = self.metrics.lock().clone();
        let own = format!(
            "# HELP capstan_leading Whether this process holds the lease.\n# TYPE capstan_leading gauge\n\
             capstan_leading{{lease=\"{}\"}} {}\n",
            self.lease,
            u8::from(self.leading.load(Ordering::Relaxed))
        );
        let mut waiting =
            "# HELP capstan_waits_for_peer Whether a controller waits because the one that it replaces runs.\n\
                           # TYPE capstan_waits_for_peer gauge\n"
                .to_owned();
        for (controller, waits) in self.waiting.lock().iter() {
            let waits = u8::from(*waits);
            waiting += &format!("capstan_waits_for_peer{{controller=\"{controller}\"}} {waits}\n");
        }
        own + &waiting + &metrics.map_or_else(|| "# EOF\n".to_owned(), |metrics| metrics.encode())
    }
}

pub fn health(status: Arc<Status>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state(status)
}

/// Without `access` everybody may read them.
pub fn metrics(status: Arc<Status>, access: Option<Access>) -> Router {
    let routes = Router::new().route("/metrics", get(scrape)).with_state(status);
    match access {
        Some(access) => routes.layer(middleware::from_fn_with_state(Arc::new(access), access::authorize)),
        None => routes,
    }
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

/// Returns the certificate in the files `tls.crt` and `tls.key` of `dir`, which is read again when it is renewed there; without
/// `dir` a self-signed one.
pub fn certificate(dir: Option<PathBuf>) -> Result<Arc<ServerCertificate>> {
    let certificate = Arc::new(ServerCertificate::default());
    let Some(dir) = dir else {
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
        let made = rcgen::generate_simple_self_signed([host]).context("cannot make a certificate")?;
        certificate.replace(made.cert.pem().as_bytes(), made.signing_key.serialize_pem().as_bytes())?;
        return Ok(certificate);
    };
    let load = move |dir: &Path, certificate: &ServerCertificate| -> Result<()> {
        let read = |name: &str| std::fs::read(dir.join(name)).with_context(|| format!("cannot read {name}"));
        let replaced = certificate.replace(&read("tls.crt")?, &read("tls.key")?);
        replaced.with_context(|| format!("cannot use the certificate in {}", dir.display()))
    };
    load(&dir, &certificate)?;
    let current = certificate.clone();
    tokio::spawn(async move {
        loop {
            Clock::system().sleep(CERTIFICATE_REREAD).await;
            if let Err(error) = load(&dir, &current) {
                warn!(
                    error = format!("{error:#}"),
                    "cannot read the certificate of the metrics; the previous one stays in use"
                );
            }
        }
    });
    Ok(certificate)
}
