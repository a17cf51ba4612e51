//! The rules of Azure for the disks, size and place of a VM or scale set, with Azure's error messages. Pure functions
//! of the model.

use serde_json::Value;

use super::skus::{self, Location, Size};
use crate::azure::wire::{Fail, same, text};

/// The input of the rules, from a VM or from a scale set's profile.
pub struct Model<'a> {
    pub size: &'a str,
    pub location: &'a str,
    pub zones: &'a [String],
    /// `storageProfile`.
    pub storage: &'a Value,
    pub ultra_enabled: bool,
    pub availability_set: bool,
    pub scale_set: bool,
}

pub const ULTRA: &str = "UltraSSD_LRS";
pub const PREMIUM_V2: &str = "PremiumV2_LRS";
const TYPES: [&str; 7] = [
    "Standard_LRS",
    "StandardSSD_LRS",
    "Premium_LRS",
    "Premium_ZRS",
    "StandardSSD_ZRS",
    ULTRA,
    PREMIUM_V2,
];

/// Checks a model. Returns the first error.
pub fn check(model: &Model) -> Result<(), Fail> {
    let (size, location) = place(model)?;
    os_disk(model, size)?;
    if model.ultra_enabled {
        ultra_place(model, size, location)?;
    }
    let disks = model.storage["dataDisks"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let mut luns = std::collections::BTreeSet::new();
    for disk in disks {
        data_disk(model, size, disk)?;
        let lun = disk["lun"].as_i64().unwrap_or_default();
        if !(0..64).contains(&lun) {
            return Err(Fail::parameter(
                "dataDisk.lun",
                format!(
                    "The value '{lun}' of parameter 'dataDisk.lun' is out of range. The value must be between '0' and '63', inclusive."
                ),
            ));
        }
        if !luns.insert(lun) {
            return Err(Fail::parameter(
                "dataDisks",
                format!(
                    "A disk named '{}' already uses the same LUN: {lun}.",
                    name_of(disk, disks, lun)
                ),
            ));
        }
    }
    if disks.len() as u64 > size.data_disks {
        let message = format!(
            "The maximum number of data disks allowed to be attached to a VM of this size is {}.",
            size.data_disks
        );
        return Err(Fail::conflict("OperationNotAllowed", message).target("dataDisks"));
    }
    Ok(())
}

fn name_of<'a>(disk: &'a Value, disks: &'a [Value], lun: i64) -> &'a str {
    let first = disks
        .iter()
        .find(|other| other["lun"].as_i64().unwrap_or_default() == lun)
        .unwrap_or(disk);
    text(first, "/name").unwrap_or_default()
}

fn place<'a>(model: &Model) -> Result<(&'a Size, &'a Location), Fail> {
    let location = skus::find_location(model.location).ok_or_else(|| {
        let known: Vec<&str> = skus::LOCATIONS.iter().map(|location| location.name).collect();
        let message = format!(
            "The provided location '{}' is not available for resource type 'Microsoft.Compute/virtualMachines'. List of available \
             regions for the resource type is '{}'.",
            model.location,
            known.join(",")
        );
        Fail::bad("LocationNotAvailableForResourceType", message)
    })?;
    let size = skus::find_size(model.size).ok_or_else(|| {
        let known: Vec<&str> = skus::SIZES.iter().map(|size| size.name).collect();
        let message = format!(
            "The value {} provided for the VM size is not valid. The valid sizes in the current region are: {}.",
            model.size,
            known.join(",")
        );
        Fail::parameter(if model.scale_set { "sku.name" } else { "vmSize" }, message)
    })?;
    if let Some(zone) = model.zones.iter().find(|zone| !location.zones.contains(&zone.as_str())) {
        let message = if location.zones.is_empty() {
            format!(
                "The resource's location '{}' does not support availability zones: '{zone}'.",
                location.name
            )
        } else {
            format!(
                "The zone(s) '{zone}' is not supported. The supported zones for location '{}' are '{}'",
                location.name,
                location.zones.join(",")
            )
        };
        return Err(Fail::bad("AvailabilityZoneNotSupported", message));
    }
    if model.availability_set && !model.zones.is_empty() {
        return Err(Fail::bad(
            "BadRequest",
            "Virtual Machine cannot be created because both Availability Zone and Availability Set were specified. Deploying an Availability Set to an Availability Zone isn't supported.",
        ));
    }
    Ok((size, location))
}

fn os_disk(model: &Model, size: &Size) -> Result<(), Fail> {
    let os = &model.storage["osDisk"];
    let controller = text(model.storage, "/diskControllerType").unwrap_or(size.controller());
    if !same(controller, size.controller()) {
        let message = format!(
            "The VM size '{}' does not support disk controller type '{controller}'. Supported disk controller types are: {}.",
            size.name,
            size.controller()
        );
        return Err(Fail::parameter("storageProfile.diskControllerType", message));
    }
    let placement = text(os, "/diffDiskSettings/placement");
    if let Some(placement) =
        placement.filter(|placement| !size.placements().split(',').any(|known| same(known, placement)))
    {
        let message = format!(
            "The VM size '{}' does not support ephemeral OS disk placement '{placement}'.",
            size.name
        );
        return Err(Fail::parameter("osDisk.diffDiskSettings.placement", message));
    }
    let kind = text(os, "/managedDisk/storageAccountType").unwrap_or("Standard_LRS");
    if kind == ULTRA || kind == PREMIUM_V2 {
        return Err(Fail::parameter(
            "osDisk.managedDisk.storageAccountType",
            format!("Storage Account type '{kind}' is not supported for OS disks."),
        ));
    }
    let caching = text(os, "/caching").unwrap_or("ReadOnly");
    if text(os, "/diffDiskSettings/option") == Some("Local") && caching != "ReadOnly" {
        return Err(Fail::parameter(
            "osDisk.caching",
            "OS disk of Ephemeral VM with size greater than 0 can only have caching 'ReadOnly'.",
        ));
    }
    Ok(())
}

fn ultra_place(model: &Model, size: &Size, location: &Location) -> Result<(), Fail> {
    const TARGET: &str = "additionalCapabilities.ultraSSDEnabled";
    if model.availability_set {
        return Err(Fail::parameter(
            TARGET,
            "Feature 'UltraSSD' is not supported with Availability Sets.",
        ));
    }
    if model.zones.is_empty() && !location.zones.is_empty() {
        let what = if model.scale_set {
            "Virtual Machine Scale Sets"
        } else {
            "Virtual Machines"
        };
        return Err(Fail::parameter(
            TARGET,
            format!("Feature 'UltraSSD' can be used only with {what} in an Availability Zone."),
        ));
    }
    let zones: Vec<Option<&str>> = if model.zones.is_empty() {
        vec![None]
    } else {
        model.zones.iter().map(|zone| Some(zone.as_str())).collect()
    };
    for zone in zones {
        if !size.ultra_at(location, zone) {
            let place = zone.map(|zone| format!(" in zone '{zone}'")).unwrap_or_default();
            return Err(Fail::parameter(
                TARGET,
                format!(
                    "VM size '{}' does not support 'UltraSSD' in location '{}'{place}.",
                    size.name, location.name
                ),
            ));
        }
    }
    Ok(())
}

fn data_disk(model: &Model, size: &Size, disk: &Value) -> Result<(), Fail> {
    let kind = text(disk, "/managedDisk/storageAccountType").unwrap_or("Standard_LRS");
    let caching = text(disk, "/caching").unwrap_or("None");
    if !TYPES.contains(&kind) {
        return Err(Fail::parameter(
            "managedDisk.storageAccountType",
            format!(
                "The value '{kind}' of parameter 'storageAccountType' is not valid. Supported values are: {}.",
                TYPES.join(", ")
            ),
        ));
    }
    if kind == ULTRA && !model.ultra_enabled {
        return Err(Fail::parameter(
            "managedDisk.storageAccountType",
            "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.",
        ));
    }
    if (kind == ULTRA || kind == PREMIUM_V2) && caching != "None" {
        return Err(Fail::parameter(
            "dataDisk.caching",
            format!(
                "Storage Account type {kind} is not supported with caching type {caching}. Please use caching type None."
            ),
        ));
    }
    if kind.starts_with("Premium") && !size.premium {
        return Err(Fail::parameter(
            "managedDisk.storageAccountType",
            format!(
                "Requested operation cannot be performed because the VM size {} does not support the storage account type {kind} of \
                 disk '{}'. Consider updating the VM to a size that supports Premium storage.",
                size.name,
                text(disk, "/name").unwrap_or_default()
            ),
        ));
    }
    if kind == PREMIUM_V2 && model.availability_set {
        return Err(Fail::parameter(
            "managedDisk.storageAccountType",
            format!("Storage Account type {kind} is not supported with Availability Sets."),
        ));
    }
    if let Some(gib) = disk["diskSizeGB"].as_u64() {
        check_size(kind, gib, "dataDisk.diskSizeGB")?;
        performance(
            kind,
            gib,
            disk["diskIOPSReadWrite"].as_u64(),
            disk["diskMBpsReadWrite"].as_u64(),
            "dataDisk.",
        )?;
    }
    Ok(())
}

/// Sizes a disk type can have.
pub fn check_size(kind: &str, gib: u64, target: &str) -> Result<(), Fail> {
    let (min, max) = match kind {
        ULTRA => (4, 65536),
        PREMIUM_V2 => (1, 65536),
        _ => (1, 32767),
    };
    if (min..=max).contains(&gib) {
        return Ok(());
    }
    Err(Fail::parameter(
        target,
        format!(
            "The value '{gib}' of parameter '{target}' is out of range. The value must be between '{min}' and '{max}', inclusive."
        ),
    ))
}

/// IOPS and MB/s a disk of this type and size can have.
pub fn performance(kind: &str, gib: u64, iops: Option<u64>, mbps: Option<u64>, prefix: &str) -> Result<(), Fail> {
    let given = iops.or(mbps);
    let (iops_range, mbps_max) = match kind {
        ULTRA => {
            let top = (1000 * gib).min(400_000);
            ((100, top), (iops.unwrap_or(default_iops(gib)) / 4).clamp(1, 10_000))
        }
        PREMIUM_V2 => {
            let top = if gib <= 6 { 3000 } else { (500 * gib).min(80_000) };
            ((3000, top), (iops.unwrap_or(3000) / 4).clamp(125, 2000))
        }
        _ if given.is_some() => {
            return Err(Fail::parameter(
                &format!("{prefix}diskIOPSReadWrite"),
                format!(
                    "Parameters 'diskIOPSReadWrite' and 'diskMBpsReadWrite' are not supported with storage account type {kind}."
                ),
            ));
        }
        _ => return Ok(()),
    };
    let mbps_min = if kind == PREMIUM_V2 { 125 } else { 1 };
    range(iops, iops_range, &format!("{prefix}diskIOPSReadWrite"))?;
    range(mbps, (mbps_min, mbps_max), &format!("{prefix}diskMBpsReadWrite"))
}

fn range(value: Option<u64>, (min, max): (u64, u64), target: &str) -> Result<(), Fail> {
    match value {
        Some(value) if !(min..=max).contains(&value) => Err(Fail::parameter(
            target,
            format!(
                "The value '{value}' of parameter '{target}' is out of range. The value must be between '{min}' and '{max}', inclusive."
            ),
        )),
        _ => Ok(()),
    }
}

/// Returns the default IOPS of an Ultra disk: 151 IOPS per GiB, as recorded for 128 GiB.
pub fn default_iops(gib: u64) -> u64 {
    (gib * 151).clamp(100, 400_000)
}

/// Refuses a change of properties that are fixed at the creation of a resource. A property that was never set can be
/// set once.
pub fn fixed(names: &[&str], before: &Value, patch: &Value) -> Result<(), Fail> {
    for name in names {
        let pointer = format!("/properties/{name}");
        let (Some(old), Some(new)) = (before.pointer(&pointer), patch.pointer(&pointer)) else {
            continue;
        };
        let equal = match (old.as_str(), new.as_str()) {
            (Some(old), Some(new)) => same(old, new),
            _ => old == new,
        };
        if !equal && !old.is_null() && !new.is_null() {
            // Azure names the property without the profiles around it.
            let parts: Vec<&str> = name.split('/').filter(|part| !part.ends_with("Profile")).collect();
            let name = parts.join(".");
            let message = format!("Changing property '{name}' is not allowed.");
            return Err(Fail::conflict("PropertyChangeNotAllowed", message).target(name));
        }
    }
    Ok(())
}

/// Windows needs an administrator's password when a machine is created from an image.
pub fn password(profile: &Value) -> Result<(), Fail> {
    let windows = text(profile, "/storageProfile/osDisk/osType").is_some_and(|os| same(os, "Windows"))
        || profile
            .pointer("/osProfile/windowsConfiguration")
            .is_some_and(|config| !config.is_null());
    let has = text(profile, "/osProfile/adminPassword").is_some_and(|password| !password.is_empty());
    if !windows || has || profile["osProfile"].is_null() {
        return Ok(());
    }
    Err(Fail::parameter(
        "adminPassword",
        "Required parameter 'adminPassword' is missing (null).",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(size: &str, location: &str, zones: &[&str], ultra: bool, disks: Value) -> Option<(String, String)> {
        let zones: Vec<String> = zones.iter().map(|zone| (*zone).to_owned()).collect();
        let storage = json!({ "dataDisks": disks });
        let model = Model {
            size,
            location,
            zones: &zones,
            storage: &storage,
            ultra_enabled: ultra,
            availability_set: false,
            scale_set: true,
        };
        check(&model)
            .err()
            .map(|fail| (fail.message, fail.target.unwrap_or_default()))
    }

    fn ultra(extra: Value) -> Value {
        let mut disk = json!({ "lun": 0, "diskSizeGB": 128, "managedDisk": { "storageAccountType": ULTRA } });
        crate::azure::wire::merge(&mut disk, &extra);
        json!([disk])
    }

    #[test]
    fn ultra_disks_are_refused_in_azures_words() {
        let d4 = "Standard_D4s_v3";
        assert_eq!(refused(d4, "eastus", &["1"], true, ultra(json!({}))), None);
        assert_eq!(
            refused(d4, "eastus", &["1"], false, ultra(json!({}))),
            Some((
                "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set."
                    .into(),
                "managedDisk.storageAccountType".into()
            ))
        );
        assert_eq!(
            refused(d4, "eastus", &["1"], true, ultra(json!({ "caching": "ReadWrite" }))),
            Some((
                "Storage Account type UltraSSD_LRS is not supported with caching type ReadWrite. Please use caching type None.".into(),
                "dataDisk.caching".into()
            ))
        );
        assert_eq!(
            refused(d4, "eastus", &[], true, json!([])),
            Some((
                "Feature 'UltraSSD' can be used only with Virtual Machine Scale Sets in an Availability Zone.".into(),
                "additionalCapabilities.ultraSSDEnabled".into()
            ))
        );
        assert_eq!(refused(d4, "westus", &[], true, ultra(json!({}))), None);
        assert!(refused(d4, "northcentralus", &[], true, json!([])).is_some());
        assert!(refused("Standard_B2s", "eastus", &["1"], true, json!([])).is_some());
        assert!(refused(d4, "centralus", &["3"], true, json!([])).is_some());
        assert!(
            refused(
                d4,
                "eastus",
                &["1"],
                true,
                ultra(json!({ "diskIOPSReadWrite": 200_000 }))
            )
            .is_some()
        );
        assert!(
            refused(
                d4,
                "eastus",
                &["1"],
                true,
                ultra(json!({ "diskIOPSReadWrite": 1000, "diskMBpsReadWrite": 251 }))
            )
            .is_some()
        );
        assert_eq!(
            refused(
                d4,
                "eastus",
                &["1"],
                true,
                ultra(json!({ "diskIOPSReadWrite": 1000, "diskMBpsReadWrite": 250 }))
            ),
            None
        );
    }

    #[test]
    fn a_size_takes_only_so_many_disks() {
        let disks: Vec<Value> = (0..5).map(|lun| json!({ "lun": lun, "diskSizeGB": 4 })).collect();
        let (message, target) = refused("Standard_D2s_v3", "eastus", &[], false, json!(disks)).unwrap();
        assert_eq!(
            message,
            "The maximum number of data disks allowed to be attached to a VM of this size is 4."
        );
        assert_eq!(target, "dataDisks");
    }
}
