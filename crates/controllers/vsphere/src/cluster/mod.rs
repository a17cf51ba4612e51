//! VSphereCluster: whether vCenter can be used, the failure domains, the cluster modules. The plan is
//! `capstan_core::cluster::vsphere`.

mod apply;
mod observe;
mod status;

use std::collections::BTreeMap;
use std::sync::Arc;

use capstan_api::ClusterFailureDomain;
use capstan_api::vsphere::{
    VSphereCluster, VSphereClusterIdentity, VSphereDeploymentZone, VSphereIdentityKind, VSphereMachine, VSphereVM,
};
use capstan_core::cluster::modules::Target;
use capstan_core::cluster::vsphere::{self, ClusterStep, ObservedCluster};
use capstan_core::validate::vcenter::{contains_server, same_server};
use capstan_kube::capi::Cluster;
use capstan_kube::objects::references;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::workload::{NodeEvent, Workloads};
use capstan_kube::{Cache, Context, Recorder, cache};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::affinity::Affinity;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::Clusters;

/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
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
    /// Zones that have not been checked yet.
    unchecked: Vec<String>,
}

/// Whether vCenter can be used.
enum Connection {
    Available { version: String, is_verified: bool },
    Failed(Error),
}

/// What the plan depends on, and what the status reports beside it.
struct Observed {
    plan: ObservedCluster,
    zones: Zones,
    /// `None` for a cluster that is deleted.
    connection: Option<Connection>,
    /// What went wrong when modules were changed.
    module_problems: Vec<String>,
    /// Why the workload cluster cannot be connected to, where a controller tried.
    workload: Option<String>,
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
    let controller = Controller {
        context: context.clone(),
        recorder: context.recorder(Controller::COMPONENT),
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

impl Controller {
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
                    cluster.spec.failure_domain_selector.is_some() && reaches(cluster, zone)
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
}

impl Reconcile for Controller {
    type Object = VSphereCluster;
    type State = ();
    type Observed = Observed;
    type Step = ClusterStep;
    type Error = Error;

    const NAME: &'static str = "vspherecluster";
    const COMPONENT: &'static str = "vspherecluster-controller";

    async fn observe(&self, scope: &mut Scope<VSphereCluster>, _: &mut ()) -> Result<Option<Observed>, Error> {
        self.observe_cluster(scope).await
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<ClusterStep> {
        vsphere::plan(&observed.plan)
    }

    async fn apply(
        &self,
        step: ClusterStep,
        observed: &mut Observed,
        scope: &mut Scope<VSphereCluster>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        self.apply_step(step, observed, scope).await
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

/// On a VSphereCluster: further vCenters, separated by commas, whose zones the cluster may select; `*` for every vCenter.
const ZONE_SERVERS: &str = "capstan.dev/zone-servers";

/// Whether a zone and a cluster are on the same vCenter.
pub fn same_vcenter(zone: &VSphereDeploymentZone, cluster: &VSphereCluster) -> bool {
    let servers = zone.spec.server.as_deref().zip(cluster.spec.server.as_deref());
    servers.is_some_and(|(one, other)| same_server(one, other))
}

/// Whether a cluster may select a zone: on its own vCenter, or on one that its annotation names.
pub fn reaches(cluster: &VSphereCluster, zone: &VSphereDeploymentZone) -> bool {
    let further = cluster.annotations().get(ZONE_SERVERS);
    let further: Vec<&str> = further.iter().flat_map(|servers| servers.split(',')).collect();
    let server = zone.spec.server.as_deref().filter(|server| !server.is_empty());
    let named = server.is_some_and(|server| contains_server(&further, server));
    named || same_vcenter(zone, cluster)
}
