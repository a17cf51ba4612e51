//! AzureMachinePoolMachine: one instance of a pool.

use super::vm::Future;
use crate::cel::rule;
use crate::common::Condition;
use k8s_openapi::api::core::v1::ObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// An AzureMachinePoolMachine represents one instance of a scale set.
    pub struct AzureMachinePoolMachine { spec: AzureMachinePoolMachineSpec, status: AzureMachinePoolMachineStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azuremachinepoolmachines"
}

/// Desired state of a pool's machine: the instance that it represents.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolMachineSpec {
    /// Provider ID of the instance.
    #[serde(rename = "providerID")]
    #[schemars(extend("x-kubernetes-validations" = [rule("oldSelf == '' || self == oldSelf", "providerID is immutable")]))]
    pub provider_id: String,
    /// ID of the instance within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
}

/// Observed state of a pool's machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolMachineStatus {
    /// Reference to the Node of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ref: Option<ObjectReference>,
    /// Kubernetes version of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Provisioning state that Azure reports for the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    /// Azure's name of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    /// Reason of a failure that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Description of a failure that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions of the machine, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Operations that Azure has not completed yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
    /// Whether the instance has the current model of the scale set.
    #[serde(default)]
    pub latest_model_applied: bool,
    /// Whether the machine has a Node, and the Node is ready.
    #[serde(default)]
    pub ready: bool,
    /// ID of the instance within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The operation that Azure has not completed yet, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_running_operation_state: Option<Future>,
}
