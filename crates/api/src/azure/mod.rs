//! `infrastructure.cluster.x-k8s.io/v1beta1`, the Azure half: clusters, their identity, machine pools.

mod cluster;
mod identity;
mod names;
mod network;
mod pool;
mod pool_machine;
mod vm;

pub use crate::disk::{CachingType, StorageAccountType};
pub use cluster::*;
pub use identity::*;
pub use network::*;
pub use pool::*;
pub use pool_machine::*;
pub use vm::*;

/// Set on an AzureMachinePoolMachine by its pool. The controller drains the node, then updates the instance to the
/// current model.
pub const UPDATE_INSTANCE_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/updateInstance";
/// Names the pool of an AzureMachinePoolMachine.
pub const MACHINE_POOL_LABEL: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/machine-pool";
