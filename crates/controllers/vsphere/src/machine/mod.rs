//! VSphereMachine: the machine that Cluster API sees. The plan is `capstan_core::vm::machine`.

mod desired;
mod observe;
mod status;

use std::sync::Arc;

use capstan_api::capi::GROUP;
use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_core::vm::machine::{self, MachineStep, ObservedMachine};
use capstan_kube::capi::{Cluster, Machine};
use capstan_kube::objects::delete_exactly;
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context, cache};
use jiff::Timestamp;
use kube::api::PostParams;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::conditions as names;
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
                cluster_name(machine).as_ref() == Some(&name) && (busy || deleting)
            };
            let found = by_cluster.select(cluster.namespace().as_deref(), waiting);
            found
                .iter()
                .map(|machine| ObjectRef::from_obj(machine.as_ref()))
                .collect()
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
        match step {
            MachineStep::AddFinalizer => {
                scope.add_finalizer(names::MACHINE_FINALIZER).await?;
            }
            MachineStep::CreateVm(vm) => self.create_vm(scope, *vm).await?,
            MachineStep::UpdateVm { vm, followed } => {
                let api = scope.api_of::<VSphereVM>();
                if let Some(updated) = patch::object(&api, vm.as_ref(), &followed, Lock::Open).await? {
                    scope.wrote(&self.vms, &updated);
                }
            }
            MachineStep::SetProviderId(id) => {
                let mut after = VSphereMachine::clone(&scope.object);
                after.spec.provider_id = Some(id);
                scope.write_object(&after, Lock::Open).await?;
            }
            MachineStep::LabelHost(host) => {
                // Cluster API copies this label from the Machine to its Node.
                let label =
                    |machine: &mut Machine| drop(machine.labels_mut().insert(names::HOST_LABEL.to_owned(), host));
                self.patch_machine(scope, observed.machine.as_deref(), label).await?;
            }
            MachineStep::AskForRemediation => {
                let (key, value) = (names::REMEDIATE.to_owned(), names::FAIL_WHEN_LOST.to_owned());
                let ask = |machine: &mut Machine| drop(machine.annotations_mut().insert(key, value));
                self.patch_machine(scope, observed.machine.as_deref(), ask).await?;
            }
            MachineStep::WithdrawRemediation => {
                let withdraw = |machine: &mut Machine| drop(machine.annotations_mut().remove(names::REMEDIATE));
                self.patch_machine(scope, observed.machine.as_deref(), withdraw).await?;
            }
            MachineStep::DeleteVm(vm) => self.delete_vm(scope, &vm).await?,
            MachineStep::Release => {
                scope.remove_finalizer(names::MACHINE_FINALIZER).await?;
            }
        }
        Ok(Outcome::Done)
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

impl Controller {
    async fn create_vm(&self, scope: &mut Scope<VSphereMachine>, vm: VSphereVM) -> Result<(), Error> {
        let api = scope.api_of::<VSphereVM>();
        let name = vm.name_any();
        let created = match api.create(&PostParams::default(), &vm).await {
            Err(kube::Error::Api(status)) if status.code == 409 => api.get(&name).await?,
            Err(error) => return Err(scope.doubt(error.into()).into()),
            Ok(created) => created,
        };
        check_owner(&created, &scope.key.uid)?;
        scope.wrote(&self.vms, &created);
        Ok(())
    }

    async fn delete_vm(&self, scope: &mut Scope<VSphereMachine>, vm: &VSphereVM) -> Result<(), Error> {
        let deleted = delete_exactly(&scope.api_of::<VSphereVM>(), vm).await;
        deleted.map_err(|error| scope.doubt(error))?;
        Ok(())
    }

    /// Changes the metadata of the Machine.
    async fn patch_machine(
        &self,
        scope: &mut Scope<VSphereMachine>,
        machine: Option<&Machine>,
        change: impl FnOnce(&mut Machine),
    ) -> Result<(), Error> {
        let Some(machine) = machine else { return Ok(()) };
        let mut after = machine.clone();
        change(&mut after);
        match patch::object(&scope.api_of::<Machine>(), machine, &after, Lock::Open).await {
            Ok(Some(updated)) => scope.wrote(&self.machines, &updated),
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        Ok(())
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
