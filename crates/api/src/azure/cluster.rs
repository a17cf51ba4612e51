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
    /// An AzureCluster describes a cluster's infrastructure on Azure: region, resource group, network and identity.
    pub struct AzureCluster { spec: AzureClusterSpec, status: AzureClusterStatus }
    NamespaceResourceScope "infrastructure.cluster.x-k8s.io" / "v1beta1" / "azureclusters"
}

string_enum! {
    /// The kind of extended location. Azure has one kind, the edge zone.
    pub enum ExtendedLocationType {
        EdgeZone = "EdgeZone",
    }
}

string_enum! {
    /// The group of the cloud provider's calls that a rate limit applies to.
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

/// An edge zone, which extends an Azure region.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtendedLocationSpec {
    /// Name of the edge zone.
    pub name: String,
    /// Kind of the extended location. Must be EdgeZone.
    #[serde(rename = "type")]
    pub type_: ExtendedLocationType,
}

/// Rate limits for the calls that the cloud provider sends to Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitConfig {
    /// Whether the cloud provider limits the rate of its calls.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_rate_limit: bool,
    /// Maximum read calls per second.
    #[serde(rename = "cloudProviderRateLimitQPS", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps: Option<Quantity>,
    /// Maximum read calls in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket: Option<i64>,
    /// Maximum write calls per second.
    #[serde(rename = "cloudProviderRateLimitQPSWrite", skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_qps_write: Option<Quantity>,
    /// Maximum write calls in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_rate_limit_bucket_write: Option<i64>,
}

/// Rate limits for one group of calls.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RateLimitSpec {
    /// Name of the group of calls.
    pub name: RateLimitName,
    /// Rate limits for this group of calls.
    #[serde(default, skip_serializing_if = "is_default")]
    pub config: RateLimitConfig,
}

/// Settings for the retries of the cloud provider.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackOffConfig {
    /// Whether the cloud provider retries failed calls.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cloud_provider_backoff: bool,
    /// Maximum number of retries of a failed call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_retries: Option<i64>,
    /// Factor by which the wait grows after each retry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_exponent: Option<Quantity>,
    /// Wait before the first retry, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_duration: Option<i64>,
    /// Random share that is added to each wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_backoff_jitter: Option<Quantity>,
}

/// Settings that are passed to the cluster's cloud provider.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CloudProviderConfigOverrides {
    /// Rate limits, by group of calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate_limits: Vec<RateLimitSpec>,
    /// Settings for the retries of failed calls.
    #[serde(default, skip_serializing_if = "is_default")]
    pub back_offs: BackOffConfig,
}

/// Desired state of a cluster's infrastructure on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterSpec {
    /// ID of the subscription that holds the cluster's resources.
    #[serde(rename = "subscriptionID", skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("pattern" = names::SUBSCRIPTION),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub subscription_id: Option<String>,
    /// Azure region of the cluster.
    #[schemars(
        extend("pattern" = names::LOCATION),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub location: String,
    /// Edge zone in which machines are created, instead of in the region itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_location: Option<ExtendedLocationSpec>,
    /// Tags that are set on every Azure resource of the cluster, beside those of Cluster API.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub additional_tags: BTreeMap<String, String>,
    /// Reference to the AzureClusterIdentity with which controllers sign in to Azure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity_ref: Option<ObjectReference>,
    /// Name of the Azure cloud, such as AzurePublicCloud, AzureChinaCloud or AzureUSGovernmentCloud.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [immutable("field is immutable")]))]
    pub azure_environment: Option<String>,
    /// Settings of the cluster's cloud provider that differ from the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_provider_config_overrides: Option<CloudProviderConfigOverrides>,
    /// Failure domains (availability zones) of the cluster. Read from Azure when unset.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// Network of the cluster: virtual network, subnets, load balancers and private DNS.
    #[serde(default, skip_serializing_if = "is_default")]
    pub network_spec: NetworkSpec,
    /// Resource group that holds the cluster's resources.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("pattern" = names::RESOURCE_GROUP),
        extend("x-kubernetes-validations" = [immutable("field is immutable")])
    )]
    pub resource_group: Option<String>,
    /// Bastion host through which administrators reach the machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bastion_spec: BastionSpec,
    /// Whether this object manages the control plane. False when another provider manages it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = true))]
    pub control_plane_enabled: Option<bool>,
    /// Host and port at which clients reach the API server.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("x-kubernetes-validations" = endpoint_rules()))]
    pub control_plane_endpoint: ApiEndpoint,
}

/// Observed state of a cluster's infrastructure on Azure.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AzureClusterStatus {
    /// Failure domains (availability zones) in which machines can be created.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failure_domains: BTreeMap<String, ClusterFailureDomain>,
    /// Whether the cluster's infrastructure is complete, so that machines can be created.
    #[serde(default)]
    pub ready: bool,
    /// Conditions of the cluster, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Operations that Azure has not completed yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long_running_operation_states: Vec<Future>,
}

fn endpoint_rules() -> [Rule; 2] {
    [
        rule("oldSelf.host == '' || self.host == oldSelf.host", "field is immutable").at(".host"),
        rule("oldSelf.port == 0 || self.port == oldSelf.port", "field is immutable").at(".port"),
    ]
}
