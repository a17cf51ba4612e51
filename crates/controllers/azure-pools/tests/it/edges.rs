//! Pools beside other providers, in a move, in a pause, at a quota, and updates in place that others get in the way of.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_sim::azure::{Action, Config, Fault};
use rstest::rstest;
use serde_json::{Value, json};

use crate::harness::image;
use crate::still::{NAME, Pool, Still};

const ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io";

fn updates(still: &Still) -> usize {
    let called = still.azure.arm_requests();
    called
        .iter()
        .filter(|call| call.path.to_lowercase().ends_with("/manualupgrade"))
        .count()
}

fn images(still: &Still) -> Vec<Value> {
    let image = |instance: &Value| {
        instance
            .pointer("/properties/storageProfile/imageReference/id")
            .cloned()
    };
    still.instances().iter().filter_map(image).collect()
}

fn in_place() -> Pool {
    let update = json!({ "mode": "InPlace", "maxSurge": 0, "maxUnavailable": 1 });
    Pool {
        replicas: 2,
        object: json!({ "spec": { "strategy": { "rollingUpdate": update } } }),
        ..Pool::default()
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_in_place_is_in_the_status_before_a_crash_can_lose_it() -> Result<()> {
    let (still, running) = Still::ready(in_place()).await?;
    still.upgrade(2).await?;
    still.until("an update", |still| updates(still) == 1).await;
    let kept = |still: &Still| {
        still.pool()["status"]["longRunningOperationStates"]
            .as_array()
            .map_or(0, Vec::len)
    };
    assert!(kept(&still) > 0, "the operation is not in the status");
    drop(running);
    let _running = still.start()?;
    still.until_ready(2).await;
    assert_eq!(images(&still), [json!(image(2)), json!(image(2))]);
    assert_eq!(updates(&still), 2, "each instance is updated once");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_update_in_place_whose_answer_is_lost_is_not_asked_for_again() -> Result<()> {
    let (still, _running) = Still::ready(in_place()).await?;
    let lost = Fault::new(Action::Drop)
        .method("POST")
        .path("(?i)/manualupgrade")
        .times(1);
    still.azure.fault(lost)?;
    still.upgrade(2).await?;
    still
        .until("the new image", |still| {
            images(still) == [json!(image(2)), json!(image(2))]
        })
        .await;
    still.until_ready(2).await;
    assert_eq!(updates(&still), 2, "each instance is updated once");
    Ok(())
}

/// Whether no update in place is under way and all nodes take pods.
fn at_rest(still: &Still) -> bool {
    let updates =
        |machine: &Value| !machine["metadata"]["annotations"][format!("{ANNOTATION}/updateInstance")].is_null();
    let cordoned = |node: &Value| node["spec"]["unschedulable"] == true;
    !still.machines().iter().any(updates) && !still.server.objects("nodes").iter().any(cordoned)
}

#[rstest]
#[case::a_spec_that_we_refuse(json!({ "osDisk": { "diskSizeGB": 4096 } }), None)]
#[case::a_model_that_azure_refuses(json!({ "vmSize": "Standard_D4s_v3" }), Some("InvalidParameter"))]
#[tokio::test(start_paused = true)]
async fn an_update_in_place_ends_while_the_next_spec_is_refused(
    #[case] change: Value,
    #[case] refused: Option<&str>,
) -> Result<()> {
    let (still, _running) = Still::ready(in_place()).await?;
    still.upgrade(2).await?;
    still.until("an update", |still| updates(still) == 1).await;
    if let Some(code) = refused {
        let answer = Action::Answer {
            status: 400,
            code: Some(code.to_owned()),
            message: None,
            retry_after: None,
        };
        still
            .azure
            .fault(Fault::new(answer).method("PUT").path("virtualMachineScaleSets/np"))?;
    }
    still.patch_pool(json!({ "spec": { "template": change } })).await?;
    still
        .until("the report", |still| {
            Still::condition(&still.pool(), "ScaleSetRunning")["reason"] == "InvalidConfiguration"
        })
        .await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(at_rest(&still), "{:#?}", still.machines());
    assert_eq!(updates(&still), 1, "the instance is updated once");
    let updated = images(&still).iter().filter(|found| **found == json!(image(2))).count();
    assert_eq!(updated, 1, "no other machine goes for the model");
    Ok(())
}

#[rstest]
#[case::by_an_admin(true)]
#[case::by_nobody(false)]
#[tokio::test(start_paused = true)]
async fn a_node_is_cordoned_after_an_update_in_place_if_it_was_before(#[case] cordoned: bool) -> Result<()> {
    let mut pool = in_place();
    // A cordoned node counts as unavailable: the other one may be, too.
    pool.object["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] = json!(2);
    let (still, _running) = Still::ready(pool).await?;
    let node = still.server.objects("nodes")[0]["metadata"]["name"].clone();
    if cordoned {
        let cordon = json!({ "unschedulable": true });
        let patch = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node }, "spec": cordon });
        still.patch(patch).await?;
    }
    still.upgrade(2).await?;
    still
        .until("the new image", |still| {
            images(still) == [json!(image(2)), json!(image(2))]
        })
        .await;
    still
        .until("the end of the updates", |still| {
            let done =
                |machine: &Value| machine["metadata"]["annotations"][format!("{ANNOTATION}/updateInstance")].is_null();
            still.machines().iter().all(done)
        })
        .await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    for found in still.server.objects("nodes") {
        let expected = cordoned && found["metadata"]["name"] == node;
        assert_eq!(
            found["spec"]["unschedulable"] == true,
            expected,
            "{}",
            found["metadata"]["name"]
        );
    }
    Ok(())
}

/// Bootstrap data with a token in it.
fn bootstrap(token: &str) -> String {
    BASE64.encode(format!("#cloud-config\nrun: kubeadm join --token {token}\n"))
}

async fn rotate(still: &Still, token: &str) -> Result<()> {
    still
        .patch(
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "boot" },
            "data": { "value": bootstrap(token) } }),
        )
        .await
}

#[tokio::test(start_paused = true)]
async fn a_new_token_reaches_a_scale_set_that_others_scale_while_the_old_one_lasts() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    rotate(&still, "aaaaaa.0123456789abcdef").await?;
    let managed = json!({ "cluster.x-k8s.io/replicas-managed-by": "cluster-autoscaler" });
    still
        .patch(
            json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": NAME,
            "annotations": managed } }),
        )
        .await?;
    let _running = still.start()?;
    still.until_ready(3).await;
    still.assert_settled().await;
    let before = still.instance_ids();

    still.azure.clear_requests();
    tokio::time::sleep(Duration::from_secs(590)).await;
    let calls = still.azure.arm_requests();
    assert!(calls.len() <= 2, "the recheck costs nothing in Azure: {calls:?}");

    for token in ["bbbbbb.0123456789abcdef", "cccccc.0123456789abcdef"] {
        rotate(&still, token).await?;
        tokio::time::sleep(Duration::from_secs(180)).await;
        assert_eq!(still.azure.custom_data(&still.set_id()), Some(bootstrap(token)));
    }
    assert_eq!(still.instance_ids(), before, "no machine is replaced for it");
    Ok(())
}

/// The instances boot from a disk of the new image, and the token that they were made with has expired long ago.
#[tokio::test(start_paused = true)]
async fn an_instance_that_is_updated_to_another_image_joins_with_the_token_of_today() -> Result<()> {
    let still = Still::new(in_place()).await?;
    rotate(&still, "aaaaaa.0123456789abcdef").await?;
    let _running = still.start()?;
    still.until_ready(2).await;
    let before = still.instance_ids();
    still.upgrade(2).await?;
    still
        .until("the first update", |still| {
            images(still).contains(&json!(image(2))) && updates(still) == 1
        })
        .await;
    // Between the two updates.
    rotate(&still, "bbbbbb.0123456789abcdef").await?;
    still
        .until("the new image", |still| {
            images(still) == [json!(image(2)), json!(image(2))]
        })
        .await;
    still.until_ready(2).await;
    assert_eq!(still.instance_ids(), before, "in place");
    let data = |id: &String| {
        let instance = format!("{}/virtualMachines/{id}", still.set_id());
        still.azure.instance_custom_data(&instance)
    };
    let tokens = ["aaaaaa.0123456789abcdef", "bbbbbb.0123456789abcdef"];
    let mut found: Vec<_> = before.iter().map(data).collect();
    found.sort();
    let mut expected: Vec<_> = tokens.iter().map(|token| Some(bootstrap(token))).collect();
    expected.sort();
    assert_eq!(found, expected, "each has the newest of its time");
    let reimaged = |call: &&capstan_sim::azure::Request| call.path.to_lowercase().ends_with("/reimage");
    assert_eq!(still.azure.arm_requests().iter().filter(reimaged).count(), 2);
    assert_eq!(updates(&still), 2, "each instance is updated once");
    still.assert_settled().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_paused_rollout_replaces_nothing_until_the_pause_ends() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let before = still.instance_ids();
    let pause = format!("{ANNOTATION}/pause-rollout");
    still
        .patch_pool(json!({ "metadata": { "annotations": { &pause: "true" } } }))
        .await?;
    still.upgrade(2).await?;
    still
        .until("the report", |still| {
            let updated = Still::condition(&still.pool(), "ScaleSetModelUpdated");
            updated["message"]
                .as_str()
                .is_some_and(|message| message.contains("3 machines"))
        })
        .await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.instance_ids(), before);
    still
        .patch_pool(json!({ "metadata": { "annotations": { &pause: null } } }))
        .await?;
    still
        .until("the rollout", |still| images(still) == vec![json!(image(2)); 3])
        .await;
    still.until_ready(3).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_full_quota_stops_no_rollout_that_may_do_without_surge() -> Result<()> {
    let update = json!({ "maxSurge": 1, "maxUnavailable": 1 });
    let (still, _running) = Still::ready(Pool {
        object: json!({ "spec": { "strategy": { "rollingUpdate": update } } }),
        sim: Config {
            // Three machines of two cores.
            regional_cores: 6,
            ..Config::default()
        },
        ..Pool::default()
    })
    .await?;
    let begun = tokio::time::Instant::now();
    still.upgrade(2).await?;
    still
        .until("the rollout", |still| images(still) == vec![json!(image(2)); 3])
        .await;
    still.until_ready(3).await;
    // Three times a delete of 5 s and a creation of 20 s, and no wait of minutes for a quota that a delete has freed.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(300), "{took:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_of_another_kind_of_cluster_is_reported_and_never_touched() -> Result<()> {
    let reference = json!({ "kind": "AzureManagedCluster" });
    let still = Still::new(Pool {
        owner: json!({ "spec": { "infrastructureRef": reference } }),
        ..Pool::default()
    })
    .await?;
    let _running = still.start()?;
    let running = |still: &Still| Still::condition(&still.pool(), "ScaleSetRunning");
    still
        .until("the report", |still| {
            running(still)["message"].to_string().contains("AzureManagedCluster")
        })
        .await;
    assert!(still.pool()["metadata"]["finalizers"].is_null());
    assert_eq!(still.azure.arm_requests().len(), 0);
    still
        .delete(
            json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
            "metadata": { "name": NAME } }),
        )
        .await?;
    still
        .until("the end of the object", |still| still.pool().is_null())
        .await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(still.azure.arm_requests().len(), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_has_moved_to_another_cluster_takes_nothing_along() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let before = still.instance_ids();
    still
        .patch_pool(json!({ "metadata": { "annotations": { "clusterctl.cluster.x-k8s.io/delete-for-move": "" } } }))
        .await?;
    still
        .delete(
            json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
            "metadata": { "name": NAME } }),
        )
        .await?;
    // clusterctl removes the finalizers itself.
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(still.instance_ids(), before);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_move_that_a_person_holds_stays_held() -> Result<()> {
    let block = "clusterctl.cluster.x-k8s.io/block-move";
    let (still, _running) = Still::ready(Pool {
        object: json!({ "metadata": { "annotations": { block: "until Monday" } } }),
        ..Pool::default()
    })
    .await?;
    tokio::time::sleep(Duration::from_secs(1200)).await;
    assert_eq!(still.pool()["metadata"]["annotations"][block], "until Monday");
    Ok(())
}

#[rstest]
#[case::without_subnets(json!({ "spec": { "networkSpec": { "subnets": [] } } }), Some("WaitingForNetwork"))]
#[case::with_a_subnet_that_does_not_exist(
    json!({ "spec": { "networkSpec": { "subnets": [{ "name": "other", "role": "node" }] } } }), Some("WaitingForNetwork"))]
#[case::of_another_manager(json!({ "metadata": { "annotations": { "cluster.x-k8s.io/managed-by": "others" } } }), None)]
#[tokio::test(start_paused = true)]
async fn an_azure_cluster_is_not_ready_without_its_network(
    #[case] cluster: Value,
    #[case] reason: Option<&str>,
) -> Result<()> {
    let still = Still::new(Pool {
        cluster,
        ..Pool::default()
    })
    .await?;
    let _running = still.start()?;
    tokio::time::sleep(Duration::from_secs(600)).await;
    let found = still.server.objects("azureclusters").remove(0);
    assert_ne!(found["status"]["ready"], true);
    let network = Still::condition(&found, "NetworkInfrastructureReady");
    assert_eq!(network["reason"].as_str(), reason);
    assert!(still.set().is_null(), "no scale set without a network");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_scale_down_takes_from_the_fullest_zone_where_zones_are_kept_even() -> Result<()> {
    let still = Still::new(Pool {
        replicas: 4,
        object: json!({ "spec": { "zoneBalance": true } }),
        ..Pool::default()
    })
    .await?;
    still
        .patch(
            json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": NAME },
            "spec": { "failureDomains": ["1", "2"] } }),
        )
        .await?;
    let _running = still.start()?;
    still.until_ready(4).await;
    still.scale(2).await?;
    still.until_ready(2).await;
    let mut zones: Vec<String> = still.instances().iter().map(|i| i["zones"][0].to_string()).collect();
    zones.sort();
    assert_eq!(zones, ["\"1\"", "\"2\""]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_metrics_show_how_many_machines_a_pool_should_have_and_how_many_are_ready() -> Result<()> {
    let (still, running) = Still::ready(Pool {
        replicas: 2,
        ..Pool::default()
    })
    .await?;
    let shown = |metric: &str| {
        let metrics = running.metrics();
        let line = metrics
            .lines()
            .find(|line| line.starts_with(&format!("{metric}{{pool=\"{NAME}\"")));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!(shown("capstan_pool_replicas_desired").as_deref(), Some("2"));
    still
        .until("two ready machines", |_| {
            shown("capstan_pool_replicas_ready").as_deref() == Some("2")
        })
        .await;
    still.scale(3).await?;
    still
        .until("three wanted machines", |_| {
            shown("capstan_pool_replicas_desired").as_deref() == Some("3")
        })
        .await;
    Ok(())
}
