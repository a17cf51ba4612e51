//! Decides whether machines can be placed where a VSphereDeploymentZone says, and which tags to create and attach.
//!
//! Invariants: a zone stays until no machine is in it, because the zone says where the machine is; the first fault in the order of the checks is the one that is reported; a tag is created or attached only where
//! the failure domain asks for that (`autoConfigure`), and only when everything that is checked before it exists.

use std::fmt;
use std::time::Duration;

use capstan_api::vsphere::{FailureDomain, FailureDomainType};
use jiff::Timestamp;

use crate::plan::{Describe, Impact, Plan};
use crate::vm::MoRef;

/// A folder or network that is missing may be created at any time. The next check comes after as long as it is known to be
/// missing, within these bounds.
const RECHECK: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// The machines of a zone that is deleted are read from the cache, so that reading them again costs nothing.
const DELETING: Duration = Duration::from_secs(10);

/// A check of a zone, with the condition that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Whether vCenter answers.
    Vcenter,
    /// Whether the folder and the pool of a zone exist.
    Placement,
    /// Whether the failure domain of a zone is as described.
    FailureDomain,
}

impl Check {
    /// In the order in which they are made.
    pub const ALL: [Self; 3] = [Self::Vcenter, Self::Placement, Self::FailureDomain];

    pub const fn condition(self) -> &'static str {
        match self {
            Self::Vcenter => "VCenterAvailable",
            Self::Placement => "PlacementConstraintMet",
            Self::FailureDomain => "VSphereFailureDomainValidated",
        }
    }
}

/// Why a check fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub check: Check,
    pub reason: &'static str,
    pub text: String,
    /// A zone with a warning can be used.
    pub is_warning: bool,
}

impl Fault {
    pub fn new(check: Check, reason: &'static str, text: String) -> Self {
        Self {
            check,
            reason,
            text,
            is_warning: false,
        }
    }

    pub fn of_domain(reason: &'static str, text: String) -> Self {
        Self::new(Check::FailureDomain, reason, text)
    }
}

/// A VSphereDeploymentZone with everything that the plan depends on.
#[derive(Clone, Debug)]
pub enum ObservedZone {
    /// A user has paused the zone, for this reason.
    Paused(String),
    Deleting {
        /// The machines that are in the zone.
        users: Vec<String>,
    },
    Present {
        /// What vCenter has of the zone, or why nothing can be placed there.
        topology: Box<Result<ObservedTopology, Fault>>,
        /// The checks that the status reports as failing, and since when.
        failing: Vec<(Check, Timestamp)>,
        /// How often to check a zone that is as it should be.
        resync: Duration,
    },
}

/// What vCenter has of a failure domain whose datacenter, compute cluster, resource pool and folder exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedTopology {
    /// The tags of region and zone.
    pub tags: Vec<ObservedTag>,
    /// The first network or datastore that does not exist.
    pub missing: Option<Fault>,
    pub groups: Option<ObservedGroups>,
}

/// A tag that marks a region or a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedTag {
    /// The reason to report where the tag is not as described.
    pub reason: &'static str,
    pub category: String,
    pub name: String,
    pub auto_configure: bool,
    pub exists: bool,
    /// The objects that should have the tag and do not, with their names; or why that is unknown.
    pub lacking: Result<Vec<(MoRef, String)>, String>,
}

/// The groups of hosts and machines that a failure domain names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedGroups {
    pub cluster: String,
    pub vm_group: String,
    pub host_group: String,
    pub has_vm_group: bool,
    /// The hosts of the host group, if it exists.
    pub hosts: Option<Vec<MoRef>>,
    /// Whether the rule that ties the groups together is enabled; `None` where there is no such rule.
    pub rule_enabled: Option<bool>,
}

/// One effect for a VSphereDeploymentZone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZoneStep {
    AddFinalizer,
    /// Remove the finalizer.
    Release,
    /// Create the tag and its category where they do not exist, and attach it.
    AttachTag {
        category: String,
        name: String,
        objects: Vec<MoRef>,
    },
}

impl fmt::Display for ZoneStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the VSphereDeploymentZone"),
            Self::Release => f.write_str("takes its finalizer off the VSphereDeploymentZone"),
            Self::AttachTag {
                category,
                name,
                objects,
            } => {
                let objects: Vec<String> = objects.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "attaches tag {name:?} of category {category:?} to {}",
                    objects.join(", ")
                )
            }
        }
    }
}

impl Describe for ZoneStep {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer | Self::Release => Impact::Ensures,
            Self::AttachTag { objects, .. } => Impact::Cloud(objects.len()),
        }
    }
}

/// Returns the next steps.
pub fn plan(observed: &ObservedZone, now: Timestamp) -> Plan<ZoneStep> {
    let (topology, failing, resync) = match observed {
        ObservedZone::Paused(_) => return Plan::idle(),
        ObservedZone::Deleting { users } if users.is_empty() => return Plan::step(ZoneStep::Release),
        ObservedZone::Deleting { .. } => return Plan::after(DELETING),
        ObservedZone::Present {
            topology,
            failing,
            resync,
        } => (topology, failing, *resync),
    };
    let fault = fault(topology);
    let requeue = fault.map_or(resync, |fault| {
        let since = failing.iter().find(|(check, _)| *check == fault.check);
        recheck(since.map_or(now, |(_, since)| *since), now)
    });
    let attachments = topology.as_ref().as_ref().map(attachments).unwrap_or_default();
    Plan {
        steps: [ZoneStep::AddFinalizer].into_iter().chain(attachments).collect(),
        requeue: Some(requeue),
    }
}

/// Returns the first thing that is wrong with a zone.
pub fn fault(topology: &Result<ObservedTopology, Fault>) -> Option<Fault> {
    match topology {
        Err(fault) => Some(fault.clone()),
        Ok(topology) => {
            let tags = topology.tags.iter().find_map(tag_fault);
            tags.or_else(|| topology.missing.clone())
                .or_else(|| topology.groups.as_ref().and_then(groups_fault))
        }
    }
}

/// Returns the tags to attach: those before the first one that is wrong.
fn attachments(topology: &ObservedTopology) -> Vec<ZoneStep> {
    let sound = topology.tags.iter().take_while(|tag| tag_fault(tag).is_none());
    let steps = sound.filter_map(|tag| {
        let lacking = tag
            .lacking
            .as_ref()
            .ok()
            .filter(|lacking| !lacking.is_empty() || !tag.exists)?;
        Some(ZoneStep::AttachTag {
            category: tag.category.clone(),
            name: tag.name.clone(),
            objects: lacking.iter().map(|(object, _)| object.clone()).collect(),
        })
    });
    steps.collect()
}

fn tag_fault(tag: &ObservedTag) -> Option<Fault> {
    let ObservedTag { category, name, .. } = tag;
    let text = match &tag.lacking {
        Err(text) => text.clone(),
        Ok(_) if tag.auto_configure => return None,
        Ok(_) if !tag.exists => {
            format!("tag {name:?} of category {category:?} does not exist: make it and attach it")
        }
        Ok(lacking) => {
            let (object, whose) = lacking.first()?;
            format!(
                "tag {name:?} of category {category:?} is not attached to {} {whose:?}",
                object.kind()
            )
        }
    };
    Some(Fault::of_domain(tag.reason, text))
}

/// Returns what is wrong with the groups of hosts and machines, which a rule should tie together.
fn groups_fault(groups: &ObservedGroups) -> Option<Fault> {
    let ObservedGroups {
        cluster,
        vm_group: vms,
        host_group: hosts,
        ..
    } = groups;
    let wrong = |text: String| Some(Fault::of_domain("HostsMisconfigured", text));
    if !groups.has_vm_group {
        return wrong(format!(
            "VM group {vms:?} does not exist in compute cluster {cluster:?}"
        ));
    }
    if groups.hosts.is_none() {
        return wrong(format!(
            "host group {hosts:?} does not exist in compute cluster {cluster:?}"
        ));
    }
    match groups.rule_enabled {
        Some(true) => None,
        Some(false) => Some(Fault {
            is_warning: true,
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

/// Returns the objects that should have the tag of a region or zone.
pub fn tagged_objects(
    domain: &FailureDomain,
    datacenter: &MoRef,
    cluster: Option<&MoRef>,
    groups: Option<&ObservedGroups>,
) -> Result<Vec<MoRef>, String> {
    match domain.type_ {
        FailureDomainType::ComputeCluster => Ok(cluster.cloned().into_iter().collect()),
        FailureDomainType::HostGroup => {
            let hosts = groups.and_then(|groups| groups.hosts.clone());
            let group = groups.map(|groups| groups.host_group.as_str()).unwrap_or_default();
            let hosts = hosts.filter(|hosts| !hosts.is_empty());
            hosts.ok_or_else(|| format!("host group {group:?} does not exist or has no hosts"))
        }
        _ => Ok(vec![datacenter.clone()]),
    }
}

/// Returns when to check again what has been wrong since then.
fn recheck(since: Timestamp, now: Timestamp) -> Duration {
    let known = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    known.clamp(RECHECK.0, RECHECK.1)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const NOW: Timestamp = Timestamp::constant(1_000_000, 0);
    const RESYNC: Duration = Duration::from_secs(600);

    fn host(number: u8) -> (MoRef, String) {
        (
            MoRef::new("HostSystem", format!("host-{number}")),
            format!("esx{number}"),
        )
    }

    fn tag(name: &str, auto_configure: bool, exists: bool, lacking: Vec<(MoRef, String)>) -> ObservedTag {
        ObservedTag {
            reason: "Misconfigured",
            category: "k8s".into(),
            name: name.into(),
            auto_configure,
            exists,
            lacking: Ok(lacking),
        }
    }

    fn groups(has_vm_group: bool, hosts: bool, rule_enabled: Option<bool>) -> ObservedTopology {
        ObservedTopology {
            groups: Some(ObservedGroups {
                has_vm_group,
                hosts: hosts.then(|| vec![host(1).0]),
                rule_enabled,
                ..ObservedGroups::default()
            }),
            ..ObservedTopology::default()
        }
    }

    fn tags(tags: Vec<ObservedTag>) -> ObservedTopology {
        ObservedTopology {
            tags,
            ..ObservedTopology::default()
        }
    }

    fn assess(topology: Result<ObservedTopology, Fault>) -> (Option<&'static str>, Vec<String>, Option<Duration>) {
        let reason = fault(&topology).map(|fault| fault.reason);
        let failing = vec![(Check::FailureDomain, NOW - jiff::SignedDuration::from_secs(40))];
        let observed = ObservedZone::Present {
            topology: Box::new(topology),
            failing,
            resync: RESYNC,
        };
        let plan = plan(&observed, NOW);
        assert_eq!(plan.steps.first(), Some(&ZoneStep::AddFinalizer));
        let attached = plan.steps.into_iter().skip(1).map(|step| match step {
            ZoneStep::AttachTag { name, objects, .. } => format!("{name}: {}", objects.len()),
            ZoneStep::AddFinalizer | ZoneStep::Release => "finalizer".to_owned(),
        });
        (reason, attached.collect(), plan.requeue)
    }

    #[rstest]
    #[case::all_there(tags(vec![tag("r", false, true, vec![])]), None, &[])]
    #[case::missing(tags(vec![tag("r", false, false, vec![host(1)])]), Some("Misconfigured"), &[])]
    #[case::not_attached(tags(vec![tag("r", false, true, vec![host(1)])]), Some("Misconfigured"), &[])]
    #[case::created(tags(vec![tag("r", true, false, vec![host(1), host(2)])]), None, &["r: 2"])]
    #[case::attached(tags(vec![tag("r", true, true, vec![host(2)])]), None, &["r: 1"])]
    #[case::nothing_lacks(tags(vec![tag("r", true, true, vec![])]), None, &[])]
    #[case::one_before_a_wrong_one(
        tags(vec![tag("r", true, true, vec![host(2)]), tag("z", false, true, vec![host(1)])]), Some("Misconfigured"), &["r: 1"])]
    #[case::none_after_a_wrong_one(
        tags(vec![tag("r", false, true, vec![host(1)]), tag("z", true, true, vec![host(2)])]), Some("Misconfigured"), &[])]
    #[case::tied(groups(true, true, Some(true)), None, &[])]
    #[case::no_vm_group(groups(false, true, Some(true)), Some("HostsMisconfigured"), &[])]
    #[case::no_hosts(groups(true, false, Some(true)), Some("HostsMisconfigured"), &[])]
    #[case::no_rule(groups(true, true, None), Some("HostsMisconfigured"), &[])]
    #[case::rule_disabled(groups(true, true, Some(false)), Some("HostsAffinityMisconfigured"), &[])]
    fn tags_are_attached_where_the_failure_domain_asks_and_the_first_fault_is_reported(
        #[case] topology: ObservedTopology,
        #[case] reason: Option<&'static str>,
        #[case] attached: &[&str],
    ) {
        let requeue = if reason.is_some() {
            Duration::from_secs(40)
        } else {
            RESYNC
        };
        let expected = attached.iter().map(|text| (*text).to_owned()).collect();
        assert_eq!(assess(Ok(topology)), (reason, expected, Some(requeue)));
    }

    #[test]
    fn a_zone_stays_until_no_machine_is_in_it() {
        let deleted = |users: &[&str]| {
            let users = users.iter().map(|user| (*user).to_owned()).collect();
            let plan = plan(&ObservedZone::Deleting { users }, NOW);
            (plan.steps, plan.requeue)
        };
        assert_eq!(deleted(&["ns/m"]), (Vec::new(), Some(DELETING)));
        assert_eq!(deleted(&[]), (vec![ZoneStep::Release], None));
        assert!(plan(&ObservedZone::Paused(String::new()), NOW).steps.is_empty());
    }

    #[test]
    fn nothing_is_attached_in_a_zone_that_cannot_be_read() {
        let fault = Fault::new(Check::Vcenter, "VCenterUnreachable", "refused".into());
        let expected = (Some("VCenterUnreachable"), Vec::new(), Some(RECHECK.0));
        assert_eq!(assess(Err(fault)), expected);
    }

    #[test]
    fn a_missing_object_is_checked_less_and_less_often() {
        let after = |seconds: i64| recheck(NOW - jiff::SignedDuration::from_secs(seconds), NOW).as_secs();
        assert_eq!([-3, 0, 5, 10, 40, 90].map(after), [5, 5, 5, 10, 40, 60]);
    }
}
