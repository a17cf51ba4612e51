//! Nodes of running VMs and instances join a cluster, as their kubelets would create them. The joiner deletes them when
//! the VM is deleted.
//!
//! kwok renews the lease of a Node that is ready. A Node that kwok must not change (it is not ready yet, or its VM is
//! stopped) has the label `capstan.dev/kwok=off`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::clock::Span;
use super::compute::eviction::split;
use super::compute::fleet::{Power, State};
use super::server::Shared;
use super::wire::text;
use super::world::{Doc, World};

/// The number of Nodes that are written at a time.
const WRITERS: usize = 16;
/// After an API server refused or did not answer.
const AGAIN: Duration = Duration::from_secs(1);
const KWOK_LABEL: &str = "capstan.dev/kwok";

/// A cluster that Nodes join.
#[derive(Clone)]
pub enum Cluster {
    Kubeconfig(PathBuf),
    Client(kube::Client),
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cluster::Kubeconfig(path) => write!(f, "Kubeconfig({})", path.display()),
            Cluster::Client(_) => f.write_str("Client"),
        }
    }
}

/// The clusters that Nodes join, and the metadata of the Nodes.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// For VMs and scale sets that no entry of `by_name` fits.
    pub default: Option<Cluster>,
    /// By the name of the scale set or VM: an exact name, or a prefix with `*` at its end. The first that fits wins.
    pub by_name: Vec<(String, Cluster)>,
    /// From running to Ready.
    pub ready_after: Option<Span>,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub kubelet_version: Option<String>,
}

impl Options {
    pub fn client(client: kube::Client) -> Self {
        Self {
            default: Some(Cluster::Client(client)),
            ..Self::default()
        }
    }

    fn clusters(&self) -> impl Iterator<Item = &Cluster> {
        self.by_name.iter().map(|(_, cluster)| cluster).chain(&self.default)
    }

    /// The place in `clusters` of the one that a scale set or VM of this name joins.
    fn place(&self, name: &str) -> Option<usize> {
        let fits = |pattern: &str| match pattern.strip_suffix('*') {
            Some(prefix) => name.to_lowercase().starts_with(&prefix.to_lowercase()),
            None => pattern.eq_ignore_ascii_case(name),
        };
        let by_name = self.by_name.iter().position(|(pattern, _)| fits(pattern));
        by_name.or(self.default.as_ref().map(|_| self.by_name.len()))
    }
}

/// A VM or instance that has, or will have, a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Guest {
    node: String,
    /// The scale set's or the VM's name.
    owner: String,
    provider_id: String,
    running: bool,
    address: String,
    region: String,
    zone: Option<String>,
    size: String,
    image: String,
}

/// The state of the joiner for a guest.
#[derive(Clone, Debug)]
struct Joined {
    node: String,
    cluster: usize,
    ready: bool,
    /// The time at which a running guest becomes ready.
    ready_at: Option<Instant>,
}

pub struct Joiner {
    options: Options,
    clients: Vec<kube::Client>,
    joined: HashMap<String, Joined>,
    /// Guests that never join, by a fault.
    absent: HashSet<String>,
    /// Guests to look at again, and when.
    again: BTreeMap<(Instant, u64), String>,
    ticket: u64,
}

impl Joiner {
    pub async fn new(options: Options) -> anyhow::Result<Self> {
        let mut clients = Vec::new();
        for cluster in options.clusters() {
            clients.push(match cluster {
                Cluster::Client(client) => client.clone(),
                Cluster::Kubeconfig(path) => connect(path).await?,
            });
        }
        Ok(Self {
            options,
            clients,
            joined: HashMap::new(),
            absent: HashSet::new(),
            again: BTreeMap::new(),
            ticket: 0,
        })
    }

    /// Follows the simulator for as long as it lives.
    pub async fn run(mut self, shared: Arc<Shared>) {
        loop {
            let keys = self.due(&shared);
            if keys.is_empty() {
                let next = self.again.first_key_value().map(|((at, _), _)| *at);
                tokio::select! {
                    () = shared.changed.notified() => {}
                    () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
                }
                continue;
            }
            self.sync(&shared, keys).await;
        }
    }

    fn due(&mut self, shared: &Shared) -> Vec<(String, Option<Guest>)> {
        let mut core = shared.lock();
        let mut keys = std::mem::take(&mut core.world.touched);
        let now = Instant::now();
        while let Some(entry) = self.again.first_entry() {
            if entry.key().0 > now {
                break;
            }
            keys.insert(entry.remove());
        }
        let mut due = Vec::new();
        for key in keys {
            let guest = guest(&core.world, &key);
            let first = !self.joined.contains_key(&key) && !self.absent.contains(&key);
            match &guest {
                None => drop(self.absent.remove(&key)),
                Some(guest) if guest.running && first && core.world.faults.never_joins(&key) => {
                    self.absent.insert(key.clone());
                }
                Some(_) => {}
            }
            if !self.absent.contains(&key) {
                due.push((key, guest));
            }
        }
        due
    }

    async fn sync(&mut self, shared: &Shared, keys: Vec<(String, Option<Guest>)>) {
        let mut work = Vec::new();
        for (key, guest) in keys {
            let before = self.joined.get(&key).cloned();
            let step = self.step(before.as_ref(), guest, shared);
            if let Some(step) = step {
                work.push((key, before, step));
            }
        }
        let (clients, options) = (&self.clients, &self.options);
        let now = shared.lock().world.clock.wall();
        let carry = |(key, before, step): (String, Option<Joined>, Step)| async move {
            let outcome = step.apply(clients, options, now).await;
            (key, before, step, outcome)
        };
        let done: Vec<_> = futures::stream::iter(work)
            .map(carry)
            .buffer_unordered(WRITERS)
            .collect()
            .await;
        for (key, before, step, outcome) in done {
            match outcome {
                Ok(()) => self.record(key, before, step),
                Err(error) => {
                    tracing::warn!(key, %error, "cannot write a Node; the joiner retries");
                    self.later(Instant::now() + AGAIN, key);
                }
            }
        }
    }

    fn later(&mut self, at: Instant, key: String) {
        self.ticket += 1;
        self.again.insert((at, self.ticket), key);
    }

    /// Returns the next step for one guest.
    fn step(&self, before: Option<&Joined>, guest: Option<Guest>, shared: &Shared) -> Option<Step> {
        let now = Instant::now();
        match (before, guest) {
            (None, None) => None,
            (Some(joined), None) => Some(Step::Leave {
                cluster: joined.cluster,
                node: joined.node.clone(),
            }),
            (None, Some(guest)) if !guest.running => None,
            (None, Some(guest)) => {
                let cluster = self.options.place(&guest.owner)?;
                let wait = self
                    .options
                    .ready_after
                    .map(|span| span.draw(&mut shared.lock().world.chance))
                    .unwrap_or_default();
                Some(Step::Join {
                    cluster,
                    guest,
                    ready_at: (!wait.is_zero()).then(|| now + wait),
                })
            }
            (Some(joined), Some(guest)) => {
                let waiting = joined.ready_at.is_some_and(|at| at > now);
                let ready = guest.running && !waiting;
                (ready != joined.ready).then(|| Step::Turn {
                    cluster: joined.cluster,
                    node: joined.node.clone(),
                    ready,
                })
            }
        }
    }

    fn record(&mut self, key: String, before: Option<Joined>, step: Step) {
        match step {
            Step::Leave { .. } => {
                self.joined.remove(&key);
            }
            Step::Join {
                cluster,
                guest,
                ready_at,
            } => {
                if let Some(at) = ready_at {
                    self.later(at, key.clone());
                }
                self.joined.insert(
                    key,
                    Joined {
                        node: guest.node,
                        cluster,
                        ready: ready_at.is_none(),
                        ready_at,
                    },
                );
            }
            Step::Turn { ready, .. } => {
                if let Some(before) = before {
                    self.joined.insert(
                        key,
                        Joined {
                            ready,
                            ready_at: None,
                            ..before
                        },
                    );
                }
            }
        }
    }
}

#[derive(Debug)]
enum Step {
    Join {
        cluster: usize,
        guest: Guest,
        ready_at: Option<Instant>,
    },
    Turn {
        cluster: usize,
        node: String,
        ready: bool,
    },
    Leave {
        cluster: usize,
        node: String,
    },
}

impl Step {
    async fn apply(&self, clients: &[kube::Client], options: &Options, now: jiff::Timestamp) -> anyhow::Result<()> {
        let cluster = match self {
            Step::Join { cluster, .. } | Step::Turn { cluster, .. } | Step::Leave { cluster, .. } => *cluster,
        };
        let nodes: Api<Node> = Api::all(clients.get(cluster).context("no such cluster")?.clone());
        match self {
            Step::Join { guest, ready_at, .. } => join(&nodes, guest, ready_at.is_none(), options, now).await,
            Step::Turn { node, ready, .. } => turn(&nodes, node, *ready, now).await,
            Step::Leave { node, .. } => absent(nodes.delete(node, &DeleteParams::default()).await.map(|_| ())),
        }
    }
}

fn absent(result: kube::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other?),
    }
}

async fn join(
    nodes: &Api<Node>,
    guest: &Guest,
    ready: bool,
    options: &Options,
    now: jiff::Timestamp,
) -> anyhow::Result<()> {
    let node: Node = serde_json::from_value(node(guest, ready, options, now))?;
    match nodes.create(&PostParams::default(), &node).await {
        Err(kube::Error::Api(status)) if status.code == 409 => turn(nodes, &guest.node, ready, now).await,
        other => Ok(other.map(|_| ())?),
    }
}

async fn turn(nodes: &Api<Node>, name: &str, ready: bool, now: jiff::Timestamp) -> anyhow::Result<()> {
    let label = if ready { Value::Null } else { json!("off") };
    let metadata = json!({ "metadata": { "labels": { KWOK_LABEL: label } } });
    absent(
        nodes
            .patch(name, &PatchParams::default(), &Patch::Merge(&metadata))
            .await
            .map(|_| ()),
    )?;
    let status = json!({ "status": { "conditions": [condition(ready, false, now)] } });
    absent(
        nodes
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(&status))
            .await
            .map(|_| ()),
    )
}

fn condition(ready: bool, fresh: bool, now: jiff::Timestamp) -> Value {
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let (status, reason, message) = match (ready, fresh) {
        (true, _) => ("True", "KubeletReady", "kubelet is posting ready status"),
        (false, true) => ("False", "KubeletNotReady", "container runtime network not ready"),
        (false, false) => ("Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status."),
    };
    json!({ "type": "Ready", "status": status, "reason": reason, "message": message, "lastHeartbeatTime": now, "lastTransitionTime": now })
}

fn node(guest: &Guest, ready: bool, options: &Options, now: jiff::Timestamp) -> Value {
    let zone = guest
        .zone
        .as_ref()
        .map_or_else(|| "0".to_owned(), |zone| format!("{}-{zone}", guest.region));
    let mut labels = json!({
        "kubernetes.io/hostname": guest.node, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": guest.size, "topology.kubernetes.io/region": guest.region,
        "topology.kubernetes.io/zone": zone,
    });
    for (name, value) in &options.labels {
        labels[name] = json!(value);
    }
    if !ready {
        labels[KWOK_LABEL] = json!("off");
    }
    let version = options.kubelet_version.as_deref().unwrap_or("v1.36.3");
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": guest.node, "labels": labels },
        "spec": { "providerID": guest.provider_id, "taints": options.taints },
        "status": {
            "addresses": [{ "type": "InternalIP", "address": guest.address }, { "type": "Hostname", "address": guest.node }],
            "capacity": { "cpu": "4", "memory": "16Gi", "pods": "110" }, "allocatable": { "cpu": "4", "memory": "16Gi", "pods": "110" },
            "conditions": [condition(ready, true, now)],
            "nodeInfo": { "kubeletVersion": version, "kubeProxyVersion": version, "osImage": guest.image, "operatingSystem": "linux",
                "architecture": "amd64", "containerRuntimeVersion": "containerd://2.0.0", "kernelVersion": "6.8.0-azure",
                "machineID": "", "systemUUID": "", "bootID": "" },
        },
    })
}

async fn connect(path: &std::path::Path) -> anyhow::Result<kube::Client> {
    let kubeconfig =
        kube::config::Kubeconfig::read_from(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
    // In the API server's audit log the creator of the Nodes is told apart from their users.
    config
        .headers
        .push((http::header::USER_AGENT, http::HeaderValue::from_static("capstan-sim")));
    Ok(kube::Client::try_from(config)?)
}

/// The guest behind a key, if it still exists.
fn guest(world: &World, key: &str) -> Option<Guest> {
    match split(key) {
        Some((set, id)) => {
            let fleet = world.fleets.get(set)?;
            let instance = fleet.instances.get(&id)?;
            let image = text(
                fleet.model(instance),
                "/properties/virtualMachineProfile/storageProfile/imageReference/id",
            );
            Some(Guest {
                node: fleet.computer_name(instance).to_lowercase(),
                owner: fleet.name.clone(),
                provider_id: provider_id(&fleet.instance_id(instance)),
                running: instance.power == Power::Running && instance.state != State::Failed,
                address: fleet.address(instance),
                region: fleet.location.clone(),
                zone: instance.zone.clone(),
                size: fleet.size(instance).to_owned(),
                image: image.unwrap_or("Ubuntu 24.04").to_owned(),
            })
        }
        None => vm_guest(world, world.docs.get(key)?),
    }
}

fn vm_guest(world: &World, doc: &Doc) -> Option<Guest> {
    let set = text(&doc.body, "/properties/virtualMachineScaleSet/id").and_then(|id| id.rsplit('/').next());
    let nic = text(&doc.body, "/properties/networkProfile/networkInterfaces/0/id").and_then(|id| world.get(id));
    let address = nic.and_then(|nic| text(&nic.body, "/properties/ipConfigurations/0/properties/privateIPAddress"));
    let computer = text(&doc.body, "/properties/osProfile/computerName").unwrap_or(doc.name());
    Some(Guest {
        node: computer.to_lowercase(),
        owner: set.unwrap_or(doc.name()).to_owned(),
        provider_id: provider_id(doc.id()),
        running: doc.hidden("power") == "running" && doc.state() != "Failed" && doc.state() != "Creating",
        address: address.unwrap_or("10.0.0.4").to_owned(),
        region: doc.location().to_owned(),
        zone: text(&doc.body, "/zones/0").map(str::to_owned),
        size: text(&doc.body, "/properties/hardwareProfile/vmSize")
            .unwrap_or_default()
            .to_owned(),
        image: text(&doc.body, "/properties/storageProfile/imageReference/id")
            .unwrap_or("Ubuntu 24.04")
            .to_owned(),
    })
}

/// As Azure's cloud provider writes it: subscription and group in lower case, the rest as it is.
fn provider_id(id: &str) -> String {
    let (head, tail) = id.split_once("/providers/").unwrap_or((id, ""));
    let head = head.to_lowercase().replace("/resourcegroups/", "/resourceGroups/");
    format!("azure://{head}/providers/{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_ids_are_what_the_cloud_provider_writes() {
        assert_eq!(
            provider_id("/subscriptions/AB/resourceGroups/My-RG/providers/Microsoft.Compute/virtualMachines/Worker"),
            "azure:///subscriptions/ab/resourceGroups/my-rg/providers/Microsoft.Compute/virtualMachines/Worker"
        );
    }

    #[test]
    fn a_scale_set_joins_the_first_cluster_whose_name_fits() {
        let cluster = || Cluster::Kubeconfig("x".into());
        let by_name = vec![("pool-a".into(), cluster()), ("pool-*".into(), cluster())];
        let mut options = Options {
            by_name,
            ..Options::default()
        };
        assert_eq!(options.place("Pool-A"), Some(0));
        assert_eq!(options.place("pool-b"), Some(1));
        assert_eq!(options.place("other"), None);
        options.default = Some(cluster());
        assert_eq!(options.place("other"), Some(2));
    }
}
