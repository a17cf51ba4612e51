//! The status of a VSphereClusterIdentity.

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_core::cluster::identity::ObservedIdentity;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::Report;
use jiff::Timestamp;

use crate::conditions as names;

pub fn status(
    identity: &VSphereClusterIdentity,
    observed: Option<&ObservedIdentity>,
    now: Timestamp,
) -> Report<VSphereClusterIdentity> {
    let fault = match observed {
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
    status.v1beta2 = names::v1beta2(&status.conditions);
    Report::of(after)
}
