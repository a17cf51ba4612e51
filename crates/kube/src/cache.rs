//! Trimmed, shared caches. Invariant: one watch per kind and scope however many controllers read it; each subscriber
//! sees every object that exists when it subscribes and every later change, deletions included; a cache that was started
//! with a limit never holds more objects, nor more text in them, than that.
//!
//! kube's own shared reflector does not pass deletions on, so the fan-out is ours; list, watch, resume and store are
//! kube's.

use std::any::{Any, TypeId};
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use capstan_core::memory::{Full, Holder};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};

use crate::error::Error;
use crate::pages;
use crate::rewatch::Rewatch;
use crate::runtime::Preview;

/// A cache whose server holds more objects than the cache may is filled again after this long: users may have removed
/// some of them.
const OVERFULL_RETRY: Duration = Duration::from_secs(300);
/// At most so many characters of a server's error are kept and logged.
const ERROR_CHARACTERS: usize = 300;
/// kubectl's copy of the whole object; no controller reads it.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// An object that a cache can hold.
pub trait Object: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static {}
impl<K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static> Object for K {}

/// The most that a cache may hold of a workload cluster's API server.
pub(crate) struct Most<K> {
    pub objects: usize,
    pub bytes: usize,
    /// Returns how many bytes of text a trimmed object has.
    pub size: fn(&K) -> usize,
    /// What it takes of the memory for objects of others. `None`: the API server is this cluster's own.
    pub holder: Option<Arc<Holder>>,
}

/// What an object in a cache takes besides itself: it is in a map by its names, and in an index beside the cache.
const OBJECT_OVERHEAD: usize = 512;
/// Memory is taken in parts of this many bytes.
const PART: usize = 8 << 10;

impl<K> Most<K> {
    /// Takes the memory that so many objects need.
    fn hold(&self, objects: usize, bytes: usize) -> Result<(), Full> {
        // Names are keys of the map, too.
        let memory = objects * (size_of::<K>() + OBJECT_OVERHEAD) + 2 * bytes;
        let parts = memory.next_multiple_of(PART);
        self.holder.as_ref().map_or(Ok(()), |holder| holder.set(parts))
    }
}

/// Waits until a cache has to give up what it holds.
async fn told(holder: Option<&Holder>) -> Full {
    match holder {
        Some(holder) => holder.told().await,
        None => std::future::pending().await,
    }
}

/// Why a cache does not hold what its server has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Overfull {
    #[error("the server has more objects than the cache may hold")]
    TooMany,
    #[error(transparent)]
    NoMemory(#[from] Full),
}

/// The longest name of an object, in bytes.
const NAME_BYTES: usize = 253;
/// More than a UID or a resourceVersion has.
const ID_BYTES: usize = 128;

/// Whether Kubernetes allows the names of an object.
fn is_plausible(meta: &ObjectMeta) -> bool {
    let within = |text: &Option<String>, most: usize| text.as_ref().is_none_or(|text| text.len() <= most);
    within(&meta.name, NAME_BYTES)
        && within(&meta.namespace, NAME_BYTES)
        && within(&meta.uid, ID_BYTES)
        && within(&meta.resource_version, ID_BYTES)
}

/// Returns how many bytes of text the names of an object have.
pub(crate) fn name_bytes(meta: &ObjectMeta) -> usize {
    let texts = [&meta.name, &meta.namespace, &meta.uid, &meta.resource_version];
    texts.into_iter().flatten().map(String::len).sum()
}

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
    overfull: Mutex<Option<Overfull>>,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Change<K>>>>,
    removed: Mutex<Removed>,
}

impl<K> Default for Feed<K> {
    fn default() -> Self {
        Self {
            trouble: Mutex::default(),
            overfull: Mutex::default(),
            subscribers: Mutex::default(),
            removed: Mutex::default(),
        }
    }
}

impl<K> Feed<K> {
    /// Notes why the cache does not hold what its server has.
    fn set_overfull(&self, why: &Overfull) {
        *self.trouble.lock() = Some(why.to_string());
        *self.overfull.lock() = Some(why.clone());
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
        Self::start_with(api, config, trim, None, None, shutdown)
    }

    /// As [`Cache::start`], with no more than `most`. When the server has more, the cache keeps what it has, is
    /// [overfull](Cache::is_overfull), and is filled again from time to time. It is overfull and empty when its memory is needed
    /// for others. Objects whose names Kubernetes does not allow are left out.
    pub(crate) fn start_bounded(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        most: Most<K>,
        shutdown: CancellationToken,
    ) -> Self {
        Self::start_with(api, config, trim, Some(most), None, shutdown)
    }

    /// As [`Cache::start`], with the objects that a preview changes in the place of those that the server has.
    pub(crate) fn start_overlaid(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        preview: Option<Preview>,
        shutdown: CancellationToken,
    ) -> Self {
        Self::start_with(api, config, trim, None, preview, shutdown)
    }

    fn start_with(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        most: Option<Most<K>>,
        preview: Option<Preview>,
        shutdown: CancellationToken,
    ) -> Self {
        let writer = Writer::<K>::default();
        let store = writer.as_reader();
        let feed = Arc::<Feed<K>>::default();
        let (tell, listed) = watch::channel(false);
        let fed = feed.clone();
        // Only the watch of a workload cluster, or of a part of one, belongs to its caller.
        let span = most.as_ref().map_or_else(Span::none, |_| Span::current());
        let page = config.page_size;
        let source = move |page| {
            let mut config = config.clone();
            config.page_size = page;
            let events = watcher(api.clone(), config).backoff(Rewatch::of(&K::kind(&())));
            match &preview {
                Some(preview) => preview.overlaid(events).boxed(),
                None => events.boxed(),
            }
        };
        let mut filling = Filling {
            trim,
            most,
            writer,
            listed: tell,
            feed: fed,
        };
        let kept = async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = filling.keep(source, page) => {}
            }
        };
        let task = tokio::spawn(kept.instrument(span));
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
        self.overfull().is_some()
    }

    /// Returns why the cache does not hold what its server has.
    pub(crate) fn overfull(&self) -> Option<Overfull> {
        self.0.feed.overfull.lock().clone()
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
        in_order(self.0.store.state_filter(|object| inside(object) && predicate(object)))
    }

    /// Returns every object, then every change.
    pub fn subscribe(&self) -> impl Stream<Item = Change<K>> + Send + use<K> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut subscribers = self.0.feed.subscribers.lock();
        for object in in_order(self.0.store.state()) {
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

/// Why a watch is begun again.
enum End {
    Overfull(Overfull),
    /// The memory of the cache is needed for others.
    GiveUp(Full),
    /// A page is beyond the bounds of an answer: this many objects in one may be within them.
    Smaller(u32),
}

/// Fills the store.
struct Filling<K: Object> {
    trim: fn(&mut K),
    most: Option<Most<K>>,
    writer: Writer<K>,
    listed: watch::Sender<bool>,
    feed: Arc<Feed<K>>,
}

impl<K: Object> Filling<K> {
    /// Keeps the store until the process ends.
    async fn keep(&mut self, source: impl Fn(Option<u32>) -> Events<K>, mut page: Option<u32>) {
        let holder = self.most.as_ref().and_then(|most| most.holder.clone());
        let holder = holder.as_deref();
        loop {
            let end = tokio::select! {
                end = self.fill(source(page), page) => end,
                full = told(holder) => Some(End::GiveUp(full)),
            };
            // The store drops what it has collected of the list.
            self.writer.apply_watcher_event(&watcher::Event::Init);
            match end {
                Some(End::Smaller(half)) => page = Some(half),
                Some(End::Overfull(why)) => {
                    self.hold_store();
                    self.rest(why, holder).await;
                }
                Some(End::GiveUp(full)) => {
                    self.give_up(full.clone());
                    self.rest(Overfull::NoMemory(full), holder).await;
                }
                None => return,
            }
        }
    }

    /// Gives back the memory of a list that was not taken to its end.
    fn hold_store(&self) {
        if let Some(most) = &self.most {
            let reader = self.writer.as_reader();
            let bytes = reader.state().iter().map(|object| (most.size)(object)).sum();
            // This is less than it has.
            let _ = most.hold(reader.len(), bytes);
        }
    }

    /// Notes that the cache does not hold what its server has, and waits before it is filled again.
    async fn rest(&mut self, why: Overfull, holder: Option<&Holder>) {
        self.feed.set_overfull(&why);
        let most = self.most.as_ref().map(|most| (most.objects, most.bytes));
        let (objects, bytes) = most.unwrap_or_default();
        tracing::warn!(kind = %K::kind(&()), objects, bytes, reason = %why, "the cache does not hold what the server has");
        let mut pause = Box::pin(capstan_core::clock::sleep(OVERFULL_RETRY));
        tokio::select! {
            () = &mut pause => return,
            full = told(holder) => self.give_up(full),
        }
        pause.await;
    }

    /// Empties the store: its memory is needed for others.
    fn give_up(&mut self, full: Full) {
        // Before anything leaves the store: what is not in a cache in trouble may exist all the same.
        self.feed.set_overfull(&Overfull::NoMemory(full));
        let gone = in_order(self.writer.as_reader().state());
        // Subscribing reads the store under this lock.
        let mut subscribers = self.feed.subscribers.lock();
        self.writer.apply_watcher_event(&watcher::Event::Init);
        self.writer.apply_watcher_event(&watcher::Event::InitDone);
        let gone = gone.into_iter().map(|object| Change { object, gone: true });
        let changes: Vec<_> = gone.collect();
        subscribers.retain(|subscriber| changes.iter().all(|change| subscriber.send(change.clone()).is_ok()));
        drop(subscribers);
        if let Some(most) = &self.most {
            // Nobody is refused to hold nothing.
            let _ = most.hold(0, 0);
        }
    }

    async fn fill(
        &mut self,
        mut events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Unpin,
        page: Option<u32>,
    ) -> Option<End> {
        let reader = self.writer.as_reader();
        let mut count = Count::of(&self.most, &reader);
        while let Some(event) = events.next().await {
            let event = match event {
                Ok(event) => event.modify(self.trim),
                Err(error) => {
                    if let (watcher::Error::InitialListFailed(error), Some(page)) = (&error, page)
                        && let Some(half) = pages::halved(page, error)
                    {
                        return Some(End::Smaller(half));
                    }
                    let error = shortened(&error);
                    tracing::warn!(kind = %K::kind(&()), error, "the watch was interrupted and starts again");
                    *self.feed.trouble.lock() = Some(error);
                    continue;
                }
            };
            if let Some(most) = &self.most {
                if !is_allowed(&event) {
                    continue;
                }
                if let Err(why) = count.admit(most, &reader, &event) {
                    return Some(End::Overfull(why));
                }
            }
            // The beginning of a list comes before the server is asked for it, and proves nothing.
            if !matches!(event, watcher::Event::Init | watcher::Event::InitApply(_)) {
                *self.feed.trouble.lock() = None;
                *self.feed.overfull.lock() = None;
            }
            self.publish(&reader, &event);
        }
        None
    }

    /// Puts an event into the store and notifies the subscribers.
    fn publish(&mut self, reader: &Store<K>, event: &watcher::Event<K>) {
        // Subscribing reads the store under this lock: a change is either in what it reads or sent to it after.
        let mut subscribers = self.feed.subscribers.lock();
        let changes = apply(&mut self.writer, reader, event);
        for change in changes.iter().filter(|change| change.gone) {
            if let Some(uid) = &change.object.meta().uid {
                self.feed.removed.lock().note(uid.clone());
            }
        }
        subscribers.retain(|subscriber| {
            !subscriber.is_closed() && changes.iter().all(|change| subscriber.send(change.clone()).is_ok())
        });
        drop(subscribers);
        if matches!(event, watcher::Event::InitDone) {
            self.listed.send_replace(true);
        }
    }
}

fn is_allowed<K: Object>(event: &watcher::Event<K>) -> bool {
    match event {
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) | watcher::Event::Delete(object) => {
            is_plausible(object.meta())
        }
        watcher::Event::Init | watcher::Event::InitDone => true,
    }
}

/// How much of the most a cache holds.
#[derive(Default)]
struct Count {
    bytes: usize,
    listed: usize,
    listed_bytes: usize,
}

impl Count {
    fn of<K: Object>(most: &Option<Most<K>>, reader: &Store<K>) -> Self {
        let size = |most: &Most<K>| reader.state().iter().map(|object| (most.size)(object)).sum();
        Self {
            bytes: most.as_ref().map_or(0, size),
            ..Self::default()
        }
    }

    /// Takes room for what the event adds to the cache, if the cache may hold it.
    fn admit<K: Object>(
        &mut self,
        most: &Most<K>,
        reader: &Store<K>,
        event: &watcher::Event<K>,
    ) -> Result<(), Overfull> {
        let mut objects = reader.len();
        let held = |object: &K| reader.get(&ObjectRef::from_obj(object));
        match event {
            watcher::Event::Init => (self.listed, self.listed_bytes) = (0, 0),
            watcher::Event::InitApply(object) => {
                self.listed += 1;
                self.listed_bytes += (most.size)(object);
            }
            watcher::Event::InitDone => {
                self.bytes = self.listed_bytes;
                objects = self.listed;
                (self.listed, self.listed_bytes) = (0, 0);
            }
            watcher::Event::Apply(object) => {
                let before = held(object);
                let replaced = before.as_ref().map_or(0, |before| (most.size)(before));
                self.bytes = self.bytes.saturating_sub(replaced) + (most.size)(object);
                objects += usize::from(before.is_none());
            }
            watcher::Event::Delete(object) => {
                let replaced = held(object).map_or(0, |before| (most.size)(&before));
                self.bytes = self.bytes.saturating_sub(replaced);
            }
        }
        let is_within = objects <= most.objects && self.bytes <= most.bytes;
        if !is_within || self.listed > most.objects || self.listed_bytes > most.bytes {
            return Err(Overfull::TooMany);
        }
        Ok(most.hold(objects + self.listed, self.bytes + self.listed_bytes)?)
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

/// Returns objects in the order of their names: that of the store differs from process to process.
fn in_order<K: Object>(mut objects: Vec<Arc<K>>) -> Vec<Arc<K>> {
    objects.sort_by_cached_key(|object| (object.namespace(), object.name_any()));
    objects
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
            let before = in_order(reader.state());
            writer.apply_watcher_event(event);
            let gone = before
                .into_iter()
                .filter(|old| reader.get(&ObjectRef::from_obj(old.as_ref())).is_none());
            let gone = gone.map(|object| Change { object, gone: true });
            let present = in_order(reader.state())
                .into_iter()
                .map(|object| Change { object, gone: false });
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
    /// The cache of this kind under these selectors, started by the first caller.
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
