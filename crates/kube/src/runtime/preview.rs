//! The preview: controllers observe and plan, and carry nothing out.
//!
//! Invariant: no request of a context with a preview changes anything. [`ReadOnly`] refuses every write at the client that
//! would send it: Kubernetes, Azure and vSphere. A step that only compares, and writes what differs, is tried all the same:
//! the writes that are refused then are what it would change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use capstan_core::interceptor::{Effect, Interceptor, System, Verdict};
use capstan_core::plan::{Describe, Forecast, Impact};
use capstan_core::{Class, Classified};
use futures::{Stream, StreamExt};
use kube::core::DynamicObject;
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use super::{ObjectKey, Outcome, Reconcile, Scope};
use crate::cache::Object;

/// An object that cannot be observed at once is observed so often: a session or a connection may be on its way.
const TRIES: usize = 3;
/// Between two tries.
const PAUSE: Duration = Duration::from_secs(2);
/// A cloud that does not answer must not hold up the plans of all other objects.
const PATIENCE: Duration = Duration::from_secs(60);
/// So many refused requests are kept.
const KEPT: usize = 1000;

tokio::task_local! {
    /// The writes that were refused to the object that this task plans.
    static REFUSED: Arc<Mutex<Vec<Effect>>>;
}

/// Collects the plans of all controllers. Clones share what was collected.
#[derive(Clone, Debug)]
pub struct Preview(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Objects as they would be: caches show them in the place of those that the API server has.
    changes: Vec<DynamicObject>,
    planned: Mutex<Vec<Planned>>,
    finished: watch::Sender<BTreeSet<&'static str>>,
    refused: Mutex<Vec<Effect>>,
    notes: Mutex<Vec<String>>,
}

/// The plan of one object.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Planned {
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub name: String,
    /// The next steps, in order.
    pub steps: Vec<PlannedStep>,
    /// Why the object cannot be observed, or a step cannot be carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(flatten)]
    pub forecast: Forecast,
}

/// One step, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedStep {
    pub step: String,
    /// Whether it changes something; a step that does not only waits.
    pub changes: bool,
    /// Requests to the cloud, at least; reads are not counted.
    pub cloud_calls: usize,
    /// The requests that were refused when the step was tried.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writes: Vec<String>,
}

impl Planned {
    fn new<K: Resource<DynamicType = ()>>(key: &ObjectKey) -> Self {
        Self {
            kind: K::kind(&()).into_owned(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            steps: Vec::new(),
            error: None,
            forecast: Forecast::default(),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.kind, &self.namespace, &self.name, &self.error)
            == (&other.kind, &other.namespace, &other.name, &other.error)
    }

    pub fn changes(&self) -> bool {
        self.steps.iter().any(|step| step.changes) || !self.forecast.waves.is_empty()
    }

    /// Requests to the cloud until the object is in its desired state, as far as that can be foreseen.
    pub fn cloud_calls(&self) -> usize {
        let next: usize = self.steps.iter().map(|step| step.cloud_calls).sum();
        next.max(self.forecast.cloud_calls)
    }

    /// Returns what keeps the object from its desired state.
    pub fn blocked(&self) -> Option<String> {
        let waits = self
            .steps
            .iter()
            .find(|step| !step.changes)
            .map(|step| step.step.clone());
        self.error.clone().or(self.forecast.blocked.clone()).or(waits)
    }
}

impl Preview {
    /// `changes` are objects as the API server would store them.
    pub fn new(changes: Vec<DynamicObject>) -> Self {
        Self(Arc::new(Inner {
            changes,
            planned: Mutex::default(),
            finished: watch::channel(BTreeSet::new()).0,
            refused: Mutex::default(),
            notes: Mutex::default(),
        }))
    }

    /// Returns the interceptor that refuses every write.
    pub fn read_only(&self) -> Arc<dyn Interceptor> {
        Arc::new(ReadOnly(self.clone()))
    }

    /// Waits until the controllers with these names have planned all their objects. Returns whether they all have.
    pub async fn finished(&self, controllers: &BTreeSet<&'static str>) -> bool {
        let mut finished = self.0.finished.subscribe();
        finished.wait_for(|done| done.is_superset(controllers)).await.is_ok()
    }

    /// Returns the controllers that have planned all their objects.
    pub fn finished_now(&self) -> BTreeSet<&'static str> {
        self.0.finished.borrow().clone()
    }

    /// The controllers have nothing to plan in this cluster, for this reason.
    pub fn skip(&self, controllers: &[&'static str], reason: String) {
        self.0.notes.lock().push(reason);
        self.0.finished.send_modify(|done| done.extend(controllers));
    }

    /// Returns the plans, in the order of kinds and names.
    pub fn planned(&self) -> Vec<Planned> {
        let mut planned = self.0.planned.lock().clone();
        planned.sort_by(|a, b| (&a.kind, &a.namespace, &a.name).cmp(&(&b.kind, &b.namespace, &b.name)));
        planned
    }

    /// Returns why controllers have no plans.
    pub fn notes(&self) -> Vec<String> {
        self.0.notes.lock().clone()
    }

    /// Returns the writes that were refused while objects were observed and steps were tried, with their numbers.
    pub fn refused(&self) -> BTreeMap<String, usize> {
        let mut counted = BTreeMap::new();
        for effect in self.0.refused.lock().iter() {
            *counted.entry(text(effect)).or_default() += 1;
        }
        counted
    }

    /// Shows the changed objects in the place of those that the API server has.
    pub(crate) fn overlaid<K: Object, S: Stream<Item = watcher::Result<watcher::Event<K>>>>(
        &self,
        events: S,
    ) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + use<K, S> {
        let of_kind = |object: &&DynamicObject| {
            let types = object.types.as_ref();
            let group = |version: &str| version.split_once('/').map_or("", |(group, _)| group).to_owned();
            types.is_some_and(|types| types.kind == K::kind(&()) && group(&types.api_version) == K::group(&()))
        };
        let changed = self.0.changes.iter().filter(of_kind);
        let changed: Vec<K> = changed.filter_map(|object| self.parsed(object)).collect();
        let mut shown = BTreeSet::new();
        events.flat_map(move |event| {
            let same = |a: &K, b: &K| (a.namespace(), a.name_any()) == (b.namespace(), b.name_any());
            let mut replace = |object: K| {
                shown.insert((object.namespace(), object.name_any()));
                changed
                    .iter()
                    .find(|change| same(change, &object))
                    .cloned()
                    .unwrap_or(object)
            };
            let events = match event {
                Ok(watcher::Event::Apply(object)) => vec![Ok(watcher::Event::Apply(replace(object)))],
                Ok(watcher::Event::InitApply(object)) => vec![Ok(watcher::Event::InitApply(replace(object)))],
                Ok(watcher::Event::InitDone) => {
                    let new = changed
                        .iter()
                        .filter(|change| !shown.contains(&(change.namespace(), change.name_any())));
                    let new = new.map(|object| Ok(watcher::Event::InitApply(object.clone())));
                    new.chain([Ok(watcher::Event::InitDone)]).collect()
                }
                other => vec![other],
            };
            futures::stream::iter(events)
        })
    }

    /// Returns a changed object as its kind. One that cannot be read has no plan.
    fn parsed<K: Object>(&self, object: &DynamicObject) -> Option<K> {
        let error = match object.clone().try_parse() {
            Ok(object) => return Some(object),
            Err(error) => error,
        };
        let unread = Planned {
            error: Some(format!("the changed object cannot be read: {error}")),
            ..Planned::new::<K>(&ObjectKey {
                // A kind that is cluster-wide has none, and a new object has no UID yet.
                namespace: object.metadata.namespace.as_deref().unwrap_or("").to_owned(),
                name: object.name_any(),
                uid: object.metadata.uid.as_deref().unwrap_or("").to_owned(),
            })
        };
        let mut planned = self.0.planned.lock();
        // Several caches may have the kind.
        if !planned.iter().any(|other| other.is_same(&unread)) {
            planned.push(unread);
        }
        None
    }

    /// Plans one object.
    pub(super) async fn plan<R: Reconcile>(&self, reconcile: &R, scope: &mut Scope<R::Object>, state: &mut R::State) {
        let mut planned = Planned::new::<R::Object>(&scope.key);
        for attempt in 1..=TRIES {
            planned.steps.clear();
            let observed = capstan_core::clock::timeout(PATIENCE, observe(reconcile, scope, state, &mut planned)).await;
            planned.error = match observed {
                Ok(Ok(false)) => return,
                Ok(Ok(true)) => None,
                Ok(Err(error)) if attempt < TRIES && error.class() == Class::Transient => {
                    scope.context.clock.sleep(PAUSE).await;
                    continue;
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("cannot be observed within {} s", PATIENCE.as_secs())),
            };
            break;
        }
        self.0.planned.lock().push(planned);
    }

    /// A controller has planned all its objects.
    pub(super) fn finish(&self, controller: &'static str) {
        self.0.finished.send_modify(|done| {
            done.insert(controller);
        });
    }
}

/// Observes and plans. Returns whether the object is for this controller.
async fn observe<R: Reconcile>(
    reconcile: &R,
    scope: &mut Scope<R::Object>,
    state: &mut R::State,
    planned: &mut Planned,
) -> Result<bool, R::Error> {
    let Some(mut observed) = reconcile.observe(scope, state).await? else {
        return Ok(false);
    };
    let now = scope.now();
    planned.forecast = R::forecast(&observed, now);
    for step in R::plan(&observed, now).steps {
        let (text, impact) = (step.to_string(), step.impact());
        let (changes, cloud_calls, writes) = match impact {
            Impact::None => continue,
            Impact::Waits => (false, 0, Vec::new()),
            Impact::Cluster => (true, 0, Vec::new()),
            Impact::Cloud(calls) => (true, calls, Vec::new()),
            Impact::Ensures => {
                let refused = Arc::<Mutex<Vec<Effect>>>::default();
                let tried = REFUSED.scope(refused.clone(), reconcile.apply(step, &mut observed, scope, state));
                let tried = tried.await;
                let writes: Vec<Effect> = refused
                    .lock()
                    .iter()
                    .filter(|effect| is_change(effect))
                    .cloned()
                    .collect();
                match tried {
                    // The status would be written, or nothing at all: the plan goes on.
                    _ if writes.is_empty() && !refused.lock().is_empty() => continue,
                    Err(error) if writes.is_empty() => return Err(error),
                    Ok(Outcome::Done | Outcome::Observe | Outcome::Wait(_)) if writes.is_empty() => continue,
                    Ok(_) | Err(_) => {}
                }
                let calls = writes.iter().filter(|effect| effect.system != System::Kube).count();
                (true, calls, writes.iter().map(self::text).collect())
            }
        };
        planned.steps.push(PlannedStep {
            step: text,
            changes,
            cloud_calls,
            writes,
        });
    }
    Ok(true)
}

/// Whether a refused request would have changed anything but a status or an event.
fn is_change(effect: &Effect) -> bool {
    effect.system != System::Kube || !(effect.target.ends_with("/status") || effect.target.ends_with("/events"))
}

fn text(effect: &Effect) -> String {
    format!("{} {}", effect.method, effect.target)
}

/// Refuses every write.
struct ReadOnly(Preview);

impl Interceptor for ReadOnly {
    fn before(&self, effect: &Effect) -> Verdict {
        if !effect.write {
            return Verdict::Pass;
        }
        let mut all = self.0.0.refused.lock();
        if all.len() < KEPT {
            all.push(effect.clone());
        }
        let _ = REFUSED.try_with(|refused| refused.lock().push(effect.clone()));
        Verdict::Refuse("a plan writes nothing".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;

    fn map(name: &str, value: &str) -> ConfigMap {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns"}, "data": {"value": value}
        }))
        .unwrap()
    }

    fn change(name: &str, value: &str) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "ns"}, "data": {"value": value}
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn caches_show_changed_and_new_objects_in_the_place_of_those_that_are_there() {
        let preview = Preview::new(vec![change("old", "changed"), change("new", "created")]);
        let events = vec![
            Ok(watcher::Event::Init),
            Ok(watcher::Event::InitApply(map("old", "stored"))),
            Ok(watcher::Event::InitApply(map("other", "stored"))),
            Ok(watcher::Event::InitDone),
            Ok(watcher::Event::Apply(map("old", "stored again"))),
        ];
        let shown: Vec<_> = preview.overlaid(futures::stream::iter(events)).collect().await;
        let text = |event: &watcher::Result<watcher::Event<ConfigMap>>| match event {
            Ok(watcher::Event::InitApply(map) | watcher::Event::Apply(map)) => {
                format!("{} {}", map.name_any(), map.data.as_ref().unwrap()["value"])
            }
            Ok(watcher::Event::Init) => "init".to_owned(),
            Ok(watcher::Event::InitDone) => "done".to_owned(),
            other => format!("{other:?}"),
        };
        let shown: Vec<String> = shown.iter().map(text).collect();
        let expected = [
            "init",
            "old changed",
            "other stored",
            "new created",
            "done",
            "old changed",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn only_writes_are_refused_and_all_of_them() {
        let preview = Preview::new(Vec::new());
        let effect = |system, method: &str, write| Effect {
            system,
            method: method.to_owned(),
            target: "/t".to_owned(),
            write,
        };
        let read_only = preview.read_only();
        for system in [System::Kube, System::Azure, System::Vsphere] {
            assert_eq!(read_only.before(&effect(system, "GET", false)), Verdict::Pass);
            let verdict = read_only.before(&effect(system, "PUT", true));
            assert!(matches!(verdict, Verdict::Refuse(_)), "{verdict:?}");
        }
        assert_eq!(preview.refused(), BTreeMap::from([("PUT /t".to_owned(), 3)]));
    }
}
