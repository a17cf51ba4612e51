//! One long poll for each session, through which every task and machine that somebody waits for is watched.
//!
//! Invariants: the number of calls grows neither with the number of waiters nor with the time they wait; whoever waits is
//! told of every change, also when the session was lost and renewed in between.
//!
//! The poll itself is in [`crate::poll`].

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::poll::Poll;
use crate::properties::{Object, Want};
use crate::session::lock;
use crate::task::TASK_PATHS;
use crate::vcenter::{Inner, Vcenter};
use crate::vm::STATE_PATHS;
use crate::xml::Element;
use capstan_core::vm::MoRef;

/// Objects that one call reads at most.
const CHUNK: usize = 100;
/// After a failure the poll starts again no sooner than this, doubled up to `RETRY_MAX`.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// What a waiter has seen last.
#[derive(Clone, Debug, Default)]
pub(crate) enum Seen {
    #[default]
    Nothing,
    Object(Arc<Object>),
    Gone,
    /// The session cannot be renewed.
    Failed(Error),
}

#[derive(Default)]
pub(crate) struct Watcher {
    interests: Mutex<Interests>,
    pub(crate) changed: Arc<Notify>,
    started: AtomicBool,
}

#[derive(Default)]
struct Interests {
    entries: HashMap<MoRef, Entry>,
    asked: u64,
}

impl Interests {
    fn all(&self) -> impl Iterator<Item = (MoRef, u64)> {
        let entries = self.entries.iter();
        entries.map(|(reference, entry)| (reference.clone(), entry.order))
    }
}

struct Entry {
    order: u64,
    waiters: usize,
    seen: watch::Sender<Seen>,
}

/// Somebody's wait; it ends when this is dropped.
pub(crate) struct Interest {
    inner: Weak<Inner>,
    reference: MoRef,
    seen: watch::Receiver<Seen>,
    closed: tokio_util::sync::CancellationToken,
    server: String,
    fresh: bool,
}

impl Interest {
    /// The next state that is news to this waiter. At first, what is known already.
    pub async fn next(&mut self) -> Result<Seen> {
        loop {
            if self.fresh {
                self.fresh = false;
            } else {
                tokio::select! {
                    changed = self.seen.changed() => {
                        if changed.is_err() { return Err(Error::Closed { server: self.server.clone() }); }
                    }
                    () = self.closed.cancelled() => return Err(Error::Closed { server: self.server.clone() }),
                }
            }
            match self.seen.borrow_and_update().clone() {
                Seen::Nothing => {}
                Seen::Failed(error) => return Err(error),
                seen => return Ok(seen),
            }
        }
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        let mut interests = lock(&inner.watcher.interests);
        if let Some(entry) = interests.entries.get_mut(&self.reference) {
            entry.waiters = entry.waiters.saturating_sub(1);
            if entry.waiters == 0 {
                interests.entries.remove(&self.reference);
            }
        }
    }
}

impl Vcenter {
    pub(crate) fn interest(&self, reference: &MoRef) -> Interest {
        let seen = {
            let mut interests = lock(&self.0.watcher.interests);
            interests.asked += 1;
            let order = interests.asked;
            let entry = interests.entries.entry(reference.clone()).or_insert_with(|| Entry {
                order,
                waiters: 0,
                seen: watch::channel(Seen::Nothing).0,
            });
            entry.waiters += 1;
            entry.seen.subscribe()
        };
        self.0.watcher.changed.notify_one();
        if !self.0.watcher.started.swap(true, Ordering::SeqCst) {
            tokio::spawn(run(Arc::downgrade(&self.0)));
        }
        Interest {
            inner: Arc::downgrade(&self.0),
            reference: reference.clone(),
            seen,
            closed: self.0.closed.clone(),
            server: self.0.login.server.clone(),
            fresh: true,
        }
    }
}

/// Runs for as long as the session is used by anybody. While nobody waits, a session that is lost stays so: an account that
/// is not let in any more is not tried for nobody.
async fn run(inner: Weak<Inner>) {
    let mut retry = RETRY;
    loop {
        let Some(strong) = inner.upgrade() else { return };
        let vcenter = Vcenter(strong);
        let (closed, changed) = (vcenter.0.closed.clone(), vcenter.0.watcher.changed.clone());
        if vcenter.waiters().is_empty() {
            drop(vcenter);
            tokio::select! {
                () = closed.cancelled() => return,
                () = changed.notified() => continue,
            }
        }
        let started = Instant::now();
        let result = tokio::select! {
            () = closed.cancelled() => return,
            result = Poll::run(vcenter) => result,
        };
        let Err(error) = result else { return };
        if started.elapsed() > RETRY_MAX {
            retry = RETRY;
        }
        tracing::debug!(%error, "watching vCenter starts again");
        tokio::select! {
            () = closed.cancelled() => return,
            () = tokio::time::sleep(retry) => {}
        }
        retry = (retry * 2).min(RETRY_MAX);
    }
}

pub(crate) const WANTS: [Want<'static>; 2] = [
    Want {
        kind: "Task",
        paths: TASK_PATHS,
    },
    Want {
        kind: "VirtualMachine",
        paths: STATE_PATHS,
    },
];

impl Vcenter {
    /// Who is to be in the view, and whether that is everybody.
    pub(crate) fn wanted(&self, window: usize) -> (Vec<(MoRef, u64)>, bool) {
        let interests = lock(&self.0.watcher.interests);
        choose(interests.all().collect(), window)
    }

    /// Who is waited for, and by which interest.
    pub(crate) fn waiters(&self) -> Vec<(MoRef, u64)> {
        lock(&self.0.watcher.interests).all().collect()
    }

    pub(crate) async fn read_and_tell(&self, references: &[MoRef]) -> Result<bool> {
        let mut news = false;
        for chunk in references.chunks(CHUNK) {
            news |= self.read_chunk(chunk).await?;
        }
        Ok(news)
    }

    async fn read_chunk(&self, references: &[MoRef]) -> Result<bool> {
        let found = self.retrieve(&WANTS, references, &[]).await?;
        let mut missing: HashSet<&MoRef> = references.iter().collect();
        let mut news = false;
        for object in found {
            let Some(reference) = object.reference.clone() else {
                continue;
            };
            missing.remove(&reference);
            news |= self.tell(&reference, Seen::Object(Arc::new(object)));
        }
        for reference in missing {
            news |= self.tell(reference, Seen::Gone);
        }
        Ok(news)
    }

    /// Merges an object update into what is known, and tells the waiters if that changed anything. The answer is whether
    /// it is news of somebody known: one who is seen for the first time has not moved.
    pub(crate) fn merge(&self, reference: &MoRef, update: &Element) -> bool {
        let interests = lock(&self.0.watcher.interests);
        let Some(entry) = interests.entries.get(reference) else {
            return false;
        };
        let known = !matches!(&*entry.seen.borrow(), Seen::Nothing);
        let mut object = match &*entry.seen.borrow() {
            Seen::Object(object) if update.text_at("kind") != Some("enter") => Object::clone(object),
            _ => Object {
                reference: Some(reference.clone()),
                ..Object::default()
            },
        };
        for change in update.all("changeSet") {
            let Some(name) = change.string_at("name") else { continue };
            match change.child("val") {
                Some(value) if !matches!(change.text_at("op"), Some("remove" | "indirectRemove")) => {
                    object.values.insert(name, value.clone());
                }
                _ => {
                    object.values.remove(&name);
                }
            }
        }
        let told = entry
            .seen
            .send_if_modified(|seen| replace(seen, Seen::Object(Arc::new(object))));
        told && known
    }

    pub(crate) fn tell(&self, reference: &MoRef, news: Seen) -> bool {
        let interests = lock(&self.0.watcher.interests);
        let Some(entry) = interests.entries.get(reference) else {
            return false;
        };
        entry.seen.send_if_modified(|seen| replace(seen, news))
    }

    pub(crate) fn fail_all(&self, error: &Error) {
        for entry in lock(&self.0.watcher.interests).entries.values() {
            entry.seen.send_replace(Seen::Failed(error.clone()));
        }
    }
}

/// Puts news in the place of what was seen; false when it is no news.
fn replace(seen: &mut Seen, news: Seen) -> bool {
    let same = match (&*seen, &news) {
        (Seen::Object(old), Seen::Object(new)) => old.values == new.values,
        (Seen::Gone, Seen::Gone) => true,
        _ => false,
    };
    *seen = news;
    !same
}

/// The window: the oldest, and whether that is everybody.
fn choose(mut waiters: Vec<(MoRef, u64)>, window: usize) -> (Vec<(MoRef, u64)>, bool) {
    let all = waiters.len() <= window;
    waiters.sort_by_key(|(_, order)| *order);
    waiters.truncate(window);
    (waiters, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_takes_the_oldest_and_everybody_when_there_is_room() {
        let waiters: Vec<(MoRef, u64)> = (0..20).map(|n| (MoRef::task(&format!("task-{n}")), n)).collect();
        let shuffled: Vec<(MoRef, u64)> = waiters.iter().rev().cloned().collect();
        assert_eq!(choose(shuffled.clone(), 8), (waiters[..8].to_vec(), false));
        assert_eq!(choose(shuffled, 20), (waiters, true));
    }

    #[test]
    fn the_same_again_is_no_news() {
        let object = |state: &str| {
            let value = Element {
                text: state.to_owned(),
                ..Element::default()
            };
            Seen::Object(Arc::new(Object {
                reference: None,
                values: [("info.state".to_owned(), value)].into(),
            }))
        };
        let mut seen = Seen::Nothing;
        assert!(replace(&mut seen, object("running")));
        assert!(!replace(&mut seen, object("running")));
        assert!(replace(&mut seen, object("success")));
        assert!(replace(&mut seen, Seen::Gone));
        assert!(!replace(&mut seen, Seen::Gone));
    }
}
