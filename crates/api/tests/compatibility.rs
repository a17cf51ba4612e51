//! Every field of the controllers that Capstan replaces is in our definitions, with the same type, and is not
//! required where they do not require it. Their definitions come out of the pinned Go modules of `tools/crds`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod support;

use capstan_api::{crds, openshift::AzureMachineProviderSpec};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, fs, path::Path};
use support::{module, say};

const AZURE: &str = "sigs.k8s.io/cluster-api-provider-azure";
const VSPHERE: &str = "sigs.k8s.io/cluster-api-provider-vsphere";
const OPENSHIFT: &str = "github.com/openshift/api";

/// Where each module keeps the definitions, and the kinds that are compared.
const SOURCES: [(&str, &str, &[&str]); 3] = [
    (
        AZURE,
        "config/crd/bases",
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
        &["Machine", "MachineSet"],
    ),
];

/// The v1beta1 schema of each kind found in a directory; several files of one kind are one schema.
fn upstream(directory: &Path) -> BTreeMap<String, Value> {
    let mut kinds: BTreeMap<String, Value> = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let crd: Value = serde_saphyr::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let versions = crd["spec"]["versions"].as_array().unwrap();
        let Some(version) = versions.iter().find(|version| version["name"] == "v1beta1") else {
            continue;
        };
        let schema = version["schema"]["openAPIV3Schema"].clone();
        let kind = crd["spec"]["names"]["kind"].as_str().unwrap().to_owned();
        match kinds.get_mut(&kind) {
            Some(known) => join(known, schema),
            None => _ = kinds.insert(kind, schema),
        }
    }
    kinds
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

fn ours() -> BTreeMap<String, Value> {
    let schema =
        |crd: &k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition| {
            let version = serde_json::to_value(&crd.spec.versions[0]).unwrap();
            version["schema"]["openAPIV3Schema"].clone()
        };
    crds()
        .iter()
        .map(|crd| (crd.spec.names.kind.clone(), schema(crd)))
        .collect()
}

#[derive(Default)]
struct Comparison {
    fields: usize,
    faults: Vec<String>,
}

impl Comparison {
    fn compare(&mut self, path: &str, theirs: &Value, ours: &Value) {
        self.types(path, theirs, ours);
        self.limits(path, theirs, ours);
        self.requirements(path, theirs, ours);
        let none = Map::new();
        let known = ours["properties"].as_object().unwrap_or(&none);
        for (name, theirs) in theirs["properties"].as_object().unwrap_or(&none) {
            let path = format!("{path}.{name}");
            self.fields += 1;
            match known.get(name) {
                Some(ours) => self.compare(&path, theirs, ours),
                None if is_open(ours) => {}
                None => self.faults.push(format!("{path} is missing")),
            }
        }
        for (key, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
            if let (Some(theirs), Some(ours)) = (theirs.get(key), ours.get(key)) {
                self.compare(&format!("{path}{suffix}"), theirs, ours);
            }
        }
    }

    fn types(&mut self, path: &str, theirs: &Value, ours: &Value) {
        let facts = [
            "type",
            "x-kubernetes-int-or-string",
            "x-kubernetes-preserve-unknown-fields",
            "nullable",
        ];
        for fact in facts {
            if theirs.get(fact).is_some() && theirs.get(fact) != ours.get(fact) {
                let shown = |schema: &Value| schema.get(fact).unwrap_or(&Value::Null).to_string();
                self.faults.push(format!(
                    "{path} has {fact} {} instead of {}",
                    shown(ours),
                    shown(theirs)
                ));
            }
        }
        for key in ["items", "additionalProperties"] {
            if theirs.get(key).is_some_and(Value::is_object) != ours.get(key).is_some_and(Value::is_object) {
                self.faults.push(format!("{path} differs in having {key}"));
            }
        }
        if let Some(words) = ours["enum"].as_array() {
            let all = theirs["enum"]
                .as_array()
                .is_some_and(|theirs| theirs.iter().all(|word| words.contains(word)));
            if !all {
                self.faults.push(format!("{path} takes only {words:?}"));
            }
        }
    }

    /// A default changes what is stored, a limit what is taken: each of ours is theirs, or is owned up to.
    fn limits(&mut self, path: &str, theirs: &Value, ours: &Value) {
        const LIMITS: [&str; 9] = [
            "default",
            "minimum",
            "maximum",
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "maxProperties",
            "pattern",
        ];
        for limit in LIMITS {
            let (their, our) = (theirs.get(limit), ours.get(limit));
            // The same number may be written with or without a fraction.
            let same = our == their || (our.is_some() && our.and_then(Value::as_f64) == their.and_then(Value::as_f64));
            let same = same && our.is_some() == their.is_some();
            let stricter = our.is_some() && !same;
            let lost = limit == "default" && their.is_some() && !same;
            if (stricter || lost)
                && !STRICTER
                    .iter()
                    .any(|(suffix, known)| path.ends_with(suffix) && *known == limit)
            {
                self.faults
                    .push(format!("{path} has {limit} {our:?} instead of {their:?}"));
            }
        }
    }

    fn requirements(&mut self, path: &str, theirs: &Value, ours: &Value) {
        let list = |schema: &Value| schema["required"].as_array().cloned().unwrap_or_default();
        let theirs = list(theirs);
        for name in list(ours) {
            // A field of our own may be required within something that they do not have.
            if !theirs.contains(&name) {
                self.faults
                    .push(format!("{path}.{} is required", name.as_str().unwrap_or_default()));
            }
        }
    }
}

/// Anything goes below.
fn is_open(schema: &Value) -> bool {
    schema["x-kubernetes-preserve-unknown-fields"] == true
}

/// Limits of ours that their definitions do not have: what their webhooks, Azure or vSphere refuse.
/// Unchecked by them, a value beyond would only fail later; a length or count is there so that rules have a bounded
/// cost, and is far beyond what is possible.
const STRICTER: [(&str, &str); 25] = [
    // Azure: at most 64 LUNs, sizes of managed disks, names of resources.
    (".template.dataDisks", "maxItems"),
    (".template.dataDisks[].diskSizeGB", "minimum"),
    (".template.dataDisks[].diskSizeGB", "maximum"),
    (".template.dataDisks[].lun", "minimum"),
    (".template.dataDisks[].lun", "maximum"),
    (".template.dataDisks[].nameSuffix", "minLength"),
    (".template.dataDisks[].nameSuffix", "maxLength"),
    (".managedDisk.storageAccountType", "maxLength"),
    // Their webhook.
    (".template.osDisk.diskSizeGB", "minimum"),
    (".template.osDisk.diskSizeGB", "maximum"),
    (".template.terminateNotificationTimeout", "minimum"),
    (".template.terminateNotificationTimeout", "maximum"),
    // vSphere: at most 10 network cards, no empty disk; more disks than they allow, since controllers take more.
    (".dataDisks", "maxItems"),
    (".dataDisks[].name", "maxLength"),
    (".dataDisks[].sizeGiB", "minimum"),
    (".network.devices", "maxItems"),
    (".network.devices[].ipAddrs", "maxItems"),
    (".network.devices[].ipAddrs[]", "maxLength"),
    // Go cannot read anything else.
    (".guestSoftPowerOffTimeout", "pattern"),
    // Their webhook's default.
    ("VSphereDeploymentZone.spec.controlPlane", "default"),
    // A default of theirs behind a feature gate of OpenShift.
    ("Machine.spec.authoritativeAPI", "default"),
    ("MachineSet.spec.authoritativeAPI", "default"),
    (".template.spec.authoritativeAPI", "default"),
    // Kubernetes' own length of a label.
    ("MachineSet.spec.selector.matchLabels", "maxProperties"),
    ("MachineSet.spec.selector.matchLabels{}", "maxLength"),
];

#[test]
fn no_field_of_the_replaced_controllers_is_missing_or_different() {
    let ours = ours();
    let mut faults = Vec::new();
    let mut total = 0;
    for (path, directory, kinds) in SOURCES {
        let Some(dir) = module(path) else {
            say(&format!(
                "SKIPPED: the fields of {path} were not compared: neither the module nor Go is there"
            ));
            continue;
        };
        let theirs = upstream(&dir.join(directory));
        for kind in kinds {
            let mut comparison = Comparison::default();
            comparison.compare(kind, &theirs[*kind], &ours[*kind]);
            say(&format!("{kind}: {} fields compared", comparison.fields));
            total += comparison.fields;
            faults.extend(comparison.faults);
        }
    }
    say(&format!("{total} fields compared in all"));
    assert!(
        faults.is_empty(),
        "{} differences:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn no_field_of_a_machine_on_azure_is_missing() {
    const NAME: &str = "com.github.openshift.api.machine.v1beta1.AzureMachineProviderSpec";
    let Some(dir) = module(OPENSHIFT) else {
        say("SKIPPED: the fields of AzureMachineProviderSpec were not compared: neither the module nor Go is there");
        return;
    };
    let text = fs::read_to_string(dir.join("openapi/openapi.json")).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    let mut faults = Vec::new();
    let mut fields = 0;
    probe(
        &document["definitions"],
        NAME,
        &mut Vec::new(),
        &mut fields,
        &mut faults,
    );
    say(&format!("AzureMachineProviderSpec: {fields} fields compared"));
    assert!(
        faults.is_empty(),
        "{} differences:\n{}",
        faults.len(),
        faults.join("\n")
    );
    assert!(fields > 50, "only {fields} fields were found");
}

/// Reads a spec with one field set at a time: it must be known, not land among the extra ones, and come back.
fn probe(all: &Value, name: &str, path: &mut Vec<(String, bool)>, fields: &mut usize, faults: &mut Vec<String>) {
    for (field, schema) in all[name]["properties"].as_object().unwrap() {
        let list = schema["type"] == "array";
        path.push((field.clone(), list));
        let element = if list { &schema["items"] } else { schema };
        let reference = element["$ref"].as_str().map(|r| r.trim_start_matches("#/definitions/"));
        match reference {
            Some(inner) if inner.contains(".machine.v1beta1.") => probe(all, inner, path, fields, faults),
            _ => {
                *fields += 1;
                if let Err(fault) = round_trip(path, &sample(element, reference)) {
                    faults.push(fault);
                }
            }
        }
        path.pop();
    }
}

fn sample(element: &Value, reference: Option<&str>) -> Value {
    match (element["type"].as_str(), reference) {
        (Some("string"), _) => json!("word"),
        (Some("integer"), _) => json!(7),
        (Some("boolean"), _) => json!(true),
        (Some("object"), _) => json!({ "word": "word" }),
        (_, Some(name)) if name.contains("Quantity") => json!("7"),
        _ => json!({ "name": "word" }),
    }
}

fn round_trip(path: &[(String, bool)], leaf: &Value) -> Result<(), String> {
    let raw = path.iter().rev().fold(leaf.clone(), |inner, (field, list)| {
        let value = if *list { json!([inner]) } else { inner };
        json!({ field: value })
    });
    let name = path
        .iter()
        .map(|(field, _)| field.as_str())
        .collect::<Vec<_>>()
        .join(".");
    let spec = AzureMachineProviderSpec::from_raw(&raw).map_err(|error| error.to_string())?;
    // In capitals the field is found only if it is known.
    let shouted: Value = serde_json::from_str(&raw.to_string().replace(
        &format!("\"{}\":", path[path.len() - 1].0),
        &format!("\"{}\":", path[path.len() - 1].0.to_uppercase()),
    ))
    .unwrap();
    let again = AzureMachineProviderSpec::from_raw(&shouted).map_err(|error| error.to_string())?;
    if spec != again {
        return Err(format!("{name} is missing"));
    }
    let written = spec.to_raw();
    let found = path.iter().try_fold(&written, |node, (field, list)| {
        let node = node.get(field)?;
        if *list { node.get(0) } else { Some(node) }
    });
    if found == Some(leaf) {
        Ok(())
    } else {
        Err(format!("{name} comes back as {found:?}"))
    }
}
