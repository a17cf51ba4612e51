//! Reads a VSphereDeploymentZone, and what vCenter has of its failure domain.

use std::collections::BTreeSet;
use std::sync::Arc;

use capstan_api::vsphere::{
    FailureDomain, PlacementConstraint, Topology, VSphereCluster, VSphereDeploymentZone, VSphereFailureDomainSpec,
    VSphereIdentityKind,
};
use capstan_core::cluster::zone::{
    Check, Fault, ObservedGroups, ObservedTag, ObservedTopology, ObservedZone, tagged_objects,
};
use capstan_core::validate::vsphere::{deployment_zone, failure_domain};
use capstan_kube::conditions;
use capstan_kube::runtime::Scope;
use capstan_vsphere::{Datacenter, MoRef, Vcenter};
use jiff::Timestamp;
use kube::ResourceExt;

use super::{Controller, status};
use crate::cluster::{reaches, same_vcenter};
use crate::error::Error;
use crate::owner_cluster::paused;

impl Controller {
    pub(super) async fn observe_zone(
        &self,
        scope: &Scope<VSphereDeploymentZone>,
    ) -> Result<Option<ObservedZone>, Error> {
        let own = scope.object.as_ref();
        if let Some(reason) = paused(own, None) {
            return Ok(Some(ObservedZone::Paused(reason)));
        }
        if scope.is_deleting() {
            let users = self.users(&own.name_any());
            return Ok(Some(ObservedZone::Deleting { users }));
        }
        if self.is_foreign(own) {
            return Ok(None);
        }
        let topology = match self.compare(own).await {
            Err(error) if error.is_reported() => Err(status::unreachable(&error)),
            result => result?,
        };
        Ok(Some(ObservedZone::Present {
            topology: Box::new(topology),
            failing: failing(own),
            resync: self.context.resync,
        }))
    }

    /// Returns the machines that are in a zone, with their namespaces.
    fn users(&self, zone: &str) -> Vec<String> {
        let named = |domain: &Option<String>| domain.as_deref() == Some(zone);
        let name = |namespace: Option<String>, name: String| format!("{}/{name}", namespace.unwrap_or_default());
        let machines = self
            .machines
            .select(None, |machine| named(&machine.spec.failure_domain));
        let machines = machines
            .iter()
            .map(|machine| name(machine.namespace(), machine.name_any()));
        let owners = self.owners.select(None, |own| named(&own.spec.failure_domain));
        let owners = owners.iter().map(|own| name(own.namespace(), own.name_any()));
        let users: BTreeSet<String> = machines.chain(owners).collect();
        users.into_iter().collect()
    }

    async fn compare(&self, own: &VSphereDeploymentZone) -> Found<ObservedTopology> {
        let name = own.spec.failure_domain.clone().unwrap_or_default();
        let Some(domain) = self.domains.get(None, &name) else {
            let text = format!("VSphereFailureDomain {name:?} does not exist");
            return Ok(Err(Fault::of_domain("FailureDomainNotFound", text)));
        };
        let findings = deployment_zone(&own.spec);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let findings = failure_domain(&domain.spec);
        if !findings.is_ok() {
            return Ok(Err(Fault::of_domain("FailureDomainInvalid", findings.message())));
        }
        let vcenter = self.session(own).await?;
        observe_topology(&vcenter, &own.spec.placement_constraint, &domain.spec).await
    }

    /// Whether a zone is left to another instance. Zones belong to no namespace; an instance that works in one namespace only
    /// leaves zones that none of its clusters can use to others.
    fn is_foreign(&self, own: &VSphereDeploymentZone) -> bool {
        self.context.namespace.is_some() && self.in_reach(own).is_empty()
    }

    /// Returns the clusters that can use a zone. Those on its own server come first among their rank.
    fn in_reach(&self, own: &VSphereDeploymentZone) -> Vec<Arc<VSphereCluster>> {
        let all = &self.clusters.infrastructure;
        let mut found = all.select(None, |cluster| reaches(cluster, own));
        let is_elsewhere = |cluster: &VSphereCluster| !same_vcenter(own, cluster);
        found.sort_by_key(|cluster| {
            let name = (cluster.namespace(), cluster.name_any());
            (rank(cluster), is_elsewhere(cluster), name)
        });
        found
    }

    /// Returns a session by the identity of a cluster that can use the zone, or by the manager's own account. A cluster that
    /// cannot sign in, or whose account does not see the datacenter, does not keep the zone from the next one.
    pub(super) async fn session(&self, own: &VSphereDeploymentZone) -> Result<Vcenter, Error> {
        let domain = own.spec.failure_domain.as_deref().unwrap_or_default();
        let domain = self.domains.get(None, domain);
        let datacenter = domain.as_ref().map(|domain| domain.spec.topology.datacenter.as_str());
        let server = own.spec.server.as_deref().unwrap_or_default();
        let mut best = Best(None);
        for cluster in self.in_reach(own) {
            let session = match same_vcenter(own, &cluster) {
                true => self.credentials.session(&cluster).await,
                false => self.credentials.session_with(&cluster, server, None).await,
            };
            let sees = match &session {
                Ok(vcenter) => !vcenter
                    .datacenter(datacenter)
                    .await
                    .is_err_and(|error| is_hidden(&error)),
                Err(_) => false,
            };
            if best.take(session, sees) {
                break;
            }
        }
        match best.0 {
            Some(session) => session,
            None => self.credentials.session_of_manager(server).await,
        }
    }
}

/// The identities of administrators come first, then those of tenants, then the manager's own account: tenants give their own
/// accounts whatever rights they like.
fn rank(cluster: &VSphereCluster) -> u8 {
    match cluster.spec.identity_ref.as_ref().map(|identity| &identity.kind) {
        Some(VSphereIdentityKind::VSphereClusterIdentity) => 0,
        Some(_) => 1,
        None => 2,
    }
}

/// The session of the first candidate whose account sees what the zone names. Where none does, that of the first who could sign
/// in at all, or why the first could not.
struct Best<S>(Option<Result<S, Error>>);

impl<S> Best<S> {
    /// Takes what became of the next candidate. Returns whether nobody else is to be asked.
    fn take(&mut self, session: Result<S, Error>, sees: bool) -> bool {
        let is_last = match &session {
            Ok(_) => sees,
            Err(error) => !cannot_sign_in(error),
        };
        let is_better = match &self.0 {
            None => true,
            Some(best) => best.is_err() && session.is_ok(),
        };
        if is_last || is_better {
            self.0 = Some(session);
        }
        is_last
    }
}

/// Whether an account may lack the right to see an object that exists.
fn is_hidden(error: &capstan_vsphere::Error) -> bool {
    let is_forbidden = |fault: &capstan_vsphere::Fault| fault.is("NoPermission");
    matches!(error, capstan_vsphere::Error::NotFound { .. }) || error.fault().is_some_and(is_forbidden)
}

/// Whether another identity may succeed where one failed. A server that does not answer answers nobody.
fn cannot_sign_in(error: &Error) -> bool {
    use capstan_vsphere::Error::{Certificate, Invalid, Login, Thumbprint};
    match error.vsphere() {
        Some(source) => matches!(
            source,
            Login { .. } | Thumbprint { .. } | Certificate { .. } | Invalid { .. }
        ),
        None => error.is_reported(),
    }
}

/// Returns the checks of a zone that fail, and since when.
fn failing(zone: &VSphereDeploymentZone) -> Vec<(Check, Timestamp)> {
    let conditions = zone.status.as_ref().map(|status| status.conditions.as_slice());
    let conditions = conditions.unwrap_or_default();
    let failing = Check::ALL
        .into_iter()
        .filter(|check| conditions::is_false(conditions, check.condition()));
    failing
        .filter_map(|check| Some((check, conditions::since(conditions, check.condition())?)))
        .collect()
}

/// Found, or what is wrong.
type Found<T> = Result<Result<T, Fault>, Error>;

/// Turns what is missing into a fault; anything else is an error.
fn found<T>(result: capstan_vsphere::Result<T>, fault: impl FnOnce(String) -> Fault) -> Found<T> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(error @ (capstan_vsphere::Error::NotFound { .. } | capstan_vsphere::Error::Ambiguous { .. })) => {
            Ok(Err(fault(error.to_string())))
        }
        Err(error) => Err(error.into()),
    }
}

/// Takes what was found, or returns what is wrong.
macro_rules! need {
    ($found:expr) => {
        match $found {
            Ok(value) => value,
            Err(fault) => return Ok(Err(fault)),
        }
    };
}

/// Reads what vCenter has of a failure domain.
async fn observe_topology(
    vcenter: &Vcenter,
    constraint: &PlacementConstraint,
    domain: &VSphereFailureDomainSpec,
) -> Found<ObservedTopology> {
    let topology = &domain.topology;
    let not_found = |reason| move |text| Fault::of_domain(reason, text);
    let datacenter = vcenter.datacenter(Some(&topology.datacenter)).await;
    let datacenter = need!(found(datacenter, not_found("DatacenterNotFound"))?);
    let cluster = match topology.compute_cluster.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => {
            let cluster = vcenter.cluster(&datacenter, Some(name)).await;
            Some(need!(found(cluster, not_found("ComputeClusterNotFound"))?))
        }
        None => None,
    };
    need!(placement(vcenter, &datacenter, constraint, cluster.as_ref(), topology).await?);
    let groups = observe_groups(vcenter, cluster.as_ref(), topology).await?;
    let mut tags = Vec::new();
    for (side, reason) in [
        (&domain.region, "FailureDomainRegionMisconfigured"),
        (&domain.zone, "FailureDomainZoneMisconfigured"),
    ] {
        let objects = tagged_objects(side, &datacenter.reference, cluster.as_ref(), groups.as_ref());
        tags.push(observe_tag(vcenter, side, reason, objects).await?);
    }
    Ok(Ok(ObservedTopology {
        tags,
        missing: missing(vcenter, &datacenter, topology).await?.err(),
        groups,
    }))
}

/// Returns the first network or datastore of a failure domain that does not exist.
async fn missing(vcenter: &Vcenter, datacenter: &Arc<Datacenter>, topology: &Topology) -> Found<()> {
    let not_found = |reason| move |text| Fault::of_domain(reason, text);
    let configured = topology
        .network_configurations
        .iter()
        .map(|network| &network.network_name);
    for network in topology.networks.iter().chain(configured) {
        let network = vcenter.network(datacenter, network).await;
        need!(found(network, not_found("NetworkNotFound"))?);
    }
    if let Some(datastore) = topology.datastore.as_deref().filter(|name| !name.is_empty()) {
        let datastore = vcenter.datastores(datacenter, datastore).await;
        need!(found(datastore, not_found("DatastoreNotFound"))?);
    }
    Ok(Ok(()))
}

async fn observe_groups(
    vcenter: &Vcenter,
    cluster: Option<&MoRef>,
    topology: &Topology,
) -> Result<Option<ObservedGroups>, Error> {
    let Some(hosts) = &topology.hosts else {
        return Ok(None);
    };
    let found = match cluster {
        Some(cluster) => vcenter.groups(cluster).await?,
        None => Default::default(),
    };
    let (vm_group, host_group) = (hosts.vm_group_name.clone(), hosts.host_group_name.clone());
    Ok(Some(ObservedGroups {
        cluster: topology.compute_cluster.clone().unwrap_or_default(),
        has_vm_group: found.machines(&vm_group).is_some(),
        hosts: found.hosts(&host_group),
        rule_enabled: found.rule_is_enabled(&vm_group, &host_group),
        vm_group,
        host_group,
    }))
}

async fn observe_tag(
    vcenter: &Vcenter,
    side: &FailureDomain,
    reason: &'static str,
    objects: Result<Vec<MoRef>, String>,
) -> Result<ObservedTag, Error> {
    let tag = match vcenter.tag_category(&side.tag_category).await? {
        Some(category) => vcenter.tag_in_category(&category, &side.name).await?,
        None => None,
    };
    let mut observed = ObservedTag {
        reason,
        category: side.tag_category.clone(),
        name: side.name.clone(),
        auto_configure: side.auto_configure == Some(true),
        exists: tag.is_some(),
        lacking: Ok(Vec::new()),
    };
    let objects = match objects {
        Ok(objects) => objects,
        Err(text) => {
            observed.lacking = Err(text);
            return Ok(observed);
        }
    };
    let mut lacking = Vec::new();
    for object in objects {
        let has_tag = match &tag {
            Some(tag) => vcenter.attached_tags(&object).await?.contains(tag),
            None => false,
        };
        if !has_tag {
            let name = vcenter.name_of(&object).await?;
            lacking.push((object, name));
        }
    }
    observed.lacking = Ok(lacking);
    Ok(observed)
}

async fn placement(
    vcenter: &Vcenter,
    datacenter: &Arc<Datacenter>,
    constraint: &PlacementConstraint,
    cluster: Option<&MoRef>,
    topology: &Topology,
) -> Found<()> {
    if let Some(name) = constraint.resource_pool.as_deref().filter(|name| !name.is_empty()) {
        let pool = vcenter.resource_pool(datacenter, Some(name)).await;
        let pool = match found(pool, |text| Fault::new(Check::Placement, "ResourcePoolNotFound", text))? {
            Ok(pool) => pool,
            Err(fault) => return Ok(Err(fault)),
        };
        if cluster.is_some_and(|cluster| pool.owner.as_ref() != Some(cluster)) {
            let cluster = topology.compute_cluster.as_deref().unwrap_or_default();
            let text = format!("resource pool {name:?} is not in compute cluster {cluster:?}");
            return Ok(Err(Fault::of_domain("ResourcePoolNotFound", text)));
        }
    }
    if let Some(folder) = constraint.folder.as_deref().filter(|name| !name.is_empty()) {
        let folder = vcenter.vm_folder(datacenter, Some(folder)).await;
        let folder = found(folder, |text| Fault::new(Check::Placement, "FolderNotFound", text))?;
        return Ok(folder.map(drop));
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_account_that_sees_nothing_does_not_keep_a_zone_from_the_next_one() {
        let refused = || Error::Invalid("no".to_owned());
        let silent = || {
            Error::from(capstan_vsphere::Error::Unreachable {
                server: "vc".to_owned(),
                cause: "timed out".to_owned(),
            })
        };
        let chosen = |candidates: &[&'static str]| {
            let mut best = Best(None);
            for candidate in candidates {
                let session = match *candidate {
                    "refused" => Err(refused()),
                    "silent" => Err(silent()),
                    session => Ok(session),
                };
                if best.take(session, *candidate == "good") {
                    break;
                }
            }
            best.0.map(|session| session.map_err(|error| error.to_string()))
        };
        assert_eq!(chosen(&["refused", "blind", "good"]), Some(Ok("good")));
        assert_eq!(chosen(&["refused", "blind", "refused"]), Some(Ok("blind")));
        assert_eq!(chosen(&["refused"]), Some(Err(refused().to_string())));
        assert_eq!(chosen(&["blind", "silent", "good"]), Some(Err(silent().to_string())));
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn the_identities_of_administrators_come_before_those_of_tenants() {
        let ranks = [
            json!({"identityRef": {"kind": "VSphereClusterIdentity", "name": "i"}}),
            json!({"identityRef": {"kind": "Secret", "name": "s"}}),
            json!({}),
        ];
        let ranks = ranks.map(|spec| {
            let cluster = json!({"metadata": {"name": "c"}, "spec": spec});
            rank(&serde_json::from_value(cluster).unwrap())
        });
        assert_eq!(ranks, [0, 1, 2]);
    }
}
