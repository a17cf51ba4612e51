//! Managed disks.

use http::Method;
use serde_json::{Value, json};

use super::rules;
use super::storage::Home;
use crate::azure::operations::Lane;
use crate::azure::resources::Place;
use crate::azure::wire::{Answer, Call, Fail, Reply, merge, text};
use crate::azure::world::{Doc, Effect, World};

/// The source of a disk.
#[derive(Clone, Debug, Default)]
pub struct Recipe {
    pub location: String,
    pub zone: Option<String>,
    pub kind: String,
    pub gib: u64,
    pub option: String,
    pub iops: Option<u64>,
    pub mbps: Option<u64>,
    pub encryption_set: Option<String>,
    pub os: Option<String>,
}

impl Recipe {
    /// From an entry of a storage profile.
    pub fn of(disk: &Value, home: &Home) -> Result<Self, Fail> {
        let recipe = Self {
            location: home.location.into(),
            zone: home.zone.map(str::to_owned),
            kind: text(disk, "/managedDisk/storageAccountType")
                .unwrap_or("Standard_LRS")
                .into(),
            gib: disk["diskSizeGB"].as_u64().unwrap_or(30),
            option: text(disk, "/createOption").unwrap_or("Empty").into(),
            iops: disk["diskIOPSReadWrite"].as_u64(),
            mbps: disk["diskMBpsReadWrite"].as_u64(),
            encryption_set: text(disk, "/managedDisk/diskEncryptionSet/id").map(str::to_owned),
            os: text(disk, "/osType").map(str::to_owned),
        };
        if recipe.option == "Empty" && disk["diskSizeGB"].is_null() {
            return Err(Fail::bad(
                "InvalidParameter",
                "Required parameter 'dataDisk.diskSizeGB' is missing (null).",
            )
            .target("dataDisk.diskSizeGB"));
        }
        Ok(recipe)
    }

    fn performance(&self) -> (u64, u64) {
        match self.kind.as_str() {
            rules::ULTRA => {
                let iops = self.iops.unwrap_or(rules::default_iops(self.gib));
                (iops, self.mbps.unwrap_or((iops * 1038 / 19328).clamp(1, 10_000)))
            }
            rules::PREMIUM_V2 => (self.iops.unwrap_or(3000), self.mbps.unwrap_or(125)),
            "Premium_LRS" | "Premium_ZRS" => ((self.gib * 4).clamp(120, 20_000), (self.gib / 5).clamp(25, 900)),
            _ => (500, 60),
        }
    }
}

impl World {
    pub fn make_disk(&mut self, place: &Place, recipe: &Recipe) -> Doc {
        let (iops, mbps) = recipe.performance();
        let mut body = place.head();
        merge(
            &mut body,
            &json!({
                "location": recipe.location,
                "sku": { "name": recipe.kind, "tier": recipe.kind.split('_').next() },
                "properties": {
                    "creationData": { "createOption": recipe.option },
                    "diskSizeGB": recipe.gib, "diskSizeBytes": recipe.gib << 30,
                    "diskIOPSReadWrite": iops, "diskMBpsReadWrite": mbps,
                    "encryption": { "type": "EncryptionAtRestWithPlatformKey" },
                    "networkAccessPolicy": "AllowAll", "publicNetworkAccess": "Enabled",
                    "timeCreated": self.clock.stamp(), "uniqueId": self.chance.uuid(),
                    "provisioningState": "Succeeded", "diskState": "Unattached",
                },
            }),
        );
        if let Some(zone) = &recipe.zone {
            body["zones"] = json!([zone]);
        }
        if let Some(os) = &recipe.os {
            body["properties"]["osType"] = json!(os);
        }
        if recipe.kind == rules::ULTRA || recipe.kind == rules::PREMIUM_V2 {
            body["properties"]["creationData"]["logicalSectorSize"] = json!(4096);
        }
        if let Some(set) = &recipe.encryption_set {
            body["properties"]["encryption"] =
                json!({ "type": "EncryptionAtRestWithCustomerKey", "diskEncryptionSetId": set });
        }
        Doc::new(body)
    }

    /// `…/Microsoft.Compute/disks…`.
    pub fn disks(&mut self, call: &Call) -> Reply {
        match (&call.method, call.segments.len()) {
            (&Method::GET, 7) => self.list(call),
            (&Method::GET, 8) => self
                .render(&call.key, call)
                .map(Answer::ok)
                .ok_or_else(|| Place::of(call).not_found()),
            (&Method::PUT, 8) => self.put_disk(call),
            (&Method::PATCH, 8) if self.docs.contains_key(&call.key) => self.put_disk(call),
            (&Method::PATCH, 8) => Err(Place::of(call).not_found()),
            (&Method::DELETE, 8) => self.delete_disk(call),
            _ => Err(Fail::new(
                405,
                "MethodNotAllowed",
                format!("{} is not possible on {}.", call.method, call.path),
            )),
        }
    }

    fn put_disk(&mut self, call: &Call) -> Reply {
        let current = self.docs.get(&call.key);
        self.precondition(call, current.map(|doc| doc.version))?;
        let mut body = current.map_or_else(|| call.body.clone(), |doc| doc.body.clone());
        if current.is_some() {
            merge(&mut body, &call.body);
        }
        let given = &call.body["properties"];
        let (kind, gib) = judge(&body, given, current)?;
        let fresh = current.is_none();
        if fresh {
            let recipe = recipe(&body, given, kind, gib);
            let mut made = self.make_disk(&Place::of(call), &recipe).body;
            merge(&mut made, &body);
            body = made;
        }
        let mut doc = self.docs.remove(&call.key).unwrap_or_default();
        doc.body = body;
        doc.set_state(if fresh { "Creating" } else { "Updating" });
        let location = doc.location().to_owned();
        self.docs.insert(call.key.clone(), doc);
        let takes = self.config.times.disk.draw(&mut self.chance);
        let fail = self.faults.fail_resource(call.method.as_str(), &call.path);
        let end = if fail.is_some() { "Failed" } else { "Succeeded" };
        let effect = Effect::State(call.key.clone(), end.into());
        let operation = self.begin(call, Lane::Disk, vec![(takes, effect)], fail.as_ref());
        let mut answer = Answer::ok(self.docs.get(&call.key).map(|doc| doc.body.clone()).unwrap_or_default());
        if self
            .operations
            .get(&operation)
            .is_some_and(|operation| operation.end.is_none())
        {
            answer.status = http::StatusCode::ACCEPTED;
            answer.body = outline(&answer.body, fresh.then_some(&call.body));
        }
        Ok(self.follow(call, answer, &operation, &location))
    }

    fn delete_disk(&mut self, call: &Call) -> Reply {
        let Some(doc) = self.docs.get(&call.key) else {
            return Ok(Answer::no_content());
        };
        if let Some(owner) = text(&doc.body, "/managedBy") {
            return Err(Fail::conflict(
                "OperationNotAllowed",
                format!("Disk {} is attached to VM {owner}.", doc.name()),
            ));
        }
        let location = doc.location().to_owned();
        let takes = self.config.times.disk.draw(&mut self.chance);
        let operation = self.begin(call, Lane::Disk, vec![(takes, Effect::Remove(call.key.clone()))], None);
        let answer = if self.docs.contains_key(&call.key) {
            Answer::accepted()
        } else {
            Answer::empty()
        };
        Ok(self.follow(call, answer, &operation, &location))
    }
}

/// A disk while Azure works on it: without id and type, and with nothing that was not asked for.
fn outline(disk: &Value, asked: Option<&Value>) -> Value {
    let mut body = json!({ "name": disk["name"], "location": disk["location"], "properties": {
        "creationData": disk["properties"]["creationData"], "diskSizeGB": disk["properties"]["diskSizeGB"],
        "provisioningState": "Updating", "isArmResource": true } });
    for name in ["sku", "zones", "tags"] {
        if asked.is_none_or(|asked| asked.get(name).is_some()) && disk.get(name).is_some() {
            body[name] = disk[name].clone();
        }
    }
    body
}

/// What kind of disk it is to be, and how large, if Azure takes it: `given` is what this call says, `body` what comes of it.
fn judge(body: &Value, given: &Value, current: Option<&Doc>) -> Result<(String, u64), Fail> {
    let kind = text(body, "/sku/name").unwrap_or("Standard_LRS").to_owned();
    let empty = text(body, "/properties/creationData/createOption") == Some("Empty");
    let size = body["properties"]["diskSizeGB"].as_u64();
    let Some(gib) = size.or((!empty).then_some(30)) else {
        return Err(Fail::bad(
            "InvalidParameter",
            "Required parameter 'disk.diskSizeGB' is missing (null).",
        )
        .target("disk.diskSizeGB"));
    };
    rules::check_size(&kind, gib, "disk.diskSizeGB")?;
    let (iops, mbps) = (&given["diskIOPSReadWrite"], &given["diskMBpsReadWrite"]);
    rules::performance(&kind, gib, iops.as_u64(), mbps.as_u64(), "disk.")?;
    let before = current.and_then(|doc| doc.body["properties"]["diskSizeGB"].as_u64());
    if before.is_some_and(|before| gib < before) {
        return Err(Fail::bad(
            "ResizeDiskError",
            format!("New disk size {gib} GB is smaller than the disk's size. Shrinking a disk is not allowed."),
        ));
    }
    if kind == rules::ULTRA && !empty {
        return Err(Fail::parameter(
            "disk.creationData",
            "UltraSSD_LRS disks can be created only with the create option Empty.",
        ));
    }
    Ok((kind, gib))
}

fn recipe(body: &Value, given: &Value, kind: String, gib: u64) -> Recipe {
    let word = |pointer: &str| text(body, pointer).map(str::to_owned);
    Recipe {
        location: word("/location").unwrap_or_else(|| "eastus".into()),
        zone: word("/zones/0"),
        kind,
        gib,
        option: word("/properties/creationData/createOption").unwrap_or_else(|| "Empty".into()),
        iops: given["diskIOPSReadWrite"].as_u64(),
        mbps: given["diskMBpsReadWrite"].as_u64(),
        encryption_set: word("/properties/encryption/diskEncryptionSetId"),
        os: word("/properties/osType"),
    }
}
