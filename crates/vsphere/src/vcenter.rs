//! One vCenter with its session, which is renewed when vCenter has forgotten it.
//!
//! Invariant: until a server has answered RetrieveServiceContent as a vCenter does, no credential is sent to it and nothing
//! of its answers goes into an error.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use capstan_core::Memory;
use capstan_core::clock::Clock;
use capstan_core::interceptor::Interceptors;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, Holders};
use crate::circuit::Circuit;
use crate::content::{About, Content};
use crate::error::{Error, Result};
use crate::groups::Queues;
use crate::in_process::InProcess;
use crate::metrics::{Counted, Metrics};
use crate::rest::Rest;
use crate::session::{Login, Refusal, Settings};
use crate::soap::Call;
use crate::tls::{self, Trust};
use crate::watcher::Watcher;
use crate::xml::{Element, Writer};
use capstan_core::validate::vcenter::Server;
use capstan_core::vm::MoRef;

/// An answer as young as this shows that a vCenter is there.
const LATELY: Duration = Duration::from_secs(5);
/// A session without any calls is used this often: vCenter forgets sessions after 30 idle minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(10 * 60);

/// A logged-in vCenter. Cheap to clone; all clones share one session.
#[derive(Clone)]
pub struct Vcenter(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub login: Login,
    pub http: reqwest::Client,
    pub base: String,
    pub interceptors: Interceptors,
    pub in_process: Option<InProcess>,
    pub clock: Clock,
    pub metrics: Metrics,
    pub memory: Arc<Memory>,
    open: OnceLock<Counted>,
    pub content: OnceLock<Content>,
    session: RwLock<Session>,
    /// The last refusal to renew the session; also keeps two renewals apart.
    renewing: tokio::sync::Mutex<Refusal>,
    /// The number of the current login; session-bound objects (filters, views) end with the previous one.
    pub generation: watch::Sender<u64>,
    pub closed: CancellationToken,
    pub circuit: Circuit,
    /// That of the REST API, which is another service of vCenter.
    pub rest_circuit: Circuit,
    pub cache: Cache,
    pub watcher: Watcher,
    pub rest: tokio::sync::Mutex<Rest>,
    /// Keeps requests about cluster modules apart.
    pub modules: tokio::sync::Mutex<()>,
    pub groups: Queues,
    pub pbm: tokio::sync::OnceCell<MoRef>,
    /// When vCenter last answered.
    pub answered: Mutex<Instant>,
}

#[derive(Clone, Default)]
struct Session {
    generation: u64,
    cookie: Option<String>,
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
        let holders = Holders {
            memory: settings.memory.clone(),
            tenant: login.tenant().into(),
        };
        let inner = Inner {
            base,
            login,
            http,
            interceptors: settings.interceptors,
            in_process: settings.in_process,
            clock: settings.clock,
            metrics: settings.metrics,
            memory: settings.memory,
            open: OnceLock::new(),
            content: OnceLock::new(),
            session: RwLock::default(),
            renewing: tokio::sync::Mutex::default(),
            generation: watch::channel(0).0,
            closed: CancellationToken::new(),
            circuit: Circuit::default(),
            rest_circuit: Circuit::default(),
            cache: Cache::new(settings.clock, holders),
            watcher: Watcher::default(),
            rest: tokio::sync::Mutex::default(),
            modules: tokio::sync::Mutex::default(),
            groups: Queues::default(),
            pbm: tokio::sync::OnceCell::new(),
            answered: Mutex::new(settings.clock.instant()),
        };
        let vcenter = Self(Arc::new(inner));
        let service = service();
        let probe = Call::probe("RetrieveServiceContent", &service, String::new());
        let answer = vcenter.send(probe, None).await;
        let content = answer.and_then(|answer| Content::read(&answer));
        let content = content.map_err(|error| vcenter.unquoted(error))?;
        let _ = vcenter.0.content.set(content);
        vcenter.renew(0).await?;
        let _ = vcenter.0.open.set(vcenter.0.metrics.session());
        vcenter.keep_alive();
        Ok(vcenter)
    }

    /// Asks vCenter for an answer, unless it has answered a call lately.
    pub async fn answers(&self) -> Result<()> {
        if self.0.clock.since(*self.0.answered.lock()) < LATELY {
            return Ok(());
        }
        self.call(Call::probe("CurrentTime", &service(), String::new()))
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
        let session = self.0.session.read();
        (session.generation, session.cookie.clone())
    }

    /// Logs in again, unless another caller has done so since login number `before`.
    pub(crate) async fn renew(&self, before: u64) -> Result<()> {
        let mut refusal = self.0.renewing.lock().await;
        if self.session().0 != before {
            return Ok(());
        }
        if let Some(error) = refusal.holds(self.0.clock.instant()) {
            return Err(error);
        }
        let manager = self.content()?.session_manager.clone();
        let mut body = Writer::new();
        body.text("userName", &self.0.login.username)
            .text("password", self.0.login.password.reveal());
        let result = self
            .exchange(&Call::probe("Login", &manager, body.finish()), None)
            .await;
        let result = result.map_err(|error| self.login_error(error));
        self.0.metrics.logged_in(&result);
        refusal.note(self.0.clock.instant(), &result);
        let (_, cookie) = result?;
        let generation = {
            let mut session = self.0.session.write();
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

    /// Uses a session that has had no calls for a while.
    fn keep_alive(&self) {
        let weak = Arc::downgrade(&self.0);
        let closed = self.0.closed.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = closed.cancelled() => return,
                    () = capstan_core::clock::sleep(KEEP_ALIVE) => {}
                }
                let Some(inner) = weak.upgrade() else { return };
                if inner.clock.since(*inner.answered.lock()) < KEEP_ALIVE {
                    continue;
                }
                let vcenter = Vcenter(inner);
                if let Err(error) = vcenter.answers().await {
                    tracing::debug!(server = %vcenter.0.login.server, %error, "the session could not be kept alive");
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
    #[case("http://10.0.0.5:2379")]
    #[case("vc/path?query=")]
    #[case("user:password@vc")]
    fn a_server_that_is_more_than_a_host_and_a_port_is_refused(#[case] server: &str) {
        let refused = base_url(server).unwrap_err().to_string();
        assert!(refused.contains("spec.server") && refused.contains(server), "{refused}");
    }
}
