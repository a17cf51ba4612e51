//! What keeps machines together or apart: the VM group of their failure domain, and the cluster module of the control plane
//! or MachineDeployment that they belong to. Read from caches alone.

use std::sync::Arc;

use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_core::cluster::modules::Target;
use capstan_kube::capi::Machine;
use capstan_kube::{Cache, Context, cache};
use kube::ResourceExt;

use crate::conditions as names;
use crate::error::Error;
use crate::machine::machine_name;
use crate::owner_cluster::Clusters;

/// Returns the control plane or MachineDeployment that a Machine belongs to; `None` for a machine by itself.
fn target_of(machine: &Machine) -> Option<Target> {
    let labels = machine.labels();
    let control_plane = labels.contains_key(names::CONTROL_PLANE_LABEL);
    let name = if control_plane {
        let mut owners = machine.owner_references().iter();
        let owner = owners.find(|owner| owner.controller == Some(true));
        owner
            .map(|owner| owner.name.clone())
            .or_else(|| labels.get(names::CONTROL_PLANE_NAME_LABEL).cloned())
    } else {
        labels.get(names::DEPLOYMENT_NAME_LABEL).cloned()
    };
    name.filter(|name| !name.is_empty())
        .map(|name| Target { control_plane, name })
}

/// A VM group of a compute cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmGroup {
    pub datacenter: String,
    pub cluster: String,
    pub name: String,
}

/// From a VM to what it belongs to.
#[derive(Clone)]
pub struct Affinity {
    clusters: Clusters,
    machines: Cache<Machine>,
    owners: Cache<VSphereMachine>,
    zones: Cache<VSphereDeploymentZone>,
    domains: Cache<VSphereFailureDomain>,
    /// Whether clusters without any modules get them too.
    everywhere: bool,
}

impl Affinity {
    pub fn new(context: &Context, clusters: Clusters, everywhere: bool) -> Self {
        Self {
            clusters,
            machines: context.cache(),
            owners: context.cache(),
            zones: context.cache_cluster_wide(cache::trim),
            domains: context.cache_cluster_wide(cache::trim),
            everywhere,
        }
    }

    pub async fn ready(&self) -> Result<(), Error> {
        self.machines.ready().await?;
        self.owners.ready().await?;
        self.zones.ready().await?;
        Ok(self.domains.ready().await?)
    }

    /// Whether Capstan manages the modules of a cluster.
    pub fn has_modules(&self, cluster: &VSphereCluster) -> bool {
        !cluster.spec.disable_cluster_module && (self.everywhere || !cluster.spec.cluster_modules.is_empty())
    }

    fn owners_of(&self, vm: &VSphereVM) -> Option<(Arc<VSphereMachine>, Arc<Machine>)> {
        let namespace = vm.namespace();
        let mut owners = vm.owner_references().iter();
        let owner = owners.find(|owner| owner.kind == VSphereMachine::KIND)?;
        let owner = self.owners.get(namespace.as_deref(), &owner.name)?;
        let machine = self.machines.get(namespace.as_deref(), &machine_name(&owner)?)?;
        Some((owner, machine))
    }

    pub fn target(&self, vm: &VSphereVM) -> Option<Target> {
        let (_, machine) = self.owners_of(vm)?;
        target_of(&machine)
    }

    /// The module that a VM is to be in, if there is one already.
    pub fn module(&self, vm: &VSphereVM) -> Option<String> {
        let cluster = self.clusters.infrastructure_behind(vm)?;
        if !self.has_modules(&cluster) {
            return None;
        }
        let modules = &cluster.spec.cluster_modules;
        self.target(vm)?.module(modules).map(str::to_owned)
    }

    /// Whether a VM is not in the module that it is to be in.
    pub fn is_outside(&self, vm: &VSphereVM) -> bool {
        let noted = vm.status.as_ref().and_then(|status| status.module_uuid.as_ref());
        self.module(vm).is_some_and(|module| noted != Some(&module))
    }

    /// Returns the deployment zone of a VM.
    fn zone(&self, vm: &VSphereVM) -> Option<Arc<VSphereDeploymentZone>> {
        let (owner, machine) = self.owners_of(vm)?;
        let zone = machine.spec.failure_domain.clone();
        let zone = zone.or_else(|| owner.spec.failure_domain.clone())?;
        self.zones.get(None, &zone)
    }

    /// Returns the vCenter that the deployment zone of a VM names.
    pub fn zone_server(&self, vm: &VSphereVM) -> Option<String> {
        self.zone(vm)?.spec.server.clone().filter(|server| !server.is_empty())
    }

    /// Returns the VM group that the failure domain of a VM names.
    pub fn group(&self, vm: &VSphereVM) -> Option<VmGroup> {
        let zone = self.zone(vm)?;
        let domain = self.domains.get(None, zone.spec.failure_domain.as_deref()?)?;
        let topology = &domain.spec.topology;
        Some(VmGroup {
            datacenter: topology.datacenter.clone(),
            cluster: topology.compute_cluster.clone().unwrap_or_default(),
            name: topology.hosts.as_ref()?.vm_group_name.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case::worker(json!({"labels": {"cluster.x-k8s.io/deployment-name": "md"}}), Some((false, "md")))]
    #[case::control_plane(
        json!({"labels": {"cluster.x-k8s.io/control-plane": "", "cluster.x-k8s.io/control-plane-name": "hash_1_z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "KubeadmControlPlane", "name": "cp", "uid": "u", "controller": true}]}),
        Some((true, "cp")),
    )]
    #[case::by_label(
        json!({"labels": {"cluster.x-k8s.io/control-plane": "", "cluster.x-k8s.io/control-plane-name": "cp"}}),
        Some((true, "cp")),
    )]
    #[case::alone(json!({"labels": {}}), None)]
    fn machines_are_kept_apart_from_those_of_the_same_owner(
        #[case] metadata: serde_json::Value,
        #[case] expected: Option<(bool, &str)>,
    ) {
        let machine = json!({"metadata": metadata, "spec": {"clusterName": "c", "bootstrap": {}}});
        let machine: Machine = serde_json::from_value(machine).unwrap();
        let expected = expected.map(|(control_plane, name)| Target {
            control_plane,
            name: name.to_owned(),
        });
        assert_eq!(target_of(&machine), expected);
    }
}
