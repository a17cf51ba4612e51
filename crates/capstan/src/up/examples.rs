//! The examples that `capstan up` applies: the files of `examples/`, with the simulated clouds' addresses filled in.

use anyhow::{Context, Result};
use capstan_testkit::manifests;
use kube::api::DynamicObject;

use crate::controllers::Name;

/// The namespace of objects that name none.
pub const NAMESPACE: &str = "default";

macro_rules! example {
    ($name:expr, $file:literal) => {
        ($name, $file, include_str!(concat!("../../../../examples/", $file)))
    };
}

const FILES: [(Name, &str, &str); 3] = [
    example!(Name::Openshift, "openshift.yaml"),
    example!(Name::AzurePools, "azure-pool/pool.yaml"),
    example!(Name::Vsphere, "vsphere.yaml"),
];

/// The objects of all examples for these controllers, in the order of their files.
pub fn load(controllers: &[Name], variables: &[(&str, String)]) -> Result<Vec<DynamicObject>> {
    let mut objects = Vec::new();
    for (_, file, text) in FILES.iter().filter(|(name, ..)| controllers.contains(name)) {
        let text = variables.iter().fold((*text).to_owned(), |text, (name, value)| {
            text.replace(&format!("${{{name}}}"), value)
        });
        objects.extend(manifests::parse(&text).with_context(|| format!("cannot read examples/{file}"))?);
    }
    Ok(objects)
}

/// Whether an object is a machine, or creates machines.
pub fn is_machine(object: &DynamicObject) -> bool {
    let kind = object
        .types
        .as_ref()
        .map(|types| types.kind.as_str())
        .unwrap_or_default();
    kind.contains("Machine") && !kind.ends_with("Template")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_complete_once_the_clouds_are_known() {
        let names = [
            "AZURE_SUBSCRIPTION_ID",
            "AZURE_TENANT_ID",
            "AZURE_CLIENT_ID",
            "AZURE_CLIENT_SECRET",
            "VSPHERE_SERVER",
            "VSPHERE_USERNAME",
            "VSPHERE_PASSWORD",
            "VSPHERE_THUMBPRINT",
        ];
        let variables: Vec<_> = names.into_iter().map(|name| (name, "filled-in".to_owned())).collect();
        let objects = load(&Name::ALL, &variables).unwrap();
        assert!(objects.len() > 20);
        for object in &objects {
            let text = serde_json::to_string(object).unwrap();
            assert!(!text.contains("${"), "{text}");
        }
    }
}
