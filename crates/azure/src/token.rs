//! Tokens: one sign-in per credential until the token is about to expire, however many callers need it.
//!
//! Invariants: the whole credential is the key, so that two secrets of one application never displace each other's
//! token; the number of remembered credentials is bounded, and one that never signed in is forgotten first.

use crate::assertion::Certificate;
use crate::credential::CredentialKey;
use crate::{Cloud, Credential, Error, Metrics, Settings};
use async_trait::async_trait;
use azure_core::cloud::{CloudConfiguration, CustomConfiguration};
use azure_core::credentials::TokenCredential;
use azure_core::http::{AsyncRawResponse, ClientOptions, HttpClient, Request, RetryOptions, Transport};
use azure_identity::{
    ClientAssertionCredential, ClientAssertionCredentialOptions, ClientSecretCredential, ClientSecretCredentialOptions,
    ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId, WorkloadIdentityCredential,
    WorkloadIdentityCredentialOptions,
};
use capstan_core::Clock;
use capstan_core::azure_names::AzureName;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// After a failed sign-in all callers get that failure for this long: a wrong secret must not become a storm of sign-ins,
/// which Entra ID answers by blocking the application.
const FAILURE_REST: Duration = Duration::from_secs(10);

/// A token that Azure refuses although it should be valid is dropped, but not a new one.
const REFUSED_TOKEN_AGE: Duration = Duration::from_secs(60);

/// Credentials remembered at most. A process that serves more identities signs in again now and then.
const MOST_CREDENTIALS: usize = 512;

/// A credential that was unused for this long is forgotten: its Secret was rotated or deleted. Longer than the resync of
/// the controllers, so that a quiet cluster does not sign in again.
const UNUSED: Duration = Duration::from_secs(2 * 3600);

/// Counts the requests that go to the authority.
#[derive(Debug)]
struct Counted {
    http: reqwest::Client,
    metrics: Metrics,
}

#[async_trait]
impl HttpClient for Counted {
    async fn execute_request(&self, request: &Request) -> azure_core::Result<AsyncRawResponse> {
        self.metrics.sign_ins.inc();
        HttpClient::execute_request(&self.http, request).await
    }
}

struct Cell {
    source: Arc<dyn TokenCredential>,
    since: Instant,
    /// Whether the credential ever got a token.
    proven: AtomicBool,
    failure: tokio::sync::Mutex<Option<(Instant, String)>>,
}

struct Entry {
    cell: Arc<Cell>,
    used: Instant,
}

/// All tokens of one process.
pub(crate) struct Tokens {
    cloud: Cloud,
    clock: Clock,
    transport: Arc<Counted>,
    cells: Mutex<HashMap<CredentialKey, Entry>>,
}

impl Tokens {
    pub(crate) fn new(settings: &Settings, http: reqwest::Client) -> Self {
        Self {
            cloud: settings.cloud.clone(),
            clock: settings.clock,
            transport: Arc::new(Counted {
                http,
                metrics: settings.metrics.clone(),
            }),
            cells: Mutex::default(),
        }
    }

    /// A token for `credential`, from memory where it is still good.
    pub(crate) async fn get(&self, credential: &Credential) -> Result<String, Error> {
        let cell = self.cell(credential)?;
        let fail = |reason: String| Error::SignIn {
            identity: credential.identity().to_string(),
            reason,
        };
        // Locked during the sign-in, so that all callers share its outcome, good or bad.
        let mut failure = cell.failure.lock().await;
        if let Some((at, reason)) = &*failure
            && self.clock.since(*at) < FAILURE_REST
        {
            return Err(fail(reason.clone()));
        }
        match cell.source.get_token(&[&self.cloud.scope()], None).await {
            Ok(token) => {
                *failure = None;
                cell.proven.store(true, Relaxed);
                Ok(token.token.secret().to_owned())
            }
            Err(error) => {
                let reason = error.to_string();
                *failure = Some((self.clock.instant(), reason.clone()));
                Err(fail(reason))
            }
        }
    }

    /// Azure refused the token (401): the next caller signs in again, unless the token was new.
    pub(crate) fn refused(&self, credential: &Credential) {
        let key = credential.key();
        let mut cells = self.cells.lock();
        if cells
            .get(&key)
            .is_some_and(|entry| self.clock.since(entry.cell.since) > REFUSED_TOKEN_AGE)
        {
            cells.remove(&key);
        }
    }

    fn cell(&self, credential: &Credential) -> Result<Arc<Cell>, Error> {
        let (key, now) = (credential.key(), self.clock.instant());
        if let Some(cell) = used(&mut self.cells.lock(), &key, now) {
            return Ok(cell);
        }
        let identity = credential.identity();
        // The tenant becomes part of the authority's address.
        AzureName::Tenant
            .check(&identity.tenant)
            .map_err(|error| Error::Credential {
                identity: identity.to_string(),
                reason: error.to_string(),
            })?;
        // A file is read here: other sign-ins must not wait for it.
        let source = self.source(credential).map_err(|error| match error {
            SourceError::Ours(error) => error,
            SourceError::Theirs(error) => Error::Credential {
                identity: identity.to_string(),
                reason: error.to_string(),
            },
        })?;
        let mut cells = self.cells.lock();
        // Another caller was faster: all share its token.
        if let Some(cell) = used(&mut cells, &key, now) {
            return Ok(cell);
        }
        make_room(&mut cells, now);
        let cell = Arc::new(Cell {
            source,
            since: now,
            proven: AtomicBool::new(false),
            failure: tokio::sync::Mutex::default(),
        });
        let entry = Entry {
            cell: cell.clone(),
            used: now,
        };
        cells.insert(key, entry);
        Ok(cell)
    }

    fn options(&self, authority: &reqwest::Url) -> ClientOptions {
        let mut custom = CustomConfiguration::default();
        custom.authority_host = authority.to_string();
        ClientOptions {
            retry: RetryOptions::none(),
            transport: Some(Transport::new(self.transport.clone())),
            cloud: Some(Arc::new(CloudConfiguration::Custom(custom))),
            ..ClientOptions::default()
        }
    }

    fn source(&self, credential: &Credential) -> Result<Arc<dyn TokenCredential>, SourceError> {
        let client_options = self.options(&self.cloud.authority);
        Ok(match credential {
            Credential::Secret {
                tenant,
                client_id,
                secret,
            } => ClientSecretCredential::new(
                tenant,
                client_id.clone(),
                secret.reveal().to_owned().into(),
                Some(ClientSecretCredentialOptions { client_options }),
            )?,
            Credential::Certificate {
                tenant,
                client_id,
                pem,
                authority,
            } => {
                let authority = authority.as_ref().unwrap_or(&self.cloud.authority);
                let client_options = self.options(authority);
                let audience = format!(
                    "{}/{tenant}/oauth2/v2.0/token",
                    authority.as_str().trim_end_matches('/')
                );
                let certificate = Certificate::new(&credential.identity(), pem, audience, self.clock)?;
                ClientAssertionCredential::new(
                    tenant.clone(),
                    client_id.clone(),
                    certificate,
                    Some(ClientAssertionCredentialOptions { client_options }),
                )?
            }
            Credential::WorkloadIdentity {
                tenant,
                client_id,
                token_file,
            } => WorkloadIdentityCredential::new(Some(WorkloadIdentityCredentialOptions {
                credential_options: ClientAssertionCredentialOptions { client_options },
                client_id: Some(client_id.clone()),
                tenant_id: Some(tenant.clone()),
                token_file_path: Some(token_file.clone()),
            }))?,
            Credential::ManagedIdentity { client_id } => {
                ManagedIdentityCredential::new(Some(ManagedIdentityCredentialOptions {
                    user_assigned_id: client_id.clone().map(UserAssignedId::ClientId),
                    client_options,
                }))?
            }
        })
    }
}

/// Returns a remembered credential, and remembers that it was used.
fn used(cells: &mut HashMap<CredentialKey, Entry>, key: &CredentialKey, now: Instant) -> Option<Arc<Cell>> {
    let entry = cells.get_mut(key)?;
    entry.used = now;
    Some(entry.cell.clone())
}

/// Forgets unused credentials, and then, if there are still too many, one more: the longest unused of those that never
/// signed in, or else of all.
fn make_room(cells: &mut HashMap<CredentialKey, Entry>, now: Instant) {
    cells.retain(|_, entry| now.duration_since(entry.used) < UNUSED);
    if cells.len() < MOST_CREDENTIALS {
        return;
    }
    let oldest = cells
        .iter()
        .min_by_key(|(_, entry)| (entry.cell.proven.load(Relaxed), entry.used))
        .map(|(key, _)| *key);
    if let Some(key) = oldest {
        cells.remove(&key);
    }
}

enum SourceError {
    Ours(Error),
    Theirs(azure_core::Error),
}

impl From<Error> for SourceError {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<azure_core::Error> for SourceError {
    fn from(error: azure_core::Error) -> Self {
        Self::Theirs(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Secret;

    fn tokens() -> Tokens {
        Tokens::new(&Settings::new(Cloud::named("").unwrap()), reqwest::Client::new())
    }

    fn credential(secret: &str) -> Credential {
        Credential::Secret {
            tenant: "t".into(),
            client_id: "c".into(),
            secret: Secret::new(secret),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_that_would_change_the_authoritys_address_is_refused() {
        for tenant in ["x/../../evil", "t?x=", "t#", "..", "", "a b"] {
            let credential = Credential::Secret {
                tenant: tenant.into(),
                client_id: "c".into(),
                secret: Secret::new("s"),
            };
            let refused = tokens().get(&credential).await;
            assert!(
                matches!(refused, Err(Error::Credential { .. })),
                "{tenant:?}: {refused:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn two_secrets_of_one_application_do_not_displace_each_other() {
        let tokens = tokens();
        let [one, two] = ["one", "two"].map(|secret| tokens.cell(&credential(secret)).unwrap());
        assert!(!Arc::ptr_eq(&one, &two));
        for (secret, cell) in [("one", &one), ("two", &two)] {
            assert!(Arc::ptr_eq(cell, &tokens.cell(&credential(secret)).unwrap()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_wrong_credentials_displaces_none_that_works() {
        let tokens = tokens();
        let good = tokens.cell(&credential("good")).unwrap();
        good.proven.store(true, Relaxed);
        for n in 0..MOST_CREDENTIALS * 2 {
            tokio::time::advance(Duration::from_millis(1)).await;
            tokens.cell(&credential(&format!("wrong{n}"))).unwrap();
        }
        assert_eq!(tokens.cells.lock().len(), MOST_CREDENTIALS);
        assert!(Arc::ptr_eq(&good, &tokens.cell(&credential("good")).unwrap()));
    }

    #[test]
    fn nobody_waits_for_the_file_of_another_credential() {
        let path = std::env::temp_dir().join(format!("capstan-token-{}", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let (tokens, slow) = (tokens(), path.clone());
        let slow = Credential::WorkloadIdentity {
            tenant: "t".into(),
            client_id: "c".into(),
            token_file: slow,
        };
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| tokens.cell(&slow).map(drop));
            // A FIFO opens for writing once its reader is there.
            let writer = std::fs::File::options().write(true).open(&path).unwrap();
            assert!(tokens.cells.try_lock().is_some(), "the read holds the lock of all");
            drop(writer);
            reading.join().unwrap().unwrap();
        });
        std::fs::remove_file(path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_credential_that_nobody_uses_is_forgotten() {
        let tokens = tokens();
        tokens.cell(&credential("rotated")).unwrap();
        tokio::time::advance(UNUSED).await;
        tokens.cell(&credential("new")).unwrap();
        assert_eq!(tokens.cells.lock().len(), 1);
    }
}
