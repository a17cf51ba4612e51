//! One vCenter, spoken to in SOAP: calls, faults, and a session that is renewed when vCenter has forgotten it.
//!
//! Invariant: until a server has answered RetrieveServiceContent as a vCenter does, no credential is sent to it and nothing
//! of its answers goes into an error.

use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use capstan_core::interceptor::{Effect, Interceptors, System, Verdict};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::body;
use crate::cache::Cache;
use crate::circuit::Circuit;
use crate::error::{Error, Fault, Result};
use crate::groups::Queues;
use crate::rest::Rest;
use crate::session::{Login, Refusal, Settings, lock};
use crate::tls::{self, Trust};
use crate::watcher::Watcher;
use crate::xml::{Element, Writer, escape};
use capstan_core::validate::vcenter::Server;
use capstan_core::vm::MoRef;

/// A call that has not been answered by then is taken for lost; vCenter answers within seconds or not at all.
const ANSWER: Duration = Duration::from_secs(90);
/// What is asked of a vCenter before anything else is answered by then, or it is taken for away.
const HELLO: Duration = Duration::from_secs(30);
/// An answer as young as this shows that a vCenter is there.
const LATELY: Duration = Duration::from_secs(5);
/// With nothing watched, a session is touched this often: vCenter forgets sessions after 30 idle minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(10 * 60);
/// Answers are kept this short in errors.
const BODY_SHOWN: usize = 300;
const FIRST_VERSION: &str = "6.5";

/// What vCenter says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    pub name: String,
    pub full_name: String,
    pub version: String,
    pub build: String,
    pub api_version: String,
    pub api_type: String,
    pub instance_uuid: String,
}

/// The singletons that a vCenter has.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub about: About,
    pub root_folder: MoRef,
    pub property_collector: MoRef,
    pub session_manager: MoRef,
    pub search_index: Option<MoRef>,
    pub view_manager: Option<MoRef>,
}

/// A logged-in vCenter. Cheap to clone; all clones share one session.
#[derive(Clone)]
pub struct Vcenter(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub login: Login,
    pub http: reqwest::Client,
    pub base: String,
    pub interceptors: Interceptors,
    pub content: OnceLock<Content>,
    session: RwLock<Session>,
    /// When vCenter last refused to renew the session, and with what; also keeps two renewals apart.
    renewing: tokio::sync::Mutex<Refusal>,
    /// Tells the number of the current login; session-bound objects (filters, views) die with the previous one.
    pub generation: watch::Sender<u64>,
    pub closed: CancellationToken,
    circuit: Circuit,
    pub cache: Cache,
    pub watcher: Watcher,
    pub rest: tokio::sync::Mutex<Rest>,
    /// Whose turn it is to ask about cluster modules.
    pub modules: tokio::sync::Mutex<()>,
    pub groups: Queues,
    pub pbm: tokio::sync::OnceCell<MoRef>,
    /// When vCenter last answered.
    touched: Mutex<tokio::time::Instant>,
}

#[derive(Clone, Default)]
struct Session {
    generation: u64,
    cookie: Option<String>,
}

/// One SOAP request.
pub(crate) struct Call<'a> {
    pub method: &'a str,
    pub this: &'a MoRef,
    pub body: String,
    pub write: bool,
    pub timeout: Duration,
}

impl<'a> Call<'a> {
    pub fn read(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            method,
            this,
            body,
            write: false,
            timeout: ANSWER,
        }
    }

    /// One that shows whether anybody is there.
    fn hello(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            timeout: HELLO,
            ..Self::read(method, this, body)
        }
    }

    /// Whether the server has not shown yet that it is a vCenter, or that it accepts the account.
    fn is_first(&self) -> bool {
        matches!(self.method, "RetrieveServiceContent" | "Login")
    }

    /// Whether an answer is not expected before something happens.
    fn is_long(&self) -> bool {
        self.method == "WaitForUpdatesEx"
    }

    pub fn write(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            write: true,
            ..Self::read(method, this, body)
        }
    }
}

impl std::fmt::Debug for Vcenter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vcenter({:?})", self.0.login)
    }
}

impl Vcenter {
    /// Connects and logs in. Most callers want [`crate::Sessions::get`], which shares sessions.
    pub async fn connect(login: Login, settings: Settings) -> Result<Self> {
        let base = base_url(&login.server)?;
        Self::connect_to(base, login, settings).await
    }

    pub(crate) async fn connect_to(base: String, login: Login, settings: Settings) -> Result<Self> {
        let http = tls::client(&login.trust, concat!("capstan/", env!("CARGO_PKG_VERSION")))?;
        let inner = Inner {
            base,
            login,
            http,
            interceptors: settings.interceptors,
            content: OnceLock::new(),
            session: RwLock::default(),
            renewing: tokio::sync::Mutex::default(),
            generation: watch::channel(0).0,
            closed: CancellationToken::new(),
            circuit: Circuit::default(),
            cache: Cache::default(),
            watcher: Watcher::default(),
            rest: tokio::sync::Mutex::default(),
            modules: tokio::sync::Mutex::default(),
            groups: Queues::default(),
            pbm: tokio::sync::OnceCell::new(),
            touched: Mutex::new(tokio::time::Instant::now()),
        };
        let vcenter = Self(Arc::new(inner));
        let service = service();
        let hello = Call::hello("RetrieveServiceContent", &service, String::new());
        let answer = vcenter.send(hello, None).await;
        let content = answer.and_then(|answer| Content::read(&answer));
        let content = content.map_err(|error| vcenter.unquoted(error))?;
        let _ = vcenter.0.content.set(content);
        vcenter.renew(0).await?;
        vcenter.keep_alive();
        Ok(vcenter)
    }

    /// Asks whether vCenter is there, unless it has answered somebody lately.
    pub async fn answers(&self) -> Result<()> {
        let ago = lock(&self.0.touched).elapsed();
        if ago < LATELY {
            return Ok(());
        }
        self.call(Call::hello("CurrentTime", &service(), String::new()))
            .await
            .map(|_| ())
    }

    pub fn about(&self) -> About {
        self.0
            .content
            .get()
            .map(|content| content.about.clone())
            .unwrap_or_default()
    }

    pub fn server(&self) -> &str {
        &self.0.login.server
    }

    /// Returns how the certificate of the server is verified.
    pub fn trust(&self) -> &Trust {
        &self.0.login.trust
    }

    /// Replaces errors that quote the answer of a server that has not shown itself to be a vCenter.
    fn unquoted(&self, error: Error) -> Error {
        let answer = match error {
            Error::Http { status, .. } => format!("HTTP {status}"),
            Error::Fault { .. } => "a fault".to_owned(),
            Error::Xml(_) => "no XML that can be read".to_owned(),
            Error::Incomplete { .. } => "no service content".to_owned(),
            error => return error,
        };
        Error::NotVcenter {
            server: self.0.login.server.clone(),
            answer,
        }
    }

    pub fn is_closed(&self) -> bool {
        self.0.closed.is_cancelled()
    }

    /// Ends the session. Waits and watches end with [`Error::Closed`].
    pub async fn logout(&self) -> Result<()> {
        self.0.closed.cancel();
        let token = self.0.rest.lock().await.token.take();
        if let Some(token) = token {
            let _ = self.rest_logout(&token).await;
        }
        let (_, cookie) = self.session();
        if cookie.is_none() {
            return Ok(());
        }
        let manager = self.content()?.session_manager.clone();
        self.send(Call::read("Logout", &manager, String::new()), cookie)
            .await
            .map(|_| ())
    }

    pub(crate) fn content(&self) -> Result<&Content> {
        self.0.content.get().ok_or_else(|| Error::Closed {
            server: self.0.login.server.clone(),
        })
    }

    /// A call within the session; a session that vCenter has forgotten is renewed once and the call repeated.
    pub(crate) async fn call(&self, call: Call<'_>) -> Result<Element> {
        if self.is_closed() {
            return Err(Error::Closed {
                server: self.0.login.server.clone(),
            });
        }
        let (generation, cookie) = self.session();
        let again = Call {
            body: call.body.clone(),
            ..call
        };
        match self.send(call, cookie).await {
            Err(error) if error.is_not_authenticated() => {
                self.renew(generation).await?;
                let (_, cookie) = self.session();
                self.send(again, cookie).await
            }
            result => result,
        }
    }

    /// A call that is not repeated: for objects that die with the session. A forgotten session is renewed all the same.
    pub(crate) async fn call_once(&self, call: Call<'_>) -> Result<Element> {
        let (generation, cookie) = self.session();
        let result = self.send(call, cookie).await;
        if result.as_ref().is_err_and(Error::is_not_authenticated) {
            self.renew(generation).await?;
        }
        result
    }

    /// As [`Vcenter::call`], for methods that return one reference (a task mostly).
    pub(crate) async fn call_for_moref(&self, call: Call<'_>) -> Result<MoRef> {
        let method = call.method.to_owned();
        let answer = self.call(call).await?;
        answer.moref_at("returnval").ok_or(Error::Incomplete {
            method,
            what: "returned reference",
        })
    }

    pub(crate) fn session(&self) -> (u64, Option<String>) {
        let session = self.0.session.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        (session.generation, session.cookie.clone())
    }

    /// Logs in again, unless somebody else has done so since `seen`.
    pub(crate) async fn renew(&self, seen: u64) -> Result<()> {
        let mut refusal = self.0.renewing.lock().await;
        if self.session().0 != seen {
            return Ok(());
        }
        if let Some(error) = refusal.holds() {
            return Err(error);
        }
        let manager = self.content()?.session_manager.clone();
        let mut body = Writer::new();
        body.text("userName", &self.0.login.username)
            .text("password", self.0.login.password.reveal());
        let result = self
            .exchange(&Call::hello("Login", &manager, body.finish()), None)
            .await;
        let result = result.map_err(|error| self.login_error(error));
        refusal.note(&result);
        let (_, cookie) = result?;
        let generation = {
            let mut session = self
                .0
                .session
                .write()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            session.generation += 1;
            session.cookie = cookie;
            session.generation
        };
        self.0.generation.send_replace(generation);
        tracing::debug!(server = %self.0.login.server, generation, "logged in to vCenter");
        Ok(())
    }

    fn login_error(&self, error: Error) -> Error {
        match error {
            Error::Fault { fault, .. } if fault.is("InvalidLogin") || fault.is("NoPermission") => Error::Login {
                server: self.0.login.server.clone(),
                user: self.0.login.username.clone(),
                fault,
            },
            error => error,
        }
    }

    async fn send(&self, call: Call<'_>, cookie: Option<String>) -> Result<Element> {
        self.exchange(&call, cookie).await.map(|(answer, _)| answer)
    }

    /// One request and its answer, through the interceptors; also the session cookie that the answer sets.
    async fn exchange(&self, call: &Call<'_>, cookie: Option<String>) -> Result<(Element, Option<String>)> {
        let _alone = if call.is_long() { None } else { self.0.circuit.enter()? };
        let envelope = envelope(call, "urn:vim25", "");
        let version = self
            .0
            .content
            .get()
            .map_or(FIRST_VERSION, |content| content.about.api_version.as_str());
        let request = self
            .0
            .http
            .post(format!("{}/sdk", self.0.base))
            .header("SOAPAction", format!("\"urn:vim25/{version}\""))
            .header("Content-Type", "text/xml; charset=utf-8")
            .timeout(call.timeout);
        let request = match cookie {
            Some(cookie) => request.header("Cookie", cookie),
            None => request,
        };
        self.through(
            call.method,
            &call.this.to_string(),
            call.write,
            self.soap(call, request.body(envelope)),
        )
        .await
    }

    /// Asks the interceptors before a request is sent and after its answer came.
    pub(crate) async fn through<T>(
        &self,
        method: &str,
        target: &str,
        write: bool,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let effect = Effect {
            system: System::Vsphere,
            method: method.to_owned(),
            target: target.to_owned(),
            write,
        };
        obey(self.0.interceptors.before(&effect), method).await?;
        let began = tokio::time::Instant::now();
        let result = request.await;
        tracing::trace!(method, target, took = ?began.elapsed(), "vCenter answered");
        if matches!(result, Ok(_) | Err(Error::Fault { .. })) {
            *lock(&self.0.touched) = tokio::time::Instant::now();
            self.0.circuit.answered();
        }
        obey(self.0.interceptors.after(&effect), method).await?;
        result
    }

    pub(crate) async fn soap(
        &self,
        call: &Call<'_>,
        request: reqwest::RequestBuilder,
    ) -> Result<(Element, Option<String>)> {
        let answer = request.send().await.map_err(|error| {
            let told = self.unreachable(&error);
            if error.is_timeout() && !call.is_long() {
                self.0.circuit.silent(&told);
            }
            told
        })?;
        let status = answer.status();
        let cookie = session_cookie(answer.headers());
        let limit = if call.is_first() {
            body::MAX_HELLO
        } else {
            body::MAX_SOAP
        };
        let text = self.body(call.method, answer, limit).await?;
        let http = |text: &str| Error::Http {
            server: self.0.login.server.clone(),
            method: call.method.to_owned(),
            status: status.as_u16(),
            body: text.chars().take(BODY_SHOWN).collect(),
        };
        if !status.is_success() && status.as_u16() != 500 {
            return Err(http(&text));
        }
        let tree = match Element::parse(&text) {
            Ok(tree) => tree,
            Err(_) if !status.is_success() => return Err(http(&text)),
            Err(error) => return Err(error),
        };
        let body = tree.into_child("Body").ok_or_else(|| http(&text))?;
        if let Some(fault) = body.child("Fault") {
            let detail = fault.child("detail").and_then(|detail| detail.children.first());
            let fault = Box::new(Fault::read(detail, fault.text_at("faultstring").unwrap_or_default()));
            return Err(Error::Fault {
                method: call.method.to_owned(),
                target: call.this.to_string(),
                fault,
            });
        }
        let answer = body.children.into_iter().next().ok_or_else(|| http(&text))?;
        Ok((answer, cookie))
    }

    /// Reads an answer that is not longer than `limit`.
    pub(crate) async fn body(&self, method: &str, answer: reqwest::Response, limit: usize) -> Result<body::Text> {
        match body::read(answer, limit).await {
            Ok(body::Body::Text(text)) => Ok(text),
            Ok(body::Body::TooLarge) => Err(Error::TooLarge {
                server: self.0.login.server.clone(),
                method: method.to_owned(),
                limit,
            }),
            Ok(body::Body::TooSlow) => Err(Error::Unreachable {
                server: self.0.login.server.clone(),
                cause: format!("its large answer to {method} does not end"),
            }),
            Err(error) => Err(self.unreachable(&error)),
        }
    }

    pub(crate) fn unreachable(&self, error: &reqwest::Error) -> Error {
        let mut cause = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            cause = format!("{cause}: {inner}");
            source = inner.source();
        }
        let server = self.0.login.server.clone();
        match tls::mismatch(&cause) {
            Some((seen, expected)) => Error::Thumbprint { server, seen, expected },
            None if tls::is_rejected(&cause) => Error::Certificate { server, cause },
            None => Error::Unreachable { server, cause },
        }
    }

    /// Touches a session that nothing else has touched for a while.
    fn keep_alive(&self) {
        let weak = Arc::downgrade(&self.0);
        let closed = self.0.closed.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = closed.cancelled() => return,
                    () = tokio::time::sleep(KEEP_ALIVE) => {}
                }
                let Some(inner) = weak.upgrade() else { return };
                let idle = lock(&inner.touched).elapsed();
                if idle < KEEP_ALIVE {
                    continue;
                }
                let vcenter = Vcenter(inner);
                if let Err(error) = vcenter.answers().await {
                    tracing::debug!(server = %vcenter.0.login.server, %error, "session could not be kept alive");
                }
            }
        });
    }
}

fn service() -> MoRef {
    MoRef::new("ServiceInstance", "ServiceInstance")
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

impl Content {
    fn read(answer: &Element) -> Result<Self> {
        let method = || "RetrieveServiceContent".to_owned();
        let content = answer.child("returnval").ok_or(Error::Incomplete {
            method: method(),
            what: "content",
        })?;
        let need = |name: &'static str| {
            content.moref_at(name).ok_or(Error::Incomplete {
                method: method(),
                what: name,
            })
        };
        let about = |name: &str| content.string_at(&format!("about.{name}")).unwrap_or_default();
        Ok(Self {
            about: About {
                name: about("name"),
                full_name: about("fullName"),
                version: about("version"),
                build: about("build"),
                api_version: about("apiVersion"),
                api_type: about("apiType"),
                instance_uuid: about("instanceUuid"),
            },
            root_folder: need("rootFolder")?,
            property_collector: need("propertyCollector")?,
            session_manager: need("sessionManager")?,
            search_index: content.moref_at("searchIndex"),
            view_manager: content.moref_at("viewManager"),
        })
    }
}

pub(crate) fn envelope(call: &Call<'_>, namespace: &str, header: &str) -> String {
    let Call { method, this, body, .. } = call;
    format!(
        concat!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>",
            "<soapenv:Envelope xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" ",
            "xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\" xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\">",
            "{}<soapenv:Body><{} xmlns=\"{}\"><_this type=\"{}\">{}</_this>{}</{}></soapenv:Body></soapenv:Envelope>"
        ),
        header,
        method,
        namespace,
        escape(this.kind()),
        escape(this.value()),
        body,
        method
    )
}

async fn obey(verdict: Verdict, method: &str) -> Result<()> {
    match verdict {
        Verdict::Pass => Ok(()),
        Verdict::Delay(time) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Verdict::Refuse(reason) => Err(Error::Refused {
            method: method.to_owned(),
            reason,
        }),
        Verdict::Hang => std::future::pending().await,
    }
}

fn session_cookie(headers: &reqwest::header::HeaderMap) -> Option<String> {
    headers
        .get_all("set-cookie")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .filter_map(|value| value.split(';').next())
        .find(|pair| pair.trim_start().starts_with("vmware_soap_session="))
        .map(|pair| pair.trim().to_owned())
}

/// Returns the base of all URLs of a server.
fn base_url(server: &str) -> Result<String> {
    match Server::parse(server) {
        Ok(server) => Ok(format!("https://{}", server.authority())),
        Err(reason) => Err(Error::Invalid {
            field: "spec.server",
            value: server.to_owned(),
            reason,
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("7.0.3", "7.0.3.0")]
    #[case("8.0.3", "8.0.3.0")]
    #[case("9.0.0", "9.0.0.0")]
    fn the_service_content_of_every_version_is_read(#[case] version: &str, #[case] api: &str) {
        let text = format!(
            concat!(
                "<RetrieveServiceContentResponse><returnval>",
                r#"<rootFolder type="Folder">group-d1</rootFolder>"#,
                r#"<propertyCollector type="PropertyCollector">propertyCollector</propertyCollector>"#,
                r#"<viewManager type="ViewManager">ViewManager</viewManager>"#,
                "<about><name>VMware vCenter Server</name><fullName>VMware vCenter Server {0} build-1</fullName>",
                "<vendor>VMware, Inc.</vendor><version>{0}</version><build>1</build><osType>linux-x64</osType>",
                "<productLineId>vpx</productLineId><apiType>VirtualCenter</apiType><apiVersion>{1}</apiVersion>",
                "<instanceUuid>4a6b</instanceUuid></about>",
                r#"<setting type="OptionManager">VpxSettings</setting>"#,
                r#"<sessionManager type="SessionManager">SessionManager</sessionManager>"#,
                r#"<searchIndex type="SearchIndex">SearchIndex</searchIndex>"#,
                r#"<somethingNew type="SomethingNew">of-a-later-version</somethingNew>"#,
                "</returnval></RetrieveServiceContentResponse>",
            ),
            version, api
        );
        let content = Content::read(&Element::parse(&text).unwrap()).unwrap();
        let about = &content.about;
        assert_eq!((about.version.as_str(), about.api_version.as_str()), (version, api));
        assert_eq!(
            (about.api_type.as_str(), about.instance_uuid.as_str()),
            ("VirtualCenter", "4a6b")
        );
        assert_eq!(content.session_manager.value(), "SessionManager");
        assert!(content.search_index.is_some() && content.view_manager.is_some());
    }

    #[rstest]
    #[case("http://10.0.0.5:2379")]
    #[case("vc/path?query=")]
    #[case("user:password@vc")]
    fn a_server_that_is_more_than_a_host_and_a_port_is_refused(#[case] server: &str) {
        let refused = base_url(server).unwrap_err().to_string();
        assert!(refused.contains("spec.server") && refused.contains(server), "{refused}");
    }
}
