//! The long poll within one login: its view and its answers.
//!
//! Objects that somebody waits for are in a list view, and `WaitForUpdatesEx` reports their changes. [`PollRate`] decides how
//! many objects are in the view, and how often the rest is read.
//!
//! Invariants: the view is not changed again before an answer has shown the change before (a server that takes one in while
//! the next arrives may end in a deadlock, and govmomi's simulator does). Objects that have to wait for that are read within
//! [`SHORT_WAIT`]. A server that does not answer a change at all gets a new poll with a new view. Changes that a server lost
//! are read at the end of a long wait at the latest.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use capstan_core::clock::Clock;

use crate::error::{Error, Result};
use crate::poll_rate::{PollRate, SHORT_WAIT, WINDOW};
use crate::properties::{Step, write_filter};
use crate::soap::Call;
use crate::vcenter::{Inner, Vcenter};
use crate::watcher::{Update, WANTS};
use crate::xml::{Element, Writer};
use capstan_core::vm::MoRef;

/// Servers give no more updates than this in one answer.
const PAGE: usize = 100;
/// The longest wait in one call: shorter than the idle limits of usual proxies, and it keeps the session alive.
const LONG_WAIT: Duration = Duration::from_secs(55);
/// New waiters that come within this time are added in one call.
const GATHER: Duration = Duration::from_millis(20);
/// Beyond the wait itself, an answer may take this long before the connection counts as dead.
const GRACE: Duration = Duration::from_secs(30);
/// A view that cannot be changed within this time is stuck on the server, and its poll with it.
const STUCK: Duration = Duration::from_secs(10);

/// The poll within one login: its collector and view live no longer than that.
pub(crate) struct Poll {
    inner: Weak<Inner>,
    clock: Clock,
    collector: MoRef,
    view: MoRef,
    version: String,
    /// The objects in the view, with the interest that added each.
    listed: HashMap<MoRef, u64>,
    read: Instant,
    rate: PollRate,
    /// Whether this server lets all objects enter again after a change of the view.
    reenters: bool,
    change: Option<Change>,
}

/// A change of the view that no answer has shown yet.
struct Change {
    added: HashSet<MoRef>,
    at: Instant,
}

type Wait = Pin<Box<dyn Future<Output = Result<Element>> + Send>>;

impl Poll {
    /// Ends with an error when the session was renewed or lost, and with `Ok` when nobody holds the vCenter any more.
    pub async fn run(vcenter: Vcenter) -> Result<()> {
        let mut generation = vcenter.0.generation.subscribe();
        generation.mark_unchanged();
        let inner = Arc::downgrade(&vcenter.0);
        let changed = vcenter.0.watcher.changed.clone();
        let poll = Self::open(&vcenter).await;
        if let Err(error @ (Error::Login { .. } | Error::Thumbprint { .. })) = &poll {
            vcenter.fail_all(error);
        }
        let mut poll = poll?;
        let _counted = vcenter.0.metrics.poll();
        drop(vcenter);
        let mut wait: Option<Wait> = None;
        loop {
            let Some(vcenter) = inner.upgrade().map(Vcenter) else {
                return Ok(());
            };
            let all_watched = poll.arrange(&vcenter).await?;
            if wait.is_none() && !poll.listed.is_empty() {
                wait = Some(poll.wait(&vcenter, LONG_WAIT));
            }
            drop(vcenter);
            let waiting = wait.is_some();
            let next_read = poll.next_read();
            let answer = tokio::select! {
                answer = async { match &mut wait { Some(wait) => wait.await, None => std::future::pending().await } },
                    if waiting => answer?,
                () = changed.notified() => {
                    capstan_core::clock::sleep(GATHER).await;
                    continue;
                }
                () = capstan_core::clock::sleep_until(next_read.into()), if !all_watched => {
                    let Some(vcenter) = inner.upgrade().map(Vcenter) else { return Ok(()) };
                    match poll.read_others(&vcenter).await? {
                        Some(true) => poll.rate.note_change(vcenter.waiters().len(), poll.clock.instant()),
                        Some(false) => poll.rate.note_quiet(poll.clock.instant()),
                        None => poll.rate.widen(),
                    }
                    continue;
                }
                _ = generation.changed() => {
                    return Err(Error::Refused { method: "WaitForUpdatesEx".into(), reason: "session renewed".into() });
                }
            };
            wait = None;
            let Some(vcenter) = inner.upgrade().map(Vcenter) else {
                return Ok(());
            };
            poll.take(&vcenter, &answer).await?;
        }
    }

    async fn open(vcenter: &Vcenter) -> Result<Self> {
        let content = vcenter.content()?;
        let views = content.view_manager.clone().ok_or(Error::Incomplete {
            method: "RetrieveServiceContent".to_owned(),
            what: "viewManager",
        })?;
        let shared = content.property_collector.clone();
        let collector = vcenter
            .call_for_moref(Call::read("CreatePropertyCollector", &shared, String::new()))
            .await?;
        let view = vcenter
            .call_for_moref(Call::read("CreateListView", &views, String::new()))
            .await?;
        let mut body = Writer::new();
        let steps = [Step {
            name: "view",
            kind: "ListView",
            path: "view",
            next: &[],
        }];
        write_filter(&mut body, "spec", &WANTS, std::slice::from_ref(&view), &steps);
        body.value("partialUpdates", false);
        vcenter
            .call_for_moref(Call::read("CreateFilter", &collector, body.finish()))
            .await?;
        let mut poll = Self {
            inner: Arc::downgrade(&vcenter.0),
            collector,
            view,
            version: String::new(),
            listed: HashMap::new(),
            clock: vcenter.0.clock,
            read: vcenter.0.clock.instant(),
            rate: PollRate::of(&content.about.full_name),
            reenters: false,
            change: None,
        };
        // The server takes in the empty view before it is first changed: see the invariants above.
        let answer = poll.wait(vcenter, Duration::ZERO).await?;
        if let Some(version) = answer.child("returnval").and_then(|set| set.string_at("version")) {
            poll.version = version;
        }
        Ok(poll)
    }

    /// Adds and removes objects so that the view holds those that are waited for. Returns whether it holds all of them.
    async fn arrange(&mut self, vcenter: &Vcenter) -> Result<bool> {
        let (wanted, all) = vcenter.wanted(self.rate.window());
        let is_new = |(reference, _): &&(MoRef, u64)| !self.listed.contains_key(reference);
        let add: Vec<(MoRef, u64)> = wanted.iter().filter(is_new).cloned().collect();
        // An object that comes back before it was removed does not enter again, and its waiter would hear nothing.
        let is_back = |(reference, order): &&(MoRef, u64)| self.listed.get(reference).is_some_and(|o| o != order);
        let back: Vec<(MoRef, u64)> = wanted.iter().filter(is_back).cloned().collect();
        if !back.is_empty() {
            let references: Vec<MoRef> = back.iter().map(|(reference, _)| reference.clone()).collect();
            vcenter.read_and_report(&references).await?;
            self.listed.extend(back);
        }
        let keep: HashSet<MoRef> = wanted.into_iter().map(|(reference, _)| reference).collect();
        let is_left = |listed: &&MoRef| !keep.contains(*listed);
        let remove: Vec<MoRef> = self.listed.keys().filter(is_left).cloned().collect();
        // Removing costs a call too, so objects that are done stay until others are added or too many have gathered.
        if self.rate.is_busy(self.clock.instant()) {
            return Ok(false);
        }
        if add.is_empty() && remove.len() <= WINDOW {
            return Ok(all);
        }
        if !self.is_settled() {
            return Ok(add.is_empty() && all);
        }
        self.change_view(vcenter, add, remove).await?;
        Ok(all)
    }

    async fn change_view(&mut self, vcenter: &Vcenter, add: Vec<(MoRef, u64)>, remove: Vec<MoRef>) -> Result<()> {
        let mut body = Writer::new();
        for (reference, _) in &add {
            body.moref("add", reference);
        }
        for reference in &remove {
            body.moref("remove", reference);
        }
        let change = vcenter.call(Call::read("ModifyListView", &self.view, body.finish()));
        let stuck = |_| Error::Refused {
            method: "ModifyListView".into(),
            reason: "the server has not answered for long: a new view is made".into(),
        };
        let answer = capstan_core::clock::timeout(STUCK, change).await.map_err(stuck)??;
        let mut added: HashSet<MoRef> = add.iter().map(|(reference, _)| reference.clone()).collect();
        self.listed.extend(add);
        for reference in &remove {
            self.listed.remove(reference);
        }
        for unresolved in answer.all("returnval").filter_map(Element::moref) {
            self.listed.remove(&unresolved);
            added.remove(&unresolved);
            vcenter.report(&unresolved, Update::Gone);
        }
        self.change = Some(Change {
            added,
            at: self.clock.instant(),
        });
        Ok(())
    }

    fn is_settled(&self) -> bool {
        self.change
            .as_ref()
            .is_none_or(|change| self.clock.since(change.at) >= SHORT_WAIT)
    }

    /// Returns when objects outside the view are read at the latest.
    fn next_read(&self) -> Instant {
        let changed = self.change.as_ref().map(|change| change.at);
        changed.map_or(self.read, |at| at.max(self.read)) + self.rate.pause()
    }

    fn wait(&self, vcenter: &Vcenter, longest: Duration) -> Wait {
        let mut body = Writer::new();
        body.text("version", &self.version).nest("options", |w| {
            w.value("maxWaitSeconds", longest.as_secs());
        });
        let (weak, collector, body) = (Arc::downgrade(&vcenter.0), self.collector.clone(), body.finish());
        Box::pin(async move {
            let Some(vcenter) = weak.upgrade().map(Vcenter) else {
                return Ok(Element::default());
            };
            let call = Call {
                timeout: longest + GRACE,
                ..Call::read("WaitForUpdatesEx", &collector, body)
            };
            vcenter.call_once(call).await
        })
    }

    /// Reports the changes in an answer to their waiters.
    async fn take(&mut self, vcenter: &Vcenter, answer: &Element) -> Result<()> {
        let Some(updates) = answer.child("returnval") else {
            self.rate.widen();
            return self.read_all(vcenter).await;
        };
        self.version = updates.string_at("version").unwrap_or_default();
        let (mut doubtful, mut changed, mut entered) = (Vec::new(), false, HashSet::new());
        let added = self
            .change
            .as_ref()
            .map(|change| change.added.clone())
            .unwrap_or_default();
        for update in updates.all("filterSet").flat_map(|set| set.all("objectSet")) {
            let Some(reference) = update.moref_at("obj") else {
                continue;
            };
            let kind = update.text_at("kind");
            if self
                .change
                .as_ref()
                .is_some_and(|change| change.shows(&reference, kind))
            {
                self.change = None;
            }
            if kind == Some("enter") {
                entered.insert(reference.clone());
            }
            match kind {
                // The server reports this also of objects that we removed from the view.
                Some("leave") if self.listed.contains_key(&reference) => doubtful.push(reference),
                Some("leave") => {}
                _ => changed |= vcenter.merge(&reference, update),
            }
        }
        let truncated = updates.bool_at("truncated") == Some(true);
        if !truncated {
            doubtful.extend(self.passed_over(vcenter, &entered, &added));
        }
        if !doubtful.is_empty() {
            changed |= vcenter.read_and_report(&doubtful).await?;
        }
        if changed && !truncated {
            self.rate.note_change(vcenter.waiters().len(), self.clock.instant());
        }
        Ok(())
    }

    /// Returns the objects that did not enter with the others. Servers that let all objects enter again after a change of the
    /// view may forget to report an object that left at that very moment.
    fn passed_over(&mut self, vcenter: &Vcenter, entered: &HashSet<MoRef>, added: &HashSet<MoRef>) -> Vec<MoRef> {
        let again = |reference: &MoRef| self.listed.contains_key(reference) && !added.contains(reference);
        self.reenters |= entered.iter().any(again);
        if !self.reenters || entered.is_empty() || self.listed.len() >= PAGE {
            return Vec::new();
        }
        let pending = vcenter.waiters().into_iter();
        let missed = pending.filter(|(reference, order)| self.listed.get(reference) == Some(order));
        let missed = missed.filter(|(reference, _)| !entered.contains(reference) && !added.contains(reference));
        missed.map(|(reference, _)| reference).collect()
    }

    /// Reads all objects once after a long wait without an update: the server may have lost one.
    async fn read_all(&mut self, vcenter: &Vcenter) -> Result<()> {
        let all: Vec<MoRef> = vcenter.waiters().into_iter().map(|(reference, _)| reference).collect();
        if !all.is_empty() {
            self.read = self.clock.instant();
            vcenter.read_and_report(&all).await?;
        }
        Ok(())
    }

    /// Reads the objects that are waited for, are outside the view and do not enter it next; in busy times all of them. Returns
    /// whether any has changed, and `None` if there is nothing to read.
    async fn read_others(&mut self, vcenter: &Vcenter) -> Result<Option<bool>> {
        self.read = self.clock.instant();
        let mut others = vcenter.waiters();
        if !self.rate.is_busy(self.clock.instant()) {
            others.retain(|(reference, order)| self.listed.get(reference) != Some(order));
            if self.is_settled() {
                let (next, _) = vcenter.wanted(self.rate.window());
                others.retain(|waiter| !next.contains(waiter));
            }
        }
        if others.is_empty() {
            return Ok(None);
        }
        let others: Vec<MoRef> = others.into_iter().map(|(reference, _)| reference).collect();
        vcenter.read_and_report(&others).await.map(Some)
    }
}

impl Change {
    /// Whether an update shows that the server has taken the change in: an object of the change enters or, if the change added
    /// none, others enter again or leave.
    fn shows(&self, reference: &MoRef, kind: Option<&str>) -> bool {
        match kind {
            Some("enter") => self.added.is_empty() || self.added.contains(reference),
            Some("leave") => self.added.is_empty(),
            _ => false,
        }
    }
}

impl Drop for Poll {
    /// The collector is session-bound: it ends with the session, or here when the session lives on.
    fn drop(&mut self) {
        let (inner, collector, view) = (self.inner.clone(), self.collector.clone(), self.view.clone());
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            let Some(vcenter) = inner.upgrade().map(Vcenter).filter(|vcenter| !vcenter.is_closed()) else {
                return;
            };
            let _ = vcenter
                .call_once(Call::read("DestroyPropertyCollector", &collector, String::new()))
                .await;
            let _ = vcenter.call_once(Call::read("DestroyView", &view, String::new())).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_shown_by_objects_that_it_added_or_else_by_any_that_enters_or_leaves() {
        let (new, old) = (MoRef::task("task-2"), MoRef::task("task-1"));
        let change = |added: &[&MoRef]| Change {
            added: added.iter().copied().cloned().collect(),
            at: capstan_core::clock::Clock::system().instant(),
        };
        assert!(change(&[&new]).shows(&new, Some("enter")));
        assert!(!change(&[&new]).shows(&new, Some("modify")));
        assert!(
            !change(&[&new]).shows(&old, Some("enter")),
            "an answer from before the change says nothing about it"
        );
        assert!(!change(&[&new]).shows(&old, Some("leave")));
        assert!(change(&[]).shows(&old, Some("leave")));
        assert!(change(&[]).shows(&old, Some("enter")));
    }
}
