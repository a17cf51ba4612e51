//! Trimmed, shared caches. Invariant: one watch per kind and scope however many controllers read it; each subscriber
//! sees every object that exists when it subscribes and every later change, deletions included.
//!
//! kube's own shared reflector tells its subscribers nothing of deletions, so the fan-out is ours; list, watch, resume
//! and store are kube's.

use std::any::{Any, TypeId};
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// kubectl's copy of the whole object; nobody here reads it.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// What a cache can hold.
pub trait Object: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static {}
impl<K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static> Object for K {}

/// One change of one object.
#[derive(Clone, Debug)]
pub struct Change<K> {
    pub object: Arc<K>,
    pub gone: bool,
}

/// Drop what no controller reads and what costs most memory.
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

/// What the watch fills beside the store.
struct Feed<K> {
    /// The last error of the watch.
    trouble: Mutex<Option<String>>,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Change<K>>>>,
    removed: Mutex<Removed>,
}

impl<K> Default for Feed<K> {
    fn default() -> Self {
        Self {
            trouble: Mutex::default(),
            subscribers: Mutex::default(),
            removed: Mutex::default(),
        }
    }
}

/// UIDs of the objects that left the cache last: an object that is not there may have been shown and removed since.
#[derive(Default)]
struct Removed(VecDeque<String>);

impl Removed {
    /// More than are ever waited for at a time.
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
        let writer = Writer::<K>::default();
        let store = writer.as_reader();
        let feed = Arc::<Feed<K>>::default();
        let (tell, listed) = watch::channel(false);
        let keep = keep(api, config, trim, writer, tell, feed.clone());
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

    /// Wait for the first complete list.
    pub async fn ready(&self) -> Result<(), Error> {
        let ended = |_| Error::WatchEnded {
            kind: K::kind(&()).into_owned(),
        };
        let mut listed = self.0.listed.clone();
        listed.wait_for(|listed| *listed).await.map_err(ended)?;
        Ok(())
    }

    /// The last error of the watch, until the server has told what there is again: the cache may be out of date.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.0.feed.trouble).clone()
    }

    /// Whether an object with this UID was in the cache and has left it lately.
    pub fn has_removed(&self, uid: &str) -> bool {
        lock(&self.0.feed.removed).0.iter().any(|removed| removed == uid)
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

    /// Everything there is, then every change.
    pub fn subscribe(&self) -> impl Stream<Item = Change<K>> + Send + use<K> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut subscribers = lock(&self.0.feed.subscribers);
        for object in self.0.store.state() {
            let _ = sender.send(Change { object, gone: false });
        }
        subscribers.push(sender);
        futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        })
    }

    /// Wait until `predicate` holds for the cached object (or its absence); watches, never polls.
    pub async fn until(&self, namespace: Option<&str>, name: &str, predicate: impl Fn(Option<&K>) -> bool) {
        let mut changes = std::pin::pin!(self.subscribe());
        while !predicate(self.get(namespace, name).as_deref()) {
            if changes.next().await.is_none() {
                return std::future::pending().await;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn keep<K: Object>(
    api: Api<K>,
    config: watcher::Config,
    trim: fn(&mut K),
    mut writer: Writer<K>,
    listed: watch::Sender<bool>,
    feed: Arc<Feed<K>>,
) {
    let reader = writer.as_reader();
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => {
                // The beginning of a list comes before the list is asked for, and proves nothing.
                if !matches!(event, watcher::Event::Init | watcher::Event::InitApply(_)) {
                    *lock(&feed.trouble) = None;
                }
                event.modify(trim)
            }
            Err(error) => {
                *lock(&feed.trouble) = Some(error.to_string());
                tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted");
                continue;
            }
        };
        // Subscribing reads the store under this lock: a change is either in what it reads or sent to it after.
        let mut subscribers = lock(&feed.subscribers);
        let changes = apply(&mut writer, &reader, &event);
        for change in changes.iter().filter(|change| change.gone) {
            if let Some(uid) = &change.object.meta().uid {
                lock(&feed.removed).note(uid.clone());
            }
        }
        subscribers.retain(|subscriber| {
            !subscriber.is_closed() && changes.iter().all(|change| subscriber.send(change.clone()).is_ok())
        });
        if matches!(event, watcher::Event::InitDone) {
            listed.send_replace(true);
        }
    }
}

/// Put an event into the store; the answer is what it changed.
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
        let mut caches = lock(&self.0);
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

    /// Listed, then told that what it knows is too old to go on from; the second list is answered, or never is.
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
    async fn a_cache_is_in_trouble_until_the_list_that_mends_it_has_come() {
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
