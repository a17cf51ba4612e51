//! Servers and clients that behave as badly as the threat model allows: vCenters that answer without end, a workload
//! cluster with more Nodes than any real one, clients that never finish a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine as _;
use rustls::pki_types::PrivateKeyDer;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// The answer of a vCenter that looks like one, to the first request of a client.
const CONTENT: &str = concat!(
    r#"<RetrieveServiceContentResponse><returnval><rootFolder type="Folder">f</rootFolder>"#,
    r#"<propertyCollector type="PropertyCollector">p</propertyCollector>"#,
    r#"<searchIndex type="SearchIndex">i</searchIndex>"#,
    r#"<sessionManager type="SessionManager">s</sessionManager></returnval></RetrieveServiceContentResponse>"#,
);
/// A slow client sends one byte of its headers this often, after as many as a server may keep.
const BYTE: Duration = Duration::from_secs(1);
const HEADER: usize = 24 << 10;
/// A slow vCenter answers shortly before clients give up.
const SLOW: Duration = Duration::from_secs(80);

/// What objects report when Capstan has no memory for what their servers send.
pub const NO_MEMORY: &str = "--foreign-memory";

/// The behaviour of a hostile vCenter.
#[derive(Clone, Copy, Debug)]
pub enum Vcenter {
    /// Every answer is a text without end.
    Endless,
    /// It looks like a vCenter until the login; then every answer is a text without end.
    EndlessAfterLogin,
    /// It looks like a vCenter until the login; then every answer has a million and a half of small elements.
    Elements,
    /// It looks like a vCenter until the login; then every answer is one of pages without end.
    Pages,
    /// It looks like a vCenter until the login; then every answer is a fault with a message of some MiB.
    Fault,
    /// It looks like a vCenter until the login; then every answer comes late. Not in [`Vcenter::ALL`], because its machines
    /// report nothing for minutes.
    Slow,
}

impl Vcenter {
    pub const ALL: [Self; 5] = [
        Self::Endless,
        Self::EndlessAfterLogin,
        Self::Elements,
        Self::Pages,
        Self::Fault,
    ];

    /// What a machine reports of it.
    pub fn report(self) -> &'static str {
        match self {
            Self::Fault => "(SystemError)",
            _ => "more than",
        }
    }
}

enum Answer {
    Whole(&'static str, String),
    Late(String),
    Endless,
    /// The connection stays open and nothing is sent.
    Silent,
}

/// A hostile server with a certificate of its own; it ends when this is dropped.
pub struct Server {
    /// `host:port`.
    pub address: String,
    /// Its certificate in PEM, which is its own CA.
    pub ca: String,
    sent: Arc<AtomicU64>,
    requests: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn vcenter(kind: Vcenter) -> Result<Self> {
        let elements = Arc::new(envelope(&"<a/>".repeat(3 << 19)));
        let text = "x".repeat(7 << 20);
        let fault = envelope(&format!(
            r#"<Fault><faultstring>{text}</faultstring><detail><SystemErrorFault/></detail></Fault>"#
        ));
        let page = envelope(&format!(
            r#"<R><returnval><token>t</token><objects><obj type="Folder">f</obj><propSet><name>name</name><val>{}</val></propSet></objects></returnval></R>"#,
            &text[..200 << 10]
        ));
        Self::start(move |request| {
            let whole = |body: &str| Answer::Whole("text/xml", envelope(body));
            match kind {
                Vcenter::Endless => Answer::Endless,
                _ if request.contains("<RetrieveServiceContent") => whole(CONTENT),
                _ if request.contains("<Login ") => whole("<LoginResponse/>"),
                Vcenter::EndlessAfterLogin => Answer::Endless,
                Vcenter::Elements => Answer::Whole("text/xml", elements.as_ref().clone()),
                Vcenter::Pages => Answer::Whole("text/xml", page.clone()),
                Vcenter::Fault => Answer::Whole("text/xml", fault.clone()),
                Vcenter::Slow => Answer::Late(envelope("<R/>")),
            }
        })
        .await
    }

    /// An API server with so many Nodes, each with so many bytes of annotations.
    pub async fn cluster(nodes: usize, bytes: usize) -> Result<Self> {
        let annotation = "x".repeat(bytes);
        Self::start(move |request| {
            let line = request.lines().next().unwrap_or_default();
            let query = line.split(['?', ' ']).nth(2).unwrap_or_default();
            let number = |name: &str| {
                let part = query.split('&').find_map(|part| part.strip_prefix(name));
                part.and_then(|value| value.parse::<usize>().ok())
            };
            if query.contains("watch=") {
                return Answer::Silent;
            }
            let from = number("continue=").unwrap_or(0);
            let to = (from + number("limit=").unwrap_or(nodes)).min(nodes);
            let next = if to < nodes { to.to_string() } else { String::new() };
            // Text instead of JSON values: pages of several MiB are built fast enough in a debug build, too.
            let node = |n| {
                format!(
                    r#"{{"metadata":{{"name":"n{n}","annotations":{{"a":"{annotation}"}}}},"spec":{{"providerID":"azure:///n{n}"}}}}"#
                )
            };
            let items: Vec<String> = (from..to).map(node).collect();
            let head = format!(r#""kind":"NodeList","apiVersion":"v1","metadata":{{"resourceVersion":"1","continue":"{next}"}}"#);
            Answer::Whole("application/json", format!(r#"{{{head},"items":[{}]}}"#, items.join(",")))
        })
        .await
    }

    /// An API server whose Nodes are full of small arrays.
    pub async fn arrays() -> Result<Self> {
        let deep = format!("{}0{},", "[".repeat(100), "]".repeat(100));
        let fields = deep.repeat((3 << 20) / deep.len());
        let head = r#""kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"}"#;
        let item = format!(r#"{{"metadata":{{"name":"n","managedFields":[{{"fieldsV1":[{fields}0]}}]}}}}"#);
        let list = format!(r#"{{{head},"items":[{item}]}}"#);
        Self::start(move |_| Answer::Whole("application/json", list.clone())).await
    }

    async fn start(script: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()])?;
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let (sent, requests) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (script, counters) = (Arc::new(script), (sent.clone(), requests.clone()));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, script, counters) = (acceptor.clone(), script.clone(), counters.clone());
                tokio::spawn(async move {
                    // The client ends such a connection; that is no error here.
                    let _ = serve(acceptor, stream, script.as_ref(), &counters).await;
                });
            }
        });
        Ok(Self {
            address,
            ca: made.cert.pem(),
            sent,
            requests,
            task,
        })
    }

    /// Returns how many bytes of answers it has sent.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns how many requests it has had.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns a kubeconfig for it.
    pub fn kubeconfig(&self) -> String {
        let ca = base64::engine::general_purpose::STANDARD.encode(&self.ca);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("https://{}", self.address), "certificate-authority-data": ca}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        })
        .to_string()
    }
}

fn envelope(body: &str) -> String {
    format!("<Envelope><Body>{body}</Body></Envelope>")
}

async fn serve(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    script: &(dyn Fn(&str) -> Answer + Send + Sync),
    (sent, requests): &(Arc<AtomicU64>, Arc<AtomicU64>),
) -> std::io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let mut request = String::new();
        while !is_whole(&request) {
            let read = stream.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            request.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
        requests.fetch_add(1, Ordering::Relaxed);
        match script(&request) {
            Answer::Whole(type_, body) => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: {type_}\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(body.as_bytes()).await?;
                stream.flush().await?;
                sent.fetch_add(body.len() as u64, Ordering::Relaxed);
            }
            Answer::Late(body) => {
                tokio::time::sleep(SLOW).await;
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                stream.write_all((head + &body).as_bytes()).await?;
                stream.flush().await?;
            }
            Answer::Silent => std::future::pending().await,
            Answer::Endless => {
                let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nConnection: close\r\n\r\n<a>";
                stream.write_all(head).await?;
                let chunk = vec![b'x'; 1 << 16];
                loop {
                    stream.write_all(&chunk).await?;
                    sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Whether the text has the headers of a request and as much of a body as they announce.
fn is_whole(request: &str) -> bool {
    let Some((head, body)) = request.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>().ok())?
    });
    body.len() >= length.unwrap_or(0)
}

/// Clients that send their headers byte by byte, and connect again when the server cuts them off, until this is dropped.
pub struct SlowClients(Vec<tokio::task::JoinHandle<()>>);

impl SlowClients {
    /// Starts so many against each address, and waits until each has been connected once.
    pub async fn start(addresses: &[String], number: usize) -> Result<Self> {
        let mut tasks = Vec::new();
        for address in addresses {
            for _ in 0..number {
                let first = TcpStream::connect(address).await;
                let first = first.with_context(|| format!("cannot connect to {address}"))?;
                tasks.push(tokio::spawn(trickle(first, address.clone())));
            }
        }
        Ok(Self(tasks))
    }
}

impl Drop for SlowClients {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

async fn trickle(first: TcpStream, address: String) {
    let header = ["GET / HTTP/1.1\r\nx: ", &"x".repeat(HEADER)].concat().into_bytes();
    let mut stream = Ok(first);
    loop {
        if let Ok(stream) = &mut stream {
            let mut sent = stream.write_all(&header).await;
            while sent.is_ok() {
                tokio::time::sleep(BYTE).await;
                sent = stream.write_all(b"x").await;
            }
        }
        tokio::time::sleep(BYTE).await;
        stream = TcpStream::connect(&address).await;
    }
}
