//! Sessions: one for each server and user, shared by all callers, renewed when vCenter forgets it, logged out at the end.
//!
//! Invariants: no lock is held across a request except the one that keeps two logins of the same account apart. A caller that
//! waits for the login of another gets its result. A vCenter that takes no connections occupies one caller at a time: all
//! others fail at once. A login that vCenter refused is not tried again for minutes, so that our retries lock no account.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_core::clock::Clock;
use capstan_core::interceptor::Interceptors;
use capstan_core::{Memory, Secret};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::in_process::InProcess;
use crate::metrics::Metrics;
use crate::vcenter::Vcenter;

/// A refused login is not tried again for this long: accounts are locked after a handful of failures within minutes. Every
/// further refusal doubles it, up to [`REFUSED_LONGEST`].
const REFUSED: Duration = Duration::from_secs(60);
const REFUSED_LONGEST: Duration = Duration::from_secs(4 * 60);
/// A vCenter that did not answer is not asked again for this long.
const UNREACHABLE: Duration = Duration::from_secs(2);
/// A caller waits this long for the login of another. A login takes seconds; a vCenter that takes no connections makes it take
/// more than a minute, and each caller that waits keeps a machine of another vCenter from its reconcile.
const PATIENCE: Duration = Duration::from_secs(5);
/// A session that nobody has asked for during this time, and that nobody holds, is logged out.
const IDLE: Duration = Duration::from_secs(30 * 60);
/// At stop, a vCenter that does not answer a logout is left alone after this time.
const LOGOUT: Duration = Duration::from_secs(5);

pub use crate::tls::Trust;

/// Where to log in, as whom, and whom to trust.
#[derive(Clone)]
pub struct Login {
    /// Host, host:port, or URL.
    pub server: String,
    pub username: String,
    pub password: Secret,
    pub trust: Trust,
    /// The namespace whose owner chose the server; large answers of all servers of one tenant wait for one turn. `None`: an
    /// administrator chose it. Logins that differ in nothing else share a session.
    pub tenant: Option<String>,
}

impl Login {
    fn key(&self) -> (&str, &str, &Secret, &Trust) {
        (&self.server, &self.username, &self.password, &self.trust)
    }

    pub(crate) fn tenant(&self) -> &str {
        self.tenant.as_deref().unwrap_or(&self.server)
    }
}

impl PartialEq for Login {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Login {}

impl std::hash::Hash for Login {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Login({} as {})", self.server, self.username)
    }
}

/// The settings of all sessions.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub interceptors: Interceptors,
    pub clock: Clock,
    pub metrics: Metrics,
    /// For what vCenters make this process keep.
    pub memory: Arc<Memory>,
    /// Answers instead of the servers, in tests.
    pub in_process: Option<InProcess>,
}

/// All sessions of the process. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Shared>);

#[derive(Default)]
struct Shared {
    settings: Settings,
    slots: Mutex<HashMap<Login, Arc<Slot>>>,
}

struct Slot {
    clock: Clock,
    used: Mutex<Instant>,
    /// The last login, if it failed for another reason than a refusal.
    failed: Mutex<Option<(Error, Instant)>>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    open: Option<Vcenter>,
    refusal: Refusal,
}

impl Slot {
    fn new(clock: Clock) -> Self {
        Self {
            clock,
            used: Mutex::new(clock.instant()),
            failed: Mutex::default(),
            state: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the open session, or opens one with `connect`. Returns whether it was opened now.
    async fn open(&self, server: &str, connect: impl Future<Output = Result<Vcenter>>) -> Result<(Vcenter, bool)> {
        let asked = self.clock.instant();
        let mut state = self.turn(server).await?;
        if let Some(vcenter) = state.open.as_ref().filter(|vcenter| !vcenter.is_closed()) {
            return Ok((vcenter.clone(), false));
        }
        if let Some(error) = state.refusal.holds(self.clock.instant()) {
            return Err(error);
        }
        if let Some((error, at)) = self.failed.lock().clone()
            && (at >= asked || self.clock.since(at) < UNREACHABLE)
        {
            return Err(error);
        }
        let result = connect.await;
        let now = self.clock.instant();
        state.refusal.note(now, &result);
        state.open = result.as_ref().ok().cloned();
        *self.failed.lock() = result.as_ref().err().map(|error| (error.clone(), now));
        result.map(|vcenter| (vcenter, true))
    }

    /// Waits until no other caller logs in. While the last login has failed, and after [`PATIENCE`], this is an error.
    async fn turn(&self, server: &str) -> Result<tokio::sync::MutexGuard<'_, State>> {
        let failed = self.failed.lock().as_ref().map(|(error, _)| error.clone());
        if let Some(error) = failed {
            return self.state.try_lock().map_err(|_| error);
        }
        turn(self.clock, server, &self.state).await
    }
}

/// Waits until no other caller holds the lock for a login. After [`PATIENCE`] this is an error.
pub(crate) async fn turn<'a, T>(
    clock: Clock,
    server: &str,
    lock: &'a tokio::sync::Mutex<T>,
) -> Result<tokio::sync::MutexGuard<'a, T>> {
    tokio::select! {
        biased;
        guard = lock.lock() => Ok(guard),
        () = clock.sleep(PATIENCE) => Err(Error::Unreachable {
            server: server.to_owned(),
            cause: format!("a login has taken longer than {} s", PATIENCE.as_secs()),
        }),
    }
}

/// The last refusal of a login, how many there were in a row, and when.
#[derive(Debug, Default)]
pub(crate) struct Refusal(Option<(Error, u32, Instant)>);

impl Refusal {
    /// Returns the error of the refusal, for as long as vCenter is not to be asked again.
    pub fn holds(&self, now: Instant) -> Option<Error> {
        let (error, times, at) = self.0.as_ref()?;
        (now.saturating_duration_since(*at) < hold_time(*times)).then(|| error.clone())
    }

    /// Notes the result of a login.
    pub fn note<T>(&mut self, now: Instant, result: &Result<T>) {
        match result {
            Ok(_) => self.0 = None,
            Err(error @ Error::Login { .. }) => {
                let before = self.0.as_ref().map_or(0, |(_, times, _)| *times);
                self.0 = Some((error.clone(), before.saturating_add(1), now));
            }
            Err(_) => {}
        }
    }
}

fn hold_time(times: u32) -> Duration {
    capstan_core::backoff::exponential(REFUSED, REFUSED_LONGEST, times)
}

impl Sessions {
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Shared {
            settings,
            slots: Mutex::default(),
        }))
    }

    /// Returns the session for this login, logged in if there is none yet.
    pub async fn get(&self, login: &Login) -> Result<Vcenter> {
        let (slot, idle) = self.slot(login);
        end(idle);
        let connect = Box::pin(Vcenter::connect(login.clone(), self.0.settings.clone()));
        let (vcenter, is_new) = slot.open(&login.server, connect).await?;
        if is_new {
            end(self.replaced_by(login));
        }
        Ok(vcenter)
    }

    /// Logs every session out; for the end of the process.
    pub async fn close(&self) {
        let slots: Vec<_> = self.0.slots.lock().drain().map(|(_, slot)| slot).collect();
        futures::future::join_all(slots.into_iter().map(logout)).await;
    }

    /// Removes the slots of the same account with another password: a login has just proven that password old. Not before, or
    /// a caller with a wrong password would end the session of one with the right password.
    fn replaced_by(&self, login: &Login) -> Vec<Arc<Slot>> {
        let same = |key: &Login| key.server == login.server && key.username == login.username;
        let mut slots = self.0.slots.lock();
        let old: Vec<Login> = slots
            .keys()
            .filter(|key| same(key) && key.password != login.password)
            .cloned()
            .collect();
        old.iter().filter_map(|key| slots.remove(key)).collect()
    }

    /// Returns the slot of a login, and removes slots that have been idle for long.
    fn slot(&self, login: &Login) -> (Arc<Slot>, Vec<Arc<Slot>>) {
        let clock = self.0.settings.clock;
        let mut slots = self.0.slots.lock();
        let stale: Vec<Login> = slots
            .iter()
            .filter(|(key, slot)| *key != login && clock.since(*slot.used.lock()) > IDLE)
            .map(|(key, _)| key.clone())
            .collect();
        let removed = stale.iter().filter_map(|key| slots.remove(key)).collect();
        let slot = slots.entry(login.clone()).or_insert_with(|| Arc::new(Slot::new(clock)));
        *slot.used.lock() = clock.instant();
        (slot.clone(), removed)
    }
}

/// Logs out in the background.
fn end(slots: Vec<Arc<Slot>>) {
    for slot in slots {
        tokio::spawn(logout(slot));
    }
}

async fn logout(slot: Arc<Slot>) {
    let open = slot.state.lock().await.open.take();
    if let Some(vcenter) = open {
        // A session that is not logged out ends after vCenter's own timeout.
        let _ = capstan_core::clock::timeout(LOGOUT, vcenter.logout()).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::Fault;

    fn refused() -> Result<()> {
        Err(Error::Login {
            server: "vc".into(),
            user: "me".into(),
            fault: Box::new(Fault::read(None, "no")),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_login_is_not_tried_again_for_minutes_and_longer_each_time() {
        let (mut refusal, clock) = (Refusal::default(), Clock::system());
        for seconds in [60, 120, 240, 240] {
            assert!(refusal.holds(clock.instant()).is_none());
            refusal.note(clock.instant(), &refused());
            clock.sleep(Duration::from_secs(seconds - 1)).await;
            assert!(
                matches!(refusal.holds(clock.instant()), Some(Error::Login { .. })),
                "{seconds}"
            );
            clock.sleep(Duration::from_secs(1)).await;
        }
        refusal.note(clock.instant(), &Ok(()));
        refusal.note(clock.instant(), &refused());
        clock.sleep(REFUSED).await;
        assert!(
            refusal.holds(clock.instant()).is_none(),
            "a login that succeeds starts the count again"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_vcenter_that_takes_no_connections_occupies_one_caller_at_a_time() {
        let clock = Clock::system();
        let (slot, asked) = (Slot::new(clock), AtomicUsize::new(0));
        // As long as connecting, the first call and the login take with a server that does not answer.
        let silent = || async {
            asked.fetch_add(1, Ordering::SeqCst);
            clock.sleep(Duration::from_secs(70)).await;
            Err(Error::Unreachable {
                server: "vc".into(),
                cause: "timed out".into(),
            })
        };
        let took = async |began: Instant| {
            let result = slot.open("vc", silent()).await;
            assert!(matches!(result, Err(Error::Unreachable { .. })));
            clock.since(began)
        };
        // At first nothing is known: one connects, the others wait a moment.
        let began = clock.instant();
        let first = futures::future::join_all((0..20).map(|_| took(began))).await;
        assert_eq!(first.iter().filter(|took| **took > PATIENCE).count(), 1, "{first:?}");
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        // Then one at a time finds out whether the vCenter is back, and nobody waits for it.
        clock.sleep(UNREACHABLE).await;
        let began = clock.instant();
        let second = futures::future::join_all((0..20).map(|_| took(began))).await;
        assert_eq!(
            second.iter().filter(|took| **took > Duration::ZERO).count(),
            1,
            "{second:?}"
        );
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }
}
