//! The end of a VM: brought down by its mode, relieved of what is not its own, destroyed, and seen to be gone.

use std::sync::Arc;

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::workload::Lookup;
use capstan_kube::{Next, patch};
use capstan_vsphere::{ConfigSpec, DeviceChange, MoRef, Vcenter};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt};

use super::working::{CloneEnd, Job, News, Purpose, Working};
use super::{RECHECK, Vms, tell};
use crate::clusters::cluster_name;
use crate::domain::PowerOff;
use crate::error::Error;
use crate::from_api;
use crate::plan::{self, Farewell};
use crate::terms;

impl Vms {
    /// `None`: it is gone.
    pub(super) async fn end(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        working: &mut Working,
    ) -> Result<Option<Next>, Error> {
        if !vm.finalizers().iter().any(|finalizer| finalizer == terms::VM_FINALIZER) {
            return Ok(None);
        }
        let in_vain = |job: &Job| matches!(job.purpose, Purpose::Address | Purpose::Group);
        if working.job.as_ref().is_some_and(in_vain) {
            working.job = None;
        }
        if self.is_ending(vm, working).await? {
            return Ok(Some(Next::Wait));
        }
        let vcenter = match self.session(vm).await {
            Ok(vcenter) => vcenter,
            // Without its cluster nobody can say which vCenter it would be in; if nothing was ever cloned, nothing is.
            Err(Error::Waiting(_) | Error::Spec(_)) if never_cloned(vm, working) => return self.gone(vm).await,
            Err(error) => return Err(error),
        };
        if self.resume_task(vm, working, &vcenter) {
            return Ok(Some(Next::Wait));
        }
        self.locate(vm, working, &vcenter).await?;
        let wanted = from_api::wanted(vm);
        let (memory, now) = (self.memory(vm, working), Timestamp::now());
        let asked = vm.status.as_ref().and_then(|status| {
            let in_progress = conditions::get(&status.conditions, terms::GUEST_SOFT_POWER_OFF_SUCCEEDED)?;
            (in_progress.reason.as_deref() == Some(terms::SOFT_OFF_IN_PROGRESS))
                .then_some(in_progress.last_transition_time.0)
        });
        let unsure = working.doubtful || never_cloned(vm, working);
        if working.facts.is_none() && unsure && self.may_be_cloning(vm, working, &vcenter).await? {
            return Ok(Some(Next::Wait));
        }
        let facts = working.facts.as_ref();
        let step = plan::farewell(facts, &memory, wanted.power_off, wanted.soft_timeout, asked, now);
        let Some(reference) = working.reference.clone().filter(|_| step != Farewell::Gone) else {
            return self.gone(vm).await;
        };
        self.take_leave(vm, working, &vcenter, &reference, step, now)
            .await
            .map(Some)
    }

    /// A clone that nobody wrote down may still be under way: it must not outlive its object. A template that is gone has
    /// no clones.
    async fn may_be_cloning(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        working: &mut Working,
        vcenter: &Vcenter,
    ) -> Result<bool, Error> {
        match self.others_are_cloning(vm, working, vcenter).await {
            Err(Error::Vsphere(error)) if error.class() == Class::Terminal => Ok(false),
            result => result,
        }
    }

    async fn take_leave(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        working: &mut Working,
        vcenter: &Vcenter,
        reference: &MoRef,
        step: Farewell,
        now: Timestamp,
    ) -> Result<Next, Error> {
        let failed = |error| tell::because(terms::DELETION_FAILED, error);
        match step {
            Farewell::Gone => Ok(Next::Wait),
            Farewell::ShutDownGuest => {
                if let Err(error) = vcenter.shutdown_guest(reference).await {
                    // Whoever may be forced is not kept by a guest that cannot be asked.
                    let may_be_forced = from_api::wanted(vm).power_off == PowerOff::TrySoft && error.fault().is_some();
                    if !may_be_forced {
                        return Err(failed(error));
                    }
                    let text = format!("{error}: powering off");
                    self.recorder.warning(vm.as_ref(), terms::SOFT_OFF_FAILED, text).await;
                    let task = vcenter.power_off(reference).await.map_err(failed)?;
                    return Ok(self.await_task(vm, working, Purpose::PowerOff, task));
                }
                self.soft_power_off(
                    vm,
                    working,
                    terms::SOFT_OFF_IN_PROGRESS,
                    Severity::Info,
                    "the guest was asked to shut down",
                )
                .await?;
                self.await_power_off(vm, working, vcenter, reference);
                Ok(Next::After(from_api::wanted(vm).soft_timeout))
            }
            Farewell::AwaitShutdown { until } => {
                self.await_power_off(vm, working, vcenter, reference);
                let left = until.map(|until| until.duration_since(now).try_into().unwrap_or_default());
                Ok(left.map_or(Next::Wait, Next::After))
            }
            Farewell::CannotShutDown => {
                let text = "the guest cannot be asked to shut down (VMware Tools do not run) and powerOffMode is soft: \
                            start them, power it off by hand, or set powerOffMode to trySoft or hard";
                self.soft_power_off(vm, working, terms::SOFT_OFF_FAILED, Severity::Warning, text)
                    .await?;
                self.recorder.warning(vm.as_ref(), terms::SOFT_OFF_FAILED, text).await;
                working.stale();
                Ok(Next::After(RECHECK))
            }
            Farewell::PowerOff => {
                let task = vcenter.power_off(reference).await.map_err(failed)?;
                Ok(self.await_task(vm, working, Purpose::PowerOff, task))
            }
            Farewell::Detach(keys) => {
                let ours = working
                    .devices
                    .iter()
                    .filter(|device| keys.contains(&device.key))
                    .cloned();
                let devices: Vec<DeviceChange> = ours.map(DeviceChange::Remove).collect();
                let text = format!("detaching {} disks that are not the machine's own", devices.len());
                self.recorder.normal(vm.as_ref(), "VolumesDetached", text).await;
                let spec = ConfigSpec {
                    devices,
                    ..ConfigSpec::default()
                };
                let task = vcenter.reconfigure(reference, &spec).await.map_err(failed)?;
                Ok(self.await_task(vm, working, Purpose::Detach, task))
            }
            Farewell::Destroy => {
                self.leave_module(vm, working, vcenter, reference).await;
                let task = vcenter.destroy(reference).await.map_err(failed)?;
                Ok(self.await_task(vm, working, Purpose::Destroy, task))
            }
        }
    }

    /// Takes in the news of the last wait; tells whether one is still under way.
    async fn is_ending(&self, vm: &VSphereVM, working: &mut Working) -> Result<bool, Error> {
        let uid = vm.uid().unwrap_or_default();
        let news = match self.desk.news(&uid) {
            Some(News::Slow) | None => {
                // A guest that takes its time may have to be forced: the deadline is looked at again.
                let shutdown = working.job.as_ref().is_some_and(|job| job.purpose == Purpose::Shutdown);
                return Ok(working.job.is_some() && !shutdown);
            }
            Some(news) => news,
        };
        let Some(purpose) = working.job.take().map(|job| job.purpose.clone()) else {
            return Ok(false);
        };
        working.stale();
        match (purpose, news) {
            (Purpose::OtherClones, News::Task(Ok(_))) => {
                (working.alone, working.doubtful) = (true, false);
                Ok(false)
            }
            (Purpose::Clone, News::Task(result)) => {
                let end = CloneEnd::of(&result);
                working.task_over = end != CloneEnd::UnderWay;
                working.doubtful |= end == CloneEnd::Unknown;
                match (end, result) {
                    (_, Ok(made)) => working.reference = made,
                    (CloneEnd::UnderWay, Err(error)) => return Err(error.into()),
                    _ => {}
                }
                Ok(false)
            }
            (Purpose::Destroy, News::Task(Ok(_))) => {
                working.reference = None;
                Ok(false)
            }
            (_, News::Task(Err(error)) | News::State(Err(error))) if !error.is_gone() => {
                Err(tell::because(terms::DELETION_FAILED, error))
            }
            _ => Ok(false),
        }
    }

    fn await_power_off(self: &Arc<Self>, vm: &VSphereVM, working: &mut Working, vcenter: &Vcenter, reference: &MoRef) {
        let off = |state: &capstan_vsphere::VmState| state.power != capstan_vsphere::PowerState::On;
        self.await_state(vm, working, vcenter, reference, Purpose::Shutdown, off);
    }

    async fn soft_power_off(
        &self,
        vm: &VSphereVM,
        working: &mut Working,
        reason: &str,
        severity: Severity,
        text: &str,
    ) -> Result<(), Error> {
        self.write(vm, working, |status, now| {
            let type_ = terms::GUEST_SOFT_POWER_OFF_SUCCEEDED;
            conditions::remove(&mut status.conditions, type_);
            conditions::mark_false(&mut status.conditions, type_, severity, reason, text, now);
            tell::in_progress(status, terms::DELETING, text, now);
        })
        .await
    }

    /// Nothing is left in vCenter: the Node goes, then the finalizer.
    async fn gone(&self, vm: &Arc<VSphereVM>) -> Result<Option<Next>, Error> {
        self.remove_node(vm).await;
        self.release_addresses(vm).await?;
        patch::remove_finalizer(&self.api(vm), vm.as_ref(), terms::VM_FINALIZER).await?;
        Ok(None)
    }

    /// Removes the Node of the machine in the workload cluster. A cluster that does not answer does not hold the machine
    /// up: it may be going itself, and its own controllers remove Nodes too.
    async fn remove_node(&self, vm: &VSphereVM) {
        let Some(cluster) = cluster_name(vm) else { return };
        if from_api::memory(vm).seen {
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
                .map(|uuid| format!("{}{uuid}", terms::PROVIDER_ID));
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

fn never_cloned(vm: &VSphereVM, working: &Working) -> bool {
    let noted = vm
        .status
        .as_ref()
        .is_some_and(|status| status.task_ref.is_some() || status.vm_ref.is_some());
    !noted && working.started.is_none() && !from_api::memory(vm).seen
}
