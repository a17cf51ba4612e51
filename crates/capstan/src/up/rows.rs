//! The rows that `capstan up` shows: one per machine-like object, kept current by watches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use capstan_api::vsphere::VSphereMachine;
use futures::StreamExt;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, ResourceExt};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

const OPENSHIFT: &str = "machine.openshift.io";
const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io";

/// The kinds that have a row, in the order in which they are shown.
pub const KINDS: [(&str, &str); 6] = [
    (OPENSHIFT, "MachineSet"),
    (OPENSHIFT, "Machine"),
    (INFRASTRUCTURE, "AzureMachinePool"),
    (INFRASTRUCTURE, "AzureMachinePoolMachine"),
    (INFRASTRUCTURE, "VSphereMachine"),
    (INFRASTRUCTURE, "VSphereVM"),
];

/// The version in which a kind is watched.
pub fn version(kind: &str) -> &'static str {
    let vsphere = kind.starts_with("VSphere");
    if vsphere { VSphereMachine::VERSION } else { "v1beta1" }
}

/// Identifies an object: index of the kind in [`KINDS`], namespace, name.
pub type Key = (usize, String, String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
    pub state: String,
    pub ready: bool,
    /// The problem of an object that is not ready, or else its Node, or its provider ID.
    pub detail: String,
    /// The problem that its conditions report, if there is one.
    pub problem: String,
    /// Those of its owners that have rows themselves.
    pub owners: Vec<Key>,
}

/// All rows; clones share them.
#[derive(Clone)]
pub struct Rows {
    rows: Arc<Mutex<BTreeMap<Key, Row>>>,
    changed: watch::Sender<u64>,
}

impl Rows {
    /// Watches all kinds that the cluster has. Ends when the returned set is dropped.
    pub fn watch(client: &Client) -> (Self, JoinSet<()>) {
        let rows = Self {
            rows: Arc::default(),
            changed: watch::Sender::new(0),
        };
        let mut tasks = JoinSet::new();
        for (place, (group, kind)) in KINDS.into_iter().enumerate() {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version(kind), kind));
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
            tasks.spawn(rows.clone().follow(place, api));
        }
        (rows, tasks)
    }

    async fn follow(self, place: usize, api: Api<DynamicObject>) {
        // Errors are answered by the back-off: a kind that is not installed yet appears later.
        let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Apply(object) | Event::InitApply(object)) => {
                    let Some(row) = row(KINDS[place].1, &object) else {
                        continue;
                    };
                    let key = (place, row.namespace.clone(), row.name.clone());
                    self.lock().insert(key, row);
                }
                Ok(Event::Delete(object)) => {
                    let Some(namespace) = object.namespace() else {
                        continue;
                    };
                    self.lock().remove(&(place, namespace, object.name_any()));
                }
                Ok(Event::Init) => self.lock().retain(|key, _| key.0 != place),
                Ok(Event::InitDone) | Err(_) => continue,
            }
            self.changed.send_modify(|count| *count += 1);
        }
    }

    pub fn all(&self) -> Vec<Row> {
        self.lock().values().cloned().collect()
    }

    /// The rows of these keys, and of all that they own.
    pub fn of(&self, wanted: &[Key]) -> Vec<Row> {
        let rows = self.lock();
        let mut keys: BTreeSet<&Key> = wanted.iter().collect();
        loop {
            let owned = |(key, row): &(&Key, &Row)| !keys.contains(key) && row.owners.iter().any(|o| keys.contains(o));
            let more: Vec<&Key> = rows.iter().filter(owned).map(|(key, _)| key).collect();
            if more.is_empty() {
                break;
            }
            keys.extend(more);
        }
        let shown = rows.iter().filter(|(key, _)| keys.contains(key));
        shown.map(|(_, row)| row.clone()).collect()
    }

    pub fn get(&self, key: &Key) -> Option<Row> {
        self.lock().get(key).cloned()
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The key of an object that has a row.
pub fn key(object: &DynamicObject, namespace: &str) -> Option<Key> {
    let types = object.types.as_ref()?;
    let namespace = object.namespace().unwrap_or_else(|| namespace.to_owned());
    Some((place(&types.api_version, &types.kind)?, namespace, object.name_any()))
}

fn place(api_version: &str, kind: &str) -> Option<usize> {
    let group = api_version.split_once('/')?.0;
    KINDS.iter().position(|known| *known == (group, kind))
}

fn owners(object: &DynamicObject) -> Vec<Key> {
    let Some(namespace) = object.namespace() else {
        return Vec::new();
    };
    let owners = object.owner_references().iter();
    owners
        .filter_map(|owner| {
            Some((
                place(&owner.api_version, &owner.kind)?,
                namespace.clone(),
                owner.name.clone(),
            ))
        })
        .collect()
}

/// Returns the row of an object, with whether the object has reached its desired state.
fn row(kind: &'static str, object: &DynamicObject) -> Option<Row> {
    let (spec, status) = (&object.data["spec"], &object.data["status"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let phase = text(&status["phase"]);
    let (mut state, ready) = match kind {
        "MachineSet" => count(spec["replicas"].as_i64().unwrap_or(1), status["readyReplicas"].as_i64()),
        "AzureMachinePool" => {
            let replicas = status["replicas"].as_i64();
            let ready = status["ready"].as_bool().unwrap_or_default();
            (format!("{} instances", replicas.unwrap_or_default()), ready)
        }
        "Machine" => (phase.clone(), phase == "Running"),
        _ => {
            let provisioned = status["initialization"]["provisioned"].as_bool();
            let ready = status["ready"].as_bool().or(provisioned).unwrap_or_default();
            (phase.clone(), ready && !says_unready(status))
        }
    };
    if object.metadata.deletion_timestamp.is_some() {
        "Deleting".clone_into(&mut state);
    } else if state.is_empty() {
        if ready { "Ready" } else { "Not ready" }.clone_into(&mut state);
    }
    let failure = [&status["errorMessage"], &status["failureMessage"]]
        .into_iter()
        .map(text)
        .find(|t| !t.is_empty());
    let node = text(&status["nodeRef"]["name"]);
    let ready = ready && object.metadata.deletion_timestamp.is_none();
    let problem = failure.or_else(|| complaint(status)).unwrap_or_default();
    let detail = if !ready && !problem.is_empty() {
        problem.clone()
    } else if node.is_empty() {
        short(spec["providerID"].as_str().unwrap_or_default()).to_owned()
    } else {
        node
    };
    Some(Row {
        kind,
        namespace: object.namespace()?,
        name: object.name_any(),
        ready,
        state,
        detail,
        problem,
        owners: owners(object),
    })
}

/// Returns the part of a provider ID that differs between machines.
fn short(provider_id: &str) -> &str {
    let compute = provider_id.split_once("/providers/Microsoft.Compute/");
    compute.map_or(provider_id, |(_, name)| name)
}

/// Whether the summary of the conditions is that it is not ready, which may come after it once was.
fn says_unready(status: &Value) -> bool {
    let conditions = status["conditions"].as_array().into_iter().flatten();
    conditions
        .into_iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "False")
}

/// Returns the message of a false condition, the summary first.
fn complaint(status: &Value) -> Option<String> {
    let conditions = status["conditions"].as_array()?;
    let mut bad: Vec<&Value> = conditions
        .iter()
        .filter(|condition| condition["status"] == "False")
        .collect();
    bad.sort_by_key(|condition| condition["type"] != "Ready");
    bad.iter().find_map(|condition| {
        let texts = ["message", "reason"].map(|key| condition[key].as_str().unwrap_or_default());
        texts.into_iter().find(|text| !text.is_empty()).map(str::to_owned)
    })
}

fn count(desired: i64, ready: Option<i64>) -> (String, bool) {
    let ready = ready.unwrap_or_default();
    (format!("{ready}/{desired} ready"), ready == desired)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(kind: &'static str, spec: Value, status: Value) -> (String, bool) {
        let object = json!({
            "apiVersion": "v1", "kind": kind, "metadata": {"name": "one", "namespace": "default"},
            "spec": spec, "status": status,
        });
        let row = row(kind, &serde_json::from_value(object).unwrap()).unwrap();
        (row.state, row.ready)
    }

    #[test]
    fn a_row_is_ready_when_its_object_has_become_what_it_was_to_be() {
        let none = json!({});
        assert_eq!(
            shown("Machine", none.clone(), none.clone()),
            ("Not ready".into(), false)
        );
        assert_eq!(
            shown("Machine", none.clone(), json!({"phase": "Provisioned"})),
            ("Provisioned".into(), false)
        );
        assert_eq!(
            shown("Machine", none.clone(), json!({"phase": "Running"})),
            ("Running".into(), true)
        );
        let set = json!({"replicas": 2});
        assert_eq!(
            shown("MachineSet", set.clone(), json!({"readyReplicas": 1})),
            ("1/2 ready".into(), false)
        );
        assert_eq!(
            shown("MachineSet", set, json!({"readyReplicas": 2})),
            ("2/2 ready".into(), true)
        );
        assert_eq!(
            shown("VSphereVM", none.clone(), json!({"ready": true})),
            ("Ready".into(), true)
        );
        let lost = json!({"ready": true, "conditions": [{"type": "Ready", "status": "False", "message": "gone"}]});
        assert_eq!(shown("VSphereVM", none, lost.clone()), ("Not ready".into(), false));
        assert_eq!(complaint(&lost), Some("gone".to_owned()));
    }

    #[test]
    fn a_row_tells_what_is_in_the_way_or_else_where_the_machine_is() {
        let detail = |spec: Value, status: Value| {
            let object = json!({"metadata": {"name": "one", "namespace": "ns"}, "spec": spec, "status": status});
            row("AzureMachinePoolMachine", &serde_json::from_value(object).unwrap())
                .unwrap()
                .detail
        };
        let id = "azure:///subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/p/virtualMachines/0";
        let spec = json!({"providerID": id});
        let waits = json!([{"type": "Ready", "status": "False", "reason": "WaitingForNode", "message": ""}]);
        assert_eq!(detail(spec.clone(), json!({"conditions": waits})), "WaitingForNode");
        assert_eq!(
            detail(spec.clone(), json!({})),
            "virtualMachineScaleSets/p/virtualMachines/0"
        );
        let up = json!({"ready": true, "nodeRef": {"name": "node-a"}});
        assert_eq!(detail(spec, up), "node-a");
        assert_eq!(detail(json!({"providerID": "vsphere://u"}), json!({})), "vsphere://u");
    }

    #[test]
    fn what_somebody_else_runs_in_the_cluster_is_not_waited_for() {
        let rows = Rows {
            rows: Arc::default(),
            changed: watch::Sender::new(0),
        };
        let add = |kind: &'static str, name: &str, owner: Option<(&str, &str)>| {
            let owners = owner.map(|(kind, name)| {
                json!([{"apiVersion": format!("{OPENSHIFT}/v1beta1"), "kind": kind, "name": name, "uid": "u"}])
            });
            let object = json!({"apiVersion": format!("{OPENSHIFT}/v1beta1"), "kind": kind,
                "metadata": {"name": name, "namespace": "ns", "ownerReferences": owners}});
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            let key = key(&object, "default").unwrap();
            rows.lock().insert(key.clone(), row(kind, &object).unwrap());
            key
        };
        let set = add("MachineSet", "workers", None);
        add("Machine", "workers-a", Some(("MachineSet", "workers")));
        let own = add("Machine", "archive", None);
        add("MachineSet", "theirs", None);
        add("Machine", "theirs-a", Some(("MachineSet", "theirs")));
        let names: Vec<String> = rows.of(&[set, own]).into_iter().map(|row| row.name).collect();
        assert_eq!(names, ["workers", "archive", "workers-a"]);
        assert_eq!(rows.all().len(), 5);
    }
}
