//! What Azure refuses, cannot finish or shows later, and what becomes of it. Under paused time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Action, Config, Fault};
use http::Method;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still, resource};
use crate::succession::put_as_before;
use crate::takeover::azure;

const API: &str = "machine.openshift.io";
const MINUTE: Duration = Duration::from_secs(60);

fn answer(status: u16, code: &str, message: &str) -> Action {
    Action::Answer {
        status,
        code: Some(code.into()),
        message: Some(message.into()),
        retry_after: None,
    }
}

fn named(name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name}})
}

/// A disk with a performance of its own: it is made before its machine.
fn fast_disk(policy: &str) -> Value {
    json!([{"nameSuffix": "fast", "lun": 0, "diskSizeGB": 8, "deletionPolicy": policy, "diskIOPSReadWrite": 500,
        "cachingType": "None", "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}])
}

#[tokio::test(start_paused = true)]
async fn a_resource_that_azure_does_not_see_yet_fails_no_machine() -> Result<()> {
    let referenced = |id: &str| format!("Resource {id} referenced by resource /virtualMachines/m was not found.");
    let cases = [
        (
            "PUT",
            "virtualMachines/m",
            404,
            "NotFound",
            "Network interface 'm-nic' could not be found.".to_owned(),
        ),
        (
            "PUT",
            "virtualMachines/m",
            400,
            "InvalidResourceReference",
            referenced("/networkInterfaces/m-nic"),
        ),
        (
            "PUT",
            "virtualMachines/m",
            404,
            "ResourceNotFound",
            referenced("/disks/m_fast"),
        ),
        (
            "PUT",
            "networkInterfaces/m-nic",
            400,
            "InvalidResourceReference",
            referenced("/publicIPAddresses/c-m"),
        ),
    ];
    for (method, path, status, code, message) in cases {
        let still = Still::new(Config::instant()).await?;
        let _running = still.start(Some(NAMESPACE))?;
        let unseen = Fault::new(answer(status, code, &message)).method(method).path(path);
        still.azure.fault(unseen.times(1))?;
        let spec = json!({"publicIP": true, "dataDisks": fast_disk("Delete")});
        still.create(still.machine("m", spec)).await?;
        still.until_phase("m", "Running").await;
        let sent = still.azure.arm_requests();
        assert!(sent.iter().any(|request| request.status == status), "{message}");
    }
    Ok(())
}

/// The pools of the machine's interface.
fn pools(still: &Still) -> Result<usize> {
    let nic = still.id("Microsoft.Network/networkInterfaces", "m-nic");
    let nic = still.azure.get(&nic).context("no interface")?;
    let first = &nic["properties"]["ipConfigurations"][0]["properties"];
    Ok(first["loadBalancerBackendAddressPools"].as_array().map_or(0, Vec::len))
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_azure_refuses_for_good_leaves_its_balancers() -> Result<()> {
    for refused in ["virtualMachines/m", "disks/m_fast"] {
        let still = Still::new(Config::instant()).await?;
        let balancer = still.id("Microsoft.Network/loadBalancers", "lb");
        let body = json!({"location": "eastus", "properties": {
            "frontendIPConfigurations": [{"name": "f", "properties": {}}], "backendAddressPools": [{"name": "lb"}]}});
        let path = format!("{balancer}?api-version=2024-05-01");
        assert!(still.azure.direct(Method::PUT, &path, body).status.is_success());
        let no = answer(400, "InvalidParameter", "as the test asks");
        still.azure.fault(Fault::new(no).method("PUT").path(refused))?;
        let _running = still.start(Some(NAMESPACE))?;
        let spec = json!({"publicLoadBalancer": "lb", "dataDisks": fast_disk("Delete")});
        still.create(still.machine("m", spec)).await?;
        still.until_phase("m", "Failed").await;
        assert_eq!(pools(&still)?, 0, "{refused}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_interface_whose_operation_fails_is_requested_again() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let failed = Action::FailProvisioning {
        code: "InternalServerError".into(),
        message: "as the test asks".into(),
    };
    still
        .azure
        .fault(Fault::new(failed).path("networkInterfaces/").times(1))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let nic = still.id("Microsoft.Network/networkInterfaces", "m-nic");
    let nic = still.azure.get(&nic).context("no interface")?;
    assert_eq!(nic["properties"]["provisioningState"], "Succeeded");
    let sent = still.azure.arm_requests();
    let asked = sent
        .iter()
        .filter(|request| request.method == "PUT" && request.path.contains("networkInterfaces"));
    assert_eq!(asked.count(), 2);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_the_old_controller_took_for_ready_fails_with_its_virtual_machine() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    still.openshift(azure()).await?;
    let failed = Action::FailProvisioning {
        code: "AllocationFailed".into(),
        message: "as the test asks".into(),
    };
    still
        .azure
        .fault(Fault::new(failed).path("virtualMachines/m$").times(1))?;
    put_as_before(&still, "m");
    let vm = still.id("Microsoft.Compute/virtualMachines", "m");
    let mut machine = still.machine("m", json!({}));
    machine["metadata"]["finalizers"] = json!(["machine.machine.openshift.io"]);
    machine["spec"]["providerID"] = json!(format!("azure://{vm}"));
    let status = json!({"status": {"phase": "Provisioned", "providerStatus": {"vmId": vm, "vmState": "Creating", "conditions": [
        {"type": "MachineCreated", "status": "True", "reason": "MachineCreationSucceeded",
         "message": "machine successfully created", "lastTransitionTime": "2027-01-15T08:00:00Z"}]}}});
    let api: Api<DynamicObject> = Api::namespaced_with(still.server.client(), NAMESPACE, &resource(&machine));
    still.create(machine).await?;
    api.patch_status("m", &PatchParams::default(), &Patch::Merge(status))
        .await?;
    let _running = still.start(None)?;
    let machine = still.until_phase("m", "Failed").await;
    let message = machine["status"]["errorMessage"].as_str().unwrap_or_default();
    assert!(message.contains("Azure could not finish it"), "{message}");
    // Nothing is deleted before somebody deletes the Machine, and then all of it goes.
    assert_eq!(still.resources("virtualMachines"), ["m"]);
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    assert!(still.resources("virtualMachines").is_empty() && still.resources("networkInterfaces").is_empty());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_group_that_somebody_deletes_keeps_no_machine_that_ran_there() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let gone = answer(
        404,
        "ResourceGroupNotFound",
        "Resource group 'capstan' could not be found.",
    );
    still.azure.fault(Fault::new(gone).path("resourceGroups/capstan"))?;
    still.delete(named("m")).await?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn addresses_that_a_node_gets_later_are_listed_on_its_machine() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({"publicIP": true}))).await?;
    let machine = still.until_phase("m", "Running").await;
    let addresses = |machine: &Value| machine["status"]["addresses"].to_string();
    assert!(
        addresses(&machine).contains(r#"{"address":"c-m.eastus.cloudapp.azure.com","type":"ExternalDNS"}"#),
        "{}",
        addresses(&machine)
    );
    // Somebody gives the interface a second address, and the cloud provider shows it on the Node.
    let id = still.id("Microsoft.Network/networkInterfaces", "m-nic");
    let mut nic = still.azure.get(&id).context("no interface")?;
    let mut second = nic["properties"]["ipConfigurations"][0].clone();
    second["name"] = json!("second");
    let subnet = second["properties"]["subnet"].clone();
    second["properties"] = json!({"subnet": subnet, "primary": false, "privateIPAddress": "10.0.0.99",
        "privateIPAllocationMethod": "Static"});
    nic["properties"]["ipConfigurations"]
        .as_array_mut()
        .context("no configurations")?
        .push(second);
    let path = format!("{id}?api-version=2024-05-01");
    let made = still.azure.direct(Method::PUT, &path, nic);
    assert!(made.status.is_success(), "{made:?}");
    let node = still.get("", "nodes", "m").context("no Node")?;
    let mut shown = node["status"]["addresses"].as_array().cloned().unwrap_or_default();
    let nic = still.azure.get(&id).context("no interface")?;
    let new = nic["properties"]["ipConfigurations"][1]["properties"]["privateIPAddress"].clone();
    shown.push(json!({"type": "InternalIP", "address": new}));
    still.patch_node("m", json!({"status": {"addresses": shown}})).await?;
    still
        .until("the second address", |still| {
            let machine = still.get(API, "machines", "m").unwrap_or_default();
            addresses(&machine).contains(new.as_str().unwrap_or("none"))
        })
        .await;
    // One read is enough.
    still.azure.clear_requests();
    tokio::time::sleep(MINUTE * 60).await;
    let sent = still.azure.arm_requests();
    assert!(!sent.iter().any(|request| request.path.contains("networkInterfaces")));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_control_plane_machine_learns_the_internal_balancer_that_it_is_behind() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let subnet = still.id(
        "Microsoft.Network/virtualNetworks",
        "capstan-vnet/subnets/worker-subnet",
    );
    let frontends = [
        (
            "inside",
            json!({"privateIPAddress": "10.0.0.4", "subnet": {"id": subnet}}),
        ),
        ("outside", json!({})),
    ];
    for (name, frontend) in frontends {
        let path = still.id(
            "Microsoft.Network/loadBalancers",
            &format!("{name}?api-version=2024-05-01"),
        );
        let body = json!({"location": "eastus", "properties": {
            "frontendIPConfigurations": [{"name": "f", "properties": frontend}], "backendAddressPools": [{"name": "p"}]}});
        assert!(still.azure.direct(Method::PUT, &path, body).status.is_success());
    }
    for name in ["m", "worker"] {
        let mut machine = still.machine(
            name,
            json!({"publicLoadBalancer": "outside", "internalLoadBalancer": "inside"}),
        );
        if name == "m" {
            machine["metadata"]["labels"]["machine.openshift.io/cluster-api-machine-role"] = json!("master");
        }
        still.create(machine).await?;
        still.until_phase(name, "Running").await;
        // As early installers left it: behind the balancer, and the spec does not say so.
        let mut before = named(name);
        before["spec"]["providerSpec"]["value"] = json!({"internalLoadBalancer": null});
        still.patch(before).await?;
    }
    let balancer = |still: &Still, name: &str| {
        let machine = still.get(API, "machines", name).unwrap_or_default();
        machine["spec"]["providerSpec"]["value"]["internalLoadBalancer"].clone()
    };
    still
        .until("the balancer", |still| balancer(still, "m") == "inside")
        .await;
    tokio::time::sleep(MINUTE * 30).await;
    assert_eq!(balancer(&still, "worker"), Value::Null, "workers have none");
    Ok(())
}

/// Specs that Azure or the operator's rules refuse, and why. Nobody has to ask Azure for that.
fn hopeless() -> Vec<(Value, &'static str)> {
    let disk = |suffix: &str, lun: i32, kind: &str| {
        json!({"nameSuffix": suffix, "lun": lun, "diskSizeGB": 8, "deletionPolicy": "Delete",
            "managedDisk": {"storageAccountType": kind}})
    };
    let disks = |disks: &[Value]| json!({"dataDisks": disks});
    let in_set = |mut over: Value| {
        over["availabilitySet"] = json!("as");
        over
    };
    let os = |change: Value| {
        let mut os =
            json!({"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}});
        for (field, value) in change.as_object().into_iter().flatten() {
            os[field] = value.clone();
        }
        json!({"osDisk": os})
    };
    let encrypted = json!({"securityProfile": {"securityEncryptionType": "VMGuestStateOnly"}});
    let tags: serde_json::Map<String, Value> = (0..47).map(|n| (format!("t{n}"), json!("v"))).collect();
    let boot = |boot: Value| json!({"diagnostics": {"boot": boot}});
    let image = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/images/i";
    let ultra = disk("u", 0, "UltraSSD_LRS");
    vec![
        (
            in_set(json!({})),
            "Azure takes no machine with a zone into an availability set",
        ),
        (
            in_set(json!({"zone": "", "spotVMOptions": {}})),
            "no machine with spotVMOptions into",
        ),
        (
            in_set(json!({"zone": "", "dataDisks": [ultra]})),
            "no machine with Ultra disks",
        ),
        (
            in_set(json!({"zone": "", "dataDisks": [disk("p", 0, "PremiumV2_LRS")]})),
            "no machine with PremiumV2_LRS disks into",
        ),
        (
            json!({"zone": "", "dataDisks": [disk("p", 0, "PremiumV2_LRS")]}),
            "takes PremiumV2_LRS disks in location eastus only in a zone",
        ),
        (disks(&[disk("OSDisk", 0, "Premium_LRS")]), "the OS disk has this name"),
        (
            disks(&[disk("a", 0, "Premium_LRS"), disk("A", 1, "Premium_LRS")]),
            "each Data Disk must have a unique nameSuffix",
        ),
        (
            os(json!({"managedDisk": encrypted})),
            "securityProfile should be set when",
        ),
        (
            boot(json!({"storageAccountType": "CustomerManaged"})),
            "storageAccountURI must be provided when",
        ),
        (
            boot(json!({"storageAccountType": "Mine"})),
            "must be AzureManaged or CustomerManaged",
        ),
        (
            json!({"capacityReservationGroupID": image}),
            "capacityReservationGroupID: Invalid value",
        ),
        (os(json!({"cachingType": "Fast"})), "osDisk.cachingType: Invalid value"),
        (json!({"tags": tags}), "at most 46 tags"),
        (
            json!({"spotVMOptions": {"maxPrice": "cheap"}}),
            "must be a price in dollars per hour",
        ),
        (
            json!({"ultraSSDCapability": "hello"}),
            "ultraSSDCapability can be only Enabled",
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn what_is_known_beforehand_is_refused_before_the_first_resource() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let cases = hopeless();
    for (index, (over, _)) in cases.iter().enumerate() {
        still.create(still.machine(&format!("m{index}"), over.clone())).await?;
    }
    let mut wrong = Vec::new();
    for (index, (over, why)) in cases.iter().enumerate() {
        let name = format!("m{index}");
        still
            .until(&format!("an end of {over}"), |still| {
                let machine = still.get(API, "machines", &name).unwrap_or_default();
                ["Failed", "Running"]
                    .map(Value::from)
                    .contains(&machine["status"]["phase"])
            })
            .await;
        let machine = still.get(API, "machines", &name).context("gone")?;
        let message = machine["status"]["errorMessage"].as_str().unwrap_or_default();
        if !message.contains(why) {
            wrong.push(format!("{over}: {message:?}"));
        }
    }
    let written = still
        .azure
        .arm_requests()
        .into_iter()
        .filter(|sent| sent.method != "GET");
    wrong.extend(written.map(|sent| format!("{} {}", sent.method, sent.path)));
    println!("{} specs are refused beforehand", cases.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn in_a_group_that_went_with_the_accounts_role_a_machine_waits_and_says_for_which_right() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let refused = "The client 'c' does not have authorization to perform action 'Microsoft.Compute/virtualMachines/read' over \
                   scope '/subscriptions/s/resourceGroups/capstan' or the scope is invalid.";
    let scoped = Fault::new(answer(403, "AuthorizationFailed", refused)).path("(?i)resourceGroups/capstan");
    let scoped = still.azure.fault(scoped)?;
    still.delete(named("m")).await?;
    let last = |still: &Still| {
        let machine = still.get(API, "machines", "m").unwrap_or_default();
        let last = machine["status"]["lastOperation"]["description"].as_str();
        last.unwrap_or_default().to_owned()
    };
    still
        .until("a reason", |still| {
            last(still).contains("Microsoft.Compute/virtualMachines/read")
        })
        .await;
    tokio::time::sleep(MINUTE * 60).await;
    let machine = still.get(API, "machines", "m").context("gone")?;
    assert_eq!(machine["status"]["phase"], "Deleting");
    // A role on the subscription lets Azure say that there is no such group.
    still.azure.remove_fault(scoped);
    let gone = answer(
        404,
        "ResourceGroupNotFound",
        "Resource group 'capstan' could not be found.",
    );
    still.azure.fault(Fault::new(gone).path("(?i)resourceGroups/capstan"))?;
    still
        .until("gone", |still| still.get(API, "machines", "m").is_none())
        .await;
    Ok(())
}
