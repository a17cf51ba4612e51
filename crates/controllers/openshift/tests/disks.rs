//! Data disks: the proposal's stories, and what becomes of disks when their machine goes.

mod support;

use anyhow::Result;
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

fn disk_of(world: &World, name: &str) -> Value {
    let id = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/disks/{name}",
        world.sim.subscription
    );
    world.sim.get(&id).unwrap_or_default()
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
