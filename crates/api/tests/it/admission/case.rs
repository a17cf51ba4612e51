//! Objects, and the API server's answers to them. `capstan check` is tested with the same cases.

use capstan_api::crds;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// One object, as it was and as it is to be, and the API server's answer.
pub struct Case {
    pub kind: &'static str,
    pub name: Option<&'static str>,
    pub before: Option<Value>,
    pub spec: Value,
    /// Parts of the refusal, all of which must be there; none when it is accepted.
    pub refusal: Vec<String>,
}

/// A spec that is created.
pub fn creating(kind: &'static str, spec: Value) -> Case {
    Case {
        kind,
        name: None,
        before: None,
        spec,
        refusal: Vec::new(),
    }
}

/// A spec that takes the place of another.
pub fn changing(kind: &'static str, before: Value, spec: Value) -> Case {
    Case {
        kind,
        name: None,
        before: Some(before),
        spec,
        refusal: Vec::new(),
    }
}

impl Case {
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    pub fn refused(mut self, parts: &[&str]) -> Self {
        self.refusal = parts.iter().map(|part| (*part).to_owned()).collect();
        self
    }
}

/// `base` with the value at a JSON pointer replaced, or removed when it is null; missing objects are made.
pub fn with(base: &Value, pointer: &str, value: Value) -> Value {
    let mut changed = base.clone();
    let mut keys: Vec<_> = pointer.split('/').skip(1).collect();
    let last = keys.pop().expect("a pointer to a field");
    let mut node = &mut changed;
    for key in keys {
        node = match node {
            Value::Array(list) => &mut list[key.parse::<usize>().expect("an index")],
            _ => node
                .as_object_mut()
                .expect("an object")
                .entry(key)
                .or_insert_with(|| json!({})),
        };
    }
    let fields = node.as_object_mut().expect("an object");
    match value {
        Value::Null => _ = fields.remove(last),
        value => _ = fields.insert(last.to_owned(), value),
    }
    changed
}

/// Made once: schemas of fourteen kinds take a while without optimisation.
pub static CRDS: LazyLock<Vec<CustomResourceDefinition>> =
    LazyLock::new(|| crds().into_iter().map(v1beta1_alone).collect());

/// The rules of v1beta1 are judged without a conversion webhook: the kinds with another version have definitions of their own
/// here, with v1beta1 alone.
fn v1beta1_alone(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let spec = &mut crd.spec;
    if spec.conversion.take().is_none() {
        return crd;
    }
    spec.versions.retain(|version| version.name == "v1beta1");
    spec.versions.iter_mut().for_each(|version| version.storage = true);
    "admission.example.com".clone_into(&mut spec.group);
    let names = &mut spec.names;
    (names.short_names, names.categories) = (None, None);
    names.plural = format!("old{}", names.plural);
    names.singular = names.singular.take().map(|name| format!("old{name}"));
    crd.metadata.name = Some(format!("{}.{}", names.plural, spec.group));
    crd.metadata.labels = None;
    crd
}
