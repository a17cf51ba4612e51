//! The long poll within one login: its view, and what its answers say.
//!
//! What is waited for is put into a list view, and `WaitForUpdatesEx` tells what changed. How much of it is in the view,
//! and how often the rest is read, is for [`PollRate`] to say.
//!
//! Invariants: the view is not changed again before an answer has shown the change before (a server that takes one in
//! while the next arrives may end in a deadlock, and govmomi's simulator does); whoever is kept waiting by that is read
//! within [`SHORT_WAIT`]; a server that does not answer a change at all is polled anew, with a view of its own; what a
//! server lost is found out at the end of a long wait at the latest.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::poll_rate::{PollRate, SHORT_WAIT, WINDOW};
use crate::properties::{Step, write_filter};
use crate::vcenter::{Call, Inner, Vcenter};
use crate::watcher::{Seen, WANTS};
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
    collector: MoRef,
    view: MoRef,
    version: String,
    /// Who is in the view, and which interest put him there.
    listed: HashMap<MoRef, u64>,
    read: Instant,
    rate: PollRate,
    /// Whether this server lets everybody enter anew after a change of the view.
    anew: bool,
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
                    tokio::time::sleep(GATHER).await;
                    continue;
                }
                () = tokio::time::sleep_until(next_read), if !all_watched => {
                    let Some(vcenter) = inner.upgrade().map(Vcenter) else { return Ok(()) };
                    match poll.read_others(&vcenter).await? {
                        Some(true) => poll.rate.stir(vcenter.waiters().len(), Instant::now()),
                        Some(false) => poll.rate.calm(Instant::now()),
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
            read: Instant::now(),
            rate: PollRate::of(&content.about.full_name),
            anew: false,
            change: None,
        };
        // The empty view is taken in before it is first changed: see the invariants above.
        let answer = poll.wait(vcenter, Duration::ZERO).await?;
        if let Some(version) = answer.child("returnval").and_then(|set| set.string_at("version")) {
            poll.version = version;
        }
        Ok(poll)
    }

    /// Brings the view in line with what is waited for; tells whether nobody is left outside.
    async fn arrange(&mut self, vcenter: &Vcenter) -> Result<bool> {
        let (wanted, all) = vcenter.wanted(self.rate.window());
        let is_new = |(reference, _): &&(MoRef, u64)| !self.listed.contains_key(reference);
        let add: Vec<(MoRef, u64)> = wanted.iter().filter(is_new).cloned().collect();
        // Whoever comes back before he was taken out does not enter again, and would be told nothing.
        let is_back = |(reference, order): &&(MoRef, u64)| self.listed.get(reference).is_some_and(|o| o != order);
        let back: Vec<(MoRef, u64)> = wanted.iter().filter(is_back).cloned().collect();
        if !back.is_empty() {
            let references: Vec<MoRef> = back.iter().map(|(reference, _)| reference.clone()).collect();
            vcenter.read_and_tell(&references).await?;
            self.listed.extend(back);
        }
        let keep: HashSet<MoRef> = wanted.into_iter().map(|(reference, _)| reference).collect();
        let is_left = |listed: &&MoRef| !keep.contains(*listed);
        let remove: Vec<MoRef> = self.listed.keys().filter(is_left).cloned().collect();
        // Leaving costs a call too, so those that are done stay until somebody enters or too many have gathered.
        if self.rate.is_busy(Instant::now()) {
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
            reason: "the server has not answered for long: the view is made anew".into(),
        };
        let answer = tokio::time::timeout(STUCK, change).await.map_err(stuck)??;
        let mut added: HashSet<MoRef> = add.iter().map(|(reference, _)| reference.clone()).collect();
        self.listed.extend(add);
        for reference in &remove {
            self.listed.remove(reference);
        }
        for unresolved in answer.all("returnval").filter_map(Element::moref) {
            self.listed.remove(&unresolved);
            added.remove(&unresolved);
            vcenter.tell(&unresolved, Seen::Gone);
        }
        self.change = Some(Change {
            added,
            at: Instant::now(),
        });
        Ok(())
    }

    fn is_settled(&self) -> bool {
        self.change
            .as_ref()
            .is_none_or(|change| change.at.elapsed() >= SHORT_WAIT)
    }

    /// When those who are outside are read at the latest.
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

    /// Tells the waiters what an answer says.
    async fn take(&mut self, vcenter: &Vcenter, answer: &Element) -> Result<()> {
        let Some(updates) = answer.child("returnval") else {
            self.rate.widen();
            return self.read_everybody(vcenter).await;
        };
        self.version = updates.string_at("version").unwrap_or_default();
        let (mut doubtful, mut news, mut entered) = (Vec::new(), false, HashSet::new());
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
                // Also said of what we took out of the view ourselves.
                Some("leave") if self.listed.contains_key(&reference) => doubtful.push(reference),
                Some("leave") => {}
                _ => news |= vcenter.merge(&reference, update),
            }
        }
        let truncated = updates.bool_at("truncated") == Some(true);
        if !truncated {
            doubtful.extend(self.passed_over(vcenter, &entered, &added));
        }
        if !doubtful.is_empty() {
            news |= vcenter.read_and_tell(&doubtful).await?;
        }
        if news && !truncated {
            self.rate.stir(vcenter.waiters().len(), Instant::now());
        }
        Ok(())
    }

    /// Servers that let everybody enter anew after a change of the view may forget to say who went in that very moment:
    /// those who did not enter with the others.
    fn passed_over(&mut self, vcenter: &Vcenter, entered: &HashSet<MoRef>, added: &HashSet<MoRef>) -> Vec<MoRef> {
        let anew = |reference: &MoRef| self.listed.contains_key(reference) && !added.contains(reference);
        self.anew |= entered.iter().any(anew);
        if !self.anew || entered.is_empty() || self.listed.len() >= PAGE {
            return Vec::new();
        }
        let pending = vcenter.waiters().into_iter();
        let missed = pending.filter(|(reference, order)| self.listed.get(reference) == Some(order));
        let missed = missed.filter(|(reference, _)| !entered.contains(reference) && !added.contains(reference));
        missed.map(|(reference, _)| reference).collect()
    }

    /// After a long wait without a word everybody is read once, should the server have lost one.
    async fn read_everybody(&mut self, vcenter: &Vcenter) -> Result<()> {
        let all: Vec<MoRef> = vcenter.waiters().into_iter().map(|(reference, _)| reference).collect();
        if !all.is_empty() {
            self.read = Instant::now();
            vcenter.read_and_tell(&all).await?;
        }
        Ok(())
    }

    /// Reads those who expect something, are outside the window and do not enter it next; in busy times everybody. Tells
    /// whether there was news, and nothing if there is nobody to read.
    async fn read_others(&mut self, vcenter: &Vcenter) -> Result<Option<bool>> {
        self.read = Instant::now();
        let mut others = vcenter.waiters();
        if !self.rate.is_busy(Instant::now()) {
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
        vcenter.read_and_tell(&others).await.map(Some)
    }
}

impl Change {
    /// Whether an update shows that the server has taken the change in: by one that entered or, when there was none, by
    /// the others that enter anew or leave.
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
    fn a_change_is_shown_by_those_it_added_or_else_by_anybody_who_enters_or_leaves() {
        let (new, old) = (MoRef::task("task-2"), MoRef::task("task-1"));
        let change = |added: &[&MoRef]| Change {
            added: added.iter().copied().cloned().collect(),
            at: Instant::now(),
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
