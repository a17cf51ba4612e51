//! AzureCluster: subscription, region and network of a cluster.

use super::{
    names,
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
    /// What kind of extended location.
    pub enum ExtendedLocationType {
        EdgeZone = "EdgeZone",
    }
}

string_enum! {
    /// Which group of cloud provider calls a limit is for.
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

/// An edge zone beside a region.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtendedLocationSpec {
    /// Name of the edge zone.
    pub name: String,
    /// Kind of extended location.
    #[serde(rename = "type")]
    pub type_: ExtendedLocationType,
}

/// Limits of the cloud provider's calls to Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitConfig {
    /// Whether calls are limited at all.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_rate_limit: bool,
    /// Reading calls per second.
    #[serde(rename = "cloudProviderRateLimitQPS", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps: Option<Quantity>,
    /// Reading calls that may come at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket: Option<i64>,
    /// Writing calls per second.
    #[serde(rename = "cloudProviderRateLimitQPSWrite", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps_write: Option<Quantity>,
    /// Writing calls that may come at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket_write: Option<i64>,
}

/// Limits for one group of calls.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitSpec {
    /// The group of calls.
    pub name: RateLimitName,
    /// Its limits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub config: RateLimitConfig,
}

/// How the cloud provider retries.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackOffConfig {
    /// Whether failed calls are tried again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_backoff: bool,
    /// How often.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_retries: Option<i64>,
    /// By how much the wait grows each time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_exponent: Option<Quantity>,
    /// The first wait, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_duration: Option<i64>,
    /// How much the wait varies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_jitter: Option<Quantity>,
}

/// Settings passed on to the cluster's cloud provider.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudProviderConfigOverrides {
    /// Limits by group of calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate_limits: Vec<RateLimitSpec>,
    /// How failed calls are tried again.
    #[serde(default, skip_serializing_if = "is_default")]
    pub back_offs: BackOffConfig,
}

/// Where a cluster is on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterSpec {
    /// Subscription that everything is made in.
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("pattern" = names::SUBSCRIPTION),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub subscription_id: Option<String>,
    /// Azure region.
    #[schemars(
        extend("pattern" = names::LOCATION),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub location: String,
    /// Edge zone to use instead of the region itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_location: Option<ExtendedLocationSpec>,
    /// Tags for everything that is made in Azure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    /// The AzureClusterIdentity that signs in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<ObjectReference>,
    /// Which Azure: AzurePublicCloud, AzureChinaCloud, AzureUSGovernmentCloud and so on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub azure_environment: Option<String>,
    /// Settings of the cluster's cloud provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_config_overrides: Option<CloudProviderConfigOverrides>,
    /// Zones to use; found out when unset.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// The cluster's network.
    #[serde(default, skip_serializing_if = "is_default")]
    pub network_spec: NetworkSpec,
    /// Resource group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("pattern" = names::RESOURCE_GROUP),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub resource_group: Option<String>,
    /// The way in for administrators.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bastion_spec: BastionSpec,
    /// False when the control plane is looked after elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = true))]
    pub control_plane_enabled: Option<bool>,
    /// Where the API server answers.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-kubernetes-validations" = endpoint_rules()))]
    pub control_plane_endpoint: ApiEndpoint,
}

/// What has been found and done for a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterStatus {
    /// Zones that machines can be put into.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// Whether the network is there and machines can be made.
    #[serde(default)]
    pub ready: bool,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Operations that Azure has not finished.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
}

fn endpoint_rules() -> [Rule; 2] {
    [
        rule("oldSelf.host == '' || self.host == oldSelf.host", "field is immutable").at(".host"),
        rule("oldSelf.port == 0 || self.port == oldSelf.port", "field is immutable").at(".port"),
    ]
}
