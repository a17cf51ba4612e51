//! The disks of a VM: those to create, to attach and to detach. Everything is checked before anything changes.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::disk::Recipe;
use crate::azure::resources::Place;
use crate::azure::wire::{Fail, same, text};
use crate::azure::world::World;

/// The changes that a VM's new storage profile requires.
#[derive(Debug, Default)]
pub struct Plan {
    make: Vec<(Place, Recipe)>,
    attach: Vec<String>,
    detach: Vec<String>,
}

/// The place of a VM, as far as it matters to its disks.
pub struct Home<'a> {
    pub vm: &'a Place,
    pub location: &'a str,
    pub zone: Option<&'a str>,
    pub ultra: bool,
}

impl World {
    /// Reads a storage profile, fills in names and ids, and returns the changes that it requires. `held` are the disks
    /// of the VM.
    pub fn plan_disks(&mut self, home: &Home, storage: &mut Value, held: &[String]) -> Result<Plan, Fail> {
        let mut plan = Plan::default();
        let vm = home.vm.name.clone();
        let mut keep = Vec::new();
        if storage["osDisk"].is_object() {
            let fallback = format!("{vm}_OsDisk_1_{}", self.chance.hex(32));
            let os = &mut storage["osDisk"];
            os["createOption"] = json!(text(os, "/createOption").unwrap_or("FromImage"));
            default(os, "deleteOption", json!("Detach"));
            default(os, "osType", json!("Linux"));
            default(os, "caching", json!("ReadWrite"));
            if text(os, "/diffDiskSettings/option").is_none() {
                default(os, "diskSizeGB", json!(30));
            }
            keep.push(self.plan_disk(home, os, fallback, held, &mut plan)?);
        }
        let detached = |disk: &Value| disk["toBeDetached"].as_bool() == Some(true);
        if let Some(disks) = storage["dataDisks"].as_array_mut() {
            disks.retain(|disk| !detached(disk));
            for disk in disks.iter_mut() {
                let lun = disk["lun"].as_u64().unwrap_or_default();
                let fallback = format!("{vm}_disk{}_{}", lun + 2, self.chance.hex(32));
                default(disk, "deleteOption", json!("Detach"));
                default(disk, "caching", json!("None"));
                default(disk, "lun", json!(0));
                keep.push(self.plan_disk(home, disk, fallback, held, &mut plan)?);
                disk["toBeDetached"] = json!(false);
            }
        }
        plan.detach = held.iter().filter(|key| !keep.contains(key)).cloned().collect();
        Ok(plan)
    }

    fn plan_disk(
        &mut self,
        home: &Home,
        disk: &mut Value,
        fallback: String,
        held: &[String],
        plan: &mut Plan,
    ) -> Result<String, Fail> {
        let given = text(disk, "/managedDisk/id").map(str::to_owned);
        let name = match (text(disk, "/name"), &given) {
            (Some(name), _) => name.to_owned(),
            (None, Some(id)) => id.rsplit('/').next().unwrap_or_default().to_owned(),
            (None, None) => fallback,
        };
        let place = home.vm.sibling("Microsoft.Compute", "disks", &name);
        let key = given.as_deref().map_or_else(|| place.key(), str::to_lowercase);
        disk["name"] = json!(name);
        let mine = held.contains(&key) && self.docs.contains_key(&key);
        let attach = text(disk, "/createOption").is_some_and(|option| same(option, "Attach"));
        if !mine && (attach || given.is_some()) {
            self.attachable(home, disk, &key)?;
            plan.attach.push(key.clone());
        } else if !mine {
            let recipe = Recipe::of(disk, home)?;
            if let Some(set) = &recipe.encryption_set {
                self.encryption_set(set)?;
            }
            if self.docs.contains_key(&key) {
                let message = format!(
                    "Disk {name} already exists in resource group {}. Only CreateOption.Attach is supported.",
                    home.vm.group.to_uppercase()
                );
                return Err(Fail::conflict("ConflictingUserInput", message).target(place.id()));
            }
            if text(disk, "/diffDiskSettings/option").is_none() {
                plan.make.push((place.clone(), recipe));
            }
        }
        if let Some(doc) = self.docs.get(&key) {
            let kind = text(&doc.body, "/sku/name").unwrap_or("Standard_LRS").to_owned();
            let gib = doc
                .body
                .pointer("/properties/diskSizeGB")
                .cloned()
                .unwrap_or(Value::Null);
            default(&mut disk["managedDisk"], "storageAccountType", json!(kind));
            default(disk, "diskSizeGB", gib);
        } else {
            default(&mut disk["managedDisk"], "storageAccountType", json!("Standard_LRS"));
        }
        disk["managedDisk"]["id"] = json!(given.unwrap_or_else(|| place.id()));
        Ok(key)
    }

    fn encryption_set(&self, id: &str) -> Result<(), Fail> {
        if self.docs.contains_key(&id.to_lowercase()) {
            return Ok(());
        }
        let name = id.rsplit('/').next().unwrap_or_default();
        Err(Fail::new(
            404,
            "NotFound",
            format!("Disk encryption set '{name}' could not be found: {id}."),
        )
        .target("diskEncryptionSet.id"))
    }

    fn attachable(&self, home: &Home, disk: &Value, key: &str) -> Result<(), Fail> {
        let Some(doc) = self.docs.get(key) else {
            let name = key.rsplit('/').next().unwrap_or_default();
            return Err(
                Fail::new(404, "NotFound", format!("Disk {name} is not found.")).target("dataDisks.managedDisk.id")
            );
        };
        let vm = home.vm.id();
        if let Some(owner) = text(&doc.body, "/managedBy").filter(|owner| !same(owner, &vm)) {
            let message = format!(
                "Cannot attach the disk {} to VM {vm} because it is already attached to VM {owner}. A disk can be attached to only one \
                 VM at a time.",
                doc.name()
            );
            return Err(Fail::conflict("ConflictingUserInput", message).target(doc.id().to_owned()));
        }
        let zone = text(&doc.body, "/zones/0");
        let kind = text(&doc.body, "/sku/name").unwrap_or_default();
        if zone != home.zone && !(zone.is_none() && kind.ends_with("ZRS")) {
            let message = format!(
                "Disk {} cannot be attached to the VM because it is not in the same zone as the VM. VM zone: '{}'. Disk zone: '{}'. ",
                doc.id(),
                home.zone.unwrap_or_default(),
                zone.unwrap_or_default()
            );
            return Err(Fail::bad("BadRequest", message));
        }
        if kind == super::rules::ULTRA && !home.ultra {
            return Err(Fail::parameter(
                "managedDisk.storageAccountType",
                "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.",
            ));
        }
        let caching = text(disk, "/caching").unwrap_or("None");
        if (kind == super::rules::ULTRA || kind == super::rules::PREMIUM_V2) && caching != "None" {
            let message = format!(
                "Storage Account type {kind} is not supported with caching type {caching}. Please use caching type None."
            );
            return Err(Fail::parameter("dataDisk.caching", message));
        }
        Ok(())
    }

    /// Carries a plan out.
    pub fn apply_disks(&mut self, vm: &Place, tags: &Value, plan: Plan) {
        for (place, recipe) in plan.make {
            let mut doc = self.make_disk(&place, &recipe);
            // A disk that Azure creates with its machine gets the tags that the machine has at that time.
            default(&mut doc.body, "tags", tags.clone());
            attach(&mut doc.body, &vm.id());
            self.docs.insert(place.key(), doc);
        }
        for key in plan.attach {
            if let Some(doc) = self.docs.get_mut(&key) {
                attach(&mut doc.body, &vm.id());
                doc.version += 1;
            }
        }
        for key in plan.detach {
            self.detach_disk(&key);
        }
    }

    pub fn detach_disk(&mut self, key: &str) {
        if let Some(doc) = self.docs.get_mut(key) {
            if let Some(body) = doc.body.as_object_mut() {
                body.shift_remove("managedBy");
            }
            doc.body["properties"]["diskState"] = json!("Unattached");
            doc.version += 1;
        }
    }
}

fn attach(disk: &mut Value, vm: &str) {
    disk["managedBy"] = json!(vm);
    disk["properties"]["diskState"] = json!("Attached");
}

pub fn default(value: &mut Value, name: &str, fallback: Value) {
    if value.get(name).is_none_or(Value::is_null) && !fallback.is_null() {
        value[name] = fallback;
    }
}

/// Keys of the disks a VM has, with their deleteOption.
pub fn held(vm: &Value) -> BTreeMap<String, String> {
    let storage = &vm["properties"]["storageProfile"];
    let data = storage["dataDisks"].as_array().map(Vec::as_slice).unwrap_or_default();
    std::iter::once(&storage["osDisk"])
        .chain(data)
        .filter_map(|disk| {
            let id = text(disk, "/managedDisk/id")?;
            Some((
                id.to_lowercase(),
                text(disk, "/deleteOption").unwrap_or("Detach").to_owned(),
            ))
        })
        .collect()
}
