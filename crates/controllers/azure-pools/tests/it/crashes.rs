//! The process dies after every effect of a piece of work, and a new one goes on from what is left: in Kubernetes, in Azure,
//! and nowhere else.

use std::time::Duration;

use anyhow::Result;
use capstan_core::interceptor::Interceptors;
use capstan_testkit::interceptors::{StopAfter, writes_but_events};
use http::Method;
use rstest::rstest;
use serde_json::{Value, json};

use crate::harness::image;
use crate::still::{NAME, Pool, Still};
use crate::takeover::{OUR_CLUSTER, make_set};

/// No piece of work here takes as many effects.
const MOST_LIVES: usize = 300;
/// A life without an effect waits for Azure, or for a node. None waits for so long.
const LONGEST_LIFE: u64 = 1800;

/// Lets processes live, each until its first effect, until the work is done. Returns how many died.
async fn lives(still: &Still, done: impl Fn(&Still) -> bool, keeps: impl Fn(&Still)) -> Result<usize> {
    for life in 0..MOST_LIVES {
        let stop = StopAfter::counting(1, writes_but_events);
        let _running = still.start_behind(Interceptors::new(vec![stop.clone()]))?;
        for _ in 0..LONGEST_LIFE {
            if stop.has_stopped() || done(still) {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            keeps(still);
        }
        if done(still) {
            return Ok(life);
        }
        assert!(
            stop.has_stopped(),
            "no effect, and no end: {:#?}",
            still.pool()["status"]
        );
    }
    panic!("the work does not come to an end: {:#?}", still.machines());
}

/// A Node that runs pods.
fn is_available(node: &Value) -> bool {
    let ready = Still::condition(node, "Ready")["status"] == "True";
    ready && node["spec"]["unschedulable"] != true
}

/// Panics if fewer machines are available or more exist than allowed. Instances that Azure deletes do not count.
fn within(least: usize, most: usize) -> impl Fn(&Still) {
    move |still| {
        let nodes = still.server.objects("nodes");
        let available = nodes.iter().filter(|node| is_available(node)).count();
        assert!(available >= least, "only {available} machines are available");
        let deleting = |instance: &Value| instance["properties"]["provisioningState"] == "Deleting";
        let exist = still.instances().iter().filter(|instance| !deleting(instance)).count();
        assert!(exist <= most, "{exist} instances exist");
    }
}

fn has_image(still: &Still, version: u32, count: usize) -> bool {
    let instances = still.instances();
    let has = |instance: &&Value| {
        let found = instance.pointer("/properties/storageProfile/imageReference/id");
        found == Some(&json!(image(version))) && instance["properties"]["provisioningState"] == "Succeeded"
    };
    let nodes = still.server.objects("nodes");
    instances.len() == count && instances.iter().filter(has).count() == count && nodes.iter().all(is_available)
}

/// Everything is as it should be, and stays so.
async fn ends_well(still: &Still, count: usize) -> Result<()> {
    let _running = still.start()?;
    still.until_ready(count).await;
    still.assert_settled().await;
    Ok(())
}

#[rstest]
#[case::replaced("Replace", 1, 0, 2, 3)]
#[case::in_place("InPlace", 0, 1, 1, 2)]
#[tokio::test(start_paused = true)]
async fn a_rollout_survives_a_crash_after_each_of_its_effects(
    #[case] mode: &str,
    #[case] surge: usize,
    #[case] unavailable: usize,
    #[case] least: usize,
    #[case] most: usize,
) -> Result<()> {
    let update = json!({ "mode": mode, "maxSurge": surge, "maxUnavailable": unavailable });
    let (still, running) = Still::ready(Pool {
        replicas: 2,
        object: json!({ "spec": { "strategy": { "rollingUpdate": update } } }),
        ..Pool::default()
    })
    .await?;
    let before = still.instance_ids();
    drop(running);
    still.upgrade(2).await?;
    let died = lives(&still, |still| has_image(still, 2, 2), within(least, most)).await?;
    assert!(died >= 8, "only {died} effects");
    ends_well(&still, 2).await?;
    assert_eq!(still.instance_ids() == before, mode == "InPlace");
    let calls = still.azure.arm_requests();
    let updates = calls.iter().filter(|call| call.path.ends_with("/manualupgrade"));
    assert_eq!(updates.count(), if mode == "InPlace" { 2 } else { 0 }, "once each");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_capacity_that_others_set_survives_a_crash_after_each_effect() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    let managed = json!({ "cluster.x-k8s.io/replicas-managed-by": "cluster-autoscaler" });
    let machine_pool = json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool",
        "metadata": { "name": NAME, "annotations": managed } });
    still.patch(machine_pool).await?;
    let running = still.start()?;
    still.until_ready(3).await;
    drop(running);
    let replicas = |still: &Still| still.server.objects("machinepools")[0]["spec"]["replicas"].clone();
    let capacity = |still: &Still| still.set()["sku"]["capacity"].clone();
    for wanted in [5, 2] {
        let body = json!({ "sku": { "capacity": wanted } });
        let set = still.azure.direct(Method::PATCH, &still.set_id(), body);
        assert!(set.status.is_success(), "{}", set.body);
        let settled = |still: &Still| {
            replicas(still) == wanted && still.machines().len() == wanted && still.instances().len() == wanted
        };
        let kept = |still: &Still| assert_eq!(capacity(still), wanted, "it was set back");
        let died = lives(&still, settled, kept).await?;
        assert!(died >= 1, "only {died} effects");
    }
    ends_well(&still, 2).await?;
    assert_eq!(capacity(&still), 2);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_take_over_survives_a_crash_after_each_of_its_effects() -> Result<()> {
    let still = Still::new(Pool {
        replicas: 2,
        ..Pool::default()
    })
    .await?;
    make_set(&still, json!({ OUR_CLUSTER: "owned" })).await;
    let before = still.instance_ids();
    let taken = |still: &Still| still.set()["tags"]["capstan-pool"] == "default/np" && still.machines().len() == 2;
    let died = lives(&still, taken, within(2, 2)).await?;
    assert!(died >= 4, "only {died} effects");
    ends_well(&still, 2).await?;
    assert_eq!(still.instance_ids(), before);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_deletion_survives_a_crash_after_each_of_its_effects() -> Result<()> {
    let (still, running) = Still::ready(Pool {
        replicas: 2,
        ..Pool::default()
    })
    .await?;
    drop(running);
    let object = json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
        "metadata": { "name": NAME } });
    still.delete(object).await?;
    let died = lives(&still, |still| still.pool().is_null(), |_| {}).await?;
    assert!(died >= 6, "only {died} effects");
    assert_eq!((still.machines(), still.instances()), (Vec::new(), Vec::new()));
    assert!(still.set().is_null(), "the scale set is still there");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_operation_under_way_is_taken_up_by_the_next_process() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    let running = still.start()?;
    let operations = |still: &Still| {
        still.pool()["status"]["longRunningOperationStates"]
            .as_array()
            .map_or(0, Vec::len)
    };
    still
        .until("an operation in the status", |still| operations(still) > 0)
        .await;
    drop(running);
    still.azure.clear_requests();
    let _running = still.start()?;
    still.until_ready(3).await;
    let writes = still.azure.arm_requests().into_iter().filter(|call| call.is_write());
    assert_eq!(writes.count(), 0, "what is under way is not asked for again");
    Ok(())
}
