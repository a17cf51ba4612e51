//! How fast a rollout may be, how often Azure is asked for what it does not make, and what a model that does not land stops:
//! itself.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use capstan_core::interceptor::Interceptors;
use capstan_sim::azure::compute::fleet::State;
use capstan_sim::azure::{Action, Config, Fault, Span, Times};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use http::Method;
use serde_json::{Value, json};

use crate::harness::image;
use crate::still::{NAME, Pool, Running, Still};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";

fn rolling(surge: usize, unavailable: usize) -> Value {
    let update = json!({ "maxSurge": surge, "maxUnavailable": unavailable });
    json!({ "spec": { "strategy": { "rollingUpdate": update } } })
}

fn running(still: &Still) -> Value {
    Still::condition(&still.pool(), "ScaleSetRunning")
}

fn message(condition: &Value) -> String {
    condition["message"].as_str().unwrap_or_default().to_owned()
}

fn images(still: &Still) -> Vec<Value> {
    let image = |instance: &Value| {
        instance
            .pointer("/properties/storageProfile/imageReference/id")
            .cloned()
    };
    still.instances().iter().filter_map(image).collect()
}

fn ready_machines(still: &Still) -> usize {
    let machines = still.machines();
    machines.iter().filter(|m| m["status"]["ready"] == true).count()
}

/// Calls Azure as somebody else does.
fn outside(still: &Still, method: Method, action: &str, body: Value) -> u16 {
    let path = format!("{}{action}?api-version=2024-07-01", still.set_id());
    still.azure.direct(method, &path, body).status.as_u16()
}

/// Puts another bootstrap token into the bootstrap data.
async fn rotate(still: &Still, token: &str) -> Result<()> {
    let data = json!({ "value": format!("#cloud-config\n{{ token: {token} }}\n") });
    still
        .patch(json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "boot" }, "stringData": data }))
        .await
}

/// A pool whose machines are all ready, with a token in their bootstrap data.
async fn ready_with_token(pool: Pool) -> Result<(Still, Running)> {
    let replicas = pool.replicas;
    let still = Still::new(pool).await?;
    rotate(&still, "abcdef.0123456789abcdef").await?;
    let running = still.start()?;
    still.until_ready(replicas).await;
    Ok((still, running))
}

/// Deletes one machine and waits until another one has come for it.
async fn replace_one(still: &Still) -> Result<()> {
    let (before, count) = (still.instance_ids(), still.instances().len());
    let name = still.machines()[0]["metadata"]["name"].clone();
    still
        .delete(
            json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePoolMachine", "metadata": { "name": name } }),
        )
        .await?;
    still
        .until("its successor", |still| {
            let new = |id: &&String| !before.contains(id);
            still.instance_ids().iter().filter(new).count() == 1
                && still.instances().len() == count
                && ready_machines(still) == count
        })
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_rollout_takes_no_longer_than_its_machines_take_to_come() -> Result<()> {
    let sim = Config {
        times: Times {
            instance_create: Span::secs(20),
            instance_delete: Span::secs(5),
            ..Times::default()
        },
        ..Config::default()
    };
    let still = Still::new(Pool {
        replicas: 20,
        object: rolling(2, 0),
        sim,
        ..Pool::default()
    })
    .await?;
    let writes = Ledger::of(kube_writes);
    let _running = still.start_behind(Interceptors::new(vec![writes.clone()]))?;
    still.until_ready(20).await;
    still.azure.clear_requests();
    writes.clear();
    let begun = tokio::time::Instant::now();
    still.upgrade(2).await?;
    still
        .until("the rollout", |still| images(still) == vec![json!(image(2)); 20])
        .await;
    // Ten rounds of 20 s. With the deletes it would be 250 s.
    let took = begun.elapsed();
    still.until_ready(20).await;
    let calls = still.azure.arm_requests();
    let called = calls
        .iter()
        .map(|call| format!("{} {} {}", call.time, call.method, call.path));
    let called: Vec<String> = called.collect();
    assert!(
        called.len() <= 70,
        "{} calls in {took:?}: {called:#?}\n{}",
        called.len(),
        writes.summary()
    );
    assert!(
        writes.len() <= 110,
        "{} writes in {took:?}: {}",
        writes.len(),
        writes.summary()
    );
    assert!(took < Duration::from_secs(216), "{took:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn machines_that_all_fail_are_not_made_again_and_again() -> Result<()> {
    let still = Still::new(Pool {
        replicas: 20,
        object: rolling(0, 1),
        ..Pool::default()
    })
    .await?;
    let (code, message) = ("OSProvisioningTimedOut".to_owned(), "it did not start".to_owned());
    still
        .azure
        .fault(Fault::new(Action::FailProvisioning { code, message }))?;
    let _running = still.start()?;
    let mut made = BTreeSet::new();
    for _ in 0..3600 {
        made.extend(still.instance_ids());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // A try of 20 at once, then after 30, 60, 120, 240, 480 s, and then every ten minutes.
    assert!(made.len() <= 20 * 12, "{} instances within an hour", made.len());
    assert!(made.len() > 20, "it is tried again");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_capacity_that_azure_does_not_have_is_given_up_and_asked_for_again_later() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let none = Action::NoCapacity {
        zone: None,
        vm_size: None,
        code: None,
    };
    // There is room for one.
    let fault = still.azure.fault(Fault::new(none).skip(1))?;
    still.scale(6).await?;
    still
        .until("the report", |still| running(still)["reason"] == "CapacityUnavailable")
        .await;
    let told = message(&running(&still));
    for part in ["Standard_D2s_v3", "eastus", "AllocationFailed"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(still.events("CapacityUnavailable").len(), 1);
    still
        .until("the capacity of what exists", |still| {
            still.instances().len() == 4 && still.set()["sku"]["capacity"] == 4
        })
        .await;
    still.azure.clear_requests();
    tokio::time::sleep(Duration::from_secs(1200)).await;
    let asked = still.azure.arm_requests();
    let asked = asked.iter().filter(|request| request.is_write()).count();
    assert_eq!(asked, 0, "not for half an hour");

    // A changed pool is tried at once.
    still.azure.remove_fault(fault);
    let begun = tokio::time::Instant::now();
    still.scale(5).await?;
    still.until_ready(5).await;
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
    assert_eq!(running(&still)["status"], "True");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pool_without_room_grows_by_itself_once_there_is_some() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let fault = still.azure.fault(Fault::new(Action::NoCapacity {
        zone: None,
        vm_size: None,
        code: None,
    }))?;
    still.scale(4).await?;
    still
        .until("the report", |still| running(still)["reason"] == "CapacityUnavailable")
        .await;
    still.azure.remove_fault(fault);
    still.until_ready(4).await;
    still.assert_settled().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn spot_options_that_cannot_be_removed_stop_nothing_else() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        object: json!({ "spec": { "template": { "spotVMOptions": {} } } }),
        ..Pool::default()
    })
    .await?;
    let before = still.instance_ids();
    still
        .patch_pool(json!({ "spec": { "template": { "spotVMOptions": null } } }))
        .await?;
    still
        .until("the report", |still| {
            message(&running(still)).contains("make a new pool")
        })
        .await;
    assert_eq!(running(&still)["reason"], "InvalidConfiguration");
    still.scale(4).await?;
    still
        .until("the fourth machine", |still| ready_machines(still) == 4)
        .await;
    replace_one(&still).await?;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let kept = still.instance_ids().iter().filter(|id| before.contains(id)).count();
    assert_eq!((kept, still.instances().len()), (2, 4), "nothing rolls");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_size_that_azure_refuses_is_not_the_size_of_new_machines() -> Result<()> {
    let (still, _running) = Still::ready(Pool::default()).await?;
    let refusal = Action::Answer {
        status: 400,
        code: Some("InvalidParameter".to_owned()),
        message: None,
        retry_after: None,
    };
    still
        .azure
        .fault(Fault::new(refusal).method("PUT").path("virtualMachineScaleSets/np"))?;
    still
        .patch_pool(json!({ "spec": { "template": { "vmSize": "Standard_D4s_v3" } } }))
        .await?;
    still
        .until("the report", |still| running(still)["reason"] == "InvalidConfiguration")
        .await;
    still.scale(4).await?;
    still
        .until("the fourth machine", |still| ready_machines(still) == 4)
        .await;
    for instance in still.instances() {
        assert_eq!(instance["sku"]["name"], "Standard_D2s_v3");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_new_bootstrap_token_does_not_make_a_refused_model_the_current_one() -> Result<()> {
    let (still, _running) = ready_with_token(Pool {
        object: json!({ "spec": { "template": { "spotVMOptions": {} } } }),
        ..Pool::default()
    })
    .await?;
    let before = still.instance_ids();
    still
        .patch_pool(json!({ "spec": { "template": { "spotVMOptions": null } } }))
        .await?;
    still
        .until("the report", |still| {
            message(&running(still)).contains("make a new pool")
        })
        .await;
    rotate(&still, "fedcba.0123456789abcdef").await?;
    still.scale(4).await?;
    still
        .until("the fourth machine", |still| ready_machines(still) == 4)
        .await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    for id in before {
        assert!(still.instance_ids().contains(&id), "{id} was replaced");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_spec_that_we_refuse_stops_only_itself() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 4,
        ..Pool::default()
    })
    .await?;
    still
        .patch_pool(json!({ "spec": { "template": { "osDisk": { "diskSizeGB": 4096 } } } }))
        .await?;
    still
        .until("the report", |still| running(still)["reason"] == "InvalidConfiguration")
        .await;
    let before = still.instance_ids();
    still.scale(3).await?;
    still
        .until("three machines", |still| still.instances().len() == 3)
        .await;
    replace_one(&still).await?;
    let kept = still.instance_ids().iter().filter(|id| before.contains(id)).count();
    assert_eq!(kept, 2);
    still
        .until("a status that follows", |still| {
            let ids = still.pool()["spec"]["providerIDList"].as_array().map_or(0, Vec::len);
            still.pool()["status"]["replicas"] == 3 && ids == 3
        })
        .await;
    assert_eq!(running(&still)["reason"], "InvalidConfiguration");

    still
        .patch_pool(json!({ "spec": { "template": { "osDisk": { "diskSizeGB": 64 } } } }))
        .await?;
    still
        .until("the new model", |still| running(still)["status"] == "True")
        .await;
    still.until_ready(3).await;
    let kept = still.instance_ids().iter().filter(|id| before.contains(id)).count();
    assert_eq!(kept, 0, "the new model rolls");
    still.assert_settled().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_scale_down_that_a_budget_holds_up_names_pod_and_budget() -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 2,
        ..Pool::default()
    })
    .await?;
    for node in still.server.objects("nodes") {
        let node = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        still
            .create(json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": format!("on-{node}"), "labels": { "app": "web" } },
                "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "none" }] },
                "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } }))
            .await?;
    }
    let spec = json!({ "minAvailable": 2, "selector": { "matchLabels": { "app": "web" } } });
    still
        .create(
            json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web" },
            "spec": spec }),
        )
        .await?;
    still.scale(1).await?;
    let replicas = |still: &Still| Still::condition(&still.pool(), "ScaleSetDesiredReplicas");
    let named = |text: &str| text.contains("on-") && text.contains("budget");
    still
        .until("the reason", |still| named(&message(&replicas(still))))
        .await;
    assert_eq!(
        (&replicas(&still)["reason"], &replicas(&still)["severity"]),
        (&json!("ScaleSetScaleDown"), &json!("Warning"))
    );

    still
        .delete(json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": { "name": NAME } }))
        .await?;
    still
        .until("the reason", |still| named(&message(&running(still))))
        .await;
    assert_eq!(running(&still)["severity"], "Warning");
    Ok(())
}

/// Sets the state of a running instance, as Azure does now and then.
fn turn(still: &Still, place: usize, state: State) {
    still.azure.changing(|azure| {
        let set = still.set_id().to_lowercase();
        if let Some(instance) = azure
            .fleets
            .get_mut(&set)
            .and_then(|f| f.instances.values_mut().nth(place))
        {
            instance.state = state;
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_passes_replaces_nothing_and_is_no_failure_for_good() -> Result<()> {
    let (still, running) = Still::ready(Pool::default()).await?;
    let before = still.instance_ids();
    drop(running);
    turn(&still, 0, State::Failed);
    let _running = still.start()?;
    let failed = |still: &Still| {
        let machines = still.machines();
        machines
            .iter()
            .filter(|m| m["status"]["provisioningState"] == "Failed")
            .count()
    };
    still.until("the state", |still| failed(still) == 1).await;
    for _ in 0..60 {
        let given_up = |machine: &Value| !machine["status"]["failureReason"].is_null();
        assert!(!still.machines().iter().any(given_up), "{:#?}", still.machines());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    turn(&still, 0, State::Succeeded);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.instance_ids(), before);
    assert_eq!(failed(&still), 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_new_management_cluster_takes_machines_over_as_they_are() -> Result<()> {
    let (still, running) = ready_with_token(Pool::default()).await?;
    // A newer token makes the first machines ones of an older model in Azure's eyes.
    rotate(&still, "fedcba.0123456789abcdef").await?;
    tokio::time::sleep(Duration::from_secs(60)).await;
    still.scale(4).await?;
    still.until_ready(4).await;
    drop(running);
    let before = still.instance_ids();
    for machine in still.machines() {
        let machine = json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePoolMachine",
            "metadata": { "name": machine["metadata"]["name"], "finalizers": null } });
        still.patch(machine.clone()).await?;
        still.delete(machine).await?;
    }
    assert_eq!(still.machines().len(), 0);
    let _running = still.start()?;
    still.until_ready(4).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.instance_ids(), before, "nothing rolls");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_autoscalers_scale_down_in_a_rollout_is_not_undone() -> Result<()> {
    let still = Still::new(Pool {
        replicas: 4,
        ..Pool::default()
    })
    .await?;
    let managed = json!({ "annotations": { "cluster.x-k8s.io/replicas-managed-by": "autoscaler" } });
    let pool = json!({ "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": NAME } });
    let mut change = pool.clone();
    crate::harness::merge(&mut change, &json!({ "metadata": managed }));
    still.patch(change).await?;
    let _running = still.start()?;
    still.until_ready(4).await;
    still.upgrade(2).await?;
    still
        .until("a rollout under way", |still| {
            images(still).iter().filter(|id| **id == json!(image(2))).count() == 2
        })
        .await;
    let gone = still.instance_ids().pop();
    assert!(outside(&still, Method::POST, "/delete", json!({ "instanceIds": [gone] })) < 300);
    still
        .until("the rollout", |still| images(still) == vec![json!(image(2)); 3])
        .await;
    still.until_ready(3).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(still.instances().len(), 3);
    let replicas = still.server.objects("machinepools")[0]["spec"]["replicas"].clone();
    assert_eq!(replicas, 3);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_azure_lists_late_is_not_made_twice() -> Result<()> {
    let sim = Config {
        times: Times {
            listing: Span::secs(45),
            ..Times::default()
        },
        ..Config::default()
    };
    let (still, _running) = ready_with_token(Pool { sim, ..Pool::default() }).await?;
    still.upgrade(2).await?;
    rotate(&still, "fedcba.0123456789abcdef").await?;
    let mut new = BTreeSet::new();
    for _ in 0..7200 {
        let is_new = |instance: &Value| {
            instance.pointer("/properties/storageProfile/imageReference/id") == Some(&json!(image(2)))
        };
        let ids = still.instances().into_iter().filter(is_new);
        new.extend(ids.map(|instance| instance["instanceId"].to_string()));
        if images(&still) == vec![json!(image(2)); 3] {
            break;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    still.until_ready(3).await;
    assert_eq!(images(&still), vec![json!(image(2)); 3]);
    assert_eq!(new.len(), 3, "each machine was made once: {new:?}");
    Ok(())
}
