//! JSON merge patch (RFC 7386), and the part of the strategic merge patch that Nodes and Pods need.

use serde_json::{Map, Value};

pub fn merge(into: &mut Value, patch: &Value) {
    apply(into, patch, &|_| None);
}

/// As [`merge`], but lists of these fields are merged by the key of their items.
pub fn strategic(into: &mut Value, patch: &Value) {
    apply(into, patch, &|field| match field {
        "conditions" | "addresses" => Some("type"),
        "containers" | "volumes" => Some("name"),
        "ownerReferences" => Some("uid"),
        _ => None,
    });
}

fn apply(into: &mut Value, patch: &Value, key_of: &impl Fn(&str) -> Option<&'static str>) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    let Some(fields) = into.as_object_mut() else { return };
    for (field, change) in patch {
        match (change, key_of(field)) {
            (Value::Null, _) => drop(fields.remove(field)),
            (Value::Array(items), Some(key)) => {
                let list = fields.entry(field.clone()).or_insert_with(|| Value::Array(Vec::new()));
                merge_items(list, items, key, key_of);
            }
            _ => apply(fields.entry(field.clone()).or_insert(Value::Null), change, key_of),
        }
    }
}

fn merge_items(list: &mut Value, items: &[Value], key: &str, key_of: &impl Fn(&str) -> Option<&'static str>) {
    let Some(list) = list.as_array_mut() else { return };
    for item in items {
        match list.iter().position(|old| old[key] == item[key]) {
            Some(place) if item["$patch"] == "delete" => drop(list.remove(place)),
            Some(place) => apply(&mut list[place], item, key_of),
            None => list.push(item.clone()),
        }
    }
}

/// The API server keeps no nulls.
pub fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_null_removes_and_a_list_is_replaced() {
        let mut value = json!({"a": {"b": 1, "c": [1, 2]}, "d": "x"});
        merge(
            &mut value,
            &json!({"a": {"b": null, "c": [3], "e": {"f": null, "g": 1}}, "d": "y"}),
        );
        assert_eq!(value, json!({"a": {"c": [3], "e": {"g": 1}}, "d": "y"}));
    }

    #[test]
    fn conditions_are_merged_by_type() {
        let mut value = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Disk"}]}});
        strategic(
            &mut value,
            &json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
        );
        let expected = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Disk"}]}});
        assert_eq!(value, expected);
    }
}
