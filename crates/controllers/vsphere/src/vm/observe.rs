//! Reads a VSphereVM and its virtual machine.
//!
//! Invariant: observe writes nothing. It never waits for a task of vCenter either: it leaves a waiter behind and ends.

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_core::vm::{self as plan, BringUp, Memberships, Observation, Recorded, ResolvedNames};
use capstan_kube::runtime::Scope;
use capstan_vsphere::{MoRef, Vcenter, VmInfo};
use kube::ResourceExt;

use super::clone::{disk_datastore, none_usable};
use super::state::{Started, TaskKind, TaskOutcome, VmState};
use super::{Controller, Observed, is_ready, marks, pending};
use crate::desired;
use crate::error::Error;
use crate::observed::{self, Resolved};
use crate::owner_cluster::paused;

impl Controller {
    pub(super) async fn observe_vm(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Option<Observed>, Error> {
        let cluster = self.clusters.of(scope.object.as_ref()).ok();
        if let Some(reason) = paused(scope.object.as_ref(), cluster.as_deref()) {
            state.give_up_turn();
            let mut observed = Observed::idle(None);
            observed.notes.paused = Some(reason);
            return Ok(Some(observed));
        }
        let left = state.retry_left(self.version_of_others(&scope.object), scope.instant());
        if let Some(left) = left.filter(|_| !state.has_outcome()) {
            return Ok(Some(Observed::idle(Some(left))));
        }
        state.retry_at = None;
        if scope.is_deleting() {
            self.observe_teardown(scope, state).await
        } else {
            let observed = self.observe_running(scope, state).await?;
            if observed.clone.is_none() {
                state.turn = None;
            }
            Ok(Some(observed))
        }
    }

    async fn observe_running(&self, scope: &Scope<VSphereVM>, state: &mut VmState) -> Result<Observed, Error> {
        let vm = &scope.object;
        let ready = is_ready(vm);
        // A rule that is stricter than it was is no fault of a machine that runs.
        let findings = capstan_core::validate::vsphere::virtual_machine(&vm.name_any(), &vm.spec);
        if !findings.is_ok() && !desired::recorded(vm).was_ready {
            return Err(Error::Invalid(findings.message()));
        }
        let settled = ready && !self.affinity.is_outside(vm);
        let read = state.read_at.filter(|(_, by)| settled && *by == marks(vm));
        // A VM that is ready is read again once in a while: somebody may have powered it off.
        let (clock, resync) = (self.context.clock, self.context.resync);
        if let Some(age) = read.map(|(at, _)| clock.since(at)).filter(|age| *age < resync) {
            return Ok(Observed::idle(Some(resync - age)));
        }
        if state.is_pending()? {
            return Ok(Observed::idle(None));
        }
        if !ready && let Some(waiting) = self.observe_claims(scope, state).await? {
            return Ok(waiting);
        }
        let vcenter = self.session(vm).await?;
        if self.resume_task(scope, state, &vcenter) {
            return Ok(Observed::idle(None));
        }
        self.locate(scope, state, &vcenter).await?;
        let mut desired = desired::desired(vm, &scope.key.uid);
        crate::ipam::put(&mut desired.networks, &state.given);
        let was_ready = recorded(vm, state).was_ready;
        let mut observed = Observed::idle(None);
        if state.observed.is_none() && !was_ready && !plan::waits_for_static_address(&desired.networks) {
            if state.name_taken {
                self.find_by_name(scope, state, &vcenter).await?;
                self.locate(scope, state, &vcenter).await?;
            }
            if state.observed.is_none() && self.others_are_cloning(scope, state, &vcenter).await? {
                return Ok(observed);
            }
            if state.observed.is_none() {
                self.load_user_data(scope, state).await?;
                let prepared = self.prepare_clone(vm, state, &vcenter, &desired).await?;
                let request = prepared.request(&vcenter, scope);
                let has_turn = state.turn.as_ref().is_some_and(|turn| *turn.request() == request);
                if self.turns.are_limited() && !has_turn {
                    state.turn = None;
                    let turn = self.turns.clone().wait(request);
                    let turn = async { TaskOutcome::Turn(turn.await) };
                    pending::follow(scope, state, TaskKind::Turn, turn);
                    return Ok(observed);
                }
                observed.clone = Some(prepared);
            }
        }
        self.recall_disks(scope, state, &vcenter).await?;
        if state.observed.is_some() && !was_ready {
            self.load_user_data(scope, state).await?;
            observed.resolved = self.resolve(&desired, &vcenter).await?;
        }
        self.recognize_disks(vm, state, &desired);
        let names = observed.resolved.names();
        self.read_policies(state, &names, &vcenter).await?;
        observed.host = self.host(state, &vcenter).await;
        observed.plan = Observation::BringUp(Box::new(BringUp {
            desired: desired.clone(),
            names,
            user: state.user.clone(),
            recorded: recorded(vm, state),
            vm: state.observed.clone(),
            tried: state.tried.clone(),
            memberships: Memberships {
                tags: if state.tagged { Vec::new() } else { desired.tags.clone() },
                group: !state.grouped && self.affinity.group(vm).is_some(),
                module: self.module_to_join(vm, state),
            },
        }));
        observed.desired = desired;
        observed.vcenter = Some(vcenter);
        Ok(observed)
    }

    /// Follows a clone that has no waiter: an earlier process started it, or its waiter ended before it did.
    pub(super) fn resume_task(&self, scope: &Scope<VSphereVM>, state: &mut VmState, vcenter: &Vcenter) -> bool {
        let status = scope.object.status.as_ref();
        let noted = status.and_then(|status| status.task_ref.clone());
        let own = state.started.as_ref().map(|started| started.task.clone());
        let named = noted.or(own).filter(|task| !task.is_empty());
        let Some(task) = named.filter(|_| !state.task_over && state.reference.is_none()) else {
            return false;
        };
        let task = vcenter.task(MoRef::task(&task));
        pending::follow(scope, state, TaskKind::Clone, pending::task(task));
        true
    }

    /// Finds the virtual machine and reads it, unless the state has it.
    pub(super) async fn locate(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<(), Error> {
        if state.observed.is_some() {
            return Ok(());
        }
        let vm = &scope.object;
        let noted = vm.status.as_ref().and_then(|status| status.vm_ref.as_deref());
        if let Some(reference) = state.reference.take().or(noted.map(MoRef::vm)) {
            match vcenter.vm(&reference).await {
                // A VM that cannot be read shows no ids; that it is another's is not known.
                Ok(info) if self.is_owner(vm, &info) || observed::unreadable(&info).is_some() => {
                    state.found(info);
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut found = vcenter.find_vm_by_instance_uuid(None, &scope.key.uid).await?;
        let bios = vm.spec.bios_uuid.as_deref();
        if let Some(bios) = bios.filter(|uuid| !uuid.is_empty() && found.is_none()) {
            found = vcenter.find_vm_by_bios_uuid(None, bios).await?;
        }
        if let Some(reference) = found {
            let info = vcenter.vm(&reference).await?;
            if self.is_owner(vm, &info) || observed::unreadable(&info).is_some() {
                state.found(info);
            }
        }
        Ok(())
    }

    fn is_owner(&self, vm: &VSphereVM, info: &VmInfo) -> bool {
        let found = plan::FoundVm {
            name: &info.state.name,
            instance_uuid: &info.instance_uuid,
            bios_uuid: &info.bios_uuid,
            extra_config: &info.extra_config,
        };
        plan::is_owner(vm, &found, |claims| !self.vms.select(None, claims).is_empty())
    }

    /// Returns the vCenter objects that the networks, datastores and policies of a spec name.
    pub(super) async fn resolve(&self, desired: &plan::DesiredVm, vcenter: &Vcenter) -> Result<Resolved, Error> {
        let datacenter = vcenter.datacenter(desired.datacenter.as_deref()).await?;
        let mut resolved = Resolved::default();
        if let Some(name) = &desired.storage_policy {
            resolved.policy = Some(vcenter.storage_policy(name).await?);
        }
        for device in &desired.networks {
            resolved
                .networks
                .push(vcenter.network(&datacenter, &device.network).await?);
        }
        for (index, disk) in desired.disks.iter().enumerate() {
            let named = |error: capstan_vsphere::Error| match error {
                error @ (capstan_vsphere::Error::NotFound { .. } | capstan_vsphere::Error::Ambiguous { .. }) => {
                    Error::Invalid(format!("dataDisks[{index}] {:?}: {error}", disk.name))
                }
                error => error.into(),
            };
            let datastore = match &disk.datastore {
                Some(name) => {
                    let found = disk_datastore(vcenter, &datacenter, &desired.instance_uuid, name).await;
                    let none = || Error::Invalid(format!("dataDisks[{index}] {:?}: {}", disk.name, none_usable(name)));
                    Some(found.map_err(named)?.ok_or_else(none)?)
                }
                None => None,
            };
            let policy = match disk.storage_policy.as_ref().or(desired.storage_policy.as_ref()) {
                Some(name) => Some(vcenter.storage_policy(name).await.map_err(named)?),
                None => None,
            };
            resolved.disks.push(observed::ResolvedDisk { datastore, policy });
        }
        Ok(resolved)
    }

    /// Reads the storage policies of a VM that is to have some, unless they are known.
    async fn read_policies(&self, state: &mut VmState, names: &ResolvedNames, vcenter: &Vcenter) -> Result<(), Error> {
        let Some(observed) = state.observed.as_mut() else {
            return Ok(());
        };
        if names.has_policies() && observed.policies.is_none() && observed.unreadable.is_none() {
            let disks = observed.hardware.devices.iter().filter(|device| device.disk.is_some());
            let disks: Vec<i32> = disks.map(|device| device.key).collect();
            observed.policies = Some(vcenter.policies_of(&observed.reference, &disks).await?);
        }
        Ok(())
    }

    /// Returns the name of the host of a VM that is up.
    async fn host(&self, state: &VmState, vcenter: &Vcenter) -> Option<String> {
        let observed = state.observed.as_ref()?;
        let host = observed.host.as_deref()?.parse::<MoRef>().ok()?;
        if plan::report(observed).addresses.is_empty() {
            return None;
        }
        vcenter.name_of(&host).await.ok()
    }

    /// Finds the units that a process gave out that did not live to record them: the same template and the same spec give
    /// the same units.
    async fn recall_disks(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<(), Error> {
        let vm = &scope.object;
        let recorded = recorded(vm, state);
        let mode = vm.status.as_ref().is_some_and(|status| status.clone_mode.is_some()) || state.started.is_some();
        let known = mode && recorded.placements.len() == vm.spec.clone_spec.data_disks.len();
        if known || is_ready(vm) || state.observed.is_none() {
            return Ok(());
        }
        match self.allocate_again(scope, state, vcenter).await {
            // A VM that was up once is up without its template, too.
            Err(error) if recorded.was_ready && error.class() == Class::Terminal => Ok(()),
            result => result,
        }
    }

    /// Finds the data disks of a VM that another controller cloned, which recorded no units.
    fn recognize_disks(&self, vm: &VSphereVM, state: &mut VmState, desired: &plan::DesiredVm) {
        let recorded = recorded(vm, state);
        let Some(observed) = state.observed.as_ref().filter(|_| recorded.was_ready) else {
            return;
        };
        if recorded.placements.is_empty()
            && let Some(found) = plan::recognize_disks(observed, &desired.disks)
        {
            state.started = Some(Started {
                task: String::new(),
                linked: recorded.linked,
                snapshot: vm.status.as_ref().and_then(|status| status.snapshot.clone()),
                disks: desired::planned_disks(&desired.disks, &found),
            });
        }
    }
}

/// Returns the part of the status that the plan needs. A clone that is not recorded yet counts as recorded.
pub(super) fn recorded(vm: &VSphereVM, state: &VmState) -> Recorded {
    let mut recorded = desired::recorded(vm);
    if recorded.placements.is_empty()
        && let Some(started) = &state.started
    {
        recorded.placements = desired::placements(&started.disks);
        recorded.linked = started.linked;
    }
    recorded
}
