//! Manifests that users have keep working: the cluster templates that cluster-api-provider-azure ships for them, and those
//! that it is tested with, are taken by the API server with our definitions, every field known.

use crate::support;

use anyhow::{Context, Result};
use capstan_testkit::{ControlPlane, manifests};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, ValidationDirective},
};
use std::{fs, time::Duration};
use support::{module, say};

const MODULE: &str = "sigs.k8s.io/cluster-api-provider-azure";
const TIMEOUT: Duration = Duration::from_secs(300);
const KINDS: [&str; 3] = ["AzureMachinePool", "AzureCluster", "AzureClusterIdentity"];
const FOLDERS: [&str; 4] = [
    "templates",
    "templates/test/ci",
    "templates/test/dev",
    "test/e2e/data/infrastructure-azure/v1beta1",
];

/// The objects of our kinds among a template's.
fn ours(template: &str) -> Result<Vec<DynamicObject>> {
    let is_ours = |text: &&str| {
        let kind = text.lines().find_map(|line| line.strip_prefix("kind: "));
        kind.is_some_and(|kind| KINDS.contains(&kind.trim()))
    };
    let texts: Vec<&str> = template.split("\n---\n").filter(is_ours).collect();
    manifests::parse(&filled_in(&texts.join("\n---\n")))
}

/// Fills in `${NAME}`, `${NAME:=default}` and `${NAME:-default}` as clusterctl would, from the last one on: a default may
/// name a variable itself.
fn filled_in(template: &str) -> String {
    let mut text = template.to_owned();
    while let Some(start) = text.rfind("${") {
        let end = start + text[start..].find('}').expect("a closed variable");
        let variable = &text[start + 2..end];
        let name = variable.split([':', '=', '-', '/']).next().unwrap_or_default();
        let default = variable[name.len()..]
            .trim_start_matches([':', '=', '-', '/'])
            .trim_matches('"');
        let value = match (name, default) {
            ("AZURE_EXTENDEDLOCATION_TYPE", _) => "EdgeZone".to_owned(),
            ("AZURE_SUBSCRIPTION_ID", _) => "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b".to_owned(),
            (name, _) if name.starts_with("AZURE_LOCATION") => "eastus".to_owned(),
            (_, "") => name.to_lowercase().replace('_', "-"),
            (_, default) => default.to_owned(),
        };
        text.replace_range(start..=end, &value);
    }
    text
}

async fn take(client: &Client, namespace: &str, mut object: DynamicObject) -> Result<()> {
    let types = object.types.clone().context("an object without a kind")?;
    let plural = match types.kind.as_str() {
        "AzureClusterIdentity" => "azureclusteridentities".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let (group, version) = types.api_version.split_once('/').context("a group and a version")?;
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
    let Some(dir) = module(MODULE) else {
        say(&format!(
            "SKIPPED: the templates of {MODULE} were not tried: neither the module nor Go is there"
        ));
        return Ok(());
    };
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("upstream").await?;
    let client = plane.client().await?;
    let all = async {
        let mut taken = 0;
        for folder in FOLDERS {
            for entry in fs::read_dir(dir.join(folder))? {
                let path = entry?.path();
                if path.extension().is_none_or(|extension| extension != "yaml") {
                    continue;
                }
                for object in ours(&fs::read_to_string(&path)?)? {
                    let done = take(&client, &namespace, object).await;
                    done.with_context(|| path.display().to_string())?;
                    taken += 1;
                }
            }
        }
        say(&format!("{taken} objects of {MODULE}'s templates taken"));
        anyhow::ensure!(taken > 100, "only {taken} objects were found");
        anyhow::Ok(())
    };
    tokio::time::timeout(TIMEOUT, all)
        .await
        .context("the templates took too long")?
}
