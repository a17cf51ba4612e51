//! The teardown of a VM: it is powered off by its mode, foreign disks are detached, it is destroyed, and its Node is removed.

use std::sync::Arc;

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::workload::Lookup;
use capstan_kube::{Next, patch};
use capstan_vsphere::{ConfigSpec, DeviceChange, Vcenter};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt};

use super::state::{CloneEnd, PendingTask, TaskKind, TaskOutcome, VmState};
use super::{RECHECK, Vms, pending, status};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use crate::owner_cluster::cluster_name;
use capstan_core::vm::PowerOff;
use capstan_core::vm::{self as plan, TeardownStep};

impl Vms {
    /// `None`: it is gone.
    pub(super) async fn end(self: &Arc<Self>, vm: &Arc<VSphereVM>, state: &mut VmState) -> Result<Option<Next>, Error> {
        if !vm.finalizers().iter().any(|finalizer| finalizer == names::VM_FINALIZER) {
            return Ok(None);
        }
        let in_vain = |job: &PendingTask| matches!(job.kind, TaskKind::Address | TaskKind::Group);
        if state.pending.as_ref().is_some_and(in_vain) {
            state.pending = None;
        }
        if self.is_ending(vm, state).await? {
            return Ok(Some(Next::Wait));
        }
        let vcenter = match self.session(vm).await {
            Ok(vcenter) => vcenter,
            // Without its cluster nobody can say which vCenter it would be in; if nothing was ever cloned, nothing is.
            Err(Error::NotReady(_) | Error::Invalid(_)) if never_cloned(vm, state) => return self.gone(vm).await,
            Err(error) => return Err(error),
        };
        if self.resume_task(vm, state, &vcenter) {
            return Ok(Some(Next::Wait));
        }
        self.locate(vm, state, &vcenter).await?;
        let desired = desired::desired(vm);
        let (recorded, now) = (self.recorded(vm, state), self.context.clock.now());
        let asked = vm.status.as_ref().and_then(|status| {
            let in_progress = conditions::get(&status.conditions, names::GUEST_SOFT_POWER_OFF_SUCCEEDED)?;
            (in_progress.reason.as_deref() == Some(names::SOFT_OFF_IN_PROGRESS))
                .then_some(in_progress.last_transition_time.0)
        });
        let unsure = state.doubtful || never_cloned(vm, state);
        if state.observed.is_none() && unsure && self.may_be_cloning(vm, state, &vcenter).await? {
            return Ok(Some(Next::Wait));
        }
        let observed = state.observed.as_ref();
        let step = plan::teardown(observed, &recorded, desired.power_off, desired.soft_timeout, asked, now);
        self.apply_teardown(vm, state, &vcenter, step, now).await
    }

    /// A clone that nobody wrote down may still be under way: it must not outlive its object. A template that is gone has
    /// no clones.
    async fn may_be_cloning(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<bool, Error> {
        match self.others_are_cloning(vm, state, vcenter).await {
            Err(Error::Vsphere(error)) if error.class() == Class::Terminal => Ok(false),
            result => result,
        }
    }

    async fn apply_teardown(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        step: TeardownStep,
        now: Timestamp,
    ) -> Result<Option<Next>, Error> {
        let failed = |error| status::because(names::DELETION_FAILED, error);
        let next = match step {
            TeardownStep::Release => return self.gone(vm).await,
            TeardownStep::Unreadable(reason) => {
                state.stale();
                return Err(Error::NotReady(reason));
            }
            TeardownStep::ShutDownGuest(reference) => {
                if let Err(error) = vcenter.shutdown_guest(&reference).await {
                    // Whoever may be forced is not kept by a guest that cannot be asked.
                    let may_be_forced = desired::desired(vm).power_off == PowerOff::TrySoft && error.fault().is_some();
                    if !may_be_forced {
                        return Err(failed(error));
                    }
                    let text = format!("{error}: powering off");
                    self.recorder.warning(vm.as_ref(), names::SOFT_OFF_FAILED, text).await;
                    let task = vcenter.power_off(&reference).await.map_err(failed)?;
                    return Ok(Some(self.follow(vm, state, TaskKind::PowerOff, pending::task(task))));
                }
                self.soft_power_off(
                    vm,
                    state,
                    names::SOFT_OFF_IN_PROGRESS,
                    Severity::Info,
                    "the guest was asked to shut down",
                )
                .await?;
                self.follow(
                    vm,
                    state,
                    TaskKind::Shutdown,
                    pending::power_off(vcenter.watch_vm(&reference)),
                );
                Next::After(desired::desired(vm).soft_timeout)
            }
            TeardownStep::AwaitShutdown { vm: reference, until } => {
                self.follow(
                    vm,
                    state,
                    TaskKind::Shutdown,
                    pending::power_off(vcenter.watch_vm(&reference)),
                );
                let left = until.map(|until| until.duration_since(now).try_into().unwrap_or_default());
                left.map_or(Next::Wait, Next::After)
            }
            TeardownStep::CannotShutDown => {
                let text = "the guest cannot be asked to shut down (VMware Tools do not run) and powerOffMode is soft: \
                            start them, power it off by hand, or set powerOffMode to trySoft or hard";
                self.soft_power_off(vm, state, names::SOFT_OFF_FAILED, Severity::Warning, text)
                    .await?;
                self.recorder.warning(vm.as_ref(), names::SOFT_OFF_FAILED, text).await;
                state.stale();
                Next::After(RECHECK)
            }
            TeardownStep::PowerOff(reference) => {
                let task = vcenter.power_off(&reference).await.map_err(failed)?;
                self.follow(vm, state, TaskKind::PowerOff, pending::task(task))
            }
            TeardownStep::Detach { vm: reference, disks } => {
                let ours = state
                    .devices
                    .iter()
                    .filter(|device| disks.contains(&device.key))
                    .cloned();
                let devices: Vec<DeviceChange> = ours.map(DeviceChange::Remove).collect();
                let text = format!("detaching {} disks that are not the machine's own", devices.len());
                self.recorder.normal(vm.as_ref(), "VolumesDetached", text).await;
                let spec = ConfigSpec {
                    devices,
                    ..ConfigSpec::default()
                };
                let task = vcenter.reconfigure(&reference, &spec).await.map_err(failed)?;
                self.follow(vm, state, TaskKind::Detach, pending::task(task))
            }
            TeardownStep::Destroy(reference) => {
                self.leave_module(vm, state, vcenter, &reference).await;
                let task = vcenter.destroy(&reference).await.map_err(failed)?;
                self.follow(vm, state, TaskKind::Destroy, pending::task(task))
            }
        };
        Ok(Some(next))
    }

    /// Handles the outcome of pending work; returns whether work is still pending.
    async fn is_ending(&self, vm: &VSphereVM, state: &mut VmState) -> Result<bool, Error> {
        let uid = vm.uid().unwrap_or_default();
        let outcome = match self.states.outcome(&uid) {
            Some(TaskOutcome::Slow) | None => {
                // A guest that takes its time may have to be forced: the deadline is looked at again.
                let shutdown = state
                    .pending
                    .as_ref()
                    .is_some_and(|pending| pending.kind == TaskKind::Shutdown);
                return Ok(state.pending.is_some() && !shutdown);
            }
            Some(outcome) => outcome,
        };
        let Some(kind) = state.pending.take().map(|pending| pending.kind.clone()) else {
            return Ok(false);
        };
        state.stale();
        match (kind, outcome) {
            (TaskKind::OtherClones, TaskOutcome::Task(Ok(_))) => {
                (state.alone, state.doubtful) = (true, false);
                Ok(false)
            }
            (TaskKind::Clone, TaskOutcome::Task(result)) => {
                let end = CloneEnd::of(&result);
                state.task_over = end != CloneEnd::UnderWay;
                state.doubtful |= end == CloneEnd::Unknown;
                match (end, result) {
                    (_, Ok(made)) => state.reference = made,
                    (CloneEnd::UnderWay, Err(error)) => return Err(error.into()),
                    _ => {}
                }
                Ok(false)
            }
            (TaskKind::Destroy, TaskOutcome::Task(Ok(_))) => {
                state.reference = None;
                Ok(false)
            }
            (_, TaskOutcome::Task(Err(error)) | TaskOutcome::State(Err(error))) if !error.is_gone() => {
                Err(status::because(names::DELETION_FAILED, error))
            }
            _ => Ok(false),
        }
    }

    async fn soft_power_off(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        reason: &str,
        severity: Severity,
        text: &str,
    ) -> Result<(), Error> {
        self.write(vm, state, |status, now| {
            let type_ = names::GUEST_SOFT_POWER_OFF_SUCCEEDED;
            conditions::remove(&mut status.conditions, type_);
            conditions::mark_false(&mut status.conditions, type_, severity, reason, text, now);
            status::in_progress(status, names::DELETING, text, now);
        })
        .await
    }

    /// Nothing is left in vCenter: the Node goes, then the finalizer.
    async fn gone(&self, vm: &Arc<VSphereVM>) -> Result<Option<Next>, Error> {
        self.remove_node(vm).await;
        self.release_addresses(vm).await?;
        patch::remove_finalizer(&self.api(vm), vm.as_ref(), names::VM_FINALIZER).await?;
        Ok(None)
    }

    /// Removes the Node of the machine in the workload cluster. A cluster that does not answer does not hold the machine
    /// up: it may be going itself, and its own controllers remove Nodes too.
    async fn remove_node(&self, vm: &VSphereVM) {
        let Some(cluster) = cluster_name(vm) else { return };
        if desired::recorded(vm).was_ready {
            let cluster = self.workloads.cluster(&vm.namespace().unwrap_or_default(), &cluster);
            let node = match cluster.by_name(&vm.name_any()).await {
                Lookup::Found(node) => node,
                Lookup::Missing => return,
                Lookup::Unreachable(reason) => {
                    tracing::warn!(vm = %vm.name_any(), %reason, "the machine's Node is not removed");
                    return;
                }
            };
            let ours = vm
                .spec
                .bios_uuid
                .as_ref()
                .map(|uuid| format!("{}{uuid}", names::PROVIDER_ID));
            let theirs = node.spec.as_ref().and_then(|spec| spec.provider_id.clone());
            if theirs.is_some() && ours.is_some() && theirs != ours {
                return;
            }
            let Ok(connection) = cluster.connection().await else {
                return;
            };
            let nodes: Api<Node> = Api::all(connection.client.clone());
            if let Err(error) = nodes.delete(&vm.name_any(), &Default::default()).await {
                tracing::warn!(vm = %vm.name_any(), %error, "node not removed");
            }
        }
    }
}

fn never_cloned(vm: &VSphereVM, state: &VmState) -> bool {
    let noted = vm
        .status
        .as_ref()
        .is_some_and(|status| status.task_ref.is_some() || status.vm_ref.is_some());
    !noted && state.started.is_none() && !desired::recorded(vm).was_ready
}
