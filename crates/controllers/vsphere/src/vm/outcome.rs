//! Takes in the outcome of pending work. The outcome of a task saves a read of the VM where it says enough.

use capstan_core::vm::{Changes, ObservedVm, PowerState};
use capstan_kube::runtime::EventNote;

use super::state::{CloneEnd, TaskKind, TaskOutcome, VmState};
use super::status::because;
use crate::conditions as names;
use crate::error::Error;
use crate::observed;

impl VmState {
    /// Takes in the outcome of pending work; returns whether work is still pending.
    pub(super) fn is_pending(&mut self) -> Result<bool, Error> {
        match self.take_outcome() {
            None => Ok(self.pending.is_some()),
            Some((kind, outcome)) => self.ended(kind, outcome).map(|()| false),
        }
    }

    fn ended(&mut self, kind: TaskKind, outcome: TaskOutcome) -> Result<(), Error> {
        match (kind, outcome) {
            (TaskKind::Clone, TaskOutcome::Task(result)) => self.clone_ended(result),
            (TaskKind::OtherClones, TaskOutcome::Task(Ok(_))) => {
                (self.alone, self.doubtful) = (true, false);
                Ok(())
            }
            (_, TaskOutcome::Turn(turn)) => {
                self.turn = Some(turn);
                Ok(())
            }
            (TaskKind::Reconfigure(changes), TaskOutcome::Task(Ok(_))) => {
                self.restored.extend(changes.dropped.clone());
                match self.observed.as_mut().filter(|_| !changes.is_read_back()) {
                    Some(observed) => apply_changes(&changes, observed),
                    None => self.stale(),
                }
                self.tried = Some(changes);
                Ok(())
            }
            (TaskKind::Group, TaskOutcome::Task(Ok(_))) => {
                (self.grouped, self.failures) = (true, 0);
                Ok(())
            }
            (TaskKind::RestoreGroup, TaskOutcome::Task(result)) => {
                // The VM runs, with or without its group: the next read tries again.
                self.grouped = true;
                let failed =
                    |error: capstan_vsphere::Error| EventNote::warning(names::VM_GROUP_FAILED, error.to_string());
                self.events.extend(result.err().map(failed));
                Ok(())
            }
            // The group is missing, not the machine.
            (TaskKind::Group, TaskOutcome::Task(Err(error))) => {
                self.stale();
                Err(because(names::VM_GROUP_FAILED, error))
            }
            (TaskKind::PowerOn, TaskOutcome::Task(Ok(_))) => {
                if let Some(observed) = self.observed.as_mut() {
                    observed.power = PowerState::On;
                }
                self.failures = 0;
                Ok(())
            }
            (TaskKind::Address | TaskKind::Shutdown, TaskOutcome::State(Ok(found))) => {
                match self.observed.as_mut() {
                    Some(known) => observed::update(known, &found),
                    None => self.stale(),
                }
                Ok(())
            }
            (kind, TaskOutcome::Task(Err(error)) | TaskOutcome::State(Err(error))) => {
                self.stale();
                if error.is_gone() {
                    self.reference = None;
                    return Ok(());
                }
                Err(because(reason_of(&kind), error))
            }
            (_, TaskOutcome::Task(Ok(_)) | TaskOutcome::State(Ok(_))) => {
                self.stale();
                Ok(())
            }
        }
    }

    fn clone_ended(&mut self, result: capstan_vsphere::Result<Option<capstan_vsphere::MoRef>>) -> Result<(), Error> {
        let end = CloneEnd::of(&result);
        self.task_over = end != CloneEnd::UnderWay;
        match (end, result) {
            (_, Ok(made)) => {
                self.reference = made;
                self.failures = 0;
                Ok(())
            }
            // Whether the VM was made after all is found out by its UUID, once no clone is under way any more.
            (CloneEnd::Unknown, Err(_)) => {
                self.doubtful = true;
                Ok(())
            }
            (CloneEnd::UnderWay, Err(error)) => Err(error.into()),
            (CloneEnd::Failed | CloneEnd::Made(_), Err(error)) => {
                self.started = None;
                self.clone_failed = true;
                if error.fault().is_some_and(|fault| fault.is("DuplicateName")) {
                    self.name_taken = true;
                    return Ok(());
                }
                Err(because(names::CLONING_FAILED, error))
            }
        }
    }

    /// Takes in the outcome of pending work of a VM that is torn down; returns whether work is still pending.
    pub(super) fn teardown_pending(&mut self) -> Result<bool, Error> {
        let in_vain = |kind: &TaskKind| matches!(kind, TaskKind::Address | TaskKind::Group | TaskKind::RestoreGroup);
        if self.pending.as_ref().is_some_and(|pending| in_vain(&pending.kind)) {
            self.pending = None;
        }
        let Some((kind, outcome)) = self.take_outcome() else {
            // A guest that takes its time may have to be powered off: the plan looks at the deadline again.
            let busy = |kind: &TaskKind| *kind != TaskKind::Shutdown;
            return Ok(self.pending.as_ref().is_some_and(|pending| busy(&pending.kind)));
        };
        self.stale();
        match (kind, outcome) {
            (TaskKind::OtherClones, TaskOutcome::Task(Ok(_))) => (self.alone, self.doubtful) = (true, false),
            (TaskKind::Clone, TaskOutcome::Task(result)) => {
                let end = CloneEnd::of(&result);
                self.task_over = end != CloneEnd::UnderWay;
                self.doubtful |= end == CloneEnd::Unknown;
                match (end, result) {
                    (_, Ok(made)) => self.reference = made,
                    (CloneEnd::UnderWay, Err(error)) => return Err(error.into()),
                    (CloneEnd::Failed | CloneEnd::Unknown | CloneEnd::Made(_), Err(_)) => {}
                }
            }
            (TaskKind::Destroy, TaskOutcome::Task(Ok(_))) => self.reference = None,
            (_, TaskOutcome::Task(Err(error)) | TaskOutcome::State(Err(error))) if !error.is_gone() => {
                return Err(because(names::DELETION_FAILED, error));
            }
            (_, TaskOutcome::Task(_) | TaskOutcome::State(_) | TaskOutcome::Turn(_)) => {}
        }
        Ok(false)
    }
}

/// Changes an observation as a reconfiguration changed the VM that touched no device.
fn apply_changes(changes: &Changes, observed: &mut ObservedVm) {
    observed.extra_config.extend(changes.extra_config.clone());
    observed.cpus = changes.cpus.unwrap_or(observed.cpus);
    observed.cores_per_socket = changes.cores_per_socket.unwrap_or(observed.cores_per_socket);
    observed.memory_mib = changes.memory_mib.unwrap_or(observed.memory_mib);
}

fn reason_of(kind: &TaskKind) -> &'static str {
    match kind {
        TaskKind::Clone | TaskKind::OtherClones | TaskKind::Turn => names::CLONING_FAILED,
        TaskKind::PowerOn => names::POWERING_ON_FAILED,
        TaskKind::Group | TaskKind::RestoreGroup => names::VM_GROUP_FAILED,
        TaskKind::PowerOff | TaskKind::Detach | TaskKind::Destroy | TaskKind::Shutdown => names::DELETION_FAILED,
        TaskKind::Upgrade | TaskKind::Reconfigure(_) | TaskKind::Address => names::TASK_FAILURE,
    }
}
