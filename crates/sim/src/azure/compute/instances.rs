//! Instances of scale sets: lists, single instances, and actions on many at once.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::fleet::{Power, State};
use super::scale_set::{CUSTOM_DATA, all};
use super::vm;
use crate::azure::operations::Lane;
use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, merge, same, text};
use crate::azure::world::{Effect, UNLISTED, World};

impl World {
    /// `…/virtualMachineScaleSets/{n}/virtualMachines…`.
    pub fn instances(&mut self, call: &Call, set: &str) -> Reply {
        if call.segments.len() == 9 {
            return self.list_instances(call, set);
        }
        if self.fleets.get(set).is_some_and(|fleet| fleet.flexible) {
            return self.flexible_instance(call, set);
        }
        let id = call.segment(9).to_owned();
        let action = call.segment(10).to_lowercase();
        let number = self
            .known(set, &id)
            .ok_or_else(|| Fail::new(404, "NotFound", "The entity was not found in this Azure location."));
        match (&call.method, call.segments.len(), action.as_str()) {
            (&Method::GET, 10, _) => self
                .instance(set, number?, call.expands("instanceview"))
                .map(Answer::ok),
            (&Method::GET, 11, "instanceview") => {
                let number = number?;
                let fleet = self.fleets.get(set);
                Ok(Answer::ok(
                    fleet
                        .and_then(|fleet| Some(fleet.view(fleet.instances.get(&number)?)))
                        .unwrap_or_default(),
                ))
            }
            (&Method::GET, _, "networkinterfaces") => self.set_nics(call, set, Some(number?)),
            (&Method::PUT | &Method::PATCH, 10, _) => self.put_instance(call, set, number?),
            (&Method::DELETE, 10, _) => match number {
                Ok(number) => self.act(call, set, &[number], "delete"),
                Err(_) => Ok(Answer::no_content()),
            },
            (&Method::POST, 11, "simulateeviction") => self.evict_instance(set, number?),
            (&Method::POST, 11, action) => self.act(call, set, &[number?], action),
            _ => self.generic(call),
        }
    }

    fn known(&self, set: &str, id: &str) -> Option<u64> {
        let number = id.parse().ok()?;
        self.fleets.get(set)?.instances.contains_key(&number).then_some(number)
    }

    fn instance(&self, set: &str, id: u64, view: bool) -> Result<Value, Fail> {
        let fleet = self.fleets.get(set);
        let found = fleet.and_then(|fleet| Some(fleet.render(fleet.instances.get(&id)?, view)));
        found.ok_or_else(|| Fail::new(404, "NotFound", "The entity was not found in this Azure location."))
    }

    fn list_instances(&self, call: &Call, set: &str) -> Reply {
        let view = call.expands("instanceview");
        let Some(fleet) = self.fleets.get(set) else {
            return Ok(Answer::ok(json!({ "value": [] })));
        };
        if fleet.flexible {
            let listed = |key: &String| self.docs.get(key).is_some_and(|doc| !doc.hidden.contains_key(UNLISTED));
            let vms = self.flexible_vms(set).into_iter().filter(listed).collect();
            return self.page(call, vms, |key| self.flexible_body(set, key, view));
        }
        let listed = fleet.instances.values().filter(|instance| !instance.unlisted);
        let keys = listed.map(|instance| format!("{:012}", instance.id)).collect();
        self.page(call, keys, |key| {
            Some(fleet.render(fleet.instances.get(&key.parse().ok()?)?, view))
        })
    }

    /// The network interfaces of all instances, or of one.
    pub fn set_nics(&self, call: &Call, set: &str, only: Option<u64>) -> Reply {
        let Some(fleet) = self.fleets.get(set) else {
            return Ok(Answer::ok(json!({ "value": [] })));
        };
        if let (Some(id), 12) = (only, call.segments.len()) {
            let nics = fleet
                .instances
                .get(&id)
                .map(|instance| fleet.nics(instance))
                .unwrap_or_default();
            let found = nics
                .into_iter()
                .find(|nic| text(nic, "/name").is_some_and(|name| same(name, call.segment(11))));
            return found.map(Answer::ok).ok_or_else(|| Place::of(call).not_found());
        }
        let chosen = fleet
            .instances
            .values()
            .filter(|instance| only.is_none_or(|id| instance.id == id));
        let nics: Vec<Value> = chosen.flat_map(|instance| fleet.nics(instance)).collect();
        let keys = (0..nics.len()).map(|i| format!("{i:012}")).collect();
        self.page(call, keys, |key| nics.get(key.parse::<usize>().ok()?).cloned())
    }

    /// PUT on an instance: its protection, tags and data disks.
    fn put_instance(&mut self, call: &Call, set: &str, id: u64) -> Reply {
        let view = call.expands("instanceview");
        let version = self
            .fleets
            .get(set)
            .and_then(|fleet| fleet.instances.get(&id))
            .map(|instance| instance.version);
        self.precondition(call, version)?;
        let mut own = json!({});
        for (name, pointer) in [
            ("protectionPolicy", "/properties/protectionPolicy"),
            ("dataDisks", "/properties/storageProfile/dataDisks"),
        ] {
            match call.body.pointer(pointer) {
                Some(value) if name == "dataDisks" => own["properties"]["storageProfile"]["dataDisks"] = value.clone(),
                Some(value) => own["properties"][name] = value.clone(),
                None => {}
            }
        }
        if let Some(tags) = call.body.get("tags") {
            own["tags"] = tags.clone();
        }
        let takes = self.config.times.vm_update.draw(&mut self.chance);
        let location = {
            let Some(fleet) = self.fleets.get_mut(set) else {
                return Err(Fail::new(
                    404,
                    "NotFound",
                    "The entity was not found in this Azure location.",
                ));
            };
            if let Some(instance) = fleet.instances.get_mut(&id) {
                let mut merged = instance.own.take().map(|own| *own).unwrap_or_else(|| json!({}));
                merge(&mut merged, &own);
                instance.own = Some(Box::new(merged));
                instance.state = State::Updating;
                instance.version += 1;
            }
            fleet.location.clone()
        };
        let power = "running".to_owned();
        let operation = self.begin(
            call,
            Lane::Compute,
            vec![(
                takes,
                Effect::InstancePower {
                    set: set.into(),
                    id,
                    power,
                },
            )],
            None,
        );
        let mut answer = Answer::ok(self.instance(set, id, view)?);
        if self.operations[&operation].end.is_none() {
            answer.status = http::StatusCode::ACCEPTED;
        }
        Ok(self.follow(call, answer, &operation, &location))
    }

    /// `POST …/virtualMachineScaleSets/{n}/{action}` with `instanceIds`.
    pub fn batch(&mut self, call: &Call, set: &str, action: &str) -> Reply {
        let given: Option<Vec<String>> = call.body["instanceIds"]
            .as_array()
            .map(|ids| ids.iter().map(id_text).collect());
        let required = matches!(action, "delete" | "manualupgrade");
        let given = match given {
            Some(ids) if !ids.is_empty() => Some(ids),
            _ if required => {
                return Err(Fail::bad(
                    "InvalidParameter",
                    "Required parameter 'vmInstanceIDs.instanceIds' is missing (null).",
                )
                .target("vmInstanceIDs.instanceIds"));
            }
            _ => None,
        };
        if self.fleets.get(set).is_some_and(|fleet| fleet.flexible) {
            return self.flexible_batch(call, set, action, given.unwrap_or_default());
        }
        let every = || {
            self.fleets
                .get(set)
                .map(|fleet| fleet.instances.keys().copied().collect())
                .unwrap_or_default()
        };
        let ids: Vec<u64> = match given {
            None => every(),
            Some(ids) if ids.iter().any(|id| all(id)) => every(),
            Some(ids) => ids
                .iter()
                .map(|id| self.known(set, id).ok_or_else(|| inactive(id)))
                .collect::<Result<_, _>>()?,
        };
        self.act(call, set, &ids, action)
    }

    fn act(&mut self, call: &Call, set: &str, ids: &[u64], action: &str) -> Reply {
        let effects = match action {
            "delete" => self.delete_instances(set, ids),
            "manualupgrade" | "reimage" | "reimageall" => self.renew(set, ids, action),
            action => {
                let (now, then) = vm::power(action).ok_or_else(|| vm::unknown_action(call))?;
                self.power_instances(set, ids, now, then)
            }
        };
        if let Some(doc) = self.docs.get_mut(set).filter(|doc| doc.state() != "Deleting") {
            doc.set_state("Updating");
        }
        Ok(self.begin_on_set(call, set, effects))
    }

    /// Begins an operation of these effects; with the last of them the scale set is at rest again.
    pub(super) fn begin_on_set(&mut self, call: &Call, set: &str, mut effects: Vec<(Duration, Effect)>) -> Answer {
        let takes = effects.iter().map(|(takes, _)| *takes).max().unwrap_or_default();
        effects.push((takes, Effect::SetSettled(set.to_owned(), None)));
        let fleet = self.fleets.get(set);
        let location = fleet.map(|fleet| fleet.location.clone()).unwrap_or_default();
        let operation = self.begin(call, Lane::Compute, effects, None);
        let answer = if self.operations[&operation].end.is_some() {
            Answer::empty()
        } else {
            Answer::accepted()
        };
        self.follow(call, answer, &operation, &location)
    }

    /// Explicit deletes ignore protection and lower the capacity.
    fn delete_instances(&mut self, set: &str, ids: &[u64]) -> Vec<(Duration, Effect)> {
        let mut fresh = Vec::new();
        for instance in self
            .fleets
            .get_mut(set)
            .into_iter()
            .flat_map(|fleet| fleet.instances.values_mut())
        {
            if ids.contains(&instance.id) && instance.state != State::Deleting {
                instance.state = State::Deleting;
                instance.version += 1;
                fresh.push(instance.id);
            }
        }
        self.lower_capacity(set, fresh.len() as u64);
        let mut effects = self.removal(set, &fresh);
        // Instances that are already being deleted keep their time; this operation waits for them.
        for id in ids.iter().filter(|id| !fresh.contains(id)) {
            let set = set.to_owned();
            effects.push((
                self.config.times.instance_delete.draw(&mut self.chance),
                Effect::InstanceRemoved { set, id: *id },
            ));
        }
        effects
    }

    pub fn lower_capacity(&mut self, set: &str, by: u64) {
        if let Some(doc) = self.docs.get_mut(set) {
            let capacity = doc.body["sku"]["capacity"].as_u64().unwrap_or_default();
            doc.body["sku"]["capacity"] = json!(capacity.saturating_sub(by));
            doc.version += 1;
        }
    }

    fn renew(&mut self, set: &str, ids: &[u64], action: &str) -> Vec<(Duration, Effect)> {
        let mut effects = Vec::new();
        for id in ids {
            let takes = self.config.times.instance_update.draw(&mut self.chance);
            let Some(instance) = self.fleets.get_mut(set).and_then(|fleet| fleet.instances.get_mut(id)) else {
                continue;
            };
            if instance.state == State::Deleting {
                continue;
            }
            instance.state = State::Updating;
            instance.power = if instance.power == Power::Running {
                Power::Starting
            } else {
                instance.power
            };
            instance.version += 1;
            let (set, id) = (set.to_owned(), *id);
            let path = format!("{set}/virtualmachines/{id}");
            self.touch(&path);
            effects.push((
                takes,
                if action == "manualupgrade" {
                    Effect::InstanceUpgraded { set, id }
                } else {
                    Effect::InstanceReimaged { set, id }
                },
            ));
        }
        effects
    }

    fn power_instances(&mut self, set: &str, ids: &[u64], now: &str, then: &str) -> Vec<(Duration, Effect)> {
        let mut effects = Vec::new();
        for id in ids {
            let takes = self.config.times.vm_power.draw(&mut self.chance);
            let Some(instance) = self.fleets.get_mut(set).and_then(|fleet| fleet.instances.get_mut(id)) else {
                continue;
            };
            instance.power = Power::named(now);
            instance.state = State::Updating;
            instance.version += 1;
            effects.push((
                takes,
                Effect::InstancePower {
                    set: set.to_owned(),
                    id: *id,
                    power: then.to_owned(),
                },
            ));
            self.touch(&format!("{set}/virtualmachines/{id}"));
        }
        effects
    }

    pub fn instance_created(&mut self, set: &str, id: u64, fail: Option<Fail>) {
        self.settle(set, id, |instance, _| {
            instance.state = if fail.is_some() {
                State::Failed
            } else {
                State::Succeeded
            };
            instance.power = if fail.is_some() { Power::Stopped } else { Power::Running };
            instance.error = fail;
        });
    }

    /// The model is applied; custom data reaches an instance only when it is reimaged.
    pub fn instance_upgraded(&mut self, set: &str, id: u64) {
        self.settle(set, id, |instance, current| {
            instance.model = current;
            instance.power = if instance.power == Power::Starting {
                Power::Running
            } else {
                instance.power
            };
            instance.state = State::Succeeded;
            instance.error = None;
        });
    }

    /// A reimaged instance gets image and custom data of the model it runs, not of the newest model.
    pub fn instance_reimaged(&mut self, set: &str, id: u64) {
        let fleet = self.fleets.get(set);
        let custom_data = fleet.and_then(|fleet| {
            let model = fleet.model(fleet.instances.get(&id)?);
            text(model, CUSTOM_DATA).map(str::to_owned)
        });
        self.settle(set, id, |instance, _| {
            instance.custom_data = custom_data;
            instance.state = State::Succeeded;
            instance.power = Power::Running;
            instance.error = None;
        });
    }

    pub fn instance_power(&mut self, set: &str, id: u64, power: &str) {
        self.settle(set, id, |instance, _| {
            instance.state = State::Succeeded;
            instance.power = Power::named(power);
        });
    }

    fn settle(&mut self, set: &str, id: u64, change: impl FnOnce(&mut super::fleet::Instance, u64)) {
        let Some(fleet) = self.fleets.get_mut(set) else { return };
        let current = fleet.current;
        if let Some(instance) = fleet
            .instances
            .get_mut(&id)
            .filter(|instance| instance.state != State::Deleting)
        {
            change(instance, current);
            instance.version += 1;
        }
        fleet.prune();
        self.touch(&format!("{set}/virtualmachines/{id}"));
    }

    pub fn instance_listed(&mut self, set: &str, id: u64) {
        let fleet = self.fleets.get_mut(set);
        if let Some(instance) = fleet.and_then(|fleet| fleet.instances.get_mut(&id)) {
            instance.unlisted = false;
        }
    }

    pub fn instance_removed(&mut self, set: &str, id: u64) {
        let Some(fleet) = self.fleets.get_mut(set) else { return };
        fleet.instances.remove(&id);
        fleet.prune();
        self.touch(&format!("{set}/virtualmachines/{id}"));
    }
}

fn id_text(id: &Value) -> String {
    id.as_str().map_or_else(|| id.to_string(), str::to_owned)
}

fn inactive(id: &str) -> Fail {
    Fail::parameter(
        "instanceIds",
        format!("The provided instanceId {id} is not an active Virtual Machine Scale Set VM instanceId."),
    )
}
