//! From Rust types to structural schemas.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::Value;

/// The schema of a type, with everything inlined and `Option`s no different from what they hold.
pub(crate) fn plain<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    simplify(&mut schema);
    schema
}

/// Undoes what schemars does for `Option`: `nullable`, `anyOf` with a null branch, `["string", "null"]`.
fn simplify(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else { return };
    node.remove("nullable");
    node.remove("title");
    node.remove("default");
    if let Some(default) = node.remove("x-default") {
        node.insert("default".to_owned(), default);
    }
    if let Some(branch) = node.get("anyOf").and_then(only_branch) {
        node.remove("anyOf");
        for (key, value) in branch {
            node.entry(key).or_insert(value);
        }
        return simplify(schema);
    }
    if let Some(Value::Array(types)) = node.get("type") {
        let kept = types.iter().find(|name| *name != "null").cloned();
        node.extend(kept.map(|name| ("type".to_owned(), name)));
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = node.get_mut(key) {
            simplify(inner);
        }
    }
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(simplify);
    }
}

/// The branch of an `Option`'s `anyOf` that is not null.
fn only_branch(branches: &Value) -> Option<serde_json::Map<String, Value>> {
    let is_null = |branch: &&Value| {
        branch
            .get("enum")
            .is_some_and(|values| values == &serde_json::json!([null]))
            || branch.get("type").is_some_and(|name| name == "null")
    };
    let mut kept = branches.as_array()?.iter().filter(|branch| !is_null(branch));
    match (kept.next(), kept.next()) {
        (Some(branch), None) => branch.as_object().cloned(),
        _ => None,
    }
}
