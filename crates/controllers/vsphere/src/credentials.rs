//! Credentials of vCenters: from the identity of a cluster to a session.
//!
//! Invariants: an identity is used only from namespaces that it allows; a shared credential is sent only to servers that its
//! owner allows; a Secret is used as an identity only if it has the shape of one; no password leaves this module except into
//! a login.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::{VSphereCluster, VSphereClusterIdentity, VSphereIdentityKind};
use capstan_core::Memo;
use capstan_core::cluster::secrets::NamedSecret;
use capstan_core::validate::vcenter::{contains_server, same_server};
use capstan_kube::patch::Lock;
use capstan_kube::{Cache, Context, grant, patch};
use capstan_vsphere::{Login, Sessions, Trust, Vcenter};
use futures::Stream;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{ListParams, PartialObjectMeta};
use kube::{Api, ResourceExt};

use crate::error::Error;
use crate::secrets::{self, Secrets};

/// Whether an identity allows a namespace depends on the namespace's labels. A burst of hundreds of machines does not read
/// them again and again.
const REMEMBER: Duration = Duration::from_secs(15);
/// On a VSphereClusterIdentity: the servers that Capstan may send its password to, separated by commas; `*` for every server.
pub const ALLOWED_SERVERS: &str = "capstan.dev/allowed-servers";
/// The keys of an identity's Secret.
const USERNAME: &str = "username";
const PASSWORD: &str = "password";
const CA: &str = "ca.crt";

/// A user name and a password, with the CA of the server where the identity names one.
#[derive(Clone, Default)]
pub struct Account {
    pub username: String,
    pub password: capstan_core::Secret,
    pub ca: Option<String>,
    /// The namespace whose owner has the account and chooses its servers.
    pub tenant: Option<String>,
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Account({})", self.username)
    }
}

/// The part of the manager's flags that concerns credentials.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// The account for clusters that name no identity.
    pub account: Option<Account>,
    /// The namespaces whose clusters may use that account; `*` stands for all of them.
    pub account_namespaces: Vec<String>,
    /// The servers that the account, and identities that do not name their servers, may be sent to.
    pub servers: Vec<String>,
    /// Whether every certificate is accepted where a manifest gives neither a thumbprint nor a CA.
    pub insecure: bool,
}

impl Policy {
    /// Returns the manager's own account if its flags allow that for this namespace and this server. Objects without a
    /// namespace are those of administrators.
    fn fallback(&self, namespace: Option<&str>, server: &str) -> Result<Account, Error> {
        let Some(account) = &self.account else {
            return Err(Error::Invalid(
                "spec.identityRef is not set, and the manager has no account of its own: set spec.identityRef".into(),
            ));
        };
        if let Some(namespace) = namespace {
            let listed = |entry: &String| entry == "*" || entry == namespace;
            if !self.account_namespaces.iter().any(listed) {
                return Err(Error::Invalid(format!(
                    "spec.identityRef is not set, and the manager's own account is not allowed for namespace \
                     {namespace:?}: set spec.identityRef, or --vcenter-account-namespaces of the manager"
                )));
            }
        }
        check_server("the manager's own account", &self.servers, server)?;
        Ok(account.clone())
    }
}

/// Identity, its version, and namespace.
type Grant = (String, Option<String>, String);
/// Grants that are remembered at most.
const GRANTS: usize = 1024;

/// Finds accounts and signs in with them.
pub struct Credentials {
    client: kube::Client,
    sessions: Sessions,
    identities: Cache<VSphereClusterIdentity>,
    secrets: Secrets,
    /// The namespace of the Secrets of VSphereClusterIdentities.
    home: String,
    policy: Policy,
    allowed: Memo<Grant, bool>,
}

impl Credentials {
    pub fn new(
        context: &Context,
        sessions: Sessions,
        identities: Cache<VSphereClusterIdentity>,
        home: String,
        policy: Policy,
    ) -> Self {
        Self {
            client: context.client.clone(),
            sessions,
            identities,
            secrets: Secrets::new(context),
            home,
            policy,
            allowed: Memo::new(context.clock, GRANTS),
        }
    }

    /// Returns the Secret that a cluster's account is read from, as far as that is known.
    pub fn secret_of(&self, cluster: &VSphereCluster) -> Option<secrets::Key> {
        let identity = cluster.spec.identity_ref.as_ref()?;
        match identity.kind {
            VSphereIdentityKind::Secret => Some((cluster.namespace()?, identity.name.clone())),
            VSphereIdentityKind::VSphereClusterIdentity => {
                self.secret_of_identity(self.identities.get(None, &identity.name)?.as_ref())
            }
            VSphereIdentityKind::Other(_) => None,
        }
    }

    pub fn secret_of_identity(&self, identity: &VSphereClusterIdentity) -> Option<secrets::Key> {
        let name = identity.spec.secret_name.clone().filter(|name| !name.is_empty())?;
        Some((self.home.clone(), name))
    }

    /// Returns the keys of identities' Secrets that change.
    pub fn changes(&self) -> impl Stream<Item = secrets::Key> + Send + use<> {
        self.secrets.changes()
    }

    /// Returns a session with the server of a cluster, by the cluster's identity.
    pub async fn session(&self, cluster: &VSphereCluster) -> Result<Vcenter, Error> {
        let server = server_of(cluster)?;
        self.session_with(cluster, &server, cluster.spec.thumbprint.as_deref())
            .await
    }

    /// Returns a session with a server by a cluster's identity. The caller has checked that the cluster may use this server.
    pub async fn session_with(
        &self,
        cluster: &VSphereCluster,
        server: &str,
        thumbprint: Option<&str>,
    ) -> Result<Vcenter, Error> {
        let account = self.find_account(cluster, server).await?;
        let given = |text: &&str| !text.trim().is_empty();
        let own = cluster.spec.thumbprint.as_deref();
        let own = own.filter(|_| {
            cluster
                .spec
                .server
                .as_deref()
                .is_some_and(|own| same_server(own, server))
        });
        let thumbprint = thumbprint.filter(given).or(own);
        self.sign_in(account, server, thumbprint).await
    }

    /// Whether the certificate of a cluster's server is verified.
    pub fn verifies(&self, cluster: &VSphereCluster) -> bool {
        let pinned = cluster.spec.thumbprint.as_deref();
        !self.policy.insecure || pinned.is_some_and(|text| !text.trim().is_empty())
    }

    /// Returns a session for an object that belongs to no cluster, by the manager's own account.
    pub async fn session_of_manager(&self, server: &str) -> Result<Vcenter, Error> {
        let account = self.policy.fallback(None, server)?;
        self.sign_in(account, server, None).await
    }

    async fn sign_in(&self, account: Account, server: &str, thumbprint: Option<&str>) -> Result<Vcenter, Error> {
        let login = Login {
            server: server.to_owned(),
            username: account.username,
            password: account.password,
            trust: Trust::new(thumbprint, account.ca.as_deref(), self.policy.insecure),
            tenant: account.tenant,
        };
        Ok(self.sessions.get(&login).await?)
    }

    /// Stops to watch a Secret that no cluster uses any more.
    pub fn forget(&self, namespace: &str, name: &str) {
        self.secrets.release(namespace, name);
    }

    async fn find_account(&self, cluster: &VSphereCluster, server: &str) -> Result<Account, Error> {
        let namespace = cluster.namespace();
        let Some(identity) = &cluster.spec.identity_ref else {
            return self.policy.fallback(namespace.as_deref(), server);
        };
        let namespace = namespace.ok_or_else(|| Error::Invalid("a VSphereCluster without a namespace".into()))?;
        match identity.kind {
            VSphereIdentityKind::Secret => {
                let secret = self.secret(&namespace, &identity.name).await?;
                // The Secret is the tenant's own, so it may name its servers and need not.
                if let Some(servers) = secret.annotations().get(ALLOWED_SERVERS) {
                    let whose = format!("Secret {namespace}/{}", identity.name);
                    check_server(&whose, &list(servers), server)?;
                }
                let account = account_in(&secret, &namespace, &identity.name)?;
                Ok(Account {
                    tenant: Some(namespace),
                    ..account
                })
            }
            VSphereIdentityKind::VSphereClusterIdentity => self.read_identity(&namespace, &identity.name, server).await,
            VSphereIdentityKind::Other(ref kind) => Err(Error::Invalid(format!(
                "spec.identityRef.kind {kind:?}: use Secret or VSphereClusterIdentity"
            ))),
        }
    }

    async fn read_identity(&self, namespace: &str, name: &str, server: &str) -> Result<Account, Error> {
        self.identities.ready().await?;
        let missing = || Error::NotReady(format!("VSphereClusterIdentity {name:?} does not exist"));
        let identity = self.identities.get(None, name).ok_or_else(missing)?;
        if !self.allows(&identity, namespace).await? {
            return Err(Error::Invalid(format!(
                "VSphereClusterIdentity {name:?} does not allow namespace {namespace:?}: \
                 match its labels in spec.allowedNamespaces.selector"
            )));
        }
        let whose = format!("VSphereClusterIdentity {name:?}");
        match identity.annotations().get(ALLOWED_SERVERS) {
            Some(servers) => check_server(&whose, &list(servers), server)?,
            None => check_server(&whose, &self.policy.servers, server)?,
        }
        let secret = identity.spec.secret_name.as_deref().unwrap_or_default();
        account_in(self.secret(&self.home, secret).await?.as_ref(), &self.home, secret)
    }

    async fn allows(&self, identity: &VSphereClusterIdentity, namespace: &str) -> Result<bool, Error> {
        let Some(allowed) = &identity.spec.allowed_namespaces else {
            return Ok(false);
        };
        let key = (identity.name_any(), identity.resource_version(), namespace.to_owned());
        let ask = async {
            let namespaces: Api<Namespace> = Api::all(self.client.clone());
            match namespaces.get_opt(namespace).await? {
                Some(namespace) => matches(&allowed.selector, &namespace),
                None => Ok(false),
            }
        };
        self.allowed.get(&key, REMEMBER, ask).await
    }

    /// Returns the Secret in a cluster's own namespace that its identity is in, if there is one.
    pub async fn own_secret(&self, cluster: &VSphereCluster) -> Result<Option<Arc<Secret>>, Error> {
        let identity = cluster.spec.identity_ref.as_ref();
        let own = identity.filter(|identity| identity.kind == VSphereIdentityKind::Secret);
        match (own, cluster.namespace()) {
            (Some(own), Some(namespace)) => self.secrets.get(&namespace, &own.name).await,
            _ => Ok(None),
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, Error> {
        let missing = || Error::Invalid(format!("secret {namespace}/{name} of the identity does not exist"));
        self.secrets.get(namespace, name).await?.ok_or_else(missing)
    }

    /// Returns the metadata of the Secrets that a VSphereClusterIdentity with this UID names or owns, from the API server. An
    /// account that may not list Secrets there finds none.
    pub async fn secrets_of_identity(
        &self,
        identity: &VSphereClusterIdentity,
        uid: &str,
    ) -> Result<Vec<Secret>, Error> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.home);
        let all = match secrets.list_metadata(&ListParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 403 => return Ok(Vec::new()),
            all => all?.items,
        };
        let named = self.secret_of_identity(identity).map(|(_, name)| name);
        let concerns = |secret: &NamedSecret| named.as_deref() == Some(secret.name()) || secret.is_owned_by(uid);
        let read = |found: PartialObjectMeta<Secret>| Secret {
            metadata: found.metadata,
            ..Secret::default()
        };
        let all = all.into_iter().map(read);
        Ok(all
            .filter(|secret| concerns(&NamedSecret::new(secret.clone())))
            .collect())
    }

    /// Checks that the Secret of a VSphereClusterIdentity is there and has the shape of one.
    pub async fn check_identity(&self, identity: &VSphereClusterIdentity) -> Result<Arc<Secret>, Error> {
        let name = identity.spec.secret_name.as_deref().unwrap_or_default();
        let secret = self.secret(&self.home, name).await?;
        account_in(&secret, &self.home, name)?;
        Ok(secret)
    }

    /// Writes the difference to the Secret of a VSphereClusterIdentity.
    pub async fn patch_identity_secret(
        &self,
        before: &NamedSecret,
        after: &NamedSecret,
    ) -> Result<(), capstan_kube::Error> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.home);
        patch::object(&secrets, before.0.as_ref(), after.0.as_ref(), Lock::Version)
            .await
            .map(drop)
    }
}

/// Returns the server of a cluster.
pub fn server_of(cluster: &VSphereCluster) -> Result<String, Error> {
    let server = cluster
        .spec
        .server
        .as_deref()
        .map(str::trim)
        .filter(|server| !server.is_empty());
    server.map(str::to_owned).ok_or_else(|| {
        Error::Invalid(format!(
            "spec.server of VSphereCluster {:?} is not set: name the vCenter there",
            cluster.name_any()
        ))
    })
}

/// Checks that a machine names no other server than its cluster does, or its failure domain.
pub fn check_machine_server(named: Option<&str>, cluster: &str, zone: Option<&str>) -> Result<String, Error> {
    let Some(named) = named.map(str::trim).filter(|named| !named.is_empty()) else {
        return Ok(cluster.to_owned());
    };
    if same_server(named, cluster) || zone.is_some_and(|zone| same_server(named, zone)) {
        return Ok(named.to_owned());
    }
    Err(Error::Invalid(format!(
        "spec.server {named:?} is not the vCenter of the machine's cluster ({cluster:?}), nor of its failure domain: remove \
         spec.server, or use a failure domain of that vCenter"
    )))
}

fn check_server(whose: &str, allowed: &[String], server: &str) -> Result<(), Error> {
    if contains_server(allowed, server) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "{whose} may not be used for server {server:?}: name the server in annotation {ALLOWED_SERVERS}, or in \
         --vcenter-servers of the manager"
    )))
}

fn list(text: &str) -> Vec<String> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries.map(str::to_owned).collect()
}

/// Whether a Secret has the shape of an identity.
pub fn is_identity(secret: &Secret) -> bool {
    account_in(secret, "", "").is_ok()
}

/// Returns the account in a Secret that has the shape of an identity: type Opaque, the keys `username` and `password`, perhaps
/// `ca.crt`, and nothing else. A Secret of another shape is somebody's for another purpose, and is not sent anywhere.
fn account_in(secret: &Secret, namespace: &str, name: &str) -> Result<Account, Error> {
    let refuse = |text: String| {
        Error::Invalid(format!(
            "secret {namespace}/{name} cannot be used as an identity: {text}"
        ))
    };
    if let Some(type_) = secret.type_.as_deref().filter(|type_| *type_ != "Opaque") {
        return Err(refuse(format!("its type is {type_:?}, not \"Opaque\"")));
    }
    let data = secret.data.as_ref();
    let known = [USERNAME, PASSWORD, CA];
    if let Some(other) = data.and_then(|data| data.keys().find(|key| !known.contains(&key.as_str()))) {
        return Err(refuse(format!(
            "it has the key {other:?}; an identity has \"username\", \"password\" and perhaps \"ca.crt\""
        )));
    }
    let text = |key: &str| {
        let bytes = data.and_then(|data| data.get(key));
        let text = bytes.and_then(|bytes| String::from_utf8(bytes.0.clone()).ok());
        text.filter(|text| !text.is_empty())
    };
    let field = |key: &str| text(key).ok_or_else(|| refuse(format!("it has no {key:?}")));
    Ok(Account {
        username: field(USERNAME)?,
        password: field(PASSWORD)?.into(),
        ca: text(CA),
        tenant: None,
    })
}

fn matches(selector: &LabelSelector, namespace: &Namespace) -> Result<bool, Error> {
    grant::selects(selector, namespace.labels())
        .map_err(|error| Error::Invalid(format!("spec.allowedNamespaces.selector cannot be read: {error}")))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rstest::rstest;

    use super::*;

    fn secret(type_: Option<&str>, keys: &[&str]) -> Secret {
        let data = keys
            .iter()
            .map(|key| ((*key).to_owned(), ByteString(b"value".to_vec())));
        Secret {
            type_: type_.map(str::to_owned),
            data: Some(data.collect()),
            ..Secret::default()
        }
    }

    #[rstest]
    #[case::as_documented(Some("Opaque"), &["username", "password"], None)]
    #[case::with_a_ca(None, &["username", "password", "ca.crt"], None)]
    #[case::basic_auth(Some("kubernetes.io/basic-auth"), &["username", "password"], Some("kubernetes.io/basic-auth"))]
    #[case::for_another_purpose(Some("Opaque"), &["username", "password", "dsn"], Some("\"dsn\""))]
    #[case::without_password(Some("Opaque"), &["username"], Some("\"password\""))]
    #[case::empty(Some("Opaque"), &[], Some("\"username\""))]
    fn a_secret_is_an_identity_by_its_shape(
        #[case] type_: Option<&str>,
        #[case] keys: &[&str],
        #[case] refused: Option<&str>,
    ) {
        let found = account_in(&secret(type_, keys), "ns", "name").map_err(|error| error.to_string());
        match refused {
            None => assert_eq!(found.unwrap().username, "value"),
            Some(text) => {
                let error = found.unwrap_err();
                assert!(
                    error.contains(text) && error.contains("ns/name") && !error.contains("value"),
                    "{error}"
                );
            }
        }
    }

    #[rstest]
    #[case::unset(None, None, true)]
    #[case::the_clusters(Some("VC1"), None, true)]
    #[case::another(Some("attacker.example"), None, false)]
    #[case::of_its_failure_domain(Some("vc2"), Some("vc2"), true)]
    #[case::another_than_both(Some("vc3"), Some("vc2"), false)]
    #[case::another_port(Some("vc1:8443"), None, false)]
    #[case::a_url_of_the_same(Some("https://vc1/sdk"), None, true)]
    #[case::a_url_with_a_user(Some("vc1@attacker.example"), None, false)]
    fn a_machine_names_no_other_server_than_its_cluster(
        #[case] named: Option<&str>,
        #[case] zone: Option<&str>,
        #[case] allowed: bool,
    ) {
        let checked = check_machine_server(named, "vc1", zone);
        assert_eq!(checked.is_ok(), allowed, "{checked:?}");
        if let Err(error) = checked {
            let text = error.to_string();
            assert!(text.contains("spec.server") && text.contains(named.unwrap()), "{text}");
        }
    }

    #[rstest]
    #[case::of_an_allowed_namespace(Some("team-a"), "vc1", &["team-a"], None)]
    #[case::of_any_namespace(Some("team-b"), "vc1", &["*"], None)]
    #[case::of_an_administrator(None, "vc1", &[], None)]
    #[case::by_default(Some("team-a"), "vc1", &[], Some("--vcenter-account-namespaces"))]
    #[case::of_another_namespace(Some("team-b"), "vc1", &["team-a"], Some("\"team-b\""))]
    #[case::for_another_server(Some("team-a"), "attacker.example", &["*"], Some("attacker.example"))]
    fn the_managers_own_account_is_used_where_the_operator_allows_it(
        #[case] namespace: Option<&str>,
        #[case] server: &str,
        #[case] namespaces: &[&str],
        #[case] refused: Option<&str>,
    ) {
        let policy = Policy {
            account: Some(Account {
                username: "manager".into(),
                ..Account::default()
            }),
            account_namespaces: namespaces.iter().map(|name| (*name).to_owned()).collect(),
            servers: vec!["vc1".into()],
            insecure: false,
        };
        let found = policy.fallback(namespace, server).map_err(|error| error.to_string());
        match refused {
            None => assert_eq!(found.unwrap().username, "manager"),
            Some(text) => assert!(found.as_ref().is_err_and(|error| error.contains(text)), "{found:?}"),
        }
        let none = Policy::default().fallback(namespace, server).unwrap_err();
        assert!(none.to_string().contains("spec.identityRef"), "{none}");
    }

    #[test]
    fn a_shared_credential_goes_only_to_servers_that_its_owner_names() {
        assert!(check_server("x", &list("vc1, vc2:8443"), "vc2:8443").is_ok());
        let refused = check_server("VSphereClusterIdentity \"shared\"", &list("vc1"), "attacker.example");
        let text = refused.unwrap_err().to_string();
        assert!(
            text.contains("shared") && text.contains("attacker.example") && text.contains(ALLOWED_SERVERS),
            "{text}"
        );
        assert!(check_server("x", &[], "vc1").is_err(), "nobody by default");
    }
}
