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
    /// A VSphereVM is the virtual machine of a VSphereMachine.
    pub struct VSphereVM { spec: VSphereVMSpec, status: VSphereVMStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspherevms"
}

/// Desired state of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = power_rules()))]
pub struct VSphereVMSpec {
    /// Template and settings of the virtual machine.
    #[serde(flatten)]
    pub clone_spec: VirtualMachineCloneSpec,
    /// Reference to the Secret that holds the bootstrap data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_ref: Option<ObjectReference>,
    /// BIOS UUID of the virtual machine.
    #[serde(rename = "biosUUID", skip_serializing_if = "Option::is_none")]
    pub bios_uuid: Option<String>,
    /// Way in which the virtual machine is powered off: hard, soft or trySoft.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "hard"))]
    pub power_off_mode: Option<PowerOffMode>,
    /// Time that the guest has to shut down before Capstan powers the virtual machine off, with trySoft. 5 minutes when
    /// unset.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub guest_soft_power_off_timeout: Option<Duration>,
}

/// Observed state of a virtual machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereVMStatus {
    /// Host on which the virtual machine runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Whether the virtual machine runs and has an IP address.
    #[serde(default)]
    pub ready: bool,
    /// IP addresses of the virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Clone mode with which the virtual machine was cloned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone_mode: Option<String>,
    /// Snapshot from which the virtual machine was cloned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Time at which Capstan retries after a failed task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<Time>,
    /// ID of the vCenter task in progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_ref: Option<String>,
    /// Network devices of the virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<NetworkStatus>,
    /// Reason of a failure that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Description of a failure that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions of the virtual machine, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// UUID of the cluster module that the virtual machine belongs to.
    #[serde(rename = "moduleUUID", skip_serializing_if = "Option::is_none")]
    pub module_uuid: Option<String>,
    /// Managed object reference of the virtual machine in vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_ref: Option<String>,
    /// Conditions in the form of Cluster API v1beta2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
    /// Data disks of the virtual machine, in the order of the spec.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub data_disks: Vec<DataDiskStatus>,
}

/// Observed state of a data disk. Its UUID distinguishes disks of the same size.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskStatus {
    /// Name of the disk in the spec. Empty when the spec has none.
    #[serde(default)]
    pub name: String,
    /// Unit number of the disk on its controller.
    pub unit_number: i32,
    /// Controller of the disk.
    pub controller: DataDiskControllerStatus,
    /// UUID of the virtual disk, which the guest sees as its WWN or serial number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Path of the disk's backing file, such as `[datastore] folder/disk.vmdk`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datastore_path: Option<String>,
    /// Capacity of the disk in GiB.
    #[serde(rename = "sizeGiB", skip_serializing_if = "Option::is_none")]
    pub size_gib: Option<i64>,
}

/// Observed state of a disk controller.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DataDiskControllerStatus {
    /// Type of the controller.
    #[serde(rename = "type")]
    pub type_: String,
    /// Bus number of the controller, among those of the same type.
    pub bus: i32,
    /// Device key of the controller in vCenter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<i32>,
}
