//! What Azure fills in where a request leaves it out.

use serde_json::{Value, json};

use super::storage::default;
use crate::azure::wire::{same, text};

/// Fills in a scale set's model. This happens at every write, because a list in a request replaces the whole list.
pub fn scale_set(body: &mut Value) {
    let created = text(body, "/properties/timeCreated").unwrap_or_default().to_owned();
    let flexible = text(body, "/properties/orchestrationMode") == Some("Flexible");
    if let Some(repairs) = part(body, "/properties/automaticRepairsPolicy") {
        default(repairs, "repairAction", json!("Replace"));
    }
    let Some(profile) = part(body, "/properties/virtualMachineProfile") else {
        return;
    };
    default(profile, "timeCreated", json!(created));
    operating_system(profile, flexible);
    if let Some(disk) = part(profile, "/storageProfile/osDisk").filter(|disk| disk.get("diffDiskSettings").is_none()) {
        let gib = image_size(disk);
        default(disk, "diskSizeGB", json!(gib));
    }
    if let Some(extensions) = part(profile, "/extensionProfile") {
        default(extensions, "extensions", json!([]));
    }
    for interface in list(profile, "/networkProfile/networkInterfaceConfigurations") {
        let Some(properties) = part(interface, "/properties") else {
            continue;
        };
        default(properties, "disableTcpStateTracking", json!(false));
        default(properties, "enableIPForwarding", json!(false));
        default(properties, "dnsSettings", json!({ "dnsServers": [] }));
        for config in list(properties, "/ipConfigurations") {
            if let Some(properties) = part(config, "/properties") {
                default(properties, "privateIPAddressVersion", json!("IPv4"));
            }
        }
    }
}

/// Fills in a virtual machine's properties.
pub fn machine(properties: &mut Value) {
    operating_system(properties, true);
    if let Some(image) = part(properties, "/storageProfile/imageReference") {
        exact_version(image);
    }
    if let Some(disk) = part(properties, "/storageProfile/osDisk").filter(|disk| disk.get("diffDiskSettings").is_none())
    {
        let gib = image_size(disk);
        default(disk, "diskSizeGB", json!(gib));
    }
}

/// The version of a marketplace image that a machine was made from.
pub fn exact_version(image: &mut Value) {
    if image.get("publisher").is_some() {
        let version = text(image, "/version").unwrap_or("latest");
        let version = if same(version, "latest") { "1.0.0" } else { version }.to_owned();
        default(image, "exactVersion", json!(version));
    }
}

/// Settings of the guest; `patches` tells whether Azure shows those of its updates.
fn operating_system(profile: &mut Value, patches: bool) {
    let publisher = text(profile, "/storageProfile/imageReference/publisher").unwrap_or_default();
    let windows = publisher.starts_with("MicrosoftWindows")
        || text(profile, "/storageProfile/osDisk/osType").is_some_and(|os| same(os, "Windows"))
        || profile.pointer("/osProfile/windowsConfiguration").is_some();
    if let Some(disk) = part(profile, "/storageProfile/osDisk") {
        default(disk, "osType", json!(if windows { "Windows" } else { "Linux" }));
    }
    let Some(os) = part(profile, "/osProfile") else { return };
    default(os, "secrets", json!([]));
    default(os, "allowExtensionOperations", json!(true));
    default(os, "requireGuestProvisionSignal", json!(true));
    let (name, option, on, mode) = if windows {
        ("windowsConfiguration", "enableAutomaticUpdates", true, "AutomaticByOS")
    } else {
        (
            "linuxConfiguration",
            "disablePasswordAuthentication",
            false,
            "ImageDefault",
        )
    };
    default(os, name, json!({}));
    let config = &mut os[name];
    default(config, "provisionVMAgent", json!(true));
    default(config, option, json!(on));
    if patches {
        default(
            config,
            "patchSettings",
            json!({ "patchMode": mode, "assessmentMode": "ImageDefault" }),
        );
    }
}

/// The size of the image that a disk is made from, in GiB.
fn image_size(disk: &Value) -> u64 {
    if text(disk, "/osType").is_some_and(|os| same(os, "Windows")) {
        127
    } else {
        30
    }
}

fn part<'a>(value: &'a mut Value, pointer: &str) -> Option<&'a mut Value> {
    value.pointer_mut(pointer).filter(|part| part.is_object())
}

fn list<'a>(value: &'a mut Value, pointer: &str) -> impl Iterator<Item = &'a mut Value> {
    value
        .pointer_mut(pointer)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}
