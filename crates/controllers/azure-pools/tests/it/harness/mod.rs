//! A pool on a simulated Azure, with the controllers running beside the test, and a watch over both budget bounds.

mod watch;

pub use watch::Bounds;

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use capstan_api::azure::{AzureCluster, AzureClusterIdentity, AzureMachinePool, AzureMachinePoolMachine};
use capstan_azure::{Cloud, Settings};
use capstan_core::interceptor::Interceptors;
use capstan_kube::capi::{Cluster, MachinePool};
use capstan_kube::nodes::takes_pods;
use capstan_sim::azure::{Azure, Config, Handle, Network, Strict, joiner};
use capstan_testkit::{ControlPlane, Harness, Running};
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub use capstan_testkit::PATIENCE;

pub const GROUP: &str = "capstan";

static NUMBER: AtomicUsize = AtomicUsize::new(0);

pub struct Options {
    pub replicas: usize,
    pub surge: Value,
    pub unavailable: Value,
    pub sim: Config,
    /// Merged into the pool's spec.
    pub spec: Value,
    /// Where the machines' nodes live, if not where their objects do.
    pub workload: Option<ControlPlane>,
    /// The resource group, as the AzureCluster spells it.
    pub group: &'static str,
    /// The pool's name, if not a short one.
    pub name: Option<&'static str>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            replicas: 3,
            surge: json!(1),
            unavailable: json!(0),
            sim: Config::quick(),
            spec: json!({}),
            workload: None,
            group: GROUP,
            name: None,
        }
    }
}

pub struct World {
    harness: Harness,
    /// The pool's name, and the scale set's.
    pub name: String,
    pub group: &'static str,
    pub sim: Arc<Handle>,
    pub bounds: Arc<Bounds>,
    /// How long anything is waited for.
    pub patience: Duration,
    workload: Option<ControlPlane>,
    running: Option<Running>,
    sampler: tokio::task::JoinHandle<()>,
}

impl Deref for World {
    type Target = Harness;

    fn deref(&self) -> &Harness {
        &self.harness
    }
}

impl World {
    /// Everything up to a pool whose machines are all ready.
    pub async fn with_pool(options: Options) -> Result<Self> {
        let replicas = options.replicas;
        let world = Self::start(options).await?;
        world.until_ready(replicas).await?;
        Ok(world)
    }

    pub async fn start(options: Options) -> Result<Self> {
        Self::prepare(options).await?.started().await
    }

    /// Runs the controllers.
    pub async fn started(mut self) -> Result<Self> {
        self.run(Interceptors::default()).await?;
        Ok(self)
    }

    /// Everything but the controllers.
    pub async fn prepare(options: Options) -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        plane.install_cluster_api_crds().await?;
        Self::prepare_on(plane, options).await
    }

    /// The same on a control plane that has Cluster API's definitions already.
    pub async fn prepare_on(plane: ControlPlane, mut options: Options) -> Result<Self> {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let harness = Harness::new(plane, "pools").await?;
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let short = || format!("np{number}-{}", harness.namespace.rsplit('-').next().unwrap());
        let name = options.name.map_or_else(short, str::to_owned);
        let nodes = match &options.workload {
            Some(workload) => workload.client().await?,
            None => harness.client.clone(),
        };
        let sim = Azure::start(Config {
            joiner: Some(joiner::Options::client(nodes)),
            networks: vec![Network {
                group: options.group.to_owned(),
                ..Network::default()
            }],
            strict: Strict::ALL,
            ..options.sim.clone()
        })
        .await?;
        let (sim, bounds) = (Arc::new(sim), Arc::new(Bounds::default()));
        let sampler = tokio::spawn(async {});
        let workload = options.workload.take();
        let world = Self {
            harness,
            name,
            group: options.group,
            sim,
            bounds,
            patience: PATIENCE,
            workload,
            running: None,
            sampler,
        };
        world.make_cluster().await?;
        world.make_pool(&world.name, &options).await?;
        Ok(world)
    }

    pub async fn run(&mut self, interceptors: Interceptors) -> Result<()> {
        let shutdown = CancellationToken::new();
        let options = capstan_kube::Options {
            interceptors: interceptors.clone(),
            namespace: Some(self.namespace.clone()),
            shutdown: shutdown.clone(),
            ..Default::default()
        };
        let context = capstan_kube::Context::new(self.plane.config().await?, options)?;
        let cloud = Cloud::custom("sim", &self.sim.url, &self.sim.url)?;
        let azure = capstan_azure::Clients::new(Settings {
            ca_file: Some(self.sim.ca_file.clone()),
            interceptors,
            ..Settings::new(cloud)
        })?;
        self.running = Some(Running::new(shutdown, async move {
            if let Err(error) = capstan_azure_pools::run(context, azure, Default::default()).await {
                panic!("the controllers ended: {error}");
            }
        }));
        Ok(())
    }

    /// Stops the controllers as a crash does: in the middle of whatever they do.
    pub async fn crash(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill().await;
        }
    }

    /// Watches the bounds from now on, at every change of a node and every few milliseconds.
    pub fn watch_bounds(&mut self, floor: usize, ceiling: usize) {
        self.bounds.set(floor, ceiling);
        let (bounds, client, set) = (self.bounds.clone(), self.client.clone(), self.set_id());
        let (sim, vms) = (self.sim.clone(), self.vm_prefix());
        self.sampler = tokio::spawn(async move {
            let nodes: Api<Node> = Api::all(client.clone());
            let cache = capstan_kube::Cache::start(
                nodes,
                kube::runtime::watcher::Config::default(),
                capstan_kube::cache::trim_node,
                CancellationToken::new(),
            );
            let _ = cache.ready().await;
            // Kubernetes may taint a node that was not ready after it is ready again: a node that took pods before, and that
            // is ready and not cordoned, is not taken away by the pool.
            let mut took_pods: BTreeSet<String> = BTreeSet::new();
            loop {
                let mut instances: Vec<String> = sim.ids("virtualMachines");
                // Those that Azure is deleting do not count.
                let stays = |vm: &Value| vm["properties"]["provisioningState"] != "Deleting";
                instances.retain(|id| id.to_lowercase().starts_with(&vms) && sim.get(id).is_some_and(|vm| stays(&vm)));
                let uniform = sim.instances(&set).into_iter().filter(stays);
                instances.extend(uniform.map(|i| i["id"].to_string()));
                let ours = |node: &Node| is_node_of(node, &set, &vms);
                let cordoned = |node: &Node| {
                    node.spec
                        .as_ref()
                        .and_then(|spec| spec.unschedulable)
                        .unwrap_or_default()
                };
                let ready = cache.select(None, |node| ours(node) && capstan_kube::nodes::is_ready(node));
                let took: Vec<String> = ready
                    .iter()
                    .filter(|node| takes_pods(node))
                    .map(|node| node.name_any())
                    .collect();
                took_pods.extend(took);
                let usable = |node: &&Arc<Node>| !cordoned(node) && took_pods.contains(&node.name_any());
                bounds.check(ready.iter().filter(usable).count(), &instances, || {
                    let nodes = cache.select(None, ours);
                    let state = |node: &Arc<Node>| {
                        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
                        let ready = conditions.into_iter().flatten().find(|c| c.type_ == "Ready");
                        let ready = ready.map(|c| (c.status.clone(), c.reason.clone()));
                        format!("{} ready {ready:?} cordoned {}", node.name_any(), cordoned(node))
                    };
                    nodes.iter().map(state).collect::<Vec<_>>().join(", ")
                });
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
        });
    }

    pub fn set_id(&self) -> String {
        format!(
            "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/virtualMachineScaleSets/{}",
            self.sim.subscription, self.group, self.name
        )
    }

    /// What the ids of a Flexible set's machines begin with.
    fn vm_prefix(&self) -> String {
        let id = self.set_id().to_lowercase();
        format!("{}_", id.replace("/virtualmachinescalesets/", "/virtualmachines/"))
    }

    /// The ids of a Flexible set's machines.
    pub fn vm_ids(&self) -> Vec<String> {
        let mut ids = self.sim.ids("virtualMachines");
        ids.retain(|id| id.to_lowercase().starts_with(&self.vm_prefix()));
        ids
    }

    async fn make_cluster(&self) -> Result<()> {
        let sim = &self.sim;
        self.create::<Secret>(json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "azure" },
            "stringData": { "clientSecret": sim.client_secret }
        }))
        .await?;
        self.create::<AzureClusterIdentity>(json!({
            "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureClusterIdentity",
            "metadata": { "name": "sp" },
            "spec": {
                "type": "ServicePrincipal", "tenantID": sim.tenant, "clientID": sim.client_id,
                "clientSecret": { "name": "azure", "namespace": self.namespace }, "allowedNamespaces": {}
            }
        }))
        .await?;
        self.create::<AzureCluster>(json!({
            "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureCluster",
            "metadata": { "name": "c" },
            "spec": {
                "subscriptionID": sim.subscription, "location": "eastus", "resourceGroup": self.group,
                "identityRef": {
                    "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureClusterIdentity", "name": "sp"
                },
                "networkSpec": {
                    "vnet": { "name": "capstan-vnet" },
                    "subnets": [{ "name": "node-subnet", "role": "node" }]
                }
            }
        }))
        .await?;
        self.create::<Cluster>(json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "metadata": { "name": "c" },
            "spec": { "infrastructureRef": {
                "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureCluster", "name": "c"
            } }
        }))
        .await?;
        self.create::<Secret>(json!({
            "apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
            "metadata": { "name": "c-kubeconfig", "labels": { "cluster.x-k8s.io/cluster-name": "c" } },
            "stringData": { "value": self.kubeconfig()? }
        }))
        .await?;
        self.create::<Secret>(json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "boot" },
            "stringData": { "value": "#cloud-config\ntoken: abcdef.0123456789abcdef\n" }
        }))
        .await?;
        Ok(())
    }

    /// How to reach the cluster that the nodes are in.
    pub fn kubeconfig(&self) -> Result<String> {
        let plane = self.workload.as_ref().unwrap_or(&self.plane);
        Ok(std::fs::read_to_string(plane.kubeconfig())?)
    }

    /// Where the nodes are.
    pub async fn nodes(&self) -> Result<Api<Node>> {
        Ok(Api::all(match &self.workload {
            Some(workload) => workload.client().await?,
            None => self.client.clone(),
        }))
    }

    pub async fn make_pool(&self, name: &str, options: &Options) -> Result<()> {
        self.create::<MachinePool>(json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": name },
            "spec": {
                "clusterName": "c", "replicas": options.replicas,
                "template": { "spec": {
                    "clusterName": "c", "version": "v1.35.0", "bootstrap": { "dataSecretName": "boot" },
                    "infrastructureRef": {
                        "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureMachinePool", "name": name
                    }
                } }
            }
        }))
        .await?;
        let mut pool = json!({
            "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureMachinePool",
            "metadata": { "name": name },
            "spec": {
                "location": "eastus",
                "strategy": { "type": "RollingUpdate", "rollingUpdate": {
                    "maxSurge": options.surge, "maxUnavailable": options.unavailable, "deletePolicy": "Oldest"
                } },
                "template": {
                    "vmSize": "Standard_D2s_v3",
                    "osDisk": { "osType": "Linux", "diskSizeGB": 30 },
                    "image": { "id": image(1) },
                    "sshPublicKey": ""
                }
            }
        });
        merge(&mut pool["spec"], &options.spec);
        self.create::<AzureMachinePool>(pool).await?;
        Ok(())
    }

    /// A new image for the pool.
    pub async fn upgrade(&self, version: u32) -> Result<()> {
        let patch = json!({ "spec": { "template": { "image": { "id": image(version) } } } });
        self.patch::<AzureMachinePool>(&self.name, patch).await?;
        Ok(())
    }

    pub async fn scale(&self, replicas: usize) -> Result<()> {
        self.patch::<MachinePool>(&self.name, json!({ "spec": { "replicas": replicas } }))
            .await?;
        Ok(())
    }

    pub async fn pool(&self) -> Result<AzureMachinePool> {
        Ok(self.api().get(&self.name).await?)
    }

    pub async fn machines(&self) -> Result<Vec<AzureMachinePoolMachine>> {
        Ok(self.api().list(&ListParams::default()).await?.items)
    }

    pub async fn delete_machine(&self, name: &str) -> Result<()> {
        self.api::<AzureMachinePoolMachine>()
            .delete(name, &DeleteParams::default())
            .await?;
        Ok(())
    }

    /// Waits until exactly so many instances and machines exist, all ready and of the newest model, their nodes take pods,
    /// and the pool's status shows it.
    pub async fn until_ready(&self, count: usize) -> Result<Vec<AzureMachinePoolMachine>> {
        self.until(&format!("{count} ready machines"), async || {
            let machines = self.machines().await?;
            let good = |m: &AzureMachinePoolMachine| {
                let status = m.status.clone().unwrap_or_default();
                status.ready && status.latest_model_applied && m.metadata.deletion_timestamp.is_none()
            };
            let status = self.pool().await?.status.unwrap_or_default();
            let shown = status.replicas == i32::try_from(count)?
                && capstan_kube::conditions::is_true(&status.conditions, "ScaleSetModelUpdated")
                && status.long_running_operation_states.is_empty();
            if !shown || machines.len() != count || !machines.iter().all(good) {
                return Ok(None);
            }
            // The objects may still show an instance that has gone since.
            let lower = |ids: Vec<String>| ids.iter().map(|id| id.to_lowercase()).collect::<BTreeSet<String>>();
            let real = lower(self.instance_ids().into_iter().chain(self.vm_ids()).collect());
            let id = |m: &AzureMachinePoolMachine| m.spec.provider_id.trim_start_matches("azure://").to_owned();
            if real != lower(machines.iter().map(id).collect()) {
                return Ok(None);
            }
            // A new node is ready a moment before Kubernetes removes the taint that it is born with.
            let nodes = self.nodes().await?.list(&ListParams::default()).await?;
            let (set, vms) = (self.set_id(), self.vm_prefix());
            let available = |node: &&Node| is_node_of(node, &set, &vms) && takes_pods(node);
            Ok((nodes.iter().filter(available).count() == count).then_some(machines))
        })
        .await
    }

    pub async fn until<T>(&self, what: &str, look: impl AsyncFn() -> Result<Option<T>>) -> Result<T> {
        let begun = Instant::now();
        loop {
            let looked = look().await;
            if let Ok(Some(found)) = looked {
                return Ok(found);
            }
            if begun.elapsed() > self.patience {
                looked?;
                let pool = self.pool().await.ok().map(|pool| json!({ "status": pool.status }));
                let machines: Vec<_> = self
                    .machines()
                    .await?
                    .into_iter()
                    .map(|m| json!([m.name_any(), m.metadata.deletion_timestamp, m.status]))
                    .collect();
                bail!(
                    "no {what} after {:?}: {pool:?} {machines:#?} {:#?}",
                    self.patience,
                    self.sim.instances(&self.set_id()).len()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub async fn until_rolling(&self) -> Result<()> {
        let told = async || {
            Ok(self
                .condition("ScaleSetModelUpdated")
                .await?
                .filter(|(status, _)| status == "False"))
        };
        self.until("the rollout's begin", told).await.map(drop)
    }

    pub async fn until_gone(&self, name: &str) -> Result<()> {
        let gone = async || {
            Ok(self
                .api::<AzureMachinePoolMachine>()
                .get_opt(name)
                .await?
                .is_none()
                .then_some(()))
        };
        self.until(&format!("end of {name}"), gone).await
    }

    /// Waits until a machine says which budget holds its drain up, and what it says.
    pub async fn until_blocked(&self, name: &str) -> Result<String> {
        self.until("the reason of the wait", async || {
            let found = self.api::<AzureMachinePoolMachine>().get_opt(name).await?;
            let status = found.and_then(|machine| machine.status).unwrap_or_default();
            let draining = capstan_kube::conditions::get(&status.conditions, "DrainingSucceeded");
            let why = draining.and_then(|condition| condition.message.clone());
            Ok(why.filter(|message| message.contains("budget")))
        })
        .await
    }

    pub async fn until_uncordoned(&self) -> Result<()> {
        let prefix = format!("azure://{}/", self.set_id()).to_lowercase();
        self.until("uncordoned nodes", async || {
            let nodes = Api::<Node>::all(self.client.clone())
                .list(&ListParams::default())
                .await?;
            let cordoned = nodes.iter().filter_map(|node| node.spec.as_ref()).any(|spec| {
                let ours = spec
                    .provider_id
                    .as_deref()
                    .unwrap_or_default()
                    .to_lowercase()
                    .starts_with(&prefix);
                ours && spec.unschedulable.unwrap_or_default()
            });
            Ok((!cordoned).then_some(()))
        })
        .await
    }

    /// Nothing is written and Azure is not called once all is done.
    pub async fn assert_quiet(&self) -> Result<()> {
        let versions = async || -> Result<Vec<Option<String>>> {
            let mut versions: Vec<_> = self
                .machines()
                .await?
                .iter()
                .map(ResourceExt::resource_version)
                .collect();
            versions.push(self.pool().await?.resource_version());
            Ok(versions)
        };
        // What a pool says of itself may follow a little later.
        let begun = Instant::now();
        loop {
            self.sim.clear_requests();
            let before = versions().await?;
            tokio::time::sleep(Duration::from_secs(4)).await;
            let (after, called) = (versions().await?, self.sim.arm_requests());
            if after == before && called.is_empty() {
                return Ok(());
            }
            assert!(begun.elapsed() < self.patience, "{before:?} {after:?} {called:?}");
        }
    }

    pub fn instance_ids(&self) -> Vec<String> {
        let instances = self.sim.instances(&self.set_id());
        instances
            .iter()
            .filter_map(|instance| instance["id"].as_str().map(str::to_owned))
            .collect()
    }

    /// Whether there are as many instances as wanted, and all of that image.
    pub fn all_have(&self, version: u32) -> Result<bool> {
        let instances = self.sim.instances(&self.set_id());
        let image_of = |instance: &Value| {
            instance
                .pointer("/properties/storageProfile/imageReference/id")
                .cloned()
        };
        let new = |instance: &Value| image_of(instance) == Some(json!(image(version)));
        Ok(instances.len() == 2 && instances.iter().all(new))
    }

    /// A pod on a node, under a disruption budget that never lets it go.
    pub async fn guarded_pod(&self, name: &str, node: &str) -> Result<()> {
        self.create::<k8s_openapi::api::core::v1::Pod>(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "labels": { "app": name } },
            "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "none" }] }
        }))
        .await?;
        self.create::<k8s_openapi::api::policy::v1::PodDisruptionBudget>(json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": name },
            "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": name } } }
        }))
        .await?;
        let budgets = self.api::<k8s_openapi::api::policy::v1::PodDisruptionBudget>();
        self.until("a budget that counts its pod", async || {
            let status = budgets.get(name).await?.status.unwrap_or_default();
            // A pod that is not ready yet is evicted whatever the budget says.
            Ok((status.current_healthy > Some(0)).then_some(()))
        })
        .await
    }

    /// The message of one of the pool's conditions.
    pub async fn condition(&self, type_: &str) -> Result<Option<(String, String)>> {
        let status = self.pool().await?.status.unwrap_or_default();
        let found = capstan_kube::conditions::get(&status.conditions, type_);
        Ok(found.map(|c| (c.status.clone(), c.message.clone().unwrap_or_default())))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.sampler.abort();
    }
}

/// Whether a node is of an instance of this scale set, in either mode.
fn is_node_of(node: &Node, set: &str, vms: &str) -> bool {
    let id = capstan_kube::nodes::provider_id(node).unwrap_or_default();
    let uniform = format!("azure://{set}/virtualmachines/").to_lowercase();
    id.starts_with(&uniform) || id.starts_with(&format!("azure://{vms}"))
}

pub fn image(version: u32) -> String {
    format!("/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node-{version}")
}

pub fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}
