//! A cluster and an Azure inside the test process, under paused time: no test here waits, and none can lose a race.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use capstan_azure::{Clients, Cloud, InProcess, Settings};
use capstan_core::Clock;
use capstan_core::interceptor::Interceptors;
use capstan_kube::lease::Identity;
use capstan_kube::{Context, Options};
use capstan_sim::azure::{Azure, Config, Handle, joiner};
use capstan_testkit::Objects;
use capstan_testkit::apiserver::{self, ApiServer};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

pub use capstan_testkit::resource;

pub const NAMESPACE: &str = "openshift-machine-api";
const BEGIN: i64 = 1_800_000_000;

pub struct Still {
    pub server: ApiServer,
    pub azure: Arc<Handle>,
    pub clock: Clock,
    objects: Objects,
    on_write: Arc<Mutex<Option<OnWrite>>>,
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
}

impl Deref for Still {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

/// Learns method and path of every write of the controllers, except those of their leases.
type OnWrite = Arc<dyn Fn(&http::Method, &str) + Send + Sync>;

/// Something that happens directly before the first request with this method and this part of a path.
struct Meanwhile {
    method: http::Method,
    path: String,
    happens: Box<dyn FnOnce(&Handle) + Send>,
}

/// The controllers; they end with this.
pub struct Running(
    CancellationToken,
    pub tokio::task::JoinHandle<()>,
    pub capstan_kube::Metrics,
);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.cancel();
        self.1.abort();
    }
}

impl Still {
    pub async fn new(config: Config) -> Result<Self> {
        let begin = jiff::Timestamp::from_second(BEGIN)?;
        let server = ApiServer::new(apiserver::Settings {
            start: begin,
            ..apiserver::Settings::default()
        });
        let azure = Azure::in_process(Config {
            start: Some(begin),
            joiner: Some(joiner::Options::client(server.client())),
            ..config
        })
        .await?;
        let still = Self {
            objects: Objects::new(server.client(), NAMESPACE),
            server,
            azure: Arc::new(azure),
            clock: Clock::starting_at(begin),
            on_write: Arc::default(),
            meanwhile: Arc::default(),
        };
        let secret = |name: &str, data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data});
        let credentials = json!({"azure_subscription_id": still.azure.subscription, "azure_tenant_id": still.azure.tenant,
            "azure_client_id": still.azure.client_id, "azure_client_secret": still.azure.client_secret,
            "azure_resourcegroup": "capstan", "azure_region": "eastus"});
        still.create(secret("azure-cloud-credentials", credentials)).await?;
        still
            .create(secret(
                "worker-user-data",
                json!({"userData": r#"{"ignition":{"version":"3.2.0"}}"#}),
            ))
            .await?;
        Ok(still)
    }

    /// Makes the cluster one of OpenShift.
    pub async fn openshift(&self, status: Value) -> Result<()> {
        let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let definition: CustomResourceDefinition = serde_json::from_value(json!({
            "metadata": {"name": "infrastructures.config.openshift.io"},
            "spec": {
                "group": "config.openshift.io", "scope": "Cluster",
                "names": {"kind": "Infrastructure", "plural": "infrastructures"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open}}],
            },
        }))?;
        self.server.define(&definition);
        let object = infrastructure(status);
        let api: Api<DynamicObject> = Api::all_with(self.server.client(), &resource(&object));
        api.create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?;
        Ok(())
    }

    /// Changes the facts about the cluster.
    pub async fn infrastructure(&self, status: Value) -> Result<()> {
        let object = infrastructure(status);
        let api: Api<DynamicObject> = Api::all_with(self.server.client(), &resource(&object));
        let patch = Patch::Merge(&object);
        api.patch("cluster", &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Lets somebody learn of every write of the controllers before it is sent.
    pub fn on_write(&self, learns: impl Fn(&http::Method, &str) + Send + Sync + 'static) {
        *self.on_write.lock() = Some(Arc::new(learns));
    }

    /// Lets something happen directly before the controllers' first request of this kind.
    pub fn meanwhile(&self, method: http::Method, path: &str, happens: impl FnOnce(&Handle) + Send + 'static) {
        *self.meanwhile.lock() = Some(Meanwhile {
            method,
            path: path.to_owned(),
            happens: Box::new(happens),
        });
    }

    /// Returns the id of a resource of the machines' group.
    pub fn id(&self, kind: &str, name: &str) -> String {
        format!(
            "/subscriptions/{}/resourceGroups/capstan/providers/{kind}/{name}",
            self.azure.subscription
        )
    }

    /// Starts the controllers; `namespace` is that of `--namespace`.
    pub fn start(&self, namespace: Option<&str>) -> Result<Running> {
        self.start_behind(namespace, Interceptors::default())
    }

    /// The same, with these interceptors in the clients of both systems.
    pub fn start_behind(&self, namespace: Option<&str>, interceptors: Interceptors) -> Result<Running> {
        let shutdown = CancellationToken::new();
        let on_write = self.on_write.clone();
        let server = self
            .server
            .clone()
            .map_request(move |request: http::Request<kube::client::Body>| {
                if !request.uri().path().contains("/leases") {
                    learn(&on_write, request.method(), request.uri().path());
                }
                request
            });
        let on_write = self.on_write.clone();
        let context = Context::new(
            kube::Config::new("http://in-process".parse()?),
            Options {
                namespace: namespace.map(ToOwned::to_owned),
                shutdown: shutdown.clone(),
                clock: self.clock,
                interceptors: interceptors.clone(),
                holder: Identity::of_installation("capstan-system", "capstan"),
                transport: Some(tower::util::BoxCloneSyncService::new(server)),
                ..Options::default()
            },
        )?;
        let metrics = context.metrics.clone();
        let (azure, meanwhile) = (self.azure.clone(), self.meanwhile.clone());
        let in_process = InProcess::new(move |request| {
            let now = meanwhile
                .lock()
                .take_if(|next| next.method == *request.method() && request.uri().path().contains(&next.path));
            if let Some(now) = now {
                (now.happens)(&azure);
            }
            if request.uri().path().starts_with("/subscriptions") {
                learn(&on_write, request.method(), request.uri().path());
            }
            let answer = azure.answer(request);
            async move { answer.await.map_err(|error| error.to_string()) }
        });
        let clients = Clients::new(Settings {
            clock: self.clock,
            in_process: Some(in_process),
            interceptors,
            ..Settings::new(Cloud::custom("sim", &self.azure.url, &self.azure.url)?)
        })?;
        let task = tokio::spawn(async move {
            if let Err(error) = capstan_openshift::run(context, clients).await {
                eprintln!("the controllers ended: {error}");
            }
        });
        Ok(Running(shutdown, task, metrics))
    }

    /// Changes the status of a Node, as its kubelet or the node controller does.
    pub async fn patch_node(&self, name: &str, patch: Value) -> Result<()> {
        let api: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.server.client());
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await?;
        Ok(())
    }

    pub fn machine(&self, name: &str, over: Value) -> Value {
        json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine",
            "metadata": {"name": name, "labels": {"machine.openshift.io/cluster-api-cluster": "c"}},
            "spec": {"providerSpec": {"value": provider_spec(over)}},
        })
    }

    pub fn set(&self, name: &str, replicas: i32, over: Value) -> Value {
        let labels = json!({"machine.openshift.io/cluster-api-machineset": name, "machine.openshift.io/cluster-api-cluster": "c"});
        json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": {
                "metadata": {"labels": labels}, "spec": {"providerSpec": {"value": provider_spec(over)}}}},
        })
    }

    /// Returns the object of this kind and name, in whatever namespace.
    pub fn get(&self, group: &str, plural: &str, name: &str) -> Option<Value> {
        let mut all = self.server.objects_of(group, plural).into_iter();
        all.find(|object| object["metadata"]["name"] == name)
    }

    /// Names of the resources of a kind in Azure.
    pub fn resources(&self, kind: &str) -> Vec<String> {
        let ids = self.azure.ids(kind);
        let mut names: Vec<String> = ids
            .iter()
            .filter_map(|id| id.rsplit('/').next().map(str::to_owned))
            .collect();
        names.sort();
        names
    }

    /// Changes a Machine; `change` has its `spec` or its `metadata`.
    pub async fn patch_machine(&self, name: &str, change: Value) -> Result<()> {
        let mut object = machine(name);
        for (key, value) in change.as_object().into_iter().flatten() {
            object[key] = value.clone();
        }
        self.patch(object).await
    }

    pub async fn delete_machine(&self, name: &str) -> Result<()> {
        self.delete(machine(name)).await
    }

    pub async fn until_gone(&self, name: &str) {
        let gone = |still: &Self| still.get("machine.openshift.io", "machines", name).is_none();
        self.until(&format!("the end of {name}"), gone).await;
    }

    /// Returns the message of the first event about an object with this reason.
    pub async fn event(&self, name: &str, reason: &str) -> String {
        let found = |still: &Self| {
            let mut events = still.server.objects_of("", "events").into_iter();
            events.find(|event| event["involvedObject"]["name"] == name && event["reason"] == reason)
        };
        self.until(&format!("event {reason} of {name}"), |still| found(still).is_some())
            .await;
        let event = found(self).unwrap_or_default();
        event["message"].as_str().unwrap_or_default().to_owned()
    }

    /// Lets time pass until it is so.
    pub async fn until(&self, what: &str, so: impl Fn(&Self) -> bool) {
        for _ in 0..3600 {
            if so(self) {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let machines = self.server.objects_of("machine.openshift.io", "machines");
        panic!("{what} did not come: {machines:#?}");
    }

    pub async fn until_phase(&self, name: &str, phase: &str) -> Value {
        let machine = |still: &Self| still.get("machine.openshift.io", "machines", name);
        self.until(&format!("{name} {phase}"), |still| {
            machine(still).is_some_and(|machine| machine["status"]["phase"] == phase)
        })
        .await;
        machine(self).unwrap_or_default()
    }
}

fn learn(on_write: &Mutex<Option<OnWrite>>, method: &http::Method, path: &str) {
    let learns = on_write.lock().clone();
    if let Some(learns) = learns.filter(|_| method != http::Method::GET) {
        learns(method, path);
    }
}

/// A Machine, as far as a change or its deletion names it.
pub fn machine(name: &str) -> Value {
    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name}})
}

fn infrastructure(status: Value) -> Value {
    json!({"apiVersion": "config.openshift.io/v1", "kind": "Infrastructure", "metadata": {"name": "cluster"}, "spec": {},
           "status": status})
}

fn provider_spec(over: Value) -> Value {
    let mut value = json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "AzureMachineProviderSpec", "vmSize": "Standard_D4s_v3",
        "vnet": "capstan-vnet", "subnet": "worker-subnet", "zone": "1",
        "image": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        "userDataSecret": {"name": "worker-user-data"}, "credentialsSecret": {"name": "azure-cloud-credentials"},
    });
    for (key, replacement) in over.as_object().into_iter().flatten() {
        value[key] = replacement.clone();
    }
    value
}
