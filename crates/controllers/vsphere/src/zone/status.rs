//! The status of a VSphereDeploymentZone.

use capstan_api::vsphere::VSphereDeploymentZone;
use capstan_core::cluster::zone::{Check, Fault, ObservedZone, fault};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use crate::conditions as names;
use crate::error::Error;

pub fn status(
    zone: &VSphereDeploymentZone,
    observed: Option<&ObservedZone>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<VSphereDeploymentZone> {
    let shown = zone.status.as_ref().and_then(|status| status.v1beta2.clone());
    let fault = match (result, observed) {
        (_, Some(ObservedZone::Deleting { users })) => {
            let mut report = Report::nothing();
            if !users.is_empty() {
                let text = format!("the zone stays until no machine is in it: {}", names::list(users));
                report.events.push(EventNote::warning(names::IN_USE, text));
            }
            return report;
        }
        (_, Some(ObservedZone::Paused(reason))) => {
            let mut after = zone.clone();
            let paused = names::with_paused(
                shown.clone(),
                shown.as_ref(),
                zone.metadata.generation,
                Some(reason),
                now,
            );
            after.status.get_or_insert_default().v1beta2 = paused;
            return Report::of(after);
        }
        (Err(error), _) if error.is_reported() => Some(unreachable(error)),
        (Err(_), _) | (Ok(()), None) => return Report::nothing(),
        (Ok(()), Some(ObservedZone::Present { topology, .. })) => fault(topology),
    };
    let mut after = zone.clone();
    let status = after.status.get_or_insert_default();
    let list = &mut status.conditions;
    for check in Check::ALL {
        match fault.as_ref().filter(|fault| fault.check == check) {
            Some(fault) => {
                let severity = if fault.is_warning {
                    Severity::Warning
                } else {
                    Severity::Error
                };
                conditions::mark_false(list, check.condition(), severity, fault.reason, &fault.text, now);
                break;
            }
            None => conditions::mark_true(list, check.condition(), now),
        };
    }
    status.ready = Some(fault.is_none_or(|fault| fault.is_warning));
    conditions::summarize(&mut status.conditions, &Check::ALL.map(Check::condition), now);
    let conditions = names::v1beta2(&status.conditions);
    status.v1beta2 = names::with_paused(conditions, shown.as_ref(), zone.metadata.generation, None, now);
    Report::of(after)
}

/// vCenter did not answer, or refused.
pub fn unreachable(error: &Error) -> Fault {
    Fault::new(Check::Vcenter, names::VCENTER_UNREACHABLE, error.to_string())
}
