//! Pools that are not alone: scale sets that others made, replicas that others manage, nodes in another cluster, clusters
//! that are paused, and identities of several kinds.

use crate::harness;

use std::time::Duration;

use anyhow::Result;
use capstan_api::azure::{AzureClusterIdentity, AzureMachinePool, AzureMachinePoolMachine};
use capstan_core::interceptor::Interceptors;
use capstan_kube::capi::{Cluster, MachinePool};
use capstan_testkit::ControlPlane;
use harness::{Options, World};
use http::Method;
use k8s_openapi::api::core::v1::{Event, Secret};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

fn names(machines: &[AzureMachinePoolMachine]) -> Vec<String> {
    machines.iter().map(ResourceExt::name_any).collect()
}

/// Whether anybody was asked to delete an instance, or to take a whole new model.
fn was_harmed(world: &World) -> Vec<String> {
    let calls = world.sim.arm_requests();
    let harmful = calls
        .iter()
        .filter(|call| matches!(call.method.as_str(), "POST" | "PUT" | "DELETE"));
    harmful.map(|call| format!("{} {}", call.method, call.path)).collect()
}

/// A call to Azure that is not ours.
fn outside(world: &World, method: Method, rest: &str, body: Value) -> u16 {
    world
        .sim
        .direct(method, &format!("{}{rest}", world.set_id()), body)
        .status
        .as_u16()
}

/// The scale set, the pool and its machines as the provider that ran them before leaves them behind: without any mark of
/// ours, with a newer bootstrap token in the model than the instances were made with, and one instance not yet noted.
async fn inherited(world: &World) -> Result<()> {
    let profile = |token: &str| {
        json!({
            "storageProfile": {
                "imageReference": { "id": harness::image(1) },
                "osDisk": { "osType": "Linux", "createOption": "FromImage", "diskSizeGB": 30 }
            },
            "osProfile": { "computerNamePrefix": "old", "adminUsername": "capi", "customData": token },
            "networkProfile": { "networkInterfaceConfigurations": [{ "name": "nic", "properties": {
                "primary": true, "ipConfigurations": [{ "name": "ip", "properties": { "primary": true } }]
            } }] }
        })
    };
    let set = json!({
        "location": "eastus", "sku": { "name": "standard_d2s_v3", "tier": "Standard", "capacity": 3 },
        "tags": { "Name": world.name, "cost-center": "42",
            "sigs.k8s.io_cluster-api-provider-azure_cluster_c": "owned",
            "sigs.k8s.io_cluster-api-provider-azure_role": "node" },
        "properties": {
            "orchestrationMode": "Uniform", "overprovision": false, "singlePlacementGroup": false,
            "upgradePolicy": { "mode": "Manual" }, "virtualMachineProfile": profile("Zmlyc3Q=")
        }
    });
    assert_eq!(outside(world, Method::PUT, "", set), 201);
    world
        .until("three instances", async || {
            let made = |i: &Value| i.pointer("/properties/provisioningState") == Some(&json!("Succeeded"));
            let instances = world.sim.instances(&world.set_id());
            Ok((instances.len() == 3 && instances.iter().all(made)).then_some(()))
        })
        .await?;
    let rotated = json!({ "properties": { "virtualMachineProfile": profile("c2Vjb25k") } });
    assert_eq!(outside(world, Method::PATCH, "", rotated), 200);

    let pool = world.pool().await?;
    let ids = world.instance_ids();
    for id in &ids[..2] {
        let number = id.rsplit('/').next().unwrap();
        let name = format!("{}-{number}", world.name);
        let machine = json!({
            "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePoolMachine",
            "metadata": {
                "name": name, "finalizers": ["azuremachinepoolmachine.infrastructure.cluster.x-k8s.io"],
                "labels": { "cluster.x-k8s.io/cluster-name": "c", "c": "owned", "cluster.x-k8s.io/pool-name": world.name,
                    "azuremachinepool.infrastructure.cluster.x-k8s.io/machine-pool": world.name },
                "ownerReferences": [{
                    "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
                    "name": world.name, "uid": pool.uid(), "blockOwnerDeletion": true
                }]
            },
            "spec": { "providerID": format!("azure://{id}"), "instanceID": number }
        });
        world.create::<AzureMachinePoolMachine>(machine).await?;
    }
    let listed: Vec<String> = ids.iter().map(|id| format!("azure://{id}")).collect();
    let left = json!({
        // The second one is of an earlier version of Capstan; the other provider would not remove it.
        "metadata": { "finalizers": ["machinepool.cluster.x-k8s.io", "azuremachinepool.infrastructure.cluster.x-k8s.io"] },
        "spec": { "providerID": format!("azure://{}", world.set_id()), "providerIDList": listed }
    });
    world.patch::<AzureMachinePool>(&world.name, left).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scale_set_of_another_provider_is_taken_over_without_replacing_a_machine() -> Result<()> {
    let world = World::prepare(Options::default()).await?;
    inherited(&world).await?;
    let instances = world.instance_ids();
    world.sim.clear_requests();
    let world = world.started().await?;
    let adopted = names(&world.until_ready(3).await?);
    world.assert_quiet().await?;
    assert_eq!(world.instance_ids(), instances, "no instance was replaced");
    assert_eq!(was_harmed(&world), Vec::<String>::new());
    let set = world.sim.get(&world.set_id()).unwrap();
    assert_eq!(set["tags"]["cost-center"], "42", "tags of others stay");
    assert_eq!(world.pool().await?.finalizers(), ["machinepool.cluster.x-k8s.io"]);

    world.scale(4).await?;
    let four = names(&world.until_ready(4).await?);
    assert!(adopted.iter().all(|name| four.contains(name)), "{adopted:?} {four:?}");
    world.upgrade(2).await?;
    world.until_rolling().await?;
    let rolled = names(&world.until_ready(4).await?);
    assert!(rolled.iter().all(|name| !four.contains(name)), "{four:?} {rolled:?}");

    let pools = world.api::<AzureMachinePool>();
    pools.delete(&world.name, &DeleteParams::default()).await?;
    world
        .until("the pool's end, whoever's finalizers it has", async || {
            Ok(pools.get_opt(&world.name).await?.is_none().then_some(()))
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capacity_that_somebody_else_manages_is_followed() -> Result<()> {
    let world = World::prepare(Options {
        replicas: 2,
        ..Options::default()
    })
    .await?;
    let managed = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/replicas-managed-by": "autoscaler" } } });
    world.patch::<MachinePool>(&world.name, managed).await?;
    let mut world = world.started().await?;
    world.until_ready(2).await?;
    let follows = async |world: &World, count: usize| {
        let said = async || {
            let pool: MachinePool = world.api().get(&world.name).await?;
            Ok((pool.replicas() as usize == count).then_some(()))
        };
        world
            .until(&format!("{count} replicas in the MachinePool"), said)
            .await?;
        world.until_ready(count).await
    };
    let capacity = |n: usize| json!({ "sku": { "capacity": n } });
    assert_eq!(outside(&world, Method::PATCH, "", capacity(4)), 200);
    follows(&world, 4).await?;

    let gone = world.instance_ids()[0].rsplit('/').next().unwrap().to_owned();
    assert!(outside(&world, Method::POST, "/delete", json!({ "instanceIds": [gone] })) < 300);
    follows(&world, 3).await?;

    // Whatever the MachinePool says.
    world.sim.clear_requests();
    world.scale(1).await?;
    follows(&world, 3).await?;
    assert_eq!(was_harmed(&world), Vec::<String>::new());

    // And whatever happens while nobody looks.
    world.crash().await;
    assert_eq!(outside(&world, Method::PATCH, "", capacity(4)), 200);
    world.run(Interceptors::default()).await?;
    follows(&world, 4).await?;
    assert_eq!(was_harmed(&world), Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_in_another_cluster_are_found_there_and_never_taken_for_missing() -> Result<()> {
    let workload = ControlPlane::start(Default::default()).await?;
    let world = World::with_pool(Options {
        replicas: 2,
        workload: Some(workload),
        ..Options::default()
    })
    .await?;
    let machine = world.machines().await?.remove(0);
    let node = machine.status.clone().unwrap().node_ref.unwrap().name.unwrap();
    assert!(world.nodes().await?.get_opt(&node).await?.is_some());
    let here = kube::Api::<k8s_openapi::api::core::v1::Node>::all(world.client.clone());
    assert!(here.get_opt(&node).await?.is_none(), "not in the management cluster");

    // The cluster does not answer any more: its nodes are neither missing nor drained.
    let alive = world.kubeconfig()?;
    let server = alive.lines().find(|line| line.trim().starts_with("server:")).unwrap();
    let dead = alive.replace(server.trim(), "server: https://127.0.0.1:1");
    let told_to = async |text: &str| {
        let change = json!({ "stringData": { "value": text } });
        world.patch::<Secret>("c-kubeconfig", change).await
    };
    let hostile = alive.replace(
        "    client-key-data:",
        "    tokenFile: /etc/hostname\n    client-key-data:",
    );
    told_to(&hostile).await?;
    let condition = async |type_: &str| -> Result<Option<String>> {
        let found = world
            .api::<AzureMachinePoolMachine>()
            .get_opt(&machine.name_any())
            .await?;
        let status = found.and_then(|machine| machine.status).unwrap_or_default();
        let condition = capstan_kube::conditions::get(&status.conditions, type_);
        Ok(condition.map(|c| format!("{} {}", c.status, c.message.clone().unwrap_or_default())))
    };
    world
        .until("a word about the cluster", async || {
            Ok(condition("NodeHealthy")
                .await?
                .filter(|text| text.starts_with("Unknown")))
        })
        .await?;
    // A kubeconfig that names a file is refused, and the condition names the field.
    world
        .until("the refused field", async || {
            let refused = |text: &String| text.contains("users[].user.tokenFile is not allowed");
            Ok(condition("NodeHealthy").await?.filter(refused))
        })
        .await?;
    told_to(&dead).await?;
    world
        .until("the unreachable cluster", async || {
            let refused = |text: &String| text.contains("refuses the connection");
            Ok(condition("NodeHealthy").await?.filter(refused))
        })
        .await?;
    world.sim.clear_requests();
    world.delete_machine(&machine.name_any()).await?;
    world.scale(3).await?;
    let why = world
        .until("why it is not drained", async || {
            Ok(condition("DrainingSucceeded")
                .await?
                .filter(|text| text.contains("cluster")))
        })
        .await?;
    assert!(why.contains(&world.namespace), "{why}");
    world
        .until("what can go on", async || {
            Ok((world.instance_ids().len() >= 3).then_some(()))
        })
        .await?;
    assert_eq!(was_harmed(&world), Vec::<String>::new());
    let provider_id = machine.spec.provider_id.to_lowercase();
    let stands = |id: &String| provider_id.ends_with(&id.to_lowercase());
    assert!(world.instance_ids().iter().any(stands));

    // A kubeconfig that works again is taken up.
    told_to(&alive).await?;
    world.until_gone(&machine.name_any()).await?;
    world.until_ready(3).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_cluster_is_left_alone() -> Result<()> {
    let world = World::with_pool(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    let paused = |yes: bool| json!({ "spec": { "paused": yes } });
    let before = names(&world.machines().await?);
    world.patch::<Cluster>("c", paused(true)).await?;
    // The watch has brought it when a change of the pool, made after it, brings nothing.
    world.assert_quiet().await?;
    world.upgrade(2).await?;
    world.delete_machine(&before[0]).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(world.sim.arm_requests().is_empty(), "{:?}", world.sim.arm_requests());
    assert_eq!(world.instance_ids().len(), 1);
    world.patch::<Cluster>("c", paused(false)).await?;
    world.until_gone(&before[0]).await?;
    world.until_ready(1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ultra_disks_are_judged_for_the_pools_own_zones() -> Result<()> {
    let disk = json!({ "nameSuffix": "fast", "diskSizeGB": 64, "lun": 0, "cachingType": "None",
        "managedDisk": { "storageAccountType": "UltraSSD_LRS" } });
    let world = World::prepare(Options {
        replicas: 1,
        spec: json!({ "template": { "dataDisks": [disk] } }),
        ..Options::default()
    })
    .await?;
    // Without a zone this size has none; in a zone that offers them the same pool is made.
    let world = world.started().await?;
    let told = async || {
        let condition = world.condition("ScaleSetRunning").await?;
        Ok(condition.filter(|(status, _)| status == "False"))
    };
    let (_, message) = world.until("the refusal", told).await?;
    assert!(message.contains("does not support ultra disks"), "{message}");
    assert!(world.sim.arm_requests().iter().all(|call| !call.is_write()));
    // An event comes after the status that it reports.
    let warned = async || {
        let events = world.api::<Event>().list(&ListParams::default()).await?;
        let is_warning = |event: &Event| {
            let message = event.message.as_deref().unwrap_or_default();
            event.type_.as_deref() == Some("Warning") && message.contains("ultra disks")
        };
        Ok(events.iter().any(is_warning).then_some(()))
    };
    world.until("the warning", warned).await?;
    let zoned = json!({ "spec": { "failureDomains": ["1"] } });
    world.patch::<MachinePool>(&world.name, zoned).await?;
    world.until_ready(1).await?;
    let set = world.sim.get(&world.set_id()).unwrap();
    assert_eq!(set["properties"]["additionalCapabilities"]["ultraSSDEnabled"], true);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_used_once_it_allows_the_namespace() -> Result<()> {
    let world = World::prepare(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    // A secret in a namespace that the identity does not allow stays unread, and the pool says why.
    let labelled = json!({ "allowedNamespaces": { "list": null, "selector": { "matchLabels": { "team": "a" } } } });
    world
        .patch::<AzureClusterIdentity>("sp", json!({ "spec": labelled }))
        .await?;
    let world = world.started().await?;
    until_refused(&world, &["does not allow namespace"]).await?;
    assert_eq!(world.sim.sign_ins(), 0);
    // The namespace gets the label: nothing else has to change.
    let namespaces = kube::Api::<k8s_openapi::api::core::v1::Namespace>::all(world.client.clone());
    let label = json!({ "metadata": { "labels": { "team": "a" } } });
    let merge = kube::api::Patch::Merge(label);
    namespaces.patch(&world.namespace, &Default::default(), &merge).await?;
    world.until_ready(1).await?;
    Ok(())
}

/// Returns the AzureCluster's condition once its message has all these parts.
async fn until_refused(world: &World, parts: &[&str]) -> Result<()> {
    let refused = async || {
        let cluster: capstan_api::azure::AzureCluster = world.api().get("c").await?;
        let status = cluster.status.unwrap_or_default();
        let network = capstan_kube::conditions::get(&status.conditions, "NetworkInfrastructureReady");
        let message = network.and_then(|condition| condition.message.clone());
        Ok(message.filter(|message| parts.iter().all(|part| message.contains(part))))
    };
    world.until("the refusal", refused).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_an_identity_is_refused_with_a_condition_and_an_event() -> Result<()> {
    let world = World::prepare(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    let without = json!({ "spec": { "identityRef": null } });
    world.patch::<capstan_api::azure::AzureCluster>("c", without).await?;
    let world = world.started().await?;
    let parts = ["spec.identityRef: Required value", "--allow-environment-identity="];
    until_refused(&world, &parts).await?;
    let told = async || {
        let events = world.api::<Event>().list(&ListParams::default()).await?;
        let told = |event: &Event| {
            let message = event.message.as_deref().unwrap_or_default();
            event.type_.as_deref() == Some("Warning") && parts.iter().all(|part| message.contains(part))
        };
        Ok(events.items.iter().any(told).then_some(()))
    };
    world.until("the event", told).await?;
    assert_eq!(world.sim.sign_ins(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_of_another_namespace_is_used_once_its_owner_grants_it() -> Result<()> {
    let world = World::prepare(Options {
        replicas: 1,
        ..Options::default()
    })
    .await?;
    let other = world.plane.namespace("others").await?;
    let secrets = kube::Api::<Secret>::namespaced(world.client.clone(), &other);
    let secret = serde_json::from_value(json!({
        "metadata": { "name": "azure" }, "stringData": { "clientSecret": world.sim.client_secret }
    }))?;
    secrets.create(&Default::default(), &secret).await?;
    let named = json!({ "spec": { "clientSecret": { "name": "azure", "namespace": other } } });
    world.patch::<AzureClusterIdentity>("sp", named).await?;
    let world = world.started().await?;
    until_refused(&world, &["capstan.dev/allowed-namespaces", &world.namespace]).await?;
    assert_eq!(world.sim.sign_ins(), 0);
    let granted = json!({ "metadata": { "annotations": { "capstan.dev/allowed-namespaces": world.namespace } } });
    let merge = kube::api::Patch::Merge(granted);
    secrets.patch("azure", &Default::default(), &merge).await?;
    world.until_ready(1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flexible_set_lives_as_a_uniform_one_does() -> Result<()> {
    let mut world = World::with_pool(Options {
        replicas: 2,
        spec: json!({ "orchestrationMode": "Flexible" }),
        ..Options::default()
    })
    .await?;
    let first = world.vm_ids();
    assert_eq!(first.len(), 2);
    world.watch_bounds(2, 3);
    world.upgrade(2).await?;
    world.until_rolling().await?;
    world.until_ready(2).await?;
    assert!(world.vm_ids().iter().all(|id| !first.contains(id)), "all were replaced");
    world.bounds.assert_kept();

    world.bounds.set(1, 4);
    let victim = world.machines().await?[0].name_any();
    world.delete_machine(&victim).await?;
    world.until_gone(&victim).await?;
    world.until_ready(2).await?;
    world.scale(3).await?;
    world.until_ready(3).await?;
    world.scale(1).await?;
    let last = world.until_ready(1).await?;
    assert_eq!(world.vm_ids().len(), 1);
    world.bounds.assert_kept();
    world
        .until("the capacity that is left", async || {
            let set = world.sim.get(&world.set_id()).unwrap();
            Ok((set["sku"]["capacity"] == 1).then_some(()))
        })
        .await?;
    world.assert_quiet().await?;

    // One that goes behind our back is made again.
    assert!(world.sim.vanish(&world.vm_ids()[0]));
    world.until_gone(&last[0].name_any()).await?;
    world.until_ready(1).await?;
    let pools = world.api::<AzureMachinePool>();
    pools.delete(&world.name, &DeleteParams::default()).await?;
    world
        .until("the pool's end", async || {
            Ok(pools.get_opt(&world.name).await?.is_none().then_some(()))
        })
        .await?;
    assert_eq!(world.vm_ids(), Vec::<String>::new());
    Ok(())
}
