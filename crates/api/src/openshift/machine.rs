//! Machine: one node's machine, its hooks and its phases.

use crate::common::{Condition, is_default};
use k8s_openapi::api::core::v1::{NodeAddress, ObjectReference, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

resource! {
    /// A Machine is one machine of a cluster.
    pub struct Machine { spec: MachineSpec, status: MachineStatus }
    NamespaceResourceScope "machine.openshift.io" / "v1beta1" / "machines"
}

string_enum! {
    /// The API that is authoritative for a machine.
    pub enum MachineAuthority {
        MachineApi = "MachineAPI",
        ClusterApi = "ClusterAPI",
        Migrating = "Migrating",
    }
}

string_enum! {
    /// The API from which the last synchronization copied.
    pub enum SynchronizedApi {
        MachineApi = "MachineAPI",
        ClusterApi = "ClusterAPI",
    }
}

/// Metadata of machines, or of a machine's node.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineMeta {
    /// Name of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Prefix of a name that the API server generates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generate_name: Option<String>,
    /// Namespace of the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Labels of the object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Owner references of the object.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["uid"]))]
    pub owner_references: Vec<OwnerReference>,
}

/// A hook that stops the deletion of a machine at one point until the hook's owner removes it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHook {
    /// Name of the hook, unique within its list.
    #[schemars(extend("pattern" = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"), extend("minLength" = 3), extend("maxLength" = 256))]
    pub name: String,
    /// Owner of the hook: the component or person that removes it.
    #[schemars(extend("minLength" = 3), extend("maxLength" = 512))]
    pub owner: String,
}

/// Hooks that stop the deletion of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHooks {
    /// Hooks that stop the deletion before the node is drained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub pre_drain: Vec<LifecycleHook>,
    /// Hooks that stop the deletion before the machine is deleted in its cloud.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub pre_terminate: Vec<LifecycleHook>,
}

/// Settings of a machine in its cloud.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProviderSpec {
    /// Content that the provider defines. On Azure, an AzureMachineProviderSpec.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("type" = "object", "x-kubernetes-preserve-unknown-fields" = true))]
    pub value: Option<Value>,
}

/// Desired state of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSpec {
    /// Labels and annotations that are copied to the node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: MachineMeta,
    /// Hooks that stop the deletion of the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lifecycle_hooks: LifecycleHooks,
    /// Taints that are added to those of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub taints: Vec<Taint>,
    /// Settings of the machine in its cloud.
    #[serde(default)]
    pub provider_spec: ProviderSpec,
    /// Provider ID of the machine, equal to that of its node.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// API that is authoritative for the machine: MachineAPI or ClusterAPI.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
}

/// The last operation on the machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// Description of the last operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Time at which the operation last changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// State of the last operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Type of the last operation.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
}

/// Observed state of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    /// Reference to the Node of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ref: Option<ObjectReference>,
    /// Time at which the status last changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// Reason of a failure that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    /// Description of a failure that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// Status that the provider writes. On Azure, an AzureMachineProviderStatus.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("type" = "object", "x-kubernetes-preserve-unknown-fields" = true))]
    pub provider_status: Option<Value>,
    /// Addresses of the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<NodeAddress>,
    /// Last operation on the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// Phase of the machine: Provisioning, Provisioned, Running, Deleting or Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Conditions of the machine, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// API that is authoritative for the machine now, or Migrating while this changes.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
    /// API from which the last synchronization copied.
    #[serde(rename = "synchronizedAPI", skip_serializing_if = "Option::is_none")]
    pub synchronized_api: Option<SynchronizedApi>,
    /// Generation of the authoritative object that was last synchronized.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub synchronized_generation: Option<i64>,
}
