//! Machines of OpenShift on Azure.
//!
//! Checked at every write: a VM is made once for a machine, and never again after it was up; a VM is deleted only when its
//! machine is, and when no Pod is left on its Node; a disk that is to be kept is never deleted. In the end each machine has
//! one VM, and a machine that is gone leaves nothing but the disks that are to be kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use capstan_sim::azure::{Config, Span, Times, joiner};
use capstan_testkit::apiserver::Rng;
use futures::future::BoxFuture;
use http::Method;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::world::{Call, Clouds, GROUP, Monitor, NAMESPACE, View, World, is_ready};
use crate::{Scenario, Trace};

const VERSION: &str = "machine.openshift.io/v1beta1";
/// A Node that was not ready within this time may have Pods that cannot end.
const SILENT: Duration = Duration::from_secs(120);

pub struct Machines {
    monitor: Arc<Watch>,
    made: usize,
    rng: Rng,
}

#[derive(Default)]
struct Watch(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// VMs that were up once, by name.
    up: BTreeSet<String>,
    /// Machines whose provisioning has failed in Azure, or whose VM somebody else has removed: their Nodes may never join,
    /// and a MachineHealthCheck would replace them.
    lost: BTreeSet<String>,
    /// Disks that are to be kept, once they exist.
    kept: BTreeSet<String>,
    /// When a Node was last seen not to be ready.
    unready: BTreeMap<String, Instant>,
}

fn names(view: &View, kind: &str) -> Vec<String> {
    let mut names: Vec<String> = view.azure.ids(kind).iter().filter_map(|id| last(id)).collect();
    names.sort();
    names
}

fn last(path: &str) -> Option<String> {
    path.rsplit('/').next().map(str::to_lowercase)
}

fn machine(view: &View, name: &str) -> Option<Value> {
    let mut machines = openshift(view).into_iter();
    machines.find(|machine| machine["metadata"]["name"] == name)
}

/// Cluster API has a kind of the same name.
fn openshift(view: &View) -> Vec<Value> {
    view.server.objects_of("machine.openshift.io", "machines")
}

fn vm_id(view: &View, name: &str) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/{GROUP}/providers/Microsoft.Compute/virtualMachines/{name}",
        view.azure.subscription
    )
}

impl Known {
    fn observe(&mut self, view: &View) {
        let now = Instant::now();
        for node in view.server.objects("nodes") {
            let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if is_ready(&node) {
                self.up.insert(name);
            } else {
                self.unready.insert(name, now);
            }
        }
        for name in names(view, "virtualMachines") {
            let vm = view.azure.get(&vm_id(view, &name));
            if vm.is_some_and(|vm| vm["properties"]["provisioningState"] == "Failed") {
                self.lost.insert(name);
            }
        }
        self.kept
            .extend(names(view, "disks").into_iter().filter(|name| name.ends_with("_kept")));
    }

    fn delete_vm(&self, view: &View, name: &str) {
        let Some(machine) = machine(view, name) else {
            return view
                .trace
                .wrong(format!("VM {name} goes and its machine is gone already"));
        };
        let failed = machine["status"]["phase"] == "Failed" || !self.up.contains(name);
        if machine["metadata"]["deletionTimestamp"].is_null() && !failed {
            view.trace.wrong(format!("VM {name} goes although its machine stays"));
        }
        let silent = self.unready.get(name).is_some_and(|at| at.elapsed() < SILENT);
        let pods = view.pods_on(name);
        let there = view
            .server
            .objects("nodes")
            .iter()
            .any(|node| node["metadata"]["name"] == name);
        if there && !pods.is_empty() && !silent {
            view.trace
                .wrong(format!("VM {name} goes while its node has the pods {pods:?}"));
        }
    }
}

impl Monitor for Watch {
    fn azure_before(&self, view: &View, call: &Call) {
        let mut known = self.0.lock();
        known.observe(view);
        let Some(name) = last(&call.path) else { return };
        if call.path.contains("/virtualmachines/") && call.method == Method::PUT {
            if machine(view, &name).is_none() {
                view.trace
                    .wrong(format!("a VM is made for {name}, which does not exist"));
            }
            let exists = names(view, "virtualMachines").contains(&name);
            if known.up.contains(&name) && !exists {
                view.trace.wrong(format!("VM {name} was up once and is made again"));
            }
        }
        if call.path.contains("/virtualmachines/") && call.method == Method::DELETE {
            known.delete_vm(view, &name);
        }
        if call.path.contains("/disks/") && call.method == Method::DELETE && name.ends_with("_kept") {
            view.trace
                .wrong(format!("disk {name} is deleted although it is to be kept"));
        }
    }

    fn azure_after(&self, view: &View, _: &Call) {
        self.0.lock().observe(view);
    }

    fn kube_after(&self, view: &View, _: &str, _: Option<&Value>) {
        self.0.lock().observe(view);
    }
}

impl Machines {
    async fn make(&mut self, world: &World) -> Result<()> {
        self.made += 1;
        let name = format!("m{}", self.made);
        let disk = |suffix: &str, lun: usize, policy: &str| {
            json!({"nameSuffix": suffix, "lun": lun, "diskSizeGB": 4, "deletionPolicy": policy,
                "managedDisk": {"storageAccountType": "Premium_LRS"}})
        };
        let disks = match self.rng.below(3) {
            0 => json!([]),
            1 => json!([disk("gone", 0, "Delete")]),
            _ => json!([disk("gone", 0, "Delete"), disk("kept", 1, "Detach")]),
        };
        let value = json!({
            "apiVersion": VERSION, "kind": "AzureMachineProviderSpec", "vmSize": "Standard_D4s_v3",
            "vnet": "capstan-vnet", "subnet": "worker-subnet", "zone": "1", "dataDisks": disks,
            "image": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
            "publicIP": self.rng.chance(30), "userDataSecret": {"name": "worker-user-data"},
            "credentialsSecret": {"name": "azure-cloud-credentials", "namespace": NAMESPACE},
        });
        world.trace.note(format!("user: create machine {name}"));
        let machine = json!({"apiVersion": VERSION, "kind": "Machine", "metadata": {"name": name,
            "labels": {"machine.openshift.io/cluster-api-cluster": "c"}}, "spec": {"providerSpec": {"value": value}}});
        world.create("machines", machine).await?;
        Ok(())
    }

    fn pick(&mut self, world: &World) -> Option<String> {
        let machine = self.rng.pick(&openshift(&world.view)).cloned()?;
        machine["metadata"]["name"].as_str().map(str::to_owned)
    }
}

impl Scenario for Machines {
    const NAME: &'static str = "machines";

    fn prepare(seed: u64, trace: Trace) -> BoxFuture<'static, Result<(Self, World)>> {
        Box::pin(async move {
            let monitor = Arc::new(Watch::default());
            let mut machines = Self {
                monitor: monitor.clone(),
                made: 0,
                rng: Rng::new(seed ^ 0x0c9),
            };
            let config = Config {
                times: Times {
                    vm_create: Span::between(Duration::from_secs(20), Duration::from_secs(90)),
                    vm_delete: Span::between(Duration::from_secs(5), Duration::from_secs(60)),
                    network: Span::between(Duration::ZERO, Duration::from_secs(5)),
                    latency: Span::between(Duration::from_millis(10), Duration::from_millis(400)),
                    ..Times::default()
                },
                joiner: Some(joiner::Options {
                    ready_after: Some(Span::between(Duration::from_secs(1), Duration::from_secs(40))),
                    ..joiner::Options::default()
                }),
                ..Config::default()
            };
            let process = |context, clouds: Clouds| -> BoxFuture<'static, Result<()>> {
                Box::pin(async move { Ok(capstan_openshift::run(context, clouds.azure).await?) })
            };
            let world = World::new(seed, config, process, monitor, trace).await?;
            let azure = &world.view.azure;
            let secret = |name: &str, data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data});
            let credentials = json!({"azure_subscription_id": azure.subscription, "azure_tenant_id": azure.tenant,
                "azure_client_id": azure.client_id, "azure_client_secret": azure.client_secret,
                "azure_resourcegroup": GROUP, "azure_region": "eastus"});
            world
                .create("secrets", secret("azure-cloud-credentials", credentials))
                .await?;
            let data = json!({"userData": r#"{"ignition":{"version":"3.2.0"}}"#});
            world.create("secrets", secret("worker-user-data", data)).await?;
            let set = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "web"}, "spec": {}});
            world.create("replicasets", set).await?;
            machines.make(&world).await?;
            machines.make(&world).await?;
            Ok((machines, world))
        })
    }

    fn edit<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            match self.rng.below(8) {
                0 | 1 => self.make(world).await?,
                2 | 3 => {
                    if let Some(name) = self.pick(world) {
                        world.delete(VERSION, "machines", &name).await?;
                    }
                }
                4 => {
                    if let Some(name) = self.pick(world) {
                        world.trace.note(format!("others: VM {name} vanishes"));
                        self.monitor.0.lock().lost.insert(name.clone());
                        world.view.azure.vanish(&vm_id(&world.view, &name));
                    }
                }
                5 => {
                    if let Some(name) = self.pick(world) {
                        world
                            .patch("v1", "nodes", &name, json!({"spec": {"unschedulable": true}}))
                            .await?;
                    }
                }
                _ => world.schedule().await?,
            }
            Ok(())
        })
    }

    fn missing(&self, world: &World) -> Vec<String> {
        let (view, mut missing) = (&world.view, Vec::new());
        let machines = openshift(view);
        let vms = names(view, "virtualMachines");
        let mut expected = BTreeSet::new();
        for machine in &machines {
            let name = machine["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let phase = machine["status"]["phase"].as_str().unwrap_or_default();
            if !machine["metadata"]["deletionTimestamp"].is_null() {
                missing.push(format!("{name} is being deleted"));
            } else if phase == "Running" {
                if !vms.contains(&name) {
                    missing.push(format!("{name} is Running and has no VM"));
                }
            } else if phase != "Failed" && !self.monitor.0.lock().lost.contains(&name) {
                missing.push(format!("{name} is {phase}"));
            }
            expected.insert(name);
        }
        for vm in vms.iter().filter(|vm| !expected.contains(*vm)) {
            missing.push(format!("VM {vm} has no machine"));
        }
        let owned = |name: &str, suffix: &str| {
            name.strip_suffix(suffix)
                .is_some_and(|machine| expected.contains(machine))
        };
        for nic in names(view, "networkInterfaces")
            .iter()
            .filter(|nic| !owned(nic, "-nic"))
        {
            missing.push(format!("interface {nic} has no machine"));
        }
        for disk in names(view, "disks") {
            let stays = disk.ends_with("_kept") || owned(&disk, "_osdisk") || owned(&disk, "_gone");
            if !stays {
                missing.push(format!("disk {disk} has no machine"));
            }
        }
        let disks: BTreeSet<String> = names(view, "disks").into_iter().collect();
        for lost in self.monitor.0.lock().kept.iter().filter(|kept| !disks.contains(*kept)) {
            missing.push(format!("disk {lost} was to be kept and is gone"));
        }
        missing
    }

    fn settle<'a>(&'a mut self, _: &'a mut World) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
