//! The status of a VSphereCluster.
//!
//! Invariant: a cluster becomes ready only when all of its zones have been checked, so that no machine is placed before its
//! failure domain is known. A cluster that is ready stays ready.

use capstan_api::vsphere::{VSphereCluster, VSphereClusterStatus};
use capstan_core::Class;
use capstan_core::cluster::modules::ObservedModules;
use capstan_core::cluster::vsphere::{ObservedCluster, ObservedVcenter};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use super::{Connection, Observed, Zones};
use crate::conditions as names;
use crate::error::Error;

/// The message of the condition that reports `--insecure-vcenter`.
const NOT_VERIFIED: &str = "the manager runs with --insecure-vcenter and accepts every certificate of this vCenter: set \
                            spec.thumbprint, or put the CA into the key \"ca.crt\" of the identity's Secret";

pub fn status(
    cluster: &VSphereCluster,
    observed: Option<&Observed>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<VSphereCluster> {
    let mut after = cluster.clone();
    let status = after.status.get_or_insert_default();
    let mut events = Vec::new();
    let (shown, generation) = (status.v1beta2.clone(), cluster.metadata.generation);
    if let Some(observed) = observed {
        match &observed.plan {
            ObservedCluster::Deleting { .. } => return Report::nothing(),
            ObservedCluster::Paused(reason) => {
                status.v1beta2 = names::with_paused(shown.clone(), shown.as_ref(), generation, Some(reason), now);
                return Report::of(after);
            }
            ObservedCluster::Present { .. } => {}
        }
        workload_available(status, observed.workload.as_deref(), now);
    }
    let connection = observed.and_then(|observed| observed.connection.as_ref());
    let refused = match connection {
        Some(Connection::Failed(error)) => Some(error),
        _ => None,
    };
    if let Some(error) = result.err().or(refused) {
        if !error.is_reported() {
            return Report::nothing();
        }
        let severity = match error.class() {
            Class::Terminal => Severity::Error,
            Class::Transient | Class::Throttled(_) => Severity::Warning,
        };
        let (type_, reason, text) = (names::VCENTER_AVAILABLE, names::VCENTER_UNREACHABLE, error.to_string());
        conditions::mark_false(&mut status.conditions, type_, severity, reason, &text, now);
        events.push(EventNote::warning(reason, text));
    } else if let Some((observed, Connection::Available { version, is_verified })) = observed.zip(connection) {
        let (was_ready, zones) = (status.ready, &observed.zones);
        available(status, *is_verified, now);
        failure_domains(cluster, status, zones, now);
        events.extend(modules_available(status, observed, now));
        status.vcenter_version = Some(version.clone());
        status.ready |= zones.unchecked.is_empty();
        if status.ready && !was_ready {
            let server = cluster.spec.server.clone().unwrap_or_default();
            events.push(EventNote::normal(
                "Ready",
                format!("vCenter {server} {version} is available"),
            ));
        }
    }
    conditions::summarize(&mut status.conditions, &[names::VCENTER_AVAILABLE], now);
    let conditions = names::v1beta2(&status.conditions);
    status.v1beta2 = names::with_paused(conditions, shown.as_ref(), generation, None, now);
    let mut report = Report::of(after);
    report.events = events;
    report
}

/// Reports the cluster modules. Returns the event where something is wrong with them.
fn modules_available(status: &mut VSphereClusterStatus, observed: &Observed, now: Timestamp) -> Option<EventNote> {
    let (list, type_) = (&mut status.conditions, names::CLUSTER_MODULES_AVAILABLE);
    let ObservedCluster::Present {
        vcenter: ObservedVcenter::Available(modules),
        ..
    } = &observed.plan
    else {
        return None;
    };
    let problems = match modules {
        ObservedModules::Unmanaged => {
            conditions::remove(list, type_);
            return None;
        }
        ObservedModules::Unreadable(text) => text.clone(),
        ObservedModules::Known(_) if observed.module_problems.is_empty() => {
            conditions::mark_true(list, type_, now);
            return None;
        }
        ObservedModules::Known(_) => observed.module_problems.join("; "),
    };
    let (reason, text) = (
        names::MODULES_FAILED,
        format!("cluster modules cannot be set up for {problems}"),
    );
    conditions::mark_false(list, type_, Severity::Warning, reason, &text, now);
    Some(EventNote::warning(reason, text))
}

fn available(status: &mut VSphereClusterStatus, verified: bool, now: Timestamp) {
    let list = &mut status.conditions;
    conditions::mark_true(list, names::VCENTER_AVAILABLE, now);
    if verified {
        conditions::remove(list, names::CERTIFICATE_VERIFIED);
    } else {
        let (type_, reason) = (names::CERTIFICATE_VERIFIED, names::INSECURE);
        conditions::mark_false(list, type_, Severity::Warning, reason, NOT_VERIFIED, now);
    }
}

/// Reports a workload cluster that Capstan cannot connect to. The condition is absent when nothing is wrong.
fn workload_available(status: &mut VSphereClusterStatus, refusal: Option<&str>, now: Timestamp) {
    let (list, type_) = (&mut status.conditions, names::WORKLOAD_CLUSTER_AVAILABLE);
    match refusal {
        Some(refusal) => {
            let text = format!("Capstan removes no Nodes of deleted machines: {refusal}");
            conditions::mark_false(list, type_, Severity::Warning, names::KUBECONFIG_REFUSED, &text, now);
        }
        None => {
            conditions::remove(list, type_);
        }
    }
}

/// Whether the status reports a workload cluster that Capstan cannot connect to.
pub fn reports_refusal(cluster: &VSphereCluster) -> bool {
    let conditions = cluster.status.as_ref().map(|status| status.conditions.as_slice());
    conditions::is_false(conditions.unwrap_or_default(), names::WORKLOAD_CLUSTER_AVAILABLE)
}

fn failure_domains(cluster: &VSphereCluster, status: &mut VSphereClusterStatus, zones: &Zones, now: Timestamp) {
    let (list, type_) = (&mut status.conditions, names::FAILURE_DOMAINS_AVAILABLE);
    if cluster.spec.failure_domain_selector.is_none() {
        conditions::remove(list, type_);
    } else if !zones.unchecked.is_empty() {
        let text = format!(
            "waiting for the first check of deployment zones {}",
            zones.unchecked.join(", ")
        );
        conditions::mark_false(list, type_, Severity::Info, names::WAITING_FOR_ZONES, &text, now);
    } else if !zones.not_ready.is_empty() {
        let text = format!("deployment zones that cannot be used: {}", zones.not_ready.join(", "));
        conditions::mark_false(list, type_, Severity::Info, "FailureDomainsSkipped", &text, now);
    } else {
        conditions::mark_true(list, type_, now);
    }
    status.failure_domains = zones.domains.clone();
}

#[cfg(test)]
mod tests {
    use capstan_core::cluster::secrets::ObservedSecrets;

    use super::*;

    fn observed(unchecked: &[&str]) -> Observed {
        let secrets = ObservedSecrets {
            owner: Default::default(),
            identity: None,
            recorded: None,
            former: Vec::new(),
        };
        Observed {
            plan: ObservedCluster::Present {
                secrets: Box::new(secrets),
                vcenter: ObservedVcenter::Available(ObservedModules::Unmanaged),
                resync: std::time::Duration::from_secs(600),
            },
            zones: Zones {
                unchecked: unchecked.iter().map(|name| (*name).to_owned()).collect(),
                ..Zones::default()
            },
            connection: Some(Connection::Available {
                version: "8.0.3".into(),
                is_verified: true,
            }),
            module_problems: Vec::new(),
            workload: None,
        }
    }

    #[test]
    fn a_refused_kubeconfig_is_reported_until_it_is_accepted() {
        let now = Timestamp::UNIX_EPOCH;
        let with = |cluster: &VSphereCluster, refusal: Option<&str>| {
            let observed = Observed {
                workload: refusal.map(str::to_owned),
                ..observed(&[])
            };
            status(cluster, Some(&observed), Ok(()), now).object.unwrap()
        };
        let cluster = VSphereCluster::new("c", Default::default());
        let refused = with(&cluster, Some("field users[].user.exec is not allowed"));
        assert!(reports_refusal(&refused) && refused.status.as_ref().unwrap().ready);
        let conditions = refused.status.clone().unwrap().conditions;
        let condition = conditions::get(&conditions, names::WORKLOAD_CLUSTER_AVAILABLE).unwrap();
        assert!(condition.message.clone().unwrap().contains("users[].user.exec"));
        let accepted = with(&refused, None);
        assert!(!reports_refusal(&accepted));
    }

    #[test]
    fn a_cluster_is_ready_when_all_of_its_zones_have_been_checked() {
        let now = Timestamp::UNIX_EPOCH;
        let mut cluster = VSphereCluster::new("c", Default::default());
        cluster.spec.failure_domain_selector = Some(Default::default());
        let after = |cluster: &VSphereCluster, unchecked: &[&str]| {
            let report = status(cluster, Some(&observed(unchecked)), Ok(()), now);
            report.object.unwrap()
        };
        let waiting = after(&cluster, &["zone-a"]).status.unwrap();
        assert!(!waiting.ready);
        let condition = conditions::get(&waiting.conditions, names::FAILURE_DOMAINS_AVAILABLE).unwrap();
        assert_eq!(condition.reason.as_deref(), Some(names::WAITING_FOR_ZONES));
        let ready = after(&cluster, &[]);
        assert!(ready.status.as_ref().unwrap().ready);
        assert!(
            after(&ready, &["zone-b"]).status.unwrap().ready,
            "a new zone takes nothing away"
        );
    }
}
