//! Workload clusters: found by their kubeconfig secret, replaced with it, and never mistaken when they do not answer.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use capstan_kube::workload::{Lookup, NodeEvent, Workloads};
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

struct World {
    plane: ControlPlane,
    client: kube::Client,
    namespace: String,
    context: Context,
    workloads: Workloads,
}

impl Drop for World {
    fn drop(&mut self) {
        self.context.shutdown.cancel();
    }
}

impl World {
    async fn new() -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        let namespace = plane.namespace("workload").await?;
        let context = Context::new(plane.config().await?, Options::default())?;
        let workloads = Workloads::new(&context);
        Ok(Self {
            client: plane.client().await?,
            plane,
            namespace,
            context,
            workloads,
        })
    }

    async fn secret(&self, kubeconfig: &str) -> Result<()> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
            "metadata": {"name": "demo-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "demo"}},
            "stringData": {"value": kubeconfig},
        });
        api.patch("demo-kubeconfig", &PatchParams::apply("test"), &Patch::Apply(secret))
            .await?;
        Ok(())
    }

    fn kubeconfig(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.plane.kubeconfig())?)
    }

    async fn node(&self, provider_id: &str) -> Result<Node> {
        let name = format!("{}-node", self.namespace);
        let node = serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"providerID": provider_id}}))?;
        Ok(Api::<Node>::all(self.client.clone())
            .create(&PostParams::default(), &node)
            .await?)
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(Duration::from_secs(120), future)
        .await
        .with_context(|| format!("waited in vain: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_found_by_provider_id_whatever_its_case_and_its_changes_are_told() -> Result<()> {
    let world = World::new().await?;
    world.secret(&world.kubeconfig()?).await?;
    let cluster = world.workloads.cluster(&world.namespace, "demo");
    let id = format!("azure:///subscriptions/S/resourceGroups/{}/x", world.namespace);
    assert!(matches!(cluster.by_provider_id(&id).await, Lookup::Missing));
    let mut events = Box::pin(world.workloads.events());
    let node = world.node(&id.to_uppercase()).await?;
    let is_told = |event: &NodeEvent, end: bool| {
        matches!(event, NodeEvent::Node { cluster, node: changed, gone }
            if cluster.name == "demo" && changed.name_any() == node.name_any() && *gone == end)
    };
    let told = async { while events.next().await.is_some_and(|event| !is_told(&event, false)) {} };
    within("the new node is told", told).await?;
    let Lookup::Found(found) = cluster.by_provider_id(&id).await else {
        bail!("not found")
    };
    assert_eq!(found.name_any(), node.name_any());
    assert!(matches!(cluster.by_name(&node.name_any()).await, Lookup::Found(_)));
    Api::<Node>::all(world.client.clone())
        .delete(&node.name_any(), &DeleteParams::default())
        .await?;
    let gone = async { while events.next().await.is_some_and(|event| !is_told(&event, true)) {} };
    within("the node's end is told", gone).await?;
    assert!(matches!(cluster.by_provider_id(&id).await, Lookup::Missing));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_does_not_answer_is_unreachable_until_its_secret_is_mended() -> Result<()> {
    let world = World::new().await?;
    let cluster = world.workloads.cluster(&world.namespace, "demo");
    let Lookup::Unreachable(reason) = cluster.by_name("any").await else {
        bail!("there is no secret")
    };
    assert!(reason.contains("demo-kubeconfig does not exist"), "{reason}");
    let good = world.kubeconfig()?;
    let server = good
        .lines()
        .find(|line| line.trim_start().starts_with("server:"))
        .context("no server")?;
    let mut events = Box::pin(world.workloads.events());
    world
        .secret(&good.replace(server, "    server: https://127.0.0.1:1"))
        .await?;
    let told = async {
        loop {
            events.next().await;
            match cluster.by_name("any").await {
                Lookup::Unreachable(reason) if reason.contains("refuses the connection") => return Ok(()),
                // What was told may be of the time before.
                Lookup::Unreachable(_) => {}
                _ => bail!("nobody answers there"),
            }
        }
    };
    within("the connection is told", told).await??;
    world.secret(&good).await?;
    let mended = async {
        while !matches!(cluster.by_name("any").await, Lookup::Missing) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    within("the mended secret is used", mended).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_in_a_kubeconfig_is_never_run_and_the_field_is_named() -> Result<()> {
    let world = World::new().await?;
    let marker = std::env::temp_dir().join(format!("capstan-{}", world.namespace));
    let good = world.kubeconfig()?;
    let users = good.find("users:").context("no users")?;
    let exec = format!(
        "users:\n- name: capstan\n  user:\n    exec: {{apiVersion: client.authentication.k8s.io/v1, command: touch, \
         args: [{}]}}\n",
        marker.display()
    );
    world.secret(&format!("{}{exec}", &good[..users])).await?;
    let cluster = world.workloads.cluster(&world.namespace, "demo");
    let Lookup::Unreachable(reason) = cluster.by_name("any").await else {
        bail!("it must be refused")
    };
    assert!(reason.contains("users[].user.exec is not allowed"), "{reason}");
    assert!(!marker.exists(), "the command was run");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_token_is_explained_without_the_answer_of_the_server() -> Result<()> {
    let world = World::new().await?;
    let good = world.kubeconfig()?;
    let users = good.find("users:").context("no users")?;
    let token = "users:\n- name: capstan\n  user:\n    token: very-secret\n";
    world.secret(&format!("{}{token}", &good[..users])).await?;
    let cluster = world.workloads.cluster(&world.namespace, "demo");
    let Lookup::Unreachable(reason) = cluster.by_name("any").await else {
        bail!("the token is wrong")
    };
    let expected = format!(
        "cluster {0}/demo is unreachable: the API server rejects the credentials (401): renew the kubeconfig in Secret \
         {0}/demo-kubeconfig",
        world.namespace
    );
    assert_eq!(reason, expected);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_that_cannot_be_read_is_said_without_its_content() -> Result<()> {
    let world = World::new().await?;
    world.secret("token: [very-secret").await?;
    let cluster = world.workloads.cluster(&world.namespace, "demo");
    let Lookup::Unreachable(reason) = cluster.by_name("any").await else {
        bail!("it cannot be read")
    };
    assert!(
        reason.contains("kubeconfig") && !reason.contains("very-secret"),
        "{reason}"
    );
    Ok(())
}
