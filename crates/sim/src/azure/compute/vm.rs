//! Virtual machines: create, change, power, delete, with their dependencies.

use http::Method;
use serde_json::{Value, json};

use super::defaults;
use super::rules::{self, Model};
use super::storage::{self, Home, default};
use crate::azure::operations::{Lane, Operation};
use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, merge, object, same, text};
use crate::azure::world::{Doc, Effect, World};

const KIND: &str = "Microsoft.Compute/virtualMachines";

impl World {
    /// `…/Microsoft.Compute/virtualMachines…`.
    pub fn vms(&mut self, call: &Call) -> Reply {
        let action = call.segment(8).to_lowercase();
        match (&call.method, call.segments.len(), action.as_str()) {
            (&Method::GET, 7, _) => self.list(call),
            (&Method::GET, 8, _) => self
                .render(&call.key, call)
                .map(Answer::ok)
                .ok_or_else(|| Place::of(call).not_found()),
            (&Method::GET, 9, "instanceview") => {
                self.vm_doc(call).map(|(_, doc)| Answer::ok(self.vm_instance_view(doc)))
            }
            (&Method::PUT, 8, _) => self.put_vm(call),
            (&Method::PATCH, 8, _) => self.vm_doc(call).map(|_| ()).and_then(|()| self.update_vm(call)),
            (&Method::DELETE, 8, _) => self.delete_vm(call),
            (&Method::POST, 9, "simulateeviction") => self.evict_vm(call),
            (&Method::POST, 9, "attachdetachdatadisks") => self.attach_detach(call),
            (&Method::POST, 9, action) => self.power_vm(call, action),
            _ if call.segments.len() >= 9 => self.generic(call),
            _ => Err(Fail::new(
                405,
                "MethodNotAllowed",
                format!("{} is not possible on {}.", call.method, call.path),
            )),
        }
    }

    fn vm_doc(&self, call: &Call) -> Result<(String, &Doc), Fail> {
        let place = Place::of(call);
        let key = place.key();
        match self.docs.get(&key) {
            Some(doc) => Ok((key, doc)),
            None => Err(place.not_found()),
        }
    }

    fn put_vm(&mut self, call: &Call) -> Reply {
        let current = self.docs.get(&call.key);
        self.precondition(call, current.map(|doc| doc.version))?;
        if current.is_some() {
            return self.update_vm(call);
        }
        let place = Place::of(call);
        let mut body = call.body.clone();
        let asked = &call.body["properties"]["storageProfile"];
        if text(&body, "/location").is_none() {
            return Err(Fail::bad(
                "LocationRequired",
                "The location property is required for this definition.",
            ));
        }
        let (takes, fail) = self.create_vm(&place, &mut body, call)?;
        let effect = Effect::VmCreated(call.key.clone(), fail.clone());
        let operation = self.begin(call, Lane::Compute, vec![(takes, effect)], fail.as_ref());
        let mut body = self.render(&call.key, call).unwrap_or_default();
        if text(&body, "/properties/provisioningState") == Some("Creating") {
            unmade_disks(&mut body["properties"]["storageProfile"], asked);
        }
        let location = text(&body, "/location").unwrap_or_default().to_owned();
        Ok(self.follow(call, Answer::created(body), &operation, &location))
    }

    /// Checks everything, then puts a VM and its disks into the state Creating. Returns the duration and the outcome.
    pub fn create_vm(
        &mut self,
        place: &Place,
        body: &mut Value,
        call: &Call,
    ) -> Result<(std::time::Duration, Option<Fail>), Fail> {
        let location = text(body, "/location").unwrap_or_default().to_owned();
        let size = text(body, "/properties/hardwareProfile/vmSize")
            .unwrap_or_default()
            .to_owned();
        let zone = text(body, "/zones/0").map(str::to_owned);
        check_model(body)?;
        defaults::machine(&mut body["properties"]);
        if self.config.strict.windows_password {
            rules::password(&body["properties"])?;
        }
        self.quota(&location, &size, 1)?;
        let mut fail = self.faults.no_capacity(call, &size, zone.as_deref(), &location);
        if let Some(fail) = fail.as_ref().filter(|fail| fail.code == "SkuNotAvailable") {
            return Err(fail.clone());
        }
        fail = fail.or_else(|| self.faults.fail_provisioning(call.method.as_str(), &place.id()));
        let nics = self.check_nics(place, body)?;
        let ultra = body
            .pointer("/properties/additionalCapabilities/ultraSSDEnabled")
            .and_then(Value::as_bool)
            == Some(true);
        let home = Home {
            vm: place,
            location: &location,
            zone: zone.as_deref(),
            ultra,
        };
        let mut profile = body["properties"]["storageProfile"].take();
        let plan = self.plan_disks(&home, &mut profile, &[])?;
        body["properties"]["storageProfile"] = profile;
        self.apply_disks(place, &body["tags"], plan);
        self.take_nics(place, &nics);
        let mut doc = Doc::new(place.head());
        merge(&mut doc.body, body);
        doc.hide("power", "starting");
        hide_secrets(&mut doc);
        let properties = object(&mut doc.body, "properties");
        properties.insert("vmId".into(), json!(self.chance.uuid()));
        properties.insert("timeCreated".into(), json!(self.clock.stamp()));
        doc.set_state("Creating");
        self.docs.insert(place.key(), doc);
        self.touch(&place.key());
        Ok((self.config.times.vm_create.draw(&mut self.chance), fail))
    }

    fn check_nics(&self, place: &Place, body: &Value) -> Result<Vec<String>, Fail> {
        let mut keys = Vec::new();
        for nic in body
            .pointer("/properties/networkProfile/networkInterfaces")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let id = text(nic, "/id").unwrap_or_default();
            let Some(doc) = self.get(id) else {
                return Err(Fail::bad(
                    "InvalidResourceReference",
                    format!(
                        "Resource {id} referenced by resource {} was not found. Please make sure that the referenced resource exists, and that both resources are in the same region.",
                        place.id()
                    ),
                ));
            };
            if let Some(owner) =
                text(&doc.body, "/properties/virtualMachine/id").filter(|owner| !same(owner, &place.id()))
            {
                return Err(super::super::network::nic_in_use(doc.id(), owner));
            }
            keys.push(id.to_lowercase());
        }
        Ok(keys)
    }

    fn take_nics(&mut self, place: &Place, nics: &[String]) {
        for (i, key) in nics.iter().enumerate() {
            let n = key
                .bytes()
                .fold(0_u32, |n, byte| n.wrapping_mul(31).wrapping_add(byte.into()));
            if let Some(doc) = self.docs.get_mut(key) {
                doc.body["properties"]["virtualMachine"] = json!({ "id": place.id() });
                doc.body["properties"]["primary"] = json!(i == 0);
                let mac = format!("00-0D-3A-{:02X}-{:02X}-{:02X}", n >> 16 & 255, n >> 8 & 255, n & 255);
                default(&mut doc.body["properties"], "macAddress", json!(mac));
                doc.version += 1;
            }
        }
    }

    /// PUT on a VM that exists, and PATCH.
    fn update_vm(&mut self, call: &Call) -> Reply {
        let (key, doc) = self.vm_doc(call)?;
        self.precondition(call, Some(doc.version))?;
        if doc.state() == "Deleting" {
            return Err(being_deleted(doc));
        }
        if doc.state() == "Creating"
            && let Some(operation) = self.running_operation(&key)
        {
            // A PUT that is sent again while the first is worked on changes nothing.
            let (location, body) = (doc.location().to_owned(), self.render(&key, call).unwrap_or_default());
            return Ok(self.follow(call, Answer::ok(body), &operation, &location));
        }
        unchangeable(doc, &call.body)?;
        let mut body = doc.body.clone();
        merge(&mut body, &call.body);
        let place = Place::of(call);
        check_model(&body)?;
        let running = doc.hidden("power") != "deallocated";
        let ultra = |body: &Value| {
            body.pointer("/properties/additionalCapabilities/ultraSSDEnabled")
                .and_then(Value::as_bool)
                == Some(true)
        };
        if running && ultra(&body) != ultra(&doc.body) {
            let message = format!(
                "Property 'additionalCapabilities.ultraSSDEnabled' of VM '{}' can be changed only when the VM is deallocated.",
                place.name
            );
            return Err(Fail::conflict("OperationNotAllowed", message).target("additionalCapabilities.ultraSSDEnabled"));
        }
        let held: Vec<String> = storage::held(&doc.body).into_keys().collect();
        let old_nics = nics(&doc.body);
        let new_nics = self.check_nics(&place, &body)?;
        let location = text(&body, "/location").unwrap_or_default().to_owned();
        let zone = text(&body, "/zones/0").map(str::to_owned);
        let home = Home {
            vm: &place,
            location: &location,
            zone: zone.as_deref(),
            ultra: ultra(&body),
        };
        let mut profile = body["properties"]["storageProfile"].take();
        let plan = self.plan_disks(&home, &mut profile, &held)?;
        body["properties"]["storageProfile"] = profile;
        self.apply_disks(&place, &body["tags"], plan);
        for (nic, _) in old_nics.iter().filter(|(nic, _)| !new_nics.contains(nic)) {
            self.leave_nic(nic);
        }
        self.take_nics(&place, &new_nics);
        if let Some(doc) = self.docs.get_mut(&key) {
            doc.body = body;
            hide_secrets(doc);
            doc.set_state("Updating");
        }
        self.touch(&key);
        let takes = self.config.times.vm_update.draw(&mut self.chance);
        let operation = self.begin(call, Lane::Compute, vec![(takes, Effect::VmUpdated(key.clone()))], None);
        let answer = Answer::ok(self.render(&key, call).unwrap_or_default());
        Ok(self.follow(call, answer, &operation, &location))
    }

    /// `POST …/attachDetachDataDisks`: the same as a PATCH of the storage profile.
    fn attach_detach(&mut self, call: &Call) -> Reply {
        let (key, doc) = self.vm_doc(call)?;
        let mut disks = doc
            .body
            .pointer("/properties/storageProfile/dataDisks")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let listed = |name: &str| call.body[name].as_array().cloned().unwrap_or_default();
        for gone in listed("dataDisksToDetach") {
            disks.retain(|disk| {
                !same(
                    text(disk, "/managedDisk/id").unwrap_or_default(),
                    text(&gone, "/diskId").unwrap_or("-"),
                )
            });
        }
        for new in listed("dataDisksToAttach") {
            let used: Vec<u64> = disks.iter().filter_map(|disk| disk["lun"].as_u64()).collect();
            let lun = new["lun"]
                .as_u64()
                .or_else(|| (0..64).find(|lun| !used.contains(lun)))
                .unwrap_or(0);
            disks.push(json!({ "lun": lun, "createOption": "Attach", "caching": new.get("caching").unwrap_or(&json!("None")),
                "deleteOption": new.get("deleteOption").unwrap_or(&json!("Detach")), "managedDisk": { "id": new["diskId"] } }));
        }
        let mut patch = call.clone();
        patch.key = key.clone();
        patch.body = json!({ "properties": { "storageProfile": { "dataDisks": disks } } });
        self.update_vm(&patch)?;
        let profile = self.docs[&key].body["properties"]["storageProfile"].clone();
        Ok(Answer::ok(profile))
    }

    fn delete_vm(&mut self, call: &Call) -> Reply {
        let Some(doc) = self.docs.get(&call.key) else {
            return Ok(Answer::no_content());
        };
        self.precondition(call, Some(doc.version))?;
        let location = doc.location().to_owned();
        let key = call.key.clone();
        if doc.state() == "Deleting"
            && let Some(id) = self.running_operation(&key)
        {
            return Ok(self.follow(call, Answer::accepted(), &id, &location));
        }
        self.forget(|effect| matches!(effect, Effect::VmCreated(vm, _) | Effect::VmUpdated(vm) | Effect::VmPower(vm, _) if *vm == key));
        self.cancel_operations(&key);
        if let Some(doc) = self.docs.get_mut(&key) {
            doc.set_state("Deleting");
        }
        self.touch(&key);
        let takes = self.config.times.vm_delete.draw(&mut self.chance);
        let effect = Effect::VmRemoved {
            vm: key.clone(),
            keep_disks: call.ordeal.keep_disks,
        };
        let operation = self.begin(call, Lane::Compute, vec![(takes, effect)], None);
        let answer = if self.docs.contains_key(&key) {
            Answer::accepted()
        } else {
            Answer::empty()
        };
        Ok(self.follow(call, answer, &operation, &location))
    }

    fn running_operation(&self, key: &str) -> Option<String> {
        let running = |operation: &Operation| operation.target == key && operation.end.is_none();
        self.operations
            .iter()
            .find(|(_, operation)| running(operation))
            .map(|(id, _)| id.clone())
    }

    /// Ends the operations of a resource that is deleted now as preempted.
    pub fn cancel_operations(&mut self, key: &str) {
        let running: Vec<String> = self
            .operations
            .iter()
            .filter(|(_, operation)| operation.target == key && operation.end.is_none())
            .map(|(id, _)| id.clone())
            .collect();
        let error = Fail::conflict(
            "OperationPreempted",
            "The operation has been preempted by a more recent operation.",
        )
        .error();
        for id in running {
            self.end_operation(&id, Some(error.clone()));
        }
    }

    fn power_vm(&mut self, call: &Call, action: &str) -> Reply {
        let (key, doc) = self.vm_doc(call)?;
        if doc.state() == "Deleting" {
            return Err(being_deleted(doc));
        }
        let location = doc.location().to_owned();
        let (now, then) = power(action).ok_or_else(|| unknown_action(call))?;
        if let Some(doc) = self.docs.get_mut(&key) {
            doc.hide("power", now);
            doc.set_state("Updating");
        }
        self.touch(&key);
        let takes = self.config.times.vm_power.draw(&mut self.chance);
        let operation = self.begin(
            call,
            Lane::Compute,
            vec![(takes, Effect::VmPower(key.clone(), then.into()))],
            None,
        );
        let answer = if self.operations[&operation].end.is_some() {
            Answer::empty()
        } else {
            Answer::accepted()
        };
        Ok(self.follow(call, answer, &operation, &location))
    }

    pub fn vm_created(&mut self, key: &str, fail: Option<Fail>) {
        let Some(doc) = self.docs.get_mut(key) else { return };
        match fail {
            Some(fail) => {
                // A guest that is late to report runs all the same.
                let late = fail.code.starts_with("OSProvisioning");
                doc.hide("power", if late { "running" } else { "stopped" });
                doc.hide("error", serde_json::to_value(&fail).unwrap_or_default());
                doc.set_state("Failed");
            }
            None => {
                doc.hide("power", "running");
                doc.set_state("Succeeded");
            }
        }
        self.touch(key);
    }

    pub fn vm_updated(&mut self, key: &str) {
        if let Some(doc) = self.docs.get_mut(key) {
            doc.set_state("Succeeded");
        }
        self.touch(key);
    }

    pub fn vm_power(&mut self, key: &str, power: &str) {
        if let Some(doc) = self.docs.get_mut(key) {
            doc.hide("power", power);
            doc.set_state("Succeeded");
        }
        self.touch(key);
    }

    /// Deletes a VM, and the dependencies that are marked for deletion with it.
    pub fn vm_removed(&mut self, key: &str, keep_disks: bool) {
        let Some(doc) = self.docs.remove(key) else { return };
        for (disk, option) in storage::held(&doc.body) {
            if same(&option, "Delete") && !keep_disks {
                self.docs.remove(&disk);
            } else {
                self.detach_disk(&disk);
            }
        }
        for (nic, option) in nics(&doc.body) {
            if same(&option, "Delete") {
                self.remove_nic(&nic)
            } else {
                self.leave_nic(&nic)
            }
        }
        let prefix = format!("{key}/");
        self.docs.retain(|other, _| !other.starts_with(&prefix));
        self.touch(key);
    }

    /// An out-of-band delete, as if done in the portal.
    pub fn remove_resource(&mut self, key: &str) {
        match self.docs.get(key).map(|doc| doc.kind().to_owned()).as_deref() {
            Some(KIND) => self.vm_removed(key, false),
            Some("Microsoft.Network/networkInterfaces") => self.remove_nic(key),
            _ => {
                self.docs.remove(key);
            }
        }
    }
}

/// The answer to a PUT does not name the disks that Azure is going to make.
fn unmade_disks(storage: &mut Value, asked: &Value) {
    let hide = |disk: &mut Value, asked: &Value| {
        if text(asked, "/managedDisk/id").is_some() {
            return;
        }
        if let Some(managed) = disk["managedDisk"].as_object_mut() {
            managed.shift_remove("id");
        }
        if let (true, Some(disk)) = (asked.get("name").is_none(), disk.as_object_mut()) {
            disk.shift_remove("name");
        }
    };
    if storage["osDisk"].is_object() {
        hide(&mut storage["osDisk"], &asked["osDisk"]);
    }
    let disks = storage.get_mut("dataDisks").and_then(Value::as_array_mut);
    for disk in disks.into_iter().flatten() {
        let lun = disk["lun"].clone();
        let same_lun = |asked: &&Value| asked.get("lun").cloned().unwrap_or(json!(0)) == lun;
        let asked = asked["dataDisks"].as_array().into_iter().flatten().find(same_lun);
        hide(disk, asked.unwrap_or(&Value::Null));
    }
}

/// Keys of the network interfaces a VM has, with their deleteOption.
pub fn nics(vm: &Value) -> Vec<(String, String)> {
    let list = vm
        .pointer("/properties/networkProfile/networkInterfaces")
        .and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|nic| {
            let id = text(nic, "/id")?;
            Some((
                id.to_lowercase(),
                text(nic, "/properties/deleteOption").unwrap_or("Detach").to_owned(),
            ))
        })
        .collect()
}

/// The power states during and after an action.
pub fn power(action: &str) -> Option<(&'static str, &'static str)> {
    Some(match action {
        "start" => ("starting", "running"),
        "restart" | "redeploy" | "reapply" | "reimage" | "performmaintenance" => ("running", "running"),
        "poweroff" => ("stopping", "stopped"),
        "deallocate" => ("deallocating", "deallocated"),
        "generalize" => ("stopped", "stopped"),
        _ => return None,
    })
}

pub fn unknown_action(call: &Call) -> Fail {
    Fail::new(
        404,
        "InvalidResourceType",
        format!("The action {} could not be found for the resource.", call.path),
    )
}

fn being_deleted(doc: &Doc) -> Fail {
    Fail::conflict(
        "OperationNotAllowed",
        format!(
            "Operation cannot be performed on VM '{}' because it is marked to be deleted.",
            doc.name()
        ),
    )
}

fn check_model(body: &Value) -> Result<(), Fail> {
    let properties = &body["properties"];
    let zones: Vec<String> = body["zones"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    rules::check(&Model {
        size: text(properties, "/hardwareProfile/vmSize").unwrap_or_default(),
        location: text(body, "/location").unwrap_or_default(),
        zones: &zones,
        storage: &properties["storageProfile"],
        ultra_enabled: properties
            .pointer("/additionalCapabilities/ultraSSDEnabled")
            .and_then(Value::as_bool)
            == Some(true),
        availability_set: text(properties, "/availabilitySet/id").is_some(),
        scale_set: false,
    })
}

/// Custom data and passwords are taken in but never shown.
pub fn hide_secrets(doc: &mut Doc) {
    let Some(profile) = doc
        .body
        .pointer_mut("/properties/osProfile")
        .and_then(Value::as_object_mut)
    else {
        return;
    };
    let custom_data = profile.shift_remove("customData");
    profile.shift_remove("adminPassword");
    if let Some(data) = custom_data {
        doc.hide("customData", data);
    }
}

/// Some properties are fixed at birth.
fn unchangeable(doc: &Doc, patch: &Value) -> Result<(), Fail> {
    const FIXED: [&str; 4] = [
        "osProfile/computerName",
        "osProfile/adminUsername",
        "storageProfile/imageReference/id",
        "availabilitySet/id",
    ];
    let refused = |name: &str| {
        let name = name.replace('/', ".");
        Err(Fail::conflict(
            "PropertyChangeNotAllowed",
            format!("Changing property '{name}' is not allowed."),
        )
        .target(name))
    };
    for name in FIXED {
        let pointer = format!("/properties/{name}");
        if let Some(new) = text(patch, &pointer)
            && text(&doc.body, &pointer).is_some_and(|old| !same(old, new))
        {
            return refused(name);
        }
    }
    match text(patch, "/properties/osProfile/customData") {
        Some(data) if data != doc.hidden("customData") => refused("osProfile/customData"),
        _ if patch
            .get("zones")
            .is_some_and(|zones| doc.body.get("zones").is_some_and(|old| old != zones)) =>
        {
            refused("zones")
        }
        _ => Ok(()),
    }
}
