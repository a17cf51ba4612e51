//! Carries out the steps of a VSphereMachine.

use capstan_api::vsphere::{VSphereMachine, VSphereVM};
use capstan_core::vm::machine::MachineStep;
use capstan_kube::capi::Machine;
use capstan_kube::objects::delete_exactly;
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{Outcome, Scope};
use kube::ResourceExt;
use kube::api::PostParams;

use super::{Controller, Observed, check_owner};
use crate::conditions as names;
use crate::error::Error;

impl Controller {
    pub(super) async fn apply_step(
        &self,
        step: MachineStep,
        observed: &Observed,
        scope: &mut Scope<VSphereMachine>,
    ) -> Result<Outcome, Error> {
        match step {
            MachineStep::AddFinalizer => {
                scope.add_finalizer(names::MACHINE_FINALIZER).await?;
            }
            MachineStep::CreateVm(vm) => self.create_vm(scope, *vm).await?,
            MachineStep::UpdateVm { vm, followed } => {
                let api = scope.api_of::<VSphereVM>();
                if let Some(updated) = patch::object(&api, vm.as_ref(), &followed, Lock::Open).await? {
                    scope.wrote(&self.vms, &updated);
                }
            }
            MachineStep::SetProviderId(id) => {
                let mut after = VSphereMachine::clone(&scope.object);
                after.spec.provider_id = Some(id);
                scope.write_object(&after, Lock::Open).await?;
            }
            MachineStep::LabelHost(host) => {
                // Cluster API copies this label from the Machine to its Node.
                let label =
                    |machine: &mut Machine| drop(machine.labels_mut().insert(names::HOST_LABEL.to_owned(), host));
                self.patch_machine(scope, observed.machine.as_deref(), label).await?;
            }
            MachineStep::AskForRemediation => {
                let (key, value) = (names::REMEDIATE.to_owned(), names::FAIL_WHEN_LOST.to_owned());
                let ask = |machine: &mut Machine| drop(machine.annotations_mut().insert(key, value));
                self.patch_machine(scope, observed.machine.as_deref(), ask).await?;
            }
            MachineStep::WithdrawRemediation => {
                let withdraw = |machine: &mut Machine| drop(machine.annotations_mut().remove(names::REMEDIATE));
                self.patch_machine(scope, observed.machine.as_deref(), withdraw).await?;
            }
            MachineStep::DeleteVm(vm) => self.delete_vm(scope, &vm).await?,
            MachineStep::Release => {
                scope.remove_finalizer(names::MACHINE_FINALIZER).await?;
            }
        }
        Ok(Outcome::Done)
    }

    async fn create_vm(&self, scope: &mut Scope<VSphereMachine>, vm: VSphereVM) -> Result<(), Error> {
        let api = scope.api_of::<VSphereVM>();
        let name = vm.name_any();
        let created = match api.create(&PostParams::default(), &vm).await {
            Err(kube::Error::Api(status)) if status.code == 409 => api.get(&name).await?,
            Err(error) => return Err(scope.doubt(error.into()).into()),
            Ok(created) => created,
        };
        check_owner(&created, &scope.key.uid)?;
        scope.wrote(&self.vms, &created);
        Ok(())
    }

    async fn delete_vm(&self, scope: &mut Scope<VSphereMachine>, vm: &VSphereVM) -> Result<(), Error> {
        let deleted = delete_exactly(&scope.api_of::<VSphereVM>(), vm).await;
        deleted.map_err(|error| scope.doubt(error))?;
        Ok(())
    }

    /// Changes the metadata of the Machine.
    async fn patch_machine(
        &self,
        scope: &mut Scope<VSphereMachine>,
        machine: Option<&Machine>,
        change: impl FnOnce(&mut Machine),
    ) -> Result<(), Error> {
        let Some(machine) = machine else { return Ok(()) };
        let mut after = machine.clone();
        change(&mut after);
        match patch::object(&scope.api_of::<Machine>(), machine, &after, Lock::Open).await {
            Ok(Some(updated)) => scope.wrote(&self.machines, &updated),
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        Ok(())
    }
}
