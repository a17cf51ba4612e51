//! Stands in for Cluster API core where it does not run, as far as machines need it: it marks a Cluster as provisioned,
//! writes its kubeconfig Secret for the local cluster, and sets the owners of infrastructure objects.
//!
//! Invariant: every step is a patch, and a repeated step changes nothing.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ObjectMeta, Patch, PatchParams, PostParams,
};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde_json::Value;
use tokio::task::JoinSet;
use tracing::warn;

use super::rows;

const GROUP: &str = "cluster.x-k8s.io";
const VERSION: &str = "v1beta2";
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
const CLUSTER_LABEL: &str = "cluster.x-k8s.io/cluster-name";

/// The components that the stand-in replaces.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Cluster API core and the control plane's provider.
    Core,
    /// The control plane's provider alone: core runs, and waits for a kubeconfig.
    ControlPlane,
}

/// Watches Clusters, Machines and MachinePools until the returned set is dropped.
pub fn start(part: Part, client: &Client, kubeconfig: &str) -> JoinSet<()> {
    let kinds: &[&'static str] = match part {
        Part::Core => &["Cluster", "Machine", "MachinePool"],
        Part::ControlPlane => &["Cluster"],
    };
    let mut tasks = JoinSet::new();
    for kind in kinds {
        tasks.spawn(follow(part, kind, client.clone(), kubeconfig.to_owned()));
    }
    tasks
}

async fn follow(part: Part, kind: &'static str, client: Client, kubeconfig: String) {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, VERSION, kind));
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut objects = watcher(api, watcher::Config::default())
        .default_backoff()
        .applied_objects()
        .boxed();
    while let Some(object) = objects.next().await {
        let Ok(object) = object else { continue };
        if object.metadata.deletion_timestamp.is_some() {
            continue;
        }
        for attempt in 1.. {
            let result = match part {
                Part::Core => reconcile(kind, &client, &resource, &object, &kubeconfig).await,
                Part::ControlPlane => match object.namespace() {
                    Some(namespace) => give_kubeconfig(&client, &object, &namespace, &kubeconfig).await,
                    None => Ok(()),
                },
            };
            match result {
                Ok(()) => break,
                // Somebody else wrote at the same moment, mostly.
                Err(_) if attempt < ATTEMPTS => capstan_core::clock::sleep(PAUSE).await,
                Err(error) => {
                    let (name, error) = (object.name_any(), format!("{error:#}"));
                    warn!(kind, name, error, "cannot stand in for Cluster API");
                    break;
                }
            }
        }
    }
}

async fn reconcile(
    kind: &str,
    client: &Client,
    resource: &ApiResource,
    object: &DynamicObject,
    kubeconfig: &str,
) -> Result<()> {
    let Some(namespace) = object.namespace() else {
        return Ok(());
    };
    if kind == "Cluster" {
        bring_up(client, resource, object, &namespace).await?;
        give_kubeconfig(client, object, &namespace, kubeconfig).await?;
        return own(
            client,
            object,
            kind,
            &namespace,
            &object.data["spec"]["infrastructureRef"],
        )
        .await;
    }
    let template = if kind == "MachinePool" {
        &object.data["spec"]["template"]["spec"]
    } else {
        &object.data["spec"]
    };
    own(client, object, kind, &namespace, &template["infrastructureRef"]).await
}

#[derive(Debug, Serialize)]
struct BroughtUp {
    status: BroughtUpStatus,
}

#[derive(Debug, Serialize)]
struct BroughtUpStatus {
    phase: &'static str,
    initialization: Initialization,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Initialization {
    infrastructure_provisioned: bool,
    control_plane_initialized: bool,
}

async fn bring_up(client: &Client, resource: &ApiResource, cluster: &DynamicObject, namespace: &str) -> Result<()> {
    if cluster.data["status"]["initialization"]["infrastructureProvisioned"] == Value::Bool(true) {
        return Ok(());
    }
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, resource);
    let initialization = Initialization {
        infrastructure_provisioned: true,
        control_plane_initialized: true,
    };
    let patch = BroughtUp {
        status: BroughtUpStatus {
            phase: "Provisioned",
            initialization,
        },
    };
    api.patch_status(&cluster.name_any(), &PatchParams::default(), &Patch::Merge(&patch))
        .await?;
    Ok(())
}

async fn give_kubeconfig(client: &Client, cluster: &DynamicObject, namespace: &str, kubeconfig: &str) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let name = format!("{}-kubeconfig", cluster.name_any());
    let data = ByteString(kubeconfig.as_bytes().to_vec());
    // A cluster that was started again may be at another address.
    let there = secrets.get_opt(&name).await?;
    let same = |secret: &Secret| secret.data.as_ref().and_then(|data| data.get("value")) == Some(&data);
    if there.as_ref().is_some_and(same) {
        return Ok(());
    }
    if there.is_some() {
        secrets.delete(&name, &DeleteParams::default()).await?;
    }
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(name),
            labels: Some([(CLUSTER_LABEL.to_owned(), cluster.name_any())].into()),
            ..ObjectMeta::default()
        },
        type_: Some("cluster.x-k8s.io/secret".to_owned()),
        data: Some([("value".to_owned(), data)].into()),
        ..Secret::default()
    };
    secrets.create(&PostParams::default(), &secret).await?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct Owned {
    metadata: OwnedMetadata,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OwnedMetadata {
    owner_references: Vec<OwnerReference>,
    resource_version: Option<String>,
    labels: std::collections::BTreeMap<String, String>,
}

/// Makes `owner` the owner of the objects that it refers to.
async fn own(client: &Client, owner: &DynamicObject, kind: &str, namespace: &str, reference: &Value) -> Result<()> {
    let (Some(child_kind), Some(name)) = (reference["kind"].as_str(), reference["name"].as_str()) else {
        return Ok(());
    };
    let group = reference["apiGroup"]
        .as_str()
        .unwrap_or("infrastructure.cluster.x-k8s.io");
    let gvk = GroupVersionKind::gvk(group, rows::version(child_kind), child_kind);
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&gvk));
    let Some(child) = wait_for(&api, name).await? else {
        return Ok(());
    };
    let uid = owner.uid().context("an owner without a UID")?;
    if child.owner_references().iter().any(|reference| reference.uid == uid) {
        return Ok(());
    }
    let mut owner_references = child.owner_references().to_vec();
    owner_references.push(OwnerReference {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind.to_owned(),
        name: owner.name_any(),
        uid,
        controller: Some(true),
        block_owner_deletion: Some(true),
    });
    let cluster = owner.data["spec"]["clusterName"]
        .as_str()
        .map_or_else(|| owner.name_any(), str::to_owned);
    let patch = Owned {
        metadata: OwnedMetadata {
            owner_references,
            resource_version: child.resource_version(),
            labels: [(CLUSTER_LABEL.to_owned(), cluster)].into(),
        },
    };
    api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// Manifests come in any order: the target of a reference may be applied a moment later.
async fn wait_for(api: &Api<DynamicObject>, name: &str) -> Result<Option<DynamicObject>> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let exists = |object: Option<&DynamicObject>| object.is_some();
    match capstan_core::clock::timeout(
        PATIENCE,
        kube::runtime::wait::await_condition(api.clone(), name, exists),
    )
    .await
    {
        Ok(found) => Ok(found?),
        Err(_) => Ok(None),
    }
}
