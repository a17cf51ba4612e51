//! The credentials with which Capstan signs in to Azure. Secrets never appear in `Debug`, logs or errors.

use crate::{Error, certificate};
use aws_lc_rs::digest::{Context, SHA256};
use capstan_core::Secret;
use reqwest::Url;
use std::fmt;
use std::path::PathBuf;
use zeroize::Zeroizing;

/// The way to sign in. Equal credentials share tokens; a rotated secret is another credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// A service principal with a client secret.
    Secret {
        tenant: String,
        client_id: String,
        secret: Secret,
    },
    /// A service principal with a certificate and its private key, both PEM, in one text.
    Certificate {
        tenant: String,
        client_id: String,
        pem: Secret,
        /// The authority, if it is not that of the cloud.
        authority: Option<Url>,
    },
    /// A Kubernetes service account token that Entra ID trusts.
    WorkloadIdentity {
        tenant: String,
        client_id: String,
        token_file: PathBuf,
    },
    /// The identity of the virtual machine we run on: a user-assigned one by its client id, else the system's.
    ManagedIdentity { client_id: Option<String> },
}

/// A hash of one whole credential, with its secret, for maps. The secret cannot be read from it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CredentialKey([u8; 32]);

impl fmt::Debug for CredentialKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialKey(…)")
    }
}

/// The public part of a credential: safe to print.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub tenant: String,
    pub client_id: String,
}

impl Credential {
    /// By the variables that Azure's own SDKs read, in their order: a secret, a certificate, a federated token, else the
    /// identity of the machine we run on.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let set = |name: &str| var(name).filter(|value| !value.is_empty());
        let (tenant, client_id) = (set("AZURE_TENANT_ID"), set("AZURE_CLIENT_ID"));
        let (Some(tenant), Some(client_id)) = (tenant, client_id.clone()) else {
            return Ok(Self::ManagedIdentity { client_id });
        };
        if let Some(secret) = set("AZURE_CLIENT_SECRET") {
            let secret = Secret::new(secret);
            return Ok(Self::Secret {
                tenant,
                client_id,
                secret,
            });
        }
        if let Some(path) = set("AZURE_CLIENT_CERTIFICATE_PATH") {
            let invalid = |reason: String| Error::Invalid {
                field: "AZURE_CLIENT_CERTIFICATE_PATH",
                value: path.clone(),
                reason,
            };
            let bytes = std::fs::read(&path).map_err(|error| invalid(error.to_string()))?;
            let password = Secret::new(set("AZURE_CLIENT_CERTIFICATE_PASSWORD").unwrap_or_default());
            let pem = certificate::to_pem(&Zeroizing::new(bytes), &password).map_err(|why| invalid(why.to_string()))?;
            return Ok(Self::Certificate {
                tenant,
                client_id,
                pem,
                authority: None,
            });
        }
        Ok(match set("AZURE_FEDERATED_TOKEN_FILE") {
            Some(file) => Self::WorkloadIdentity {
                tenant,
                client_id,
                token_file: file.into(),
            },
            None => Self::ManagedIdentity {
                client_id: Some(client_id),
            },
        })
    }

    /// Equal for equal credentials only.
    pub(crate) fn key(&self) -> CredentialKey {
        let file;
        let (kind, parts): (u8, [&str; 4]) = match self {
            Self::Secret {
                tenant,
                client_id,
                secret,
            } => (0, [tenant, client_id, secret.reveal(), ""]),
            Self::Certificate {
                tenant,
                client_id,
                pem,
                authority,
            } => {
                let at = authority.as_ref().map_or("", Url::as_str);
                (1, [tenant, client_id, pem.reveal(), at])
            }
            Self::WorkloadIdentity {
                tenant,
                client_id,
                token_file,
            } => {
                file = token_file.to_string_lossy();
                (2, [tenant, client_id, file.as_ref(), ""])
            }
            Self::ManagedIdentity { client_id: None } => (3, ["", "", "", ""]),
            Self::ManagedIdentity {
                client_id: Some(client_id),
            } => (4, [client_id, "", "", ""]),
        };
        let mut digest = Context::new(&SHA256);
        digest.update(&[kind]);
        for part in parts {
            // With its length, so that no two credentials are written the same way.
            digest.update(&(part.len() as u64).to_be_bytes());
            digest.update(part.as_bytes());
        }
        let mut key = [0; 32];
        key.copy_from_slice(digest.finish().as_ref());
        CredentialKey(key)
    }

    pub fn identity(&self) -> Identity {
        let (tenant, client_id) = match self {
            Credential::Secret { tenant, client_id, .. }
            | Credential::Certificate { tenant, client_id, .. }
            | Credential::WorkloadIdentity { tenant, client_id, .. } => (tenant.clone(), client_id.clone()),
            Credential::ManagedIdentity { client_id } => (
                "managed".to_owned(),
                client_id.clone().unwrap_or_else(|| "system".to_owned()),
            ),
        };
        Identity { tenant, client_id }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.client_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case::secret(&[("AZURE_TENANT_ID", "t"), ("AZURE_CLIENT_ID", "c"), ("AZURE_CLIENT_SECRET", "s")], "Secret {")]
    #[case::token(
        &[("AZURE_TENANT_ID", "t"), ("AZURE_CLIENT_ID", "c"), ("AZURE_FEDERATED_TOKEN_FILE", "/f")],
        "WorkloadIdentity {"
    )]
    #[case::own_identity(&[("AZURE_CLIENT_ID", "c")], "ManagedIdentity { client_id: Some")]
    #[case::nothing(&[], "ManagedIdentity { client_id: None")]
    fn the_sdks_variables_say_who_we_are(#[case] vars: &[(&str, &str)], #[case] expected: &str) {
        let var = |name: &str| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let credential = format!("{:?}", Credential::from_vars(var).unwrap());
        assert!(credential.starts_with(expected), "{credential}");
    }

    #[test]
    fn keys_differ_wherever_credentials_do() {
        let secret = |tenant: &str, client_id: &str, secret: &str| Credential::Secret {
            tenant: tenant.into(),
            client_id: client_id.into(),
            secret: Secret::new(secret),
        };
        let all = [
            secret("t", "c", "one"),
            secret("t", "c", "two"),
            secret("tc", "", "one"),
            secret("t", "co", "ne"),
            Credential::Certificate {
                tenant: "t".into(),
                client_id: "c".into(),
                pem: Secret::new("one"),
                authority: None,
            },
            Credential::Certificate {
                tenant: "t".into(),
                client_id: "c".into(),
                pem: Secret::new("one"),
                authority: Some("https://login.example".parse().unwrap()),
            },
            Credential::WorkloadIdentity {
                tenant: "t".into(),
                client_id: "c".into(),
                token_file: "one".into(),
            },
            Credential::ManagedIdentity { client_id: None },
            Credential::ManagedIdentity {
                client_id: Some(String::new()),
            },
        ];
        let keys: std::collections::HashSet<_> = all.iter().map(Credential::key).collect();
        assert_eq!(keys.len(), all.len());
        assert_eq!(secret("t", "c", "one").key(), all[0].key());
        assert!(!format!("{:?}", all[0].key()).contains("one"));
    }

    #[test]
    fn secrets_do_not_print() {
        let credential = Credential::Secret {
            tenant: "t".into(),
            client_id: "c".into(),
            secret: Secret::new("hunter2"),
        };
        assert!(!format!("{credential:?} {}", credential.identity()).contains("hunter2"));
    }
}
