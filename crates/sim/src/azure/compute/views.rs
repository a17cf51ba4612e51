//! Documents as clients see them: ETags, and instance views when they ask for them.

use serde_json::{Value, json};

use crate::azure::wire::{Call, text};
use crate::azure::world::{Doc, World, etag};

/// Kinds that carry an ETag in the body.
const TAGGED: [&str; 4] = [
    "Microsoft.Compute/virtualMachines",
    "Microsoft.Compute/virtualMachineScaleSets",
    "Microsoft.Network/",
    "virtualMachines",
];

impl World {
    /// A resource as a GET or a list shows it.
    pub fn render(&self, key: &str, call: &Call) -> Option<Value> {
        let doc = self.docs.get(key)?;
        let mut body = doc.body.clone();
        let kind = doc.kind();
        if TAGGED.iter().any(|tagged| kind.starts_with(tagged)) {
            body["etag"] = json!(etag(kind.starts_with("Microsoft.Network/"), doc.version));
        }
        match kind {
            "Microsoft.Compute/virtualMachines" if call.expands("instanceview") => {
                body["properties"]["instanceView"] = self.vm_instance_view(doc);
            }
            "Microsoft.Network/networkInterfaces" => {
                let tag = body["etag"].clone();
                let configs = body.pointer_mut("/properties/ipConfigurations");
                for config in configs.and_then(Value::as_array_mut).into_iter().flatten() {
                    config["etag"] = tag.clone();
                }
            }
            "Microsoft.Compute/availabilitySets" => {
                let members = self.members(doc.id());
                body["properties"]["virtualMachines"] = json!(members);
            }
            _ => {}
        }
        Some(body)
    }

    /// VMs in an availability set.
    pub fn members(&self, availability_set: &str) -> Vec<Value> {
        let in_set = |doc: &&Doc| {
            doc.kind() == "Microsoft.Compute/virtualMachines"
                && text(&doc.body, "/properties/availabilitySet/id")
                    .is_some_and(|id| id.eq_ignore_ascii_case(availability_set))
        };
        self.docs
            .values()
            .filter(in_set)
            .map(|doc| json!({ "id": doc.id() }))
            .collect()
    }

    pub fn vm_instance_view(&self, doc: &Doc) -> Value {
        let time = text(&doc.body, "/properties/timeCreated").unwrap_or_default();
        let computer = text(&doc.body, "/properties/osProfile/computerName").unwrap_or(doc.name());
        instance_view(
            doc.state(),
            doc.hidden("power"),
            doc.hidden.get("error"),
            time,
            computer,
        )
    }
}

/// The statuses of a VM or an instance.
pub fn instance_view(state: &str, power: &str, error: Option<&Value>, time: &str, computer: &str) -> Value {
    let provisioning = match (state, error) {
        ("Failed", Some(error)) => json!({
            "code": format!("ProvisioningState/failed/{}", text(error, "/code").unwrap_or("Unknown")), "level": "Error",
            "displayStatus": "Provisioning failed", "message": text(error, "/message").unwrap_or_default(), "time": time }),
        (state, _) => json!({ "code": format!("ProvisioningState/{}", state.to_lowercase()),
            "level": if state == "Failed" { "Error" } else { "Info" },
            "displayStatus": format!("Provisioning {}", state.to_lowercase()), "time": time }),
    };
    let mut statuses = vec![provisioning];
    if !power.is_empty() && state != "Creating" {
        statuses.push(
            json!({ "code": format!("PowerState/{power}"), "level": "Info", "displayStatus": format!("VM {power}") }),
        );
    }
    let mut view = json!({ "computerName": computer, "osName": "ubuntu", "osVersion": "24.04", "hyperVGeneration": "V2", "statuses": statuses });
    if power == "running" {
        view["vmAgent"] = json!({ "vmAgentVersion": "2.11.1.4", "statuses": [{ "code": "ProvisioningState/succeeded", "level": "Info",
            "displayStatus": "Ready", "message": "Guest Agent is running", "time": time }] });
    }
    view
}
