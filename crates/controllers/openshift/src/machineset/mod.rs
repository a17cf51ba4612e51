//! The MachineSet controller. Invariant: a late cache never makes it create or delete a machine too many: a set whose
//! last writes the cache has not shown yet is left alone, and after an answer that was lost it reads live.

mod apply;
mod metrics;
mod observe;
pub mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use capstan_api::openshift::{Machine, MachineAuthority, MachineSet};
use capstan_core::Class;
use capstan_kube::expectations::{Expectations, Shown, Version};
use capstan_kube::{Cache, Classified, Context, Next, Reconciler, Recorder};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};
use kube::runtime::reflector::ObjectRef;

use plan::Member;

/// Set on a Node by the machine that it belongs to, as `namespace/name`.
pub const MACHINE_ANNOTATION: &str = "machine.openshift.io/machine";
/// Counts that move with every machine are written at most this often; a change of the spec is answered at once.
const STATUS_PACE: Duration = Duration::from_secs(1);
/// A cache that has not shown our writes after this long is not waited for: its watch may be silently dead.
const STALE_CACHE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error("{path}: {detail}")]
    Invalid { path: String, detail: String },
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Kube(error) => error.class(),
            Self::Invalid { .. } => Class::Terminal,
        }
    }
}

fn invalid(path: &str, detail: String) -> Error {
    Error::Invalid {
        path: path.to_owned(),
        detail,
    }
}

struct Sets {
    context: Context,
    machines: Cache<Machine>,
    nodes: Cache<Node>,
    recorder: Recorder,
    expected: Expectations<String>,
    /// Sets (by UID) whose last create or delete may or may not have happened.
    uncertain: Mutex<HashSet<String>>,
    /// When each set's status was last written.
    written: Mutex<HashMap<String, Instant>>,
}

/// Run until the context's shutdown.
pub async fn run(context: Context) {
    let (sets, machines, nodes) = (
        context.cache::<MachineSet>(),
        context.cache::<Machine>(),
        context.nodes(),
    );
    context
        .metrics
        .register(|registry| registry.register_collector(Box::new(metrics::Sets(sets.clone()))));
    let this = Arc::new(Sets {
        machines: machines.clone(),
        nodes: nodes.clone(),
        recorder: context.recorder("machineset-controller"),
        expected: Expectations::default(),
        uncertain: Mutex::default(),
        written: Mutex::default(),
        context: context.clone(),
    });
    let of_machine = {
        let (this, sets) = (this.clone(), sets.clone());
        machines.subscribe().flat_map(move |change| {
            if change.gone {
                this.expected.gone(&change.object.uid().unwrap_or_default());
            }
            futures::stream::iter(concerned(&sets, &change.object))
        })
    };
    let of_node = {
        let (machines, sets) = (machines.clone(), sets.clone());
        move |node: &Node| {
            machine_of(&machines, node)
                .map(|m| concerned(&sets, &m))
                .unwrap_or_default()
        }
    };
    let ready = async { tokio::try_join!(machines.ready(), nodes.ready()) };
    tokio::select! {
        () = context.shutdown.cancelled() => return,
        _ = ready => {}
    }
    Reconciler::new("machineset", &context, sets)
        .on(of_machine)
        .watches(&nodes, of_node)
        .run(move |set| {
            let this = this.clone();
            async move { this.pass(&set).await }
        })
        .await;
}

/// The set that owns a machine, or those that may adopt it.
fn concerned(sets: &Cache<MachineSet>, machine: &Machine) -> Vec<ObjectRef<MachineSet>> {
    let namespace = machine.namespace().unwrap_or_default();
    if let Some(owner) = machine
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true))
    {
        let set = (owner.kind == MachineSet::KIND).then(|| ObjectRef::new(&owner.name).within(&namespace));
        return set.into_iter().collect();
    }
    let takes = |set: &MachineSet| observe::selector(set).is_ok_and(|selector| selector.matches(machine.labels()));
    sets.select(Some(&namespace), takes)
        .iter()
        .map(|set| ObjectRef::from_obj(set.as_ref()))
        .collect()
}

/// The machine that a node belongs to, by its annotation or by the machine's nodeRef.
fn machine_of(machines: &Cache<Machine>, node: &Node) -> Option<Arc<Machine>> {
    if let Some((namespace, name)) = node
        .annotations()
        .get(MACHINE_ANNOTATION)
        .and_then(|value| value.split_once('/'))
    {
        return machines.get(Some(namespace), name);
    }
    let name = node.metadata.name.as_deref();
    machines
        .store()
        .find(|machine| node_name(machine) == name && name.is_some())
}

fn node_name(machine: &Machine) -> Option<&str> {
    machine.status.as_ref()?.node_ref.as_ref()?.name.as_deref()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sets {
    async fn pass(&self, set: &MachineSet) -> Result<Next, Error> {
        let uid = set.uid().unwrap_or_default();
        if set.metadata.deletion_timestamp.is_some() || managed_elsewhere(set) {
            self.expected.forget(&uid);
            return Ok(Next::Wait);
        }
        let selector = match observe::selector(set) {
            Ok(selector) => selector,
            Err(error) => {
                self.refuse(set, &error).await?;
                return Err(error);
            }
        };
        if self.expected.pending(&uid, |machine| self.shown(set, machine)) {
            if !self.expected.overdue(&uid, STALE_CACHE) {
                return Ok(Next::After(STALE_CACHE));
            }
            self.expected.forget(&uid);
            lock(&self.uncertain).insert(uid.clone());
        }
        let members = self.members(set, &selector, &uid).await?;
        let plan = plan::plan(&members, &observe::wanted(set), Timestamp::now());
        let wait = self.write_status(set, &plan, &selector).await?;
        self.carry_out(set, &plan).await?;
        let available = plan
            .available_at
            .map(|at| Duration::try_from(at.duration_since(Timestamp::now())));
        let available = available.map(Result::unwrap_or_default);
        Ok([wait, available]
            .into_iter()
            .flatten()
            .min()
            .map_or(Next::Wait, Next::After))
    }

    fn shown(&self, set: &MachineSet, uid: &str) -> Option<Shown> {
        let namespace = set.namespace();
        let machine = self
            .machines
            .store()
            .find(|m| m.namespace() == namespace && m.metadata.uid.as_deref() == Some(uid));
        machine.map(|machine| Shown {
            version: Version::new(machine.resource_version().unwrap_or_default()),
            deleting: machine.metadata.deletion_timestamp.is_some(),
        })
    }

    /// The machines that the selector matches: from the cache, or live when we do not know what our last write did.
    async fn members(&self, set: &MachineSet, selector: &Selector, uid: &str) -> Result<Vec<Member>, Error> {
        let namespace = set.namespace().unwrap_or_default();
        let machines = if lock(&self.uncertain).contains(uid) {
            let api = self.context.api::<Machine>(&namespace);
            let params = ListParams::default().labels(&selector.to_string());
            let machines = api.list(&params).await.map_err(capstan_kube::Error::from)?.items;
            for machine in machines
                .iter()
                .filter(|machine| observe::owner(set, machine) == plan::Owner::Us)
            {
                let version = machine.resource_version().unwrap_or_default();
                self.expected
                    .wrote(&uid.to_owned(), machine.uid().unwrap_or_default(), version);
            }
            lock(&self.uncertain).remove(uid);
            machines.into_iter().map(Arc::new).collect()
        } else {
            self.machines
                .select(Some(&namespace), |machine| selector.matches(machine.labels()))
        };
        let member = |machine: &Arc<Machine>| {
            let node = node_name(machine).and_then(|name| self.nodes.get(None, name));
            observe::member(set, machine, node.as_deref())
        };
        Ok(machines.iter().map(member).collect())
    }
}

/// The set is being moved to, or has moved to, Cluster API.
fn managed_elsewhere(set: &MachineSet) -> bool {
    let authority = set.status.as_ref().and_then(|status| status.authoritative_api.as_ref());
    matches!(
        authority,
        Some(MachineAuthority::ClusterApi | MachineAuthority::Migrating)
    )
}
