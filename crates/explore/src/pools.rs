//! A machine pool on Azure.
//!
//! Checked at every write: our own cordons and deletions leave desired − maxUnavailable machines available; no more than
//! desired + maxSurge instances are asked for; an instance is deleted, updated or reimaged only when no Pod is left on its
//! Node; and no instance goes that neither a call of ours nor somebody else named: Azure never chooses.

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

use crate::world::{Call, Clouds, GROUP, Monitor, NAMESPACE, View, World, is_available, is_ready};
use crate::{Scenario, Trace};

const NAME: &str = "np";
/// Nobody has the private key.
const SSH_KEY: &str = "c3NoLWVkMjU1MTkgQUFBQUMzTnphQzFsWkRJMU5URTVBQUFBSUdGaFlXRmhZV0ZoWVdGaFlXRmhZV0ZoWVdGaFlXRmhZV0ZoWVdGaFlXRmggZXhwbG9yZXIK";
const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const CLUSTER_API: &str = "cluster.x-k8s.io/v1beta2";
/// A cache shows a change after this long at the latest: what changed within it may be unknown to the product.
const UNKNOWN: Duration = Duration::from_secs(120);
/// On the objects of machines that are updated in place.
const UPDATE: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/updateInstance";
/// On those whose node somebody else had cordoned before.
const CORDONED: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/cordoned";
/// The size of the OS disk, and one that Azure does not make.
const DISK: u32 = 30;
const TOO_LARGE: u32 = 4096;

/// What the user wants.
#[derive(Clone, Copy, Debug)]
struct Desired {
    replicas: usize,
    surge: usize,
    unavailable: usize,
    in_place: bool,
    image: usize,
}

impl Desired {
    /// The pool's `rollingUpdate`.
    fn rolling_update(&self) -> Value {
        let mode = if self.in_place { "InPlace" } else { "Replace" };
        json!({"maxSurge": self.surge, "maxUnavailable": self.unavailable, "deletePolicy": "Oldest", "mode": mode})
    }
}

pub struct Pools {
    desired: Desired,
    deleted: bool,
    /// Whether the spec is invalid: the pool keeps the model that it has.
    invalid: bool,
    monitor: Arc<Watch>,
    rng: Rng,
}

/// What the monitor knows.
#[derive(Default)]
struct Watch(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// What was desired, and until when.
    desired: Vec<(Option<Instant>, Desired)>,
    /// When a Node was last available.
    available: BTreeMap<String, Instant>,
    /// Nodes that the product has made unavailable.
    own: BTreeSet<String>,
    /// Provider ids of machines that somebody else wants to be gone.
    unwanted: BTreeSet<String>,
    /// When a Node was last seen not to be ready.
    unready: BTreeMap<String, Instant>,
    /// The instances before the write that Azure carries out.
    instances: BTreeSet<String>,
    /// Instances that a call of ours named.
    named: BTreeSet<String>,
}

impl Known {
    /// All that was desired lately.
    fn lately(&self) -> Vec<Desired> {
        let lately = |(until, _): &&(Option<Instant>, Desired)| until.is_none_or(|until| until.elapsed() < UNKNOWN);
        self.desired
            .iter()
            .filter(lately)
            .map(|(_, desired)| *desired)
            .collect()
    }

    fn floor(&self) -> usize {
        let floors = self
            .lately()
            .into_iter()
            .map(|d| d.replicas.saturating_sub(d.unavailable));
        floors.min().unwrap_or(0)
    }

    fn ceiling(&self) -> usize {
        self.lately()
            .into_iter()
            .map(|d| d.replicas + d.surge)
            .max()
            .unwrap_or(0)
    }

    fn observe(&mut self, view: &View) {
        let now = Instant::now();
        for node in view.server.objects("nodes") {
            let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if is_available(&node) {
                self.own.remove(&name);
                self.available.insert(name.clone(), now);
            }
            if !is_ready(&node) {
                self.unready.insert(name, now);
            }
        }
    }

    /// Notes the instances that stay. One that went must have been named by somebody.
    fn count(&mut self, view: &View) {
        let now: BTreeSet<String> = staying(view).into_keys().collect();
        let named = |id: &&String| self.named.contains(*id) || self.unwanted.contains(&provider_id(view, id));
        let chosen: Vec<&String> = self.instances.difference(&now).filter(|id| !named(id)).collect();
        if !chosen.is_empty() && view.azure.get(&set_id(view)).is_some() {
            view.trace.wrong(format!("Azure chose the instances {chosen:?} to go"));
        }
        self.instances = now;
    }

    /// The product makes a Node unavailable.
    fn take(&mut self, view: &View, node: &Value, why: &str) {
        let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let id = node["spec"]["providerID"].as_str().unwrap_or_default().to_lowercase();
        if !self.own.insert(name.clone()) || self.unwanted.contains(&id) {
            return;
        }
        // A Node that went by itself a moment ago may count as available still.
        let counted = |(other, at): &(&String, &Instant)| at.elapsed() < UNKNOWN && !self.own.contains(*other);
        let left = self.available.iter().filter(counted).count();
        if left < self.floor() {
            view.trace.wrong(format!(
                "{why} {name} leaves {left} machines available, less than {}",
                self.floor()
            ));
        }
    }
}

fn set_id(view: &View) -> String {
    format!(
        "/subscriptions/{}/resourcegroups/{GROUP}/providers/microsoft.compute/virtualmachinescalesets/{NAME}",
        view.azure.subscription
    )
}

/// Instances that are not being deleted, by id.
fn staying(view: &View) -> BTreeMap<String, Value> {
    let instances = view.azure.instances(&set_id(view)).into_iter();
    let staying = instances.filter(|instance| instance["properties"]["provisioningState"] != "Deleting");
    let id = |instance: &Value| instance["instanceId"].as_str().unwrap_or_default().to_owned();
    staying.map(|instance| (id(&instance), instance)).collect()
}

fn provider_id(view: &View, instance: &str) -> String {
    format!("azure://{}/virtualmachines/{instance}", set_id(view))
}

/// Instances that a call destroys, or restarts with a newer model, and whether it destroys them.
fn victims(call: &Call) -> (Vec<String>, bool) {
    let action = call.path.rsplit('/').next().unwrap_or_default();
    if call.method == Method::POST && matches!(action, "delete" | "reimage" | "reimageall" | "manualupgrade") {
        let ids = call.body["instanceIds"].as_array().into_iter().flatten();
        let ids = ids.filter_map(|id| id.as_str().map(str::to_owned)).collect();
        return (ids, action != "manualupgrade");
    }
    if call.method == Method::DELETE && call.path.contains("/virtualmachines/") {
        return (vec![action.to_owned()], true);
    }
    (Vec::new(), false)
}

impl Monitor for Watch {
    fn azure_before(&self, view: &View, call: &Call) {
        let mut known = self.0.lock();
        known.observe(view);
        known.count(view);
        let (victims, destroyed) = victims(call);
        known.named.extend(victims.iter().filter(|_| destroyed).cloned());
        for id in victims {
            let Some(node) = view.node(&provider_id(view, &id)) else {
                continue;
            };
            let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let pods = view.pods_on(&name);
            // Pods on a Node that does not answer cannot end.
            let silent = known.unready.get(&name).is_some_and(|at| at.elapsed() < UNKNOWN);
            if !pods.is_empty() && !silent {
                view.trace
                    .wrong(format!("instance {id} goes while {name} has the pods {pods:?}"));
            }
            if is_available(&node) {
                known.take(view, &node, "the call for");
            }
        }
        view.trace.note(format!(
            "   {} instances, {} {}",
            known.instances.len(),
            call.method,
            summary(call)
        ));
    }

    fn azure_after(&self, view: &View, call: &Call) {
        let mut known = self.0.lock();
        let changes = matches!(call.method, Method::PUT | Method::PATCH) && call.path == set_id(view);
        let (before, count) = (known.instances.len(), staying(view).len());
        // A capacity that only confirms the instances that are there adds none.
        if changes && count > known.ceiling() && count > before {
            view.trace
                .wrong(format!("{count} instances, more than {}", known.ceiling()));
        }
        known.count(view);
    }

    fn kube_after(&self, view: &View, path: &str, before: Option<&Value>) {
        let mut known = self.0.lock();
        known.observe(view);
        let Some(before) = before else { return };
        let name = &before["metadata"]["name"];
        let cordoned = |node: &Value| node["spec"]["unschedulable"] == true;
        let now = view
            .server
            .objects("nodes")
            .into_iter()
            .find(|node| node["metadata"]["name"] == *name);
        if is_available(before) && now.as_ref().is_some_and(cordoned) {
            known
                .available
                .insert(name.as_str().unwrap_or_default().to_owned(), Instant::now());
            known.take(view, before, "the cordon of");
        }
        if path.contains("/nodes/") {
            view.trace.note(format!("   {} available", known.available.len()));
        }
    }
}

fn summary(call: &Call) -> String {
    match &call.body {
        Value::Null => String::new(),
        body if body["sku"].is_object() => format!("capacity {}", body["sku"]["capacity"]),
        body => body["instanceIds"].to_string(),
    }
}

fn image(version: usize) -> String {
    format!("/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node-{version}")
}

impl Pools {
    fn change(&mut self, mut desired: Desired) {
        if self.deleted {
            desired.replicas = 0;
        }
        let mut known = self.monitor.0.lock();
        if let Some(last) = known.desired.last_mut() {
            last.0 = Some(Instant::now());
        }
        known.desired.push((None, desired));
        self.desired = desired;
    }

    async fn objects(&self, world: &World) -> Result<()> {
        let view = &world.view;
        let azure = &view.azure;
        let secret = |name: &str, data: Value| {
            json!({"apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret", "metadata": {"name": name,
                "labels": {"cluster.x-k8s.io/cluster-name": "c"}}, "stringData": data})
        };
        let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "https://in-process"}}],
            "users": [{"name": "u", "user": {"token": "t"}}]});
        for object in [
            secret("azure", json!({"clientSecret": azure.client_secret})),
            secret("c-kubeconfig", json!({"value": kubeconfig.to_string()})),
            secret("boot", json!({"value": "#cloud-config\n{}\n"})),
        ] {
            world.create("secrets", object).await?;
        }
        let identity = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": {"name": "sp"},
            "spec": {"type": "ServicePrincipal", "tenantID": azure.tenant, "clientID": azure.client_id,
                "clientSecret": {"name": "azure", "namespace": NAMESPACE}, "allowedNamespaces": {}}});
        world.create("azureclusteridentities", identity).await?;
        let cluster = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": {"name": "c"}, "spec": {
            "subscriptionID": azure.subscription, "location": "eastus", "resourceGroup": GROUP,
            "identityRef": {"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": "sp"},
            "networkSpec": {"vnet": {"name": "capstan-vnet"}, "subnets": [{"name": "node-subnet", "role": "node"}]}}});
        world.create("azureclusters", cluster).await?;
        let reference =
            |kind: &str, name: &str| json!({"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": kind, "name": name});
        let cluster = json!({"apiVersion": CLUSTER_API, "kind": "Cluster", "metadata": {"name": "c"},
            "spec": {"infrastructureRef": reference("AzureCluster", "c")}});
        world.create("clusters", cluster).await?;
        let pool = json!({"apiVersion": CLUSTER_API, "kind": "MachinePool", "metadata": {"name": NAME}, "spec": {
            "clusterName": "c", "replicas": self.desired.replicas, "template": {"spec": {"clusterName": "c",
                "version": "v1.35.0", "bootstrap": {"dataSecretName": "boot"},
                "infrastructureRef": reference("AzureMachinePool", NAME)}}}});
        world.create("machinepools", pool).await?;
        let pool = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": {"name": NAME}, "spec": {
            "location": "eastus",
            "strategy": {"type": "RollingUpdate", "rollingUpdate": self.desired.rolling_update()},
            "template": {"vmSize": "Standard_D2s_v3", "osDisk": {"osType": "Linux", "diskSizeGB": DISK},
                "image": {"id": image(self.desired.image)}, "sshPublicKey": SSH_KEY}}});
        world.create("azuremachinepools", pool).await?;
        let set = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "web"}, "spec": {}});
        world.create("replicasets", set).await?;
        let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}});
        world.create("poddisruptionbudgets", budget).await?;
        Ok(())
    }

    /// A machine of the pool, by chance.
    fn machine(&mut self, world: &World) -> Option<Value> {
        self.rng
            .pick(&world.view.server.objects("azuremachinepoolmachines"))
            .cloned()
    }

    async fn unwanted(&mut self, world: &World, id: &str) {
        self.monitor.0.lock().unwanted.insert(id.to_lowercase());
        world.trace.note(format!("others: {id} is to go"));
    }

    /// Somebody adds instances to the scale set in Azure, or takes some away, and Azure chooses them.
    fn capacity_by_others(&mut self, world: &World) {
        let view = &world.view;
        let ids: Vec<String> = staying(view).into_keys().collect();
        if view.azure.get(&set_id(view)).is_none() {
            return;
        }
        let capacity = self.rng.below(ids.len() + 3);
        world.trace.note(format!("others: capacity {capacity}"));
        if capacity < ids.len() {
            let mut known = self.monitor.0.lock();
            known.unwanted.extend(ids.iter().map(|id| provider_id(view, id)));
        }
        let body = json!({"sku": {"capacity": capacity}});
        view.azure.direct(Method::PATCH, &set_id(view), body);
    }

    /// Makes the spec invalid, or valid again.
    async fn resize_disk(&mut self, world: &World, size: u32) -> Result<()> {
        if self.deleted {
            return Ok(());
        }
        self.invalid = size != DISK;
        let patch = json!({"spec": {"template": {"osDisk": {"diskSizeGB": size}}}});
        world.patch(INFRASTRUCTURE, "azuremachinepools", NAME, patch).await
    }

    async fn cordon(&mut self, world: &World, cordon: bool) -> Result<()> {
        let Some(node) = self.rng.pick(&world.view.server.objects("nodes")).cloned() else {
            return Ok(());
        };
        let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let unschedulable = if cordon { json!(true) } else { Value::Null };
        world
            .patch("v1", "nodes", &name, json!({"spec": {"unschedulable": unschedulable}}))
            .await
    }
}

impl Scenario for Pools {
    const NAME: &'static str = "pools";

    fn prepare(seed: u64, trace: Trace) -> BoxFuture<'static, Result<(Self, World)>> {
        Box::pin(async move {
            let mut rng = Rng::new(seed ^ 0x9001);
            let (surge, unavailable) = [(1, 0), (0, 1), (1, 1), (2, 0), (2, 1)][rng.below(5)];
            let desired = Desired {
                replicas: rng.below(4) + 1,
                surge,
                unavailable,
                in_place: rng.chance(40),
                image: 1,
            };
            let monitor = Arc::new(Watch::default());
            let mut pools = Self {
                desired,
                deleted: false,
                invalid: false,
                monitor: monitor.clone(),
                rng,
            };
            pools.change(desired);
            let config = Config {
                times: Times {
                    instance_create: Span::between(Duration::from_secs(20), Duration::from_secs(90)),
                    instance_delete: Span::between(Duration::from_secs(5), Duration::from_secs(60)),
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
                Box::pin(async move { Ok(capstan_azure_pools::run(context, clouds.azure, Default::default()).await?) })
            };
            let world = World::new(seed, config, process, monitor, trace).await?;
            pools.objects(&world).await?;
            Ok((pools, world))
        })
    }

    fn edit<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut desired = self.desired;
            match self.rng.below(14) {
                0 | 1 => {
                    desired.replicas = self.rng.below(5) + 1;
                    self.change(desired);
                    let patch = json!({"spec": {"replicas": desired.replicas}});
                    world.patch(CLUSTER_API, "machinepools", NAME, patch).await?;
                }
                2 | 3 => {
                    desired.image += 1;
                    self.change(desired);
                    let patch = json!({"spec": {"template": {"image": {"id": image(desired.image)}}}});
                    world.patch(INFRASTRUCTURE, "azuremachinepools", NAME, patch).await?;
                }
                4 => {
                    (desired.surge, desired.unavailable) = [(1, 0), (0, 1), (1, 1), (2, 0)][self.rng.below(4)];
                    desired.in_place = self.rng.chance(40);
                    self.change(desired);
                    let patch = json!({"spec": {"strategy": {"rollingUpdate": desired.rolling_update()}}});
                    world.patch(INFRASTRUCTURE, "azuremachinepools", NAME, patch).await?;
                }
                5 => {
                    if let Some(machine) = self.machine(world) {
                        let (name, id) = (&machine["metadata"]["name"], &machine["spec"]["providerID"]);
                        self.unwanted(world, id.as_str().unwrap_or_default()).await;
                        world
                            .delete(
                                INFRASTRUCTURE,
                                "azuremachinepoolmachines",
                                name.as_str().unwrap_or_default(),
                            )
                            .await?;
                    }
                }
                6 => self.cordon(world, true).await?,
                7 => {
                    let ids: Vec<String> = staying(&world.view).into_keys().collect();
                    if let Some(id) = self.rng.pick(&ids).cloned() {
                        self.unwanted(world, &provider_id(&world.view, &id)).await;
                        world
                            .view
                            .azure
                            .vanish(&format!("{}/virtualMachines/{id}", set_id(&world.view)));
                    }
                }
                8 => self.capacity_by_others(world),
                // Most seeds keep their pool.
                9 if self.rng.chance(30) => {
                    desired.replicas = 0;
                    self.change(desired);
                    self.deleted = true;
                    world.delete(INFRASTRUCTURE, "azuremachinepools", NAME).await?;
                }
                10 => self.resize_disk(world, TOO_LARGE).await?,
                11 => self.resize_disk(world, DISK).await?,
                _ => world.schedule().await?,
            }
            Ok(())
        })
    }

    fn missing(&self, world: &World) -> Vec<String> {
        let (view, mut missing) = (&world.view, Vec::new());
        if self.deleted {
            for kind in ["azuremachinepools", "azuremachinepoolmachines"] {
                let left = view.server.objects(kind).len();
                missing.extend((left > 0).then(|| format!("{left} {kind} are left")));
            }
            let set = view.azure.get(&set_id(view));
            missing.extend(set.map(|_| "the scale set is left".to_owned()));
            return missing;
        }
        let instances = staying(view);
        if instances.len() != self.desired.replicas {
            missing.push(format!("{} instances of {}", instances.len(), self.desired.replicas));
        }
        for (id, instance) in &instances {
            let has = instance.pointer("/properties/storageProfile/imageReference/id");
            if has != Some(&json!(image(self.desired.image))) && !self.invalid {
                missing.push(format!("instance {id} has an old image"));
            }
            if !view
                .node(&provider_id(view, id))
                .is_some_and(|node| is_available(&node))
            {
                missing.push(format!("instance {id} has no available node"));
            }
        }
        let machines = view.server.objects("azuremachinepoolmachines");
        let good = |machine: &&Value| {
            let status = &machine["status"];
            status["ready"] == true
                && (status["latestModelApplied"] == true || self.invalid)
                && machine["metadata"]["annotations"][UPDATE].is_null()
                && machine["metadata"]["deletionTimestamp"].is_null()
        };
        let ready = machines.iter().filter(good).count();
        if ready != machines.len() || ready != self.desired.replicas {
            missing.push(format!("{ready} of {} machine objects are ready", machines.len()));
        }
        missing
    }

    fn settle<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            // A pool whose spec stays invalid ends what is under way, too.
            let pools = world.view.server.objects("azuremachinepools");
            let made = pools.iter().any(|pool| pool["spec"]["providerID"].is_string());
            if !made || self.rng.chance(50) {
                self.resize_disk(world, DISK).await?;
            }
            for machine in world.view.server.objects("azuremachinepoolmachines") {
                let name = machine["metadata"]["name"].as_str().unwrap_or_default();
                if machine["metadata"]["annotations"][CORDONED].is_string() {
                    let patch = json!({"metadata": {"annotations": {CORDONED: null}}});
                    world
                        .patch(INFRASTRUCTURE, "azuremachinepoolmachines", name, patch)
                        .await?;
                }
            }
            for node in world.view.server.objects("nodes") {
                let name = node["metadata"]["name"].as_str().unwrap_or_default();
                world
                    .patch("v1", "nodes", name, json!({"spec": {"unschedulable": null}}))
                    .await?;
            }
            Ok(())
        })
    }
}
