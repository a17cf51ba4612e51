//! Takes a machine away: hooks, drain, the virtual machine, and everything that was made for it.
//!
//! Invariants: a disk marked Detach is never deleted, and is seen to survive; the finalizer goes only when Azure has
//! confirmed that the virtual machine, its OS disk, its interface and every disk marked Delete are gone.

use super::error::Error;
use super::fate::{self, Known};
use super::leaving::{Disks, Leaving, Ties};
use super::plan::Step;
use super::spec::is_unreadable;
use super::status::{self, Ending};
use super::{Controller, Flow, Target, Work, link};
use crate::sizes;
use capstan_api::openshift::{MACHINE_FINALIZER, Machine};
use capstan_azure::{Client, Operation, Owned, Progress, Request};
use capstan_core::drain::{self, Options as DrainOptions};
use capstan_kube::drain::Outcome;
use capstan_kube::{Next, patch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use std::sync::Arc;
use std::time::Duration;

/// Only one control plane node is drained at a time; the next in line asks again after this.
const CONTROL_PLANE_TURN: Duration = Duration::from_secs(20);

impl Controller {
    pub(super) async fn end(&self, step: Step, work: &mut Work, node: Option<Arc<Node>>) -> Result<Flow, Error> {
        match step {
            Step::HoldDrain => self.hold(work, None).await,
            Step::Drain => match node {
                Some(node) => self.drain(work, &node).await,
                None => Ok(Flow::Again),
            },
            step => {
                self.stop_draining(work, node.as_deref());
                match step {
                    Step::HoldTerminate => self.hold(work, None).await,
                    _ => self.destroy(work, node, None).await,
                }
            }
        }
    }

    /// The machine goes on without its drain, or after it: its Node is gone, say, or is not to be drained any more.
    fn stop_draining(&self, work: &Work, node: Option<&Node>) {
        let linked = work.machine.status.as_ref().and_then(|status| status.node_ref.as_ref());
        let linked = linked.and_then(|reference| reference.name.clone());
        if let Some(name) = node.map(|node| node.name_any()).or(linked) {
            self.drainer.stop(&name);
        }
    }

    /// Asks the API server for the machine's Node, which the cache does not show.
    pub(super) async fn find_node(&self, work: &mut Work) -> Result<Flow, Error> {
        let (api, machine) = (Api::<Node>::all(self.ctx.client.clone()), &work.machine);
        let status = machine.status.as_ref();
        let linked = status.and_then(|status| status.node_ref.as_ref()?.name.as_deref());
        let provider = machine.spec.provider_id.as_deref().unwrap_or_default();
        let addresses = status.map(|status| status.addresses.as_slice()).unwrap_or_default();
        let belongs = |node: &Node| link::belongs(node, provider, addresses);
        let found = match linked {
            Some(name) => api.get_opt(name).await?,
            // Nodes of Azure are named after their machines. All are read only when the cache is known to be late.
            None => match api.get_opt(&machine.name_any()).await?.filter(belongs) {
                None if self.nodes.trouble().is_some() => {
                    let all = api.list(&ListParams::default()).await?;
                    all.items.into_iter().find(belongs)
                }
                found => found,
            },
        };
        if let Some(node) = &found {
            tracing::info!(machine = %machine.name_any(), node = %node.name_any(), "found a Node that the cache lacks");
        }
        work.node = Some(found.map(Arc::new));
        Ok(Flow::Again)
    }

    fn ending<'a>(machine: &'a Machine, drained: Option<Result<(), String>>) -> Ending<'a> {
        let hooks = &machine.spec.lifecycle_hooks;
        Ending {
            pre_drain: &hooks.pre_drain,
            pre_terminate: &hooks.pre_terminate,
            drained,
            ..Ending::default()
        }
    }

    /// Says what the machine waits for.
    async fn hold(&self, work: &mut Work, drained: Option<Result<(), String>>) -> Result<Flow, Error> {
        let after = status::deleting(&work.machine, &Self::ending(&work.machine, drained), Timestamp::now());
        self.write_status(work, &after).await?;
        Ok(Flow::Rest(Next::Wait))
    }

    async fn drain(&self, work: &mut Work, node: &Arc<Node>) -> Result<Flow, Error> {
        if self.another_control_plane_drains(&work.machine, node) {
            let text = "waiting for another control plane node to be drained".to_owned();
            self.hold(work, Some(Err(text))).await?;
            return Ok(Flow::Rest(Next::After(CONTROL_PLANE_TURN)));
        }
        let (trigger, object) = (self.trigger.clone(), ObjectRef::from_obj(work.machine.as_ref()));
        let wake = Arc::new(move || trigger.poke(object.clone()));
        let name = work.machine.name_any();
        match self.drainer.drain(&name, node, DrainOptions::default(), wake).await? {
            Outcome::Drained(drained) => {
                match drained.reason() {
                    drain::Reason::Empty | drain::Reason::NotNeeded(_) => {
                        let text = format!("Node {:?} drained", node.name_any());
                        self.events.normal(work.machine.as_ref(), "DrainSucceeded", text).await;
                    }
                    drain::Reason::TimedOut { .. } => {
                        let text = format!("Node {:?} is not drained: {drained}", node.name_any());
                        self.events.warning(work.machine.as_ref(), "DrainSkipped", text).await;
                    }
                }
                if work.machine.spec.lifecycle_hooks.pre_terminate.is_empty() {
                    self.destroy(work, Some(node.clone()), Some(Ok(()))).await
                } else {
                    self.hold(work, Some(Ok(()))).await
                }
            }
            Outcome::Draining { obstacles, again, .. } => {
                let pods = drain::describe(&obstacles);
                self.hold(work, Some(Err(pods.clone()))).await?;
                let blocked = obstacles
                    .iter()
                    .any(|obstacle| matches!(obstacle.reason, drain::ObstacleReason::DisruptionBudget(_)));
                if blocked {
                    let text = format!("Node {:?} is not drained yet: {pods}", node.name_any());
                    self.events.warning(work.machine.as_ref(), "DrainBlocked", text).await;
                }
                Ok(Flow::Rest(Next::After(again)))
            }
        }
    }

    /// Whether a control plane machine that was deleted earlier is still being drained.
    fn another_control_plane_drains(&self, machine: &Machine, node: &Node) -> bool {
        if !link::is_control_plane(node) {
            return false;
        }
        let order = |machine: &Machine| {
            (
                machine.metadata.deletion_timestamp.as_ref().map(|time| time.0),
                machine.name_any(),
            )
        };
        let drains = |other: &Machine| {
            let status = status::of(other);
            let drained = capstan_kube::conditions::is_true(&status.conditions, status::DRAINED);
            let control_plane = self.node_of(other).is_some_and(|node| link::is_control_plane(&node));
            other.metadata.deletion_timestamp.is_some()
                && other.uid() != machine.uid()
                && !drained
                && control_plane
                && order(other) < order(machine)
        };
        !self.machines.select(machine.namespace().as_deref(), drains).is_empty()
    }

    async fn destroy(
        &self,
        work: &mut Work,
        node: Option<Arc<Node>>,
        drained: Option<Result<(), String>>,
    ) -> Result<Flow, Error> {
        // A spec that could never be read was never made into anything.
        if is_unreadable(&work.machine) && !status::may_have_vm(&work.machine) {
            return self.release(work, node, &[]).await;
        }
        match self.destroyed(work, drained).await {
            Ok(Gone::NotYet(after)) => Ok(Flow::Rest(Next::After(after))),
            Ok(Gone::All(kept)) => self.release(work, node, &kept).await,
            Err(error) => {
                let error = error.retried();
                // Said when Azure refused; that we keep to it is no news.
                let news = !matches!(error, Error::Kube(_)) && !error.is_held();
                if !matches!(error, Error::Kube(_)) {
                    // A namespace that is being deleted takes no events: the status has to tell.
                    let (machine, why) = (work.machine.clone(), error.to_string());
                    let ending = Ending {
                        hindrance: news.then_some(why.as_str()),
                        ..Self::ending(&machine, None)
                    };
                    self.write_status(work, &status::deleting(&machine, &ending, Timestamp::now()))
                        .await?;
                }
                if news {
                    let text = format!(
                        "DeleteError: failed to delete machine {:?}: {error}",
                        work.machine.name_any()
                    );
                    self.metrics
                        .failed("FailedDelete", work.machine.as_ref(), "DeleteError");
                    self.events.warning(work.machine.as_ref(), "FailedDelete", text).await;
                }
                Err(error)
            }
        }
    }

    async fn destroyed(&self, work: &mut Work, drained: Option<Result<(), String>>) -> Result<Gone, Error> {
        let target = match self.target(&work.machine).await {
            Ok(target) => target,
            // Azure has no such group, so nothing was ever made in it.
            Err(Error::Refused(why)) => {
                tracing::warn!(machine = %work.machine.name_any(), why, "nothing to delete in azure");
                return Ok(Gone::All(Vec::new()));
            }
            Err(error) => return Err(error),
        };
        let mut leaving = self.memory.leaving(&work.uid);
        let gone = self.left(work, &target, &mut leaving, drained).await;
        if gone.as_ref().err().is_some_and(Error::is_interface_in_use) {
            // It came after all: what is known of its end is not true any more.
            self.memory.doubt_vm_gone(&work.uid);
            leaving = Leaving::default();
        }
        self.memory.keep_leaving(&work.uid, leaving);
        gone
    }

    async fn left(
        &self,
        work: &mut Work,
        target: &Target,
        leaving: &mut Leaving,
        drained: Option<Result<(), String>>,
    ) -> Result<Gone, Error> {
        let mut ties = Ties {
            public_ip: target.spec.public_ip || status::has_public_ip(&work.machine),
            lent: false,
            ours: false,
            inherited: status::is_inherited(&work.machine),
        };
        if !self.memory.vm_gone(&work.uid) {
            match self
                .vm_deleted(work, target, &mut leaving.spared, drained.clone())
                .await?
            {
                VmGone::NotYet(after) => return Ok(Gone::NotYet(after)),
                VmGone::Gone => self.memory.set_vm_gone(&work.uid),
                VmGone::NotOurs => ties.lent = true,
            }
        }
        ties.ours = is_recorded(&work.machine, target);
        let Leaving { disks, network, .. } = leaving;
        let (disks, network) = futures::join!(self.disks_gone(work, target, disks), network.go(target, ties));
        if let Some(after) = [disks?, network?].into_iter().flatten().min() {
            if drained.is_some() {
                // The next pass is not to drain again.
                let after = status::deleting(&work.machine, &Self::ending(&work.machine, drained), Timestamp::now());
                self.write_status(work, &after).await?;
            }
            return Ok(Gone::NotYet(after));
        }
        availability_set_gone(target).await?;
        let kept = leaving.disks.fate.as_ref().map(|fate| fate.kept.clone());
        Ok(Gone::All(kept.unwrap_or_default()))
    }

    /// Deletes the virtual machine, if it is ours.
    async fn vm_deleted(
        &self,
        work: &mut Work,
        target: &Target,
        sparing: &mut Request<()>,
        drained: Option<Result<(), String>>,
    ) -> Result<VmGone, Error> {
        let client = &target.account.client;
        if let Some(operation) = self.following(work) {
            return self.follow_deletion(work, client, operation).await;
        }
        let names = &target.names;
        let doing = || Error::doing(format!("failed to delete vm {}", names.machine));
        if matches!(sparing, Request::Running(_))
            && let Some(after) = sparing.finish(client, async { Ok(None) }).await.map_err(doing())?
        {
            return Ok(VmGone::NotYet(after));
        }
        let Some(vm) = client.get_vm(&names.group, &names.machine).await.map_err(doing())? else {
            return Ok(VmGone::Gone);
        };
        let recorded = status::recorded_vm(&work.machine);
        // A provider id proves nothing: whoever may edit the Machine can write one.
        let owned = match Owned::by_tags(&vm, |_| names.owns_vm(&vm, recorded.as_ref())) {
            Ok(owned) => owned,
            Err(error) => {
                tracing::warn!(machine = names.machine, %error, "the virtual machine stays");
                return Ok(VmGone::NotOurs);
            }
        };
        let seen = fate::attached(names, &vm);
        if !is_recorded(&work.machine, target)
            || fate::is_untold(&target.spec, names, &status::attached(&work.machine), &seen)
        {
            // Before it goes: once it is gone, nobody could tell that it was ours and what it had.
            let after = status::holding(&work.machine, &vm, seen, Timestamp::now());
            self.write_status(work, &after).await?;
        }
        if let Some(update) = fate::spared(&target.spec, names, &vm) {
            let send = async {
                let put = client.patch_vm(&names.group, &names.machine, &update).await?;
                Ok(put.operation)
            };
            *sparing = Request::NotSent;
            if let Some(after) = sparing.finish(client, send).await.map_err(doing())? {
                return Ok(VmGone::NotYet(after));
            }
        }
        let operation = client.delete_vm(&owned).await.map_err(doing())?;
        self.memory.follow(&work.uid, operation.clone());
        let (machine, id) = (work.machine.clone(), status::id_of(&vm));
        let ending = Ending {
            operation: operation.as_ref(),
            vm_id: id.as_deref(),
            ..Self::ending(&machine, drained)
        };
        let after = status::deleting(&machine, &ending, Timestamp::now());
        self.write_status(work, &after).await?;
        Ok(operation.map_or(VmGone::Gone, |operation| {
            VmGone::NotYet(operation.due_in(Timestamp::now()))
        }))
    }

    async fn follow_deletion(
        &self,
        work: &mut Work,
        client: &Client,
        mut operation: Operation,
    ) -> Result<VmGone, Error> {
        let due = operation.due_in(Timestamp::now());
        if !due.is_zero() {
            return Ok(VmGone::NotYet(due));
        }
        match client.poll(&mut operation).await {
            Ok(Progress::Running(after)) => {
                self.memory.follow(&work.uid, Some(operation));
                Ok(VmGone::NotYet(after))
            }
            Ok(Progress::Done(_)) => {
                self.memory.follow(&work.uid, None);
                Ok(VmGone::Gone)
            }
            Err(source) => {
                if source.ended_operation() {
                    // Neither memory nor status may keep what is over, or it would be asked about for ever.
                    self.memory.follow(&work.uid, None);
                    let machine = work.machine.clone();
                    let id = status::vm_id(&machine);
                    let ending = Ending {
                        vm_id: Some(id.as_deref().unwrap_or_default()),
                        ..Self::ending(&machine, None)
                    };
                    self.write_status(work, &status::deleting(&machine, &ending, Timestamp::now()))
                        .await?;
                }
                Err(Error::Azure {
                    doing: format!("failed to delete vm {}", work.machine.name_any()),
                    source,
                })
            }
        }
    }

    /// Every disk that is to go goes. Which, is decided once.
    async fn disks_gone(&self, work: &Work, target: &Target, disks: &mut Disks) -> Result<Option<Duration>, Error> {
        let Target { spec, names, account } = target;
        if disks.fate.is_none() {
            let listing = self.disk_lists.get(&account.client, &names.group).await?;
            let known = Known {
                attached: &status::attached(&work.machine),
                ours: is_recorded(&work.machine, target),
            };
            disks.fate = Some(fate::decide(spec, names, &listing, known));
        }
        let wait = disks.go(&account.client, &names.group).await?;
        let missing = disks.fate.iter_mut().filter(|_| wait.is_none());
        for name in missing.flat_map(|fate| std::mem::take(&mut fate.missing)) {
            let text = format!(
                "Data Disk {name} was to be kept, but is not in resource group {}",
                names.group
            );
            self.events
                .warning(work.machine.as_ref(), "DataDiskMissing", text)
                .await;
        }
        Ok(wait)
    }

    /// Nothing is left in Azure: the Node goes, and with the finalizer the machine.
    async fn release(&self, work: &mut Work, node: Option<Arc<Node>>, kept: &[String]) -> Result<Flow, Error> {
        if let Some(node) = node {
            self.node_gone(&node).await?;
        }
        let name = work.machine.name_any();
        for text in fate::farewell(&name, kept) {
            self.events.normal(work.machine.as_ref(), "Deleted", text).await;
        }
        patch::remove_finalizer(&self.api(&work.machine), work.machine.as_ref(), MACHINE_FINALIZER).await?;
        // A late cache must not make us do it all again.
        self.memory.set_released(&work.uid);
        let cached = self.machines.get(work.machine.namespace().as_deref(), &name);
        if cached.is_none_or(|cached| cached.uid().as_deref() != Some(work.uid.as_str())) {
            self.memory.forget(&work.uid);
        }
        Ok(Flow::Rest(Next::Wait))
    }

    async fn node_gone(&self, node: &Node) -> Result<(), Error> {
        let api: Api<Node> = Api::all(self.ctx.client.clone());
        let same = Preconditions {
            uid: node.uid(),
            resource_version: None,
        };
        match api
            .delete(&node.name_any(), &DeleteParams::default().preconditions(same))
            .await
        {
            Ok(_) => Ok(()),
            Err(error) if matches!(capstan_kube::error::code(&error), Some(404 | 409)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether a virtual machine of this name, in this group, was recorded as the machine's.
fn is_recorded(machine: &Machine, target: &Target) -> bool {
    status::recorded_vm(machine) == Some(target.names.vm_id())
}

/// How far the virtual machine's deletion is.
enum VmGone {
    /// Look again after this long.
    NotYet(Duration),
    Gone,
    /// One of this name is there that was not made for this machine: it stays.
    NotOurs,
}

/// How far the deletion in Azure is.
enum Gone {
    NotYet(Duration),
    /// All of it, but for these disks.
    All(Vec<String>),
}

/// The availability set that was made for the machine's set, once it is empty.
async fn availability_set_gone(target: &Target) -> Result<(), Error> {
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
        // Who may not read the catalogue any more looks for the set itself.
        Err(error) if !sizes::is_unreadable(&error) => return Err(doing()(error)),
        _ => {}
    }
    let Some(set) = client
        .get_availability_set(&names.group, &name)
        .await
        .map_err(doing())?
    else {
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
