use super::*;
use proptest::prelude::*;
use serde_json::json;

const OLD: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const NEW: &str = "infrastructure.cluster.x-k8s.io/v1beta2";

fn object(version: &str, kind: &str, spec: Value, status: Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a", "uid": "u"}, "spec": spec, "status": status})
}

#[test]
fn a_machine_of_v1beta1_has_its_fields_where_v1beta2_has_them() {
    let spec = json!({
        "template": "t", "namingStrategy": {"template": "{{ .machine.name }}"}, "guestSoftPowerOffTimeout": "5m0s",
        "network": {"devices": [{"networkName": "n", "dhcp4": false}]}, "dataDisks": [{"name": "d", "sizeGiB": 1}],
    });
    let status = json!({
        "ready": true, "conditions": [{"type": "Ready", "status": "True"}], "failureReason": "x",
        "v1beta2": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": ""}]},
    });
    let converted = convert(object(OLD, "VSphereMachine", spec, status), NEW).unwrap();
    let spec = json!({
        "template": "t", "naming": {"template": "{{ .machine.name }}"}, "guestSoftPowerOffTimeoutSeconds": 300,
        "network": {"devices": [{"networkName": "n", "dhcp4": false}]}, "dataDisks": [{"name": "d", "sizeGiB": 1}],
    });
    let status = json!({
        "initialization": {"provisioned": true},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": ""}],
        "deprecated": {"v1beta1": {"conditions": [{"type": "Ready", "status": "True"}], "failureReason": "x"}},
    });
    assert_eq!(converted, object(NEW, "VSphereMachine", spec, status));
}

#[test]
fn fields_that_v1beta2_lacks_come_back_from_an_annotation() {
    let spec = json!({"template": "t", "failureDomain": "zone-a", "guestSoftPowerOffTimeout": "90.5s"});
    let old = object(OLD, "VSphereMachine", spec, json!({}));
    let mut new = convert(old.clone(), NEW).unwrap();
    assert_eq!(
        new["spec"],
        json!({"template": "t", "guestSoftPowerOffTimeoutSeconds": 90})
    );
    assert_eq!(convert(new.clone(), OLD).unwrap(), old);
    // A user of v1beta2 changes the timeout: it is that one that counts.
    new["spec"]["guestSoftPowerOffTimeoutSeconds"] = json!(30);
    let back = convert(new, OLD).unwrap();
    let spec = json!({"template": "t", "failureDomain": "zone-a", "guestSoftPowerOffTimeout": "30s"});
    assert_eq!(back, object(OLD, "VSphereMachine", spec, json!({})));
}

#[test]
fn failure_domains_are_a_list_by_name_in_v1beta2() {
    let status = json!({"ready": false, "failureDomains": {"b": {"controlPlane": true}, "a": {}}});
    let old = object(OLD, "VSphereCluster", json!({"server": "vc"}), status);
    let new = convert(old.clone(), NEW).unwrap();
    let domains = json!([{"name": "a"}, {"name": "b", "controlPlane": true}]);
    assert_eq!(
        new["status"],
        json!({"initialization": {"provisioned": false}, "failureDomains": domains})
    );
    assert_eq!(convert(new, OLD).unwrap(), old);
}

#[test]
fn capvs_own_annotation_tells_false_from_unset_and_does_not_reach_v1beta2() {
    let device = |extra: Value| {
        let mut device = json!({"networkName": "n"});
        extra
            .as_object()
            .unwrap()
            .iter()
            .for_each(|(key, value)| device[key] = value.clone());
        device
    };
    let spec = json!({"template": "t", "bootstrapRef": {"name": "b", "kind": "Secret"},
        "network": {"devices": [device(json!({})), device(json!({"dhcp4": true}))]}});
    let mut old = object(OLD, "VSphereVM", spec, json!({}));
    // CAPV wrote the annotation when the object was read; the user has set dhcp4 of the second device since.
    let before = json!({"spec": {"template": "t", "numCoresPerSocket": 0, "folder": "removed",
        "network": {"devices": [device(json!({"dhcp4": false})), device(json!({"dhcp4": false, "dhcp6": false}))]}}});
    old["metadata"]["annotations"] = json!({CONVERSION_DATA: before.to_string(), "mine": "1"});
    let new = convert(old, NEW).unwrap();
    assert_eq!(new["metadata"]["annotations"]["mine"], "1");
    assert_eq!(new["metadata"]["annotations"].get(CONVERSION_DATA), None);
    let devices = [
        device(json!({"dhcp4": false})),
        device(json!({"dhcp4": true, "dhcp6": false})),
    ];
    let expected = json!({"template": "t", "bootstrapRef": {"name": "b"}, "numCoresPerSocket": 0,
        "network": {"devices": devices}});
    assert_eq!(new["spec"], expected);
}

#[test]
fn other_kinds_groups_and_versions_are_refused() {
    let other = |kind: &str, to: &str| convert(object(OLD, kind, json!({}), json!({})), to).is_err();
    assert!(other("AzureCluster", NEW));
    assert!(other("VSphereVM", "infrastructure.cluster.x-k8s.io/v1"));
    assert!(other("VSphereVM", "example.com/v1beta2"));
    assert!(!other("VSphereVM", OLD));
}

fn maybe(value: impl Strategy<Value = Value> + 'static) -> BoxedStrategy<Option<Value>> {
    proptest::option::of(value).boxed()
}

fn word() -> impl Strategy<Value = Value> {
    "[a-z]{1,4}".prop_map(Value::from)
}

/// An object with any of these fields; parents without any field do not exist.
fn any_of(fields: Vec<(&'static str, BoxedStrategy<Option<Value>>)>) -> BoxedStrategy<Value> {
    let (paths, values): (Vec<_>, Vec<_>) = fields.into_iter().unzip();
    let build = move |values: Vec<Option<Value>>| {
        let mut object = json!({});
        for (path, value) in paths.iter().zip(values) {
            value.into_iter().for_each(|value| put(&mut object, path, value));
        }
        object
    };
    values.prop_map(build).boxed()
}

fn conditions() -> BoxedStrategy<Option<Value>> {
    maybe(proptest::collection::vec(word().prop_map(|type_| json!({"type": type_})), 1..3).prop_map(Value::from))
}

/// Specs and statuses of one kind. Every field of the table may be there, beside fields that both versions have.
fn objects(version: &'static str, kind: &'static fields::Kind) -> BoxedStrategy<Value> {
    let old = version == OLD;
    let path = move |field: &Field| if old { field.v1beta1 } else { field.v1beta2 };
    let value = move |field: &Field| match field.form {
        Form::Seconds if old => maybe("([0-9]{1,3}(s|m|h|ms)|later)".prop_map(Value::from)),
        Form::Seconds => maybe((1..100_000i64).prop_map(Value::from)),
        Form::List if old => {
            maybe(word().prop_map(|name| json!({name.as_str().unwrap_or_default(): {"controlPlane": true}})))
        }
        Form::List => maybe(word().prop_map(|name| json!([{"name": name, "controlPlane": true}]))),
        Form::Same if field.v1beta1.ends_with("conditions") => conditions(),
        Form::Same | Form::Dropped => maybe(word()),
    };
    let all = move |table: &[Field], common: &'static str| {
        let known = table.iter().filter(|field| !path(field).is_empty());
        let mut fields: Vec<_> = known.map(|field| (path(field), value(field))).collect();
        fields.push((common, maybe(word())));
        fields.push(("network.devices", maybe(word())));
        any_of(fields)
    };
    (all(kind.fields, "template"), all(kind.status, "host"), any::<bool>())
        .prop_map(move |(spec, status, annotated)| {
            let mut object = json!({"apiVersion": version, "kind": kind.kind, "metadata": {"name": "a"}});
            put(&mut object, &kind.spec.join("."), spec);
            object["status"] = status;
            if annotated {
                object["metadata"]["annotations"] = json!({"mine": "1"});
            }
            object
        })
        .boxed()
}

fn any_object(version: &'static str) -> BoxedStrategy<Value> {
    let kinds = fields::KINDS.iter().filter_map(|kind| fields::of(kind.kind));
    proptest::strategy::Union::new(kinds.map(|kind| objects(version, kind)).collect::<Vec<_>>()).boxed()
}

proptest! {
    #[test]
    fn an_object_of_v1beta1_is_the_same_after_v1beta2(old in any_object(OLD)) {
        let new = convert(old.clone(), NEW).unwrap();
        prop_assert_eq!(convert(new, OLD).unwrap(), old);
    }

    #[test]
    fn an_object_of_v1beta2_is_the_same_after_v1beta1(new in any_object(NEW)) {
        let old = convert(new.clone(), OLD).unwrap();
        prop_assert_eq!(convert(old, NEW).unwrap(), new);
    }

    /// A client with Go types reads v1beta1 from CAPV's conversion, drops what is empty, and writes the rest to Capstan.
    #[test]
    fn an_object_of_v1beta2_survives_clients_that_drop_empty_fields(new in any_object(NEW), dhcp in any::<Option<bool>>()) {
        let mut new = new;
        let spec = new["kind"] == "VSphereVM";
        if let (true, Some(dhcp)) = (spec, dhcp) {
            put(&mut new, "spec.network.devices", json!([{"networkName": "n", "dhcp4": dhcp, "skipIPAllocation": false}]));
        }
        let mut old = convert(new.clone(), OLD).unwrap();
        annotate(&mut old, CONVERSION_DATA, new.to_string());
        if let Some(spec) = old.get_mut("spec") {
            drop_empty(spec);
        }
        prop_assert_eq!(convert(old, NEW).unwrap(), new);
    }
}

fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !is_empty(field));
            fields.values_mut().for_each(drop_empty);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_empty),
        _ => {}
    }
}
