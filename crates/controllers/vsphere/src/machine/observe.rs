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
use crate::owner_cluster::{has_paused_annotation, paused};

impl Controller {
    pub(super) async fn observe_machine(&self, scope: &mut Scope<VSphereMachine>) -> Result<Option<Observed>, Error> {
        let own = scope.object.clone();
        let Some(name) = machine_name(&own) else {
            return self.observe_without_owner(scope).await;
        };
        let machine = self.machines.get(Some(&scope.key.namespace), &name);
        let cluster = machine.as_ref().and_then(|machine| self.cluster_of(machine));
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
        if !scope.is_deleting() || !is_held || has_paused_annotation(own.as_ref()) {
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
        let name = &machine.spec.cluster_name;
        let cluster = cluster.ok_or_else(|| Error::NotReady(format!("Cluster {name:?} does not exist")))?;
        if !cluster.infrastructure_provisioned() {
            return Ok(ObservedMachine::NoInfrastructure);
        }
        if machine.spec.bootstrap.data_secret_name.is_none() {
            return Ok(ObservedMachine::NoBootstrapData);
        }
        let desired = self.desired_vm(&scope.object, machine, &cluster)?;
        let name = desired.name_any();
        let cached = if scope.live {
            scope.api_of::<VSphereVM>().get_opt(&name).await?.map(Arc::new)
        } else {
            self.vms.get(Some(&scope.key.namespace), &name)
        };
        let Some(vm) = cached else {
            return Ok(ObservedMachine::NoVm {
                desired: Box::new(desired),
            });
        };
        check_owner(&vm, &scope.key.uid)?;
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
            followed: Box::new(desired::follow(&vm, &desired)),
            provider_id: uuid.map(|uuid| format!("{}{uuid}", names::PROVIDER_ID)),
            is_failing: matches!(severity, Some("Warning" | "Error")),
            host_label: host_label(machine, status.host.as_deref().filter(|_| uuid.is_some())),
            lost_since: lost_since(&scope.object, &vm),
            remediation: remediation(machine),
            vm,
        })
    }

    fn desired_vm(&self, own: &VSphereMachine, machine: &Machine, cluster: &Cluster) -> Result<VSphereVM, Error> {
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
        Ok(desired::vm(
            &name,
            own,
            &key.uid,
            machine,
            &infrastructure,
            zone.as_ref(),
        ))
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

/// Returns whether somebody has asked to replace a Machine. The value tells who: Cluster API does not read it.
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
