//! The Secrets of identities, each with a watch of its own.
//!
//! Invariant: only Secrets that an identity names are read, by one watch each. Controllers subscribe to their changes and
//! do not read them again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_kube::{Cache, Context, cache};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::watcher;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// A watch that has not delivered its first list by then fails the reconcile, which reports the reason.
const SHOWN: Duration = Duration::from_secs(10);

/// Namespace and name of a secret.
pub type Key = (String, String);

type Subscribers = Arc<Mutex<Vec<mpsc::UnboundedSender<Key>>>>;

/// The watched Secrets.
pub struct Secrets {
    client: kube::Client,
    shutdown: CancellationToken,
    watched: Mutex<HashMap<Key, Cache<Secret>>>,
    subscribers: Subscribers,
}

impl Secrets {
    pub fn new(context: &Context) -> Self {
        Self {
            client: context.client.clone(),
            shutdown: context.shutdown.clone(),
            watched: Mutex::default(),
            subscribers: Subscribers::default(),
        }
    }

    /// Returns the Secret as it is now. The first call starts the watch.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, Error> {
        let cache = self.watch((namespace.to_owned(), name.to_owned()));
        match capstan_core::clock::timeout(SHOWN, cache.ready()).await {
            Ok(ready) => ready?,
            Err(_) => {
                let trouble = cache.trouble().unwrap_or_else(|| "no answer".into());
                return Err(Error::NotReady(format!(
                    "secret {namespace}/{name} of the identity cannot be watched: {trouble}"
                )));
            }
        }
        Ok(cache.get(Some(namespace), name))
    }

    fn watch(&self, key: Key) -> Cache<Secret> {
        let mut watched = self.watched.lock();
        if let Some(cache) = watched.get(&key) {
            return cache.clone();
        }
        let (namespace, name) = &key;
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let cache = Cache::start(api, config, cache::trim, self.shutdown.clone());
        tokio::spawn(forward(
            cache.subscribe().map(|_| ()),
            key.clone(),
            self.subscribers.clone(),
        ));
        watched.insert(key, cache.clone());
        cache
    }

    /// Stops a watch. The next call of [`Secrets::get`] starts it again.
    pub fn release(&self, namespace: &str, name: &str) {
        self.watched.lock().remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// Returns a stream of the Secrets that change.
    pub fn changes(&self) -> impl Stream<Item = Key> + Send + use<> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.subscribers.lock().push(sender);
        futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        })
    }
}

/// Sends every change to all subscribers, for as long as the Secret is watched.
async fn forward(changes: impl Stream<Item = ()> + Send, key: Key, subscribers: Subscribers) {
    let mut changes = std::pin::pin!(changes);
    while changes.next().await.is_some() {
        subscribers
            .lock()
            .retain(|subscriber| subscriber.send(key.clone()).is_ok());
    }
}
