//! Decides what to do next with one virtual machine. Pure: an observation in, one step out.
//!
//! Invariants: a VM that was ready once is never cloned again; nothing of a VM is changed once it runs or was ready, because
//! its guest may have removed what it was started with; a VM is not powered on before its devices and storage policies are as
//! desired; nothing is decided about a VM whose configuration vCenter cannot read. Every step
//! carries the VM that it acts on, so that whoever applies a step has nothing left to decide.

mod changes;
mod datastore;
mod guestinfo;
pub mod machine;
mod metadata;
mod moref;
mod report;
mod teardown;
mod types;

pub use changes::{Changes, changes, check_template, template_disks};
pub use datastore::choose as choose_datastore;
pub use guestinfo::{METADATA, at_clone};
pub use metadata::render as metadata;
pub use moref::MoRef;
pub use report::{Report, report, waits_for_static_address};
pub use teardown::{TeardownStep, foreign_disks, teardown};
pub use types::{
    Allocation, DesiredVm, DhcpOverrides, GuestNic, NetworkDevice, Nic, ObservedVm, Pci, Policies, PowerOff,
    PowerState, Recorded, ResolvedNames, Route, UserData,
};

use crate::disks::vsphere::hardware_version;

/// The next step towards a machine that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The VM does not exist and never did.
    Clone,
    /// The VM was ready once and vCenter does not have it any more.
    Lost,
    /// vCenter cannot read the configuration of the VM, for this reason.
    Unreadable(String),
    /// The virtual hardware is older than desired.
    Upgrade {
        vm: MoRef,
        to: String,
    },
    /// Something is not as desired.
    Reconfigure {
        vm: MoRef,
        changes: Box<Changes>,
    },
    /// Something is not as desired, and no reconfiguration can change that.
    Wrong(String),
    PowerOn(MoRef),
    /// The VM runs, but its guest has not reported an address yet.
    AwaitAddresses {
        vm: MoRef,
        report: Report,
    },
    Up {
        vm: MoRef,
        report: Report,
    },
}

/// Returns the next step.
pub fn plan(
    desired: &DesiredVm,
    names: &ResolvedNames,
    user: Option<&UserData>,
    recorded: &Recorded,
    observed: Option<&ObservedVm>,
) -> Step {
    let Some(observed) = observed else {
        return if recorded.was_ready { Step::Lost } else { Step::Clone };
    };
    if let Some(reason) = &observed.unreadable {
        return Step::Unreadable(reason.clone());
    }
    let vm = observed.reference.clone();
    if !recorded.was_ready && observed.power == PowerState::Off {
        if let Some(to) = upgrade(desired, observed) {
            return Step::Upgrade { vm, to };
        }
        let changes = changes(desired, names, user, recorded, observed);
        if !changes.wrong.is_empty() {
            return Step::Wrong(changes.wrong.join("; "));
        }
        if !changes.is_empty() {
            let changes = Box::new(changes);
            return Step::Reconfigure { vm, changes };
        }
    }
    if observed.power != PowerState::On {
        return Step::PowerOn(vm);
    }
    let report = report(observed);
    if report.addresses.is_empty() {
        Step::AwaitAddresses { vm, report }
    } else {
        Step::Up { vm, report }
    }
}

fn upgrade(desired: &DesiredVm, observed: &ObservedVm) -> Option<String> {
    let to = desired.hardware_version.as_deref()?;
    (hardware_version(to)? > observed.hardware.version).then(|| to.to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
