//! Who we are towards each vCenter: from a cluster's identity to a session.
//!
//! Kept here: an identity is used only from namespaces that it allows, and no password leaves this module except into a
//! login.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use capstan_api::vsphere::{VSphereCluster, VSphereClusterIdentity, VSphereIdentityKind};
use capstan_kube::Context;
use capstan_vsphere::{Login, Sessions, Trust, Vcenter};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::SelectorExt;
use kube::{Api, ResourceExt};

use crate::error::Error;

/// A machine in a burst of hundreds need not read its cluster's secret again; a changed password is known this late.
const REMEMBER: Duration = Duration::from_secs(15);

/// A login that was refused is not tried again for this long with the same password: accounts are locked after a handful of
/// failures within minutes.
const REFUSED: Duration = Duration::from_secs(60);

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

type Known = HashMap<Key, (Account, Instant)>;
/// A cluster by namespace and name, and the identity that it names.
type Key = (String, String, String);

/// Finds accounts and logs in with them.
pub struct Credentials {
    client: kube::Client,
    sessions: Sessions,
    /// Where the secrets of cluster-wide identities are.
    home: String,
    fallback: Option<Account>,
    known: Mutex<Known>,
    refused: Mutex<HashMap<Login, (capstan_vsphere::Error, Instant)>>,
}

impl Credentials {
    pub fn new(context: &Context, sessions: Sessions, home: String, fallback: Option<Account>) -> Self {
        Self {
            client: context.client.clone(),
            sessions,
            home,
            fallback,
            known: Mutex::default(),
            refused: Mutex::default(),
        }
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
        let Account { username, password } = self.account(cluster).await?;
        let trust = Trust::from_thumbprint(thumbprint.as_deref());
        let login = Login {
            server,
            username,
            password,
            trust,
        };
        if let Some((error, _)) = lock(&self.refused).get(&login).filter(|(_, at)| at.elapsed() < REFUSED) {
            return Err(error.clone().into());
        }
        let result = self.sessions.get(&login).await;
        match &result {
            Err(error @ capstan_vsphere::Error::Login { .. }) => {
                self.forget(cluster);
                lock(&self.refused).insert(login, (error.clone(), Instant::now()));
            }
            _ => drop(lock(&self.refused).remove(&login)),
        }
        Ok(result?)
    }

    /// The next session of this cluster is made from what its identity says then.
    pub fn forget(&self, cluster: &VSphereCluster) {
        lock(&self.known).remove(&key(cluster));
    }

    async fn account(&self, cluster: &VSphereCluster) -> Result<Account, Error> {
        if let Some((account, _)) = lock(&self.known)
            .get(&key(cluster))
            .filter(|(_, at)| at.elapsed() < REMEMBER)
        {
            return Ok(account.clone());
        }
        let account = self.find_account(cluster).await?;
        lock(&self.known).insert(key(cluster), (account.clone(), Instant::now()));
        Ok(account)
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
        let identities: Api<VSphereClusterIdentity> = Api::all(self.client.clone());
        let missing = || Error::Waiting(format!("VSphereClusterIdentity {name:?} does not exist"));
        let identity = identities.get_opt(name).await?.ok_or_else(missing)?;
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
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let Some(namespace) = namespaces.get_opt(namespace).await? else {
            return Ok(false);
        };
        matches(&allowed.selector, &namespace)
    }

    async fn read_secret(&self, namespace: &str, name: &str) -> Result<Account, Error> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let missing = || Error::Waiting(format!("secret {namespace}/{name} of the identity does not exist"));
        let secret = secrets.get_opt(name).await?.ok_or_else(missing)?;
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

fn key(cluster: &VSphereCluster) -> Key {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let identity = cluster.spec.identity_ref.as_ref();
    (
        namespace,
        name,
        identity.map(|i| format!("{}/{}", i.kind, i.name)).unwrap_or_default(),
    )
}

fn matches(selector: &LabelSelector, namespace: &Namespace) -> Result<bool, Error> {
    let selector: kube::core::Selector = selector
        .clone()
        .try_into()
        .map_err(|error| Error::Spec(format!("spec.allowedNamespaces.selector cannot be read: {error}")))?;
    Ok(selector.matches(namespace.labels()))
}
