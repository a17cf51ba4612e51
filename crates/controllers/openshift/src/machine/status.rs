//! The status of a machine. Pure changes of the object; the writer sends only what differs.

mod read;

pub use read::*;

use super::disks;
use super::ids::Ids as _;
use capstan_api::common::Condition;
use capstan_api::openshift::{
    AzureMachineProviderSpec, AzureMachineProviderStatus, LastOperation, Machine, MachineAuthority, MachineStatus,
};
use capstan_azure::Operation;
use capstan_azure::model::VirtualMachine;
use capstan_core::machine::disks::{Attached, recorded};
use capstan_core::machine::names::Names;
use capstan_core::machine::{self, describe_hooks, phase};
use capstan_kube::conditions::{self, Severity};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::NodeAddress;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

/// Shows the virtual machine's state in `oc get machines -o wide`.
pub const INSTANCE_STATE: &str = "machine.openshift.io/instance-state";
const INSTANCE_TYPE: &str = "machine.openshift.io/instance-type";
const REGION: &str = "machine.openshift.io/region";
const ZONE: &str = "machine.openshift.io/zone";
const INTERRUPTIBLE: &str = "machine.openshift.io/interruptible-instance";

/// Where in the provider's status an operation under way is kept, so that a restart takes it up.
const OPERATION: &str = "operation";

/// Where the disks stand that the virtual machine was made with: the spec may lose them later.
const DATA_DISKS: &str = "dataDisks";

/// Marks the conditions of the provider's status as ours. The controller before this one does not keep it.
const CONDITIONS_BY: &str = "conditionsBy";

/// The condition of the provider's status that says whether the virtual machine was created.
const CREATED: &str = "MachineCreated";

pub const INSTANCE_EXISTS: &str = "InstanceExists";
pub const DRAINABLE: &str = "Drainable";
pub const DRAINED: &str = "Drained";
pub const TERMINABLE: &str = "Terminable";
/// Cluster API's migration waits for it.
const PAUSED: &str = "Paused";

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
pub fn holding(machine: &Machine, vm: &VirtualMachine, disks: Vec<Attached>, now: Timestamp) -> Machine {
    let mut status = of(machine);
    let disks = recorded(&attached(machine), disks);
    set_provider(&mut status, |provider| {
        keep_disks(provider, &disks);
        provider.vm_id = id_of(vm);
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

/// Azure has accepted the machine and is making it.
pub fn provisioning(
    machine: &Machine,
    spec: &AzureMachineProviderSpec,
    names: &Names,
    vm: &VirtualMachine,
    operation: Option<&Operation>,
    addresses: Vec<NodeAddress>,
    now: Timestamp,
) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::PROVISIONING.to_owned());
    if !addresses.is_empty() {
        status.addresses = addresses;
    }
    let disks = recorded(&attached(machine), disks::attached(spec, names, vm));
    set_provider(&mut status, |provider| {
        keep_disks(provider, &disks);
        provider.vm_id = id_of(vm);
        provider.vm_state = Some(vm.provisioning_state().to_string());
        keep_operation(provider, operation);
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
pub fn create_failed(machine: &Machine, message: &str, now: Timestamp) -> Machine {
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
pub fn identified(
    machine: &Machine,
    names: &Names,
    size: Option<&str>,
    zone: Option<&str>,
    spot: bool,
    state: &str,
) -> Machine {
    let mut changed = machine.clone();
    changed.spec.provider_id = Some(names.provider_id());
    changed
        .annotations_mut()
        .insert(INSTANCE_STATE.to_owned(), state.to_owned());
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

/// The virtual machine is there.
pub fn provisioned(machine: &Machine, state: &str, now: Timestamp) -> Machine {
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
pub fn running(machine: &Machine, node: k8s_openapi::api::core::v1::ObjectReference, now: Timestamp) -> Machine {
    let mut status = of(machine);
    status.phase = Some(phase::RUNNING.to_owned());
    status.node_ref = Some(node);
    conditions::mark_true(&mut status.conditions, INSTANCE_EXISTS, now);
    stamped(machine, status, now)
}

/// Azure showed the virtual machine.
pub fn seen(machine: &Machine, state: Option<&str>, addresses: Vec<NodeAddress>, now: Timestamp) -> Machine {
    let mut status = of(machine);
    if let Some(state) = state.filter(|state| provider(machine).vm_state.as_deref() != Some(*state)) {
        set_provider(&mut status, |provider| provider.vm_state = Some(state.to_owned()));
    }
    if !addresses.is_empty() {
        status.addresses = addresses;
    }
    if status.phase.is_none() {
        status.phase = Some(phase::PROVISIONED.to_owned());
    }
    conditions::mark_true(&mut status.conditions, INSTANCE_EXISTS, now);
    stamped(machine, status, now)
}

/// The machine has failed.
pub fn failed(machine: &Machine, reason: &str, message: &str, now: Timestamp) -> Machine {
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
pub struct Deletion<'a> {
    /// `None`: nothing new. `Err`: the pods in the way.
    pub drained: Option<Result<(), String>>,
    pub operation: Option<&'a Operation>,
    pub vm_id: Option<&'a str>,
    /// Why the last step failed.
    pub error: Option<&'a str>,
}

/// The operation in the status is over.
pub fn without_operation(machine: &Machine, now: Timestamp) -> Machine {
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

pub fn deleting(machine: &Machine, deletion: &Deletion, now: Timestamp) -> Machine {
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
            keep_operation(provider, deletion.operation);
            provider.vm_state = Some("Deleting".to_owned());
            if provider.vm_id.is_none() {
                provider.vm_id = deletion.vm_id.map(ToOwned::to_owned);
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
    if let Some(why) = deletion.error {
        let last = status.last_operation.as_ref();
        if last.and_then(|last| last.description.as_deref()) != Some(why) {
            did(&mut status, "Delete", "Failed", why, now);
        }
    }
    stamped(machine, status, now)
}

#[cfg(test)]
mod tests;
