//! The cluster templates that the replaced controllers ship for their users.

use super::{module, module_at, say};
use std::fs;

const AZURE: &str = "sigs.k8s.io/cluster-api-provider-azure";
/// The kinds of its templates that Capstan has.
const AZURE_KINDS: [&str; 3] = ["AzureMachinePool", "AzureCluster", "AzureClusterIdentity"];
const AZURE_FOLDERS: [&str; 4] = [
    "templates",
    "templates/test/ci",
    "templates/test/dev",
    "test/e2e/data/infrastructure-azure/v1beta1",
];
const VSPHERE: &str = "sigs.k8s.io/cluster-api-provider-vsphere";
/// The last version that stores v1beta1, and one that stores v1beta2.
const VERSIONS: [&str; 2] = ["v1.14.0", "v1.16.1"];

/// Fills in `${NAME}`, `${NAME:=default}` and `${NAME:-default}` as clusterctl would, from the last one on: a default may
/// name a variable itself. A variable without a value and a default gets its own name.
pub fn filled_in(template: &str, value: impl Fn(&str) -> Option<&'static str>) -> String {
    let mut text = template.to_owned();
    while let Some(start) = text.rfind("${") {
        let end = start + text[start..].find('}').expect("a closed variable");
        let variable = &text[start + 2..end];
        let name = variable.split([':', '=', '-', '/']).next().unwrap_or_default();
        let default = variable[name.len()..]
            .trim_start_matches([':', '=', '-', '/'])
            .trim_matches('"');
        let value = match (value(name), default) {
            (Some(value), _) => value.to_owned(),
            (None, "") => name.to_lowercase().replace('_', "-"),
            (None, default) => default.to_owned(),
        };
        text.replace_range(start..=end, &value);
    }
    text
}

/// Returns the templates of cluster-api-provider-vsphere by version and file; none without Go or a network.
pub fn vsphere() -> Vec<(String, String)> {
    let value = |name: &str| match name {
        "CONTROL_PLANE_MACHINE_COUNT" | "WORKER_MACHINE_COUNT" => Some("3"),
        "CONTROL_PLANE_ENDPOINT_IP" | "NAMESERVER" => Some("10.0.0.9"),
        "VSPHERE_SERVER" => Some("vcenter.example.com"),
        "VSPHERE_TLS_THUMBPRINT" => Some("AA:BB:CC:DD:EE:FF:00:11:22:33:44:55:66:77:88:99:AA:BB:CC:DD"),
        "VSPHERE_STORAGE_POLICY" => Some(""),
        "NODE_IPAM_POOL_API_GROUP" => Some("ipam.cluster.x-k8s.io"),
        "NODE_IPAM_POOL_KIND" => Some("InClusterIPPool"),
        "KUBERNETES_VERSION" => Some("v1.34.0"),
        _ => None,
    };
    let mut found = Vec::new();
    for version in VERSIONS {
        let Some(dir) = module_at(VSPHERE, version) else {
            say(&format!(
                "SKIPPED: the templates of {VSPHERE} {version} were not tried: neither the module nor Go is there"
            ));
            continue;
        };
        for entry in fs::read_dir(dir.join("templates")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                let name = format!("{version} {}", path.file_name().unwrap_or_default().display());
                found.push((name, filled_in(&fs::read_to_string(&path).unwrap(), value)));
            }
        }
    }
    found
}

/// Returns the templates of cluster-api-provider-azure by file, without the kinds that Capstan has not; none without Go or a
/// network.
pub fn azure() -> Vec<(String, String)> {
    let Some(dir) = module(AZURE) else {
        say(&format!(
            "SKIPPED: the templates of {AZURE} were not tried: neither the module nor Go is there"
        ));
        return Vec::new();
    };
    let value = |name: &str| match name {
        "AZURE_EXTENDEDLOCATION_TYPE" => Some("EdgeZone"),
        "AZURE_SUBSCRIPTION_ID" => Some("5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b"),
        // Most users leave it out.
        "AZURE_SSH_PUBLIC_KEY_B64" => Some("\"\""),
        name if name.starts_with("AZURE_LOCATION") => Some("eastus"),
        _ => None,
    };
    let is_ours = |text: &&str| {
        let kind = text.lines().find_map(|line| line.strip_prefix("kind: "));
        kind.is_some_and(|kind| AZURE_KINDS.contains(&kind.trim()))
    };
    let mut found = Vec::new();
    for folder in AZURE_FOLDERS {
        for entry in fs::read_dir(dir.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            // Scripts among the others have variables of their own.
            let ours: Vec<&str> = text.split("\n---\n").filter(is_ours).collect();
            let name = format!("{folder}/{}", path.file_name().unwrap_or_default().display());
            found.push((name, filled_in(&ours.join("\n---\n"), value)));
        }
    }
    found
}
