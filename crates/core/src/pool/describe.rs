//! The steps of a pool in words.

use std::fmt;

use super::{Selected, Step};
use crate::drain::Drained;
use crate::plan::{Describe, Impact};

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the pool"),
            Self::SetSshKey => f.write_str("gives the pool an SSH key"),
            Self::CreateScaleSet { capacity } => write!(f, "creates the scale set with capacity {capacity}"),
            Self::AdoptScaleSet(_) => f.write_str("takes the scale set over as it is: its machines stay"),
            Self::CreateObjects(names) => write!(f, "creates the objects of {}", names.join(", ")),
            Self::ReleaseObjects(names) => write!(f, "removes the objects of {}, which are gone", names.join(", ")),
            Self::RecordModels(names) => write!(f, "records the model of {}", names.join(", ")),
            Self::DeleteStray(name) => write!(
                f,
                "deletes Machine {name}, whose infrastructure does not exist any more"
            ),
            Self::DeleteOwner { name, .. } => write!(f, "deletes the Machine of {name}"),
            Self::Drain(names) => write!(f, "drains the nodes of {}", names.join(", ")),
            Self::DeleteInstances(drained) => write!(f, "deletes the instances {}", ids(drained)),
            Self::UpdateInstances(drained) => write!(f, "updates the instances {} in place", ids(drained)),
            Self::ReimageInstances(drained) => write!(f, "reimages the instances {}", ids(drained)),
            Self::FinishUpdate { name, .. } => write!(f, "ends the update of {name}"),
            Self::AbandonUpdate { name, reason } => write!(f, "replaces {name} instead of updating it ({reason})"),
            Self::Remove(selected) => write!(f, "removes {}", selected_names(selected)),
            Self::StartUpdate { machine, .. } => write!(f, "updates {} in place", machine.name),
            Self::ApplyScaleSet { model, capacity, .. } => match model {
                true => write!(f, "gives the scale set its new model and capacity {capacity}"),
                false => write!(f, "gives the scale set capacity {capacity}"),
            },
            Self::RefreshBootstrap => f.write_str("gives the scale set new bootstrap data"),
            Self::ApplyTags => f.write_str("gives the scale set its tags"),
            Self::SetReplicas(count) => write!(f, "sets the replicas of the MachinePool to {count}"),
            Self::DeleteScaleSet => f.write_str("deletes the scale set"),
            Self::ReleasePool => f.write_str("takes its finalizer off the pool"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer
            | Self::SetSshKey
            | Self::CreateObjects(_)
            | Self::ReleaseObjects(_)
            | Self::RecordModels(_)
            | Self::DeleteStray(_)
            | Self::DeleteOwner { .. }
            | Self::Drain(_)
            | Self::FinishUpdate { .. }
            | Self::AbandonUpdate { .. }
            | Self::Remove(_)
            | Self::StartUpdate { .. }
            | Self::SetReplicas(_)
            | Self::ReleasePool => Impact::Cluster,
            Self::CreateScaleSet { .. }
            | Self::AdoptScaleSet(_)
            | Self::DeleteInstances(_)
            | Self::UpdateInstances(_)
            | Self::ReimageInstances(_)
            | Self::ApplyScaleSet { .. }
            | Self::RefreshBootstrap
            | Self::ApplyTags
            | Self::DeleteScaleSet => Impact::Cloud(1),
        }
    }
}

fn ids(drained: &[Drained]) -> String {
    let ids: Vec<&str> = drained.iter().map(Drained::machine).collect();
    ids.join(", ")
}

fn selected_names(selected: &[Selected]) -> String {
    let names: Vec<&str> = selected.iter().map(|selected| selected.name.as_str()).collect();
    names.join(", ")
}
