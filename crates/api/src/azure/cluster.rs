//! AzureCluster: subscription, region and network of a cluster.

use super::{
    network::{BastionSpec, NetworkSpec},
    vm::Future,
};
use crate::cel::{Rule, immutable, rule};
use crate::common::{ApiEndpoint, ClusterFailureDomain, Condition, Quantity, is_default, is_false};
use k8s_openapi::api::core::v1::ObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

resource! {
    /// The Azure side of a cluster.
    pub struct AzureCluster { spec: AzureClusterSpec, status: AzureClusterStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azureclusters"
}

string_enum! {
    pub enum ExtendedLocationType {
        EdgeZone = "EdgeZone",
    }
}

string_enum! {
    pub enum RateLimitName {
        DefaultRateLimit = "defaultRateLimit",
        RouteRateLimit = "routeRateLimit",
        SubnetsRateLimit = "subnetsRateLimit",
        InterfaceRateLimit = "interfaceRateLimit",
        RouteTableRateLimit = "routeTableRateLimit",
        LoadBalancerRateLimit = "loadBalancerRateLimit",
        PublicIpAddressRateLimit = "publicIPAddressRateLimit",
        SecurityGroupRateLimit = "securityGroupRateLimit",
        VirtualMachineRateLimit = "virtualMachineRateLimit",
        StorageAccountRateLimit = "storageAccountRateLimit",
        DiskRateLimit = "diskRateLimit",
        SnapshotRateLimit = "snapshotRateLimit",
        VirtualMachineScaleSetRateLimit = "virtualMachineScaleSetRateLimit",
        VirtualMachineSizesRateLimit = "virtualMachineSizesRateLimit",
        AvailabilitySetRateLimit = "availabilitySetRateLimit",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtendedLocationSpec {
    pub name: String,
    #[serde(rename = "type")]
    pub type_: ExtendedLocationType,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitConfig {
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_rate_limit: bool,
    #[serde(rename = "cloudProviderRateLimitQPS", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket: Option<i64>,
    #[serde(rename = "cloudProviderRateLimitQPSWrite", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps_write: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket_write: Option<i64>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitSpec {
    pub name: RateLimitName,
    #[serde(default, skip_serializing_if = "is_default")]
    pub config: RateLimitConfig,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackOffConfig {
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_backoff: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_retries: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_exponent: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_duration: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_jitter: Option<Quantity>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudProviderConfigOverrides {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate_limits: Vec<RateLimitSpec>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub back_offs: BackOffConfig,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterSpec {
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub subscription_id: Option<String>,
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub location: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_location: Option<ExtendedLocationSpec>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<ObjectReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub azure_environment: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_config_overrides: Option<CloudProviderConfigOverrides>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub network_spec: NetworkSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub resource_group: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub bastion_spec: BastionSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = true))]
    pub control_plane_enabled: Option<bool>,
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-kubernetes-validations" = endpoint_rules()))]
    pub control_plane_endpoint: ApiEndpoint,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterStatus {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    #[serde(default)]
    pub ready: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
}

fn endpoint_rules() -> [Rule; 2] {
    [
        rule("oldSelf.host == '' || self.host == oldSelf.host", "field is immutable").at(".host"),
        rule("oldSelf.port == 0 || self.port == oldSelf.port", "field is immutable").at(".port"),
    ]
}
