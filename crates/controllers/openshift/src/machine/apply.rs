//! Carries out the steps of a plan, and reports what could not be done.

use super::create::Part;
use super::error::Error;
use super::ids::Ids as _;
use super::state::State;
use super::status::{Failed, Note, Requested, Shown};
use super::{Controller, Observed, Target, check, disks, internal_balancer, node, observe, status};
use capstan_api::openshift::{MACHINE_FINALIZER, Machine};
use capstan_azure::client::When;
use capstan_azure::model::VirtualMachine;
use capstan_azure::{Operation, Progress};
use capstan_core::Classified as _;
use capstan_core::machine::failure::{self, Creation};
use capstan_core::machine::{NodeLookup, Step};
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use k8s_openapi::api::core::v1::{Node, NodeAddress};
use kube::{Api, ResourceExt as _};
use std::time::Duration;

/// How soon to ask again about a change that Azure shows no operation for.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// A control plane node waits for its turn; watches of Nodes end the wait sooner.
const CONTROL_PLANE_TURN: Duration = Duration::from_secs(20);

impl Controller {
    /// Carries out a step. One that has something to report ends the reconcile: the runtime reports it, and the next
    /// reconcile plans with it.
    pub(super) async fn apply_step(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        match self.carry_out(step, observed, scope, state).await? {
            Outcome::Observe if !observed.notes.is_empty() => Ok(Outcome::Wait(Some(Duration::ZERO))),
            outcome => Ok(outcome),
        }
    }

    async fn carry_out(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        match step {
            Step::AddFinalizer(_) => {
                scope.add_finalizer(MACHINE_FINALIZER).await?;
                Ok(Outcome::Observe)
            }
            Step::PollVm => self.poll_vm(observed, scope, state).await,
            Step::Prepare => {
                let result = self.prepare(observed, scope, state).await;
                self.created(result, observed, scope, state).await
            }
            Step::EnsureAddress => {
                let result = self.ensure(Part::Address, observed, scope, state).await;
                self.created(result, observed, scope, state).await
            }
            Step::EnsureInterfaceAndDisks => {
                let result = self.ensure(Part::InterfaceAndDisks, observed, scope, state).await;
                self.created(result, observed, scope, state).await
            }
            Step::CreateVm => {
                let result = self.request_vm(When::Absent, observed, scope, state).await;
                self.created(result, observed, scope, state).await
            }
            Step::RetryVm => {
                let result = self.request_vm(When::Always, observed, scope, state).await;
                self.created(result, observed, scope, state).await
            }
            Step::AwaitVm => {
                let target = self.target(scope, observed).await?;
                let begun = Operation::of_vm("PUT", &target.names.vm_id(), scope.now() + POLL_INTERVAL);
                state.follow(Some(begun));
                Ok(Outcome::Wait(Some(POLL_INTERVAL)))
            }
            Step::RecordRequested => self.record_requested(observed, scope).await,
            Step::RecordProvisioned => self.record_provisioned(observed, scope, state).await,
            Step::RecordObservation => self.record_observation(observed, scope, state).await,
            Step::LinkNode(node) => {
                self.apply_node_metadata(scope, &node).await?;
                observed.notes.push(Note::Linked(node::reference(&node)));
                Ok(Outcome::Done)
            }
            Step::FailMissing => {
                let failed = Failed {
                    reason: "UpdateError",
                    message: "can't find created instance".to_owned(),
                    event: "FailedUpdate",
                };
                self.fail(failed, observed, scope, state).await
            }
            Step::FailNameConflict => {
                let name = scope.name();
                let why = format!("a virtual machine named {name} exists already and was not made for this machine");
                self.refuse(&why, observed, scope, state).await
            }
            Step::FailUnfinished => {
                let why = "Azure could not finish it, its provisioning state is Failed";
                self.refuse(why, observed, scope, state).await
            }
            Step::AwaitDrainHooks => {
                observed.notes.deleting(None);
                let text = "Drain blocked by pre-drain hook";
                observed.notes.event(EventNote::normal("DrainBlocked", text));
                Ok(Outcome::Wait(None))
            }
            Step::AwaitTerminateHooks => {
                observed.notes.deleting(None);
                Ok(Outcome::Wait(None))
            }
            Step::AwaitControlPlane(other) => {
                let text = format!("waiting for control plane node {other}: one is drained at a time");
                observed.notes.deleting(Some(Err(text)));
                Ok(Outcome::Wait(Some(CONTROL_PLANE_TURN)))
            }
            Step::Drain(node) => self.drain(&node, observed, scope, state).await,
            Step::DeleteVm(drained) => {
                if let Some(node) = self.drained_node(observed, &scope.object) {
                    self.drainer.stop(&node);
                }
                let result = self.delete_vm(drained, observed, scope, state).await;
                self.deleted(result, observed, scope, state)
            }
            Step::PollVmDeletion => {
                let result = self.poll_vm_deletion(observed, scope, state).await;
                self.deleted(result, observed, scope, state)
            }
            Step::DeleteResources => {
                let result = self.delete_resources(observed, scope, state).await;
                self.deleted(result, observed, scope, state)
            }
            Step::DeleteAvailabilitySet => {
                let result = self.delete_availability_set(observed, scope, state).await;
                self.deleted(result, observed, scope, state)
            }
            Step::Release(node) => self.release(scope, state, node.as_deref()).await,
        }
    }

    /// Notes the failure of a step of the creation, as [`failure::of_creation`] decides.
    async fn created(
        &self,
        result: Result<Outcome, Error>,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Err(error) = result else { return result };
        state.user_data = None;
        let is_begun = status::of(&scope.object).phase.is_some();
        match failure::of_creation(error.failure(), is_begun) {
            Creation::Retry => Err(error),
            Creation::ReportAndRetry => {
                self.metrics
                    .failed("FailedCreate", scope.object.as_ref(), "CreateError");
                observed
                    .notes
                    .push(Note::NotCreated(not_created(&scope.name(), &error.to_string())));
                Err(error)
            }
            Creation::Fail => self.refuse(&error.to_string(), observed, scope, state).await,
        }
    }

    /// Returns whether there was anything to write.
    async fn write_object(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
        after: &Machine,
    ) -> Result<bool, Error> {
        let written = scope.write_object(after, Lock::Open).await?;
        if written {
            state.wrote(&scope.object);
        }
        Ok(written)
    }

    async fn poll_vm(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let Some(mut operation) = observe::operation(scope, state) else {
            return Ok(Outcome::Observe);
        };
        let target = self.target(scope, observed).await?;
        match target.account.client.poll(&mut operation).await {
            Ok(Progress::Running(after)) => {
                state.follow(Some(operation));
                Ok(Outcome::Wait(Some(after)))
            }
            Ok(Progress::Done(_)) => {
                state.follow(None);
                if status::vm_id(&scope.object).is_none() {
                    // The status was never written: it is filled from the virtual machine.
                    state.may_exist = true;
                    return Ok(Outcome::Observe);
                }
                state.observed(&scope.object, scope.instant());
                self.record_provisioned(observed, scope, state).await
            }
            Err(error) if error.ended_operation() => {
                state.follow(None);
                state.operation_over = true;
                let arm = error.arm().map(|arm| check::refused(&scope.name(), arm));
                let text = arm.unwrap_or_else(|| error.to_string());
                let failed = match failure::ends_creation(error.class(), error.is_not_found()) {
                    true => Error::Invalid(text),
                    false => Error::NotReady(text),
                };
                self.created(Err(failed), observed, scope, state).await
            }
            Err(source) => Err(Error::Azure {
                doing: "polling the virtual machine's creation".into(),
                source,
            }),
        }
    }

    async fn record_requested(&self, observed: &mut Observed, scope: &mut Scope<Machine>) -> Result<Outcome, Error> {
        let target = self.target(scope, observed).await?;
        let addresses = self.addresses_of(&target).await?;
        let vm = observed.vm.clone().unwrap_or_default();
        let requested = requested(&target, &vm, None, addresses);
        observed.notes.push(Note::Requested(Box::new(requested)));
        Ok(Outcome::Done)
    }

    /// Brings labels and annotations up to date with a virtual machine that was ready before.
    async fn record_observation(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let balancer = if observed.vm.is_some() && internal_balancer::is_unnamed(&scope.object) {
            let target = self.target(scope, observed).await?;
            internal_balancer::find(&target).await
        } else {
            None
        };
        let vm = observed.vm.as_ref();
        let vm_state = vm.and_then(status::state_of);
        let updated = match vm {
            Some(vm) => {
                let mut shown = status::shown(&scope.object, vm, vm_state.as_deref());
                if let Some(balancer) = balancer {
                    shown = internal_balancer::named(shown, balancer);
                }
                self.write_object(scope, state, &shown).await?
            }
            None => false,
        };
        let node = match &observed.plan.node {
            NodeLookup::Found(node) => Some(node.as_ref()),
            NodeLookup::NotCached | NodeLookup::Absent => None,
        };
        let addresses = if node::lacks_addresses(&scope.object, node) {
            let target = self.target(scope, observed).await?;
            self.addresses_of(&target).await.map_err(Error::retryable)?
        } else {
            Vec::new()
        };
        observed.notes.push(Note::Shown(Shown {
            state: vm_state,
            addresses,
            updated,
        }));
        Ok(Outcome::Done)
    }

    async fn addresses_of(&self, target: &Target) -> Result<Vec<NodeAddress>, Error> {
        let Target { spec, names, account } = target;
        let client = &account.client;
        let nic = client.get_nic(&names.group, &names.nic()).await;
        let nic = nic
            .map_err(Error::doing(format!("reading nic {}", names.nic())))?
            .unwrap_or_default();
        let mut public = None;
        if spec.public_ip {
            let found = client.get_public_ip(&names.group, &names.public_ip()).await;
            public = found.map_err(Error::doing(format!("reading public ip {}", names.public_ip())))?;
        }
        Ok(status::addresses(&names.machine, &nic, public.as_ref()))
    }

    pub(super) async fn record_provisioned(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let target = self.target(scope, observed).await?;
        let Target { spec, names, .. } = target.as_ref();
        let spot = spec.spot_vm_options.is_some();
        let zone = spec.zone.as_deref();
        let after = status::identified(&scope.object, names, spec.vm_size.as_deref(), zone, spot);
        self.write_object(scope, state, &after).await?;
        let node = self.node_of(&scope.object);
        if let Some(node) = &node {
            self.apply_node_metadata(scope, node).await?;
        }
        let node = node.as_deref().map(node::reference);
        observed.notes.push(Note::Provisioned(node));
        state.observed(&scope.object, scope.instant());
        Ok(Outcome::Observe)
    }

    async fn apply_node_metadata(&self, scope: &Scope<Machine>, node: &Node) -> Result<(), Error> {
        let after = node::with_machine_metadata(&scope.key, &scope.object, node);
        let api: Api<Node> = Api::all(self.context.client.clone());
        let taints = |node: &Node| node.spec.as_ref().and_then(|spec| spec.taints.clone());
        // Taints are one list that others write too.
        let lock = if taints(&after) == taints(node) {
            Lock::Open
        } else {
            Lock::Version
        };
        patch::object(&api, node, &after, lock).await?;
        Ok(())
    }

    /// The machine can never be created: it has failed, with the message that users search for.
    async fn refuse(
        &self,
        why: &str,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let failed = Failed {
            reason: "InvalidConfiguration",
            message: not_created(&scope.name(), why),
            event: "FailedCreate",
        };
        self.fail(failed, observed, scope, state).await
    }

    async fn fail(
        &self,
        failed: Failed,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let mut marked = Machine::clone(&scope.object);
        marked
            .annotations_mut()
            .insert(status::INSTANCE_STATE.to_owned(), "Unknown".to_owned());
        self.write_object(scope, state, &marked).await?;
        self.metrics.failed(failed.event, scope.object.as_ref(), failed.reason);
        observed.notes.push(Note::Failed(failed));
        Ok(Outcome::Wait(None))
    }

    /// Returns the name of the Node whose drain may still run.
    pub(super) fn drained_node(&self, observed: &Observed, machine: &Machine) -> Option<String> {
        let linked = machine.status.as_ref().and_then(|status| status.node_ref.as_ref());
        match &observed.plan.node {
            NodeLookup::Found(node) => Some(node.name_any()),
            NodeLookup::NotCached | NodeLookup::Absent => linked.and_then(|reference| reference.name.clone()),
        }
    }
}

/// Returns the note about a virtual machine that Azure has accepted.
pub(super) fn requested(
    Target { spec, names, .. }: &Target,
    vm: &VirtualMachine,
    operation: Option<Operation>,
    addresses: Vec<NodeAddress>,
) -> Requested {
    Requested {
        vm_id: status::id_of(vm),
        vm_state: vm.provisioning_state().to_string(),
        disks: disks::attached(spec, names, vm),
        operation,
        addresses,
    }
}

/// The message that users search for.
fn not_created(machine: &str, why: &str) -> String {
    format!("failed to reconcile machine {machine:?}: failed to create vm {machine}: {why}")
}
