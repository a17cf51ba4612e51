//! Spot VMs and instances that Azure takes back.

use super::fleet::{Power, State};
use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, same, text};
use crate::azure::world::{Effect, World};

fn not_spot() -> Fail {
    Fail::conflict(
        "OperationNotAllowed",
        "Simulate eviction is only allowed on virtual machines with priority Spot.",
    )
}

impl World {
    pub fn evict_vm(&mut self, call: &Call) -> Reply {
        let place = Place::of(call);
        let doc = self.docs.get(&place.key()).ok_or_else(|| place.not_found())?;
        if text(&doc.body, "/properties/priority") != Some("Spot") {
            return Err(not_spot());
        }
        let takes = self.config.times.eviction.draw(&mut self.chance);
        self.later(takes, Effect::Evict(place.key()));
        Ok(Answer::no_content())
    }

    pub fn evict_instance(&mut self, set: &str, id: u64) -> Reply {
        let fleet = self.fleets.get(set);
        let model = fleet.and_then(|fleet| Some(fleet.model(fleet.instances.get(&id)?)));
        if model.and_then(|model| text(model, "/properties/virtualMachineProfile/priority")) != Some("Spot") {
            return Err(not_spot());
        }
        let takes = self.config.times.eviction.draw(&mut self.chance);
        self.later(takes, Effect::Evict(format!("{set}/virtualmachines/{id}")));
        Ok(Answer::no_content())
    }

    /// Evicts a VM or instance by its policy: deletes or deallocates it.
    pub fn evicted(&mut self, key: &str) {
        if let Some((set, id)) = split(key) {
            let Some(fleet) = self.fleets.get_mut(set) else { return };
            let Some(instance) = fleet.instances.get(&id) else {
                return;
            };
            let policy = text(
                fleet.model(instance),
                "/properties/virtualMachineProfile/evictionPolicy",
            )
            .unwrap_or("Deallocate");
            if same(policy, "Delete") {
                self.lower_capacity(set, 1);
                self.instance_removed(set, id);
            } else if let Some(instance) = fleet.instances.get_mut(&id) {
                instance.power = Power::Deallocated;
                instance.state = State::Succeeded;
                instance.version += 1;
                self.touch(key);
            }
            return;
        }
        let Some(doc) = self.docs.get(key) else { return };
        if same(
            text(&doc.body, "/properties/evictionPolicy").unwrap_or("Deallocate"),
            "Delete",
        ) {
            self.vm_removed(key, false);
        } else {
            self.vm_power(key, "deallocated");
        }
    }

    /// Deletes a resource without a call of a client: a VM, an instance, or any other resource.
    pub fn vanish(&mut self, id: &str) -> bool {
        let key = id.to_lowercase();
        if let Some((set, number)) = split(&key) {
            let known = self
                .fleets
                .get(set)
                .is_some_and(|fleet| fleet.instances.contains_key(&number));
            if known {
                self.lower_capacity(set, 1);
                self.instance_removed(set, number);
            }
            return known;
        }
        let known = self.docs.contains_key(&key);
        if self.fleets.contains_key(&key) {
            self.set_removed(&key);
        } else {
            self.remove_resource(&key);
        }
        known
    }
}

/// A Uniform instance's key, split into its set's key and its number.
pub fn split(key: &str) -> Option<(&str, u64)> {
    let (set, id) = key.split_once("/virtualmachines/")?;
    set.contains("/virtualmachinescalesets/").then_some(())?;
    Some((set, id.parse().ok()?))
}
