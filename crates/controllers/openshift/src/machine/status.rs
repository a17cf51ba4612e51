//! The status and the events of a machine. Pure: the runtime writes what differs.

mod notes;
mod read;

pub use notes::{Failed, Note, Notes, Shown};
pub use read::*;

use std::time::Duration;

use super::error::Error;
use super::ids::Ids as _;
use capstan_api::common::Condition;
use capstan_api::openshift::{AzureMachineProviderStatus, LastOperation, Machine, MachineAuthority, MachineStatus};
use capstan_azure::Operation;
use capstan_azure::model::VirtualMachine;
use capstan_core::machine::disks::{Attached, recorded};
use capstan_core::machine::names::Names;
use capstan_core::machine::{self, describe_hooks, phase};
use capstan_core::{Class, Classified};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeAddress, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

/// Shows the virtual machine's state in `oc get machines -o wide`.
pub const INSTANCE_STATE: &str = "machine.openshift.io/instance-state";
/// Label with the VM size of a Machine.
const INSTANCE_TYPE: &str = "machine.openshift.io/instance-type";
/// Label with the Azure region of a Machine.
const REGION: &str = "machine.openshift.io/region";
/// Label with the availability zone of a Machine.
const ZONE: &str = "machine.openshift.io/zone";
/// Label of a spot Machine and of its Node, which a termination handler reads.
const INTERRUPTIBLE: &str = "machine.openshift.io/interruptible-instance";

/// Where in the provider's status an operation under way is kept, so that a restart takes it up.
const OPERATION: &str = "operation";

/// Where the disks stand that the virtual machine was made with: the spec may lose them later.
const DATA_DISKS: &str = "dataDisks";

/// Marks the conditions of the provider's status as ours. The controller before this one does not keep it.
const CONDITIONS_BY: &str = "conditionsBy";

/// The condition of the provider's status that says whether the virtual machine was created.
const CREATED: &str = "MachineCreated";

const INSTANCE_EXISTS: &str = "InstanceExists";
/// Upstream's reason for a virtual machine that cannot be looked up.
const UNCHECKED: &str = "ErrorCheckingProvider";
/// Each attempt may fail with another text.
const UNOBSERVED_PACE: Duration = Duration::from_secs(60);
const DRAINABLE: &str = "Drainable";
const DRAINED: &str = "Drained";
const TERMINABLE: &str = "Terminable";
/// Cluster API's migration waits for it.
const PAUSED: &str = "Paused";

/// Shows a virtual machine that was just made.
const RUNNING: &str = "Running";

/// Returns the machine with the status that users should see after a reconcile, and the events.
pub fn status(machine: &Machine, notes: &Notes, now: Timestamp) -> Report<Machine> {
    let (mut after, mut events) = (with_pause(machine, now), Vec::new());
    for note in notes.iter() {
        let shown = noted(&after, note, now);
        let changed = shown.as_ref().is_some_and(|shown| shown.status != after.status);
        events.extend(event(&after, note, changed));
        after = shown.unwrap_or(after);
    }
    Report {
        events,
        ..Report::of(after)
    }
}

/// Reports that nobody knows whether the virtual machine exists. An error of the API server is not the machine's, and Azure's
/// request for patience passes.
pub fn unobserved(machine: &Machine, error: &Error, now: Timestamp) -> Report<Machine> {
    let passes = matches!(error.class(), Class::Throttled(_));
    if matches!(error, Error::Kube(_)) || passes {
        return Report::nothing();
    }
    let mut status = of(machine);
    let message = format!("Failed to check if machine exists: {error}");
    conditions::mark_unknown(&mut status.conditions, INSTANCE_EXISTS, UNCHECKED, &message, now);
    Report {
        pace: Some(UNOBSERVED_PACE),
        ..Report::of(stamped(machine, status, now))
    }
}

/// Returns the machine as a note shows it. `None`: the status stays.
fn noted(machine: &Machine, note: &Note, now: Timestamp) -> Option<Machine> {
    Some(match note {
        Note::Requested(requested) => provisioning(machine, requested, now),
        Note::Provisioned(None) => provisioned(machine, RUNNING, now),
        // Where the Node came before Azure's last answer, Provisioned would be over as it is written.
        Note::Provisioned(Some(node)) => running(&provisioned(machine, RUNNING, now), node.clone(), now),
        Note::Linked(node) => running(machine, node.clone(), now),
        Note::Shown(shown) => seen(machine, shown.state.as_deref(), &shown.addresses, now),
        Note::NotCreated(message) => create_failed(machine, message, now),
        Note::Failed(Failed { reason, message, .. }) => failed(machine, reason, message, now),
        Note::Holding { vm_id, disks } => holding(machine, vm_id.as_ref(), disks, now),
        Note::Deleting(deletion) => deleting(machine, deletion, now),
        Note::OperationOver => without_operation(machine, now),
        Note::Event(_) => return None,
    })
}

/// Returns the event that reports a note. `changed`: it changes the status.
fn event(machine: &Machine, note: &Note, changed: bool) -> Option<EventNote> {
    let name = machine.name_any();
    match note {
        Note::Provisioned(_) => Some(EventNote::normal("Created", format!("Created machine {name:?}"))),
        Note::Shown(shown) if shown.updated || changed => {
            Some(EventNote::normal("Updated", format!("Updated machine {name:?}")))
        }
        Note::NotCreated(message) => Some(EventNote::warning("FailedCreate", format!("CreateError: {message}"))),
        Note::Failed(Failed { reason, message, event }) => {
            Some(EventNote::warning(event, format!("{reason}: {message}")))
        }
        Note::Deleting(deletion) => {
            let why = deletion.error.as_ref()?;
            let text = format!("DeleteError: failed to delete machine {name:?}: {why}");
            Some(EventNote::warning("FailedDelete", text))
        }
        Note::Event(event) => Some(event.clone()),
        Note::Requested(_) | Note::Linked(_) | Note::Shown(_) | Note::Holding { .. } | Note::OperationOver => None,
    }
}

fn with_pause(machine: &Machine, now: Timestamp) -> Machine {
    let before = machine.status.clone().unwrap_or_default();
    let (spec, authority) = (
        machine.spec.authoritative_api.as_ref(),
        before.authoritative_api.as_ref(),
    );
    let Some(conditions) = paused(&before.conditions, spec, authority, now) else {
        return machine.clone();
    };
    // Where the migration controller does not run, nobody else says which API manages the object.
    let authoritative_api = authority.or(spec).cloned();
    Machine {
        status: Some(MachineStatus {
            conditions,
            authoritative_api,
            ..before
        }),
        ..machine.clone()
    }
}

/// Sets the condition of the provider's status that others read for the reason why there is no virtual machine.
fn set_created(provider: &mut AzureMachineProviderStatus, result: Result<(), &str>, now: Timestamp) {
    let (status, reason, message) = match result {
        Ok(()) => ("True", "MachineCreationSucceeded", "machine successfully created"),
        Err(why) => ("False", "MachineCreationFailed", why),
    };
    if provider.conditions.is_empty() {
        provider.extra.insert(CONDITIONS_BY.to_owned(), "capstan".into());
    }
    let before = provider.conditions.iter().find(|condition| condition.type_ == CREATED);
    let since = before
        .filter(|before| before.status == status)
        .map(|before| before.last_transition_time.clone());
    let condition = meta::Condition {
        type_: CREATED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: since.unwrap_or(Time(now)),
        observed_generation: None,
    };
    provider.conditions.retain(|condition| condition.type_ != CREATED);
    provider.conditions.push(condition);
}

fn set_provider(status: &mut MachineStatus, change: impl FnOnce(&mut AzureMachineProviderStatus)) {
    let raw = status.provider_status.as_ref();
    let mut provider = raw
        .and_then(|raw| AzureMachineProviderStatus::from_raw(raw).ok())
        .unwrap_or_default();
    provider
        .api_version
        .get_or_insert_with(|| AzureMachineProviderStatus::API_VERSION.to_owned());
    provider
        .kind
        .get_or_insert_with(|| AzureMachineProviderStatus::KIND.to_owned());
    change(&mut provider);
    status.provider_status = Some(provider.to_raw());
}

fn keep_operation(provider: &mut AzureMachineProviderStatus, operation: Option<&Operation>) {
    match operation.and_then(|operation| serde_json::to_value(operation).ok()) {
        Some(value) => drop(provider.extra.insert(OPERATION.to_owned(), value)),
        None => drop(provider.extra.remove(OPERATION)),
    }
}

fn keep_disks(provider: &mut AzureMachineProviderStatus, disks: &[Attached]) {
    if let Ok(value) = serde_json::to_value(disks)
        && !disks.is_empty()
    {
        provider.extra.insert(DATA_DISKS.to_owned(), value);
    }
}

/// The virtual machine is about to be deleted; these are the disks that it has.
pub fn holding(machine: &Machine, vm_id: Option<&String>, disks: &[Attached], now: Timestamp) -> Machine {
    let mut status = of(machine);
    let disks = recorded(&attached(machine), disks.to_vec());
    set_provider(&mut status, |provider| {
        keep_disks(provider, &disks);
        provider.vm_id = vm_id.cloned();
    });
    stamped(machine, status, now)
}

fn did(status: &mut MachineStatus, what: &str, state: &str, description: &str, now: Timestamp) {
    status.last_operation = Some(LastOperation {
        description: Some(description.to_owned()),
        last_updated: Some(Time(now)),
        state: Some(state.to_owned()),
        type_: Some(what.to_owned()),
    });
}

/// Sets the time of the change, if there is one.
fn stamped(machine: &Machine, status: MachineStatus, now: Timestamp) -> Machine {
    let mut changed = machine.clone();
    let same = machine.status.as_ref() == Some(&status);
    changed.status = Some(status);
    if !same && let Some(status) = changed.status.as_mut() {
        status.last_updated = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
    }
    changed
}

/// A virtual machine that Azure has accepted.
#[derive(Debug, Default)]
pub struct Requested {
    pub vm_id: Option<String>,
    pub vm_state: String,
    pub disks: Vec<Attached>,
    pub operation: Option<Operation>,
    pub addresses: Vec<NodeAddress>,
}

/// Azure has accepted the machine and is making it.
fn provisioning(machine: &Machine, requested: &Requested, now: Timestamp) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::PROVISIONING.to_owned());
    if !requested.addresses.is_empty() {
        status.addresses.clone_from(&requested.addresses);
    }
    let disks = recorded(&attached(machine), requested.disks.clone());
    set_provider(&mut status, |provider| {
        keep_disks(provider, &disks);
        provider.vm_id.clone_from(&requested.vm_id);
        provider.vm_state = Some(requested.vm_state.clone());
        keep_operation(provider, requested.operation.as_ref());
    });
    did(
        &mut status,
        "Create",
        "Processing",
        "the virtual machine is being created",
        now,
    );
    stamped(machine, status, now)
}

/// The virtual machine could not be created for now; the phase says that it is tried again.
fn create_failed(machine: &Machine, message: &str, now: Timestamp) -> Machine {
    let mut status = of(machine);
    if status.phase.is_none() {
        status.phase = Some(phase::PROVISIONING.to_owned());
    }
    set_provider(&mut status, |provider| {
        keep_operation(provider, None);
        set_created(provider, Err(message), now);
    });
    conditions::mark_false(
        &mut status.conditions,
        INSTANCE_EXISTS,
        Severity::Warning,
        "CreateFailed",
        message,
        now,
    );
    if status
        .last_operation
        .as_ref()
        .and_then(|last| last.description.as_deref())
        != Some(message)
    {
        did(&mut status, "Create", "Failed", message, now);
    }
    stamped(machine, status, now)
}

/// Returns the object with everything that identifies its virtual machine.
pub fn identified(machine: &Machine, names: &Names, size: Option<&str>, zone: Option<&str>, spot: bool) -> Machine {
    let mut changed = machine.clone();
    changed.spec.provider_id = Some(names.provider_id());
    changed
        .annotations_mut()
        .insert(INSTANCE_STATE.to_owned(), RUNNING.to_owned());
    let labels = changed.labels_mut();
    let mut label = |key: &str, value: &str| {
        if !value.is_empty() {
            labels.insert(key.to_owned(), value.to_owned());
        }
    };
    label(INSTANCE_TYPE, size.unwrap_or_default());
    label(REGION, &names.location);
    label(ZONE, zone.unwrap_or_default());
    if spot {
        // The cluster's MachineHealthCheck for terminations selects this very value, on Machines and on Nodes.
        labels.insert(INTERRUPTIBLE.to_owned(), String::new());
        changed
            .spec
            .metadata
            .labels
            .insert(INTERRUPTIBLE.to_owned(), String::new());
    }
    changed
}

/// Returns the object with the state, the size and the zone that its virtual machine has by now.
pub fn shown(machine: &Machine, vm: &VirtualMachine, state: Option<&str>) -> Machine {
    let mut changed = machine.clone();
    if let Some(state) = state {
        changed
            .annotations_mut()
            .insert(INSTANCE_STATE.to_owned(), state.to_owned());
    }
    let hardware = vm.properties.as_ref().and_then(|vm| vm.hardware_profile.as_ref());
    let size = hardware.and_then(|hardware| hardware.vm_size.clone());
    let zones = vm.zones.as_ref().map(|zones| zones.join(","));
    for (label, value) in [(INSTANCE_TYPE, size), (ZONE, zones)] {
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            continue;
        };
        // Azure does not regard the case of a size.
        let known = machine.labels().get(label);
        if known.is_none_or(|known| !known.eq_ignore_ascii_case(&value)) {
            changed.labels_mut().insert(label.to_owned(), value);
        }
    }
    changed
}

/// The virtual machine is there.
fn provisioned(machine: &Machine, state: &str, now: Timestamp) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::PROVISIONED.to_owned());
    set_provider(&mut status, |provider| {
        provider.vm_state = Some(state.to_owned());
        keep_operation(provider, None);
        set_created(provider, Ok(()), now);
    });
    conditions::mark_true(&mut status.conditions, INSTANCE_EXISTS, now);
    for ready in [DRAINABLE, TERMINABLE] {
        conditions::mark_true(&mut status.conditions, ready, now);
    }
    did(
        &mut status,
        "Create",
        "Successful",
        "the virtual machine was created",
        now,
    );
    stamped(machine, status, now)
}

/// Its Node is there too.
fn running(machine: &Machine, node: ObjectReference, now: Timestamp) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::RUNNING.to_owned());
    status.node_ref = Some(node);
    conditions::mark_true(&mut status.conditions, INSTANCE_EXISTS, now);
    stamped(machine, status, now)
}

/// Azure showed the virtual machine.
fn seen(machine: &Machine, state: Option<&str>, addresses: &[NodeAddress], now: Timestamp) -> Machine {
    let mut status = of(machine);
    if let Some(state) = state.filter(|state| provider(machine).vm_state.as_deref() != Some(*state)) {
        set_provider(&mut status, |provider| provider.vm_state = Some(state.to_owned()));
    }
    if !addresses.is_empty() {
        status.addresses = addresses.to_vec();
    }
    if status.phase.is_none() {
        status.phase = Some(phase::PROVISIONED.to_owned());
    }
    conditions::mark_true(&mut status.conditions, INSTANCE_EXISTS, now);
    stamped(machine, status, now)
}

/// The machine has failed.
fn failed(machine: &Machine, reason: &str, message: &str, now: Timestamp) -> Machine {
    let mut status = of(machine);
    let gone = reason != "InvalidConfiguration";
    status.phase = Some(phase::FAILED.to_owned());
    status.error_reason = Some(reason.to_owned());
    status.error_message = Some(message.to_owned());
    set_provider(&mut status, |provider| {
        provider.vm_state = Some("Unknown".to_owned());
        keep_operation(provider, None);
        if !gone {
            set_created(provider, Err(message), now);
        }
    });
    let (why, text) = if gone {
        ("InstanceMissing", message)
    } else {
        ("InstanceNotCreated", message)
    };
    conditions::mark_false(
        &mut status.conditions,
        INSTANCE_EXISTS,
        Severity::Warning,
        why,
        text,
        now,
    );
    did(&mut status, "Create", "Failed", message, now);
    stamped(machine, status, now)
}

/// How far a deletion has come.
#[derive(Clone, Debug, Default)]
pub struct Deletion {
    /// `None`: nothing new. `Err`: the pods in the way.
    pub drained: Option<Result<(), String>>,
    pub operation: Option<Operation>,
    pub vm_id: Option<String>,
    /// Why the last step failed.
    pub error: Option<String>,
}

/// The operation in the status is over.
fn without_operation(machine: &Machine, now: Timestamp) -> Machine {
    let mut status = of(machine);
    set_provider(&mut status, |provider| keep_operation(provider, None));
    stamped(machine, status, now)
}

/// Says whether the controller leaves the object to another API. `None`: nothing to say, for nobody migrates.
pub fn paused(
    before: &[Condition],
    spec: Option<&MachineAuthority>,
    status: Option<&MachineAuthority>,
    now: Timestamp,
) -> Option<Vec<Condition>> {
    let mut after = before.to_vec();
    match machine::paused_for(spec, status) {
        Some(other) => {
            let message = format!("The AuthoritativeAPI is set to {other}");
            conditions::mark_true_because(&mut after, PAUSED, "AuthoritativeAPINotMachineAPI", &message, now);
        }
        // A cluster that knows no migration gets no condition.
        None if spec.is_none() && conditions::get(before, PAUSED).is_none() => return None,
        None => {
            let (reason, message) = (
                "AuthoritativeAPIMachineAPI",
                "The AuthoritativeAPI is set to MachineAPI",
            );
            conditions::mark_false(&mut after, PAUSED, Severity::Info, reason, message, now);
        }
    }
    Some(after)
}

fn deleting(machine: &Machine, deletion: &Deletion, now: Timestamp) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::DELETING.to_owned());
    let hooks = &machine.spec.lifecycle_hooks;
    let list = &mut status.conditions;
    for (condition, hooks, when) in [
        (DRAINABLE, &hooks.pre_drain, "Drain"),
        (TERMINABLE, &hooks.pre_terminate, "Terminate"),
    ] {
        if hooks.is_empty() {
            conditions::mark_true(list, condition, now);
        } else {
            let message = format!("{when} operation currently blocked by: [{}]", describe_hooks(hooks));
            conditions::mark_false(list, condition, Severity::Warning, "HookPresent", &message, now);
        }
    }
    let _changed = match &deletion.drained {
        None => false,
        Some(Ok(())) => conditions::mark_true_because(list, DRAINED, "DrainComplete", "Drain completed", now),
        Some(Err(pods)) => conditions::mark_false(list, DRAINED, Severity::Warning, "Draining", pods, now),
    };
    if deletion.operation.is_some() || deletion.vm_id.is_some() {
        set_provider(&mut status, |provider| {
            keep_operation(provider, deletion.operation.as_ref());
            provider.vm_state = Some("Deleting".to_owned());
            if provider.vm_id.is_none() {
                provider.vm_id.clone_from(&deletion.vm_id);
            }
        });
        if status.last_operation.as_ref().and_then(|last| last.type_.as_deref()) != Some("Delete") {
            did(
                &mut status,
                "Delete",
                "Processing",
                "the virtual machine is being deleted",
                now,
            );
        }
    }
    if let Some(why) = deletion.error.as_deref() {
        let last = status.last_operation.as_ref();
        if last.and_then(|last| last.description.as_deref()) != Some(why) {
            did(&mut status, "Delete", "Failed", why, now);
        }
    }
    stamped(machine, status, now)
}

#[cfg(test)]
mod tests;
