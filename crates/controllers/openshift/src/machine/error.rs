//! Why a reconcile of a machine failed.

use capstan_core::machine::failure::Failure;
use capstan_core::{Class, Classified};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error("{doing}: {source}")]
    Azure {
        doing: String,
        source: capstan_azure::Error,
    },
    /// The user has to change something.
    #[error("{0}")]
    Invalid(String),
    /// The machine waits for something.
    #[error("{0}")]
    NotReady(String),
}

impl Error {
    /// Wraps Azure's errors with what was being done.
    pub fn doing(what: impl Into<String>) -> impl FnOnce(capstan_azure::Error) -> Self {
        let doing = what.into();
        move |source| Self::Azure { doing, source }
    }

    /// Returns what decisions about the machine depend on.
    pub fn failure(&self) -> Failure {
        Failure {
            of_cluster: matches!(self, Self::Kube(_)),
            class: self.class(),
            is_paused: matches!(self, Self::Azure { source, .. } if matches!(source, capstan_azure::Error::Throttled { .. })),
            is_interface_in_use: matches!(self, Self::Azure { source, .. } if super::network::is_in_use(source)),
        }
    }

    /// The same error, retried whatever its class: for what no change of the spec can mend.
    pub fn retryable(self) -> Self {
        if self.class() == Class::Terminal {
            Self::NotReady(self.to_string())
        } else {
            self
        }
    }
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        Self::Kube(error.into())
    }
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Kube(error) => error.class(),
            Self::Azure { source, .. } => source.class(),
            Self::Invalid(_) => Class::Terminal,
            Self::NotReady(_) => Class::Transient,
        }
    }
}
