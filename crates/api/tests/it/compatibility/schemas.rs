//! Fields, types, limits and defaults.

use serde_json::{Map, Value, json};

/// How many fields were compared, and what differs.
#[derive(Default)]
pub struct Comparison {
    pub fields: usize,
    pub faults: Vec<String>,
}

pub fn compare(kind: &str, theirs: &Value, ours: &Value) -> Comparison {
    let mut comparison = Comparison::default();
    comparison.compare(kind, theirs, ours);
    comparison
}

impl Comparison {
    fn compare(&mut self, path: &str, theirs: &Value, ours: &Value) {
        self.types(path, theirs, ours);
        self.words(path, theirs, ours);
        self.merging(path, theirs, ours);
        self.limits(path, theirs, ours);
        self.requirements(path, theirs, ours);
        let none = Map::new();
        let known = ours["properties"].as_object().unwrap_or(&none);
        for (name, theirs) in theirs["properties"].as_object().unwrap_or(&none) {
            let path = format!("{path}.{name}");
            self.fields += 1;
            match known.get(name) {
                Some(ours) => self.compare(&path, theirs, ours),
                None if is_open(ours) => {}
                None => self.faults.push(format!("{path} is missing")),
            }
        }
        for (key, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
            if let (Some(theirs), Some(ours)) = (theirs.get(key), ours.get(key)) {
                self.compare(&format!("{path}{suffix}"), theirs, ours);
            }
        }
    }

    fn types(&mut self, path: &str, theirs: &Value, ours: &Value) {
        let facts = [
            "type",
            "x-kubernetes-int-or-string",
            "x-kubernetes-preserve-unknown-fields",
            "nullable",
        ];
        for fact in facts {
            if theirs.get(fact).is_some() && theirs.get(fact) != ours.get(fact) {
                let shown = |schema: &Value| schema.get(fact).unwrap_or(&Value::Null).to_string();
                self.faults.push(format!(
                    "{path} has {fact} {} instead of {}",
                    shown(ours),
                    shown(theirs)
                ));
            }
        }
        for key in ["items", "additionalProperties"] {
            if theirs.get(key).is_some_and(Value::is_object) != ours.get(key).is_some_and(Value::is_object) {
                self.faults.push(format!("{path} differs in having {key}"));
            }
        }
        // Without a format any whole number passes; the API server reads none beyond 64 bits.
        let (their, our) = (theirs.get("format"), ours.get("format"));
        let free = their.is_none() && our.is_some_and(|format| format == "int64");
        if our.is_some() && our != their && !free {
            self.faults
                .push(format!("{path} has format {our:?} instead of {their:?}"));
        }
    }

    fn words(&mut self, path: &str, theirs: &Value, ours: &Value) {
        if let Some(words) = ours["enum"].as_array() {
            let all = theirs["enum"]
                .as_array()
                .is_some_and(|theirs| theirs.iter().all(|word| words.contains(word)));
            if !all {
                self.faults.push(format!("{path} takes only {words:?}"));
            }
        }
    }

    /// Who may own which part under server-side apply.
    fn merging(&mut self, path: &str, theirs: &Value, ours: &Value) {
        let facts = [
            ("x-kubernetes-map-type", json!("granular")),
            ("x-kubernetes-list-type", json!("atomic")),
            ("x-kubernetes-list-map-keys", json!([])),
        ];
        for (fact, default) in facts {
            let of = |schema: &Value| schema.get(fact).unwrap_or(&default).clone();
            let (their, our) = (of(theirs), of(ours));
            if their != our && !path.ends_with(NAMES_MAY_REPEAT) {
                self.faults.push(format!("{path} has {fact} {our} instead of {their}"));
            }
        }
    }

    /// A default changes what is stored, a limit what is taken: each of ours is theirs, or is owned up to.
    fn limits(&mut self, path: &str, theirs: &Value, ours: &Value) {
        const LIMITS: [&str; 18] = [
            "default",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "uniqueItems",
            "minProperties",
            "maxProperties",
            "pattern",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
        ];
        for limit in LIMITS {
            let (their, our) = (theirs.get(limit), ours.get(limit));
            // The same number may be written with or without a fraction.
            let same = our == their || (our.is_some() && our.and_then(Value::as_f64) == their.and_then(Value::as_f64));
            let same = same && our.is_some() == their.is_some();
            let stricter = our.is_some() && !same;
            let lost = limit == "default" && their.is_some() && !same;
            if (stricter || lost)
                && !STRICTER
                    .iter()
                    .any(|(suffix, known)| path.ends_with(suffix) && *known == limit)
            {
                self.faults
                    .push(format!("{path} has {limit} {our:?} instead of {their:?}"));
            }
        }
    }

    fn requirements(&mut self, path: &str, theirs: &Value, ours: &Value) {
        let list = |schema: &Value| schema["required"].as_array().cloned().unwrap_or_default();
        let theirs = list(theirs);
        for name in list(ours) {
            // A field of our own may be required within something that they do not have.
            let field = format!("{path}.{}", name.as_str().unwrap_or_default());
            if !theirs.contains(&name) && !field.ends_with(TEMPLATE_SPEC) {
                self.faults.push(format!("{field} is required"));
            }
        }
    }
}

/// The spec of a template: without it the template makes nothing, and the rule that keeps the spec unchanged would not hold.
const TEMPLATE_SPEC: &str = "Template.spec.template.spec";

/// Anything goes below.
fn is_open(schema: &Value) -> bool {
    schema["x-kubernetes-preserve-unknown-fields"] == true
}

/// The data disks of vSphere: theirs are merged by name, which ours need not have.
const NAMES_MAY_REPEAT: &str = ".dataDisks";

/// Limits of ours that their definitions do not have: what their webhooks, Azure or vSphere refuse.
/// Unchecked by them, a value beyond would only fail later; a length or count is there so that rules have a bounded
/// cost, and is far beyond what is possible.
const STRICTER: [(&str, &str); 38] = [
    // Azure's rules for names: each of these becomes part of an address in Azure Resource Manager.
    (".location", "pattern"),
    (".vmSize", "pattern"),
    (".subscriptionID", "pattern"),
    (".tenantID", "pattern"),
    (".resourceGroup", "pattern"),
    (".privateDNSZoneResourceGroup", "pattern"),
    (".vnet.name", "pattern"),
    (".remoteVnetName", "pattern"),
    (".subnets[].name", "pattern"),
    (".azureBastion.subnet.name", "pattern"),
    (".subnetName", "pattern"),
    ("LB.name", "pattern"),
    (".backendPool.name", "pattern"),
    // Azure: at most 64 LUNs, sizes of managed disks, names of resources.
    (".template.dataDisks", "maxItems"),
    (".template.dataDisks[].diskSizeGB", "minimum"),
    (".template.dataDisks[].diskSizeGB", "maximum"),
    (".template.dataDisks[].lun", "minimum"),
    (".template.dataDisks[].lun", "maximum"),
    (".template.dataDisks[].nameSuffix", "minLength"),
    (".template.dataDisks[].nameSuffix", "maxLength"),
    (".managedDisk.storageAccountType", "maxLength"),
    // Their webhook.
    (".template.osDisk.diskSizeGB", "minimum"),
    (".template.osDisk.diskSizeGB", "maximum"),
    (".template.terminateNotificationTimeout", "minimum"),
    (".template.terminateNotificationTimeout", "maximum"),
    // vSphere: at most 10 network cards, no empty disk; more disks than they allow, since controllers take more.
    (".dataDisks", "maxItems"),
    (".dataDisks[].name", "maxLength"),
    (".dataDisks[].sizeGiB", "minimum"),
    (".network.devices", "maxItems"),
    (".network.devices[].ipAddrs", "maxItems"),
    (".network.devices[].ipAddrs[]", "maxLength"),
    // Go cannot read anything else.
    (".guestSoftPowerOffTimeout", "pattern"),
    // Their webhook's default.
    ("VSphereDeploymentZone.spec.controlPlane", "default"),
    // A default of theirs behind a feature gate of OpenShift.
    ("Machine.spec.authoritativeAPI", "default"),
    ("MachineSet.spec.authoritativeAPI", "default"),
    (".template.spec.authoritativeAPI", "default"),
    // Kubernetes' own length of a label.
    ("MachineSet.spec.selector.matchLabels", "maxProperties"),
    ("MachineSet.spec.selector.matchLabels{}", "maxLength"),
];
