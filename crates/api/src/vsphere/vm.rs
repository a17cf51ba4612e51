//! VSphereVM: the virtual machine behind a VSphereMachine.

use super::{
    clone::{VirtualMachineCloneSpec, power_rules},
    machine::{NetworkStatus, PowerOffMode},
};
use crate::common::{Condition, V1Beta2Status};
use crate::duration::{Duration, lenient};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// The virtual machine behind a VSphereMachine.
    pub struct VSphereVM { spec: VSphereVMSpec, status: VSphereVMStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspherevms"
}

/// A virtual machine as it is to be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = power_rules()))]
pub struct VSphereVMSpec {
    /// What it is cloned from and what it becomes.
    #[serde(flatten)]
    pub clone_spec: VirtualMachineCloneSpec,
    /// Secret with the first boot's data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_ref: Option<ObjectReference>,
    /// BIOS UUID of the virtual machine.
    #[serde(rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// How it is turned off.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "hard"))]
    pub power_off_mode: Option<PowerOffMode>,
    /// How long its guest may take to shut down, with trySoft; 5 minutes when unset.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub guest_soft_power_off_timeout: Option<Duration>,
}

/// A virtual machine as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereVMStatus {
    /// Host that it runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Whether it is up and has an address.
    #[serde(default)]
    pub ready: bool,
    /// Its addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// How it was cloned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_mode: Option<String>,
    /// Snapshot that it was cloned from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// When to try again after a failed task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<Time>,
    /// The task of vCenter that is under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_ref: Option<String>,
    /// Its network cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<NetworkStatus>,
    /// One word for why it failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Why it failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Cluster module that it belongs to.
    #[serde(rename = "moduleUUID", skip_serializing_if = "Option::is_none")]
    pub module_uuid: Option<String>,
    /// Managed object reference in vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_ref: Option<String>,
    /// The same as Cluster API v1beta2 wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
    /// The data disks as vCenter has them, in the order of the spec.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_disks: Vec<DataDiskStatus>,
}

/// A data disk as vCenter has it, so that disks of the same size can be told apart.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskStatus {
    /// The disk's name in the spec; empty where the spec gives none.
    #[serde(default)]
    pub name: String,
    /// Unit number on its controller.
    pub unit_number: i32,
    /// The controller that the disk hangs on.
    pub controller: DataDiskControllerStatus,
    /// The virtual disk's UUID, which the guest sees as its WWN or serial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The backing file, as in `[datastore] folder/disk.vmdk`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore_path: Option<String>,
    /// The disk's capacity.
    #[serde(rename = "sizeGiB", skip_serializing_if = "Option::is_none")]
    pub size_gib: Option<i64>,
}

/// A controller as vCenter has it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskControllerStatus {
    /// The kind of controller.
    #[serde(rename = "type")]
    pub type_: String,
    /// Bus number among controllers of the kind.
    pub bus: i32,
    /// vCenter's device key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<i32>,
}
