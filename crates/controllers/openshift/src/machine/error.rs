//! Why a reconcile of a machine failed.

use capstan_core::machine::failure::{Failure, Refusal};
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

/// Codes of Azure for a request that refers to something that is not there, besides the status 404.
const MISSING_REFERENCE: [&str; 3] = ["InvalidResourceReference", "NotFound", "ResourceNotFound"];

/// Whether Azure refused a request because it misses one of these resources, which were just made or read.
pub fn misses_any(error: &capstan_azure::Error, names: &[String]) -> bool {
    let Some(arm) = error.arm() else { return false };
    let refusal = Refusal {
        is_not_found: error.is_not_found() || MISSING_REFERENCE.iter().any(|code| arm.has_code(code)),
        message: &arm.message,
        target: arm.target.as_deref(),
    };
    names.iter().any(|name| refusal.misses(name))
}

/// Whether Azure read a request and refused it: it made nothing, and will not before something changes.
pub fn is_refused(error: &capstan_azure::Error) -> bool {
    error
        .arm()
        .is_some_and(|arm| matches!(arm.status, 400..500) && !matches!(arm.status, 408 | 429))
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
