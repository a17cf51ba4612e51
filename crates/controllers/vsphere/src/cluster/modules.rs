//! The cluster modules of a cluster: one for its control plane and one for each MachineDeployment, so that DRS keeps their
//! machines on different hosts.
//!
//! Invariants: `spec.clusterModules` names every module that was made and not removed; a module is removed when its owner
//! and the last of its machines are gone; a condition reports problems with modules, and no machine waits for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use capstan_api::capi::{GROUP, Version};
use capstan_api::vsphere::{ClusterModule, VSphereCluster, VSphereClusterStatus, VSphereVM};
use capstan_core::Class;
use capstan_core::validate::vcenter::same_server;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::patch::Lock;
use capstan_kube::runtime::ObjectKey;
use capstan_kube::runtime::Scope;
use capstan_vsphere::{MoRef, Vcenter};
use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, ResourceExt};

use super::ClusterController;
use crate::affinity::Target;
use crate::conditions as names;
use crate::error::Error;

/// What is to be done about the modules of a cluster.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    keep: Vec<ClusterModule>,
    make: Vec<Target>,
    remove: Vec<ClusterModule>,
}

/// Compares the modules that are noted with their owners, those with machines and those without any at present, and with
/// the modules that vCenter has.
fn plan(
    noted: &[ClusterModule],
    busy: &BTreeSet<Target>,
    idle: &BTreeSet<Target>,
    existing: &BTreeSet<String>,
) -> Plan {
    let mut plan = Plan::default();
    let mut served = BTreeSet::new();
    for module in noted {
        let target = Target::of_module(module);
        let exists = existing.contains(&module.module_uuid);
        let desired = idle.contains(&target) || (busy.contains(&target) && exists);
        if desired && served.insert(target) {
            plan.keep.push(module.clone());
        } else if exists {
            plan.remove.push(module.clone());
        }
    }
    plan.make = busy.difference(&served).cloned().collect();
    plan
}

/// How the modules of a cluster are.
pub(super) enum Modules {
    /// Nobody asked for them.
    Unwanted,
    Fine,
    /// With the reason and what is said.
    Wrong(&'static str, String),
}

impl Modules {
    pub fn is_wrong(&self) -> bool {
        matches!(self, Self::Wrong(..))
    }

    pub fn note(&self, status: &mut VSphereClusterStatus, now: Timestamp) {
        let (list, type_) = (&mut status.conditions, names::CLUSTER_MODULES_AVAILABLE);
        match self {
            Self::Unwanted => conditions::remove(list, type_),
            Self::Fine => conditions::mark_true(list, type_, now),
            Self::Wrong(reason, text) => conditions::mark_false(list, type_, Severity::Warning, reason, text, now),
        };
    }
}

impl ClusterController {
    /// Brings the modules of a cluster up to date.
    pub(super) async fn ensure_modules(
        &self,
        scope: &mut Scope<VSphereCluster>,
        vcenter: &Vcenter,
    ) -> Result<Modules, Error> {
        let own = scope.object.clone();
        let own = own.as_ref();
        let targets = self.targets(own);
        let noted = &own.spec.cluster_modules;
        if !self.affinity.has_modules(own) || (targets.is_empty() && noted.is_empty()) {
            return Ok(Modules::Unwanted);
        }
        let existing = match vcenter.cluster_modules().await {
            Ok(existing) => existing.into_iter().map(|module| module.module).collect(),
            Err(error) => return Ok(self.went_wrong(own, vec![error.to_string()]).await),
        };
        let busy = targets.keys().cloned().collect();
        let plan = plan(noted, &busy, &self.idle(own, &busy).await?, &existing);
        let (mut modules, mut problems, mut made) = (plan.keep, Vec::new(), Vec::new());
        for module in plan.remove {
            if let Err(error) = vcenter.delete_cluster_module(&module.module_uuid).await {
                problems.push(format!("module {}: {error}", module.module_uuid));
                modules.push(module);
            }
        }
        for target in plan.make {
            match self.make(own, vcenter, targets.get(&target)).await {
                Ok(module) => {
                    made.push(module.clone());
                    modules.push(ClusterModule {
                        control_plane: target.control_plane,
                        target_object_name: target.name,
                        module_uuid: module,
                    });
                }
                Err(error) => problems.push(format!("{}: {error}", target.name)),
            }
        }
        self.note_modules(scope, vcenter, modules, made).await?;
        Ok(if problems.is_empty() {
            Modules::Fine
        } else {
            self.went_wrong(own, problems).await
        })
    }

    async fn went_wrong(&self, own: &VSphereCluster, problems: Vec<String>) -> Modules {
        let text = format!("cluster modules cannot be set up for {}", problems.join("; "));
        self.recorder.warning(own, names::MODULES_FAILED, text.as_str()).await;
        Modules::Wrong(names::MODULES_FAILED, text)
    }

    /// Who has machines, with one of them. One that stays is preferred, for its place is where the next ones will go.
    fn targets(&self, own: &VSphereCluster) -> BTreeMap<Target, Arc<VSphereVM>> {
        let mut vms = self.vms.select(own.namespace().as_deref(), |vm| {
            let cluster = self.clusters.infrastructure_behind(vm);
            cluster.is_some_and(|cluster| cluster.name_any() == own.name_any())
        });
        vms.sort_by_key(|vm| (vm.metadata.deletion_timestamp.is_some(), vm.name_any()));
        let mut targets = BTreeMap::new();
        for vm in vms {
            if let Some(target) = self.affinity.target(&vm) {
                targets.entry(target).or_insert(vm);
            }
        }
        targets
    }

    /// Owners of modules that have no machines at present, but may have some again: a control plane for as long as its
    /// cluster lives, a MachineDeployment for as long as it exists.
    async fn idle(&self, own: &VSphereCluster, busy: &BTreeSet<Target>) -> Result<BTreeSet<Target>, Error> {
        let mut idle = BTreeSet::new();
        for target in own.spec.cluster_modules.iter().map(Target::of_module) {
            if busy.contains(&target) {
                continue;
            }
            if target.control_plane || self.deployment_exists(own, &target.name).await? {
                idle.insert(target);
            }
        }
        Ok(idle)
    }

    async fn deployment_exists(&self, own: &VSphereCluster, name: &str) -> Result<bool, Error> {
        let version = Version::default().as_str();
        let kind = ApiResource {
            group: GROUP.to_owned(),
            version: version.to_owned(),
            api_version: format!("{GROUP}/{version}"),
            kind: "MachineDeployment".to_owned(),
            plural: "machinedeployments".to_owned(),
        };
        let key = ObjectKey::of(own)?;
        let all: Api<DynamicObject> = Api::namespaced_with(self.context.client.clone(), &key.namespace, &kind);
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        match all.list_metadata(&named).await {
            Ok(found) => Ok(!found.items.is_empty()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn make(
        &self,
        own: &VSphereCluster,
        vcenter: &Vcenter,
        vm: Option<&Arc<VSphereVM>>,
    ) -> Result<String, Error> {
        let spec = vm.map(|vm| vm.spec.clone_spec.clone()).unwrap_or_default();
        let server = spec.server.as_deref().filter(|server| !server.is_empty());
        let own_server = own.spec.server.as_deref().unwrap_or_default();
        if let Some(server) = server.filter(|server| !same_server(server, own_server)) {
            let text = format!("its machines are in vCenter {server:?}, which is not the cluster's own");
            return Err(Error::Invalid(text));
        }
        let cluster = compute_cluster(vcenter, spec.datacenter.as_deref(), spec.resource_pool.as_deref()).await?;
        Ok(vcenter.create_cluster_module(&cluster).await?)
    }

    /// Writes down which modules there are. Modules have no names: one that is not written down would be lost.
    async fn note_modules(
        &self,
        scope: &mut Scope<VSphereCluster>,
        vcenter: &Vcenter,
        modules: Vec<ClusterModule>,
        made: Vec<String>,
    ) -> Result<(), Error> {
        let mut after = VSphereCluster::clone(&scope.object);
        after.spec.cluster_modules = modules;
        match scope.write_object(&after, Lock::Version).await {
            Ok(_) => Ok(()),
            Err(error) => {
                for module in made {
                    if let Err(error) = vcenter.delete_cluster_module(&module).await {
                        tracing::warn!(%module, %error, "cluster module left behind");
                    }
                }
                Err(error.into())
            }
        }
    }

    /// The cluster goes and has no machines any more: its modules go too.
    pub(super) async fn remove_modules(&self, own: &VSphereCluster) -> Result<(), Error> {
        let modules = &own.spec.cluster_modules;
        if modules.is_empty() {
            return Ok(());
        }
        let vcenter = match self.credentials.session(own).await {
            // An account that is gone for good must not keep the cluster for ever.
            Err(error) if error.is_reported() && error.class() == Class::Terminal => {
                let left: Vec<&str> = modules.iter().map(|module| module.module_uuid.as_str()).collect();
                let text = format!("cluster modules {} are left behind: {error}", left.join(", "));
                self.recorder.warning(own, names::MODULES_FAILED, text).await;
                return Ok(());
            }
            session => session?,
        };
        for module in modules {
            vcenter.delete_cluster_module(&module.module_uuid).await?;
        }
        Ok(())
    }
}

/// The compute cluster of a resource pool.
async fn compute_cluster(vcenter: &Vcenter, datacenter: Option<&str>, pool: Option<&str>) -> Result<MoRef, Error> {
    let datacenter = vcenter.datacenter(datacenter).await?;
    let found = vcenter.resource_pool(&datacenter, pool).await?;
    let owner = found.owner.clone();
    owner
        .filter(|owner| owner.kind() == "ClusterComputeResource")
        .ok_or_else(|| {
            let pool = pool.unwrap_or_default();
            Error::Invalid(format!(
                "resource pool {pool:?} is that of a single host, which has no cluster modules"
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(target: &str, id: &str) -> ClusterModule {
        ClusterModule {
            control_plane: false,
            target_object_name: target.into(),
            module_uuid: id.into(),
        }
    }

    #[test]
    fn every_owner_of_machines_has_one_module_and_nobody_else_has() {
        let target = |control_plane, name: &str| Target {
            control_plane,
            name: name.into(),
        };
        let busy = BTreeSet::from(["a", "b", "c"].map(|name| target(false, name)));
        let idle = BTreeSet::from(["scaled-down", "removed"].map(|name| target(false, name)));
        let noted = [
            module("a", "1"),
            module("a", "2"),
            module("b", "3"),
            module("gone", "4"),
            module("long-gone", "5"),
            module("scaled-down", "6"),
            module("removed", "7"),
        ];
        let existing = ["1", "2", "4", "6", "foreign"].map(String::from).into();
        let expected = Plan {
            keep: vec![module("a", "1"), module("scaled-down", "6"), module("removed", "7")],
            make: vec![target(false, "b"), target(false, "c")],
            remove: vec![module("a", "2"), module("gone", "4")],
        };
        assert_eq!(plan(&noted, &busy, &idle, &existing), expected);
    }
}
