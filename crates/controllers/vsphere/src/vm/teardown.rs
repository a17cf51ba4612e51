//! The teardown of a VM: it is powered off by its mode, foreign disks are detached, it is destroyed, and its Node is deleted.

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_core::drain::Drained;
use capstan_core::vm::{Observation, Teardown, TeardownStep, is_node_of};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::objects::delete_exactly;
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use capstan_kube::workload::Lookup;
use capstan_vsphere::{ConfigSpec, DeviceChange, MoRef, Task, Vcenter};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Resource, ResourceExt};

use super::observe::recorded;
use super::state::{TaskKind, VmState};
use super::status::{Progress, because};
use super::{Controller, Observed, RECHECK, pending};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use crate::owner_cluster::cluster_name;

impl Controller {
    /// Returns `None` for a VSphereVM without our finalizer.
    pub(super) async fn observe_teardown(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Option<Observed>, Error> {
        let vm = &scope.object;
        if !vm.finalizers().iter().any(|finalizer| finalizer == names::VM_FINALIZER) {
            return Ok(None);
        }
        state.give_up_turn();
        if state.teardown_pending()? {
            return Ok(Some(Observed::idle(None)));
        }
        let mut observed = Observed::idle(None);
        match self.session(vm).await {
            Ok(vcenter) => {
                if self.resume_task(scope, state, &vcenter) {
                    return Ok(Some(observed));
                }
                self.locate(scope, state, &vcenter).await?;
                let unsure = state.doubtful || never_cloned(vm, state);
                if state.observed.is_none() && unsure && self.may_be_cloning(scope, state, &vcenter).await? {
                    return Ok(Some(observed));
                }
                observed.vcenter = Some(vcenter);
            }
            // Without its cluster nobody can say which vCenter it would be in; if nothing was ever cloned, nothing is.
            Err(Error::NotReady(_) | Error::Invalid(_)) if never_cloned(vm, state) => {}
            Err(error) => return Err(error),
        }
        let noted = vm.status.as_ref().and_then(|status| status.module_uuid.clone());
        observed.plan = Observation::Teardown(Box::new(Teardown {
            desired: desired::desired(vm, &scope.key.uid),
            recorded: recorded(vm, state),
            vm: state.observed.clone(),
            deleted: vm.meta().deletion_timestamp.as_ref().map(|time| time.0),
            asked: asked(vm),
            guest_refuses: state.guest_refuses,
            module: state.module.clone().or(noted),
        }));
        observed.desired = desired::desired(vm, &scope.key.uid);
        Ok(Some(observed))
    }

    /// Whether a clone may be under way that nobody recorded: it must not outlive its object. A template that is gone has no
    /// clones.
    async fn may_be_cloning(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<bool, Error> {
        match self.others_are_cloning(scope, state, vcenter).await {
            Err(Error::Vsphere(error)) if error.class() == Class::Terminal => Ok(false),
            result => result,
        }
    }

    pub(super) async fn apply_teardown(
        &self,
        step: TeardownStep,
        observed: &mut Observed,
        scope: &mut Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Outcome, Error> {
        let failed = |error| because(names::DELETION_FAILED, error);
        match step {
            TeardownStep::Release => {
                scope.remove_finalizer(names::VM_FINALIZER).await?;
                Ok(Outcome::Done)
            }
            TeardownStep::Unreadable(reason) => Err(Error::NotReady(reason)),
            TeardownStep::ShutDownGuest(vm) => self.shut_down_guest(scope, state, observed, vm).await,
            TeardownStep::AwaitShutdown { vm, until } => {
                let off = pending::power_off(observed.vcenter()?.watch_vm(&vm));
                pending::follow(scope, state, TaskKind::Shutdown, off);
                let left = until.map(|until| until.duration_since(scope.now()).try_into().unwrap_or_default());
                Ok(Outcome::Wait(left))
            }
            TeardownStep::CannotShutDown => {
                let text = "the guest cannot be asked to shut down (VMware Tools do not run) and powerOffMode is soft: \
                            start them, power it off by hand, or set powerOffMode to trySoft or hard";
                let (reason, severity) = (names::SOFT_OFF_FAILED, Severity::Warning);
                observed.notes.progress = Some(Progress::SoftPowerOff { reason, severity, text });
                observed.notes.events.push(EventNote::warning(reason, text));
                state.stale();
                Ok(Outcome::Wait(Some(RECHECK)))
            }
            TeardownStep::PowerOff(vm) => {
                let task = observed.vcenter()?.power_off(&vm).await.map_err(failed)?;
                Ok(pending::follow(scope, state, TaskKind::PowerOff, pending::task(task)))
            }
            TeardownStep::Detach { vm, disks } => {
                let foreign = state.devices.iter().filter(|device| disks.contains(&device.key));
                let devices: Vec<DeviceChange> = foreign.cloned().map(DeviceChange::Remove).collect();
                let text = format!("detaching {} disks that are not the machine's own", devices.len());
                observed.notes.events.push(EventNote::normal("VolumesDetached", text));
                let spec = ConfigSpec {
                    devices,
                    ..ConfigSpec::default()
                };
                let task = observed.vcenter()?.reconfigure(&vm, &spec).await.map_err(failed)?;
                Ok(pending::follow(scope, state, TaskKind::Detach, pending::task(task)))
            }
            TeardownStep::Destroy { vm, drained } => match destroy(observed.vcenter()?, &vm, drained).await {
                Ok(task) => Ok(pending::follow(scope, state, TaskKind::Destroy, pending::task(task))),
                // The answer to an earlier call was lost.
                Err(error) if error.is_gone() => {
                    state.stale();
                    state.reference = None;
                    Ok(Outcome::Observe)
                }
                Err(error) => Err(failed(error)),
            },
        }
    }

    async fn shut_down_guest(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        observed: &mut Observed,
        vm: MoRef,
    ) -> Result<Outcome, Error> {
        let vcenter = observed.vcenter()?.clone();
        match vcenter.shutdown_guest(&vm).await {
            Ok(()) => {}
            Err(error) if error.fault().is_some() && observed.desired.may_be_forced() => {
                let text = format!("{error}: powering off");
                state.events.push(EventNote::warning(names::SOFT_OFF_FAILED, text));
                state.guest_refuses = true;
                return Ok(Outcome::Observe);
            }
            Err(error) => return Err(because(names::DELETION_FAILED, error)),
        }
        observed.notes.progress = Some(Progress::SoftPowerOff {
            reason: names::SOFT_OFF_IN_PROGRESS,
            severity: Severity::Info,
            text: "the guest was asked to shut down",
        });
        pending::follow(
            scope,
            state,
            TaskKind::Shutdown,
            pending::power_off(vcenter.watch_vm(&vm)),
        );
        Ok(Outcome::Wait(Some(observed.desired.soft_timeout)))
    }

    /// Deletes the Node of the machine in the workload cluster. A cluster that does not answer does not hold the machine up:
    /// it may be going itself, and its own controllers delete Nodes too.
    pub(super) async fn delete_node(&self, scope: &Scope<VSphereVM>) {
        let vm = &scope.object;
        let Some(cluster) = cluster_name(vm.as_ref()) else {
            return;
        };
        let cluster = self.workloads.cluster(&scope.key.namespace, &cluster);
        match cluster.by_name(&scope.key.name).await {
            Lookup::Found(_) => {}
            Lookup::Missing => return,
            Lookup::Unreachable(reason) => {
                tracing::warn!(%reason, "the Node is not deleted: its cluster does not answer");
                return;
            }
        }
        let Ok(connection) = cluster.connection().await else {
            return;
        };
        let nodes: Api<Node> = Api::all(connection.client.clone());
        if let Err(error) = delete_live_node(&nodes, &scope.key.name, vm).await {
            tracing::warn!(node = scope.key.name, %error, "the Node is not deleted");
        }
    }
}

/// Destroys a VM. Without the proof nobody can call it.
async fn destroy(vcenter: &Vcenter, vm: &MoRef, drained: Drained) -> capstan_vsphere::Result<Task> {
    tracing::info!(%vm, %drained, "destroying the virtual machine");
    vcenter.destroy(vm).await
}

/// The cache may show the Node of an earlier machine of this name: the API server says whose Node it is now.
async fn delete_live_node(nodes: &Api<Node>, name: &str, vm: &VSphereVM) -> Result<(), capstan_kube::Error> {
    let own = vm.spec.bios_uuid.as_ref();
    let own = own.map(|uuid| format!("{}{uuid}", names::PROVIDER_ID));
    let Some(node) = nodes.get_opt(name).await? else {
        return Ok(());
    };
    let id = node.spec.as_ref().and_then(|spec| spec.provider_id.as_deref());
    if is_node_of(own.as_deref(), id) {
        delete_exactly(nodes, &node).await?;
    }
    Ok(())
}

/// Returns when the guest was asked to shut down.
fn asked(vm: &VSphereVM) -> Option<Timestamp> {
    let conditions = &vm.status.as_ref()?.conditions;
    let condition = conditions::get(conditions, names::GUEST_SOFT_POWER_OFF_SUCCEEDED)?;
    let asked = condition.reason.as_deref() == Some(names::SOFT_OFF_IN_PROGRESS);
    asked.then_some(condition.last_transition_time.0)
}

fn never_cloned(vm: &VSphereVM, state: &VmState) -> bool {
    let status = vm.status.as_ref();
    let noted = status.is_some_and(|status| status.task_ref.is_some() || status.vm_ref.is_some());
    !noted && state.started.is_none() && !desired::recorded(vm).was_ready
}
