//! VSphereVM: one object, one virtual machine.
//!
//! Invariant: the VM of an object has the object's UID as its instance UUID, or the BIOS UUID that the object kept through a
//! move to another management cluster. It is searched by both before anything is cloned.

mod clone;
mod ip_claims;
mod pending;
mod placement;
mod state;
mod status;
mod teardown;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use capstan_core::backoff::exponential;
use capstan_kube::expectations::Version;
use capstan_kube::workload::Workloads;
use capstan_kube::{Cache, Context, Next, Recorder, Trigger, patch};
use capstan_vsphere::{MoRef, Vcenter, VmInfo};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};

use crate::affinity::Affinity;
use crate::conditions as names;
use crate::credentials::{Credentials, check_machine_server, server_of};
use crate::desired;
use crate::error::Error;
use crate::ipam::Ipam;
use crate::observed::{self, Resolved};
use crate::owner_cluster::{Clusters, cluster_name};
use capstan_core::vm::{self as plan, Changes, ResolvedNames, Step};
use capstan_core::vm::{DesiredVm, ObservedVm, Recorded};

use state::{TaskKind, TaskOutcome, VmState, VmStates};

/// A failure that a user must correct, perhaps outside Kubernetes, is retried after this long at first, and this often at last.
const FIRST_RECHECK: Duration = Duration::from_secs(5);
const RECHECK: Duration = Duration::from_secs(60);
/// A failure that may go away by itself is retried after this long at first, then after twice as long, up to [`RECHECK`].
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The keys of bootstrap data and metadata, which every VM of ours is started with.
const BOOTSTRAP_KEYS: [&str; 3] = [
    "guestinfo.metadata",
    "guestinfo.userdata",
    "guestinfo.ignition.config.data",
];
/// The status reports a step that takes longer than this while it lasts, and a shorter one when it is over.
const SLOW: Duration = Duration::from_secs(15);

/// The controller of VSphereVMs.
pub struct Vms {
    context: Context,
    recorder: Recorder,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    workloads: Workloads,
    affinity: Affinity,
    states: VmStates,
    ipam: Ipam,
    trigger: OnceLock<Trigger<VSphereVM>>,
    started: Timestamp,
}

impl Vms {
    pub fn new(
        context: &Context,
        clusters: Clusters,
        credentials: Arc<Credentials>,
        workloads: Workloads,
        affinity: Affinity,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            recorder: context.recorder("vspherevm-controller"),
            clusters,
            credentials,
            workloads,
            affinity,
            states: VmStates::default(),
            ipam: Ipam::default(),
            trigger: OnceLock::new(),
            started: context.clock.now(),
        })
    }

    /// Runs until the context's shutdown.
    pub async fn run(self: Arc<Self>, cache: Cache<VSphereVM>, concurrency: u16) {
        let (by_infrastructure, by_cluster, by_secret) = (cache.clone(), cache.clone(), cache.clone());
        let clusters = self.clusters.clone();
        let affinity = self.affinity.clone();
        let (with_secrets, credentials) = (self.clusters.clone(), self.credentials.clone());
        let secrets = self.credentials.changes().flat_map(move |secret| {
            let needs = |vm: &VSphereVM| {
                let cluster = with_secrets
                    .of(vm)
                    .and_then(|cluster| with_secrets.infrastructure_of(&cluster));
                cluster.is_ok_and(|cluster| credentials.secret_of(&cluster).as_ref() == Some(&secret))
            };
            let found = by_secret.select(None, |vm| is_busy(vm) && needs(vm));
            let found: Vec<_> = found.iter().map(|vm| ObjectRef::from_obj(vm.as_ref())).collect();
            futures::stream::iter(found)
        });
        let reconciler = capstan_kube::Reconciler::new("vspherevm", &self.context, cache)
            .concurrency(concurrency)
            .watches(&self.clusters.infrastructure, move |changed| {
                let of_it = |vm: &VSphereVM| {
                    let cluster = clusters.of(vm).and_then(|cluster| clusters.infrastructure_of(&cluster));
                    cluster.is_ok_and(|cluster| cluster.name_any() == changed.name_any())
                };
                let found = by_infrastructure.select(changed.namespace().as_deref(), |vm| {
                    of_it(vm) && (is_busy(vm) || affinity.is_outside(vm))
                });
                found.iter().map(|vm| ObjectRef::from_obj(vm.as_ref())).collect()
            })
            .watches(&self.clusters.clusters, move |changed| {
                let name = changed.name_any();
                let of_it = |vm: &VSphereVM| is_busy(vm) && cluster_name(vm).as_ref() == Some(&name);
                let found = by_cluster.select(changed.namespace().as_deref(), of_it);
                found.iter().map(|vm| ObjectRef::from_obj(vm.as_ref())).collect()
            })
            .on(secrets);
        let _ = self.trigger.set(reconciler.trigger());
        reconciler.run(move |vm| self.clone().run_once(vm)).await;
    }

    async fn run_once(self: Arc<Self>, vm: Arc<VSphereVM>) -> Result<Next, Error> {
        let uid = vm.uid().unwrap_or_default();
        let mut state = self.states.take(&uid);
        let result = self.reconcile(&vm, &mut state).await;
        if matches!(result, Ok(None)) {
            self.states.forget(&uid);
            return Ok(Next::Wait);
        }
        self.states.put(&uid, state);
        result.map(|next| next.unwrap_or(Next::Wait))
    }

    /// Returns `None` when the state of the VM is not needed any more.
    async fn reconcile(self: &Arc<Self>, vm: &Arc<VSphereVM>, state: &mut VmState) -> Result<Option<Next>, Error> {
        let lagging = |written: &Version| {
            vm.resource_version()
                .is_some_and(|version| !Version::new(version).shows(written))
        };
        if state.written.as_ref().is_some_and(lagging) || self.clusters.is_paused(vm.as_ref()) {
            return Ok(Some(Next::Wait));
        }
        let left = state.resting(self.version_of_others(vm), self.context.clock.instant());
        if let Some(left) = left.filter(|_| !self.states.has_outcome(&vm.uid().unwrap_or_default())) {
            return Ok(Some(Next::After(left)));
        }
        state.rest = None;
        let deleting = vm.meta().deletion_timestamp.is_some();
        let result = if deleting {
            self.end(vm, state).await
        } else {
            self.bring_up(vm, state).await.map(Some)
        };
        match result {
            Err(error) if error.is_reported() => self.failed(vm, state, error).await.map(Some),
            result => result,
        }
    }

    async fn bring_up(self: &Arc<Self>, vm: &Arc<VSphereVM>, state: &mut VmState) -> Result<Next, Error> {
        let ready = vm.status.as_ref().is_some_and(|status| status.ready);
        // A rule that is stricter than it was is no fault of a machine that runs.
        let findings = capstan_core::validate::vsphere::virtual_machine(&vm.name_any(), &vm.spec);
        if !findings.is_ok() && !desired::recorded(vm).was_ready {
            return Err(Error::Invalid(findings.message()));
        }
        let settled = ready && !self.affinity.is_outside(vm);
        let looked = state.looked.filter(|(_, by)| settled && *by == marks(vm));
        // A VM that is ready is read again once in a while: somebody may have powered it off.
        let (clock, resync) = (self.context.clock, self.context.resync);
        if let Some(ago) = looked.map(|(at, _)| clock.since(at)).filter(|ago| *ago < resync) {
            return Ok(Next::After(resync - ago));
        }
        // Capstan creates VSphereVMs with the finalizer; a predecessor may not have.
        patch::add_finalizer(&self.api(vm), vm.as_ref(), names::VM_FINALIZER).await?;
        if state.started.is_some() {
            self.record_clone(vm, state).await?;
        }
        if self.is_waiting(vm, state).await? {
            return Ok(Next::Wait);
        }
        if !ready && let Some(next) = self.claim_addresses(vm, state).await? {
            return Ok(next);
        }
        let vcenter = self.session(vm).await?;
        if self.resume_task(vm, state, &vcenter) {
            return Ok(Next::Wait);
        }
        self.locate(vm, state, &vcenter).await?;
        self.recall_disks(vm, state, &vcenter).await?;
        let recorded = self.recorded(vm, state);
        let desired = self.desired(vm, state);
        let resolved = if recorded.was_ready || state.observed.is_none() {
            Resolved::default()
        } else {
            self.load_user_data(vm, state).await?;
            self.resolve(&desired, &vcenter).await?
        };
        let names = resolved.names();
        self.read_policies(state, &names, &vcenter).await?;
        let step = plan::plan(
            &desired,
            &names,
            state.user.as_ref(),
            &recorded,
            state.observed.as_ref(),
        );
        self.apply(vm, state, &vcenter, &desired, &resolved, step).await
    }

    async fn apply(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        desired: &DesiredVm,
        resolved: &Resolved,
        step: Step,
    ) -> Result<Next, Error> {
        match step {
            Step::Clone => self.start_clone(vm, state, vcenter).await,
            Step::Lost => self.lost(vm, state).await,
            Step::Unreadable(reason) => {
                state.stale();
                Err(Error::NotReady(reason))
            }
            Step::Wrong(text) => Err(Error::Invalid(text)),
            Step::Upgrade { vm: reference, to } => {
                let task = vcenter.upgrade_hardware(&reference, &to).await?;
                Ok(self.follow(vm, state, TaskKind::Upgrade, pending::task(task)))
            }
            Step::Reconfigure { vm: reference, changes } => {
                if state.tried.as_ref() == Some(&changes) {
                    return self
                        .without_effect(vm, state, vcenter, desired, &reference, *changes)
                        .await;
                }
                let spec = observed::reconfiguration(desired, resolved, &changes, &state.devices);
                let task = vcenter.reconfigure(&reference, &spec).await?;
                Ok(self.follow(vm, state, TaskKind::Reconfigure(changes), pending::task(task)))
            }
            Step::PowerOn(reference) => self.power_on(vm, state, vcenter, desired, &reference).await,
            Step::AwaitAddresses { vm: reference, report } => {
                let nics = state
                    .observed
                    .as_ref()
                    .map(|known| known.nics.clone())
                    .unwrap_or_default();
                let address = pending::address(vcenter.watch_vm(&reference), reference, nics);
                self.follow(vm, state, TaskKind::Address, address);
                self.waiting_for_address(vm, state, &report).await
            }
            Step::Up { vm: reference, report } => self.up(vm, state, vcenter, desired, &reference, report).await,
        }
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

    async fn power_on(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        desired: &DesiredVm,
        reference: &MoRef,
    ) -> Result<Next, Error> {
        if !state.tagged && !desired.tags.is_empty() {
            vcenter
                .attach_tags(reference, &desired.tags)
                .await
                .map_err(|error| status::because(names::TAGS_FAILED, error))?;
        }
        state.tagged = true;
        if let Some(next) = self.join_group(vm, state, vcenter, reference).await? {
            return Ok(next);
        }
        self.join_module(vm, state, vcenter, reference).await;
        let task = vcenter
            .power_on(reference)
            .await
            .map_err(|error| status::because(names::POWERING_ON_FAILED, error))?;
        Ok(self.follow(vm, state, TaskKind::PowerOn, pending::task(task)))
    }

    /// A reconfiguration that changed nothing: for devices that is an error with their names, for anything else vCenter
    /// keeps what it keeps and the machine goes on without.
    async fn without_effect(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        desired: &DesiredVm,
        reference: &MoRef,
        changes: Changes,
    ) -> Result<Next, Error> {
        if observed::touches_devices(&changes) || observed::sets_policies(&changes) {
            state.tried = None;
            state.stale();
            let text = if observed::sets_policies(&changes) {
                "vCenter did not set the storage policy".into()
            } else if changes.dropped.is_empty() {
                "a disk did not grow".into()
            } else {
                changes.dropped.join("; ")
            };
            return Err(Error::Invalid(format!("{text}, and a reconfiguration did not help")));
        }
        if !changes.settings.is_empty() {
            let text = format!(
                "{}, and a reconfiguration did not help: the machine goes on as it is",
                changes.settings.join("; ")
            );
            self.recorder.warning(vm.as_ref(), "SettingsDropped", text).await;
        }
        self.power_on(vm, state, vcenter, desired, reference).await
    }

    async fn session(&self, vm: &VSphereVM) -> Result<Vcenter, Error> {
        let cluster = self.clusters.infrastructure_of(self.clusters.of(vm)?.as_ref())?;
        let spec = &vm.spec.clone_spec;
        let zone = self.affinity.zone_server(vm);
        let server = check_machine_server(spec.server.as_deref(), &server_of(&cluster)?, zone.as_deref())?;
        self.credentials
            .session_with(&cluster, &server, spec.thumbprint.as_deref())
            .await
    }

    fn recorded(&self, vm: &VSphereVM, state: &VmState) -> Recorded {
        let mut recorded = desired::recorded(vm);
        if recorded.placements.is_empty()
            && let Some(started) = &state.started
        {
            let mut with_disks = vm.clone();
            let status = with_disks.status.get_or_insert_default();
            status.data_disks = started.disks.clone();
            recorded.placements = desired::recorded(&with_disks).placements;
            recorded.linked = started.linked;
        }
        recorded
    }

    /// Handles the outcome of pending work; returns whether work is still pending.
    async fn is_waiting(&self, vm: &VSphereVM, state: &mut VmState) -> Result<bool, Error> {
        let outcome = self.states.outcome(&vm.uid().unwrap_or_default());
        let Some(outcome) = outcome else {
            return Ok(state.pending.is_some());
        };
        if matches!(outcome, TaskOutcome::Slow) {
            self.slow(vm, state).await?;
            return Ok(state.pending.is_some());
        }
        let Some(kind) = state.pending.take().map(|pending| pending.kind.clone()) else {
            return Ok(false);
        };
        self.handle_outcome(vm, state, kind, outcome).await?;
        Ok(false)
    }

    async fn handle_outcome(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        kind: TaskKind,
        outcome: TaskOutcome,
    ) -> Result<(), Error> {
        match (kind, outcome) {
            (TaskKind::Clone, TaskOutcome::Task(result)) => self.clone_ended(vm, state, result).await,
            (TaskKind::OtherClones, TaskOutcome::Task(Ok(_))) => {
                (state.alone, state.doubtful) = (true, false);
                Ok(())
            }
            (TaskKind::Reconfigure(changes), TaskOutcome::Task(Ok(_))) => {
                state.mended.extend(changes.dropped.clone());
                match state.observed.as_mut().filter(|_| !observed::is_read_back(&changes)) {
                    Some(observed) => apply_changes(&changes, observed),
                    None => state.stale(),
                }
                state.tried = Some(changes);
                Ok(())
            }
            (TaskKind::Group, TaskOutcome::Task(Ok(_))) => {
                (state.grouped, state.failures) = (true, 0);
                Ok(())
            }
            // What is missing is the group, not the machine.
            (TaskKind::Group, TaskOutcome::Task(Err(error))) => {
                state.stale();
                Err(status::because(names::VM_GROUP_FAILED, error))
            }
            (TaskKind::PowerOn, TaskOutcome::Task(Ok(_))) => {
                if let Some(observed) = state.observed.as_mut() {
                    observed.power = capstan_core::vm::PowerState::On;
                }
                state.failures = 0;
                Ok(())
            }
            (TaskKind::Address | TaskKind::Shutdown, TaskOutcome::State(Ok(found))) => {
                match state.observed.as_mut() {
                    Some(known) => observed::update(known, &found),
                    None => state.stale(),
                }
                Ok(())
            }
            (kind, TaskOutcome::Task(Err(error)) | TaskOutcome::State(Err(error))) => {
                state.stale();
                if error.is_gone() {
                    state.reference = None;
                    return Ok(());
                }
                Err(status::because(reason_of(&kind), error))
            }
            _ => {
                state.stale();
                Ok(())
            }
        }
    }

    /// Follows a clone that has no waiter: an earlier process started it, or its waiter ended before it did.
    fn resume_task(self: &Arc<Self>, vm: &Arc<VSphereVM>, state: &mut VmState, vcenter: &Vcenter) -> bool {
        let noted = vm.status.as_ref().and_then(|status| status.task_ref.clone());
        let own = state.started.as_ref().map(|started| started.task.clone());
        let named = noted.or(own).filter(|task| !task.is_empty());
        let Some(task) = named.filter(|_| !state.task_over && state.reference.is_none()) else {
            return false;
        };
        let task = vcenter.task(MoRef::task(&task));
        self.follow(vm, state, TaskKind::Clone, pending::task(task));
        true
    }

    /// Finds the virtual machine and reads it, unless the state has it.
    async fn locate(&self, vm: &VSphereVM, state: &mut VmState, vcenter: &Vcenter) -> Result<(), Error> {
        if state.observed.is_some() {
            return Ok(());
        }
        let uid = vm.uid().unwrap_or_default();
        let noted = vm
            .status
            .as_ref()
            .and_then(|status| status.vm_ref.as_deref())
            .map(MoRef::vm);
        let guess = state.reference.take().or(noted);
        if let Some(reference) = guess {
            match vcenter.vm(&reference).await {
                // A VM that cannot be read shows no ids; that it is another's is not known.
                Ok(info) if is_ours(vm, &info) || observed::unreadable(&info).is_some() => {
                    state.found(info);
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut found = vcenter.find_vm_by_instance_uuid(None, &uid).await?;
        if let Some(bios) = vm
            .spec
            .bios_uuid
            .as_deref()
            .filter(|uuid| !uuid.is_empty() && found.is_none())
        {
            found = vcenter.find_vm_by_bios_uuid(None, bios).await?;
        }
        if let Some(reference) = found {
            let info = vcenter.vm(&reference).await?;
            if is_ours(vm, &info) || observed::unreadable(&info).is_some() {
                state.found(info);
            }
        }
        Ok(())
    }

    /// Returns a hash of the object and its cluster that status writes of ours do not change.
    fn version_of_others(&self, vm: &VSphereVM) -> u64 {
        let mut hasher = DefaultHasher::new();
        let cluster = self.clusters.infrastructure_behind(vm);
        let cluster = cluster.map(|cluster| (cluster.uid(), cluster.meta().generation));
        let meta = vm.meta();
        (marks(vm), meta.generation, meta.deletion_timestamp.is_some(), cluster).hash(&mut hasher);
        hasher.finish()
    }

    fn api(&self, vm: &VSphereVM) -> Api<VSphereVM> {
        self.context.api(&vm.namespace().unwrap_or_default())
    }
}

/// Whether a virtual machine is this object's: it was cloned for it, or for the object that this one was before it was moved
/// to another management cluster or restored. Such an object has a new UID and keeps its BIOS UUID. As anybody who may write
/// VSphereVMs can write a BIOS UUID, it counts only for a VM of the same name that was started with bootstrap data.
fn is_ours(vm: &VSphereVM, info: &VmInfo) -> bool {
    let same =
        |one: Option<&str>, other: &str| one.is_some_and(|one| !one.is_empty() && one.eq_ignore_ascii_case(other));
    let bootstrapped = || {
        let mut keys = info.extra_config.iter().map(|(key, _)| key.as_str());
        keys.any(|key| BOOTSTRAP_KEYS.iter().any(|prefix| key.starts_with(prefix)))
    };
    same(vm.uid().as_deref(), &info.instance_uuid)
        || same(vm.spec.bios_uuid.as_deref(), &info.bios_uuid) && vm.name_any() == info.state.name && bootstrapped()
}

/// Whether a change of its cluster may concern a VM.
fn is_busy(vm: &VSphereVM) -> bool {
    let ready = vm.status.as_ref().is_some_and(|status| status.ready);
    !ready || vm.meta().deletion_timestamp.is_some()
}

/// Returns a hash of annotations, labels and the way to vCenter: a change of them asks for another read of the VM.
fn marks(vm: &VSphereVM) -> u64 {
    let mut hasher = DefaultHasher::new();
    let spec = &vm.spec.clone_spec;
    (vm.annotations(), vm.labels(), &spec.server, &spec.thumbprint).hash(&mut hasher);
    hasher.finish()
}

/// ObservedVm as they are after a reconfiguration that touched no device.
fn apply_changes(changes: &Changes, observed: &mut ObservedVm) {
    observed.extra_config.extend(changes.extra_config.clone());
    observed.cpus = changes.cpus.unwrap_or(observed.cpus);
    observed.cores_per_socket = changes.cores_per_socket.unwrap_or(observed.cores_per_socket);
    observed.memory_mib = changes.memory_mib.unwrap_or(observed.memory_mib);
}

fn reason_of(kind: &TaskKind) -> &'static str {
    match kind {
        TaskKind::Clone | TaskKind::OtherClones => names::CLONING_FAILED,
        TaskKind::PowerOn => names::POWERING_ON_FAILED,
        TaskKind::Group => names::VM_GROUP_FAILED,
        TaskKind::PowerOff | TaskKind::Detach | TaskKind::Destroy | TaskKind::Shutdown => names::DELETION_FAILED,
        TaskKind::Upgrade | TaskKind::Reconfigure(_) | TaskKind::Address => names::TASK_FAILURE,
    }
}

/// Returns when to retry a failure that may go away by itself.
fn retry(failures: u32) -> Duration {
    exponential(FIRST_RETRY, RECHECK, failures)
}

/// Returns when to retry a failure that a user must correct.
fn recheck(failures: u32) -> Duration {
    exponential(FIRST_RECHECK, RECHECK, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_retried_less_and_less_often() {
        let seconds = |failures| recheck(failures).as_secs();
        assert_eq!([1, 2, 3, 4, 5, 40].map(seconds), [5, 10, 20, 40, 60, 60]);
        let seconds = |failures| retry(failures).as_secs();
        assert_eq!([1, 2, 3, 4, 5, 6, 7, 40].map(seconds), [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
