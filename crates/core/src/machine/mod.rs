//! OpenShift machines on Azure: the next step for one ([`plan`]), the names of its resources, and the disks that go with it.

pub mod cluster;
pub mod control_plane;
mod describe;
pub mod disks;
pub mod failure;
pub mod kept;
pub mod names;
pub mod orphans;
mod plan;
pub mod quota;
mod vm_deletion;

pub use plan::*;
pub use vm_deletion::{LiveVm, VmDeletion, delete_vm};

pub mod phase {
    pub const PROVISIONING: &str = "Provisioning";
    pub const PROVISIONED: &str = "Provisioned";
    pub const RUNNING: &str = "Running";
    pub const DELETING: &str = "Deleting";
    pub const FAILED: &str = "Failed";
}
