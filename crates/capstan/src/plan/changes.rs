//! Files that are not applied yet: the API server answers a dry run with the objects as it would store them.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::{self, Scope};
use serde::Serialize;
use serde_json::Value;

use crate::manifest::{self, Object};

/// The field manager of dry runs; the API server stores nothing of it.
const MANAGER: &str = "capstan-plan";
/// The group of Cluster API's own kinds.
const CLUSTER_API: &str = "cluster.x-k8s.io";

/// One object of a file.
pub struct Change {
    /// As the API server would store it.
    pub object: DynamicObject,
    pub outcome: Outcome,
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
pub async fn dry_run(config: &kube::Config, files: &[PathBuf], namespace: Option<&str>) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    if files.is_empty() {
        return Ok(changes);
    }
    let client = kube::Client::try_from(config.clone()).context("cannot make a Kubernetes client")?;
    for file in files {
        for object in manifest::read(file)? {
            let change = apply(&client, &object, namespace.unwrap_or(&config.default_namespace)).await;
            changes.push(change.with_context(|| object.describe())?);
        }
    }
    Ok(changes)
}

async fn apply(client: &kube::Client, object: &Object, namespace: &str) -> Result<Change> {
    let (group, version) = object
        .api_version()
        .split_once('/')
        .unwrap_or(("", object.api_version()));
    let kind = GroupVersionKind::gvk(group, version, object.kind());
    let (resource, capabilities) = discovery::pinned_kind(client, &kind)
        .await
        .context("the API server does not serve this kind")?;
    let own = Some(object.namespace()).filter(|namespace| !namespace.is_empty());
    let api: Api<DynamicObject> = match capabilities.scope {
        Scope::Namespaced => Api::namespaced_with(client.clone(), own.unwrap_or(namespace), &resource),
        Scope::Cluster => Api::all_with(client.clone(), &resource),
    };
    let Some(name) = Some(object.name()).filter(|name| !name.is_empty()) else {
        bail!("metadata.name is empty: a plan needs the name");
    };
    let before = api.get_opt(name).await.context("cannot be read")?;
    let params = PatchParams {
        dry_run: true,
        ..PatchParams::apply(MANAGER).force()
    };
    let after = api.patch(name, &params, &Patch::Apply(&object.value)).await;
    let after = after.context("the API server refuses the change")?;
    let outcome = match &before {
        None => Outcome::Created,
        Some(before) if desired(before)? == desired(&after)? => Outcome::Unchanged,
        Some(_) => Outcome::Changed,
    };
    Ok(Change { object: after, outcome })
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
