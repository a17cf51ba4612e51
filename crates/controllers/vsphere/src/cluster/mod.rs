//! VSphereCluster: whether vCenter can be used, the failure domains, the cluster modules.

pub mod identity;
mod modules;
mod status;
mod topology;
pub mod zone;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::ClusterFailureDomain;
use capstan_api::capi::GROUP;
use capstan_api::vsphere::{
    VSphereCluster, VSphereClusterIdentity, VSphereDeploymentZone, VSphereIdentityKind, VSphereMachine, VSphereVM,
};
use capstan_core::Class;
use capstan_core::plan::{Describe, Impact};
use capstan_core::validate::vcenter::same_server;
use capstan_kube::capi::Cluster;
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::workload::{NodeEvent, Workloads};
use capstan_kube::{Cache, Context, Recorder, cache};
use capstan_vsphere::{Trust, Vcenter};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::core::SelectorExt;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::affinity::{Affinity, Target};
use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::{Clusters, cluster_name, has_paused_annotation};
use modules::Modules;

/// A refused account may be corrected in vCenter, where Capstan does not see it. A more frequent login might lock it.
const REFUSED: Duration = Duration::from_secs(60);
/// Whatever else is wrong is corrected in Kubernetes, where Capstan watches everything but the labels of namespaces.
const RECHECK: Duration = Duration::from_secs(10);
/// What keeps modules from being made is corrected in vCenter, where Capstan does not see it.
const MODULES: Duration = Duration::from_secs(60);
/// The machines that are left are read from the cache, so that reading them again costs nothing.
const DELETING: Duration = Duration::from_secs(10);
/// The name of this controller.
pub const NAME: &str = ClusterController::NAME;

struct ClusterController {
    context: Context,
    recorder: Recorder,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    machines: Cache<VSphereMachine>,
    vms: Cache<VSphereVM>,
    affinity: Affinity,
    zones: Cache<VSphereDeploymentZone>,
    workloads: Workloads,
}

/// The deployment zones that a cluster selects.
#[derive(Clone, Debug, Default, PartialEq)]
struct Zones {
    /// The failure domains of the zones that are ready.
    domains: BTreeMap<String, ClusterFailureDomain>,
    not_ready: Vec<String>,
    /// Zones that nobody has checked yet.
    unchecked: Vec<String>,
}

enum Observed {
    Deleting {
        /// The machines that are left.
        machines: Vec<String>,
    },
    Present {
        zones: Zones,
        /// The version of vCenter, and whether its certificate is verified.
        connected: Option<(String, bool)>,
        modules: Option<Modules>,
        /// Why the workload cluster cannot be connected to, where a controller tried.
        workload: Option<String>,
        /// An error that only a user can correct.
        fault: Option<Box<Error>>,
    },
}

#[derive(Debug)]
enum Step {
    AddFinalizer,
    /// Sign in to vCenter, and bring the cluster modules up to date.
    Connect,
    /// Make the cluster an owner of its Secret, and keep the Secret until the cluster is gone.
    ProtectSecret,
    RemoveModules,
    /// Remove the finalizers from the Secret.
    ReleaseSecret,
    /// Remove the finalizer.
    Release,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AddFinalizer => "puts its finalizer on the VSphereCluster",
            Self::Connect => "signs in to vCenter and brings the cluster modules up to date",
            Self::ProtectSecret => "makes the VSphereCluster an owner of its Secret",
            Self::RemoveModules => "deletes the cluster modules",
            Self::ReleaseSecret => "releases the Secret",
            Self::Release => "takes its finalizer off the VSphereCluster",
        })
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::Connect | Self::ProtectSecret | Self::RemoveModules | Self::ReleaseSecret => {
                Impact::Ensures
            }
            Self::Release => Impact::Cluster,
        }
    }
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    (machines, vms): (Cache<VSphereMachine>, Cache<VSphereVM>),
    affinity: Affinity,
    identities: Cache<VSphereClusterIdentity>,
    workloads: Workloads,
) -> Result<(), Error> {
    let controller = ClusterController {
        context: context.clone(),
        recorder: context.recorder(ClusterController::COMPONENT),
        clusters,
        credentials,
        machines,
        vms,
        affinity,
        zones: context.cache_cluster_wide(cache::trim),
        workloads,
    };
    controller.zones.ready().await?;
    Arc::new(controller).run(identities).await;
    Ok(())
}

impl ClusterController {
    async fn run(self: Arc<Self>, identities: Cache<VSphereClusterIdentity>) {
        let own = self.clusters.infrastructure.clone();
        let (of_zone, of_identity, of_secret) = (own.clone(), own.clone(), own.clone());
        let credentials = self.credentials.clone();
        let by_secret = self.credentials.changes().flat_map(move |secret| {
            let named = |cluster: &VSphereCluster| credentials.secret_of(cluster).as_ref() == Some(&secret);
            futures::stream::iter(references(&of_secret.select(None, named)))
        });
        let (known, workloads) = (self.clusters.clone(), self.workloads.clone());
        let by_workload = self.workloads.events().flat_map(move |event| {
            let NodeEvent::Cluster(key) = event else {
                return futures::stream::iter(Vec::new());
            };
            let cluster = known.clusters.get(Some(&key.namespace), &key.name);
            let own = cluster.and_then(|cluster| known.infrastructure_of(&cluster).ok());
            let is_refused = workloads.refusal(&key.namespace, &key.name).is_some();
            let differs = own.filter(|own| is_refused != status::reports_refusal(own));
            futures::stream::iter(references(differs.as_slice()))
        });
        let (of_machine, of_vm, affinity) = (self.clusters.clone(), self.clusters.clone(), self.affinity.clone());
        let reconciler = Reconciler::new(&self.context, own)
            .watches(&self.clusters.clusters, |cluster: &Cluster| {
                let named = cluster.spec.infrastructure_ref.as_ref();
                let named = named.filter(|named| named.kind == VSphereCluster::KIND);
                let reference = named.map(|named| {
                    let mut reference = ObjectRef::<VSphereCluster>::new(&named.name);
                    reference.namespace = cluster.namespace();
                    reference
                });
                reference.into_iter().collect()
            })
            .watches(&self.machines, move |machine: &VSphereMachine| {
                // A cluster that is deleted waits for its last machine.
                let deleting = machine.meta().deletion_timestamp.is_some();
                let cluster = deleting.then(|| of_machine.infrastructure_behind(machine)).flatten();
                references(cluster.as_slice())
            })
            .watches(&self.vms, move |vm: &VSphereVM| {
                // A VM outside its module needs it; the last VM of an owner makes a module superfluous.
                let cluster = of_vm.infrastructure_behind(vm);
                let cluster = cluster.filter(|cluster| affinity.has_modules(cluster));
                let concerned = cluster.filter(|cluster| {
                    let modules = &cluster.spec.cluster_modules;
                    let inside = vm.status.as_ref().and_then(|status| status.module_uuid.as_deref());
                    let is_outside = |target: Target| inside.is_none() || target.module(modules) != inside;
                    vm.meta().deletion_timestamp.is_some() || affinity.target(vm).is_some_and(is_outside)
                });
                references(concerned.as_slice())
            })
            .watches(&self.zones, move |zone: &VSphereDeploymentZone| {
                references(&of_zone.select(None, |cluster| {
                    cluster.spec.failure_domain_selector.is_some() && same_vcenter(zone, cluster)
                }))
            })
            .watches(&identities, move |identity: &VSphereClusterIdentity| {
                let name = identity.name_any();
                references(&of_identity.select(None, |cluster| {
                    let named = cluster.spec.identity_ref.as_ref();
                    named.is_some_and(|r| r.kind == VSphereIdentityKind::VSphereClusterIdentity && r.name == name)
                }))
            })
            .on(by_secret)
            .on(by_workload);
        reconciler.run(self).await;
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
            .select(None, |zone| same_vcenter(zone, own) && selector.matches(zone.labels()));
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

    async fn connect(&self, own: &VSphereCluster) -> Result<Vcenter, Error> {
        let findings = capstan_core::validate::vsphere::cluster(&own.spec);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let vcenter = self.credentials.session(own).await?;
        vcenter.answers().await?;
        Ok(vcenter)
    }

    /// Makes a cluster an owner of the Secret in its namespace, so that clusterctl moves it along, and adds the finalizer that
    /// CAPV uses: machines whose Secret is gone could not be deleted in vCenter.
    async fn protect_secret(&self, scope: &Scope<VSphereCluster>) -> Result<(), Error> {
        let Some(secret) = self.credentials.own_secret(&scope.object).await? else {
            return Ok(());
        };
        let is_owned = secret.owner_references().iter().any(|owner| owner.uid == scope.key.uid);
        let is_kept = secret
            .finalizers()
            .iter()
            .any(|finalizer| finalizer == names::SECRET_FINALIZER);
        if (is_owned && is_kept) || secret.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let mut after = Secret::clone(&secret);
        if !is_owned {
            after.owner_references_mut().push(OwnerReference {
                api_version: VSphereCluster::API_VERSION.to_owned(),
                kind: VSphereCluster::KIND.to_owned(),
                name: scope.key.name.clone(),
                uid: scope.key.uid.clone(),
                ..OwnerReference::default()
            });
        }
        if !is_kept {
            after.finalizers_mut().push(names::SECRET_FINALIZER.to_owned());
        }
        match patch::object(&scope.api_of::<Secret>(), secret.as_ref(), &after, Lock::Version).await {
            // Somebody else has changed the Secret, or removed it: the watch asks for the next reconcile.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
            result => result.map(drop).map_err(Error::from),
        }
    }

    /// Removes the finalizers from the Secret of a cluster.
    async fn release_secret(&self, scope: &Scope<VSphereCluster>) -> Result<(), Error> {
        let identity = scope.object.spec.identity_ref.as_ref();
        let Some(identity) = identity.filter(|identity| identity.kind == VSphereIdentityKind::Secret) else {
            return Ok(());
        };
        let secrets = scope.api_of::<Secret>();
        for finalizer in [names::CLUSTER_FINALIZER, names::SECRET_FINALIZER] {
            let Some(secret) = secrets.get_opt(&identity.name).await? else {
                return Ok(());
            };
            patch::remove_finalizer(&secrets, &secret, finalizer).await?;
        }
        Ok(())
    }
}

impl Reconcile for ClusterController {
    type Object = VSphereCluster;
    type State = ();
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "vspherecluster";
    const COMPONENT: &'static str = "vspherecluster-controller";

    async fn observe(&self, scope: &mut Scope<VSphereCluster>, _: &mut ()) -> Result<Option<Observed>, Error> {
        let own = scope.object.clone();
        let is_core = |version: &str| version.split('/').next() == Some(GROUP);
        let mut owners = own.owner_references().iter();
        let Some(owner) = owners.find(|owner| owner.kind == "Cluster" && is_core(&owner.api_version)) else {
            // A VSphereCluster that belongs to no Cluster is left alone, until it is deleted: it has no machines.
            let is_held = own
                .finalizers()
                .iter()
                .any(|finalizer| finalizer == names::CLUSTER_FINALIZER);
            let release = scope.is_deleting() && is_held && !has_paused_annotation(own.as_ref());
            return Ok(release.then(|| Observed::Deleting { machines: Vec::new() }));
        };
        let cluster = self.clusters.clusters.get(Some(&scope.key.namespace), &owner.name);
        if has_paused_annotation(own.as_ref()) || cluster.is_some_and(|cluster| cluster.is_paused()) {
            return Ok(None);
        }
        if scope.is_deleting() {
            let left = self.machines.select(Some(&scope.key.namespace), |machine| {
                cluster_name(machine).as_deref() == Some(owner.name.as_str())
            });
            let machines = left.iter().map(|machine| machine.name_any()).collect();
            return Ok(Some(Observed::Deleting { machines }));
        }
        Ok(Some(Observed::Present {
            zones: self.zones_of(&own)?,
            connected: None,
            modules: None,
            workload: self.workloads.refusal(&scope.key.namespace, &owner.name),
            fault: None,
        }))
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        match observed {
            Observed::Deleting { machines } if machines.is_empty() => Plan {
                steps: vec![Step::RemoveModules, Step::ReleaseSecret, Step::Release],
                requeue: None,
            },
            Observed::Deleting { .. } => Plan::after(DELETING),
            Observed::Present { .. } => Plan {
                steps: vec![Step::AddFinalizer, Step::ProtectSecret, Step::Connect],
                requeue: None,
            },
        }
    }

    async fn apply(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<VSphereCluster>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        match step {
            Step::AddFinalizer => {
                scope.add_finalizer(names::CLUSTER_FINALIZER).await?;
            }
            Step::ProtectSecret => self.protect_secret(scope).await?,
            Step::Connect => return self.apply_connect(observed, scope).await,
            Step::RemoveModules => self.remove_modules(&scope.object).await?,
            Step::ReleaseSecret => {
                self.release_secret(scope).await?;
                self.credentials.forget(&scope.object);
            }
            Step::Release => {
                scope.remove_finalizer(names::CLUSTER_FINALIZER).await?;
            }
        }
        Ok(Outcome::Done)
    }

    fn status(
        cluster: &VSphereCluster,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereCluster> {
        status::status(cluster, observed, result, now)
    }
}

impl ClusterController {
    async fn apply_connect(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<VSphereCluster>,
    ) -> Result<Outcome, Error> {
        let Observed::Present {
            connected,
            modules,
            fault,
            ..
        } = observed
        else {
            return Ok(Outcome::Done);
        };
        let vcenter = match self.connect(&scope.object).await {
            Err(error) if error.is_reported() && error.class() == Class::Terminal => {
                let wait = if error.vsphere().is_some() { REFUSED } else { RECHECK };
                *fault = Some(Box::new(error));
                return Ok(Outcome::Wait(Some(wait)));
            }
            connected => connected?,
        };
        *connected = Some((vcenter.about().version, *vcenter.trust() != Trust::Insecure));
        let found = self.ensure_modules(scope, &vcenter).await?;
        let wait = if found.is_wrong() { MODULES } else { self.context.resync };
        *modules = Some(found);
        Ok(Outcome::Wait(Some(wait)))
    }
}

fn references(found: &[Arc<VSphereCluster>]) -> Vec<ObjectRef<VSphereCluster>> {
    found
        .iter()
        .map(|cluster| ObjectRef::from_obj(cluster.as_ref()))
        .collect()
}

/// Whether a zone and a cluster are on the same vCenter.
fn same_vcenter(zone: &VSphereDeploymentZone, cluster: &VSphereCluster) -> bool {
    let servers = zone.spec.server.as_deref().zip(cluster.spec.server.as_deref());
    servers.is_some_and(|(one, other)| same_server(one, other))
}
