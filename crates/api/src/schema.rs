//! From Rust types to structural schemas.
//!
//! Invariants: everything is inlined; an `Option` looks no different from what it holds (what is unset is left out,
//! never null); the only defaults are those asked for by `x-default`, so that reading leniently never writes.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value};

/// Prefix of the types of Kubernetes. Their field descriptions are left to the documentation of Kubernetes.
const KUBERNETES_PREFIX: &str = "io.k8s.";

/// Types of Kubernetes that have one owner under server-side apply, because a part of a reference is useless.
const WHOLE: [&str; 5] = [
    "LabelSelector",
    "ObjectReference",
    "OwnerReference",
    "SecretReference",
    "TypedLocalObjectReference",
];

/// A kind whose definition Capstan ships.
pub(crate) trait Kind {
    const GROUP: &'static str;
    const VERSION: &'static str;
    const KIND: &'static str;
    const PLURAL: &'static str;
    const SCOPE: &'static str;

    fn spec_schema() -> Value;
    fn status_schema() -> Option<Value>;
}

/// Returns the schema of a type.
pub(crate) fn plain<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.meta_schema = None);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    let definitions = schema.as_object_mut().and_then(|root| root.remove("$defs"));
    simplify(
        &mut schema,
        definitions.as_ref().and_then(Value::as_object).unwrap_or(&Map::new()),
    );
    schema
}

fn simplify(schema: &mut Value, definitions: &Map<String, Value>) {
    let Some(node) = schema.as_object_mut() else { return };
    if let Some(branch) = node.get("anyOf").and_then(only_branch) {
        node.remove("anyOf");
        merge(node, branch);
    }
    if let Some(Value::String(reference)) = node.remove("$ref") {
        merge(node, resolve(&reference, definitions));
    }
    for key in ["title", "default", "nullable"] {
        node.remove(key);
    }
    if let Some(default) = node.remove("x-default") {
        node.insert("default".to_owned(), default);
    }
    // A field takes the rules of its type back with an empty list of its own.
    if node
        .get("x-kubernetes-validations")
        .is_some_and(|rules| rules == &Value::Array(Vec::new()))
    {
        node.remove("x-kubernetes-validations");
    }
    without_null(node);
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = node.get_mut(key) {
            simplify(inner, definitions);
        }
    }
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties
            .values_mut()
            .for_each(|property| simplify(property, definitions));
    }
}

/// Merges the schema of a type into that of a field. The field's own keywords win.
fn merge(node: &mut Map<String, Value>, below: Map<String, Value>) {
    for (key, value) in below {
        node.entry(key).or_insert(value);
    }
}

fn resolve(reference: &str, definitions: &Map<String, Value>) -> Map<String, Value> {
    let name = reference.trim_start_matches("#/$defs/");
    let mut definition = definitions.get(name).cloned().unwrap_or_default();
    let short = name
        .strip_prefix(KUBERNETES_PREFIX)
        .and_then(|path| path.rsplit('.').next());
    if short.is_some() {
        undescribe(&mut definition);
    }
    let mut node = match definition {
        Value::Object(node) => node,
        _ => Map::new(),
    };
    if short.is_some_and(|short| WHOLE.contains(&short)) {
        node.insert("x-kubernetes-map-type".to_owned(), "atomic".into());
    }
    node
}

fn undescribe(definition: &mut Value) {
    let Some(node) = definition.as_object_mut() else { return };
    node.remove("description");
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = node.get_mut(key) {
            undescribe(inner);
        }
    }
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(undescribe);
    }
}

/// Removes null from types and enums: `["string", "null"]` becomes `"string"`.
fn without_null(node: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = node.get("type") {
        let kept = types.iter().find(|name| *name != "null").cloned();
        node.extend(kept.map(|name| ("type".to_owned(), name)));
    }
    if let Some(Value::Array(words)) = node.get_mut("enum") {
        words.retain(|word| !word.is_null());
    }
}

/// Returns the branch of an `Option`'s `anyOf` that is not null.
fn only_branch(branches: &Value) -> Option<Map<String, Value>> {
    let is_null = |branch: &&Value| branch.get("type").is_some_and(|name| name == "null");
    let mut kept = branches.as_array()?.iter().filter(|branch| !is_null(branch));
    match (kept.next(), kept.next()) {
        (Some(branch), None) => branch.as_object().cloned(),
        _ => None,
    }
}
