//! The objects, their history, and the one version counter. Invariant: every change of an object is in the history, in
//! the order of its version, and a watch shows changes of one kind in that order.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::kinds::{Key, Kind, Kinds};
use super::rng::Rng;

/// Namespace and name.
pub type Name = (String, String);

/// One change of one object.
#[derive(Clone, Debug)]
pub struct Change {
    pub version: u64,
    pub kind: Key,
    /// The object before the change.
    pub before: Option<Value>,
    /// The object after the change; for a deletion, its last state.
    pub object: Value,
    pub deleted: bool,
    /// From when on watches show the change.
    pub visible: Instant,
}

pub struct Store {
    pub kinds: Kinds,
    pub rng: Rng,
    pub lag: RangeInclusive<Duration>,
    objects: BTreeMap<Key, BTreeMap<Name, Value>>,
    version: u64,
    history: Vec<Change>,
    /// Changes up to this version are forgotten.
    pub compacted: u64,
    /// Counts how often all watches were cut.
    pub epoch: u64,
    /// The reactions of other parts of a cluster to a change.
    pub follow_ups: Vec<FollowUp>,
    began: Instant,
    start: Timestamp,
}

/// Something that another part of a cluster does a little later.
#[derive(Clone, Debug, PartialEq)]
pub enum FollowUp {
    /// The kubelet has ended a Pod that is being deleted.
    PodEnds { name: Name, uid: String },
    /// The garbage collector searches for dependents of this deleted owner.
    Collect { owner: String },
    /// The Pods of a deleted Node are removed.
    RemovePods { node: String },
}

impl Store {
    pub fn new(seed: u64, start: Timestamp) -> Self {
        Self {
            kinds: Kinds::builtin(),
            rng: Rng::new(seed),
            lag: Duration::ZERO..=Duration::ZERO,
            objects: BTreeMap::new(),
            version: 1,
            history: Vec::new(),
            compacted: 0,
            epoch: 0,
            follow_ups: Vec::new(),
            began: Instant::now(),
            start,
        }
    }

    /// The time of day, in whole seconds as objects carry it.
    pub fn time(&self) -> String {
        let now = self.start + self.began.elapsed();
        now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn all<'a>(&'a self, kind: &Key) -> impl Iterator<Item = (&'a Name, &'a Value)> + use<'a> {
        self.objects.get(kind).into_iter().flatten()
    }

    pub fn get(&self, kind: &Key, name: &Name) -> Option<&Value> {
        self.objects.get(kind)?.get(name)
    }

    pub fn everything(&self) -> impl Iterator<Item = (&Key, &Name, &Value)> {
        let kinds = self.objects.iter();
        kinds.flat_map(|(kind, objects)| objects.iter().map(move |(name, object)| (kind, name, object)))
    }

    pub fn has_uid(&self, uid: &str) -> bool {
        self.everything().any(|(_, _, object)| object["metadata"]["uid"] == uid)
    }

    /// Writes an object as a new version and returns it.
    pub fn put(&mut self, kind: &Kind, name: Name, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let key = kind.key();
        let before = self
            .objects
            .entry(key.clone())
            .or_default()
            .insert(name, object.clone());
        self.record(key, before, object.clone(), false);
        object
    }

    /// Removes an object; its last state is a new version too.
    pub fn remove(&mut self, kind: &Key, name: &Name) -> Option<Value> {
        let mut object = self.objects.get_mut(kind)?.remove(name)?;
        self.version += 1;
        let before = object.clone();
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.record(kind.clone(), Some(before), object.clone(), true);
        Some(object)
    }

    fn record(&mut self, kind: Key, before: Option<Value>, object: Value, deleted: bool) {
        let lag = self.rng.between(&self.lag);
        let last = self.history.iter().rev().find(|change| change.kind == kind);
        let soonest = Instant::now() + lag;
        self.history.push(Change {
            version: self.version,
            visible: last.map_or(soonest, |last| last.visible.max(soonest)),
            kind,
            before,
            object,
            deleted,
        });
    }

    /// The changes of a kind after a version.
    pub fn since(&self, kind: &Key, version: u64) -> impl Iterator<Item = &Change> {
        let first = self.history.partition_point(|change| change.version <= version);
        self.history[first..].iter().filter(move |change| change.kind == *kind)
    }

    /// Forgets the history so far: a watch from an earlier version has expired.
    pub fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }
}

/// The metadata of an object; an object without any gets an empty one.
pub fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    match &mut object["metadata"] {
        Value::Object(fields) => fields,
        other => unreachable!("{other} is an object"),
    }
}

pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub fn finalizers(object: &Value) -> Vec<&str> {
    let all = object["metadata"]["finalizers"].as_array().into_iter().flatten();
    all.filter_map(Value::as_str).collect()
}
