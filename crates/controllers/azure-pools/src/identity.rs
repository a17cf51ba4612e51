//! The credential by which a cluster's resources are managed in Azure.
//!
//! Invariants: an AzureClusterIdentity is used only by clusters in namespaces that it allows, and its Secret is read only
//! after that was checked. The Secret is in the identity's own namespace, or grants that namespace. The manager's own
//! credential is used only where the operator allows it, and so are client ids that trust the manager. A file is read only from
//! the operator's folders.

use std::collections::BTreeMap;
use std::path::PathBuf;

use capstan_api::azure::{AllowedNamespaces, AzureCluster, AzureClusterIdentity, IdentityType};
use capstan_azure::{Allowed, Credential, Secret as Hidden, Url, certificate};
use capstan_kube::grant;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Api, Resource, ResourceExt};
use zeroize::Zeroizing;

use crate::error::Error;

/// The mount path of the projected service account token, unless the SDKs' own variable names another.
const TOKEN_FILE: &str = "/var/run/secrets/azure/tokens/azure-identity-token";
const SECRET_KEY: &str = "clientSecret";
const CERTIFICATE_KEYS: [&str; 2] = ["certificate", SECRET_KEY];
const PASSWORD_KEY: &str = "password";

/// What the operator gives and allows for signing in to Azure; read once, at start.
#[derive(Clone, Debug)]
pub struct SignIn {
    /// Its `environment_identity` names the clusters that may leave out `identityRef`: the manager's own credential is used
    /// for them.
    pub allowed: Allowed,
    /// The credential that the environment of the process describes.
    pub environment: Option<Credential>,
    /// The subscription of clusters that name none.
    pub subscription: Option<String>,
    /// The token that WorkloadIdentity signs in with.
    pub token_file: PathBuf,
}

impl Default for SignIn {
    fn default() -> Self {
        Self {
            allowed: Allowed::default(),
            environment: None,
            subscription: None,
            token_file: TOKEN_FILE.into(),
        }
    }
}

impl SignIn {
    /// Reads the variables that Azure's SDKs read.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, capstan_azure::Error> {
        let set = |name: &str| var(name).filter(|value| !value.is_empty());
        Ok(Self {
            environment: Some(Credential::from_vars(set)?),
            subscription: set("AZURE_SUBSCRIPTION_ID"),
            token_file: set("AZURE_FEDERATED_TOKEN_FILE").map_or_else(|| TOKEN_FILE.into(), PathBuf::from),
            ..Self::default()
        })
    }

    /// Returns the subscription of a cluster.
    pub fn subscription(&self, cluster: &AzureCluster) -> Result<String, Error> {
        let written = cluster.spec.subscription_id.clone().filter(|id| !id.is_empty());
        written.or_else(|| self.subscription.clone()).ok_or_else(|| {
            let name = cluster.name_any();
            Error::Invalid(format!(
                "AzureCluster {name}: spec.subscriptionID: Required value: name a subscription, or set \
                 AZURE_SUBSCRIPTION_ID for capstan"
            ))
        })
    }

    /// Returns the credential of a cluster.
    pub async fn credential(&self, client: &kube::Client, cluster: &AzureCluster) -> Result<Credential, Error> {
        match identity(client, cluster).await? {
            Some(identity) => self.read(client, &identity).await,
            None => self.environment_credential(cluster, &namespace(cluster)?),
        }
    }

    fn environment_credential(&self, cluster: &AzureCluster, namespace: &str) -> Result<Credential, Error> {
        let allowed = self.allowed.environment_identity.contain(namespace);
        let credential = self.environment.as_ref().filter(|_| allowed).cloned();
        credential.ok_or_else(|| {
            let name = cluster.name_any();
            Error::Invalid(format!(
                "AzureCluster {name}: spec.identityRef: Required value: name an AzureClusterIdentity, or start capstan \
                 with --allow-environment-identity={namespace}"
            ))
        })
    }

    async fn read(&self, client: &kube::Client, identity: &AzureClusterIdentity) -> Result<Credential, Error> {
        let spec = &identity.spec;
        let (tenant, client_id) = (spec.tenant_id.clone(), spec.client_id.clone());
        let refuse = |reason: String| Error::Identity {
            identity: identity.name_any(),
            reason,
        };
        // The identity's own namespace: whoever may write the identity names the client id.
        let by_manager = || -> Result<(), Error> {
            let own = namespace(identity)?;
            self.allowed.client_ids.check(&own, &client_id).map_err(refuse)
        };
        match &spec.type_ {
            IdentityType::ServicePrincipal | IdentityType::ManualServicePrincipal => Ok(Credential::Secret {
                tenant,
                client_id,
                secret: Keys::read(client, identity).await?.text(&[SECRET_KEY])?,
            }),
            IdentityType::ServicePrincipalCertificate => {
                let secret = Keys::read(client, identity).await;
                let (bytes, password) = match spec.cert_path.as_deref().filter(|path| !path.is_empty()) {
                    Some(path) => {
                        let bytes = self.allowed.read("certPath", path).await.map_err(refuse)?;
                        // The Secret is optional beside a file: it may hold the password.
                        (
                            Zeroizing::new(bytes),
                            secret.map(|keys| keys.password()).unwrap_or_default(),
                        )
                    }
                    None => {
                        let keys = secret?;
                        (Zeroizing::new(keys.value(&CERTIFICATE_KEYS)?.to_vec()), keys.password())
                    }
                };
                Ok(Credential::Certificate {
                    tenant,
                    client_id,
                    pem: pem(bytes, password).await.map_err(refuse)?,
                    authority: None,
                })
            }
            IdentityType::WorkloadIdentity => by_manager().map(|()| Credential::WorkloadIdentity {
                tenant,
                client_id,
                token_file: self.token_file.clone(),
            }),
            IdentityType::UserAssignedMsi => by_manager().map(|()| Credential::ManagedIdentity {
                client_id: Some(client_id),
            }),
            IdentityType::UserAssignedIdentityCredential => {
                let path = spec.user_assigned_identity_credentials_path.as_deref();
                self.credentials_file(path, tenant).await.map_err(refuse)
            }
            IdentityType::Other(other) => Err(refuse(format!("type {other:?} is not known"))),
        }
    }

    /// Reads the certificate credential that Azure's managed platform writes to a file, as JSON.
    async fn credentials_file(&self, path: Option<&str>, tenant: String) -> Result<Credential, String> {
        const FIELD: &str = "userAssignedIdentityCredentialsPath";
        #[derive(serde::Deserialize)]
        struct File {
            client_id: String,
            tenant_id: Option<String>,
            /// The certificate with its key, in base64.
            client_secret: String,
            /// Where Azure's managed platform wants it to sign in.
            authentication_endpoint: Option<String>,
        }
        let path = path.filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| format!("{FIELD} is not set"))?;
        let bytes = self.allowed.read(FIELD, path).await?;
        let file: File =
            serde_json::from_slice(&bytes).map_err(|_| format!("{FIELD} {path} is not a credential of Azure's"))?;
        let endpoint = file.authentication_endpoint.filter(|endpoint| !endpoint.is_empty());
        let authority = match endpoint.map(|endpoint| endpoint.parse::<Url>()) {
            None => None,
            Some(Ok(url)) if url.scheme() == "https" => Some(url),
            Some(_) => {
                return Err(format!(
                    "authentication_endpoint in {FIELD} {path} must be an https address"
                ));
            }
        };
        Ok(Credential::Certificate {
            tenant: file.tenant_id.unwrap_or(tenant),
            client_id: file.client_id,
            pem: pem(Zeroizing::new(file.client_secret.into_bytes()), Hidden::default()).await?,
            authority,
        })
    }
}

/// Returns the identity that a cluster names and may use; `None` if it names none.
pub async fn identity(client: &kube::Client, cluster: &AzureCluster) -> Result<Option<AzureClusterIdentity>, Error> {
    let namespace = namespace(cluster)?;
    let Some(reference) = &cluster.spec.identity_ref else {
        return Ok(None);
    };
    let name = reference.name.clone().unwrap_or_default();
    let home = reference.namespace.clone().filter(|home| !home.is_empty());
    let home = home.unwrap_or_else(|| namespace.clone());
    let found = Api::<AzureClusterIdentity>::namespaced(client.clone(), &home)
        .get_opt(&name)
        .await?;
    let refuse = |reason: &str| Error::Identity {
        identity: format!("{home}/{name}"),
        reason: reason.to_owned(),
    };
    let identity = found.ok_or_else(|| refuse(&absent(&home, &namespace, "does not exist")))?;
    if !permitted(client, &identity, &namespace).await? {
        let not_allowed = format!("does not allow namespace {namespace}: add it to allowedNamespaces");
        return Err(refuse(&absent(&home, &namespace, &not_allowed)));
    }
    Ok(Some(identity))
}

/// Returns the namespace and the name of the Secret that an identity signs in with as a service principal.
pub fn client_secret(identity: &AzureClusterIdentity) -> Result<Option<(String, String)>, Error> {
    let by_secret = matches!(
        identity.spec.type_,
        IdentityType::ServicePrincipal | IdentityType::ManualServicePrincipal
    );
    if !by_secret {
        return Ok(None);
    }
    let (reference, own) = (&identity.spec.client_secret, namespace(identity)?);
    let home = reference.namespace.clone().filter(|home| !home.is_empty());
    Ok(Some((home.unwrap_or(own), reference.name.clone().unwrap_or_default())))
}

/// Reads the client secret of a service principal.
pub async fn read_client_secret(client: &kube::Client, identity: &AzureClusterIdentity) -> Result<Hidden, Error> {
    Keys::read(client, identity).await?.text(&[SECRET_KEY])
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
    is_allowed(allowed, namespace, &labels).map_err(|reason| Error::Identity {
        identity: identity.name_any(),
        reason: format!("spec.allowedNamespaces.selector cannot be read: {reason}"),
    })
}

/// The same reason for an identity of another namespace that does not exist and for one that allows nothing: nobody learns
/// what there is in other namespaces.
fn absent(home: &str, namespace: &str, reason: &str) -> String {
    match home == namespace {
        true => reason.to_owned(),
        false => format!(
            "does not exist, or does not allow namespace {namespace}: create it, or add the namespace to allowedNamespaces"
        ),
    }
}

/// Whether a namespace may use an identity. Unset allows none, not even the identity's own namespace; an empty object
/// allows all; a list or a selector those that it names. As upstream, an empty list and an empty selector name nobody.
fn is_allowed(
    allowed: Option<&AllowedNamespaces>,
    namespace: &str,
    labels: &BTreeMap<String, String>,
) -> Result<bool, String> {
    let Some(allowed) = allowed else { return Ok(false) };
    if allowed.list.is_none() && allowed.selector.is_none() {
        return Ok(true);
    }
    if allowed.list.iter().flatten().any(|name| name == namespace) {
        return Ok(true);
    }
    match &allowed.selector {
        Some(selector) if !grant::is_empty(selector) => grant::selects(selector, labels),
        Some(_) | None => Ok(false),
    }
}

fn namespace<K: Resource<DynamicType = ()>>(object: &K) -> Result<String, Error> {
    let incomplete = || capstan_kube::Error::Incomplete {
        kind: K::kind(&()).into_owned(),
        field: "metadata.namespace",
    };
    Ok(object.namespace().ok_or_else(incomplete)?)
}

/// Returns certificate and key as PEM. A PKCS#12 file may take a moment to open: other work goes on meanwhile.
async fn pem(bytes: Zeroizing<Vec<u8>>, password: Hidden) -> Result<Hidden, String> {
    let read = tokio::task::spawn_blocking(move || certificate::to_pem(&bytes, &password));
    let read = read.await.map_err(|_| "the certificate cannot be read".to_owned())?;
    read.map_err(|why| why.to_string())
}

/// The values of an identity's Secret.
struct Keys {
    identity: String,
    /// Its namespace and name.
    name: String,
    data: BTreeMap<String, k8s_openapi::ByteString>,
}

impl Keys {
    async fn read(client: &kube::Client, identity: &AzureClusterIdentity) -> Result<Self, Error> {
        let reference = &identity.spec.client_secret;
        let own = namespace(identity)?;
        let home = reference.namespace.clone().filter(|home| !home.is_empty());
        let (home, name) = (
            home.unwrap_or_else(|| own.clone()),
            reference.name.clone().unwrap_or_default(),
        );
        let refuse = |reason: String| Error::Identity {
            identity: identity.name_any(),
            reason,
        };
        let found = Api::<Secret>::namespaced(client.clone(), &home).get_opt(&name).await?;
        let granted = found.filter(|secret| grant::allows(secret, &own));
        let secret = granted.ok_or_else(|| match home == own {
            true => refuse(format!("secret {home}/{name} does not exist")),
            false => refuse(grant::refusal(&home, &name, &own)),
        })?;
        Ok(Self {
            identity: identity.name_any(),
            name: format!("{home}/{name}"),
            data: secret.data.unwrap_or_default(),
        })
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Identity {
            identity: self.identity.clone(),
            reason,
        }
    }

    /// Returns the value of the first of these keys that the Secret has.
    fn value(&self, keys: &[&str]) -> Result<&[u8], Error> {
        let value = keys.iter().find_map(|key| self.data.get(*key));
        let lacks = || self.refuse(format!("secret {} has no key {SECRET_KEY}", self.name));
        value.map(|value| value.0.as_slice()).ok_or_else(lacks)
    }

    fn text(&self, keys: &[&str]) -> Result<Hidden, Error> {
        let text = std::str::from_utf8(self.value(keys)?);
        let text = text.map_err(|_| self.refuse(format!("secret {} is not text", self.name)))?;
        Ok(Hidden::new(text.trim_end_matches('\n')))
    }

    /// Returns the password of a certificate; most have none.
    fn password(&self) -> Hidden {
        self.text(&[PASSWORD_KEY]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_azure::{ClientIdOf, Namespaces};
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::unset_is_none(Value::Null, false)]
    #[case::empty_is_all(json!({}), true)]
    #[case::an_empty_list_is_none(json!({ "list": [] }), false)]
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
        assert_eq!(is_allowed(allowed.as_ref(), "team-a", &labels), Ok(expected));
    }

    #[test]
    fn an_empty_list_stays_a_list_when_it_is_written_again() {
        let allowed: AllowedNamespaces = serde_json::from_value(json!({ "list": [] })).unwrap();
        assert_eq!(serde_json::to_value(allowed).unwrap(), json!({ "list": [] }));
    }

    #[tokio::test]
    async fn nobody_learns_whether_an_identity_of_another_namespace_exists() {
        let refusal = async |home: &str, exists: bool| {
            let identity = json!({ "metadata": { "name": "i" }, "spec": { "type": "ServicePrincipal",
                "tenantID": "t", "clientID": "c", "allowedNamespaces": { "list": [] } } });
            let missing = json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" });
            let (code, body) = if exists { (200, identity) } else { (404, missing) };
            let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
                let body = kube::client::Body::from(body.to_string().into_bytes());
                let answer = http::Response::builder().status(code).body(body).unwrap();
                std::future::ready(Ok::<_, std::convert::Infallible>(answer))
            });
            let mut cluster = cluster();
            cluster.spec.identity_ref = serde_json::from_value(json!({ "name": "i", "namespace": home })).unwrap();
            let client = kube::Client::new(service, "default");
            let refused = SignIn::default().credential(&client, &cluster).await;
            refused.unwrap_err().to_string()
        };
        assert_ne!(refusal("team-a", true).await, refusal("team-a", false).await);
        let elsewhere = refusal("platform", true).await;
        assert!(
            elsewhere.contains("does not exist, or does not allow namespace team-a"),
            "{elsewhere}"
        );
        assert_eq!(elsewhere, refusal("platform", false).await);
    }

    fn cluster() -> AzureCluster {
        let cluster = json!({ "metadata": { "name": "c", "namespace": "team-a" }, "spec": { "location": "l" } });
        serde_json::from_value(cluster).unwrap()
    }

    #[rstest]
    #[case::nobody(Namespaces::None, false)]
    #[case::everybody(Namespaces::All, true)]
    #[case::this_namespace(Namespaces::Only(["team-a".to_owned()].into()), true)]
    #[case::another_namespace(Namespaces::Only(["team-b".to_owned()].into()), false)]
    fn the_managers_own_identity_is_used_where_the_operator_allows_it(
        #[case] environment_identity: Namespaces,
        #[case] expected: bool,
    ) {
        let allowed = Allowed {
            environment_identity,
            ..Allowed::default()
        };
        let sign_in = SignIn {
            allowed,
            ..SignIn::from_vars(|_| None).unwrap()
        };
        let found = sign_in.environment_credential(&cluster(), "team-a");
        match expected {
            true => assert_eq!(found.unwrap(), Credential::ManagedIdentity { client_id: None }),
            false => {
                let refusal = found.unwrap_err().to_string();
                assert!(refusal.contains("spec.identityRef: Required value"), "{refusal}");
                assert!(refusal.contains("--allow-environment-identity=team-a"), "{refusal}");
            }
        }
    }

    #[rstest]
    #[case::workload_identity("WorkloadIdentity")]
    #[case::managed_identity("UserAssignedMSI")]
    #[tokio::test]
    async fn an_identity_names_the_client_ids_that_the_operator_allows_its_namespace(#[case] kind: &str) {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = kube::Client::try_from(nowhere).unwrap();
        let sign_in = SignIn {
            allowed: Allowed {
                client_ids: ["team-a=app-1".parse::<ClientIdOf>().unwrap()].into_iter().collect(),
                ..Allowed::default()
            },
            ..SignIn::default()
        };
        let read = async |namespace: &str, client_id: &str| {
            let identity = json!({ "metadata": { "name": "i", "namespace": namespace },
                "spec": { "type": kind, "tenantID": "t", "clientID": client_id } });
            sign_in.read(&client, &serde_json::from_value(identity).unwrap()).await
        };
        read("team-a", "app-1").await.unwrap();
        for (namespace, client_id) in [("team-a", "app-2"), ("team-b", "app-1")] {
            let refusal = read(namespace, client_id).await.unwrap_err().to_string();
            assert!(
                refusal.contains(&format!("--allow-client-ids={namespace}={client_id}")),
                "{refusal}"
            );
        }
    }

    #[rstest]
    #[case::as_the_platform_writes_it(json!({ "authentication_endpoint": "https://login.example/" }), Ok(Some("https://login.example/")))]
    #[case::without_an_address(json!({}), Ok(None))]
    #[case::in_the_clear(json!({ "authentication_endpoint": "http://login.example/" }), Err("must be an https address"))]
    #[case::of_another_format(json!({ "client_secret": "bm90aGluZw==" }), Err("the PKCS#12 file is damaged"))]
    #[case::incomplete(json!({ "client_secret": null }), Err("is not a credential of Azure's"))]
    #[tokio::test]
    async fn the_credentials_of_azures_managed_platform_are_a_certificate_in_base64(
        #[case] over: Value,
        #[case] expected: Result<Option<&str>, &str>,
    ) {
        let pfx = include_str!("../../../azure/src/certificate/fixtures/legacy.pfx.txt");
        let mut content = json!({ "client_id": "app", "tenant_id": "t", "client_secret": pfx.replace('\n', "") });
        for (key, value) in over.as_object().unwrap() {
            content[key] = value.clone();
        }
        let name = format!("capstan-platform-{}-{}", std::process::id(), uuid(&content));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("credentials.json");
        std::fs::write(&path, content.to_string()).unwrap();
        let allowed = Allowed {
            folders: vec![folder.clone()],
            ..Allowed::default()
        };
        let sign_in = SignIn {
            allowed,
            ..SignIn::default()
        };
        let read = sign_in.credentials_file(path.to_str(), "other".to_owned()).await;
        std::fs::remove_dir_all(folder).unwrap();
        match (read, expected) {
            (
                Ok(Credential::Certificate {
                    tenant, pem, authority, ..
                }),
                Ok(at),
            ) => {
                assert_eq!(tenant, "t");
                assert!(pem.reveal().contains("BEGIN PRIVATE KEY"));
                assert_eq!(authority.as_ref().map(Url::as_str), at);
            }
            (Err(why), Err(part)) => assert!(why.contains(part), "{why}"),
            (read, _) => panic!("{read:?}"),
        }
    }

    /// A number for each content, so that tests beside each other use other folders.
    fn uuid(content: &Value) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        content.to_string().hash(&mut hasher);
        hasher.finish()
    }
}
