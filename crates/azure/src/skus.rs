//! The SKU catalogue: the capabilities of VM sizes in a region and its zones. Read once a day for each region, and kept small.

use crate::Error;
use crate::budget::policy::Policy;
use crate::client::{Call, Client};
use crate::error::{ArmError, null_is_empty};
use crate::path::Path;
use http::Method;
use parking_lot::Mutex;
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SKUS: &str = "2021-07-01";

/// New sizes and regions appear over weeks; a day is early enough.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// A size that the catalogue does not know may be newer than the catalogue: read again, but not more often than this.
const RECHECK: Duration = Duration::from_secs(600);

/// After a refusal the catalogue is read again after this long: role assignments take minutes to spread.
const REFUSED: Duration = Duration::from_secs(180);

/// The capabilities of a VM size in one region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub name: String,
    /// The family that Azure counts its vCPUs under.
    pub family: String,
    /// Zones of the region that have the size.
    pub zones: BTreeSet<String>,
    /// Zones in which it takes Ultra disks.
    pub ultra_zones: BTreeSet<String>,
    /// Whether it takes Ultra disks outside zones.
    pub ultra_regional: bool,
    pub max_data_disks: Option<u32>,
    pub premium_io: bool,
    pub ephemeral_os: bool,
    pub accelerated_networking: bool,
    pub encryption_at_host: bool,
    pub v_cpus: Option<u32>,
    /// Fewer than `v_cpus` on sizes that switch some of them off.
    pub v_cpus_available: Option<u32>,
    pub memory_mib: Option<u64>,
    pub gpus: Option<u32>,
    /// The placements of an ephemeral OS disk, in Azure's spelling. Empty where the catalogue names none.
    pub ephemeral_placements: BTreeSet<String>,
    /// The controllers that its disks can be attached to, in Azure's spelling. Empty where the catalogue names none.
    pub disk_controllers: BTreeSet<String>,
    pub architecture: Option<String>,
    /// Abilities that the catalogue denies. Abilities that it does not mention are left to Azure.
    pub lacks: BTreeSet<Ability>,
    /// Reasons why this subscription cannot have it here at all.
    pub restrictions: Vec<String>,
    /// Zones that this subscription cannot have.
    pub restricted_zones: BTreeSet<String>,
}

/// Something that a spec can request and that a size may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ability {
    PremiumDisks,
    EphemeralOsDisk,
    AcceleratedNetworking,
    EncryptionAtHost,
}

/// The abilities by their names in the catalogue.
const ABILITIES: [(&str, Ability); 4] = [
    ("PremiumIO", Ability::PremiumDisks),
    ("EphemeralOSDiskSupported", Ability::EphemeralOsDisk),
    ("AcceleratedNetworkingEnabled", Ability::AcceleratedNetworking),
    ("EncryptionAtHostSupported", Ability::EncryptionAtHost),
];

impl Size {
    /// Whether its disks are attached by NVMe and in no other way.
    pub fn is_nvme_only(&self) -> bool {
        let mut controllers = self.disk_controllers.iter();
        !self.disk_controllers.is_empty() && controllers.all(|name| name.eq_ignore_ascii_case("NVMe"))
    }

    /// Whether it takes Ultra disks in this zone, or outside zones for `None`.
    pub fn supports_ultra(&self, zone: Option<&str>) -> bool {
        match zone {
            Some(zone) => self.ultra_zones.contains(zone),
            None => self.ultra_regional,
        }
    }
}

/// All VM sizes of one region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Catalogue {
    pub location: String,
    sizes: HashMap<String, Size>,
    /// The most fault domains that an availability set with managed disks can have.
    pub max_fault_domains: Option<i32>,
}

impl Catalogue {
    pub fn new(location: &str, sizes: impl IntoIterator<Item = Size>) -> Self {
        let sizes = sizes.into_iter().map(|size| (size.name.to_lowercase(), size)).collect();
        Self {
            location: location.to_owned(),
            sizes,
            max_fault_domains: None,
        }
    }

    pub fn size(&self, name: &str) -> Option<&Size> {
        self.sizes.get(&name.to_lowercase())
    }

    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawSku {
    #[serde(default, deserialize_with = "null_is_empty")]
    resource_type: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    family: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    locations: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    location_info: Vec<LocationInfo>,
    #[serde(default, deserialize_with = "null_is_empty")]
    capabilities: Vec<Capability>,
    #[serde(default, deserialize_with = "null_is_empty")]
    restrictions: Vec<Restriction>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LocationInfo {
    #[serde(default, deserialize_with = "null_is_empty")]
    location: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    zones: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    zone_details: Vec<ZoneDetails>,
}

#[derive(Deserialize)]
struct ZoneDetails {
    // Azure really writes this one with a capital; some clones of it do not.
    #[serde(rename = "Name", alias = "name", default, deserialize_with = "null_is_empty")]
    names: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    capabilities: Vec<Capability>,
}

#[derive(Deserialize)]
struct Capability {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    value: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Restriction {
    #[serde(rename = "type", default, deserialize_with = "null_is_empty")]
    kind: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    reason_code: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    restriction_info: RestrictionInfo,
}

#[derive(Deserialize, Default)]
struct RestrictionInfo {
    #[serde(default, deserialize_with = "null_is_empty")]
    zones: Vec<String>,
}

fn value<'a>(capabilities: &'a [Capability], name: &str) -> Option<&'a str> {
    capabilities
        .iter()
        .find(|capability| capability.name.eq_ignore_ascii_case(name))
        .map(|c| c.value.as_str())
}

fn is_true(capabilities: &[Capability], name: &str) -> bool {
    value(capabilities, name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns the parts of a value that is a list separated by commas.
fn listed(capabilities: &[Capability], name: &str) -> BTreeSet<String> {
    let value = value(capabilities, name).unwrap_or_default();
    let parts = value.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(ToOwned::to_owned).collect()
}

/// Returns the maximum number of fault domains of availability sets in a region, if this entry has it.
fn max_fault_domains(sku: &RawSku, location: &str) -> Option<i32> {
    let here = sku.locations.iter().any(|other| other.eq_ignore_ascii_case(location));
    let aligned = sku.resource_type.eq_ignore_ascii_case("availabilitySets") && sku.name == "Aligned";
    let most = value(&sku.capabilities, "MaximumPlatformFaultDomainCount")?;
    (here && aligned).then(|| most.parse().ok()).flatten()
}

fn size(sku: RawSku, location: &str) -> Option<Size> {
    let here = sku
        .location_info
        .iter()
        .find(|info| info.location.eq_ignore_ascii_case(location));
    let offered = here.is_some() || sku.locations.iter().any(|other| other.eq_ignore_ascii_case(location));
    if !sku.resource_type.eq_ignore_ascii_case("virtualMachines") || !offered {
        return None;
    }
    let all = &sku.capabilities;
    let zone_details = here.map(|info| info.zone_details.as_slice()).unwrap_or_default();
    let by_zone = sku
        .restrictions
        .iter()
        .filter(|restriction| restriction.kind.eq_ignore_ascii_case("Zone"));
    Some(Size {
        zones: here
            .map(|info| info.zones.iter().cloned().collect())
            .unwrap_or_default(),
        ultra_zones: zone_details
            .iter()
            .filter(|details| is_true(&details.capabilities, "UltraSSDAvailable"))
            .flat_map(|details| details.names.iter().cloned())
            .collect(),
        ultra_regional: is_true(all, "UltraSSDAvailable"),
        max_data_disks: value(all, "MaxDataDiskCount").and_then(|value| value.parse().ok()),
        premium_io: is_true(all, "PremiumIO"),
        ephemeral_os: is_true(all, "EphemeralOSDiskSupported"),
        accelerated_networking: is_true(all, "AcceleratedNetworkingEnabled"),
        encryption_at_host: is_true(all, "EncryptionAtHostSupported"),
        family: sku.family,
        v_cpus: value(all, "vCPUs").and_then(|value| value.parse().ok()),
        v_cpus_available: value(all, "vCPUsAvailable").and_then(|value| value.parse().ok()),
        memory_mib: value(all, "MemoryGB")
            .and_then(|v| v.parse::<f64>().ok())
            .map(|gib| (gib * 1024.0) as u64),
        gpus: value(all, "GPUs").and_then(|value| value.parse().ok()),
        ephemeral_placements: listed(all, "SupportedEphemeralOSDiskPlacements"),
        disk_controllers: listed(all, "DiskControllerTypes"),
        lacks: ABILITIES
            .iter()
            .filter(|(word, _)| value(all, word).is_some_and(|value| value.eq_ignore_ascii_case("False")))
            .map(|(_, ability)| *ability)
            .collect(),
        architecture: value(all, "CpuArchitectureType").map(ToOwned::to_owned),
        restricted_zones: by_zone.flat_map(|r| r.restriction_info.zones.iter().cloned()).collect(),
        restrictions: sku
            .restrictions
            .iter()
            .filter(|restriction| restriction.kind.eq_ignore_ascii_case("Location"))
            .map(|restriction| restriction.reason_code.clone())
            .collect(),
        name: sku.name,
    })
}

/// The catalogue, or Azure's refusal.
type Outcome = Result<Arc<Catalogue>, (String, Box<ArmError>)>;
type Slot = Arc<tokio::sync::Mutex<Option<(Instant, Outcome)>>>;

/// Catalogues remembered at most. Each has some hundred sizes.
const MOST_CATALOGUES: usize = 128;

/// By principal, subscription and region: an identity without rights does not spoil the catalogue of another.
type Key = (Arc<str>, String, String);

/// Each catalogue is read by one caller while the others wait for it.
#[derive(Default)]
pub(crate) struct Catalogues(Mutex<HashMap<Key, (Instant, Slot)>>);

impl Catalogues {
    /// Returns the slot of this key. Where there are too many slots, the one that was unused the longest is dropped.
    fn slot(&self, key: Key, now: Instant) -> Slot {
        let mut slots = self.0.lock();
        if !slots.contains_key(&key) && slots.len() >= MOST_CATALOGUES {
            let oldest = slots
                .iter()
                .min_by_key(|(_, (used, _))| *used)
                .map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                slots.remove(&oldest);
            }
        }
        let entry = slots.entry(key).or_insert_with(|| (now, Slot::default()));
        entry.0 = now;
        entry.1.clone()
    }
}

impl Client {
    /// The catalogue of a region, at most a day old.
    pub async fn catalogue(&self, location: &str) -> Result<Arc<Catalogue>, Error> {
        self.catalogue_within(location, FRESH).await
    }

    /// Returns the capabilities of a size in a region; `None` when Azure does not offer it there.
    pub async fn size(&self, location: &str, name: &str) -> Result<Option<Size>, Error> {
        if let Some(size) = self.catalogue(location).await?.size(name) {
            return Ok(Some(size.clone()));
        }
        Ok(self.catalogue_within(location, RECHECK).await?.size(name).cloned())
    }

    pub(crate) fn skus(&self, location: &str) -> Result<Call, Error> {
        let path = Path::subscription(self.subscription())?
            .provider("Microsoft.Compute")
            .word("skus");
        let filter = format!("location eq '{}'", location.replace('\'', "''"));
        Ok(Call::new(Method::GET, path, SKUS, Policy::Other).query("$filter", filter))
    }

    async fn catalogue_within(&self, location: &str, age: Duration) -> Result<Arc<Catalogue>, Error> {
        let key = (
            self.principal().clone(),
            self.subscription().to_lowercase(),
            location.to_lowercase(),
        );
        let slot = self.shared.catalogues.slot(key, self.clock().instant());
        let mut slot = slot.lock().await;
        match &*slot {
            Some((read, Ok(catalogue))) if self.clock().since(*read) < age => return Ok(catalogue.clone()),
            Some((read, Err((call, error)))) if self.clock().since(*read) < REFUSED => {
                let (call, error) = (call.clone(), error.clone());
                return Err(Error::Arm { call, error });
            }
            _ => {}
        }
        let raw: Vec<RawSku> = match self.list(self.skus(location)?).await {
            Ok(raw) => raw,
            Err(error) => {
                if let Error::Arm { call, error } = &error
                    && matches!(error.status, 400 | 403 | 404)
                {
                    *slot = Some((self.clock().instant(), Err((call.clone(), error.clone()))));
                }
                return Err(error);
            }
        };
        let max_fault_domains = raw.iter().find_map(|sku| max_fault_domains(sku, location));
        let sizes = raw.into_iter().filter_map(|sku| size(sku, location));
        let catalogue = Arc::new(Catalogue {
            max_fault_domains,
            ..Catalogue::new(location, sizes)
        });
        *slot = Some((self.clock().instant(), Ok(catalogue.clone())));
        Ok(catalogue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"[
      {"resourceType":"virtualMachines","name":"Standard_D4s_v3","locations":["eastus"],
       "locationInfo":[{"location":"eastus","zones":["1","2"],
         "zoneDetails":[{"Name":["2"],"capabilities":[{"name":"UltraSSDAvailable","value":"True"}]}]}],
       "capabilities":[{"name":"MaxDataDiskCount","value":"8"},{"name":"PremiumIO","value":"True"},
         {"name":"EphemeralOSDiskSupported","value":"False"},{"name":"MemoryGB","value":"16"}],
       "restrictions":[{"type":"Zone","reasonCode":"NotAvailableForSubscription","restrictionInfo":{"zones":["1"]}}]},
      {"resourceType":"virtualMachines","name":"Standard_L8","locations":["eastus"],
       "capabilities":[{"name":"UltraSSDAvailable","value":"True"}]},
      {"resourceType":"virtualMachines","name":"Standard_Elsewhere","locations":["westus"],"locationInfo":null,
       "capabilities":null,"restrictions":null},
      {"resourceType":"disks","name":"UltraSSD_LRS","locations":["eastus"]}]"#;

    #[test]
    fn sizes_without_scsi_and_regions_with_few_fault_domains_are_known() {
        let list = r#"[
          {"resourceType":"virtualMachines","name":"Standard_D2s_v6","locations":["eastus"],
           "capabilities":[{"name":"DiskControllerTypes","value":"NVMe"},{"name":"GPUs","value":"2"}]},
          {"resourceType":"virtualMachines","name":"Standard_E2bs_v5","locations":["eastus"],
           "capabilities":[{"name":"DiskControllerTypes","value":"SCSI, NVMe"}]},
          {"resourceType":"availabilitySets","name":"Classic","locations":["eastus"],
           "capabilities":[{"name":"MaximumPlatformFaultDomainCount","value":"2"}]},
          {"resourceType":"availabilitySets","name":"Aligned","locations":["eastus"],
           "capabilities":[{"name":"MaximumPlatformFaultDomainCount","value":"3"}]}]"#;
        let raw: Vec<RawSku> = serde_json::from_str(list).unwrap();
        assert_eq!(raw.iter().find_map(|sku| max_fault_domains(sku, "eastus")), Some(3));
        assert_eq!(raw.iter().find_map(|sku| max_fault_domains(sku, "westus")), None);
        let found = Catalogue::new("eastus", raw.into_iter().filter_map(|sku| size(sku, "eastus")));
        let nvme = |name: &str| found.size(name).map(Size::is_nvme_only);
        assert_eq!(
            (nvme("Standard_D2s_v6"), nvme("Standard_E2bs_v5")),
            (Some(true), Some(false))
        );
        assert_eq!(found.size("Standard_D2s_v6").and_then(|size| size.gpus), Some(2));
        assert_eq!(catalogue().size("Standard_L8").map(Size::is_nvme_only), Some(false));
    }

    fn catalogue() -> Catalogue {
        let raw: Vec<RawSku> = serde_json::from_str(LIST).unwrap();
        Catalogue::new("EastUS", raw.into_iter().filter_map(|sku| size(sku, "EastUS")))
    }

    #[test]
    fn ultra_support_is_known_by_zone_and_by_region() {
        let catalogue = catalogue();
        let zonal = catalogue.size("standard_d4s_V3").unwrap();
        assert!(zonal.supports_ultra(Some("2")) && !zonal.supports_ultra(Some("1")) && !zonal.supports_ultra(None));
        let regional = catalogue.size("Standard_L8").unwrap();
        assert!(regional.supports_ultra(None) && !regional.supports_ultra(Some("1")));
    }

    #[test]
    fn disk_limits_restrictions_and_capabilities_are_read() {
        let catalogue = catalogue();
        let size = catalogue.size("Standard_D4s_v3").unwrap();
        assert_eq!(
            (size.max_data_disks, size.premium_io, size.memory_mib),
            (Some(8), true, Some(16384))
        );
        assert!(size.restricted_zones.contains("1") && size.restrictions.is_empty());
        assert_eq!(
            size.lacks,
            [Ability::EphemeralOsDisk].into(),
            "what the catalogue does not mention is not lacking"
        );
        assert!(catalogue.size("Standard_Elsewhere").is_none());
    }

    #[test]
    fn the_number_of_catalogues_is_bounded_and_the_longest_unused_goes_first() {
        let (catalogues, now) = (Catalogues::default(), Instant::now());
        let key = |n: usize| (Arc::from(format!("p{n}")), "s".to_owned(), "eastus".to_owned());
        let first = catalogues.slot(key(0), now);
        for n in 1..MOST_CATALOGUES * 2 {
            let later = now + Duration::from_secs(n as u64);
            catalogues.slot(key(n), later);
            assert!(Arc::ptr_eq(&first, &catalogues.slot(key(0), later)));
        }
        assert_eq!(catalogues.0.lock().len(), MOST_CATALOGUES);
    }
}
