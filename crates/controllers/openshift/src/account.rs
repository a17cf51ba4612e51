//! Azure accounts, from the credentials secrets that machines name.

use crate::machine::Error;
use capstan_azure::{Client, Clients, Credential, Secret as Hidden};
use k8s_openapi::api::core::v1::{Secret, SecretReference};
use kube::{Api, Client as Kube};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A rotated secret is taken up within this time; until then each machine does not read it anew.
const FRESH: Duration = Duration::from_secs(30);

/// Where workload identity mounts its token unless the secret says otherwise.
const TOKEN_FILE_VARIABLE: &str = "AZURE_FEDERATED_TOKEN_FILE";

/// What the credentials secret says about where machines go, for specs that leave it open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub subscription: String,
    pub group: String,
    pub location: String,
}

/// A subscription with the right to use it.
#[derive(Clone, Debug)]
pub struct Account {
    pub client: Client,
    pub place: Place,
}

/// Accounts by the secret that they come from.
pub struct Accounts {
    kube: Kube,
    clients: Clients,
    known: Mutex<HashMap<(String, String), (Instant, Account)>>,
}

impl Accounts {
    pub fn new(kube: Kube, clients: Clients) -> Self {
        Self {
            kube,
            clients,
            known: Mutex::default(),
        }
    }

    /// The account of a machine in `namespace` that names this secret.
    pub async fn get(&self, reference: Option<&SecretReference>, namespace: &str) -> Result<Account, Error> {
        let name = reference
            .and_then(|reference| reference.name.clone())
            .unwrap_or_default();
        let given = reference
            .and_then(|reference| reference.namespace.clone())
            .filter(|given| !given.is_empty());
        let key = (given.unwrap_or_else(|| namespace.to_owned()), name);
        if let Some(account) = self.cached(&key) {
            return Ok(account);
        }
        let (namespace, name) = &key;
        let secret = read(&self.kube, namespace, name).await?;
        let account = self
            .account(&secret)
            .map_err(|missing| Error::NotYet(format!("credentials secret {namespace}/{name} has no {missing}")))?;
        self.lock().insert(key, (Instant::now(), account.clone()));
        Ok(account)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(String, String), (Instant, Account)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cached(&self, key: &(String, String)) -> Option<Account> {
        self.lock()
            .get(key)
            .filter(|(read, _)| read.elapsed() < FRESH)
            .map(|(_, account)| account.clone())
    }

    fn account(&self, secret: &BTreeMap<String, String>) -> Result<Account, &'static str> {
        let credential = credential(secret, std::env::var(TOKEN_FILE_VARIABLE).ok())?;
        let get = |key: &'static str| secret.get(key).cloned().filter(|value| !value.is_empty());
        let place = Place {
            subscription: get("azure_subscription_id").ok_or("azure_subscription_id")?,
            group: get("azure_resourcegroup").unwrap_or_default(),
            location: get("azure_region").unwrap_or_default(),
        };
        let client = self.clients.client(&credential, &place.subscription);
        Ok(Account { client, place })
    }
}

/// Which way of signing in a secret stands for; the key that is missing, if none.
fn credential(secret: &BTreeMap<String, String>, token_file: Option<String>) -> Result<Credential, &'static str> {
    let get = |key: &str| secret.get(key).cloned().filter(|value| !value.is_empty());
    let Some(client_id) = get("azure_client_id") else {
        return if get("azure_client_secret").is_some() {
            Err("azure_client_id")
        } else {
            Ok(Credential::ManagedIdentity { client_id: None })
        };
    };
    let tenant = get("azure_tenant_id");
    if let Some(value) = get("azure_client_secret") {
        let tenant = tenant.ok_or("azure_tenant_id")?;
        return Ok(Credential::Secret {
            tenant,
            client_id,
            secret: Hidden::new(value),
        });
    }
    if let Some(pem) = get("azure_client_certificate") {
        let tenant = tenant.ok_or("azure_tenant_id")?;
        return Ok(Credential::Certificate {
            tenant,
            client_id,
            pem: Hidden::new(pem),
        });
    }
    match (get("azure_federated_token_file").or(token_file), tenant) {
        (Some(file), Some(tenant)) => Ok(Credential::WorkloadIdentity {
            tenant,
            client_id,
            token_file: file.into(),
        }),
        _ => Ok(Credential::ManagedIdentity {
            client_id: Some(client_id),
        }),
    }
}

/// A secret's values. A missing secret is waited for, not a reason to give a machine up.
pub async fn read_bytes(
    kube: &Kube,
    namespace: &str,
    name: &str,
    what: &str,
) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let api: Api<Secret> = Api::namespaced(kube.clone(), namespace);
    let secret = api
        .get_opt(name)
        .await?
        .ok_or_else(|| Error::NotYet(format!("{what} secret {namespace}/{name} does not exist")))?;
    Ok(secret
        .data
        .unwrap_or_default()
        .into_iter()
        .map(|(key, value)| (key, value.0))
        .collect())
}

async fn read(kube: &Kube, namespace: &str, name: &str) -> Result<BTreeMap<String, String>, Error> {
    let values = read_bytes(kube, namespace, name, "credentials").await?;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap_or_default().trim().to_owned();
    Ok(values.into_iter().map(|(key, value)| (key, text(value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Credential, &'static str> {
        let secret = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        credential(&secret, None)
    }

    #[test]
    fn the_secret_tells_how_to_sign_in() {
        let base = [("azure_client_id", "c"), ("azure_tenant_id", "t")];
        let with = |extra: (&'static str, &'static str)| of(&[base[0], base[1], extra]).unwrap();
        assert!(matches!(with(("azure_client_secret", "x")), Credential::Secret { .. }));
        assert!(matches!(
            with(("azure_client_certificate", "x")),
            Credential::Certificate { .. }
        ));
        assert!(matches!(
            with(("azure_federated_token_file", "/x")),
            Credential::WorkloadIdentity { .. }
        ));
        assert!(matches!(
            of(&base).unwrap(),
            Credential::ManagedIdentity { client_id: Some(_) }
        ));
        assert!(matches!(
            of(&[]).unwrap(),
            Credential::ManagedIdentity { client_id: None }
        ));
        assert_eq!(of(&[("azure_client_secret", "x")]), Err("azure_client_id"));
        assert_eq!(of(&[("azure_client_secret", "x"), base[0]]), Err("azure_tenant_id"));
    }
}
