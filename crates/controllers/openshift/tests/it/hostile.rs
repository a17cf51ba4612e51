//! Machines of somebody who wants what is not theirs: names that leave their place in a URL, provider ids of others.

use crate::support::World;

use anyhow::{Context as _, Result};
use capstan_sim::azure::Config;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

/// A network interface that belongs to nobody here; its name is what the machine's would be.
fn victims(world: &World, group: &str, machine: &str) -> Vec<String> {
    let base = format!(
        "/subscriptions/{}/resourceGroups/{group}/providers",
        world.sim.subscription
    );
    let subnet = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Network/virtualNetworks/capstan-vnet/subnets/worker-subnet",
        world.sim.subscription
    );
    let tags = json!({"team": "other"});
    let interface = format!("{base}/Microsoft.Network/networkInterfaces/{machine}-nic");
    let machine_id = format!("{base}/Microsoft.Compute/virtualMachines/{machine}");
    let documents = [
        (
            interface.clone(),
            json!({"location": "eastus", "tags": tags, "properties": {"ipConfigurations": [
                {"name": "c", "properties": {"subnet": {"id": subnet}, "privateIPAllocationMethod": "Dynamic"}}]}}),
        ),
        (
            machine_id.clone(),
            json!({"location": "eastus", "tags": tags, "zones": ["1"], "properties": {
                "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
                "storageProfile": {
                    "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
                    "osDisk": {"name": format!("{machine}_OSDisk"), "createOption": "FromImage", "osType": "Linux"}},
                "osProfile": {"computerName": machine, "adminUsername": "core", "adminPassword": "Aa1!aaaaaaaa"},
                "networkProfile": {"networkInterfaces": [{"id": interface, "properties": {"primary": true}}]},
            }}),
        ),
    ];
    let mut ids = Vec::new();
    for (id, body) in documents {
        let answer = world
            .sim
            .direct(http::Method::PUT, &format!("{id}?api-version=2024-07-01"), body);
        assert!(answer.status.is_success(), "{id}: {answer:?}");
        ids.push(id);
    }
    ids.push(format!("{base}/Microsoft.Compute/disks/{machine}_OSDisk"));
    ids
}

fn error_message(machine: &capstan_api::openshift::Machine) -> String {
    let status = machine.status.clone().unwrap_or_default();
    status.error_message.unwrap_or_default()
}

/// Requests that change something in Azure.
fn writes(world: &World) -> Vec<String> {
    let all = world.sim.arm_requests();
    let writes = all.iter().filter(|request| request.method != "GET");
    writes
        .map(|request| format!("{} {}?{}", request.method, request.path, request.query))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_group_that_leaves_its_place_in_a_url_is_refused_and_nothing_is_deleted() -> Result<()> {
    let world = World::new("hostile", Config::instant()).await?;
    let _controller = world.start().await?;
    let victim = world.name("victim");
    let ids = victims(&world, "capstan", &victim);
    world.sim.clear_requests();
    for (index, group) in [
        "capstan?api-version=2021-04-01&x=",
        "capstan/providers/Microsoft.Compute/virtualMachines/v?api-version=2024-07-01&x=",
        "x/../capstan",
        "..",
        "capstan#",
    ]
    .into_iter()
    .enumerate()
    {
        let name = world.name(&format!("m{index}"));
        world
            .create(world.manifest(&name, json!({"resourceGroup": group})))
            .await?;
        let machine = world.until_phase(&name, "Failed").await?;
        let message = error_message(&machine);
        assert!(
            message.contains("providerSpec.resourceGroup: Invalid value: "),
            "{message}"
        );
        let claimed = world.name(&format!("c{index}"));
        let mut manifest = world.manifest(&claimed, json!({"resourceGroup": group}));
        manifest["metadata"]["finalizers"] = json!(["machine.machine.openshift.io"]);
        manifest["spec"]["providerID"] = json!("azure:///anything");
        world.create(manifest).await?;
        for name in [name, claimed] {
            world.delete(&name).await?;
            world.until_gone(&name).await?;
        }
    }
    assert_eq!(writes(&world), Vec::<String>::new());
    for id in ids {
        world.sim.get(&id).with_context(|| format!("{id} is gone"))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_id_proves_nothing() -> Result<()> {
    let world = World::new("claimed", Config::instant()).await?;
    let _controller = world.start().await?;
    let subscription = world.sim.subscription.clone();
    let answer = world.sim.direct(
        http::Method::PUT,
        &format!("/subscriptions/{subscription}/resourceGroups/prod?api-version=2021-04-01"),
        json!({"location": "eastus"}),
    );
    assert!(answer.status.is_success(), "{answer:?}");
    let provider_id = |group: &str, name: &str| {
        format!(
            "azure:///subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{name}"
        )
    };
    for (suffix, group) in [
        ("own", "capstan"),
        ("other", "prod"),
        ("query", "prod?api-version=2021-04-01&x="),
    ] {
        let name = world.name(suffix);
        let ids = match group.contains('?') {
            true => Vec::new(),
            false => victims(&world, group, &name),
        };
        world.sim.clear_requests();
        let mut manifest = world.manifest(&name, json!({"publicIP": true}));
        manifest["metadata"]["finalizers"] = json!(["machine.machine.openshift.io"]);
        manifest["spec"]["providerID"] = json!(provider_id(group, &name));
        world.create(manifest).await?;
        world.delete(&name).await?;
        world.until_gone(&name).await?;
        assert_eq!(writes(&world), Vec::<String>::new(), "{suffix}");
        for id in ids {
            world.sim.get(&id).with_context(|| format!("{id} is gone"))?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_of_other_namespaces_are_not_used() -> Result<()> {
    let world = World::new("foreign", Config::instant()).await?;
    let _controller = world.start().await?;
    let other = world.plane.namespace("others").await?;
    let name = world.name("data");
    let over = json!({"userDataSecret": {"name": "worker-user-data", "namespace": other}});
    world.create(world.manifest(&name, over)).await?;
    let machine = world.until_phase(&name, "Failed").await?;
    let message = error_message(&machine);
    assert!(
        message.contains("providerSpec.userDataSecret.namespace: Invalid value: "),
        "{message}"
    );
    assert!(world.calls().is_empty(), "{:?}", world.calls());

    let name = world.name("account");
    let own: Api<Secret> = Api::namespaced(world.client.clone(), &world.namespace);
    let theirs: Api<Secret> = Api::namespaced(world.client.clone(), &other);
    let mut copy = Secret {
        data: own.get("azure-cloud-credentials").await?.data,
        ..Secret::default()
    };
    copy.metadata.name = Some("azure-cloud-credentials".to_owned());
    theirs.create(&PostParams::default(), &copy).await?;
    let over = json!({"credentialsSecret": {"name": "azure-cloud-credentials", "namespace": other}});
    world.create(world.manifest(&name, over)).await?;
    let message = world.event(&name, "FailedCreate").await?;
    assert!(
        message.contains("does not exist, or does not allow namespace"),
        "{message}"
    );
    assert!(world.calls().is_empty(), "{:?}", world.calls());
    let grant = json!({"metadata": {"annotations": {"capstan.dev/allowed-namespaces": world.namespace}}});
    theirs
        .patch("azure-cloud-credentials", &PatchParams::default(), &Patch::Merge(grant))
        .await?;
    world.until_phase(&name, "Provisioned").await?;
    Ok(())
}
