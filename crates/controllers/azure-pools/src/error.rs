//! Why a pool or a cluster is not in its desired state.

use capstan_core::{Class, Classified};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Azure(#[from] capstan_azure::Error),
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    /// The identity cannot be used by this cluster.
    #[error("identity {identity}: {reason}")]
    Identity { identity: String, reason: String },
    /// The user must change something: the message names the field, the value and what to do.
    #[error("{0}")]
    Invalid(String),
    /// The message names what does not exist yet.
    #[error("{0}")]
    NotReady(String),
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        Self::Kube(error.into())
    }
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Azure(error) => error.class(),
            Self::Kube(error) => error.class(),
            // The identity, its secret and its namespace's labels change without a change of the pool.
            Self::Identity { .. } | Self::NotReady(_) => Class::Transient,
            Self::Invalid(_) => Class::Terminal,
        }
    }
}

impl Error {
    /// Whether Azure refuses the credential. Its Secret changes without a change of the pool.
    pub fn is_about_credentials(&self) -> bool {
        use capstan_azure::Error::{Credential, SignIn};
        matches!(self, Self::Azure(Credential { .. } | SignIn { .. }))
    }

    /// Whether somebody has to change the identity.
    pub fn is_about_the_identity(&self) -> bool {
        matches!(
            self,
            Self::Identity { .. } | Self::Azure(capstan_azure::Error::Credential { .. })
        )
    }

    /// A short CamelCase word for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Identity { .. } | Self::Azure(capstan_azure::Error::Credential { .. }) => "IdentityUnusable",
            Self::Azure(error) => match error.class() {
                Class::Throttled(_) => "Throttled",
                Class::Transient => "AzureError",
                Class::Terminal => "InvalidConfiguration",
            },
            Self::Kube(_) => "KubernetesError",
            Self::Invalid(_) => "InvalidConfiguration",
            Self::NotReady(_) => "WaitingForDependency",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_that_cannot_be_used_is_retried_and_reported_as_the_identitys_fault() {
        let error = Error::from(capstan_azure::Error::Credential {
            identity: "sp".to_owned(),
            reason: "no such file".to_owned(),
        });
        assert_eq!((error.class(), error.reason()), (Class::Transient, "IdentityUnusable"));
        assert!(error.is_about_credentials() && error.is_about_the_identity());
    }
}
