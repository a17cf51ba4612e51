//! Lists and watches.

use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http_body::Frame;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::ApiServer;
use super::answer::Failure;
use super::kinds::{Query, Target};
use super::selector::Selector;
use super::store::{Change, Name, Store};

/// The interval of bookmarks on an idle watch.
const BOOKMARK: Duration = Duration::from_secs(60);
/// A watch that names no time ends after this long.
const TIMEOUT: Duration = Duration::from_secs(1800);

impl Store {
    pub fn list(&self, target: &Target, query: &Query) -> Value {
        let selector = Selector::of(query);
        let inside = |name: &Name| target.namespace.as_ref().is_none_or(|namespace| *namespace == name.0);
        let after = query
            .get("continue")
            .split_once('/')
            .map(|(ns, name)| (ns.to_owned(), name.to_owned()));
        let selected = self.all(&target.kind.key()).filter(|(name, object)| {
            inside(name) && selector.selects(object) && after.as_ref().is_none_or(|after| *name > after)
        });
        let limit = query
            .number("limit")
            .filter(|limit| *limit > 0)
            .map_or(usize::MAX, |limit| limit as usize);
        let mut selected = selected.peekable();
        let (mut items, mut last) = (Vec::new(), None);
        while items.len() < limit
            && let Some((name, object)) = selected.next()
        {
            items.push(object.clone());
            last = Some(name);
        }
        let more = last.filter(|_| selected.peek().is_some());
        let mut metadata = json!({"resourceVersion": self.version().to_string()});
        if let Some((namespace, name)) = more {
            metadata["continue"] = json!(format!("{namespace}/{name}"));
        }
        let items: Vec<Value> = items.iter().map(|object| target.show(object)).collect();
        json!({
            "kind": format!("{}List", target.kind.kind), "apiVersion": target.kind.api_version(&target.version),
            "metadata": metadata, "items": items,
        })
    }
}

/// The position of a watch.
struct Watching {
    server: ApiServer,
    target: Target,
    selector: Selector,
    bookmarks: bool,
    version: u64,
    epoch: u64,
    ends: Instant,
    bookmark: Instant,
    initial: Vec<Value>,
    over: bool,
}

enum Next {
    Send(Value),
    Wait(Instant),
    End,
}

/// The changes from the version in the query on, one line each.
pub fn watch(
    server: ApiServer,
    target: Target,
    query: &Query,
) -> impl Stream<Item = Result<Frame<Bytes>, std::convert::Infallible>> + Send + 'static {
    let selector = Selector::of(query);
    let now = Instant::now();
    let timeout = query.number("timeoutSeconds").map_or(TIMEOUT, Duration::from_secs);
    let store = server.store.lock();
    let version = query.number("resourceVersion").unwrap_or(0);
    let mut initial = Vec::new();
    if version == 0 {
        let list = store.list(&target, query);
        let items = list["items"].as_array().into_iter().flatten();
        initial = items.map(|object| json!({"type": "ADDED", "object": object})).collect();
        initial.reverse();
    }
    let watching = Watching {
        selector,
        bookmarks: query.is_true("allowWatchBookmarks"),
        version: if version == 0 { store.version() } else { version },
        epoch: store.epoch,
        ends: now + timeout,
        bookmark: now + BOOKMARK,
        initial,
        over: false,
        target,
        server: server.clone(),
    };
    drop(store);
    futures::stream::unfold(watching, |mut watching| async move {
        let event = watching.event().await?;
        let line = Bytes::from(event.to_string() + "\n");
        Some((Ok(Frame::data(line)), watching))
    })
}

impl Watching {
    /// The next event; `None` ends the watch.
    async fn event(&mut self) -> Option<Value> {
        loop {
            let server = self.server.clone();
            let changed = server.changed.notified();
            tokio::pin!(changed);
            // Enabled before the look, so that no change falls between the two.
            changed.as_mut().enable();
            match self.next() {
                Next::Send(event) => return Some(event),
                Next::End => return None,
                Next::Wait(until) => tokio::select! {
                    biased;
                    () = &mut changed => {}
                    () = tokio::time::sleep_until(until) => {}
                },
            }
        }
    }

    fn next(&mut self) -> Next {
        if let Some(event) = self.initial.pop() {
            return Next::Send(event);
        }
        let now = Instant::now();
        let server = self.server.clone();
        let store = server.store.lock();
        if self.over || now >= self.ends || store.epoch != self.epoch {
            return Next::End;
        }
        if self.version < store.compacted {
            self.over = true;
            let status = Failure::expired(self.version, store.compacted).status();
            return Next::Send(json!({"type": "ERROR", "object": status}));
        }
        let key = self.target.kind.key();
        let mut due = None;
        for change in store.since(&key, self.version) {
            if change.visible > now {
                due = Some(change.visible);
                break;
            }
            self.version = change.version;
            if let Some(event) = self.shown(change) {
                self.bookmark = now + BOOKMARK;
                return Next::Send(event);
            }
        }
        if due.is_none() && self.bookmarks && now >= self.bookmark {
            self.bookmark = now + BOOKMARK;
            self.version = store.version();
            return Next::Send(self.bookmark_event());
        }
        // A bookmark is sent only when no change is pending: it confirms that all changes before it were sent.
        let until = match due {
            Some(due) => due,
            None if self.bookmarks => self.bookmark,
            None => self.ends,
        };
        Next::Wait(until.min(self.ends))
    }

    fn bookmark_event(&self) -> Value {
        let object = json!({"metadata": {"resourceVersion": self.version.to_string(), "creationTimestamp": null}});
        json!({"type": "BOOKMARK", "object": self.target.show(&object)})
    }

    /// The change as this watch sees it: an object that is no longer selected is deleted for it.
    fn shown(&self, change: &Change) -> Option<Value> {
        let inside = self
            .target
            .namespace
            .as_deref()
            .is_none_or(|namespace| change.object["metadata"]["namespace"] == namespace);
        let named = self
            .target
            .name
            .as_deref()
            .is_none_or(|name| change.object["metadata"]["name"] == name);
        if !inside || !named {
            return None;
        }
        let before = change
            .before
            .as_ref()
            .is_some_and(|before| self.selector.selects(before));
        let after = !change.deleted && self.selector.selects(&change.object);
        let kind = match (before, after) {
            (false, false) => return None,
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
        };
        Some(json!({"type": kind, "object": self.target.show(&change.object)}))
    }
}
