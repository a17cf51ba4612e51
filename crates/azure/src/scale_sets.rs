//! Scale sets and the instances of Uniform ones. Instances are read by list and deleted in batches: Azure throttles a
//! controller that makes calls for each instance.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::compute::COMPUTE;
use crate::error::optional;
use crate::model::{Instance, InstanceIds, ScaleSet, ScaleSetView};
use crate::owned::Owned;
use crate::path::Path;
use crate::{Error, Operation};
use capstan_core::azure_names::AzureName;
use http::Method;

impl Client {
    fn scale_set_path(&self, group: &str, name: &str) -> Result<Path, Error> {
        self.compute(group)?
            .resource("virtualMachineScaleSets", AzureName::ScaleSet, name)
    }

    pub(crate) fn scale_set(&self, method: Method, group: &str, name: &str, policy: Policy) -> Result<Call, Error> {
        Ok(Call::new(method, self.scale_set_path(group, name)?, COMPUTE, policy))
    }

    pub async fn get_scale_set(&self, group: &str, name: &str) -> Result<Option<ScaleSet>, Error> {
        self.get(self.scale_set(Method::GET, group, name, Policy::ScaleSetGet)?)
            .await
    }

    pub(crate) fn scale_set_view(&self, group: &str, name: &str) -> Result<Call, Error> {
        let path = self.scale_set_path(group, name)?.word("instanceView");
        Ok(Call::new(Method::GET, path, COMPUTE, Policy::ScaleSetList))
    }

    pub async fn get_scale_set_view(&self, group: &str, name: &str) -> Result<Option<ScaleSetView>, Error> {
        optional(self.read(self.scale_set_view(group, name)?).await)
    }

    /// Creates it, with [`When::Absent`], or changes it.
    pub async fn put_scale_set(
        &self,
        group: &str,
        name: &str,
        set: &ScaleSet,
        when: When,
    ) -> Result<Put<ScaleSet>, Error> {
        let policy = if when == When::Absent {
            Policy::ScaleSetCreate
        } else {
            Policy::ScaleSetUpdate
        };
        let call = self.scale_set(Method::PUT, group, name, policy)?;
        self.change(call.when(when).body(set)?).await
    }

    /// Changes only what `set` names: its capacity, its model, its tags.
    pub async fn patch_scale_set(
        &self,
        group: &str,
        name: &str,
        set: &ScaleSet,
        when: When,
    ) -> Result<Put<ScaleSet>, Error> {
        let call = self.scale_set(Method::PATCH, group, name, Policy::ScaleSetUpdate)?;
        self.change(call.when(when).body(set)?).await
    }

    /// Deletes the scale set with all of its instances.
    pub async fn delete_scale_set(&self, set: &Owned<ScaleSet>) -> Result<Option<Operation>, Error> {
        let (group, name) = self.own(set)?;
        self.start(self.scale_set(Method::DELETE, group, name, Policy::ScaleSetDelete)?)
            .await
    }

    pub(crate) fn instances(&self, group: &str, set: &str) -> Result<Call, Error> {
        let path = self.scale_set_path(group, set)?.word("virtualMachines");
        Ok(Call::new(Method::GET, path, COMPUTE, Policy::ScaleSetList).query("$expand", "instanceView"))
    }

    /// All instances, each with its instance view.
    pub async fn list_instances(&self, group: &str, set: &str) -> Result<Vec<Instance>, Error> {
        self.list(self.instances(group, set)?).await
    }

    pub(crate) fn for_instances(
        &self,
        (group, set): (&str, &str),
        action: &'static str,
        ids: &[String],
    ) -> Result<Call, Error> {
        let path = self.scale_set_path(group, set)?.word(action);
        let body = InstanceIds {
            instance_ids: Some(ids.to_vec()),
        };
        Call::new(Method::POST, path, COMPUTE, Policy::InstanceUpdate).body(&body)
    }

    /// Deletes these instances in one call.
    pub async fn delete_instances(&self, set: &Owned<ScaleSet>, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.start(self.for_instances(self.own(set)?, "delete", ids)?).await
    }

    /// Brings these instances to the latest model (`manualupgrade`). Custom data stays as it is on them.
    pub async fn upgrade_instances(&self, group: &str, set: &str, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.start(self.for_instances((group, set), "manualupgrade", ids)?)
            .await
    }

    /// Replaces the operating system disks of these instances; they are provisioned again with the custom data of their model.
    pub async fn reimage_instances(&self, set: &Owned<ScaleSet>, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.start(self.for_instances(self.own(set)?, "reimage", ids)?).await
    }
}
