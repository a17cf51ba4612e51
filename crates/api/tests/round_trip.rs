//! Nothing is lost on the way through the types: an object with every field of its definition set comes back the
//! same, and an empty one comes back empty.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

use capstan_api::{azure, crds, openshift, vsphere};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

/// A value that a schema describes, with every property set.
fn full(schema: &Value) -> Value {
    if let Some(word) = schema["enum"].get(0) {
        return word.clone();
    }
    if let Some(properties) = schema["properties"].as_object() {
        return properties
            .iter()
            .map(|(name, schema)| (name.clone(), full(schema)))
            .collect::<Map<_, _>>()
            .into();
    }
    match (schema["type"].as_str(), schema["format"].as_str()) {
        (Some("array"), _) => json!([full(&schema["items"])]),
        (Some("object"), _) if schema["additionalProperties"].is_object() => {
            json!({ "key": full(&schema["additionalProperties"]) })
        }
        (Some("object"), _) => json!({ "free": { "form": [1, "two", null] } }),
        (Some("integer"), _) => json!(7),
        (Some("boolean"), _) => json!(true),
        (Some("string"), Some("date-time")) => json!("2026-01-02T03:04:05Z"),
        // Reads as a duration too.
        (Some("string"), _) => json!("7s"),
        _ => json!("7"),
    }
}

fn definition(kind: &str) -> (CustomResourceDefinition, Value) {
    let crd = crds().into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
    (crd, schema["openAPIV3Schema"]["properties"].clone())
}

fn unchanged<K: DeserializeOwned + Serialize>(kind: &str) {
    let (crd, properties) = definition(kind);
    let mut object = json!({
        "apiVersion": format!("{}/v1beta1", crd.spec.group),
        "kind": kind,
        "metadata": { "name": "full", "labels": { "a": "b" } },
        "spec": full(&properties["spec"]),
    });
    if let Some(status) = properties.get("status") {
        object["status"] = full(status);
    }
    let read: K = serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{kind}: {error}: {object}"));
    assert_eq!(serde_json::to_value(read).unwrap(), object, "{kind}");
}

/// What is left of an object without content: no spec at all must not stop a reader either.
fn empty<K: DeserializeOwned + Serialize>(kind: &str) {
    let read: K = serde_json::from_value(json!({ "metadata": { "name": "empty" } })).unwrap();
    let written = serde_json::to_value(read).unwrap();
    assert!(written.get("status").is_none(), "{kind}: {written}");
    assert_eq!(written["kind"], kind);
}

macro_rules! each {
    ($check:ident: $($module:ident::$kind:ident),+ $(,)?) => {
        $($check::<$module::$kind>(stringify!($kind));)+
    };
}

macro_rules! every_kind {
    ($check:ident) => {
        each!($check:
            openshift::Machine, openshift::MachineSet,
            azure::AzureMachinePool, azure::AzureMachinePoolMachine, azure::AzureCluster, azure::AzureClusterIdentity,
            vsphere::VSphereMachine, vsphere::VSphereMachineTemplate, vsphere::VSphereVM, vsphere::VSphereCluster,
            vsphere::VSphereClusterTemplate, vsphere::VSphereClusterIdentity, vsphere::VSphereFailureDomain,
            vsphere::VSphereDeploymentZone,
        )
    };
}

#[test]
fn an_object_with_every_field_set_comes_back_the_same() {
    every_kind!(unchanged);
}

#[test]
fn an_object_without_spec_can_be_read() {
    every_kind!(empty);
}

#[test]
fn a_word_of_the_future_is_kept() {
    let raw = json!({ "metadata": {}, "spec": { "location": "l", "template": { "vmSize": "s", "osDisk": { "cachingType": "Sometimes" } } } });
    let pool: azure::AzureMachinePool = serde_json::from_value(raw).unwrap();
    let caching = pool.spec.template.os_disk.caching_type.clone().unwrap();
    assert!(!caching.is_known());
    assert_eq!(
        serde_json::to_value(&pool).unwrap()["spec"]["template"]["osDisk"]["cachingType"],
        "Sometimes"
    );
}
