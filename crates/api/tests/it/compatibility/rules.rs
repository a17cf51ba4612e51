//! CEL rules of ours, which their definitions do not have: each repeats a rule of their webhooks, or is listed as our own.

use serde_json::Value;
use std::{fs, path::Path};

/// How many rules there are, and which of them nobody asked for.
#[derive(Default)]
pub struct Comparison {
    pub rules: usize,
    pub faults: Vec<String>,
}

/// Rules whose words are not among those of their webhooks, and why they refuse no manifest that worked before.
const OTHER_WORDS: [(&str, &str); 21] = [
    (
        "can only be set when AzureClusterIdentity is of type UserAssignedMSI",
        "their webhook answers with the value alone",
    ),
    ("orchestrationMode is immutable", "Azure cannot change it"),
    (
        "must be a number of machines, 0 or more, or a percentage such as 25%",
        "their rollout fails on anything else",
    ),
    (
        "disableVMBootstrapExtension is immutable once it has been set",
        "their webhook has two sentences for it",
    ),
    (
        "each data disk must have a unique nameSuffix",
        "Azure refuses the scale set",
    ),
    ("each data disk must have a unique lun", "Azure refuses the scale set"),
    (
        "must be at most 32767 unless storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        "Azure refuses the scale set",
    ),
    (
        "cachingType must be None when storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        "Azure refuses the scale set",
    ),
    (
        "diskIOPSReadWrite and diskMBpsReadWrite can be set only when storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
        "fields of ours",
    ),
    (
        "userManaged must be specified when storageAccountType is 'UserManaged'",
        "their webhook fills the word in",
    ),
    (
        "userManaged can be set only when storageAccountType is 'UserManaged'",
        "their webhook says it of the URI within",
    ),
    (
        "exactly one of id, marketplace, sharedGallery and computeGallery must be set",
        "their webhook has a sentence for each pair",
    ),
    (
        "UltraSSD_LRS and PremiumV2_LRS can be used with data disks only, they cannot be used with OS disks",
        "Azure refuses the scale set",
    ),
    (
        "region's Failure Domain type cannot be HostGroup",
        "their webhook fills the type in",
    ),
    (
        "cannot be nil if zone's Failure Domain type is HostGroup",
        "their webhook fills the type in",
    ),
    (
        "cannot be nil if the Failure Domain type of region or zone is ComputeCluster",
        "their webhook has a sentence for each",
    ),
    (
        "ipAddrs cannot be set in templates",
        "their webhook names the field apart",
    ),
    (
        "two data disks must not have the same unitNumber on the same controller",
        "fields of ours",
    ),
    (
        "provisioningType is not a field of a data disk: use provisioningMode (Thin, Thick or EagerlyZeroed)",
        "their definition drops the field",
    ),
    ("selector is immutable", "webhook of OpenShift's machine-api-operator"),
    (
        "`selector` does not match template `labels`",
        "webhook of OpenShift's machine-api-operator",
    ),
];

/// All that the webhooks of a module may answer: their source.
pub fn refusals(module: &Path) -> String {
    let mut text = String::new();
    gather(module, false, &mut text);
    text
}

fn gather(directory: &Path, within: bool, text: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let within = within || name.contains("webhook");
        if path.is_dir() {
            gather(&path, within, text);
        } else if within && name.ends_with(".go") && !name.ends_with("_test.go") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

pub fn compare(kind: &str, schema: &Value, refusals: &str) -> Comparison {
    let mut comparison = Comparison::default();
    comparison.walk(kind, schema, refusals);
    comparison
}

impl Comparison {
    fn walk(&mut self, kind: &str, schema: &Value, refusals: &str) {
        match schema {
            Value::Object(fields) => {
                let rules = fields.get("x-kubernetes-validations").and_then(Value::as_array);
                for rule in rules.into_iter().flatten() {
                    self.rules += 1;
                    let message = rule["message"].as_str().unwrap_or_default();
                    let told = refusals.contains(message) || OTHER_WORDS.iter().any(|(words, _)| *words == message);
                    if message.is_empty() || !told {
                        self.faults.push(format!(
                            "{kind}: does a rule refuse what worked before? say why not in OTHER_WORDS: {rule}"
                        ));
                    }
                }
                fields.values().for_each(|value| self.walk(kind, value, refusals));
            }
            Value::Array(list) => list.iter().for_each(|value| self.walk(kind, value, refusals)),
            _ => {}
        }
    }
}

#[test]
fn no_word_is_said_of_a_rule_that_is_gone() {
    let all = serde_json::to_string(&capstan_api::crds()).unwrap();
    for (words, _) in OTHER_WORDS {
        let written = serde_json::to_string(words).unwrap();
        assert!(all.contains(&written), "no rule says {words}");
    }
}
