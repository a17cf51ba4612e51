//! One long poll for each session. It watches all tasks and machines that somebody waits for.
//!
//! Invariants: the number of calls grows neither with the number of waiters nor with the time they wait. A waiter hears of
//! every change, also when the session was lost and renewed in between.
//!
//! The poll itself is in [`crate::poll`].

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::error::{Error, Result};
use crate::poll::Poll;
use crate::properties::{Object, Want};
use crate::task::TASK_PATHS;
use crate::vcenter::{Inner, Vcenter};
use crate::vm::{MAX_STATE, STATE_PATHS};
use crate::xml::Element;
use capstan_core::backoff::exponential;
use capstan_core::memory::Holder;
use capstan_core::vm::MoRef;

/// Objects that one call reads at most.
const CHUNK: usize = 100;
/// After a failure the poll starts again no sooner than this, doubled up to `RETRY_MAX`.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The last update of an object.
#[derive(Clone, Debug, Default)]
pub(crate) enum Update {
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
    update: watch::Sender<Update>,
    holder: Holder,
}

/// One waiter's interest in an object. The wait ends when this value is dropped.
pub(crate) struct Interest {
    inner: Weak<Inner>,
    reference: MoRef,
    update: watch::Receiver<Update>,
    closed: tokio_util::sync::CancellationToken,
    server: String,
    fresh: bool,
}

impl Interest {
    /// Returns the next update that this waiter has not had; at first the current one, if there is one.
    pub async fn next(&mut self) -> Result<Update> {
        loop {
            if self.fresh {
                self.fresh = false;
            } else {
                tokio::select! {
                    changed = self.update.changed() => {
                        if changed.is_err() { return Err(Error::Closed { server: self.server.clone() }); }
                    }
                    () = self.closed.cancelled() => return Err(Error::Closed { server: self.server.clone() }),
                }
            }
            match self.update.borrow_and_update().clone() {
                Update::Nothing => {}
                Update::Failed(error) => return Err(error),
                update => return Ok(update),
            }
        }
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        let mut interests = inner.watcher.interests.lock();
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
        let update = {
            let mut interests = self.0.watcher.interests.lock();
            interests.asked += 1;
            let order = interests.asked;
            let entry = interests.entries.entry(reference.clone()).or_insert_with(|| Entry {
                order,
                waiters: 0,
                update: watch::channel(Update::Nothing).0,
                holder: self.0.memory.holder(self.0.login.tenant()),
            });
            entry.waiters += 1;
            entry.update.subscribe()
        };
        self.0.watcher.changed.notify_one();
        if !self.0.watcher.started.swap(true, Ordering::SeqCst) {
            tokio::spawn(run(Arc::downgrade(&self.0)));
        }
        Interest {
            inner: Arc::downgrade(&self.0),
            reference: reference.clone(),
            update,
            closed: self.0.closed.clone(),
            server: self.0.login.server.clone(),
            fresh: true,
        }
    }
}

/// Runs for as long as anybody uses the session. While nobody waits, a lost session is not renewed: vCenter may lock an account
/// whose logins fail.
async fn run(inner: Weak<Inner>) {
    let mut failures = 0;
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
        let (clock, started) = (vcenter.0.clock, vcenter.0.clock.instant());
        let metrics = vcenter.0.metrics.clone();
        let result = tokio::select! {
            () = closed.cancelled() => return,
            result = Poll::run(vcenter) => result,
        };
        let Err(error) = result else { return };
        metrics.poll_failed();
        failures = if clock.since(started) > RETRY_MAX {
            1
        } else {
            failures + 1
        };
        tracing::debug!(%error, "the watch of vCenter starts again");
        tokio::select! {
            () = closed.cancelled() => return,
            () = clock.sleep(exponential(RETRY, RETRY_MAX, failures)) => {}
        }
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
    /// Returns the objects that belong into the view, and whether these are all objects.
    pub(crate) fn wanted(&self, window: usize) -> (Vec<(MoRef, u64)>, bool) {
        let interests = self.0.watcher.interests.lock();
        choose(interests.all().collect(), window)
    }

    /// Returns all objects that are waited for, each with the order of its interest.
    pub(crate) fn waiters(&self) -> Vec<(MoRef, u64)> {
        self.0.watcher.interests.lock().all().collect()
    }

    pub(crate) async fn read_and_report(&self, references: &[MoRef]) -> Result<bool> {
        let mut changed = false;
        for chunk in references.chunks(CHUNK) {
            changed |= self.read_chunk(chunk).await?;
        }
        Ok(changed)
    }

    async fn read_chunk(&self, references: &[MoRef]) -> Result<bool> {
        let found = self.retrieve(&WANTS, references, &[]).await?;
        let mut missing: HashSet<&MoRef> = references.iter().collect();
        let mut changed = false;
        for object in found {
            let Some(reference) = object.reference.clone() else {
                continue;
            };
            missing.remove(&reference);
            changed |= self.report(&reference, Update::Object(Arc::new(object)));
        }
        for reference in missing {
            changed |= self.report(reference, Update::Gone);
        }
        Ok(changed)
    }

    /// Merges a partial update into the last one and reports the result if it differs. Returns whether an object has changed
    /// that was known before.
    pub(crate) fn merge(&self, reference: &MoRef, update: &Element) -> bool {
        let interests = self.0.watcher.interests.lock();
        let Some(entry) = interests.entries.get(reference) else {
            return false;
        };
        let known = !matches!(&*entry.update.borrow(), Update::Nothing);
        let mut object = match &*entry.update.borrow() {
            Update::Object(object) if update.text_at("kind") != Some("enter") => Object::clone(object),
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
        // The server can add properties without end; the last state that is small enough stays.
        let weight = object.weight();
        if weight > MAX_STATE || entry.holder.set(weight).is_err() {
            return false;
        }
        let reported = entry
            .update
            .send_if_modified(|update| replace(update, Update::Object(Arc::new(object))));
        reported && known
    }

    pub(crate) fn report(&self, reference: &MoRef, new: Update) -> bool {
        let interests = self.0.watcher.interests.lock();
        let Some(entry) = interests.entries.get(reference) else {
            return false;
        };
        let weight = match &new {
            Update::Object(object) => object.weight(),
            Update::Nothing | Update::Gone | Update::Failed(_) => 0,
        };
        let new = match entry.holder.set(weight) {
            Ok(()) => new,
            Err(full) => Update::Failed(full.into()),
        };
        entry.update.send_if_modified(|update| replace(update, new))
    }

    pub(crate) fn fail_all(&self, error: &Error) {
        for entry in self.0.watcher.interests.lock().entries.values() {
            entry.update.send_replace(Update::Failed(error.clone()));
        }
    }
}

/// Replaces an update. Returns whether the new one differs.
fn replace(update: &mut Update, new: Update) -> bool {
    let same = match (&*update, &new) {
        (Update::Object(old), Update::Object(new)) => old.values == new.values,
        (Update::Gone, Update::Gone) => true,
        _ => false,
    };
    *update = new;
    !same
}

/// Returns the oldest waiters, and whether these are all.
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
    fn the_window_takes_the_oldest_and_all_when_there_is_room() {
        let waiters: Vec<(MoRef, u64)> = (0..20).map(|n| (MoRef::task(&format!("task-{n}")), n)).collect();
        let shuffled: Vec<(MoRef, u64)> = waiters.iter().rev().cloned().collect();
        assert_eq!(choose(shuffled.clone(), 8), (waiters[..8].to_vec(), false));
        assert_eq!(choose(shuffled, 20), (waiters, true));
    }

    #[test]
    fn the_same_update_again_is_not_reported() {
        let object = |state: &str| {
            let value = Element {
                text: state.to_owned(),
                ..Element::default()
            };
            Update::Object(Arc::new(Object {
                reference: None,
                values: [("info.state".to_owned(), value)].into(),
            }))
        };
        let mut update = Update::Nothing;
        assert!(replace(&mut update, object("running")));
        assert!(!replace(&mut update, object("running")));
        assert!(replace(&mut update, object("success")));
        assert!(replace(&mut update, Update::Gone));
        assert!(!replace(&mut update, Update::Gone));
    }
}
