//! The CustomResourceDefinitions that Capstan ships, made from the types.

mod definition;
mod kinds;
mod template_policy;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;
pub use template_policy::template_policy;

/// Returns every definition, in the order of the documentation.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let all = kinds::all().into_iter().map(definition::Definition::build).collect();
    crate::vsphere::v1beta2::serve_v1beta2(all)
}

/// Returns the name of the file in `deploy/crds` that holds the definition.
pub fn file_name(crd: &CustomResourceDefinition) -> String {
    format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural)
}

/// Returns an object as a manifest for `kubectl apply`.
pub fn manifest(object: &impl serde::Serialize) -> Result<String, serde_saphyr::ser::Error> {
    // Serde's JSON of a definition of our own types does not fail. If it did, the manifest would be empty and the drift
    // test would fail.
    let mut value = serde_json::to_value(object).unwrap_or_default();
    whole_numbers(&mut value);
    serde_saphyr::to_string(&value)
}

/// Limits are floating point in the definition's type: `63` reads better than `63.0`.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let whole = number
                .as_f64()
                .filter(|n| n.fract() == 0.0 && n.abs() < f64::from(i32::MAX));
            if let (true, Some(whole)) = (number.is_f64(), whole) {
                *value = (whole as i64).into();
            }
        }
        Value::Array(list) => list.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        _ => {}
    }
}
