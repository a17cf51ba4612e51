//! The secrets that identities name, each watched by itself.
//!
//! Kept here: only secrets that somebody named are read, by one watch each; whoever depends on one is told when it
//! changes, so that nothing has to be read again and again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use capstan_kube::{Cache, Context, cache};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::watcher;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// A watch that has shown nothing by then is in trouble, which is told instead of waited out.
const SHOWN: Duration = Duration::from_secs(10);

/// Namespace and name of a secret.
pub type Key = (String, String);

type Subscribers = Arc<Mutex<Vec<mpsc::UnboundedSender<Key>>>>;

/// The secrets that are watched.
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

    /// The secret as it is now; watched from the first time that somebody asks for it.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, Error> {
        let cache = self.watch((namespace.to_owned(), name.to_owned()));
        match tokio::time::timeout(SHOWN, cache.ready()).await {
            Ok(ready) => ready?,
            Err(_) => {
                let trouble = cache.trouble().unwrap_or_else(|| "no answer".into());
                return Err(Error::Waiting(format!(
                    "secret {namespace}/{name} of the identity cannot be watched: {trouble}"
                )));
            }
        }
        Ok(cache.get(Some(namespace), name))
    }

    fn watch(&self, key: Key) -> Cache<Secret> {
        let mut watched = lock(&self.watched);
        if let Some(cache) = watched.get(&key) {
            return cache.clone();
        }
        let (namespace, name) = &key;
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let cache = Cache::start(api, config, cache::trim, self.shutdown.clone());
        tokio::spawn(pass_on(
            cache.subscribe().map(|_| ()),
            key.clone(),
            self.subscribers.clone(),
        ));
        watched.insert(key, cache.clone());
        cache
    }

    /// Nobody needs this secret any more; if somebody does, it is watched again.
    pub fn release(&self, namespace: &str, name: &str) {
        lock(&self.watched).remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// The names of secrets that changed.
    pub fn changes(&self) -> impl Stream<Item = Key> + Send + use<> {
        let (sender, receiver) = mpsc::unbounded_channel();
        lock(&self.subscribers).push(sender);
        futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        })
    }
}

/// Tells everybody of every change, for as long as the secret is watched.
async fn pass_on(changes: impl Stream<Item = ()> + Send, key: Key, subscribers: Subscribers) {
    let mut changes = std::pin::pin!(changes);
    while changes.next().await.is_some() {
        lock(&subscribers).retain(|subscriber| subscriber.send(key.clone()).is_ok());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
