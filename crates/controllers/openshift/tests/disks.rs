//! Data disks: the proposal's stories, and what becomes of disks when their machine goes.

mod support;

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Action, Config, Fault};
use serde_json::{Value, json};
use support::{World, disk};

#[tokio::test(flavor = "multi_thread")]
async fn ultra_disks_get_their_capability_performance_and_user_data() -> Result<()> {
    let world = World::new("ultra", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    let mut fast = disk("fast", 1, "Delete", "PremiumV2_LRS");
    fast["diskSizeGB"] = json!(100);
    fast["diskIOPSReadWrite"] = json!(5000);
    fast["diskMBpsReadWrite"] = json!(200);
    let mut ultra = disk("ultrassd", 0, "Detach", "UltraSSD_LRS");
    ultra["cachingType"] = json!("None");
    let mut manifest = world.manifest(&name, json!({"dataDisks": [ultra, fast]}));
    manifest["metadata"]["annotations"] = json!({"capstan.dev/disk-mounts": "lun0:/var/lib/etcd:xfs"});
    world.create(manifest).await?;
    world.until_phase(&name, "Provisioned").await?;

    let vm = world.vm(&name).unwrap();
    assert_eq!(vm["properties"]["additionalCapabilities"]["ultraSSDEnabled"], true);
    let attached = vm["properties"]["storageProfile"]["dataDisks"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(attached.len(), 2);
    let fast = disk_of(&world, &format!("{name}_fast"));
    assert_eq!(
        (&fast["properties"]["diskIOPSReadWrite"], &fast["sku"]["name"]),
        (&json!(5000), &json!("PremiumV2_LRS"))
    );
    let user_data = world.sim.custom_data(vm["id"].as_str().unwrap()).unwrap();
    let user_data = String::from_utf8(base64_decode(&user_data))?;
    assert!(
        user_data.contains("/var/lib/etcd") && user_data.contains("scsi1/lun0"),
        "{user_data}"
    );

    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert_eq!(world.azure("disks"), [format!("{name}_ultrassd")]);
    Ok(())
}

fn disk_id(world: &World, name: &str) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/disks/{name}",
        world.sim.subscription
    )
}

fn disk_of(world: &World, name: &str) -> Value {
    world.sim.get(&disk_id(world, name)).unwrap_or_default()
}

fn base64_decode(text: &str) -> Vec<u8> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_is_passed_on_as_it_is() -> Result<()> {
    let world = World::new("userdata", Config::instant()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    let custom = world
        .sim
        .custom_data(world.vm(&name).unwrap()["id"].as_str().unwrap())
        .unwrap();
    assert_eq!(base64_decode(&custom), br#"{"ignition":{"version":"3.2.0"}}"#);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_outlives_its_machine_is_deleted_until_it_is_gone() -> Result<()> {
    let world = World::new("outlive", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world
        .create(world.manifest(&name, json!({"dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]})))
        .await?;
    world.until_phase(&name, "Provisioned").await?;
    world.sim.fault(Fault::new(Action::KeepDisks))?;
    let refusal = Action::Answer {
        status: 400,
        code: Some("InvalidParameter".into()),
        message: Some("not now".into()),
        retry_after: None,
    };
    world
        .sim
        .fault(Fault::new(refusal).policy("DeleteDisk").path("_data").times(2))?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("disks").is_empty(), "{:?}", world.azure("disks"));
    let event = world.event(&name, "FailedDelete").await?;
    assert!(
        event.contains(&format!("failed to delete Data Disk: {name}_data")),
        "{event}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_became_detach_after_its_machine_was_made_survives() -> Result<()> {
    let world = World::new("spare", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    let manifest = world.manifest(&name, json!({"dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]}));
    let mut changed = manifest["spec"]["providerSpec"]["value"].clone();
    changed["dataDisks"][0]["deletionPolicy"] = json!("Detach");
    world.create(manifest).await?;
    world.until_phase(&name, "Provisioned").await?;
    world
        .patch(&name, json!({"spec": {"providerSpec": {"value": changed}}}))
        .await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert_eq!(world.azure("disks"), [format!("{name}_data")]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_an_earlier_machine_left_is_named_and_waited_for() -> Result<()> {
    let world = World::new("left", Config::quick()).await?;
    let _controller = world.start().await?;
    let mut fast = disk("fast", 0, "Detach", "UltraSSD_LRS");
    fast["diskIOPSReadWrite"] = json!(500);
    for (suffix, disk) in [("data", disk("data", 0, "Detach", "Premium_LRS")), ("fast", fast)] {
        let name = world.name(suffix);
        let left = format!("{name}_{suffix}");
        let manifest = world.manifest(&name, json!({"dataDisks": [disk]}));
        world.create(manifest.clone()).await?;
        world.until_phase(&name, "Provisioned").await?;
        world.delete(&name).await?;
        world.until_gone(&name).await?;
        assert_eq!(world.azure("disks"), std::slice::from_ref(&left));

        world.create(manifest).await?;
        let told = |machine: Option<&capstan_api::openshift::Machine>| {
            let conditions = machine.and_then(|machine| Some(&machine.status.as_ref()?.conditions));
            conditions.into_iter().flatten().any(|condition| {
                let text = condition.message.as_deref().unwrap_or_default();
                condition.type_ == "InstanceExists"
                    && text.contains(&format!("Data Disk {left} remains from an earlier machine"))
            })
        };
        let machine = world
            .until(&name, "told what is in its way", told)
            .await?
            .context("it is gone")?;
        assert_eq!(support::phase_of(&machine), "Provisioning");
        assert_eq!(machine.status.and_then(|status| status.error_message), None);
        let event = world.event(&name, "FailedCreate").await?;
        assert!(event.contains("deletionPolicy Detach"), "{event}");
        assert_eq!(
            world.azure("disks"),
            std::slice::from_ref(&left),
            "nothing is made over it"
        );

        assert!(world.sim.vanish(&disk_id(&world, &left)), "an administrator deletes it");
        world.until_phase(&name, "Provisioned").await?;
        world.delete(&name).await?;
        world.until_gone(&name).await?;
        world.sim.vanish(&disk_id(&world, &left));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_made_machine_leaves_nothing() -> Result<()> {
    let world = World::new("half", Config::quick()).await?;
    let _controller = world.start().await?;
    world.sim.fault(Fault::new(Action::Stall).policy("PutVM"))?;
    let name = world.name("m");
    world
        .create(world.manifest(
            &name,
            json!({"publicIP": true, "dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]}),
        ))
        .await?;
    world.until_phase(&name, "Provisioning").await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    for kind in ["virtualMachines", "networkInterfaces", "disks", "publicIPAddresses"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    Ok(())
}
