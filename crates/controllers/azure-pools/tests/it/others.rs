//! Others that scale a pool, and the capacity, the model and the bootstrap data that their machines get.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use capstan_sim::azure::{Action, Config, Fault, Span, Times};
use http::Method;
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{Pool, Running, Still};

/// A pool whose replicas somebody else manages, and whose machines are all ready.
async fn managed(pool: Pool) -> Result<(Still, Running)> {
    let replicas = pool.replicas;
    let still = Still::new(pool).await?;
    still.let_others_scale().await?;
    let running = still.start()?;
    still.until_ready(replicas).await;
    Ok((still, running))
}

/// Sets the capacity as an autoscaler does.
fn scale(still: &Still, capacity: usize) {
    let change = json!({ "sku": { "name": "Standard_D2s_v3", "capacity": capacity } });
    assert_eq!(still.outside(Method::PATCH, "", change), 200);
}

fn capacity(still: &Still) -> Value {
    still.set()["sku"]["capacity"].clone()
}

fn replicas(still: &Still) -> Value {
    still.server.objects("machinepools")[0]["spec"]["replicas"].clone()
}

#[rstest]
#[case::that_azure_lists_at_once(json!({}), Span::ZERO)]
#[case::that_azure_lists_late(json!({}), Span::secs(45))]
#[case::of_a_flexible_set(json!({ "spec": { "orchestrationMode": "Flexible" } }), Span::ZERO)]
#[case::of_a_flexible_set_that_azure_lists_late(
    json!({ "spec": { "orchestrationMode": "Flexible" } }), Span::secs(45))]
#[tokio::test(start_paused = true)]
async fn machines_that_others_have_just_added_get_a_new_model_too(
    #[case] object: Value,
    #[case] listing: Span,
) -> Result<()> {
    let times = Times {
        listing,
        ..Times::default()
    };
    let sim = Config {
        times,
        ..Config::default()
    };
    let (still, _running) = managed(Pool {
        object,
        sim,
        ..Pool::default()
    })
    .await?;
    // No machine shows by image or size that it lacks the new key.
    scale(&still, 5);
    let before = still.vm_ids();
    assert_eq!(before.len(), 5);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let key = BASE64.encode("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh other\n");
    still
        .patch_pool(json!({ "spec": { "template": { "sshPublicKey": key } } }))
        .await?;
    still
        .until("five machines of the new model", |still| {
            let now = still.vm_ids();
            now.len() == 5 && now.is_disjoint(&before)
        })
        .await;
    still.until_ready(5).await;
    let after = still.vm_ids();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.vm_ids(), after, "each machine was replaced once");
    assert_eq!(replicas(&still), 5);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_capacity_that_others_have_set_stays_although_azure_has_no_room() -> Result<()> {
    let (still, _running) = managed(Pool::default()).await?;
    let fault = still.azure.fault(Fault::new(Action::NoCapacity {
        zone: None,
        vm_size: None,
        code: None,
    }))?;
    scale(&still, 6);
    let running = |still: &Still| Still::condition(&still.pool(), "ScaleSetRunning");
    still
        .until("the report", |still| running(still)["reason"] == "CapacityUnavailable")
        .await;
    for _ in 0..7200 {
        assert_eq!(capacity(&still), 6);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(replicas(&still), 6);
    assert_eq!(still.events("CapacityUnavailable").len(), 1);
    // They turn elsewhere.
    scale(&still, 3);
    still
        .until("the end of the report", |still| running(still)["status"] == "True")
        .await;
    assert_eq!(replicas(&still), 3);
    still.azure.remove_fault(fault);
    scale(&still, 4);
    still.until_ready(4).await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lower_capacity_that_others_set_in_a_rollout_is_not_undone() -> Result<()> {
    let (still, _running) = managed(Pool {
        replicas: 4,
        ..Pool::default()
    })
    .await?;
    let before = still.vm_ids();
    still.upgrade(2).await?;
    still
        .until("a rollout under way", |still| {
            still.vm_ids().difference(&before).count() == 2
        })
        .await;
    let now = capacity(&still).as_u64().unwrap_or_default();
    scale(&still, usize::try_from(now)? - 1);
    still.until("the rollout", |still| still.all_have(2, 3)).await;
    still.until_ready(3).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((still.instances().len(), replicas(&still)), (3, json!(3)));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_new_token_reaches_a_scale_set_that_others_scale_although_we_refuse_the_spec() -> Result<()> {
    let data = |token: &str| format!("#cloud-config\nrun: kubeadm join --token {token}\n");
    let still = Still::new(Pool::default()).await?;
    still.set_bootstrap(&data("aaaaaa.0123456789abcdef")).await?;
    still.let_others_scale().await?;
    let _running = still.start()?;
    still.until_ready(3).await;
    let before = still.vm_ids();
    still
        .patch_pool(json!({ "spec": { "template": { "osDisk": { "diskSizeGB": 4096 } } } }))
        .await?;
    let running = |still: &Still| Still::condition(&still.pool(), "ScaleSetRunning");
    still
        .until("the report", |still| running(still)["reason"] == "InvalidConfiguration")
        .await;
    let newer = data("bbbbbb.0123456789abcdef");
    still.set_bootstrap(&newer).await?;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(still.azure.custom_data(&still.set_id()), Some(BASE64.encode(newer)));
    scale(&still, 4);
    still
        .until("the fourth machine", |still| still.machines().len() == 4)
        .await;
    assert!(before.is_subset(&still.vm_ids()), "no machine is replaced for it");
    Ok(())
}
