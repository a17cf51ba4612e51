//! The CustomResourceDefinitions that Capstan ships, made from the types.

mod definition;
mod kinds;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

/// Every definition, in the order in which they are listed in the documentation.
pub fn crds() -> Vec<CustomResourceDefinition> {
    kinds::all().into_iter().map(definition::Definition::build).collect()
}

/// The file that a definition is kept in under `deploy/crds`.
pub fn file_name(crd: &CustomResourceDefinition) -> String {
    format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural)
}

/// A definition as a manifest, as `kubectl apply` takes it.
pub fn manifest(crd: &CustomResourceDefinition) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(crd)
}
