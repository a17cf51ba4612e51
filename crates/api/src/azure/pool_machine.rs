//! AzureMachinePoolMachine: one instance of a pool.

use super::vm::Future;
use crate::cel::rule;
use crate::common::Condition;
use k8s_openapi::api::core::v1::ObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// One instance of a scale set.
    pub struct AzureMachinePoolMachine { spec: AzureMachinePoolMachineSpec, status: AzureMachinePoolMachineStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azuremachinepoolmachines"
}

/// Which instance this is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolMachineSpec {
    /// Provider ID of the instance.
    #[serde(rename = "providerID")]
    #[schemars(extend("x-kubernetes-validations" = [rule("oldSelf == '' || self == oldSelf", "providerID is immutable")]))]
    pub provider_id: String,
    /// Number of the instance within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
}

/// An instance as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolMachineStatus {
    /// The node that it became.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ref: Option<ObjectReference>,
    /// Kubernetes version of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Azure's provisioning state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    /// Azure's name of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    /// One word for why it failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Why it failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Operations that Azure has not finished.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
    /// Whether the instance has the newest model.
    #[serde(default)]
    pub latest_model_applied: bool,
    /// Whether the node is there and ready.
    #[serde(default)]
    pub ready: bool,
    /// The instance's number within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The one operation that is under way, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_running_operation_state: Option<Future>,
}
