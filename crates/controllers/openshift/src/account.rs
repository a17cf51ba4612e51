//! Azure accounts, from the credentials secrets that machines name.

use crate::machine::Error;
use capstan_api::openshift::MACHINE_FINALIZER;
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
        let key = key(reference, namespace);
        if let Some(account) = self.cached(&key) {
            return Ok(account);
        }
        match self.read(&key).await? {
            Some(account) => Ok(account),
            None => Err(Error::NotYet(missing("credentials", &key.0, &key.1))),
        }
    }

    /// The same for a machine that goes. A namespace that is deleted loses its secrets before its machines, and takes no
    /// new ones: then the account is used that the secret last stood for.
    pub async fn get_or_last(&self, reference: Option<&SecretReference>, namespace: &str) -> Result<Account, Error> {
        let key = key(reference, namespace);
        if let Some(account) = self.cached(&key) {
            return Ok(account);
        }
        if let Some(account) = self.read(&key).await? {
            return Ok(account);
        }
        let last = self.lock().get(&key).map(|(_, account)| account.clone());
        last.ok_or_else(|| Error::NotYet(left_over(&missing("credentials", &key.0, &key.1))))
    }

    /// The account that the secret stands for now; `None` where there is no such secret.
    async fn read(&self, key: &(String, String)) -> Result<Option<Account>, Error> {
        let (namespace, name) = key;
        let api: Api<Secret> = Api::namespaced(self.kube.clone(), namespace);
        let Some(secret) = api.get_opt(name).await? else {
            return Ok(None);
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap_or_default().trim().to_owned();
        let secret = values(secret).into_iter().map(|(key, value)| (key, text(value)));
        let account = self
            .account(&secret.collect())
            .map_err(|missing| Error::NotYet(format!("credentials secret {namespace}/{name} has no {missing}")))?;
        self.lock().insert(key.clone(), (Instant::now(), account.clone()));
        Ok(Some(account))
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

/// Where a machine's secret is: namespace and name.
fn key(reference: Option<&SecretReference>, namespace: &str) -> (String, String) {
    let name = reference.and_then(|reference| reference.name.clone());
    let given = reference
        .and_then(|reference| reference.namespace.clone())
        .filter(|given| !given.is_empty());
    (given.unwrap_or_else(|| namespace.to_owned()), name.unwrap_or_default())
}

fn missing(what: &str, namespace: &str, name: &str) -> String {
    format!("{what} secret {namespace}/{name} does not exist")
}

/// What to do about a machine whose things in Azure nobody can delete.
fn left_over(why: &str) -> String {
    format!(
        "{why}, and what this machine has in azure cannot be deleted without it: create the secret again, or delete the \
         virtual machine, its disks, interface and public address by hand and then take the finalizer \
         {MACHINE_FINALIZER} off the machine"
    )
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
        .ok_or_else(|| Error::NotYet(missing(what, namespace, name)))?;
    Ok(values(secret))
}

fn values(secret: Secret) -> BTreeMap<String, Vec<u8>> {
    let data = secret.data.unwrap_or_default().into_iter();
    data.map(|(key, value)| (key, value.0)).collect()
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

    /// An API server that has this secret and no other, as long as it is there.
    fn api_server(secret: &std::sync::Arc<Mutex<Option<serde_json::Value>>>) -> Kube {
        let secret = secret.clone();
        let serve = move |_: http::Request<kube::client::Body>| {
            let found = secret.lock().unwrap().clone();
            let missing = serde_json::json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
            let status = if found.is_some() { 200 } else { 404 };
            let body = serde_json::to_vec(&found.unwrap_or(missing)).unwrap();
            let answer = http::Response::builder().status(status);
            let answer = answer.body(kube::client::Body::from(body)).unwrap();
            async move { Ok::<_, std::convert::Infallible>(answer) }
        };
        Kube::new(tower::service_fn(serve), "default")
    }

    #[tokio::test]
    async fn a_machine_goes_by_the_account_that_its_secret_last_stood_for() {
        let encoded = |text: &str| k8s_openapi::ByteString(text.as_bytes().to_vec());
        let secret = serde_json::json!({"metadata": {"name": "s"}, "data": {
            "azure_subscription_id": encoded("sub"), "azure_client_id": encoded("c"),
            "azure_client_secret": encoded("x"), "azure_tenant_id": encoded("t"),
        }});
        let there = std::sync::Arc::new(Mutex::new(Some(secret)));
        let cloud = capstan_azure::Cloud::custom("sim", "https://localhost:1", "https://localhost:1").unwrap();
        let clients = Clients::new(capstan_azure::Settings::new(cloud)).unwrap();
        let accounts = Accounts::new(api_server(&there), clients);
        let reference = SecretReference {
            name: Some("s".into()),
            namespace: None,
        };
        assert_eq!(
            accounts.get(Some(&reference), "ns").await.unwrap().place.subscription,
            "sub"
        );
        *there.lock().unwrap() = None;
        let long_ago = Instant::now().checked_sub(FRESH).unwrap();
        accounts.lock().values_mut().for_each(|(read, _)| *read = long_ago);
        let error = accounts.get(Some(&reference), "ns").await.unwrap_err().to_string();
        assert_eq!(error, "credentials secret ns/s does not exist");
        let last = accounts.get_or_last(Some(&reference), "ns").await.unwrap();
        assert_eq!(last.place.subscription, "sub");
        let error = accounts.get_or_last(Some(&reference), "elsewhere").await.unwrap_err();
        assert!(error.to_string().contains("take the finalizer"), "{error}");
    }
}
