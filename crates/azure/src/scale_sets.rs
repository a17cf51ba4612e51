//! Scale sets and the instances of Uniform ones. Instances are read by list and deleted in batches: calls per instance
//! are what gets a controller throttled.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::compute::COMPUTE;
use crate::error::optional;
use crate::model::{
    Instance, InstanceIds, InstanceUpdate, InstanceUpdateProperties, ProtectionPolicy, ScaleSet, ScaleSetView,
};
use crate::{Error, Operation};
use http::Method;

impl Client {
    fn scale_set(&self, method: Method, group: &str, rest: &str, policy: Policy) -> Call {
        Call::new(
            method,
            self.compute(group, &format!("virtualMachineScaleSets/{rest}")),
            COMPUTE,
            policy,
        )
    }

    pub async fn get_scale_set(&self, group: &str, name: &str) -> Result<Option<ScaleSet>, Error> {
        optional(
            self.read(self.scale_set(Method::GET, group, name, Policy::ScaleSetGet))
                .await,
        )
    }

    pub async fn list_scale_sets(&self, group: &str) -> Result<Vec<ScaleSet>, Error> {
        let path = self.compute(group, "virtualMachineScaleSets");
        self.list(Call::new(Method::GET, path, COMPUTE, Policy::ScaleSetList))
            .await
    }

    pub async fn get_scale_set_view(&self, group: &str, name: &str) -> Result<Option<ScaleSetView>, Error> {
        let rest = format!("{name}/instanceView");
        optional(
            self.read(self.scale_set(Method::GET, group, &rest, Policy::ScaleSetList))
                .await,
        )
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
        self.change(self.scale_set(Method::PUT, group, name, policy).when(when).body(set)?)
            .await
    }

    /// Changes only what `set` names: its capacity, its model, its tags.
    pub async fn patch_scale_set(
        &self,
        group: &str,
        name: &str,
        set: &ScaleSet,
        when: When,
    ) -> Result<Put<ScaleSet>, Error> {
        self.change(
            self.scale_set(Method::PATCH, group, name, Policy::ScaleSetUpdate)
                .when(when)
                .body(set)?,
        )
        .await
    }

    pub async fn delete_scale_set(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.scale_set(Method::DELETE, group, name, Policy::ScaleSetDelete))
            .await
    }

    /// All instances, each with its instance view.
    pub async fn list_instances(&self, group: &str, set: &str) -> Result<Vec<Instance>, Error> {
        let rest = format!("{set}/virtualMachines");
        self.list(
            self.scale_set(Method::GET, group, &rest, Policy::ScaleSetList)
                .query("$expand", "instanceView"),
        )
        .await
    }

    pub async fn get_instance(&self, group: &str, set: &str, id: &str) -> Result<Option<Instance>, Error> {
        let rest = format!("{set}/virtualMachines/{id}");
        let call = self
            .scale_set(Method::GET, group, &rest, Policy::InstanceGet)
            .query("$expand", "instanceView");
        optional(self.read(call).await)
    }

    async fn for_instances(
        &self,
        group: &str,
        set: &str,
        action: &str,
        ids: &[String],
        policy: Policy,
    ) -> Result<Option<Operation>, Error> {
        let body = InstanceIds {
            instance_ids: Some(ids.to_vec()),
        };
        self.start(
            self.scale_set(Method::POST, group, &format!("{set}/{action}"), policy)
                .body(&body)?,
        )
        .await
    }

    /// Deletes these instances in one call.
    pub async fn delete_instances(&self, group: &str, set: &str, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.for_instances(group, set, "delete", ids, Policy::InstanceUpdate)
            .await
    }

    /// Brings these instances to the latest model (`manualupgrade`).
    pub async fn upgrade_instances(&self, group: &str, set: &str, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.for_instances(group, set, "manualupgrade", ids, Policy::InstanceUpdate)
            .await
    }

    pub async fn reimage_instances(&self, group: &str, set: &str, ids: &[String]) -> Result<Option<Operation>, Error> {
        self.for_instances(group, set, "reimage", ids, Policy::InstanceUpdate)
            .await
    }

    /// Protects an instance from scale-in, or lifts that.
    pub async fn protect_instance(
        &self,
        group: &str,
        set: &str,
        id: &str,
        protection: ProtectionPolicy,
    ) -> Result<Put<Instance>, Error> {
        let body = InstanceUpdate {
            location: Some(self.location().to_owned()).filter(|location| !location.is_empty()),
            properties: Some(InstanceUpdateProperties {
                protection_policy: Some(protection),
            }),
        };
        let rest = format!("{set}/virtualMachines/{id}");
        self.change(
            self.scale_set(Method::PUT, group, &rest, Policy::InstanceUpdate)
                .body(&body)?,
        )
        .await
    }
}
