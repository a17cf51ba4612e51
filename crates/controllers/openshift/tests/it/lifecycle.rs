//! The life of a machine against a real API server and a simulated Azure.

use crate::support;

use anyhow::{Context as _, Result};
use capstan_api::openshift::Machine;
use capstan_core::interceptor::{Effect, Interceptor, Verdict};
use capstan_sim::azure::{Action, Config, Fault, Request};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{World, disk};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_created_linked_and_deleted_with_few_calls_and_writes() -> Result<()> {
    let world = World::new("life", Config::quick()).await?;
    let written = Ledger::new();
    let _controller = world.start_behind(vec![written.clone()]).await?;
    let name = world.name("m");
    let disks = json!([
        disk("data", 0, "Delete", "Premium_LRS"),
        disk("keep", 1, "Detach", "Premium_LRS")
    ]);
    let mut manifest = world.manifest(&name, json!({"dataDisks": disks, "location": "East US"}));
    manifest["spec"]["metadata"] = json!({"labels": {"disktype": "fast"}});
    manifest["spec"]["taints"] = json!([{"key": "k", "effect": "NoSchedule"}]);
    world.create(manifest).await?;

    let machine = world.until_phase(&name, "Provisioned").await?;
    assert_eq!(machine.spec.provider_id, Some(world.provider_id(&name)));
    assert_eq!(machine.annotations()["machine.openshift.io/instance-state"], "Running");
    assert_eq!(
        machine.labels()["machine.openshift.io/instance-type"],
        "Standard_D4s_v3"
    );
    assert_eq!(machine.labels()["machine.openshift.io/region"], "eastus");
    assert_eq!(
        world.azure("disks"),
        [format!("{name}_OSDisk"), format!("{name}_data"), format!("{name}_keep")]
    );
    world.event(&name, "Created").await?;

    let so_far = || (world.calls().len(), written.len(), world.sim.sign_ins());
    let before = so_far();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        so_far(),
        before,
        "nothing is called or written while the Node is awaited"
    );

    world.join(&machine).await?;
    let machine = world.until_phase(&name, "Running").await?;
    assert_eq!(
        machine
            .status
            .as_ref()
            .unwrap()
            .node_ref
            .as_ref()
            .unwrap()
            .name
            .as_deref(),
        Some(name.as_str())
    );
    let node = world.nodes().get(&name).await?;
    assert_eq!(
        node.annotations()["machine.openshift.io/machine"],
        format!("{}/{name}", world.namespace)
    );
    assert_eq!(node.labels()["disktype"], "fast");
    assert!(node.spec.unwrap().taints.unwrap().iter().any(|taint| taint.key == "k"));
    let creating = world.calls();
    let writes = written.count(kube_writes);
    println!(
        "create: {} ARM calls {creating:?}, {writes} kube writes",
        creating.len()
    );
    println!("{written}");
    assert!(
        creating.iter().filter(|policy| **policy != "GetSkus").count() <= 6,
        "{creating:?}"
    );
    // The Node's own controller writes its taints too: a patch of ours may have to be sent again.
    let own = written.count(|effect| kube_writes(effect) && !effect.target.contains("/nodes/"));
    assert!(own <= 6, "{own} writes besides the Node's");

    world.sim.clear_requests();
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    let deleting = world.calls();
    let all = written.count(kube_writes);
    println!(
        "delete: {} ARM calls {deleting:?}, {} kube writes",
        deleting.len(),
        all - writes
    );
    assert!(deleting.len() <= 6, "{deleting:?}");
    assert!(all - writes <= 6, "{} writes", all - writes);
    assert_eq!(world.azure("disks"), [format!("{name}_keep")]);
    assert!(world.azure("virtualMachines").is_empty() && world.azure("networkInterfaces").is_empty());
    assert!(world.nodes().get_opt(&name).await?.is_none());
    let text = world.event(&name, "Deleted").await?;
    assert!(text.contains(&format!("/disks/{name}_keep")), "{text}");
    assert!(
        world
            .events(&name)
            .await?
            .iter()
            .all(|(reason, _)| reason != "FailedDelete")
    );
    assert_eq!(world.sim.sign_ins(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_node_is_there_first_is_running_at_once() -> Result<()> {
    let world = World::new("early", Config::quick()).await?;
    let written = Ledger::new();
    let _controller = world.start_behind(vec![written.clone()]).await?;
    let name = world.name("m");
    let mut early = serde_json::from_value::<Machine>(world.manifest(&name, json!({})))?;
    early.spec.provider_id = Some(world.provider_id(&name));
    world.join(&early).await?;
    world.create(world.manifest(&name, json!({}))).await?;
    let machine = world.until_phase(&name, "Running").await?;
    assert!(machine.status.as_ref().is_some_and(|status| status.node_ref.is_some()));
    let state = machine
        .status
        .and_then(|status| status.provider_status)
        .unwrap_or_default();
    assert_eq!(
        (&state["vmState"], state.get("operation")),
        (&json!("Running"), None),
        "{state}"
    );
    world.event(&name, "Created").await?;
    // The Node's own controller writes its taints too: a patch of ours may have to be sent again.
    let own = written.count(|effect| kube_writes(effect) && !effect.target.contains("/nodes/"));
    assert!(own <= 5, "besides the Node's: {written}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_work_is_refused_before_anything_is_made() -> Result<()> {
    let world = World::new("refuse", Config::quick()).await?;
    let _controller = world.start().await?;
    let ultra = json!([disk("u", 0, "Delete", "UltraSSD_LRS")]);
    let cases = [
        (
            "conflict",
            json!({"dataDisks": ultra, "ultraSSDCapability": "Disabled"}),
            r#"StatusCode=400 -- Original Error: Code="InvalidParameter" Message="StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set." Target="managedDisk.storageAccountType""#,
        ),
        (
            "zone",
            json!({"dataDisks": ultra, "zone": ""}),
            "vm size Standard_D4s_v3 does not support ultra disks in location eastus. select a different vm size or disable ultra disks",
        ),
        (
            "weak",
            json!({"dataDisks": ultra, "vmSize": "Standard_B2s"}),
            "vm size Standard_B2s does not support ultra disks in location eastus",
        ),
        (
            "region",
            json!({"dataDisks": ultra, "location": "northcentralus", "zone": ""}),
            "vm size Standard_D4s_v3 does not support ultra disks in location northcentralus",
        ),
        (
            "size",
            json!({"vmSize": "Standard_Nope"}),
            "vm size Standard_Nope is not available in location eastus",
        ),
        (
            "lun",
            json!({"dataDisks": [disk("d", 64, "Delete", "Premium_LRS")]}),
            "providerSpec.dataDisks[0].lun: Invalid value: 64: must be greater than or equal to 0 and less than 64",
        ),
        (
            "many",
            json!({"dataDisks": (0..9).map(|lun| disk(&format!("d{lun}"), lun, "Delete", "Premium_LRS")).collect::<Vec<_>>()}),
            "vm size Standard_D4s_v3 takes 8 data disks, the spec has 9",
        ),
    ];
    for (suffix, over, text) in cases {
        let name = world.name(suffix);
        world.create(world.manifest(&name, over)).await?;
        let machine = world.until_phase(&name, "Failed").await?;
        let status = machine.status.clone().unwrap();
        assert_eq!(status.error_reason.as_deref(), Some("InvalidConfiguration"));
        assert!(
            status.error_message.as_deref().unwrap().contains(text),
            "{:?}",
            status.error_message
        );
        let event = world.event(&name, "FailedCreate").await?;
        let start = format!("InvalidConfiguration: failed to reconcile machine {name:?}: failed to create vm {name}: ");
        assert!(event.starts_with(&start) && event.contains(text), "{event}");
        assert_eq!(machine.annotations()["machine.openshift.io/instance-state"], "Unknown");
    }
    assert!(world.azure("networkInterfaces").is_empty() && world.azure("disks").is_empty());
    for (suffix, ..) in [("conflict", 0), ("lun", 0)] {
        world.delete(&world.name(suffix)).await?;
        world.until_gone(&world.name(suffix)).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn azures_own_refusal_ends_the_machine_in_azures_words() -> Result<()> {
    let world = World::new("azure", Config::quick()).await?;
    let _controller = world.start().await?;
    let refusal = Action::Answer {
        status: 400,
        code: Some("InvalidParameter".into()),
        message: Some("The value of parameter x is invalid.".into()),
        retry_after: None,
    };
    world.sim.fault(Fault::new(refusal).policy("PutVM").times(1))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Failed").await?;
    let event = world.event(&name, "FailedCreate").await?;
    assert!(
        event.contains(r#"StatusCode=400 -- Original Error: Code="InvalidParameter" Message="The value"#),
        "{event}"
    );
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(
        world.azure("networkInterfaces").is_empty(),
        "what was made is deleted with the machine"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn passing_trouble_never_ends_a_machine() -> Result<()> {
    let world = World::new("trouble", Config::quick()).await?;
    let _controller = world.start().await?;
    let quota = Action::Answer {
        status: 409,
        code: Some("OperationNotAllowed".into()),
        message: Some("Operation could not be completed as it results in exceeding approved Cores quota.".into()),
        retry_after: None,
    };
    world.sim.fault(Fault::throttle(2).policy("PutVM").times(1))?;
    world.sim.fault(Fault::new(quota).policy("PutVM").skip(1).times(1))?;
    world
        .sim
        .fault(Fault::new(Action::Drop).policy("PutVM").skip(2).times(1))?;
    world.sim.fault(Fault::answer(503).policy("GetOperation").times(1))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    assert_eq!(world.azure("virtualMachines"), std::slice::from_ref(&name));
    let puts = world.calls().iter().filter(|policy| **policy == "PutVM").count();
    assert!(puts <= 4, "{puts} requests for one machine");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_asked_of_azure_while_it_wants_to_be_left_alone() -> Result<()> {
    let world = World::new("hold", Config::quick()).await?;
    let _controller = world.start().await?;
    world.sim.fault(Fault::throttle(4).policy("PutVM").times(1))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world
        .until(&name, "throttled", |machine| {
            machine.is_some_and(|m| m.status.is_some())
        })
        .await?;
    let second = world.name("n");
    world.create(world.manifest(&second, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    world.until_phase(&second, "Provisioned").await?;
    let asked = world.sim.arm_requests();
    let mut asked = asked.iter().filter(|request| request.policy == "PutVM");
    let time = |request: &Request| request.time.parse::<jiff::Timestamp>();
    let refused = asked.next().context("nothing was asked")?;
    assert_eq!(refused.status, 429);
    for later in asked {
        let pause = time(later)?.duration_since(time(refused)?);
        assert!(pause.as_secs_f64() > 3.9, "asked again after {pause:?}");
    }
    Ok(())
}

/// Azure refuses every request for a virtual machine for a while. How many requests that cost, all machines together,
/// and how long it lasted.
async fn refused_for(crowd: usize, time: Duration, retry_after: Option<u64>) -> Result<(usize, Duration)> {
    let began = Instant::now();
    let world = World::new("crowd", Config::quick()).await?;
    let _controller = world.start().await?;
    let busy = Action::Answer {
        status: 429,
        code: Some("OperationNotAllowed".into()),
        message: Some("too many requests".into()),
        retry_after,
    };
    let fault = world.sim.fault(Fault::new(busy).policy("PutVM"))?;
    let names: Vec<String> = (0..crowd).map(|n| world.name(&n.to_string())).collect();
    for name in &names {
        world.create(world.manifest(name, json!({}))).await?;
    }
    for name in &names {
        let told = |machine: Option<&Machine>| machine.is_some_and(|machine| machine.status.is_some());
        world.until(name, "told of the throttling", told).await?;
    }
    tokio::time::sleep(time).await;
    let refused = world
        .sim
        .requests()
        .iter()
        .filter(|request| request.status == 429)
        .count();
    let lasted = began.elapsed();
    world.sim.remove_fault(fault);
    for name in &names {
        world.until_phase(name, "Provisioned").await?;
        let events = world.events(name).await?;
        assert!(
            events.iter().all(|(_, text)| !text.contains("InvalidConfiguration")),
            "{events:?}"
        );
    }
    for name in &names {
        world.delete(name).await?;
    }
    for name in &names {
        world.until_gone(name).await?;
    }
    for kind in ["virtualMachines", "networkInterfaces", "disks"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    Ok((refused, lasted))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_that_azure_sends_away_asks_no_sooner_than_it_may_and_comes_through() -> Result<()> {
    let (refused, lasted) = refused_for(10, Duration::from_secs(5), Some(3)).await?;
    println!("10 machines, 429 for {lasted:?}: {refused} requests");
    let times = lasted.as_secs() as usize / 3 + 1;
    assert!(refused <= 10 * times, "{refused} requests in {lasted:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: prints what a minute of throttling costs"]
async fn a_minute_of_throttling_measured() -> Result<()> {
    for retry_after in [None, Some(10), Some(2)] {
        let (refused, lasted) = refused_for(50, Duration::from_secs(60), retry_after).await?;
        println!("50 machines, 429 for {lasted:?}, Retry-After {retry_after:?}: {refused} requests");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_capacity_is_tried_again() -> Result<()> {
    let world = World::new("capacity", Config::quick()).await?;
    let _controller = world.start().await?;
    let full = Action::FailProvisioning {
        code: "ZonalAllocationFailed".into(),
        message: "no room".into(),
    };
    world.sim.fault(Fault::new(full).path("virtualMachines").times(1))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    assert!(
        world
            .event(&name, "FailedCreate")
            .await?
            .contains("ZonalAllocationFailed")
    );
    assert_eq!(world.azure("virtualMachines"), [name]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_machine_that_vanished_fails_its_machine() -> Result<()> {
    let world = World::new("vanish", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    world.join(&machine).await?;
    world.until_phase(&name, "Running").await?;
    let id = machine.spec.provider_id.unwrap();
    assert!(world.sim.vanish(id.trim_start_matches("azure://")));
    world
        .patch(&name, json!({"metadata": {"annotations": {"look": "again"}}}))
        .await?;
    let machine = world.until_phase(&name, "Failed").await?;
    assert_eq!(
        machine.status.unwrap().error_message.as_deref(),
        Some("can't find created instance")
    );
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_hold_a_deletion_until_they_are_removed() -> Result<()> {
    let world = World::new("hooks", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    let mut manifest = world.manifest(&name, json!({}));
    manifest["spec"]["lifecycleHooks"] = json!({"preDrain": [{"name": "first", "owner": "tester"}], "preTerminate": [{"name": "second", "owner": "tester"}]});
    world.create(manifest).await?;
    world.until_phase(&name, "Provisioned").await?;
    world.delete(&name).await?;
    let held = |condition: &'static str| {
        move |machine: Option<&Machine>| {
            machine
                .and_then(|machine| machine.status.as_ref())
                .is_some_and(|status| {
                    status.conditions.iter().any(|found| {
                        found.type_ == condition
                            && found.status == "False"
                            && found.reason.as_deref() == Some("HookPresent")
                    })
                })
        }
    };
    world.until(&name, "held before its drain", held("Drainable")).await?;
    world
        .patch(&name, json!({"spec": {"lifecycleHooks": {"preDrain": null}}}))
        .await?;
    world.until(&name, "held before its end", held("Terminable")).await?;
    assert_eq!(world.azure("virtualMachines"), std::slice::from_ref(&name));
    world.patch(&name, json!({"spec": {"lifecycleHooks": null}})).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("virtualMachines").is_empty());
    Ok(())
}

/// A pod that a budget keeps on the machine's Node.
async fn stubborn_pod(world: &World, node: &str) -> Result<(Api<Pod>, Api<PodDisruptionBudget>)> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), &world.namespace);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "stubborn", "labels": {"app": "stubborn"}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "i"}]},
    }))?;
    pods.create(&PostParams::default(), &pod).await?;
    let running = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    pods.patch_status("stubborn", &PatchParams::default(), &Patch::Merge(running))
        .await?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), &world.namespace);
    let budget = serde_json::from_value(json!({
        "metadata": {"name": "keep"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "stubborn"}}},
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    Ok((pods, budgets))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_excluded_from_drain_and_one_whose_node_is_gone_wait_for_no_pod() -> Result<()> {
    let world = World::new("undrained", Config::quick()).await?;
    let _controller = world.start().await?;
    let (excluded, orphaned) = (world.name("excluded"), world.name("orphaned"));
    for name in [&excluded, &orphaned] {
        world.create(world.manifest(name, json!({}))).await?;
        let machine = world.until_phase(name, "Provisioned").await?;
        world.join(&machine).await?;
        world.until_phase(name, "Running").await?;
    }
    let (_, budgets) = stubborn_pod(&world, &excluded).await?;
    let exclude = json!({"metadata": {"annotations": {"machine.openshift.io/exclude-node-draining": ""}}});
    world.patch(&excluded, exclude).await?;
    world.nodes().delete(&orphaned, &DeleteParams::default()).await?;
    for name in [&excluded, &orphaned] {
        world.delete(name).await?;
    }
    for name in [&excluded, &orphaned] {
        world.until_gone(name).await?;
    }
    assert!(world.azure("virtualMachines").is_empty());
    assert!(
        world.nodes().get_opt(&excluded).await?.is_none(),
        "its Node goes with it"
    );
    budgets.delete("keep", &DeleteParams::default()).await?;
    Ok(())
}

/// A machine whose drain is blocked by its pod.
async fn blocked_drain(world: &World) -> Result<(String, Api<Pod>, Api<PodDisruptionBudget>)> {
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    world.join(&machine).await?;
    world.until_phase(&name, "Running").await?;
    let (pods, budgets) = stubborn_pod(world, &name).await?;

    world.delete(&name).await?;
    let blocked = |machine: Option<&Machine>| {
        machine
            .and_then(|machine| machine.status.as_ref())
            .is_some_and(|status| {
                status.conditions.iter().any(|condition| {
                    condition.type_ == "Drained"
                        && condition.status == "False"
                        && condition
                            .message
                            .as_deref()
                            .is_some_and(|message| message.contains("stubborn"))
                })
            })
    };
    world.until(&name, "blocked by its pod", blocked).await?;
    Ok((name, pods, budgets))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_stays_until_its_node_is_drained() -> Result<()> {
    let world = World::new("drain", Config::quick()).await?;
    let _controller = world.start().await?;
    let (name, pods, budgets) = blocked_drain(&world).await?;
    assert_eq!(
        world.azure("virtualMachines"),
        std::slice::from_ref(&name),
        "the machine stays while a pod is in the way"
    );
    budgets.delete("keep", &DeleteParams::default()).await?;
    world.until_gone(&name).await?;
    assert!(
        pods.get_opt("stubborn")
            .await?
            .is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
    );
    assert!(world.azure("virtualMachines").is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_not_to_be_drained_any_more_goes_and_nothing_is_shown_in_its_way() -> Result<()> {
    let world = World::new("exclude", Config::quick()).await?;
    let controller = world.start().await?;
    let (name, pods, _) = blocked_drain(&world).await?;
    let shown = || controller.metrics.encode().contains("capstan_drain_pod_in_the_way{");
    assert!(shown());
    let annotation = json!({"metadata": {"annotations": {"machine.openshift.io/exclude-node-draining": ""}}});
    world.patch(&name, annotation).await?;
    world.until_gone(&name).await?;
    assert!(!shown());
    pods.delete("stubborn", &DeleteParams::default().grace_period(0))
        .await?;
    Ok(())
}

/// Nodes are listed once; the watch that would tell of new ones never comes through.
#[derive(Default)]
struct Late(AtomicUsize);

impl Interceptor for Late {
    fn before(&self, effect: &Effect) -> Verdict {
        if effect.target == "/api/v1/nodes" && self.0.fetch_add(1, Ordering::SeqCst) > 0 {
            return Verdict::Hang;
        }
        Verdict::Pass
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_the_cache_has_not_heard_of_is_drained_all_the_same() -> Result<()> {
    let world = World::new("late", Config::quick()).await?;
    let _controller = world.start_behind(vec![Arc::new(Late::default())]).await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    world.join(&machine).await?;
    world.delete(&name).await?;
    world.event(&name, "DrainSucceeded").await?;
    world.until_gone(&name).await?;
    world.nodes().delete(&name, &DeleteParams::default()).await?;
    Ok(())
}
