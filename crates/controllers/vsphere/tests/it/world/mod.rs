//! A cluster of machines on a simulated vCenter, with the controllers running beside the test.

mod tail;

use std::ops::{Deref, DerefMut};

use anyhow::{Context as _, Result, bail};
use capstan_api::vsphere::{
    VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM, v1beta2,
};
use capstan_core::interceptor::{Effect, Interceptors, System};
use capstan_kube::capi::{Cluster, Machine};
use capstan_testkit::interceptors::Ledger;
use capstan_testkit::{ControlPlane, Harness, Running, Vcsim, vcsim};
use capstan_vsphere::{Login, Trust, Vcenter, VmInfo};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub use capstan_testkit::PATIENCE;

/// Whether an effect is a write to Kubernetes or a read of a secret.
fn write_or_secret(effect: &Effect) -> bool {
    effect.system == System::Kube && (effect.write || effect.target.contains("/secrets"))
}

pub struct World {
    harness: Harness,
    pub vcsim: Vcsim,
    pub ledger: std::sync::Arc<Ledger>,
    /// Whether machines of one owner are kept apart in every cluster.
    pub anti_affinity: bool,
    /// The manager's flags about credentials.
    pub credentials: capstan_vsphere_machines::Policy,
    /// How many clones may be under way.
    pub clones: capstan_vsphere_machines::CloneLimits,
    /// With it the controllers work in all namespaces, on the objects with this label.
    pub watch_filter: Option<String>,
    /// The version of Cluster API's own objects.
    core: &'static str,
    running: Option<Running>,
}

impl Deref for World {
    type Target = Harness;

    fn deref(&self) -> &Harness {
        &self.harness
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Harness {
        &mut self.harness
    }
}

impl World {
    pub async fn start(options: capstan_testkit::vcsim::Options) -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        plane.install_cluster_api_crds().await?;
        Self::start_on(plane, "v1beta2", options).await
    }

    /// On a control plane of its own: objects without a namespace are those of this world alone.
    pub async fn start_alone(options: capstan_testkit::vcsim::Options) -> Result<Self> {
        let plane = ControlPlane::start(Default::default()).await?;
        plane.install_cluster_api_crds().await?;
        Self::start_on(plane, "v1beta2", options).await
    }

    /// On a control plane that has the definitions of Cluster API in this version.
    pub async fn start_on(
        plane: ControlPlane,
        core: &'static str,
        options: capstan_testkit::vcsim::Options,
    ) -> Result<Self> {
        tail::keep();
        let harness = Harness::new(plane, "vsphere").await?;
        let vcsim = vcsim(options).await?;
        let mut world = Self {
            harness,
            vcsim,
            ledger: Ledger::of(write_or_secret),
            anti_affinity: false,
            credentials: Default::default(),
            clones: Default::default(),
            watch_filter: None,
            core,
            running: None,
        };
        world.make_cluster().await?;
        let interceptors = Interceptors::new(vec![world.ledger.clone()]);
        world.run(interceptors).await?;
        Ok(world)
    }

    /// Starts the controllers.
    pub async fn run(&mut self, interceptors: Interceptors) -> Result<()> {
        let shutdown = CancellationToken::new();
        let options = capstan_kube::Options {
            interceptors,
            namespace: self.watch_filter.is_none().then(|| self.namespace.clone()),
            watch_filter: self.watch_filter.clone(),
            shutdown: shutdown.clone(),
            ..Default::default()
        };
        let context = capstan_kube::Context::new(self.plane.config().await?, options)?;
        let (home, anti_affinity) = (self.namespace.clone(), self.anti_affinity);
        let (credentials, clones) = (self.credentials.clone(), self.clones);
        self.running = Some(Running::new(shutdown, async move {
            let options = capstan_vsphere_machines::Options {
                identity_namespace: home,
                anti_affinity,
                credentials,
                clones,
                ..Default::default()
            };
            if let Err(error) = capstan_vsphere_machines::run(context, options).await {
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

    pub async fn create<K>(&self, value: Value) -> Result<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: serde::Serialize + DeserializeOwned + Clone + std::fmt::Debug,
    {
        let mut value = value;
        // Tests write vSphere's kinds with the fields of v1beta1.
        if K::kind(&()).starts_with("VSphere") && value.get("apiVersion").is_none() {
            value["apiVersion"] = json!("infrastructure.cluster.x-k8s.io/v1beta1");
            value = v1beta2::convert(value, VSphereMachine::API_VERSION)?;
        }
        self.create_at(&self.path::<K>(None), &value).await
    }

    /// The path of a kind, or of one object; Cluster API's own in the version that this world has.
    fn path<K>(&self, name: Option<&str>) -> String
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        let path = K::url_path(&(), Some(&self.namespace));
        let core = format!("/apis/cluster.x-k8s.io/{}/", self.core);
        let path = path.replace("/apis/cluster.x-k8s.io/v1beta2/", &core);
        name.map_or(path.clone(), |name| format!("{path}/{name}"))
    }

    /// Merges into the status of an object.
    pub async fn set_status<K>(&self, name: &str, status: Value) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        let request = http::Request::patch(format!("{}/status", self.path::<K>(Some(name))))
            .header("content-type", "application/merge-patch+json");
        let body = serde_json::to_vec(&json!({"status": status}))?;
        self.client.request_text(request.body(body)?).await?;
        Ok(())
    }

    fn core_version(&self) -> String {
        format!("cluster.x-k8s.io/{}", self.core)
    }

    pub async fn make_cluster(&self) -> Result<()> {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "vcenter"},
            "stringData": {"username": self.vcsim.username, "password": self.vcsim.password},
        });
        self.create::<Secret>(secret).await?;
        let cluster: Cluster = self
            .create(json!({
                "apiVersion": self.core_version(), "kind": "Cluster", "metadata": {"name": "c"},
                "spec": {"infrastructureRef": self.infrastructure("VSphereCluster", "c")},
            }))
            .await?;
        self.create::<VSphereCluster>(json!({
            "kind": "VSphereCluster",
            "metadata": {"name": "c", "labels": {"cluster.x-k8s.io/cluster-name": "c"}, "ownerReferences": [owner(&cluster, &self.core_version(), "Cluster")]},
            "spec": {
                "server": self.vcsim.server, "thumbprint": self.vcsim.thumbprint,
                "identityRef": {"kind": "Secret", "name": "vcenter"},
                "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443},
            },
        }))
        .await?;
        let status = match self.core {
            "v1beta1" => json!({"infrastructureReady": true}),
            _ => json!({"initialization": {"infrastructureProvisioned": true}}),
        };
        self.set_status::<Cluster>("c", status).await
    }

    /// A reference to an object of ours, as the version in use has them.
    fn infrastructure(&self, kind: &str, name: &str) -> Value {
        let group = "infrastructure.cluster.x-k8s.io";
        match self.core {
            "v1beta1" => json!({"apiVersion": format!("{group}/v1beta1"), "kind": kind, "name": name}),
            _ => json!({"apiGroup": group, "kind": kind, "name": name}),
        }
    }

    /// A Machine with its bootstrap data and its VSphereMachine, as Cluster API core would have made them.
    pub async fn machine(&self, name: &str, spec: Value) -> Result<()> {
        self.machine_with(name, spec, json!({"value": "#cloud-config\n{}\n"}))
            .await
    }

    pub async fn machine_with(&self, name: &str, spec: Value, bootstrap: Value) -> Result<()> {
        self.machine_of(name, json!({}), spec, bootstrap).await
    }

    /// One with labels that tell whom it belongs to.
    pub async fn machine_of(&self, name: &str, whose: Value, spec: Value, bootstrap: Value) -> Result<()> {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": format!("{name}-boot")}, "stringData": bootstrap});
        self.create::<Secret>(secret).await?;
        let mut labels = whose;
        labels["cluster.x-k8s.io/cluster-name"] = json!("c");
        let machine: Machine = self
            .create(json!({
                "apiVersion": self.core_version(), "kind": "Machine", "metadata": {"name": name, "labels": labels},
                "spec": {
                    "clusterName": "c", "bootstrap": {"dataSecretName": format!("{name}-boot")},
                    "infrastructureRef": self.infrastructure("VSphereMachine", name),
                },
            }))
            .await?;
        self.create::<VSphereMachine>(json!({
            "kind": "VSphereMachine",
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner(&machine, &self.core_version(), "Machine")]},
            "spec": spec,
        }))
        .await?;
        Ok(())
    }

    /// A zone of hosts, and the failure domain that it is about; gives its name.
    pub async fn host_zone(&self, name: &str, tags_made: bool, group: &str) -> Result<String> {
        let name = format!("{name}-{}", self.namespace);
        let side = |kind: &str| json!({"name": name, "type": kind, "tagCategory": kind, "autoConfigure": tags_made});
        let domain: VSphereFailureDomain = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"region": side("Datacenter"), "zone": side("HostGroup"), "topology": {
                "datacenter": "DC0", "computeCluster": "DC0_C0",
                "hosts": {"vmGroupName": format!("vms-{group}"), "hostGroupName": format!("hosts-{group}")},
            }},
        }))?;
        let zone: VSphereDeploymentZone = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"server": self.vcsim.server, "failureDomain": name, "placementConstraint": {}},
        }))?;
        let params = PostParams::default();
        Api::all(self.client.clone()).create(&params, &domain).await?;
        Api::all(self.client.clone()).create(&params, &zone).await?;
        Ok(name)
    }

    /// Waits until a zone says something, or with no text until it is ready; tells whether it can be used.
    pub async fn zone_says(&self, name: &str, text: &'static str) -> Result<bool> {
        let zones: Api<VSphereDeploymentZone> = Api::all(self.client.clone());
        let said = move |zone: Option<&VSphereDeploymentZone>| {
            let status = zone.and_then(|zone| zone.status.clone()).unwrap_or_default();
            let mut messages = status.conditions.iter().filter_map(|c| c.message.as_deref());
            match text {
                "" => status.ready == Some(true),
                text => messages.any(|message| message.contains(text)),
            }
        };
        let waited = kube::runtime::wait::await_condition(zones.clone(), name, said);
        let found = tokio::time::timeout(PATIENCE, waited).await;
        let now = zones.get(name).await?.status;
        found.with_context(|| format!("{name} does not say {text:?}: {now:?}"))??;
        Ok(now.and_then(|status| status.ready) == Some(true))
    }

    pub async fn ready(&self, name: &str) -> Result<(VSphereMachine, VSphereVM, VmInfo)> {
        let ready = |machine: &VSphereMachine| machine.status.as_ref().is_some_and(|status| status.ready);
        let machine = self.until::<VSphereMachine>(name, ready).await?;
        let vm = self.api::<VSphereVM>().get(name).await?;
        let info = self.in_vcenter(&vm).await?.context("ready but not in vCenter")?;
        Ok((machine, vm, info))
    }

    /// What can be told of a machine that did not come up: both objects, the events, vCenter's view, the log.
    async fn story(&self, name: &str) -> String {
        let machine = self.api::<VSphereMachine>().get_opt(name).await.ok().flatten();
        let vm = self.api::<VSphereVM>().get_opt(name).await.ok().flatten();
        let there = match &vm {
            Some(vm) => format!("{:?}", self.in_vcenter(vm).await.map(|vm| vm.map(|vm| vm.state))),
            None => "no VSphereVM".to_owned(),
        };
        let calls = self.vcsim.admin.counters().await.unwrap_or_default();
        let log = tail::about(&[name, &self.vcsim.server], 40).join("\n");
        format!(
            "{}\n{}\nevents: {:#?}\nin vCenter: {there}\ncalls: {calls:?}\nlog:\n{log}",
            pretty(machine.map(|machine| machine.status)),
            pretty(vm.map(|vm| (vm.metadata.resource_version, vm.status))),
            self.events(name).await.unwrap_or_default(),
        )
    }

    /// Waits until an object is as asked for; watches, with a deadline.
    pub async fn until<K>(&self, name: &str, is_so: impl Fn(&K) -> bool) -> Result<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: DeserializeOwned + Clone + std::fmt::Debug + Send + 'static + Sync,
    {
        let found = kube::runtime::wait::await_condition(self.api::<K>(), name, move |object: Option<&K>| {
            object.is_some_and(&is_so)
        });
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(found) => found?.context("gone"),
            Err(_) => bail!(
                "{} {name} did not get there in time\n{}",
                K::kind(&()),
                self.story(name).await
            ),
        }
    }

    pub async fn gone<K>(&self, name: &str) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: DeserializeOwned + Clone + std::fmt::Debug + Send + 'static + Sync,
    {
        let gone = kube::runtime::wait::await_condition(self.api::<K>(), name, |object: Option<&K>| object.is_none());
        match tokio::time::timeout(PATIENCE, gone).await {
            Ok(gone) => gone?,
            Err(_) => bail!("{} {name} is still there\n{}", K::kind(&()), self.story(name).await),
        };
        Ok(())
    }

    pub async fn delete(&self, name: &str) -> Result<()> {
        self.api::<VSphereMachine>()
            .delete(name, &DeleteParams::default())
            .await?;
        self.gone::<VSphereMachine>(name).await
    }

    /// Waits for the condition VMProvisioned of a VSphereVM to say something.
    pub async fn condition_of_vm(&self, name: &str, text: &'static str) -> Result<String> {
        let found = self
            .until::<VSphereVM>(name, move |vm| message(vm).contains(text))
            .await;
        match found {
            Ok(vm) => Ok(message(&vm)),
            Err(error) => bail!("no condition says {text:?}: {error}"),
        }
    }

    pub async fn vcenter(&self) -> Result<Vcenter> {
        let login = Login {
            server: self.vcsim.server.clone(),
            username: self.vcsim.username.clone(),
            password: self.vcsim.password.clone().into(),
            trust: Trust::Thumbprint(self.vcsim.thumbprint.clone()),
            tenant: None,
        };
        Ok(Vcenter::connect(login, Default::default()).await?)
    }

    pub async fn in_vcenter(&self, vm: &VSphereVM) -> Result<Option<VmInfo>> {
        let vcenter = self.vcenter().await?;
        let Some(reference) = vcenter.find_vm_by_instance_uuid(None, &vm.uid().unwrap()).await? else {
            return Ok(None);
        };
        Ok(Some(vcenter.vm(&reference).await?))
    }
}

fn pretty(value: impl serde::Serialize) -> String {
    serde_json::to_string_pretty(&value).unwrap_or_default()
}

fn message(vm: &VSphereVM) -> String {
    let conditions = vm
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let all = conditions
        .iter()
        .filter(|c| c.type_ != "Ready")
        .filter_map(|c| c.message.clone());
    all.collect::<Vec<_>>().join("; ")
}

fn owner(object: &impl Resource<DynamicType = ()>, version: &str, kind: &str) -> Value {
    json!({"apiVersion": version, "kind": kind, "name": object.name_any(), "uid": object.uid(), "controller": true})
}

/// A machine's spec for the simulated vCenter, with more fields.
pub fn spec(template: &str, extra: Value) -> Value {
    let mut spec = json!({
        "template": template, "datacenter": "DC0", "cloneMode": "linkedClone", "numCPUs": 2, "memoryMiB": 4096,
        "datastore": "LocalDS_0", "resourcePool": "/DC0/host/DC0_C0/Resources", "folder": "/DC0/vm",
        "network": {"devices": [{"networkName": "VM Network", "dhcp4": true}]},
    });
    for (key, value) in extra.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

/// Unit, GiB, thin and eagerly scrubbed of every disk, in the order of units.
pub fn disks(info: &VmInfo) -> Vec<(i32, i64, Option<bool>, Option<bool>)> {
    let mut disks: Vec<_> = info
        .devices
        .iter()
        .filter_map(|device| {
            let disk = device.disk()?;
            Some((
                device.unit?,
                disk.capacity_kib / (1024 * 1024),
                disk.thin_provisioned,
                disk.eagerly_scrub,
            ))
        })
        .collect();
    disks.sort();
    disks
}
