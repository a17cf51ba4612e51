//! Pools from end to end: real API server and controllers of Kubernetes, simulated Azure. Both budget bounds are checked at
//! every observed state.

use crate::harness;

use std::time::Duration;

use anyhow::Result;
use capstan_api::azure::{AzureClusterIdentity, AzureMachinePool};
use capstan_core::interceptor::Interceptors;
use capstan_sim::azure::{Action, Config, Fault};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use capstan_testkit::print_line;
use harness::{Options, World};
use k8s_openapi::api::core::v1::Event;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_new_image_rolls_through_within_both_bounds_and_few_writes() -> Result<()> {
    let options = Options {
        replicas: 6,
        surge: json!(2),
        ..Options::default()
    };
    let mut world = World::prepare(options).await?;
    let writes = Ledger::of(kube_writes);
    world.run(Interceptors::new(vec![writes.clone()])).await?;
    world.until_ready(6).await?;
    let before: Vec<String> = world.machines().await?.iter().map(ResourceExt::name_any).collect();
    world.watch_bounds(6, 8);
    world.sim.clear_requests();
    writes.clear();
    let begun = std::time::Instant::now();
    world.upgrade(2).await?;
    world.until_rolling().await?;
    let after = world.until_ready(6).await?;
    assert!(
        after.iter().all(|machine| !before.contains(&machine.name_any())),
        "every machine was replaced"
    );
    world.bounds.assert_kept();
    print_line(&format!(
        "6 instances replaced in batches of 2: {} ARM calls, {} kube writes: {}",
        world.sim.arm_requests().len(),
        writes.len(),
        writes.summary()
    ));
    // Five of each machine's own, and two more if it takes so long that it is told; the pool's own come by the clock.
    let by_the_clock = begun.elapsed().as_secs() / 10 + if begun.elapsed().as_secs() > 80 { 12 } else { 0 };
    let most = 6 * 6 + usize::try_from(by_the_clock)?.max(6);
    assert!(writes.len() <= most, "{}", writes.summary());
    world.assert_quiet().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_without_a_key_applied_again_rolls_nothing() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    let before = world.machines().await?[0].name_any();
    let pool = world.pool().await?;
    let key = pool.spec.template.ssh_public_key;
    let emptied = json!({ "spec": { "template": { "sshPublicKey": "" } } });
    world
        .patch::<AzureMachinePool>(&pool.metadata.name.unwrap_or_default(), emptied)
        .await?;
    world
        .until("the same key again", async || {
            Ok((world.pool().await?.spec.template.ssh_public_key == key).then_some(()))
        })
        .await?;
    world.assert_quiet().await?;
    assert_eq!(world.until_ready(1).await?[0].name_any(), before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_in_place_keeps_the_instances() -> Result<()> {
    let spec = json!({ "strategy": { "rollingUpdate": { "mode": "InPlace" } } });
    let options = Options {
        surge: json!(0),
        unavailable: json!(1),
        spec,
        ..Options::default()
    };
    let mut world = World::with_pool(options).await?;
    let before: Vec<String> = world.machines().await?.iter().map(ResourceExt::name_any).collect();
    world.watch_bounds(2, 3);
    world.upgrade(2).await?;
    world.until_rolling().await?;
    let after: Vec<String> = world.until_ready(3).await?.iter().map(ResourceExt::name_any).collect();
    assert_eq!(after, before);
    world.bounds.assert_kept();
    world.until_uncordoned().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_update_in_place_becomes_a_replacement() -> Result<()> {
    let spec = json!({ "strategy": { "rollingUpdate": { "mode": "InPlace" } } });
    let options = Options {
        replicas: 2,
        surge: json!(0),
        unavailable: json!(1),
        spec,
        ..Options::default()
    };
    let mut world = World::with_pool(options).await?;
    let before: Vec<String> = world.machines().await?.iter().map(ResourceExt::name_any).collect();
    world.watch_bounds(1, 2);
    world.sim.fault(Fault::answer(400).path("manualupgrade"))?;
    world.upgrade(2).await?;
    world.until_rolling().await?;
    let after = world.until_ready(2).await?;
    assert!(after.iter().all(|machine| !before.contains(&machine.name_any())));
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_go_up_and_down_and_a_deleted_machine_is_replaced() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    let marked = world.machines().await?[0].name_any();
    let note = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "yes" } } });
    world
        .patch::<capstan_api::azure::AzureMachinePoolMachine>(&marked, note)
        .await?;
    world.scale(5).await?;
    let five = world.until_ready(5).await?;

    world.watch_bounds(3, 6);
    world.scale(3).await?;
    let three = world.until_ready(3).await?;
    assert!(
        three.iter().all(|machine| machine.name_any() != marked),
        "the marked one went"
    );
    let stayed: Vec<_> = three
        .iter()
        .filter(|m| five.iter().any(|old| old.name_any() == m.name_any()))
        .collect();
    assert_eq!(stayed.len(), 3, "exactly two went");

    world.bounds.set(2, 4);
    let victim = three[0].name_any();
    world.delete_machine(&victim).await?;
    world.until_gone(&victim).await?;
    world.until_ready(3).await?;
    world.bounds.assert_kept();
    let listed = async || Ok((world.pool().await?.spec.provider_id_list.len() == 3).then_some(()));
    world.until("three provider ids", listed).await?;
    let pool = world.pool().await?;
    assert_eq!(
        pool.status.unwrap().infrastructure_machine_kind.as_deref(),
        Some("AzureMachinePoolMachine")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_drain_says_why_and_ends_with_its_timeout() -> Result<()> {
    let options = Options {
        replicas: 2,
        spec: json!({ "nodeDrainTimeout": "30s" }),
        ..Options::default()
    };
    let mut world = World::with_pool(options).await?;
    let machine = world.machines().await?.remove(0);
    let node = machine.status.clone().unwrap().node_ref.unwrap().name.unwrap();
    world.guarded_pod("web", &node).await?;
    world.watch_bounds(2, 3);
    world.bounds.set(1, 3);
    world.delete_machine(&machine.name_any()).await?;
    let why = world.until_blocked(&machine.name_any()).await?;
    assert!(
        why.contains(&format!(
            "pod {}/web is blocked by budget {}/web",
            world.namespace, world.namespace
        )),
        "{why}"
    );
    world.until_gone(&machine.name_any()).await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_and_evicted_instances_are_replaced() -> Result<()> {
    let spec = json!({ "template": { "spotVMOptions": { "evictionPolicy": "Deallocate" } } });
    let mut world = World::with_pool(Options {
        spec,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 4);
    let first = world.instance_ids();
    assert!(world.sim.vanish(&first[0]));
    world
        .until("its replacement", async || {
            let ids = world.instance_ids();
            Ok((ids.len() == 3 && !ids.contains(&first[0])).then_some(()))
        })
        .await?;
    world.until_ready(3).await?;
    let evicted = world.instance_ids()[0].clone();
    world.sim.evict(&evicted);
    world
        .until("the evicted one's replacement", async || {
            Ok((!world.instance_ids().contains(&evicted)).then_some(()))
        })
        .await?;
    world.until_ready(3).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_instance_is_replaced_and_missing_capacity_is_told() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 4);
    let fail = Action::FailProvisioning {
        code: "OSProvisioningTimedOut".into(),
        message: "did not finish".into(),
    };
    world.sim.fault(Fault::new(fail).times(1))?;
    world.scale(3).await?;
    world.until_ready(3).await?;

    world.sim.fault(Fault::new(Action::NoCapacity {
        zone: None,
        vm_size: None,
        code: None,
    }))?;
    world.scale(4).await?;
    let (_, message) = world
        .until("the shortage in a condition", async || {
            Ok(world
                .condition("ScaleSetRunning")
                .await?
                .filter(|(status, _)| status == "False"))
        })
        .await?;
    assert!(
        message.contains("did not create all instances") || message.contains("Allocation"),
        "{message}"
    );
    world.scale(3).await?;
    world.sim.clear_faults();
    world.until_ready(3).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_called_while_azure_asks_for_patience() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world.watch_bounds(2, 3);
    world.sim.clear_requests();
    world.sim.fault(Fault::throttle(15).times(1))?;
    world.upgrade(2).await?;
    world
        .until("the 429", async || {
            Ok(world
                .sim
                .arm_requests()
                .iter()
                .any(|request| request.status == 429)
                .then_some(()))
        })
        .await?;
    let before = world.sim.arm_requests().len();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(world.sim.arm_requests().len(), before, "{:?}", world.sim.arm_requests());
    world.until_rolling().await?;
    world.until_ready(2).await?;
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_goes_on_while_azure_asks_for_patience() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    let machine = world.machines().await?.remove(0);
    let node = machine.status.clone().unwrap().node_ref.unwrap().name.unwrap();
    world.guarded_pod("web", &node).await?;
    // Far longer than the test: whatever happens from here on happens without Azure.
    world.sim.fault(Fault::throttle(3600))?;
    world.delete_machine(&machine.name_any()).await?;
    world.scale(3).await?;
    world
        .until("the 429", async || {
            let refused = |requests: Vec<capstan_sim::azure::Request>| requests.iter().any(|call| call.status == 429);
            Ok(refused(world.sim.arm_requests()).then_some(()))
        })
        .await?;
    let before = world.sim.arm_requests().len();
    world.until_blocked(&machine.name_any()).await?;
    let budgets = world.api::<k8s_openapi::api::policy::v1::PodDisruptionBudget>();
    budgets.delete("web", &DeleteParams::default()).await?;
    let pods = world.api::<k8s_openapi::api::core::v1::Pod>();
    world
        .until("the eviction", async || {
            let pod = pods.get_opt("web").await?;
            Ok(pod
                .is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
                .then_some(()))
        })
        .await?;
    assert_eq!(world.sim.arm_requests().len(), before, "{:?}", world.sim.arm_requests());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_model_in_the_middle_of_a_rollout_wins() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 4,
        ..Options::default()
    })
    .await?;
    let first: Vec<String> = world.instance_ids();
    world.watch_bounds(4, 5);
    world.upgrade(2).await?;
    world
        .until("half of the rollout", async || {
            let left = world.instance_ids().iter().filter(|id| first.contains(id)).count();
            Ok((left <= 2).then_some(()))
        })
        .await?;
    world.upgrade(3).await?;
    world.until_rolling().await?;
    world.until_ready(4).await?;
    for instance in world.sim.instances(&world.set_id()) {
        let image = instance
            .pointer("/properties/storageProfile/imageReference/id")
            .unwrap();
        assert_eq!(image, &json!(harness::image(3)));
    }
    world.bounds.assert_kept();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pool_takes_its_machines_and_its_scale_set_along() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    world
        .api::<AzureMachinePool>()
        .delete(&world.name, &DeleteParams::default())
        .await?;
    world
        .until("the pool's end", async || {
            Ok(world
                .api::<AzureMachinePool>()
                .get_opt(&world.name)
                .await?
                .is_none()
                .then_some(()))
        })
        .await?;
    assert!(world.machines().await?.is_empty());
    assert!(world.sim.get(&world.set_id()).is_none());
    let calls = world.sim.arm_requests();
    let last = |method: &str| calls.iter().rposition(|call| call.method == method);
    assert!(last("POST") < last("DELETE"), "instances went before the scale set");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_told_before_azure_is_asked() -> Result<()> {
    let options = Options {
        replicas: 1,
        spec: json!({ "template": { "sshPublicKey": "bm90IGEga2V5" } }),
        ..Options::default()
    };
    let world = World::start(options).await?;
    let told = async || {
        Ok(world
            .condition("ScaleSetRunning")
            .await?
            .filter(|(status, _)| status == "False"))
    };
    let (_, message) = world.until("the refusal", told).await?;
    assert!(message.contains("spec.template.sshPublicKey"), "{message}");
    assert!(world.sim.arm_requests().iter().all(|call| !call.is_write()));
    // The event follows the status.
    let recorded = async || {
        let events = world.api::<Event>().list(&ListParams::default()).await?;
        let refused = |event: &Event| event.reason.as_deref() == Some("InvalidConfiguration");
        Ok(events.iter().any(refused).then_some(()))
    };
    world.until("the event", recorded).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_that_does_not_allow_the_namespace_is_not_used() -> Result<()> {
    let sim = Config::quick();
    let world = World::prepare(Options {
        replicas: 1,
        sim,
        ..Options::default()
    })
    .await?;
    let elsewhere = json!({ "spec": { "allowedNamespaces": { "list": ["elsewhere"] } } });
    world.patch::<AzureClusterIdentity>("sp", elsewhere).await?;
    let world = world.started().await?;
    let (_, message) = world
        .until("the refusal", async || {
            let cluster: capstan_api::azure::AzureCluster = world.api().get("c").await?;
            let status = cluster.status.unwrap_or_default();
            let network = capstan_kube::conditions::get(&status.conditions, "NetworkInfrastructureReady");
            Ok(network.map(|c| (c.status.clone(), c.message.clone().unwrap_or_default())))
        })
        .await?;
    assert!(message.contains("does not allow namespace"), "{message}");
    assert_eq!(world.sim.sign_ins(), 0);
    Ok(())
}
