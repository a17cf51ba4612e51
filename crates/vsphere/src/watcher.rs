//! One long poll for each session, through which every task and machine that somebody waits for is watched.
//!
//! Invariants: the number of calls grows neither with the number of waiters nor with the time they wait; whoever waits is
//! told of every change, also when the session was lost and renewed in between.
//!
//! What is waited for is put into a list view, and `WaitForUpdatesEx` tells what changed. Servers compute updates anew
//! over everything watched, for every change in their inventory: that is dear while hundreds of clones are under way. So
//! the view is a window: in busy times the oldest few stand for all, and each time one of them moves, the others are
//! read in one call; the quieter it gets, the wider the window, until everything is watched and nothing is sent any more.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::moref::MoRef;
use crate::properties::{Object, Step, Want, write_filter};
use crate::session::lock;
use crate::task::TASK_PATHS;
use crate::vcenter::{Call, Inner, Vcenter};
use crate::vm::STATE_PATHS;
use crate::xml::{Element, Writer};

/// How many objects stand for all in busy times.
const WINDOW: usize = 8;
/// The window grows by this factor with every quiet round, and shrinks by it with every change.
const GROWTH: usize = 4;
/// No window is wider: vCenter does not like views without bounds.
const WIDEST: usize = 8192;
/// The longest wait in one call: shorter than the idle limits of usual proxies, and it keeps the session alive.
const LONG_WAIT: Duration = Duration::from_secs(55);
/// The longest time that somebody outside the window goes unread.
const SHORT_WAIT: Duration = Duration::from_secs(1);
/// Reads of what is outside the window are this far apart at least.
const BETWEEN_READS: Duration = Duration::from_millis(250);
/// New waiters that come within this time are added in one call.
const GATHER: Duration = Duration::from_millis(20);
/// After a failure the poll starts again no sooner than this, doubled up to `RETRY_MAX`.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Beyond the wait itself, an answer may take this long before the connection counts as dead.
const GRACE: Duration = Duration::from_secs(30);

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
    changed: Arc<Notify>,
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

/// The poll within one login: its collector and view live no longer than that.
struct Poll {
    inner: Weak<Inner>,
    collector: MoRef,
    view: MoRef,
    version: String,
    /// Who is in the view, and which interest put him there.
    listed: HashMap<MoRef, u64>,
    window: usize,
    read: Instant,
}

type Wait = Pin<Box<dyn Future<Output = Result<Element>> + Send>>;

impl Poll {
    /// Ends with an error when the session was renewed or lost, and with `Ok` when nobody holds the vCenter any more.
    async fn run(vcenter: Vcenter) -> Result<()> {
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
                wait = Some(poll.wait(&vcenter));
            }
            drop(vcenter);
            let waiting = wait.is_some();
            let next_read = poll.read + SHORT_WAIT;
            let answer = tokio::select! {
                answer = async { match &mut wait { Some(wait) => wait.await, None => std::future::pending().await } },
                    if waiting => answer?,
                () = changed.notified() => {
                    tokio::time::sleep(GATHER).await;
                    continue;
                }
                () = tokio::time::sleep_until(next_read), if !all_watched => {
                    let Some(vcenter) = inner.upgrade().map(Vcenter) else { return Ok(()) };
                    if !poll.read_others(&vcenter).await? {
                        poll.widen();
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
        Ok(Self {
            inner: Arc::downgrade(&vcenter.0),
            collector,
            view,
            version: String::new(),
            listed: HashMap::new(),
            window: WINDOW,
            read: Instant::now(),
        })
    }

    /// Brings the view in line with what is waited for; tells whether nobody is left outside.
    async fn arrange(&mut self, vcenter: &Vcenter) -> Result<bool> {
        let (wanted, all) = vcenter.wanted(self.window);
        let is_new = |(reference, _): &&(MoRef, u64)| !self.listed.contains_key(reference);
        let add: Vec<(MoRef, u64)> = wanted.iter().filter(is_new).cloned().collect();
        // Whoever comes back before he was taken out does not enter again, and would be told nothing.
        let is_back = |(reference, order): &&(MoRef, u64)| self.listed.get(reference).is_some_and(|o| o != order);
        let back: Vec<(MoRef, u64)> = wanted.iter().filter(is_back).cloned().collect();
        let keep: HashSet<MoRef> = wanted.into_iter().map(|(reference, _)| reference).collect();
        let remove: Vec<MoRef> = self
            .listed
            .keys()
            .filter(|listed| !keep.contains(*listed))
            .cloned()
            .collect();
        if !back.is_empty() {
            let references: Vec<MoRef> = back.iter().map(|(reference, _)| reference.clone()).collect();
            self.listed.extend(back);
            vcenter.read_and_tell(&references).await?;
        }
        // Leaving costs a call too, so those that are done stay until somebody enters or too many have gathered.
        if add.is_empty() && remove.len() <= WINDOW {
            return Ok(all);
        }
        let mut body = Writer::new();
        for (reference, _) in &add {
            body.moref("add", reference);
        }
        for reference in &remove {
            body.moref("remove", reference);
        }
        let answer = vcenter
            .call(Call::read("ModifyListView", &self.view, body.finish()))
            .await?;
        self.listed.extend(add);
        for reference in &remove {
            self.listed.remove(reference);
        }
        for unresolved in answer.all("returnval").filter_map(Element::moref) {
            self.listed.remove(&unresolved);
            vcenter.tell(&unresolved, Seen::Gone);
        }
        Ok(all)
    }

    fn wait(&self, vcenter: &Vcenter) -> Wait {
        let mut body = Writer::new();
        body.text("version", &self.version).nest("options", |w| {
            w.value("maxWaitSeconds", LONG_WAIT.as_secs());
        });
        let (weak, collector, body) = (Arc::downgrade(&vcenter.0), self.collector.clone(), body.finish());
        Box::pin(async move {
            let Some(vcenter) = weak.upgrade().map(Vcenter) else {
                return Ok(Element::default());
            };
            let call = Call {
                timeout: LONG_WAIT + GRACE,
                ..Call::read("WaitForUpdatesEx", &collector, body)
            };
            vcenter.call_once(call).await
        })
    }

    /// Tells the waiters what an answer says, and reads those that are outside the window.
    async fn take(&mut self, vcenter: &Vcenter, answer: &Element) -> Result<()> {
        let Some(updates) = answer.child("returnval") else {
            self.widen();
            return Ok(());
        };
        self.version = updates.string_at("version").unwrap_or_default();
        let mut doubtful = Vec::new();
        for update in updates.all("filterSet").flat_map(|set| set.all("objectSet")) {
            let Some(reference) = update.moref_at("obj") else {
                continue;
            };
            match update.text_at("kind") {
                // Also said of what we took out of the view ourselves.
                Some("leave") if self.listed.contains_key(&reference) => doubtful.push(reference),
                Some("leave") => {}
                _ => vcenter.merge(&reference, update),
            }
        }
        if !doubtful.is_empty() {
            vcenter.read_and_tell(&doubtful).await?;
        }
        if updates.bool_at("truncated") == Some(true) {
            return Ok(());
        }
        self.window = (self.window / GROWTH).max(WINDOW);
        self.read_others(vcenter).await.map(|_| ())
    }

    fn widen(&mut self) {
        self.window = self.window.saturating_mul(GROWTH).min(WIDEST);
    }

    /// Reads those who expect something and are outside the window; tells whether there was news.
    async fn read_others(&mut self, vcenter: &Vcenter) -> Result<bool> {
        let mut others = vcenter.pending();
        others.retain(|reference| !self.listed.contains_key(reference));
        if others.is_empty() {
            return Ok(false);
        }
        tokio::time::sleep_until(self.read + BETWEEN_READS).await;
        self.read = Instant::now();
        vcenter.read_and_tell(&others).await
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

const WANTS: [Want<'static>; 2] = [
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
    fn wanted(&self, window: usize) -> (Vec<(MoRef, u64)>, bool) {
        let interests = lock(&self.0.watcher.interests);
        choose(
            interests
                .entries
                .iter()
                .map(|(reference, entry)| (reference, entry.order, entry.pending > 0)),
            window,
        )
    }

    fn pending(&self) -> Vec<MoRef> {
        let interests = lock(&self.0.watcher.interests);
        interests
            .entries
            .iter()
            .filter(|(_, entry)| entry.pending > 0)
            .map(|(reference, _)| reference.clone())
            .collect()
    }

    async fn read_and_tell(&self, references: &[MoRef]) -> Result<bool> {
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

    /// Merges an object update into what is known, and tells the waiters if that changed anything.
    fn merge(&self, reference: &MoRef, update: &Element) {
        let interests = lock(&self.0.watcher.interests);
        let Some(entry) = interests.entries.get(reference) else {
            return;
        };
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
        entry
            .seen
            .send_if_modified(|seen| replace(seen, Seen::Object(Arc::new(object))));
    }

    fn tell(&self, reference: &MoRef, news: Seen) -> bool {
        let interests = lock(&self.0.watcher.interests);
        let Some(entry) = interests.entries.get(reference) else {
            return false;
        };
        entry.seen.send_if_modified(|seen| replace(seen, news))
    }

    fn fail_all(&self, error: &Error) {
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
