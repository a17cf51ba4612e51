//! Virtual machines and availability sets.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::model::{AvailabilitySet, VirtualMachine, VirtualMachineUpdate};
use crate::owned::Owned;
use crate::path::Path;
use crate::{Error, Operation};
use capstan_core::azure_names::AzureName;
use http::Method;

pub(crate) const COMPUTE: &str = "2024-07-01";

impl Client {
    pub(crate) fn compute(&self, group: &str) -> Result<Path, Error> {
        Ok(self.group(group)?.provider("Microsoft.Compute"))
    }

    pub(crate) fn vm(&self, method: Method, group: &str, name: &str, policy: Policy) -> Result<Call, Error> {
        let path = self
            .compute(group)?
            .resource("virtualMachines", AzureName::VirtualMachine, name)?;
        Ok(Call::new(method, path, COMPUTE, policy))
    }

    /// The machine, without its instance view.
    pub async fn get_vm(&self, group: &str, name: &str) -> Result<Option<VirtualMachine>, Error> {
        self.get(self.vm(Method::GET, group, name, Policy::VmGet)?).await
    }

    /// The machine with its power state.
    pub async fn get_vm_with_instance_view(&self, group: &str, name: &str) -> Result<Option<VirtualMachine>, Error> {
        let call = self.vm(Method::GET, group, name, Policy::VmGet)?;
        self.get(call.query("$expand", "instanceView")).await
    }

    pub(crate) fn flexible_vms(&self, group: &str, scale_set_id: &str) -> Result<Call, Error> {
        let path = self.compute(group)?.word("virtualMachines");
        let filter = format!("'virtualMachineScaleSet/id' eq '{}'", scale_set_id.replace('\'', "''"));
        Ok(Call::new(Method::GET, path, COMPUTE, Policy::VmList)
            .query("$filter", filter)
            .query("$expand", "instanceView"))
    }

    /// The instances of a Flexible scale set, which are machines of their own; with their power states.
    pub async fn list_flexible_vms(&self, group: &str, scale_set_id: &str) -> Result<Vec<VirtualMachine>, Error> {
        let machines: Vec<VirtualMachine> = self.list(self.flexible_vms(group, scale_set_id)?).await?;
        let of_set = |vm: &VirtualMachine| {
            let set = vm.properties.as_ref()?.virtual_machine_scale_set.as_ref()?;
            Some(set.id.as_deref()?.eq_ignore_ascii_case(scale_set_id))
        };
        Ok(machines
            .into_iter()
            .filter(|vm| of_set(vm).unwrap_or_default())
            .collect())
    }

    pub async fn put_vm(
        &self,
        group: &str,
        name: &str,
        vm: &VirtualMachine,
        when: When,
    ) -> Result<Put<VirtualMachine>, Error> {
        let call = self.vm(Method::PUT, group, name, Policy::VmPut)?;
        self.change(call.when(when).body(vm)?).await
    }

    pub async fn patch_vm(
        &self,
        group: &str,
        name: &str,
        update: &VirtualMachineUpdate,
        when: When,
    ) -> Result<Put<VirtualMachine>, Error> {
        let call = self.vm(Method::PATCH, group, name, Policy::VmPut)?;
        self.change(call.when(when).body(update)?).await
    }

    /// Deletes the machine, and with it everything that it has with `deleteOption: Delete`.
    pub async fn delete_vm(&self, vm: &Owned<VirtualMachine>) -> Result<Option<Operation>, Error> {
        let (group, name) = self.own(vm)?;
        self.start(self.vm(Method::DELETE, group, name, Policy::VmPut)?).await
    }

    pub(crate) fn availability_set(&self, method: Method, group: &str, name: &str) -> Result<Call, Error> {
        let path = self
            .compute(group)?
            .resource("availabilitySets", AzureName::AvailabilitySet, name)?;
        Ok(Call::new(method, path, COMPUTE, Policy::Other))
    }

    pub async fn get_availability_set(&self, group: &str, name: &str) -> Result<Option<AvailabilitySet>, Error> {
        self.get(self.availability_set(Method::GET, group, name)?).await
    }

    pub(crate) fn availability_sets(&self, group: &str) -> Result<Call, Error> {
        let path = self.compute(group)?.word("availabilitySets");
        Ok(Call::new(Method::GET, path, COMPUTE, Policy::Other))
    }

    pub async fn list_availability_sets(&self, group: &str) -> Result<Vec<AvailabilitySet>, Error> {
        self.list(self.availability_sets(group)?).await
    }

    pub async fn put_availability_set(
        &self,
        group: &str,
        name: &str,
        set: &AvailabilitySet,
    ) -> Result<AvailabilitySet, Error> {
        let call = self.availability_set(Method::PUT, group, name)?;
        Ok(self.change(call.body(set)?).await?.value)
    }

    /// Azure refuses to delete one that still has machines (409).
    pub async fn delete_availability_set(&self, set: &Owned<AvailabilitySet>) -> Result<(), Error> {
        let (group, name) = self.own(set)?;
        let call = self.availability_set(Method::DELETE, group, name)?;
        self.start(call).await.map(drop)
    }
}
