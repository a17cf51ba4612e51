//! The scale set that a pool asks for, and the hash that distinguishes machines of an older model.
//!
//! Invariant: everything in the spec that makes an instance what it is goes into the hash; what changes by itself (the
//! capacity, bootstrap tokens, Azure's catalogue, our own defaults) does not. So a change of any field reaches the
//! instances, and neither a rotated bootstrap token nor a newer version of this program replaces one.

mod marketplace;
mod profile;
mod replacing;
mod ssh;

pub use replacing::replacing;
pub use ssh::generate as generate_ssh_key;

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_api::azure::{
    AzureCluster, AzureMachinePool, AzureMachinePoolSpec, AzureMachinePoolTemplate, Image, OrchestrationMode,
    VmIdentity,
};
use capstan_api::capi::MachinePool;
use capstan_azure::model::{
    ManagedIdentities, ScaleInPolicy, ScaleSet, ScaleSetOsProfile, ScaleSetProperties, Sku, Tags, UpgradePolicy,
    VirtualMachineProfile,
};
use capstan_azure::{ResourceId, Size};
use capstan_core::disks::azure::ultra_unsupported;
use capstan_core::pool::{CLUSTER_TAG_PREFIX, POOL_TAG};
use capstan_core::validate::azure_pool::ultra_enabled;
use kube::ResourceExt;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::error::Error;

/// The tag that carries the hash of the model that the scale set was last given.
pub const HASH_TAG: &str = "capstan-model";
/// The tag that carries the hash of the custom data, tokens and all, that new instances get.
pub const CUSTOM_DATA_TAG: &str = "capstan-custom-data";

/// The tag by which CAPZ knows whether the custom data has changed. Without it, CAPZ would replace the machines of a pool that
/// it gets back.
pub const PEER_DATA_TAG: &str = "capz-custom-data-hash";

/// A Windows computer has 15 letters for its name, six of which are Azure's.
const LONGEST_WINDOWS_NAME: usize = 9;
/// Flexible sets must name the version of the network API that makes their interfaces.
const NETWORK_API: &str = "2020-11-01";

/// What a scale set is made from.
pub struct Input<'a> {
    pub pool: &'a AzureMachinePool,
    pub machine_pool: &'a MachinePool,
    pub cluster_name: &'a str,
    pub azure_cluster: &'a AzureCluster,
    pub subscription: &'a str,
    /// The bootstrap data as the secret holds it.
    pub bootstrap: &'a [u8],
    /// What Azure's catalogue says of the size; used where the spec leaves the choice to us.
    pub accelerated_networking: bool,
}

/// The scale set that is wanted, without its capacity.
#[derive(Clone, Debug)]
pub struct Model {
    pub group: String,
    pub name: String,
    pub set: ScaleSet,
    /// Of all that makes an instance what it is.
    pub hash: String,
    /// Of the custom data that new instances get.
    pub custom_data_hash: String,
    pub image: Image,
}

impl Input<'_> {
    pub fn group(&self) -> String {
        group(self.azure_cluster, self.cluster_name)
    }

    pub fn name(&self) -> String {
        set_name(self.pool)
    }

    fn id(&self, provider: &str, group: &str, kind: &str, name: &str) -> ResourceId {
        ResourceId::new(self.subscription, group, provider, kind, name)
    }

    fn flexible(&self) -> bool {
        self.pool.spec.orchestration_mode == Some(OrchestrationMode::Flexible)
    }

    /// The pool's zones.
    pub fn zones(&self) -> Vec<String> {
        zones(self.machine_pool)
    }
}

/// The scale set's name: the pool's, but for Windows, where the names of computers begin with it and have to be short.
pub fn set_name(pool: &AzureMachinePool) -> String {
    let name = pool.name_any();
    let windows = pool.spec.template.os_disk.os_type.as_deref() == Some("Windows");
    match name.len().checked_sub(5) {
        Some(tail) if windows && name.len() > LONGEST_WINDOWS_NAME => format!("win-{}", &name[tail..]),
        _ => name,
    }
}

/// The resource group of a cluster: its own, or one named after it.
pub fn group(cluster: &AzureCluster, cluster_name: &str) -> String {
    let named = cluster.spec.resource_group.clone().filter(|group| !group.is_empty());
    named.unwrap_or_else(|| cluster_name.to_owned())
}

/// The zones that the MachinePool names, in order and once.
pub fn zones(machine_pool: &MachinePool) -> Vec<String> {
    let mut zones = machine_pool.spec.failure_domains.clone();
    if zones.is_empty() {
        zones.extend(machine_pool.spec.template.spec.failure_domain.clone());
    }
    zones.retain(|zone| !zone.is_empty());
    zones.sort();
    zones.dedup();
    zones
}

/// Builds the scale set that a pool asks for.
pub fn build(input: &Input<'_>) -> Result<Model, Error> {
    let pool = &input.pool.spec;
    let (image, reference, plan) = profile::image(input)?;
    let profile = VirtualMachineProfile {
        os_profile: Some(profile::os(input)),
        storage_profile: Some(profile::storage(input, reference)),
        network_profile: Some(profile::network(input)?),
        security_profile: profile::security(input),
        diagnostics_profile: profile::diagnostics(input),
        extension_profile: profile::extensions(input),
        scheduled_events_profile: profile::terminate_notification(input),
        ..profile::spot(input)?
    };
    let flexible = input.flexible();
    let zones = input.zones();
    let properties = ScaleSetProperties {
        orchestration_mode: Some(if flexible { "Flexible" } else { "Uniform" }.to_owned()),
        upgrade_policy: (!flexible).then(|| UpgradePolicy {
            mode: Some("Manual".to_owned()),
            ..Default::default()
        }),
        overprovision: (!flexible).then_some(false),
        // One placement group would end at 100 instances, and cannot be left later.
        single_placement_group: Some(false),
        platform_fault_domain_count: pool.platform_fault_domain_count.or(flexible.then_some(1)),
        // Azure refuses to balance fewer than two zones.
        zone_balance: pool.zone_balance.filter(|_| zones.len() > 1),
        // Should capacity ever be lowered while an instance is being made, the one without work goes.
        scale_in_policy: (!flexible).then(|| ScaleInPolicy {
            rules: Some(vec!["NewestVM".to_owned()]),
            ..Default::default()
        }),
        additional_capabilities: ultra_enabled(&pool.template).map(|enabled| {
            capstan_azure::model::AdditionalCapabilities {
                ultra_ssd_enabled: Some(enabled),
                ..Default::default()
            }
        }),
        virtual_machine_profile: Some(profile),
        ..Default::default()
    };
    let mut set = ScaleSet {
        location: Some(pool.location.clone()),
        zones: (!zones.is_empty()).then_some(zones),
        sku: Some(sku(&pool.template.vm_size, None)),
        plan,
        identity: identity(input),
        tags: Some(tags(input)),
        properties: Some(properties),
        ..Default::default()
    };
    let hash = model_hash(input, &set);
    let custom_data_hash = digest(input.bootstrap);
    let tags = set.tags.get_or_insert_default();
    tags.insert(HASH_TAG.to_owned(), hash.clone());
    tags.insert(CUSTOM_DATA_TAG.to_owned(), custom_data_hash.clone());
    tags.insert(PEER_DATA_TAG.to_owned(), peer_digest(input.bootstrap));
    Ok(Model {
        group: input.group(),
        name: input.name(),
        set,
        hash,
        custom_data_hash,
        image,
    })
}

/// The model that a scale set has, with newer bootstrap data: new instances of a pool whose spec cannot say another one are
/// made from it.
pub fn present(set: &ScaleSet, hash: &str, bootstrap: &[u8]) -> Model {
    let os = ScaleSetOsProfile {
        custom_data: Some(BASE64.encode(bootstrap)),
        ..Default::default()
    };
    Model {
        group: String::new(),
        name: set.name.clone().unwrap_or_default(),
        set: ScaleSet {
            sku: set.sku.clone(),
            tags: Some(Tags::from([(PEER_DATA_TAG.to_owned(), peer_digest(bootstrap))])),
            properties: Some(ScaleSetProperties {
                virtual_machine_profile: Some(VirtualMachineProfile {
                    os_profile: Some(os),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        },
        hash: hash.to_owned(),
        custom_data_hash: digest(bootstrap),
        image: Image::default(),
    }
}

/// Checks what only Azure's catalogue knows: the size exists where the pool wants it, and can do what the pool asks of it.
pub fn check_size(input: &Input<'_>, size: &Size) -> Result<(), Error> {
    let refusal = size_refusal(&input.pool.spec, &input.zones(), size);
    refusal.map_or(Ok(()), |refusal| Err(Error::Invalid(refusal)))
}

/// Why instances of this size cannot carry what the pool asks for in these zones.
pub fn size_refusal(spec: &AzureMachinePoolSpec, zones: &[String], size: &Size) -> Option<String> {
    let template = &spec.template;
    let (name, location) = (&template.vm_size, &spec.location);
    if ultra_enabled(template) == Some(true) {
        let lacking: Vec<&str> = zones
            .iter()
            .map(String::as_str)
            .filter(|zone| !size.supports_ultra(Some(zone)))
            .collect();
        let supported = if zones.is_empty() {
            size.supports_ultra(None)
        } else {
            lacking.is_empty()
        };
        if !supported {
            let place = match lacking.as_slice() {
                [] => location.clone(),
                lacking => format!("{location}, zones {}", lacking.join(", ")),
            };
            return Some(ultra_unsupported(name, &place));
        }
    }
    let disks = template.data_disks.len();
    let most = size.max_data_disks.filter(|most| disks > *most as usize)?;
    Some(format!(
        "spec.template.dataDisks: Invalid value: {disks}: vm size {name} takes no more than {most} data disks"
    ))
}

/// A SKU of this size, with a capacity where one is to be set.
pub fn sku(size: &str, capacity: Option<usize>) -> Sku {
    Sku {
        name: Some(size.to_owned()),
        tier: Some("Standard".to_owned()),
        capacity: capacity.and_then(|n| i64::try_from(n).ok()),
        ..Default::default()
    }
}

fn identity(input: &Input<'_>) -> Option<ManagedIdentities> {
    let spec = &input.pool.spec;
    let kind = spec.identity.as_ref().filter(|kind| **kind != VmIdentity::None)?;
    let ids = spec.user_assigned_identities.iter().map(|identity| {
        let id = identity
            .provider_id
            .strip_prefix("azure://")
            .unwrap_or(&identity.provider_id);
        (id.to_owned(), serde_json::json!({}))
    });
    let assigned: BTreeMap<_, _> = ids.collect();
    Some(ManagedIdentities {
        kind: Some(kind.as_str().to_owned()),
        user_assigned_identities: (!assigned.is_empty()).then_some(assigned),
        ..Default::default()
    })
}

/// Tags that are about the model, and not the user's.
pub const OWN_TAGS: [&str; 3] = [HASH_TAG, CUSTOM_DATA_TAG, PEER_DATA_TAG];

/// The cluster's tags, the pool's own over them, and the marks by which the resource is known as the cluster's.
fn tags(input: &Input<'_>) -> Tags {
    let mut tags = input.azure_cluster.spec.additional_tags.clone();
    tags.extend(input.pool.spec.additional_tags.clone());
    let cluster = input.cluster_name;
    tags.insert(format!("{CLUSTER_TAG_PREFIX}{cluster}"), "owned".to_owned());
    tags.insert(
        "sigs.k8s.io_cluster-api-provider-azure_role".to_owned(),
        "node".to_owned(),
    );
    // The cloud provider knows the cluster's resources by it.
    tags.insert(format!("kubernetes.io_cluster_{cluster}"), "owned".to_owned());
    tags.insert("Name".to_owned(), input.name());
    tags.insert(POOL_TAG.to_owned(), pool_tag(input.pool));
    tags
}

/// Returns the value of the tag by which a scale set is known as the pool's.
pub fn pool_tag(pool: &AzureMachinePool) -> String {
    match pool.namespace() {
        Some(namespace) => format!("{namespace}/{}", pool.name_any()),
        None => pool.name_any(),
    }
}

/// What the hash is taken of: the user's wishes, and never our own defaults. A later version that fills them in otherwise
/// gets the same hash, so that an upgrade replaces no machine. A field that is added here must be left out of the text
/// while it is unset.
#[derive(Serialize)]
struct Hashed<'a> {
    location: &'a str,
    template: &'a AzureMachinePoolTemplate,
    orchestration_mode: &'a Option<OrchestrationMode>,
    identity: Option<&'a VmIdentity>,
    user_assigned_identities: Vec<&'a str>,
    platform_fault_domain_count: Option<i32>,
    zone_balance: Option<bool>,
    zones: Vec<String>,
    /// The Kubernetes version, where it chooses the image.
    version: Option<&'a str>,
    /// The edition of Windows Server that the annotation names, where it chooses the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    windows: Option<&'a str>,
    /// The subnets and backend pools of the network interfaces.
    network: Vec<String>,
}

/// The version of [`Hashed`], in front of the hash. A scale set whose hash is of another version is taken over like one
/// that somebody else made.
const HASH_VERSION: &str = "3-";

/// Returns the part of a hash that is about bootstrap data and SSH key. Azure's Update Instance API does not bring them to an
/// instance: only a new OS disk reads them.
pub fn bootstrap_part(hash: &str) -> &str {
    hash.rsplit('-').next().unwrap_or_default()
}

/// Whether this version of the program wrote the hash.
pub fn is_of_this_version(hash: &str) -> bool {
    hash.starts_with(HASH_VERSION)
}

fn model_hash(input: &Input<'_>, set: &ScaleSet) -> String {
    let spec = &input.pool.spec;
    let version = input.machine_pool.spec.template.spec.version.as_deref();
    let identity = spec.identity.as_ref().filter(|kind| **kind != VmIdentity::None);
    let hashed = Hashed {
        location: &spec.location,
        template: &spec.template,
        orchestration_mode: &spec.orchestration_mode,
        identity,
        user_assigned_identities: spec
            .user_assigned_identities
            .iter()
            .map(|identity| identity.provider_id.as_str())
            .collect(),
        platform_fault_domain_count: spec.platform_fault_domain_count,
        zone_balance: spec.zone_balance,
        zones: input.zones(),
        version: version.filter(|_| spec.template.image.is_none()),
        windows: profile::windows_annotation(input.pool).filter(|_| spec.template.image.is_none()),
        network: network_ids(set),
    };
    // A value of plain data always serializes.
    let text = serde_json::to_vec(&hashed).unwrap_or_default();
    let key = spec.template.ssh_public_key.as_deref().unwrap_or_default();
    let bootstrap = mask_tokens(&String::from_utf8_lossy(input.bootstrap));
    let bootstrap = digest(format!("{key}\n{bootstrap}").as_bytes());
    format!("{HASH_VERSION}{}-{bootstrap}", digest(&text))
}

/// The ids of the subnets and backend pools that a scale set's interfaces are in.
fn network_ids(set: &ScaleSet) -> Vec<String> {
    let profile = set.properties.as_ref().and_then(|p| p.virtual_machine_profile.as_ref());
    let network = profile.and_then(|profile| profile.network_profile.as_ref());
    let interfaces = network.and_then(|network| network.network_interface_configurations.as_ref());
    let interfaces = interfaces.into_iter().flatten().filter_map(|i| i.properties.as_ref());
    let addresses = interfaces.flat_map(|interface| interface.ip_configurations.iter().flatten());
    let addresses = addresses.filter_map(|address| address.properties.as_ref());
    let ids = addresses.flat_map(|address| {
        let pools = address.load_balancer_backend_address_pools.iter().flatten();
        address
            .subnet
            .iter()
            .chain(pools)
            .filter_map(|resource| resource.id.clone())
    });
    ids.collect()
}

/// Returns the hash that CAPZ takes of custom data: SHA-256 of its base64 text.
fn peer_digest(bootstrap: &[u8]) -> String {
    let hash = Sha256::digest(BASE64.encode(bootstrap));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Bootstrap tokens (`abcdef.0123456789abcdef`) replaced by a fixed text. Ignition carries files as data URLs, in which
/// what stands before a token may be the last digit of an escaped character (`token:%20abcdef…`).
fn mask_tokens(text: &str) -> String {
    let bytes = text.as_bytes();
    let plain = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let word = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let escaped = |at: usize| {
        let digits = at.checked_sub(2).and_then(|first| bytes.get(first..at));
        let sign = at.checked_sub(3).and_then(|sign| bytes.get(sign));
        sign == Some(&b'%') && digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let is_token = |at: usize| {
        (at..at + 6).all(|n| plain(bytes.get(n)))
            && bytes.get(at + 6) == Some(&b'.')
            && (at + 7..at + 23).all(|n| plain(bytes.get(n)))
            && !word(bytes.get(at + 23))
            && (at == 0 || !word(bytes.get(at - 1)) || escaped(at))
    };
    let mut masked = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if is_token(at) {
            masked.extend_from_slice(b"<token>");
            at += 23;
        } else {
            masked.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8_lossy(&masked).into_owned()
}

/// Sets the password that Azure asks for when a Windows scale set is created. Nobody gets to know it.
pub fn set_admin_password(set: &mut ScaleSet) -> Result<(), Error> {
    let profile = set.properties.as_mut().and_then(|p| p.virtual_machine_profile.as_mut());
    let os = profile.and_then(|profile| profile.os_profile.as_mut());
    if let Some(os) = os.filter(|os| os.windows_configuration.is_some()) {
        let mut random = [0; 60];
        aws_lc_rs::rand::fill(&mut random)
            .map_err(|_| Error::NotReady("the system has no random numbers for an adminPassword".to_owned()))?;
        // Azure wants characters of three kinds at least.
        os.admin_password = Some(format!("aA1-{}", encode(&random)));
    }
    Ok(())
}

fn encode(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

#[cfg(test)]
mod peer;
#[cfg(test)]
mod tests;
