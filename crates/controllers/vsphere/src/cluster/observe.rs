//! Reads a VSphereCluster: its Secrets, its deployment zones, its vCenter with the cluster modules, and the machines that are
//! left of it when it is deleted.

use std::collections::{BTreeMap, BTreeSet};

use capstan_api::ClusterFailureDomain;
use capstan_api::capi::{CLUSTER_NAME_LABEL, GROUP, Version};
use capstan_api::vsphere::{VSphereCluster, VSphereMachine, VSphereVM};
use capstan_core::Class;
use capstan_core::cluster::modules::{KnownModules, ObservedModules, Place, Target};
use capstan_core::cluster::secrets::{self, HeldSecret, NamedSecret, ObservedSecrets};
use capstan_core::cluster::vsphere::{ObservedCluster, ObservedVcenter, Teardown};
use capstan_kube::runtime::{ObjectKey, Scope};
use capstan_vsphere::{Trust, Vcenter};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::SelectorExt;
use kube::{Api, ResourceExt};

use super::{Connection, Controller, Observed, Zones, reaches};
use crate::conditions as names;
use crate::credentials::is_identity;
use crate::error::Error;
use crate::owner_cluster::{cluster_name, paused};

impl Controller {
    pub(super) async fn observe_cluster(&self, scope: &Scope<VSphereCluster>) -> Result<Option<Observed>, Error> {
        let own = scope.object.as_ref();
        let is_core = |version: &str| version.split('/').next() == Some(GROUP);
        let mut owners = own.owner_references().iter();
        let Some(owner) = owners.find(|owner| owner.kind == "Cluster" && is_core(&owner.api_version)) else {
            // A VSphereCluster that belongs to no Cluster is left alone, until it is deleted: it has no machines.
            let is_held = own
                .finalizers()
                .iter()
                .any(|finalizer| finalizer == names::CLUSTER_FINALIZER);
            if !scope.is_deleting() || !is_held || paused(own, None).is_some() {
                return Ok(None);
            }
            return self.observe_deletion(scope, Vec::new()).await.map(Some);
        };
        let cluster = self.clusters.clusters.get(Some(&scope.key.namespace), &owner.name);
        if let Some(reason) = paused(own, cluster.as_deref()) {
            return Ok(Some(Observed {
                plan: ObservedCluster::Paused(reason),
                zones: Zones::default(),
                connection: None,
                module_problems: Vec::new(),
                workload: None,
            }));
        }
        if scope.is_deleting() {
            let machines = self.left_of(scope, &owner.name).await?;
            return self.observe_deletion(scope, machines).await.map(Some);
        }
        let (vcenter, connection) = self.observe_vcenter(own).await?;
        Ok(Some(Observed {
            plan: ObservedCluster::Present {
                secrets: Box::new(self.observe_secrets(scope).await?),
                vcenter,
                resync: self.context.resync,
            },
            zones: self.zones_of(own)?,
            connection: Some(connection),
            module_problems: Vec::new(),
            workload: self.workloads.refusal(&scope.key.namespace, &owner.name),
        }))
    }

    async fn observe_deletion(&self, scope: &Scope<VSphereCluster>, machines: Vec<String>) -> Result<Observed, Error> {
        let own = scope.object.as_ref();
        let mut teardown = Teardown {
            uid: scope.key.uid.clone(),
            ..Teardown::default()
        };
        if machines.is_empty() {
            let named = secrets::named_secret(own);
            let former = secrets::recorded(own).filter(|name| named != Some(name.as_str()));
            teardown.secret = self.held(scope, named.map(str::to_owned)).await?.pop();
            teardown.former = self.held(scope, former).await?;
            let modules = own.spec.cluster_modules.iter();
            teardown.modules = modules.map(|module| module.module_uuid.clone()).collect();
        }
        if !teardown.modules.is_empty() {
            match self.credentials.session(own).await {
                Err(error) if is_final(&error) => teardown.account_fault = Some(error.to_string()),
                session => session.map(drop)?,
            }
        }
        Ok(Observed {
            plan: ObservedCluster::Deleting { machines, teardown },
            zones: Zones::default(),
            connection: None,
            module_problems: Vec::new(),
            workload: None,
        })
    }

    /// Returns the zones that a cluster selects.
    fn zones_of(&self, own: &VSphereCluster) -> Result<Zones, Error> {
        let Some(selector) = own.spec.failure_domain_selector.clone() else {
            return Ok(Zones::default());
        };
        let selector: kube::core::Selector = selector
            .try_into()
            .map_err(|error| Error::Invalid(format!("spec.failureDomainSelector cannot be read: {error}")))?;
        let mut zones = self
            .zones
            .select(None, |zone| reaches(own, zone) && selector.matches(zone.labels()));
        zones.sort_by_key(|zone| zone.name_any());
        let mut found = Zones::default();
        for zone in zones {
            match zone.status.as_ref().and_then(|status| status.ready) {
                Some(true) => {
                    let domain = ClusterFailureDomain {
                        control_plane: zone.spec.control_plane.unwrap_or(true),
                        ..ClusterFailureDomain::default()
                    };
                    found.domains.insert(zone.name_any(), domain);
                }
                Some(false) => found.not_ready.push(zone.name_any()),
                None => found.unchecked.push(zone.name_any()),
            }
        }
        Ok(found)
    }

    async fn observe_secrets(&self, scope: &Scope<VSphereCluster>) -> Result<ObservedSecrets, Error> {
        let own = scope.object.as_ref();
        let named = self.credentials.own_secret(own).await?.map(NamedSecret);
        let (identity, other) = match named {
            Some(secret) if is_identity(&secret.0) => (Some(secret), None),
            other => (None, other),
        };
        let former = secrets::former(own, identity.as_ref(), other.as_ref());
        Ok(ObservedSecrets {
            owner: OwnerReference {
                api_version: VSphereCluster::API_VERSION.to_owned(),
                kind: VSphereCluster::KIND.to_owned(),
                name: scope.key.name.clone(),
                uid: scope.key.uid.clone(),
                ..OwnerReference::default()
            },
            identity,
            recorded: secrets::recorded(own),
            former: self.held(scope, former).await?,
        })
    }

    /// Returns those of these Secrets that exist, read from the API server, and whether another cluster needs them.
    async fn held(
        &self,
        scope: &Scope<VSphereCluster>,
        names: impl IntoIterator<Item = String>,
    ) -> Result<Vec<HeldSecret>, Error> {
        let mut held = Vec::new();
        for name in names {
            let Some(secret) = scope.api_of::<Secret>().get_opt(&name).await? else {
                continue;
            };
            let secret = NamedSecret::new(secret);
            let clusters = scope.api_of::<VSphereCluster>().list(&ListParams::default()).await?;
            let is_shared = secrets::is_shared(&secret, &scope.key.uid, &clusters.items);
            held.push(HeldSecret { secret, is_shared });
        }
        Ok(held)
    }

    /// Signs in to vCenter, and reads what the plan depends on.
    async fn observe_vcenter(&self, own: &VSphereCluster) -> Result<(ObservedVcenter, Connection), Error> {
        let vcenter = match self.connect(own).await {
            Err(error) if !error.is_reported() => return Err(error),
            Err(error) if is_final(&error) => {
                let by_vcenter = error.vsphere().is_some();
                return Ok((ObservedVcenter::Refused { by_vcenter }, Connection::Failed(error)));
            }
            Err(error) => return Ok((ObservedVcenter::Unreachable, Connection::Failed(error))),
            Ok(vcenter) => vcenter,
        };
        let modules = self.observe_modules(own, &vcenter).await?;
        let is_verified = *vcenter.trust() != Trust::Insecure;
        let version = vcenter.about().version;
        let connection = Connection::Available { version, is_verified };
        Ok((ObservedVcenter::Available(modules), connection))
    }

    async fn connect(&self, own: &VSphereCluster) -> Result<Vcenter, Error> {
        let findings = capstan_core::validate::vsphere::cluster(&own.spec);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let vcenter = self.credentials.session(own).await?;
        vcenter.answers().await?;
        Ok(vcenter)
    }

    async fn observe_modules(&self, own: &VSphereCluster, vcenter: &Vcenter) -> Result<ObservedModules, Error> {
        let busy = self.targets(own);
        let recorded = own.spec.cluster_modules.clone();
        if !self.affinity.has_modules(own) || (busy.is_empty() && recorded.is_empty()) {
            return Ok(ObservedModules::Unmanaged);
        }
        let existing = match vcenter.cluster_modules().await {
            Ok(existing) => existing.into_iter().map(|module| module.module).collect(),
            Err(error) => return Ok(ObservedModules::Unreadable(error.to_string())),
        };
        Ok(ObservedModules::Known(KnownModules {
            server: own.spec.server.clone().unwrap_or_default(),
            idle: self.idle(own, &busy).await?,
            recorded,
            busy,
            existing,
        }))
    }

    /// Returns the owners of machines, with the place of one machine each. One that stays is preferred, for its place is where
    /// the next ones will go.
    fn targets(&self, own: &VSphereCluster) -> BTreeMap<Target, Place> {
        let mut vms = self.vms.select(own.namespace().as_deref(), |vm| {
            let cluster = self.clusters.infrastructure_behind(vm);
            cluster.is_some_and(|cluster| cluster.name_any() == own.name_any())
        });
        vms.sort_by_key(|vm| (vm.metadata.deletion_timestamp.is_some(), vm.name_any()));
        let mut targets = BTreeMap::new();
        for vm in vms {
            if let Some(target) = self.affinity.target(&vm) {
                let spec = &vm.spec.clone_spec;
                targets.entry(target).or_insert_with(|| Place {
                    server: spec.server.clone(),
                    datacenter: spec.datacenter.clone(),
                    resource_pool: spec.resource_pool.clone(),
                });
            }
        }
        targets
    }

    async fn idle(&self, own: &VSphereCluster, busy: &BTreeMap<Target, Place>) -> Result<BTreeSet<Target>, Error> {
        let mut idle = BTreeSet::new();
        for target in own.spec.cluster_modules.iter().map(Target::of_module) {
            if busy.contains_key(&target) {
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

    /// Returns the machines and VMs of a cluster that are left. What the caches do not show is read live: without its Secret
    /// a VM could not be deleted in vCenter.
    async fn left_of(&self, scope: &Scope<VSphereCluster>, cluster: &str) -> Result<Vec<String>, Error> {
        let namespace = Some(scope.key.namespace.as_str());
        let machines = self
            .machines
            .select(namespace, |machine| cluster_name(machine).as_deref() == Some(cluster));
        let vms = self
            .vms
            .select(namespace, |vm| cluster_name(vm).as_deref() == Some(cluster));
        let machines = machines.iter().map(|machine| machine.name_any());
        let cached: Vec<String> = machines.chain(vms.iter().map(|vm| vm.name_any())).collect();
        if !cached.is_empty() {
            return Ok(cached);
        }
        let of_cluster = ListParams::default().labels(&format!("{CLUSTER_NAME_LABEL}={cluster}"));
        let machines = scope.api_of::<VSphereMachine>().list(&of_cluster).await?;
        let vms = scope.api_of::<VSphereVM>().list(&of_cluster).await?;
        let machines = machines.items.iter().map(|machine| machine.name_any());
        Ok(machines.chain(vms.items.iter().map(|vm| vm.name_any())).collect())
    }
}

/// Whether only a user can correct an error.
fn is_final(error: &Error) -> bool {
    error.is_reported() && error.class() == Class::Terminal
}
