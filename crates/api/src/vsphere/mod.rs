//! `infrastructure.cluster.x-k8s.io/v1beta1`, the vSphere half: clusters, machines, virtual machines, topology.

mod clone;
mod cluster;
mod machine;
mod topology;
mod vm;

pub use clone::*;
pub use cluster::*;
pub use machine::*;
pub use topology::*;
pub use vm::*;
