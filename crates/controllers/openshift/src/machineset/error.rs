//! Why a MachineSet cannot be reconciled.

use capstan_core::{Class, Classified};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error("cannot create a machine: {0}")]
    Create(capstan_kube::Error),
    #[error("{path}: {detail}")]
    Invalid { path: &'static str, detail: String },
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Kube(error) | Self::Create(error) => error.class(),
            Self::Invalid { .. } => Class::Terminal,
        }
    }
}
