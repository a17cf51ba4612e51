//! Tells the API server where the webhooks are. Invariant: failurePolicy is Ignore: with the program away the API server
//! goes on, and the controller refuses the object by the same words.

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference, ValidatingWebhook,
    ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::api::{Api, DeleteParams, Patch, PatchParams};

use capstan_kube::webhook::{Address, Place};

use super::Error;

pub const MUTATE: &str = "/mutate";
pub const VALIDATE: &str = "/validate";
/// A slow answer must not hold up users for long: the controller checks again anyway.
const TIMEOUT_SECONDS: i32 = 5;
const FIELD_MANAGER: &str = "capstan-webhook";

/// The content of the two configurations.
pub struct Registration<'a> {
    /// Name of both configurations.
    pub name: &'a str,
    pub place: Place<'a>,
    /// Only objects of this namespace, if any.
    pub namespace: Option<&'a str>,
}

impl Registration<'_> {
    /// Write both; what is already so is not changed.
    pub async fn apply(&self, client: &kube::Client) -> Result<(), Error> {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        mutating
            .patch(self.name, &params, &Patch::Apply(self.mutating()))
            .await
            .map_err(capstan_kube::Error::from)?;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
        let patch = Patch::Apply(self.validating());
        validating
            .patch(self.name, &params, &patch)
            .await
            .map_err(capstan_kube::Error::from)?;
        Ok(())
    }

    fn metadata(&self) -> ObjectMeta {
        ObjectMeta {
            name: Some(self.name.to_owned()),
            ..ObjectMeta::default()
        }
    }

    fn mutating(&self) -> MutatingWebhookConfiguration {
        let webhook = |(kind, resource): (&str, &str)| MutatingWebhook {
            name: format!("default.{kind}.machine.openshift.io"),
            client_config: self.client_config(MUTATE),
            rules: Some(vec![rule(resource)]),
            namespace_selector: self.namespaces(),
            failure_policy: Some("Ignore".to_owned()),
            side_effects: "None".to_owned(),
            timeout_seconds: Some(TIMEOUT_SECONDS),
            admission_review_versions: vec!["v1".to_owned()],
            match_policy: Some("Equivalent".to_owned()),
            ..MutatingWebhook::default()
        };
        let webhooks = Some(KINDS.map(webhook).to_vec());
        MutatingWebhookConfiguration {
            metadata: self.metadata(),
            webhooks,
        }
    }

    fn validating(&self) -> ValidatingWebhookConfiguration {
        let webhook = |(kind, resource): (&str, &str)| ValidatingWebhook {
            name: format!("validation.{kind}.machine.openshift.io"),
            client_config: self.client_config(&format!("{VALIDATE}/{}", self.place.proof)),
            rules: Some(vec![rule(resource)]),
            namespace_selector: self.namespaces(),
            failure_policy: Some("Ignore".to_owned()),
            side_effects: "None".to_owned(),
            timeout_seconds: Some(TIMEOUT_SECONDS),
            admission_review_versions: vec!["v1".to_owned()],
            match_policy: Some("Equivalent".to_owned()),
            ..ValidatingWebhook::default()
        };
        let webhooks = Some(KINDS.map(webhook).to_vec());
        ValidatingWebhookConfiguration {
            metadata: self.metadata(),
            webhooks,
        }
    }

    fn client_config(&self, path: &str) -> WebhookClientConfig {
        let ca_bundle = Some(ByteString(self.place.bundle.as_bytes().to_vec()));
        match self.place.address {
            Address::Url(host) => WebhookClientConfig {
                ca_bundle,
                url: Some(format!("https://{host}{path}")),
                service: None,
            },
            Address::Service { namespace, name, port } => {
                let (namespace, name, path) = (namespace.clone(), name.clone(), Some(path.to_owned()));
                let service = ServiceReference {
                    namespace,
                    name,
                    path,
                    port: Some(i32::from(*port)),
                };
                WebhookClientConfig {
                    ca_bundle,
                    service: Some(service),
                    url: None,
                }
            }
        }
    }

    fn namespaces(&self) -> Option<LabelSelector> {
        let namespace = self.namespace?.to_owned();
        let labels = [("kubernetes.io/metadata.name".to_owned(), namespace)].into();
        Some(LabelSelector {
            match_labels: Some(labels),
            ..LabelSelector::default()
        })
    }
}

/// Take both configurations away.
pub async fn remove(client: &kube::Client, name: &str) -> Result<(), Error> {
    let params = DeleteParams::default();
    let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    mutating
        .delete(name, &params)
        .await
        .map_err(capstan_kube::Error::from)?;
    validating
        .delete(name, &params)
        .await
        .map_err(capstan_kube::Error::from)?;
    Ok(())
}

const KINDS: [(&str, &str); 2] = [("machine", "machines"), ("machineset", "machinesets")];

fn rule(resource: &str) -> RuleWithOperations {
    RuleWithOperations {
        api_groups: Some(vec!["machine.openshift.io".to_owned()]),
        api_versions: Some(vec!["v1beta1".to_owned()]),
        operations: Some(vec!["CREATE".to_owned(), "UPDATE".to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        scope: Some("Namespaced".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const SHIPPED: &str = include_str!("../../../../../deploy/controllers/openshift/webhook.yaml");

    #[test]
    fn the_installation_ships_the_configurations_that_are_written_except_for_the_ca_and_the_path_that_proves_a_review()
    {
        let address = Address::Service {
            namespace: "capstan-system".to_owned(),
            name: "capstan-webhook".to_owned(),
            port: 443,
        };
        let registration = Registration {
            name: "capstan-machine-api",
            place: Place {
                address: &address,
                bundle: "",
                proof: "x",
            },
            namespace: None,
        };
        let shipped: Vec<Value> = serde_saphyr::from_multiple(SHIPPED).unwrap();
        let (mutating, validating) = (registration.mutating(), registration.validating());
        for written in [serde_json::to_value(mutating), serde_json::to_value(validating)] {
            let mut written = written.unwrap();
            for webhook in written["webhooks"].as_array_mut().unwrap() {
                webhook["clientConfig"].as_object_mut().unwrap().remove("caBundle");
                let service = webhook["clientConfig"]["service"].as_object_mut().unwrap();
                service.retain(|field, value| field != "path" || value == MUTATE);
            }
            assert!(shipped.contains(&written), "deploy/ lacks {written:#}");
        }
    }
}
