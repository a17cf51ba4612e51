//! VSphereMachine and its template.

use super::clone::{VirtualMachineCloneSpec, power_rules};
use crate::cel::{Rule, rule};
use crate::common::{Condition, MachineAddress, TemplateMeta, V1Beta2Status, is_default};
use crate::duration::{Duration, lenient};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// A VSphereMachine is one machine of a cluster on vSphere.
    pub struct VSphereMachine { spec: VSphereMachineSpec, status: VSphereMachineStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheremachines"
}

resource! {
    /// A VSphereMachineTemplate is a template from which VSphereMachines are created.
    pub struct VSphereMachineTemplate { spec: VSphereMachineTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheremachinetemplates"
}

string_enum! {
    /// The way in which a virtual machine is powered off: at once, by its guest, or by its guest and after a timeout at
    /// once.
    pub enum PowerOffMode {
        Hard = "hard",
        Soft = "soft",
        TrySoft = "trySoft",
    }
}

/// The naming of virtual machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereVMNamingStrategy {
    /// Go template of the virtual machine's name. It can use .machine.name and the function random.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

/// Desired state of a machine on vSphere.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = power_rules()))]
pub struct VSphereMachineSpec {
    /// Template and settings of the virtual machine.
    #[serde(flatten)]
    pub clone_spec: VirtualMachineCloneSpec,
    /// Provider ID of the machine: vsphere:// followed by its BIOS UUID.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Name of the machine's failure domain, a VSphereDeploymentZone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// Way in which the virtual machine is powered off: hard, soft or trySoft.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "hard"))]
    pub power_off_mode: Option<PowerOffMode>,
    /// Time that the guest has to shut down before Capstan powers the virtual machine off, with trySoft. 5 minutes when
    /// unset.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub guest_soft_power_off_timeout: Option<Duration>,
    /// Naming of the virtual machine. The name of the machine when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub naming_strategy: Option<VSphereVMNamingStrategy>,
}

/// Observed state of a network device.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    /// Whether the device is connected.
    #[serde(default)]
    pub connected: bool,
    /// IP addresses of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addrs: Vec<String>,
    /// MAC address of the device.
    pub mac_addr: String,
    /// Name of the vSphere network that the device is connected to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
}

/// Observed state of a machine on vSphere.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineStatus {
    /// Whether the virtual machine runs and has an IP address.
    #[serde(default)]
    pub ready: bool,
    /// Addresses of the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<MachineAddress>,
    /// Network devices of the virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<NetworkStatus>,
    /// Reason of a failure that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Description of a failure that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    /// Conditions of the machine, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Conditions in the form of Cluster API v1beta2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

/// Template of a VSphereMachine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateResource {
    /// Labels and annotations of the created machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: TemplateMeta,
    /// Spec of the created machine.
    #[schemars(extend("x-kubernetes-validations" = template_rules()))]
    pub spec: VSphereMachineSpec,
}

/// Desired state of a VSphereMachineTemplate.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateSpec {
    /// Template of the machines.
    pub template: VSphereMachineTemplateResource,
}

fn template_rules() -> Vec<Rule> {
    const NO_ADDRESSES: &str = "self.network.devices.all(device, !has(device.ipAddrs) || size(device.ipAddrs) == 0)";
    let own = [
        rule("self.?providerID.orValue('') == ''", "cannot be set in templates")
            .at(".providerID")
            .forbidden(),
        rule(NO_ADDRESSES, "ipAddrs cannot be set in templates")
            .at(".network.devices")
            .forbidden(),
    ];
    own.into_iter().chain(power_rules()).collect()
}
