//! The errors of the vSphere controllers.

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
    /// A user must change the spec, or an object that it refers to.
    #[error("{0}")]
    Invalid(String),
    /// vCenter refuses for a reason that Capstan cannot read there, so no event comes when it goes away.
    #[error("{0}")]
    Unseen(String),
    /// An object that others provide does not exist yet.
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
            Self::Kube(error) => error.class(),
            Self::Vsphere(error) | Self::Step { error, .. } => error.class(),
            Self::Invalid(_) => Class::Terminal,
            Self::NotReady(_) | Self::Unseen(_) => Class::Transient,
        }
    }
}

impl Error {
    pub fn class(&self) -> Class {
        Classified::class(self)
    }

    /// Returns the error of the vCenter client.
    pub fn vsphere(&self) -> Option<&capstan_vsphere::Error> {
        match self {
            Self::Vsphere(error) | Self::Step { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Whether vCenter cannot be used at all.
    pub fn is_connection(&self) -> bool {
        use capstan_vsphere::Error::{Certificate, Closed, Http, Login, NotVcenter, Thumbprint, Unreachable};
        let source = self.vsphere();
        matches!(
            source,
            Some(Unreachable { .. } | Login { .. } | Closed { .. } | Http { .. })
        ) || matches!(source, Some(Thumbprint { .. } | Certificate { .. } | NotVcenter { .. }))
    }

    /// Whether vCenter answered with a failure that may go away without any event.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Unseen(_)) || self.vsphere().is_some() && !self.is_connection()
    }

    /// Whether the status of the object reports the error. An error of the API server could not be written there.
    pub fn is_reported(&self) -> bool {
        !matches!(self, Self::Kube(_))
    }
}
