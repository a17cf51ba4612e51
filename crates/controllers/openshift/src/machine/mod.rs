//! OpenShift machines on Azure: one Machine object, one virtual machine.
//!
//! Operations are polled when Azure's Retry-After allows it; changes of Nodes and pods come by watches.

mod apply;
mod availability_set;
mod build;
mod check;
mod create;
mod dependencies;
mod disk_deletion;
mod disk_list;
mod disks;
mod drain;
mod error;
mod ids;
mod internal_balancer;
mod metrics;
mod network;
pub(crate) mod node;
mod observe;
mod quotas;
pub(crate) mod spec;
mod state;
pub(crate) mod status;
mod subnets;
mod teardown;

pub use error::Error;

use crate::account::{Account, Accounts};
use crate::platform::Facts;
use capstan_api::openshift::{AzureMachineProviderSpec, Machine};
use capstan_azure::Clients;
use capstan_azure::model::VirtualMachine;
use capstan_core::machine::{self, Step, names::Names};
use capstan_kube::cache::Change;
use capstan_kube::drain::Drainer;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context, Recorder};
use disk_list::DiskLists;
use futures::{Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use metrics::Metrics;
use quotas::Quotas;
use state::State;
use std::collections::HashMap;
use std::sync::Arc;
use subnets::Subnets;

/// The component that events of machines are reported by.
const COMPONENT: &str = "azure-controller";

/// Runs the machine controller until the context's shutdown.
pub async fn run(context: Context, clients: Clients, facts: Facts) -> Result<(), Error> {
    let (machines, nodes) = (context.cache::<Machine>(), context.nodes());
    let reconciler = Reconciler::new(&context, machines.clone()).on(of_nodes(nodes.clone(), machines.clone()));
    machines.ready().await?;
    nodes.ready().await?;
    let controller = Controller {
        accounts: Accounts::new(context.client.clone(), clients, context.clock),
        drainer: Drainer::new(&context),
        events: context.recorder(COMPONENT),
        disk_lists: DiskLists::new(context.clock),
        subnets: Subnets::new(context.clock),
        quotas: Quotas::new(context.clock),
        metrics: Metrics::new(&context.metrics, machines.clone(), context.clock, facts.has_operator()),
        facts,
        context,
        machines,
        nodes,
    };
    reconciler.run(Arc::new(controller)).await;
    Ok(())
}

/// Changes of Nodes that matter to a machine, as the machines that they matter to.
fn of_nodes(nodes: Cache<Node>, machines: Cache<Machine>) -> impl Stream<Item = ObjectRef<Machine>> + Send {
    let mut prints: HashMap<String, u64> = HashMap::new();
    nodes.subscribe().flat_map(move |Change { object: node, gone }| {
        let name = node.name_any();
        let print = node::fingerprint(&node);
        let changed = if gone {
            prints.remove(&name).is_some()
        } else {
            prints.insert(name, print) != Some(print)
        };
        let concerned = if changed {
            machines_of(&node, &machines)
        } else {
            Vec::new()
        };
        futures::stream::iter(concerned)
    })
}

fn machines_of(node: &Node, machines: &Cache<Machine>) -> Vec<ObjectRef<Machine>> {
    let name = node.name_any();
    let of_node = |machine: &Machine| {
        let status = machine.status.as_ref();
        let linked = status.and_then(|status| status.node_ref.as_ref()?.name.as_deref()) == Some(name.as_str());
        let addresses = status.map(|status| status.addresses.as_slice()).unwrap_or_default();
        linked || node::belongs(node, machine.spec.provider_id.as_deref().unwrap_or_default(), addresses)
    };
    machines
        .select(None, of_node)
        .iter()
        .map(|machine| ObjectRef::from_obj(machine.as_ref()))
        .collect()
}

pub(crate) struct Controller {
    context: Context,
    accounts: Accounts,
    machines: Cache<Machine>,
    nodes: Cache<Node>,
    drainer: Drainer,
    events: Recorder,
    disk_lists: DiskLists,
    subnets: Subnets,
    quotas: Quotas,
    metrics: Metrics,
    facts: Facts,
}

/// What the plan depends on, and what its steps need.
pub(crate) struct Observed {
    plan: machine::Observed,
    /// As Azure showed it in this reconcile.
    vm: Option<VirtualMachine>,
    /// Read when a step first needs it.
    target: Option<Arc<Target>>,
    /// What the steps have done.
    notes: status::Notes,
}

/// Everything that requests to Azure about one machine need.
pub(crate) struct Target {
    spec: AzureMachineProviderSpec,
    names: Names,
    account: Account,
}

impl Reconcile for Controller {
    type Object = Machine;
    type State = State;
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "machine";
    const COMPONENT: &'static str = COMPONENT;

    async fn observe(&self, scope: &mut Scope<Machine>, state: &mut State) -> Result<Option<Observed>, Error> {
        self.observe_machine(scope, state).await
    }

    fn plan(observed: &Observed, now: Timestamp) -> Plan<Step> {
        machine::plan(&observed.plan, now)
    }

    async fn apply(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        self.apply_step(step, observed, scope, state).await
    }

    fn status(
        machine: &Machine,
        observed: Option<&Observed>,
        _: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<Machine> {
        status::status(machine, observed.map(|observed| &observed.notes), now)
    }

    fn reported(&self, before: &Machine, after: &Machine) {
        self.metrics.phase(before, after);
    }
}
