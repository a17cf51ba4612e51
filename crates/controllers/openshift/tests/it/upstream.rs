//! What other parts of OpenShift read and wait for, under paused time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Action, Config, Fault};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still, resource};

const MINUTE: Duration = Duration::from_secs(60);
const API: &str = "machine.openshift.io";
const LABELS: &str = "capacity.cluster-autoscaler.kubernetes.io/labels";

fn condition(object: &Value, type_: &str) -> Option<String> {
    let conditions = object["status"]["conditions"].as_array()?;
    let found = conditions.iter().find(|condition| condition["type"] == type_)?;
    found["status"].as_str().map(str::to_owned)
}

#[tokio::test(start_paused = true)]
async fn a_set_without_machines_tells_the_autoscaler_what_they_would_offer() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.set("workers", 0, json!({}))).await?;
    let annotations = |still: &Still| {
        let set = still.get(API, "machinesets", "workers").unwrap_or_default();
        set["metadata"]["annotations"].clone()
    };
    still.until("annotations", |still| !annotations(still).is_null()).await;
    let expected = json!({
        "machine.openshift.io/vCPU": "4", "machine.openshift.io/memoryMb": "16384", "machine.openshift.io/GPU": "0",
        "capacity.cluster-autoscaler.kubernetes.io/labels": "kubernetes.io/arch=amd64",
    });
    assert_eq!(annotations(&still), expected);
    let version = still.server.version();
    tokio::time::sleep(MINUTE * 30).await;
    assert_eq!(still.server.version(), version, "nothing is written twice");
    let size = json!({"vmSize": "Standard_D8s_v3"});
    let spec = json!({"template": {"spec": {"providerSpec": {"value": size}}}});
    let change = json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet",
                        "metadata": {"name": "workers"}, "spec": spec});
    still.patch(change).await?;
    still
        .until("the new size", |still| {
            annotations(still)["machine.openshift.io/vCPU"] == "8"
        })
        .await;
    let mut labelled = still.set("gpus", 0, json!({"vmSize": "Standard_NC4as_T4_v3"}));
    labelled["metadata"]["annotations"] = json!({(LABELS): "disktype=ultrassd"});
    still.create(labelled).await?;
    let of_gpus = |still: &Still| {
        let set = still.get(API, "machinesets", "gpus").unwrap_or_default();
        set["metadata"]["annotations"].clone()
    };
    still
        .until("a GPU", |still| of_gpus(still)["machine.openshift.io/GPU"] == "1")
        .await;
    assert_eq!(of_gpus(&still)[LABELS], "disktype=ultrassd,kubernetes.io/arch=amd64");
    still
        .create(still.set("unknown", 0, json!({"vmSize": "Standard_Nope"})))
        .await?;
    still
        .until("an event", |still| {
            let events = still.server.objects_of("", "events");
            events.iter().any(|event| {
                let message = event["message"].as_str().unwrap_or_default();
                event["reason"] == "FailedUpdate" && message.contains("instance type unknown: \"Standard_Nope\"")
            })
        })
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn objects_that_cluster_api_manages_are_paused_and_nothing_is_made_for_them() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let mut machine = still.machine("m", json!({}));
    let mut set = still.set("workers", 2, json!({}));
    machine["spec"]["authoritativeAPI"] = json!("ClusterAPI");
    set["spec"]["authoritativeAPI"] = json!("ClusterAPI");
    still.create(machine).await?;
    still.create(set).await?;
    for (plural, name) in [("machines", "m"), ("machinesets", "workers")] {
        still
            .until("Paused", |still| {
                let object = still.get(API, plural, name).unwrap_or_default();
                condition(&object, "Paused").as_deref() == Some("True")
            })
            .await;
    }
    tokio::time::sleep(MINUTE).await;
    assert!(still.resources("virtualMachines").is_empty());
    assert_eq!(still.server.objects_of(API, "machines").len(), 1);
    assert!(still.azure.arm_requests().is_empty());
    Ok(())
}

/// Lets the migration controller say which API manages an object.
async fn hand_over(still: &Still, kind: &str, name: &str, authority: &str) -> Result<()> {
    let object = json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": kind, "metadata": {"name": name}});
    let api: Api<DynamicObject> = Api::namespaced_with(still.server.client(), NAMESPACE, &resource(&object));
    let status = json!({"status": {"authoritativeAPI": authority}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    Ok(())
}

/// Hands over all machines and the set, and waits until all say so.
async fn hand_all_over(still: &Still, authority: &str, paused: &str) -> Result<()> {
    let machines = still.server.objects_of(API, "machines");
    for machine in &machines {
        let name = machine["metadata"]["name"].as_str().unwrap_or_default();
        hand_over(still, "Machine", name, authority).await?;
    }
    hand_over(still, "MachineSet", "workers", authority).await?;
    let names: Vec<&Value> = machines.iter().map(|machine| &machine["metadata"]["name"]).collect();
    still
        .until("Paused", |still| {
            let mut machines = still.server.objects_of(API, "machines");
            // Others may be new by now.
            machines.retain(|machine| names.contains(&&machine["metadata"]["name"]));
            let sets = still.server.objects_of(API, "machinesets");
            let mut all = machines.iter().chain(&sets);
            all.all(|object| condition(object, "Paused").as_deref() == Some(paused))
        })
        .await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_migrates_is_left_alone_until_it_comes_back() -> Result<()> {
    let still = Still::new(Config::default()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    let mut machine = still.machine("m", json!({}));
    let mut set = still.set("workers", 1, json!({}));
    machine["spec"]["authoritativeAPI"] = json!("MachineAPI");
    set["spec"]["authoritativeAPI"] = json!("MachineAPI");
    still.create(machine).await?;
    still.create(set).await?;
    let running = |still: &Still, count: usize| {
        let machines = still.server.objects_of(API, "machines");
        machines.len() == count && machines.iter().all(|machine| machine["status"]["phase"] == "Running")
    };
    still.until("two machines", |still| running(still, 2)).await;
    let machine = still.get(API, "machines", "m").context("gone")?;
    assert_eq!(
        machine["status"]["authoritativeAPI"], "MachineAPI",
        "nobody else says so"
    );
    // One more is under way when the migration begins.
    still.create(still.machine("late", json!({}))).await?;
    still.until_phase("late", "Provisioning").await;
    for authority in ["Migrating", "ClusterAPI"] {
        hand_all_over(&still, authority, "True").await?;
        still.patch(scaled(3)).await?;
        // The message of the condition names who manages the objects now.
        tokio::time::sleep(MINUTE).await;
        let asked = still.azure.arm_requests().len();
        let written = |still: &Still| ["machines", "machinesets"].map(|plural| still.server.objects_of(API, plural));
        let before = written(&still);
        tokio::time::sleep(MINUTE * 30).await;
        let after = still.azure.arm_requests().len();
        assert_eq!(after, asked, "Azure is asked under {authority}");
        assert_eq!(written(&still), before, "something is written under {authority}");
        assert_eq!(still.server.objects_of(API, "machines").len(), 3);
    }
    hand_all_over(&still, "MachineAPI", "False").await?;
    still.until("all machines", |still| running(still, 5)).await;
    let sent = still.azure.arm_requests();
    let made = sent.iter().filter(|request| request.policy == "PutVM").count();
    assert_eq!(made, 5, "each virtual machine was asked for once");
    Ok(())
}

fn scaled(replicas: i32) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": "workers"},
           "spec": {"replicas": replicas}})
}

#[tokio::test(start_paused = true)]
async fn while_azure_has_no_room_no_interface_stays_in_a_balancers_pool() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let balancer = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Network/loadBalancers/lb?api-version=2024-05-01",
        still.azure.subscription
    );
    let pools = json!({"location": "eastus", "properties": {
        "frontendIPConfigurations": [{"name": "f", "properties": {}}], "backendAddressPools": [{"name": "lb"}]}});
    still.azure.direct(http::Method::PUT, &balancer, pools);
    let full = still.azure.fault(
        Fault::new(Action::Answer {
            status: 409,
            code: Some("OperationNotAllowed".into()),
            message: Some("Operation could not be completed as it results in exceeding approved cores quota".into()),
            retry_after: None,
        })
        .policy("PutVM"),
    )?;
    let _running = still.start(Some(NAMESPACE))?;
    still
        .create(still.machine("m", json!({"publicLoadBalancer": "lb"})))
        .await?;
    still
        .until("the refusal", |still| {
            let machine = still.get(API, "machines", "m").unwrap_or_default();
            condition(&machine, "InstanceExists").as_deref() == Some("False")
        })
        .await;
    let pools = |still: &Still| -> Result<Value> {
        let id = still
            .azure
            .ids("networkInterfaces")
            .into_iter()
            .next()
            .context("no interface")?;
        let nic = still.azure.get(&id).context("gone")?;
        Ok(nic["properties"]["ipConfigurations"][0]["properties"]["loadBalancerBackendAddressPools"].clone())
    };
    assert_eq!(pools(&still)?.as_array().map_or(0, Vec::len), 0);
    let machine = still.get(API, "machines", "m").context("gone")?;
    let created = &machine["status"]["providerStatus"]["conditions"][0];
    assert_eq!(
        (&created["type"], &created["reason"]),
        (&json!("MachineCreated"), &json!("MachineCreationFailed"))
    );
    assert!(
        created["message"].as_str().unwrap_or_default().contains("quota"),
        "{created}"
    );
    still.azure.remove_fault(full);
    still.until_phase("m", "Running").await;
    assert_eq!(pools(&still)?.as_array().map_or(0, Vec::len), 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_machine_on_a_dead_node_goes_within_seconds_whatever_grace_its_pods_have() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let node = |still: &Still| still.server.objects("nodes").into_iter().next();
    let name = node(&still).context("no Node")?["metadata"]["name"].clone();
    // Nobody is there to end it.
    let held = json!({"name": "slow", "namespace": "default", "finalizers": ["capstan.dev/test"]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": held,
        "spec": {"nodeName": name, "terminationGracePeriodSeconds": 3600, "containers": [{"name": "c", "image": "none"}]}});
    still.create(pod).await?;
    let dead = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown",
        "lastTransitionTime": "2027-01-15T08:00:00Z", "reason": "NodeStatusUnknown"}]}});
    still.patch_node(name.as_str().unwrap_or_default(), dead).await?;
    still.delete(still.machine("m", json!({}))).await?;
    let began = tokio::time::Instant::now();
    still
        .until("the end", |still| still.get(API, "machines", "m").is_none())
        .await;
    assert!(began.elapsed() < MINUTE, "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn labels_follow_a_virtual_machine_that_somebody_resizes() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let vm = still.id("Microsoft.Compute/virtualMachines", "m");
    let size = json!({"properties": {"hardwareProfile": {"vmSize": "Standard_D8s_v3"}}});
    let resized = still
        .azure
        .direct(http::Method::PATCH, &format!("{vm}?api-version=2024-07-01"), size);
    assert!(resized.status.is_success(), "{resized:?}");
    still
        .until("the new size", |still| {
            let machine = still.get("machine.openshift.io", "machines", "m").unwrap_or_default();
            machine["metadata"]["labels"]["machine.openshift.io/instance-type"] == "Standard_D8s_v3"
        })
        .await;
    Ok(())
}

/// Upstream's condition for a machine whose virtual machine nobody can look up.
#[tokio::test(start_paused = true)]
async fn a_machine_whose_vm_cannot_be_looked_up_reports_why_until_it_can() -> Result<()> {
    let still = Still::new(Config::instant()).await?;
    let _running = still.start(Some(NAMESPACE))?;
    still.create(still.machine("m", json!({}))).await?;
    still.until_phase("m", "Running").await;
    let machine = |still: &Still| still.get(API, "machines", "m").unwrap_or_default();
    let exists = |still: &Still| condition(&machine(still), "InstanceExists");
    let name = "azure-cloud-credentials";
    let secret = still.get("", "secrets", name).context("no Secret")?;
    let named = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}});
    still.delete(named.clone()).await?;
    still
        .until("an unknown state", |still| exists(still).as_deref() == Some("Unknown"))
        .await;
    let status = machine(&still)["status"].clone();
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    let unknown = conditions.iter().find(|condition| condition["status"] == "Unknown");
    let unknown = unknown.context("no condition")?;
    assert_eq!(
        (&unknown["reason"], &status["phase"]),
        (&json!("ErrorCheckingProvider"), &json!("Running"))
    );
    assert!(
        unknown["message"].as_str().is_some_and(|text| text.contains(name)),
        "{unknown}"
    );
    let version = still.server.version();
    tokio::time::sleep(MINUTE * 30).await;
    assert_eq!(still.server.version(), version, "the same failure is written once");
    let mut again = named;
    again["data"] = secret["data"].clone();
    still.create(again).await?;
    still
        .until("a known state", |still| exists(still).as_deref() == Some("True"))
        .await;
    Ok(())
}
