//! Deletes a machine: hooks, drain, the virtual machine, and everything that was made for it.
//!
//! Invariants: a disk marked Detach is never deleted, and is seen to survive; the finalizer goes only when Azure has
//! confirmed that the virtual machine, its OS disk, its interface and every disk marked Delete are gone. An account that
//! may not read disks cannot be asked for that confirmation: then Azure's answer to the deletion counts, and an event
//! says so.

use super::error::Error;
use super::names::Ids as _;
use super::network::{Network, Ownership};
use super::spec::is_unreadable;
use super::state::State;
use super::status::{self, Deletion};
use super::{Controller, Observed, Target, disks, observe};
use crate::sizes;
use capstan_api::openshift::{MACHINE_FINALIZER, Machine};
use capstan_azure::{Client, Owned, Progress as Polled, Request};
use capstan_core::drain::{self, Drained, Options as DrainOptions};
use capstan_core::machine::disks::{self as disposition, Disposition, Known};
use capstan_core::machine::{self, Progress, Step};
use capstan_kube::drain::Outcome as DrainOutcome;
use capstan_kube::runtime::{Outcome, Scope};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Preconditions};
use std::collections::HashMap;
use std::time::Duration;

/// A control plane node waits for its turn; watches of Nodes end the wait sooner.
const CONTROL_PLANE_TURN: Duration = Duration::from_secs(20);

/// How far the deletion in Azure is.
#[derive(Clone, Debug, Default)]
pub struct Teardown {
    pub vm_gone: bool,
    /// Another virtual machine has the machine's name.
    foreign_vm: bool,
    /// The change that keeps disks from going with the virtual machine.
    detached: Request<()>,
    disks: Disks,
    network: Network,
    resources: Resources,
    availability_set: bool,
}

#[derive(Clone, Copy, Debug, Default)]
enum Resources {
    #[default]
    NotRequested,
    PendingUntil(Timestamp),
    Deleted,
}

impl Teardown {
    pub fn progress(&self, now: Timestamp) -> machine::Teardown {
        machine::Teardown {
            vm_gone: self.vm_gone,
            resources: match self.resources {
                Resources::NotRequested => Progress::NotRequested,
                Resources::PendingUntil(due) => {
                    Progress::Pending(due.duration_since(now).try_into().unwrap_or_default())
                }
                Resources::Deleted => Progress::Done,
            },
            availability_set: self.availability_set,
        }
    }

    /// Nothing was ever made in Azure.
    fn nothing_to_delete() -> Self {
        Self {
            vm_gone: true,
            resources: Resources::Deleted,
            availability_set: true,
            ..Self::default()
        }
    }
}

/// The disks of one machine.
#[derive(Clone, Debug, Default)]
struct Disks {
    /// Decided once, from one listing.
    disposition: Option<Disposition>,
    stages: HashMap<String, Request<()>>,
    /// Azure did not let us see that they are gone.
    unverified: bool,
}

impl Disks {
    /// Deletes the disks that go, and sees that they are gone. Returns how long to wait, or nothing once they are.
    async fn delete(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let deleted = self.advance(client, group).await;
        if deleted.is_err() && !self.stages.values().any(|stage| matches!(stage, Request::Running(_))) {
            // A fresh listing decides again.
            *self = Self::default();
        }
        deleted
    }

    async fn advance(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let Some(disposition) = &mut self.disposition else {
            return Ok(None);
        };
        let (mut wait, mut failed) = (None, None);
        // One that does not go keeps none of the others.
        for (label, name) in std::mem::take(&mut disposition.delete) {
            let stage = self.stages.entry(name.clone()).or_default();
            match delete_disk(stage, client, group, label, &name).await {
                Ok(Deleted::Verified) => drop(self.stages.remove(&name)),
                Ok(Deleted::Unverified) => {
                    self.unverified = true;
                    self.stages.remove(&name);
                }
                Ok(Deleted::Pending(after)) => {
                    wait = Some(wait.map_or(after, |wait: Duration| wait.min(after)));
                    disposition.delete.push((label, name));
                }
                Err(error) => {
                    failed = failed.or(Some(error));
                    disposition.delete.push((label, name));
                }
            }
        }
        failed.map_or(Ok(wait), Err)
    }
}

enum Deleted {
    Verified,
    /// Azure took the deletion; the account may not read the disk.
    Unverified,
    Pending(Duration),
}

async fn delete_disk(
    stage: &mut Request<()>,
    client: &Client,
    group: &str,
    label: &str,
    name: &str,
) -> Result<Deleted, Error> {
    let doing = || Error::doing(format!("failed to delete {label}: {name}"));
    let finished = stage.finish(client, client.delete_disk(group, name)).await;
    if let Some(after) = finished.map_err(doing())? {
        return Ok(Deleted::Pending(after));
    }
    match client.get_disk(group, name).await {
        Ok(None) => Ok(Deleted::Verified),
        Ok(Some(_)) => {
            *stage = Request::NotSent;
            Err(Error::NotReady(format!(
                "failed to delete {label}: {name}: it is still there"
            )))
        }
        Err(error) if error.arm().is_some_and(|arm| arm.status == 403) => Ok(Deleted::Unverified),
        Err(error) => Err(doing()(error)),
    }
}

impl Controller {
    pub(super) async fn apply_teardown(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        match step {
            Step::ReportHooks => {
                self.report_deletion(scope, None).await?;
                Ok(Outcome::Wait(None))
            }
            Step::AwaitControlPlane(other) => {
                let text = format!("waiting for control plane node {other}: one is drained at a time");
                self.report_deletion(scope, Some(Err(text))).await?;
                Ok(Outcome::Wait(Some(CONTROL_PLANE_TURN)))
            }
            Step::Drain(node) => self.drain(scope, state, &node).await,
            Step::DeleteVm(drained) => {
                if let Some(node) = self.drained_node(observed, &scope.object) {
                    self.drainer.stop(&node);
                }
                let result = self.delete_vm(drained, observed, scope, state).await;
                self.deleted(result, scope, state).await
            }
            Step::PollVmDeletion => {
                let result = self.poll_vm_deletion(observed, scope, state).await;
                self.deleted(result, scope, state).await
            }
            Step::DeleteResources => {
                let result = self.delete_resources(observed, scope, state).await;
                self.deleted(result, scope, state).await
            }
            Step::DeleteAvailabilitySet => {
                let result = self.delete_availability_set(observed, scope, state).await;
                self.deleted(result, scope, state).await
            }
            Step::Release(node) => self.release(scope, state, node.as_deref()).await,
            Step::AddFinalizer
            | Step::PollVm
            | Step::Prepare
            | Step::EnsureAddress
            | Step::EnsureInterfaceAndDisks
            | Step::CreateVm
            | Step::RetryVm
            | Step::AwaitVm
            | Step::RecordRequested
            | Step::RecordProvisioned
            | Step::RecordObservation
            | Step::LinkNode(_)
            | Step::FailMissing
            | Step::FailNameConflict => Ok(Outcome::Observe),
        }
    }

    /// Judges a step of the deletion: what failed is reported and tried again, whatever it is.
    async fn deleted(
        &self,
        result: Result<Outcome, Error>,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let error = match result {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        if error.is_interface_in_use() {
            // The virtual machine came after all: a request for it was carried out late.
            state.teardown = None;
            state.operation = None;
            state.operation_over = true;
        }
        let error = error.retryable();
        if matches!(error, Error::Kube(_)) {
            return Err(error);
        }
        // A pause that Azure asked for was reported when it did.
        let reported = !error.is_throttled_locally();
        // A namespace in deletion takes no events: the status has the error too.
        let why = error.to_string();
        let deletion = Deletion {
            error: reported.then_some(why.as_str()),
            ..Deletion::default()
        };
        let after = status::deleting(&scope.object, &deletion, scope.now());
        self.write_status(scope, &after).await?;
        if reported {
            let text = format!("DeleteError: failed to delete machine {:?}: {error}", scope.name());
            self.metrics
                .failed("FailedDelete", scope.object.as_ref(), "DeleteError");
            self.events.warning(scope.object.as_ref(), "FailedDelete", text).await;
        }
        Err(error)
    }

    /// Writes what the deletion waits for.
    async fn report_deletion(
        &self,
        scope: &mut Scope<Machine>,
        drained: Option<Result<(), String>>,
    ) -> Result<(), Error> {
        let deletion = Deletion {
            drained,
            ..Deletion::default()
        };
        let after = status::deleting(&scope.object, &deletion, scope.now());
        self.write_status(scope, &after).await
    }

    async fn drain(&self, scope: &mut Scope<Machine>, state: &mut State, node: &Node) -> Result<Outcome, Error> {
        let (name, options) = (scope.name(), DrainOptions::default());
        let drained = match self.drainer.drain(&name, node, options, scope.waker()).await? {
            DrainOutcome::Drained(drained) => drained,
            DrainOutcome::Draining { obstacles, again, .. } => {
                let pods = drain::describe(&obstacles);
                self.report_deletion(scope, Some(Err(pods.clone()))).await?;
                let blocked = obstacles
                    .iter()
                    .any(|obstacle| matches!(obstacle.reason, drain::ObstacleReason::DisruptionBudget(_)));
                if blocked {
                    let text = format!("Node {:?} is not drained yet: {pods}", node.name_any());
                    self.events.warning(scope.object.as_ref(), "DrainBlocked", text).await;
                }
                return Ok(Outcome::Wait(Some(again)));
            }
        };
        match drained.reason() {
            drain::Reason::Empty | drain::Reason::NotNeeded(_) => {
                let text = format!("Node {:?} drained", node.name_any());
                self.events.normal(scope.object.as_ref(), "DrainSucceeded", text).await;
            }
            drain::Reason::TimedOut { .. } => {
                let text = format!("Node {:?} is not drained: {drained}", node.name_any());
                self.events.warning(scope.object.as_ref(), "DrainSkipped", text).await;
            }
        }
        state.drained = Some(drained);
        if !scope.object.spec.lifecycle_hooks.pre_terminate.is_empty() {
            self.report_deletion(scope, Some(Ok(()))).await?;
        }
        Ok(Outcome::Observe)
    }

    /// Returns what is needed to talk to Azure. `None`: nothing was ever made there.
    async fn teardown_target(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Option<std::sync::Arc<Target>>, Error> {
        let never = is_unreadable(&scope.object) && !status::may_have_vm(&scope.object);
        let why = match self.target(scope, observed).await {
            Ok(target) if !never => return Ok(Some(target)),
            Ok(_) => "its spec was never readable".to_owned(),
            // Azure has no such group.
            Err(Error::Invalid(why)) => why,
            Err(error) if never => error.to_string(),
            Err(error) => return Err(error),
        };
        tracing::warn!(why, "nothing to delete in Azure");
        state.teardown = Some(Box::new(Teardown::nothing_to_delete()));
        Ok(None)
    }

    /// Deletes the virtual machine, if it is the machine's.
    async fn delete_vm(
        &self,
        drained: Drained,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Some(target) = self.teardown_target(observed, scope, state).await? else {
            return Ok(Outcome::Observe);
        };
        let (client, names) = (&target.account.client, &target.names);
        let doing = || Error::doing(format!("failed to delete vm {}", names.machine));
        state.dependencies = None;
        let teardown = state.teardown.get_or_insert_default();
        if matches!(teardown.detached, Request::Running(_)) {
            let finished = teardown.detached.finish(client, async { Ok(None) }).await;
            if let Some(after) = finished.map_err(doing())? {
                return Ok(Outcome::Wait(Some(after)));
            }
        }
        // The proof is for this machine and no other.
        let Some(vm) = client.get_vm(&names.group, drained.machine()).await.map_err(doing())? else {
            teardown.vm_gone = true;
            return Ok(Outcome::Observe);
        };
        let recorded = status::recorded_vm(&scope.object);
        let owned = match Owned::by_tags(&vm, |_| names.owns_vm(&vm, recorded.as_ref())) {
            Ok(owned) => owned,
            Err(error) => {
                tracing::warn!(%error, "the virtual machine stays");
                (teardown.vm_gone, teardown.foreign_vm) = (true, true);
                return Ok(Outcome::Observe);
            }
        };
        let attached = disks::attached(names, &vm);
        let known = status::attached(&scope.object);
        if recorded != Some(names.vm_id()) || disposition::is_unrecorded(&target.spec, names, &known, &attached) {
            // Once it is gone, nothing else shows that it was the machine's and which disks it had.
            let after = status::holding(&scope.object, &vm, attached, scope.now());
            self.write_status(scope, &after).await?;
        }
        if let Some(update) = disks::detach_before_delete(&target.spec, names, &vm) {
            let send = async {
                let put = client.patch_vm(&names.group, &names.machine, &update).await?;
                Ok(put.operation)
            };
            teardown.detached = Request::NotSent;
            let finished = teardown.detached.finish(client, send).await;
            if let Some(after) = finished.map_err(doing())? {
                return Ok(Outcome::Wait(Some(after)));
            }
        }
        let operation = client.delete_vm(&owned).await.map_err(doing())?;
        teardown.vm_gone = operation.is_none();
        state.follow(operation.clone());
        let id = status::id_of(&vm);
        let deletion = Deletion {
            drained: was_drained(&drained).then_some(Ok(())),
            operation: operation.as_ref(),
            vm_id: id.as_deref(),
            ..Deletion::default()
        };
        let after = status::deleting(&scope.object, &deletion, scope.now());
        self.write_status(scope, &after).await?;
        Ok(match operation {
            Some(operation) => Outcome::Wait(Some(operation.due_in(scope.now()))),
            None => Outcome::Observe,
        })
    }

    async fn poll_vm_deletion(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Some(mut operation) = observe::operation(scope, state) else {
            return Ok(Outcome::Observe);
        };
        let Some(target) = self.teardown_target(observed, scope, state).await? else {
            return Ok(Outcome::Observe);
        };
        match target.account.client.poll(&mut operation).await {
            Ok(Polled::Running(after)) => {
                state.follow(Some(operation));
                Ok(Outcome::Wait(Some(after)))
            }
            Ok(Polled::Done(_)) => {
                state.follow(None);
                state.teardown.get_or_insert_default().vm_gone = true;
                Ok(Outcome::Observe)
            }
            Err(source) => {
                if source.ended_operation() {
                    // Neither memory nor status may keep an operation that is over.
                    state.follow(None);
                    state.operation_over = true;
                    let after = status::without_operation(&scope.object, scope.now());
                    self.write_status(scope, &after).await?;
                }
                Err(Error::Azure {
                    doing: format!("failed to delete vm {}", scope.name()),
                    source,
                })
            }
        }
    }

    /// Deletes disks, interface and public address, all at once.
    async fn delete_resources(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Some(target) = self.teardown_target(observed, scope, state).await? else {
            return Ok(Outcome::Observe);
        };
        let had_vm = status::recorded_vm(&scope.object) == Some(target.names.vm_id());
        let teardown = state.teardown.get_or_insert_default();
        let ownership = Ownership {
            public_ip: target.spec.public_ip || status::may_have_public_ip(&scope.object),
            foreign_vm: teardown.foreign_vm,
            had_vm,
            inherited: status::is_inherited(&scope.object),
        };
        let Teardown { disks, network, .. } = teardown.as_mut();
        let machine = scope.object.clone();
        let (disks, network) = futures::join!(
            self.delete_disks(&machine, &target, had_vm, disks),
            network.delete(&target, ownership)
        );
        let wait = [disks?, network?].into_iter().flatten().min();
        teardown.resources = match wait {
            Some(after) => Resources::PendingUntil(scope.now() + after),
            None => Resources::Deleted,
        };
        if let (Some(_), true) = (wait, state.drained.is_some()) {
            // The next process must not drain again.
            self.report_deletion(scope, Some(Ok(()))).await?;
        }
        Ok(wait.map_or(Outcome::Observe, |after| Outcome::Wait(Some(after))))
    }

    async fn delete_disks(
        &self,
        machine: &Machine,
        target: &Target,
        had_vm: bool,
        disks: &mut Disks,
    ) -> Result<Option<Duration>, Error> {
        let Target { spec, names, account } = target;
        if disks.disposition.is_none() {
            let attached = status::attached(machine);
            let known = Known {
                attached: &attached,
                had_vm,
            };
            let listing = self.disk_lists.get(&account.client, &names.group).await?;
            disks.disposition = Some(match &listing {
                Some(listing) => disposition::decide(spec, names, listing, known),
                None => disposition::decide_unlisted(spec, names, known),
            });
        }
        let wait = disks.delete(&account.client, &names.group).await?;
        if wait.is_some() {
            return Ok(wait);
        }
        if std::mem::take(&mut disks.unverified) {
            let text = "the account may not read disks (Microsoft.Compute/disks/read): Azure accepted the deletion of \
                        the machine's disks, and nobody has seen that they are gone";
            self.events.warning(machine, "DiskDeletionUnverified", text).await;
        }
        let missing = disks
            .disposition
            .as_mut()
            .map(|disposition| std::mem::take(&mut disposition.missing));
        for name in missing.unwrap_or_default() {
            let text = format!(
                "Data Disk {name} was to be kept, but is not in resource group {}",
                names.group
            );
            self.events.warning(machine, "DataDiskMissing", text).await;
        }
        Ok(None)
    }

    /// Deletes the availability set that was made for the machine's set, once it is empty.
    async fn delete_availability_set(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        if let Some(target) = self.teardown_target(observed, scope, state).await? {
            delete_empty_set(&target).await?;
            state.teardown.get_or_insert_default().availability_set = true;
        }
        Ok(Outcome::Observe)
    }

    /// Nothing is left in Azure: deletes the Node, and removes the finalizer.
    async fn release(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
        node: Option<&Node>,
    ) -> Result<Outcome, Error> {
        if let Some(node) = node {
            self.drainer.stop(&node.name_any());
            self.delete_node(node).await?;
        }
        let disposition = state
            .teardown
            .as_ref()
            .and_then(|teardown| teardown.disks.disposition.as_ref());
        let kept = disposition
            .map(|disposition| disposition.keep.clone())
            .unwrap_or_default();
        for text in disposition::deleted_messages(&scope.name(), &kept) {
            self.events.normal(scope.object.as_ref(), "Deleted", text).await;
        }
        scope.remove_finalizer(MACHINE_FINALIZER).await?;
        Ok(Outcome::Wait(None))
    }

    async fn delete_node(&self, node: &Node) -> Result<(), Error> {
        let api: Api<Node> = Api::all(self.context.client.clone());
        let same = Preconditions {
            uid: node.uid(),
            resource_version: None,
        };
        let params = DeleteParams::default().preconditions(same);
        match api.delete(&node.name_any(), &params).await {
            Ok(_) => Ok(()),
            Err(error) if matches!(capstan_kube::error::code(&error), Some(404 | 409)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the proof comes from a drain, so that the condition says so.
fn was_drained(drained: &Drained) -> bool {
    match drained.reason() {
        drain::Reason::Empty | drain::Reason::TimedOut { .. } => true,
        drain::Reason::NotNeeded(reason) => *reason == drain::NotNeeded::Recorded,
    }
}

async fn delete_empty_set(target: &Target) -> Result<(), Error> {
    let Target { spec, names, account } = target;
    let own = spec.availability_set.as_deref().is_some_and(|name| !name.is_empty());
    let zone = spec.zone.as_deref().is_some_and(|zone| !zone.is_empty());
    let Some(name) = names
        .availability_set()
        .filter(|_| !own && !zone && spec.spot_vm_options.is_none())
    else {
        return Ok(());
    };
    let client = &account.client;
    let doing = || Error::doing(format!("failed to delete availability set {name}"));
    // Known from the cached catalogue: where sizes have zones, no set was made.
    let region = &names.location;
    match client.size(region, spec.vm_size.as_deref().unwrap_or_default()).await {
        Ok(None) => return Ok(()),
        Ok(Some(size)) if !size.zones.is_empty() => return Ok(()),
        // An account that may not read the catalogue looks for the set itself.
        Err(error) if !sizes::is_unreadable(&error) => return Err(doing()(error)),
        _ => {}
    }
    let found = client.get_availability_set(&names.group, &name).await;
    let Some(set) = found.map_err(doing())? else {
        return Ok(());
    };
    let Ok(owned) = Owned::by_tags(&set, |tags| names.has_made(Some(tags), true)) else {
        return Ok(());
    };
    let members = set
        .properties
        .and_then(|properties| properties.virtual_machines)
        .unwrap_or_default();
    if !members.is_empty() {
        return Ok(());
    }
    match client.delete_availability_set(&owned).await {
        // Another machine has joined it meanwhile.
        Err(error) if error.arm().is_some_and(|arm| arm.status == 409) => Ok(()),
        result => result.map_err(doing()),
    }
}
