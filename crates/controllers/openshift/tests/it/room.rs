//! Sizes, quotas, fault domains and accounts: what a region has room for, and what other writers do meanwhile. Under paused
//! time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use capstan_sim::azure::{Action, Config, Fault, Network, OPENSHIFTS_ROLE};
use http::Method;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const API: &str = "machine.openshift.io";
const SET_LABEL: &str = "machine.openshift.io/cluster-api-machineset";
const SETS: &str = "Microsoft.Compute/availabilitySets";
const VMS: &str = "Microsoft.Compute/virtualMachines";
const MINUTE: Duration = Duration::from_secs(60);

fn phase(still: &Still, name: &str) -> String {
    let machine = still.get(API, "machines", name).unwrap_or_default();
    machine["status"]["phase"].as_str().unwrap_or_default().to_owned()
}

/// The message of the condition InstanceExists.
fn reason(still: &Still, name: &str) -> String {
    let machine = still.get(API, "machines", name).unwrap_or_default();
    let conditions = machine["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions
        .iter()
        .find(|condition| condition["type"] == "InstanceExists");
    let message = found.and_then(|condition| condition["message"].as_str());
    message.unwrap_or_default().to_owned()
}

fn named(name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name}})
}

/// Requests whose path ends with this.
fn asked(still: &Still, end: &str) -> usize {
    let requests = still.azure.arm_requests();
    requests.iter().filter(|request| request.path.ends_with(end)).count()
}

#[tokio::test(start_paused = true)]
async fn a_size_without_scsi_gets_nvme_and_its_disks_are_mounted_by_the_device_that_it_shows() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let disks = json!([{"nameSuffix": "etcd", "lun": 3, "diskSizeGB": 8, "deletionPolicy": "Delete"}]);
    let sizes = [
        (
            "new",
            "Standard_D4ds_v6",
            json!("NVMe"),
            "/dev/disk/azure/data/by-lun/3",
        ),
        ("old", "Standard_D4s_v3", Value::Null, "/dev/disk/azure/scsi1/lun3"),
    ];
    for (name, size, controller, device) in sizes {
        let mut machine = still.machine(name, json!({"vmSize": size, "dataDisks": disks}));
        machine["metadata"]["annotations"] = json!({"capstan.dev/disk-mounts": "lun3:/var/lib/etcd:xfs"});
        still.create(machine).await?;
        still.until_phase(name, "Running").await;
        let id = still.id(VMS, name);
        let vm = still.azure.get(&id).context("no virtual machine")?;
        assert_eq!(vm["properties"]["storageProfile"]["diskControllerType"], controller);
        let data = still.azure.custom_data(&id).context("no user data")?;
        let data = String::from_utf8(base64::engine::general_purpose::STANDARD.decode(data)?)?;
        assert!(data.contains(device), "{data}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_ephemeral_disk_is_kept_where_the_spec_says_and_refused_where_the_size_has_no_such_place() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let spec = |placement: &str| {
        let settings = json!({"ephemeralStorageLocation": "Local", "placement": placement});
        let os = json!({"osType": "Linux", "diskSizeGB": 64, "cachingType": "ReadOnly", "diskSettings": settings,
            "managedDisk": {"storageAccountType": "Standard_LRS"}});
        json!({"vmSize": "Standard_D4ds_v6", "osDisk": os})
    };
    still.create(still.machine("m", spec("NvmeDisk"))).await?;
    still.create(still.machine("bad", spec("CacheDisk"))).await?;
    still.until_phase("m", "Running").await;
    let vm = still.azure.get(&still.id(VMS, "m")).context("no virtual machine")?;
    let settings = &vm["properties"]["storageProfile"]["osDisk"]["diffDiskSettings"];
    assert_eq!(*settings, json!({"option": "Local", "placement": "NvmeDisk"}));
    let failed = still.until_phase("bad", "Failed").await;
    let message = failed["status"]["errorMessage"].as_str().unwrap_or_default();
    assert!(
        message.contains("vm size Standard_D4ds_v6 cannot keep an ephemeral os disk on CacheDisk"),
        "{message}"
    );
    assert_eq!(still.resources("networkInterfaces"), ["m-nic"]);
    Ok(())
}

/// A machine of the set `workers` in a region without zones.
fn of_set(still: &Still, name: &str) -> Value {
    let mut machine = still.machine(name, json!({"location": "westus", "zone": "", "vnet": "west-vnet"}));
    machine["metadata"]["labels"][SET_LABEL] = json!("workers");
    machine
}

async fn in_the_west() -> Result<Still> {
    let still = Still::new(Config::instant()).await?;
    still.azure.network(&Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Network::default()
    });
    Ok(still)
}

fn given_set(still: &Still, name: &str, tags: &Value) {
    let body = json!({"location": "westus", "sku": {"name": "Aligned"}, "tags": tags,
        "properties": {"platformFaultDomainCount": 2, "platformUpdateDomainCount": 5}});
    let path = format!("{}?api-version=2024-07-01", still.id(SETS, name));
    assert!(still.azure.direct(Method::PUT, &path, body).status.is_success());
}

fn set_of(still: &Still, machine: &str) -> String {
    let vm = still.azure.get(&still.id(VMS, machine)).unwrap_or_default();
    let id = vm["properties"]["availabilitySet"]["id"].as_str().unwrap_or_default();
    id.rsplit('/').next().unwrap_or_default().to_owned()
}

#[tokio::test(start_paused = true)]
async fn an_availability_set_has_as_many_fault_domains_as_its_region() -> Result<()> {
    for (location, domains) in [("westus", 3), ("ukwest", 2), ("onerack", 1)] {
        let still = Still::new(Config::instant()).await?;
        still.azure.network(&Network {
            location: location.into(),
            vnet: "west-vnet".into(),
            ..Network::default()
        });
        let _running = still.start(Some(NAMESPACE))?;
        let mut machine = of_set(&still, "m");
        machine["spec"]["providerSpec"]["value"]["location"] = json!(location);
        still.create(machine).await?;
        still.until_phase("m", "Running").await;
        let set = still.azure.get(&still.id(SETS, "c_workers-as")).context("no set")?;
        assert_eq!(set["properties"]["platformFaultDomainCount"], domains, "{location}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_availability_set_is_found_under_its_earlier_name_and_goes_with_its_last_machine() -> Result<()> {
    let still = in_the_west().await?;
    given_set(&still, "workers-as", &json!({"kubernetes.io-cluster-c": "owned"}));
    let _running = still.start(Some(NAMESPACE))?;
    still.create(of_set(&still, "m")).await?;
    still.until_phase("m", "Running").await;
    assert_eq!(set_of(&still, "m"), "workers-as");
    assert_eq!(still.resources("availabilitySets"), ["workers-as"]);
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    assert!(still.resources("availabilitySets").is_empty());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_whose_availability_set_went_with_another_is_tried_again() -> Result<()> {
    let still = in_the_west().await?;
    let _running = still.start(Some(NAMESPACE))?;
    let gone = Action::Answer {
        status: 404,
        code: Some("NotFound".into()),
        message: Some("Availability set 'c_workers-as' could not be found.".into()),
        retry_after: None,
    };
    still.azure.fault(Fault::new(gone).policy("PutVM").times(1))?;
    still.create(of_set(&still, "m")).await?;
    still.until_phase("m", "Running").await;
    assert_eq!(set_of(&still, "m"), "c_workers-as");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn quota_is_asked_before_anything_is_made_once_for_many_machines() -> Result<()> {
    let still = Still::new(Config {
        family_cores: Some(8),
        ..Config::instant()
    })
    .await?;
    let _running = still.start(Some(NAMESPACE))?;
    for name in ["a", "b"] {
        still.create(still.machine(name, json!({}))).await?;
    }
    for name in ["a", "b"] {
        still.until_phase(name, "Running").await;
    }
    assert_eq!(
        asked(&still, "/usages"),
        1,
        "one answer serves all machines of a region"
    );
    tokio::time::sleep(MINUTE).await;
    still.create(still.machine("c", json!({}))).await?;
    still
        .until("a reason", |still| reason(still, "c").contains("quota exceeded"))
        .await;
    let text = reason(&still, "c");
    for part in [
        "standardDSv3Family",
        "limit 8, used 8",
        "needs 4 more",
        "request a higher quota",
    ] {
        assert!(text.contains(part), "{text}");
    }
    tokio::time::sleep(MINUTE * 10).await;
    assert_eq!(phase(&still, "c"), "Provisioning");
    assert_eq!(
        still.resources("networkInterfaces"),
        ["a-nic", "b-nic"],
        "nothing is made without quota"
    );
    still.delete(named("a")).await?;
    still.until_phase("c", "Running").await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_account_that_may_not_read_quotas_creates_machines_and_is_asked_once() -> Result<()> {
    let still = Still::new(Config {
        allowed_actions: Some(OPENSHIFTS_ROLE.map(ToOwned::to_owned).to_vec()),
        ..Config::instant()
    })
    .await?;
    let _running = still.start(Some(NAMESPACE))?;
    for name in ["a", "b", "c"] {
        still.create(still.machine(name, json!({}))).await?;
        still.until_phase(name, "Running").await;
    }
    assert_eq!(asked(&still, "/usages"), 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_names_another_subscription_fails_no_running_machine() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let other = "00000000-1111-4222-8333-444444444444";
    // The other subscription can be read, and has no such group.
    let missing = Action::Answer {
        status: 404,
        code: Some("ResourceGroupNotFound".into()),
        message: Some("Resource group 'capstan' could not be found.".into()),
        retry_after: None,
    };
    still.azure.fault(Fault::new(missing).path(other))?;
    let secret = |id: &str| {
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "azure-cloud-credentials"},
        "stringData": {"azure_subscription_id": id}})
    };
    still.patch(secret(other)).await?;
    // Several times as long as it takes until every machine is compared with Azure.
    tokio::time::sleep(MINUTE * 45).await;
    assert_eq!(phase(&still, "m"), "Running");
    still.patch(secret(&still.azure.subscription)).await?;
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    assert!(still.resources("virtualMachines").is_empty());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_detached_while_a_disk_is_spared_stays_detached() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let disks = |policy: &str| json!({"dataDisks": [{"nameSuffix": "data", "lun": 0, "diskSizeGB": 8, "deletionPolicy": policy}]});
    still.create(still.machine("m", disks("Delete"))).await?;
    still.until_phase("m", "Running").await;
    let vm = still.id(VMS, "m");
    let volume = still.id("Microsoft.Compute/disks", "pvc-1");
    let body = json!({"location": "eastus", "zones": ["1"], "sku": {"name": "Premium_LRS"},
        "properties": {"creationData": {"createOption": "Empty"}, "diskSizeGB": 8}});
    let made = still
        .azure
        .direct(Method::PUT, &format!("{volume}?api-version=2024-03-02"), body);
    assert!(made.status.is_success(), "{made:?}");
    let change = format!("{vm}/attachDetachDataDisks?api-version=2024-07-01");
    let attach = json!({"dataDisksToAttach": [{"diskId": volume, "lun": 5, "deleteOption": "Detach"}]});
    let attached = still.azure.direct(Method::POST, &change, attach);
    assert!(attached.status.is_success(), "{attached:?}");
    tokio::time::sleep(MINUTE).await;
    let mut keep = named("m");
    keep["spec"]["providerSpec"]["value"] = disks("Detach");
    still.patch(keep).await?;
    // Between the controller's read and its change, the driver detaches a volume.
    let detach = json!({"dataDisksToDetach": [{"diskId": volume}]});
    still.meanwhile(Method::PATCH, "/virtualMachines/m", move |azure| {
        let detached = azure.direct(Method::POST, &change, detach);
        assert!(detached.status.is_success(), "{detached:?}");
    });
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    let sent = still.azure.arm_requests();
    let changes: Vec<u16> = sent
        .iter()
        .filter(|request| request.method == "PATCH")
        .map(|request| request.status)
        .collect();
    assert_eq!(
        changes.first(),
        Some(&412),
        "the first change was made for a list that is no more: {changes:?}"
    );
    assert!(
        changes.len() > 1 && changes.last().is_some_and(|status| *status < 300),
        "{changes:?}"
    );
    assert_eq!(still.resources("disks"), ["m_data", "pvc-1"]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_virtual_machine_that_runs_although_its_guest_was_late_is_not_requested_again() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let late = Action::FailProvisioning {
        code: "OSProvisioningTimedOut".into(),
        message: "as the test asks".into(),
    };
    still
        .azure
        .fault(Fault::new(late).path("virtualMachines/m$").times(1))?;
    still.create(still.machine("m", json!({}))).await?;
    still
        .until("a provider id", |still| {
            let machine = still.get(API, "machines", "m").unwrap_or_default();
            !machine["spec"]["providerID"].is_null()
        })
        .await;
    tokio::time::sleep(MINUTE * 30).await;
    let sent = still.azure.arm_requests();
    let requests = sent.iter().filter(|request| request.policy == "PutVM").count();
    assert_eq!(requests, 1, "the virtual machine runs");
    Ok(())
}

/// An Azure that lets its account do what machine-api-operator's CredentialsRequest asks for.
fn openshifts_role() -> Config {
    Config {
        allowed_actions: Some(OPENSHIFTS_ROLE.map(ToOwned::to_owned).to_vec()),
        ..Config::default()
    }
}

/// A machine with two data disks that go with it.
fn with_disks(still: &Still, name: &str) -> Value {
    let disk =
        |lun: i32| json!({"nameSuffix": format!("d{lun}"), "lun": lun, "diskSizeGB": 8, "deletionPolicy": "Delete"});
    still.machine(name, json!({"dataDisks": [disk(0), disk(1)]}))
}

async fn gone(still: &Still, names: &[String]) -> Result<()> {
    for name in names {
        still.delete(named(name)).await?;
    }
    let there = |still: &Still, name: &String| still.get(API, "machines", name).is_some();
    still
        .until("gone", |still| !names.iter().any(|name| there(still, name)))
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn with_openshifts_role_machines_cost_six_calls_to_create_and_six_to_delete_all_included() -> Result<()> {
    const MACHINES: usize = 20;
    let still = Still::new(openshifts_role()).await?;
    let running = still.start(Some(NAMESPACE))?;
    let names: Vec<String> = (0..MACHINES).map(|n| format!("m{n}")).collect();
    for name in &names {
        still.create(with_disks(&still, name)).await?;
    }
    for name in &names {
        still.until_phase(name, "Running").await;
    }
    let creating = calls(&still);
    still.azure.clear_requests();
    gone(&still, &names).await?;
    let deleting = calls(&still);
    for kind in ["disks", "networkInterfaces", "virtualMachines"] {
        assert!(still.resources(kind).is_empty(), "{kind}");
    }
    println!(
        "{MACHINES} machines: {} calls to create and {} to delete them",
        creating.len(),
        deleting.len()
    );
    assert!(creating.len() <= 6 * MACHINES, "{creating:#?}");
    assert!(deleting.len() <= 6 * MACHINES, "{deleting:#?}");
    let refused: Vec<&String> = deleting.iter().filter(|call| call.ends_with(" 403")).collect();
    assert!(
        refused.is_empty(),
        "the creation has learned what the account may not do: {refused:?}"
    );

    // A process that has created none learns it by one call for all.
    for name in &names[..2] {
        still.create(with_disks(&still, name)).await?;
        still.until_phase(name, "Running").await;
    }
    drop(running);
    let _running = still.start(Some(NAMESPACE))?;
    still.azure.clear_requests();
    gone(&still, &names[..1]).await?;
    let first = calls(&still);
    let (refused, own): (Vec<&String>, Vec<&String>) = first.iter().partition(|call| call.ends_with(" 403"));
    assert!(refused.len() <= 1 && own.len() <= 6, "{first:#?}");
    still.azure.clear_requests();
    gone(&still, &names[1..2]).await?;
    let second = calls(&still);
    assert!(second.len() <= 6, "{second:#?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn rights_that_an_account_gets_later_are_used_within_an_hour() -> Result<()> {
    let still = Still::new(openshifts_role()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let names = ["before".to_owned(), "after".to_owned()];
    for name in &names {
        still.create(with_disks(&still, name)).await?;
        still.until_phase(name, "Running").await;
    }
    gone(&still, &names[..1]).await?;
    assert_eq!(
        asked(&still, "/disks"),
        0,
        "it is known that the account may not list them"
    );
    still.azure.changing(|world| world.config.allowed_actions = None);
    tokio::time::sleep(MINUTE * 61).await;
    still.azure.clear_requests();
    gone(&still, &names[1..]).await?;
    assert_eq!(asked(&still, "/disks"), 1, "{:#?}", calls(&still));
    Ok(())
}

/// All calls to Resource Manager.
fn calls(still: &Still) -> Vec<String> {
    let requests = still.azure.arm_requests();
    requests
        .iter()
        .map(|request| format!("{} {} {}", request.method, request.path, request.status))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn quotas_that_azure_does_not_tell_keep_no_machine_from_being_created() -> Result<()> {
    for (status, code) in [
        (503, "ServiceUnavailable"),
        (500, "InternalServerError"),
        (429, "TooManyRequests"),
    ] {
        let still = Still::new(Config::instant()).await?;
        let broken = Action::Answer {
            status,
            code: Some(code.into()),
            message: Some("as the test asks".into()),
            retry_after: None,
        };
        still.azure.fault(Fault::new(broken).path("/usages"))?;
        let _running = still.start(Some(NAMESPACE))?;
        still.create(still.machine("m", json!({}))).await?;
        still.until_phase("m", "Running").await;
        assert!(asked(&still, "/usages") > 0);
        assert_eq!(reason(&still, "m"), "", "{code}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn one_answer_about_quotas_lets_in_as_many_machines_as_it_has_room_for() -> Result<()> {
    // Room for ten machines of four vCPUs each.
    let still = Still::new(Config {
        family_cores: Some(40),
        ..Config::default()
    })
    .await?;
    let _running = still.start(Some(NAMESPACE))?;
    for n in 0..40 {
        still.create(still.machine(&format!("m{n}"), json!({}))).await?;
    }
    let full = |still: &Still| still.resources("virtualMachines").len() == 10;
    for _ in 0..600 {
        assert!(still.resources("networkInterfaces").len() <= 10);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(full(&still), "{:?}", still.resources("virtualMachines"));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_availability_set_of_another_cluster_is_neither_used_nor_deleted() -> Result<()> {
    for tags in [json!({"kubernetes.io_cluster.other": "owned"}), json!({})] {
        let still = in_the_west().await?;
        given_set(&still, "workers-as", &tags);
        let _running = still.start(Some(NAMESPACE))?;
        still.create(of_set(&still, "m")).await?;
        still.until_phase("m", "Running").await;
        assert_eq!(set_of(&still, "m"), "c_workers-as", "{tags}");
        still.delete(named("m")).await?;
        still
            .until("gone", |still| still.get(API, "machines", "m").is_none())
            .await;
        assert_eq!(still.resources("availabilitySets"), ["workers-as"], "{tags}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_waits_while_another_cluster_has_its_availability_set_and_says_so() -> Result<()> {
    let still = in_the_west().await?;
    given_set(&still, "c_workers-as", &json!({"kubernetes.io_cluster.other": "owned"}));
    let _running = still.start(Some(NAMESPACE))?;
    still.create(of_set(&still, "m")).await?;
    still
        .until("a reason", |still| {
            reason(still, "m").contains("availability set c_workers-as in capstan is of cluster other")
        })
        .await;
    assert!(still.resources("virtualMachines").is_empty());
    assert!(
        still.resources("networkInterfaces").is_empty(),
        "nothing is made meanwhile"
    );
    // Both clusters share it on purpose, or nobody has said whose it is: it is used as it is.
    for tags in [
        json!({"kubernetes.io_cluster.other": "owned", "kubernetes.io_cluster.c": "owned"}),
        json!({}),
    ] {
        let still = in_the_west().await?;
        given_set(&still, "c_workers-as", &tags);
        let _running = still.start(Some(NAMESPACE))?;
        still.create(of_set(&still, "m")).await?;
        still.until_phase("m", "Running").await;
        assert_eq!(set_of(&still, "m"), "c_workers-as", "{tags}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_no_availability_set_takes_gets_none() -> Result<()> {
    let still = in_the_west().await?;
    let _running = still.start(Some(NAMESPACE))?;
    let disk = json!([{"nameSuffix": "fast", "lun": 0, "diskSizeGB": 8, "deletionPolicy": "Delete",
        "managedDisk": {"storageAccountType": "PremiumV2_LRS"}}]);
    let mut machine = of_set(&still, "m");
    machine["spec"]["providerSpec"]["value"]["dataDisks"] = disk.clone();
    still.create(machine).await?;
    still.until_phase("m", "Running").await;
    assert_eq!(set_of(&still, "m"), "");
    assert!(still.resources("availabilitySets").is_empty());
    // Where the size has zones, such a disk needs one.
    still
        .create(still.machine("zoneless", json!({"zone": "", "dataDisks": disk})))
        .await?;
    let failed = still.until_phase("zoneless", "Failed").await;
    let message = failed["status"]["errorMessage"].as_str().unwrap_or_default();
    assert!(
        message.contains("takes PremiumV2_LRS disks in location eastus only in a zone"),
        "{message}"
    );
    assert_eq!(still.resources("networkInterfaces"), ["m-nic"]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_address_under_the_earlier_name_goes_with_the_machine_beside_that_of_today() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still
        .openshift(
            json!({"infrastructureName": "ocp-x7", "platformStatus": {"type": "Azure", "azure": {
            "resourceGroupName": "capstan", "networkResourceGroupName": "capstan"}}}),
        )
        .await?;
    let _running = still.start(None)?;
    still.create(still.machine("m", json!({"publicIP": true}))).await?;
    let machine = still.until_phase("m", "Running").await;
    let tags = json!({"kubernetes.io-cluster-c": "owned", "capstan-machine": format!("{NAMESPACE}/m"),
        "capstan-machine-uid": machine["metadata"]["uid"]});
    let path = still.id("Microsoft.Network/publicIPAddresses", "c-m");
    let body = json!({"location": "eastus", "tags": tags, "sku": {"name": "Standard"},
        "properties": {"publicIPAllocationMethod": "Static"}});
    let made = still
        .azure
        .direct(Method::PUT, &format!("{path}?api-version=2024-05-01"), body);
    assert!(made.status.is_success(), "{made:?}");
    assert_eq!(still.resources("publicIPAddresses"), ["c-m", "ocp-x7-m"]);
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    assert!(
        still.resources("publicIPAddresses").is_empty(),
        "{:?}",
        still.resources("publicIPAddresses")
    );
    Ok(())
}
