//! The status of an AzureCluster.

use capstan_api::azure::{AzureCluster, AzureClusterStatus};
use capstan_core::cluster::azure::Network;
use capstan_core::{Class, Classified};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use crate::error::Error;

const NETWORK_READY: &str = "NetworkInfrastructureReady";

pub fn status(
    object: &AzureCluster,
    observed: Option<&Network>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<AzureCluster> {
    if observed == Some(&Network::LeftToCapz) {
        return Report::nothing();
    }
    let mut after = object.clone();
    let status = after.status.get_or_insert_default();
    match (result, observed) {
        (Err(error), _) => mark_failed(status, error, now),
        (Ok(()), Some(network)) => mark(status, network, now),
        (Ok(()), None) => {}
    }
    conditions::summarize(&mut status.conditions, &[NETWORK_READY], now);
    let reported = result
        .err()
        .filter(|error| error.class() == Class::Terminal || error.is_about_the_identity());
    Report {
        events: reported
            .map(|error| EventNote::warning(error.reason(), error.to_string()))
            .into_iter()
            .collect(),
        ..Report::of(after)
    }
}

fn mark(status: &mut AzureClusterStatus, network: &Network, now: Timestamp) {
    let list = &mut status.conditions;
    match network {
        Network::Exists => {
            conditions::mark_true(list, NETWORK_READY, now);
            status.ready = true;
        }
        Network::Lacks(what) => {
            let message = format!("{what} does not exist");
            conditions::mark_false(list, NETWORK_READY, Severity::Info, "WaitingForNetwork", &message, now);
        }
        Network::LeftToCapz => {}
    }
}

fn mark_failed(status: &mut AzureClusterStatus, error: &Error, now: Timestamp) {
    let (list, text) = (&mut status.conditions, error.to_string());
    conditions::mark_false(list, NETWORK_READY, Severity::Warning, error.reason(), &text, now);
}
