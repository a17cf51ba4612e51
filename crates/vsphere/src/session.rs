//! Sessions: one for each server and user, shared by everybody, renewed when vCenter forgets it, logged out at the end.
//!
//! Invariants: no lock is held across a request except the one that keeps two logins of the same account apart, and whoever
//! waited for it is answered by what came of the other's; a login that vCenter refused is not tried again for minutes, so
//! that no account is locked by our retries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use capstan_core::Secret;
use capstan_core::interceptor::Interceptors;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::vcenter::Vcenter;

/// How long a refused login is not tried again: accounts are locked after a handful of failures within minutes. Every
/// further refusal doubles it, up to [`REFUSED_LONGEST`].
const REFUSED: Duration = Duration::from_secs(60);
const REFUSED_LONGEST: Duration = Duration::from_secs(4 * 60);
/// A vCenter that was away is not asked again for this long.
const AWAY: Duration = Duration::from_secs(2);
/// A session that nobody has asked for during this time, and that nobody holds, is logged out.
const IDLE: Duration = Duration::from_secs(30 * 60);
/// At stop, a vCenter that does not answer a logout is left alone after this time.
const LOGOUT: Duration = Duration::from_secs(5);

pub use crate::tls::Trust;

/// Where to log in, as whom, and whom to trust.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Login {
    /// Host, host:port, or URL.
    pub server: String,
    pub username: String,
    pub password: Secret,
    pub trust: Trust,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Login({} as {})", self.server, self.username)
    }
}

/// What all sessions share.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub interceptors: Interceptors,
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
    used: Mutex<Instant>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    open: Option<Vcenter>,
    refusal: Refusal,
    /// The last login that failed for another reason, and when.
    failed: Option<(Error, Instant)>,
}

/// The last refusal of a login, how many there were in a row, and when.
#[derive(Debug, Default)]
pub(crate) struct Refusal(Option<(Error, u32, Instant)>);

impl Refusal {
    /// What vCenter said, for as long as it is not to be asked again.
    pub fn holds(&self) -> Option<Error> {
        let (error, times, at) = self.0.as_ref()?;
        (at.elapsed() < held(*times)).then(|| error.clone())
    }

    /// Takes in what came of a login.
    pub fn note<T>(&mut self, result: &Result<T>) {
        match result {
            Ok(_) => self.0 = None,
            Err(error @ Error::Login { .. }) => {
                let before = self.0.as_ref().map_or(0, |(_, times, _)| *times);
                self.0 = Some((error.clone(), before.saturating_add(1), Instant::now()));
            }
            Err(_) => {}
        }
    }
}

fn held(times: u32) -> Duration {
    REFUSED
        .saturating_mul(1u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX))
        .min(REFUSED_LONGEST)
}

impl Sessions {
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Shared {
            settings,
            slots: Mutex::default(),
        }))
    }

    /// The session for this login, logged in if there is none yet.
    pub async fn get(&self, login: &Login) -> Result<Vcenter> {
        let (slot, idle) = self.slot(login);
        end(idle);
        let asked = Instant::now();
        let mut state = slot.state.lock().await;
        if let Some(vcenter) = state.open.as_ref().filter(|vcenter| !vcenter.is_closed()) {
            return Ok(vcenter.clone());
        }
        if let Some(error) = state.refusal.holds() {
            return Err(error);
        }
        let answers = |(_, at): &&(Error, Instant)| *at >= asked || at.elapsed() < AWAY;
        if let Some((error, _)) = state.failed.as_ref().filter(answers) {
            return Err(error.clone());
        }
        let result = Vcenter::connect(login.clone(), self.0.settings.clone()).await;
        state.refusal.note(&result);
        state.open = result.as_ref().ok().cloned();
        state.failed = result.as_ref().err().map(|error| (error.clone(), Instant::now()));
        if result.is_ok() {
            end(self.replaced_by(login));
        }
        result
    }

    /// Logs every session out; for the end of the process.
    pub async fn close(&self) {
        let slots: Vec<_> = lock(&self.0.slots).drain().map(|(_, slot)| slot).collect();
        futures::future::join_all(slots.into_iter().map(logout)).await;
    }

    /// Slots of the same account with another password: it has just been proven old. Not before, or somebody with a wrong
    /// password would end the session of somebody with the right one.
    fn replaced_by(&self, login: &Login) -> Vec<Arc<Slot>> {
        let same = |key: &Login| key.server == login.server && key.username == login.username;
        let mut slots = lock(&self.0.slots);
        let old: Vec<Login> = slots
            .keys()
            .filter(|key| same(key) && key.password != login.password)
            .cloned()
            .collect();
        old.iter().filter_map(|key| slots.remove(key)).collect()
    }

    /// The slot of a login, and slots that have been idle for long.
    fn slot(&self, login: &Login) -> (Arc<Slot>, Vec<Arc<Slot>>) {
        let mut slots = lock(&self.0.slots);
        let stale: Vec<Login> = slots
            .iter()
            .filter(|(key, slot)| *key != login && lock(&slot.used).elapsed() > IDLE)
            .map(|(key, _)| key.clone())
            .collect();
        let gone = stale.iter().filter_map(|key| slots.remove(key)).collect();
        let slot = slots.entry(login.clone()).or_insert_with(|| {
            Arc::new(Slot {
                used: Mutex::new(Instant::now()),
                state: tokio::sync::Mutex::default(),
            })
        });
        *lock(&slot.used) = Instant::now();
        (slot.clone(), gone)
    }
}

/// Logs out without making anybody wait for it.
fn end(slots: Vec<Arc<Slot>>) {
    for slot in slots {
        tokio::spawn(logout(slot));
    }
}

async fn logout(slot: Arc<Slot>) {
    let open = slot.state.lock().await.open.take();
    if let Some(vcenter) = open {
        // The session ends by itself after vCenter's own timeout if it cannot be told now.
        let _ = tokio::time::timeout(LOGOUT, vcenter.logout()).await;
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

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
    async fn a_refused_login_is_left_alone_for_minutes_and_longer_each_time() {
        let mut refusal = Refusal::default();
        for seconds in [60, 120, 240, 240] {
            assert!(refusal.holds().is_none());
            refusal.note(&refused());
            tokio::time::advance(Duration::from_secs(seconds - 1)).await;
            assert!(matches!(refusal.holds(), Some(Error::Login { .. })), "{seconds}");
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        refusal.note(&Ok(()));
        refusal.note(&refused());
        tokio::time::advance(REFUSED).await;
        assert!(refusal.holds().is_none(), "one that was let in begins anew");
    }

    #[tokio::test]
    async fn whoever_waited_for_a_vcenter_that_is_away_does_not_ask_it_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap().to_string();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let away = tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(300)).await;
                drop(connection);
            }
        });
        let login = Login {
            server,
            username: "me".into(),
            password: "secret".into(),
            trust: Trust::Insecure,
        };
        let sessions = Sessions::default();
        let all = futures::future::join_all((0..20).map(|_| sessions.get(&login))).await;
        away.abort();
        let unreachable = |result: &Result<Vcenter>| matches!(result, Err(Error::Unreachable { .. }));
        assert!(all.iter().all(unreachable), "{all:?}");
        assert!(asked.load(Ordering::SeqCst) < 5, "asked {asked:?} times for 20");
    }
}
