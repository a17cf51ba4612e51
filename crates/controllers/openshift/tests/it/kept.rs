//! Disks that outlive their machine and are attached again, under paused time.

use anyhow::{Context as _, Result};
use capstan_core::machine::orphans::{Kind, Resource, Wanted};
use capstan_sim::azure::Config;
use http::Method;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const API: &str = "machine.openshift.io";
const ANNOTATION: &str = "capstan.dev/attach-kept-disks";
const DISKS: &str = "Microsoft.Compute/disks";

fn disks() -> Value {
    json!({"dataDisks": [{"nameSuffix": "data", "lun": 0, "diskSizeGB": 8, "deletionPolicy": "Detach",
        "managedDisk": {"storageAccountType": "Premium_LRS"}}]})
}

fn named(kind: &str, name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": kind, "metadata": {"name": name}})
}

/// Something in the disk's description that no other disk has.
fn identity(still: &Still, disk: &str) -> Result<Value> {
    let found = still.azure.get(&still.id(DISKS, disk)).context("no disk")?;
    Ok(found["properties"]["uniqueId"].clone())
}

fn attached(still: &Still, machine: &str) -> Vec<String> {
    let vm = still.azure.get(&still.id("Microsoft.Compute/virtualMachines", machine));
    let disks = vm.unwrap_or_default()["properties"]["storageProfile"]["dataDisks"].clone();
    let names = disks.as_array().cloned().unwrap_or_default().into_iter();
    names
        .map(|disk| disk["name"].as_str().unwrap_or_default().to_owned())
        .collect()
}

async fn gone(still: &Still, name: &str) -> Result<()> {
    still.delete(named("Machine", name)).await?;
    still
        .until("gone", |still| still.get(API, "machines", name).is_none())
        .await;
    Ok(())
}

fn message(still: &Still, name: &str) -> String {
    let machine = still.get(API, "machines", name).unwrap_or_default();
    let status = &machine["status"]["providerStatus"]["conditions"][0]["message"];
    status.as_str().unwrap_or_default().to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_machine_made_again_gets_the_disk_that_it_left_and_leaves_it_again() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", disks())).await?;
    still.until_phase("m", "Running").await;
    let disk = identity(&still, "m_data")?;
    for _ in 0..2 {
        gone(&still, "m").await?;
        assert_eq!(still.resources("disks"), ["m_data"]);
        let mut again = still.machine("m", disks());
        again["metadata"]["annotations"] = json!({(ANNOTATION): "data"});
        still.create(again).await?;
        still.until_phase("m", "Running").await;
        assert_eq!(attached(&still, "m"), ["m_data"]);
        assert_eq!(identity(&still, "m_data")?, disk);
    }
    let events = still.server.objects_of("", "events");
    let told = events.iter().find(|event| event["reason"] == "KeptDiskAttached");
    let told = told.context("no event KeptDiskAttached")?["message"].clone();
    assert_eq!(told, "Data Disk data is the kept disk m_data");
    Ok(())
}

/// A disk as `capstan orphans` sees it.
fn orphan(still: &Still, disk: &str) -> Result<Resource> {
    let id = still.id(DISKS, disk);
    let found = still.azure.get(&id).context("no disk")?;
    Ok(Resource {
        kind: Kind::Disk,
        group: "capstan".into(),
        name: disk.to_owned(),
        id,
        tags: serde_json::from_value(found["tags"].clone())?,
        used_by: None,
    })
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_a_machine_left_on_purpose_goes_by_its_name_only() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    // One that Azure makes together with the machine, and one that is made before it and is to stay only later.
    let fast = |policy: &str| {
        let mut spec = disks();
        let fast = json!({"nameSuffix": "fast", "lun": 1, "diskSizeGB": 8, "deletionPolicy": policy, "cachingType": "None",
            "diskIOPSReadWrite": 500, "managedDisk": {"storageAccountType": "UltraSSD_LRS"}});
        spec["dataDisks"].as_array_mut().unwrap().push(fast);
        spec
    };
    still.create(still.machine("m", fast("Delete"))).await?;
    still.until_phase("m", "Running").await;
    let mut change = named("Machine", "m");
    change["spec"]["providerSpec"]["value"] = fast("Detach");
    still.patch(change).await?;
    gone(&still, "m").await?;
    assert_eq!(still.resources("disks"), ["m_data", "m_fast"]);
    let all = Wanted {
        others: true,
        disks: true,
        ..Wanted::default()
    };
    for disk in ["m_data", "m_fast"] {
        let orphan = orphan(&still, disk)?;
        assert!(!all.includes(&orphan), "{orphan:?}");
        let by_name = Wanted {
            kept_disks: [disk.to_owned()].into(),
            ..Wanted::default()
        };
        assert!(by_name.includes(&orphan), "{orphan:?}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn machines_of_a_set_get_the_disks_that_its_earlier_machines_left_each_of_them_once() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let mut set = still.set("workers", 2, disks());
    set["metadata"]["annotations"] = json!({(ANNOTATION): "data"});
    still.create(set).await?;
    let machines = |still: &Still| -> Vec<String> {
        let all = still.server.objects_of(API, "machines").into_iter();
        let running = all.filter(|machine| machine["status"]["phase"] == "Running");
        running
            .filter_map(|machine| machine["metadata"]["name"].as_str().map(str::to_owned))
            .collect()
    };
    let scale = |replicas: i32| {
        let mut change = named("MachineSet", "workers");
        change["spec"] = json!({"replicas": replicas});
        change
    };
    still.until("two machines", |still| machines(still).len() == 2).await;
    let before: Vec<String> = still
        .resources("disks")
        .into_iter()
        .filter(|disk| disk.ends_with("_data"))
        .collect();
    assert_eq!(before.len(), 2);
    still.patch(scale(0)).await?;
    still
        .until("none", |still| still.server.objects_of(API, "machines").is_empty())
        .await;
    assert_eq!(still.resources("disks"), before);
    still.patch(scale(3)).await?;
    still.until("three machines", |still| machines(still).len() == 3).await;
    let mut disks: Vec<String> = machines(&still)
        .iter()
        .flat_map(|machine| attached(&still, machine))
        .collect();
    disks.sort();
    disks.dedup();
    assert_eq!(disks.len(), 3, "{disks:?}");
    assert!(before.iter().all(|disk| disks.contains(disk)), "{before:?} {disks:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_disk_of_another_cluster_is_not_attached_and_the_machine_says_why() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let tags = json!({"kubernetes.io_cluster.other": "owned", "capstan-machine": format!("{NAMESPACE}/old")});
    let body = json!({"location": "eastus", "zones": ["1"], "sku": {"name": "Premium_LRS"}, "tags": tags,
        "properties": {"creationData": {"createOption": "Empty"}, "diskSizeGB": 8}});
    let path = format!("{}?api-version=2024-03-02", still.id(DISKS, "old_data"));
    assert!(still.azure.direct(Method::PUT, &path, body).status.is_success());
    let mut machine = still.machine("m", disks());
    machine["metadata"]["annotations"] = json!({(ANNOTATION): "data=old_data"});
    still.create(machine).await?;
    still
        .until("a reason", |still| {
            message(still, "m").contains("disk old_data cannot be attached: its tags do not name this cluster")
        })
        .await;
    assert!(still.resources("networkInterfaces").is_empty() && still.resources("virtualMachines").is_empty());
    gone(&still, "m").await?;
    assert_eq!(still.resources("disks"), ["old_data"]);
    Ok(())
}
