//! Manifests that users have keep working: the API server accepts the cluster templates that cluster-api-provider-azure and
//! cluster-api-provider-vsphere ship for them, and those that the former is tested with, with our definitions, every field known.

use crate::support;

use anyhow::{Context, Result};
use capstan_testkit::{ControlPlane, manifests};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, ValidationDirective},
};
use std::time::Duration;
use support::{say, templates};

/// The group in which the tests of admission define vSphere's kinds in v1beta1 alone, so that no webhook converts them.
const OLD_VSPHERE: &str = "admission.example.com";
const TIMEOUT: Duration = Duration::from_secs(300);

async fn take(client: &Client, namespace: &str, mut object: DynamicObject) -> Result<()> {
    let types = object.types.clone().context("an object without a kind")?;
    let plural = match types.kind.as_str() {
        "AzureClusterIdentity" => "azureclusteridentities".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let (group, version) = types.api_version.split_once('/').context("a group and a version")?;
    let plural = match group {
        OLD_VSPHERE => format!("old{plural}"),
        _ => plural,
    };
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: types.api_version.clone(),
        kind: types.kind.clone(),
        plural,
    };
    object.metadata.namespace = Some(namespace.to_owned());
    let params = PatchParams {
        dry_run: true,
        field_manager: Some("capstan-compatibility".to_owned()),
        field_validation: Some(ValidationDirective::Strict),
        ..Default::default()
    };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
    let name = object.name_any();
    api.patch(&name, &params, &Patch::Apply(&object))
        .await
        .with_context(|| format!("{} {name}", types.kind))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_templates_of_the_replaced_controller_are_taken_as_they_are() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("upstream").await?;
    let client = plane.client().await?;
    let found = tokio::task::spawn_blocking(templates::azure).await?;
    let all = async {
        let mut taken = 0;
        for (name, text) in &found {
            for object in manifests::parse(text).with_context(|| name.clone())? {
                take(&client, &namespace, object).await.with_context(|| name.clone())?;
                taken += 1;
            }
        }
        say(&format!("{taken} objects of {} templates taken", found.len()));
        anyhow::ensure!(found.is_empty() || taken > 100, "only {taken} objects were found");
        anyhow::Ok(())
    };
    tokio::time::timeout(TIMEOUT, all)
        .await
        .context("the templates took too long")?
}

#[tokio::test(flavor = "multi_thread")]
async fn the_templates_of_the_vsphere_provider_are_accepted_as_they_are() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    crate::admission::install(&plane.client().await?).await?;
    let namespace = plane.namespace("upstream-vsphere").await?;
    let client = plane.client().await?;
    let found = tokio::task::spawn_blocking(templates::vsphere).await?;
    let all = async {
        let mut accepted = 0;
        for (name, text) in &found {
            let objects = manifests::parse(text).with_context(|| name.clone())?;
            for mut object in objects {
                let types = object.types.as_mut().context("an object without a kind")?;
                match types.api_version.as_str() {
                    "infrastructure.cluster.x-k8s.io/v1beta2" => {}
                    "infrastructure.cluster.x-k8s.io/v1beta1" => types.api_version = format!("{OLD_VSPHERE}/v1beta1"),
                    _ => continue,
                }
                let done = take(&client, &namespace, object).await;
                done.with_context(|| name.clone())?;
                accepted += 1;
            }
        }
        say(&format!("{accepted} objects of {} templates accepted", found.len()));
        anyhow::ensure!(found.is_empty() || accepted >= 14, "only {accepted} objects were found");
        anyhow::Ok(())
    };
    tokio::time::timeout(TIMEOUT, all)
        .await
        .context("the templates took too long")?
}
