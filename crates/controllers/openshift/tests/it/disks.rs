//! Data disks: the proposal's stories, and what becomes of disks when their machine goes.

use crate::support;

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Action, Config, Fault};
use serde_json::{Value, json};
use support::{World, disk};

use crate::still::{Still, machine};

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

#[tokio::test(start_paused = true)]
async fn a_disk_that_outlives_its_machine_is_deleted_until_it_is_gone() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let name = "m";
    still
        .create(still.machine(name, json!({"dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]})))
        .await?;
    still.until_phase(name, "Running").await;
    stubborn_disk(&still, &format!("{name}_data"))?;
    still.delete_machine(name).await?;
    still.until_gone(name).await;
    assert!(still.resources("disks").is_empty(), "{:?}", still.resources("disks"));
    let event = still.event(name, "FailedDelete").await;
    assert!(
        event.contains(&format!("failed to delete Data Disk: {name}_data")),
        "{event}"
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_became_detach_after_its_machine_was_made_survives() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let name = "m";
    let manifest = still.machine(name, json!({"dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]}));
    let mut changed = manifest["spec"]["providerSpec"]["value"].clone();
    changed["dataDisks"][0]["deletionPolicy"] = json!("Detach");
    still.create(manifest).await?;
    still.until_phase(name, "Running").await;
    still
        .patch_machine(name, json!({"spec": {"providerSpec": {"value": changed}}}))
        .await?;
    still.delete_machine(name).await?;
    still.until_gone(name).await;
    assert_eq!(still.resources("disks"), [format!("{name}_data")]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_an_earlier_machine_left_is_named_and_waited_for() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let mut fast = disk("fast", 0, "Detach", "UltraSSD_LRS");
    fast["diskIOPSReadWrite"] = json!(500);
    for (suffix, disk) in [("data", disk("data", 0, "Detach", "Premium_LRS")), ("fast", fast)] {
        let (name, left) = (suffix, format!("{suffix}_{suffix}"));
        let manifest = still.machine(name, json!({"dataDisks": [disk]}));
        still.create(manifest.clone()).await?;
        still.until_phase(name, "Running").await;
        still.delete_machine(name).await?;
        still.until_gone(name).await;
        assert_eq!(still.resources("disks"), std::slice::from_ref(&left));

        still.create(manifest).await?;
        let remains = format!("Data Disk {left} remains from an earlier machine");
        let shown = |still: &Still| still.get("machine.openshift.io", "machines", name).unwrap_or_default();
        let reported = |still: &Still| {
            let machine = shown(still);
            let conditions = machine["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|condition| {
                let text = condition["message"].as_str().unwrap_or_default();
                condition["type"] == "InstanceExists" && text.contains(&remains)
            })
        };
        still.until("the report of what is in its way", reported).await;
        let machine = shown(&still);
        assert_eq!(machine["status"]["phase"], "Provisioning");
        assert_eq!(machine["status"]["errorMessage"], Value::Null);
        let event = still.event(name, "FailedCreate").await;
        assert!(event.contains("deletionPolicy Detach"), "{event}");
        assert_eq!(
            still.resources("disks"),
            std::slice::from_ref(&left),
            "nothing is made over it"
        );

        assert!(
            still.azure.vanish(&still_disk_id(&still, &left)),
            "an administrator deletes it"
        );
        still.until_phase(name, "Running").await;
        still.delete_machine(name).await?;
        still.until_gone(name).await;
        still.azure.vanish(&still_disk_id(&still, &left));
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_half_made_machine_leaves_nothing() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    still.azure.fault(Fault::new(Action::Stall).policy("PutVM"))?;
    let name = "m";
    still
        .create(still.machine(
            name,
            json!({"publicIP": true, "dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]}),
        ))
        .await?;
    still.until_phase(name, "Provisioning").await;
    still.delete_machine(name).await?;
    still.until_gone(name).await;
    for kind in ["virtualMachines", "networkInterfaces", "disks", "publicIPAddresses"] {
        assert!(still.resources(kind).is_empty(), "{kind}: {:?}", still.resources(kind));
    }
    Ok(())
}

fn still_disk_id(still: &Still, name: &str) -> String {
    still.id("Microsoft.Compute/disks", name)
}

/// Azure deletes the machine and leaves all disks; the first two attempts to delete this one are refused.
fn stubborn_disk(still: &Still, disk: &str) -> Result<()> {
    still.azure.fault(Fault::new(Action::KeepDisks))?;
    let refusal = Action::Answer {
        status: 400,
        code: Some("InvalidParameter".into()),
        message: Some("not now".into()),
        retry_after: None,
    };
    let refusal = Fault::new(refusal).policy("DeleteDisk").path(disk);
    still.azure.fault(refusal.times(2))?;
    Ok(())
}

async fn leaves_only(still: &Still, name: &str, kept: &str) -> Result<()> {
    still.delete_machine(name).await?;
    still.until_gone(name).await;
    let kept = format!("{name}_{kept}");
    assert_eq!(still.resources("disks"), std::slice::from_ref(&kept));
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        assert!(still.resources(kind).is_empty(), "{kind}: {:?}", still.resources(kind));
    }
    let text = still.event(name, "Deleted").await;
    assert!(
        text.contains(&format!("is kept as {}", still_disk_id(still, &kept))),
        "{text}"
    );
    assert!(
        still.azure.vanish(&still_disk_id(still, &kept)),
        "the administrator has found it"
    );
    Ok(())
}

fn three_disks() -> Value {
    let mut fast = disk("fast", 2, "Delete", "UltraSSD_LRS");
    fast["diskIOPSReadWrite"] = json!(500);
    json!([
        disk("gone", 0, "Delete", "Premium_LRS"),
        disk("kept", 1, "Detach", "Premium_LRS"),
        fast
    ])
}

/// By an edit, or by a version of the controller or of its definitions that did not know the fields.
#[tokio::test(start_paused = true)]
async fn disks_that_the_spec_lost_go_or_stay_as_they_were_made() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    for (suffix, downgraded) in [("edited", false), ("downgraded", true)] {
        let name = suffix;
        let manifest = still.machine(name, json!({"publicIP": true, "dataDisks": three_disks()}));
        still.create(manifest).await?;
        still.until_phase(name, "Running").await;
        let without = json!({"dataDisks": null, "publicIP": null});
        still
            .patch_machine(name, json!({"spec": {"providerSpec": {"value": without}}}))
            .await?;
        if downgraded {
            let mut without = machine(name);
            without["status"] = json!({"providerStatus": {"dataDisks": null}});
            still.patch_status(without).await?;
        }
        stubborn_disk(&still, &format!("{name}_gone"))?;
        leaves_only(&still, name, "kept").await?;
        let event = still.event(name, "FailedDelete").await;
        assert!(
            event.contains(&format!("failed to delete Data Disk: {name}_gone")),
            "{event}"
        );
        still.azure.clear_faults();
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_whose_virtual_machine_was_deleted_by_somebody_else_leaves_nothing() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let name = "m";
    still
        .create(still.machine(name, json!({"publicIP": true, "dataDisks": three_disks()})))
        .await?;
    let machine = still.until_phase(name, "Running").await;
    let id = machine["spec"]["providerID"].as_str().context("no provider id")?;
    let key = id.trim_start_matches("azure://").to_lowercase();
    still.azure.changing(|azure| azure.vm_removed(&key, true));
    assert_eq!(still.resources("disks").len(), 4, "all its disks are still there");
    leaves_only(&still, name, "kept").await
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_azure_could_not_finish_leaves_nothing() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let broken = Action::FailProvisioning {
        code: "OSProvisioningClientError".into(),
        message: "the image does not start".into(),
    };
    still.azure.fault(Fault::new(broken).path("virtualMachines").times(1))?;
    let name = "m";
    still
        .create(still.machine(name, json!({"publicIP": true, "dataDisks": three_disks()})))
        .await?;
    let machine = still.until_phase(name, "Failed").await;
    let message = machine["status"]["errorMessage"].as_str().unwrap_or_default();
    assert!(
        message.contains(r#"Code="OSProvisioningClientError" Message="the image does not start""#),
        "{message}"
    );
    let id = still.id("Microsoft.Compute/virtualMachines", name);
    let vm = still.azure.get(&id).context("no virtual machine")?;
    assert_eq!(vm["properties"]["provisioningState"], "Failed");
    stubborn_disk(&still, &format!("{name}_gone"))?;
    leaves_only(&still, name, "kept").await
}

/// While the webhook was away.
#[tokio::test(start_paused = true)]
async fn a_machine_whose_spec_became_unreadable_leaves_nothing() -> Result<()> {
    let still = Still::new(Config::quick()).await?;
    let _controller = still.start(None)?;
    let name = "m";
    still
        .create(still.machine(name, json!({"dataDisks": three_disks()})))
        .await?;
    still.until_phase(name, "Running").await;
    let garbled = json!({"dataDisks": "none", "publicIP": "no", "resourceGroup": "elsewhere"});
    still
        .patch_machine(name, json!({"spec": {"providerSpec": {"value": garbled}}}))
        .await?;
    leaves_only(&still, name, "kept").await
}
