//! Whether vCenter is as a failure domain describes it: what it names exists, its tags are where they belong, and its groups
//! of hosts and machines are tied together by a rule. Tags are made and attached where the failure domain asks for that.

use std::sync::Arc;

use capstan_api::vsphere::{FailureDomain, FailureDomainType, PlacementConstraint, Topology, VSphereFailureDomainSpec};
use capstan_kube::conditions::Severity;
use capstan_vsphere::{Datacenter, Groups, MoRef, Vcenter};

use crate::conditions as names;
use crate::error::Error;

/// Which condition is false, why, what is said, and how grave that is.
pub struct Fault {
    pub condition: &'static str,
    pub reason: &'static str,
    pub text: String,
    pub severity: Severity,
}

impl Fault {
    pub fn of_domain(reason: &'static str, text: String) -> Self {
        Self {
            condition: names::FAILURE_DOMAIN_VALIDATED,
            reason,
            text,
            severity: Severity::Error,
        }
    }

    fn of_placement(reason: &'static str, text: String) -> Self {
        Self {
            condition: names::PLACEMENT_CONSTRAINT_MET,
            ..Self::of_domain(reason, text)
        }
    }
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

/// Goes on with what was found, or ends with what is wrong.
macro_rules! need {
    ($found:expr) => {
        match $found {
            Ok(value) => value,
            Err(fault) => return Ok(Some(fault)),
        }
    };
}

/// The first thing that is wrong with a zone.
pub async fn check(
    vcenter: &Vcenter,
    constraint: &PlacementConstraint,
    domain: &VSphereFailureDomainSpec,
) -> Result<Option<Fault>, Error> {
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
    let groups = match &cluster {
        Some(cluster) if topology.hosts.is_some() => vcenter.groups(cluster).await?,
        _ => Groups::default(),
    };
    for (side, reason) in [
        (&domain.region, "FailureDomainRegionMisconfigured"),
        (&domain.zone, "FailureDomainZoneMisconfigured"),
    ] {
        let objects = match carriers(side, &datacenter, cluster.as_ref(), topology, &groups) {
            Ok(objects) => objects,
            Err(text) => return Ok(Some(Fault::of_domain(reason, text))),
        };
        if let Some(text) = mark(vcenter, side, &objects).await? {
            return Ok(Some(Fault::of_domain(reason, text)));
        }
    }
    let configured = topology
        .network_configurations
        .iter()
        .map(|network| &network.network_name);
    for network in topology.networks.iter().chain(configured) {
        let network = vcenter.network(&datacenter, network).await;
        need!(found(network, not_found("NetworkNotFound"))?);
    }
    if let Some(datastore) = topology.datastore.as_deref().filter(|name| !name.is_empty()) {
        let datastore = vcenter.datastore(&datacenter, Some(datastore)).await;
        need!(found(datastore, not_found("DatastoreNotFound"))?);
    }
    Ok(tied(topology, &groups))
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
        let pool = match found(pool, |text| Fault::of_placement("ResourcePoolNotFound", text))? {
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
        let folder = found(folder, |text| Fault::of_placement("FolderNotFound", text))?;
        return Ok(folder.map(drop));
    }
    Ok(Ok(()))
}

/// What carries the tag of a region or zone.
fn carriers(
    side: &FailureDomain,
    datacenter: &Datacenter,
    cluster: Option<&MoRef>,
    topology: &Topology,
    groups: &Groups,
) -> Result<Vec<MoRef>, String> {
    match side.type_ {
        FailureDomainType::ComputeCluster => Ok(cluster.cloned().into_iter().collect()),
        FailureDomainType::HostGroup => {
            let group = topology.hosts.as_ref().map(|hosts| hosts.host_group_name.as_str());
            let group = group.unwrap_or_default();
            let hosts = groups.hosts(group).filter(|hosts| !hosts.is_empty());
            hosts.ok_or_else(|| format!("host group {group:?} does not exist or has no hosts"))
        }
        _ => Ok(vec![datacenter.reference.clone()]),
    }
}

/// Whether every object carries the tag; what is wrong otherwise.
async fn mark(vcenter: &Vcenter, side: &FailureDomain, objects: &[MoRef]) -> Result<Option<String>, Error> {
    let made_here = side.auto_configure == Some(true);
    let (name, category) = (&side.name, &side.tag_category);
    let Some(tag) = tag(vcenter, side, made_here).await? else {
        let text = format!("tag {name:?} of category {category:?} does not exist: make it and attach it");
        return Ok(Some(text));
    };
    for object in objects {
        if vcenter.attached_tags(object).await?.contains(&tag) {
            continue;
        }
        if !made_here {
            let whose = vcenter.name_of(object).await?;
            let text = format!(
                "tag {name:?} of category {category:?} is not attached to {} {whose:?}",
                object.kind()
            );
            return Ok(Some(text));
        }
        vcenter.attach_tags(object, std::slice::from_ref(&tag)).await?;
    }
    Ok(None)
}

async fn tag(vcenter: &Vcenter, side: &FailureDomain, made_here: bool) -> Result<Option<String>, Error> {
    let (category, name) = (&side.tag_category, &side.name);
    let id = match vcenter.tag_category(category).await? {
        Some(id) => id,
        None if made_here => match vcenter.create_tag_category(category).await {
            Ok(id) => id,
            // Another zone of the same region may have been quicker.
            Err(error) => vcenter.tag_category(category).await?.ok_or(error)?,
        },
        None => return Ok(None),
    };
    Ok(match vcenter.tag_in_category(&id, name).await? {
        None if made_here => Some(match vcenter.create_tag(&id, name).await {
            Ok(tag) => tag,
            Err(error) => vcenter.tag_in_category(&id, name).await?.ok_or(error)?,
        }),
        found => found,
    })
}

/// Whether the groups of hosts and machines are there, and tied together.
fn tied(topology: &Topology, groups: &Groups) -> Option<Fault> {
    let hosts = topology.hosts.as_ref()?;
    let (vms, hosts) = (hosts.vm_group_name.as_str(), hosts.host_group_name.as_str());
    let cluster = topology.compute_cluster.as_deref().unwrap_or_default();
    let wrong = |text: String| Some(Fault::of_domain("HostsMisconfigured", text));
    if groups.machines(vms).is_none() {
        return wrong(format!(
            "VM group {vms:?} does not exist in compute cluster {cluster:?}"
        ));
    }
    if groups.hosts(hosts).is_none() {
        return wrong(format!(
            "host group {hosts:?} does not exist in compute cluster {cluster:?}"
        ));
    }
    match groups.rule_is_enabled(vms, hosts) {
        Some(true) => None,
        Some(false) => Some(Fault {
            severity: Severity::Warning,
            ..Fault::of_domain(
                "HostsAffinityMisconfigured",
                format!("the rule that ties VM group {vms:?} to host group {hosts:?} is disabled"),
            )
        }),
        None => wrong(format!(
            "no rule of compute cluster {cluster:?} ties VM group {vms:?} to host group {hosts:?}"
        )),
    }
}
