//! Servers that are no vCenter, or a hostile one: what the client sends to them, keeps of them and quotes from them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use capstan_core::Memory;
use capstan_core::vm::MoRef;
use capstan_vsphere::{Error, Login, Settings, Trust, Vcenter};
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// No test waits longer, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);
const SECRET: &str = "internal-data-of-another-service";
const CONTENT: &str = concat!(
    r#"<RetrieveServiceContentResponse><returnval><rootFolder type="Folder">f</rootFolder>"#,
    r#"<propertyCollector type="PropertyCollector">p</propertyCollector>"#,
    r#"<searchIndex type="SearchIndex">i</searchIndex>"#,
    r#"<sessionManager type="SessionManager">s</sessionManager></returnval></RetrieveServiceContentResponse>"#,
);

/// The answer of a server to one request.
#[derive(Clone)]
enum Answer {
    /// A status and a body.
    Whole(u16, String),
    /// A body without end.
    Endless,
    /// So many bytes of a body, and then nothing.
    Part(usize),
}

type Script = Arc<dyn Fn(&str) -> Answer + Send + Sync>;

/// A server with a certificate of its own.
struct Server {
    address: String,
    ca: String,
    requests: Arc<AtomicUsize>,
    logins: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
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
        let script: Script = Arc::new(script);
        let (requests, logins, sent) = (Arc::default(), Arc::default(), Arc::default());
        let counters = (Arc::clone(&requests), Arc::clone(&logins), Arc::clone(&sent));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(acceptor.clone(), stream, script.clone(), counters.clone()));
            }
        });
        Ok(Self {
            address,
            ca: made.cert.pem(),
            requests,
            logins,
            sent,
            task,
        })
    }

    async fn connect(&self, trust: Trust) -> Result<Result<Vcenter, Error>> {
        self.connect_with(trust, Settings::default()).await
    }

    async fn connect_with(&self, trust: Trust, settings: Settings) -> Result<Result<Vcenter, Error>> {
        let login = Login {
            server: self.address.clone(),
            username: "me".into(),
            password: "secret".into(),
            trust,
            tenant: None,
        };
        let connected = tokio::time::timeout(PATIENCE, Vcenter::connect(login, settings)).await;
        connected.context("no answer in time")
    }

    async fn refused(&self, trust: Trust) -> Result<Error> {
        let connected = self.connect(trust).await?;
        connected.err().context("connected to a hostile server")
    }
}

type Counters = (Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>);

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, script: Script, counters: Counters) -> std::io::Result<()> {
    let (requests, logins, sent) = counters;
    let mut stream = acceptor.accept(stream).await?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let mut text = String::new();
        while !text.contains("</soapenv:Envelope>") {
            let read = stream.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            text.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
        requests.fetch_add(1, Ordering::SeqCst);
        logins.fetch_add(usize::from(text.contains("<Login ")), Ordering::SeqCst);
        match script(&text) {
            Answer::Whole(status, body) => {
                let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(body.as_bytes()).await?;
                stream.flush().await?;
            }
            Answer::Part(bytes) => {
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<a>")
                    .await?;
                stream.write_all(&vec![b'x'; bytes]).await?;
                stream.flush().await?;
                std::future::pending::<()>().await;
            }
            Answer::Endless => {
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<a>")
                    .await?;
                let chunk = vec![b'x'; 1 << 16];
                loop {
                    stream.write_all(&chunk).await?;
                    sent.fetch_add(chunk.len(), Ordering::SeqCst);
                }
            }
        }
    }
}

fn envelope(body: &str) -> Answer {
    Answer::Whole(200, format!("<Envelope><Body>{body}</Body></Envelope>"))
}

/// Looks like a vCenter until the login; `then` answers everything else.
fn until_login(then: impl Fn() -> Answer + Send + Sync + 'static) -> impl Fn(&str) -> Answer + Send + Sync + 'static {
    move |request| match request {
        hello if hello.contains("<RetrieveServiceContent") => envelope(CONTENT),
        login if login.contains("<Login ") => envelope("<LoginResponse/>"),
        _ => then(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_end_is_dropped_after_a_fixed_number_of_bytes() -> Result<()> {
    let server = Server::start(|_| Answer::Endless).await?;
    let error = server.refused(Trust::Ca(server.ca.clone())).await?;
    assert!(matches!(error, Error::TooLarge { limit: 262_144, .. }), "{error}");
    // Beyond the limit there is only what the sockets hold.
    let sent = server.sent.load(Ordering::SeqCst);
    assert!(sent < 16 << 20, "{sent} bytes were read");

    let server = Server::start(until_login(|| Answer::Endless)).await?;
    let vcenter = server.connect(Trust::Ca(server.ca.clone())).await??;
    let read = tokio::time::timeout(PATIENCE, vcenter.find_vm_by_instance_uuid(None, "any")).await?;
    let error = read.expect_err("an answer without end");
    assert!(matches!(error, Error::TooLarge { limit: 8_388_608, .. }), "{error}");
    assert!(error.to_string().contains("more than 8388608 bytes"), "{error}");
    let again = tokio::time::timeout(PATIENCE, vcenter.find_vm_by_instance_uuid(None, "any")).await?;
    let error = again.expect_err("it wasted its turn");
    assert!(matches!(error, Error::Barred { .. }), "{error}");
    let sent = server.sent.load(Ordering::SeqCst);
    assert!(sent < 32 << 20, "{sent} bytes were read");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn large_answers_are_read_one_at_a_time_and_small_ones_do_not_wait() -> Result<()> {
    // It sends a little more than a small answer, and then nothing: its turn does not end before its time is over.
    let stuck = Server::start(until_login(|| Answer::Part(2 << 20))).await?;
    let holder = stuck.connect(Trust::Ca(stuck.ca.clone())).await??;
    let held = tokio::spawn(async move { holder.find_vm_by_instance_uuid(None, "any").await.err() });
    let endless = Server::start(until_login(|| Answer::Endless)).await?;
    let waiting = endless.connect(Trust::Ca(endless.ca.clone())).await??;
    let waited = tokio::spawn(async move { waiting.find_vm_by_instance_uuid(None, "any").await.err() });
    let small = Server::start(until_login(|| envelope("<FindByUuidResponse/>"))).await?;
    let good = small.connect(Trust::Ca(small.ca.clone())).await??;
    let found = tokio::time::timeout(PATIENCE, good.find_vm_by_instance_uuid(None, "any")).await??;
    assert!(found.is_none());
    let error = tokio::time::timeout(PATIENCE, held).await??.context("it ended well")?;
    assert!(error.to_string().contains("does not end"), "{error}");
    let error = tokio::time::timeout(PATIENCE, waited)
        .await??
        .context("it ended well")?;
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_many_small_elements_is_refused_with_their_number() -> Result<()> {
    let server = Server::start(until_login(|| envelope(&"<a/>".repeat(3 << 19)))).await?;
    let vcenter = server.connect(Trust::Ca(server.ca.clone())).await??;
    let read = tokio::time::timeout(PATIENCE, vcenter.find_vm_by_instance_uuid(None, "any")).await?;
    let error = read.expect_err("6 MiB of elements");
    assert!(error.to_string().contains("more than 100000 elements"), "{error}");
    Ok(())
}

/// An answer of the property collector with one machine, and a token for the next page.
fn page(properties: &str, token: &str) -> Answer {
    envelope(&format!(
        "<RetrievePropertiesExResponse><returnval>{token}<objects><obj type=\"VirtualMachine\">vm-1</obj>{properties}</objects>\
         </returnval></RetrievePropertiesExResponse>"
    ))
}

fn property(name: &str, value: &str) -> String {
    format!("<propSet><name>{name}</name><val>{value}</val></propSet>")
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_without_end_are_given_up() -> Result<()> {
    let value = property("name", &"x".repeat(200 << 10));
    let server = Server::start(until_login(move || page(&value, "<token>next</token>"))).await?;
    let vcenter = server.connect(Trust::Ca(server.ca.clone())).await??;
    let read = tokio::time::timeout(PATIENCE, vcenter.vm(&MoRef::new("VirtualMachine", "vm-1"))).await?;
    let error = read.expect_err("pages without end");
    assert!(error.to_string().contains("more than 25165824 bytes"), "{error}");
    assert!(server.requests.load(Ordering::SeqCst) < 200);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_would_fill_the_memory_is_not_kept() -> Result<()> {
    let option = "<OptionValue><key>k</key><value>v</value></OptionValue>";
    let many = |times: usize| property("config.extraConfig", &option.repeat(times));
    for (times, is_kept) in [(1_000, true), (30_000, false)] {
        let answer = page(&many(times), "");
        let server = Server::start(until_login(move || answer.clone())).await?;
        let vcenter = server.connect(Trust::Ca(server.ca.clone())).await??;
        let read = tokio::time::timeout(PATIENCE, vcenter.vm(&MoRef::new("VirtualMachine", "vm-1"))).await?;
        match read {
            Ok(info) => assert!(is_kept && info.extra_config.len() == times),
            Err(error) => assert!(
                !is_kept && error.to_string().contains("more than 3145728 bytes"),
                "{error}"
            ),
        }
    }
    Ok(())
}

/// Settings with so many bytes of memory for all vCenters.
fn with_memory(bytes: usize) -> Settings {
    Settings {
        memory: Arc::new(Memory::new(bytes)),
        ..Settings::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_given_up_when_their_memory_is_needed_for_others() -> Result<()> {
    let value = property("name", &"x".repeat(200 << 10));
    let server = Server::start(until_login(move || page(&value, "<token>next</token>"))).await?;
    let settings = with_memory(4 << 20);
    let connected = server.connect_with(Trust::Ca(server.ca.clone()), settings.clone());
    let vcenter = connected.await??;
    let read = tokio::time::timeout(PATIENCE, vcenter.vm(&MoRef::new("VirtualMachine", "vm-1"))).await?;
    let error = read.expect_err("pages without end");
    assert!(matches!(error, Error::NoMemory(_)), "{error}");
    assert!(server.requests.load(Ordering::SeqCst) < 40);
    assert_eq!(settings.memory.held(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_machines_that_are_kept_have_a_bounded_memory_together() -> Result<()> {
    let option = "<OptionValue><key>k</key><value>v</value></OptionValue>";
    let answer = page(&property("config.extraConfig", &option.repeat(1_000)), "");
    let server = Server::start(until_login(move || answer.clone())).await?;
    let settings = with_memory(4 << 20);
    let connected = server.connect_with(Trust::Ca(server.ca.clone()), settings.clone());
    let vcenter = connected.await??;
    let machine = MoRef::new("VirtualMachine", "vm-1");
    let read = async || tokio::time::timeout(PATIENCE, vcenter.vm(&machine)).await;
    let mut kept = Vec::new();
    let error = loop {
        match read().await? {
            Ok(info) => kept.push(info),
            Err(error) => break error,
        }
        assert!(kept.len() < 100, "{:?}", settings.memory);
    };
    assert!(matches!(error, Error::NoMemory(_)), "{error}");
    assert!(error.to_string().contains("--foreign-memory"), "{error}");
    assert!(kept.len() > 2 && settings.memory.held() > 2 << 20);
    kept.clear();
    assert_eq!(settings.memory.held(), 0);
    assert!(read().await?.is_ok());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_and_snapshots_of_a_machine_are_bounded() -> Result<()> {
    let addresses: String = (0..10_000)
        .map(|n| format!("<ipAddress>10.0.{}.{}</ipAddress>", n / 256, n % 256))
        .collect();
    let name = "n".repeat(4 << 10);
    let nested = (0..200).fold(String::new(), |inner, _| {
        format!("<childSnapshotList><snapshot type=\"S\">s</snapshot><name>{name}</name>{inner}</childSnapshotList>")
    });
    let flat = "<rootSnapshotList><snapshot type=\"S\">s</snapshot><name>n</name></rootSnapshotList>".repeat(1_000);
    let root =
        format!("<rootSnapshotList><snapshot type=\"S\">s</snapshot><name>n</name>{nested}</rootSnapshotList>{flat}");
    let nic = property("guest.net", &format!("<GuestNicInfo>{addresses}</GuestNicInfo>"));
    for properties in [nic, property("snapshot", &root)] {
        let answer = page(&properties, "");
        let server = Server::start(until_login(move || answer.clone())).await?;
        let vcenter = server.connect(Trust::Ca(server.ca.clone())).await??;
        let info = tokio::time::timeout(PATIENCE, vcenter.vm(&MoRef::new("VirtualMachine", "vm-1"))).await??;
        let addresses: usize = info.state.nics.iter().map(|nic| nic.addresses.len()).sum();
        let paths: usize = info.snapshots.iter().map(|snapshot| snapshot.path.len()).sum();
        assert!(addresses <= 256, "{addresses} addresses");
        assert!(info.snapshots.len() <= 500 && paths < 1 << 20, "{paths} bytes of paths");
        assert!(addresses == 256 || info.snapshots.len() == 500);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_server_that_is_no_vcenter_is_quoted_and_it_gets_no_password() -> Result<()> {
    let fault = format!("<Fault><faultstring>{SECRET}</faultstring></Fault>");
    let answers = [
        Answer::Whole(403, SECRET.into()),
        Answer::Whole(200, format!("<html>{SECRET}</html>")),
        Answer::Whole(200, SECRET.into()),
        Answer::Whole(500, SECRET.into()),
        envelope(&fault),
        envelope(&format!(
            "<RetrieveServiceContentResponse>{SECRET}</RetrieveServiceContentResponse>"
        )),
        envelope(&format!("<a></{SECRET}>")),
    ];
    for answer in answers {
        let given = answer.clone();
        let server = Server::start(move |_| given.clone()).await?;
        let error = server.refused(Trust::Ca(server.ca.clone())).await?;
        assert!(matches!(error, Error::NotVcenter { .. }), "{error}");
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
        assert_eq!(server.logins.load(Ordering::SeqCst), 0);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_no_known_ca_signed_is_rejected_before_anything_is_sent() -> Result<()> {
    let server = Server::start(|_| envelope(CONTENT)).await?;
    let error = server.refused(Trust::new(None, None, false)).await?;
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("spec.thumbprint") && text.contains("ca.crt"), "{text}");
    let other = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()])?;
    let error = server.refused(Trust::Ca(other.cert.pem())).await?;
    assert!(matches!(error, Error::Certificate { .. }), "{error}");
    assert_eq!(server.requests.load(Ordering::SeqCst), 0);
    Ok(())
}
