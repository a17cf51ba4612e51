//! One process of the product, the cluster and the cloud around it, and what can happen to them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use bytes::Bytes;
use capstan_azure::{Clients, Cloud, InProcess, Settings};
use capstan_core::Clock;
use capstan_core::interceptor::{Interceptor, Interceptors};
use capstan_kube::{Context, Options};
use capstan_sim::azure::{Azure, Config, Fault, Handle, Strict, joiner};
use capstan_testkit::apiserver::{self, Answer, ApiServer, Rng};
use capstan_testkit::interceptors::{StopAfter, writes};
use futures::future::BoxFuture;
use http::{Method, Request, Response};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::core::ApiResource;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, ServiceExt};

use crate::faults::{End, Faults, Odds};
use crate::trace::Trace;

/// The namespace of everything.
pub const NAMESPACE: &str = "default";
/// The resource group of everything.
pub const GROUP: &str = "capstan";
/// A watch lags by no more than this.
const LAG: Duration = Duration::from_secs(20);
/// More requests than this in one seed are a loop.
const MOST_REQUESTS: usize = 60_000;
/// How long a process that is to stop after a write may go on without one.
const STOPS_WITHIN: Duration = Duration::from_secs(1200);
/// The time of day at which every seed begins, in seconds: 2027-01-15.
const BEGIN: i64 = 1_800_000_000;

/// Runs the controllers until they are shut down.
pub type Process = fn(Context, Clouds) -> BoxFuture<'static, Result<()>>;

/// The clouds that a process reaches.
pub struct Clouds {
    pub azure: Clients,
    pub vcenter: Option<capstan_vsphere::InProcess>,
}

/// Checks promises at the requests of the product.
pub trait Monitor: Send + Sync {
    /// A write to Azure is about to be carried out.
    fn azure_before(&self, _: &View, _: &Call) {}
    /// It was carried out.
    fn azure_after(&self, _: &View, _: &Call) {}
    /// A write to Kubernetes was carried out; the last argument is the object as it was.
    fn kube_after(&self, _: &View, _: &str, _: Option<&Value>) {}
}

/// For scenarios without Azure.
pub struct NoMonitor;

impl Monitor for NoMonitor {}

/// A request to Azure.
#[derive(Debug)]
pub struct Call {
    pub method: Method,
    pub path: String,
    pub body: Value,
}

/// The cluster and the cloud, as they are.
#[derive(Clone)]
pub struct View {
    pub server: ApiServer,
    pub azure: Arc<Handle>,
    pub trace: Trace,
}

pub struct World {
    pub view: View,
    pub client: kube::Client,
    pub trace: Trace,
    pub crashes: usize,
    /// The vCenter, if there is one.
    pub vcenter: Option<capstan_vsphere::InProcess>,
    faults: Arc<Faults>,
    monitor: Arc<dyn Monitor>,
    process: Process,
    clock: Clock,
    running: Option<Running>,
}

struct Running {
    end: Arc<End>,
    stop: Option<Arc<StopAfter>>,
    shutdown: CancellationToken,
    task: JoinHandle<Result<()>>,
}

impl World {
    pub async fn new(
        seed: u64,
        config: Config,
        process: Process,
        monitor: Arc<dyn Monitor>,
        trace: Trace,
    ) -> Result<Self> {
        let begin = jiff::Timestamp::from_second(BEGIN)?;
        let server = ApiServer::new(apiserver::Settings {
            seed,
            start: begin,
            ..apiserver::Settings::default()
        });
        let azure = Azure::in_process(Config {
            seed,
            start: Some(begin),
            strict: Strict::ALL,
            joiner: Some(joiner::Options {
                ready_after: config.joiner.as_ref().and_then(|joiner| joiner.ready_after),
                ..joiner::Options::client(server.client())
            }),
            ..config
        })
        .await?;
        Ok(Self {
            client: server.client(),
            view: View {
                server,
                azure: Arc::new(azure),
                trace: trace.clone(),
            },
            faults: Faults::new(seed, trace.clone()),
            trace,
            crashes: 0,
            vcenter: None,
            monitor,
            process,
            clock: Clock::starting_at(begin),
            running: None,
        })
    }

    /// Starts a process; it stops after so many writes, if a number is given.
    pub fn start(&mut self, writes_left: Option<usize>) -> Result<()> {
        let (end, shutdown) = (Arc::new(End::default()), CancellationToken::new());
        let stop = writes_left.map(|number| StopAfter::counting(number, writes));
        let mut all: Vec<Arc<dyn Interceptor>> = vec![end.clone()];
        all.extend(stop.clone().map(|stop| stop as Arc<dyn Interceptor>));
        all.push(self.faults.clone());
        let interceptors = Interceptors::new(all);
        let context = Context::new(
            kube::Config::new("http://in-process".parse()?),
            Options {
                interceptors: interceptors.clone(),
                namespace: Some(NAMESPACE.to_owned()),
                shutdown: shutdown.clone(),
                clock: self.clock,
                transport: Some(kube_transport(self.view.clone(), self.monitor.clone())),
                ..Options::default()
            },
        )?;
        let url = &self.view.azure.url;
        let clients = Clients::new(Settings {
            interceptors,
            clock: self.clock,
            in_process: Some(azure_transport(self.view.clone(), self.monitor.clone())),
            ..Settings::new(Cloud::custom("sim", url, url)?)
        })?;
        let clouds = Clouds {
            azure: clients,
            vcenter: self.vcenter.clone(),
        };
        let task = tokio::spawn((self.process)(context, clouds));
        self.running = Some(Running {
            end,
            stop,
            shutdown,
            task,
        });
        Ok(())
    }

    /// Ends the process in the middle of whatever it does.
    pub async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.end.end();
            running.task.abort();
            let _ = running.task.await;
            running.shutdown.cancel();
        }
    }

    pub async fn crash(&mut self) -> Result<()> {
        self.trace.note("crash");
        self.crashes += 1;
        self.stop().await;
        self.start(None)
    }

    /// Starts a process that ends after its n-th write, waits for its end, and starts another one.
    pub async fn crash_after(&mut self, number: usize) -> Result<()> {
        self.trace.note(format!("start, to crash after write {number}"));
        self.stop().await;
        self.start(Some(number))?;
        let stop = self.running.as_ref().and_then(|running| running.stop.clone());
        if let Some(stop) = stop {
            let _ = tokio::time::timeout(STOPS_WITHIN, stop.stopped()).await;
        }
        self.check()?;
        self.crash().await
    }

    /// Waits, and checks what happened meanwhile.
    pub async fn wait(&mut self, time: Duration) -> Result<()> {
        tokio::time::sleep(time).await;
        self.check()
    }

    fn check(&self) -> Result<()> {
        if let Some(broken) = self.trace.broken().first() {
            bail!("{broken}");
        }
        if self.faults.counts().0 > MOST_REQUESTS {
            bail!("more than {MOST_REQUESTS} requests: a loop");
        }
        if self.running.as_ref().is_some_and(|running| running.task.is_finished()) {
            bail!("the controllers have ended by themselves");
        }
        Ok(())
    }

    pub fn requests(&self) -> usize {
        self.faults.counts().0
    }

    /// Returns how many writes the product has sent, events not counted.
    pub fn written(&self) -> usize {
        self.faults.counts().1
    }

    pub fn disturb_requests(&mut self, rng: &mut Rng) {
        let odds = Odds {
            refused: rng.below(15),
            lost: rng.below(10),
            late: rng.below(15),
        };
        self.trace.note(format!("{odds:?}"));
        self.faults.set(odds);
    }

    pub fn disturb_watches(&mut self, rng: &mut Rng) {
        match rng.below(4) {
            0 => {
                self.trace.note("watches are cut");
                self.view.server.cut_watches();
            }
            1 => {
                self.trace.note("history is compacted, watches are cut");
                self.view.server.compact();
                self.view.server.cut_watches();
            }
            _ => {
                let lag = rng.between(&(Duration::ZERO..=LAG));
                self.trace.note(format!("watches lag by up to {lag:?}"));
                self.view.server.set_lag(Duration::ZERO..=lag);
            }
        }
    }

    pub fn disturb_azure(&mut self, rng: &mut Rng) -> Result<()> {
        let times = rng.below(6) as u64 + 1;
        let fault = match rng.below(6) {
            0 => Fault::answer(500),
            1 => Fault::answer(409).method("PUT"),
            2 => Fault::new(capstan_sim::azure::Action::Drop),
            3 => Fault::new(capstan_sim::azure::Action::Refuse),
            4 => Fault::new(capstan_sim::azure::Action::Delay { millis: 30_000 }),
            _ => Fault::new(capstan_sim::azure::Action::FailProvisioning {
                code: "OSProvisioningTimedOut".to_owned(),
                message: "OS provisioning did not finish in time".to_owned(),
            }),
        };
        let fault = fault.skip(rng.below(4) as u64).times(times);
        self.trace.note(format!("azure: {fault:?}"));
        self.view.azure.fault(fault)?;
        Ok(())
    }

    /// Ends all faults; a process that has stopped is started again.
    pub fn calm(&mut self) -> Result<()> {
        self.trace.note("calm");
        self.faults.set(Odds::default());
        self.view.server.set_lag(Duration::ZERO..=Duration::ZERO);
        self.view.azure.clear_faults();
        self.view.azure.release();
        Ok(())
    }

    fn api(&self, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let resource = ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: if group.is_empty() {
                version.to_owned()
            } else {
                format!("{group}/{version}")
            },
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        };
        match plural {
            "nodes" => Api::all_with(self.client.clone(), &resource),
            _ => Api::namespaced_with(self.client.clone(), NAMESPACE, &resource),
        }
    }

    /// Creates an object as a user does.
    pub async fn create(&self, plural: &str, manifest: Value) -> Result<DynamicObject> {
        let text = |field: &str| manifest[field].as_str().unwrap_or_default().to_owned();
        let api = self.api(&text("apiVersion"), &text("kind"), plural);
        let object: DynamicObject = serde_json::from_value(manifest)?;
        Ok(api.create(&PostParams::default(), &object).await?)
    }

    /// Changes an object as a user does. An object that is gone by now is left alone.
    pub async fn patch(&self, version: &str, plural: &str, name: &str, patch: Value) -> Result<()> {
        self.trace.note(format!("user: patch {plural}/{name} {patch}"));
        let api = self.api(version, "", plural);
        absent(
            api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
                .map(drop),
        )
    }

    pub async fn delete(&self, version: &str, plural: &str, name: &str) -> Result<()> {
        self.trace.note(format!("user: delete {plural}/{name}"));
        let api = self.api(version, "", plural);
        absent(api.delete(name, &DeleteParams::default()).await.map(drop))
    }

    /// A Pod on each Node that takes Pods, and a budget over all of them.
    pub async fn schedule(&self) -> Result<()> {
        for node in self
            .view
            .server
            .objects("nodes")
            .iter()
            .filter(|node| is_available(node))
        {
            let name = node["metadata"]["name"].as_str().unwrap_or_default();
            let pod = json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"generateName": format!("web-{name}-"), "labels": {"app": "web"}, "ownerReferences": [{
                    "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": self.view.owner(), "controller": true}]},
                "spec": {"nodeName": name, "containers": [{"name": "c", "image": "none"}]}});
            self.create("pods", pod).await?;
        }
        Ok(())
    }
}

fn absent(result: kube::Result<()>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

impl View {
    /// The uid of the ReplicaSet that Pods belong to.
    fn owner(&self) -> String {
        let sets = self.server.objects("replicasets");
        let uid = sets.first().and_then(|set| set["metadata"]["uid"].as_str());
        uid.unwrap_or_default().to_owned()
    }

    pub fn node(&self, provider_id: &str) -> Option<Value> {
        let same = |node: &Value| {
            let id = node["spec"]["providerID"].as_str().unwrap_or_default();
            id.eq_ignore_ascii_case(provider_id)
        };
        self.server.objects("nodes").into_iter().find(same)
    }

    /// Names of the Pods that keep a Node from being drained.
    pub fn pods_on(&self, node: &str) -> Vec<String> {
        let pods = self
            .server
            .objects("pods")
            .into_iter()
            .filter(|pod| pod["spec"]["nodeName"] == node);
        pods.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect()
    }
}

pub fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions
        .into_iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Whether a Node is ready and takes Pods.
pub fn is_available(node: &Value) -> bool {
    is_ready(node) && node["spec"]["unschedulable"] != true && node["metadata"]["deletionTimestamp"].is_null()
}

fn kube_transport(view: View, monitor: Arc<dyn Monitor>) -> capstan_kube::client::Transport {
    let service = tower::service_fn(move |request: Request<Body>| {
        let (view, monitor) = (view.clone(), monitor.clone());
        async move {
            let (method, path) = (request.method().clone(), request.uri().path().to_owned());
            let before = (method != Method::GET).then(|| object(&view, &path)).flatten();
            let response = view.server.clone().oneshot(request).await?;
            if method != Method::GET {
                monitor.kube_after(&view, &path, before.as_ref());
            }
            Ok::<Response<Answer>, BoxError>(response)
        }
    });
    tower::util::BoxCloneSyncService::new(service)
}

/// The Node that a path is about; the monitors check no other kind.
fn object(view: &View, path: &str) -> Option<Value> {
    let name = path.strip_prefix("/api/v1/nodes/")?.split('/').next()?;
    view.server
        .objects("nodes")
        .into_iter()
        .find(|node| node["metadata"]["name"] == name)
}

fn azure_transport(view: View, monitor: Arc<dyn Monitor>) -> InProcess {
    InProcess::new(move |request: Request<Bytes>| {
        let (view, monitor) = (view.clone(), monitor.clone());
        async move {
            let call = (request.method() != Method::GET).then(|| Call {
                method: request.method().clone(),
                path: request.uri().path().to_lowercase(),
                body: serde_json::from_slice(request.body()).unwrap_or_default(),
            });
            if let Some(call) = &call {
                monitor.azure_before(&view, call);
            }
            let answer = view.azure.answer(request).await;
            if let Some(call) = &call {
                monitor.azure_after(&view, call);
            }
            answer.map_err(|error| error.to_string())
        }
    })
}
