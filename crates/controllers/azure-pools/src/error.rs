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
            Self::Azure(_) if self.is_about_credentials() => Class::Transient,
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

    /// A short CamelCase word for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Azure(capstan_azure::Error::Credential { .. }) => "IdentityUnusable",
            Self::Azure(error) => match error.class() {
                Class::Throttled(_) => "Throttled",
                Class::Transient => "AzureError",
                Class::Terminal => "InvalidConfiguration",
            },
            Self::Kube(_) => "KubernetesError",
            Self::Identity { .. } => "IdentityUnusable",
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
