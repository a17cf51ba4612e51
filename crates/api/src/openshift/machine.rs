//! Machine: one node's machine, its hooks and its phases.

use crate::common::{Condition, is_default};
use k8s_openapi::api::core::v1::{NodeAddress, ObjectReference, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

resource! {
    /// One machine of a cluster.
    pub struct Machine { spec: MachineSpec, status: MachineStatus }
    NamespaceResourceScope "machine.openshift.io" / "v1beta1" / "machines"
}

string_enum! {
    /// Which API has the say over a machine.
    pub enum MachineAuthority {
        MachineApi = "MachineAPI",
        ClusterApi = "ClusterAPI",
        Migrating = "Migrating",
    }
}

string_enum! {
    /// Which API was last copied from.
    pub enum SynchronizedApi {
        MachineApi = "MachineAPI",
        ClusterApi = "ClusterAPI",
    }
}

/// Metadata for machines, or for a machine's node.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineMeta {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Beginning of a name to be made up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generate_name: Option<String>,
    /// Its namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Owners of the object.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["uid"]))]
    pub owner_references: Vec<OwnerReference>,
}

/// Something that must be done before a machine may go on being deleted.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHook {
    /// What must be done.
    #[schemars(extend("pattern" = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"), extend("minLength" = 3), extend("maxLength" = 256))]
    pub name: String,
    /// Who does it.
    #[schemars(extend("minLength" = 3), extend("maxLength" = 512))]
    pub owner: String,
}

/// Hooks that hold up deletion.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHooks {
    /// Held up before the node is drained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub pre_drain: Vec<LifecycleHook>,
    /// Held up before the machine is deleted on its cloud.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["name"]))]
    pub pre_terminate: Vec<LifecycleHook>,
}

/// What a machine is to be on its cloud.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProviderSpec {
    /// Content that the provider defines; on Azure an AzureMachineProviderSpec.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("type" = "object", "x-kubernetes-preserve-unknown-fields" = true))]
    pub value: Option<Value>,
}

/// A machine as it is to be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSpec {
    /// Labels and annotations for the node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: MachineMeta,
    /// Hooks that hold up deletion.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lifecycle_hooks: LifecycleHooks,
    /// Taints for the node, beside its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub taints: Vec<Taint>,
    /// What the machine is to be on its cloud.
    #[serde(default)]
    pub provider_spec: ProviderSpec,
    /// Which machine of the cloud this is; matches the node's.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Which API has the say.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
}

/// What was last done with the machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// What was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// When it was last seen to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// How it stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Kind of operation.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
}

/// A machine as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    /// The node that it became.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ref: Option<ObjectReference>,
    /// When it was last seen to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// One word for why the machine failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    /// Why the machine failed for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// What the provider knows; on Azure an AzureMachineProviderStatus.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("type" = "object", "x-kubernetes-preserve-unknown-fields" = true))]
    pub provider_status: Option<Value>,
    /// Its addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<NodeAddress>,
    /// What was last done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// Provisioning, Provisioned, Running, Deleting or Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Which API has the say.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
    /// Which API was last copied from.
    #[serde(rename = "synchronizedAPI", skip_serializing_if = "Option::is_none")]
    pub synchronized_api: Option<SynchronizedApi>,
    /// Generation that was last copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub synchronized_generation: Option<i64>,
}
