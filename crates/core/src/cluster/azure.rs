//! Decides about an AzureCluster, whose network others manage.
//!
//! Invariant: an AzureCluster that another manager reconciles (`cluster.x-k8s.io/managed-by`, or CAPZ beside Capstan) is never
//! written.

use std::convert::Infallible;
use std::time::Duration;

use capstan_api::azure::AzureCluster;
use capstan_api::capi::PAUSED_ANNOTATION;

use crate::plan::Plan;

/// An infrastructure cluster with this annotation is managed by a component outside of Cluster API.
const MANAGED_BY: &str = "cluster.x-k8s.io/managed-by";
const CAPZ_FINALIZER: &str = "azurecluster.infrastructure.cluster.x-k8s.io";
/// No event reports that a network was created: Capstan checks this often.
const RECHECK: Duration = Duration::from_secs(30);

/// A CAPZ that runs puts its finalizer on a new AzureCluster within this time.
pub const CAPZ_FIRST: Duration = Duration::from_secs(60);

/// Whether the network of an AzureCluster exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    Exists,
    /// The first part of it that does not.
    Lacks(String),
    /// Not read: CAPZ runs, and has had no time yet to put its finalizer on the new AzureCluster.
    LeftToCapz,
}

/// Returns when to check the network again. Capstan changes nothing but the status.
pub fn plan(network: &Network) -> Plan<Infallible> {
    match network {
        Network::Exists => Plan::idle(),
        Network::Lacks(_) => Plan::after(RECHECK),
        Network::LeftToCapz => Plan::after(CAPZ_FIRST),
    }
}

/// Whether an AzureCluster needs no reconcile: it is deleted, paused or ready, or another manager reports its status. CAPZ puts
/// its finalizer on every AzureCluster that it reconciles.
pub fn is_left_alone(cluster: &AzureCluster) -> bool {
    let meta = &cluster.metadata;
    let has = |name: &str| meta.annotations.as_ref().is_some_and(|all| all.contains_key(name));
    let mut finalizers = meta.finalizers.iter().flatten();
    meta.deletion_timestamp.is_some()
        || cluster.status.as_ref().is_some_and(|status| status.ready)
        || has(MANAGED_BY)
        || has(PAUSED_ANNOTATION)
        || finalizers.any(|finalizer| finalizer == CAPZ_FINALIZER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::alone(json!({"metadata": {}}), false)]
    #[case::external(json!({"metadata": {"annotations": {"cluster.x-k8s.io/managed-by": "terraform"}}}), true)]
    #[case::paused(json!({"metadata": {"annotations": {"cluster.x-k8s.io/paused": ""}}}), true)]
    #[case::capz(json!({"metadata": {"finalizers": ["azurecluster.infrastructure.cluster.x-k8s.io"]}}), true)]
    #[case::another_finalizer(json!({"metadata": {"finalizers": ["example.com/keep"]}}), false)]
    #[case::deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), true)]
    #[case::ready(json!({"metadata": {}, "status": {"ready": true}}), true)]
    fn an_azure_cluster_of_another_manager_is_left_alone(#[case] mut cluster: Value, #[case] expected: bool) {
        cluster["spec"] = json!({"location": "eastus"});
        let cluster: AzureCluster = serde_json::from_value(cluster).unwrap();
        assert_eq!(is_left_alone(&cluster), expected);
    }

    #[test]
    fn a_network_that_is_missing_is_checked_again() {
        assert_eq!(plan(&Network::Exists), Plan::idle());
        assert_eq!(plan(&Network::LeftToCapz).requeue, Some(CAPZ_FIRST));
        assert_eq!(plan(&Network::Lacks("a subnet".into())).requeue, Some(RECHECK));
    }
}
