//! `infrastructure.cluster.x-k8s.io`, the vSphere half, with the fields of v1beta1: clusters, machines, virtual machines, topology.

mod clone;
mod cluster;
mod frozen;
mod machine;
mod topology;
pub mod v1beta2;
mod vm;

pub use clone::*;
pub use cluster::*;
pub(crate) use frozen::{freeze_machine, freeze_vm, vm_name_rule};
pub use machine::*;
pub use topology::*;
pub use vm::*;

/// The answer of the API server to a change of a template.
pub const TEMPLATE_FROZEN: &str =
    "VSphereMachineTemplate spec.template.spec field is immutable. Please create a new resource instead.";
