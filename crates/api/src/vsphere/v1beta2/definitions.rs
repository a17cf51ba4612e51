//! The definitions with v1beta2: its schema follows from that of v1beta1 and the table of fields.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceColumnDefinition, CustomResourceConversion, CustomResourceDefinition,
    CustomResourceDefinitionVersion, ServiceReference, WebhookClientConfig, WebhookConversion,
};
use serde_json::{Map, Value, json};

use super::fields::{self, Field, Form};
use super::{V1BETA1, V1BETA2};

/// The path of the conversion webhook.
pub const CONVERT_PATH: &str = "/convert";
/// Label of the definitions whose conversion webhook Capstan serves.
pub const CONVERTED_LABEL: &str = "capstan.dev/conversion";
/// Label of the contract. Cluster API reads objects in the version that the newest contract label names.
const CONTRACT: &str = "cluster.x-k8s.io/v1beta2";

/// The value of [`CONVERTED_LABEL`].
pub const CONVERTED: &str = "webhook";
/// The default Service of the webhook: its namespace and its name.
const SERVICE: (&str, &str) = ("capstan-system", "capstan-webhook");

/// Adds v1beta2 to the definitions of the vSphere kinds, as the stored version. The API server converts through the
/// webhook; the running program adds the CA that the API server trusts.
pub fn serve_v1beta2(crds: Vec<CustomResourceDefinition>) -> Vec<CustomResourceDefinition> {
    let add = |mut crd: CustomResourceDefinition| {
        let Some(kind) = fields::of(&crd.spec.names.kind) else {
            return crd;
        };
        let Some(first) = crd.spec.versions.iter_mut().find(|version| version.name == V1BETA1) else {
            return crd;
        };
        first.storage = false;
        let second = second_version(first, kind);
        crd.spec.versions.push(second);
        crd.spec.conversion = Some(conversion(SERVICE.0, SERVICE.1));
        let labels = crd.metadata.labels.get_or_insert_default();
        labels.insert(CONTRACT.to_owned(), V1BETA2.to_owned());
        labels.insert(CONVERTED_LABEL.to_owned(), CONVERTED.to_owned());
        crd
    };
    crds.into_iter().map(add).collect()
}

/// Sets the webhook's Service in all definitions with a conversion.
pub fn set_service(crds: &mut [CustomResourceDefinition], namespace: &str, name: &str) {
    for crd in crds.iter_mut().filter(|crd| crd.spec.conversion.is_some()) {
        crd.spec.conversion = Some(conversion(namespace, name));
    }
}

/// Sets the stored version of the kinds with two versions, for the way back to a controller that knows v1beta1 alone.
pub fn store_as(crds: &mut [CustomResourceDefinition], version: &str) {
    for crd in crds.iter_mut().filter(|crd| crd.spec.conversion.is_some()) {
        for found in &mut crd.spec.versions {
            found.storage = found.name == version;
        }
    }
}

fn conversion(namespace: &str, service: &str) -> CustomResourceConversion {
    CustomResourceConversion {
        strategy: "Webhook".to_owned(),
        webhook: Some(WebhookConversion {
            client_config: Some(WebhookClientConfig {
                service: Some(ServiceReference {
                    namespace: namespace.to_owned(),
                    name: service.to_owned(),
                    path: Some(CONVERT_PATH.to_owned()),
                    port: Some(443),
                }),
                ..WebhookClientConfig::default()
            }),
            conversion_review_versions: vec!["v1".to_owned()],
        }),
    }
}

fn second_version(first: &CustomResourceDefinitionVersion, kind: &fields::Kind) -> CustomResourceDefinitionVersion {
    let mut version = first.clone();
    (version.name, version.storage) = (V1BETA2.to_owned(), true);
    let provisioned = kind.status.iter().any(|field| field.v1beta1 == "ready");
    for column in version.additional_printer_columns.iter_mut().flatten() {
        if provisioned && column.json_path == ".status.ready" {
            column.json_path = ".status.initialization.provisioned".to_owned();
        }
    }
    add_columns(&mut version, kind.kind);
    if let Some(schema) = version.schema.as_mut() {
        let mut value = serde_json::to_value(&*schema).unwrap_or_default();
        if let Some(root) = value.get_mut("openAPIV3Schema") {
            change_schema(root, kind.spec, kind.fields);
            change_schema(root, &["status"], kind.status);
            change_details(root);
        }
        // The schema was made from our own types; a test installs every one of them.
        *schema = serde_json::from_value(value).unwrap_or_default();
    }
    version
}

/// Returns the columns that CAPV's v1beta2 has and its v1beta1 has not: name, path and priority.
fn columns(kind: &str) -> &'static [(&'static str, &'static str, i32)] {
    const PROVISIONED: (&str, &str, i32) = ("Provisioned", ".status.initialization.provisioned", 0);
    const PAUSED: (&str, &str, i32) = ("Paused", ".status.conditions[?(@.type==\"Paused\")].status", 10);
    const CLASS: (&str, &str, i32) = (
        "ClusterClass",
        ".metadata.ownerReferences[?(@.kind==\"ClusterClass\")].name",
        0,
    );
    match kind {
        "VSphereMachine" => &[
            PROVISIONED,
            ("Provider ID", ".spec.providerID", 10),
            ("Template", ".spec.template", 10),
            PAUSED,
        ],
        "VSphereCluster" => &[
            ("Cluster", ".metadata.labels.cluster\\.x-k8s\\.io/cluster-name", 0),
            PROVISIONED,
            ("ControlPlane Endpoint", ".spec.controlPlaneEndpoint.host", 0),
            PAUSED,
        ],
        "VSphereMachineTemplate" => &[
            CLASS,
            ("Cluster", ".metadata.ownerReferences[?(@.kind==\"Cluster\")].name", 0),
        ],
        "VSphereClusterTemplate" => &[CLASS],
        _ => &[],
    }
}

/// Puts the columns of v1beta2 before those of v1beta1, and drops the columns of v1beta1 for the same field.
fn add_columns(version: &mut CustomResourceDefinitionVersion, kind: &str) {
    let new = columns(kind);
    let column = |(name, path, priority): &(&str, &str, i32)| CustomResourceColumnDefinition {
        name: (*name).to_owned(),
        json_path: (*path).to_owned(),
        priority: (*priority != 0).then_some(*priority),
        type_: "string".to_owned(),
        ..CustomResourceColumnDefinition::default()
    };
    let old = version.additional_printer_columns.take().unwrap_or_default();
    let kept = old
        .into_iter()
        .filter(|old| new.iter().all(|(_, path, _)| *path != old.json_path));
    version.additional_printer_columns = Some(new.iter().map(column).chain(kept).collect());
}

/// Changes the details in which v1beta2 differs for fields that keep their place.
fn change_details(schema: &mut Value) {
    const MAP_TYPE: &str = "x-kubernetes-map-type";
    let Some(schema) = schema.as_object_mut() else { return };
    let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
    for (name, property) in properties.into_iter().flatten() {
        let Some(fields) = property.as_object_mut() else {
            continue;
        };
        match name.as_str() {
            "routeMetric" => drop(fields.insert("format".to_owned(), "int32".into())),
            "powerOffMode" => drop(fields.remove("default")),
            "bootstrapRef" => drop(fields.remove(MAP_TYPE)),
            "addressesFromPools" => {
                let items = fields.get_mut("items").and_then(Value::as_object_mut);
                items.map(|items| items.remove(MAP_TYPE));
            }
            _ => {}
        }
        change_details(property);
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(inner) = schema.get_mut(inner) {
            change_details(inner);
        }
    }
}

fn change_schema(root: &mut Value, path: &[&str], fields: &[Field]) {
    let found = path
        .iter()
        .try_fold(root, |schema, name| schema.get_mut("properties")?.get_mut(*name));
    let Some(schema) = found else { return };
    let taken: Vec<(&Field, Value)> = fields
        .iter()
        .filter_map(|field| Some((field, take_property(schema, field.v1beta1)?)))
        .collect();
    for (field, property) in taken {
        let property = match field.form {
            Form::Dropped => continue,
            Form::Same => property,
            Form::Seconds => json!({
                "type": "integer", "format": "int32", "minimum": 1,
                "description": property.get("description").cloned().unwrap_or_default(),
            }),
            Form::List => list_of(property),
        };
        put_property(schema, field.v1beta2, property);
    }
    change_rules(schema, fields);
}

/// Takes a property from an object schema. Removes a parent without properties.
fn take_property(schema: &mut Value, path: &str) -> Option<Value> {
    let (name, rest) = path.split_once('.').unwrap_or((path, ""));
    let properties = schema.get_mut("properties")?.as_object_mut()?;
    if !rest.is_empty() {
        let inner = properties.get_mut(name)?;
        let taken = take_property(inner, rest)?;
        if inner
            .get("properties")
            .and_then(Value::as_object)
            .is_some_and(Map::is_empty)
        {
            properties.remove(name);
        }
        return Some(taken);
    }
    let taken = properties.remove(name)?;
    if let Some(required) = schema.get_mut("required").and_then(Value::as_array_mut) {
        required.retain(|required| required != name);
    }
    Some(taken)
}

fn put_property(schema: &mut Value, path: &str, property: Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    let properties = fields.entry("properties").or_insert_with(|| json!({}));
    let Some(properties) = properties.as_object_mut() else {
        return;
    };
    match path.split_once('.') {
        None => drop(properties.insert(path.to_owned(), property)),
        Some((name, rest)) => {
            let inner = properties.entry(name).or_insert_with(|| json!({"type": "object"}));
            put_property(inner, rest, property);
        }
    }
}

fn list_of(map: Value) -> Value {
    let mut items = map
        .get("additionalProperties")
        .cloned()
        .unwrap_or_else(|| json!({"type": "object"}));
    put_property(
        &mut items,
        "name",
        json!({"type": "string", "minLength": 1, "maxLength": 256}),
    );
    items["required"] = json!(["name"]);
    json!({
        "type": "array", "items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
        "description": map.get("description").cloned().unwrap_or_default(),
    })
}

/// Renames fields in the rules of a schema, and drops the rules of fields that do not exist in v1beta2.
fn change_rules(schema: &mut Value, fields: &[Field]) {
    let rules = schema.get_mut("x-kubernetes-validations").and_then(Value::as_array_mut);
    let Some(rules) = rules else { return };
    let is_about = |rule: &Value, field: &Field| rule.get("fieldPath") == Some(&format!(".{}", field.v1beta1).into());
    rules.retain(|rule| {
        !fields
            .iter()
            .any(|field| field.form == Form::Dropped && is_about(rule, field))
    });
    for rule in rules.iter_mut().filter_map(Value::as_object_mut) {
        for text in ["rule", "fieldPath"] {
            let Some(Value::String(text)) = rule.get_mut(text) else {
                continue;
            };
            for field in fields.iter().filter(|field| field.form != Form::Dropped) {
                *text = text.replace(field.v1beta1, field.v1beta2);
            }
            // Unset seconds are 0.
            *text = text.replace("Seconds.orValue('0s') == '0s'", "Seconds.orValue(0) == 0");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(kind: &str, version: &str) -> Value {
        let crd = crate::crds()
            .into_iter()
            .find(|crd| crd.spec.names.kind == kind)
            .unwrap();
        let mut versions = crd.spec.versions.into_iter();
        let version = versions.find(|found| found.name == version).unwrap();
        serde_json::to_value(version.schema.unwrap().open_api_v3_schema.unwrap()).unwrap()
    }

    fn property<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
        path.split('.')
            .try_fold(schema, |schema, name| schema.get("properties")?.get(name))
    }

    #[test]
    fn every_vsphere_kind_is_served_in_both_versions_and_stored_as_v1beta2() {
        for crd in crate::crds() {
            let vsphere = crd.spec.names.kind.starts_with("VSphere");
            assert_eq!(crd.spec.versions.len(), if vsphere { 2 } else { 1 });
            let stored: Vec<_> = crd.spec.versions.iter().filter(|version| version.storage).collect();
            assert_eq!(stored.len(), 1);
            assert_eq!(stored[0].name, if vsphere { V1BETA2 } else { V1BETA1 });
            assert_eq!(crd.spec.conversion.is_some(), vsphere);
            let contract = crd.metadata.labels.as_ref().and_then(|labels| labels.get(CONTRACT));
            assert_eq!(contract.is_some(), vsphere);
        }
    }

    #[test]
    fn the_schema_of_v1beta2_has_every_field_in_its_place() {
        for kind in &fields::KINDS {
            let (old, new) = (schema(kind.kind, V1BETA1), schema(kind.kind, V1BETA2));
            let tables = [(kind.spec.join("."), kind.fields), ("status".to_owned(), kind.status)];
            for (prefix, field) in tables
                .iter()
                .flat_map(|(prefix, table)| table.iter().map(move |f| (prefix, f)))
            {
                let at = |path: &str| format!("{prefix}.{path}");
                assert!(
                    property(&old, &at(field.v1beta1)).is_some(),
                    "{} {}",
                    kind.kind,
                    field.v1beta1
                );
                match field.form {
                    Form::Dropped => assert_eq!(property(&new, &at(field.v1beta1)), None),
                    Form::Same | Form::Seconds | Form::List => {
                        assert!(
                            property(&new, &at(field.v1beta2)).is_some(),
                            "{} {}",
                            kind.kind,
                            field.v1beta2
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn rules_follow_their_fields() {
        let new = schema("VSphereMachine", V1BETA2);
        let rules = property(&new, "spec").unwrap()["x-kubernetes-validations"].to_string();
        assert!(
            rules.contains("self.?guestSoftPowerOffTimeoutSeconds.orValue(0) == 0"),
            "{rules}"
        );
        assert!(rules.contains("has(self.naming)"), "{rules}");
        assert!(
            !rules.contains("failureDomain") && !rules.contains("namingStrategy"),
            "{rules}"
        );
    }
}
