//! Trimmed, shared caches. Invariant: one watch per kind and scope however many controllers read it; each subscriber
//! sees every object that exists when it subscribes and every later change, deletions included; a cache that was started
//! with a limit never holds more objects than that.
//!
//! kube's own shared reflector does not pass deletions on, so the fan-out is ours; list, watch, resume and store are
//! kube's.

use std::any::{Any, TypeId};
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::rewatch::Rewatch;
use crate::runtime::Preview;

/// A cache whose server holds more objects than the cache may is filled again after this long: somebody may have removed
/// some of them.
const OVERFULL_RETRY: Duration = Duration::from_secs(300);
/// At most so many characters of a server's error are kept and logged.
const ERROR_CHARACTERS: usize = 300;
/// kubectl's copy of the whole object; no controller reads it.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// An object that a cache can hold.
pub trait Object: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static {}
impl<K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static> Object for K {}

/// One change of one object.
#[derive(Clone, Debug)]
pub struct Change<K> {
    pub object: Arc<K>,
    pub gone: bool,
}

/// Drops the fields that no controller reads and that cost most memory.
pub fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
    if let Some(annotations) = object.meta_mut().annotations.as_mut() {
        annotations.remove(LAST_APPLIED);
    }
}

/// A Node's image list is more than half of it.
pub fn trim_node(node: &mut Node) {
    trim(node);
    if let Some(status) = node.status.as_mut() {
        status.images = None;
        status.volumes_attached = None;
        status.volumes_in_use = None;
    }
}

struct Shared<K: Object> {
    store: Store<K>,
    /// kube's own `wait_until_ready` wakes only the last of several waiters, and caches are shared.
    listed: watch::Receiver<bool>,
    feed: Arc<Feed<K>>,
    task: tokio::task::AbortHandle,
}

/// The state of the watch beside the store.
struct Feed<K> {
    /// The last error of the watch.
    trouble: Mutex<Option<String>>,
    overfull: AtomicBool,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Change<K>>>>,
    removed: Mutex<Removed>,
}

impl<K> Default for Feed<K> {
    fn default() -> Self {
        Self {
            trouble: Mutex::default(),
            overfull: AtomicBool::default(),
            subscribers: Mutex::default(),
            removed: Mutex::default(),
        }
    }
}

/// UIDs of the objects that left the cache last: an object that is not there may have been shown and removed since.
#[derive(Default)]
struct Removed(VecDeque<String>);

impl Removed {
    /// More than a controller ever waits for at a time.
    const KEPT: usize = 4096;

    fn note(&mut self, uid: String) {
        if self.0.len() >= Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back(uid);
    }
}

impl<K: Object> Drop for Shared<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A cache of one kind, kept by one watch for as long as a clone of it lives. Reads through [`Cache::store`].
pub struct Cache<K: Object>(Arc<Shared<K>>);

impl<K: Object> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Object> Cache<K> {
    /// Watch `api` until the last clone is dropped or `shutdown` is cancelled.
    pub fn start(api: Api<K>, config: watcher::Config, trim: fn(&mut K), shutdown: CancellationToken) -> Self {
        Self::start_bounded(api, config, trim, usize::MAX, shutdown)
    }

    /// As [`Cache::start`], with at most `limit` objects. When the server has more, the cache keeps those that it has,
    /// is [overfull](Cache::is_overfull), and is filled again from time to time.
    pub fn start_bounded(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        limit: usize,
        shutdown: CancellationToken,
    ) -> Self {
        Self::start_with(api, config, trim, limit, None, shutdown)
    }

    /// As [`Cache::start`], with the objects that a preview changes in the place of those that the server has.
    pub(crate) fn start_overlaid(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        preview: Option<Preview>,
        shutdown: CancellationToken,
    ) -> Self {
        Self::start_with(api, config, trim, usize::MAX, preview, shutdown)
    }

    fn start_with(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        limit: usize,
        preview: Option<Preview>,
        shutdown: CancellationToken,
    ) -> Self {
        let writer = Writer::<K>::default();
        let store = writer.as_reader();
        let feed = Arc::<Feed<K>>::default();
        let (tell, listed) = watch::channel(false);
        let fed = feed.clone();
        let source = move || {
            let events = watcher(api.clone(), config.clone()).backoff(Rewatch::of(&K::kind(&())));
            match &preview {
                Some(preview) => preview.overlaid(events).boxed(),
                None => events.boxed(),
            }
        };
        let keep = keep(source, trim, limit, writer, tell, fed);
        let task = tokio::spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = keep => {}
            }
        });
        Self(Arc::new(Shared {
            store,
            listed,
            feed,
            task: task.abort_handle(),
        }))
    }

    pub fn store(&self) -> Store<K> {
        self.0.store.clone()
    }

    /// Waits for the first complete list.
    pub async fn ready(&self) -> Result<(), Error> {
        let ended = |_| Error::WatchEnded {
            kind: K::kind(&()).into_owned(),
        };
        let mut listed = self.0.listed.clone();
        listed.wait_for(|listed| *listed).await.map_err(ended)?;
        Ok(())
    }

    /// Whether the server has more objects than the cache may hold.
    pub fn is_overfull(&self) -> bool {
        self.0.feed.overfull.load(Ordering::SeqCst)
    }

    /// Returns the last error of the watch, until the server answers again: the cache may be out of date.
    pub fn trouble(&self) -> Option<String> {
        self.0.feed.trouble.lock().clone()
    }

    /// Whether an object with this UID was in the cache and has left it lately.
    pub fn has_removed(&self, uid: &str) -> bool {
        self.0.feed.removed.lock().0.iter().any(|removed| removed == uid)
    }

    pub fn get(&self, namespace: Option<&str>, name: &str) -> Option<Arc<K>> {
        let mut reference = ObjectRef::<K>::new(name);
        reference.namespace = namespace.map(str::to_owned);
        self.0.store.get(&reference)
    }

    /// All objects of a namespace that `predicate` holds for, in the order of their names.
    pub fn select(&self, namespace: Option<&str>, predicate: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        let inside = |object: &K| namespace.is_none() || object.namespace().as_deref() == namespace;
        let mut found = self.0.store.state_filter(|object| inside(object) && predicate(object));
        found.sort_by_key(|object| (object.namespace(), object.name_any()));
        found
    }

    /// Returns every object, then every change.
    pub fn subscribe(&self) -> impl Stream<Item = Change<K>> + Send + use<K> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut subscribers = self.0.feed.subscribers.lock();
        for object in self.0.store.state() {
            let _ = sender.send(Change { object, gone: false });
        }
        subscribers.push(sender);
        futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        })
    }

    /// Waits until `predicate` holds for the cached object (or its absence); watches, never polls.
    pub async fn until(&self, namespace: Option<&str>, name: &str, predicate: impl Fn(Option<&K>) -> bool) {
        let mut changes = std::pin::pin!(self.subscribe());
        while !predicate(self.get(namespace, name).as_deref()) {
            if changes.next().await.is_none() {
                return std::future::pending().await;
            }
        }
    }
}

type Events<K> = BoxStream<'static, watcher::Result<watcher::Event<K>>>;

/// Keeps the store for ever. A watch ends only when the server has more objects than the limit.
async fn keep<K: Object>(
    source: impl Fn() -> Events<K>,
    trim: fn(&mut K),
    limit: usize,
    mut writer: Writer<K>,
    listed: watch::Sender<bool>,
    feed: Arc<Feed<K>>,
) {
    loop {
        fill(source(), trim, limit, &mut writer, &listed, &feed).await;
        // The store drops what it has collected of the list.
        writer.apply_watcher_event(&watcher::Event::Init);
        tracing::warn!(kind = %K::kind(&()), limit, "the server has more objects than the cache may hold");
        feed.overfull.store(true, Ordering::SeqCst);
        *feed.trouble.lock() = Some(format!("the server has more than {limit} objects"));
        tokio::time::sleep(OVERFULL_RETRY).await;
    }
}

async fn fill<K: Object>(
    mut events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Unpin,
    trim: fn(&mut K),
    limit: usize,
    writer: &mut Writer<K>,
    listed: &watch::Sender<bool>,
    feed: &Feed<K>,
) {
    let reader = writer.as_reader();
    let mut in_list = 0;
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event.modify(trim),
            Err(error) => {
                let error = shortened(&error);
                tracing::warn!(kind = %K::kind(&()), error, "watch interrupted");
                *feed.trouble.lock() = Some(error);
                continue;
            }
        };
        let size = match &event {
            watcher::Event::Init => {
                in_list = 0;
                0
            }
            watcher::Event::InitApply(_) => {
                in_list += 1;
                in_list
            }
            watcher::Event::Apply(object) if reader.get(&ObjectRef::from_obj(object)).is_none() => reader.len() + 1,
            watcher::Event::Apply(_) | watcher::Event::Delete(_) | watcher::Event::InitDone => 0,
        };
        if size > limit {
            return;
        }
        // The beginning of a list comes before the server is asked for it, and proves nothing.
        if !matches!(event, watcher::Event::Init | watcher::Event::InitApply(_)) {
            *feed.trouble.lock() = None;
            feed.overfull.store(false, Ordering::SeqCst);
        }
        // Subscribing reads the store under this lock: a change is either in what it reads or sent to it after.
        let mut subscribers = feed.subscribers.lock();
        let changes = apply(writer, &reader, &event);
        for change in changes.iter().filter(|change| change.gone) {
            if let Some(uid) = &change.object.meta().uid {
                feed.removed.lock().note(uid.clone());
            }
        }
        subscribers.retain(|subscriber| {
            !subscriber.is_closed() && changes.iter().all(|change| subscriber.send(change.clone()).is_ok())
        });
        drop(subscribers);
        if matches!(event, watcher::Event::InitDone) {
            listed.send_replace(true);
        }
    }
}

/// Returns an error in one line of bounded length: its text may come from any server.
pub(crate) fn shortened(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.chars()
        .filter(|c| !c.is_control())
        .take(ERROR_CHARACTERS)
        .collect()
}

/// Puts an event into the store and returns what it changed.
fn apply<K: Object>(writer: &mut Writer<K>, reader: &Store<K>, event: &watcher::Event<K>) -> Vec<Change<K>> {
    match event {
        watcher::Event::Init | watcher::Event::InitApply(_) => {
            writer.apply_watcher_event(event);
            Vec::new()
        }
        watcher::Event::Apply(object) => {
            writer.apply_watcher_event(event);
            let object = reader.get(&ObjectRef::from_obj(object));
            object
                .into_iter()
                .map(|object| Change { object, gone: false })
                .collect()
        }
        watcher::Event::Delete(object) => {
            writer.apply_watcher_event(event);
            vec![Change {
                object: Arc::new(object.clone()),
                gone: true,
            }]
        }
        watcher::Event::InitDone => {
            let before = reader.state();
            writer.apply_watcher_event(event);
            let gone = before
                .into_iter()
                .filter(|old| reader.get(&ObjectRef::from_obj(old.as_ref())).is_none());
            let gone = gone.map(|object| Change { object, gone: true });
            let present = reader.state().into_iter().map(|object| Change { object, gone: false });
            gone.chain(present).collect()
        }
    }
}

/// The caches of one API server, one per kind and scope.
#[derive(Default)]
pub struct Caches(Mutex<HashMap<Key, Box<dyn Any + Send>>>);

#[derive(PartialEq, Eq, Hash)]
struct Key {
    kind: TypeId,
    selector: String,
}

impl Caches {
    /// The cache of this kind under these selectors, started when nobody asked before.
    pub fn get<K: Object>(&self, config: watcher::Config, start: impl FnOnce(watcher::Config) -> Cache<K>) -> Cache<K> {
        let selector = format!("{:?} {:?}", config.label_selector, config.field_selector);
        let key = Key {
            kind: TypeId::of::<K>(),
            selector,
        };
        let mut caches = self.0.lock();
        if let Some(cache) = caches.get(&key).and_then(|cache| cache.downcast_ref::<Cache<K>>()) {
            return cache.clone();
        }
        let cache = start(config);
        caches.insert(key, Box::new(cache.clone()));
        cache
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    /// Listed; then the server reports that the version is too old to continue; it answers the second list, or never does.
    fn expired(again: bool) -> (Cache<ConfigMap>, Arc<std::sync::atomic::AtomicUsize>) {
        let (client, requests) = stub::client(move |request| match request {
            0 => Some((200, stub::config_maps(&["old"]))),
            1 => Some((
                200,
                json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "metadata": {},
                    "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}}),
            )),
            2 if again => Some((200, stub::config_maps(&["new"]))),
            _ => None,
        });
        let config = watcher::Config::default();
        let cache = Cache::start(Api::all(client), config, trim, CancellationToken::new());
        (cache, requests)
    }

    async fn until(what: impl Fn() -> bool) {
        let waiting = async {
            while !what() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), waiting).await.unwrap();
    }

    #[tokio::test]
    async fn a_cache_is_out_of_date_until_the_next_list_is_complete() {
        let (cache, requests) = expired(false);
        until(|| requests.load(Ordering::SeqCst) == 3).await;
        assert!(cache.get(Some("default"), "old").is_some());
        assert!(
            cache.trouble().is_some_and(|trouble| trouble.contains("too old")),
            "{:?}",
            cache.trouble()
        );
        let (cache, _) = expired(true);
        until(|| cache.get(Some("default"), "new").is_some()).await;
        until(|| cache.trouble().is_none()).await;
    }
}
