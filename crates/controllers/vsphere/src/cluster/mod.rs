//! VSphereCluster: the vCenter behind a cluster, and the failure domains that it offers.
//!
//! Kept here: a cluster is ready when its vCenter has let us in; it does not go before its machines have gone.

pub mod identity;
mod modules;
mod topology;
pub mod zone;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use capstan_api::ClusterFailureDomain;
use capstan_api::capi::GROUP;
use capstan_api::vsphere::{
    VSphereCluster, VSphereClusterIdentity, VSphereClusterStatus, VSphereDeploymentZone, VSphereIdentityKind,
    VSphereMachine, VSphereVM,
};
use capstan_core::Class;
use capstan_core::validate::vcenter::same_server;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::expectations::Version;
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Context, Next, Reconciler, Recorder, cache};
use capstan_vsphere::Trust;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::core::SelectorExt;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};

use crate::affinity::{Affinity, Target};
use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::{Clusters, cluster_name, has_paused_annotation};

/// The message of the condition that reports `--insecure-vcenter`.
const NOT_VERIFIED: &str = "the manager runs with --insecure-vcenter and accepts every certificate of this vCenter: set \
                            spec.thumbprint, or put the CA into the key \"ca.crt\" of the identity's Secret";
/// Whether vCenter still answers is asked this often.
const RESYNC: Duration = Duration::from_secs(10 * 60);
/// A refused account may be mended where we do not see it, in vCenter itself; asking more often might lock it.
const REFUSED: Duration = Duration::from_secs(60);
/// What else is wrong is mended in Kubernetes, where all but a namespace's labels is watched.
const RECHECK: Duration = Duration::from_secs(10);
/// What keeps modules from being made is mended in vCenter, where we do not see it.
const MODULES: Duration = Duration::from_secs(60);
/// Whether machines are left is read from the cache, so that asking again costs nobody anything.
const GOING: Duration = Duration::from_secs(10);

/// Runs the clusters.
pub struct ClusterController {
    context: Context,
    recorder: Recorder,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    machines: Cache<VSphereMachine>,
    vms: Cache<VSphereVM>,
    affinity: Affinity,
    zones: Cache<VSphereDeploymentZone>,
    /// The versions that our last writes of modules made: what was made must not be made again.
    written: Mutex<HashMap<String, Version>>,
}

impl ClusterController {
    pub fn new(
        context: &Context,
        clusters: Clusters,
        credentials: Arc<Credentials>,
        machines: Cache<VSphereMachine>,
        vms: Cache<VSphereVM>,
        affinity: Affinity,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            recorder: context.recorder("vspherecluster-controller"),
            clusters,
            credentials,
            machines,
            vms,
            affinity,
            zones: context.cache_cluster_wide(cache::trim),
            written: Mutex::default(),
        })
    }

    /// The controller, until shutdown.
    pub async fn run(self: Arc<Self>, identities: Cache<VSphereClusterIdentity>) -> Result<(), Error> {
        self.zones.ready().await?;
        let own = self.clusters.infrastructure.clone();
        let (of_zone, of_identity, of_secret) = (own.clone(), own.clone(), own.clone());
        let credentials = self.credentials.clone();
        let by_secret = self.credentials.changes().flat_map(move |secret| {
            let named = |cluster: &VSphereCluster| credentials.secret_of(cluster).as_ref() == Some(&secret);
            let found = of_secret.select(None, named);
            let found: Vec<_> = found.iter().map(|c| ObjectRef::from_obj(c.as_ref())).collect();
            futures::stream::iter(found)
        });
        let (of_machine, of_vm, affinity) = (self.clusters.clone(), self.clusters.clone(), self.affinity.clone());
        let references = |found: Vec<Arc<VSphereCluster>>| -> Vec<ObjectRef<VSphereCluster>> {
            found
                .iter()
                .map(|cluster| ObjectRef::from_obj(cluster.as_ref()))
                .collect()
        };
        let reconciler = Reconciler::new("vspherecluster", &self.context, own)
            .watches(&self.clusters.clusters, |cluster| {
                let named = cluster
                    .spec
                    .infrastructure_ref
                    .as_ref()
                    .filter(|r| r.kind == VSphereCluster::KIND);
                let reference = named.map(|named| {
                    let mut reference = ObjectRef::<VSphereCluster>::new(&named.name);
                    reference.namespace = cluster.namespace();
                    reference
                });
                reference.into_iter().collect()
            })
            .watches(&self.machines, move |machine: &VSphereMachine| {
                // The last machine to go lets its cluster go.
                let going = machine.meta().deletion_timestamp.is_some();
                let cluster = going.then(|| of_machine.infrastructure_behind(machine)).flatten();
                references(cluster.into_iter().collect())
            })
            .watches(&self.vms, move |vm: &VSphereVM| {
                // Whoever is not in its module yet asks for it; the last one to go gives it back.
                let cluster = of_vm.infrastructure_behind(vm);
                let cluster = cluster.filter(|cluster| affinity.has_modules(cluster));
                let concerned = cluster.filter(|cluster| {
                    let modules = &cluster.spec.cluster_modules;
                    let inside = vm.status.as_ref().and_then(|status| status.module_uuid.as_deref());
                    let is_outside = |target: Target| inside.is_none() || target.module(modules) != inside;
                    vm.meta().deletion_timestamp.is_some() || affinity.target(vm).is_some_and(is_outside)
                });
                references(concerned.into_iter().collect())
            })
            .watches(&self.zones, move |zone| {
                references(of_zone.select(None, |c| {
                    c.spec.failure_domain_selector.is_some() && same_vcenter(zone, c)
                }))
            })
            .watches(&identities, move |identity| {
                let name = identity.name_any();
                references(of_identity.select(None, |cluster| {
                    let named = cluster.spec.identity_ref.as_ref();
                    named.is_some_and(|r| r.kind == VSphereIdentityKind::VSphereClusterIdentity && r.name == name)
                }))
            })
            .on(by_secret);
        reconciler.run(move |cluster| self.clone().pass(cluster)).await;
        Ok(())
    }

    async fn pass(self: Arc<Self>, own: Arc<VSphereCluster>) -> Result<Next, Error> {
        let is_core = |version: &str| version.split('/').next() == Some(GROUP);
        let owner = own
            .owner_references()
            .iter()
            .find(|o| o.kind == "Cluster" && is_core(&o.api_version));
        let Some(owner) = owner else { return Ok(Next::Wait) };
        let cluster = self.clusters.clusters.get(own.namespace().as_deref(), &owner.name);
        if has_paused_annotation(own.as_ref()) || cluster.as_ref().is_some_and(|cluster| cluster.is_paused()) {
            return Ok(Next::Wait);
        }
        let uid = own.uid().unwrap_or_default();
        let lagging = |written: &Version| own.resource_version().is_some_and(|v| !Version::new(v).shows(written));
        if self.lock_written().get(&uid).is_some_and(lagging) {
            return Ok(Next::Wait);
        }
        let name = owner.name.clone();
        if own.meta().deletion_timestamp.is_some() {
            return self.end(&own, &name).await;
        }
        self.bring_up(&own).await
    }

    async fn bring_up(&self, own: &VSphereCluster) -> Result<Next, Error> {
        let api: Api<VSphereCluster> = self.context.api(&own.namespace().unwrap_or_default());
        patch::add_finalizer(&api, own, names::CLUSTER_FINALIZER).await?;
        let findings = capstan_core::validate::vsphere::cluster(&own.spec);
        if !findings.is_ok() {
            return self.unavailable(own, Error::Invalid(findings.message())).await;
        }
        let vcenter = match self.credentials.session(own).await {
            Ok(vcenter) => vcenter.answers().await.map(|()| vcenter).map_err(Error::from),
            Err(error) => Err(error),
        };
        let vcenter = match vcenter {
            Ok(vcenter) => vcenter,
            Err(error) if error.is_told() => return self.unavailable(own, error).await,
            Err(error) => return Err(error),
        };
        let version = vcenter.about().version;
        let verified = *vcenter.trust() != Trust::Insecure;
        let (domains, unsettled) = self.failure_domains(own)?;
        let modules = self.modules(own, &vcenter).await?;
        let first = !own.status.as_ref().is_some_and(|status| status.ready);
        self.write(own, |status, now| {
            let list = &mut status.conditions;
            conditions::mark_true(list, names::VCENTER_AVAILABLE, now);
            if verified {
                conditions::remove(list, names::CERTIFICATE_VERIFIED);
            } else {
                let (type_, reason) = (names::CERTIFICATE_VERIFIED, names::INSECURE);
                conditions::mark_false(list, type_, Severity::Warning, reason, NOT_VERIFIED, now);
            }
            match (own.spec.failure_domain_selector.is_some(), unsettled.is_empty()) {
                (false, _) => conditions::remove(list, names::FAILURE_DOMAINS_AVAILABLE),
                (true, true) => conditions::mark_true(list, names::FAILURE_DOMAINS_AVAILABLE, now),
                (true, false) => {
                    let text = format!("deployment zones that cannot be used: {}", unsettled.join(", "));
                    let (type_, reason) = (names::FAILURE_DOMAINS_AVAILABLE, "FailureDomainsSkipped");
                    conditions::mark_false(list, type_, Severity::Info, reason, &text, now)
                }
            };
            modules.note(status, now);
            status.failure_domains = domains;
            status.vcenter_version = Some(version.clone());
            status.ready = true;
        })
        .await?;
        if first {
            let server = own.spec.server.clone().unwrap_or_default();
            self.recorder
                .normal(own, "Ready", format!("vCenter {server} {version} is available"))
                .await;
        }
        Ok(Next::After(if modules.is_wrong() { MODULES } else { RESYNC }))
    }

    async fn unavailable(&self, own: &VSphereCluster, error: Error) -> Result<Next, Error> {
        let (class, text) = (error.class(), error.to_string());
        let severity = if class == Class::Terminal {
            Severity::Error
        } else {
            Severity::Warning
        };
        self.write(own, |status, now| {
            let (type_, reason) = (names::VCENTER_AVAILABLE, names::VCENTER_UNREACHABLE);
            conditions::mark_false(&mut status.conditions, type_, severity, reason, &text, now);
        })
        .await?;
        self.recorder.warning(own, names::VCENTER_UNREACHABLE, text).await;
        match class {
            Class::Terminal if error.vsphere().is_some() => Ok(Next::After(REFUSED)),
            Class::Terminal => Ok(Next::After(RECHECK)),
            Class::Transient | Class::Throttled(_) => Err(error),
        }
    }

    /// The failure domains of the zones that the cluster selects, and the zones that are not ready.
    fn failure_domains(
        &self,
        own: &VSphereCluster,
    ) -> Result<(BTreeMap<String, ClusterFailureDomain>, Vec<String>), Error> {
        let Some(selector) = own.spec.failure_domain_selector.clone() else {
            return Ok(Default::default());
        };
        let selector: kube::core::Selector = selector
            .try_into()
            .map_err(|error| Error::Invalid(format!("spec.failureDomainSelector cannot be read: {error}")))?;
        let zones = self
            .zones
            .select(None, |zone| same_vcenter(zone, own) && selector.matches(zone.labels()));
        let is_ready = |zone: &&Arc<VSphereDeploymentZone>| zone.status.as_ref().and_then(|s| s.ready) == Some(true);
        let unsettled = zones
            .iter()
            .filter(|zone| !is_ready(zone))
            .map(|zone| zone.name_any())
            .collect();
        let domains = zones.iter().filter(is_ready).map(|zone| {
            let control_plane = zone.spec.control_plane.unwrap_or(true);
            (
                zone.name_any(),
                ClusterFailureDomain {
                    control_plane,
                    ..ClusterFailureDomain::default()
                },
            )
        });
        Ok((domains.collect(), unsettled))
    }

    async fn end(&self, own: &VSphereCluster, cluster: &str) -> Result<Next, Error> {
        let left = self.machines.select(own.namespace().as_deref(), |m| {
            cluster_name(m).as_deref() == Some(cluster)
        });
        if !left.is_empty() {
            let names: Vec<String> = left.iter().map(|machine| machine.name_any()).collect();
            tracing::info!(cluster, machines = ?names, "waiting for machines to go");
            return Ok(Next::After(GOING));
        }
        self.remove_modules(own).await?;
        self.release_secret(own).await?;
        self.credentials.forget(own);
        let api: Api<VSphereCluster> = self.context.api(&own.namespace().unwrap_or_default());
        patch::remove_finalizer(&api, own, names::CLUSTER_FINALIZER).await?;
        self.lock_written().remove(&own.uid().unwrap_or_default());
        Ok(Next::Wait)
    }

    fn note(&self, written: &VSphereCluster) {
        if let (Some(uid), Some(version)) = (written.uid(), written.resource_version()) {
            self.lock_written().insert(uid, Version::new(version));
        }
    }

    fn lock_written(&self) -> MutexGuard<'_, HashMap<String, Version>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A finalizer that another controller once put on the secret would keep it for ever.
    async fn release_secret(&self, own: &VSphereCluster) -> Result<(), Error> {
        let secret = own
            .spec
            .identity_ref
            .as_ref()
            .filter(|r| r.kind == VSphereIdentityKind::Secret);
        let Some(name) = secret.map(|reference| reference.name.clone()) else {
            return Ok(());
        };
        let secrets: Api<Secret> = self.context.api(&own.namespace().unwrap_or_default());
        let Some(secret) = secrets.get_opt(&name).await? else {
            return Ok(());
        };
        for finalizer in [names::CLUSTER_FINALIZER, names::OLD_SECRET_FINALIZER] {
            patch::remove_finalizer(&secrets, &secret, finalizer).await?;
        }
        Ok(())
    }

    async fn write(
        &self,
        own: &VSphereCluster,
        edit: impl FnOnce(&mut VSphereClusterStatus, Timestamp),
    ) -> Result<(), Error> {
        let now = Timestamp::now();
        let mut after = own.clone();
        let status = after.status.get_or_insert_default();
        edit(status, now);
        let summed_up = [names::VCENTER_AVAILABLE];
        conditions::summarize(&mut status.conditions, &summed_up, now);
        let api: Api<VSphereCluster> = self.context.api(&own.namespace().unwrap_or_default());
        match patch::status(&api, own, &after, Lock::Open).await {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Whether a zone and a cluster are on the same vCenter.
fn same_vcenter(zone: &VSphereDeploymentZone, cluster: &VSphereCluster) -> bool {
    let servers = zone.spec.server.as_deref().zip(cluster.spec.server.as_deref());
    servers.is_some_and(|(one, other)| same_server(one, other))
}
