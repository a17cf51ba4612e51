//! Azure accounts, from the credentials secrets that machines name.
//!
//! Invariants: a machine uses a secret of its own namespace, or one whose annotation names the machine's namespace. A secret
//! names no file but the operator's own token and files of the operator's folders, and stands for the identity of this process
//! only where the operator allows that.

use crate::machine::Error;
use capstan_api::openshift::MACHINE_FINALIZER;
use capstan_azure::{Client, Clients, Credential, Secret as Hidden};
use capstan_core::Clock;
use capstan_core::azure_names::AzureName;
use capstan_kube::grant;
use k8s_openapi::api::core::v1::{Secret, SecretReference};
use kube::{Api, Client as Kube};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How soon a rotated secret is used; until then machines do not read it again.
const FRESH: Duration = Duration::from_secs(30);

/// How long deletions may use an account whose secret is gone. A namespace in deletion loses its secrets before its
/// machines, which may have to be drained first; after this, deleting the secret has revoked the account.
const REVOKED_AFTER: Duration = Duration::from_secs(3600);

/// The path of workload identity's token, unless the secret has one.
const TOKEN_FILE_VARIABLE: &str = "AZURE_FEDERATED_TOKEN_FILE";

/// Where OpenShift mounts the token of a federated identity.
const TOKEN_FILE: &str = "/var/run/secrets/openshift/serviceaccount/token";

/// Subscription, group and region of a credentials secret, for specs that name none.
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

/// Namespace and name of a secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

impl Key {
    /// Returns the secret that a machine in `namespace` names.
    pub fn of(reference: Option<&SecretReference>, namespace: &str) -> Self {
        let given = |value: Option<&String>| value.filter(|value| !value.is_empty()).cloned();
        let named = given(reference.and_then(|reference| reference.namespace.as_ref()));
        let name = given(reference.and_then(|reference| reference.name.as_ref()));
        Self {
            namespace: named.unwrap_or_else(|| namespace.to_owned()),
            name: name.unwrap_or_default(),
        }
    }
}

/// An account as its secret had it when it was read.
#[derive(Clone, Debug)]
struct Known {
    read: Instant,
    account: Account,
    /// The namespaces that it grants, as its annotation has them.
    granted: String,
}

impl Known {
    fn allows(&self, key: &Key, namespace: &str) -> bool {
        key.namespace == namespace || grant::grants(&self.granted, namespace)
    }
}

/// Accounts by the secret that they come from.
pub struct Accounts {
    kube: Kube,
    clients: Clients,
    clock: Clock,
    token_file: Option<PathBuf>,
    known: Mutex<HashMap<Key, Known>>,
}

impl Accounts {
    pub fn new(kube: Kube, clients: Clients, clock: Clock) -> Self {
        Self {
            kube,
            clients,
            clock,
            token_file: own_token(),
            known: Mutex::default(),
        }
    }

    /// Returns the account of a machine in `namespace` that names this secret.
    pub async fn get(&self, reference: Option<&SecretReference>, namespace: &str) -> Result<Account, Error> {
        let key = Key::of(reference, namespace);
        match self.current(&key, namespace).await? {
            Some(known) => Ok(known.account),
            None => Err(Error::NotReady(absent(&key, namespace))),
        }
    }

    /// Returns the account of a machine that is being deleted: for a while also that of a secret that is gone.
    pub async fn get_or_last(&self, reference: Option<&SecretReference>, namespace: &str) -> Result<Account, Error> {
        let key = Key::of(reference, namespace);
        let last = match self.current(&key, namespace).await? {
            Some(known) => Some(known),
            None => self.younger(&key, namespace, REVOKED_AFTER),
        };
        match last {
            Some(known) => Ok(known.account),
            None => Err(Error::NotReady(left_over(&absent(&key, namespace)))),
        }
    }

    async fn current(&self, key: &Key, namespace: &str) -> Result<Option<Known>, Error> {
        // A grant counts at once.
        match self.younger(key, namespace, FRESH) {
            Some(known) => Ok(Some(known)),
            None => self.read(key, namespace).await,
        }
    }

    fn younger(&self, key: &Key, namespace: &str, age: Duration) -> Option<Known> {
        let known = self.known.lock().get(key).cloned();
        known.filter(|known| self.clock.since(known.read) < age && known.allows(key, namespace))
    }

    /// Reads the secret. `None`: there is no such secret, or `user` may not use it. Nobody learns from a secret of another
    /// namespace what is in it, nor whether it exists.
    async fn read(&self, key: &Key, user: &str) -> Result<Option<Known>, Error> {
        let Key { namespace, name } = key;
        let api: Api<Secret> = Api::namespaced(self.kube.clone(), namespace);
        let Some(secret) = api.get_opt(name).await? else {
            return Ok(None);
        };
        let granted = grant::granted(&secret).to_owned();
        if namespace != user && !grant::grants(&granted, user) {
            return Ok(None);
        }
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap_or_default().trim().to_owned();
        let secret = values(secret).into_iter().map(|(key, value)| (key, text(value)));
        let account = self
            .account(namespace, &secret.collect())
            .await
            .map_err(|reason| Error::NotReady(format!("credentials secret {namespace}/{name} {reason}")))?;
        let known = Known {
            read: self.clock.instant(),
            account,
            granted,
        };
        let mut all = self.known.lock();
        all.retain(|_, known| self.clock.since(known.read) < REVOKED_AFTER);
        all.insert(key.clone(), known.clone());
        Ok(Some(known))
    }

    /// Returns the account that a secret of `namespace` holds, or what is wrong with the secret.
    async fn account(&self, namespace: &str, secret: &BTreeMap<String, String>) -> Result<Account, String> {
        let credential = credential(secret, self.token_file.clone()).map_err(|key| format!("has no {key}"))?;
        self.check(namespace, &credential).await?;
        let get = |key: &'static str| secret.get(key).cloned().filter(|value| !value.is_empty());
        let place = Place {
            subscription: get("azure_subscription_id").ok_or("has no azure_subscription_id")?,
            group: get("azure_resourcegroup").unwrap_or_default(),
            location: get("azure_region").unwrap_or_default(),
        };
        if AzureName::Subscription.check(&place.subscription).is_err() {
            return Err("has no valid azure_subscription_id".to_owned());
        }
        let client = self.clients.client(&credential, &place.subscription);
        Ok(Account { client, place })
    }

    /// Refuses a credential that is not the tenant's: a file of this process, or the identity of this process.
    async fn check(&self, namespace: &str, credential: &Credential) -> Result<(), String> {
        let allowed = self.clients.allowed();
        let by_capstan = |client_id: &str| {
            let checked = allowed.client_ids.check(namespace, client_id);
            checked.map_err(|refusal| format!("is refused: {refusal}"))
        };
        match credential {
            Credential::WorkloadIdentity {
                token_file, client_id, ..
            } => {
                by_capstan(client_id)?;
                let own = [self.token_file.as_deref(), Some(TOKEN_FILE.as_ref())];
                if own.contains(&Some(token_file)) {
                    return Ok(());
                }
                let path = token_file.to_string_lossy();
                let checked = allowed.check("azure_federated_token_file", &path).await;
                checked.map_err(|refusal| format!("is refused: {refusal}, nor the token of capstan itself"))
            }
            Credential::ManagedIdentity { .. } if !allowed.environment_identity.contain(namespace) => Err(format!(
                "has no azure_client_secret, azure_client_certificate or token, so it stands for the managed identity of the \
                 machine that capstan runs on: add one of them, or start capstan with \
                 --allow-environment-identity={namespace}"
            )),
            Credential::ManagedIdentity {
                client_id: Some(client_id),
            } => by_capstan(client_id),
            Credential::ManagedIdentity { client_id: None }
            | Credential::Secret { .. }
            | Credential::Certificate { .. } => Ok(()),
        }
    }
}

/// Returns the token that the operator gives to this process.
fn own_token() -> Option<PathBuf> {
    let named = std::env::var(TOKEN_FILE_VARIABLE).ok().filter(|path| !path.is_empty());
    let mounted = || Some(PathBuf::from(TOKEN_FILE)).filter(|path| path.exists());
    named.map(PathBuf::from).or_else(mounted)
}

fn missing(what: &str, key: &Key) -> String {
    format!("{what} secret {}/{} does not exist", key.namespace, key.name)
}

/// The same answer for a secret of another namespace that does not exist and for one that grants nothing.
fn absent(key: &Key, namespace: &str) -> String {
    match key.namespace == namespace {
        true => missing("credentials", key),
        false => format!("credentials {}", grant::refusal(&key.namespace, &key.name, namespace)),
    }
}

/// Tells what to do about a machine whose resources in Azure nobody can delete.
fn left_over(why: &str) -> String {
    format!(
        "{why}, and the machine's resources in Azure cannot be deleted without it: create the secret again, or delete the \
         virtual machine, its disks, interface and public address by hand and then remove the finalizer \
         {MACHINE_FINALIZER} from the machine"
    )
}

/// Returns the credential that a secret holds, or the key that it lacks.
fn credential(secret: &BTreeMap<String, String>, token_file: Option<PathBuf>) -> Result<Credential, &'static str> {
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
            authority: None,
        });
    }
    let named = get("azure_federated_token_file").map(PathBuf::from);
    match (named.or(token_file), tenant) {
        (Some(token_file), Some(tenant)) => Ok(Credential::WorkloadIdentity {
            tenant,
            client_id,
            token_file,
        }),
        _ => Ok(Credential::ManagedIdentity {
            client_id: Some(client_id),
        }),
    }
}

/// Returns a secret's values. A machine waits for a secret that is missing.
pub async fn read_bytes(kube: &Kube, key: &Key, what: &str) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let api: Api<Secret> = Api::namespaced(kube.clone(), &key.namespace);
    let secret = api
        .get_opt(&key.name)
        .await?
        .ok_or_else(|| Error::NotReady(missing(what, key)))?;
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
    fn the_keys_of_a_secret_decide_how_to_sign_in() {
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

    const SUBSCRIPTION: &str = "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b";

    fn secret(annotations: serde_json::Value) -> serde_json::Value {
        let encoded = |text: &str| k8s_openapi::ByteString(text.as_bytes().to_vec());
        serde_json::json!({"metadata": {"name": "s", "annotations": annotations}, "data": {
            "azure_subscription_id": encoded(SUBSCRIPTION), "azure_client_id": encoded("c"),
            "azure_client_secret": encoded("x"), "azure_tenant_id": encoded("t"),
        }})
    }

    type There = std::sync::Arc<Mutex<Option<serde_json::Value>>>;

    /// Accounts of an API server that has this secret in every namespace and no other, as long as it is there.
    fn accounts(there: &There) -> Accounts {
        accounts_that(there, capstan_azure::Allowed::default())
    }

    fn accounts_that(there: &There, allowed: capstan_azure::Allowed) -> Accounts {
        let secret = there.clone();
        let serve = move |_: http::Request<kube::client::Body>| {
            let found = secret.lock().clone();
            let missing = serde_json::json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
            let status = if found.is_some() { 200 } else { 404 };
            let body = serde_json::to_vec(&found.unwrap_or(missing)).unwrap();
            let answer = http::Response::builder().status(status);
            let answer = answer.body(kube::client::Body::from(body)).unwrap();
            async move { Ok::<_, std::convert::Infallible>(answer) }
        };
        let kube = Kube::new(tower::service_fn(serve), "default");
        let cloud = capstan_azure::Cloud::custom("sim", "https://localhost:1", "https://localhost:1").unwrap();
        let settings = capstan_azure::Settings {
            allowed,
            ..capstan_azure::Settings::new(cloud)
        };
        let clients = Clients::new(settings).unwrap();
        Accounts::new(kube, clients, Clock::starting_at(jiff::Timestamp::UNIX_EPOCH))
    }

    fn named(namespace: Option<&str>) -> SecretReference {
        SecretReference {
            name: Some("s".into()),
            namespace: namespace.map(ToOwned::to_owned),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deletion_uses_the_account_of_a_lost_secret_for_an_hour() {
        let there = There::new(Mutex::new(Some(secret(serde_json::json!({})))));
        let (accounts, reference) = (accounts(&there), named(None));
        let found = accounts.get(Some(&reference), "ns").await.unwrap();
        assert_eq!(found.place.subscription, SUBSCRIPTION);
        *there.lock() = None;
        tokio::time::advance(FRESH).await;
        let error = accounts.get(Some(&reference), "ns").await.unwrap_err().to_string();
        assert_eq!(error, "credentials secret ns/s does not exist");
        let last = accounts.get_or_last(Some(&reference), "ns").await.unwrap();
        assert_eq!(last.place.subscription, SUBSCRIPTION);
        tokio::time::advance(REVOKED_AFTER).await;
        for namespace in ["ns", "elsewhere"] {
            let error = accounts.get_or_last(Some(&reference), namespace).await.unwrap_err();
            assert!(error.to_string().contains("remove the finalizer"), "{error}");
        }
        *there.lock() = Some(secret(serde_json::json!({})));
        accounts.get(Some(&reference), "other").await.unwrap();
        assert_eq!(accounts.known.lock().len(), 1, "old accounts are forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_secret_of_another_namespace_is_used_only_where_it_allows_that() {
        let there = There::new(Mutex::new(Some(secret(serde_json::json!({})))));
        let (accounts, reference) = (accounts(&there), named(Some("platform")));
        accounts.get(Some(&reference), "platform").await.unwrap();
        let mut refusals = Vec::new();
        // As it is, empty, and gone.
        for _ in 0..3 {
            let last = accounts.get_or_last(Some(&reference), "tenant").await;
            assert!(last.unwrap_err().to_string().contains("remove the finalizer"));
            let error = accounts.get(Some(&reference), "tenant").await.unwrap_err().to_string();
            let refusal = "credentials secret platform/s does not exist, or does not allow namespace tenant: annotate it with \
                           capstan.dev/allowed-namespaces=tenant";
            assert!(error.starts_with(refusal), "{error}");
            refusals.push(error);
            // Neither its absence nor what is in it changes the answer.
            *there.lock() = (refusals.len() == 1).then(|| serde_json::json!({"metadata": {"name": "s"}}));
            tokio::time::advance(FRESH).await;
        }
        assert_eq!(refusals[0], refusals[1]);
        assert_eq!(refusals[0], refusals[2]);
        for (allowed, granted) in [("a, tenant", true), ("*", true), ("ten", false)] {
            *there.lock() = Some(secret(
                serde_json::json!({(grant::ALLOWED_NAMESPACES_ANNOTATION): allowed}),
            ));
            tokio::time::advance(FRESH).await;
            assert_eq!(
                accounts.get(Some(&reference), "tenant").await.is_ok(),
                granted,
                "{allowed}"
            );
        }
    }

    #[tokio::test]
    async fn a_subscription_that_is_no_name_is_refused() {
        let mut bad = secret(serde_json::json!({}));
        bad["data"]["azure_subscription_id"] = serde_json::json!(k8s_openapi::ByteString(b"s/../t?x=".to_vec()));
        let there = There::new(Mutex::new(Some(bad)));
        let error = accounts(&there).get(Some(&named(None)), "ns").await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "credentials secret ns/s has no valid azure_subscription_id"
        );
    }

    /// The secret of a tenant that has these keys besides the subscription.
    fn secret_with(keys: &[(&str, &str)]) -> There {
        let encoded = |text: &str| serde_json::json!(k8s_openapi::ByteString(text.as_bytes().to_vec()));
        let mut data = serde_json::json!({"azure_subscription_id": encoded(SUBSCRIPTION)});
        for (key, value) in keys {
            data[key] = encoded(value);
        }
        let secret = serde_json::json!({"metadata": {"name": "s"}, "data": data});
        There::new(Mutex::new(Some(secret)))
    }

    #[tokio::test]
    async fn a_secret_names_no_file_but_the_operators_own() {
        let home = std::env::temp_dir().join(format!("capstan-account-{}", std::process::id()));
        let inside = home.join("inside");
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::write(inside.join("token"), "jwt").unwrap();
        std::fs::write(home.join("token"), "jwt").unwrap();
        let fifo = std::process::Command::new("mkfifo").arg(inside.join("fifo")).status();
        assert!(fifo.unwrap().success());
        let own = home.join("own");
        let path = |name: &str| home.join(name).to_str().unwrap().to_owned();
        let cases = [
            (path("own"), true),
            (TOKEN_FILE.to_owned(), true),
            (path("inside/token"), true),
            (path("inside/../token"), false),
            (path("inside/fifo"), false),
            (path("inside/missing"), false),
            (path("token"), false),
            ("/dev/zero".to_owned(), false),
            ("/etc/passwd".to_owned(), false),
            ("/nonexistent".to_owned(), false),
        ];
        for (file, accepted) in cases {
            let keys = [("azure_client_id", "c"), ("azure_tenant_id", "t")];
            let there = secret_with(&[keys[0], keys[1], ("azure_federated_token_file", &file)]);
            let folders = vec![inside.clone()];
            let mut accounts = accounts_that(
                &there,
                capstan_azure::Allowed {
                    folders,
                    ..Default::default()
                },
            );
            accounts.token_file = Some(own.clone());
            match accounts.get(Some(&named(None)), "ns").await {
                Ok(_) => assert!(accepted, "{file} is accepted"),
                Err(error) => {
                    let same = format!(
                        "credentials secret ns/s is refused: azure_federated_token_file {file:?} is not a readable file of \
                         at most 1 MiB in {}, nor the token of capstan itself",
                        inside.display()
                    );
                    assert_eq!((accepted, error.to_string()), (false, same));
                }
            }
        }
        std::fs::remove_dir_all(home).unwrap();
    }

    #[rstest::rstest]
    #[case::nothing(&[])]
    #[case::an_identity_of_the_host(&[("azure_client_id", "c")])]
    #[tokio::test]
    async fn a_secret_stands_for_the_identity_of_this_process_only_where_the_operator_allows_it(
        #[case] keys: &[(&str, &str)],
    ) {
        let allowed = capstan_azure::Allowed {
            environment_identity: capstan_azure::Namespaces::Only(["ns".to_owned()].into()),
            ..Default::default()
        };
        let mut accounts = accounts_that(&secret_with(keys), allowed);
        accounts.token_file = None;
        accounts.get(Some(&named(None)), "ns").await.unwrap();
        let refused = accounts.get(Some(&named(None)), "other").await;
        let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("--allow-environment-identity=other"), "{refused}");
    }

    #[rstest::rstest]
    #[case::a_federated_identity(&[("azure_client_id", "app-1"), ("azure_tenant_id", "t")])]
    #[case::an_identity_of_the_host(&[("azure_client_id", "app-1")])]
    #[tokio::test]
    async fn a_secret_names_the_client_ids_that_the_operator_allows_its_namespace(#[case] keys: &[(&str, &str)]) {
        for (id, expected) in [("app-1", true), ("app-2", false)] {
            let allowed = capstan_azure::Allowed {
                environment_identity: capstan_azure::Namespaces::All,
                client_ids: [format!("ns={id}").parse().unwrap()].into_iter().collect(),
                ..Default::default()
            };
            let mut accounts = accounts_that(&secret_with(keys), allowed);
            accounts.token_file = Some("/own".into());
            let account = accounts.get(Some(&named(None)), "ns").await;
            let refusal = account.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(refusal.is_empty(), expected, "{refusal}");
            assert!(expected || refusal.contains("--allow-client-ids=ns=app-1"), "{refusal}");
        }
    }
}
