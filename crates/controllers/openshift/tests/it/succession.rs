//! A stand-in for the controllers that Capstan replaces hands over to Capstan and takes over again while sets grow: the two never
//! write at the same time, and each machine gets one virtual machine. Under paused time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use capstan_kube::lease::{Elector, Fence, Identity, Settings};
use capstan_sim::azure::Config;
use http::Method;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::still::{NAMESPACE, Still, resource};
use crate::takeover::{HOLDER, LEASES, azure, holders};

const API: &str = "machine.openshift.io";
const SET_LABEL: &str = "machine.openshift.io/cluster-api-machineset";
const SECOND: Duration = Duration::from_secs(1);
/// A new pod needs this long before its process runs.
const POD_START: Duration = Duration::from_secs(5);
const MACHINES: usize = 20;

/// What went wrong, and who asked for which virtual machine.
#[derive(Default)]
struct Log {
    violations: Mutex<Vec<String>>,
    requested: Mutex<Vec<String>>,
}

/// The old controllers of one pod; they end with this.
struct OldPod(Vec<tokio::task::JoinHandle<()>>);

impl Drop for OldPod {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl OldPod {
    /// Each controller has its lease, with the times of machine-api-provider-azure and a phase of its own, and acts while it
    /// holds the lease.
    fn start(still: &Arc<Still>, log: &Arc<Log>, identity: &'static str) -> Self {
        let mut tasks = Vec::new();
        for (index, lease) in LEASES.into_iter().enumerate() {
            let fence = Fence::default();
            let settings = Settings {
                namespace: NAMESPACE.to_owned(),
                name: lease.to_owned(),
                identity: Identity::new(identity),
                duration: SECOND * 120,
                renew_deadline: SECOND * 110,
                retry_period: SECOND * 20,
                renew_period: SECOND * 20,
                clock: still.clock,
            };
            let mut elector = Elector::new(still.server.client(), settings, fence.clone());
            let phase = SECOND * 7 * u32::try_from(index).unwrap_or_default();
            tasks.push(tokio::spawn(async move {
                tokio::time::sleep(phase).await;
                loop {
                    elector.win().await;
                    elector.keep().await;
                }
            }));
            let old = Old {
                still: still.clone(),
                log: log.clone(),
                identity,
                lease,
                fence,
            };
            tasks.push(tokio::spawn(async move {
                loop {
                    tokio::time::sleep(SECOND).await;
                    let worked = match index {
                        0 => old.create_vm().await,
                        1 => old.create_machine().await,
                        _ => old.link_node().await,
                    };
                    if let Err(error) = worked {
                        old.log.violations.lock().push(format!("{}: {error:#}", old.lease));
                    }
                }
            }));
        }
        Self(tasks)
    }
}

/// One of the old controllers.
struct Old {
    still: Arc<Still>,
    log: Arc<Log>,
    identity: &'static str,
    lease: &'static str,
    fence: Fence,
}

impl Old {
    /// Whether the controller may write. Notes it if the API server says otherwise.
    fn leads(&self) -> bool {
        let leads = self.fence.is_open();
        let lease = self
            .still
            .get("coordination.k8s.io", "leases", self.lease)
            .unwrap_or_default();
        if leads && lease["spec"]["holderIdentity"] != self.identity {
            self.log
                .violations
                .lock()
                .push(format!("{} writes without {lease}", self.identity));
        }
        leads
    }

    fn machines(&self) -> Vec<Value> {
        self.still.server.objects_of(API, "machines")
    }

    fn api(&self) -> Api<DynamicObject> {
        let kind = json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine"});
        Api::namespaced_with(self.still.server.client(), NAMESPACE, &resource(&kind))
    }

    /// Creates one machine of a set that lacks some.
    async fn create_machine(&self) -> Result<()> {
        for set in self.still.server.objects_of(API, "machinesets") {
            let name = set["metadata"]["name"].as_str().unwrap_or_default();
            let machines = self.machines();
            let own = machines
                .iter()
                .filter(|machine| machine["metadata"]["labels"][SET_LABEL] == name);
            let wanted = set["spec"]["replicas"].as_u64().unwrap_or_default();
            if own.count() as u64 >= wanted || !self.leads() {
                continue;
            }
            let is_free = |name: &String| {
                !machines
                    .iter()
                    .any(|machine| machine["metadata"]["name"] == name.as_str())
            };
            let free = (0..)
                .map(|n| format!("{name}-{n:05}"))
                .find(is_free)
                .unwrap_or_default();
            let template = &set["spec"]["template"];
            let owner = json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "name": name,
                "uid": set["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true});
            let machine = json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "spec": template["spec"],
                "metadata": {"name": free, "labels": template["metadata"]["labels"], "ownerReferences": [owner]}});
            self.still.create(machine).await?;
        }
        Ok(())
    }

    /// Asks for the virtual machine of one machine that has none, and records it.
    async fn create_vm(&self) -> Result<()> {
        let machines = self.machines();
        let without = machines.iter().find(|machine| machine["spec"]["providerID"].is_null());
        let Some(machine) = without.filter(|_| self.leads()) else {
            return Ok(());
        };
        let name = machine["metadata"]["name"].as_str().unwrap_or_default();
        let vm = self.still.id("Microsoft.Compute/virtualMachines", name);
        if self.still.azure.get(&vm).is_none() {
            self.log.violations.lock().extend(put_as_before(&self.still, name));
            self.log.requested.lock().push(vm.to_lowercase());
        }
        // The pod may be killed here: nothing records the virtual machine then.
        tokio::time::sleep(SECOND).await;
        if !self.leads() {
            return Ok(());
        }
        let api = self.api();
        let written = json!({"metadata": {"finalizers": ["machine.machine.openshift.io"]},
            "spec": {"providerID": format!("azure://{vm}")}});
        api.patch(name, &PatchParams::default(), &Patch::Merge(written)).await?;
        let status = json!({"status": {"phase": "Provisioned", "providerStatus": {"vmId": vm, "vmState": "Running"}}});
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(())
    }

    /// Links one machine with its Node.
    async fn link_node(&self) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.still.server.client());
        let nodes = nodes.list(&ListParams::default()).await?;
        for machine in self.machines() {
            let status = &machine["status"];
            let name = machine["metadata"]["name"].as_str().unwrap_or_default();
            let joined = nodes.iter().find(|node| node.name_any() == name);
            let Some(node) = joined.filter(|_| status["nodeRef"].is_null() && status["phase"] == "Provisioned") else {
                continue;
            };
            if self.leads() {
                let reference = json!({"kind": "Node", "name": node.name_any(), "uid": node.uid()});
                let status = json!({"status": {"phase": "Running", "nodeRef": reference}});
                let patch = Patch::Merge(status);
                self.api().patch_status(name, &PatchParams::default(), &patch).await?;
            }
        }
        Ok(())
    }
}

/// Makes interface and virtual machine as the old controllers do. Returns what Azure refused.
pub fn put_as_before(still: &Still, name: &str) -> Vec<String> {
    let tags = json!({"kubernetes.io_cluster.ocp-x7": "owned"});
    let vm = still.id("Microsoft.Compute/virtualMachines", name);
    let nic = still.id("Microsoft.Network/networkInterfaces", &format!("{name}-nic"));
    let subnet = still.id(
        "Microsoft.Network/virtualNetworks",
        "capstan-vnet/subnets/worker-subnet",
    );
    let interface = json!({"location": "eastus", "tags": tags, "properties": {"ipConfigurations": [
        {"name": "pipConfig", "properties": {"subnet": {"id": subnet}, "privateIPAllocationMethod": "Dynamic"}}]}});
    let machine = json!({"location": "eastus", "tags": tags, "zones": ["1"], "properties": {
        "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
        "storageProfile": {
            "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"name": format!("{name}_OSDisk"), "createOption": "FromImage", "osType": "Linux"}},
        "osProfile": {"computerName": name, "adminUsername": "core", "adminPassword": "Aa1!aaaaaaaa"},
        "networkProfile": {"networkInterfaces": [{"id": nic, "properties": {"primary": true}}]},
    }});
    let mut refused = Vec::new();
    for (id, version, body) in [(nic, "2024-05-01", interface), (vm, "2024-07-01", machine)] {
        let path = format!("{id}?api-version={version}");
        let answer = still.azure.direct(Method::PUT, &path, body);
        if !answer.status.is_success() {
            refused.push(format!("{id}: {answer:?}"));
        }
    }
    refused
}

fn scaled(set: &str, replicas: usize) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": set},
           "spec": {"replicas": replicas}})
}

fn is_running(still: &Still, count: usize) -> bool {
    let machines = still.server.objects_of(API, "machines");
    machines.len() == count && machines.iter().all(|machine| machine["status"]["phase"] == "Running")
}

#[tokio::test(start_paused = true)]
async fn sets_grow_during_both_hand_overs_and_nobody_writes_beside_the_other() -> Result<()> {
    let still = Arc::new(Still::new(Config::default()).await?);
    let log = Arc::new(Log::default());
    still.openshift(azure()).await?;
    for set in ["a", "b"] {
        still.create(still.set(set, 0, json!({}))).await?;
    }
    let (watched, noted) = (Arc::downgrade(&still), log.clone());
    still.on_write(move |method, path| {
        let Some(still) = watched.upgrade() else { return };
        let holders = holders(&still);
        if holders != [HOLDER; 3] {
            noted
                .violations
                .lock()
                .push(format!("Capstan sends {method} {path} beside {holders:?}"));
        }
    });
    let old = OldPod::start(&still, &log, "old-1");
    still
        .until("the old controllers", |still| holders(still) == ["old-1"; 3])
        .await;
    let capstan = still.start(None)?;
    tokio::time::sleep(SECOND * 30).await;

    still.patch(scaled("a", MACHINES)).await?;
    tokio::time::sleep(SECOND * 7).await;
    drop(old);
    tokio::time::sleep(POD_START).await;
    assert!(!log.requested.lock().is_empty(), "the old controllers had begun");
    let _old = OldPod::start(&still, &log, "old-2");
    still.until("Capstan", |still| holders(still) == [HOLDER; 3]).await;
    still.until("the first set", |still| is_running(still, MACHINES)).await;

    still.patch(scaled("b", MACHINES)).await?;
    tokio::time::sleep(SECOND * 7).await;
    drop(capstan);
    still
        .until("the old controllers again", |still| holders(still) == ["old-2"; 3])
        .await;
    still
        .until("the second set", |still| is_running(still, MACHINES * 2))
        .await;

    let violations = log.violations.lock();
    assert!(violations.is_empty(), "{violations:#?}");
    let mut machines: Vec<Value> = still.server.objects_of(API, "machines");
    machines.sort_by_key(|machine| machine["metadata"]["name"].to_string());
    let names: Vec<&str> = machines
        .iter()
        .filter_map(|machine| machine["metadata"]["name"].as_str())
        .collect();
    assert_eq!(still.resources("virtualMachines"), names);
    let mut requested: BTreeMap<String, usize> = BTreeMap::new();
    let sent = still.azure.arm_requests();
    let made = sent
        .iter()
        .filter(|request| request.policy == "PutVM" && request.status < 300);
    let made = made.map(|request| request.path.to_lowercase());
    for path in made.chain(log.requested.lock().iter().cloned()) {
        *requested.entry(path).or_default() += 1;
    }
    assert_eq!(requested.len(), MACHINES * 2, "{requested:#?}");
    assert!(requested.values().all(|count| *count == 1), "{requested:#?}");
    assert!(
        !sent.iter().any(|request| request.method == "DELETE"),
        "nothing is deleted"
    );
    Ok(())
}
