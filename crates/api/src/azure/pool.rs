//! AzureMachinePool: a scale set, its model and how a change of it rolls out.

use super::vm::{
    AdditionalCapabilities, DataDisk, Diagnostics, Future, Image, NetworkInterface, OsDisk, SecurityProfile,
    SpotVmOptions, SystemAssignedIdentityRole, UserAssignedIdentity, VmExtension,
};
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, is_default};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::Duration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

resource! {
    /// A scale set whose machines have a life of their own.
    pub struct AzureMachinePool { spec: AzureMachinePoolSpec, status: AzureMachinePoolStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azuremachinepools"
}

string_enum! {
    /// How machines of an old model become machines of the new one.
    pub enum RollingUpdateMode {
        Replace = "Replace",
        InPlace = "InPlace",
    }
}

string_enum! {
    pub enum VmIdentity {
        None = "None",
        SystemAssigned = "SystemAssigned",
        UserAssigned = "UserAssigned",
    }
}

string_enum! {
    pub enum StrategyType {
        RollingUpdate = "RollingUpdate",
    }
}

string_enum! {
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

string_enum! {
    pub enum OrchestrationMode {
        Flexible = "Flexible",
        Uniform = "Uniform",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = template_rules()))]
pub struct AzureMachinePoolTemplate {
    pub vm_size: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    pub os_disk: OsDisk,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_capabilities: Option<AdditionalCapabilities>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnostics: Option<Diagnostics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 5, "maximum" = 15))]
    pub terminate_notification_timeout: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subnet_name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_extensions: Vec<VmExtension>,
    #[serde(rename = "disableVMBootstrapExtension", skip_serializing_if = "Option::is_none")]
    pub disable_vm_bootstrap_extension: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_interfaces: Vec<NetworkInterface>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rolling_update_rules()))]
pub struct RollingUpdate {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 0))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_unavailable: Option<IntOrString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_surge: Option<IntOrString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Oldest"))]
    pub delete_policy: Option<DeletePolicy>,
    /// Whether an old machine is replaced by a new one or updated where it is. Replace when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<RollingUpdateMode>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Strategy {
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "RollingUpdate"))]
    pub type_: Option<StrategyType>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pool_rules()))]
pub struct AzureMachinePoolSpec {
    pub location: String,
    pub template: AzureMachinePoolTemplate,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    #[serde(rename = "providerIDList", default, skip_serializing_if = "Vec::is_empty")]
    pub provider_id_list: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub identity: Option<VmIdentity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_assigned_identity_role: Option<SystemAssignedIdentityRole>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user_assigned_identities: Vec<UserAssignedIdentity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_assignment_name: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-default" = default_strategy()))]
    pub strategy: Strategy,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Uniform"))]
    #[schemars(extend("x-kubernetes-validations" = [immutable("orchestrationMode is immutable")]))]
    pub orchestration_mode: Option<OrchestrationMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform_fault_domain_count: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone_balance: Option<bool>,
    /// How long a drain may take before the machine goes anyway; unset or 0 is without limit. The MachinePool's
    /// own setting comes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub node_drain_timeout: Option<Duration>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    pub latest_model_applied: bool,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolStatus {
    #[serde(default)]
    pub ready: bool,
    #[serde(default)]
    pub replicas: i32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<InstanceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infrastructure_machine_kind: Option<String>,
}

fn default_strategy() -> serde_json::Value {
    json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0, "deletePolicy": "Oldest" } })
}

fn budget_rules() -> [Rule; 1] {
    [rule(
        "type(self) == int ? self >= 0 : self.matches('^[0-9]+%$')",
        "must be a number of machines, 0 or more, or a percentage such as 25%",
    )]
}

fn rolling_update_rules() -> [Rule; 1] {
    const ROOM: &str = "!has(self.maxSurge) || !has(self.maxUnavailable) || \
        (type(self.maxSurge) == int ? self.maxSurge != 0 : !self.maxSurge.matches('^0+%$')) || \
        (type(self.maxUnavailable) == int ? self.maxUnavailable != 0 : !self.maxUnavailable.matches('^0+%$'))";
    [rule(
        ROOM,
        "rolling update strategy MaxUnavailable must not be 0 if MaxSurge is 0",
    )]
}

fn data_disks_rules() -> [Rule; 2] {
    [
        rule(
            "self.all(a, self.exists_one(b, a.nameSuffix == b.nameSuffix))",
            "each data disk must have a unique nameSuffix",
        ),
        rule(
            "self.all(a, !has(a.lun) || self.exists_one(b, has(b.lun) && a.lun == b.lun))",
            "each data disk must have a unique lun",
        ),
    ]
}

fn template_rules() -> [Rule; 2] {
    [
        rule(
            "self.?subnetName.orValue('') == '' || !has(self.networkInterfaces) || size(self.networkInterfaces) == 0",
            "cannot set both NetworkInterfaces and machine SubnetName",
        )
        .at(".subnetName"),
        rule(
            "!has(oldSelf.disableVMBootstrapExtension) || \
             self.?disableVMBootstrapExtension == oldSelf.?disableVMBootstrapExtension",
            "disableVMBootstrapExtension is immutable once it has been set",
        )
        .at(".disableVMBootstrapExtension"),
    ]
}

fn pool_rules() -> [Rule; 3] {
    [
        rule(
            "self.?identity.orValue('None') != 'UserAssigned' || \
             (has(self.userAssignedIdentities) && size(self.userAssignedIdentities) > 0)",
            "must be specified for the 'UserAssigned' identity type",
        )
        .at(".userAssignedIdentities"),
        rule(
            "!has(self.systemAssignedIdentityRole) || self.?identity.orValue('None') == 'SystemAssigned'",
            "systemAssignedIdentityRole can only be set when identity is set to 'SystemAssigned'",
        )
        .at(".systemAssignedIdentityRole"),
        rule(
            "self.?roleAssignmentName.orValue('') == '' || self.?systemAssignedIdentityRole.?name.orValue('') == ''",
            "cannot set both roleAssignmentName and systemAssignedIdentityRole.name",
        )
        .at(".systemAssignedIdentityRole"),
    ]
}
