//! Decides what to do next with one virtual machine. Pure: an observation in, steps out.
//!
//! Invariants: a VM that was ready once is never cloned again; nothing of a VM is changed once it runs or was ready, because
//! its guest may have removed what it was started with; a VM is not powered on before its devices and storage policies are as
//! desired; nothing is decided about a VM whose configuration vCenter cannot read. Every step
//! carries the VM that it acts on, so that whoever applies a step has nothing left to decide.

mod changes;
mod datastore;
mod describe;
mod guestinfo;
pub mod machine;
mod metadata;
mod moref;
pub mod naming;
mod ownership;
mod plan;
mod recognize;
mod report;
mod teardown;
mod turns;
mod types;

pub use changes::{Changes, changes, check_template, ignored_sizes, template_disks};
pub use datastore::choose as choose_datastore;
pub use guestinfo::{METADATA, at_clone};
pub use metadata::render as metadata;
pub use moref::MoRef;
pub use ownership::{FoundVm, is_node_of, is_owner};
pub use plan::{BringUp, Memberships, Observation, Step, Teardown, next_step, plan};
pub use recognize::recognize_disks;
pub use report::{Report, report, waits_for_static_address};
pub use teardown::{Shutdown, TeardownStep, foreign_disks, teardown};
pub use turns::{CloneLimits, CloneRequest, Turns};
pub use types::{
    Allocation, DesiredVm, DhcpOverrides, GuestNic, NetworkDevice, Nic, ObservedVm, Pci, Policies, PowerOff,
    PowerState, Recorded, ResolvedNames, Route, UserData,
};

#[cfg(test)]
pub(crate) mod tests;
