//! AzureCluster: ready when the network that it names exists.
//!
//! Others manage its network. Invariant: an AzureCluster that another manager reconciles (`cluster.x-k8s.io/managed-by`, or CAPZ
//! beside Capstan) is never written.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureClusterStatus};
use capstan_api::capi::PAUSED_ANNOTATION;
use capstan_core::validate::azure_cluster;
use capstan_core::{Class, Classified};
use capstan_kube::capi::Cluster;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Outcome, Plan, Reconcile, Report, Scope};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::Controller;
use crate::error::Error;

const NETWORK_READY: &str = "NetworkInfrastructureReady";
const MANAGED_BY: &str = "cluster.x-k8s.io/managed-by";
const CAPZ_FINALIZER: &str = "azurecluster.infrastructure.cluster.x-k8s.io";
/// Nobody reports that a network was created: Capstan checks this often.
const RECHECK: Duration = Duration::from_secs(30);

/// Reconciles AzureClusters.
pub struct Clusters(pub Arc<Controller>);

/// Whether the network exists.
pub enum Network {
    Exists,
    /// The first part of it that does not.
    Lacks(String),
}

impl Reconcile for Clusters {
    type Object = AzureCluster;
    type State = ();
    type Observed = Network;
    /// Nothing is ever changed but the status.
    type Step = Infallible;
    type Error = Error;

    const NAME: &'static str = "azurecluster";
    const COMPONENT: &'static str = crate::COMPONENT;

    async fn observe(&self, scope: &mut Scope<AzureCluster>, _: &mut ()) -> Result<Option<Network>, Error> {
        let object = scope.object.as_ref();
        let Some(cluster) = owner(&self.0, object) else {
            return Ok(None);
        };
        let ready = object.status.as_ref().is_some_and(|status| status.ready);
        if scope.is_deleting() || is_left_alone(object) || cluster.is_paused() || ready {
            return Ok(None);
        }
        network(&self.0, object, &cluster.name_any()).await.map(Some)
    }

    fn plan(observed: &Network, _: Timestamp) -> Plan<Infallible> {
        match observed {
            Network::Exists => Plan::idle(),
            Network::Lacks(_) => Plan::after(RECHECK),
        }
    }

    async fn apply(
        &self,
        step: Infallible,
        _: &mut Network,
        _: &mut Scope<AzureCluster>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        match step {}
    }

    fn status(
        object: &AzureCluster,
        observed: Option<&Network>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<AzureCluster> {
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
}

/// Whether somebody else reports the status: an external controller, or CAPZ, which puts its finalizer on every AzureCluster that
/// it reconciles.
fn is_left_alone(object: &AzureCluster) -> bool {
    let annotated = [MANAGED_BY, PAUSED_ANNOTATION]
        .iter()
        .any(|name| object.annotations().contains_key(*name));
    annotated || object.finalizers().iter().any(|finalizer| finalizer == CAPZ_FINALIZER)
}

/// Returns the Cluster that owns it. Core sets the owner reference; without core the Cluster itself refers to it.
fn owner(controller: &Controller, object: &AzureCluster) -> Option<Arc<Cluster>> {
    let namespace = object.namespace();
    let namespace = namespace.as_deref();
    if let Some(owner) = object.owner_references().iter().find(|owner| owner.kind == "Cluster") {
        return controller.clusters.get(namespace, &owner.name);
    }
    let refers = |cluster: &Cluster| {
        let reference = cluster.spec.infrastructure_ref.as_ref();
        reference.is_some_and(|r| r.is(AzureCluster::GROUP, AzureCluster::KIND) && r.name == object.name_any())
    };
    controller.clusters.select(namespace, refers).into_iter().next()
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
    }
}

fn mark_failed(status: &mut AzureClusterStatus, error: &Error, now: Timestamp) {
    let (list, text) = (&mut status.conditions, error.to_string());
    conditions::mark_false(list, NETWORK_READY, Severity::Warning, error.reason(), &text, now);
}

/// Checks every part of the network.
async fn network(controller: &Controller, object: &AzureCluster, cluster_name: &str) -> Result<Network, Error> {
    let spec = &object.spec;
    let findings = azure_cluster::validate(spec);
    if !findings.is_ok() {
        return Err(Error::Invalid(findings.message()));
    }
    let sign_in = &controller.options.sign_in;
    let subscription = sign_in.subscription(object)?;
    let credential = sign_in.credential(&controller.context.client, object).await?;
    let clients = controller.azure.of(object)?;
    let client = clients.client(&credential, &subscription).at(&spec.location);
    let vnet = &spec.network_spec.vnet;
    let group = vnet.resource_group.clone().filter(|group| !group.is_empty());
    let group = group.unwrap_or_else(|| crate::model::group(object, cluster_name));
    let name = if vnet.name.is_empty() {
        format!("{cluster_name}-vnet")
    } else {
        vnet.name.clone()
    };
    if spec.network_spec.subnets.is_empty() {
        return Ok(Network::Lacks("a subnet in spec.networkSpec.subnets".to_owned()));
    }
    for subnet in &spec.network_spec.subnets {
        if client.get_subnet(&group, &name, &subnet.name).await?.is_none() {
            let what = format!("subnet {} of virtual network {group}/{name}", subnet.name);
            return Ok(Network::Lacks(what));
        }
    }
    Ok(Network::Exists)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::alone(json!({}), false)]
    #[case::external(json!({"annotations": {"cluster.x-k8s.io/managed-by": "terraform"}}), true)]
    #[case::paused(json!({"annotations": {"cluster.x-k8s.io/paused": ""}}), true)]
    #[case::capz(json!({"finalizers": ["azurecluster.infrastructure.cluster.x-k8s.io"]}), true)]
    #[case::somebody(json!({"finalizers": ["example.com/keep"]}), false)]
    fn an_azure_cluster_of_somebody_else_is_left_alone(#[case] metadata: Value, #[case] expected: bool) {
        let object: AzureCluster =
            serde_json::from_value(json!({"metadata": metadata, "spec": {"location": "eastus"}})).unwrap();
        assert_eq!(is_left_alone(&object), expected);
    }
}
