//! Files that are not applied yet: the API server answers a dry run with the objects as it would store them.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, Patch, PatchParams, ValidationDirective};
use kube::core::GroupVersionKind;
use kube::discovery::{self, Scope};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::manifest::{self, Object};

/// The field manager of dry runs; the API server stores nothing of it.
const MANAGER: &str = "capstan-plan";
/// Where `kubectl apply` keeps what it has applied, so that it can remove what a later file leaves out.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The group of Cluster API's own kinds.
const CLUSTER_API: &str = "cluster.x-k8s.io";

/// One object of a file.
pub struct Change {
    /// As the API server would store it.
    pub object: DynamicObject,
    pub outcome: Outcome,
    /// Whether fields that the file leaves out stay in `object`, because nothing records which of them an earlier file had.
    pub keeps_fields: bool,
}

/// Where and as whom the files are applied.
pub struct Target<'a> {
    /// The only namespace that is planned.
    pub namespace: Option<&'a str>,
    pub field_manager: Option<&'a str>,
}

/// What applying the object would do to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Created,
    Changed,
    Unchanged,
}

/// Returns the objects of the files as the API server would store them. One that it refuses is an error.
pub async fn dry_run(config: &kube::Config, files: &[PathBuf], target: &Target<'_>) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    if files.is_empty() {
        return Ok(changes);
    }
    let client = kube::Client::try_from(config.clone()).context("cannot make a Kubernetes client")?;
    for file in files {
        for object in manifest::read(file)? {
            let change = apply(&client, &object, target, &config.default_namespace).await;
            changes.push(change.with_context(|| object.describe())?);
        }
    }
    Ok(changes)
}

async fn apply(client: &kube::Client, object: &Object, target: &Target<'_>, default: &str) -> Result<Change> {
    let (group, version) = object
        .api_version()
        .split_once('/')
        .unwrap_or(("", object.api_version()));
    let kind = GroupVersionKind::gvk(group, version, object.kind());
    let (resource, capabilities) = discovery::pinned_kind(client, &kind)
        .await
        .context("the API server does not serve this kind")?;
    let own = Some(object.namespace()).filter(|namespace| !namespace.is_empty());
    let api: Api<DynamicObject> = match (capabilities.scope, own, target.namespace) {
        (Scope::Cluster, ..) => Api::all_with(client.clone(), &resource),
        (Scope::Namespaced, Some(own), Some(planned)) if own != planned => {
            bail!("its namespace is {own}, and --namespace is {planned}")
        }
        (Scope::Namespaced, own, planned) => {
            Api::namespaced_with(client.clone(), own.or(planned).unwrap_or(default), &resource)
        }
    };
    let Some(name) = Some(object.name()).filter(|name| !name.is_empty()) else {
        bail!("metadata.name is empty: a plan needs the name");
    };
    let before = api.get_opt(name).await.context("cannot be read")?;
    let way = Way::of(before.as_ref(), target.field_manager)?;
    let params = |params: PatchParams| PatchParams {
        dry_run: true,
        ..params
    };
    let after = match &way {
        Way::Merge(last) => {
            let params = params(PatchParams {
                field_validation: Some(ValidationDirective::Strict),
                ..PatchParams::default()
            });
            let patch = merge_patch(last, &object.value);
            api.patch(name, &params, &Patch::Merge(&patch)).await
        }
        Way::Apply(manager) => {
            let params = params(PatchParams::apply(manager).force());
            api.patch(name, &params, &Patch::Apply(&object.value)).await
        }
    };
    let after = after.context("the API server refuses the change")?;
    let outcome = match &before {
        None => Outcome::Created,
        Some(before) if desired(before)? == desired(&after)? => Outcome::Unchanged,
        Some(_) => Outcome::Changed,
    };
    Ok(Change {
        keeps_fields: before.is_some() && matches!(&way, Way::Apply(manager) if manager == MANAGER),
        object: after,
        outcome,
    })
}

/// How a file is applied, so that fields that it leaves out are removed as they would be.
#[derive(Debug, PartialEq)]
enum Way {
    /// As `kubectl apply`: with what it has applied before.
    Merge(Value),
    /// As `kubectl apply --server-side` by this manager.
    Apply(String),
}

impl Way {
    /// Returns the way that the object was applied before.
    fn of(before: Option<&DynamicObject>, field_manager: Option<&str>) -> Result<Self> {
        if let Some(manager) = field_manager {
            return Ok(Self::Apply(manager.to_owned()));
        }
        let Some(before) = before else {
            return Ok(Self::Apply(MANAGER.to_owned()));
        };
        if let Some(last) = before.annotations().get(LAST_APPLIED) {
            let last = serde_json::from_str::<Value>(last);
            return Ok(Self::Merge(last.with_context(|| {
                format!("metadata.annotations[{LAST_APPLIED}] is not JSON")
            })?));
        }
        let applied = before
            .managed_fields()
            .iter()
            .filter(|entry| entry.operation.as_deref() == Some("Apply") && entry.subresource.is_none());
        let managers: Vec<&str> = applied.filter_map(|entry| entry.manager.as_deref()).collect();
        match managers[..] {
            [] => Ok(Self::Apply(MANAGER.to_owned())),
            [manager] => Ok(Self::Apply(manager.to_owned())),
            _ => bail!(
                "several managers apply it: name the one of this file with --field-manager ({})",
                managers.join(", ")
            ),
        }
    }
}

/// Returns the merge patch that `kubectl apply` sends: the file, and null for what it had before and has not any more.
fn merge_patch(last: &Value, file: &Value) -> Value {
    let mut file = file.clone();
    if let Some(meta) = file.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        // kubectl always applies annotations: its own one.
        meta.entry("annotations").or_insert_with(|| Value::Object(Map::new()));
    }
    let mut last = last.clone();
    if let Some(meta) = last.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        // kubectl writes it also where the file has none.
        meta.remove("namespace");
    }
    with_removals(&last, file)
}

fn with_removals(last: &Value, mut file: Value) -> Value {
    if let (Value::Object(last), Value::Object(patch)) = (last, &mut file) {
        for (key, old) in last.iter().filter(|(_, old)| !old.is_null()) {
            let new = patch.remove(key).map_or(Value::Null, |new| with_removals(old, new));
            patch.insert(key.clone(), new);
        }
    }
    file
}

/// Returns the parts of an object that users write.
fn desired(object: &DynamicObject) -> Result<Value> {
    let mut value = serde_json::to_value(object)?;
    if let Some(map) = value.as_object_mut() {
        map.remove("status");
    }
    if let Some(meta) = value.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        for field in [
            "managedFields",
            "resourceVersion",
            "generation",
            "uid",
            "creationTimestamp",
        ] {
            meta.remove(field);
        }
    }
    Ok(value)
}

impl Change {
    pub fn kind(&self) -> &str {
        self.object.types.as_ref().map_or("", |types| types.kind.as_str())
    }

    /// Returns what the answer of the API server does not show.
    pub fn caveat(&self) -> Option<&'static str> {
        self.keeps_fields.then_some(
            "fields that the file leaves out are planned as they are, because nothing records who applied them; see --field-manager",
        )
    }

    /// Returns who acts on a kind for which Capstan has no plan.
    pub fn note(&self) -> &'static str {
        let types = self.object.types.as_ref();
        let group = types
            .and_then(|types| types.api_version.split_once('/'))
            .map_or("", |(group, _)| group);
        match self.kind() {
            kind if kind.ends_with("MachineTemplate") => {
                "machines that exist stay as they are; Cluster API makes new machines from the template"
            }
            _ if group == CLUSTER_API || group.ends_with(".cluster.x-k8s.io") => {
                "Cluster API decides which machines are created and deleted; Capstan plans for these machines then"
            }
            _ => "Capstan has no plan for this kind",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_earlier_file_had_and_this_one_has_not_is_removed() {
        let last = json!({"metadata": {"name": "a", "namespace": "n", "annotations": {"x": "1"}, "labels": {"l": "1"}},
            "spec": {"size": {"cpu": 1, "ram": 2}, "spot": {}, "disks": [1, 2], "none": null}});
        let file = json!({"metadata": {"name": "a"}, "spec": {"size": {"cpu": 3}, "disks": [1]}});
        assert_eq!(
            merge_patch(&last, &file),
            json!({"metadata": {"name": "a", "annotations": {"x": null}, "labels": null},
                "spec": {"size": {"cpu": 3, "ram": null}, "spot": null, "disks": [1]}})
        );
    }

    #[test]
    fn a_file_is_planned_as_the_object_was_applied() {
        let flux = json!({"manager": "flux", "operation": "Apply"});
        let me = json!({"manager": "me", "operation": "Apply"});
        let others = [
            json!({"manager": "capstan", "operation": "Update"}),
            json!({"manager": "status", "operation": "Apply", "subresource": "status"}),
        ];
        let apply = |manager: &str| Some(Way::Apply(manager.to_owned()));
        let cases = [
            (json!({}), None, apply(MANAGER)),
            (
                json!({"annotations": {LAST_APPLIED: "{}"}}),
                None,
                Some(Way::Merge(json!({}))),
            ),
            (
                json!({"managedFields": [flux, others[0], others[1]]}),
                None,
                apply("flux"),
            ),
            // The user has to say which.
            (json!({"managedFields": [flux, me]}), None, None),
            (json!({"managedFields": [flux, me]}), Some("me"), apply("me")),
        ];
        for (metadata, field_manager, expected) in cases {
            let object = json!({"apiVersion": "v1", "kind": "K", "metadata": metadata});
            let before: DynamicObject = serde_json::from_value(object).unwrap();
            assert_eq!(Way::of(Some(&before), field_manager).ok(), expected, "{metadata}");
        }
    }
}
