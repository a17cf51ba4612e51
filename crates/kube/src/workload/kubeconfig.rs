//! The kubeconfig of a workload cluster, as its Secret holds it. Invariant: a tenant writes this Secret, so nothing in
//! it can start a process, name a file or a proxy, or switch a check off. The client's configuration is built from a
//! list of allowed fields; a selected cluster or user with any other field is refused by that field's name.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::config::{
    AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, KubeconfigError, NamedAuthInfo, NamedCluster,
    NamedContext,
};
use serde::Deserialize;
use serde_json::Value;

use super::ClusterKey;
use crate::cache;

/// The key of the kubeconfig in its Secret, by Cluster API's contract.
const SECRET_KEY: &str = "value";
/// The type of every Secret that Cluster API creates.
const SECRET_TYPE: &str = "cluster.x-k8s.io/secret";
/// The label with the name of the Cluster.
const CLUSTER_LABEL: &str = "cluster.x-k8s.io/cluster-name";
/// Fields without effect here: they are allowed and not used.
const WITHOUT_EFFECT: [&str; 2] = ["extensions", "disable-compression"];
/// Bytes of a kubeconfig at most: one with chains of certificates has some dozens of KiB.
const LARGEST: usize = 64 << 10;
/// At most so much of a field's name is repeated in a reason.
const NAME_CHARACTERS: usize = 64;
/// The one name of cluster, user and context in the configuration that is built.
const NAME: &str = "workload";

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Document {
    current_context: Option<String>,
    #[serde(default)]
    contexts: Vec<ContextEntry>,
    #[serde(default)]
    clusters: Vec<ClusterEntry>,
    #[serde(default)]
    users: Vec<UserEntry>,
}

#[derive(Deserialize)]
struct ContextEntry {
    name: String,
    context: ContextFields,
}

#[derive(Deserialize)]
struct ContextFields {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct ClusterEntry {
    name: String,
    cluster: ClusterFields,
}

/// The fields of a cluster that are used, and `other` for those that are not.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ClusterFields {
    server: String,
    certificate_authority_data: Option<String>,
    tls_server_name: Option<String>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct UserEntry {
    name: String,
    user: UserFields,
}

/// The fields of a user that are used, and `other` for those that are not.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct UserFields {
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// Removes what is not needed of a Secret before it is kept. Too much of a kubeconfig shows that it is too large.
pub(super) fn trim(secret: &mut Secret) {
    cache::trim(secret);
    if let Some(data) = &mut secret.data {
        data.retain(|key, _| key == SECRET_KEY);
        for value in data.values_mut() {
            value.0.truncate(LARGEST + 1);
            value.0.shrink_to_fit();
        }
    }
}

/// Returns the kubeconfig in the Secret of `cluster`, or why the Secret is refused.
pub(super) fn of_secret(secret: &Secret, cluster: &ClusterKey) -> Result<String, String> {
    let refuse = |reason: &str| Err(format!("Secret {} {reason}", cluster.secret()));
    if secret.type_.as_deref() != Some(SECRET_TYPE) {
        return refuse(&format!("is refused: its type must be {SECRET_TYPE}"));
    }
    if secret.labels().get(CLUSTER_LABEL) != Some(&cluster.name) {
        return refuse(&format!(
            "is refused: its label {CLUSTER_LABEL} must be {}",
            cluster.name
        ));
    }
    let Some(value) = secret.data.as_ref().and_then(|data| data.get(SECRET_KEY)) else {
        return refuse(&format!("has no key {SECRET_KEY}"));
    };
    if value.0.len() > LARGEST {
        return refuse(&format!("is refused: its kubeconfig has more than {LARGEST} bytes"));
    }
    match String::from_utf8(value.0.clone()) {
        Ok(text) => Ok(text),
        Err(_) => refuse("holds a kubeconfig that is not UTF-8"),
    }
}

/// Returns a client configuration with the allowed fields of `text` and nothing else, or why it is refused. A reason
/// never repeats a value: it may be a credential.
pub(super) async fn config(text: &str) -> Result<kube::Config, String> {
    let clean = allowed(text)?;
    let config = kube::Config::from_custom_kubeconfig(clean, &KubeConfigOptions::default()).await;
    config.map_err(|error| match error {
        KubeconfigError::LoadCertificateAuthority(_) | KubeconfigError::ParseCertificates(_) => {
            "field clusters[].cluster.certificate-authority-data is not a PEM certificate in base64".to_owned()
        }
        KubeconfigError::ParseProxyUrl(_) | KubeconfigError::ParseNoProxy(_) => {
            "the proxy that the environment of Capstan names is not valid".to_owned()
        }
        _ => "the kubeconfig is not valid".to_owned(),
    })
}

fn allowed(text: &str) -> Result<Kubeconfig, String> {
    // The parser's own message may quote the text.
    let document: Document =
        serde_saphyr::from_str(text).map_err(|_| "the kubeconfig is not valid: check it with kubectl".to_owned())?;
    let current = document.current_context.unwrap_or_default();
    let context = document.contexts.into_iter().find(|entry| entry.name == current);
    let context = context.ok_or("field current-context names no context")?.context;
    let cluster = document
        .clusters
        .into_iter()
        .find(|entry| entry.name == context.cluster);
    let cluster = cluster
        .ok_or("field contexts[].context.cluster names no cluster")?
        .cluster;
    let user = document.users.into_iter().find(|entry| entry.name == context.user);
    let user = user.ok_or("field contexts[].context.user names no user")?.user;

    nothing_else("clusters[].cluster", &cluster.other)?;
    nothing_else("users[].user", &user.other)?;
    check_server(&cluster.server)?;
    if user.client_certificate_data.is_some() != user.client_key_data.is_some() {
        return Err("fields users[].user.client-certificate-data and client-key-data need each other".to_owned());
    }
    if user.client_certificate_data.is_none() && user.token.is_none() {
        return Err("field users[].user has neither client-certificate-data nor token".to_owned());
    }

    let cluster = Cluster {
        server: Some(cluster.server),
        certificate_authority_data: cluster.certificate_authority_data,
        tls_server_name: cluster.tls_server_name,
        ..Cluster::default()
    };
    let user = AuthInfo {
        client_certificate_data: user.client_certificate_data,
        client_key_data: user.client_key_data.map(Into::into),
        token: user.token.map(Into::into),
        ..AuthInfo::default()
    };
    let context = Context {
        cluster: NAME.to_owned(),
        user: Some(NAME.to_owned()),
        ..Context::default()
    };
    Ok(Kubeconfig {
        clusters: vec![NamedCluster {
            name: NAME.to_owned(),
            cluster: Some(cluster),
            ..NamedCluster::default()
        }],
        auth_infos: vec![NamedAuthInfo {
            name: NAME.to_owned(),
            auth_info: Some(user),
            ..NamedAuthInfo::default()
        }],
        contexts: vec![NamedContext {
            name: NAME.to_owned(),
            context: Some(context),
            ..NamedContext::default()
        }],
        current_context: Some(NAME.to_owned()),
        ..Kubeconfig::default()
    })
}

/// Refuses every field that is set and has an effect.
fn nothing_else(place: &str, other: &BTreeMap<String, Value>) -> Result<(), String> {
    let mut refused = other
        .iter()
        .filter(|(name, value)| is_set(value) && !WITHOUT_EFFECT.contains(&name.as_str()));
    let Some((name, _)) = refused.next() else { return Ok(()) };
    let name: String = name.chars().take(NAME_CHARACTERS).collect();
    Err(format!(
        "field {place}.{name} is not allowed: a kubeconfig in a Secret may hold only server, tls-server-name, \
         certificate-authority-data, client-certificate-data, client-key-data and token"
    ))
}

/// Whether a field says anything: kubectl and client-go write some fields with an empty value.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

/// A server is reached over TLS only, and by host and path only: no user, no query.
fn check_server(server: &str) -> Result<(), String> {
    let refuse = || Err("field clusters[].cluster.server must be https://host[:port][/path]".to_owned());
    let Ok(uri) = server.parse::<http::Uri>() else {
        return refuse();
    };
    let plain = uri
        .authority()
        .is_some_and(|authority| !authority.as_str().contains('@'))
        && uri.query().is_none();
    let https = uri.scheme() == Some(&http::uri::Scheme::HTTPS);
    if https && plain { Ok(()) } else { refuse() }
}

#[cfg(test)]
mod tests;
