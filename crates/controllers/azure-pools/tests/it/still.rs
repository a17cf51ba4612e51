//! A pool on a cluster and an Azure inside the test process, under paused time: no test here waits, and none can lose a
//! race. The simulator is as strict as Azure.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use capstan_azure::{Clients, Cloud, InProcess, Settings};
use capstan_core::Clock;
use capstan_core::interceptor::Interceptors;
use capstan_kube::Context;
use capstan_sim::azure::{Azure, Config, Handle, Strict, joiner};
use capstan_testkit::Objects;
use capstan_testkit::apiserver::{self, ApiServer};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{image, merge};

pub const NAMESPACE: &str = "default";
pub const NAME: &str = "np";
const GROUP: &str = "capstan";
const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const CLUSTER_API: &str = "cluster.x-k8s.io/v1beta2";
/// Nobody has the private key.
const SSH_KEY: &str = "c3NoLWVkMjU1MTkgQUFBQUMzTnphQzFsWkRJMU5URTVBQUFBSUdGaFlXRmhZV0ZoWVdGaFlXRmhZV0ZoWVdGaFlXRmhZV0ZoWVdGaFlXRmggZXhwbG9yZXIK";
const BEGIN: i64 = 1_800_000_000;

/// The part of a pool that tests change.
pub struct Pool {
    pub replicas: usize,
    /// Merged into the AzureMachinePool.
    pub object: Value,
    /// Merged into the AzureCluster.
    pub cluster: Value,
    /// Merged into the Cluster.
    pub owner: Value,
    pub sim: Config,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            replicas: 3,
            object: json!({}),
            cluster: json!({}),
            owner: json!({}),
            sim: Config::default(),
        }
    }
}

pub struct Still {
    pub server: ApiServer,
    pub azure: Arc<Handle>,
    clock: Clock,
    objects: Objects,
}

impl Deref for Still {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

/// The controllers; they end with this.
pub struct Running {
    _controllers: capstan_testkit::Running,
    metrics: capstan_kube::Metrics,
}

impl Running {
    /// Returns the metrics as a scrape shows them.
    pub fn metrics(&self) -> String {
        self.metrics.encode()
    }
}

impl Still {
    /// Everything but the controllers.
    pub async fn new(pool: Pool) -> Result<Self> {
        let still = Self::empty(pool.sim.clone()).await?;
        still.make(&pool).await?;
        Ok(still)
    }

    /// Everything up to a pool whose machines are all ready.
    pub async fn ready(pool: Pool) -> Result<(Self, Running)> {
        let replicas = pool.replicas;
        let still = Self::new(pool).await?;
        let running = still.start()?;
        still.until_ready(replicas).await;
        Ok((still, running))
    }

    /// A cluster and an Azure without objects.
    pub async fn empty(sim: Config) -> Result<Self> {
        let begin = jiff::Timestamp::from_second(BEGIN)?;
        let server = ApiServer::new(apiserver::Settings {
            start: begin,
            ..apiserver::Settings::default()
        });
        let azure = Azure::in_process(Config {
            start: Some(begin),
            strict: Strict::ALL,
            joiner: Some(joiner::Options {
                default: Some(joiner::Cluster::Client(server.client())),
                ..sim.joiner.unwrap_or_default()
            }),
            ..sim
        })
        .await?;
        Ok(Self {
            objects: Objects::new(server.client(), NAMESPACE),
            server,
            azure: Arc::new(azure),
            clock: Clock::starting_at(begin),
        })
    }

    /// Makes the credentials of Azure and of the workload cluster, and the bootstrap data.
    pub async fn make_secrets(&self) -> Result<()> {
        let azure = &self.azure;
        let secret = |name: &str, type_: &str, data: Value| {
            let labels = json!({ "cluster.x-k8s.io/cluster-name": "c" });
            json!({ "apiVersion": "v1", "kind": "Secret", "type": type_, "stringData": data,
                "metadata": { "name": name, "labels": labels } })
        };
        let kubeconfig = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
            "clusters": [{ "name": "c", "cluster": { "server": "https://in-process" } }],
            "users": [{ "name": "u", "user": { "token": "t" } }] });
        let objects = [
            secret("azure", "Opaque", json!({ "clientSecret": azure.client_secret })),
            secret(
                "c-kubeconfig",
                "cluster.x-k8s.io/secret",
                json!({ "value": kubeconfig.to_string() }),
            ),
            secret("boot", "Opaque", json!({ "value": "#cloud-config\n{}\n" })),
            json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": { "name": "sp" },
                "spec": { "type": "ServicePrincipal", "tenantID": azure.tenant, "clientID": azure.client_id,
                    "clientSecret": { "name": "azure", "namespace": NAMESPACE }, "allowedNamespaces": {} } }),
        ];
        for object in objects {
            self.create(object).await?;
        }
        Ok(())
    }

    async fn make(&self, pool: &Pool) -> Result<()> {
        let azure = &self.azure;
        self.make_secrets().await?;
        let reference = |kind: &str, name: &str| json!({ "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": kind, "name": name });
        let mut azure_cluster = json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": { "name": "c" },
            "spec": {
                "subscriptionID": azure.subscription, "location": "eastus", "resourceGroup": GROUP,
                "identityRef": { "apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": "sp" },
                "networkSpec": {
                    "vnet": { "name": "capstan-vnet" }, "subnets": [{ "name": "node-subnet", "role": "node" }] } } });
        merge(&mut azure_cluster, &pool.cluster);
        let mut cluster = json!({ "apiVersion": CLUSTER_API, "kind": "Cluster", "metadata": { "name": "c" },
            "spec": { "infrastructureRef": reference("AzureCluster", "c") } });
        merge(&mut cluster, &pool.owner);
        let mut object = json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": { "name": NAME },
            "spec": {
                "location": "eastus",
                "strategy": { "type": "RollingUpdate",
                    "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0, "deletePolicy": "Oldest" } },
                "template": { "vmSize": "Standard_D2s_v3", "osDisk": { "osType": "Linux", "diskSizeGB": 30 },
                    "image": { "id": image(1) }, "sshPublicKey": SSH_KEY } } });
        merge(&mut object, &pool.object);
        let objects = [
            azure_cluster,
            cluster,
            json!({ "apiVersion": CLUSTER_API, "kind": "MachinePool", "metadata": { "name": NAME }, "spec": {
                "clusterName": "c", "replicas": pool.replicas, "template": { "spec": { "clusterName": "c",
                    "version": "v1.35.0", "bootstrap": { "dataSecretName": "boot" },
                    "infrastructureRef": reference("AzureMachinePool", NAME) } } } }),
            object,
        ];
        for object in objects {
            self.create(object).await?;
        }
        Ok(())
    }

    pub fn start(&self) -> Result<Running> {
        self.start_behind(Interceptors::default())
    }

    pub fn start_behind(&self, interceptors: Interceptors) -> Result<Running> {
        self.start_with(interceptors, capstan_azure_pools::Options::default())
    }

    pub fn start_with(&self, interceptors: Interceptors, options: capstan_azure_pools::Options) -> Result<Running> {
        let shutdown = CancellationToken::new();
        let context = Context::new(
            kube::Config::new("http://in-process".parse()?),
            capstan_kube::Options {
                interceptors: interceptors.clone(),
                namespace: Some(NAMESPACE.to_owned()),
                shutdown: shutdown.clone(),
                clock: self.clock,
                transport: Some(tower::util::BoxCloneSyncService::new(self.server.clone())),
                ..capstan_kube::Options::default()
            },
        )?;
        let azure = self.azure.clone();
        let in_process = InProcess::new(move |request| {
            let answer = azure.answer(request);
            async move { answer.await.map_err(|error| error.to_string()) }
        });
        let clients = Clients::new(Settings {
            clock: self.clock,
            interceptors,
            in_process: Some(in_process),
            ..Settings::new(Cloud::custom("sim", &self.azure.url, &self.azure.url)?)
        })?;
        let metrics = context.metrics.clone();
        let controllers = capstan_testkit::Running::new(shutdown, async move {
            if let Err(error) = capstan_azure_pools::run(context, clients, options).await {
                eprintln!("the controllers ended: {error}");
            }
        });
        Ok(Running {
            _controllers: controllers,
            metrics,
        })
    }

    /// Creates an object as it was recorded, with its status. Returns its new uid.
    pub async fn restore(&self, object: &Value) -> Result<String> {
        let (api, name) = (
            self.api(object),
            object["metadata"]["name"].as_str().unwrap_or_default(),
        );
        let mut new = object.clone();
        if let Some(metadata) = new["metadata"].as_object_mut() {
            metadata.remove("uid");
        }
        let created = api
            .create(&PostParams::default(), &serde_json::from_value(new)?)
            .await?;
        let patch = json!({ "status": object["status"] });
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await?;
        Ok(created.metadata.uid.unwrap_or_default())
    }

    /// Changes the AzureMachinePool.
    pub async fn patch_pool(&self, patch: Value) -> Result<()> {
        let mut object =
            json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": { "name": NAME } });
        merge(&mut object, &patch);
        self.patch(object).await
    }

    pub async fn scale(&self, replicas: usize) -> Result<()> {
        self.patch_machine_pool(json!({ "spec": { "replicas": replicas } }))
            .await
    }

    /// Gives the pool another image.
    pub async fn upgrade(&self, version: u32) -> Result<()> {
        self.patch_pool(json!({ "spec": { "template": { "image": { "id": image(version) } } } }))
            .await
    }

    pub fn pool(&self) -> Value {
        let mut pools = self.server.objects("azuremachinepools").into_iter();
        pools.find(|pool| pool["metadata"]["name"] == NAME).unwrap_or_default()
    }

    pub fn machines(&self) -> Vec<Value> {
        self.server.objects("azuremachinepoolmachines")
    }

    pub fn set_id(&self) -> String {
        format!(
            "/subscriptions/{}/resourceGroups/{GROUP}/providers/Microsoft.Compute/virtualMachineScaleSets/{NAME}",
            self.azure.subscription
        )
    }

    pub fn set(&self) -> Value {
        self.azure.get(&self.set_id()).unwrap_or_default()
    }

    /// Returns all instances; those of a Flexible set are virtual machines.
    pub fn instances(&self) -> Vec<Value> {
        let vms = self.azure.ids("virtualMachines").into_iter();
        let vms = vms.filter_map(|id| self.azure.get(&id));
        self.azure.instances(&self.set_id()).into_iter().chain(vms).collect()
    }

    /// Returns the ids of all instances, in order.
    pub fn instance_ids(&self) -> Vec<String> {
        let id = |instance: &Value| instance["instanceId"].as_str().unwrap_or_default().to_owned();
        self.instances().iter().map(id).collect()
    }

    /// Returns the ids of all virtual machines. None is ever used twice.
    pub fn vm_ids(&self) -> BTreeSet<String> {
        let id = |instance: &Value| instance["properties"]["vmId"].as_str().unwrap_or_default().to_owned();
        self.instances().iter().map(id).collect()
    }

    /// Whether all instances, and so many, have this version of the image.
    pub fn all_have(&self, version: u32, count: usize) -> bool {
        let id = |instance: &Value| {
            let id = instance.pointer("/properties/storageProfile/imageReference/id");
            id.cloned().unwrap_or_default()
        };
        let ids: Vec<Value> = self.instances().iter().map(id).collect();
        ids == vec![json!(image(version)); count]
    }

    /// Calls Azure about the scale set as somebody else does.
    pub fn outside(&self, method: http::Method, action: &str, body: Value) -> u16 {
        let path = format!("{}{action}?api-version=2024-07-01", self.set_id());
        self.azure.direct(method, &path, body).status.as_u16()
    }

    /// Changes the MachinePool.
    pub async fn patch_machine_pool(&self, patch: Value) -> Result<()> {
        let mut object = json!({ "apiVersion": CLUSTER_API, "kind": "MachinePool", "metadata": { "name": NAME } });
        merge(&mut object, &patch);
        self.patch(object).await
    }

    /// Lets somebody else manage the replicas.
    pub async fn let_others_scale(&self) -> Result<()> {
        let managed = json!({ "cluster.x-k8s.io/replicas-managed-by": "autoscaler" });
        self.patch_machine_pool(json!({ "metadata": { "annotations": managed } }))
            .await
    }

    /// Changes the bootstrap data.
    pub async fn set_bootstrap(&self, value: &str) -> Result<()> {
        let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "boot" } });
        let mut change = json!({ "stringData": { "value": value } });
        merge(&mut change, &secret);
        self.patch(change).await
    }

    /// Puts a pod on every node, and a budget that lets none of them go.
    pub async fn hold_pods(&self) -> Result<()> {
        let nodes = self.server.objects("nodes");
        for node in &nodes {
            let node = node["metadata"]["name"].as_str().unwrap_or_default();
            self.create(json!({ "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": format!("on-{node}"), "labels": { "app": "web" } },
                "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "none" }] },
                "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } }))
                .await?;
        }
        let spec = json!({ "minAvailable": nodes.len(), "selector": { "matchLabels": { "app": "web" } } });
        self.create(
            json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web" },
            "spec": spec }),
        )
        .await
    }

    /// Removes that budget.
    pub async fn free_pods(&self) -> Result<()> {
        let web = json!({ "name": "web" });
        self.delete(json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": web }))
            .await
    }

    /// Returns one of an object's conditions.
    pub fn condition(object: &Value, type_: &str) -> Value {
        let mut all = object["status"]["conditions"].as_array().into_iter().flatten();
        all.find(|condition| condition["type"] == type_)
            .cloned()
            .unwrap_or_default()
    }

    /// Returns the messages of all events of this reason.
    pub fn events(&self, reason: &str) -> Vec<String> {
        let mut events = self.server.objects_of("events.k8s.io", "events");
        events.extend(self.server.objects_of("", "events"));
        let events = events.iter().filter(|event| event["reason"] == reason);
        let text = |event: &Value| event["note"].as_str().or(event["message"].as_str()).map(str::to_owned);
        events.filter_map(text).collect()
    }

    /// Lets time pass until it is so.
    pub async fn until(&self, what: &str, so: impl Fn(&Self) -> bool) {
        for _ in 0..7200 {
            if so(self) {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!(
            "{what} did not come: {:#?} {:#?}",
            self.pool()["status"],
            self.machines()
        );
    }

    /// Waits until so many machines are ready and of the newest model, and the pool shows it.
    pub async fn until_ready(&self, count: usize) {
        self.until(&format!("{count} ready machines"), |still| {
            let machines = still.machines();
            let good = |machine: &&Value| {
                machine["status"]["ready"] == true
                    && machine["status"]["latestModelApplied"] == true
                    && machine["metadata"]["deletionTimestamp"].is_null()
            };
            let status = still.pool()["status"].clone();
            let operations = status["longRunningOperationStates"].as_array().map_or(0, Vec::len);
            machines.len() == count
                && machines.iter().filter(good).count() == count
                && still.instances().len() == count
                && status["replicas"] == count
                && operations == 0
        })
        .await;
    }

    /// Lets time pass in which nothing may be written and Azure may be asked only once in a while.
    pub async fn assert_settled(&self) {
        // What a pool says of itself may follow a little later.
        tokio::time::sleep(Duration::from_secs(120)).await;
        let before = self.server.version();
        tokio::time::sleep(Duration::from_secs(1800)).await;
        assert_eq!(self.server.version(), before, "somebody writes to a settled pool");
    }
}
