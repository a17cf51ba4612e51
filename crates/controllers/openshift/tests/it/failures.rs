//! Machines whose way is disturbed: work of Azure's that does not end, answers that come late or not at all.

use crate::support;

use anyhow::{Context as _, Result};
use capstan_core::interceptor::{Effect, Interceptor, System, Verdict};
use capstan_sim::azure::{Action, Config, Fault};
use http::Method;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use support::{World, phase_of};

/// More than the controller works on at the same time.
const CROWD: usize = 33;

#[tokio::test(flavor = "multi_thread")]
async fn machines_that_wait_for_azure_hold_nobody_up_and_can_go() -> Result<()> {
    let world = World::new("waiting", Config::quick()).await?;
    let stall = Fault::new(Action::Stall).method("PUT");
    world
        .sim
        .fault(stall.clone().path("networkInterfaces/.*-stuck[0-9]+-nic"))?;
    world.sim.fault(stall.path("disks/.*-disk_fast"))?;
    let _controller = world.start().await?;
    let stuck: Vec<String> = (0..CROWD).map(|n| world.name(&format!("stuck{n}"))).collect();
    for name in &stuck {
        world.create(world.manifest(name, json!({}))).await?;
    }
    let disk = world.name("disk");
    let fast = json!([{"nameSuffix": "fast", "lun": 0, "diskSizeGB": 8, "deletionPolicy": "Delete",
                       "diskIOPSReadWrite": 500, "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}]);
    world.create(world.manifest(&disk, json!({"dataDisks": fast}))).await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    for name in stuck.iter().chain([&disk, &name]) {
        world.delete(name).await?;
    }
    for name in stuck.iter().chain([&disk, &name]) {
        world.until_gone(name).await?;
    }
    for kind in ["virtualMachines", "networkInterfaces", "disks"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    Ok(())
}

/// A virtual machine as this machine's own request would have made it.
async fn made_late(world: &World, name: &str) -> Result<()> {
    let path = |provider: &str, kind: &str, name: &str| {
        let subscription = &world.sim.subscription;
        format!("/subscriptions/{subscription}/resourceGroups/capstan/providers/{provider}/{kind}/{name}")
    };
    let uid = world.machines().get(name).await?.uid().context("no uid")?;
    let nic = path("Microsoft.Network", "networkInterfaces", &format!("{name}-nic"));
    let tags = json!({"capstan-machine": format!("{}/{name}", world.namespace), "capstan-machine-uid": uid});
    let body = json!({"location": "eastus", "tags": tags, "zones": ["1"], "properties": {
        "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
        "storageProfile": {
            "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"name": format!("{name}_OSDisk"), "createOption": "FromImage", "osType": "Linux"}},
        "osProfile": {"computerName": name, "adminUsername": "core", "adminPassword": "Aa1!aaaaaaaa"},
        "networkProfile": {"networkInterfaces": [{"id": nic, "properties": {"primary": true}}]},
    }});
    let vm = path("Microsoft.Compute", "virtualMachines", name);
    let answer = world
        .sim
        .direct(Method::PUT, &format!("{vm}?api-version=2024-07-01"), body);
    assert!(answer.status.is_success(), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_machine_that_comes_after_it_was_found_to_be_gone_goes_too() -> Result<()> {
    let world = World::new("late", Config::instant()).await?;
    let unanswered = world.sim.fault(Fault::answer(504).policy("PutVM"))?;
    let held = world
        .sim
        .fault(Fault::answer(503).method("DELETE").path("networkInterfaces/"))?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.event(&name, "FailedCreate").await?;
    world.delete(&name).await?;
    world.event(&name, "FailedDelete").await?;
    world.sim.remove_fault(unanswered);
    made_late(&world, &name).await?;
    world.sim.remove_fault(held);
    world.until_gone(&name).await?;
    for kind in ["virtualMachines", "networkInterfaces", "disks"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    Ok(())
}

/// The API server takes no status of a machine the first time that there is a virtual machine to tell of.
#[derive(Default)]
struct Deaf(AtomicU8);

impl Interceptor for Deaf {
    fn before(&self, effect: &Effect) -> Verdict {
        let step = |from, to| {
            self.0
                .compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        };
        let made =
            effect.system == System::Azure && effect.method == "PUT" && effect.target.contains("/virtualMachines/");
        if made {
            step(0, 1);
        }
        if effect.system == System::Kube && effect.target.ends_with("/status") && step(1, 2) {
            return Verdict::Refuse("the api server is away".to_owned());
        }
        Verdict::Pass
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_could_not_be_written_once_is_complete_in_the_end() -> Result<()> {
    let world = World::new("deaf", Config::quick()).await?;
    let deaf = Arc::new(Deaf::default());
    let _controller = world.start_behind(vec![deaf.clone()]).await?;
    let name = world.name("m");
    let disks = json!([support::disk("data", 0, "Delete", "Premium_LRS")]);
    world
        .create(world.manifest(&name, json!({"dataDisks": disks, "publicIP": true})))
        .await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    assert_eq!(deaf.0.load(Ordering::SeqCst), 2, "a write was refused");
    let status = machine.status.unwrap_or_default();
    let kinds: Vec<&str> = status.addresses.iter().map(|address| address.type_.as_str()).collect();
    for kind in ["InternalIP", "ExternalIP", "Hostname"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let provider = status.provider_status.unwrap_or_default();
    let id = world.provider_id(&name).replace("azure://", "");
    assert!(
        provider["vmId"]
            .as_str()
            .is_some_and(|found| found.eq_ignore_ascii_case(&id)),
        "{provider}"
    );
    assert_eq!(provider["dataDisks"][0]["name"], format!("{name}_data"));
    assert_eq!(world.calls().iter().filter(|policy| **policy == "PutVM").count(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_machine_is_seen_to_be_stopped_even_if_azure_could_not_tell_at_first() -> Result<()> {
    let world = World::new("stopped", Config::instant()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    world.join(&machine).await?;
    world.until_phase(&name, "Running").await?;
    let refusal = |status, code: &str| Action::Answer {
        status,
        code: Some(code.to_owned()),
        message: Some("not now".to_owned()),
        retry_after: None,
    };
    let vm = world.vm(&name).context("no virtual machine")?;
    let id = vm["id"].as_str().unwrap_or_default();
    let stop = format!("{id}/deallocate?api-version=2024-07-01");
    assert!(world.sim.direct(Method::POST, &stop, Value::Null).status.is_success());
    let look = Fault::new(refusal(404, "SubscriptionNotFound")).policy("GetVM");
    world.sim.fault(look.times(1))?;
    let look = Fault::new(refusal(400, "BadRequest")).policy("GetVM");
    world.sim.fault(look.skip(1).times(1))?;
    // Whatever a user changes is a reason to look.
    world
        .patch(&name, json!({"metadata": {"annotations": {"look": "now"}}}))
        .await?;
    let stopped = |machine: &capstan_api::openshift::Machine| {
        let state = machine
            .annotations()
            .get("machine.openshift.io/instance-state")
            .cloned();
        let provider = machine.status.clone().and_then(|status| status.provider_status);
        state.as_deref() == Some("Deallocated") && provider.is_some_and(|provider| provider["vmState"] == "Deallocated")
    };
    let machine = world
        .until(&name, "seen to be stopped", |machine| machine.is_some_and(stopped))
        .await?
        .context("gone")?;
    assert_eq!(
        phase_of(&machine),
        "Running",
        "a machine that is stopped has not failed"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_azure_could_not_finish_is_told_and_sent_again() -> Result<()> {
    let world = World::new("undeleted", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world.create(world.manifest(&name, json!({}))).await?;
    world.until_phase(&name, "Provisioned").await?;
    world.sim.fault(
        Fault::new(Action::Stall)
            .method("DELETE")
            .path("virtualMachines/")
            .times(1),
    )?;
    world.delete(&name).await?;
    let so = |machine: Option<&capstan_api::openshift::Machine>| {
        let provider = machine.and_then(|machine| machine.status.as_ref()?.provider_status.clone());
        provider.is_some_and(|provider| provider["operation"]["method"] == "DELETE")
    };
    world.until(&name, "being deleted", so).await?;
    let failure = json!({"code": "InternalExecutionError", "message": "it did not work out"});
    let ended = world.sim.changing(|azure| {
        let stalled = azure.operations.iter().filter(|(_, operation)| operation.stalled);
        let stalled: Vec<String> = stalled.map(|(id, _)| id.clone()).collect();
        stalled
            .iter()
            .for_each(|id| azure.end_operation(id, Some(failure.clone())));
        stalled.len()
    });
    assert_eq!(ended, 1);
    let event = world.event(&name, "FailedDelete").await?;
    assert!(event.contains("it did not work out"), "{event}");
    world.until_gone(&name).await?;
    assert!(world.azure("virtualMachines").is_empty() && world.azure("networkInterfaces").is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_secrets_a_machine_waits_and_nothing_is_made() -> Result<()> {
    let world = World::new("secrets", Config::instant()).await?;
    let _controller = world.start().await?;
    let (data, account) = (world.name("data"), world.name("account"));
    world
        .create(world.manifest(&data, json!({"userDataSecret": {"name": "late"}})))
        .await?;
    let secret = json!({"credentialsSecret": {"name": "late", "namespace": "nowhere"}});
    world.create(world.manifest(&account, secret)).await?;
    for (name, text) in [
        (
            &data,
            format!("user data secret {}/late does not exist", world.namespace),
        ),
        (&account, "credentials secret nowhere/late does not exist".to_owned()),
    ] {
        let event = world.event(name, "FailedCreate").await?;
        assert!(event.contains(&text), "{event}");
    }
    assert!(world.azure("networkInterfaces").is_empty());
    world.secret("late", &[("userData", "{}".to_owned())]).await?;
    world.until_phase(&data, "Provisioned").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_provider_id_is_known_by_its_address_and_a_lost_disk_is_told() -> Result<()> {
    let world = World::new("address", Config::instant()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    let disks = json!([support::disk("keep", 0, "Detach", "Premium_LRS")]);
    // Machines of other tests in this cluster have addresses of another subnet: this Node is not theirs.
    let spec = json!({"dataDisks": disks, "subnet": "default"});
    world.create(world.manifest(&name, spec)).await?;
    let mut machine = world.until_phase(&name, "Provisioned").await?;
    machine.spec.provider_id = None;
    world.join(&machine).await?;
    let machine = world.until_phase(&name, "Running").await?;
    let node = machine
        .status
        .and_then(|status| status.node_ref)
        .and_then(|node| node.name);
    assert_eq!(node.as_deref(), Some(name.as_str()));

    let id = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/disks/{name}_keep",
        world.sim.subscription
    );
    assert!(world.sim.vanish(&id), "somebody deletes the disk");
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    let event = world.event(&name, "DataDiskMissing").await?;
    assert!(event.contains(&format!("{name}_keep was to be kept")), "{event}");
    Ok(())
}
