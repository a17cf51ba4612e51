//! What other parts of OpenShift read and wait for, under paused time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_sim::azure::{Action, Config, Fault};
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still};

const MINUTE: Duration = Duration::from_secs(60);
const API: &str = "machine.openshift.io";

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
