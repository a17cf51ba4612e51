//! docs/reference.md, generated from the sources of the program.
//!
//! `UPDATE_REFERENCE=1` writes it: `just reference`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// The sources of what runs in a cluster.
const SOURCES: [&str; 6] = [
    "crates/api/src",
    "crates/azure/src",
    "crates/capstan/src",
    "crates/controllers",
    "crates/core/src",
    "crates/kube/src",
];
/// Not part of it: tests, and the development commands.
const LEFT_OUT: [&str; 4] = ["tests", "tests.rs", "up", "stub.rs"];
/// The meaning of variables that no flag shows.
const VARIABLES: [(&str, &str); 12] = [
    (
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
        "password of the certificate of the process's Azure identity",
    ),
    (
        "AZURE_CLIENT_CERTIFICATE_PATH",
        "certificate of the process's Azure identity",
    ),
    ("AZURE_CLIENT_ID", "client of the process's Azure identity"),
    ("AZURE_CLIENT_SECRET", "secret of the process's Azure identity"),
    ("AZURE_FEDERATED_TOKEN_FILE", "token of a workload identity"),
    (
        "AZURE_RESOURCE_MANAGER_AUDIENCE",
        "audience of tokens for Resource Manager, where it is not the endpoint",
    ),
    ("AZURE_SUBSCRIPTION_ID", "subscription of AzureClusters that name none"),
    ("AZURE_TENANT_ID", "tenant of the process's Azure identity"),
    (
        "EXP_NODE_ANTI_AFFINITY",
        "`true` keeps the vSphere machines of one control plane or MachineDeployment on different hosts, as `--feature-gates=NodeAntiAffinity=true` does",
    ),
    ("POD_NAMESPACE", "namespace of the Secrets of VSphereClusterIdentities"),
    (
        "VSPHERE_PASSWORD",
        "password for VSphereClusters that `--vcenter-account-namespaces` allows to have no identity",
    ),
    ("VSPHERE_USERNAME", "user name for the same"),
];

/// Literals that look like reasons and are none: values of conditions, and codes that Azure and vCenter answer with.
const NO_REASONS: [&str; 19] = [
    "AllocationFailed",
    "Budget",
    "False",
    "Invalid",
    "Machine",
    "MachineSet",
    "OperationNotAllowed",
    "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
    "QuotaExceeded",
    "Refused",
    "Running",
    "Secret",
    "SeveralBudgets",
    "ToBeDeletedByClusterAutoscaler",
    "True",
    "UltraSSD",
    "Unknown",
    "Failed",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the Rust files below a folder and their text up to the unit tests, in the order of their paths.
fn sources(folder: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if LEFT_OUT.contains(&name) {
            continue;
        }
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path)?;
            let product = text.split("#[cfg(test)]").next().unwrap_or_default();
            found.insert(path, product.to_owned());
        }
    }
    Ok(found)
}

/// Returns the string literals of a line.
fn literals(line: &str) -> impl Iterator<Item = &str> {
    line.split('"').skip(1).step_by(2)
}

/// Returns the value of a line that defines a constant string.
fn constant(line: &str) -> Option<&str> {
    let (before, value) = line.split_once(": &str = \"")?;
    before.contains("const ").then(|| value.strip_suffix("\";"))?
}

/// Returns whether a literal is the name of an annotation, a label or a finalizer.
fn is_qualified(value: &str) -> bool {
    let domains = ["capstan.dev", "cluster.x-k8s.io", "machine.openshift.io"];
    let domain = value.split_once('/').map(|(domain, _)| domain);
    domain.is_some_and(|found| {
        domains
            .iter()
            .any(|domain| found == *domain || found.ends_with(&format!(".{domain}")))
    })
}

/// Returns whether a literal is written as the types and reasons of conditions and events are.
fn is_reason(value: &str) -> bool {
    let first = value.chars().next().is_some_and(|c| c.is_ascii_uppercase());
    let letters = value.chars().all(|c| c.is_ascii_alphanumeric());
    let lower = value.chars().any(|c| c.is_ascii_lowercase());
    first && letters && lower && value.len() > 3 && !NO_REASONS.contains(&value)
}

/// Annotations and labels with the first sentence of the comment above their constants.
fn qualified_names(sources: &BTreeMap<PathBuf, String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::<String, String>::new();
    for text in sources.values() {
        let mut comment = String::new();
        for line in text.lines().map(str::trim) {
            if let Some(more) = line.strip_prefix("///") {
                comment = format!("{comment} {}", more.trim());
                continue;
            }
            if let Some(name) = constant(line).filter(|name| is_qualified(name)) {
                let known = found.entry(name.to_owned()).or_default();
                if known.is_empty() {
                    *known = comment.trim().replace("[`", "`").replace("`]", "`");
                }
            }
            comment.clear();
        }
    }
    found
}

/// How many lines after a word that announces a reason may hold it.
const NEAR: usize = 6;

/// Types and reasons of conditions and reasons of events, with the controllers that use them.
fn reasons(sources: &BTreeMap<PathBuf, String>) -> BTreeMap<String, BTreeSet<String>> {
    const ANNOUNCE: [&str; 6] = ["mark_", "EventNote::", ".warning(", ".normal(", "reason", "const "];
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for (path, text) in sources {
        let path = path.to_string_lossy();
        let controller = match path.split_once("/controllers/") {
            Some((_, rest)) => rest.split('/').next().unwrap_or_default(),
            None if path.ends_with("kube/src/runtime/run.rs") || path.ends_with("kube/src/conditions.rs") => "all",
            None if path.ends_with("core/src/cluster/zone.rs") => "vsphere",
            None => continue,
        };
        let mut near = 0;
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            if ANNOUNCE.iter().any(|word| line.contains(word)) {
                near = NEAR;
            }
            if near > 0 {
                near -= 1;
                for reason in literals(line).filter(|literal| is_reason(literal)) {
                    found
                        .entry(reason.to_owned())
                        .or_default()
                        .insert(controller.to_owned());
                }
            }
            if line.ends_with(';') {
                near = 0;
            }
        }
    }
    found
}

/// A flag as clap reads it from the attributes, the comment and the name of a field.
struct Flag {
    name: String,
    value: Option<String>,
    variable: Option<String>,
    default: Option<String>,
    meaning: String,
}

/// Returns the text in quotes after `key` in an attribute.
fn quoted(attribute: &str, key: &str) -> Option<String> {
    let (_, rest) = attribute.split_once(&format!("{key} = \""))?;
    rest.split('"').next().map(str::to_owned)
}

/// The flags in a source file, in its order.
fn flags(text: &str) -> Vec<Flag> {
    let (mut found, mut comment, mut attribute, mut open) = (Vec::new(), String::new(), String::new(), false);
    for line in text.lines().map(str::trim) {
        if let Some(more) = line.strip_prefix("///") {
            comment = format!("{comment} {}", more.trim());
        } else if open || line.starts_with("#[arg(") {
            attribute = format!("{attribute} {line}");
            open = !line.ends_with(")]");
        } else if line.starts_with("#[") {
            // Of no interest: other attributes stand beside those of clap.
        } else {
            let field = line.trim_start_matches("pub ").split_once(": ").map(|(name, _)| name);
            let has_flag = attribute.contains("long") && !attribute.contains("hide = true");
            if let Some(field) = field.filter(|_| has_flag) {
                found.push(Flag {
                    name: quoted(&attribute, "long").unwrap_or_else(|| field.replace('_', "-")),
                    value: quoted(&attribute, "value_name"),
                    variable: quoted(&attribute, "env"),
                    default: quoted(&attribute, "default_value"),
                    meaning: comment
                        .trim()
                        .replace("  ", " ")
                        .replace('|', "\\|")
                        .replace('<', "&lt;"),
                });
            }
            comment.clear();
            attribute.clear();
        }
    }
    found
}

/// The tables of the flags of all commands, by the files that define them.
fn commands(sources: &BTreeMap<PathBuf, String>) -> String {
    let mut out = String::new();
    let files = sources
        .iter()
        .filter(|(path, _)| path.to_string_lossy().contains("crates/capstan/src/"));
    for (path, text) in files {
        let flags = flags(text);
        let parts: Vec<String> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let file = parts.join("/");
        let file = file.rsplit("crates/capstan/src/").next().unwrap_or_default();
        let command = file.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', " ");
        if flags.is_empty() {
            continue;
        }
        let command = if command == "main" { "crds".to_owned() } else { command };
        out.push_str(&format!(
            "### capstan {command}\n| flag | meaning | variable | default |\n|---|---|---|---|\n"
        ));
        for flag in flags {
            let value = flag.value.map(|value| format!(" {value}")).unwrap_or_default();
            let code = |text: Option<String>| text.map(|text| format!("`{text}`")).unwrap_or_default();
            let (variable, default) = (code(flag.variable), code(flag.default));
            out.push_str(&format!(
                "| `--{}{value}` | {} | {variable} | {default} |\n",
                flag.name, flag.meaning
            ));
        }
        out.push('\n');
    }
    out
}

/// Variables in the sources that no flag names.
fn variables(sources: &BTreeMap<PathBuf, String>, commands: &str) -> BTreeSet<String> {
    let prefixes = ["AZURE_", "EXP_", "POD_", "VSPHERE_"];
    let is_variable = |word: &str| {
        let plain = word
            .chars()
            .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        plain && prefixes.iter().any(|prefix| word.starts_with(prefix)) && !commands.contains(&format!("| `{word}` |"))
    };
    let lines = sources.values().flat_map(|text| text.lines());
    let lines = lines.map(str::trim).filter(|line| !line.starts_with("//"));
    lines
        .flat_map(literals)
        .filter(|word| is_variable(word))
        .map(str::to_owned)
        .collect()
}

fn reference() -> Result<String> {
    let mut all = BTreeMap::new();
    for folder in SOURCES {
        all.extend(sources(&root().join(folder))?);
    }
    let commands = commands(&all);
    let used = variables(&all, &commands);

    let mut out = String::from(
        "# Reference\n\nGenerated from the sources; `just reference` writes it again. Metrics are in\n\
         [Run Capstan](operating.md#metrics), fields in `kubectl explain` and in [API](api.md).\n\n## Flags\n`capstan COMMAND --help` shows them, too. `capstan run` also accepts, and ignores or refuses with a\nmessage, flags of the controllers that it replaces.\n\n",
    );
    out.push_str(&commands);
    out.push_str("## Environment\nBesides the variables that flags show:\n\n| variable | meaning |\n|---|---|\n");
    for name in used {
        let known = VARIABLES.iter().find(|(known, _)| *known == name);
        let meaning = known.map_or("", |(_, meaning)| *meaning);
        out.push_str(&format!("| `{name}` | {meaning} |\n"));
    }
    out.push_str("\n## Annotations, labels and finalizers\n| name | meaning |\n|---|---|\n");
    for (name, meaning) in qualified_names(&all) {
        out.push_str(&format!("| `{name}` | {meaning} |\n"));
    }
    out.push_str("\n## Conditions and events\nThe types and reasons of conditions, and the reasons of events.\n\n| name | controller |\n|---|---|\n");
    for (reason, controllers) in reasons(&all) {
        let controllers: Vec<String> = controllers.into_iter().collect();
        out.push_str(&format!("| `{reason}` | {} |\n", controllers.join(", ")));
    }
    Ok(out)
}

#[test]
fn the_reference_lists_what_the_sources_have() -> Result<()> {
    let (text, file) = (reference()?, root().join("docs/reference.md"));
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&file, &text)?;
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    let changed = written.lines().zip(text.lines()).find(|(old, new)| old != new);
    ensure!(
        written == text,
        "docs/reference.md is out of date, from {changed:?} on; `just reference` writes it"
    );
    Ok(())
}
