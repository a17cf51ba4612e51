//! VSphereVM: one object, one virtual machine. The plan is `capstan_core::vm::plan`.
//!
//! Invariant: the VM of an object has the object's UID as its instance UUID, or the BIOS UUID that the object kept through a
//! move to another management cluster (`core/vm/ownership.rs`). Observe searches it by both before a clone is planned.

mod apply;
mod clone;
mod ip_claims;
mod observe;
mod outcome;
mod pending;
mod placement;
mod room;
mod state;
mod status;
mod teardown;
mod turns;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_core::backoff::exponential;
use capstan_core::vm::{self as plan, CloneLimits, DesiredVm, Observation, Step};
use capstan_kube::objects::references;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope, Trigger};
use capstan_kube::workload::Workloads;
use capstan_kube::{Cache, Context};
use capstan_vsphere::Vcenter;
use futures::StreamExt;
use jiff::Timestamp;
use kube::{Resource, ResourceExt};

use crate::affinity::Affinity;
use crate::credentials::{Credentials, check_machine_server, server_of};
use crate::error::Error;
use crate::ipam::{ClaimedAddress, Ipam};
use crate::observed::Resolved;
use crate::owner_cluster::{Clusters, cluster_name};

use clone::PreparedClone;
use state::VmState;
use status::Notes;
use turns::CloneTurns;

/// A failure that a user must correct, perhaps outside Kubernetes, is retried after this long at first, and this often at last.
const FIRST_RECHECK: Duration = Duration::from_secs(5);
const RECHECK: Duration = Duration::from_secs(60);
/// A failure that may go away by itself is retried after this long at first, then after twice as long, up to [`RECHECK`].
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The name of this controller.
pub const NAME: &str = Controller::NAME;

/// The controller of VSphereVMs.
struct Controller {
    context: Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    workloads: Workloads,
    affinity: Affinity,
    ipam: Ipam,
    turns: CloneTurns,
    /// The room that clones under way will take.
    room: room::Room,
    vms: Cache<VSphereVM>,
    trigger: Trigger<VSphereVM>,
    started: Timestamp,
}

/// How much is done at once.
pub struct Limits {
    /// Reconciles.
    pub concurrency: u16,
    /// Clones under way.
    pub clones: CloneLimits,
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    workloads: Workloads,
    affinity: Affinity,
    cache: Cache<VSphereVM>,
    limits: Limits,
) {
    let (by_infrastructure, by_cluster, by_secret) = (cache.clone(), cache.clone(), cache.clone());
    let (of_infrastructure, near) = (clusters.clone(), affinity.clone());
    let (with_secrets, secrets_of) = (clusters.clone(), credentials.clone());
    let secrets = credentials.changes().flat_map(move |secret| {
        let needs = |vm: &VSphereVM| {
            let cluster = with_secrets.infrastructure_behind(vm);
            cluster.is_some_and(|cluster| secrets_of.secret_of(&cluster).as_ref() == Some(&secret))
        };
        futures::stream::iter(references(&by_secret.select(None, |vm| is_busy(vm) && needs(vm))))
    });
    let vms = cache.clone();
    let reconciler = Reconciler::new(context, cache)
        .concurrency(limits.concurrency)
        .watches(&clusters.infrastructure, move |changed| {
            let of_it = |vm: &VSphereVM| {
                let cluster = of_infrastructure.infrastructure_behind(vm);
                cluster.is_some_and(|cluster| cluster.name_any() == changed.name_any())
            };
            references(&by_infrastructure.select(changed.namespace().as_deref(), |vm| {
                of_it(vm) && (is_busy(vm) || near.is_outside(vm))
            }))
        })
        .watches(&clusters.clusters, move |changed| {
            let name = changed.name_any();
            let concerns = |vm: &VSphereVM| is_busy(vm) || status::shows_paused(vm) != changed.is_paused();
            let of_it = |vm: &VSphereVM| concerns(vm) && cluster_name(vm).as_ref() == Some(&name);
            references(&by_cluster.select(changed.namespace().as_deref(), of_it))
        })
        .on(secrets);
    let controller = Controller {
        context: context.clone(),
        clusters,
        credentials,
        workloads,
        affinity,
        ipam: Ipam::default(),
        turns: CloneTurns::new(limits.clones),
        room: room::Room::default(),
        vms,
        trigger: reconciler.trigger(),
        started: context.clock.now(),
    };
    reconciler.run(Arc::new(controller)).await;
}

/// The plan's observation, what its steps are carried out with, and what the status reports.
struct Observed {
    plan: Observation,
    vcenter: Option<Vcenter>,
    desired: DesiredVm,
    resolved: Resolved,
    /// The clone, as long as the VM does not exist.
    clone: Option<PreparedClone>,
    /// The addresses that the VM claims from pools.
    claims: Vec<ClaimedAddress>,
    /// The name of the ESXi host that the VM runs on.
    host: Option<String>,
    notes: Notes,
}

impl Observed {
    /// Nothing to do before something changes, or this much time has passed.
    fn idle(requeue: Option<Duration>) -> Self {
        Self {
            plan: Observation::Idle(requeue),
            vcenter: None,
            desired: DesiredVm::default(),
            resolved: Resolved::default(),
            clone: None,
            claims: Vec::new(),
            host: None,
            notes: Notes::default(),
        }
    }

    fn vcenter(&self) -> Result<&Vcenter, Error> {
        let missing = || Error::NotReady("there is no session with vCenter".to_owned());
        self.vcenter.as_ref().ok_or_else(missing)
    }
}

impl Reconcile for Controller {
    type Object = VSphereVM;
    type State = VmState;
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "vspherevm";
    const COMPONENT: &'static str = "vspherevm-controller";

    async fn observe(&self, scope: &mut Scope<VSphereVM>, state: &mut VmState) -> Result<Option<Observed>, Error> {
        let result = self.observe_vm(scope, state).await;
        let observed = match result {
            Err(error) => {
                let retry = self.retry_after(&scope.object, state, &error);
                let Some(retry) = retry else { return Err(error) };
                let mut observed = Observed::idle(Some(retry));
                observed.notes.failure = Some(error);
                Some(observed)
            }
            Ok(observed) => observed,
        };
        Ok(observed.map(|mut observed| {
            observed.notes.take(state);
            observed
        }))
    }

    fn plan(observed: &Observed, now: Timestamp) -> Plan<Step> {
        plan::plan(&observed.plan, now)
    }

    async fn apply(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Outcome, Error> {
        match self.apply_step(step, observed, scope, state).await {
            Err(error) => {
                let retry = self.retry_after(&scope.object, state, &error);
                let Some(retry) = retry else { return Err(error) };
                observed.notes.failure = Some(error);
                Ok(Outcome::Wait(Some(retry)))
            }
            outcome => outcome,
        }
    }

    fn status(
        vm: &VSphereVM,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereVM> {
        status::status(vm, observed.map(|observed| &observed.notes), result, now)
    }
}

impl Controller {
    async fn session(&self, vm: &VSphereVM) -> Result<Vcenter, Error> {
        let cluster = self.clusters.infrastructure_of(self.clusters.of(vm)?.as_ref())?;
        let spec = &vm.spec.clone_spec;
        let zone = self.affinity.zone_server(vm);
        let server = check_machine_server(spec.server.as_deref(), &server_of(&cluster)?, zone.as_deref())?;
        let own = spec.thumbprint.as_deref();
        match self.credentials.session_with(&cluster, &server, own).await {
            // Nobody brings the cluster's new thumbprint to a VSphereVM that is being deleted, or that has no owner.
            Err(error) if is_other_certificate(&error) && is_alone(vm) && self.credentials.verifies(&cluster) => {
                self.credentials.session_with(&cluster, &server, None).await
            }
            session => session,
        }
    }

    /// Returns when a failure is retried that the runtime's backoff does not retry soon enough: no event comes when a user
    /// corrects something in vCenter. `None`: the runtime's backoff decides.
    fn retry_after(&self, vm: &VSphereVM, state: &mut VmState, error: &Error) -> Option<Duration> {
        state.give_up_turn();
        if !error.is_reported() {
            return None;
        }
        state.stale();
        let terminal = error.class() == Class::Terminal;
        if !terminal && !error.is_refusal() {
            return None;
        }
        state.failures = state.failures.saturating_add(1);
        let wait = if terminal {
            recheck(state.failures)
        } else {
            retry(state.failures)
        };
        let task = matches!(error.vsphere(), Some(capstan_vsphere::Error::TaskFailed { .. }));
        if task || !terminal {
            // Our own writes ask for reconciles too: without this each would start the next task at once.
            state.retry_at = Some((self.context.clock.instant() + wait, self.version_of_others(vm)));
        }
        tracing::warn!(%error, retry = ?wait, "a step for the virtual machine failed and is retried");
        Some(wait)
    }

    /// Returns a hash of the object and its cluster that status writes of ours do not change.
    fn version_of_others(&self, vm: &VSphereVM) -> u64 {
        let mut hasher = DefaultHasher::new();
        let cluster = self.clusters.infrastructure_behind(vm);
        let cluster = cluster.map(|cluster| (cluster.uid(), cluster.meta().generation));
        let meta = vm.meta();
        (marks(vm), meta.generation, meta.deletion_timestamp.is_some(), cluster).hash(&mut hasher);
        hasher.finish()
    }
}

fn is_alone(vm: &VSphereVM) -> bool {
    vm.meta().deletion_timestamp.is_some() || vm.owner_references().is_empty()
}

fn is_other_certificate(error: &Error) -> bool {
    matches!(error.vsphere(), Some(capstan_vsphere::Error::Thumbprint { .. }))
}

/// Whether a change of its cluster may concern a VM.
fn is_busy(vm: &VSphereVM) -> bool {
    !is_ready(vm) || vm.meta().deletion_timestamp.is_some()
}

fn is_ready(vm: &VSphereVM) -> bool {
    vm.status.as_ref().is_some_and(|status| status.ready)
}

/// Returns a hash of annotations, labels and the way to vCenter: a change of them asks for another read of the VM.
fn marks(vm: &VSphereVM) -> u64 {
    let mut hasher = DefaultHasher::new();
    let spec = &vm.spec.clone_spec;
    (vm.annotations(), vm.labels(), &spec.server, &spec.thumbprint).hash(&mut hasher);
    hasher.finish()
}

/// Returns when to retry a failure that may go away by itself.
fn retry(failures: u32) -> Duration {
    exponential(FIRST_RETRY, RECHECK, failures)
}

/// Returns when to retry a failure that a user must correct.
fn recheck(failures: u32) -> Duration {
    exponential(FIRST_RECHECK, RECHECK, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_retried_less_and_less_often() {
        let seconds = |failures| recheck(failures).as_secs();
        assert_eq!([1, 2, 3, 4, 5, 40].map(seconds), [5, 10, 20, 40, 60, 60]);
        let seconds = |failures| retry(failures).as_secs();
        assert_eq!([1, 2, 3, 4, 5, 6, 7, 40].map(seconds), [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
