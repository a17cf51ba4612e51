//! `machine.openshift.io/v1beta1`: the Machine API's machines, and their settings on Azure.

mod infrastructure;
mod lenient;
mod machine;
mod machineset;
mod provider;

pub use crate::disk::{CachingType, DeletionPolicy, StorageAccountType};
pub use infrastructure::*;
pub use lenient::FieldError;
pub use machine::*;
pub use machineset::*;
pub use provider::*;

/// Keeps a Machine until its cloud resources are deleted.
pub const MACHINE_FINALIZER: &str = "machine.machine.openshift.io";
/// Label with the ID of the cluster that a Machine belongs to.
pub const CLUSTER_ID_LABEL: &str = "machine.openshift.io/cluster-api-cluster";
