//! Every field of AzureMachineProviderSpec, which no definition describes: it is read by our type, and written again.

use super::{
    OPENSHIFT,
    support::{module, say},
};
use capstan_api::openshift::{AzureMachineProviderSpec, AzureMachineProviderStatus, FieldError};
use serde_json::{Value, json};
use std::fs;

/// Reads and writes a document.
type Pass = fn(&Value) -> Result<Value, FieldError>;

#[test]
fn no_field_of_a_machine_on_azure_is_missing() {
    let Some(dir) = module(OPENSHIFT) else {
        say("SKIPPED: the fields of a machine on Azure were not compared: neither the module nor Go is there");
        return;
    };
    let text = fs::read_to_string(dir.join("openapi/openapi.json")).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    let documents: [(&str, usize, Pass); 2] = [
        ("AzureMachineProviderSpec", 50, |raw| {
            AzureMachineProviderSpec::from_raw(raw).map(|spec| spec.to_raw())
        }),
        ("AzureMachineProviderStatus", 5, |raw| {
            AzureMachineProviderStatus::from_raw(raw).map(|status| status.to_raw())
        }),
    ];
    for (kind, least, pass) in documents {
        let name = format!("com.github.openshift.api.machine.v1beta1.{kind}");
        let mut probe = Probe {
            all: &document["definitions"],
            pass,
            fields: 0,
            faults: Vec::new(),
        };
        probe.visit(&name, &mut Vec::new());
        say(&format!("{kind}: {} fields compared", probe.fields));
        let faults = probe.faults.join("\n");
        assert!(faults.is_empty(), "{} differences:\n{faults}", probe.faults.len());
        assert!(probe.fields > least, "only {} fields were found", probe.fields);
    }
}

/// Reads a document with one field set at a time: it must be known, not land among the extra ones, and come back.
struct Probe<'a> {
    all: &'a Value,
    pass: Pass,
    fields: usize,
    faults: Vec<String>,
}

impl Probe<'_> {
    fn visit(&mut self, name: &str, path: &mut Vec<(String, bool)>) {
        for (field, schema) in self.all[name]["properties"].as_object().unwrap() {
            let list = schema["type"] == "array";
            path.push((field.clone(), list));
            let element = if list { &schema["items"] } else { schema };
            let reference = element["$ref"].as_str().map(|r| r.trim_start_matches("#/definitions/"));
            match reference {
                Some(inner) if inner.contains(".machine.v1beta1.") => self.visit(inner, path),
                _ => {
                    self.fields += 1;
                    let outcome = round_trip(path, &sample(element, reference), self.pass);
                    self.faults.extend(outcome.err());
                }
            }
            path.pop();
        }
    }
}

fn sample(element: &Value, reference: Option<&str>) -> Value {
    match (element["type"].as_str(), reference) {
        (Some("string"), _) => json!("word"),
        (Some("integer"), _) => json!(7),
        (Some("boolean"), _) => json!(true),
        (Some("object"), _) => json!({ "word": "word" }),
        (_, Some(name)) if name.contains("Quantity") => json!("7"),
        (_, Some(name)) if name.starts_with("Condition.") => json!({
            "type": "Word", "status": "True", "reason": "Word", "message": "word",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }),
        _ => json!({ "name": "word" }),
    }
}

fn round_trip(path: &[(String, bool)], leaf: &Value, pass: Pass) -> Result<(), String> {
    let raw = path.iter().rev().fold(leaf.clone(), |inner, (field, list)| {
        let value = if *list { json!([inner]) } else { inner };
        json!({ field: value })
    });
    let name = path
        .iter()
        .map(|(field, _)| field.as_str())
        .collect::<Vec<_>>()
        .join(".");
    let written = pass(&raw).map_err(|error| error.to_string())?;
    // In capitals the field is found only if it is known.
    let shouted: Value = serde_json::from_str(&raw.to_string().replace(
        &format!("\"{}\":", path[path.len() - 1].0),
        &format!("\"{}\":", path[path.len() - 1].0.to_uppercase()),
    ))
    .unwrap();
    if pass(&shouted).map_err(|error| error.to_string())? != written {
        return Err(format!("{name} is missing"));
    }
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
