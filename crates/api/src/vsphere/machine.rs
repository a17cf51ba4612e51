//! VSphereMachine and its template.

use super::clone::{VirtualMachineCloneSpec, power_rules};
use crate::cel::{Rule, immutable, rule};
use crate::common::{Condition, MachineAddress, TemplateMeta, V1Beta2Status, is_default};
use kube::core::Duration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// One machine of a cluster on vSphere.
    pub struct VSphereMachine { spec: VSphereMachineSpec, status: VSphereMachineStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vspheremachines"
}

resource! {
    /// A template that machines are made from.
    pub struct VSphereMachineTemplate { spec: VSphereMachineTemplateSpec }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "vspheremachinetemplates"
}

string_enum! {
    pub enum PowerOffMode {
        Hard = "hard",
        Soft = "soft",
        TrySoft = "trySoft",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereVMNamingStrategy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = power_rules()))]
pub struct VSphereMachineSpec {
    #[serde(flatten)]
    pub clone_spec: VirtualMachineCloneSpec,
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "hard"))]
    pub power_off_mode: Option<PowerOffMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = crate::common::DURATION))]
    pub guest_soft_power_off_timeout: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub naming_strategy: Option<VSphereVMNamingStrategy>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    #[serde(default)]
    pub connected: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_addrs: Vec<String>,
    pub mac_addr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineStatus {
    #[serde(default)]
    pub ready: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<MachineAddress>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<NetworkStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_message: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<V1Beta2Status>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateResource {
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: TemplateMeta,
    #[schemars(extend("x-kubernetes-validations" = template_rules()))]
    pub spec: VSphereMachineSpec,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VSphereMachineTemplateSpec {
    pub template: VSphereMachineTemplateResource,
}

fn template_rules() -> Vec<Rule> {
    const NO_ADDRESSES: &str = "self.network.devices.all(device, !has(device.ipAddrs) || size(device.ipAddrs) == 0)";
    let own = [
        immutable(super::TEMPLATE_FROZEN),
        rule("self.?providerID.orValue('') == ''", "cannot be set in templates")
            .at(".providerID")
            .forbidden(),
        rule(NO_ADDRESSES, "ipAddrs cannot be set in templates")
            .at(".network.devices")
            .forbidden(),
    ];
    own.into_iter().chain(power_rules()).collect()
}
