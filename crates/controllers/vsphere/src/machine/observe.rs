//! Reads a VSphereMachine, its VSphereVM and whatever gates it.

use std::sync::Arc;

use capstan_api::vsphere::{VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_core::vm::machine::{ObservedMachine, Remediation};
use capstan_kube::capi::{Cluster, Machine};
use capstan_kube::conditions;
use capstan_kube::runtime::{ObjectKey, Scope};
use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ListParams;

use super::{Controller, Observed, check_owner, desired, is_owned_by, machine_name};
use crate::conditions as names;
use crate::credentials::{check_machine_server, server_of};
use crate::error::Error;
use crate::owner_cluster::paused;

impl Controller {
    pub(super) async fn observe_machine(&self, scope: &mut Scope<VSphereMachine>) -> Result<Option<Observed>, Error> {
        let own = scope.object.clone();
        let Some(name) = machine_name(&own) else {
            return self.observe_without_owner(scope).await;
        };
        let machine = self.machines.get(Some(&scope.key.namespace), &name);
        // Without its Machine the label still names the cluster.
        let cluster = machine.as_ref().and_then(|machine| self.cluster_of(machine));
        let cluster = cluster.or_else(|| self.clusters.of(own.as_ref()).ok());
        if let Some(reason) = paused(own.as_ref(), cluster.as_deref()) {
            let plan = ObservedMachine::Paused(reason);
            return Ok(Some(Observed { plan, machine }));
        }
        let plan = if scope.is_deleting() {
            let vm = self.owned_vm(scope, &name).await?;
            ObservedMachine::Deleting { vm }
        } else {
            let Some(machine) = &machine else { return Ok(None) };
            self.observe_vm(scope, machine, cluster).await?
        };
        Ok(Some(Observed { plan, machine }))
    }

    /// Returns the VSphereVM of a VSphereMachine that is deleted. The naming strategy may give another name now than the VM was
    /// created with, so the owner decides. Reads from the API server what the cache does not show: a VM that was created a
    /// moment ago must not be forgotten.
    async fn owned_vm(&self, scope: &Scope<VSphereMachine>, machine: &str) -> Result<Option<Arc<VSphereVM>>, Error> {
        let vms = scope.api_of::<VSphereVM>();
        let name = desired::name(&scope.object, machine).unwrap_or_else(|_| machine.to_owned());
        let owned = |vm: &VSphereVM| is_owned_by(vm, &scope.key.uid);
        if let Some(vm) = vms.get_opt(&name).await?.filter(owned) {
            return Ok(Some(Arc::new(vm)));
        }
        let cached = self.vms.select(Some(&scope.key.namespace), owned);
        for vm in cached {
            if let Some(vm) = vms.get_opt(&vm.name_any()).await?.filter(owned) {
                return Ok(Some(Arc::new(vm)));
            }
        }
        Ok(None)
    }

    /// A VSphereMachine that belongs to no Machine is left alone, until it is deleted: then it goes with its VSphereVM.
    async fn observe_without_owner(&self, scope: &Scope<VSphereMachine>) -> Result<Option<Observed>, Error> {
        let own = &scope.object;
        let is_held = own
            .finalizers()
            .iter()
            .any(|finalizer| finalizer == names::MACHINE_FINALIZER);
        let cluster = self.clusters.of(own.as_ref()).ok();
        if !scope.is_deleting() || !is_held || paused(own.as_ref(), cluster.as_deref()).is_some() {
            return Ok(None);
        }
        // No name leads to it, and the cache may be late.
        let vms = scope.api_of::<VSphereVM>().list(&ListParams::default()).await?;
        let vm = vms.into_iter().find(|vm| is_owned_by(vm, &scope.key.uid));
        let plan = ObservedMachine::Deleting { vm: vm.map(Arc::new) };
        Ok(Some(Observed { plan, machine: None }))
    }

    fn cluster_of(&self, machine: &Machine) -> Option<Arc<Cluster>> {
        let clusters = &self.clusters.clusters;
        clusters.get(machine.namespace().as_deref(), &machine.spec.cluster_name)
    }

    async fn observe_vm(
        &self,
        scope: &Scope<VSphereMachine>,
        machine: &Machine,
        cluster: Option<Arc<Cluster>>,
    ) -> Result<ObservedMachine, Error> {
        // The gates are those of a VSphereVM that does not exist yet. One that is up stays so behind them.
        let known = if is_ready(&scope.object) {
            self.own_vm(scope, machine).await?
        } else {
            None
        };
        let (vm, followed) = match (known, self.desired_vm(&scope.object, machine, cluster.as_deref())) {
            (Some(vm), Ok(Gated::Open(desired))) => (vm.clone(), Ok(Box::new(desired::follow(&vm, &desired)))),
            (Some(vm), Ok(Gated::NoInfrastructure | Gated::NoBootstrapData)) => {
                (vm.clone(), Ok(Box::new(VSphereVM::clone(&vm))))
            }
            (Some(vm), Err(error)) if error.is_reported() => (vm, Err(error.to_string())),
            (_, Err(error)) => return Err(error),
            (None, Ok(Gated::NoInfrastructure)) => return Ok(ObservedMachine::NoInfrastructure),
            (None, Ok(Gated::NoBootstrapData)) => return Ok(ObservedMachine::NoBootstrapData),
            (None, Ok(Gated::Open(desired))) => {
                let Some(vm) = self.read_vm(scope, &desired.name_any()).await? else {
                    return Ok(ObservedMachine::NoVm { desired });
                };
                check_owner(&vm, &scope.key.uid)?;
                let followed = desired::follow(&vm, &desired);
                (vm, Ok(Box::new(followed)))
            }
        };
        let status = vm.status.clone().unwrap_or_default();
        let uuid = vm
            .spec
            .bios_uuid
            .as_ref()
            .filter(|uuid| !uuid.is_empty() && status.ready);
        let ready = conditions::get(&status.conditions, conditions::READY);
        let severity = ready
            .filter(|ready| ready.status != "True")
            .and_then(|ready| ready.severity.as_deref());
        Ok(ObservedMachine::Vm {
            followed,
            provider_id: uuid.map(|uuid| format!("{}{uuid}", names::PROVIDER_ID)),
            is_failing: matches!(severity, Some("Warning" | "Error")),
            host_label: host_label(machine, status.host.as_deref().filter(|_| uuid.is_some())),
            lost_since: lost_since(&scope.object, &vm),
            remediation: remediation(machine),
            vm,
        })
    }

    /// Returns the VSphereVM of a machine that is ready: by its name, or by its owner where the naming strategy gives another.
    async fn own_vm(&self, scope: &Scope<VSphereMachine>, machine: &Machine) -> Result<Option<Arc<VSphereVM>>, Error> {
        let owned = |vm: &VSphereVM| is_owned_by(vm, &scope.key.uid);
        if let Ok(name) = desired::name(&scope.object, &machine.name_any())
            && let Some(vm) = self.read_vm(scope, &name).await?.filter(|vm| owned(vm))
        {
            return Ok(Some(vm));
        }
        Ok(self.vms.select(Some(&scope.key.namespace), owned).into_iter().next())
    }

    async fn read_vm(&self, scope: &Scope<VSphereMachine>, name: &str) -> Result<Option<Arc<VSphereVM>>, Error> {
        if scope.live {
            return Ok(scope.api_of::<VSphereVM>().get_opt(name).await?.map(Arc::new));
        }
        Ok(self.vms.get(Some(&scope.key.namespace), name))
    }

    fn desired_vm(&self, own: &VSphereMachine, machine: &Machine, cluster: Option<&Cluster>) -> Result<Gated, Error> {
        let name = &machine.spec.cluster_name;
        let cluster = cluster.ok_or_else(|| Error::NotReady(format!("Cluster {name:?} does not exist")))?;
        if !cluster.infrastructure_provisioned() {
            return Ok(Gated::NoInfrastructure);
        }
        if machine.spec.bootstrap.data_secret_name.is_none() {
            return Ok(Gated::NoBootstrapData);
        }
        let infrastructure = self.clusters.infrastructure_of(cluster)?;
        let zone = machine.spec.failure_domain.as_deref();
        let zone = zone
            .or(own.spec.failure_domain.as_deref())
            .filter(|name| !name.is_empty());
        let zone = zone.map(|name| self.zone(name)).transpose()?;
        let zone_server = zone.as_ref().and_then(|(zone, _)| zone.spec.server.as_deref());
        let own_server = own.spec.clone_spec.server.as_deref();
        check_machine_server(own_server, &server_of(&infrastructure)?, zone_server)?;
        let zone = zone.as_ref().map(|(zone, domain)| desired::Zone {
            zone: &zone.spec,
            domain: &domain.spec,
        });
        let name = desired::name(own, &machine.name_any()).map_err(Error::Invalid)?;
        let key = ObjectKey::of(own)?;
        let vm = desired::vm(&name, own, &key.uid, machine, &infrastructure, zone.as_ref());
        Ok(Gated::Open(Box::new(vm)))
    }

    fn zone(&self, name: &str) -> Result<(Arc<VSphereDeploymentZone>, Arc<VSphereFailureDomain>), Error> {
        let missing =
            |kind: &str, name: &str| Error::NotReady(format!("{kind} {name:?} of the failure domain does not exist"));
        let zone = self.zones.get(None, name);
        let zone = zone.ok_or_else(|| missing(VSphereDeploymentZone::KIND, name))?;
        let domain = zone.spec.failure_domain.clone().unwrap_or_default();
        let found = self.domains.get(None, &domain);
        let found = found.ok_or_else(|| missing(VSphereFailureDomain::KIND, &domain))?;
        Ok((zone, found))
    }
}

/// The VSphereVM that should exist, if nothing holds it back.
enum Gated {
    NoInfrastructure,
    NoBootstrapData,
    Open(Box<VSphereVM>),
}

fn is_ready(machine: &VSphereMachine) -> bool {
    machine.status.as_ref().is_some_and(|status| status.ready)
}

/// Returns since when vCenter does not have the VM, for a machine whose annotation asks to fail then.
fn lost_since(own: &VSphereMachine, vm: &VSphereVM) -> Option<Timestamp> {
    let asked = own
        .annotations()
        .get(names::FAIL_WHEN_LOST)
        .is_some_and(|value| value == "true");
    let conditions = &vm.status.as_ref().filter(|_| asked)?.conditions;
    let provisioned = conditions::get(conditions, names::VM_PROVISIONED)?;
    let lost = provisioned.status == "False" && provisioned.reason.as_deref() == Some(names::NOT_FOUND);
    lost.then_some(provisioned.last_transition_time.0)
}

/// Returns whether somebody has asked to replace a Machine. The value names who: Cluster API does not read it.
fn remediation(machine: &Machine) -> Remediation {
    match machine.annotations().get(names::REMEDIATE).map(String::as_str) {
        None => Remediation::Unasked,
        Some(names::FAIL_WHEN_LOST) => Remediation::Asked,
        Some(_) => Remediation::AskedByOthers,
    }
}

/// Returns the host's name for the label of a Machine that has a Node and not this label.
fn host_label(machine: &Machine, host: Option<&str>) -> Option<String> {
    let has_node = machine.status.as_ref().is_some_and(|status| status.node_ref.is_some());
    let host = host.and_then(desired::label_value).filter(|_| has_node)?;
    (machine.labels().get(names::HOST_LABEL) != Some(&host)).then_some(host)
}
