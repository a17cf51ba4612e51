//! Machine and MachineSet. The API server does not check `providerSpec.value`.

use super::case::{Case, changing, creating, with};
use serde_json::{Value, json};

fn machine() -> Value {
    json!({
        "lifecycleHooks": { "preDrain": [{ "name": "MigrateImportantApp", "owner": "my-app-migration-controller" }] },
        "providerSpec": { "value": { "apiVersion": "machine.openshift.io/v1beta1", "anything": { "goes": [1, "two"] } } },
    })
}

fn set() -> Value {
    json!({
        "replicas": 2,
        "selector": { "matchLabels": { "machineset": "a" } },
        "template": { "metadata": { "labels": { "machineset": "a", "more": "b" } }, "spec": machine() },
    })
}

pub fn cases() -> Vec<Case> {
    const HOOK: &str = "/lifecycleHooks/preDrain/0";
    let mut twice = machine();
    let hooks = twice["lifecycleHooks"]["preDrain"].as_array_mut().unwrap();
    hooks.push(hooks[0].clone());
    vec![
        creating("Machine", machine()),
        creating("Machine", json!({})),
        creating("Machine", with(&machine(), &format!("{HOOK}/name"), json!("a")))
            .refused(&["spec.lifecycleHooks.preDrain[0].name", "at least 3 chars long"]),
        creating("Machine", with(&machine(), &format!("{HOOK}/name"), json!("bad name")))
            .refused(&["spec.lifecycleHooks.preDrain[0].name", "should match"]),
        creating("Machine", with(&machine(), &format!("{HOOK}/owner"), json!("a")))
            .refused(&["spec.lifecycleHooks.preDrain[0].owner", "at least 3 chars long"]),
        creating("Machine", twice).refused(&["spec.lifecycleHooks.preDrain[1]", "Duplicate value"]),
        changing(
            "Machine",
            machine(),
            with(&machine(), "/providerID", json!("azure:///x")),
        ),
        creating("MachineSet", set()),
        creating("MachineSet", with(&set(), "/deletePolicy", json!("Newest"))),
        creating("MachineSet", with(&set(), "/deletePolicy", json!("Cheapest")))
            .refused(&["spec.deletePolicy", "\"Random\", \"Newest\", \"Oldest\""]),
        changing("MachineSet", set(), with(&set(), "/replicas", json!(5))),
        changing(
            "MachineSet",
            set(),
            with(&set(), "/selector/matchLabels/more", json!("b")),
        )
        .refused(&["spec.selector: Forbidden: selector is immutable"]),
        creating(
            "MachineSet",
            with(&set(), "/template/metadata/labels/machineset", json!("z")),
        )
        .refused(&[
            "spec.template.metadata.labels",
            "`selector` does not match template `labels`",
        ]),
        creating("MachineSet", with(&set(), "/template/metadata", Value::Null))
            .refused(&["`selector` does not match template `labels`"]),
    ]
}
