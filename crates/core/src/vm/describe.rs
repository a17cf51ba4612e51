//! The steps of a vSphere machine in words.

use std::fmt;

use super::machine::MachineStep;
use super::{Changes, Step, TeardownStep};
use crate::plan::{Describe, Impact};

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the VSphereVM"),
            Self::CreateClaim(name) => write!(f, "creates IPAddressClaim {name}"),
            Self::AwaitStaticAddress => f.write_str("waits until a user gives the network device an address"),
            Self::Clone => f.write_str("clones the virtual machine"),
            Self::Lost => f.write_str("waits: vCenter lacks the virtual machine, which was ready once"),
            Self::Unreadable(reason) => write!(f, "waits until vCenter can read the virtual machine: {reason}"),
            Self::Upgrade { to, .. } => write!(f, "upgrades the virtual hardware to {to}"),
            Self::Reconfigure { changes, .. } => write!(f, "reconfigures the virtual machine: {}", summary(changes)),
            Self::KeepSettings(settings) => write!(f, "keeps the settings of vCenter: {}", settings.join("; ")),
            Self::Wrong(text) => write!(f, "waits for a user: {text}"),
            Self::AttachTags { tags, .. } => write!(f, "attaches the tags {}", tags.join(", ")),
            Self::JoinGroup(_) => f.write_str("puts the virtual machine into the VM group of its failure domain"),
            Self::RestoreGroup(_) => f.write_str("keeps the virtual machine in the VM group of its failure domain"),
            Self::JoinModule { module, .. } => write!(f, "puts the virtual machine into cluster module {module}"),
            Self::PowerOn(_) => f.write_str("powers the virtual machine on"),
            Self::AwaitAddresses { .. } => f.write_str("waits until the guest reports an address"),
            Self::RecordBiosUuid(uuid) => write!(f, "records the BIOS UUID {uuid}"),
            Self::Up { .. } => f.write_str("reports the virtual machine as ready"),
            Self::LeaveModule { module, .. } => write!(f, "takes the virtual machine out of cluster module {module}"),
            Self::Teardown(step) => step.fmt(f),
            Self::DeleteNode => f.write_str("deletes the Node"),
            Self::ReleaseAddresses => f.write_str("deletes the claims of addresses"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::RestoreGroup(_) => Impact::Ensures,
            Self::CreateClaim(_) | Self::RecordBiosUuid(_) | Self::DeleteNode | Self::ReleaseAddresses => {
                Impact::Cluster
            }
            Self::AwaitStaticAddress
            | Self::Lost
            | Self::Unreadable(_)
            | Self::Wrong(_)
            | Self::AwaitAddresses { .. } => Impact::Waits,
            Self::KeepSettings(_) | Self::Up { .. } => Impact::None,
            Self::Clone
            | Self::Upgrade { .. }
            | Self::Reconfigure { .. }
            | Self::AttachTags { .. }
            | Self::JoinGroup(_)
            | Self::JoinModule { .. }
            | Self::PowerOn(_)
            | Self::LeaveModule { .. } => Impact::Cloud(1),
            Self::Teardown(step) => step.impact(),
        }
    }
}

impl fmt::Display for TeardownStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(reason) => write!(f, "waits until vCenter can read the virtual machine: {reason}"),
            Self::ShutDownGuest(_) => f.write_str("asks the guest to shut down"),
            Self::AwaitShutdown { .. } => f.write_str("waits until the guest has shut down"),
            Self::CannotShutDown => f.write_str("waits: the guest cannot be asked to shut down"),
            Self::PowerOff(_) => f.write_str("powers the virtual machine off"),
            Self::Detach { disks, .. } => write!(f, "detaches {} disks that are not the machine's own", disks.len()),
            Self::Destroy { .. } => f.write_str("destroys the virtual machine"),
            Self::Release => f.write_str("takes its finalizer off the VSphereVM"),
        }
    }
}

impl Describe for TeardownStep {
    fn impact(&self) -> Impact {
        match self {
            Self::Unreadable(_) | Self::AwaitShutdown { .. } | Self::CannotShutDown => Impact::Waits,
            Self::ShutDownGuest(_) | Self::PowerOff(_) | Self::Detach { .. } | Self::Destroy { .. } => Impact::Cloud(1),
            Self::Release => Impact::Cluster,
        }
    }
}

/// Names the parts of a reconfiguration.
fn summary(changes: &Changes) -> String {
    let parts = [
        (!changes.add_controllers.is_empty(), "adds controllers"),
        (!changes.add_disks.is_empty(), "adds disks"),
        (!changes.grow.is_empty(), "grows disks"),
        (
            !changes.remove_nics.is_empty() || !changes.add_nics.is_empty(),
            "changes network devices",
        ),
        (changes.add_pci, "adds PCI devices"),
        (!changes.extra_config.is_empty(), "sets guest information"),
        (
            changes.cpus.is_some() || changes.cores_per_socket.is_some(),
            "sets CPUs",
        ),
        (changes.memory_mib.is_some(), "sets memory"),
        (
            changes.policy.is_some() || !changes.disk_policies.is_empty(),
            "sets storage policies",
        ),
        (!changes.settings.is_empty(), "sets resources"),
    ];
    let named: Vec<&str> = parts.iter().filter(|(is, _)| *is).map(|(_, text)| *text).collect();
    named.join(", ")
}

impl fmt::Display for MachineStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the VSphereMachine"),
            Self::CreateVm(_) => f.write_str("creates the VSphereVM"),
            Self::UpdateVm { .. } => f.write_str("brings the VSphereVM in line with its machine"),
            Self::SetProviderId(id) => write!(f, "writes provider ID {id}"),
            Self::LabelHost(host) => write!(f, "labels the Machine with its host {host}"),
            Self::AskForRemediation => {
                f.write_str("asks Cluster API to replace the Machine, whose virtual machine is lost")
            }
            Self::WithdrawRemediation => f.write_str("asks no more to replace the Machine"),
            Self::DeleteVm(_) => f.write_str("deletes the VSphereVM"),
            Self::Release => f.write_str("takes its finalizer off the VSphereMachine"),
        }
    }
}

impl Describe for MachineStep {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::UpdateVm { .. } | Self::LabelHost(_) => Impact::Ensures,
            Self::CreateVm(_) | Self::SetProviderId(_) | Self::DeleteVm(_) | Self::Release => Impact::Cluster,
            Self::AskForRemediation | Self::WithdrawRemediation => Impact::Cluster,
        }
    }
}
