//! The parts of a management cluster that these tests play: the provider of control planes, the kubelets, and the provider of
//! addresses from pools.

use std::time::Duration;

use anyhow::{Context, Result};
use capstan_testkit::ControlPlane;
use capstan_testkit::peers::CAPZ;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const CORE: &str = "cluster.x-k8s.io";
/// How often the played parts look for work.
const TURN: Duration = Duration::from_millis(300);

/// Plays until it is dropped.
pub struct Played(CancellationToken);

impl Drop for Played {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Played {
    pub async fn start(plane: &ControlPlane, namespace: &str) -> Result<Self> {
        let (client, namespace) = (plane.client().await?, namespace.to_owned());
        let end = CancellationToken::new();
        tokio::spawn({
            let end = end.clone();
            async move {
                while !end.is_cancelled() {
                    // An API server that is busy, or a definition that is being replaced, is asked again.
                    let _ = control_plane(&client, &namespace).await;
                    let _ = kubelets(&client, &namespace).await;
                    let _ = addresses(&client, &namespace).await;
                    let _ = service_operator(&client, &namespace).await;
                    tokio::time::sleep(TURN).await;
                }
            }
        });
        Ok(Self(end))
    }
}

fn api(client: &Client, namespace: &str, group: &str, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    match namespace {
        "" => Api::all_with(client.clone(), &kind),
        namespace => Api::namespaced_with(client.clone(), namespace, &kind),
    }
}

/// Cluster API looks for Nodes only once a control plane is there. Its own reconcile that was under way may write the opposite.
async fn control_plane(client: &Client, namespace: &str) -> Result<()> {
    const INITIALIZED: &str = "ControlPlaneInitialized";
    let clusters = api(client, namespace, CORE, "v1beta2", "Cluster", "clusters");
    for cluster in clusters.list(&Default::default()).await? {
        let conditions = cluster.data.pointer("/status/conditions").and_then(Value::as_array);
        let mut conditions = conditions.cloned().unwrap_or_default();
        let is_told = |c: &Value| c["type"] == INITIALIZED && c["status"] == "True";
        if cluster.metadata.deletion_timestamp.is_some() || conditions.iter().any(is_told) {
            continue;
        }
        conditions.retain(|condition| condition["type"] != INITIALIZED);
        conditions.push(
            json!({"type": INITIALIZED, "status": "True", "reason": "Initialized", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}),
        );
        let status = json!({"status": {"initialization": {"controlPlaneInitialized": true}, "conditions": conditions}});
        let patch = Patch::Merge(status);
        clusters
            .patch_status(&cluster.name_any(), &PatchParams::default(), &patch)
            .await?;
    }
    Ok(())
}

/// Every machine that has a provider ID gets a Node, which kwok keeps ready.
async fn kubelets(client: &Client, namespace: &str) -> Result<()> {
    let machines = api(client, namespace, CORE, "v1beta2", "Machine", "machines");
    let nodes = api(client, "", "", "v1", "Node", "nodes");
    for machine in machines.list(&Default::default()).await? {
        // The simulated Azure lets its machines join by itself.
        let id = machine.data["spec"]["providerID"].as_str();
        let Some(id) = id.filter(|id| !id.starts_with("azure:")) else {
            continue;
        };
        let name = machine.name_any();
        if machine.metadata.deletion_timestamp.is_none() && nodes.get_opt(&name).await?.is_none() {
            let node =
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"providerID": id}});
            nodes
                .create(&PostParams::default(), &serde_json::from_value(node)?)
                .await?;
        }
    }
    Ok(())
}

/// Every claim gets an address of its pool, as Cluster API's in-cluster provider answers.
async fn addresses(client: &Client, namespace: &str) -> Result<()> {
    const GROUP: &str = "ipam.cluster.x-k8s.io";
    let claims = api(client, namespace, GROUP, "v1beta2", "IPAddressClaim", "ipaddressclaims");
    let addresses = api(client, namespace, GROUP, "v1beta2", "IPAddress", "ipaddresses");
    for claim in claims.list(&Default::default()).await? {
        let name = claim.name_any();
        if claim.metadata.deletion_timestamp.is_some() || claim.data.pointer("/status/addressRef/name").is_some() {
            continue;
        }
        let owner = json!({"apiVersion": format!("{GROUP}/v1beta2"), "kind": "IPAddressClaim", "name": name,
            "uid": claim.uid().context("a claim without a uid")?, "controller": true, "blockOwnerDeletion": true});
        let address = json!({
            "apiVersion": format!("{GROUP}/v1beta2"), "kind": "IPAddress", "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {"claimRef": {"name": name}, "poolRef": claim.data["spec"]["poolRef"],
                "address": address_of(&name), "prefix": 16, "gateway": "10.77.0.1"},
        });
        if addresses.get_opt(&name).await?.is_none() {
            let made = serde_json::from_value(address)?;
            addresses.create(&PostParams::default(), &made).await?;
        }
        let patch = Patch::Merge(json!({"status": {"addressRef": {"name": name}}}));
        claims.patch_status(&name, &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

/// Every resource that CAPZ asks Azure Service Operator for is there already.
async fn service_operator(client: &Client, namespace: &str) -> Result<()> {
    for (group, version, kind, plural) in CAPZ.foreign {
        let api = api(client, namespace, group, version, kind, plural);
        for object in api.list(&Default::default()).await? {
            let generation = object.metadata.generation.unwrap_or_default();
            if object.data.pointer("/status/conditions/0/observedGeneration") == Some(&json!(generation)) {
                continue;
            }
            let ready = json!({"type": "Ready", "status": "True", "reason": "Succeeded", "message": "",
                "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let patch = Patch::Merge(json!({"status": {"conditions": [ready]}}));
            api.patch_status(&object.name_any(), &PatchParams::default(), &patch)
                .await?;
        }
    }
    Ok(())
}

/// Returns an address that belongs to a name: two machines of a test hardly ever share one, and nobody minds if they do.
fn address_of(name: &str) -> String {
    let hash = name
        .bytes()
        .fold(7u16, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    format!("10.77.{}.{}", hash >> 8, hash & 0xff)
}
