//! VSphereMachine and its template.

use super::clone::{VirtualMachineCloneSpec, power_rules};
use crate::cel::{Rule, rule};
use crate::common::{Condition, MachineAddress, TemplateMeta, V1Beta2Status, is_default};
use crate::duration::{Duration, lenient};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// One machine of a cluster on vSphere.
    pub struct VSphereMachine { spec: VSphereMachineSpec, status: VSphereMachineStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheremachines"
}

resource! {
    /// A template that machines are made from.
    pub struct VSphereMachineTemplate { spec: VSphereMachineTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" as "v1beta2" / "vspheremachinetemplates"
}

string_enum! {
    /// How a machine is turned off: at once, by its guest, or by its guest and then at once.
    pub enum PowerOffMode {
        Hard = "hard",
        Soft = "soft",
        TrySoft = "trySoft",
    }
}

/// How virtual machines are called.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereVMNamingStrategy {
    /// Go template of the name, with .machine.name and random.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

/// A machine as it is to be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = power_rules()))]
pub struct VSphereMachineSpec {
    /// What it is cloned from and what it becomes.
    #[serde(flatten)]
    pub clone_spec: VirtualMachineCloneSpec,
    /// Which machine this is, as vsphere:// and its BIOS UUID.
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Failure domain that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// How it is turned off.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "hard"))]
    pub power_off_mode: Option<PowerOffMode>,
    /// How long its guest may take to shut down, with trySoft; 5 minutes when unset.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub guest_soft_power_off_timeout: Option<Duration>,
    /// How the virtual machine is called; as the machine when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub naming_strategy: Option<VSphereVMNamingStrategy>,
}

/// A network card as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    /// Whether it is connected.
    #[serde(default)]
    pub connected: bool,
    /// Its addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addrs: Vec<String>,
    /// Hardware address.
    pub mac_addr: String,
    /// Network that it is connected to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
}

/// A machine as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineStatus {
    /// Whether the machine is up and has an address.
    #[serde(default)]
    pub ready: bool,
    /// Its addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<MachineAddress>,
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
    /// The same as Cluster API v1beta2 wants it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

/// The machine to be made.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateResource {
    /// Labels and annotations of the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: TemplateMeta,
    /// The machine's spec.
    #[schemars(extend("x-kubernetes-validations" = template_rules()))]
    pub spec: VSphereMachineSpec,
}

/// A template of machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateSpec {
    /// The machine to be made.
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
