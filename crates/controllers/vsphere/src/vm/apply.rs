//! Carries out one step of a VM's plan.

use capstan_api::vsphere::VSphereVM;
use capstan_core::disks::vsphere::list;
use capstan_core::vm::{Observation, ObservedVm, Report, Step};
use capstan_kube::patch::Lock;
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use capstan_vsphere::MoRef;

use super::state::{TaskKind, VmState};
use super::status::{Progress, Up, because};
use super::{Controller, Observed, RECHECK, is_ready, marks, pending};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use crate::observed;

impl Controller {
    pub(super) async fn apply_step(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Outcome, Error> {
        match step {
            // Capstan creates VSphereVMs with the finalizer; a predecessor may not have.
            Step::AddFinalizer => {
                scope.add_finalizer(names::VM_FINALIZER).await?;
                Ok(Outcome::Done)
            }
            Step::CreateClaim(name) => self.create_claim(scope, observed, &name).await,
            Step::AwaitStaticAddress => {
                observed.notes.progress = Some(Progress::StaticAddress);
                Ok(Outcome::Wait(None))
            }
            Step::Clone => self.start_clone(scope, observed, state).await,
            Step::Lost => {
                observed.notes.progress = Some(Progress::Lost);
                Ok(Outcome::Wait(Some(RECHECK)))
            }
            Step::Unreadable(reason) => Err(Error::NotReady(reason)),
            Step::Wrong(text) => {
                state.tried = None;
                Err(Error::Invalid(text))
            }
            Step::Upgrade { vm, to } => {
                let task = observed.vcenter()?.upgrade_hardware(&vm, &to).await?;
                Ok(pending::follow(scope, state, TaskKind::Upgrade, pending::task(task)))
            }
            Step::Reconfigure { vm, changes } => {
                let spec = observed::reconfiguration(&observed.desired, &observed.resolved, &changes, &state.devices);
                let task = observed.vcenter()?.reconfigure(&vm, &spec).await?;
                let kind = TaskKind::Reconfigure(changes);
                Ok(pending::follow(scope, state, kind, pending::task(task)))
            }
            Step::KeepSettings(settings) => {
                let text = format!(
                    "{}, and a reconfiguration did not help: the machine continues without the change",
                    settings.join("; ")
                );
                observed.notes.events.push(EventNote::warning("SettingsDropped", text));
                Ok(Outcome::Done)
            }
            Step::AttachTags { vm, tags } => {
                let attached = observed.vcenter()?.attach_tags(&vm, &tags).await;
                attached.map_err(|error| because(names::TAGS_FAILED, error))?;
                state.tagged = true;
                Ok(Outcome::Done)
            }
            Step::JoinGroup(vm) => self.join_group(scope, state, observed, &vm, TaskKind::Group).await,
            Step::RestoreGroup(vm) => {
                let joined = self.join_group(scope, state, observed, &vm, TaskKind::RestoreGroup);
                joined.await
            }
            Step::JoinModule { vm, module } => self.join_module(state, observed, &vm, module).await,
            Step::PowerOn(vm) => {
                let task = observed.vcenter()?.power_on(&vm).await;
                let task = task.map_err(|error| because(names::POWERING_ON_FAILED, error))?;
                Ok(pending::follow(scope, state, TaskKind::PowerOn, pending::task(task)))
            }
            Step::AwaitAddresses { vm, report } => {
                let nics = state.observed.as_ref().map(|known| known.nics.clone());
                let watch = observed.vcenter()?.watch_vm(&vm);
                let address = pending::address(watch, vm, nics.unwrap_or_default());
                let network = desired::network_status(&report);
                let gone = Progress::AddressGone { network };
                observed.notes.progress = is_ready(&scope.object).then_some(gone);
                Ok(pending::follow(scope, state, TaskKind::Address, address))
            }
            Step::RecordBiosUuid(uuid) => {
                let mut after = VSphereVM::clone(&scope.object);
                after.spec.bios_uuid = Some(uuid);
                scope.write_object(&after, Lock::Open).await?;
                Ok(Outcome::Done)
            }
            Step::Up { vm, report } => Ok(self.up(scope, state, observed, vm, report)),
            Step::LeaveModule { vm, module } => {
                // vCenter drops members that are destroyed, so a failure does no harm.
                if let Err(error) = observed.vcenter()?.remove_from_cluster_module(&module, &vm).await {
                    tracing::info!(%module, vm = %vm, %error, "the VM stays in its cluster module until it is destroyed");
                }
                Ok(Outcome::Done)
            }
            Step::Teardown(step) => self.apply_teardown(step, observed, scope, state).await,
            Step::DeleteNode => {
                self.delete_node(scope).await;
                Ok(Outcome::Done)
            }
            Step::ReleaseAddresses => {
                self.release_addresses(scope).await?;
                Ok(Outcome::Done)
            }
        }
    }

    /// Notes everything that the status reports of a VM that is up, and drops the state that was needed until then.
    fn up(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        observed: &mut Observed,
        reference: MoRef,
        report: Report,
    ) -> Outcome {
        let (listed, keys) = match &observed.plan {
            Observation::BringUp(up) => {
                let disks = up.vm.as_ref().map(|vm| found_disks(vm, up)).unwrap_or_default();
                disks.into_iter().unzip()
            }
            Observation::Idle(_) | Observation::Unaddressed { .. } | Observation::Teardown(_) => Default::default(),
        };
        let pooled = observed.desired.networks.iter().any(|device| device.pooled);
        observed.notes.up = Some(Up {
            reference: reference.clone(),
            report,
            host: observed.host.clone(),
            module: state.module.clone(),
            started: state.started.take(),
            listed,
            keys,
            pooled,
            restored: std::mem::take(&mut state.restored),
        });
        *state = VmState {
            reference: Some(reference),
            module: state.module.take(),
            task_over: true,
            tagged: true,
            read_at: Some((scope.instant(), marks(&scope.object))),
            ..VmState::default()
        };
        Outcome::Wait(Some(self.context.resync))
    }
}

/// Returns the data disks of a VM with the keys of their controllers.
fn found_disks(
    vm: &ObservedVm,
    up: &capstan_core::vm::BringUp,
) -> Vec<(capstan_core::disks::vsphere::Listed, Option<i32>)> {
    let listed = list(&vm.hardware, &up.desired.disks, &up.recorded.placements);
    let with_key = listed.into_iter().map(|disk| {
        let device = vm.hardware.disk_at(disk.kind, disk.bus, disk.unit);
        let key = device.map(|device| device.controller_key);
        (disk, key)
    });
    with_key.collect()
}
