//! Flexible scale sets: their instances are virtual machines like any other.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, same, text};
use crate::azure::world::{Doc, Effect, UNLISTED, World};

type Effects = Vec<(Duration, Effect)>;

impl World {
    /// Keys of the VMs that belong to a set.
    pub fn flexible_vms(&self, set: &str) -> Vec<String> {
        if !self.fleets.get(set).is_some_and(|fleet| fleet.flexible) {
            return Vec::new();
        }
        let prefix = set.split("/virtualmachinescalesets/").next().unwrap_or_default();
        let member =
            |doc: &Doc| text(&doc.body, "/properties/virtualMachineScaleSet/id").is_some_and(|id| same(id, set));
        self.keys(&format!("{prefix}/virtualmachines/"))
            .into_iter()
            .filter(|key| {
                self.docs
                    .get(key)
                    .is_some_and(|doc| member(doc) && doc.state() != "Deleting")
            })
            .collect()
    }

    pub fn scale_flexible(
        &mut self,
        call: &Call,
        place: &Place,
        set: &str,
        wanted: u64,
        have: u64,
    ) -> (Effects, Option<Fail>) {
        let mut effects = Vec::new();
        let mut failure = None;
        for _ in wanted..have {
            let Some(key) = self.flexible_victim(set) else { break };
            effects.push(self.flexible_removal(&key));
        }
        for _ in have..wanted {
            let name = format!("{}_{}", place.name, self.chance.hex(8));
            let vm = place.sibling("Microsoft.Compute", "virtualMachines", &name);
            let mut body = self.flexible_model(place, set, &vm);
            match self.create_vm(&vm, &mut body, call) {
                Ok((takes, fail)) => {
                    self.list_late(&vm.key());
                    failure = failure.or(fail.clone());
                    effects.push((takes, Effect::VmCreated(vm.key(), fail)));
                }
                Err(fail) => failure = Some(fail),
            }
        }
        (effects, failure)
    }

    /// From the fullest zone, there the oldest, or the newest by the set's scale-in policy.
    fn flexible_victim(&self, set: &str) -> Option<String> {
        let rule = self
            .docs
            .get(set)
            .and_then(|doc| text(&doc.body, "/properties/scaleInPolicy/rules/0"));
        let newest = rule == Some("NewestVM");
        let vms = self.flexible_vms(set);
        let facts = |key: &String| {
            let body = &self.docs.get(key)?.body;
            Some((
                text(body, "/zones/0"),
                text(body, "/properties/timeCreated").unwrap_or_default(),
            ))
        };
        let crowd = |zone: Option<&str>| vms.iter().filter_map(facts).filter(|(other, _)| *other == zone).count();
        let order = |key: &&String| {
            let (zone, created) = facts(key).unwrap_or_default();
            (crowd(zone), created.to_owned(), (*key).clone())
        };
        let fullest = vms.iter().map(|key| order(&key).0).max()?;
        let candidates = vms.iter().filter(|key| order(key).0 == fullest);
        if newest {
            candidates.max_by_key(order).cloned()
        } else {
            candidates.min_by_key(order).cloned()
        }
    }

    fn list_late(&mut self, key: &str) {
        let listing = self.config.times.listing.draw(&mut self.chance);
        if listing.is_zero() {
            return;
        }
        if let Some(doc) = self.docs.get_mut(key) {
            doc.hide(UNLISTED, true);
        }
        self.later(listing, Effect::VmListed(key.to_owned()));
    }

    fn flexible_removal(&mut self, key: &str) -> (Duration, Effect) {
        if let Some(doc) = self.docs.get_mut(key) {
            doc.set_state("Deleting");
        }
        self.touch(key);
        (
            self.config.times.vm_delete.draw(&mut self.chance),
            Effect::VmRemoved {
                vm: key.to_owned(),
                keep_disks: false,
            },
        )
    }

    /// Returns a VM's body by the set's profile. Creates its network interfaces, too.
    fn flexible_model(&mut self, set_place: &Place, set: &str, vm: &Place) -> Value {
        let Some(fleet) = self.fleets.get(set) else {
            return Value::Null;
        };
        let (model, location) = (fleet.newest().clone(), fleet.location.clone());
        let zones: Vec<String> = self
            .docs
            .get(set)
            .and_then(|doc| doc.body["zones"].as_array())
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        let crowd = |zone: &String| {
            let here = |key: &String| {
                self.docs
                    .get(key)
                    .is_some_and(|doc| text(&doc.body, "/zones/0") == Some(zone))
            };
            self.flexible_vms(set).into_iter().filter(here).count()
        };
        let zone = zones.iter().min_by_key(|zone| (crowd(zone), (*zone).clone())).cloned();
        let profile = &model["properties"]["virtualMachineProfile"];
        let mut properties = profile.clone();
        let mut storage = profile["storageProfile"].clone();
        storage["osDisk"]["deleteOption"] = json!("Delete");
        for disk in storage["dataDisks"].as_array_mut().into_iter().flatten() {
            disk["deleteOption"] = json!("Delete");
        }
        properties["storageProfile"] = storage;
        properties["hardwareProfile"] = json!({ "vmSize": model["sku"]["name"] });
        properties["virtualMachineScaleSet"] = json!({ "id": set_place.id() });
        if !model["properties"]["additionalCapabilities"].is_null() {
            properties["additionalCapabilities"] = model["properties"]["additionalCapabilities"].clone();
        }
        let prefix = text(profile, "/osProfile/computerNamePrefix")
            .unwrap_or(&set_place.name)
            .to_owned();
        if let Some(os) = properties["osProfile"].as_object_mut() {
            os.shift_remove("computerNamePrefix");
            os.insert(
                "computerName".into(),
                json!(format!("{prefix}{}", self.chance.base36(6))),
            );
        }
        let nics = self.flexible_nics(profile, vm, &location);
        properties["networkProfile"] = json!({ "networkInterfaces": nics });
        let tags = self
            .docs
            .get(set)
            .map(|doc| doc.body["tags"].clone())
            .unwrap_or_default();
        let mut body = json!({ "location": location, "properties": properties });
        if let Some(zone) = zone {
            body["zones"] = json!([zone]);
        }
        if tags.is_object() {
            body["tags"] = tags;
        }
        body
    }

    fn flexible_nics(&mut self, profile: &Value, vm: &Place, location: &str) -> Vec<Value> {
        let configs = profile
            .pointer("/networkProfile/networkInterfaceConfigurations")
            .and_then(Value::as_array)
            .cloned();
        let mut references = Vec::new();
        for config in configs.unwrap_or_default() {
            let name = format!("{}-{}", text(&config, "/name").unwrap_or("nic"), self.chance.hex(8));
            let nic = vm.sibling("Microsoft.Network", "networkInterfaces", &name);
            let mut body = nic.head();
            body["location"] = json!(location);
            body["properties"] = config["properties"].clone();
            self.dress_nic(&mut body);
            references.push(
                json!({ "id": nic.id(), "properties": { "primary": references.is_empty(), "deleteOption": "Delete" } }),
            );
            self.docs.insert(nic.key(), Doc::new(body));
        }
        references
    }

    /// A VM as the scale set's own list shows it.
    pub fn flexible_body(&self, set: &str, key: &str, view: bool) -> Option<Value> {
        let doc = self.docs.get(key)?;
        let mut body = doc.body.clone();
        let fleet = self.fleets.get(set)?;
        body["instanceId"] = json!(doc.name());
        body["id"] = json!(format!("{}/virtualMachines/{}", fleet.id, doc.name()));
        body["type"] = json!("Microsoft.Compute/virtualMachineScaleSets/virtualMachines");
        body["sku"] = json!({ "name": text(&doc.body, "/properties/hardwareProfile/vmSize"), "tier": "Standard" });
        if view {
            body["properties"]["instanceView"] = self.vm_instance_view(doc);
        }
        Some(body)
    }

    fn member(&self, set: &str, id: &str) -> Option<String> {
        self.flexible_vms(set)
            .into_iter()
            .find(|key| key.rsplit('/').next().is_some_and(|name| same(name, id)))
    }

    pub fn flexible_instance(&mut self, call: &Call, set: &str) -> Reply {
        let id = call.segment(9).to_owned();
        let member = self.member(set, &id);
        match (&call.method, call.segments.len(), member) {
            (&Method::GET, 10, Some(key)) => Ok(Answer::ok(
                self.flexible_body(set, &key, call.expands("instanceview"))
                    .unwrap_or_default(),
            )),
            (&Method::DELETE, 10, None) => Ok(Answer::no_content()),
            (&Method::DELETE, 10, Some(_)) => self.flexible_batch(call, set, "delete", vec![id]),
            (&Method::POST, 11, Some(_)) => self.flexible_batch(call, set, &call.segment(10).to_lowercase(), vec![id]),
            _ => Err(Fail::new(
                404,
                "NotFound",
                "The entity was not found in this Azure location.",
            )),
        }
    }

    pub fn flexible_batch(&mut self, call: &Call, set: &str, action: &str, ids: Vec<String>) -> Reply {
        let every = ids.is_empty() || ids.iter().any(|id| id == "*");
        let keys: Vec<String> = if every {
            self.flexible_vms(set)
        } else {
            let active = |id: &String| {
                self.member(set, id).ok_or_else(|| {
                    Fail::parameter(
                        "instanceIds",
                        format!(
                            "The provided instanceId {id} is not an active Virtual Machine Scale Set VM instanceId."
                        ),
                    )
                })
            };
            ids.iter().map(active).collect::<Result<_, _>>()?
        };
        let mut effects: Effects = Vec::new();
        for key in keys {
            if action == "delete" {
                effects.push(self.flexible_removal(&key));
                self.lower_capacity(set, 1);
                continue;
            }
            let (_, then) = super::vm::power(action).unwrap_or(("running", "running"));
            effects.push((
                self.config.times.vm_power.draw(&mut self.chance),
                Effect::VmPower(key, then.to_owned()),
            ));
        }
        Ok(self.begin_on_set(call, set, effects))
    }
}
