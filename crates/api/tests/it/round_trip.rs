//! The types lose no value: an object with every field of its definition set is written as it was read, and an empty one
//! is written empty.

use capstan_api::{azure, capi, crds, openshift, vsphere};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
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
    let written = serde_json::to_value(read).unwrap();
    let Ok(newer) = vsphere::v1beta2::convert(object.clone(), vsphere::VSphereVM::API_VERSION) else {
        return assert_eq!(written, object, "{kind}");
    };
    assert_eq!(written, newer, "{kind}");
    let read: K = serde_json::from_value(newer.clone()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), newer, "{kind}");
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

/// Any JSON, with words among it that are nearly what a field wants.
fn anything() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        any::<String>(),
        "[-+]?[0-9.]{0,40}(ns|us|µs|ms|s|m|h|x|e9h)?[-0-9a-z.]{0,6}",
        Just("2026-13-45T99:99:99Z".to_owned()),
        Just("99999999999999999999999h".to_owned()),
        Just("1e400Gi".to_owned()),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word.prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z]{0,12}", inner, 0..3)
                .prop_map(|map| map.into_iter().collect::<Map<_, _>>().into()),
        ]
    })
}

/// Puts `value` in the place of the n-th node of a tree, counted in order.
fn replace(tree: &mut Value, n: &mut usize, value: &Value) {
    if *n == 0 {
        *tree = value.clone();
    }
    *n = n.wrapping_sub(1);
    match tree {
        _ if *n == usize::MAX => {}
        Value::Array(items) => items.iter_mut().for_each(|item| replace(item, n, value)),
        Value::Object(map) => map.values_mut().for_each(|item| replace(item, n, value)),
        _ => {}
    }
}

fn count(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// What can be read can be written, and what cannot is an error.
fn survives<K: DeserializeOwned + Serialize>(object: &Value) {
    if let Ok(read) = serde_json::from_value::<K>(object.clone()) {
        serde_json::to_value(read).unwrap();
    }
}

#[test]
fn no_json_makes_a_type_panic() {
    let objects: Vec<Value> = crds()
        .iter()
        .map(|crd| {
            let (_, properties) = definition(&crd.spec.names.kind);
            json!({ "metadata": { "name": "full" }, "spec": full(&properties["spec"]),
                "status": properties.get("status").map_or(Value::Null, full) })
        })
        .collect();
    let sizes: Vec<usize> = objects.iter().map(count).collect();
    let cases = (0..objects.len(), any::<prop::sample::Index>(), anything());
    let mut runner = TestRunner::new(ProptestConfig::with_cases(500));
    let outcome = runner.run(&cases, |(which, place, value)| {
        let mut object = objects[which].clone();
        replace(&mut object, &mut place.index(sizes[which]), &value);
        macro_rules! try_kind {
            ($($module:ident::$kind:ident),+ $(,)?) => { $(survives::<$module::$kind>(&object);)+ };
        }
        try_kind!(
            openshift::Machine,
            openshift::MachineSet,
            azure::AzureMachinePool,
            azure::AzureMachinePoolMachine,
            azure::AzureCluster,
            azure::AzureClusterIdentity,
            vsphere::VSphereMachine,
            vsphere::VSphereMachineTemplate,
            vsphere::VSphereVM,
            vsphere::VSphereCluster,
            vsphere::VSphereClusterTemplate,
            vsphere::VSphereClusterIdentity,
            vsphere::VSphereFailureDomain,
            vsphere::VSphereDeploymentZone,
            capi::Cluster,
            capi::Machine,
            capi::MachinePool,
        );
        let _ = openshift::AzureMachineProviderSpec::from_raw(&object["spec"]).map(|spec| spec.to_raw());
        let _ = openshift::AzureMachineProviderSpec::from_raw(&value).map(|spec| spec.to_raw());
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn a_duration_that_is_none_counts_as_not_set_and_the_object_is_read() {
    for bad in [json!("soon"), json!("1h-5m"), json!(7), json!({})] {
        let raw = json!({ "metadata": {}, "spec": { "template": "t", "network": { "devices": [] }, "guestSoftPowerOffTimeout": bad, "nodeDrainTimeout": bad } });
        let vm: vsphere::VSphereVM = serde_json::from_value(raw.clone()).unwrap();
        assert_eq!(vm.spec.guest_soft_power_off_timeout, None);
        let machine: capi::Machine = serde_json::from_value(raw).unwrap();
        assert_eq!(machine.spec.drain_timeout(), None);
    }
}
