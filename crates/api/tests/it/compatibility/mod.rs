//! Manifests and tools for the controllers that Capstan replaces keep working. Every field of theirs is in our
//! definitions, with the same type, and is not required where they do not require it; what limits a value beyond their
//! definitions is what their webhooks or the cloud refuse anyway; kubectl finds the same names, columns and subresources.
//! Their definitions come out of the pinned Go modules of `tools/crds`.

mod definitions;
mod provider_spec;
mod rules;
mod schemas;
use crate::support;

use capstan_api::crds;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use support::{module, say};

const AZURE: &str = "sigs.k8s.io/cluster-api-provider-azure";
const VSPHERE: &str = "sigs.k8s.io/cluster-api-provider-vsphere";
const OPENSHIFT: &str = "github.com/openshift/api";

/// Where each module keeps the definitions, the versions and the kinds that are compared.
const SOURCES: [(&str, &str, &[&str], &[&str]); 3] = [
    (
        AZURE,
        "config/crd/bases",
        &["v1beta1"],
        &[
            "AzureMachinePool",
            "AzureMachinePoolMachine",
            "AzureCluster",
            "AzureClusterIdentity",
        ],
    ),
    (
        VSPHERE,
        "config/default/crd/bases",
        &["v1beta1", "v1beta2"],
        &[
            "VSphereMachine",
            "VSphereMachineTemplate",
            "VSphereVM",
            "VSphereCluster",
            "VSphereClusterTemplate",
            "VSphereClusterIdentity",
            "VSphereFailureDomain",
            "VSphereDeploymentZone",
        ],
    ),
    (
        OPENSHIFT,
        "machine/v1beta1/zz_generated.crd-manifests",
        &["v1beta1"],
        &["Machine", "MachineSet"],
    ),
];

/// What is known in a version of each kind found in a directory; several files of one kind are one definition.
fn upstream(directory: &Path, version: &str) -> BTreeMap<String, Value> {
    let mut kinds: BTreeMap<String, Value> = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let crd: Value = serde_saphyr::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let Some((kind, definition)) = only(version, &crd) else {
            continue;
        };
        match kinds.get_mut(&kind) {
            Some(known) => join(known, definition),
            None => _ = kinds.insert(kind, definition),
        }
    }
    kinds
}

/// A definition without its other versions.
fn only(version: &str, crd: &Value) -> Option<(String, Value)> {
    let spec = &crd["spec"];
    let versions = spec["versions"].as_array()?;
    let version = versions.iter().find(|found| found["name"] == version)?;
    let kind = spec["names"]["kind"].as_str()?.to_owned();
    let definition =
        json!({ "group": spec["group"], "scope": spec["scope"], "names": spec["names"], "version": version });
    Some((kind, definition))
}

/// Feature sets of one kind differ in fields: the comparison is with all of them together.
fn join(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match into.get_mut(&key) {
                    Some(known) => join(known, value),
                    None => _ = into.insert(key, value),
                }
            }
        }
        (Value::Array(into), Value::Array(from)) => into.retain(|word| from.contains(word) || word.is_object()),
        _ => {}
    }
}

fn ours(version: &str) -> BTreeMap<String, Value> {
    let definition = |crd| only(version, &serde_json::to_value(crd).unwrap());
    crds().iter().filter_map(definition).collect()
}

fn schema(definition: &Value) -> &Value {
    &definition["version"]["schema"]["openAPIV3Schema"]
}

/// Runs `compare` on each kind with their definition, ours and the folder of their module, and fails with all that it finds.
fn on_every_kind(what: &str, mut compare: impl FnMut(&str, &Value, &Value, &Path) -> Vec<String>) {
    let mut faults = Vec::new();
    for (path, directory, versions, kinds) in SOURCES {
        let Some(dir) = module(path) else {
            say(&format!(
                "SKIPPED: the {what} of {path} were not compared: neither the module nor Go is there"
            ));
            continue;
        };
        for version in versions {
            let (theirs, ours) = (upstream(&dir.join(directory), version), ours(version));
            for kind in kinds {
                let found = compare(kind, &theirs[*kind], &ours[*kind], &dir);
                faults.extend(found.into_iter().map(|fault| format!("{version}: {fault}")));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "{} differences:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn no_field_of_the_replaced_controllers_is_missing_or_different() {
    let mut total = 0;
    on_every_kind("fields", |kind, theirs, ours, _| {
        let compared = schemas::compare(kind, schema(theirs), schema(ours));
        say(&format!("{kind}: {} fields compared", compared.fields));
        total += compared.fields;
        compared.faults
    });
    say(&format!("{total} fields compared in all"));
}

#[test]
fn kubectl_finds_the_names_columns_and_subresources_that_it_knows() {
    let mut total = 0;
    on_every_kind("names and columns", |kind, theirs, ours, _| {
        let compared = definitions::compare(kind, theirs, ours);
        total += compared.facts;
        compared.faults
    });
    say(&format!("{total} names, columns and subresources compared in all"));
}

#[test]
fn a_rule_refuses_only_what_was_refused_before_or_cannot_be() {
    let mut total = 0;
    let mut refusals: BTreeMap<PathBuf, String> = BTreeMap::new();
    on_every_kind("refusals", |kind, _, ours, module| {
        let spoken = refusals
            .entry(module.to_owned())
            .or_insert_with(|| rules::refusals(module));
        let compared = rules::compare(kind, schema(ours), spoken);
        total += compared.rules;
        compared.faults
    });
    say(&format!("{total} rules accounted for"));
}
