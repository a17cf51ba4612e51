//! VSphereDeploymentZone: whether machines can be put where it says.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::{VSphereDeploymentZone, VSphereFailureDomain, VSphereFailureDomainSpec};
use capstan_core::validate::vsphere::failure_domain;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Context, Next, Reconciler};
use capstan_vsphere::Vcenter;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};

use crate::clusters::Clusters;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::terms;

/// What a zone names is looked for again this often.
const RESYNC: Duration = Duration::from_secs(10 * 60);
/// A folder or network that is missing may be made any time.
const RECHECK: Duration = Duration::from_secs(60);

/// Runs the deployment zones.
pub struct Zones {
    context: Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
}

/// Which condition is false, why, and what is said.
type Fault = (&'static str, &'static str, String);

impl Zones {
    pub fn new(
        context: &Context,
        clusters: Clusters,
        credentials: Arc<Credentials>,
        domains: Cache<VSphereFailureDomain>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            clusters,
            credentials,
            domains,
        })
    }

    /// The controller, until shutdown.
    pub async fn run(self: Arc<Self>, own: Cache<VSphereDeploymentZone>) -> Result<(), Error> {
        self.domains.ready().await?;
        let (of_domain, of_cluster) = (own.clone(), own.clone());
        let references = |found: Vec<Arc<VSphereDeploymentZone>>| -> Vec<ObjectRef<VSphereDeploymentZone>> {
            found.iter().map(|zone| ObjectRef::from_obj(zone.as_ref())).collect()
        };
        let reconciler = Reconciler::new("vspheredeploymentzone", &self.context, own)
            .watches(&self.domains, move |domain| {
                let name = domain.name_any();
                references(of_domain.select(None, |zone| zone.spec.failure_domain.as_ref() == Some(&name)))
            })
            .watches(&self.clusters.infrastructure, move |cluster| {
                let waits = |zone: &VSphereDeploymentZone| zone.status.as_ref().and_then(|s| s.ready) != Some(true);
                references(of_cluster.select(None, |zone| waits(zone) && zone.spec.server == cluster.spec.server))
            });
        reconciler.run(move |zone| self.clone().pass(zone)).await;
        Ok(())
    }

    async fn pass(self: Arc<Self>, own: Arc<VSphereDeploymentZone>) -> Result<Next, Error> {
        let api: Api<VSphereDeploymentZone> = Api::all(self.context.client.clone());
        if own.meta().deletion_timestamp.is_some() {
            // Nothing of ours hangs on it; a predecessor may have left this.
            patch::remove_finalizer(&api, own.as_ref(), terms::OLD_ZONE_FINALIZER).await?;
            return Ok(Next::Wait);
        }
        let fault = match self.check(&own).await {
            Ok(fault) => fault,
            Err(error) if error.is_told() => {
                Some((terms::VCENTER_AVAILABLE, terms::VCENTER_UNREACHABLE, error.to_string()))
            }
            Err(error) => return Err(error),
        };
        let now = Timestamp::now();
        let mut after = VSphereDeploymentZone::clone(&own);
        let status = after.status.get_or_insert_default();
        let all = [
            terms::VCENTER_AVAILABLE,
            terms::PLACEMENT_CONSTRAINT_MET,
            terms::FAILURE_DOMAIN_VALIDATED,
        ];
        for type_ in all {
            match fault.as_ref().filter(|(false_one, ..)| *false_one == type_) {
                Some((_, reason, text)) => {
                    conditions::mark_false(&mut status.conditions, type_, Severity::Error, reason, text, now);
                    break;
                }
                None => conditions::mark_true(&mut status.conditions, type_, now),
            };
        }
        status.ready = Some(fault.is_none());
        conditions::summarize(&mut status.conditions, &all, now);
        patch::status(&api, own.as_ref(), &after, Lock::Open).await?;
        Ok(Next::After(if fault.is_none() { RESYNC } else { RECHECK }))
    }

    async fn check(&self, own: &VSphereDeploymentZone) -> Result<Option<Fault>, Error> {
        let name = own.spec.failure_domain.clone().unwrap_or_default();
        let validated = terms::FAILURE_DOMAIN_VALIDATED;
        let Some(domain) = self.domains.get(None, &name) else {
            let text = format!("VSphereFailureDomain {name:?} does not exist");
            return Ok(Some((validated, "FailureDomainNotFound", text)));
        };
        let findings = failure_domain(&domain.spec);
        if !findings.is_ok() {
            return Ok(Some((validated, "FailureDomainInvalid", findings.message())));
        }
        let vcenter = self.session(own).await?;
        let placed = placement(&vcenter, own, &domain.spec).await?;
        Ok(match placed {
            Some(fault) => Some(fault),
            None => topology(&vcenter, &domain.spec).await?,
        })
    }

    /// In the name of a cluster on the same server, or of the default account.
    async fn session(&self, own: &VSphereDeploymentZone) -> Result<Vcenter, Error> {
        let server = own.spec.server.clone().unwrap_or_default();
        let same = self
            .clusters
            .infrastructure
            .select(None, |cluster| cluster.spec.server == own.spec.server);
        match same.first() {
            Some(cluster) => self.credentials.session(cluster, Some(&server), None).await,
            None => self.credentials.session(&Default::default(), Some(&server), None).await,
        }
    }
}

/// Turns what is missing into a fault; anything else is an error.
fn missing<T>(
    result: capstan_vsphere::Result<T>,
    type_: &'static str,
    reason: &'static str,
) -> Result<Option<Fault>, Error> {
    match result {
        Ok(_) => Ok(None),
        Err(error @ (capstan_vsphere::Error::NotFound { .. } | capstan_vsphere::Error::Ambiguous { .. })) => {
            Ok(Some((type_, reason, error.to_string())))
        }
        Err(error) => Err(error.into()),
    }
}

async fn placement(
    vcenter: &Vcenter,
    own: &VSphereDeploymentZone,
    domain: &VSphereFailureDomainSpec,
) -> Result<Option<Fault>, Error> {
    let datacenter = match vcenter.datacenter(Some(&domain.topology.datacenter)).await {
        Ok(datacenter) => datacenter,
        Err(error) => return missing::<()>(Err(error), terms::FAILURE_DOMAIN_VALIDATED, "DatacenterNotFound"),
    };
    let (met, constraint) = (terms::PLACEMENT_CONSTRAINT_MET, &own.spec.placement_constraint);
    if let Some(pool) = constraint.resource_pool.as_deref().filter(|pool| !pool.is_empty()) {
        let found = vcenter.resource_pool(&datacenter, Some(pool)).await;
        if let Some(fault) = missing(found, met, "ResourcePoolNotFound")? {
            return Ok(Some(fault));
        }
    }
    if let Some(folder) = constraint.folder.as_deref().filter(|folder| !folder.is_empty()) {
        return missing(
            vcenter.vm_folder(&datacenter, Some(folder)).await,
            met,
            "FolderNotFound",
        );
    }
    Ok(None)
}

async fn topology(vcenter: &Vcenter, domain: &VSphereFailureDomainSpec) -> Result<Option<Fault>, Error> {
    let (validated, topology) = (terms::FAILURE_DOMAIN_VALIDATED, &domain.topology);
    let datacenter = vcenter.datacenter(Some(&topology.datacenter)).await?;
    if let Some(cluster) = topology
        .compute_cluster
        .as_deref()
        .filter(|cluster| !cluster.is_empty())
    {
        let found = vcenter.cluster(&datacenter, Some(cluster)).await;
        if let Some(fault) = missing(found, validated, "ComputeClusterNotFound")? {
            return Ok(Some(fault));
        }
    }
    let configured = topology
        .network_configurations
        .iter()
        .map(|network| &network.network_name);
    for network in topology.networks.iter().chain(configured) {
        if let Some(fault) = missing(
            vcenter.network(&datacenter, network).await,
            validated,
            "NetworkNotFound",
        )? {
            return Ok(Some(fault));
        }
    }
    match topology.datastore.as_deref().filter(|datastore| !datastore.is_empty()) {
        Some(datastore) => missing(
            vcenter.datastore(&datacenter, Some(datastore)).await,
            validated,
            "DatastoreNotFound",
        ),
        None => Ok(None),
    }
}
