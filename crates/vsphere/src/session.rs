//! Sessions: one for each server and user, shared by everybody, renewed when vCenter forgets it, logged out at the end.
//!
//! Invariants: no lock is held across a request except the one that keeps two renewals of the same session apart; a login
//! that vCenter refused is not tried again at once, so that no account is locked by our retries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use capstan_core::door::Doors;
use tokio::time::Instant;

use crate::error::{Error, Fault, Result};
use crate::vcenter::Vcenter;

/// How long a refused login is remembered: retries of many machines must not lock the account.
pub(crate) const REFUSED: Duration = Duration::from_secs(30);
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
    pub password: String,
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
    pub doors: Doors,
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

enum State {
    Empty,
    Open(Vcenter),
    Refused(Box<Fault>, Instant),
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
        let mut state = slot.state.lock().await;
        match &*state {
            State::Open(vcenter) if !vcenter.is_closed() => return Ok(vcenter.clone()),
            State::Refused(fault, at) if at.elapsed() < REFUSED => return Err(refused(login, fault.clone())),
            _ => {}
        }
        match Vcenter::connect(login.clone(), self.0.settings.clone()).await {
            Ok(vcenter) => {
                *state = State::Open(vcenter.clone());
                end(self.replaced_by(login));
                Ok(vcenter)
            }
            Err(Error::Login { fault, .. }) => {
                *state = State::Refused(fault.clone(), Instant::now());
                Err(refused(login, fault))
            }
            Err(error) => Err(error),
        }
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
                state: tokio::sync::Mutex::new(State::Empty),
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
    let state = std::mem::replace(&mut *slot.state.lock().await, State::Empty);
    if let State::Open(vcenter) = state {
        // The session ends by itself after vCenter's own timeout if it cannot be told now.
        let _ = tokio::time::timeout(LOGOUT, vcenter.logout()).await;
    }
}

fn refused(login: &Login, fault: Box<Fault>) -> Error {
    Error::Login {
        server: login.server.clone(),
        user: login.username.clone(),
        fault,
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
