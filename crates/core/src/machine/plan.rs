//! The next step for a machine. Pure and total: every decision about a machine's life is made here.
//!
//! Invariants: a virtual machine that was ready once is never created again; a virtual machine is deleted only with a
//! [`Drained`] value; a Node that only the cache lacks is looked for on the API server before its machine goes undrained.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::openshift::{LifecycleHook, MACHINE_FINALIZER, Machine, MachineAuthority, MachineStatus};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;

use super::phase;
use crate::drain::{self, Assessment, Drained, NodeState};
use crate::plan::Plan;
use crate::validate::openshift::is_azure;

/// A machine with this annotation is deleted without a drain.
pub const EXCLUDE_DRAIN: &str = "machine.openshift.io/exclude-node-draining";

/// The virtual machine, as far as this reconcile has asked Azure about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vm {
    #[default]
    NotObserved,
    Absent,
    Ready,
    /// Azure is changing it.
    Updating,
    /// Azure could not finish it.
    Failed,
    /// It has the machine's name, but was not made for the machine.
    Foreign,
}

/// How far something is that we asked Azure for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    #[default]
    NotRequested,
    /// Azure works on it and may be asked again after this long.
    Pending(Duration),
    Done,
}

impl Progress {
    /// Returns how long to wait before anything can be done about it.
    fn wait(self) -> Option<Duration> {
        match self {
            Progress::Pending(after) if !after.is_zero() => Some(after),
            Progress::NotRequested | Progress::Pending(_) | Progress::Done => None,
        }
    }
}

/// What a virtual machine needs before Azure can be asked for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dependencies {
    /// The spec was checked, and everything that the requests need was read.
    pub prepared: bool,
    /// `None`: the spec asks for no public address.
    pub address: Option<Progress>,
    pub interface: Progress,
    /// The disks that have to be made before the virtual machine.
    pub disks: Progress,
}

/// How far the deletion in Azure is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Teardown {
    /// The virtual machine is gone, or is not this machine's.
    pub vm_gone: bool,
    /// Disks, interface and public address.
    pub resources: Progress,
    /// The availability set, where this was its last machine.
    pub availability_set: bool,
}

/// The machine's Node.
#[derive(Clone, Debug, Default)]
pub enum NodeLookup {
    Found(Arc<Node>),
    /// The cache has none.
    #[default]
    NotCached,
    /// The API server itself has none.
    Absent,
}

/// Everything that the plan depends on.
#[derive(Clone, Debug)]
pub struct Observed {
    pub machine: Arc<Machine>,
    pub vm: Vm,
    /// An operation on the virtual machine runs in Azure and may be asked about after this long.
    pub operation: Option<Duration>,
    /// Azure refused to create the virtual machine because there is one.
    pub may_exist: bool,
    /// How long until Azure ought to be asked whether the virtual machine is still there.
    pub next_observation: Duration,
    pub node: NodeLookup,
    /// The proof that the drain of this process has made; the status may not say so yet.
    pub drained: Option<Drained>,
    /// Another control plane node that has to come first.
    pub control_plane_before: Option<String>,
    /// The controller before this one worked on the machine.
    pub inherited: bool,
    pub dependencies: Dependencies,
    pub teardown: Teardown,
}

/// What comes after the finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing was made for the machine yet.
    CreateVm,
    /// Its virtual machine may be there.
    ObserveVm,
}

/// One effect, with its subject.
#[derive(Clone, Debug)]
pub enum Step {
    /// Puts our finalizer on, before anything is made.
    AddFinalizer(Next),
    /// Asks Azure about the operation.
    PollVm,
    /// Checks the spec and reads what the requests need.
    Prepare,
    EnsureAddress,
    /// Both at once: neither needs the other.
    EnsureInterfaceAndDisks,
    CreateVm,
    /// Asks Azure to finish a virtual machine that it could not finish.
    RetryVm,
    /// Azure is changing the virtual machine, without an operation that could be asked about.
    AwaitVm,
    /// The virtual machine was requested, and the status does not say so.
    RecordRequested,
    /// The virtual machine is ready for the first time.
    RecordProvisioned,
    /// Azure showed the virtual machine of a machine that was ready before.
    RecordObservation,
    LinkNode(Arc<Node>),
    /// The virtual machine was ready once and is gone: the machine has failed.
    FailMissing,
    /// Another virtual machine has the machine's name: the machine has failed.
    FailNameConflict,
    /// Azure could not finish the virtual machine that the controller before this one took for ready: the machine has failed.
    FailUnfinished,
    /// Hooks block the drain.
    AwaitDrainHooks,
    /// Hooks block the deletion of the virtual machine.
    AwaitTerminateHooks,
    /// This control plane node is drained first.
    AwaitControlPlane(String),
    Drain(Arc<Node>),
    DeleteVm(Drained),
    PollVmDeletion,
    /// Disks, interface and public address.
    DeleteResources,
    DeleteAvailabilitySet,
    /// Nothing is left in Azure: the Node goes, and the finalizer.
    Release(Option<Arc<Node>>),
}

/// Something that has to be read live before there can be a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Azure is asked about the virtual machine.
    Vm,
    /// The API server is asked for the Node that the cache lacks.
    Node,
}

/// Returns what has to be read before [`plan`] can decide. Caches are late: what destroys something reads live first.
pub fn next_read(observed: &Observed) -> Option<Read> {
    let machine = &observed.machine;
    if !is_managed(machine) || !has_finalizer(machine) {
        return None;
    }
    if machine.metadata.deletion_timestamp.is_some() {
        let request = request(observed);
        let needed = !is_going(observed) && observed.drained.is_none() && !request.excluded && !request.recorded;
        return (needed && matches!(request.node, NodeState::Unknown(_))).then_some(Read::Node);
    }
    let status = machine.status.clone().unwrap_or_default();
    let over = status.phase.as_deref() == Some(phase::FAILED);
    if over || observed.operation.is_some() || observed.vm != Vm::NotObserved {
        return None;
    }
    let due = if was_ready(machine, &status) {
        observed.next_observation.is_zero()
    } else {
        observed.may_exist || was_requested(&status)
    };
    due.then_some(Read::Vm)
}

/// Decides. Everything that [`next_read`] asks for has been read.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan<Step> {
    let machine = &observed.machine;
    if !is_managed(machine) {
        return Plan::idle();
    }
    if machine.metadata.deletion_timestamp.is_some() {
        return teardown(observed, now);
    }
    let status = machine.status.clone().unwrap_or_default();
    if status.phase.as_deref() == Some(phase::FAILED) {
        return Plan::idle();
    }
    if !has_finalizer(machine) {
        let made = observed.may_exist || was_requested(&status) || was_ready(machine, &status);
        let next = if made { Next::ObserveVm } else { Next::CreateVm };
        return Plan::step(Step::AddFinalizer(next));
    }
    if let Some(due) = observed.operation {
        return after(due, Step::PollVm);
    }
    let ready = was_ready(machine, &status);
    let mut plan = match (observed.vm, ready) {
        // Never create what may be there: it has to be read first.
        (Vm::NotObserved, false) if observed.may_exist || was_requested(&status) => Plan::after(Duration::ZERO),
        (Vm::NotObserved | Vm::Absent, false) => create(&observed.dependencies, Step::CreateVm),
        (Vm::Absent, true) => Plan::step(Step::FailMissing),
        (Vm::Foreign, _) => Plan::step(Step::FailNameConflict),
        (Vm::Updating, false) => Plan::step(Step::AwaitVm),
        (Vm::Failed, false) => create(&observed.dependencies, Step::RetryVm),
        (Vm::Ready, false) => Plan::step(Step::RecordProvisioned),
        (Vm::Failed, true) if observed.inherited && !had_node(observed, &status) => Plan::step(Step::FailUnfinished),
        // A machine that works is not judged by its last update.
        (Vm::NotObserved | Vm::Ready | Vm::Updating | Vm::Failed, true) => link(observed),
    };
    let record = match observed.vm {
        Vm::Ready | Vm::Updating | Vm::Failed if ready => Some(Step::RecordObservation),
        Vm::Ready | Vm::Updating | Vm::Failed if !was_requested(&status) => Some(Step::RecordRequested),
        Vm::Ready | Vm::Updating | Vm::Failed | Vm::NotObserved | Vm::Absent | Vm::Foreign => None,
    };
    plan.steps.splice(0..0, record);
    plan
}

fn link(observed: &Observed) -> Plan<Step> {
    let steps = match &observed.node {
        NodeLookup::Found(node) => vec![Step::LinkNode(node.clone())],
        NodeLookup::NotCached | NodeLookup::Absent => Vec::new(),
    };
    Plan {
        steps,
        requeue: Some(observed.next_observation),
    }
}

fn after(due: Duration, step: Step) -> Plan<Step> {
    if due.is_zero() {
        Plan::step(step)
    } else {
        Plan::after(due)
    }
}

/// Everything is checked first; then come address, interface and disks, and the request for the virtual machine last.
fn create(dependencies: &Dependencies, request: Step) -> Plan<Step> {
    let Dependencies {
        prepared,
        address,
        interface,
        disks,
    } = *dependencies;
    if !prepared {
        return Plan::step(Step::Prepare);
    }
    if let Some(address) = address.filter(|address| *address != Progress::Done) {
        return match address.wait() {
            Some(wait) => Plan::after(wait),
            None => Plan::step(Step::EnsureAddress),
        };
    }
    if (interface, disks) == (Progress::Done, Progress::Done) {
        return Plan::step(request);
    }
    let pending = [interface, disks]
        .into_iter()
        .filter(|progress| *progress != Progress::Done);
    let waits: Vec<Option<Duration>> = pending.map(Progress::wait).collect();
    match waits.iter().flatten().min() {
        // Whatever can be done at once is done at once.
        Some(wait) if waits.iter().all(Option::is_some) => Plan::after(*wait),
        _ => Plan::step(Step::EnsureInterfaceAndDisks),
    }
}

fn teardown(observed: &Observed, now: Timestamp) -> Plan<Step> {
    let (machine, hooks) = (&observed.machine, &observed.machine.spec.lifecycle_hooks);
    if !has_finalizer(machine) {
        return Plan::idle();
    }
    // Once Azure deletes the virtual machine, there is nothing left to drain.
    let drained = match is_going(observed) {
        true => None,
        false => match drained(observed, now) {
            Ok(drained) => Some(drained),
            Err(plan) => return plan,
        },
    };
    if !hooks.pre_terminate.is_empty() {
        return Plan::step(Step::AwaitTerminateHooks);
    }
    if let Some(due) = observed.operation {
        return after(due, Step::PollVmDeletion);
    }
    let Teardown {
        vm_gone: _,
        resources,
        availability_set,
    } = observed.teardown;
    if let Some(drained) = drained {
        return Plan::step(Step::DeleteVm(drained));
    }
    if resources != Progress::Done {
        return match resources.wait() {
            Some(wait) => Plan::after(wait),
            None => Plan::step(Step::DeleteResources),
        };
    }
    if !availability_set {
        return Plan::step(Step::DeleteAvailabilitySet);
    }
    let node = match &observed.node {
        NodeLookup::Found(node) => Some(node.clone()),
        NodeLookup::NotCached | NodeLookup::Absent => None,
    };
    Plan::step(Step::Release(node))
}

/// Whether the virtual machine is being deleted, or is gone.
fn is_going(observed: &Observed) -> bool {
    observed.operation.is_some() || observed.teardown.vm_gone
}

/// Returns the proof that the machine may go, or what comes before that. Hooks before the drain count only where there is
/// a drain.
fn drained(observed: &Observed, now: Timestamp) -> Result<Drained, Plan<Step>> {
    if let Some(drained) = &observed.drained {
        return Ok(drained.clone());
    }
    match drain::assess(&request(observed), now) {
        Assessment::Drained(drained) => return Ok(drained),
        // Never delete undrained what may have a Node: it has to be read first.
        Assessment::Wait(_) => return Err(Plan::after(Duration::ZERO)),
        Assessment::Drain => {}
    }
    if !observed.machine.spec.lifecycle_hooks.pre_drain.is_empty() {
        return Err(Plan::step(Step::AwaitDrainHooks));
    }
    Err(match (&observed.control_plane_before, &observed.node) {
        (Some(other), _) => Plan::step(Step::AwaitControlPlane(other.clone())),
        (None, NodeLookup::Found(node)) => Plan::step(Step::Drain(node.clone())),
        (None, NodeLookup::NotCached | NodeLookup::Absent) => Plan::after(Duration::ZERO),
    })
}

fn request(observed: &Observed) -> drain::Request {
    let machine = &observed.machine;
    let node = match &observed.node {
        NodeLookup::Found(_) => NodeState::Present,
        NodeLookup::NotCached if may_have_node(machine) => NodeState::Unknown("the Node has to be read".to_owned()),
        NodeLookup::NotCached | NodeLookup::Absent => NodeState::Missing,
    };
    drain::Request {
        excluded: annotations(machine).is_some_and(|annotations| annotations.contains_key(EXCLUDE_DRAIN)),
        recorded: has_drained_condition(machine),
        ..drain::Request::new(machine.metadata.name.clone().unwrap_or_default(), node)
    }
}

fn annotations(machine: &Machine) -> Option<&std::collections::BTreeMap<String, String>> {
    machine.metadata.annotations.as_ref()
}

fn has_drained_condition(machine: &Machine) -> bool {
    let conditions = machine.status.iter().flat_map(|status| &status.conditions);
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Drained" && condition.status == "True")
}

fn has_finalizer(machine: &Machine) -> bool {
    let finalizers = machine.metadata.finalizers.iter().flatten();
    finalizers.into_iter().any(|finalizer| finalizer == MACHINE_FINALIZER)
}

/// Whether the machine is for this controller: machines of other platforms, and those that Cluster API manages, are not.
pub fn is_managed(machine: &Machine) -> bool {
    let status = machine
        .status
        .as_ref()
        .and_then(|status| status.authoritative_api.as_ref());
    is_of_azure(machine) && is_machine_apis(machine.spec.authoritative_api.as_ref(), status)
}

/// Whether the machine is one of Azure, whatever API manages it.
pub fn is_of_azure(machine: &Machine) -> bool {
    machine.spec.provider_spec.value.as_ref().is_none_or(is_azure)
}

/// Whether the Machine API manages an object. A new object says so in its spec; the status says so from then on, and
/// while a migration runs.
pub fn is_machine_apis(spec: Option<&MachineAuthority>, status: Option<&MachineAuthority>) -> bool {
    paused_for(spec, status).is_none()
}

/// Returns the API that manages an object while it is not the Machine API: the object is paused.
pub fn paused_for(spec: Option<&MachineAuthority>, status: Option<&MachineAuthority>) -> Option<String> {
    let known = |authority: Option<&MachineAuthority>| {
        authority
            .map(MachineAuthority::as_str)
            .filter(|authority| !authority.is_empty())
            .map(str::to_owned)
    };
    let authority = known(status).or_else(|| known(spec))?;
    (authority != MachineAuthority::MachineApi.as_str()).then_some(authority)
}

/// Whether the virtual machine is known to have been ready once.
fn was_ready(machine: &Machine, status: &MachineStatus) -> bool {
    machine.spec.provider_id.as_deref().is_some_and(|id| !id.is_empty())
        || matches!(status.phase.as_deref(), Some(phase::PROVISIONED | phase::RUNNING))
}

/// Whether the machine has a Node, or had one.
fn had_node(observed: &Observed, status: &MachineStatus) -> bool {
    matches!(observed.node, NodeLookup::Found(_)) || status.node_ref.is_some()
}

/// Whether the machine got as far as a Node can come from.
fn may_have_node(machine: &Machine) -> bool {
    let status = machine.status.as_ref();
    machine.spec.provider_id.as_deref().is_some_and(|id| !id.is_empty())
        || status.is_some_and(|status| status.node_ref.is_some() || !status.addresses.is_empty())
}

/// Whether Azure was asked for the virtual machine before.
fn was_requested(status: &MachineStatus) -> bool {
    let provider = status.provider_status.as_ref();
    provider.is_some_and(|provider| provider.get("vmId").is_some())
}

/// Returns the names and owners of hooks, for the condition's message.
pub fn describe_hooks(hooks: &[LifecycleHook]) -> String {
    let names: Vec<String> = hooks
        .iter()
        .map(|hook| format!("{} ({})", hook.name, hook.owner))
        .collect();
    names.join(", ")
}

#[cfg(test)]
mod tests;
