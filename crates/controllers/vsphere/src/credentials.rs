//! Who we are towards each vCenter: from a cluster's identity to a session.
//!
//! Kept here: an identity is used only from namespaces that it allows, and no password leaves this module except into a
//! login.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use capstan_api::vsphere::{VSphereCluster, VSphereClusterIdentity, VSphereIdentityKind};
use capstan_kube::{Cache, Context};
use capstan_vsphere::{Login, Sessions, Trust, Vcenter};
use futures::Stream;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::SelectorExt;
use kube::{Api, ResourceExt};

use crate::error::Error;
use crate::secrets::{self, Secrets};

/// Whether an identity allows a namespace depends on the namespace's labels, which a machine in a burst of hundreds need
/// not read again.
const REMEMBER: Duration = Duration::from_secs(15);

/// Name and password that are used where a cluster names no identity.
#[derive(Clone, Default)]
pub struct Account {
    pub username: String,
    pub password: String,
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Account({})", self.username)
    }
}

/// By identity, its version, and namespace.
type Allowed = HashMap<(String, Option<String>, String), (bool, Instant)>;

/// Finds accounts and logs in with them.
pub struct Credentials {
    client: kube::Client,
    sessions: Sessions,
    identities: Cache<VSphereClusterIdentity>,
    secrets: Secrets,
    /// Where the secrets of cluster-wide identities are.
    home: String,
    fallback: Option<Account>,
    allowed: Mutex<Allowed>,
}

impl Credentials {
    pub fn new(
        context: &Context,
        sessions: Sessions,
        identities: Cache<VSphereClusterIdentity>,
        home: String,
        fallback: Option<Account>,
    ) -> Self {
        Self {
            client: context.client.clone(),
            sessions,
            identities,
            secrets: Secrets::new(context),
            home,
            fallback,
            allowed: Mutex::default(),
        }
    }

    /// The secret that a cluster's account is read from, as far as that is known.
    pub fn secret_of(&self, cluster: &VSphereCluster) -> Option<secrets::Key> {
        let identity = cluster.spec.identity_ref.as_ref()?;
        match identity.kind {
            VSphereIdentityKind::Secret => Some((cluster.namespace().unwrap_or_default(), identity.name.clone())),
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

    /// Which secrets of identities changed.
    pub fn changes(&self) -> impl Stream<Item = secrets::Key> + Send + use<> {
        self.secrets.changes()
    }

    /// A session with `server` in the name of a cluster's identity.
    pub async fn session(
        &self,
        cluster: &VSphereCluster,
        server: Option<&str>,
        thumbprint: Option<&str>,
    ) -> Result<Vcenter, Error> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
        let server = server
            .filter(|s| !s.trim().is_empty())
            .map(str::to_owned)
            .or_else(|| given(&cluster.spec.server));
        let server = server.ok_or_else(|| {
            let name = cluster.name_any();
            Error::Spec(format!(
                "neither the machine nor VSphereCluster {name:?} names a vCenter: set spec.server"
            ))
        })?;
        let thumbprint = thumbprint
            .map(str::to_owned)
            .or_else(|| given(&cluster.spec.thumbprint));
        let Account { username, password } = self.find_account(cluster).await?;
        let trust = Trust::from_thumbprint(thumbprint.as_deref());
        let login = Login {
            server,
            username,
            password,
            trust,
        };
        Ok(self.sessions.get(&login).await?)
    }

    /// A cluster goes: its own secret need not be watched any more.
    pub fn forget(&self, cluster: &VSphereCluster) {
        let identity = cluster.spec.identity_ref.as_ref();
        if let Some(own) = identity.filter(|identity| identity.kind == VSphereIdentityKind::Secret) {
            self.secrets
                .release(&cluster.namespace().unwrap_or_default(), &own.name);
        }
    }

    async fn find_account(&self, cluster: &VSphereCluster) -> Result<Account, Error> {
        let namespace = cluster.namespace().unwrap_or_default();
        let Some(identity) = &cluster.spec.identity_ref else {
            return self.fallback.clone().ok_or_else(|| {
                Error::Spec(format!(
                    "VSphereCluster {:?} has no identityRef and no default account is set: set spec.identityRef",
                    cluster.name_any()
                ))
            });
        };
        match identity.kind {
            VSphereIdentityKind::Secret => self.read_secret(&namespace, &identity.name).await,
            VSphereIdentityKind::VSphereClusterIdentity => self.read_identity(&namespace, &identity.name).await,
            VSphereIdentityKind::Other(ref kind) => Err(Error::Spec(format!(
                "spec.identityRef.kind {kind:?}: use Secret or VSphereClusterIdentity"
            ))),
        }
    }

    async fn read_identity(&self, namespace: &str, name: &str) -> Result<Account, Error> {
        self.identities.ready().await?;
        let missing = || Error::Waiting(format!("VSphereClusterIdentity {name:?} does not exist"));
        let identity = self.identities.get(None, name).ok_or_else(missing)?;
        if !self.allows(&identity, namespace).await? {
            return Err(Error::Spec(format!(
                "VSphereClusterIdentity {name:?} does not allow namespace {namespace:?}: \
                 match its labels in spec.allowedNamespaces.selector"
            )));
        }
        let secret = identity.spec.secret_name.as_deref().unwrap_or_default();
        self.read_secret(&self.home, secret).await
    }

    async fn allows(&self, identity: &VSphereClusterIdentity, namespace: &str) -> Result<bool, Error> {
        let Some(allowed) = &identity.spec.allowed_namespaces else {
            return Ok(false);
        };
        let key = (identity.name_any(), identity.resource_version(), namespace.to_owned());
        let is_fresh = |known: &&(bool, Instant)| known.1.elapsed() < REMEMBER;
        if let Some((answer, _)) = lock(&self.allowed).get(&key).filter(is_fresh) {
            return Ok(*answer);
        }
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let answer = match namespaces.get_opt(namespace).await? {
            Some(namespace) => matches(&allowed.selector, &namespace)?,
            None => false,
        };
        let mut known = lock(&self.allowed);
        known.retain(|_, known| is_fresh(&&*known));
        known.insert(key, (answer, Instant::now()));
        Ok(answer)
    }

    async fn read_secret(&self, namespace: &str, name: &str) -> Result<Account, Error> {
        let missing = || Error::Spec(format!("secret {namespace}/{name} of the identity does not exist"));
        let secret = self.secrets.get(namespace, name).await?.ok_or_else(missing)?;
        let field = |key: &str| {
            let bytes = secret
                .data
                .as_ref()
                .and_then(|data| data.get(key))
                .map(|bytes| bytes.0.clone());
            let text = bytes
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .filter(|text| !text.is_empty());
            text.ok_or_else(|| Error::Spec(format!("secret {namespace}/{name} of the identity has no {key:?}")))
        };
        Ok(Account {
            username: field("username")?,
            password: field("password")?,
        })
    }

    /// The account in a secret that a cluster-wide identity names.
    pub async fn read_secret_at_home(&self, name: &str) -> Result<Account, Error> {
        self.read_secret(&self.home, name).await
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn matches(selector: &LabelSelector, namespace: &Namespace) -> Result<bool, Error> {
    let selector: kube::core::Selector = selector
        .clone()
        .try_into()
        .map_err(|error| Error::Spec(format!("spec.allowedNamespaces.selector cannot be read: {error}")))?;
    Ok(selector.matches(namespace.labels()))
}
