//! The status of a VSphereClusterIdentity.

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_core::cluster::identity::ObservedIdentity;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use crate::conditions as names;

pub fn status(
    identity: &VSphereClusterIdentity,
    observed: Option<&ObservedIdentity>,
    now: Timestamp,
) -> Report<VSphereClusterIdentity> {
    let shown = identity.status.as_ref().and_then(|status| status.v1beta2.clone());
    let generation = identity.metadata.generation;
    let fault = match observed {
        Some(ObservedIdentity::Paused(reason)) => {
            let mut after = identity.clone();
            let paused = names::with_paused(shown.clone(), shown.as_ref(), generation, Some(reason), now);
            after.status.get_or_insert_default().v1beta2 = paused;
            return Report::of(after);
        }
        Some(ObservedIdentity::Deleting { users, .. }) if !users.is_empty() => {
            let text = format!(
                "the identity and its Secret stay until no cluster uses them: {}",
                names::list(users)
            );
            let mut report = Report::nothing();
            report.events.push(EventNote::warning(names::IN_USE, text));
            return report;
        }
        Some(ObservedIdentity::Usable { .. }) => None,
        Some(ObservedIdentity::Unusable(fault)) => Some(fault),
        Some(ObservedIdentity::Deleting { .. }) | None => return Report::nothing(),
    };
    let mut after = identity.clone();
    let status = after.status.get_or_insert_default();
    status.ready = fault.is_none();
    match fault {
        None => conditions::mark_true(&mut status.conditions, names::CREDENTIALS_AVAILABLE, now),
        Some(text) => {
            let (type_, reason) = (names::CREDENTIALS_AVAILABLE, "SecretNotAvailable");
            conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, text, now)
        }
    };
    conditions::summarize(&mut status.conditions, &[names::CREDENTIALS_AVAILABLE], now);
    let conditions = names::v1beta2(&status.conditions);
    status.v1beta2 = names::with_paused(conditions, shown.as_ref(), generation, None, now);
    Report::of(after)
}
