//! Who we are towards Azure for a cluster.
//!
//! Invariant: an AzureClusterIdentity is used only by clusters in namespaces that it allows, and its secret is read only
//! after that has been checked.

use std::path::PathBuf;

use capstan_api::azure::{AllowedNamespaces, AzureCluster, AzureClusterIdentity, IdentityType};
use capstan_azure::{Credential, Secret as Hidden};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{Api, ResourceExt};
use std::collections::BTreeMap;

use crate::error::Error;

/// Where the projected service account token is mounted, unless the SDKs' own variable says otherwise.
const TOKEN_FILE: &str = "/var/run/secrets/azure/tokens/azure-identity-token";
const TOKEN_FILE_VARIABLE: &str = "AZURE_FEDERATED_TOKEN_FILE";
const SECRET_KEY: &str = "clientSecret";
const CERTIFICATE_KEYS: [&str; 2] = ["certificate", SECRET_KEY];

/// The credential of a cluster. Without an identityRef, that of the environment we run in.
pub async fn credential(client: &kube::Client, cluster: &AzureCluster) -> Result<Credential, Error> {
    let namespace = cluster.namespace().unwrap_or_default();
    let Some(reference) = &cluster.spec.identity_ref else {
        return from_environment();
    };
    let name = reference.name.clone().unwrap_or_default();
    let home = reference
        .namespace
        .clone()
        .filter(|home| !home.is_empty())
        .unwrap_or_else(|| namespace.clone());
    let found = Api::<AzureClusterIdentity>::namespaced(client.clone(), &home)
        .get_opt(&name)
        .await?;
    let refuse = |reason: String| Error::Identity {
        identity: format!("{home}/{name}"),
        reason,
    };
    let identity = found.ok_or_else(|| refuse("does not exist".to_owned()))?;
    if !permitted(client, &identity, &namespace).await? {
        return Err(refuse(format!(
            "does not allow namespace {namespace}: add it to allowedNamespaces"
        )));
    }
    read(client, &identity).await
}

async fn permitted(client: &kube::Client, identity: &AzureClusterIdentity, namespace: &str) -> Result<bool, Error> {
    let allowed = identity.spec.allowed_namespaces.as_ref();
    let needs_labels = allowed.and_then(|allowed| allowed.selector.as_ref()).is_some();
    let labels = match needs_labels {
        true => Api::<Namespace>::all(client.clone())
            .get(namespace)
            .await?
            .metadata
            .labels
            .unwrap_or_default(),
        false => BTreeMap::new(),
    };
    Ok(is_allowed(allowed, namespace, &labels))
}

/// Unset allows none, not even the identity's own namespace; an empty object allows all; a list or a selector those that
/// it names.
fn is_allowed(allowed: Option<&AllowedNamespaces>, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
    let Some(allowed) = allowed else { return false };
    match (&allowed.list[..], &allowed.selector) {
        ([], None) => true,
        (list, selector) => {
            list.iter().any(|name| name == namespace) || selector.as_ref().is_some_and(|s| selects(s, labels))
        }
    }
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
    let expressions = selector.match_expressions.iter().flatten();
    // An empty selector would match every namespace; nobody means that when naming namespaces.
    let empty = selector.match_labels.iter().flatten().next().is_none() && expressions.clone().next().is_none();
    !empty
        && selector.match_labels.iter().flatten().all(equal)
        && expressions.clone().all(|expression| {
            let value = labels.get(&expression.key);
            let listed = value.is_some_and(|value| expression.values.iter().flatten().any(|v| v == value));
            match expression.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        })
}

async fn read(client: &kube::Client, identity: &AzureClusterIdentity) -> Result<Credential, Error> {
    let spec = &identity.spec;
    let (tenant, client_id) = (spec.tenant_id.clone(), spec.client_id.clone());
    let refuse = |reason: String| Error::Identity {
        identity: identity.name_any(),
        reason,
    };
    match &spec.type_ {
        IdentityType::ServicePrincipal | IdentityType::ManualServicePrincipal => {
            let secret = secret(client, identity, &[SECRET_KEY]).await?;
            Ok(Credential::Secret {
                tenant,
                client_id,
                secret,
            })
        }
        IdentityType::ServicePrincipalCertificate => {
            let pem = match spec.cert_path.as_deref().filter(|path| !path.is_empty()) {
                Some(path) => {
                    let bytes = tokio::fs::read(path).await;
                    let bytes = bytes.map_err(|error| refuse(format!("certPath {path}: {error}")))?;
                    // What is no text is said to be no PEM when it is used.
                    Hidden::new(String::from_utf8_lossy(&bytes))
                }
                None => secret(client, identity, &CERTIFICATE_KEYS).await?,
            };
            Ok(Credential::Certificate { tenant, client_id, pem })
        }
        IdentityType::WorkloadIdentity => {
            let token_file = std::env::var_os(TOKEN_FILE_VARIABLE).map_or_else(|| TOKEN_FILE.into(), PathBuf::from);
            Ok(Credential::WorkloadIdentity {
                tenant,
                client_id,
                token_file,
            })
        }
        IdentityType::UserAssignedMsi => Ok(Credential::ManagedIdentity {
            client_id: Some(client_id),
        }),
        IdentityType::UserAssignedIdentityCredential => {
            credentials_file(spec.user_assigned_identity_credentials_path.as_deref(), tenant)
                .await
                .map_err(refuse)
        }
        IdentityType::Other(other) => Err(refuse(format!("type {other:?} is not known"))),
    }
}

/// Azure's managed platform writes a certificate credential to a file, as JSON.
async fn credentials_file(path: Option<&str>, tenant: String) -> Result<Credential, String> {
    #[derive(serde::Deserialize)]
    struct File {
        client_id: String,
        tenant_id: Option<String>,
        client_secret: String,
    }
    let path = path
        .filter(|path| !path.is_empty())
        .ok_or("userAssignedIdentityCredentialsPath is not set")?;
    let text = tokio::fs::read_to_string(path)
        .await
        .map_err(|error| format!("{path}: {error}"))?;
    let file: File = serde_json::from_str(&text).map_err(|_| format!("{path} is not a credential of Azure's"))?;
    let tenant = file.tenant_id.unwrap_or(tenant);
    Ok(Credential::Certificate {
        tenant,
        client_id: file.client_id,
        pem: Hidden::new(file.client_secret),
    })
}

/// A value of the identity's secret. Its namespace is the one the identity names, else the identity's own.
async fn secret(client: &kube::Client, identity: &AzureClusterIdentity, keys: &[&str]) -> Result<Hidden, Error> {
    let reference = &identity.spec.client_secret;
    let home = reference
        .namespace
        .clone()
        .filter(|home| !home.is_empty())
        .or_else(|| identity.namespace());
    let (home, name) = (home.unwrap_or_default(), reference.name.clone().unwrap_or_default());
    let refuse = |reason: &str| Error::Identity {
        identity: identity.name_any(),
        reason: format!("secret {home}/{name} {reason}"),
    };
    let found = Api::<Secret>::namespaced(client.clone(), &home).get_opt(&name).await?;
    let data = found.ok_or_else(|| refuse("does not exist"))?.data.unwrap_or_default();
    let value = keys
        .iter()
        .find_map(|key| data.get(*key))
        .ok_or_else(|| refuse("has no such key: clientSecret"))?;
    let text = std::str::from_utf8(&value.0).map_err(|_| refuse("is not text"))?;
    Ok(Hidden::new(text.trim_end_matches('\n')))
}

/// The credential that Azure's SDKs would find by themselves.
fn from_environment() -> Result<Credential, Error> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let Some(client_id) = set("AZURE_CLIENT_ID") else {
        return Ok(Credential::ManagedIdentity { client_id: None });
    };
    let tenant = set("AZURE_TENANT_ID").ok_or_else(|| Error::Identity {
        identity: client_id.clone(),
        reason: "AZURE_TENANT_ID is not set".to_owned(),
    })?;
    Ok(match (set("AZURE_CLIENT_SECRET"), set(TOKEN_FILE_VARIABLE)) {
        (Some(secret), _) => Credential::Secret {
            tenant,
            client_id,
            secret: Hidden::new(secret),
        },
        (None, Some(file)) => Credential::WorkloadIdentity {
            tenant,
            client_id,
            token_file: file.into(),
        },
        (None, None) => Credential::ManagedIdentity {
            client_id: Some(client_id),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::unset_is_none(Value::Null, false)]
    #[case::empty_is_all(json!({}), true)]
    #[case::listed(json!({ "list": ["team-a"] }), true)]
    #[case::not_listed(json!({ "list": ["team-b"] }), false)]
    #[case::selected(json!({ "selector": { "matchLabels": { "env": "prod" } } }), true)]
    #[case::not_selected(json!({ "selector": { "matchLabels": { "env": "test" } } }), false)]
    #[case::by_expression(
        json!({ "selector": { "matchExpressions": [{ "key": "env", "operator": "In", "values": ["prod"] }] } }), true)]
    #[case::empty_selector(json!({ "selector": {} }), false)]
    #[case::list_or_selector(
        json!({ "list": ["team-b"], "selector": { "matchLabels": { "env": "prod" } } }), true)]
    fn an_identity_is_used_where_it_allows(#[case] allowed: Value, #[case] expected: bool) {
        let allowed: Option<AllowedNamespaces> = serde_json::from_value(allowed).unwrap();
        let labels = BTreeMap::from([("env".to_owned(), "prod".to_owned())]);
        assert_eq!(is_allowed(allowed.as_ref(), "team-a", &labels), expected);
    }
}
