//! A VM takes its place among others: in the VM group of its failure domain before it is powered on, and in the cluster
//! module of its owner as soon as there is one.

use capstan_api::vsphere::VSphereVM;
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use capstan_vsphere::MoRef;

use super::state::{TaskKind, TaskOutcome, VmState};
use super::{Controller, Observed, pending};
use crate::conditions as names;
use crate::error::Error;

impl Controller {
    /// Starts to make the VM a member of its group.
    pub(super) async fn join_group(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        observed: &Observed,
        vm: &MoRef,
        kind: TaskKind,
    ) -> Result<Outcome, Error> {
        let Some(group) = self.affinity.group(&scope.object) else {
            return Ok(Outcome::Done);
        };
        let (vcenter, vm) = (observed.vcenter()?.clone(), vm.clone());
        let join = async move {
            let joined = async {
                let datacenter = vcenter.datacenter(Some(&group.datacenter)).await?;
                let cluster = vcenter.cluster(&datacenter, Some(&group.cluster)).await?;
                vcenter.join_vm_group(&cluster, &group.name, &vm).await
            };
            TaskOutcome::Task(joined.await.map(|()| None))
        };
        Ok(pending::follow(scope, state, kind, join))
    }

    /// Returns the cluster module that the VM should be in and is not.
    pub(super) fn module_to_join(&self, vm: &VSphereVM, state: &VmState) -> Option<String> {
        let noted = vm.status.as_ref().and_then(|status| status.module_uuid.clone());
        let member_of = state.module.clone().or(noted);
        let module = self.affinity.module(vm);
        module.filter(|module| Some(module) != member_of.as_ref())
    }

    /// Makes the VM a member of its module. A failure is an event, and the VM goes on without: to run beside others of its
    /// kind is better than not to run.
    pub(super) async fn join_module(
        &self,
        state: &mut VmState,
        observed: &mut Observed,
        vm: &MoRef,
        module: String,
    ) -> Result<Outcome, Error> {
        match observed.vcenter()?.add_to_cluster_module(&module, vm).await {
            Ok(()) => state.module = Some(module),
            Err(error) => {
                let text = format!("not kept apart from others by cluster module {module}: {error}");
                observed
                    .notes
                    .events
                    .push(EventNote::warning(names::MODULES_FAILED, text));
            }
        }
        Ok(Outcome::Done)
    }
}
