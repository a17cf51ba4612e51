//! The status, the conditions and the events of a VSphereVM. Pure.
//!
//! A step that takes seconds is reported once, at its end; a step that takes long is reported while it lasts.

use capstan_api::vsphere::{NetworkStatus, VSphereVM, VSphereVMStatus};
use capstan_core::Class;
use capstan_core::disks::vsphere::Listed;
use capstan_core::vm::Report as NetworkReport;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use capstan_vsphere::MoRef;
use jiff::Timestamp;
use kube::Resource;

use super::is_ready;
use super::state::{Started, TaskKind, VmState};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;

const SUMMARIZED: &[&str] = &[names::VCENTER_AVAILABLE, names::VM_PROVISIONED];

/// A failure with the reason that its condition gives.
pub fn because(reason: &'static str, error: capstan_vsphere::Error) -> Error {
    Error::Step { reason, error }
}

/// Everything that a reconcile reports.
#[derive(Default)]
pub struct Notes {
    /// The clone that was started and has not ended.
    pub started: Option<Started>,
    /// Whether the clone in the status has failed.
    pub clone_failed: bool,
    pub progress: Option<Progress>,
    pub up: Option<Up>,
    pub failure: Option<Error>,
    /// Whether the virtual machine was found.
    pub found: bool,
    pub events: Vec<EventNote>,
    /// Why the VSphereVM is paused.
    pub paused: Option<String>,
}

impl Notes {
    /// Adds what the state knows.
    pub fn take(&mut self, state: &mut VmState) {
        let under_way = |started: &&Started| !state.task_over && !started.task.is_empty();
        self.started = state.started.as_ref().filter(under_way).cloned();
        self.clone_failed = state.clone_failed;
        self.found = state.reference.is_some();
        self.events.append(&mut state.events);
        let Some(pending) = &state.pending else { return };
        let mut report = pending.report.lock();
        if report.slow && self.progress.is_none() {
            self.progress = Progress::slow(&pending.kind, state.reference.as_ref(), !report.recorded);
            report.recorded = true;
        }
    }
}

/// The progress of a VM that is not up yet, or not any more.
#[derive(Clone, Debug)]
pub enum Progress {
    /// A step takes long.
    Slow {
        reason: &'static str,
        /// `None`: the clone, which the spec describes.
        text: Option<&'static str>,
        vm: Option<MoRef>,
        /// Whether to record an event.
        first: bool,
    },
    /// A user has to set the address of a card.
    StaticAddress,
    /// Pools have not handed out all addresses.
    Claims(String),
    /// The guest of a VM that was ready reports no address any more.
    AddressGone { network: Vec<NetworkStatus> },
    /// The VM was ready once and cannot be found.
    Lost,
    /// The guest was asked to shut down, or cannot be asked.
    SoftPowerOff {
        reason: &'static str,
        severity: Severity,
        text: &'static str,
    },
}

impl Progress {
    fn slow(kind: &TaskKind, vm: Option<&MoRef>, first: bool) -> Option<Self> {
        let (reason, text) = match kind {
            TaskKind::Clone => (names::CLONING, None),
            TaskKind::OtherClones => (names::CLONING, Some("waiting for clones that are under way")),
            TaskKind::Turn => (
                names::CLONING,
                Some("waiting for its turn: as many clones as allowed are under way on its vCenter or datastore"),
            ),
            TaskKind::Upgrade => (names::CLONING, Some("upgrading the virtual hardware")),
            TaskKind::Reconfigure(_) => (names::CLONING, Some("setting up devices and metadata")),
            TaskKind::Group => (names::CLONING, Some("joining the VM group of its failure domain")),
            TaskKind::PowerOn => (names::POWERING_ON, Some("powering on")),
            TaskKind::Address => (
                names::WAITING_FOR_IP,
                Some("powered on, waiting for the guest to report an address"),
            ),
            TaskKind::RestoreGroup | TaskKind::Shutdown | TaskKind::PowerOff | TaskKind::Detach | TaskKind::Destroy => {
                return None;
            }
        };
        let vm = vm.cloned();
        Some(Self::Slow {
            reason,
            text,
            vm,
            first,
        })
    }
}

/// A VM that is up.
pub struct Up {
    pub reference: MoRef,
    pub report: NetworkReport,
    pub host: Option<String>,
    pub module: Option<String>,
    pub started: Option<Started>,
    pub listed: Vec<Listed>,
    /// The keys of the controllers of the listed disks.
    pub keys: Vec<Option<i32>>,
    /// Whether addresses come from pools.
    pub pooled: bool,
    /// The devices that vCenter had left out and a reconfiguration added.
    pub restored: Vec<String>,
}

pub fn status(vm: &VSphereVM, notes: Option<&Notes>, result: Result<(), &Error>, now: Timestamp) -> Report<VSphereVM> {
    let mut after = vm.clone();
    let status = after.status.get_or_insert_default();
    let before = status.clone();
    let mut events = Vec::new();
    if let Some(notes) = notes {
        events.extend(notes.events.clone());
        if notes.clone_failed {
            status.task_ref = None;
        }
        if let Some(started) = &notes.started {
            record_clone(status, vm, started, now);
        }
        if let Some(progress) = &notes.progress {
            report_progress(status, vm, progress, &mut events, now);
        }
        if let Some(up) = &notes.up {
            report_up(status, vm, up, &mut events, now);
        }
    }
    let failure = result.err().or(notes.and_then(|notes| notes.failure.as_ref()));
    // An error of the API server is not the machine's: it is retried and logged.
    if let Some(error) = failure.filter(|error| error.is_reported()) {
        let found = notes.is_some_and(|notes| notes.found);
        report_failure(status, vm, found, error, &mut events, now);
    }
    let mut report = Report::nothing();
    report.events = events;
    // A VM that is up also replaces conditions that another controller left behind.
    let changed = *status != before || notes.is_some_and(|notes| notes.up.is_some());
    if changed {
        conditions::summarize(&mut status.conditions, SUMMARIZED, now);
        status.v1beta2 = names::v1beta2(&status.conditions);
    }
    let paused = notes.and_then(|notes| notes.paused.as_deref());
    let shown = before.v1beta2.as_ref();
    if changed || notes.is_some() && paused.is_some() != names::shows_paused(shown) {
        status.v1beta2 = names::with_paused(status.v1beta2.take(), shown, vm.meta().generation, paused, now);
        report.object = Some(after);
    }
    report
}

/// Whether the status says that the VSphereVM is paused.
pub fn shows_paused(vm: &VSphereVM) -> bool {
    names::shows_paused(vm.status.as_ref().and_then(|status| status.v1beta2.as_ref()))
}

/// Describes the clone and the steps after it, which are reported by themselves only where they take long.
fn cloning(vm: &VSphereVM) -> String {
    let spec = &vm.spec.clone_spec;
    format!(
        "cloning template {:?} with {} data disks; then it is set up, powered on and waits for an address",
        spec.template,
        spec.data_disks.len()
    )
}

/// Records the task of a clone with the units of the data disks, for a process after this one.
fn record_clone(status: &mut VSphereVMStatus, vm: &VSphereVM, started: &Started, now: Timestamp) {
    if status.task_ref.as_deref() == Some(started.task.as_str()) {
        return;
    }
    status.task_ref = Some(started.task.clone());
    started.note(status);
    in_progress(status, names::CLONING, &cloning(vm), now);
}

fn in_progress(status: &mut VSphereVMStatus, reason: &str, message: &str, now: Timestamp) {
    // vCenter has let us in.
    conditions::mark_true(&mut status.conditions, names::VCENTER_AVAILABLE, now);
    let (type_, severity) = (names::VM_PROVISIONED, Severity::Info);
    conditions::mark_false(&mut status.conditions, type_, severity, reason, message, now);
}

fn report_progress(
    status: &mut VSphereVMStatus,
    vm: &VSphereVM,
    progress: &Progress,
    events: &mut Vec<EventNote>,
    now: Timestamp,
) {
    match progress {
        Progress::Slow {
            reason,
            text,
            vm: reference,
            first,
        } => {
            let text = text.map_or_else(|| cloning(vm), str::to_owned);
            in_progress(status, reason, &text, now);
            status.vm_ref = status.vm_ref.take().or(reference.as_ref().map(ToString::to_string));
            events.extend(first.then(|| EventNote::normal(reason, text)));
        }
        Progress::StaticAddress => {
            let text = "a network device has neither DHCP nor ipAddrs: set its ipAddrs in the spec";
            in_progress(status, names::WAITING_FOR_STATIC_IP, text, now);
        }
        Progress::Claims(text) => {
            in_progress(status, names::WAITING_FOR_STATIC_IP, text, now);
            let (type_, reason) = (names::IP_ADDRESS_CLAIMED, names::WAITING_FOR_IP_ADDRESS);
            conditions::mark_false(&mut status.conditions, type_, Severity::Info, reason, text, now);
        }
        Progress::AddressGone { network } => {
            status.network = network.clone();
            let text = "the guest reports no address any more";
            in_progress(status, names::WAITING_FOR_IP, text, now);
        }
        // Its storage may be away for a while, so Capstan makes nothing in its place.
        Progress::Lost => {
            let uuid = vm.spec.bios_uuid.as_deref().unwrap_or("that is not recorded");
            let text = format!("virtual machine with BIOS UUID {uuid} cannot be found in vCenter");
            let (type_, reason) = (names::VM_PROVISIONED, names::NOT_FOUND);
            conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, &text, now);
            events.push(EventNote::warning(names::NOT_FOUND, text));
        }
        Progress::SoftPowerOff { reason, severity, text } => {
            let type_ = names::GUEST_SOFT_POWER_OFF_SUCCEEDED;
            // The time of its last transition is when the guest was asked.
            conditions::remove(&mut status.conditions, type_);
            conditions::mark_false(&mut status.conditions, type_, *severity, reason, text, now);
            in_progress(status, names::DELETING, text, now);
        }
    }
}

fn report_up(status: &mut VSphereVMStatus, vm: &VSphereVM, up: &Up, events: &mut Vec<EventNote>, now: Timestamp) {
    let unknown = status.clone_mode.is_none() || status.data_disks.is_empty();
    if let Some(started) = up.started.as_ref().filter(|_| unknown) {
        started.note(status);
    }
    status.data_disks = desired::found_disks(&status.data_disks, &up.listed, &up.keys);
    status.ready = true;
    status.host = up.host.clone().or(status.host.take());
    status.vm_ref = Some(up.reference.to_string());
    status.task_ref = None;
    status.module_uuid = up.module.clone().or(status.module_uuid.take());
    status.addresses = up.report.addresses.clone();
    status.network = desired::network_status(&up.report);
    (status.failure_reason, status.failure_message) = (None, None);
    if up.pooled {
        conditions::mark_true(&mut status.conditions, names::IP_ADDRESS_CLAIMED, now);
    }
    conditions::mark_true(&mut status.conditions, names::VCENTER_AVAILABLE, now);
    conditions::mark_true(&mut status.conditions, names::VM_PROVISIONED, now);
    if is_ready(vm) {
        return;
    }
    if !up.restored.is_empty() {
        let text = format!("{}; put right by reconfiguration", up.restored.join("; "));
        events.push(EventNote::warning("DevicesDropped", text));
    }
    let spec = &vm.spec.clone_spec;
    let text = format!(
        "cloned from template {:?} as {} with {} data disks, powered on, address {}",
        spec.template,
        up.reference,
        spec.data_disks.len(),
        up.report.addresses.join(", "),
    );
    events.push(EventNote::normal("Provisioned", text));
}

/// Reports a failure, word for word.
fn report_failure(
    status: &mut VSphereVMStatus,
    vm: &VSphereVM,
    found: bool,
    error: &Error,
    events: &mut Vec<EventNote>,
    now: Timestamp,
) {
    let deleting = vm.meta().deletion_timestamp.is_some();
    let connection = error.is_connection();
    let reason = match error {
        _ if connection => names::VCENTER_UNREACHABLE,
        Error::Step { reason, .. } => *reason,
        _ if deleting => names::DELETION_FAILED,
        _ if found || desired::recorded(vm).was_ready => names::TASK_FAILURE,
        _ => names::CLONING_FAILED,
    };
    let severity = match error.class() {
        Class::Terminal => Severity::Error,
        Class::Transient | Class::Throttled(_) => Severity::Warning,
    };
    let text = error.to_string();
    // A VM that is up stays provisioned when a read, a Secret or a rule fails; only a failed step on it says otherwise.
    let was_ready = is_ready(vm) && !deleting;
    let about_vcenter = connection || was_ready && !matches!(error, Error::Step { .. });
    let list = &mut status.conditions;
    if !about_vcenter && error.vsphere().is_some() {
        conditions::mark_true(list, names::VCENTER_AVAILABLE, now);
    }
    let type_ = if about_vcenter {
        names::VCENTER_AVAILABLE
    } else {
        names::VM_PROVISIONED
    };
    conditions::mark_false(list, type_, severity, reason, &text, now);
    events.push(EventNote::warning(reason, text));
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn now() -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    fn vm(ready: bool) -> VSphereVM {
        let mut vm = VSphereVM::new("m", Default::default());
        vm.status.get_or_insert_default().ready = ready;
        vm
    }

    fn refused() -> Error {
        because(
            names::POWERING_ON_FAILED,
            capstan_vsphere::Error::TaskGone {
                task: MoRef::task("task-1"),
            },
        )
    }

    #[rstest]
    #[case::a_step_on_a_running_machine(true, refused(), names::VM_PROVISIONED, names::POWERING_ON_FAILED)]
    #[case::a_rule_and_a_running_machine(true, Error::Invalid("x".into()), names::VCENTER_AVAILABLE, names::TASK_FAILURE)]
    #[case::a_rule(false, Error::Invalid("x".into()), names::VM_PROVISIONED, names::CLONING_FAILED)]
    fn a_running_machine_stays_provisioned_unless_a_step_on_it_fails(
        #[case] ready: bool,
        #[case] error: Error,
        #[case] type_: &str,
        #[case] reason: &str,
    ) {
        let report = status(&vm(ready), None, Err(&error), now());
        let after = report.object.unwrap().status.unwrap();
        let condition = conditions::get(&after.conditions, type_).unwrap();
        assert_eq!(condition.reason.as_deref(), Some(reason));
        assert_eq!(report.events.len(), 1);
    }

    #[test]
    fn a_pause_and_its_end_are_written_once() {
        let paused = Notes {
            paused: Some("why".into()),
            ..Notes::default()
        };
        let (vm, running) = (vm(true), Notes::default());
        assert!(status(&vm, Some(&running), Ok(()), now()).object.is_none());
        let at_rest = status(&vm, Some(&paused), Ok(()), now()).object.unwrap();
        assert!(status(&at_rest, Some(&paused), Ok(()), now()).object.is_none());
        let at_work = status(&at_rest, Some(&running), Ok(()), now()).object.unwrap();
        assert!(status(&at_work, Some(&running), Ok(()), now()).object.is_none());
        assert!(!names::shows_paused(at_work.status.unwrap().v1beta2.as_ref()));
    }

    #[test]
    fn a_clone_is_recorded_once_and_a_failed_one_is_removed() {
        let mut notes = Notes {
            started: Some(Started {
                task: "task-1".into(),
                ..Started::default()
            }),
            ..Notes::default()
        };
        let recorded = status(&vm(false), Some(&notes), Ok(()), now()).object.unwrap();
        assert_eq!(recorded.status.as_ref().unwrap().task_ref.as_deref(), Some("task-1"));
        assert!(status(&recorded, Some(&notes), Ok(()), now()).object.is_none());
        notes = Notes {
            clone_failed: true,
            ..Notes::default()
        };
        let failed = status(&recorded, Some(&notes), Ok(()), now()).object.unwrap();
        assert_eq!(failed.status.unwrap().task_ref, None);
    }
}
