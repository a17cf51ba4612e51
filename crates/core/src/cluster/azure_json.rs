//! Decides about the Secret `<pool>-azure-json`: the settings of Azure's cloud provider, which KubeadmConfigs of CAPZ's templates put
//! into a file of each node.
//!
//! Invariants: the content is the one that CAPZ writes, byte for byte, so that neither changes what the other made. A Secret without
//! CAPZ's label of ownership is somebody else's, and stays as it is. Logs show the name of a Secret only.

use std::collections::BTreeMap;
use std::fmt;

use capstan_api::azure::{AzureCluster, AzureMachinePool, CloudProviderConfigOverrides, RateLimitConfig, SubnetRole};
use capstan_api::common::Quantity;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Serialize;
use serde_json::{Map, Number, Value};

use super::secrets::{NamedSecret, is_deleting};
use crate::plan::{Describe, Impact, Plan};

/// The value of the label that has the cluster's name as its key, on what belongs to the cluster.
const OWNED: &str = "owned";
/// The keys of the Secret: the last one is for templates of early versions of CAPZ.
const KEYS: [&str; 3] = ["control-plane-azure.json", "worker-node-azure.json", "azure.json"];

/// How the cloud provider on a node signs in to Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeIdentity {
    /// As the cluster does. The secret is there only if the namespace of the pool has it already.
    OfCluster {
        client_id: String,
        secret: crate::Secret,
    },
    SystemAssigned,
    UserAssigned {
        client_id: String,
    },
}

/// What the content depends on.
pub struct Input<'a> {
    pub pool: &'a AzureMachinePool,
    pub cluster: &'a AzureCluster,
    pub cluster_name: &'a str,
    /// The resource group of the cluster.
    pub group: &'a str,
    pub subscription: &'a str,
    pub tenant: &'a str,
    /// The name of the Azure cloud.
    pub cloud: &'a str,
    pub identity: &'a NodeIdentity,
}

/// The Secret of a pool.
#[derive(Clone, Debug)]
pub struct Observed {
    pub cluster_name: String,
    pub wanted: NamedSecret,
    pub found: Option<NamedSecret>,
}

/// One effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Create(NamedSecret),
    /// With the version that was read: another client's change is not overwritten.
    Replace(NamedSecret),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(secret) => write!(f, "creates Secret {secret:?}"),
            Self::Replace(secret) => write!(f, "updates Secret {secret:?}"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        Impact::Cluster
    }
}

/// Returns the name of the Secret of a pool.
pub fn name(pool: &str) -> String {
    format!("{pool}-azure-json")
}

pub fn plan(observed: &Observed) -> Plan<Step> {
    let Some(found) = &observed.found else {
        return Plan::step(Step::Create(observed.wanted.clone()));
    };
    let labels = found.0.metadata.labels.as_ref();
    let is_ours = labels.is_some_and(|labels| labels.get(&observed.cluster_name).is_some_and(|value| value == OWNED));
    if !is_ours || is_deleting(found) {
        return Plan::idle();
    }
    let owners = observed.wanted.0.metadata.owner_references.iter().flatten();
    let mut after = owners.fold(found.clone(), |secret, owner| secret.owned_by(owner));
    if after.0.data != observed.wanted.0.data {
        let mut changed = Secret::clone(&after.0);
        changed.data.clone_from(&observed.wanted.0.data);
        after = NamedSecret::new(changed);
    }
    match after == *found {
        true => Plan::idle(),
        false => Plan::step(Step::Replace(after)),
    }
}

/// Returns the Secret that a pool needs.
pub fn secret(input: &Input<'_>) -> Result<NamedSecret, serde_json::Error> {
    let meta = &input.pool.metadata;
    let pool = meta.name.clone().unwrap_or_default();
    let content = ByteString(content(input)?.into_bytes());
    let owner = meta.uid.clone().map(|uid| OwnerReference {
        api_version: AzureMachinePool::API_VERSION.to_owned(),
        kind: AzureMachinePool::KIND.to_owned(),
        name: pool.clone(),
        uid,
        controller: Some(true),
        ..OwnerReference::default()
    });
    Ok(NamedSecret::new(Secret {
        metadata: ObjectMeta {
            name: Some(name(&pool)),
            namespace: meta.namespace.clone(),
            labels: Some([(input.cluster_name.to_owned(), OWNED.to_owned())].into()),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from(KEYS.map(|key| (key.to_owned(), content.clone())))),
        ..Secret::default()
    }))
}

/// The settings, in the order in which CAPZ writes them.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Settings<'a> {
    cloud: &'a str,
    tenant_id: &'a str,
    subscription_id: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    aad_client_id: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    aad_client_secret: &'a str,
    resource_group: &'a str,
    security_group_name: String,
    security_group_resource_group: &'a str,
    location: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    extended_location_type: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    extended_location_name: &'a str,
    vm_type: &'static str,
    vnet_name: String,
    vnet_resource_group: &'a str,
    subnet_name: String,
    route_table_name: String,
    load_balancer_sku: &'static str,
    load_balancer_name: &'a str,
    maximum_load_balancer_rule_count: u32,
    use_managed_identity_extension: bool,
    use_instance_metadata: bool,
    enable_vmss_flex_nodes: bool,
    #[serde(rename = "userAssignedIdentityID", skip_serializing_if = "str::is_empty")]
    user_assigned_identity_id: &'a str,
    #[serde(flatten)]
    overrides: Map<String, Value>,
}

fn content(input: &Input<'_>) -> Result<String, serde_json::Error> {
    let spec = &input.cluster.spec;
    let network = &spec.network_spec;
    let or = |name: &str, default: &str| match name.is_empty() {
        true => format!("{}-{default}", input.cluster_name),
        false => name.to_owned(),
    };
    let subnet = network
        .subnets
        .iter()
        .find(|subnet| [SubnetRole::Node, SubnetRole::Cluster].contains(&subnet.role));
    let (mut security_group, mut route_table) = ("node-nsg", "node-routetable");
    if subnet.is_some_and(|subnet| subnet.role == SubnetRole::Cluster) {
        (security_group, route_table) = ("nsg", "routetable");
    }
    let subnet = subnet.cloned().unwrap_or_default();
    let vnet_group = network.vnet.resource_group.as_deref().filter(|group| !group.is_empty());
    let vnet_group = vnet_group.unwrap_or(input.group);
    let balancer = network.node_outbound_lb.as_ref();
    let (mut client_id, mut client_secret, mut user_assigned) = ("", "", "");
    match input.identity {
        NodeIdentity::OfCluster { client_id: id, secret } => (client_id, client_secret) = (id, secret.reveal()),
        NodeIdentity::SystemAssigned => {}
        NodeIdentity::UserAssigned { client_id } => user_assigned = client_id,
    }
    let edge = spec.extended_location.as_ref();
    let settings = Settings {
        cloud: input.cloud,
        tenant_id: input.tenant,
        subscription_id: input.subscription,
        aad_client_id: client_id,
        aad_client_secret: client_secret,
        resource_group: input.group,
        security_group_name: or(&subnet.security_group.name, security_group),
        security_group_resource_group: vnet_group,
        location: &spec.location,
        extended_location_type: edge.map(|edge| edge.type_.as_str()).unwrap_or_default(),
        extended_location_name: edge.map(|edge| edge.name.as_str()).unwrap_or_default(),
        vm_type: "vmss",
        vnet_name: or(&network.vnet.name, "vnet"),
        vnet_resource_group: vnet_group,
        subnet_name: or(&subnet.name, "node-subnet"),
        route_table_name: or(&subnet.route_table.name, route_table),
        load_balancer_sku: "Standard",
        load_balancer_name: balancer
            .and_then(|balancer| balancer.name.as_deref())
            .unwrap_or_default(),
        maximum_load_balancer_rule_count: 250,
        use_managed_identity_extension: !matches!(input.identity, NodeIdentity::OfCluster { .. }),
        use_instance_metadata: true,
        enable_vmss_flex_nodes: true,
        user_assigned_identity_id: user_assigned,
        overrides: spec
            .cloud_provider_config_overrides
            .as_ref()
            .map(overrides)
            .unwrap_or_default(),
    };
    let mut text = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    settings.serialize(&mut serde_json::Serializer::with_formatter(&mut text, format))?;
    // Go's encoder escapes what HTML would read. These characters are in strings only.
    let text = String::from_utf8_lossy(&text).replace('&', "\\u0026");
    Ok(text.replace('<', "\\u003c").replace('>', "\\u003e"))
}

/// Returns what a cluster sets for the cloud provider: first the limits of all calls, then those by group, then the retries.
fn overrides(wanted: &CloudProviderConfigOverrides) -> Map<String, Value> {
    const DEFAULT: &str = "defaultRateLimit";
    let mut all = Map::new();
    let of = |name: &str| {
        wanted
            .rate_limits
            .iter()
            .rev()
            .find(|limit| limit.name.as_str() == name)
    };
    all.extend(of(DEFAULT).map(|limit| rates(&limit.config)).into_iter().flatten());
    for name in [
        "routeRateLimit",
        "subnetsRateLimit",
        "interfaceRateLimit",
        "routeTableRateLimit",
        "loadBalancerRateLimit",
        "publicIPAddressRateLimit",
        "securityGroupRateLimit",
        "virtualMachineRateLimit",
        "storageAccountRateLimit",
        "diskRateLimit",
        "snapshotRateLimit",
        "virtualMachineScaleSetRateLimit",
        "virtualMachineSizesRateLimit",
        "availabilitySetRateLimit",
    ] {
        all.extend(of(name).map(|limit| (name.to_owned(), Value::Object(rates(&limit.config)))));
    }
    let retries = &wanted.back_offs;
    let fields = [
        ("cloudProviderBackoff", truth(retries.cloud_provider_backoff)),
        (
            "cloudProviderBackoffRetries",
            count(retries.cloud_provider_backoff_retries),
        ),
        (
            "cloudProviderBackoffExponent",
            amount(retries.cloud_provider_backoff_exponent.as_ref()),
        ),
        (
            "cloudProviderBackoffDuration",
            count(retries.cloud_provider_backoff_duration),
        ),
        (
            "cloudProviderBackoffJitter",
            amount(retries.cloud_provider_backoff_jitter.as_ref()),
        ),
    ];
    all.extend(present(fields));
    all
}

fn rates(limit: &RateLimitConfig) -> Map<String, Value> {
    let fields = [
        ("cloudProviderRateLimit", truth(limit.cloud_provider_rate_limit)),
        (
            "cloudProviderRateLimitQPS",
            single(limit.cloud_provider_rate_limit_qps.as_ref()),
        ),
        (
            "cloudProviderRateLimitBucket",
            count(limit.cloud_provider_rate_limit_bucket),
        ),
        (
            "cloudProviderRateLimitQPSWrite",
            single(limit.cloud_provider_rate_limit_qps_write.as_ref()),
        ),
        (
            "cloudProviderRateLimitBucketWrite",
            count(limit.cloud_provider_rate_limit_bucket_write),
        ),
    ];
    present(fields).collect()
}

fn present(fields: [(&'static str, Option<Value>); 5]) -> impl Iterator<Item = (String, Value)> {
    let set = fields.into_iter().filter_map(|(name, value)| Some((name, value?)));
    set.map(|(name, value)| (name.to_owned(), value))
}

fn truth(value: bool) -> Option<Value> {
    value.then_some(Value::Bool(true))
}

fn count(value: Option<i64>) -> Option<Value> {
    value.filter(|value| *value != 0).map(Value::from)
}

/// Returns a quantity as a number, without a fraction where it has none; `None` for nothing.
fn amount(quantity: Option<&Quantity>) -> Option<Value> {
    number(in_ones(quantity?)?)
}

/// As [`amount`], with the digits that a number of 32 bits has.
fn single(quantity: Option<&Quantity>) -> Option<Value> {
    #[allow(clippy::cast_possible_truncation, reason = "the cloud provider reads 32 bits")]
    let short = in_ones(quantity?)? as f32;
    number(short.to_string().parse().ok()?)
}

fn number(value: f64) -> Option<Value> {
    if value == 0.0 {
        return None;
    }
    let text = value.to_string();
    let whole = text.parse::<i64>().ok().map(Number::from);
    whole.or_else(|| Number::from_f64(value)).map(Value::Number)
}

fn in_ones(quantity: &Quantity) -> Option<f64> {
    let text = quantity.0.trim();
    let (digits, scale) = match text.as_bytes().last()? {
        b'm' => (&text[..text.len() - 1], 1e-3),
        b'u' => (&text[..text.len() - 1], 1e-6),
        b'k' => (&text[..text.len() - 1], 1e3),
        b'M' => (&text[..text.len() - 1], 1e6),
        _ => (text, 1.0),
    };
    Some(digits.parse::<f64>().ok()? * scale)
}

#[cfg(test)]
mod tests;
