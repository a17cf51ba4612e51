//! The conversion webhook on a real API server.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use capstan_api::vsphere::v1beta2::serve_v1beta2;
use capstan_kube::{Context, Options};
use capstan_openshift::webhook;
use capstan_testkit::ControlPlane;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support;

/// The definition has a group of its own, so that tests beside this one keep theirs.
const GROUP: &str = "infrastructure.conversion.example.com";

fn definition() -> Result<CustomResourceDefinition> {
    let all = serve_v1beta2(capstan_api::crds(), "capstan-system", "capstan-webhook");
    let mut all = all.into_iter();
    let mut crd = all
        .find(|crd| crd.spec.names.kind == "VSphereMachine")
        .context("no definition of VSphereMachine")?;
    crd.spec.group = GROUP.to_owned();
    crd.metadata.name = Some(format!("vspheremachines.{GROUP}"));
    Ok(crd)
}

fn machines(client: &kube::Client, namespace: &str, version: &str) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: GROUP.to_owned(),
        version: version.to_owned(),
        api_version: format!("{GROUP}/{version}"),
        kind: "VSphereMachine".to_owned(),
        plural: "vspheremachines".to_owned(),
    };
    Api::namespaced_with(client.clone(), namespace, &resource)
}

/// Creates a machine once the API server serves the kind and has heard of the webhook.
async fn create(api: &Api<DynamicObject>, machine: &Value) -> Result<DynamicObject> {
    let machine: DynamicObject = serde_json::from_value(machine.clone())?;
    let began = std::time::Instant::now();
    loop {
        match api.create(&PostParams::default(), &machine).await {
            Ok(created) => return Ok(created),
            Err(error) if began.elapsed() > support::PATIENCE => bail!("never created: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_v1beta2_is_stored_as_v1beta1_and_read_in_both() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let (client, namespace) = (plane.client().await?, plane.namespace("conversion").await?);
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let crd = definition()?;
    crds.create(&PostParams::default(), &crd).await?;
    let stop = CancellationToken::new();
    let options = Options {
        shutdown: stop.clone(),
        ..Options::default()
    };
    let context = Context::new(plane.config().await?, options)?;
    let converting = tokio::spawn(webhook::run(
        context,
        webhook::Options {
            admission: false,
            conversion: true,
            ..webhook::Options::default()
        },
    ));
    let result = both_versions(&client, &namespace).await;
    // Without its webhook the definition would keep other tests from cleaning up.
    let name = crd.metadata.name.unwrap_or_default();
    let _ = machines(&client, &namespace, "v1beta1")
        .delete("m", &DeleteParams::default())
        .await;
    crds.delete(&name, &DeleteParams::default()).await?;
    stop.cancel();
    converting.await??;
    result
}

async fn both_versions(client: &kube::Client, namespace: &str) -> Result<()> {
    let (old, new) = (
        machines(client, namespace, "v1beta1"),
        machines(client, namespace, "v1beta2"),
    );
    let spec = json!({
        "template": "t", "network": {"devices": [{"networkName": "n", "dhcp4": true}]}, "powerOffMode": "trySoft",
        "guestSoftPowerOffTimeoutSeconds": 300, "naming": {"template": "{{ .machine.name }}-x"},
        "dataDisks": [{"name": "d", "sizeGiB": 1}],
    });
    let machine = json!({
        "apiVersion": format!("{GROUP}/v1beta2"), "kind": "VSphereMachine", "metadata": {"name": "m"}, "spec": spec,
    });
    create(&new, &machine).await?;
    let stored = old.get("m").await?;
    assert_eq!(stored.data["spec"]["guestSoftPowerOffTimeout"], "5m0s");
    assert_eq!(
        stored.data["spec"]["namingStrategy"]["template"],
        "{{ .machine.name }}-x"
    );
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
    Ok(())
}
