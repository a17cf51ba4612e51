//! The rights that accounts have in Azure: what Capstan does with those of OpenShift, and with its own. Under paused time.

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Config, Network, OPENSHIFTS_ROLE};
use http::Method;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const API: &str = "machine.openshift.io";
const REQUEST: &str = include_str!("../../../../../deploy/overlays/openshift/credentials-request.yaml");

/// The actions that Capstan's own CredentialsRequest asks for.
fn own_role() -> Result<Vec<String>> {
    let request: Value = serde_saphyr::from_str(REQUEST)?;
    let permissions = request["spec"]["providerSpec"]["permissions"].as_array();
    let permissions = permissions.context("no permissions")?.iter();
    Ok(permissions.filter_map(Value::as_str).map(str::to_owned).collect())
}

fn named(name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name}})
}

async fn with_role(role: Vec<String>) -> Result<Still> {
    let still = Still::new(Config {
        allowed_actions: Some(role),
        ..Config::instant()
    })
    .await?;
    still.azure.network(&Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Network::default()
    });
    Ok(still)
}

async fn gone(still: &Still, name: &str) -> Result<()> {
    still.delete(named(name)).await?;
    still
        .until("gone", |still| still.get(API, "machines", name).is_none())
        .await;
    Ok(())
}

fn refused(still: &Still) -> Vec<String> {
    let requests = still.azure.arm_requests();
    let refused = requests.iter().filter(|request| request.status == 403);
    refused
        .map(|request| format!("{} {}", request.method, request.path))
        .collect()
}

/// A machine that uses everything: address, balancer, a disk with a performance of its own, one that stays.
fn spec() -> Value {
    json!({"publicIP": true, "publicLoadBalancer": "lb", "dataDisks": [
        {"nameSuffix": "fast", "lun": 0, "diskSizeGB": 8, "deletionPolicy": "Delete", "diskIOPSReadWrite": 500,
         "cachingType": "None", "managedDisk": {"storageAccountType": "UltraSSD_LRS"}},
        {"nameSuffix": "kept", "lun": 1, "diskSizeGB": 8, "deletionPolicy": "Detach"},
    ]})
}

fn given_balancer(still: &Still) {
    let path = still.id("Microsoft.Network/loadBalancers", "lb?api-version=2024-05-01");
    let body = json!({"location": "eastus", "properties": {
        "frontendIPConfigurations": [{"name": "f", "properties": {}}], "backendAddressPools": [{"name": "lb"}]}});
    assert!(still.azure.direct(Method::PUT, &path, body).status.is_success());
}

#[tokio::test(start_paused = true)]
async fn capstans_own_credentials_request_is_enough_for_everything() -> Result<()> {
    let still = with_role(own_role()?).await?;
    given_balancer(&still);
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", spec())).await?;
    let mut of_set = still.machine("w", json!({"location": "westus", "zone": "", "vnet": "west-vnet"}));
    of_set["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
    still.create(of_set).await?;
    for name in ["m", "w"] {
        still.until_phase(name, "Running").await;
    }
    for name in ["m", "w"] {
        gone(&still, name).await?;
    }
    assert_eq!(still.resources("disks"), ["m_kept"]);
    let mut again = still.machine("m", spec());
    again["metadata"]["annotations"] = json!({"capstan.dev/attach-kept-disks": "kept"});
    still.create(again).await?;
    still.until_phase("m", "Running").await;
    gone(&still, "m").await?;
    assert_eq!(still.resources("disks"), ["m_kept"]);
    for kind in [
        "virtualMachines",
        "networkInterfaces",
        "publicIPAddresses",
        "availabilitySets",
    ] {
        assert!(still.resources(kind).is_empty(), "{kind}");
    }
    assert_eq!(refused(&still), Vec::<String>::new());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn with_openshifts_role_a_disk_that_has_to_be_made_first_waits_and_says_for_what() -> Result<()> {
    let still = with_role(OPENSHIFTS_ROLE.map(ToOwned::to_owned).to_vec()).await?;
    given_balancer(&still);
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", spec())).await?;
    let message = |still: &Still| {
        let machine = still.get(API, "machines", "m").unwrap_or_default();
        let condition = &machine["status"]["providerStatus"]["conditions"][0]["message"];
        condition.as_str().unwrap_or_default().to_owned()
    };
    still
        .until("a reason", |still| {
            message(still).contains("Microsoft.Compute/disks/read")
        })
        .await;
    assert!(
        still.resources("networkInterfaces").is_empty() && still.resources("publicIPAddresses").is_empty(),
        "nothing is made meanwhile"
    );
    gone(&still, "m").await?;
    Ok(())
}
