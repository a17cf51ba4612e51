//! A cluster of OpenShift with the controllers that Capstan replaces.

use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_sim::azure::Config;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

pub const LEASES: [&str; 3] = [
    "cluster-api-provider-azure-leader",
    "cluster-api-provider-machineset-leader",
    "cluster-api-provider-nodelink-leader",
];
pub const HOLDER: &str = "capstan/capstan-system/capstan";
const MINUTE: Duration = Duration::from_secs(60);

pub fn azure() -> Value {
    json!({"infrastructureName": "ocp-x7", "platformStatus": {"type": "Azure", "azure": {
        "resourceGroupName": "capstan", "networkResourceGroupName": "capstan",
        "resourceTags": [{"key": "team", "value": "core"}, {"key": "cost", "value": "1"}],
    }}})
}

fn lease(name: &str, holder: &str) -> Value {
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
           "spec": {"holderIdentity": holder, "leaseDurationSeconds": 3600}})
}

/// A MachineSet and a Machine, as users make them.
async fn work(still: &Still) -> Result<()> {
    still.create(still.machine("m", json!({}))).await?;
    still.create(still.set("workers", 2, json!({}))).await
}

pub fn holders(still: &Still) -> Vec<String> {
    let holder = |name: &str| {
        let lease = still.get("coordination.k8s.io", "leases", name).unwrap_or_default();
        lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
    };
    LEASES.map(holder).to_vec()
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_an_old_controller_holds_its_lease_and_all_is_done_once_it_is_free() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    still.create(lease(LEASES[1], "machine-api-controllers-7d9_1")).await?;
    work(&still).await?;
    let _running = still.start(None)?;
    let version = still.server.version();
    tokio::time::sleep(MINUTE * 5).await;
    assert_eq!(still.server.version(), version, "something was written");
    assert!(
        still.azure.arm_requests().is_empty(),
        "{:?}",
        still.azure.arm_requests()
    );
    still.patch(lease(LEASES[1], "")).await?;
    still
        .until("three machines", |still| still.resources("virtualMachines").len() == 3)
        .await;
    assert_eq!(holders(&still), [HOLDER; 3]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_lost_ends_all_work_until_it_is_free_again() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    let _running = still.start(None)?;
    still.until("all leases", |still| holders(still) == [HOLDER; 3]).await;
    still.patch(lease(LEASES[0], "old")).await?;
    // The next renewal shows it; the fence would close without it.
    tokio::time::sleep(MINUTE).await;
    still.azure.clear_requests();
    still.create(still.machine("late", json!({}))).await?;
    tokio::time::sleep(MINUTE * 5).await;
    assert!(
        still.azure.arm_requests().is_empty(),
        "{:?}",
        still.azure.arm_requests()
    );
    let machine = still.get("machine.openshift.io", "machines", "late").context("gone")?;
    assert_eq!(machine["metadata"]["finalizers"], Value::Null);
    still.patch(lease(LEASES[0], "")).await?;
    still.until_phase("late", "Running").await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn machines_of_another_platform_and_of_other_namespaces_are_left_alone() -> Result<()> {
    for status in [json!({"platformStatus": {"type": "VSphere"}}), azure()] {
        let still = Still::new(Config::instant()).await?;
        still.openshift(status.clone()).await?;
        let mut elsewhere = still.machine("m", json!({}));
        if status == azure() {
            elsewhere["metadata"]["namespace"] = json!("tenant");
        }
        let mut set = still.set("workers", 3, json!({}));
        set["metadata"]["namespace"] = elsewhere["metadata"]["namespace"].clone();
        still.create(elsewhere).await?;
        still.create(set).await?;
        let _running = still.start(None)?;
        tokio::time::sleep(MINUTE * 5).await;
        let machines = still.server.objects_of("machine.openshift.io", "machines");
        assert_eq!(machines.len(), 1, "the set has other controllers: {status}");
        let machine = still.get("machine.openshift.io", "machines", "m").context("gone")?;
        assert_eq!(machine["metadata"]["finalizers"], Value::Null, "{status}");
        assert!(still.azure.arm_requests().is_empty(), "{status}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn resources_have_the_names_and_tags_of_the_clusters_infrastructure() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let spec = json!({"publicIP": true, "tags": {"team": "edge"}});
    still.create(still.machine("m", spec)).await?;
    still.until_phase("m", "Running").await;
    assert_eq!(still.resources("publicIPAddresses"), ["ocp-x7-m"]);
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        let id = still.azure.ids(kind).into_iter().next().context("none")?;
        let found = still.azure.get(&id).context("gone")?;
        assert_eq!(found["tags"]["kubernetes.io_cluster.ocp-x7"], "owned", "{found}");
        assert_eq!(
            (&found["tags"]["team"], &found["tags"]["cost"]),
            (&json!("edge"), &json!("1"))
        );
    }
    // A change of the cluster's tags counts for the next machine.
    let mut changed = azure();
    changed["platformStatus"]["azure"]["resourceTags"] = json!([{"key": "cost", "value": "2"}]);
    still.infrastructure(changed).await?;
    tokio::time::sleep(MINUTE).await;
    still.create(still.machine("n", json!({}))).await?;
    still.until_phase("n", "Running").await;
    let id = still
        .azure
        .ids("virtualMachines")
        .into_iter()
        .find(|id| id.ends_with("/n"));
    let found = still.azure.get(&id.context("none")?).context("gone")?;
    assert_eq!(
        (&found["tags"]["cost"], &found["tags"]["team"]),
        (&json!("2"), &Value::Null)
    );
    still.delete(still.machine("m", json!({}))).await?;
    still
        .until("no address", |still| still.resources("publicIPAddresses").is_empty())
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_network_of_a_machine_in_another_group_is_in_the_clusters_group() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let group = format!(
        "/subscriptions/{}/resourceGroups/other?api-version=2021-04-01",
        still.azure.subscription
    );
    still
        .azure
        .direct(http::Method::PUT, &group, json!({"location": "eastus"}));
    let _running = still.start(Some(NAMESPACE))?;
    still
        .create(still.machine("m", json!({"resourceGroup": "other"})))
        .await?;
    let machine = still.until_phase("m", "Running").await;
    let id = machine["spec"]["providerID"].as_str().unwrap_or_default();
    assert!(id.contains("/resourceGroups/other/"), "{id}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn beside_the_operator_nothing_is_exported_that_it_exports_itself() -> Result<()> {
    let of_operator = [
        "mapi_machine_items",
        "mapi_machine_created_timestamp_seconds",
        "mapi_machineset_items",
        "mapi_machineset_created_timestamp_seconds",
        "mapi_machine_set_status_replicas",
    ];
    let of_provider = [
        "capstan_machine_ultra_ssd_capability",
        "mapi_machine_phase_transition_seconds",
    ];
    for has_operator in [false, true] {
        let still = Still::new(Config::instant()).await?;
        if has_operator {
            still.openshift(azure()).await?;
        }
        let running = still.start(Some(NAMESPACE))?;
        work(&still).await?;
        still.until_phase("m", "Running").await;
        let text = running.2.encode();
        let has = |name: &str| text.lines().any(|line| line.starts_with(&format!("# TYPE {name} ")));
        for name in of_operator {
            assert_eq!(has(name), !has_operator, "{name} beside the operator: {has_operator}");
        }
        for name in of_provider {
            assert!(has(name), "{name}");
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_names_no_group_takes_the_clusters() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    // As ccoctl writes it.
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "azure-cloud-credentials"},
        "data": {"azure_resourcegroup": null}});
    still.patch(secret).await?;
    let _running = still.start(None)?;
    still.create(still.machine("m", json!({}))).await?;
    let machine = still.until_phase("m", "Running").await;
    let id = machine["spec"]["providerID"].as_str().unwrap_or_default();
    assert!(id.contains("/resourceGroups/capstan/"), "{id}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_availability_set_under_the_labels_name_is_used_and_goes_with_its_last_machine() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    still.azure.network(&capstan_sim::azure::Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Default::default()
    });
    // The label says c, the Infrastructure object says ocp-x7.
    let path = still.id(
        "Microsoft.Compute/availabilitySets",
        "c_workers-as?api-version=2024-07-01",
    );
    let set = json!({"location": "westus", "sku": {"name": "Aligned"}, "tags": {"kubernetes.io_cluster.ocp-x7": "owned"},
        "properties": {"platformFaultDomainCount": 2, "platformUpdateDomainCount": 5}});
    assert!(still.azure.direct(http::Method::PUT, &path, set).status.is_success());
    let _running = still.start(None)?;
    let mut machine = still.machine("m", json!({"location": "westus", "zone": "", "vnet": "west-vnet"}));
    machine["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
    still.create(machine).await?;
    still.until_phase("m", "Running").await;
    assert_eq!(still.resources("availabilitySets"), ["c_workers-as"]);
    still.delete(still.machine("m", json!({}))).await?;
    still
        .until("gone", |still| {
            still.get("machine.openshift.io", "machines", "m").is_none()
        })
        .await;
    assert!(still.resources("availabilitySets").is_empty());
    Ok(())
}
