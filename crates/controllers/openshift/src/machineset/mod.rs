//! The MachineSet controller. Invariant: a late cache never makes it create or delete a machine too many: the runtime
//! does not reconcile a set before the cache shows the set's last writes, and after a lost answer it observes live.

mod apply;
mod error;
mod metrics;
mod observe;
mod state;
mod status;

use std::sync::Arc;
use std::time::Duration;

use capstan_api::openshift::{Machine, MachineSet};
use capstan_azure::Clients;
use capstan_core::machineset::{self, Step};
use capstan_core::plan::Forecast;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};
use kube::runtime::reflector::ObjectRef;

pub use error::Error;

use crate::account::Accounts;
use crate::machine::node::MACHINE_ANNOTATION;
use state::{Lookup, State};

/// The name of this controller.
pub(crate) const NAME: &str = Controller::NAME;

struct Controller {
    accounts: Accounts,
    machines: Cache<Machine>,
    nodes: Cache<Node>,
}

enum Observed {
    Managed(Managed),
    /// Cluster API manages the set.
    Paused,
}

/// What the plan depends on, and what the status shows.
struct Managed {
    plan: machineset::Observed,
    selector: Selector,
    capacity: Lookup,
    /// When a capacity that is not known is looked up again.
    resync: Duration,
}

/// Runs until the context's shutdown.
pub async fn run(context: Context, clients: Clients, has_operator: bool) {
    let (sets, machines, nodes) = (
        context.cache::<MachineSet>(),
        context.cache::<Machine>(),
        context.nodes(),
    );
    if !has_operator {
        // Else machine-api-operator exports them, and every alert on them would fire twice.
        let collector = Box::new(metrics::Sets(sets.clone()));
        context
            .metrics
            .register(|registry| registry.register_collector(collector));
    }
    let ready = async { tokio::try_join!(machines.ready(), nodes.ready()) };
    tokio::select! {
        () = context.shutdown.cancelled() => return,
        _ = ready => {}
    }
    let of_machine = {
        let sets = sets.clone();
        move |machine: &Machine| sets_of(&sets, machine)
    };
    let of_node = {
        let (machines, sets) = (machines.clone(), sets.clone());
        move |node: &Node| {
            let machine = machine_of(&machines, node);
            machine.map(|machine| sets_of(&sets, &machine)).unwrap_or_default()
        }
    };
    Reconciler::new(&context, sets)
        .watches(&machines, of_machine)
        .watches(&nodes, of_node)
        .run(Arc::new(Controller {
            accounts: Accounts::new(context.client.clone(), clients, context.clock),
            machines,
            nodes,
        }))
        .await;
}

impl Reconcile for Controller {
    type Object = MachineSet;
    type State = State;
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "machineset";
    const COMPONENT: &'static str = "machineset-controller";

    async fn observe(&self, scope: &mut Scope<MachineSet>, state: &mut State) -> Result<Option<Observed>, Error> {
        self.observe_set(scope, state).await
    }

    fn plan(observed: &Observed, now: Timestamp) -> Plan<Step> {
        let Observed::Managed(managed) = observed else {
            return Plan::idle();
        };
        let mut plan = machineset::plan(&managed.plan, now);
        if !matches!(managed.capacity, Lookup::Known(_)) {
            let again = managed.resync;
            plan.requeue = Some(plan.requeue.map_or(again, |requeue| requeue.min(again)));
        }
        plan
    }

    fn forecast(observed: &Observed, now: Timestamp) -> Forecast {
        match observed {
            Observed::Managed(managed) => machineset::forecast(&managed.plan, now),
            Observed::Paused => Forecast {
                blocked: Some("Cluster API manages the set".to_owned()),
                ..Forecast::default()
            },
        }
    }

    async fn apply(
        &self,
        step: Step,
        _: &mut Observed,
        scope: &mut Scope<MachineSet>,
        _: &mut State,
    ) -> Result<Outcome, Error> {
        match step {
            Step::Adopt(machines) => self.adopt(scope, machines).await?,
            Step::Create(count) => self.create(scope, count).await?,
            Step::Delete(machines) => self.delete(scope, machines).await?,
            Step::Annotate(annotations) => self.annotate(scope, annotations).await?,
        }
        Ok(Outcome::Done)
    }

    fn status(
        set: &MachineSet,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<MachineSet> {
        status::status(set, observed, result, now)
    }
}

/// The set that owns a machine, or those that may adopt it.
fn sets_of(sets: &Cache<MachineSet>, machine: &Machine) -> Vec<ObjectRef<MachineSet>> {
    let controller = machine
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true));
    if let Some(owner) = controller {
        let mut set = ObjectRef::new(&owner.name);
        set.namespace = machine.namespace();
        return (owner.kind == MachineSet::KIND).then_some(set).into_iter().collect();
    }
    let takes = |set: &MachineSet| observe::selector(set).is_ok_and(|selector| selector.matches(machine.labels()));
    sets.select(machine.namespace().as_deref(), takes)
        .iter()
        .map(|set| ObjectRef::from_obj(set.as_ref()))
        .collect()
}

/// The machine that a node belongs to, by its annotation or by the machine's nodeRef.
fn machine_of(machines: &Cache<Machine>, node: &Node) -> Option<Arc<Machine>> {
    let annotation = node.annotations().get(MACHINE_ANNOTATION);
    if let Some((namespace, name)) = annotation.and_then(|value| value.split_once('/')) {
        return machines.get(Some(namespace), name);
    }
    let name = node.metadata.name.as_deref();
    machines
        .store()
        .find(|machine| observe::node_name(machine) == name && name.is_some())
}
