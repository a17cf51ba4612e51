//! The events about the Secret of a pool. The status of the pool is written by [`crate::pool`].

use capstan_api::azure::AzureMachinePool;
use capstan_kube::runtime::{EventNote, Report};
use kube::ResourceExt;

use super::Observed;
use crate::error::Error;

pub fn status(
    pool: &AzureMachinePool,
    observed: Option<&Observed>,
    result: Result<(), &Error>,
) -> Report<AzureMachinePool> {
    let mut report = Report::nothing();
    let has_credential = matches!(
        observed,
        Some(Observed::Secret {
            has_credential: true,
            ..
        })
    );
    if has_credential && result.is_ok() {
        let message = format!(
            "spec.identity is None: Secret {}-azure-json holds the client secret of the cluster's identity, and each node may get it in a \
             file; set spec.identity to SystemAssigned or UserAssigned",
            pool.name_any()
        );
        report.events.push(EventNote::warning("VMIdentityNone", message));
    }
    let reported = result.err().filter(|error| error.is_about_the_identity());
    report
        .events
        .extend(reported.map(|error| EventNote::warning(error.reason(), error.to_string())));
    report
}
