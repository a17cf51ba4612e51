//! What can go wrong with a machine on vSphere, and what to do about it.

use capstan_core::Class;
use capstan_kube::Classified;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error(transparent)]
    Vsphere(#[from] capstan_vsphere::Error),
    /// A step failed; the reason goes into the condition.
    #[error("{error}")]
    Step {
        reason: &'static str,
        error: capstan_vsphere::Error,
    },
    /// The spec, or what it refers to, has to be changed by somebody.
    #[error("{0}")]
    Spec(String),
    /// vCenter refuses for a reason that cannot be found there; nobody tells when it has gone.
    #[error("{0}")]
    Unseen(String),
    /// Something that others provide is not there yet.
    #[error("{0}")]
    Waiting(String),
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
            Self::Vsphere(error) | Self::Step { error, .. } => error.class(),
            Self::Spec(_) => Class::Terminal,
            Self::Waiting(_) | Self::Unseen(_) => Class::Transient,
        }
    }
}

impl Error {
    pub fn class(&self) -> Class {
        Classified::class(self)
    }

    /// What vCenter, or the way there, had to say.
    pub fn vsphere(&self) -> Option<&capstan_vsphere::Error> {
        match self {
            Self::Vsphere(error) | Self::Step { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Whether vCenter could not be asked at all.
    pub fn is_connection(&self) -> bool {
        use capstan_vsphere::Error::{Closed, Http, Login, Thumbprint, Unreachable};
        matches!(
            self.vsphere(),
            Some(Unreachable { .. } | Login { .. } | Thumbprint { .. } | Closed { .. } | Http { .. })
        )
    }

    /// Whether vCenter answered, and what it said may be otherwise another time: nobody will tell when it is.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Unseen(_)) || self.vsphere().is_some() && !self.is_connection()
    }

    /// Whether the machine's own object is to tell of it; what is wrong with the API server cannot be told there.
    pub fn is_told(&self) -> bool {
        !matches!(self, Self::Kube(_))
    }
}
