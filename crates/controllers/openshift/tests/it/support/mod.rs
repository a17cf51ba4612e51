//! A control plane, a simulated Azure and a controller between them.
use anyhow::{Context as _, Result, bail};
use capstan_api::openshift::Machine;
use capstan_azure::{Clients, Cloud, Settings};
use capstan_core::interceptor::{Interceptor, Interceptors};
use capstan_kube::{Context, Options};
use capstan_sim::azure::{Azure, Config, Handle};
use capstan_testkit::{ControlPlane, Harness};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::{Value, json};
use std::ops::Deref;
use std::sync::Arc;

pub use capstan_testkit::PATIENCE;

pub struct World {
    harness: Harness,
    pub sim: Handle,
}

impl Deref for World {
    type Target = Harness;

    fn deref(&self) -> &Harness {
        &self.harness
    }
}

/// A controller that runs until it is killed.
pub struct Running {
    controllers: capstan_testkit::Running,
    pub metrics: capstan_kube::Metrics,
}

impl Running {
    /// As SIGKILL would.
    pub async fn kill(self) {
        self.controllers.kill().await;
    }
}

impl World {
    pub async fn new(prefix: &str, config: Config) -> Result<Self> {
        let harness = Harness::new(ControlPlane::shared().await?, prefix).await?;
        let sim = Azure::start(config).await?;
        let world = Self { harness, sim };
        world.secret("azure-cloud-credentials", &world.credentials()).await?;
        world
            .secret(
                "worker-user-data",
                &[("userData", r#"{"ignition":{"version":"3.2.0"}}"#.to_owned())],
            )
            .await?;
        Ok(world)
    }

    fn credentials(&self) -> Vec<(&'static str, String)> {
        vec![
            ("azure_subscription_id", self.sim.subscription.clone()),
            ("azure_tenant_id", self.sim.tenant.clone()),
            ("azure_client_id", self.sim.client_id.clone()),
            ("azure_client_secret", self.sim.client_secret.clone()),
            ("azure_resourcegroup", "capstan".to_owned()),
            ("azure_region", "eastus".to_owned()),
        ]
    }

    pub async fn secret(&self, name: &str, values: &[(&str, String)]) -> Result<()> {
        let data: serde_json::Map<String, Value> = values
            .iter()
            .map(|(key, value)| ((*key).to_owned(), json!(value)))
            .collect();
        let secret: Secret = serde_json::from_value(json!({"metadata": {"name": name}, "stringData": data}))?;
        self.api::<Secret>().create(&PostParams::default(), &secret).await?;
        Ok(())
    }

    pub fn settings(&self, interceptors: Interceptors) -> Result<Settings> {
        let cloud = Cloud::custom("sim", &self.sim.url, &self.sim.url)?;
        Ok(Settings {
            ca_file: Some(self.sim.ca_file.clone()),
            interceptors,
            ..Settings::new(cloud)
        })
    }

    pub async fn start(&self) -> Result<Running> {
        self.start_behind(Vec::new()).await
    }

    pub async fn start_behind(&self, interceptors: Vec<Arc<dyn Interceptor>>) -> Result<Running> {
        let interceptors = Interceptors::new(interceptors);
        let kube = Options {
            interceptors: interceptors.clone(),
            namespace: Some(self.namespace.clone()),
            ..Options::default()
        };
        let shutdown = kube.shutdown.clone();
        let context = Context::new(self.plane.config().await?, kube)?;
        let (metrics, clients) = (context.metrics.clone(), Clients::new(self.settings(interceptors)?)?);
        let controllers = capstan_testkit::Running::new(shutdown, async move {
            if let Err(error) = capstan_openshift::run(context, clients).await {
                eprintln!("controller ended: {error}");
            }
        });
        Ok(Running { controllers, metrics })
    }

    pub fn machines(&self) -> Api<Machine> {
        self.api()
    }

    pub fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// A name that no other test's Node has.
    pub fn name(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.namespace)
    }

    pub fn manifest(&self, name: &str, over: Value) -> Value {
        let mut value = json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "AzureMachineProviderSpec",
            "vmSize": "Standard_D4s_v3", "vnet": "capstan-vnet", "subnet": "worker-subnet", "zone": "1",
            "image": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
            "userDataSecret": {"name": "worker-user-data"},
            "credentialsSecret": {"name": "azure-cloud-credentials", "namespace": self.namespace},
        });
        for (key, replacement) in over.as_object().into_iter().flatten() {
            value[key] = replacement.clone();
        }
        json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine",
            "metadata": {"name": name, "namespace": self.namespace,
                         "labels": {"machine.openshift.io/cluster-api-cluster": "c"}},
            "spec": {"providerSpec": {"value": value}},
        })
    }

    pub async fn create(&self, manifest: Value) -> Result<Machine> {
        let machine: Machine = serde_json::from_value(manifest)?;
        Ok(self.machines().create(&PostParams::default(), &machine).await?)
    }

    pub async fn delete(&self, name: &str) -> Result<()> {
        self.machines().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    pub async fn patch(&self, name: &str, patch: Value) -> Result<()> {
        self.machines()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        Ok(())
    }

    /// Waits until the machine is so; `None` is a machine that is gone.
    pub async fn until(
        &self,
        name: &str,
        what: &str,
        so: impl Fn(Option<&Machine>) -> bool,
    ) -> Result<Option<Machine>> {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let stream = watcher(self.machines(), config).default_backoff();
        let mut stream = std::pin::pin!(stream);
        let (mut last, mut listed) = (None, false);
        let waiting = async {
            while let Some(event) = stream.next().await {
                match event {
                    Ok(watcher::Event::Apply(machine) | watcher::Event::InitApply(machine)) => last = Some(machine),
                    Ok(watcher::Event::Delete(_)) => last = None,
                    Ok(watcher::Event::Init) => (last, listed) = (None, false),
                    Ok(watcher::Event::InitDone) => listed = true,
                    Err(_) => {}
                }
                if listed && so(last.as_ref()) {
                    return;
                }
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            let events = self.events(name).await?;
            bail!(
                "{name} did not become {what}: {:#?}\n{events:#?}",
                last.map(|machine| machine.status)
            );
        }
        Ok(last)
    }

    pub async fn until_phase(&self, name: &str, phase: &str) -> Result<Machine> {
        let so = |machine: Option<&Machine>| machine.is_some_and(|machine| phase_of(machine) == phase);
        self.until(name, phase, so).await?.context("the machine is gone")
    }

    pub async fn until_gone(&self, name: &str) -> Result<()> {
        self.until(name, "gone", |machine| machine.is_none()).await.map(drop)
    }

    /// The machine's Node joins.
    pub async fn join(&self, machine: &Machine) -> Result<Node> {
        let ip = machine.status.as_ref().and_then(|status| {
            status
                .addresses
                .iter()
                .find(|address| address.type_ == "InternalIP")
                .map(|address| address.address.clone())
        });
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": machine.name_any(), "labels": {(capstan_testkit::controlplane::KWOK_LABEL): "off"}},
            "spec": {"providerID": machine.spec.provider_id},
            "status": {"addresses": [{"type": "InternalIP", "address": ip}]},
        }))?;
        Ok(self.nodes().create(&PostParams::default(), &node).await?)
    }

    /// The provider id that a machine of this name gets.
    pub fn provider_id(&self, name: &str) -> String {
        format!(
            "azure:///subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/virtualMachines/{name}",
            self.sim.subscription
        )
    }

    /// Names of what there is of a kind in Azure.
    pub fn azure(&self, kind: &str) -> Vec<String> {
        let mut names: Vec<String> = self
            .sim
            .ids(kind)
            .iter()
            .filter_map(|id| id.rsplit('/').next().map(str::to_owned))
            .collect();
        names.sort();
        names
    }

    pub fn vm(&self, name: &str) -> Option<Value> {
        let id = format!(
            "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/virtualMachines/{name}",
            self.sim.subscription
        );
        self.sim.get(&id)
    }

    /// Calls to Resource Manager, by the policy they fall under.
    pub fn calls(&self) -> Vec<&'static str> {
        self.sim.arm_requests().iter().map(|request| request.policy).collect()
    }
}

pub fn phase_of(machine: &Machine) -> &str {
    machine
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

pub fn disk(suffix: &str, lun: i32, policy: &str, kind: &str) -> Value {
    json!({"nameSuffix": suffix, "lun": lun, "diskSizeGB": 4, "deletionPolicy": policy,
           "managedDisk": {"storageAccountType": kind}})
}
