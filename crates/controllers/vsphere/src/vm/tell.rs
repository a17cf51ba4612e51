//! What is told of a VM: its status, its conditions, its events.
//!
//! Kept here: nothing is written that is so already; a step that is over within seconds is told once, at its end.

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

use super::working::{Purpose, Working};
use super::{RECHECK, RESYNC, Vms, marks, recheck, retry};
use crate::domain::Wanted;
use crate::error::Error;
use crate::from_api;
use crate::plan::Report;
use crate::terms;

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
    conditions::mark_true(&mut status.conditions, terms::VCENTER_AVAILABLE, now);
    conditions::mark_false(
        &mut status.conditions,
        terms::VM_PROVISIONED,
        Severity::Info,
        reason,
        message,
        now,
    );
}

const SUMMED_UP: &[&str] = &[terms::VCENTER_AVAILABLE, terms::VM_PROVISIONED];

impl Vms {
    /// Writes what `edit` changes in the status, if anything.
    pub(super) async fn write(
        &self,
        vm: &VSphereVM,
        working: &mut Working,
        edit: impl FnOnce(&mut VSphereVMStatus, Timestamp),
    ) -> Result<(), Error> {
        let now = Timestamp::now();
        let mut after = vm.clone();
        let status = after.status.get_or_insert_default();
        edit(status, now);
        conditions::summarize(&mut status.conditions, SUMMED_UP, now);
        let written = match patch::status(&self.api(vm), vm, &after, Lock::Open).await {
            Err(error) if error.is_not_found() => return Ok(()),
            written => written?,
        };
        if let Some(version) = written.and_then(|written| written.resource_version()) {
            working.written = Some(Version::new(version));
        }
        Ok(())
    }

    pub(super) async fn waiting_for_static_address(
        &self,
        vm: &VSphereVM,
        working: &mut Working,
    ) -> Result<Next, Error> {
        let text = "a network device has neither DHCP nor ipAddrs: waiting for somebody to set its ipAddrs";
        self.write(vm, working, |status, now| {
            in_progress(status, terms::WAITING_FOR_STATIC_IP, text, now)
        })
        .await?;
        Ok(Next::Wait)
    }

    /// A step takes long: say so.
    pub(super) async fn slow(&self, vm: &VSphereVM, working: &mut Working) -> Result<(), Error> {
        let Some(purpose) = working.job.as_ref().map(|job| job.purpose.clone()) else {
            return Ok(());
        };
        let (reason, text) = match purpose {
            Purpose::OtherClones => (terms::CLONING, "waiting for clones that are under way".into()),
            Purpose::Clone => (terms::CLONING, cloning(vm)),
            Purpose::Upgrade => (terms::CLONING, "upgrading the virtual hardware".into()),
            Purpose::Reconfigure(_) => (terms::CLONING, "setting up devices and metadata".into()),
            Purpose::Group => (terms::CLONING, "joining the VM group of its failure domain".into()),
            Purpose::PowerOn => (terms::POWERING_ON, "powering on".into()),
            Purpose::Address => (
                terms::WAITING_FOR_IP,
                "powered on, waiting for the guest to report an address".into(),
            ),
            Purpose::Shutdown | Purpose::PowerOff | Purpose::Detach | Purpose::Destroy => return Ok(()),
        };
        let reference = working.reference.as_ref().map(ToString::to_string);
        self.write(vm, working, |status, now| {
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
        working: &mut Working,
        report: &Report,
    ) -> Result<Next, Error> {
        let was_ready = vm.status.as_ref().is_some_and(|status| status.ready);
        if was_ready {
            let network = from_api::network_status(report);
            self.write(vm, working, |status, now| {
                status.network = network;
                in_progress(
                    status,
                    terms::WAITING_FOR_IP,
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
        working: &mut Working,
        vcenter: &Vcenter,
        wanted: &Wanted,
        reference: &MoRef,
        report: Report,
    ) -> Result<Next, Error> {
        let Some(facts) = working.facts.clone() else {
            return Ok(Next::Wait);
        };
        let host = match facts.host.as_deref().and_then(|host| host.parse::<MoRef>().ok()) {
            Some(host) => vcenter.name_of(&host).await.ok(),
            None => None,
        };
        self.join_module(vm, working, vcenter, reference).await;
        let module = working.module.clone();
        let memory = self.memory(vm, working);
        let listed = list(&facts.hardware, &wanted.disks, &memory.placements);
        let keys: Vec<Option<i32>> = listed
            .iter()
            .map(|disk| {
                facts
                    .hardware
                    .disk_at(disk.kind, disk.bus, disk.unit)
                    .map(|device| device.controller_key)
            })
            .collect();
        self.write_bios_uuid(vm, working, &facts.bios_uuid).await?;
        let first = !vm.status.as_ref().is_some_and(|status| status.ready);
        let started = working.started.clone();
        let address = report.addresses.join(", ");
        let pooled = wanted.networks.iter().any(|device| device.pooled);
        self.write(vm, working, |status, now| {
            if let Some(started) = started.filter(|_| status.clone_mode.is_none() || status.data_disks.is_empty()) {
                started.note(status);
            }
            status.data_disks = from_api::found_disks(&status.data_disks, &listed, &keys);
            status.ready = true;
            status.host = host.or(status.host.take());
            status.vm_ref = Some(reference.to_string());
            status.task_ref = None;
            status.module_uuid = module.or(status.module_uuid.take());
            status.addresses = report.addresses.clone();
            status.network = from_api::network_status(&report);
            (status.failure_reason, status.failure_message) = (None, None);
            if pooled {
                conditions::mark_true(&mut status.conditions, terms::IP_ADDRESS_CLAIMED, now);
            }
            conditions::mark_true(&mut status.conditions, terms::VCENTER_AVAILABLE, now);
            conditions::mark_true(&mut status.conditions, terms::VM_PROVISIONED, now);
        })
        .await?;
        if first {
            self.tell_first(vm, working, wanted, reference, &address).await;
        }
        let kept = Working {
            written: working.written.take(),
            reference: Some(reference.clone()),
            module: working.module.take(),
            ..Working::default()
        };
        *working = Working {
            task_over: true,
            tagged: true,
            looked: Some((std::time::Instant::now(), marks(vm))),
            ..kept
        };
        Ok(Next::After(RESYNC))
    }

    async fn tell_first(&self, vm: &VSphereVM, working: &Working, wanted: &Wanted, reference: &MoRef, address: &str) {
        if !working.mended.is_empty() {
            let text = format!("{}; put right by reconfiguration", working.mended.join("; "));
            self.recorder.warning(vm, "DevicesDropped", text).await;
        }
        let text = format!(
            "cloned from template {:?} as {reference} with {} data disks, powered on, address {address}",
            wanted.template,
            wanted.disks.len()
        );
        self.recorder.normal(vm, "Provisioned", text).await;
    }

    async fn write_bios_uuid(&self, vm: &VSphereVM, working: &mut Working, uuid: &str) -> Result<(), Error> {
        if uuid.is_empty() || vm.spec.bios_uuid.as_deref() == Some(uuid) {
            return Ok(());
        }
        let mut after = vm.clone();
        after.spec.bios_uuid = Some(uuid.to_owned());
        let written = patch::object(&self.api(vm), vm, &after, Lock::Open).await?;
        if let Some(version) = written.and_then(|written| written.resource_version()) {
            working.written = Some(Version::new(version));
        }
        Ok(())
    }

    /// It was there once and cannot be found. Storage may be away for a while, so nothing is made in its place.
    pub(super) async fn lost(&self, vm: &VSphereVM, working: &mut Working) -> Result<Next, Error> {
        let uuid = vm.spec.bios_uuid.clone().unwrap_or_default();
        let text = format!("virtual machine with BIOS UUID {uuid} cannot be found in vCenter");
        self.write(vm, working, |status, now| {
            let (type_, reason) = (terms::VM_PROVISIONED, terms::NOT_FOUND);
            conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, &text, now);
        })
        .await?;
        self.recorder.warning(vm, terms::NOT_FOUND, text).await;
        Ok(Next::After(RECHECK))
    }

    /// Tells of a failure, word for word, and decides when to try again.
    pub(super) async fn failed(&self, vm: &VSphereVM, working: &mut Working, error: Error) -> Result<Next, Error> {
        working.stale();
        let deleting = vm.meta().deletion_timestamp.is_some();
        let seen = working.reference.is_some() || from_api::memory(vm).seen;
        let reason = match &error {
            Error::Step { reason, .. } => *reason,
            _ if deleting => terms::DELETION_FAILED,
            _ if seen => terms::TASK_FAILURE,
            _ => terms::CLONING_FAILED,
        };
        let severity = if error.class() == Class::Terminal {
            Severity::Error
        } else {
            Severity::Warning
        };
        let (text, connection) = (error.to_string(), error.is_connection());
        let said = if connection { terms::VCENTER_UNREACHABLE } else { reason };
        self.recorder.warning(vm, said, text.as_str()).await;
        let answered = !connection && error.vsphere().is_some();
        self.write(vm, working, |status, now| {
            let list = &mut status.conditions;
            if answered {
                conditions::mark_true(list, terms::VCENTER_AVAILABLE, now);
            }
            let type_ = if connection {
                terms::VCENTER_AVAILABLE
            } else {
                terms::VM_PROVISIONED
            };
            conditions::mark_false(list, type_, severity, said, &text, now);
        })
        .await?;
        let terminal = error.class() == Class::Terminal;
        if !terminal && !error.is_refusal() {
            return Err(error);
        }
        working.failures = working.failures.saturating_add(1);
        let wait = if terminal {
            recheck(working.failures)
        } else {
            retry(working.failures)
        };
        let task = matches!(error.vsphere(), Some(capstan_vsphere::Error::TaskFailed { .. }));
        if task || !terminal {
            // Our own writes ask for passes too: without a rest each would start the next task at once.
            working.rest = Some((std::time::Instant::now() + wait, self.version_of_others(vm)));
        }
        tracing::warn!(vm = %vm.name_any(), %error, retry = ?wait, "a step failed");
        Ok(Next::After(wait))
    }
}
