//! The catalogue of VM sizes, disk types and where they can be had.

use serde_json::{Value, json};

use crate::azure::wire::{Answer, Call, Reply, same};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub name: &'static str,
    pub family: &'static str,
    pub cores: u64,
    pub memory_gb: u32,
    pub data_disks: u64,
    pub premium: bool,
    pub ultra: bool,
    pub ephemeral_os: bool,
    pub accelerated: bool,
    /// Whether it attaches disks by NVMe, and not by SCSI.
    pub nvme: bool,
    pub gpus: u32,
}

const fn size(name: &'static str, family: &'static str, cores: u64, memory_gb: u32, data_disks: u64) -> Size {
    Size {
        name,
        family,
        cores,
        memory_gb,
        data_disks,
        premium: true,
        ultra: true,
        ephemeral_os: true,
        accelerated: true,
        nvme: false,
        gpus: 0,
    }
}

pub const SIZES: [Size; 25] = [
    Size {
        ultra: false,
        ephemeral_os: true,
        accelerated: false,
        ..size("Standard_B2s", "standardBSFamily", 2, 4, 4)
    },
    Size {
        ultra: false,
        ephemeral_os: true,
        accelerated: false,
        ..size("Standard_B2ms", "standardBSFamily", 2, 8, 4)
    },
    Size {
        ultra: false,
        ephemeral_os: true,
        accelerated: true,
        ..size("Standard_B4ms", "standardBSFamily", 4, 16, 8)
    },
    Size {
        premium: false,
        ultra: false,
        ephemeral_os: false,
        ..size("Standard_D2_v3", "standardDv3Family", 2, 8, 4)
    },
    Size {
        premium: false,
        ultra: false,
        ephemeral_os: false,
        ..size("Standard_D4_v3", "standardDv3Family", 4, 16, 8)
    },
    Size {
        premium: false,
        ultra: false,
        ephemeral_os: false,
        ..size("Standard_DS1_v2", "standardDSv2Family", 1, 4, 4)
    },
    Size {
        ultra: false,
        ..size("Standard_DS2_v2", "standardDSv2Family", 2, 7, 8)
    },
    size("Standard_D2s_v3", "standardDSv3Family", 2, 8, 4),
    size("Standard_D4s_v3", "standardDSv3Family", 4, 16, 8),
    size("Standard_D8s_v3", "standardDSv3Family", 8, 32, 16),
    size("Standard_D16s_v3", "standardDSv3Family", 16, 64, 32),
    size("Standard_D2s_v4", "standardDSv4Family", 2, 8, 4),
    size("Standard_D4s_v4", "standardDSv4Family", 4, 16, 8),
    size("Standard_D2s_v5", "standardDSv5Family", 2, 8, 4),
    size("Standard_D4s_v5", "standardDSv5Family", 4, 16, 8),
    size("Standard_D8s_v5", "standardDSv5Family", 8, 32, 16),
    Size {
        nvme: true,
        ..size("Standard_D4ds_v6", "StandardDdsv6Family", 4, 16, 12)
    },
    size("Standard_D2ds_v5", "standardDDSv5Family", 2, 8, 4),
    size("Standard_D4ds_v5", "standardDDSv5Family", 4, 16, 8),
    size("Standard_E2s_v3", "standardESv3Family", 2, 16, 4),
    size("Standard_E4s_v3", "standardESv3Family", 4, 32, 8),
    size("Standard_E8s_v5", "standardESv5Family", 8, 64, 16),
    size("Standard_F4s_v2", "standardFSv2Family", 4, 8, 8),
    size("Standard_L8s_v3", "standardLSv3Family", 8, 64, 16),
    Size {
        ultra: false,
        accelerated: true,
        gpus: 1,
        ..size("Standard_NC4as_T4_v3", "Standard NCASv3_T4 Family", 4, 28, 8)
    },
];

#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub name: &'static str,
    pub display: &'static str,
    pub zones: &'static [&'static str],
    /// Zones where Ultra disks can be had; in a location without zones, whether they can be had at all.
    pub ultra_zones: &'static [&'static str],
    pub ultra_regional: bool,
    /// The most fault domains that an availability set can have.
    pub fault_domains: u64,
}

const THREE: &[&str] = &["1", "2", "3"];

pub const LOCATIONS: [Location; 13] = [
    zonal("eastus", "East US", THREE),
    zonal("eastus2", "East US 2", THREE),
    zonal("centralus", "Central US", &["1", "2"]),
    zonal("southcentralus", "South Central US", THREE),
    zonal("westus2", "West US 2", THREE),
    zonal("westeurope", "West Europe", THREE),
    zonal("northeurope", "North Europe", THREE),
    zonal("usgovvirginia", "USGov Virginia", THREE),
    zonal("chinanorth3", "China North 3", &["1"]),
    Location {
        name: "westus",
        display: "West US",
        zones: &[],
        ultra_zones: &[],
        ultra_regional: true,
        fault_domains: 3,
    },
    Location {
        name: "northcentralus",
        display: "North Central US",
        zones: &[],
        ultra_zones: &[],
        ultra_regional: false,
        fault_domains: 3,
    },
    small("ukwest", "UK West", 2),
    // No region of Azure: one of the smallest kind.
    small("onerack", "One Rack", 1),
];

const fn small(name: &'static str, display: &'static str, fault_domains: u64) -> Location {
    Location {
        name,
        display,
        zones: &[],
        ultra_zones: &[],
        ultra_regional: false,
        fault_domains,
    }
}

const fn zonal(name: &'static str, display: &'static str, ultra_zones: &'static [&'static str]) -> Location {
    Location {
        name,
        display,
        zones: THREE,
        ultra_zones,
        ultra_regional: false,
        fault_domains: 2,
    }
}

pub fn find_size(name: &str) -> Option<&'static Size> {
    SIZES.iter().find(|size| same(size.name, name))
}

pub fn find_location(name: &str) -> Option<&'static Location> {
    let plain = plain(name);
    LOCATIONS.iter().find(|location| location.name == plain)
}

/// `East US` and `eastus` are the same place.
pub fn plain(name: &str) -> String {
    name.to_lowercase().replace(' ', "")
}

impl Size {
    /// The controller that its disks are attached to.
    pub fn controller(&self) -> &'static str {
        if self.nvme { "NVMe" } else { "SCSI" }
    }

    /// Returns the placements of an ephemeral OS disk.
    pub fn placements(&self) -> &'static str {
        match (self.ephemeral_os, self.nvme) {
            (false, _) => "",
            (true, true) => "NvmeDisk",
            (true, false) => "ResourceDisk,CacheDisk",
        }
    }

    /// Whether Ultra disks work with this size at this place.
    pub fn ultra_at(&self, location: &Location, zone: Option<&str>) -> bool {
        self.ultra
            && match zone {
                Some(zone) => location.ultra_zones.contains(&zone),
                None => location.ultra_regional,
            }
    }
}

/// `GET …/providers/Microsoft.Compute/skus`.
pub fn list(call: &Call) -> Reply {
    let filter = call
        .query
        .get("$filter")
        .map(|filter| filter.to_lowercase())
        .unwrap_or_default();
    let wanted = filter
        .split_once("location eq")
        .and_then(|(_, rest)| rest.split('\'').nth(1))
        .map(plain);
    let places = LOCATIONS
        .iter()
        .filter(|location| wanted.as_ref().is_none_or(|wanted| location.name == wanted));
    let mut value = Vec::new();
    for location in places {
        value.extend(SIZES.iter().map(|size| vm_sku(size, location)));
        value.extend(disk_skus(location));
        value.push(set_sku(location));
    }
    Ok(Answer::ok(json!({ "value": value })))
}

/// `GET …/locations/{l}/vmSizes`.
pub fn sizes(location: &str) -> Reply {
    let known = find_location(location).is_some();
    let sizes: Vec<Value> = SIZES
        .iter()
        .filter(|_| known)
        .map(|size| {
            json!({ "name": size.name, "numberOfCores": size.cores, "osDiskSizeInMB": 1_047_552, "resourceDiskSizeInMB": 16384,
                "memoryInMB": size.memory_gb * 1024, "maxDataDiskCount": size.data_disks })
        })
        .collect();
    Ok(Answer::ok(json!({ "value": sizes })))
}

/// `GET /subscriptions/{s}/locations`.
pub fn locations(subscription: &str) -> Value {
    let places = LOCATIONS.iter().map(|location| {
        json!({ "id": format!("/subscriptions/{subscription}/locations/{}", location.name), "name": location.name,
            "displayName": location.display, "regionalDisplayName": location.display, "type": "Region",
            "metadata": { "regionType": "Physical", "regionCategory": "Recommended" } })
    });
    json!({ "value": places.collect::<Vec<_>>() })
}

fn capability(name: &str, value: impl ToString) -> Value {
    json!({ "name": name, "value": value.to_string() })
}

fn yes(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

fn vm_sku(size: &Size, location: &Location) -> Value {
    let mut capabilities = vec![
        capability("MaxResourceVolumeMB", 16384),
        capability("OSVhdSizeMB", 1_047_552),
        capability("vCPUs", size.cores),
        capability("MemoryPreservingMaintenanceSupported", "True"),
        capability("HyperVGenerations", "V1,V2"),
        capability("MemoryGB", size.memory_gb),
        capability("MaxDataDiskCount", size.data_disks),
        capability("CpuArchitectureType", "x64"),
        capability("LowPriorityCapable", yes(!size.name.starts_with("Standard_B"))),
        capability("PremiumIO", yes(size.premium)),
        capability("VMDeploymentTypes", "IaaS"),
        capability("vCPUsAvailable", size.cores),
        capability("vCPUsPerCore", 2),
        capability("EphemeralOSDiskSupported", yes(size.ephemeral_os)),
        capability("EncryptionAtHostSupported", "True"),
        capability("CapacityReservationSupported", "True"),
        capability("AcceleratedNetworkingEnabled", yes(size.accelerated)),
        capability("DiskControllerTypes", size.controller()),
        capability("SupportedEphemeralOSDiskPlacements", size.placements()),
        capability("RdmaEnabled", "False"),
        capability("MaxNetworkInterfaces", size.cores.clamp(2, 8)),
        capability("TrustedLaunchDisabled", "False"),
    ];
    if size.gpus > 0 {
        capabilities.push(capability("GPUs", size.gpus));
    }
    if location.ultra_regional && size.ultra {
        capabilities.push(capability("UltraSSDAvailable", "True"));
    }
    let details = if size.ultra && !location.ultra_zones.is_empty() {
        vec![json!({ "Name": location.ultra_zones, "capabilities": [capability("UltraSSDAvailable", "True")] })]
    } else {
        vec![]
    };
    json!({
        "resourceType": "virtualMachines", "name": size.name, "tier": "Standard",
        "size": size.name.trim_start_matches("Standard_"), "family": size.family, "locations": [location.name],
        "locationInfo": [{ "location": location.name, "zones": location.zones, "zoneDetails": details }],
        "capabilities": capabilities, "restrictions": [],
    })
}

fn set_sku(location: &Location) -> Value {
    json!({ "resourceType": "availabilitySets", "name": "Aligned", "locations": [location.name],
        "locationInfo": [{ "location": location.name, "zones": [], "zoneDetails": [] }],
        "capabilities": [capability("MaximumPlatformFaultDomainCount", location.fault_domains)], "restrictions": [] })
}

fn disk_skus(location: &Location) -> Vec<Value> {
    let disk = |name: &str, zones: &[&str], caps: Vec<Value>| {
        json!({ "resourceType": "disks", "name": name, "tier": name.split('_').next(), "size": "", "locations": [location.name],
            "locationInfo": [{ "location": location.name, "zones": zones, "zoneDetails": [] }], "capabilities": caps, "restrictions": [] })
    };
    let range = |min: u32, max: u32| vec![capability("MinSizeGiB", min), capability("MaxSizeGiB", max)];
    let mut all = vec![
        disk("Standard_LRS", location.zones, range(1, 32767)),
        disk("StandardSSD_LRS", location.zones, range(1, 32767)),
        disk("Premium_LRS", location.zones, range(1, 32767)),
    ];
    if !location.zones.is_empty() {
        all.push(disk("Premium_ZRS", location.zones, range(1, 32767)));
        all.push(disk("StandardSSD_ZRS", location.zones, range(1, 32767)));
        all.push(disk("PremiumV2_LRS", location.zones, range(1, 65536)));
    }
    if !location.ultra_zones.is_empty() || location.ultra_regional {
        all.push(disk("UltraSSD_LRS", location.ultra_zones, range(4, 65536)));
    }
    all
}
