//! HTTP servers: health, metrics and admission.
//!
//! Invariant: a client that is slow or that opens many connections costs a bounded amount and stops nobody else. Connections
//! are limited in total and for each address. Each connection has a deadline for its TLS handshake, for the headers of each
//! request, for each whole request, and for its life.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::{Mutex, RwLock};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::util::MapRequest;
use tracing::warn;

/// Bytes of the headers of a request at most, and so of what a connection holds that does nothing. Tokens have a few KiB.
const HEADERS_BYTES: usize = 32 << 10;
/// The operating system refuses connections when it is out of file descriptors; some are closed after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Connections at a time from one address.
    pub connections_per_peer: usize,
    pub handshake: Duration,
    /// Time for the headers of a request, and so also between two requests.
    pub headers: Duration,
    /// Time for a request until its answer is complete.
    pub request: Duration,
    /// A connection is closed after this long, between two requests.
    pub life: Duration,
}

impl Default for Limits {
    /// Scrapers, kubelets and API servers need a few connections each, and milliseconds for a request.
    fn default() -> Self {
        Self {
            connections: 256,
            connections_per_peer: 64,
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(10),
            request: Duration::from_secs(30),
            life: Duration::from_secs(600),
        }
    }
}

/// The address of a request's client, in its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client(pub IpAddr);

/// The certificate of a server. A new one is used for the next connection, without a restart.
#[derive(Debug, Default)]
pub struct ServerCertificate(RwLock<Option<Arc<CertifiedKey>>>);

impl ServerCertificate {
    /// Takes a certificate chain and its key, both PEM.
    pub fn replace(&self, chain: &[u8], key: &[u8]) -> Result<(), rustls::Error> {
        let invalid = |error: rustls::pki_types::pem::Error| rustls::Error::General(error.to_string());
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain).collect();
        let key = PrivateKeyDer::from_pem_slice(key).map_err(invalid)?;
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key)?;
        let certified = CertifiedKey::new(chain.map_err(invalid)?, key);
        certified.keys_match()?;
        *self.0.write() = Some(Arc::new(certified));
        Ok(())
    }
}

impl ResolvesServerCert for ServerCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }
}

/// A server that is not listening yet.
pub struct Server {
    routes: Router,
    certificate: Option<Arc<ServerCertificate>>,
    limits: Limits,
    shutdown: CancellationToken,
}

impl Server {
    pub fn new(routes: Router, shutdown: CancellationToken) -> Self {
        Self {
            routes,
            certificate: None,
            limits: Limits::default(),
            shutdown,
        }
    }

    /// Serves HTTPS instead of HTTP.
    #[must_use]
    pub fn https(mut self, certificate: Arc<ServerCertificate>) -> Self {
        self.certificate = Some(certificate);
        self
    }

    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Listens at `address` and serves until the shutdown. Returns the address bound: port 0 stands for a free one.
    pub async fn listen(self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        let acceptor = self.certificate.map(acceptor).transpose().map_err(io::Error::other)?;
        let routes = self
            .routes
            .layer(middleware::from_fn_with_state(self.limits.request, within_deadline));
        tokio::spawn(accept(
            listener,
            Connections {
                routes,
                acceptor,
                limits: self.limits,
                shutdown: self.shutdown,
                peers: Arc::default(),
            },
        ));
        Ok(bound)
    }
}

fn acceptor(certificate: Arc<ServerCertificate>) -> Result<TlsAcceptor, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn within_deadline(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    match timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => StatusCode::REQUEST_TIMEOUT.into_response(),
    }
}

#[derive(Clone)]
struct Connections {
    routes: Router,
    acceptor: Option<TlsAcceptor>,
    limits: Limits,
    shutdown: CancellationToken,
    peers: Arc<Peers>,
}

async fn accept(listener: TcpListener, connections: Connections) {
    loop {
        let accepted = tokio::select! {
            () = connections.shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                // A connection over the limit is closed at once.
                if let Some(place) = Peers::enter(&connections.peers, peer.ip(), &connections.limits) {
                    tokio::spawn(connections.clone().serve(stream, place));
                }
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Connections {
    async fn serve(self, stream: TcpStream, place: Place) {
        let client = Client(place.peer);
        let Some(acceptor) = &self.acceptor else {
            return self.answer(stream, client).await;
        };
        if let Ok(Ok(stream)) = timeout(self.limits.handshake, acceptor.accept(stream)).await {
            self.answer(stream, client).await;
        }
    }

    async fn answer(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, client: Client) {
        let from_client = move |mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(client);
            request
        };
        let service = TowerToHyperService::new(MapRequest::new(self.routes.clone(), from_client));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.headers)
            .max_buf_size(HEADERS_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = sleep(self.limits.life) => {}
            () = self.shutdown.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = timeout(self.limits.request, connection).await;
    }
}

/// Open connections by address.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

impl Peers {
    fn enter(peers: &Arc<Self>, peer: IpAddr, limits: &Limits) -> Option<Place> {
        // One machine counts once, whether it comes by IPv4 or by IPv4 inside IPv6.
        let peer = peer.to_canonical();
        let mut open = peers.0.lock();
        let own = open.get(&peer).copied().unwrap_or(0);
        if own >= limits.connections_per_peer || open.values().sum::<usize>() >= limits.connections {
            return None;
        }
        open.insert(peer, own + 1);
        Some(Place {
            peers: peers.clone(),
            peer,
        })
    }
}

/// One open connection.
struct Place {
    peers: Arc<Peers>,
    peer: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.peers.0.lock();
        if let Some(count) = open.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Extension;
    use axum::body::Bytes;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Short for the deadline under test, and far longer than any test for the others.
    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(3600);
    const PATIENT: Limits = Limits {
        connections: 8,
        connections_per_peer: 2,
        handshake: LONG,
        headers: LONG,
        request: LONG,
        life: LONG,
    };

    async fn serve(limits: Limits, certificate: Option<Arc<ServerCertificate>>) -> SocketAddr {
        let routes = Router::new()
            .route("/", get(|| async { "served" }))
            .route(
                "/client",
                get(|Extension(client): Extension<Client>| async move { client.0.to_string() }),
            )
            .route("/body", post(|body: Bytes| async move { body }));
        let mut server = Server::new(routes, CancellationToken::new()).limits(limits);
        server.certificate = certificate;
        server.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
    }

    async fn connect(address: SocketAddr, sent: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        stream
    }

    /// Returns everything that the server sends until it closes the connection.
    async fn rest(mut stream: TcpStream) -> String {
        let mut text = String::new();
        // A server that closes a connection with unread bytes resets it.
        let _ = stream.read_to_string(&mut text).await;
        text
    }

    const WHOLE: &str = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    const PART: &str = "GET / HTTP/1.1\r\nHost: ";

    #[tokio::test]
    async fn a_client_with_slow_headers_is_cut_off_and_others_are_served() {
        let limits = Limits {
            // Enough for a client that is not slow, on a machine that is.
            headers: Duration::from_secs(2),
            ..PATIENT
        };
        let address = serve(limits, None).await;
        let slow = connect(address, PART).await;
        assert!(rest(connect(address, WHOLE).await).await.ends_with("served"));
        assert!(!rest(slow).await.contains("served"), "the slow client is cut off");
    }

    #[tokio::test]
    async fn a_client_with_large_headers_is_refused_before_it_ends_them() {
        let address = serve(PATIENT, None).await;
        let token = |bytes: usize| format!("{PART}h\r\nAuthorization: Bearer {}", "x".repeat(bytes));
        let answer = rest(connect(address, &token(HEADERS_BYTES)).await).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
        let whole = token(HEADERS_BYTES / 2) + "\r\nConnection: close\r\n\r\n";
        assert!(rest(connect(address, &whole).await).await.ends_with("served"));
    }

    #[tokio::test]
    async fn a_client_without_a_handshake_and_one_with_a_slow_body_are_cut_off() {
        let limits = Limits {
            handshake: SHORT,
            ..PATIENT
        };
        let address = serve(limits, Some(Arc::default())).await;
        assert_eq!(rest(connect(address, "").await).await, "");
        let limits = Limits {
            request: SHORT,
            ..PATIENT
        };
        let address = serve(limits, None).await;
        let head = "POST /body HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 9\r\n\r\nslow";
        let answer = rest(connect(address, head).await).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    }

    #[tokio::test]
    async fn a_peer_with_too_many_connections_gets_no_more_until_one_is_closed() {
        let address = serve(PATIENT, None).await;
        let mut open = vec![connect(address, PART).await, connect(address, PART).await];
        // The server has accepted both before it accepts the third, because it accepts in order.
        assert_eq!(rest(connect(address, WHOLE).await).await, "");
        open.pop();
        loop {
            let answer = rest(connect(address, WHOLE).await).await;
            if answer.ends_with("served") {
                break;
            }
            // The server has not yet noticed that the other connection is closed.
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_life_between_two_requests() {
        let limits = Limits {
            // Enough for the first request, on a slow machine.
            life: Duration::from_secs(2),
            ..PATIENT
        };
        let address = serve(limits, None).await;
        let whole = WHOLE.replace("Connection: close\r\n", "");
        assert!(rest(connect(address, &whole).await).await.ends_with("served"));
    }

    #[tokio::test]
    async fn a_request_has_the_address_of_its_client() {
        let address = serve(PATIENT, None).await;
        let whole = WHOLE.replace("GET /", "GET /client");
        assert!(rest(connect(address, &whole).await).await.ends_with("127.0.0.1"));
    }

    #[test]
    fn one_address_cannot_take_the_connections_of_all() {
        let peers = Arc::new(Peers::default());
        let enter = |last: u8| Peers::enter(&peers, IpAddr::from([10, 0, 0, last]), &PATIENT);
        let mut places: Vec<_> = (0..8).map(|n| enter(n / 2)).collect();
        assert!(places.iter().all(Option::is_some));
        assert!(enter(0).is_none() && enter(9).is_none(), "both limits hold");
        places.truncate(7);
        assert!(enter(9).is_some(), "a closed connection makes room");
    }
}
