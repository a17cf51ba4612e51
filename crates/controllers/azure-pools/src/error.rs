//! What can keep a pool from where it should be.

use capstan_core::Class;
use capstan_kube::Classified;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Azure(#[from] capstan_azure::Error),
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    /// The identity cannot be used by this cluster.
    #[error("identity {identity}: {reason}")]
    Identity { identity: String, reason: String },
    /// The spec cannot be carried out, and only its author can change that.
    #[error("{0}")]
    Spec(String),
    /// Something that is needed does not exist yet.
    #[error("{0}")]
    Missing(String),
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        Self::Kube(error.into())
    }
}

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Self::Azure(error) => error.class(),
            Self::Kube(error) => error.class(),
            // The identity, its secret and its namespace's labels are changed without a change of the pool.
            Self::Identity { .. } | Self::Missing(_) => Class::Transient,
            Self::Spec(_) => Class::Terminal,
        }
    }

    /// Whether nobody gets in with what was signed in with. The secret changes without a change of the pool.
    pub fn is_about_credentials(&self) -> bool {
        use capstan_azure::Error::{Credential, SignIn};
        matches!(self, Self::Azure(Credential { .. } | SignIn { .. }))
    }

    /// Whether somebody has to look after the identity.
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
            Self::Spec(_) => "InvalidConfiguration",
            Self::Missing(_) => "WaitingForDependency",
        }
    }
}

impl Classified for Error {
    fn class(&self) -> Class {
        Error::class(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_that_cannot_be_used_is_tried_again_and_told_as_the_identitys_fault() {
        let error = Error::from(capstan_azure::Error::Credential {
            identity: "sp".to_owned(),
            reason: "no such file".to_owned(),
        });
        assert_eq!((error.class(), error.reason()), (Class::Transient, "IdentityUnusable"));
        assert!(error.is_about_credentials() && error.is_about_the_identity());
    }
}
