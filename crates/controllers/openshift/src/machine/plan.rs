//! What to do next with a machine. Pure and total: everything that decides over a machine's life stands here.

use capstan_api::openshift::{
    AzureMachineProviderSpec, LifecycleHook, MACHINE_FINALIZER, Machine, MachineAuthority, MachineStatus,
};
use kube::ResourceExt as _;

/// Pods are not to be moved away before this machine goes.
pub const EXCLUDE_DRAIN: &str = "machine.openshift.io/exclude-node-draining";

pub mod phase {
    pub const PROVISIONING: &str = "Provisioning";
    pub const PROVISIONED: &str = "Provisioned";
    pub const RUNNING: &str = "Running";
    pub const DELETING: &str = "Deleting";
    pub const FAILED: &str = "Failed";
}

/// What Azure said of the virtual machine, as far as this pass has asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vm {
    NotAsked,
    Absent,
    /// It is there and whole.
    Whole,
    /// It is there, and something is still being done to it.
    Busy,
    /// It is there, but Azure could not finish making it.
    Broken,
    /// Something of this name is there that was not made for this machine.
    Foreign,
}

/// What is known of a machine at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub machine: &'a Machine,
    /// An operation on its virtual machine is under way.
    pub following: bool,
    /// Azure ought to be asked whether the virtual machine is still there.
    pub look_due: bool,
    pub vm: Vm,
    /// Its Node is there.
    pub node: bool,
    /// That it has none was asked of the API server itself, not of a cache that may be late.
    pub node_asked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Not ours to touch, or over.
    Leave,
    /// Put our finalizer on, before anything is made.
    Guard,
    /// Ask Azure how the operation is doing.
    Follow,
    /// Ask Azure whether the virtual machine is there.
    Look,
    /// Make it.
    Create,
    /// Ask Azure to finish what it began.
    Mend,
    /// Follow what is being done to it, without an operation to ask about.
    Watch,
    /// It is there for the first time: write down what it is.
    Settle,
    /// Tie it to its Node.
    Link,
    /// Nothing to do until its Node comes.
    AwaitNode,
    /// It was there and is gone: it has failed for good.
    Vanished,
    /// Somebody else has taken its name.
    Taken,
    /// Deleting: wait for these hooks.
    HoldDrain,
    /// Ask the API server whether there is a Node after all.
    FindNode,
    Drain,
    HoldTerminate,
    Destroy,
}

pub fn plan(seen: &Observed) -> Step {
    let machine = seen.machine;
    if !is_ours(machine) {
        return Step::Leave;
    }
    if machine.metadata.deletion_timestamp.is_some() {
        return end(seen);
    }
    let status = machine.status.clone().unwrap_or_default();
    if status.phase.as_deref() == Some(phase::FAILED) {
        return Step::Leave;
    }
    if !is_guarded(machine) {
        return Step::Guard;
    }
    if seen.following {
        return Step::Follow;
    }
    match (seen.vm, was_there(machine, &status)) {
        (Vm::NotAsked, true) if seen.look_due => Step::Look,
        (Vm::NotAsked, false) if was_begun(&status) => Step::Look,
        (Vm::NotAsked | Vm::Absent, false) => Step::Create,
        (Vm::Absent, true) => Step::Vanished,
        (Vm::Foreign, _) => Step::Taken,
        (Vm::Busy, false) => Step::Watch,
        (Vm::Broken, false) => Step::Mend,
        (Vm::Whole, false) => Step::Settle,
        // A machine that works is not judged by its last update.
        (Vm::NotAsked | Vm::Whole | Vm::Busy | Vm::Broken, true) => {
            if seen.node {
                Step::Link
            } else {
                Step::AwaitNode
            }
        }
    }
}

fn end(seen: &Observed) -> Step {
    let (machine, hooks) = (seen.machine, &seen.machine.spec.lifecycle_hooks);
    if !is_guarded(machine) {
        return Step::Leave;
    }
    if !hooks.pre_drain.is_empty() {
        return Step::HoldDrain;
    }
    let excluded = machine.annotations().contains_key(EXCLUDE_DRAIN);
    let drained = machine.status.as_ref().is_some_and(|status| {
        status
            .conditions
            .iter()
            .any(|condition| condition.type_ == "Drained" && condition.status == "True")
    });
    if !excluded && !drained && !seen.following {
        if seen.node {
            return Step::Drain;
        }
        if !seen.node_asked && may_have_node(machine) {
            return Step::FindNode;
        }
    }
    if hooks.pre_terminate.is_empty() {
        Step::Destroy
    } else {
        Step::HoldTerminate
    }
}

fn is_guarded(machine: &Machine) -> bool {
    machine
        .finalizers()
        .iter()
        .any(|finalizer| finalizer == MACHINE_FINALIZER)
}

/// Machines of other providers, and those that Cluster API has taken over, are left alone.
fn is_ours(machine: &Machine) -> bool {
    let kind = machine
        .spec
        .provider_spec
        .value
        .as_ref()
        .and_then(|value| value.get("kind")?.as_str());
    let authority = machine
        .status
        .as_ref()
        .and_then(|status| status.authoritative_api.as_ref());
    kind.is_none_or(|kind| kind == AzureMachineProviderSpec::KIND)
        && authority.is_none_or(|authority| *authority == MachineAuthority::MachineApi || authority.as_str().is_empty())
}

/// The virtual machine is known to have been whole once.
fn was_there(machine: &Machine, status: &MachineStatus) -> bool {
    machine.spec.provider_id.as_deref().is_some_and(|id| !id.is_empty())
        || matches!(status.phase.as_deref(), Some(phase::PROVISIONED | phase::RUNNING))
}

/// It got as far as a Node can come from.
fn may_have_node(machine: &Machine) -> bool {
    let status = machine.status.as_ref();
    machine.spec.provider_id.as_deref().is_some_and(|id| !id.is_empty())
        || status.is_some_and(|status| status.node_ref.is_some() || !status.addresses.is_empty())
}

/// Azure was asked for the virtual machine before.
fn was_begun(status: &MachineStatus) -> bool {
    status
        .provider_status
        .as_ref()
        .is_some_and(|provider| provider.get("vmId").is_some())
}

/// The hooks in the way, for the condition's message.
pub fn describe_hooks(hooks: &[LifecycleHook]) -> String {
    let names: Vec<String> = hooks
        .iter()
        .map(|hook| format!("{} ({})", hook.name, hook.owner))
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests;
