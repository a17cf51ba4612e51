//! The steps of a machine in words.

use std::fmt;

use k8s_openapi::api::core::v1::Node;

use super::{Next, Step};
use crate::plan::{Describe, Impact};

/// An interface and the virtual machine itself; disks and a public address come on top.
const CREATION: usize = 2;

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::AddFinalizer(Next::CreateVm) => "puts its finalizer on the Machine, then creates its virtual machine",
            Self::AddFinalizer(Next::ObserveVm) => "puts its finalizer on the Machine",
            Self::PollVm => "waits for the operation that Azure carries out on the virtual machine",
            Self::Prepare => "checks the spec, then creates interface, disks and virtual machine",
            Self::EnsureAddress => "creates the public address, then interface, disks and virtual machine",
            Self::EnsureInterfaceAndDisks => "creates interface and disks, then the virtual machine",
            Self::CreateVm => "creates the virtual machine",
            Self::RetryVm => "asks Azure again for the virtual machine, which it could not finish",
            Self::AwaitVm => "waits until Azure has changed the virtual machine",
            Self::RecordRequested => "records the virtual machine in the status",
            Self::RecordProvisioned => "records provider ID and addresses of the virtual machine",
            Self::RecordObservation => "brings labels, annotations and status of the Machine up to date",
            Self::LinkNode(node) => return write!(f, "links Node {} with the Machine", name(node)),
            Self::FailMissing => "marks the Machine as failed: its virtual machine does not exist any more",
            Self::FailNameConflict => "marks the Machine as failed: another virtual machine has its name",
            Self::FailUnfinished => "marks the Machine as failed: Azure could not finish its virtual machine",
            Self::AwaitDrainHooks => "waits for the preDrain hooks of the Machine",
            Self::AwaitTerminateHooks => "waits for the preTerminate hooks of the Machine",
            Self::AwaitControlPlane(other) => {
                return write!(f, "waits for control plane node {other}, which is drained first");
            }
            Self::Drain(node) => return write!(f, "drains Node {}, then deletes the virtual machine", name(node)),
            Self::DeleteVm(drained) => return write!(f, "deletes the virtual machine ({drained})"),
            Self::PollVmDeletion => "waits until Azure has deleted the virtual machine",
            Self::DeleteResources => "deletes disks, interface and public address",
            Self::DeleteAvailabilitySet => "deletes the availability set, if nothing else is in it",
            Self::Release(Some(node)) => {
                return write!(f, "deletes Node {} and takes the finalizer off the Machine", name(node));
            }
            Self::Release(None) => "takes its finalizer off the Machine",
        };
        f.write_str(text)
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::PollVm
            | Self::AwaitVm
            | Self::AwaitDrainHooks
            | Self::AwaitTerminateHooks
            | Self::AwaitControlPlane(_)
            | Self::PollVmDeletion => Impact::Waits,
            Self::RecordRequested | Self::RecordObservation | Self::LinkNode(_) => Impact::Ensures,
            // With the finalizer the creation begins.
            Self::AddFinalizer(Next::CreateVm) => Impact::Cloud(CREATION),
            Self::AddFinalizer(Next::ObserveVm)
            | Self::RecordProvisioned
            | Self::FailMissing
            | Self::FailNameConflict
            | Self::FailUnfinished
            | Self::Drain(_)
            | Self::Release(_) => Impact::Cluster,
            Self::Prepare => Impact::Cloud(CREATION),
            Self::EnsureAddress => Impact::Cloud(CREATION + 1),
            Self::EnsureInterfaceAndDisks => Impact::Cloud(CREATION),
            Self::CreateVm
            | Self::RetryVm
            | Self::DeleteVm(_)
            | Self::DeleteResources
            | Self::DeleteAvailabilitySet => Impact::Cloud(1),
        }
    }
}

fn name(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}
