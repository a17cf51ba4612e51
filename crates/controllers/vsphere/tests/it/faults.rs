//! What goes wrong with a vCenter, and what a user sees of it: every fault is told with its reason and got over.

use crate::world;

use std::time::Duration;

use anyhow::{Context, Result};
use capstan_api::vsphere::{VSphereMachine, VSphereVM};
use capstan_core::interceptor::Interceptors;
use capstan_testkit::vcsim::{Fault, Options};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use world::{World, disks, spec};

fn data_disks(number: usize) -> Value {
    (0..number)
        .map(|n| json!({"name": format!("d{n}"), "sizeGiB": n + 1, "provisioningMode": "Thin"}))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_told_without_the_password_and_a_new_secret_is_enough() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    let secrets = world.api::<Secret>();
    let set = |password: &str| {
        let secret = json!({"stringData": {"password": password}});
        let secrets = secrets.clone();
        async move {
            secrets
                .patch("vcenter", &PatchParams::default(), &Patch::Merge(secret))
                .await
                .map(|_| ())
        }
    };
    let (right, wrong) = (world.vcsim.password.clone(), "not-the-secret");
    world.crash().await;
    set(wrong).await?;
    world.vcsim.admin.reset_counters().await?;
    world.ledger.clear();
    let started = std::time::Instant::now();
    world.run(Interceptors::new(vec![world.ledger.clone()])).await?;
    let names: Vec<String> = (0..5).map(|n| format!("m{n}")).collect();
    for name in &names {
        world
            .machine(name, spec("pvscsi", json!({"dataDisks": data_disks(1)})))
            .await?;
    }
    for name in &names {
        let message = world.condition_of_vm(name, "refused the login").await?;
        assert!(
            message.contains("check user name and password") && !message.contains(wrong),
            "{message}"
        );
    }
    // A refused password is tried again after a minute at the earliest, by however many machines it is wanted.
    let minutes = started.elapsed().as_secs() / 60;
    let logins = world.vcsim.admin.counters().await?["Login"];
    assert!(
        logins <= 1 + minutes,
        "{logins} logins: the account may be locked by retries"
    );
    let corrected = std::time::Instant::now();
    set(&right).await?;
    for name in &names {
        let ready = |machine: &VSphereMachine| machine.status.as_ref().is_some_and(|status| status.ready);
        world.until::<VSphereMachine>(name, ready).await?;
    }
    println!("up {:?} after the password was put right", corrected.elapsed());
    let minutes = started.elapsed().as_secs() / 60;
    let logins = world.vcsim.admin.counters().await?["Login"];
    assert!(
        logins <= 2 + minutes,
        "{logins} logins: one with the right password is enough"
    );
    let mut read = world.ledger.about("/secrets/vcenter");
    read.retain(|line| line.starts_with("GET"));
    assert!(read.is_empty(), "the secret is watched and not read again: {read:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_come_up_through_a_restart_of_vcenter_and_through_dropped_sessions() -> Result<()> {
    let world = World::start(Options {
        clone_delay: Duration::from_millis(1500),
        ..Options::default()
    })
    .await?;
    for (round, restart) in [("a", false), ("b", true)] {
        let names: Vec<String> = (0..6).map(|n| format!("{round}{n}")).collect();
        for name in &names {
            world
                .machine(name, spec("pvscsi", json!({"dataDisks": data_disks(1)})))
                .await?;
        }
        for name in &names {
            world
                .until::<VSphereVM>(name, |vm| {
                    vm.status.as_ref().is_some_and(|s| s.task_ref.is_some() || s.ready)
                })
                .await?;
        }
        match restart {
            true => world.vcsim.admin.restart(Duration::from_secs(2)).await?,
            false => world.vcsim.admin.drop_sessions().await?,
        }
        for name in &names {
            let (_, _, info) = world.ready(name).await?;
            assert_eq!(disks(&info).len(), 2);
        }
    }
    assert_eq!(
        world.vcsim.admin.counters().await?["CloneVM_Task"],
        12,
        "nobody was cloned twice"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_clone_shows_its_reason_word_for_word_and_is_tried_again() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let reason = "The operation failed because the host 'esx-7' lost its connection to the storage array.";
    let fault = Fault {
        name: "m".into(),
        ..Fault::task("CloneVM_Task", "HostCommunication", reason)
    };
    world.vcsim.admin.inject(&fault).await?;
    world
        .machine("m", spec("pvscsi", json!({"dataDisks": data_disks(2)})))
        .await?;
    let (_, vm, info) = world.ready("m").await?;
    assert_eq!(disks(&info).len(), 3);
    assert!(vm.status.unwrap().task_ref.is_none());
    let events = world.events("m").await?;
    assert!(events.iter().any(|(_, message)| message.contains(reason)), "{events:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_vcenter_refuses_again_and_again_is_tried_less_and_less_often() -> Result<()> {
    const LOOKED: Duration = Duration::from_secs(10);
    let world = World::start(Options::default()).await?;
    let reason = "The host 'esx-7' does not respond.";
    let failing = Fault::task("CloneVM_Task", "HostCommunication", reason);
    let hidden = Fault::call("CloneVM_Task", "DuplicateName", "The name 'hidden' already exists.");
    let late = Fault::task("CloneVM_Task", "DuplicateName", "The name 'late' already exists.");
    for (name, fault) in [("failing", failing), ("hidden", hidden), ("late", late)] {
        let name = name.into();
        let fault = Fault {
            name,
            times: 0,
            ..fault
        };
        world.vcsim.admin.inject(&fault).await?;
    }
    let started = std::time::Instant::now();
    for name in ["failing", "hidden", "late"] {
        world.machine(name, spec("pvscsi", json!({}))).await?;
    }
    world.condition_of_vm("failing", "does not respond").await?;
    for name in ["hidden", "late"] {
        world
            .condition_of_vm(name, "no virtual machine of that name can be seen")
            .await?;
    }
    tokio::time::sleep(LOOKED).await;
    // After one second, two, four and so on: seven tries of each fit into a minute.
    let minutes = 1 + started.elapsed().as_secs() / 60;
    let clones = world.vcsim.admin.counters().await?["CloneVM_Task"];
    assert!(
        (3..=3 * 7 * minutes).contains(&clones),
        "{clones} clones in {minutes} minutes"
    );
    for name in ["failing", "hidden", "late"] {
        let mut told = world.events(name).await?;
        told.retain(|(reason, _)| reason == "CloningFailed");
        assert_eq!(told.len(), 1, "the same is told once: {told:?}");
    }
    world.vcsim.admin.clear_faults().await?;
    for name in ["failing", "hidden", "late"] {
        world.ready(name).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_never_makes_a_second_machine() -> Result<()> {
    let world = World::start(Options {
        clone_delay: Duration::from_millis(500),
        ..Options::default()
    })
    .await?;
    for method in ["CloneVM_Task", "ReconfigVM_Task", "PowerOnVM_Task"] {
        let lost = Fault {
            method: method.into(),
            kind: "lose-answer".into(),
            times: 1,
            ..Fault::default()
        };
        world.vcsim.admin.inject(&lost).await?;
    }
    world
        .machine("m", spec("pvscsi", json!({"dataDisks": data_disks(2)})))
        .await?;
    let (machine, vm, info) = world.ready("m").await?;
    assert_eq!(Some(info.instance_uuid.clone()), vm.uid());
    assert_eq!(machine.spec.provider_id, Some(format!("vsphere://{}", info.bios_uuid)));
    assert_eq!(disks(&info).len(), 3);
    world.delete("m").await?;
    let vcenter = world.vcenter().await?;
    let datacenter = vcenter.datacenter(None).await?;
    assert!(
        vcenter.find_child(&datacenter.vm_folder, "m").await?.is_none(),
        "nothing is left behind"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_in_the_inventory_is_named() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let cases = [
        (
            "template",
            json!({"template": "no-such-template"}),
            "template \"no-such-template\" does not exist",
        ),
        (
            "datastore",
            json!({"datastore": "no-such-store"}),
            "datastore \"no-such-store\" does not exist",
        ),
        (
            "folder",
            json!({"folder": "/DC0/vm/none"}),
            "folder \"/DC0/vm/none\" does not exist",
        ),
        (
            "pool",
            json!({"resourcePool": "none"}),
            "resource pool \"none\" does not exist",
        ),
        (
            "policy",
            json!({"storagePolicyName": "none"}),
            "storage policy \"none\" does not exist",
        ),
        (
            "network",
            json!({"network": {"devices": [{"networkName": "none", "dhcp4": true}]}}),
            "network \"none\"",
        ),
    ];
    for (name, extra, _) in &cases {
        world.machine(name, spec("pvscsi", extra.clone())).await?;
    }
    for (name, _, text) in cases {
        world.condition_of_vm(name, text).await?;
    }
    assert!(
        !world.vcsim.admin.counters().await?.contains_key("CloneVM_Task"),
        "nothing was cloned"
    );
    // What was never made is deleted without ado.
    world.delete("template").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_to_sixty_disks_on_every_type_of_controller() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let cases = [
        ("pvscsi", 60),
        ("pvscsi", 1),
        ("pvscsi-13", 14),
        ("lsi", 14),
        ("lsisas", 7),
        ("sata", 29),
        ("nvme", 14),
        ("nvme-21", 60),
        ("ide", 1),
        ("two-disks", 16),
    ];
    for (n, (template, number)) in cases.iter().enumerate() {
        world
            .machine(
                &format!("m{n}"),
                spec(template, json!({"dataDisks": data_disks(*number)})),
            )
            .await?;
    }
    for (n, (template, number)) in cases.iter().enumerate() {
        let (_, vm, info) = world.ready(&format!("m{n}")).await?;
        let own = if *template == "two-disks" { 2 } else { 1 };
        let found = disks(&info);
        assert_eq!(found.len(), own + number, "{template}");
        let sizes: Vec<i64> = found.iter().skip(own).map(|disk| disk.1).collect();
        assert_eq!(
            sizes,
            (1..=*number as i64).collect::<Vec<_>>(),
            "{template}: in the order of the spec"
        );
        let listed = vm.status.context("no status")?.data_disks;
        assert_eq!(listed.len(), *number);
        assert!(
            listed.iter().all(|disk| disk.uuid.is_some()),
            "{template}: every disk can be told from the others"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_lost_in_vcenter_is_not_cloned_again_and_the_condition_says_so() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    let (_, vm, info) = world.ready("m").await?;
    let vcenter = world.vcenter().await?;
    vcenter.power_off(&info.reference).await?.wait().await?;
    vcenter.destroy(&info.reference).await?.wait().await?;
    world.vcsim.admin.reset_counters().await?;
    // An annotation asks for a reconcile now instead of at the next resync.
    let now = json!({"metadata": {"annotations": {"example.com/look": "now"}}});
    world
        .api::<VSphereVM>()
        .patch("m", &PatchParams::default(), &Patch::Merge(now))
        .await?;
    let lost = |vm: &VSphereVM| {
        let status = vm.status.clone().unwrap_or_default();
        let condition = status.conditions.iter().find(|c| c.type_ == "VMProvisioned").cloned();
        condition.is_some_and(|c| c.status == "False" && c.reason.as_deref() == Some("NotFoundByBIOSUUID"))
    };
    world.until::<VSphereVM>("m", lost).await?;
    let calls = world.vcsim.admin.counters().await?;
    assert!(!calls.contains_key("CloneVM_Task"), "{calls:?}");
    assert!(world.in_vcenter(&vm).await?.is_none());
    let provisioned = |machine: &VSphereMachine| {
        let status = machine.status.clone().unwrap_or_default();
        let mut conditions = status.conditions.iter();
        conditions
            .any(|c| c.type_ == "Ready" && c.status == "False" && c.reason.as_deref() == Some("NotFoundByBIOSUUID"))
    };
    world.until::<VSphereMachine>("m", provisioned).await?;
    world.delete("m").await
}
