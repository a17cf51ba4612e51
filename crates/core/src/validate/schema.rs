//! What the API server checks by an object's schema, without an API server: types, required fields, enums, ranges,
//! patterns, entries that must be unique, and fields that it does not know. CEL rules stay with the server.

use std::collections::HashMap;

use regex::Regex;
use serde_json::{Map, Value};

use super::FieldError;

/// Checks many values, and compiles each pattern of their schemas once.
#[derive(Default)]
pub struct Checker {
    /// `None`: Rust cannot read the pattern, and the server alone checks it.
    patterns: HashMap<String, Option<Regex>>,
    errors: Vec<FieldError>,
}

impl Checker {
    /// Returns every place where a value does not fit its structural schema.
    pub fn check(&mut self, schema: &Value, value: &Value) -> Vec<FieldError> {
        self.node(schema, value, "");
        std::mem::take(&mut self.errors)
    }

    fn node(&mut self, schema: &Value, value: &Value, path: &str) {
        if value.is_null() {
            return; // The server drops a null and applies the default.
        }
        if let Some(expected) = wrong_type(schema, value) {
            self.errors.push(FieldError::invalid(
                path,
                value.clone(),
                format!("must be of type {expected}"),
            ));
            return;
        }
        if let Some(allowed) = schema["enum"].as_array().filter(|allowed| !allowed.contains(value)) {
            let allowed = allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            self.errors.push(FieldError::invalid(
                path,
                value.clone(),
                format!("supported values: {allowed}"),
            ));
        }
        range(schema, value, path, &mut self.errors);
        match value {
            Value::Object(fields) => self.object(schema, fields, path),
            Value::String(text) => self.pattern(schema, text, path),
            Value::Array(items) => {
                unique(schema, items, path, &mut self.errors);
                for (index, item) in items.iter().enumerate() {
                    self.node(&schema["items"], item, &format!("{path}[{index}]"));
                }
            }
            _ => {}
        }
    }

    fn object(&mut self, schema: &Value, fields: &Map<String, Value>, path: &str) {
        let at = |field: &str| {
            if path.is_empty() {
                field.to_owned()
            } else {
                format!("{path}.{field}")
            }
        };
        for field in schema["required"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
        {
            if fields.get(field).is_none_or(Value::is_null) {
                self.errors.push(FieldError::required(at(field), ""));
            }
        }
        let open =
            schema["x-kubernetes-preserve-unknown-fields"] == true || schema["x-kubernetes-embedded-resource"] == true;
        for (field, value) in fields {
            // The server knows these by itself, whatever the schema says.
            if path.is_empty() && ["apiVersion", "kind", "metadata"].contains(&field.as_str()) {
                continue;
            }
            if let Some(known) = schema["properties"].get(field) {
                self.node(known, value, &at(field));
            } else if schema["additionalProperties"].is_object() {
                self.node(&schema["additionalProperties"], value, &at(field));
            } else if !open && schema["properties"].is_object() {
                self.errors.push(FieldError::forbidden(at(field), "unknown field"));
            }
        }
    }

    fn pattern(&mut self, schema: &Value, text: &str, path: &str) {
        let Some(pattern) = schema["pattern"].as_str() else {
            return;
        };
        if !self.patterns.contains_key(pattern) {
            self.patterns.insert(pattern.to_owned(), Regex::new(pattern).ok());
        }
        let compiled = self.patterns.get(pattern).and_then(Option::as_ref);
        if compiled.is_some_and(|compiled| !compiled.is_match(text)) {
            let detail = format!("should match '{pattern}'");
            self.errors.push(FieldError::invalid(path, text, detail));
        }
    }
}

/// The type that the schema asks for, where the value has another.
fn wrong_type<'a>(schema: &'a Value, value: &Value) -> Option<&'a str> {
    if schema["x-kubernetes-int-or-string"] == true {
        return (!value.is_i64() && !value.is_u64() && !value.is_string()).then_some("integer or string");
    }
    let expected = schema["type"].as_str()?;
    let fits = match expected {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" if schema["format"] == "int32" => value.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        _ => true,
    };
    (!fits).then_some(expected)
}

fn range(schema: &Value, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let size = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => Some(text.chars().count() as f64),
        Value::Array(items) => Some(items.len() as f64),
        _ => None,
    };
    let (least, most, what) = match value {
        Value::Number(_) => ("minimum", "maximum", ""),
        Value::String(_) => ("minLength", "maxLength", " characters"),
        _ => ("minItems", "maxItems", " items"),
    };
    let Some(size) = size else { return };
    if let Some(limit) = schema[least].as_f64().filter(|limit| size < *limit) {
        errors.push(FieldError::invalid(
            path,
            value.clone(),
            format!("should be at least {limit}{what}"),
        ));
    }
    if let Some(limit) = schema[most].as_f64().filter(|limit| size > *limit) {
        errors.push(FieldError::invalid(
            path,
            value.clone(),
            format!("should be at most {limit}{what}"),
        ));
    }
}

/// No two entries of a set are alike, no two of a map have the same keys.
fn unique(schema: &Value, items: &[Value], path: &str, errors: &mut Vec<FieldError>) {
    let keys = schema["x-kubernetes-list-map-keys"].as_array();
    let identity = |item: &Value| match (schema["x-kubernetes-list-type"].as_str(), keys) {
        (Some("set"), _) => Some(vec![item.clone()]),
        (Some("map"), Some(keys)) => {
            let keys = keys.iter().filter_map(Value::as_str);
            Some(keys.map(|key| item[key].clone()).collect())
        }
        _ => None,
    };
    let identities: Vec<_> = items.iter().map(identity).collect();
    for (index, identity) in identities.iter().enumerate() {
        if identity.is_some() && identities[..index].contains(identity) {
            let path = format!("{path}[{index}]");
            errors.push(FieldError::invalid(
                path,
                items[index].clone(),
                "must not be there twice",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    fn schema() -> Value {
        json!({ "type": "object", "properties": { "spec": { "type": "object", "required": ["size"], "properties": {
            "size": { "type": "integer", "minimum": 4, "maximum": 64 },
            "mode": { "type": "string", "enum": ["a", "b"] },
            "surge": { "x-kubernetes-int-or-string": true },
            "tags": { "type": "object", "additionalProperties": { "type": "string" } },
            "raw": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
            "list": { "type": "array", "maxItems": 1, "items": { "type": "string", "minLength": 1 } },
            "time": { "type": "string", "pattern": "^[0-9]+s$" },
            "port": { "type": "integer", "format": "int32" },
            "zones": { "type": "array", "x-kubernetes-list-type": "set", "items": { "type": "string" } },
            "hooks": { "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                "items": { "type": "object", "properties": { "name": { "type": "string" }, "owner": { "type": "string" } } } },
        } } } })
    }

    #[rstest]
    #[case(json!({ "size": 4, "mode": "a", "surge": "10%", "tags": { "x": "y" }, "raw": { "any": 1 }, "list": ["a"] }), &[])]
    #[case(json!({ "size": 4, "mode": null }), &[])]
    #[case(json!({}), &["spec.size: Required value"])]
    #[case(json!({ "size": "4" }), &["spec.size: Invalid value: \"4\": must be of type integer"])]
    #[case(json!({ "size": 3 }), &["spec.size: Invalid value: 3: should be at least 4"])]
    #[case(json!({ "size": 65 }), &["spec.size: Invalid value: 65: should be at most 64"])]
    #[case(json!({ "size": 4, "mode": "c" }), &["spec.mode: Invalid value: \"c\": supported values: \"a\", \"b\""])]
    #[case(json!({ "size": 4, "surge": true }), &["spec.surge: Invalid value: true: must be of type integer or string"])]
    #[case(json!({ "size": 4, "tags": { "x": 1 } }), &["spec.tags.x: Invalid value: 1: must be of type string"])]
    #[case(json!({ "size": 4, "sise": 1 }), &["spec.sise: Forbidden: unknown field"])]
    #[case(json!({ "size": 4, "list": ["", ""] }), &["spec.list: Invalid value: [\"\",\"\"]: should be at most 1 items", "spec.list[0]: Invalid value: \"\": should be at least 1 characters", "spec.list[1]: Invalid value: \"\": should be at least 1 characters"])]
    #[case(json!({ "size": 4, "time": "10s", "port": 2_147_483_647, "zones": ["1", "2"] }), &[])]
    #[case(json!({ "size": 4, "time": "soon" }), &["spec.time: Invalid value: \"soon\": should match '^[0-9]+s$'"])]
    #[case(json!({ "size": 4, "port": 2_147_483_648_i64 }), &["spec.port: Invalid value: 2147483648: must be of type integer"])]
    #[case(json!({ "size": 4, "zones": ["1", "2", "1"] }), &["spec.zones[2]: Invalid value: \"1\": must not be there twice"])]
    #[case(json!({ "size": 4, "hooks": [{ "name": "a", "owner": "x" }, { "name": "b", "owner": "x" }] }), &[])]
    #[case(json!({ "size": 4, "hooks": [{ "name": "a", "owner": "x" }, { "name": "a", "owner": "y" }] }), &["spec.hooks[1]: Invalid value: {\"name\":\"a\",\"owner\":\"y\"}: must not be there twice"])]
    fn values_are_held_against_the_schema(#[case] spec: Value, #[case] expected: &[&str]) {
        let found: Vec<_> = Checker::default()
            .check(&schema(), &json!({ "kind": "X", "spec": spec }))
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected);
    }

    proptest! {
        #[test]
        fn no_document_makes_it_panic(text in "[\\[\\]{}\":,a-d0-9 ]{0,60}") {
            if let Ok(value) = serde_json::from_str(&text) {
                let mut checker = Checker::default();
                checker.check(&schema(), &value);
                checker.check(&value, &json!({ "spec": { "size": 1 } }));
            }
        }
    }
}
