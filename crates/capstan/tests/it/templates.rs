//! The templates of Cluster API's Azure provider that have a pool: `capstan check` accepts them.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use capstan_testkit::{manifests, parts};
use kube::api::DynamicObject;
use serde_json::json;

use crate::program::capstan;

/// The kinds of the templates that Capstan has controllers for, and the pools' owners.
const KINDS: [&str; 3] = ["AzureCluster", "AzureMachinePool", "MachinePool"];

/// A key that the provider accepts: it checks the encoding.
pub const KEY: &str = include_str!("peers/key.txt");

/// Values for the variables of the templates. The others have a default.
fn value(name: &str, cluster: &str) -> Option<String> {
    let value = match name {
        "CLUSTER_NAME" => cluster,
        "AZURE_LOCATION" => "eastus",
        "AZURE_SSH_PUBLIC_KEY_B64" => KEY.trim(),
        "KUBERNETES_VERSION" | "CI_VERSION" => "v1.34.2",
        "WORKER_MACHINE_COUNT" | "WINDOWS_WORKER_MACHINE_COUNT" => "1",
        "WINDOWS_SERVER_VERSION" => "windows-2019",
        "AZURE_NODE_MACHINE_TYPE" | "AZURE_CONTROL_PLANE_MACHINE_TYPE" => "Standard_D2s_v3",
        "AZURE_SUBSCRIPTION_ID" | "AZURE_TENANT_ID" => "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b",
        _ => return None,
    };
    Some(value.to_owned())
}

/// A text for a variable without a value and without a default.
fn text_of(name: &str) -> String {
    name.to_lowercase().replace('_', "-")
}

/// Replaces the variables as `clusterctl generate` does: `${NAME}`, `${NAME:=default}`, `${NAME:-default}`, `${NAME#prefix}`.
fn fill(text: &str, cluster: &str) -> String {
    let mut text = text.to_owned();
    // The innermost first: a default may name another variable.
    while let Some(begin) = text.rfind("${") {
        let Some(end) = text[begin..].find('}').map(|length| begin + length) else {
            break;
        };
        let inner = &text[begin + 2..end];
        let named = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, rest) = inner.split_at(named.unwrap_or(inner.len()));
        let known = value(name, cluster);
        let filled = match rest.strip_prefix('#') {
            Some(prefix) => {
                let known = known.unwrap_or_default();
                known.strip_prefix(prefix).unwrap_or(&known).to_owned()
            }
            None => known.unwrap_or_else(|| match rest.trim_start_matches([':', '=', '-']) {
                "" => text_of(name),
                default => default.to_owned(),
            }),
        };
        text.replace_range(begin..=end, &filled);
    }
    text
}

/// Returns the objects of each template that has a pool, by its name; the n-th has a cluster of its own.
pub fn templates() -> Result<BTreeMap<String, (String, Vec<DynamicObject>)>> {
    let mut all = BTreeMap::new();
    let mut files: Vec<_> = std::fs::read_dir(parts::CAPZ_TEMPLATES.path()?)?.collect::<std::io::Result<_>>()?;
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in files {
        let name = file.file_name().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file.path())?;
        if !name.starts_with("cluster-template") || !text.contains("kind: AzureMachinePool\n") {
            continue;
        }
        let ours = |document: &&str| KINDS.iter().any(|kind| document.contains(&format!("\nkind: {kind}\n")));
        // A name of one letter may be a boolean of YAML.
        let cluster = format!("c{}", char::from(b'a' + u8::try_from(all.len())?));
        let documents: Vec<String> = text
            .split("\n---\n")
            .map(|document| format!("\n{document}\n"))
            .filter(|document| ours(&document.as_str()))
            .map(|document| fill(&document, &cluster))
            .collect();
        let objects = manifests::parse(&documents.join("\n---\n")).with_context(|| name.clone())?;
        all.insert(name, (cluster, objects));
    }
    ensure!(all.len() > 10, "{:?}", all.keys());
    Ok(all)
}

#[tokio::test]
async fn the_templates_of_capz_pass_the_check() -> Result<()> {
    for (name, (_, objects)) in tokio::task::spawn_blocking(templates).await?? {
        let mut child = capstan()
            .args(["check", "--strict", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        child
            .stdin
            .take()
            .context("no stdin")?
            .write_all(list.to_string().as_bytes())?;
        let out = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&out.stdout);
        println!("{name}: {}", text.trim());
        ensure!(out.status.success(), "{name}: {text}");
    }
    Ok(())
}
