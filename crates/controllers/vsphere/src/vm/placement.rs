//! A VM takes its place among others: in the VM group of its failure domain before it is powered on, and in the cluster
//! module of its owner as soon as there is one.

use std::sync::Arc;

use capstan_api::vsphere::VSphereVM;
use capstan_kube::Next;
use capstan_vsphere::{MoRef, Vcenter};

use super::state::{TaskKind, TaskOutcome, VmState};
use super::{Vms, status};
use crate::conditions as names;
use crate::error::Error;

impl Vms {
    /// Starts to make the VM a member of its group; `None` when it is one, or has none.
    pub(super) async fn join_group(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
        reference: &MoRef,
    ) -> Result<Option<Next>, Error> {
        let Some(group) = self.affinity.group(vm).filter(|_| !state.grouped) else {
            return Ok(None);
        };
        let failed = |error| status::because(names::VM_GROUP_FAILED, error);
        let datacenter = vcenter.datacenter(Some(&group.datacenter)).await.map_err(failed)?;
        let cluster = vcenter
            .cluster(&datacenter, Some(&group.cluster))
            .await
            .map_err(failed)?;
        let (vcenter, reference) = (vcenter.clone(), reference.clone());
        let join = async move {
            let joined = vcenter.join_vm_group(&cluster, &group.name, &reference).await;
            TaskOutcome::Task(joined.map(|()| None))
        };
        Ok(Some(self.follow(vm, state, TaskKind::Group, join)))
    }

    /// Makes the VM a member of its module. One that cannot be is told of, and goes on without: to run beside others of its
    /// kind is better than not to run.
    pub(super) async fn join_module(&self, vm: &VSphereVM, state: &mut VmState, vcenter: &Vcenter, reference: &MoRef) {
        let noted = vm.status.as_ref().and_then(|status| status.module_uuid.clone());
        let member_of = state.module.clone().or(noted);
        let Some(module) = self
            .affinity
            .module(vm)
            .filter(|module| Some(module) != member_of.as_ref())
        else {
            return;
        };
        match vcenter.add_to_cluster_module(&module, reference).await {
            Ok(()) => state.module = Some(module),
            Err(error) => {
                let text = format!("not kept apart from others by cluster module {module}: {error}");
                self.recorder.warning(vm, names::MODULES_FAILED, text).await;
            }
        }
    }

    /// Takes the VM out of its module. vCenter drops members that are destroyed, so that a failure does no harm.
    pub(super) async fn leave_module(&self, vm: &VSphereVM, state: &VmState, vcenter: &Vcenter, reference: &MoRef) {
        let noted = vm.status.as_ref().and_then(|status| status.module_uuid.clone());
        let Some(module) = state.module.clone().or(noted) else {
            return;
        };
        if let Err(error) = vcenter.remove_from_cluster_module(&module, reference).await {
            tracing::info!(%module, vm = %reference, %error, "not taken out of its cluster module");
        }
    }
}
