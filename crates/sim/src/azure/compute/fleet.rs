//! Instances of a Uniform scale set: small structs that share the models of their creation, rendered on demand.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::defaults::exact_version;
use super::storage::default;
use super::views::instance_view;
use crate::azure::wire::{Fail, text};
use crate::azure::world::{Range, etag};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Creating,
    Succeeded,
    Updating,
    Deleting,
    Failed,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Creating => "Creating",
            State::Succeeded => "Succeeded",
            State::Updating => "Updating",
            State::Deleting => "Deleting",
            State::Failed => "Failed",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Power {
    Starting,
    Running,
    Stopping,
    Stopped,
    Deallocating,
    Deallocated,
}

impl Power {
    pub fn name(self) -> &'static str {
        match self {
            Power::Starting => "starting",
            Power::Running => "running",
            Power::Stopping => "stopping",
            Power::Stopped => "stopped",
            Power::Deallocating => "deallocating",
            Power::Deallocated => "deallocated",
        }
    }

    pub fn named(name: &str) -> Self {
        match name {
            "starting" => Power::Starting,
            "stopping" => Power::Stopping,
            "stopped" => Power::Stopped,
            "deallocating" => Power::Deallocating,
            "deallocated" => Power::Deallocated,
            _ => Power::Running,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Instance {
    pub id: u64,
    pub vm_id: String,
    pub zone: Option<String>,
    /// The model that it runs, among those of the fleet.
    pub model: u64,
    pub state: State,
    pub power: Power,
    pub address: u32,
    pub created: String,
    /// The custom data that it was last provisioned with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custom_data: Option<String>,
    /// Whether lists do not show it yet.
    #[serde(default)]
    pub unlisted: bool,
    pub version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fail>,
    /// Set for the instance alone, by PUT: tags, protection policy, data disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<Box<Value>>,
}

/// A scale set's models and instances.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Fleet {
    pub id: String,
    pub name: String,
    pub location: String,
    pub flexible: bool,
    /// Custom data included, which the set's document never shows.
    pub models: BTreeMap<u64, Value>,
    pub current: u64,
    pub instances: BTreeMap<u64, Instance>,
    pub last_id: u64,
    /// The addresses of its instances' subnet.
    #[serde(default)]
    pub range: Range,
}

impl Fleet {
    pub fn model(&self, instance: &Instance) -> &Value {
        self.models.get(&instance.model).unwrap_or(&Value::Null)
    }

    pub fn size(&self, instance: &Instance) -> &str {
        text(self.model(instance), "/sku/name").unwrap_or_default()
    }

    pub fn newest(&self) -> &Value {
        self.models.get(&self.current).unwrap_or(&Value::Null)
    }

    /// Takes a model. Returns whether it differs from the previous one.
    pub fn adopt(&mut self, model: Value) -> bool {
        if self.models.get(&self.current) == Some(&model) {
            return false;
        }
        self.current += 1;
        self.models.insert(self.current, model);
        self.prune();
        self.current > 1
    }

    /// Forgets models that no instance runs.
    pub fn prune(&mut self) {
        let used: std::collections::BTreeSet<u64> = self.instances.values().map(|instance| instance.model).collect();
        let current = self.current;
        self.models
            .retain(|version, _| *version == current || used.contains(version));
    }

    pub fn instance_id(&self, instance: &Instance) -> String {
        format!("{}/virtualMachines/{}", self.id, instance.id)
    }

    pub fn key(&self, id: u64) -> String {
        format!("{}/virtualmachines/{id}", self.id.to_lowercase())
    }

    pub fn computer_name(&self, instance: &Instance) -> String {
        let prefix = text(
            self.model(instance),
            "/properties/virtualMachineProfile/osProfile/computerNamePrefix",
        )
        .unwrap_or(&self.name);
        format!("{prefix}{}", base36(instance.id))
    }

    pub fn address(&self, instance: &Instance) -> String {
        self.range.address(instance.address)
    }

    pub fn busy(&self) -> bool {
        self.instances
            .values()
            .any(|instance| matches!(instance.state, State::Creating | State::Updating | State::Deleting))
    }

    /// An instance as Azure shows it.
    pub fn render(&self, instance: &Instance, view: bool) -> Value {
        let model = self.model(instance);
        let profile = &model["properties"]["virtualMachineProfile"];
        let mut body = json!({
            "name": format!("{}_{}", self.name, instance.id), "id": self.instance_id(instance),
            "type": "Microsoft.Compute/virtualMachineScaleSets/virtualMachines", "location": self.location,
            "instanceId": instance.id.to_string(), "etag": etag(false, instance.version),
            "sku": { "name": text(model, "/sku/name"), "tier": text(model, "/sku/tier").unwrap_or("Standard") },
            "properties": {
                "latestModelApplied": instance.model == self.current, "modelDefinitionApplied": "VirtualMachineScaleSet",
                "vmId": instance.vm_id, "provisioningState": instance.state.name(), "timeCreated": instance.created,
                "hardwareProfile": { "vmSize": text(model, "/sku/name") }, "osProfile": self.os_profile(instance, profile),
                "storageProfile": self.storage_profile(instance, profile),
                "networkProfile": { "networkInterfaces": self.nic_references(instance, profile) },
                "networkProfileConfiguration": profile["networkProfile"],
            },
        });
        if let Some(zone) = &instance.zone {
            body["zones"] = json!([zone]);
        }
        for name in ["securityProfile", "diagnosticsProfile", "licenseType"] {
            if !profile[name].is_null() {
                body["properties"][name] = profile[name].clone();
            }
        }
        if !model["properties"]["additionalCapabilities"].is_null() {
            body["properties"]["additionalCapabilities"] = model["properties"]["additionalCapabilities"].clone();
        }
        if !model["tags"].is_null() {
            body["tags"] = model["tags"].clone();
        }
        if let Some(own) = &instance.own {
            crate::azure::wire::merge(&mut body, own);
        }
        if view {
            body["properties"]["instanceView"] = self.view(instance);
        }
        body
    }

    pub fn view(&self, instance: &Instance) -> Value {
        let error = instance
            .error
            .as_ref()
            .and_then(|error| serde_json::to_value(error).ok());
        let computer = self.computer_name(instance);
        instance_view(
            instance.state.name(),
            instance.power.name(),
            error.as_ref(),
            &instance.created,
            &computer,
        )
    }

    fn os_profile(&self, instance: &Instance, profile: &Value) -> Value {
        let mut os = profile["osProfile"].clone();
        if let Some(os) = os.as_object_mut() {
            for secret in ["customData", "adminPassword", "computerNamePrefix"] {
                os.shift_remove(secret);
            }
        }
        os["computerName"] = json!(self.computer_name(instance));
        os
    }

    fn storage_profile(&self, instance: &Instance, profile: &Value) -> Value {
        let mut storage = profile["storageProfile"].clone();
        let group = self.id.split("/providers/").next().unwrap_or_default();
        let seed = instance.vm_id.replace('-', "");
        let named = |disk: &mut Value, what: &str| {
            let name = format!("{0}_{0}_{1}_{what}_{seed}", self.name, instance.id);
            disk["managedDisk"]["id"] = json!(format!("{group}/providers/Microsoft.Compute/disks/{name}"));
            default(&mut disk["managedDisk"], "storageAccountType", json!("Standard_LRS"));
            disk["name"] = json!(name);
        };
        if storage["osDisk"].is_object() {
            named(&mut storage["osDisk"], "OsDisk_1");
            default(&mut storage["osDisk"], "osType", json!("Linux"));
        }
        if storage["imageReference"].is_object() {
            exact_version(&mut storage["imageReference"]);
        }
        default(&mut storage, "dataDisks", json!([]));
        for (i, disk) in storage["dataDisks"].as_array_mut().into_iter().flatten().enumerate() {
            named(disk, &format!("disk{}", i + 2));
        }
        storage
    }

    fn nic_references(&self, instance: &Instance, profile: &Value) -> Vec<Value> {
        let configs = profile
            .pointer("/networkProfile/networkInterfaceConfigurations")
            .and_then(Value::as_array);
        let id = self.instance_id(instance);
        let name = |config: &Value| text(config, "/name").unwrap_or("nic").to_owned();
        configs
            .into_iter()
            .flatten()
            .map(|config| json!({ "id": format!("{id}/networkInterfaces/{}", name(config)) }))
            .collect()
    }

    /// The instance's network interfaces, which exist only as part of it.
    pub fn nics(&self, instance: &Instance) -> Vec<Value> {
        let profile = &self.model(instance)["properties"]["virtualMachineProfile"];
        let configs = profile
            .pointer("/networkProfile/networkInterfaceConfigurations")
            .and_then(Value::as_array);
        let id = self.instance_id(instance);
        let mut nics = Vec::new();
        for config in configs.into_iter().flatten() {
            let name = text(config, "/name").unwrap_or("nic");
            let mut nic = config.clone();
            let tag = etag(true, instance.version);
            nic["id"] = json!(format!("{id}/networkInterfaces/{name}"));
            nic["etag"] = json!(tag);
            let mac = format!(
                "00-0D-3A-{:02X}-{:02X}-{:02X}",
                instance.address >> 16 & 255,
                instance.address >> 8 & 255,
                instance.address & 255
            );
            for (field, value) in [
                ("provisioningState", json!("Succeeded")),
                ("resourceGuid", json!(instance.vm_id)),
                ("macAddress", json!(mac)),
                ("virtualMachine", json!({ "id": id })),
                ("hostedWorkloads", json!([])),
                ("tapConfigurations", json!([])),
            ] {
                nic["properties"][field] = value;
            }
            default(&mut nic["properties"], "enableAcceleratedNetworking", json!(false));
            let dns = &mut nic["properties"]["dnsSettings"];
            default(dns, "appliedDnsServers", json!([]));
            default(dns, "internalDomainNameSuffix", json!("internal.cloudapp.net"));
            let mut primary = true;
            for ip in nic
                .pointer_mut("/properties/ipConfigurations")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                let ip_name = text(ip, "/name").unwrap_or("ipconfig").to_owned();
                ip["id"] = json!(format!("{id}/networkInterfaces/{name}/ipConfigurations/{ip_name}"));
                ip["etag"] = json!(tag);
                default(&mut ip["properties"], "primary", json!(primary));
                primary = false;
                ip["properties"]["privateIPAddress"] = json!(self.address(instance));
                ip["properties"]["privateIPAllocationMethod"] = json!("Dynamic");
                ip["properties"]["provisioningState"] = json!("Succeeded");
            }
            nics.push(nic);
        }
        nics
    }
}

/// The end of a computer's name: the instance's number in six digits of base 36.
fn base36(mut number: u64) -> String {
    let mut digits = [b'0'; 6];
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[(number % 36) as usize];
        number /= 36;
    }
    digits.iter().map(|digit| char::from(*digit)).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn computer_names_end_with_the_number_in_base_36() {
        let names: Vec<String> = [0, 9, 10, 35, 36, 1296].map(super::base36).to_vec();
        assert_eq!(names, ["000000", "000009", "00000A", "00000Z", "000010", "000100"]);
    }
}
