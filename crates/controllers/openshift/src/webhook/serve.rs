//! The HTTPS side. Invariant: a new certificate is used for the next connection, without a restart.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::certificate::Certificate;
use super::configuration::{MUTATE, VALIDATE};
use super::review::{self, Request};
use crate::sizes::Sizes;

/// A client that does not finish its handshake by then is let go.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The certificate that is served now.
#[derive(Debug, Default)]
pub struct Current(RwLock<Option<Arc<CertifiedKey>>>);

impl Current {
    pub fn replace(&self, certificate: &Certificate) -> Result<(), Error> {
        let failed = |error: &dyn std::fmt::Display| Error::Certificate(error.to_string());
        let chain = CertificateDer::pem_slice_iter(certificate.certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
        let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).map_err(|error| failed(&error))?;
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).map_err(|error| failed(&error))?;
        let certified = CertifiedKey::new(chain.map_err(|error| failed(&error))?, key);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(certified));
        Ok(())
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[derive(Clone)]
pub struct Rules {
    pub cluster_id: Arc<str>,
    pub sizes: Option<Sizes>,
}

fn routes(rules: Rules) -> Router {
    Router::new()
        .route(MUTATE, post(mutate))
        .route(VALIDATE, post(validate))
        .with_state(rules)
}

type Review = AdmissionReview<DynamicObject>;

/// Returns the request and the answer that lets it pass. `None`: the review holds no request.
fn opened(review: Review) -> Option<(Request, AdmissionResponse)> {
    let request: AdmissionRequest<DynamicObject> = review.try_into().ok()?;
    let response = AdmissionResponse::from(&request);
    Some((request.into(), response))
}

fn no_request() -> Json<Review> {
    Json(AdmissionResponse::invalid("the review holds no request").into_review())
}

async fn mutate(State(rules): State<Rules>, Json(review): Json<Review>) -> Json<Review> {
    let Some((request, response)) = opened(review) else {
        return no_request();
    };
    let patch = review::defaults(&request, &rules.cluster_id);
    Json(review::patched(response, &patch).into_review())
}

async fn validate(State(rules): State<Rules>, Json(review): Json<Review>) -> Json<Review> {
    let Some((request, response)) = opened(review) else {
        return no_request();
    };
    let mut findings = review::validate(&request);
    // Azure is not asked about a request that is refused anyway.
    if let (true, Some(sizes)) = (findings.is_ok(), &rules.sizes)
        && let Some(spec) = review::changed_spec(&request)
    {
        let warnings = sizes.warnings(&request.user, &request.namespace, &spec).await;
        findings.warnings.extend(warnings);
    }
    Json(review::judged(response, findings).into_review())
}

/// Listen, and answer until the shutdown. Returns the address bound.
pub async fn start(
    listen: SocketAddr,
    rules: Rules,
    current: Arc<Current>,
    shutdown: CancellationToken,
) -> Result<SocketAddr, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Listen {
        address: listen,
        reason: error.to_string(),
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        .with_no_client_auth()
        .with_cert_resolver(current);
    let listener = TcpListener::bind(listen).await.map_err(|error| failed(&error))?;
    let bound = listener.local_addr().map_err(|error| failed(&error))?;
    tokio::spawn(accept(
        listener,
        TlsAcceptor::from(Arc::new(config)),
        routes(rules),
        shutdown,
    ));
    Ok(bound)
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, routes: Router, shutdown: CancellationToken) {
    loop {
        let stream = tokio::select! {
            () = shutdown.cancelled() => return,
            stream = listener.accept() => stream,
        };
        let Ok((stream, _)) = stream else { continue };
        let (acceptor, service, shutdown) = (
            acceptor.clone(),
            TowerToHyperService::new(routes.clone()),
            shutdown.clone(),
        );
        tokio::spawn(async move {
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await else {
                return;
            };
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                () = shutdown.cancelled() => {}
                _ = connection => {}
            }
        });
    }
}
