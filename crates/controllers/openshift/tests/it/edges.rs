//! Azure's edges: roles that may not read, groups that are not there, resources of machines that never came.

use crate::support::{World, disk};

use anyhow::Result;
use capstan_sim::azure::{Action, Config, Fault, Network, OPENSHIFTS_ROLE};
use serde_json::json;

fn answer(status: u16, code: &str) -> Action {
    Action::Answer {
        status,
        code: Some(code.into()),
        message: Some("as the test asks".into()),
        retry_after: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_openshifts_own_role_a_machine_leaves_nothing_and_says_what_nobody_saw() -> Result<()> {
    let config = Config {
        allowed_actions: Some(OPENSHIFTS_ROLE.map(ToOwned::to_owned).to_vec()),
        ..Config::instant()
    };
    let world = World::new("role", config).await?;
    // Azure leaves the disks behind, so that somebody has to delete them.
    world.sim.fault(Fault::new(Action::KeepDisks))?;
    let _controller = world.start().await?;
    let name = world.name("m");
    let disks = json!([
        disk("gone", 0, "Delete", "Premium_LRS"),
        disk("keep", 1, "Detach", "Premium_LRS")
    ]);
    world
        .create(world.manifest(&name, json!({"dataDisks": disks, "publicIP": true})))
        .await?;
    world.until_phase(&name, "Provisioned").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    let refused: Vec<String> = world
        .sim
        .arm_requests()
        .iter()
        .filter(|request| request.status == 403)
        .map(|request| format!("{} {}", request.method, request.path))
        .collect();
    assert!(
        refused
            .iter()
            .all(|request| request.contains("/disks") || request.ends_with("/usages")),
        "more than OpenShift's role allows: {refused:?}"
    );
    assert_eq!(world.azure("disks"), [format!("{name}_keep")]);
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    let event = world.event(&name, "DiskDeletionUnverified").await?;
    assert!(event.contains("Microsoft.Compute/disks/read"), "{event}");
    let last = world.event(&name, "Deleted").await?;
    assert!(
        last.contains(&format!("is kept as /subscriptions/{}", world.sim.subscription))
            && last.contains(&format!("/disks/{name}_keep, which the account may not read")),
        "{last}"
    );
    let events = world.events(&name).await?;
    let told = events.iter().filter(|(reason, _)| reason == "DiskDeletionUnverified");
    assert_eq!(told.count(), 1, "{events:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_group_that_is_not_there_keeps_no_machine() -> Result<()> {
    let world = World::new("nogroup", Config::instant()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world
        .create(world.manifest(
            &name,
            json!({"resourceGroup": "not-there", "networkResourceGroup": "capstan"}),
        ))
        .await?;
    world.event(&name, "FailedCreate").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_made_for_a_virtual_machine_that_never_came_do_not_stay() -> Result<()> {
    let world = World::new("premade", Config::instant()).await?;
    let _controller = world.start().await?;
    world
        .sim
        .fault(Fault::new(answer(400, "InvalidParameter")).policy("PutVM"))?;
    let name = world.name("m");
    let mut fast = disk("fast", 0, "Detach", "UltraSSD_LRS");
    fast["diskIOPSReadWrite"] = json!(500);
    world
        .create(world.manifest(&name, json!({"dataDisks": [fast]})))
        .await?;
    world.until_phase(&name, "Failed").await?;
    assert_eq!(world.azure("disks"), [format!("{name}_fast")]);
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("disks").is_empty(), "{:?}", world.azure("disks"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_address_that_the_spec_lost_before_the_virtual_machine_came_does_not_stay() -> Result<()> {
    let world = World::new("address", Config::instant()).await?;
    let _controller = world.start().await?;
    let quota = world
        .sim
        .fault(Fault::new(answer(409, "OperationNotAllowed")).policy("PutVM"))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({"publicIP": true}))).await?;
    world.event(&name, "FailedCreate").await?;
    assert_eq!(world.azure("publicIPAddresses"), [format!("c-{name}")]);
    let patch = json!({"spec": {"providerSpec": {"value": {"publicIP": false}}}});
    world.patch(&name, patch).await?;
    world.sim.remove_fault(quota);
    world.until_phase(&name, "Provisioned").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("publicIPAddresses").is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_before_the_drain_does_not_hold_a_machine_that_has_nothing_to_drain() -> Result<()> {
    let world = World::new("hook", Config::instant()).await?;
    let _controller = world.start().await?;
    world
        .sim
        .fault(Fault::new(answer(400, "InvalidParameter")).policy("PutVM"))?;
    let name = world.name("m");
    let mut manifest = world.manifest(&name, json!({}));
    manifest["spec"]["lifecycleHooks"] = json!({"preDrain": [{"name": "EtcdQuorum", "owner": "etcd"}]});
    world.create(manifest).await?;
    world.until_phase(&name, "Failed").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("networkInterfaces").is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_availability_set_that_is_there_is_used_as_it_is() -> Result<()> {
    let world = World::new("avsetkept", Config::instant()).await?;
    let _controller = world.start().await?;
    world.sim.network(&Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Network::default()
    });
    // As the controller before made it: with as many fault domains as the region has, which cannot change.
    let id = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/availabilitySets/c_workers-as",
        world.sim.subscription
    );
    let body = json!({"location": "westus", "sku": {"name": "Aligned"},
        "properties": {"platformFaultDomainCount": 3, "platformUpdateDomainCount": 5}});
    let path = format!("{id}?api-version=2024-07-01");
    let answer = world.sim.direct(http::Method::PUT, &path, body);
    assert!(answer.status.is_success(), "{answer:?}");
    world.sim.clear_requests();
    let name = world.name("m");
    let west = json!({"location": "westus", "zone": "", "vnet": "west-vnet"});
    let mut manifest = world.manifest(&name, west);
    manifest["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
    world.create(manifest).await?;
    world.until_phase(&name, "Provisioned").await?;
    assert!(!world.calls().contains(&"PutAvailabilitySet"), "{:?}", world.calls());
    let set = world.sim.get(&id).unwrap_or_default();
    assert_eq!(set["properties"]["platformFaultDomainCount"], 3);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interface_that_ends_failed_is_requested_again() -> Result<()> {
    let world = World::new("badnic", Config::instant()).await?;
    let _controller = world.start().await?;
    let failed = Action::FailProvisioning {
        code: "InternalServerError".into(),
        message: "as the test asks".into(),
    };
    world
        .sim
        .fault(Fault::new(failed).path("networkInterfaces/").times(1))?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    let event = world.event(&name, "FailedCreate").await?;
    assert!(event.contains(&format!("failed to create nic {name}-nic")), "{event}");
    let id = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Network/networkInterfaces/{name}-nic",
        world.sim.subscription
    );
    let nic = world.sim.get(&id).unwrap_or_default();
    assert_eq!(nic["properties"]["provisioningState"], "Succeeded");
    Ok(())
}
