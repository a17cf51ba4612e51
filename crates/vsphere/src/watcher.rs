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
use crate::moref::MoRef;
use crate::poll::Poll;
use crate::properties::{Object, Want};
use crate::session::lock;
use crate::task::TASK_PATHS;
use crate::vcenter::{Inner, Vcenter};
use crate::vm::STATE_PATHS;
use crate::xml::Element;

/// After a failure the poll starts again no sooner than this, doubled up to `RETRY_MAX`.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// How badly somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Something is expected to happen: a task, an address.
    Pending,
    /// Nothing is expected; told when there is room.
    Standing,
}

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

struct Entry {
    order: u64,
    pending: usize,
    standing: usize,
    seen: watch::Sender<Seen>,
}

/// Somebody's wait; it ends when this is dropped.
pub(crate) struct Interest {
    inner: Weak<Inner>,
    reference: MoRef,
    urgency: Urgency,
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
            let count = if self.urgency == Urgency::Pending {
                &mut entry.pending
            } else {
                &mut entry.standing
            };
            *count = count.saturating_sub(1);
            if entry.pending + entry.standing == 0 {
                interests.entries.remove(&self.reference);
            }
        }
    }
}

impl Vcenter {
    pub(crate) fn interest(&self, reference: &MoRef, urgency: Urgency) -> Interest {
        let seen = {
            let mut interests = lock(&self.0.watcher.interests);
            interests.asked += 1;
            let order = interests.asked;
            let entry = interests.entries.entry(reference.clone()).or_insert_with(|| Entry {
                order,
                pending: 0,
                standing: 0,
                seen: watch::channel(Seen::Nothing).0,
            });
            match urgency {
                Urgency::Pending => entry.pending += 1,
                Urgency::Standing => entry.standing += 1,
            }
            entry.seen.subscribe()
        };
        self.0.watcher.changed.notify_one();
        if !self.0.watcher.started.swap(true, Ordering::SeqCst) {
            tokio::spawn(run(Arc::downgrade(&self.0)));
        }
        Interest {
            inner: Arc::downgrade(&self.0),
            reference: reference.clone(),
            urgency,
            seen,
            closed: self.0.closed.clone(),
            server: self.0.login.server.clone(),
            fresh: true,
        }
    }
}

/// Runs for as long as the session is used by anybody.
async fn run(inner: Weak<Inner>) {
    let mut retry = RETRY;
    loop {
        let Some(strong) = inner.upgrade() else { return };
        let vcenter = Vcenter(strong);
        let closed = vcenter.0.closed.clone();
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
        choose(
            interests
                .entries
                .iter()
                .map(|(reference, entry)| (reference, entry.order, entry.pending > 0)),
            window,
        )
    }

    /// Who expects something, and by which interest.
    pub(crate) fn pending(&self) -> Vec<(MoRef, u64)> {
        let interests = lock(&self.0.watcher.interests);
        let pending = interests.entries.iter().filter(|(_, entry)| entry.pending > 0);
        pending
            .map(|(reference, entry)| (reference.clone(), entry.order))
            .collect()
    }

    pub(crate) async fn read_and_tell(&self, references: &[MoRef]) -> Result<bool> {
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

/// The window: those who expect something, oldest first; everybody when there is room.
fn choose<'a>(entries: impl Iterator<Item = (&'a MoRef, u64, bool)>, window: usize) -> (Vec<(MoRef, u64)>, bool) {
    let (mut pending, standing): (Vec<_>, Vec<_>) = entries.partition(|(_, _, pending)| *pending);
    let all = pending.len() + standing.len() <= window;
    if all {
        pending.extend(standing);
    }
    pending.sort_by_key(|(_, order, _)| *order);
    let nobody_pending_outside = pending.len() <= window;
    pending.truncate(window);
    (
        pending
            .into_iter()
            .map(|(reference, order, _)| (reference.clone(), order))
            .collect(),
        all || nobody_pending_outside,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_takes_the_oldest_that_expect_something_and_everybody_when_there_is_room() {
        let references: Vec<MoRef> = (0..20).map(|n| MoRef::new("Task", format!("task-{n}"))).collect();
        let entries = || {
            references
                .iter()
                .enumerate()
                .map(|(n, reference)| (reference, n as u64, n >= 5))
        };
        let names = |chosen: Vec<(MoRef, u64)>| chosen.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        let (chosen, all) = choose(entries(), 8);
        assert_eq!(names(chosen), references[5..13]);
        assert!(!all);
        let (chosen, all) = choose(entries(), 16);
        assert_eq!(names(chosen), references[5..]);
        assert!(all, "nobody who expects something is outside");
        assert_eq!(choose(entries(), 20).0.len(), 20);
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
