//! Virtual machines, availability sets and resource groups.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::error::optional;
use crate::model::{AvailabilitySet, ResourceGroup, VirtualMachine, VirtualMachineUpdate};
use crate::{Error, Operation};
use http::Method;

pub(crate) const COMPUTE: &str = "2024-07-01";
const RESOURCES: &str = "2021-04-01";

impl Client {
    pub(crate) fn compute(&self, group: &str, rest: &str) -> String {
        format!(
            "/subscriptions/{}/resourceGroups/{group}/providers/Microsoft.Compute/{rest}",
            self.subscription()
        )
    }

    fn vm(&self, method: Method, group: &str, name: &str, policy: Policy) -> Call {
        Call::new(
            method,
            self.compute(group, &format!("virtualMachines/{name}")),
            COMPUTE,
            policy,
        )
    }

    /// The machine, without its instance view.
    pub async fn get_vm(&self, group: &str, name: &str) -> Result<Option<VirtualMachine>, Error> {
        optional(self.read(self.vm(Method::GET, group, name, Policy::VmGet)).await)
    }

    /// The machine with its power state.
    pub async fn get_vm_with_instance_view(&self, group: &str, name: &str) -> Result<Option<VirtualMachine>, Error> {
        let call = self
            .vm(Method::GET, group, name, Policy::VmGet)
            .query("$expand", "instanceView");
        optional(self.read(call).await)
    }

    pub async fn list_vms(&self, group: &str) -> Result<Vec<VirtualMachine>, Error> {
        self.list(Call::new(
            Method::GET,
            self.compute(group, "virtualMachines"),
            COMPUTE,
            Policy::VmList,
        ))
        .await
    }

    /// The instances of a Flexible scale set, which are machines of their own; with their power states.
    pub async fn list_flexible_vms(&self, group: &str, scale_set_id: &str) -> Result<Vec<VirtualMachine>, Error> {
        let call = Call::new(
            Method::GET,
            self.compute(group, "virtualMachines"),
            COMPUTE,
            Policy::VmList,
        )
        .query("$filter", format!("'virtualMachineScaleSet/id' eq '{scale_set_id}'"))
        .query("$expand", "instanceView");
        let machines: Vec<VirtualMachine> = self.list(call).await?;
        let of_set = |vm: &VirtualMachine| {
            let id = vm
                .properties
                .as_ref()?
                .virtual_machine_scale_set
                .as_ref()?
                .id
                .as_deref()?;
            Some(id.eq_ignore_ascii_case(scale_set_id))
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
        self.change(self.vm(Method::PUT, group, name, Policy::VmPut).when(when).body(vm)?)
            .await
    }

    pub async fn patch_vm(
        &self,
        group: &str,
        name: &str,
        update: &VirtualMachineUpdate,
    ) -> Result<Put<VirtualMachine>, Error> {
        self.change(self.vm(Method::PATCH, group, name, Policy::VmPut).body(update)?)
            .await
    }

    /// Deletes the machine; what it owns with `deleteOption: Delete` goes with it.
    pub async fn delete_vm(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.vm(Method::DELETE, group, name, Policy::VmPut)).await
    }

    /// `deallocate`, `start`, `restart`, `powerOff`, `reimage`, `simulateEviction`.
    pub async fn act_on_vm(&self, group: &str, name: &str, action: &str) -> Result<Option<Operation>, Error> {
        let path = self.compute(group, &format!("virtualMachines/{name}/{action}"));
        self.start(Call::new(Method::POST, path, COMPUTE, Policy::VmPut)).await
    }

    fn availability_set(&self, method: Method, group: &str, name: &str) -> Call {
        Call::new(
            method,
            self.compute(group, &format!("availabilitySets/{name}")),
            COMPUTE,
            Policy::Other,
        )
    }

    pub async fn get_availability_set(&self, group: &str, name: &str) -> Result<Option<AvailabilitySet>, Error> {
        optional(self.read(self.availability_set(Method::GET, group, name)).await)
    }

    pub async fn put_availability_set(
        &self,
        group: &str,
        name: &str,
        set: &AvailabilitySet,
    ) -> Result<AvailabilitySet, Error> {
        Ok(self
            .change(self.availability_set(Method::PUT, group, name).body(set)?)
            .await?
            .value)
    }

    /// Azure refuses to delete one that still has machines (409).
    pub async fn delete_availability_set(&self, group: &str, name: &str) -> Result<(), Error> {
        self.start(self.availability_set(Method::DELETE, group, name))
            .await
            .map(drop)
    }

    fn resource_group(&self, method: Method, name: &str) -> Call {
        let path = format!("/subscriptions/{}/resourcegroups/{name}", self.subscription());
        Call::new(method, path, RESOURCES, Policy::Other)
    }

    pub async fn get_resource_group(&self, name: &str) -> Result<Option<ResourceGroup>, Error> {
        optional(self.read(self.resource_group(Method::GET, name)).await)
    }

    pub async fn put_resource_group(&self, name: &str, group: &ResourceGroup) -> Result<ResourceGroup, Error> {
        Ok(self
            .change(self.resource_group(Method::PUT, name).body(group)?)
            .await?
            .value)
    }

    pub async fn delete_resource_group(&self, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.resource_group(Method::DELETE, name)).await
    }

    /// Adds or overwrites tags of any resource, leaving its others alone.
    pub async fn merge_tags(&self, resource_id: &str, tags: &crate::model::Tags) -> Result<(), Error> {
        #[derive(serde::Serialize)]
        struct Body<'a> {
            operation: &'a str,
            properties: Tags<'a>,
        }
        #[derive(serde::Serialize)]
        struct Tags<'a> {
            tags: &'a crate::model::Tags,
        }
        let path = format!("{resource_id}/providers/Microsoft.Resources/tags/default");
        let body = Body {
            operation: "Merge",
            properties: Tags { tags },
        };
        self.send(&Call::new(Method::PATCH, path, RESOURCES, Policy::Other).body(&body)?)
            .await
            .map(drop)
    }
}
