//! `capstan orphans` as a user runs it, against a real API server and a simulated Azure.

use crate::program;

use std::process::Output;

use anyhow::{Context, Result};
use capstan_api::openshift::Machine;
use capstan_sim::azure::{Azure, Config, Handle};
use capstan_testkit::ControlPlane;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use program::capstan;

async fn orphans(plane: &ControlPlane, sim: &Handle, more: &[&str]) -> Result<Output> {
    let mut command = capstan();
    command
        .args([
            "orphans",
            "--cluster",
            "ocp-x7",
            "--resource-group",
            "capstan",
            "--kubeconfig",
        ])
        .arg(plane.kubeconfig())
        .args(more)
        .env("AZURE_AUTHORITY_HOST", &sim.url)
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &sim.url)
        .env("SSL_CERT_FILE", &sim.ca_file)
        .env("AZURE_SUBSCRIPTION_ID", &sim.subscription)
        .env("AZURE_TENANT_ID", &sim.tenant)
        .env("AZURE_CLIENT_ID", &sim.client_id)
        .env("AZURE_CLIENT_SECRET", &sim.client_secret);
    Ok(tokio::task::spawn_blocking(move || command.output()).await??)
}

/// Puts a resource as if a machine had left it.
fn given(sim: &Handle, kind: &str, name: &str, tags: &Value, properties: Value) {
    let version = if kind.starts_with("Microsoft.Network") {
        "2024-05-01"
    } else {
        "2024-03-02"
    };
    let group = format!("/subscriptions/{}/resourceGroups/capstan", sim.subscription);
    let path = format!("{group}/providers/{kind}/{name}?api-version={version}");
    let body = json!({"location": "eastus", "tags": tags, "sku": {"name": "Standard_LRS"}, "properties": properties});
    let answer = sim.direct("PUT".parse().unwrap(), &path, body);
    assert!(answer.status.is_success(), "{answer:?}");
}

fn names(sim: &Handle, kind: &str) -> Vec<String> {
    let ids = sim.ids(kind);
    let mut names: Vec<String> = ids
        .iter()
        .filter_map(|id| id.rsplit('/').next().map(str::to_owned))
        .collect();
    names.sort();
    names
}

fn listed(out: &Output) -> Result<Vec<(String, String)>> {
    let rows: Vec<Value> = serde_json::from_slice(&out.stdout).with_context(|| format!("{out:?}"))?;
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    Ok(rows
        .iter()
        .map(|row| (text(row, "name"), text(row, "result")))
        .collect())
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(name, result)| ((*name).to_owned(), (*result).to_owned()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_listed_and_deleted_and_disks_only_on_demand() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("orphans").await?;
    let machines: Api<Machine> = Api::namespaced(plane.client().await?, &namespace);
    let alive = machines
        .create(&PostParams::default(), &Machine::new("alive", Default::default()))
        .await?;
    let uid = alive.metadata.uid.context("no uid")?;
    let sim = Azure::start(Config::instant()).await?;
    let tags = |cluster: &str, machine: &str, uid: &str| {
        json!({(format!("kubernetes.io_cluster.{cluster}")): "owned",
        "capstan-machine": format!("{namespace}/{machine}"), "capstan-machine-uid": uid})
    };
    let gone = tags("ocp-x7", "gone", "0");
    let subnet = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Network/virtualNetworks/capstan-vnet/subnets/worker-subnet",
        sim.subscription
    );
    let address = |name: &str| {
        format!(
            "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Network/publicIPAddresses/{name}",
            sim.subscription
        )
    };
    let nic = |public: Option<&str>| {
        let mut properties = json!({"subnet": {"id": subnet}, "primary": true});
        if let Some(public) = public {
            properties["publicIPAddress"] = json!({"id": address(public)});
        }
        json!({"ipConfigurations": [{"name": "a", "properties": properties}]})
    };
    let disk = || json!({"creationData": {"createOption": "Empty"}, "diskSizeGB": 8});
    given(
        &sim,
        "Microsoft.Network/publicIPAddresses",
        "ocp-x7-gone",
        &gone,
        json!({"publicIPAllocationMethod": "Static"}),
    );
    given(
        &sim,
        "Microsoft.Network/networkInterfaces",
        "gone-nic",
        &gone,
        nic(Some("ocp-x7-gone")),
    );
    given(
        &sim,
        "Microsoft.Network/networkInterfaces",
        "alive-nic",
        &tags("ocp-x7", "alive", &uid),
        nic(None),
    );
    given(
        &sim,
        "Microsoft.Network/networkInterfaces",
        "other-nic",
        &tags("other", "gone", "0"),
        nic(None),
    );
    // As Azure makes it together with its machine, with the machine's tags: nothing tells whether it was to be kept.
    given(&sim, "Microsoft.Compute/disks", "gone_data", &gone, disk());
    given(&sim, "Microsoft.Compute/disks", "gone_OSDisk", &gone, disk());
    let mut kept = gone.clone();
    kept["capstan-deletion-policy"] = json!("Detach");
    given(&sim, "Microsoft.Compute/disks", "gone_kept", &kept, disk());
    given(
        &sim,
        "Microsoft.Compute/disks",
        "pvc-1",
        &json!({"kubernetes.io_cluster.ocp-x7": "owned"}),
        disk(),
    );
    given(
        &sim,
        "Microsoft.Compute/availabilitySets",
        "ocp-x7-old-as",
        &json!({"kubernetes.io_cluster.ocp-x7": "owned"}),
        json!({}),
    );

    let out = orphans(&plane, &sim, &["-o", "json"]).await?;
    let everything = [
        "gone-nic",
        "ocp-x7-gone",
        "gone_OSDisk",
        "gone_data",
        "gone_kept",
        "ocp-x7-old-as",
    ];
    assert_eq!(listed(&out)?, pairs(&everything.map(|name| (name, "listed"))));
    let table = String::from_utf8(orphans(&plane, &sim, &[]).await?.stdout)?;
    assert!(table.starts_with("KIND") && table.ends_with("6 orphans\n"), "{table}");
    assert!(
        table.contains(&format!("machine {namespace}/gone does not exist")),
        "{table}"
    );
    assert!(table.contains("does not exist, deletionPolicy Detach\n"), "{table}");
    assert!(
        sim.arm_requests().iter().all(|request| request.method == "GET"),
        "nothing is deleted unasked"
    );

    let out = orphans(&plane, &sim, &["--delete", "-o", "json"]).await?;
    assert!(out.status.success(), "{out:?}");
    let expected = [
        ("gone-nic", "deleted"),
        ("ocp-x7-gone", "deleted"),
        ("gone_OSDisk", "kept"),
        ("gone_data", "kept"),
        ("gone_kept", "kept"),
        ("ocp-x7-old-as", "deleted"),
    ];
    assert_eq!(listed(&out)?, pairs(&expected));
    assert_eq!(names(&sim, "networkInterfaces"), ["alive-nic", "other-nic"]);
    assert_eq!(names(&sim, "disks"), ["gone_OSDisk", "gone_data", "gone_kept", "pvc-1"]);
    assert!(names(&sim, "publicIPAddresses").is_empty() && names(&sim, "availabilitySets").is_empty());

    let out = orphans(&plane, &sim, &["--delete", "--disks", "-o", "json"]).await?;
    let expected = [("gone_OSDisk", "deleted"), ("gone_data", "kept"), ("gone_kept", "kept")];
    assert_eq!(listed(&out)?, pairs(&expected));
    assert_eq!(names(&sim, "disks"), ["gone_data", "gone_kept", "pvc-1"]);
    let by_name = [
        "--delete",
        "--kept-disk",
        "gone_kept",
        "--kept-disk",
        "gone_data",
        "-o",
        "json",
    ];
    let out = orphans(&plane, &sim, &by_name).await?;
    assert_eq!(
        listed(&out)?,
        pairs(&[("gone_data", "deleted"), ("gone_kept", "deleted")])
    );
    assert_eq!(names(&sim, "disks"), ["pvc-1"]);
    Ok(())
}
