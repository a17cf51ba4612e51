//! Tokens: one sign-in per identity until the token is about to expire, however many ask at once.

use crate::assertion::Certificate;
use crate::{Cloud, Credential, Error, Metrics};
use async_trait::async_trait;
use azure_core::cloud::{CloudConfiguration, CustomConfiguration};
use azure_core::credentials::TokenCredential;
use azure_core::http::{AsyncRawResponse, ClientOptions, HttpClient, Request, RetryOptions, Transport};
use azure_identity::{
    ClientAssertionCredential, ClientAssertionCredentialOptions, ClientSecretCredential, ClientSecretCredentialOptions,
    ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId, WorkloadIdentityCredential,
    WorkloadIdentityCredentialOptions,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// After a failed sign-in everybody gets that failure for this long: a wrong secret must not become a storm of
/// sign-ins, which Entra ID answers by blocking the application.
const FAILURE_REST: Duration = Duration::from_secs(10);

/// A token that Azure refuses although it should be valid is thrown away, but not one that was just fetched.
const REFUSED_TOKEN_AGE: Duration = Duration::from_secs(60);

/// Counts what really goes to the authority.
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
    failure: tokio::sync::Mutex<Option<(Instant, String)>>,
}

/// All tokens of one process.
pub(crate) struct Tokens {
    cloud: Cloud,
    transport: Arc<Counted>,
    cells: Mutex<HashMap<Credential, Arc<Cell>>>,
}

impl Tokens {
    pub(crate) fn new(cloud: Cloud, http: reqwest::Client, metrics: Metrics) -> Self {
        Self {
            cloud,
            transport: Arc::new(Counted { http, metrics }),
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
        // Held across the sign-in, so that those who ask meanwhile share its outcome, good or bad.
        let mut failure = cell.failure.lock().await;
        if let Some((at, reason)) = &*failure
            && at.elapsed() < FAILURE_REST
        {
            return Err(fail(reason.clone()));
        }
        match cell.source.get_token(&[&self.cloud.scope()], None).await {
            Ok(token) => {
                *failure = None;
                Ok(token.token.secret().to_owned())
            }
            Err(error) => {
                let reason = error.to_string();
                *failure = Some((Instant::now(), reason.clone()));
                Err(fail(reason))
            }
        }
    }

    /// Azure refused the token (401): the next caller signs in anew, unless the token was new already.
    pub(crate) fn refused(&self, credential: &Credential) {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        if cells
            .get(credential)
            .is_some_and(|cell| cell.since.elapsed() > REFUSED_TOKEN_AGE)
        {
            cells.remove(credential);
        }
    }

    fn cell(&self, credential: &Credential) -> Result<Arc<Cell>, Error> {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cell) = cells.get(credential) {
            return Ok(cell.clone());
        }
        let identity = credential.identity();
        let source = self.source(credential).map_err(|error| match error {
            SourceError::Ours(error) => error,
            SourceError::Theirs(error) => Error::Credential {
                identity: identity.to_string(),
                reason: error.to_string(),
            },
        })?;
        // A rotated secret replaces the old one.
        cells.retain(|other, _| other.identity() != identity);
        let cell = Arc::new(Cell {
            source,
            since: Instant::now(),
            failure: tokio::sync::Mutex::default(),
        });
        cells.insert(credential.clone(), cell.clone());
        Ok(cell)
    }

    fn options(&self) -> ClientOptions {
        let mut custom = CustomConfiguration::default();
        custom.authority_host = self.cloud.authority.to_string();
        ClientOptions {
            retry: RetryOptions::none(),
            transport: Some(Transport::new(self.transport.clone())),
            cloud: Some(Arc::new(CloudConfiguration::Custom(custom))),
            ..ClientOptions::default()
        }
    }

    fn source(&self, credential: &Credential) -> Result<Arc<dyn TokenCredential>, SourceError> {
        let client_options = self.options();
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
            Credential::Certificate { tenant, client_id, pem } => {
                let audience = format!(
                    "{}/{tenant}/oauth2/v2.0/token",
                    self.cloud.authority.as_str().trim_end_matches('/')
                );
                let certificate = Certificate::new(&credential.identity(), pem, audience)?;
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
