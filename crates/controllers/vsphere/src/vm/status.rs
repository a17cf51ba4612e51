//! The status, the conditions and the events of a VSphereVM.
//!
//! Invariant: nothing is written that does not differ; a step that takes seconds is reported once, at its end.

use std::sync::Arc;

use capstan_api::vsphere::{VSphereVM, VSphereVMStatus};
use capstan_core::Class;
use capstan_core::disks::vsphere::list;
use capstan_kube::Next;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::expectations::Version;
use capstan_kube::patch::{self, Lock};
use capstan_vsphere::{MoRef, Vcenter};
use jiff::Timestamp;
use kube::{Resource, ResourceExt};

use super::state::{TaskKind, VmState};
use super::{RECHECK, Vms, marks, recheck, retry};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use capstan_core::vm::DesiredVm;
use capstan_core::vm::Report;

/// A failure with the reason that its condition gives.
pub fn because(reason: &'static str, error: capstan_vsphere::Error) -> Error {
    Error::Step { reason, error }
}

/// What is said from the start of a clone on; what follows it is told by itself only where it takes long.
pub fn cloning(vm: &VSphereVM) -> String {
    let spec = &vm.spec.clone_spec;
    format!(
        "cloning template {:?} with {} data disks; then it is set up, powered on and waits for an address",
        spec.template,
        spec.data_disks.len()
    )
}

/// Says that something is under way.
pub fn in_progress(status: &mut VSphereVMStatus, reason: &str, message: &str, now: Timestamp) {
    // Whoever gets this far has been let in.
    conditions::mark_true(&mut status.conditions, names::VCENTER_AVAILABLE, now);
    conditions::mark_false(
        &mut status.conditions,
        names::VM_PROVISIONED,
        Severity::Info,
        reason,
        message,
        now,
    );
}

const SUMMED_UP: &[&str] = &[names::VCENTER_AVAILABLE, names::VM_PROVISIONED];

impl Vms {
    /// Writes what `edit` changes in the status, if anything.
    pub(super) async fn write(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        edit: impl FnOnce(&mut VSphereVMStatus, Timestamp),
    ) -> Result<(), Error> {
        let now = self.context.clock.now();
        let mut after = vm.clone();
        let status = after.status.get_or_insert_default();
        edit(status, now);
        conditions::summarize(&mut status.conditions, SUMMED_UP, now);
        let written = match patch::status(&self.api(vm), vm, &after, Lock::Open).await {
            Err(error) if error.is_not_found() => return Ok(()),
            written => written?,
        };
        if let Some(version) = written.and_then(|written| written.resource_version()) {
            state.written = Some(Version::new(version));
        }
        Ok(())
    }

    pub(super) async fn waiting_for_static_address(&self, vm: &VSphereVM, state: &mut VmState) -> Result<Next, Error> {
        let text = "a network device has neither DHCP nor ipAddrs: waiting for somebody to set its ipAddrs";
        self.write(vm, state, |status, now| {
            in_progress(status, names::WAITING_FOR_STATIC_IP, text, now)
        })
        .await?;
        Ok(Next::Wait)
    }

    /// A step takes long: say so.
    pub(super) async fn slow(&self, vm: &VSphereVM, state: &mut VmState) -> Result<(), Error> {
        let Some(kind) = state.pending.as_ref().map(|pending| pending.kind.clone()) else {
            return Ok(());
        };
        let (reason, text) = match kind {
            TaskKind::OtherClones => (names::CLONING, "waiting for clones that are under way".into()),
            TaskKind::Clone => (names::CLONING, cloning(vm)),
            TaskKind::Upgrade => (names::CLONING, "upgrading the virtual hardware".into()),
            TaskKind::Reconfigure(_) => (names::CLONING, "setting up devices and metadata".into()),
            TaskKind::Group => (names::CLONING, "joining the VM group of its failure domain".into()),
            TaskKind::PowerOn => (names::POWERING_ON, "powering on".into()),
            TaskKind::Address => (
                names::WAITING_FOR_IP,
                "powered on, waiting for the guest to report an address".into(),
            ),
            TaskKind::Shutdown | TaskKind::PowerOff | TaskKind::Detach | TaskKind::Destroy => return Ok(()),
        };
        let reference = state.reference.as_ref().map(ToString::to_string);
        self.write(vm, state, |status, now| {
            in_progress(status, reason, &text, now);
            status.vm_ref = status.vm_ref.take().or(reference);
        })
        .await?;
        self.recorder.normal(vm, reason, text).await;
        Ok(())
    }

    /// It runs; what remains is its address. Told when that takes long.
    pub(super) async fn waiting_for_address(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        report: &Report,
    ) -> Result<Next, Error> {
        let was_ready = vm.status.as_ref().is_some_and(|status| status.ready);
        if was_ready {
            let network = desired::network_status(report);
            self.write(vm, state, |status, now| {
                status.network = network;
                in_progress(
                    status,
                    names::WAITING_FOR_IP,
                    "the guest reports no address any more",
                    now,
                );
            })
            .await?;
        }
        Ok(Next::Wait)
    }

    /// It is up: say so to everybody.
    pub(super) async fn up(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        desired: &DesiredVm,
        reference: &MoRef,
        report: Report,
    ) -> Result<Next, Error> {
        let Some(observed) = state.observed.clone() else {
            return Ok(Next::Wait);
        };
        let host = match observed.host.as_deref().and_then(|host| host.parse::<MoRef>().ok()) {
            Some(host) => vcenter.name_of(&host).await.ok(),
            None => None,
        };
        self.join_module(vm, state, vcenter, reference).await;
        let module = state.module.clone();
        let recorded = self.recorded(vm, state);
        let listed = list(&observed.hardware, &desired.disks, &recorded.placements);
        let keys: Vec<Option<i32>> = listed
            .iter()
            .map(|disk| {
                observed
                    .hardware
                    .disk_at(disk.kind, disk.bus, disk.unit)
                    .map(|device| device.controller_key)
            })
            .collect();
        self.write_bios_uuid(vm, state, &observed.bios_uuid).await?;
        let first = !vm.status.as_ref().is_some_and(|status| status.ready);
        let started = state.started.clone();
        let address = report.addresses.join(", ");
        let pooled = desired.networks.iter().any(|device| device.pooled);
        self.write(vm, state, |status, now| {
            if let Some(started) = started.filter(|_| status.clone_mode.is_none() || status.data_disks.is_empty()) {
                started.note(status);
            }
            status.data_disks = desired::found_disks(&status.data_disks, &listed, &keys);
            status.ready = true;
            status.host = host.or(status.host.take());
            status.vm_ref = Some(reference.to_string());
            status.task_ref = None;
            status.module_uuid = module.or(status.module_uuid.take());
            status.addresses = report.addresses.clone();
            status.network = desired::network_status(&report);
            (status.failure_reason, status.failure_message) = (None, None);
            if pooled {
                conditions::mark_true(&mut status.conditions, names::IP_ADDRESS_CLAIMED, now);
            }
            conditions::mark_true(&mut status.conditions, names::VCENTER_AVAILABLE, now);
            conditions::mark_true(&mut status.conditions, names::VM_PROVISIONED, now);
        })
        .await?;
        if first {
            self.tell_first(vm, state, desired, reference, &address).await;
        }
        let kept = VmState {
            written: state.written.take(),
            reference: Some(reference.clone()),
            module: state.module.take(),
            ..VmState::default()
        };
        *state = VmState {
            task_over: true,
            tagged: true,
            looked: Some((self.context.clock.instant(), marks(vm))),
            ..kept
        };
        Ok(Next::After(self.context.resync))
    }

    async fn tell_first(&self, vm: &VSphereVM, state: &VmState, desired: &DesiredVm, reference: &MoRef, address: &str) {
        if !state.mended.is_empty() {
            let text = format!("{}; put right by reconfiguration", state.mended.join("; "));
            self.recorder.warning(vm, "DevicesDropped", text).await;
        }
        let text = format!(
            "cloned from template {:?} as {reference} with {} data disks, powered on, address {address}",
            desired.template,
            desired.disks.len()
        );
        self.recorder.normal(vm, "Provisioned", text).await;
    }

    async fn write_bios_uuid(&self, vm: &VSphereVM, state: &mut VmState, uuid: &str) -> Result<(), Error> {
        if uuid.is_empty() || vm.spec.bios_uuid.as_deref() == Some(uuid) {
            return Ok(());
        }
        let mut after = vm.clone();
        after.spec.bios_uuid = Some(uuid.to_owned());
        let written = patch::object(&self.api(vm), vm, &after, Lock::Open).await?;
        if let Some(version) = written.and_then(|written| written.resource_version()) {
            state.written = Some(Version::new(version));
        }
        Ok(())
    }

    /// It was there once and cannot be found. Storage may be away for a while, so nothing is made in its place.
    pub(super) async fn lost(&self, vm: &VSphereVM, state: &mut VmState) -> Result<Next, Error> {
        let uuid = vm.spec.bios_uuid.clone().unwrap_or_default();
        let text = format!("virtual machine with BIOS UUID {uuid} cannot be found in vCenter");
        self.write(vm, state, |status, now| {
            let (type_, reason) = (names::VM_PROVISIONED, names::NOT_FOUND);
            conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, &text, now);
        })
        .await?;
        self.recorder.warning(vm, names::NOT_FOUND, text).await;
        Ok(Next::After(RECHECK))
    }

    /// Tells of a failure, word for word, and decides when to try again.
    pub(super) async fn failed(&self, vm: &VSphereVM, state: &mut VmState, error: Error) -> Result<Next, Error> {
        state.stale();
        let deleting = vm.meta().deletion_timestamp.is_some();
        let seen = state.reference.is_some() || desired::recorded(vm).was_ready;
        let reason = match &error {
            Error::Step { reason, .. } => *reason,
            _ if deleting => names::DELETION_FAILED,
            _ if seen => names::TASK_FAILURE,
            _ => names::CLONING_FAILED,
        };
        let severity = if error.class() == Class::Terminal {
            Severity::Error
        } else {
            Severity::Warning
        };
        let (text, connection) = (error.to_string(), error.is_connection());
        let said = if connection { names::VCENTER_UNREACHABLE } else { reason };
        self.recorder.warning(vm, said, text.as_str()).await;
        let answered = !connection && error.vsphere().is_some();
        // A VM that is up stays provisioned when a read, a Secret or a rule fails; only a failed step on it says otherwise.
        let was_ready = vm.status.as_ref().is_some_and(|status| status.ready) && !deleting;
        let about_vcenter = connection || was_ready && !matches!(error, Error::Step { .. });
        self.write(vm, state, |status, now| {
            let list = &mut status.conditions;
            if answered && !about_vcenter {
                conditions::mark_true(list, names::VCENTER_AVAILABLE, now);
            }
            let type_ = if about_vcenter {
                names::VCENTER_AVAILABLE
            } else {
                names::VM_PROVISIONED
            };
            conditions::mark_false(list, type_, severity, said, &text, now);
        })
        .await?;
        let terminal = error.class() == Class::Terminal;
        if !terminal && !error.is_refusal() {
            return Err(error);
        }
        state.failures = state.failures.saturating_add(1);
        let wait = if terminal {
            recheck(state.failures)
        } else {
            retry(state.failures)
        };
        let task = matches!(error.vsphere(), Some(capstan_vsphere::Error::TaskFailed { .. }));
        if task || !terminal {
            // Our own writes ask for passes too: without a rest each would start the next task at once.
            state.rest = Some((self.context.clock.instant() + wait, self.version_of_others(vm)));
        }
        tracing::warn!(vm = %vm.name_any(), %error, retry = ?wait, "a step failed");
        Ok(Next::After(wait))
    }
}
