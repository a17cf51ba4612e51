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
    /// An AzureMachinePool is a scale set on Azure that Capstan updates machine by machine.
    pub struct AzureMachinePool { spec: AzureMachinePoolSpec, status: AzureMachinePoolStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azuremachinepools"
}

string_enum! {
    /// The way in which an outdated machine gets the new model.
    pub enum RollingUpdateMode {
        Replace = "Replace",
        InPlace = "InPlace",
    }
}

string_enum! {
    /// The kind of managed identity that a machine has.
    pub enum VmIdentity {
        None = "None",
        SystemAssigned = "SystemAssigned",
        UserAssigned = "UserAssigned",
    }
}

string_enum! {
    /// The strategy by which a new model reaches the machines.
    pub enum StrategyType {
        RollingUpdate = "RollingUpdate",
        OnDelete = "OnDelete",
    }
}

string_enum! {
    /// The order in which machines are deleted.
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

string_enum! {
    /// The orchestration mode of a scale set. Instances of mode Flexible are virtual machines of their own.
    pub enum OrchestrationMode {
        Flexible = "Flexible",
        Uniform = "Uniform",
    }
}

/// Template of the machines of a pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = template_rules()))]
pub struct AzureMachinePoolTemplate {
    /// Azure VM size of the machines, such as Standard_D4s_v3.
    #[schemars(extend("pattern" = names::VM_SIZE))]
    pub vm_size: String,
    /// Image from which the machines boot. Capstan chooses an image for the Kubernetes version when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// OS disk of the machines.
    pub os_disk: OsDisk,
    /// Data disks of the machines, beside the OS disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 64, "x-kubernetes-validations" = data_disks_rules()))]
    pub data_disks: Vec<DataDisk>,
    /// Public SSH key of the administrator, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_public_key: Option<String>,
    /// Deprecated: set acceleratedNetworking of a network interface instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerated_networking: Option<bool>,
    /// Additional capabilities of the machines, such as Ultra disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_capabilities: Option<AdditionalCapabilities>,
    /// Diagnostics settings of the machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnostics: Option<Diagnostics>,
    /// Minutes, 5 to 15, for which Azure announces the deletion to the machine before it deletes the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 5, "maximum" = 15))]
    pub terminate_notification_timeout: Option<i64>,
    /// Security settings of the machines: encryption at host, confidential VM and trusted launch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<SecurityProfile>,
    /// Settings of spot machines. The machines are ordinary ones when unset.
    #[serde(rename = "spotVMOptions", skip_serializing_if = "Option::is_none")]
    pub spot_vm_options: Option<SpotVmOptions>,
    /// Deprecated: set subnetName of a network interface instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = names::RESOURCE))]
    pub subnet_name: Option<String>,
    /// Extensions that Azure installs on each machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_extensions: Vec<VmExtension>,
    /// Whether Capstan leaves out the VM extension that reports the result of bootstrapping.
    #[serde(rename = "disableVMBootstrapExtension", skip_serializing_if = "Option::is_none")]
    pub disable_vm_bootstrap_extension: Option<bool>,
    /// Network interfaces of the machines. One interface in the node subnet when unset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_interfaces: Vec<NetworkInterface>,
}

/// Limits of a rolling update.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rolling_update_rules()))]
pub struct RollingUpdate {
    /// Maximum number of machines, or percentage rounded down, that may be unavailable during an update.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 0))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_unavailable: Option<IntOrString>,
    /// Maximum number of machines, or percentage rounded up, that may exist above the desired number during an update.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    #[schemars(extend("x-kubernetes-validations" = budget_rules()))]
    pub max_surge: Option<IntOrString>,
    /// Order in which machines are deleted: Random, Newest or Oldest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Oldest"))]
    pub delete_policy: Option<DeletePolicy>,
    /// Replace creates a new machine for an outdated one. InPlace updates the outdated machine. Replace when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<RollingUpdateMode>,
}

/// Strategy by which outdated machines are brought to the new model.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Strategy {
    /// Type of the strategy. With OnDelete, only machines that replace deleted ones get the new model.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "RollingUpdate"))]
    pub type_: Option<StrategyType>,
    /// Limits of a rolling update. Used with type RollingUpdate only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
}

/// Desired state of a machine pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = pool_rules()))]
pub struct AzureMachinePoolSpec {
    /// Azure region of the scale set.
    #[schemars(extend("pattern" = names::LOCATION))]
    pub location: String,
    /// Template of the machines.
    pub template: AzureMachinePoolTemplate,
    /// Tags that are set on every Azure resource of the pool, beside those of the cluster.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    /// Resource ID of the scale set, as a provider ID.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Provider IDs of the machines of the pool.
    #[serde(rename = "providerIDList", default, skip_serializing_if = "Vec::is_empty")]
    pub provider_id_list: Vec<String>,
    /// Kind of managed identity of the machines: None, SystemAssigned or UserAssigned.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "None"))]
    pub identity: Option<VmIdentity>,
    /// Role and scope of the system-assigned identity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_assigned_identity_role: Option<SystemAssignedIdentityRole>,
    /// User-assigned identities of the machines. Used with identity UserAssigned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub user_assigned_identities: Vec<UserAssignedIdentity>,
    /// Deprecated: set systemAssignedIdentityRole.name instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_assignment_name: Option<String>,
    /// Strategy by which a change of the template reaches the machines.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-default" = default_strategy()))]
    pub strategy: Strategy,
    /// Orchestration mode of the scale set: Uniform or Flexible.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "Uniform"))]
    #[schemars(extend("x-kubernetes-validations" = [immutable("orchestrationMode is immutable")]))]
    pub orchestration_mode: Option<OrchestrationMode>,
    /// Number of fault domains over which Azure spreads the instances.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform_fault_domain_count: Option<i32>,
    /// Whether Azure must keep the same number of instances in each zone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone_balance: Option<bool>,
    /// Maximum duration of a node's drain, after which the machine is deleted anyway. No limit when unset or 0. The
    /// timeout of the MachinePool takes precedence.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub node_drain_timeout: Option<Duration>,
    /// Maximum time that a machine may run without a node before Capstan replaces it. 20m when unset, no limit when 0.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub node_startup_timeout: Option<Duration>,
}

/// An instance as older controllers listed it in the status of the pool. Kept so that no value is lost.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    /// Kubernetes version of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Provisioning state that Azure reports for the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    /// Provider ID of the instance.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// ID of the instance within the scale set.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// Azure's name of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    /// Whether the instance has the current model of the scale set.
    pub latest_model_applied: bool,
}

/// Observed state of a machine pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureMachinePoolStatus {
    /// Whether the scale set exists and Azure has completed its creation.
    #[serde(default)]
    pub ready: bool,
    /// Number of machines that are ready.
    #[serde(default)]
    pub replicas: i32,
    /// No longer written: each instance has an AzureMachinePoolMachine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<InstanceStatus>,
    /// Image that the scale set uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = Vec::<Rule>::new()))]
    pub image: Option<Image>,
    /// Kubernetes version of the machines in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Provisioning state that Azure reports for the scale set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioning_state: Option<String>,
    /// Reason of a failure that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Description of a failure that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions of the pool, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Operations that Azure has not completed yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
    /// Kind of the objects that represent the pool's machines: AzureMachinePoolMachine.
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
