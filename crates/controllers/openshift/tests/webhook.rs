//! Admission on a real API server, asked with kubectl.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use capstan_api::openshift::Machine;
use capstan_kube::{Context, Options};
use capstan_openshift::webhook;
use capstan_testkit::ControlPlane;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

struct World {
    plane: ControlPlane,
    namespace: String,
    name: String,
    client: kube::Client,
    context: Context,
    dir: std::path::PathBuf,
}

impl World {
    async fn new() -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        plane.install_crds().await?;
        let namespace = plane.namespace("webhook").await?;
        let client = plane.client().await?;
        let options = Options {
            namespace: Some(namespace.clone()),
            ..Options::default()
        };
        let context = Context::new(plane.config().await?, options)?;
        let name = format!("capstan-machine-api-{namespace}");
        let dir = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&dir)?;
        let world = Self {
            plane,
            namespace,
            name,
            client,
            context,
            dir,
        };
        world.serve(&world.context);
        world.registered().await?;
        Ok(world)
    }

    fn serve(&self, context: &Context) {
        let options = webhook::Options {
            secret_namespace: Some(self.namespace.clone()),
            cluster_id: "demo".into(),
            ..webhook::Options::default()
        };
        tokio::spawn(webhook::run(context.clone(), options));
    }

    /// The API server takes a moment to notice a new configuration: a bad machine is refused once it has.
    async fn registered(&self) -> Result<()> {
        for _ in 0..200 {
            if self.apply(&machine("probe", json!({"vmSize": 1}))).await.is_err() {
                return Ok(());
            }
            self.plane
                .kubectl(&[
                    "-n",
                    &self.namespace,
                    "delete",
                    "machines.machine.openshift.io",
                    "probe",
                ])
                .await?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("the webhook was never asked")
    }

    /// The API server keeps connections for a moment: the object is accepted once they are gone.
    async fn accepted(&self, object: &Value) -> Result<()> {
        for _ in 0..50 {
            if self.apply(object).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("refused although nobody serves the webhook")
    }

    async fn apply(&self, object: &Value) -> Result<String> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let file = self.dir.join(format!("{name}.json"));
        std::fs::write(&file, object.to_string())?;
        self.plane
            .kubectl(&["-n", &self.namespace, "apply", "-f", &file.display().to_string()])
            .await
    }

    fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn end(self) -> Result<()> {
        self.context.shutdown.cancel();
        let params = DeleteParams::default();
        Api::<MutatingWebhookConfiguration>::all(self.client.clone())
            .delete(&self.name, &params)
            .await?;
        Api::<ValidatingWebhookConfiguration>::all(self.client.clone())
            .delete(&self.name, &params)
            .await?;
        std::fs::remove_dir_all(&self.dir)?;
        Ok(())
    }
}

fn machine(name: &str, value: Value) -> Value {
    json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name},
        "spec": {"providerSpec": {"value": value}},
    })
}

fn good() -> Value {
    json!({
        "kind": "AzureMachineProviderSpec", "location": "westeurope", "managedIdentity": "id",
        "image": {"resourceID": "/images/rhcos"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        "dataDisks": [{"nameSuffix": "etcd", "diskSizeGB": 8, "lun": 0, "deletionPolicy": "Delete",
            "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_is_told_all_errors_at_once_and_good_machines_get_their_defaults() -> Result<()> {
    let world = World::new().await?;
    let mut value = good();
    value["dataDisks"][0]["diskSizeGB"] = json!(1);
    value["dataDisks"][0]["lun"] = json!(64);
    value["dataDisks"][0]["cachingType"] = json!("ReadOnly");
    let refused = world
        .apply(&machine("bad", value))
        .await
        .err()
        .context("a bad machine was accepted")?
        .to_string();
    for part in [
        "admission webhook \"validation.machine.machine.openshift.io\" denied the request",
        "providerSpec.dataDisks[0].diskSizeGB: Invalid value: 1: diskSizeGB must be provided and at least 4GB in size",
        "providerSpec.dataDisks[0].lun: Invalid value: 64: must be greater than or equal to 0 and less than 64",
        "must be \"None\" or omitted when storageAccountType is \"UltraSSD_LRS\"",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    world.apply(&machine("good", good())).await?;
    let made = world.machines().get("good").await?;
    let value = made.spec.provider_spec.value.clone().unwrap_or_default();
    assert_eq!(made.labels()["machine.openshift.io/cluster-api-cluster"], "demo");
    assert_eq!(
        (&value["vmSize"], &value["vnet"]),
        (&json!("Standard_D4s_V3"), &json!("demo-vnet"))
    );
    assert_eq!(value["credentialsSecret"]["namespace"], "openshift-machine-api");
    let again = world.apply(&machine("good", good())).await?;
    assert!(again.contains("unchanged") || again.contains("configured"), "{again}");
    world.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_checked_by_the_names_its_machines_will_have() -> Result<()> {
    let world = World::new().await?;
    let set = |suffix: String| {
        let mut value = good();
        value["dataDisks"][0]["nameSuffix"] = json!(suffix);
        json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": "workers"},
            "spec": {
                "replicas": 0, "selector": {"matchLabels": {"a": "b"}},
                "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"providerSpec": {"value": value}}},
            },
        })
    };
    let refused = world
        .apply(&set("x".repeat(67)))
        .await
        .err()
        .context("too long a name was accepted")?
        .to_string();
    assert!(
        refused.contains("too long, the overall disk name must not exceed 80 chars"),
        "{refused}"
    );
    world.apply(&set("x".repeat(66))).await?;
    world.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_webhook_away_the_api_server_goes_on_and_a_new_copy_uses_the_same_certificate() -> Result<()> {
    let world = World::new().await?;
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), &world.namespace);
    let before = secrets.get("capstan-webhook").await?;
    world.context.shutdown.cancel();
    let bad = machine("bad", json!({"vmSize": 1}));
    world.accepted(&bad).await?;
    let options = Options {
        namespace: Some(world.namespace.clone()),
        ..Options::default()
    };
    let context = Context::new(world.plane.config().await?, options)?;
    world.serve(&context);
    world.registered().await?;
    assert_eq!(secrets.get("capstan-webhook").await?.data, before.data);
    // A bad machine made meanwhile can still be annotated and deleted.
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    world.machines().patch("bad", &PatchParams::default(), &patch).await?;
    world.machines().delete("bad", &DeleteParams::default()).await?;
    context.shutdown.cancel();
    world.end().await
}
