//! The status of a VSphereMachine.

use capstan_api::MachineAddress;
use capstan_api::vsphere::{VSphereMachine, VSphereMachineStatus, VSphereVM};
use capstan_core::vm::machine::{ObservedMachine, fails, is_slow};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::conditions as names;
use crate::error::Error;

/// The reason of an event: the VSphereVM of a machine that is up stays as it is.
const NOT_FOLLOWED: &str = "MachineNotFollowed";

pub fn status(
    machine: &VSphereMachine,
    observed: Option<&ObservedMachine>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<VSphereMachine> {
    let mut after = machine.clone();
    let status = after.status.get_or_insert_default();
    let shown = status.v1beta2.clone();
    let mut events = Vec::new();
    // A machine that is up stays provisioned when a failure domain, an object of the cluster or a rule cannot be read.
    let is_up = status.ready && machine.metadata.deletion_timestamp.is_none();
    match (result, observed) {
        (_, Some(ObservedMachine::Paused(reason))) => {
            let generation = machine.metadata.generation;
            status.v1beta2 = names::with_paused(status.v1beta2.take(), shown.as_ref(), generation, Some(reason), now);
            return Report::of(after);
        }
        // An error of the API server is not the machine's: it is retried and logged.
        (Err(error), _) if !error.is_reported() => return Report::nothing(),
        (Err(error), _) => {
            let text = error.to_string();
            if is_up {
                events.push(EventNote::warning(NOT_FOLLOWED, text));
            } else {
                provisioned(status, Severity::Warning, names::CLONING_FAILED, &text, now);
                events.push(EventNote::warning(names::CLONING_FAILED, text));
            }
        }
        (Ok(()), None) => return Report::nothing(),
        (Ok(()), Some(ObservedMachine::Deleting { vm: None })) => return Report::nothing(),
        (Ok(()), Some(ObservedMachine::Deleting { vm: Some(vm) })) => deleting(status, vm, now),
        (Ok(()), Some(ObservedMachine::NoInfrastructure | ObservedMachine::NoBootstrapData)) if is_up => {}
        (Ok(()), Some(ObservedMachine::NoInfrastructure)) => {
            provisioned(status, Severity::Info, names::WAITING_FOR_CLUSTER, "", now);
        }
        (Ok(()), Some(ObservedMachine::NoBootstrapData)) => {
            provisioned(status, Severity::Info, names::WAITING_FOR_BOOTSTRAP_DATA, "", now);
        }
        (Ok(()), Some(ObservedMachine::NoVm { .. })) if !names::shows_paused(shown.as_ref()) => {
            return Report::nothing();
        }
        (Ok(()), Some(ObservedMachine::NoVm { .. })) => {}
        (
            Ok(()),
            Some(ObservedMachine::Vm {
                vm,
                provider_id: Some(_),
                lost_since,
                followed,
                ..
            }),
        ) => {
            up(status, vm, now);
            events.extend(
                followed
                    .as_ref()
                    .err()
                    .map(|text| EventNote::warning(NOT_FOLLOWED, text.clone())),
            );
            if fails(*lost_since, now) {
                let text = format!(
                    "vCenter does not have the virtual machine of VSphereVM {:?} any more",
                    vm.name_any()
                );
                status.failure_reason = Some(names::FAILED.to_owned());
                status.failure_message = Some(text.clone());
                events.push(EventNote::warning("MachineFailed", text));
            }
        }
        (Ok(()), Some(ObservedMachine::Vm { vm, is_failing, .. })) => {
            // A VM that makes progress is reported when it takes long.
            let is_reported = *is_failing || is_slow(vm, now);
            if !is_reported && !names::shows_paused(shown.as_ref()) {
                return Report::nothing();
            }
            if is_reported {
                mirror(status, vm, now);
            }
        }
    }
    conditions::summarize(&mut status.conditions, &[names::VM_PROVISIONED], now);
    let conditions = names::v1beta2(&status.conditions);
    status.v1beta2 = names::with_paused(conditions, shown.as_ref(), machine.metadata.generation, None, now);
    let mut report = Report::of(after);
    report.events = events;
    report
}

fn provisioned(status: &mut VSphereMachineStatus, severity: Severity, reason: &str, message: &str, now: Timestamp) {
    let type_ = names::VM_PROVISIONED;
    conditions::mark_false(&mut status.conditions, type_, severity, reason, message, now);
}

/// Copies the addresses and the network of a VSphereVM that is ready.
fn up(status: &mut VSphereMachineStatus, vm: &VSphereVM, now: Timestamp) {
    let found = vm.status.clone().unwrap_or_default();
    let external = found.addresses.iter().map(|address| ("ExternalIP", address.clone()));
    let all = external.chain([("InternalDNS", vm.name_any())]);
    let addresses = all.map(|(kind, address)| MachineAddress {
        type_: kind.to_owned(),
        address,
    });
    status.ready = true;
    status.addresses = addresses.collect();
    status.network = found.network;
    (status.failure_reason, status.failure_message) = (None, None);
    let mirrored = conditions::get(&found.conditions, names::VM_PROVISIONED).cloned();
    match mirrored.filter(|condition| condition.status != "True") {
        Some(condition) => conditions::set(&mut status.conditions, condition),
        None => conditions::mark_true(&mut status.conditions, names::VM_PROVISIONED, now),
    };
}

/// Copies the progress of a VSphereVM, or what is wrong with it.
fn mirror(status: &mut VSphereMachineStatus, vm: &VSphereVM, now: Timestamp) {
    let list = vm
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let ready = conditions::get(&list, conditions::READY).filter(|condition| condition.status != "True");
    let reason = ready.and_then(|c| c.reason.as_deref()).unwrap_or(names::CLONING);
    let message = ready.and_then(|c| c.message.as_deref()).unwrap_or_default();
    let severity = match ready.and_then(|c| c.severity.as_deref()) {
        Some("Error") => Severity::Error,
        Some("Warning") => Severity::Warning,
        _ => Severity::Info,
    };
    provisioned(status, severity, reason, message, now);
}

fn deleting(status: &mut VSphereMachineStatus, vm: &VSphereVM, now: Timestamp) {
    let list = vm
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let ready = conditions::get(&list, conditions::READY);
    let failing = ready.filter(|c| c.severity.as_deref().is_some_and(|severity| severity != "Info"));
    match failing.filter(|_| vm.metadata.deletion_timestamp.is_some()) {
        Some(condition) => {
            let reason = condition.reason.as_deref().unwrap_or_default();
            let message = condition.message.as_deref().unwrap_or_default();
            provisioned(status, Severity::Warning, reason, message, now);
        }
        None => provisioned(status, Severity::Info, names::DELETING, "", now),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_vm_that_makes_progress_costs_no_write_before_it_takes_long() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let report = |age: i64| {
            let mut vm = VSphereVM::new("m", Default::default());
            vm.metadata.creation_timestamp = Some(Time(now - jiff::SignedDuration::from_secs(age)));
            let observed = ObservedMachine::Vm {
                followed: Ok(Box::new(vm.clone())),
                vm: Arc::new(vm),
                provider_id: None,
                is_failing: false,
                host_label: None,
                lost_since: None,
                remediation: Default::default(),
            };
            let machine = VSphereMachine::new("m", Default::default());
            status(&machine, Some(&observed), Ok(()), now).object
        };
        assert!(report(5).is_none());
        let slow = report(40).unwrap().status.unwrap();
        let condition = conditions::get(&slow.conditions, names::VM_PROVISIONED).unwrap();
        assert_eq!(condition.reason.as_deref(), Some(names::CLONING));
    }

    #[test]
    fn a_machine_fails_when_its_vm_is_lost_and_its_annotation_asks_for_it() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let failed = |lost_since| {
            let vm = VSphereVM::new("m", Default::default());
            let observed = ObservedMachine::Vm {
                followed: Ok(Box::new(vm.clone())),
                vm: Arc::new(vm),
                provider_id: Some("vsphere://1".into()),
                is_failing: true,
                host_label: None,
                lost_since,
                remediation: Default::default(),
            };
            let machine = VSphereMachine::new("m", Default::default());
            let report = status(&machine, Some(&observed), Ok(()), now);
            report.object.unwrap().status.unwrap().failure_reason
        };
        assert_eq!(failed(None), None);
        let lost = now - jiff::SignedDuration::from_secs(600);
        assert_eq!(failed(Some(lost)).as_deref(), Some(names::FAILED));
    }

    #[rstest]
    #[case::an_error(None, Err(Error::NotReady("no zone".into())), 1)]
    #[case::no_infrastructure(Some(ObservedMachine::NoInfrastructure), Ok(()), 0)]
    #[case::no_bootstrap_data(Some(ObservedMachine::NoBootstrapData), Ok(()), 0)]
    fn a_machine_that_is_up_stays_ready_where_another_waits(
        #[case] observed: Option<ObservedMachine>,
        #[case] result: Result<(), Error>,
        #[case] events: usize,
    ) {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let provisioned = |up: bool| {
            let mut machine = VSphereMachine::new("m", Default::default());
            let before = machine.status.get_or_insert_default();
            if up {
                before.ready = true;
                conditions::mark_true(&mut before.conditions, names::VM_PROVISIONED, now);
            }
            let report = status(&machine, observed.as_ref(), result.as_ref().map(|()| ()), now);
            let after = report.object.unwrap().status.unwrap();
            let found = conditions::get(&after.conditions, names::VM_PROVISIONED).unwrap();
            (found.status.clone(), report.events.len())
        };
        assert_eq!(provisioned(true), ("True".to_owned(), events));
        assert_eq!(provisioned(false).0, "False");
    }
}
