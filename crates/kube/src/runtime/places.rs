//! How many objects of one kind are reconciled at a time.
//!
//! Invariant: every namespace has some places of its own, so that reconciles of others that hang on slow servers cannot take all
//! of them. The other places are for everybody. An object without a place is triggered again when one is free: whoever gives a
//! place back wakes the next. It does not wait in a task, because kube polls all tasks of a controller each time one wakes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::cache::Object;

/// The places that each namespace has for itself.
const RESERVED: usize = 8;

pub(super) struct Places<K: Object> {
    wake: mpsc::UnboundedSender<ObjectRef<K>>,
    state: Mutex<State<K>>,
}

struct State<K: Object> {
    shared: usize,
    namespaces: BTreeMap<String, Namespace<K>>,
    /// The namespace that got the last shared place.
    last: String,
}

struct Namespace<K: Object> {
    /// How many of its own places are free.
    free: usize,
    /// In the order of their arrival.
    waiting: BTreeMap<u64, ObjectRef<K>>,
    numbers: HashMap<ObjectRef<K>, u64>,
    arrived: u64,
}

impl<K: Object> Default for Namespace<K> {
    fn default() -> Self {
        Self {
            free: RESERVED,
            waiting: BTreeMap::new(),
            numbers: HashMap::new(),
            arrived: 0,
        }
    }
}

impl<K: Object> Namespace<K> {
    fn wait(&mut self, object: &ObjectRef<K>) {
        let number = *self.numbers.entry(object.clone()).or_insert(self.arrived);
        self.waiting.insert(number, object.clone());
        self.arrived += 1;
    }

    fn forget(&mut self, object: &ObjectRef<K>) {
        if let Some(number) = self.numbers.remove(object) {
            self.waiting.remove(&number);
        }
    }

    fn next(&mut self) -> Option<ObjectRef<K>> {
        let (_, object) = self.waiting.pop_first()?;
        self.numbers.remove(&object);
        Some(object)
    }

    fn is_idle(&self) -> bool {
        self.free == RESERVED && self.waiting.is_empty()
    }
}

/// One reconcile; others can have the place when this is dropped.
pub(super) struct Place<K: Object> {
    places: Arc<Places<K>>,
    namespace: String,
    is_shared: bool,
}

impl<K: Object> Places<K> {
    /// Places for everybody, besides those of each namespace. Objects that wait are sent to `wake`.
    pub fn new(shared: u16, wake: mpsc::UnboundedSender<ObjectRef<K>>) -> Arc<Self> {
        let state = State {
            shared: shared.into(),
            namespaces: BTreeMap::new(),
            last: String::new(),
        };
        Arc::new(Self {
            wake,
            state: Mutex::new(state),
        })
    }

    /// Returns a place. `None`: the object has to wait for one.
    pub fn take(self: &Arc<Self>, object: &ObjectRef<K>) -> Option<Place<K>> {
        let name = object.namespace.clone().unwrap_or_default();
        let mut state = self.state.lock();
        let state = &mut *state;
        let namespace = state.namespaces.entry(name.clone()).or_default();
        let is_shared = namespace.free == 0;
        let free = if is_shared {
            &mut state.shared
        } else {
            &mut namespace.free
        };
        if *free == 0 {
            namespace.wait(object);
            return None;
        }
        *free -= 1;
        namespace.forget(object);
        Some(Place {
            places: self.clone(),
            namespace: name,
            is_shared,
        })
    }

    /// Forgets an object. It may have been woken for a place that another can have now.
    pub fn gone(&self, object: &ObjectRef<K>) {
        let name = object.namespace.clone().unwrap_or_default();
        let mut state = self.state.lock();
        if let Some(namespace) = state.namespaces.get_mut(&name) {
            namespace.forget(object);
        }
        let next = state.next_of(&name).or_else(|| state.next_of_all());
        self.send(next);
    }

    fn send(&self, object: Option<ObjectRef<K>>) {
        if let Some(object) = object {
            let _ = self.wake.send(object);
        }
    }
}

impl<K: Object> State<K> {
    /// Returns who can have a free place of the namespace itself.
    fn next_of(&mut self, name: &str) -> Option<ObjectRef<K>> {
        let namespace = self.namespaces.get_mut(name)?;
        if namespace.free > 0 { namespace.next() } else { None }
    }

    /// Returns who can have a free place that is for everybody: the namespaces in turn.
    fn next_of_all(&mut self) -> Option<ObjectRef<K>> {
        if self.shared == 0 {
            return None;
        }
        let after = (Bound::Excluded(self.last.clone()), Bound::Unbounded);
        let is_waiting = |(_, namespace): &(&String, &Namespace<K>)| !namespace.waiting.is_empty();
        let mut waiting = self.namespaces.range(after).chain(&self.namespaces).filter(is_waiting);
        let name = waiting.next()?.0.clone();
        let object = self.namespaces.get_mut(&name)?.next();
        self.last = name;
        object
    }
}

impl<K: Object> Drop for Place<K> {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        let next = if self.is_shared {
            state.shared += 1;
            state.next_of_all()
        } else {
            state.namespaces.entry(self.namespace.clone()).or_default().free += 1;
            state.next_of(&self.namespace)
        };
        if state.namespaces.get(&self.namespace).is_some_and(Namespace::is_idle) {
            state.namespaces.remove(&self.namespace);
        }
        self.places.send(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;

    const SHARED: u16 = 4;

    fn object(namespace: &str, n: usize) -> ObjectRef<ConfigMap> {
        ObjectRef::new(&n.to_string()).within(namespace)
    }

    fn taken(places: &Arc<Places<ConfigMap>>, namespace: &str) -> Vec<Place<ConfigMap>> {
        (0..100).filter_map(|n| places.take(&object(namespace, n))).collect()
    }

    #[test]
    fn a_namespace_that_takes_all_places_leaves_the_others_their_own() {
        let (wake, mut woken) = mpsc::unbounded_channel();
        let places = Places::new(SHARED, wake);
        let mut bad = taken(&places, "bad");
        assert_eq!(bad.len(), usize::from(SHARED) + RESERVED);
        let good = taken(&places, "good");
        assert_eq!(good.len(), RESERVED);
        assert!(woken.try_recv().is_err(), "no place is free");
        // A shared place goes to the namespaces in turn, the first who waits first.
        drop(bad.split_off(RESERVED));
        let next: Vec<_> = std::iter::from_fn(|| woken.try_recv().ok()).collect();
        let expected = [("bad", 12), ("good", 8), ("bad", 13), ("good", 9)].map(|(of, n)| object(of, n));
        assert_eq!(next, expected);
        // A place of a namespace goes to nobody else.
        drop(good);
        let next: Vec<_> = std::iter::from_fn(|| woken.try_recv().ok()).collect();
        assert!(next.len() == RESERVED && next.iter().all(|object| object.namespace.as_deref() == Some("good")));
    }

    #[test]
    fn every_object_gets_a_place_in_the_end_although_some_are_gone() {
        let (wake, mut woken) = mpsc::unbounded_channel();
        let places = Places::new(1, wake);
        let mut running = taken(&places, "ns");
        let (mut done, mut woke) = (0, 0);
        while let Some(place) = running.pop() {
            drop(place);
            done += 1;
            while let Ok(object) = woken.try_recv() {
                woke += 1;
                match woke % 3 {
                    // Deleted while it waits, or before the place reaches it.
                    0 => places.gone(&object),
                    _ => running.extend(places.take(&object)),
                }
            }
        }
        assert!(done > 60, "{done}");
        let state = places.state.lock();
        assert!(
            state.namespaces.is_empty() && state.shared == 1,
            "nothing is kept where nothing runs"
        );
    }

    #[test]
    fn an_object_that_is_triggered_while_it_waits_waits_once() {
        let (wake, mut woken) = mpsc::unbounded_channel();
        let places = Places::new(0, wake);
        let running = taken(&places, "ns");
        for _ in 0..3 {
            assert!(places.take(&object("ns", 99)).is_none());
        }
        drop(running);
        let next: Vec<_> = std::iter::from_fn(|| woken.try_recv().ok()).collect();
        assert_eq!(next, (8..16).map(|n| object("ns", n)).collect::<Vec<_>>());
    }
}
