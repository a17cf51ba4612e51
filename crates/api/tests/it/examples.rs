//! The examples are valid: the API server accepts each object of ours unchanged, and knows every field.

use anyhow::{Context, Result};
use capstan_api::{crds, openshift::AzureMachineProviderSpec};
use capstan_testkit::ControlPlane;
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, ValidationDirective},
};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

const TIMEOUT: Duration = Duration::from_secs(300);

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            found.push(path);
        }
    }
}

/// Objects of our kinds, each with the file that it stands in.
fn objects() -> Vec<(PathBuf, DynamicObject)> {
    let kinds: Vec<_> = crds()
        .into_iter()
        .map(|crd| (crd.spec.group, crd.spec.names.kind))
        .collect();
    let mut paths = Vec::new();
    files(&directory(), &mut paths);
    paths.sort();
    let read = paths.into_iter().flat_map(|path| {
        // `capstan up` fills these in.
        let id = "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b";
        let text = fs::read_to_string(&path).unwrap();
        let text = text
            .replace("${AZURE_SUBSCRIPTION_ID}", id)
            .replace("${AZURE_TENANT_ID}", id);
        let objects = capstan_testkit::manifests::parse(&text);
        let objects = objects.unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
        objects.into_iter().map(move |object| (path.clone(), object))
    });
    let ours = |object: &DynamicObject| {
        let types = object.types.clone().unwrap_or_default();
        kinds
            .iter()
            .any(|(group, kind)| types.api_version.starts_with(group.as_str()) && types.kind == *kind)
    };
    read.filter(|(_, object)| ours(object)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_takes_every_example_as_it_stands() -> Result<()> {
    let objects = objects();
    if objects.is_empty() {
        return Ok(());
    }
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("examples").await?;
    let client = plane.client().await?;
    let params = PatchParams {
        dry_run: true,
        field_manager: Some("capstan-examples".to_owned()),
        field_validation: Some(ValidationDirective::Strict),
        ..Default::default()
    };
    let all = async {
        for (path, mut object) in objects {
            let types = object.types.clone().unwrap_or_default();
            let (group, version) = types.api_version.split_once('/').unwrap();
            let crd = crds()
                .into_iter()
                .find(|crd| crd.spec.group == group && crd.spec.names.kind == types.kind);
            let crd = crd.context("a kind of ours")?;
            let resource = ApiResource {
                group: group.to_owned(),
                version: version.to_owned(),
                api_version: types.api_version.clone(),
                kind: types.kind.clone(),
                plural: crd.spec.names.plural.clone(),
            };
            let api: Api<DynamicObject> = match crd.spec.scope.as_str() {
                "Namespaced" => Api::namespaced_with(client.clone(), &namespace, &resource),
                _ => Api::all_with(client.clone(), &resource),
            };
            object.metadata.namespace = (crd.spec.scope == "Namespaced").then(|| namespace.clone());
            let name = object.name_any();
            let taken = api.patch(&name, &params, &Patch::Apply(&object)).await;
            taken.with_context(|| format!("{}: {} {name}", path.display(), types.kind))?;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(TIMEOUT, all)
        .await
        .context("the examples took too long")?
}

/// `providerSpec.value` is raw to the API server, so a slip in it would go unseen above.
#[test]
fn every_machine_of_the_examples_is_spelled_exactly() {
    for (path, object) in objects() {
        let pointers = ["/spec/providerSpec/value", "/spec/template/spec/providerSpec/value"];
        for value in pointers.iter().filter_map(|pointer| object.data.pointer(pointer)) {
            let spec = AzureMachineProviderSpec::from_raw(value).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(
                spec.extra.is_empty(),
                "{}: unknown fields {:?}",
                path.display(),
                spec.extra.keys()
            );
            let written = spec.to_raw();
            assert!(
                within(value, &written),
                "{}: {value} reads as {written}",
                path.display()
            );
        }
    }
}

/// Everything of `part` is in `whole`.
fn within(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => part
            .iter()
            .all(|(key, value)| whole.get(key).is_some_and(|other| within(value, other))),
        (Value::Array(part), Value::Array(whole)) => {
            part.len() == whole.len() && part.iter().zip(whole).all(|(a, b)| within(a, b))
        }
        (part, whole) => part == whole,
    }
}
