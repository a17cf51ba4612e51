//! One reconcile of one object: the object itself, what was written in its course, and the way to write.

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;

use super::run::Trigger;
use super::writes::Writes;
use crate::cache::{self, Cache, Object};
use crate::context::Context;
use crate::error::Error;
use crate::patch::{self, Lock};

/// Names an object: parsed once, so that no later code meets an object without a UID.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Empty for a cluster-wide kind.
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl ObjectKey {
    pub fn of<K: Resource<DynamicType = ()>>(object: &K) -> Result<Self, Error> {
        let incomplete = |field| Error::Incomplete {
            kind: K::kind(&()).into_owned(),
            field,
        };
        let meta = object.meta();
        Ok(Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().ok_or_else(|| incomplete("metadata.name"))?,
            uid: meta.uid.clone().ok_or_else(|| incomplete("metadata.uid"))?,
        })
    }
}

impl std::fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.namespace.as_str() {
            "" => f.write_str(&self.name),
            namespace => write!(f, "{namespace}/{}", self.name),
        }
    }
}

/// Asks for the next reconcile of one object from outside: a task has ended, a pod is gone.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// One reconcile of one object.
pub struct Scope<K: Object> {
    pub context: Context,
    pub key: ObjectKey,
    /// The newest version that we know: the cache's, or the API server's answer to our last write.
    pub object: Arc<K>,
    /// Whether observe has to read from the API server: a cache does not show a write of ours in time, the answer to a write
    /// was lost, or the last reconcile panicked. The object itself was read from there.
    pub live: bool,
    pub(super) api: fn(kube::Client, &str) -> Api<K>,
    pub(super) trigger: Trigger<K>,
    pub(super) writes: Writes,
    pub(super) uncertain: bool,
    /// Our finalizer is off an object that is being deleted: it is no longer ours to reconcile.
    pub(super) released: bool,
    pub(super) own_write: bool,
    pub(super) status_written: Option<Instant>,
}

impl<K: Object + Serialize> Scope<K> {
    pub fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    pub fn instant(&self) -> Instant {
        self.context.clock.instant()
    }

    pub fn is_deleting(&self) -> bool {
        self.object.meta().deletion_timestamp.is_some()
    }

    /// Wakes this object's next reconcile.
    pub fn waker(&self) -> Waker {
        let (trigger, object) = (self.trigger.clone(), ObjectRef::from_obj(self.object.as_ref()));
        Arc::new(move || trigger.wake(object.clone()))
    }

    /// The API server answered a create or a patch of another object with `object`: the next reconcile of this one waits
    /// until `cache` shows it.
    pub fn wrote<Other: Object>(&mut self, cache: &Cache<Other>, object: &Other) {
        self.writes.wrote(cache, object, self.context.clock.instant());
    }

    /// As [`Scope::wrote`], for a delete.
    pub fn deleted<Other: Object>(&mut self, cache: &Cache<Other>, object: &Other) {
        self.writes.deleted(cache, object, self.context.clock.instant());
    }

    /// The answer to a write was lost: it may have happened or not, so the next reconcile reads live.
    pub fn doubt(&mut self, error: Error) -> Error {
        self.uncertain |= error.is_ambiguous();
        error
    }

    /// Writes the difference of the status to the object. Returns whether there was one.
    pub async fn write_status(&mut self, after: &K) -> Result<bool, Error> {
        match patch::status(&self.api(), self.object.as_ref(), after, Lock::Open).await {
            Ok(Some(written)) => {
                self.replace(written);
                self.status_written = Some(self.instant());
                Ok(true)
            }
            Ok(None) => Ok(false),
            // The object is gone, and its status with it.
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes the difference of metadata and spec to the object. Returns whether there was one.
    pub async fn write_object(&mut self, after: &K, lock: Lock) -> Result<bool, Error> {
        let written = patch::object(&self.api(), self.object.as_ref(), after, lock).await?;
        Ok(written.map(|written| self.replace(written)).is_some())
    }

    pub async fn add_finalizer(&mut self, finalizer: &str) -> Result<bool, Error> {
        let written = patch::add_finalizer(&self.api(), self.object.as_ref(), finalizer).await?;
        Ok(written.map(|written| self.replace(written)).is_some())
    }

    /// Takes our finalizer off. An object that is being deleted is not reconciled again, if the reconcile ends without an error.
    pub async fn remove_finalizer(&mut self, finalizer: &str) -> Result<bool, Error> {
        let written = patch::remove_finalizer(&self.api(), self.object.as_ref(), finalizer).await?;
        self.released = self.is_deleting();
        Ok(written.map(|written| self.replace(written)).is_some())
    }

    /// Reads the object from the API server. Returns whether it is still there.
    pub(super) async fn refresh(&mut self) -> Result<bool, Error> {
        let read = self.api().get_opt(&self.key.name).await?;
        let Some(mut read) = read.filter(|read| read.meta().uid.as_ref() == Some(&self.key.uid)) else {
            return Ok(false);
        };
        cache::trim(&mut read);
        self.replace(read);
        Ok(true)
    }

    fn replace(&mut self, written: K) {
        self.object = Arc::new(written);
        self.own_write = true;
    }

    /// The API of this object's kind, in its namespace.
    fn api(&self) -> Api<K> {
        (self.api)(self.context.client.clone(), &self.key.namespace)
    }
}

impl<K: Object> Scope<K> {
    /// The API of another kind in this object's namespace.
    pub fn api_of<Other: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<Other> {
        self.context.api(&self.key.namespace)
    }

    /// The name of the object, for messages.
    pub fn name(&self) -> String {
        self.object.name_any()
    }
}
