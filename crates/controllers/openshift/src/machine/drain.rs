//! Drains the Node of a machine that is being deleted, and reports it with upstream's events.

use super::error::Error;
use super::state::State;
use super::{Controller, Observed};
use capstan_api::openshift::Machine;
use capstan_core::drain::{self, Drained, Options as DrainOptions};
use capstan_kube::drain::Outcome as DrainOutcome;
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;

impl Controller {
    pub(super) async fn drain(
        &self,
        node: &Node,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let notes = &mut observed.notes;
        let (name, options) = (scope.name(), DrainOptions::openshift());
        let drained = match self.drainer.drain(&name, node, options, scope.waker()).await? {
            DrainOutcome::Drained(drained) => drained,
            DrainOutcome::Draining { obstacles, again, .. } => {
                notes.deleting(Some(Err(drain::describe(&obstacles))));
                // A drain that is over at once needs no event for its beginning.
                if !std::mem::replace(&mut state.drain_reported, true) {
                    notes.event(EventNote::normal("DrainProceeds", "Node drain proceeds"));
                }
                let blocked: Vec<_> = obstacles
                    .iter()
                    .filter(|obstacle| matches!(obstacle.reason, drain::ObstacleReason::DisruptionBudget(_)))
                    .map(drain::refused_eviction)
                    .collect();
                if !blocked.is_empty() {
                    let text = format!("Node drain requeued: {}", blocked.join(", "));
                    notes.event(EventNote::normal("DrainRequeued", text));
                }
                return Ok(Outcome::Wait(Some(again)));
            }
        };
        match drained.reason() {
            drain::Reason::Empty | drain::Reason::NotNeeded(_) => {
                let text = format!("Node {:?} drained", node.name_any());
                notes.event(EventNote::normal("DrainSucceeded", text));
            }
            drain::Reason::TimedOut { .. } => {
                let text = format!("Node {:?} is not drained: {drained}", node.name_any());
                notes.event(EventNote::warning("DrainSkipped", text));
            }
        }
        state.drained = Some(drained);
        if !scope.object.spec.lifecycle_hooks.pre_terminate.is_empty() {
            notes.deleting(Some(Ok(())));
        }
        Ok(Outcome::Observe)
    }
}

/// Whether the proof comes from a drain, so that the condition says so.
pub fn was_drained(drained: &Drained) -> bool {
    match drained.reason() {
        drain::Reason::Empty | drain::Reason::TimedOut { .. } => true,
        drain::Reason::NotNeeded(reason) => *reason == drain::NotNeeded::Recorded,
    }
}
