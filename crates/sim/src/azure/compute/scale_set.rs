//! Scale sets: the model, the capacity, and what follows from a change of either.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::defaults;
use super::fleet::{Fleet, Instance, Power, State};
use super::rules::{self, Model};
use super::storage::default;
use crate::azure::operations::Lane;
use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, merge, same, text};
use crate::azure::world::{Doc, Effect, World};

/// Fixed at the creation of a scale set: the update models of Azure's API do not have them.
const FIXED: [&str; 6] = [
    "orchestrationMode",
    "platformFaultDomainCount",
    "virtualMachineProfile/osProfile/computerNamePrefix",
    "virtualMachineProfile/osProfile/adminUsername",
    "virtualMachineProfile/storageProfile/osDisk/osType",
    "virtualMachineProfile/priority",
];

/// The path of the custom data in a model.
pub const CUSTOM_DATA: &str = "/properties/virtualMachineProfile/osProfile/customData";

/// The effects that a PUT, PATCH or action starts.
type Effects = Vec<(Duration, Effect)>;

impl World {
    /// `…/Microsoft.Compute/virtualMachineScaleSets…`.
    pub fn scale_sets(&mut self, call: &Call) -> Reply {
        let key: Vec<&str> = call.key.split('/').take(9).collect();
        let key = key.join("/");
        let part = call.segment(8).to_lowercase();
        if call.segments.len() >= 9 && !self.docs.contains_key(&key) {
            return Err(Place::of(call).not_found());
        }
        match (&call.method, call.segments.len(), part.as_str()) {
            (&Method::GET, 7, _) => self.list(call),
            (&Method::GET, 8, _) => self
                .render(&key, call)
                .map(Answer::ok)
                .ok_or_else(|| Place::of(call).not_found()),
            (&Method::PUT, 8, _) => self.put_set(call, &key),
            (&Method::PATCH, 8, _) if self.docs.contains_key(&key) => self.put_set(call, &key),
            (&Method::PATCH, 8, _) => Err(Place::of(call).not_found()),
            (&Method::DELETE, 8, _) => self.delete_set(call, &key),
            (&Method::GET, 9, "instanceview") => Ok(Answer::ok(self.set_view(&key))),
            (&Method::GET, 9, "skus") => Ok(Answer::ok(json!({ "value": [] }))),
            (_, _, "virtualmachines") => self.instances(call, &key),
            (&Method::GET, 9, "networkinterfaces") => self.set_nics(call, &key, None),
            (&Method::POST, 9, action) => self.batch(call, &key, action),
            _ => self.generic(call),
        }
    }

    fn put_set(&mut self, call: &Call, key: &str) -> Reply {
        let place = Place::of(call);
        let current = self.docs.get(key);
        let fresh = current.is_none();
        self.precondition(call, current.map(|doc| doc.version))?;
        if current.is_some_and(|doc| doc.state() == "Deleting") {
            return Err(Fail::conflict(
                "OperationNotAllowed",
                format!(
                    "Operation cannot be performed on VM Scale Set '{}' because it is marked to be deleted.",
                    place.name
                ),
            ));
        }
        let mut body = current.map_or_else(|| place.head(), |doc| doc.body.clone());
        merge(&mut body, &call.body);
        if fresh {
            set_defaults(&mut body, &self.chance.uuid(), &self.clock.stamp());
        } else if let Some(doc) = current {
            if let Some(zones) = call.body.get("zones") {
                expands_zones(&doc.body, zones)?;
            }
            if self.config.strict.fixed_properties {
                rules::fixed(&FIXED, &doc.body, &call.body)?;
            }
        }
        defaults::scale_set(&mut body);
        let mut model = model_of(&body);
        if let Some(fleet) = self.fleets.get(key) {
            keep_secrets(&mut model, fleet.newest());
        }
        self.check_set(&place, &body)?;
        if self.config.strict.windows_password {
            rules::password(&model["properties"]["virtualMachineProfile"])?;
        }
        let wanted = body["sku"]["capacity"].as_u64().unwrap_or_default();
        let flexible = text(&body, "/properties/orchestrationMode") == Some("Flexible");
        let have = self.population(key);
        if wanted > have {
            self.quota(
                text(&body, "/location").unwrap_or_default(),
                text(&body, "/sku/name").unwrap_or_default(),
                wanted - have,
            )?;
        }
        let mut doc = self.docs.remove(key).unwrap_or_else(|| Doc::new(Value::Null));
        doc.body = body;
        super::scale_set::hide_custom_data(&mut doc.body);
        doc.set_state(if fresh { "Creating" } else { "Updating" });
        let location = doc.location().to_owned();
        let subnet = subnets(&doc.body["properties"]["virtualMachineProfile"])
            .into_iter()
            .next();
        let range = subnet.and_then(|subnet| self.subnet_range(&subnet)).unwrap_or_default();
        let fleet = self.fleets.entry(key.to_owned()).or_default();
        fleet.id = place.id();
        fleet.name = place.name.clone();
        fleet.location = location.clone();
        fleet.flexible = flexible;
        fleet.range = range;
        let changed = fleet.adopt(model);
        self.docs.insert(key.to_owned(), doc);
        let (mut effects, fail) = self.scale(call, &place, key, wanted);
        if changed
            && self
                .docs
                .get(key)
                .and_then(|doc| text(&doc.body, "/properties/upgradePolicy/mode"))
                == Some("Automatic")
        {
            effects.extend(self.upgrade_all(key));
        }
        let takes = effects.iter().map(|(takes, _)| *takes).max().unwrap_or_default();
        effects.push((takes, Effect::SetSettled(key.to_owned(), fail.clone())));
        let operation = self.begin(call, Lane::Compute, effects, fail.as_ref());
        let body = self.render(key, call).unwrap_or_default();
        let answer = if fresh { Answer::created(body) } else { Answer::ok(body) };
        Ok(self.follow(call, answer, &operation, &location))
    }

    /// Living instances of a set, of either mode.
    pub fn population(&self, key: &str) -> u64 {
        match self.fleets.get(key) {
            Some(fleet) if fleet.flexible => self.flexible_vms(key).len() as u64,
            Some(fleet) => fleet
                .instances
                .values()
                .filter(|instance| instance.state != State::Deleting)
                .count() as u64,
            None => 0,
        }
    }

    fn check_set(&self, place: &Place, body: &Value) -> Result<(), Fail> {
        let properties = &body["properties"];
        let profile = &properties["virtualMachineProfile"];
        let zones: Vec<String> = body["zones"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        if text(body, "/location").is_none() {
            return Err(Fail::bad(
                "LocationRequired",
                "The location property is required for this definition.",
            ));
        }
        let ultra = |holder: &Value| {
            holder
                .pointer("/additionalCapabilities/ultraSSDEnabled")
                .and_then(Value::as_bool)
                == Some(true)
        };
        rules::check(&Model {
            size: text(body, "/sku/name").unwrap_or_default(),
            location: text(body, "/location").unwrap_or_default(),
            zones: &zones,
            storage: &profile["storageProfile"],
            ultra_enabled: ultra(properties) || ultra(profile),
            availability_set: false,
            scale_set: true,
        })?;
        let capacity = body["sku"]["capacity"].as_u64().unwrap_or_default();
        let single = properties["singlePlacementGroup"].as_bool().unwrap_or(true);
        let most = if single { 100 } else { 1000 };
        if capacity > most {
            return Err(Fail::bad("InvalidParameter", format!("The value {capacity} of parameter 'sku.capacity' is out of range: a scale set with singlePlacementGroup={single} has at most {most} instances.")).target("sku.capacity"));
        }
        let prefix = text(profile, "/osProfile/computerNamePrefix").unwrap_or(&place.name);
        if prefix.len() > 58 || (prefix.len() > 9 && text(profile, "/storageProfile/osDisk/osType") == Some("Windows"))
        {
            return Err(Fail::parameter(
                "computerNamePrefix",
                format!("The computer name prefix '{prefix}' is too long."),
            ));
        }
        for subnet in subnets(profile) {
            if !self.has_subnet(&subnet) {
                return Err(Fail::bad(
                    "InvalidResourceReference",
                    format!(
                        "Resource {subnet} referenced by resource {} was not found. Please make sure that the referenced resource exists, and that both resources are in the same region.",
                        place.id()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Brings a set to its capacity.
    fn scale(&mut self, call: &Call, place: &Place, key: &str, wanted: u64) -> (Effects, Option<Fail>) {
        let have = self.population(key);
        if self.fleets.get(key).is_some_and(|fleet| fleet.flexible) {
            return self.scale_flexible(call, place, key, wanted, have);
        }
        if wanted <= have {
            return (self.shrink(key, have - wanted), None);
        }
        let surplus = self
            .docs
            .get(key)
            .and_then(|doc| doc.body["properties"]["overprovision"].as_bool())
            == Some(true);
        let (mut effects, fail) = self.grow(call, key, wanted - have, false);
        if surplus && fail.is_none() {
            let (extra, _) = self.grow(call, key, (wanted - have).div_ceil(5), true);
            effects.extend(extra);
        }
        (effects, fail)
    }

    fn grow(&mut self, call: &Call, key: &str, count: u64, surplus: bool) -> (Effects, Option<Fail>) {
        let zones: Vec<String> = self
            .docs
            .get(key)
            .and_then(|doc| doc.body["zones"].as_array())
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        let mut effects = Vec::new();
        let mut failure = None;
        for _ in 0..count {
            let Some(fleet) = self.fleets.get(key) else { break };
            let crowd = |zone: &String| {
                fleet
                    .instances
                    .values()
                    .filter(|instance| instance.zone.as_ref() == Some(zone))
                    .count()
            };
            let zone = zones.iter().min_by_key(|zone| (crowd(zone), (*zone).clone())).cloned();
            let (size, location) = (
                text(fleet.newest(), "/sku/name").unwrap_or_default().to_owned(),
                fleet.location.clone(),
            );
            if let Some(fail) = self.faults.no_capacity(call, &size, zone.as_deref(), &location) {
                failure = Some(fail);
                continue;
            }
            let id = self.new_instance(key, zone);
            let path = self.fleets.get(key).map(|fleet| fleet.key(id)).unwrap_or_default();
            let fail = self.faults.fail_provisioning(call.method.as_str(), &path);
            failure = failure.or(fail.clone());
            let takes = self.config.times.instance_create.draw(&mut self.chance);
            let set = key.to_owned();
            effects.push((
                takes,
                if surplus {
                    Effect::InstanceRemoved { set, id }
                } else {
                    Effect::InstanceCreated { set, id, fail }
                },
            ));
        }
        (effects, failure)
    }

    fn new_instance(&mut self, key: &str, zone: Option<String>) -> u64 {
        let gap = 1 + self.chance.below(3);
        let (vm_id, created) = (self.chance.uuid(), self.clock.stamp());
        let listing = self.config.times.listing.draw(&mut self.chance);
        let address = self.address();
        let Some(fleet) = self.fleets.get_mut(key) else {
            return 0;
        };
        fleet.last_id = if fleet.instances.is_empty() && fleet.last_id == 0 {
            gap - 1
        } else {
            fleet.last_id + gap
        };
        let id = fleet.last_id;
        let custom_data = text(fleet.newest(), CUSTOM_DATA).map(str::to_owned);
        fleet.instances.insert(
            id,
            Instance {
                id,
                vm_id,
                zone,
                model: fleet.current,
                custom_data,
                unlisted: !listing.is_zero(),
                state: State::Creating,
                power: Power::Starting,
                address,
                created,
                version: 1,
                error: None,
                own: None,
            },
        );
        let path = fleet.key(id);
        if !listing.is_zero() {
            let set = key.to_owned();
            self.later(listing, Effect::InstanceListed { set, id });
        }
        self.touch(&path);
        id
    }

    /// Azure takes from the fullest zone, the highest id first (or by the set's scale-in policy), and spares the protected.
    fn shrink(&mut self, key: &str, count: u64) -> Effects {
        let policy = self
            .docs
            .get(key)
            .and_then(|doc| text(&doc.body, "/properties/scaleInPolicy/rules/0"))
            .unwrap_or("Default")
            .to_owned();
        let mut ids = Vec::new();
        for _ in 0..count {
            let Some(fleet) = self.fleets.get_mut(key) else { break };
            let living: Vec<&Instance> = fleet
                .instances
                .values()
                .filter(|instance| instance.state != State::Deleting)
                .collect();
            let crowd = |zone: &Option<String>| living.iter().filter(|instance| instance.zone == *zone).count();
            let spare = |instance: &&&Instance| {
                let own = instance.own.as_deref().unwrap_or(&Value::Null);
                own.pointer("/properties/protectionPolicy/protectFromScaleIn")
                    .and_then(Value::as_bool)
                    != Some(true)
            };
            let chosen = living.iter().filter(spare).max_by_key(|instance| {
                let age = if policy == "OldestVM" {
                    u64::MAX - instance.id
                } else {
                    instance.id
                };
                (crowd(&instance.zone), age)
            });
            let Some(id) = chosen.map(|instance| instance.id) else {
                break;
            };
            if let Some(instance) = fleet.instances.get_mut(&id) {
                instance.state = State::Deleting;
                instance.version += 1;
            }
            ids.push(id);
        }
        self.removal(key, &ids)
    }

    /// The end of these instances, each in its own time.
    pub fn removal(&mut self, key: &str, ids: &[u64]) -> Effects {
        let mut effects = Vec::new();
        for id in ids {
            let set = key.to_owned();
            self.forget(|effect| concerns(effect, key, *id));
            let path = self.fleets.get(key).map(|fleet| fleet.key(*id)).unwrap_or_default();
            self.touch(&path);
            effects.push((
                self.config.times.instance_delete.draw(&mut self.chance),
                Effect::InstanceRemoved { set, id: *id },
            ));
        }
        effects
    }

    fn upgrade_all(&mut self, key: &str) -> Effects {
        let Some(fleet) = self.fleets.get_mut(key) else {
            return Vec::new();
        };
        let current = fleet.current;
        let mut effects = Vec::new();
        for instance in fleet
            .instances
            .values_mut()
            .filter(|instance| instance.model != current && instance.state == State::Succeeded)
        {
            instance.state = State::Updating;
            let takes = self.config.times.instance_update.draw(&mut self.chance);
            effects.push((
                takes,
                Effect::InstanceUpgraded {
                    set: key.to_owned(),
                    id: instance.id,
                },
            ));
        }
        effects
    }

    fn delete_set(&mut self, call: &Call, key: &str) -> Reply {
        let Some(doc) = self.docs.get_mut(key) else {
            return Ok(Answer::no_content());
        };
        doc.set_state("Deleting");
        let location = doc.location().to_owned();
        let ids: Vec<u64> = self
            .fleets
            .get(key)
            .map(|fleet| fleet.instances.keys().copied().collect())
            .unwrap_or_default();
        for instance in self
            .fleets
            .get_mut(key)
            .into_iter()
            .flat_map(|fleet| fleet.instances.values_mut())
        {
            instance.state = State::Deleting;
        }
        let mut effects = self.removal(key, &ids);
        for vm in self.flexible_vms(key) {
            effects.push((
                self.config.times.vm_delete.draw(&mut self.chance),
                Effect::VmRemoved { vm, keep_disks: false },
            ));
        }
        let takes = effects
            .iter()
            .map(|(takes, _)| *takes)
            .max()
            .unwrap_or(self.config.times.instance_delete.min);
        effects.push((takes, Effect::SetRemoved(key.to_owned())));
        self.cancel_operations(key);
        let operation = self.begin(call, Lane::Compute, effects, None);
        let answer = if self.docs.contains_key(key) {
            Answer::accepted()
        } else {
            Answer::empty()
        };
        Ok(self.follow(call, answer, &operation, &location))
    }

    pub fn set_settled(&mut self, key: &str, fail: Option<Fail>) {
        let busy = self.fleets.get(key).is_some_and(Fleet::busy);
        let Some(doc) = self.docs.get_mut(key).filter(|doc| doc.state() != "Deleting") else {
            return;
        };
        match fail {
            Some(_) => doc.set_state("Failed"),
            None if busy => {}
            None => doc.set_state("Succeeded"),
        }
    }

    pub fn set_removed(&mut self, key: &str) {
        if let Some(fleet) = self.fleets.remove(key) {
            for id in fleet.instances.keys() {
                self.touch(&fleet.key(*id));
            }
        }
        self.docs.remove(key);
        let prefix = format!("{key}/");
        self.docs.retain(|other, _| !other.starts_with(&prefix));
    }

    fn set_view(&self, key: &str) -> Value {
        let mut counts = std::collections::BTreeMap::<String, u64>::new();
        for instance in self
            .fleets
            .get(key)
            .into_iter()
            .flat_map(|fleet| fleet.instances.values())
        {
            *counts
                .entry(format!("ProvisioningState/{}", instance.state.name().to_lowercase()))
                .or_default() += 1;
        }
        let summary: Vec<Value> = counts
            .into_iter()
            .map(|(code, count)| json!({ "code": code, "count": count }))
            .collect();
        let state = self
            .docs
            .get(key)
            .map(|doc| doc.state().to_lowercase())
            .unwrap_or_default();
        json!({ "virtualMachine": { "statusesSummary": summary }, "statuses": [{ "code": format!("ProvisioningState/{state}"),
            "level": "Info", "displayStatus": format!("Provisioning {state}"), "time": self.clock.stamp() }] })
    }
}

/// Whether an effect is about this instance.
fn concerns(effect: &Effect, key: &str, of: u64) -> bool {
    match effect {
        Effect::InstanceCreated { set, id, .. }
        | Effect::InstanceUpgraded { set, id }
        | Effect::InstanceReimaged { set, id }
        | Effect::InstanceRemoved { set, id }
        | Effect::InstanceListed { set, id }
        | Effect::InstancePower { set, id, .. } => set == key && *id == of,
        _ => false,
    }
}

/// Returns the model that instances are created from. Any change of it makes instances outdated.
fn model_of(body: &Value) -> Value {
    let mut model = json!({ "sku": { "name": body["sku"]["name"], "tier": body["sku"]["tier"] },
        "properties": { "virtualMachineProfile": body["properties"]["virtualMachineProfile"] } });
    if !body["properties"]["additionalCapabilities"].is_null() {
        model["properties"]["additionalCapabilities"] = body["properties"]["additionalCapabilities"].clone();
    }
    model
}

/// The document never shows custom data, so a PUT of a document that was read has none: the stored one stays.
fn keep_secrets(model: &mut Value, before: &Value) {
    for secret in ["customData", "adminPassword"] {
        let pointer = format!("/properties/virtualMachineProfile/osProfile/{secret}");
        if model.pointer(&pointer).is_none()
            && let Some(value) = before.pointer(&pointer)
        {
            model["properties"]["virtualMachineProfile"]["osProfile"][secret] = value.clone();
        }
    }
}

fn hide_custom_data(body: &mut Value) {
    if let Some(os) = body
        .pointer_mut("/properties/virtualMachineProfile/osProfile")
        .and_then(Value::as_object_mut)
    {
        os.shift_remove("customData");
        os.shift_remove("adminPassword");
    }
}

fn set_defaults(body: &mut Value, unique: &str, created: &str) {
    default(&mut body["sku"], "tier", json!("Standard"));
    default(&mut body["sku"], "capacity", json!(0));
    let properties = &mut body["properties"];
    default(properties, "orchestrationMode", json!("Uniform"));
    let uniform = text(properties, "/orchestrationMode") == Some("Uniform");
    if uniform {
        default(&mut properties["upgradePolicy"], "mode", json!("Manual"));
        default(properties, "overprovision", json!(true));
        default(properties, "doNotRunExtensionsOnOverprovisionedVMs", json!(false));
    }
    default(properties, "singlePlacementGroup", json!(uniform));
    default(
        properties,
        "platformFaultDomainCount",
        json!(if uniform { 5 } else { 1 }),
    );
    properties["uniqueId"] = json!(unique);
    properties["timeCreated"] = json!(created);
}

/// Zones can be added to a scale set, and never removed.
fn expands_zones(before: &Value, zones: &Value) -> Result<(), Fail> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let (old, new) = (list(&before["zones"]), list(zones));
    if old.iter().all(|zone| new.contains(zone)) {
        return Ok(());
    }
    Err(Fail::conflict("PropertyChangeNotAllowed", "Changing property 'zones' is not allowed.").target("zones"))
}

/// Subnets that a profile's network interfaces are to be in.
pub fn subnets(profile: &Value) -> Vec<String> {
    let configs = profile
        .pointer("/networkProfile/networkInterfaceConfigurations")
        .and_then(Value::as_array);
    let ips = configs
        .into_iter()
        .flatten()
        .filter_map(|config| config.pointer("/properties/ipConfigurations").and_then(Value::as_array));
    ips.flatten()
        .filter_map(|ip| text(ip, "/properties/subnet/id").map(str::to_owned))
        .collect()
}

/// Whether a name selects all instances.
pub fn all(id: &str) -> bool {
    same(id, "*")
}
