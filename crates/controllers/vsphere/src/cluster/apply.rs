//! Carries out the steps of a VSphereCluster.

use capstan_api::vsphere::{ClusterModule, VSphereCluster};
use capstan_core::cluster::modules::{ModuleChanges, Place};
use capstan_core::cluster::secrets::{NamedSecret, SecretStep};
use capstan_core::cluster::vsphere::{ClusterStep, MODULES_RECHECK};
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{Outcome, Scope};
use capstan_vsphere::{MoRef, Vcenter};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;

use super::{Connection, Controller, Observed};
use crate::conditions as names;
use crate::error::Error;

impl Controller {
    pub(super) async fn apply_step(
        &self,
        step: ClusterStep,
        observed: &mut Observed,
        scope: &mut Scope<VSphereCluster>,
    ) -> Result<Outcome, Error> {
        match step {
            ClusterStep::AddFinalizer => {
                scope.add_finalizer(names::CLUSTER_FINALIZER).await?;
            }
            ClusterStep::Secret(step) => self.apply_secret(step, scope).await?,
            ClusterStep::ChangeModules(changes) => {
                let vcenter = self.credentials.session(&scope.object).await?;
                observed.module_problems = change_modules(scope, &vcenter, changes).await?;
                if !observed.module_problems.is_empty() {
                    return Ok(Outcome::Wait(Some(MODULES_RECHECK)));
                }
            }
            ClusterStep::BackOff => {
                if let Some(Connection::Failed(error)) = observed.connection.take() {
                    return Err(error);
                }
            }
            ClusterStep::DeleteModules(modules) => {
                let vcenter = self.credentials.session(&scope.object).await?;
                for module in modules {
                    vcenter.delete_cluster_module(&module).await?;
                }
            }
            ClusterStep::LeaveModules { modules, fault } => {
                let text = format!("cluster modules {} are left behind: {fault}", modules.join(", "));
                let own = scope.object.as_ref();
                self.recorder.warning(own, names::MODULES_FAILED, text).await;
            }
            ClusterStep::Release => {
                scope.remove_finalizer(names::CLUSTER_FINALIZER).await?;
            }
        }
        Ok(Outcome::Done)
    }

    async fn apply_secret(&self, step: SecretStep, scope: &mut Scope<VSphereCluster>) -> Result<(), Error> {
        match step {
            SecretStep::Record(name) => {
                let mut after = VSphereCluster::clone(&scope.object);
                match name {
                    Some(name) => after.annotations_mut().insert(names::IDENTITY_SECRET.to_owned(), name),
                    None => after.annotations_mut().remove(names::IDENTITY_SECRET),
                };
                scope.write_object(&after, Lock::Open).await?;
            }
            SecretStep::Protect { secret, protected } => match patch_secret(scope, &secret, &protected).await {
                // Another client has changed the Secret, or removed it: the watch asks for the next reconcile.
                Err(error) if error.is_conflict() || error.is_not_found() => {}
                result => result?,
            },
            SecretStep::Release {
                secret,
                released,
                is_unused,
            } => {
                if is_unused {
                    self.credentials.forget(&scope.key.namespace, secret.name());
                }
                patch_secret(scope, &secret, &released).await?;
            }
        }
        Ok(())
    }
}

async fn patch_secret(
    scope: &Scope<VSphereCluster>,
    before: &NamedSecret,
    after: &NamedSecret,
) -> Result<(), capstan_kube::Error> {
    let secrets = scope.api_of::<Secret>();
    patch::object(&secrets, before.0.as_ref(), after.0.as_ref(), Lock::Version)
        .await
        .map(drop)
}

/// Deletes and creates modules, and writes down which ones there are. Returns the problems.
async fn change_modules(
    scope: &mut Scope<VSphereCluster>,
    vcenter: &Vcenter,
    changes: ModuleChanges,
) -> Result<Vec<String>, Error> {
    let ModuleChanges {
        keep: mut modules,
        create,
        remove,
        refused: mut problems,
    } = changes;
    let mut created = Vec::new();
    for module in remove {
        if let Err(error) = vcenter.delete_cluster_module(&module.module_uuid).await {
            problems.push(format!("module {}: {error}", module.module_uuid));
            modules.push(module);
        }
    }
    for (target, place) in create {
        match create_module(vcenter, &place).await {
            Ok(module) => {
                created.push(module.clone());
                modules.push(ClusterModule {
                    control_plane: target.control_plane,
                    target_object_name: target.name,
                    module_uuid: module,
                });
            }
            Err(error) => problems.push(format!("{}: {error}", target.name)),
        }
    }
    record_modules(scope, vcenter, modules, created).await?;
    Ok(problems)
}

async fn create_module(vcenter: &Vcenter, place: &Place) -> Result<String, Error> {
    let (datacenter, pool) = (place.datacenter.as_deref(), place.resource_pool.as_deref());
    let cluster = compute_cluster(vcenter, datacenter, pool).await?;
    Ok(vcenter.create_cluster_module(&cluster).await?)
}

/// Writes down which modules there are. Modules have no names: one that is not written down would be lost.
async fn record_modules(
    scope: &mut Scope<VSphereCluster>,
    vcenter: &Vcenter,
    modules: Vec<ClusterModule>,
    created: Vec<String>,
) -> Result<(), Error> {
    let mut after = VSphereCluster::clone(&scope.object);
    after.spec.cluster_modules = modules;
    let Err(error) = scope.write_object(&after, Lock::Version).await else {
        return Ok(());
    };
    for module in created {
        if let Err(error) = vcenter.delete_cluster_module(&module).await {
            tracing::warn!(%module, %error, "cannot delete the cluster module: delete it in vCenter");
        }
    }
    Err(error.into())
}

/// Returns the compute cluster of a resource pool.
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
