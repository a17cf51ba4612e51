//! Instances and operations that fail: how long that has been so, and how creation slows down.

use std::collections::HashMap;
use std::time::Duration;

use capstan_core::pool::{Cause, Mode};
use capstan_kube::runtime::EventNote;

use super::Actor;
use super::cloud::Failure;
use super::member::Member;
use super::observe::{Observed, startup_timeout};
use super::state::Kind;
use super::status::no_room;
use crate::model::zones;

/// An instance that ran and that Azure calls Failed may recover by itself within this time.
const FAILED_PATIENCE: Duration = Duration::from_secs(120);

impl Actor<'_> {
    /// Notes how long instances have been in a state that may pass by itself.
    pub(super) fn note_instances(&mut self, observed: &mut Observed) {
        let now = self.now();
        let lists = self.state.snapshot.as_ref().map_or(0, |snapshot| snapshot.lists);
        let confirmed = self.state.snapshot.as_ref().is_some_and(|snapshot| snapshot.confirmed);
        let target = self.update_target(observed.model.as_ref());
        let mut failed = HashMap::new();
        let mut updated = HashMap::new();
        let mut joining = HashMap::new();
        let timeout = startup_timeout(&self.pool().spec);
        let mut again = None;
        for member in &mut observed.members {
            let id = member.provider_id().to_owned();
            let Some(instance) = &member.instance else {
                member.confirmed_missing = confirmed;
                continue;
            };
            let known = self.state.joining.get(&id).copied();
            if member.is_joining() {
                let counted = known.unwrap_or_default().observed(now);
                member.joining = Some(counted.waited());
                joining.insert(id.clone(), counted);
                if member.leaving() && timeout.is_some_and(|timeout| counted.waited() >= timeout) {
                    self.state.unjoined.insert(id.clone());
                }
            } else if member.node.node().is_none() {
                joining.extend(known.map(|known| (id.clone(), known.paused())));
            } else if !member.has_run() {
                self.state.unjoined.clear();
            }
            if instance.is("Failed") {
                let (since, first) = *self.state.failed_since.get(&id).unwrap_or(&(now, lists));
                let left = FAILED_PATIENCE.saturating_sub(now.saturating_duration_since(since));
                member.failed = !member.has_run() || (left.is_zero() && lists > first);
                if !member.failed {
                    // A second list decides.
                    self.state.instances_stale |= left.is_zero();
                    again = again.min(Some(left)).or(Some(left));
                }
                failed.insert(id.clone(), (since, first));
            }
            if member.updating() {
                let known = self
                    .state
                    .updated_since
                    .get(&id)
                    .filter(|(model, _)| Some(model) == target.as_ref());
                let since = known
                    .map(|(_, since)| *since)
                    .or((instance.latest && !member.awaits_reimage()).then_some(now));
                updated.extend(target.clone().zip(since).map(|update| (id, update)));
            }
        }
        let is_updated = |id: &str| observed.members.iter().any(|m| m.id() == id && m.updating());
        self.state.refused_updates.retain(|id, _| is_updated(id));
        observed.failed_updates.clone_from(&self.state.refused_updates);
        (self.state.failed_since, self.state.updated_since) = (failed, updated);
        self.state.joining = joining;
        if let Some(left) = again {
            observed.requeue(left);
        }
        // One list may be late: a second one confirms what the first one lacks.
        let lacks = |m: &Member| m.instance.is_none() && !m.object_deleting();
        let suspect = observed.members.iter().any(lacks);
        if suspect && !confirmed {
            self.state.recheck_instances(now);
        }
    }

    /// Failed creations slow the next one down; failed updates in place become replacements.
    pub(super) async fn note_failures(&mut self, failures: Vec<Failure>, observed: &mut Observed) {
        let capacity = self.scale_set().map_or(0, |set| set.capacity);
        let existing = observed.existing().count();
        for failure in failures {
            self.warn("OperationFailed", failure.message.clone());
            match failure.kind {
                Kind::Change => {
                    let not_made = Cause::NotMade { capacity, existing };
                    let cause = if failure.no_room { not_made } else { Cause::Instances };
                    self.creation_failed(failure.message, cause);
                }
                Kind::Update | Kind::Reimage => {
                    let failed = failure.ids.into_iter().map(|id| (id, "UpdateFailed"));
                    observed.failed_updates.extend(failed);
                }
                Kind::Delete | Kind::Remove => {}
            }
        }
        if observed.mode() == Mode::Teardown {
            return;
        }
        let mut failed = Vec::new();
        for member in &observed.members {
            let Some(instance) = &member.instance else { continue };
            let new = !member.has_run() && instance.is("Failed");
            if new && self.state.failures_counted.insert(instance.provider_id.clone()) {
                let why = instance.message.clone();
                let why = why.unwrap_or_else(|| format!("instance {} failed", instance.id));
                self.warn("InstanceFailed", format!("{}: {why}", member.name));
                failed.push(why);
            }
        }
        // However many failed, it was one try.
        if let Some(why) = failed.first() {
            let one = failed.len() == 1;
            let cause = if one { Cause::Instance } else { Cause::Instances };
            self.creation_failed(why.clone(), cause);
        }
        self.note_shortage(observed).await;
    }

    /// Notes that instances were not made. The event about a pool that asks for no more names what to change.
    pub(super) fn creation_failed(&mut self, why: String, cause: Cause) {
        let (now, before) = (self.now(), self.state.retry.given_up());
        self.state.retry.failed(why.clone(), cause, now);
        if self.state.retry.given_up() && !before {
            let message = no_room(self.pool(), &zones(&self.owners.machine_pool), &why);
            self.warn("CapacityUnavailable", message);
        }
    }

    fn warn(&mut self, reason: &'static str, message: String) {
        self.state.events.push(EventNote::warning(reason, message));
    }

    /// A scale operation that ended without all its instances is a failure, also if it ended while we were away.
    async fn note_shortage(&mut self, observed: &Observed) {
        let Some(set) = self.scale_set() else { return };
        let exists = |m: &&Member| m.instance.as_ref().is_some_and(|instance| !instance.is("Deleting"));
        let count = observed.members.iter().filter(exists).count();
        let short = count < set.capacity;
        let over = set.state.eq_ignore_ascii_case("Failed") && !self.state.busy(Kind::Change);
        if short && over && !self.state.retry.is_counted() {
            let why = match self.state.retry.why.clone() {
                Some(why) => why,
                None => self.shortage().await,
            };
            self.warn("InstancesNotCreated", why.clone());
            let (capacity, existing) = (set.capacity, count);
            self.creation_failed(why, Cause::NotMade { capacity, existing });
        }
    }

    /// Returns why instances were not created, as far as Azure says so.
    async fn shortage(&mut self) -> String {
        let why = match self.cloud().await {
            Ok(cloud) => cloud.shortage().await,
            Err(error) => Err(error),
        };
        why.unwrap_or_else(|error| {
            let set = &self.owners.set.name;
            format!("Azure did not create all instances of scale set {set}, and does not say why: {error}")
        })
    }

    /// Once as many machines as desired are ready, creation has not failed any more. Failed ones that are deleted prove
    /// nothing.
    pub(super) fn note_success(&mut self, observed: &Observed) {
        let is_failed = |m: &Member| m.instance.as_ref().is_some_and(|i| i.is("Failed"));
        let failing = observed.existing().any(is_failed);
        let ready = observed.existing().filter(|member| member.node.is_ready()).count();
        let waiting = self.state.retry.remaining(self.now()).is_some();
        if self.state.retry.failing() && !waiting && !failing && ready >= self.desired() {
            self.state.failures_counted.clear();
            self.state.retry.succeeded();
        }
    }
}
