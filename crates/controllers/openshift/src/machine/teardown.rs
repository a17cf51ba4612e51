//! Deletes a machine: hooks, drain, the virtual machine, and everything that was made for it.
//!
//! Invariants: a disk marked Detach is never deleted, and is seen to survive; the finalizer goes only when Azure has
//! confirmed that the virtual machine, its OS disk, its interface and every disk marked Delete are gone. An account that
//! may not read disks cannot be asked for that confirmation: then Azure's answer to the deletion counts, and an event
//! says so. It does not ask for the interface either where Azure was to delete it with the virtual machine and has done so
//! with all disks.

use super::disk_deletion::{self, Disks};
use super::error::Error;
use super::ids::Ids as _;
use super::network::{Network, Ownership};
use super::spec::is_unreadable;
use super::state::State;
use super::status::{self, Deletion, Note, Notes};
use super::{Controller, Observed, Target, availability_set, disk_list, disks, drain, observe};
use capstan_api::openshift::{MACHINE_FINALIZER, Machine};
use capstan_azure::client::When;
use capstan_azure::model::{VirtualMachine, VirtualMachineUpdate};
use capstan_azure::{Owned, Progress as Polled, Request, ResourceId};
use capstan_core::drain::Drained;
use capstan_core::machine::disks::{self as disposition, Known};
use capstan_core::machine::failure::{self, Report};
use capstan_core::machine::{self, LiveVm, Progress, VmDeletion};
use capstan_kube::objects;
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt as _};
use std::time::Duration;

/// How far the deletion in Azure is.
#[derive(Clone, Debug, Default)]
pub struct Teardown {
    pub vm_gone: bool,
    /// Another virtual machine has the machine's name.
    foreign_vm: bool,
    /// Azure deletes the interface together with the virtual machine.
    interface_goes: bool,
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

/// Whether Azure deletes an interface together with the virtual machine.
fn goes_with(vm: &VirtualMachine, interface: &ResourceId) -> bool {
    let profile = vm.properties.as_ref().and_then(|vm| vm.network_profile.as_ref());
    let interfaces = profile.and_then(|profile| profile.network_interfaces.as_deref());
    interfaces.unwrap_or_default().iter().any(|one| {
        let id = one.id.as_deref().and_then(|id| id.parse::<ResourceId>().ok());
        let option = one.properties.as_ref().and_then(|one| one.delete_option.as_deref());
        id.as_ref() == Some(interface) && option.is_some_and(|option| option.eq_ignore_ascii_case("Delete"))
    })
}

/// Returns what the deletion of this virtual machine depends on.
fn live_vm(
    vm: &VirtualMachine,
    target: &Target,
    scope: &Scope<Machine>,
) -> LiveVm<Owned<VirtualMachine>, VirtualMachineUpdate> {
    let Target { spec, names, .. } = target;
    let machine = scope.object.as_ref();
    let (recorded, known) = (status::recorded_vm(machine), status::attached(machine));
    let (disks, vm_id) = (disks::attached(spec, names, vm), status::id_of(vm));
    let is_unrecorded = recorded != Some(names.vm_id()) || disposition::is_unrecorded(spec, names, &known, &disks);
    let is_writable = || status::holding(machine, vm_id.as_ref(), &disks, scope.now()).status != machine.status;
    LiveVm {
        owned: Owned::by_tags(vm, |_| names.owns_vm(vm, recorded.as_ref())).ok(),
        is_unrecorded: is_unrecorded && is_writable(),
        keep_disks: disks::detach_before_delete(spec, names, vm),
    }
}

impl Controller {
    /// Notes the failure of a step of the deletion, as [`failure::of_deletion`] decides, for the retry.
    pub(super) fn deleted(
        &self,
        result: Result<Outcome, Error>,
        observed: &mut Observed,
        scope: &Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Err(error) = result else { return result };
        let failure::Deletion { begin_anew, report } = failure::of_deletion(error.failure());
        if begin_anew {
            state.begin_teardown_anew();
        }
        let error = error.retryable();
        match report {
            Report::Nothing => {}
            Report::Phase => observed.notes.deleting(None),
            // A namespace in deletion takes no events: the status has the reason, too.
            Report::Reason => {
                self.metrics
                    .failed("FailedDelete", scope.object.as_ref(), "DeleteError");
                observed.notes.push(Note::Deleting(Deletion {
                    error: Some(error.to_string()),
                    ..Deletion::default()
                }));
            }
        }
        Err(error)
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
        tracing::warn!(why, "Capstan deletes nothing in Azure for the machine");
        state.teardown = Some(Box::new(Teardown::nothing_to_delete()));
        Ok(None)
    }

    /// Deletes the virtual machine, if it is the machine's.
    pub(super) async fn delete_vm(
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
        if drained.is_skipped() && !std::mem::replace(&mut state.skip_reported, true) {
            let event = EventNote::normal("DrainSkipped", "Node drain skipped");
            observed.notes.event(event);
        }
        // The proof is for this machine and no other.
        let vm = client.get_vm(&names.group, drained.machine()).await.map_err(doing())?;
        let live = vm.as_ref().map(|vm| live_vm(vm, &target, scope));
        let owned = match machine::delete_vm(live) {
            VmDeletion::Gone => {
                teardown.vm_gone = true;
                return Ok(Outcome::Observe);
            }
            VmDeletion::Foreign => {
                tracing::warn!("the virtual machine is not deleted: the machine does not own it");
                (teardown.vm_gone, teardown.foreign_vm) = (true, true);
                return Ok(Outcome::Observe);
            }
            VmDeletion::Record => {
                let vm = vm.unwrap_or_default();
                let (disks, vm_id) = (disks::attached(&target.spec, names, &vm), status::id_of(&vm));
                observed.notes.push(Note::Holding { vm_id, disks });
                return Ok(Outcome::Observe);
            }
            VmDeletion::KeepDisks { change, owned } => {
                // The list of disks is changed as a whole: a volume that was attached or detached since it was read counts.
                let etag = vm.as_ref().and_then(|vm| vm.etag.clone());
                let when = etag.map_or(When::Always, When::Unchanged);
                let send = async {
                    let put = client.patch_vm(&names.group, &names.machine, &change, when).await?;
                    Ok(put.operation)
                };
                teardown.detached = Request::NotSent;
                match teardown.detached.finish(client, send).await {
                    Ok(None) => owned,
                    Ok(Some(after)) => return Ok(Outcome::Wait(Some(after))),
                    Err(error) if error.is_precondition_failed() => return Ok(Outcome::Observe),
                    Err(error) => return Err(doing()(error)),
                }
            }
            VmDeletion::Delete(owned) => owned,
        };
        teardown.interface_goes = vm.as_ref().is_some_and(|vm| goes_with(vm, &names.nic_id()));
        let operation = client.delete_vm(&owned).await.map_err(doing())?;
        teardown.vm_gone = operation.is_none();
        state.follow(operation.clone());
        observed.notes.push(Note::Deleting(Deletion {
            drained: drain::was_drained(&drained).then_some(Ok(())),
            operation: operation.clone(),
            vm_id: vm.as_ref().and_then(status::id_of),
            ..Deletion::default()
        }));
        Ok(match operation {
            Some(operation) => Outcome::Wait(Some(operation.due_in(scope.now()))),
            None => Outcome::Observe,
        })
    }

    pub(super) async fn poll_vm_deletion(
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
                    observed.notes.push(Note::OperationOver);
                }
                Err(Error::Azure {
                    doing: format!("failed to delete vm {}", scope.name()),
                    source,
                })
            }
        }
    }

    /// Deletes disks, interface and public address, all at once.
    pub(super) async fn delete_resources(
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
        let Teardown {
            disks,
            network,
            interface_goes,
            ..
        } = teardown.as_mut();
        let machine = scope.object.clone();
        let delete_disks = self.delete_disks(&machine, &target, had_vm, disks, &mut observed.notes);
        let (deleted, network) = if *interface_goes {
            let deleted = delete_disks.await;
            if matches!(deleted, Ok(None)) && disks.unreadable && disks.went_before {
                network.interface_went();
            }
            (deleted, network.delete(&target, ownership).await)
        } else {
            futures::join!(delete_disks, network.delete(&target, ownership))
        };
        let wait = [deleted?, network?].into_iter().flatten().min();
        teardown.resources = match wait {
            Some(after) => Resources::PendingUntil(scope.now() + after),
            None => Resources::Deleted,
        };
        if let (Some(_), true) = (wait, state.drained.is_some()) {
            // The next process must not drain again.
            observed.notes.deleting(Some(Ok(())));
        }
        Ok(wait.map_or(Outcome::Observe, |after| Outcome::Wait(Some(after))))
    }

    async fn delete_disks(
        &self,
        machine: &Machine,
        target: &Target,
        had_vm: bool,
        disks: &mut Disks,
        notes: &mut Notes,
    ) -> Result<Option<Duration>, Error> {
        let Target { spec, names, account } = target;
        if disks.disposition.is_none() {
            let attached = status::attached(machine);
            let known = Known {
                attached: &attached,
                had_vm,
            };
            let listing = self
                .disk_lists
                .get(&account.client, &names.group, disk_list::OPTIONAL)
                .await?;
            disks.unreadable = listing.is_none();
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
            notes.event(EventNote::warning("DiskDeletionUnverified", text));
        }
        let (missing, mark) = match &mut disks.disposition {
            Some(disposition) => (
                std::mem::take(&mut disposition.missing),
                std::mem::take(&mut disposition.mark_kept),
            ),
            None => Default::default(),
        };
        for name in mark {
            if let Err(error) = disk_deletion::mark_kept(&account.client, &names.group, &name).await {
                tracing::warn!(%error, disk = name, "the disk is kept, but its tag says that it goes with its machine");
            }
        }
        for name in missing {
            let text = format!(
                "Data Disk {name} was to be kept, but is not in resource group {}",
                names.group
            );
            notes.event(EventNote::warning("DataDiskMissing", text));
        }
        Ok(None)
    }

    /// Deletes the availability set that was made for the machine's set, once it is empty.
    pub(super) async fn delete_availability_set(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        if let Some(target) = self.teardown_target(observed, scope, state).await? {
            availability_set::delete_if_empty(&target).await?;
            state.teardown.get_or_insert_default().availability_set = true;
        }
        Ok(Outcome::Observe)
    }

    /// Nothing is left in Azure: deletes the Node, and removes the finalizer.
    pub(super) async fn release(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
        node: Option<&Node>,
    ) -> Result<Outcome, Error> {
        if let Some(node) = node {
            self.drainer.stop(&node.name_any());
            let nodes: Api<Node> = Api::all(self.context.client.clone());
            objects::delete_exactly(&nodes, node).await?;
        }
        let disposition = state
            .teardown
            .as_ref()
            .and_then(|teardown| teardown.disks.disposition.as_ref());
        // Without its finalizer the object may be gone before the runtime could report.
        for text in disposition::deleted_messages(&scope.name(), disposition) {
            self.events.normal(scope.object.as_ref(), "Deleted", text).await;
        }
        scope.remove_finalizer(MACHINE_FINALIZER).await?;
        Ok(Outcome::Wait(None))
    }
}
