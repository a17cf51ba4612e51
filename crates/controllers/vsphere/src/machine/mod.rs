//! VSphereMachine: the machine that Cluster API sees. The plan is `capstan_core::vm::machine`.

mod apply;
mod desired;
mod observe;
mod status;

use std::sync::Arc;

use capstan_api::capi::GROUP;
use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_core::vm::machine::{self, MachineStep, ObservedMachine};
use capstan_kube::capi::{Cluster, Machine};
use capstan_kube::objects::references;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context, cache};
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::conditions;
use crate::error::Error;
use crate::owner_cluster::{Clusters, cluster_name};
/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
    clusters: Clusters,
    machines: Cache<Machine>,
    vms: Cache<VSphereVM>,
    zones: Cache<VSphereDeploymentZone>,
    domains: Cache<VSphereFailureDomain>,
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    clusters: Clusters,
    machines: Cache<Machine>,
    vms: Cache<VSphereVM>,
    own: Cache<VSphereMachine>,
    concurrency: u16,
) -> Result<(), Error> {
    let controller = Controller {
        clusters,
        machines,
        vms,
        zones: context.cache_cluster_wide(cache::trim),
        domains: context.cache_cluster_wide(cache::trim),
    };
    controller.zones.ready().await?;
    controller.domains.ready().await?;
    let (by_cluster, by_thumbprint) = (own.clone(), controller.vms.clone());
    let reconciler = Reconciler::new(context, own)
        .concurrency(concurrency)
        .watches(&controller.vms, |vm: &VSphereVM| owner_of(vm).into_iter().collect())
        .watches(&controller.machines, |machine: &Machine| {
            let infrastructure = &machine.spec.infrastructure_ref;
            let ours = infrastructure.is(VSphereMachine::GROUP, VSphereMachine::KIND);
            let reference = ours.then(|| reference(&infrastructure.name, machine.namespace()));
            reference.into_iter().collect()
        })
        .watches(&controller.clusters.infrastructure, move |cluster: &VSphereCluster| {
            // A new thumbprint reaches every VM.
            let mut owners = cluster.owner_references().iter();
            let name = owners
                .find(|owner| owner.kind == "Cluster")
                .map(|owner| owner.name.clone());
            let stale = by_thumbprint.select(cluster.namespace().as_deref(), |vm| {
                vm.spec.clone_spec.thumbprint != cluster.spec.thumbprint && cluster_name(vm) == name
            });
            stale.iter().filter_map(|vm| owner_of(vm)).collect()
        })
        .watches(&controller.clusters.clusters, move |cluster: &Cluster| {
            let name = cluster.name_any();
            let waiting = |machine: &VSphereMachine| {
                let busy = !machine.status.as_ref().is_some_and(|status| status.ready);
                let deleting = machine.meta().deletion_timestamp.is_some();
                let shown = machine.status.as_ref().and_then(|status| status.v1beta2.as_ref());
                let paused = conditions::shows_paused(shown) != cluster.is_paused();
                cluster_name(machine).as_ref() == Some(&name) && (busy || deleting || paused)
            };
            references(&by_cluster.select(cluster.namespace().as_deref(), waiting))
        });
    reconciler.run(Arc::new(controller)).await;
    Ok(())
}

/// What the plan depends on, and the Machine that the host's label goes to.
struct Observed {
    plan: ObservedMachine,
    machine: Option<Arc<Machine>>,
}

impl Reconcile for Controller {
    type Object = VSphereMachine;
    type State = ();
    type Observed = Observed;
    type Step = MachineStep;
    type Error = Error;

    const NAME: &'static str = "vspheremachine";
    const COMPONENT: &'static str = "vspheremachine-controller";

    async fn observe(&self, scope: &mut Scope<VSphereMachine>, _: &mut ()) -> Result<Option<Observed>, Error> {
        self.observe_machine(scope).await
    }

    fn plan(observed: &Observed, now: Timestamp) -> Plan<MachineStep> {
        machine::plan(&observed.plan, now)
    }

    async fn apply(
        &self,
        step: MachineStep,
        observed: &mut Observed,
        scope: &mut Scope<VSphereMachine>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        self.apply_step(step, observed, scope).await
    }

    fn status(
        machine: &VSphereMachine,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereMachine> {
        status::status(machine, observed.map(|observed| &observed.plan), result, now)
    }
}

/// Returns the VSphereMachine of a VSphereVM.
fn owner_of(vm: &VSphereVM) -> Option<ObjectRef<VSphereMachine>> {
    let mut owners = vm.owner_references().iter();
    let owner = owners.find(|owner| owner.kind == VSphereMachine::KIND);
    owner.map(|owner| reference(&owner.name, vm.namespace()))
}

/// Checks that a VSphereVM belongs to the VSphereMachine with this UID.
fn check_owner(vm: &VSphereVM, uid: &str) -> Result<(), Error> {
    if is_owned_by(vm, uid) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "VSphereVM {:?} exists already and belongs to another object: remove it, or use another name",
        vm.name_any()
    )))
}

fn is_owned_by(vm: &VSphereVM, uid: &str) -> bool {
    vm.owner_references().iter().any(|owner| owner.uid == uid)
}

/// Returns the name of the Machine that owns this object.
pub fn machine_name(own: &VSphereMachine) -> Option<String> {
    let is_core = |api_version: &str| api_version.split('/').next() == Some(GROUP);
    let owners = own.owner_references().iter();
    let mut machines = owners.filter(|owner| owner.kind == "Machine" && is_core(&owner.api_version));
    machines.next().map(|owner| owner.name.clone())
}

fn reference(name: &str, namespace: Option<String>) -> ObjectRef<VSphereMachine> {
    let mut reference = ObjectRef::new(name);
    reference.namespace = namespace;
    reference
}
