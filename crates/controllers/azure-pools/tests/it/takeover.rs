//! Scale sets that exist before their pool: those of its cluster are taken over, those of others are left alone.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use http::Method;
use rstest::rstest;
use serde_json::{Value, json};

use crate::harness::{image, merge};
use crate::still::{NAME, Pool, Still};

pub const OUR_CLUSTER: &str = "sigs.k8s.io_cluster-api-provider-azure_cluster_c";
const OTHER_CLUSTER: &str = "sigs.k8s.io_cluster-api-provider-azure_cluster_b";
const OLD_DATA: &str = "b2xk";

/// Makes a scale set of two instances as another program would, with these tags.
pub async fn make_set(still: &Still, tags: Value) {
    let body = json!({
        "location": "eastus", "sku": { "name": "Standard_D2s_v3", "tier": "Standard", "capacity": 2 }, "tags": tags,
        "properties": {
            "orchestrationMode": "Uniform", "overprovision": false, "singlePlacementGroup": false,
            "upgradePolicy": { "mode": "Manual" },
            "virtualMachineProfile": {
                "storageProfile": {
                    "imageReference": { "id": image(1) },
                    "osDisk": { "osType": "Linux", "createOption": "FromImage", "diskSizeGB": 30 }
                },
                "osProfile": { "computerNamePrefix": NAME, "adminUsername": "capi", "customData": OLD_DATA },
                "networkProfile": { "networkInterfaceConfigurations": [{ "name": "nic", "properties": {
                    "primary": true, "ipConfigurations": [{ "name": "ip", "properties": { "primary": true } }]
                } }] }
            }
        }
    });
    let answer = still.azure.direct(Method::PUT, &still.set_id(), body);
    assert_eq!(answer.status, 201, "{}", answer.body);
    still
        .until("two nodes", |still| {
            still.instances().len() == 2 && still.server.objects("nodes").len() == 2
        })
        .await;
    still.azure.clear_requests();
}

fn object() -> Value {
    json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
        "metadata": { "name": NAME } })
}

fn writes(still: &Still) -> Vec<String> {
    let calls = still.azure.arm_requests();
    let writes = calls.iter().filter(|call| call.is_write());
    writes.map(|call| format!("{} {}", call.method, call.path)).collect()
}

#[rstest]
#[case::of_another_cluster(json!({ OTHER_CLUSTER: "owned" }), "belongs to cluster b")]
#[case::of_another_pool(json!({ OUR_CLUSTER: "owned", "capstan-pool": "team-b/np" }), "belongs to pool team-b/np")]
#[case::of_nobody(json!({ "team": "a" }), "no tag of a cluster")]
#[tokio::test(start_paused = true)]
async fn a_scale_set_of_somebody_else_is_neither_changed_nor_deleted(
    #[case] tags: Value,
    #[case] why: &str,
) -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    make_set(&still, tags).await;
    let (set, instances) = (still.set(), still.instances());
    let _running = still.start()?;
    let running = |still: &Still| Still::condition(&still.pool(), "ScaleSetRunning");
    still
        .until("the report", |still| {
            running(still)["message"].to_string().contains(why)
        })
        .await;
    let condition = running(&still);
    assert_eq!(
        (&condition["status"], &condition["severity"]),
        (&json!("False"), &json!("Error"))
    );
    let message = condition["message"].as_str().unwrap_or_default();
    assert!(message.contains("scale set np in resource group capstan"), "{message}");
    assert!(message.contains("capstan-pool=default/np"), "{message}");

    still.upgrade(2).await?;
    still.scale(1).await?;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.machines(), Vec::<Value>::new());

    still.delete(object()).await?;
    still
        .until("the end of the object", |still| still.pool().is_null())
        .await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(writes(&still), Vec::<String>::new());
    assert_eq!((still.set(), still.instances()), (set, instances));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_whose_scale_set_is_given_to_another_stops_and_keeps_its_machines() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let mut tags = still.set()["tags"].clone();
    merge(&mut tags, &json!({ "capstan-pool": "team-b/np" }));
    let given = still
        .azure
        .direct(Method::PATCH, &still.set_id(), json!({ "tags": tags }));
    assert!(given.status.is_success(), "{}", given.body);
    still.azure.clear_requests();
    let (machines, pool) = (still.machines(), still.pool());
    still
        .until("the report", |still| {
            let running = Still::condition(&still.pool(), "ScaleSetRunning");
            running["message"].to_string().contains("belongs to pool team-b/np")
        })
        .await;
    still.upgrade(2).await?;
    still.scale(1).await?;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(writes(&still), Vec::<String>::new());
    assert_eq!((still.machines(), still.instances().len()), (machines, 3));
    assert_eq!(still.pool()["spec"]["providerIDList"], pool["spec"]["providerIDList"]);

    still.delete(object()).await?;
    still
        .until("the end of the object", |still| still.pool().is_null())
        .await;
    assert_eq!((writes(&still), still.instances().len()), (Vec::new(), 3));
    assert!(still.events("ScaleSetLeft")[0].contains("belongs to pool team-b/np"));
    Ok(())
}

/// Returns the tags of a scale set that has today's bootstrap data.
async fn tags_of_today() -> Result<Value> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    Ok(still.set()["tags"].clone())
}

#[rstest]
#[case::with_old_data("old", false)]
#[case::with_the_data_of_today("today", true)]
#[tokio::test(start_paused = true)]
async fn new_instances_of_a_scale_set_that_was_taken_over_start_with_the_data_of_today(
    #[case] hash: &str,
    #[case] known: bool,
) -> Result<()> {
    let today = tags_of_today().await?;
    let hash = if known {
        today["capz-custom-data-hash"].clone()
    } else {
        json!(hash)
    };
    let still = Still::new(Pool {
        replicas: 2,
        ..Pool::default()
    })
    .await?;
    make_set(
        &still,
        json!({ OUR_CLUSTER: "owned", "cost": "42", "capz-custom-data-hash": hash }),
    )
    .await;
    let before = still.instance_ids();
    let _running = still.start()?;
    still.until_ready(2).await;
    still.assert_settled().await;
    assert_eq!(still.instance_ids(), before);
    assert_eq!(writes(&still), [format!("PATCH {}", still.set_id())], "only tags");
    let tags = still.set()["tags"].clone();
    assert_eq!(
        (&tags["cost"], &tags["capstan-pool"]),
        (&json!("42"), &json!("default/np"))
    );
    assert_eq!(tags["capz-custom-data-hash"], hash);
    assert_eq!(
        tags["capstan-custom-data"] == today["capstan-custom-data"],
        known,
        "{tags}"
    );

    still.scale(3).await?;
    still.until_ready(3).await;
    let ids = still.instance_ids();
    let new = ids.iter().find(|id| !before.contains(id)).expect("a new instance");
    let data = still
        .azure
        .instance_custom_data(&format!("{}/virtualMachines/{new}", still.set_id()));
    let expected = if known {
        OLD_DATA.to_owned()
    } else {
        BASE64.encode("#cloud-config\n{}\n")
    };
    assert_eq!(data, Some(expected));
    let tags = still.set()["tags"].clone();
    assert_eq!(tags["capstan-custom-data"], today["capstan-custom-data"]);
    Ok(())
}
