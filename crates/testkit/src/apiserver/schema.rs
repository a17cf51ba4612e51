//! Pruning and defaulting by the structural schema of a definition.

use serde_json::{Map, Value};

const PRESERVE: &str = "x-kubernetes-preserve-unknown-fields";
const EMBEDDED: &str = "x-kubernetes-embedded-resource";

/// Removes the fields that the schema does not have. The root keeps its type and metadata in any case.
pub fn prune(schema: &Value, value: &mut Value, root: bool) {
    match value {
        Value::Object(fields) => prune_object(schema, fields, root || schema[EMBEDDED] == true),
        Value::Array(items) => items.iter_mut().for_each(|item| prune(&schema["items"], item, false)),
        _ => {}
    }
}

fn prune_object(schema: &Value, fields: &mut Map<String, Value>, resource: bool) {
    let (properties, additional) = (&schema["properties"], &schema["additionalProperties"]);
    let keep_unknown = schema[PRESERVE] == true || *additional == true;
    let own = |key: &str| resource && matches!(key, "apiVersion" | "kind" | "metadata");
    fields.retain(|key, _| own(key) || keep_unknown || additional.is_object() || properties.get(key).is_some());
    for (key, value) in fields {
        match properties.get(key) {
            _ if own(key) => {}
            Some(schema) => prune(schema, value, false),
            None if additional.is_object() => prune(additional, value, false),
            None => {}
        }
    }
}

/// Adds the defaults of fields that are absent, and drops nulls of fields that have a default.
pub fn default(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(preset) = schema.get("default")
                    && fields.get(key).is_none_or(Value::is_null)
                {
                    fields.insert(key.clone(), preset.clone());
                }
                if let Some(field) = fields.get_mut(key) {
                    default(schema, field);
                }
            }
            if schema["additionalProperties"].is_object() {
                let known = &schema["properties"];
                let others = fields.iter_mut().filter(|(key, _)| known.get(key.as_str()).is_none());
                others.for_each(|(_, value)| default(&schema["additionalProperties"], value));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| default(&schema["items"], item)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_fields_go_and_defaults_come() {
        let schema = json!({"type": "object", "properties": {
            "spec": {"type": "object", "properties": {
                "size": {"type": "integer", "default": 3},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"default": 1}}}}}}}});
        let mut value = json!({"kind": "X", "metadata": {"name": "x"}, "other": 1, "spec": {
            "unknown": 1, "labels": {"a": "b"}, "free": {"x": 1}, "list": [{"b": 2}]}});
        prune(&schema, &mut value, true);
        default(&schema, &mut value);
        let expected = json!({"kind": "X", "metadata": {"name": "x"}, "spec": {
            "labels": {"a": "b"}, "free": {"x": 1}, "list": [{"a": 1}], "size": 3}});
        assert_eq!(value, expected);
    }
}
