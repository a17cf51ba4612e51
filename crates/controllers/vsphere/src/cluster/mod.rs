//! VSphereCluster: whether vCenter can be used, the failure domains, the cluster modules.

pub mod identity;
mod modules;
mod secret;
mod status;
mod topology;
pub mod zone;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::ClusterFailureDomain;
use capstan_api::capi::{CLUSTER_NAME_LABEL, GROUP};
use capstan_api::vsphere::{
    VSphereCluster, VSphereClusterIdentity, VSphereDeploymentZone, VSphereIdentityKind, VSphereMachine, VSphereVM,
};
use capstan_core::Class;
use capstan_core::plan::{Describe, Impact};
use capstan_core::validate::vcenter::same_server;
use capstan_kube::capi::Cluster;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::workload::{NodeEvent, Workloads};
use capstan_kube::{Cache, Context, Recorder, cache};
use capstan_vsphere::{Trust, Vcenter};
use futures::StreamExt;
use jiff::Timestamp;
use kube::api::ListParams;
use kube::core::SelectorExt;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::affinity::{Affinity, Target};
use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::{Clusters, cluster_name, has_paused_annotation};
use modules::Modules;
use secret::{NamedSecret, Secrets};

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
        /// The machines and VMs that are left.
        machines: Vec<String>,
    },
    Present {
        zones: Zones,
        secrets: Secrets,
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
    ProtectSecret(NamedSecret),
    /// Release a Secret that the cluster owns and does not use any more.
    ReleaseFormerSecret(String),
    RemoveModules,
    /// Remove the finalizers from the Secret.
    ReleaseSecret,
    /// Remove the finalizer.
    Release,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::ProtectSecret(secret) => return write!(f, "makes the VSphereCluster an owner of Secret {secret:?}"),
            Self::ReleaseFormerSecret(name) => return write!(f, "releases Secret {name}, which it used before"),
            Self::AddFinalizer => "puts its finalizer on the VSphereCluster",
            Self::Connect => "signs in to vCenter and brings the cluster modules up to date",
            Self::RemoveModules => "deletes the cluster modules",
            Self::ReleaseSecret => "releases the Secret",
            Self::Release => "takes its finalizer off the VSphereCluster",
        };
        f.write_str(text)
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::Connect | Self::ProtectSecret(_) | Self::ReleaseFormerSecret(_) => {
                Impact::Ensures
            }
            Self::RemoveModules | Self::ReleaseSecret => Impact::Ensures,
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
                // A cluster that is deleted waits for its last VM.
                let cluster = of_vm.infrastructure_behind(vm);
                let concerned = cluster.filter(|cluster| {
                    if !affinity.has_modules(cluster) {
                        return cluster.meta().deletion_timestamp.is_some();
                    }
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
            let machines = self.left_of(scope, &owner.name).await?;
            return Ok(Some(Observed::Deleting { machines }));
        }
        Ok(Some(Observed::Present {
            zones: self.zones_of(&own)?,
            secrets: self.observe_secrets(&own).await?,
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
            Observed::Present { secrets, .. } => {
                let mut steps = vec![Step::AddFinalizer];
                steps.extend(secrets.former.iter().cloned().map(Step::ReleaseFormerSecret));
                steps.extend(secrets.identity.clone().map(Step::ProtectSecret));
                steps.push(Step::Connect);
                Plan { steps, requeue: None }
            }
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
            Step::ProtectSecret(secret) => self.protect_secret(scope, &secret.0).await?,
            Step::ReleaseFormerSecret(name) => self.release_former(scope, &name).await?,
            Step::Connect => return self.apply_connect(observed, scope).await,
            Step::RemoveModules => self.remove_modules(&scope.object).await?,
            Step::ReleaseSecret => self.release_secret(scope).await?,
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
