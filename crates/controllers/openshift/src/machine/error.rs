//! Why a pass over a machine ended early.

use capstan_core::Class;
use capstan_kube::Classified;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    /// Azure did not do what we asked.
    #[error("{doing}: {source}")]
    Azure {
        doing: String,
        source: capstan_azure::Error,
    },
    /// The spec cannot become a machine.
    #[error("{0}")]
    Refused(String),
    /// Something that the machine needs is not there yet, or is in the way.
    #[error("{0}")]
    NotYet(String),
}

impl Error {
    /// Wraps Azure's errors with what was being done.
    pub fn doing(what: impl Into<String>) -> impl FnOnce(capstan_azure::Error) -> Self {
        let doing = what.into();
        move |source| Self::Azure { doing, source }
    }

    /// Nothing was sent: an earlier answer asked for a pause.
    pub fn is_held(&self) -> bool {
        let source = match self {
            Self::Azure { source, .. } => source,
            _ => return false,
        };
        matches!(source, capstan_azure::Error::Throttled { .. })
    }

    /// An interface could not be deleted, because a virtual machine has it.
    pub fn is_interface_in_use(&self) -> bool {
        matches!(self, Self::Azure { source, .. } if super::leaving::is_in_use(source))
    }

    /// The same, but retried whatever it is: for deletions, which nobody can mend by changing the spec.
    pub fn retried(self) -> Self {
        if Classified::class(&self) == Class::Terminal {
            Self::NotYet(self.to_string())
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
            Self::Refused(_) => Class::Terminal,
            Self::NotYet(_) => Class::Transient,
        }
    }
}
