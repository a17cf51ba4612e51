//! Who we are to Azure. Secrets never show in `Debug`, logs or errors.

use std::fmt;
use std::path::PathBuf;

/// A value that is never printed.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// How to sign in. Equal credentials share tokens; a rotated secret is another credential.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

/// The public part of a credential: safe to print.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub tenant: String,
    pub client_id: String,
}

impl Credential {
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
