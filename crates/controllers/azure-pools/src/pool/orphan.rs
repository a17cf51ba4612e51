//! The teardown of a pool whose cluster is gone.
//!
//! Invariant: another's scale set is never touched: only the one that is recorded as the pool's own, under the pool's name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool};
use capstan_azure::ResourceId;
use capstan_core::pool::{self, Mode};
use capstan_core::{Class, Classified};
use capstan_kube::capi::MachinePool;
use capstan_kube::runtime::{EventNote, Scope};
use kube::ResourceExt;

use super::member::{Frame, machine};
use super::observe::Observed;
use super::owners::{Owners, SetName, cluster_label};
use super::state::{Kind, State};
use super::{Actor, FINALIZER};
use crate::Controller;
use crate::error::Error;
use crate::model;

/// While objects go away, their watch wakes us; this is for a watch that was cut off, and for a lost sign-in.
const RECHECK: Duration = Duration::from_secs(30);

/// The finalizer of earlier versions of Capstan. CAPZ does not remove it.
pub(super) const OLD_FINALIZER: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io";

/// Whether the pool carries a finalizer that only we remove.
pub fn is_ours(pool: &AzureMachinePool) -> bool {
    let ours = |finalizer: &String| [FINALIZER, OLD_FINALIZER].contains(&finalizer.as_str());
    pool.finalizers().iter().any(ours)
}

/// Observes a pool that is deleted after its cluster. Its scale set goes as long as somebody can sign in for it; else the
/// object stays and reports the scale set that is left.
pub(super) async fn observe(
    controller: &Controller,
    scope: &mut Scope<AzureMachinePool>,
    state: &mut State,
    missing: &str,
) -> Result<Observed, Error> {
    let set = scale_set(&scope.object, state);
    let owners = Owners {
        machine_pool: Arc::default(),
        cluster: Arc::default(),
        azure_cluster: cluster(controller, scope, set.as_ref()).unwrap_or_default(),
        set: set.as_ref().map(name).unwrap_or_default(),
        cluster_name: cluster_label(controller, &scope.object, &MachinePool::default()),
        gone: true,
    };
    let signed_in = state.client.is_some() || owners.azure_cluster.metadata.name.is_some();
    let mut actor = Actor::new(controller, scope, state, owners);
    let Some(set) = set else {
        return actor.observe_orphan().await;
    };
    let left = match signed_in {
        true => match actor.refresh_set().await {
            Ok(()) => return actor.observe_orphan().await,
            Err(error @ Error::Kube(_)) => return Err(error),
            Err(error) => {
                actor.note_error(&error);
                error
            }
        },
        false => Error::NotReady(format!(
            "scale set {set} may still run, and Capstan cannot sign in to Azure: {missing}; create it again, or delete the \
             scale set and then the finalizer {FINALIZER}"
        )),
    };
    let message = format!("scale set {set} is not deleted yet: {left}");
    actor.state.events.push(EventNote::warning("ScaleSetLeft", message));
    let mut observed = Observed::new(actor.owners.clone(), Mode::WithoutCloud, RECHECK);
    if left.class() == Class::Terminal {
        observed.requeue = controller.context.resync;
    }
    observed.error = Some(left);
    Ok(observed)
}

impl Actor<'_> {
    async fn refresh_set(&mut self) -> Result<(), Error> {
        self.cloud().await?.refresh_set().await
    }

    async fn observe_orphan(&mut self) -> Result<Observed, Error> {
        let mut observed = Observed::new(self.owners.clone(), Mode::Orphaned, RECHECK);
        observed.members = self.orphans().await?;
        let set = self.scale_set();
        let (default, none) = (set.clone().unwrap_or_default(), Default::default());
        let frame = Frame {
            model: "",
            set: &default,
            make: &default.make,
            deleting: &none,
            updating: &none,
            failed_updates: &BTreeMap::new(),
            updates_end: true,
            updated: &Default::default(),
            spot: false,
            balanced: false,
            teardown: true,
        };
        observed.plan.machines = observed.members.iter().map(|member| machine(member, &frame)).collect();
        observed.plan.scale_set = set.map(|set| pool::ScaleSet {
            capacity: set.capacity,
            deleting: self.state.busy(Kind::Remove),
            ..pool::ScaleSet::default()
        });
        observed.cloud = self.state.summary(&self.owners.set);
        observed.plan.name_taken = self.state.foreign.is_some();
        self.note_foreign(&mut observed);
        Ok(observed)
    }
}

/// Returns the scale set that is recorded as the pool's.
fn scale_set(pool: &AzureMachinePool, state: &State) -> Option<ResourceId> {
    let known = || state.snapshot.as_ref()?.set.as_ref().map(|set| set.id.clone());
    let id: ResourceId = pool.spec.provider_id.clone().or_else(known)?.parse().ok()?;
    let named = id.name().eq_ignore_ascii_case(&model::set_name(pool));
    (named && id.kind().eq_ignore_ascii_case("virtualMachineScaleSets")).then_some(id)
}

fn name(set: &ResourceId) -> SetName {
    SetName {
        group: set.group.clone(),
        name: set.name().to_owned(),
    }
}

/// Returns an AzureCluster that has outlived its Cluster, by the group and the subscription of its machines.
fn cluster(
    controller: &Controller,
    scope: &Scope<AzureMachinePool>,
    set: Option<&ResourceId>,
) -> Option<Arc<AzureCluster>> {
    let set = set?;
    let same = |cluster: &AzureCluster| {
        let subscription = cluster.spec.subscription_id.as_deref().unwrap_or_default();
        model::group(cluster, &cluster.name_any()).eq_ignore_ascii_case(&set.group)
            && subscription.eq_ignore_ascii_case(&set.subscription)
    };
    let clusters = controller.azure_clusters.select(Some(&scope.key.namespace), same);
    clusters.into_iter().next()
}
