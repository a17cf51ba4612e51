//! The status of a MachineSet.

use std::time::Duration;

use capstan_api::openshift::{MachineSet, MachineSetStatus};
use capstan_core::machineset;
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use super::state::Lookup;
use super::{Error, Managed, Observed};
use crate::machine::status::paused;

/// Counts move with every machine; they are written at most this often.
const PACE: Duration = Duration::from_secs(1);
/// Upstream's reason for a set that cannot be reconciled.
const INVALID: &str = "InvalidConfiguration";

pub fn status(
    set: &MachineSet,
    observed: Option<&Observed>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<MachineSet> {
    let mut before = set.status.clone().unwrap_or_default();
    let (spec, authority) = (set.spec.authoritative_api.as_ref(), before.authoritative_api.as_ref());
    if let Some(conditions) = paused(&before.conditions, spec, authority, now) {
        // Where the migration controller does not run, nobody else says which API manages the object.
        before.authoritative_api = authority.or(spec).cloned();
        before.conditions = conditions;
    }
    let after = match (observed, result) {
        (_, Err(error @ Error::Invalid { .. })) => MachineSetStatus {
            error_reason: Some(INVALID.to_owned()),
            error_message: Some(error.to_string()),
            observed_generation: set.metadata.generation,
            ..before.clone()
        },
        (Some(Observed::Managed(managed)), _) => counted(set, managed, before.clone(), now),
        (Some(Observed::Paused), _) => before.clone(),
        (None, _) => return Report::nothing(),
    };
    // A change of the spec is answered at once.
    let answers = before.observed_generation != after.observed_generation;
    let mut report = Report::of(MachineSet {
        status: Some(after),
        ..set.clone()
    });
    report.pace = (!answers).then_some(PACE);
    report.events = match result {
        Err(error @ Error::Invalid { .. }) => vec![EventNote::warning("FailedValidate", error.to_string())],
        Err(error @ Error::Create(_)) => vec![EventNote::warning("FailedCreate", error.to_string())],
        Err(Error::Kube(_)) | Ok(()) => Vec::new(),
    };
    if let Some(Observed::Managed(Managed {
        capacity: Lookup::UnknownSize(size),
        ..
    })) = observed
    {
        report.events.push(EventNote::warning(
            "FailedUpdate",
            format!("Failed to set autoscaling from zero annotations, instance type unknown: {size:?}"),
        ));
    }
    report
}

fn counted(set: &MachineSet, observed: &Managed, before: MachineSetStatus, now: Timestamp) -> MachineSetStatus {
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let counts = machineset::counts(&observed.plan, now);
    MachineSetStatus {
        replicas: number(counts.replicas),
        fully_labeled_replicas: Some(number(counts.fully_labeled)),
        ready_replicas: Some(number(counts.ready)),
        available_replicas: Some(number(counts.available)),
        observed_generation: set.metadata.generation,
        label_selector: Some(observed.selector.to_string()),
        error_reason: None,
        error_message: None,
        ..before
    }
}
