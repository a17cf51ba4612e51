//! The definitions in `deploy/crds` are generated from the types. `UPDATE_CRDS=1 cargo test -p capstan-api` writes them.

use capstan_api::{crds, file_name};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;
use std::{collections::BTreeSet, fs, path::PathBuf};

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds")
}

#[test]
fn the_definitions_in_deploy_are_those_of_the_types() {
    let directory = directory();
    let update = std::env::var_os("UPDATE_CRDS").is_some();
    let mut expected = BTreeSet::new();
    for crd in crds() {
        let path = directory.join(file_name(&crd));
        let text = capstan_api::manifest(&crd).unwrap();
        if update {
            fs::create_dir_all(&directory).unwrap();
            fs::write(&path, &text).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "{} is out of date: run UPDATE_CRDS=1 cargo test -p capstan-api",
            path.display()
        );
        expected.insert(file_name(&crd));
    }
    let found: BTreeSet<_> = fs::read_dir(&directory)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected, "deploy/crds holds a file of no kind");
}

#[test]
fn clusterctl_moves_the_kinds_of_azure() {
    let azure = |crd: &CustomResourceDefinition| crd.metadata.name.as_deref().unwrap_or_default().starts_with("azure");
    let all: Vec<_> = crds().into_iter().filter(azure).collect();
    assert!(all.len() >= 4);
    for crd in all {
        let labels = crd.metadata.labels.clone().unwrap_or_default();
        assert!(
            labels.contains_key("clusterctl.cluster.x-k8s.io"),
            "{}",
            file_name(&crd)
        );
    }
}

/// Collects what is wrong with the descriptions of a schema and of all schemas below it.
fn bad_descriptions(schema: &Value, path: &str, bad: &mut Vec<String>) {
    const RIDDLES: [&str; 9] = ["What", "How", "Who", "Whose", "Where", "When", "Which", "Why", "Its"];
    if let Some(text) = schema.get("description").and_then(Value::as_str) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let starts_as_riddle = words.first().is_some_and(|first| RIDDLES.contains(first));
        if starts_as_riddle || words.len() < 4 || !text.ends_with('.') {
            bad.push(format!("{path}: {text:?}"));
        }
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        bad_descriptions(property, &format!("{path}.{name}"), bad);
    }
    for below in ["items", "additionalProperties"] {
        if let Some(below) = schema.get(below) {
            bad_descriptions(below, &format!("{path}[]"), bad);
        }
    }
}

#[test]
fn descriptions_are_plain_sentences() {
    let mut bad = Vec::new();
    for crd in crds() {
        for version in &crd.spec.versions {
            let schema = version.schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref());
            let schema = serde_json::to_value(schema).unwrap();
            let path = format!("{}/{}", crd.spec.names.kind, version.name);
            bad_descriptions(&schema, &path, &mut bad);
        }
    }
    assert!(
        bad.is_empty(),
        "{} descriptions do not read as sentences of four words or more:\n{}",
        bad.len(),
        bad.join("\n")
    );
}

#[test]
fn a_manifest_reads_back_as_the_same_definition() {
    for crd in crds() {
        let text = capstan_api::manifest(&crd).unwrap();
        let back: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(back, crd, "{}", file_name(&crd));
    }
}

#[test]
fn every_kind_has_a_schema_with_spec_and_the_contract_of_its_group() {
    for crd in crds() {
        let name = crd.metadata.name.clone().unwrap();
        let version = &crd.spec.versions[0];
        let schema = version
            .schema
            .as_ref()
            .and_then(|s| s.open_api_v3_schema.as_ref())
            .unwrap();
        assert!(
            schema.properties.as_ref().unwrap().contains_key("spec"),
            "{name} lost its schema"
        );
        let contract = crd
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get("cluster.x-k8s.io/v1beta1"));
        assert_eq!(
            contract.is_some(),
            crd.spec.group.ends_with("cluster.x-k8s.io"),
            "{name}"
        );
    }
    assert_eq!(crds().len(), 14);
}

#[test]
fn the_policy_in_deploy_is_the_one_of_the_code() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/controllers/vsphere/template-policy.yaml");
    let (policy, binding) = capstan_api::template_policy();
    let text = [
        capstan_api::manifest(&policy).unwrap(),
        capstan_api::manifest(&binding).unwrap(),
    ]
    .join("---\n");
    if std::env::var_os("UPDATE_CRDS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "{} is out of date: run UPDATE_CRDS=1 cargo test -p capstan-api",
        path.display()
    );
}
