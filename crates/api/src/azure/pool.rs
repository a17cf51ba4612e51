//! AzureMachinePool: a scale set, its model and how a change of it rolls out.

use super::names;
use super::vm::{
    AdditionalCapabilities, DataDisk, Diagnostics, Future, Image, NetworkInterface, OsDisk, SecurityProfile,
    SpotVmOptions, SystemAssignedIdentityRole, UserAssignedIdentity, VmExtension,
};
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, is_default};
use crate::duration::{Duration, lenient};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
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
    /// Which identity a machine has towards Azure.
    pub enum VmIdentity {
        None = "None",
        SystemAssigned = "SystemAssigned",
        UserAssigned = "UserAssigned",
    }
}

string_enum! {
    /// How a change of the model reaches the machines.
    pub enum StrategyType {
        RollingUpdate = "RollingUpdate",
        OnDelete = "OnDelete",
    }
}

string_enum! {
    /// Which machine goes first.
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

string_enum! {
    /// How Azure runs the scale set; Flexible instances are virtual machines of their own.
    pub enum OrchestrationMode {
        Flexible = "Flexible",
        Uniform = "Uniform",
    }
}

/// What the machines of a pool are like.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = template_rules()))]
pub struct AzureMachinePoolTemplate {
    /// Azure's name of the machine size.
    #[schemars(extend("pattern" = names::VM_SIZE))]
    pub vm_size: String,
    /// What the machines start from; an image for the Kubernetes version when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// The disk that the machine starts from.
    pub os_disk: OsDisk,
    /// Disks beside the OS disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    /// Public key for SSH, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    /// Deprecated: set it on a network interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
    /// What else a host must be able to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_capabilities: Option<AdditionalCapabilities>,
    /// Diagnostics of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnostics: Option<Diagnostics>,
    /// Minutes, 5 to 15, that a machine is told before it goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 5, "maximum" = 15))]
    pub terminate_notification_timeout: Option<i64>,
    /// How it is protected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    /// Runs on spare capacity.
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    /// Deprecated: set it on a network interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub subnet_name: Option<String>,
    /// Extensions that run on each machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_extensions: Vec<VmExtension>,
    /// Leaves out the extension that reports how bootstrapping went.
    #[serde(rename = "disableVMBootstrapExtension", skip_serializing_if = "Option::is_none")]
    pub disable_vm_bootstrap_extension: Option<bool>,
    /// Network interfaces; one in the node subnet when unset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_interfaces: Vec<NetworkInterface>,
}

/// How far a rolling update may go at once.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rolling_update_rules()))]
pub struct RollingUpdate {
    /// How many machines, or what share of them rounded down, may be unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 0))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_unavailable: Option<IntOrString>,
    /// How many machines, or what share of them rounded up, there may be beyond those wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_surge: Option<IntOrString>,
    /// Which machine goes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Oldest"))]
    pub delete_policy: Option<DeletePolicy>,
    /// Whether an old machine is replaced by a new one or updated where it is. Replace when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<RollingUpdateMode>,
}

/// How old machines become new ones.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Strategy {
    /// OnDelete gives machines a new model only when they are deleted.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "RollingUpdate"))]
    pub type_: Option<StrategyType>,
    /// How far it may go at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
}

/// A pool as it is to be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pool_rules()))]
pub struct AzureMachinePoolSpec {
    /// Azure region.
    #[schemars(extend("pattern" = names::LOCATION))]
    pub location: String,
    /// What the machines are like.
    pub template: AzureMachinePoolTemplate,
    /// Tags for everything that is made in Azure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    /// Resource ID of the scale set.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Provider IDs of the machines.
    #[serde(rename = "providerIDList", default, skip_serializing_if = "Vec::is_empty")]
    pub provider_id_list: Vec<String>,
    /// Which identity the machines have.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub identity: Option<VmIdentity>,
    /// Role of a system assigned identity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_assigned_identity_role: Option<SystemAssignedIdentityRole>,
    /// Identities that exist already.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user_assigned_identities: Vec<UserAssignedIdentity>,
    /// Deprecated: set systemAssignedIdentityRole.name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_assignment_name: Option<String>,
    /// How a change of the model reaches the machines.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-default" = default_strategy()))]
    pub strategy: Strategy,
    /// How Azure runs the scale set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Uniform"))]
    #[schemars(extend("x-kubernetes-validations" = [immutable("orchestrationMode is immutable")]))]
    pub orchestration_mode: Option<OrchestrationMode>,
    /// Fault domains that instances are spread over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform_fault_domain_count: Option<i32>,
    /// Whether Azure must keep the zones even.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone_balance: Option<bool>,
    /// How long a drain may take before the machine goes anyway; unset or 0 is without limit. The MachinePool's
    /// own setting comes first.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub node_drain_timeout: Option<Duration>,
    /// How long a machine may run without a node before it is replaced; 20m when unset, 0 is without limit.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub node_startup_timeout: Option<Duration>,
}

/// An instance as older controllers listed it; kept so that nothing is lost.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    /// Kubernetes version of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Azure's provisioning state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    /// Provider ID of the instance.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Number of the instance within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// Azure's name of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    /// Whether the instance has the newest model.
    pub latest_model_applied: bool,
}

/// A pool as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolStatus {
    /// Whether the scale set is there and its machines are being looked after.
    #[serde(default)]
    pub ready: bool,
    /// How many machines are ready.
    #[serde(default)]
    pub replicas: i32,
    /// No longer written: each instance has an AzureMachinePoolMachine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<InstanceStatus>,
    /// The image in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = Vec::<Rule>::new()))]
    pub image: Option<Image>,
    /// The Kubernetes version in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Azure's provisioning state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
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
    /// The kind that stands for one machine.
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
        (type(self.maxSurge) == int ? self.maxSurge != 0 : true) || \
        (type(self.maxUnavailable) == int ? self.maxUnavailable != 0 : true)";
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
