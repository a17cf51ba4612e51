//! Both versions on a real API server: the conversion webhook, and the migration of objects that were stored as v1beta1.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use capstan_api::vsphere::v1beta2::CONVERTED_LABEL;
use capstan_kube::{Context, Options, webhook};
use capstan_testkit::ControlPlane;
use capstan_vsphere_machines::migration;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::world::PATIENCE;

/// The definition has a group and a label of its own, so that tests beside this one keep theirs.
const GROUP: &str = "infrastructure.conversion.example.com";
const LABEL: &str = "conversion-test";

fn definition() -> Result<CustomResourceDefinition> {
    let mut crd = capstan_api::crds()
        .into_iter()
        .find(|crd| crd.spec.names.kind == "VSphereMachine")
        .context("no definition of VSphereMachine")?;
    crd.spec.group = GROUP.to_owned();
    let names = &mut crd.spec.names;
    (names.short_names, names.categories) = (None, None);
    names.plural = "convertedmachines".to_owned();
    names.singular = Some("convertedmachine".to_owned());
    crd.metadata.name = Some(format!("convertedmachines.{GROUP}"));
    crd.metadata.labels = Some([(CONVERTED_LABEL.to_owned(), LABEL.to_owned())].into());
    Ok(crd)
}

/// The definition with one version alone.
fn only(version: &str) -> Result<CustomResourceDefinition> {
    let mut crd = definition()?;
    crd.spec.conversion = None;
    crd.spec.versions.retain(|found| found.name == version);
    crd.spec.versions.iter_mut().for_each(|version| version.storage = true);
    Ok(crd)
}

struct Machines {
    client: kube::Client,
    namespace: String,
}

impl Machines {
    fn of(&self, version: &str) -> Api<DynamicObject> {
        let resource = ApiResource {
            group: GROUP.to_owned(),
            version: version.to_owned(),
            api_version: format!("{GROUP}/{version}"),
            kind: "VSphereMachine".to_owned(),
            plural: "convertedmachines".to_owned(),
        };
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }

    fn definitions(&self) -> Api<CustomResourceDefinition> {
        Api::all(self.client.clone())
    }

    /// Creates a machine once the API server serves the kind and has heard of the webhook.
    async fn create(&self, version: &str, name: &str, spec: &Value) -> Result<()> {
        let machine: DynamicObject = serde_json::from_value(json!({
            "apiVersion": format!("{GROUP}/{version}"), "kind": "VSphereMachine", "metadata": {"name": name}, "spec": spec,
        }))?;
        let began = Instant::now();
        while let Err(error) = self.of(version).create(&PostParams::default(), &machine).await {
            if began.elapsed() > PATIENCE {
                bail!("never created: {error}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    /// Waits until the API server reads the spec of a machine so.
    async fn reads(&self, version: &str, name: &str, spec: &Value) -> Result<()> {
        let began = Instant::now();
        loop {
            let read = self.of(version).get(name).await;
            match read {
                Ok(read) if read.data["spec"] == *spec => return Ok(()),
                other if began.elapsed() > PATIENCE => bail!("{name} in {version}: {other:?}"),
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Replaces the spec and the labels of the definition.
    async fn define(&self, crd: &CustomResourceDefinition) -> Result<()> {
        let api = self.definitions();
        let name = crd.name_any();
        let mut found = api.get(&name).await?;
        found.spec = crd.spec.clone();
        found.metadata.labels.clone_from(&crd.metadata.labels);
        api.replace(&name, &PostParams::default(), &found).await?;
        Ok(())
    }

    async fn stored_versions(&self) -> Result<Vec<String>> {
        let found = self.definitions().get(&definition()?.name_any()).await?;
        Ok(found
            .status
            .and_then(|status| status.stored_versions)
            .unwrap_or_default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_stored_as_v1beta1_are_served_in_both_versions_and_rewritten_once() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let machines = Machines {
        client: plane.client().await?,
        namespace: plane.namespace("conversion").await?,
    };
    machines
        .definitions()
        .create(&PostParams::default(), &only("v1beta1")?)
        .await?;
    let old = json!({
        "template": "t", "network": {"devices": []}, "powerOffMode": "trySoft", "guestSoftPowerOffTimeout": "1m0s",
        "failureDomain": "zone-a",
    });
    machines.create("v1beta1", "old", &old).await?;

    machines.define(&definition()?).await?;
    let injector = tokio::spawn(inject_ca(machines.definitions(), plane.kubeconfig().to_owned()));
    let (stop, name) = (CancellationToken::new(), definition()?.name_any());
    let options = Options {
        shutdown: stop.clone(),
        ..Options::default()
    };
    let context = Context::new(plane.config().await?, options)?;
    let hooks: Vec<Arc<dyn webhook::Hook>> = vec![Arc::new(webhook::Conversion::labeled(LABEL))];
    let options = webhook::Options {
        check_interval: Duration::from_secs(1),
        ..webhook::Options::default()
    };
    let converting = tokio::spawn(webhook::run(context, options, hooks));
    // The order is taken off and Capstan's CA written in one patch; then nobody writes another.
    let is_released = |crd: Option<&CustomResourceDefinition>| {
        crd.is_some_and(|crd| {
            crd.annotations()
                .get("capstan.dev/inject-ca-from")
                .is_some_and(|order| order == "capv/cert")
        })
    };
    let released = kube::runtime::wait::await_condition(machines.definitions(), &name, is_released);
    let released = tokio::time::timeout(PATIENCE, released).await;
    let result = match released {
        Ok(_) => both_versions(&machines, &old).await,
        Err(_) => Err(anyhow::anyhow!("cert-manager still writes the CA")),
    };
    injector.abort();
    // The definition does not need the webhook any more, which would keep other tests from cleaning up.
    let alone = machines.define(&only("v1beta2")?).await;
    stop.cancel();
    converting.await??;
    result?;
    alone?;
    let new = json!({
        "template": "t", "network": {"devices": []}, "powerOffMode": "trySoft", "guestSoftPowerOffTimeoutSeconds": 60,
    });
    machines.reads("v1beta2", "old", &new).await?;
    machines.definitions().delete(&name, &DeleteParams::default()).await?;
    Ok(())
}

/// Plays the CA injector of cert-manager: a definition that a predecessor installed gets the CA of the predecessor's webhook, for
/// as long as its annotation asks for that.
async fn inject_ca(definitions: Api<CustomResourceDefinition>, kubeconfig: std::path::PathBuf) -> Result<()> {
    const ASKED: &str = "cert-manager.io/inject-ca-from";
    let name = definition()?.name_any();
    let asked = Patch::Merge(json!({"metadata": {"annotations": {ASKED: "capv/cert"}}}));
    definitions.patch(&name, &PatchParams::default(), &asked).await?;
    let kubeconfig = std::fs::read_to_string(kubeconfig)?;
    let other = kubeconfig
        .lines()
        .find_map(|line| line.trim().strip_prefix("certificate-authority-data: "));
    loop {
        let found = definitions.get(&name).await?;
        if found.annotations().contains_key(ASKED) {
            let webhook = json!({"clientConfig": {"caBundle": other}});
            let write = json!({
                "metadata": {"resourceVersion": found.resource_version()}, "spec": {"conversion": {"webhook": webhook}},
            });
            // A definition that somebody has changed meanwhile is read again.
            let _ = definitions
                .patch(&name, &PatchParams::default(), &Patch::Merge(write))
                .await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn both_versions(machines: &Machines, old_spec: &Value) -> Result<()> {
    let (old, new) = (machines.of("v1beta1"), machines.of("v1beta2"));
    let spec = json!({
        "template": "t", "network": {"devices": [{"networkName": "n", "dhcp4": true}]}, "powerOffMode": "trySoft",
        "guestSoftPowerOffTimeoutSeconds": 300, "naming": {"template": "{{ .machine.name }}-x"},
        "dataDisks": [{"name": "d", "sizeGiB": 1}],
    });
    machines.create("v1beta2", "m", &spec).await?;
    machines.reads("v1beta2", "m", &spec).await?;
    // Nothing was converted so far: the API server may not have heard of the webhook yet.
    let mut converted = spec.clone();
    let fields = converted.as_object_mut().context("no fields")?;
    fields.remove("guestSoftPowerOffTimeoutSeconds");
    let naming = fields.remove("naming").context("no naming")?;
    fields.insert("namingStrategy".to_owned(), naming);
    fields.insert("guestSoftPowerOffTimeout".to_owned(), json!("5m0s"));
    machines.reads("v1beta1", "m", &converted).await?;
    let ready = json!({"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let new_ready = json!({
        "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "Ready", "message": "",
    });
    let status = json!({"ready": true, "conditions": [ready], "v1beta2": {"conditions": [new_ready]}});
    let patch = Patch::Merge(json!({"status": status}));
    old.patch_status("m", &PatchParams::default(), &patch).await?;
    let read = new.get("m").await?;
    assert_eq!(read.data["spec"], spec);
    assert_eq!(read.data["status"]["initialization"]["provisioned"], true);
    assert_eq!(read.data["status"]["conditions"], json!([new_ready]));
    assert_eq!(
        read.data["status"]["deprecated"]["v1beta1"]["conditions"],
        json!([ready])
    );
    let renamed = Patch::Merge(json!({"spec": {"naming": {"template": "other"}}}));
    let refused = new.patch("m", &PatchParams::default(), &renamed).await;
    let refused = refused.err().context("the name template was changed")?.to_string();
    assert!(refused.contains("cannot be modified"), "{refused}");

    machines.reads("v1beta1", "old", old_spec).await?;
    assert_eq!(machines.stored_versions().await?, ["v1beta1", "v1beta2"]);
    let before = new.get("old").await?.resource_version();
    migration::migrate_labeled(&machines.client, LABEL).await?;
    assert_eq!(machines.stored_versions().await?, ["v1beta2"]);
    let after = new.get("old").await?.resource_version();
    assert_ne!(before, after, "the object is stored anew");
    migration::migrate_labeled(&machines.client, LABEL).await?;
    assert_eq!(new.get("old").await?.resource_version(), after, "once is enough");
    machines.reads("v1beta1", "old", old_spec).await
}
