//! Drains the Node of a machine that is being deleted, and tells users about it with upstream's events.

use super::Controller;
use super::error::Error;
use super::state::State;
use capstan_api::openshift::Machine;
use capstan_core::drain::{self, Drained, Options as DrainOptions};
use capstan_kube::drain::Outcome as DrainOutcome;
use capstan_kube::runtime::{Outcome, Scope};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;

impl Controller {
    pub(super) async fn drain(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
        node: &Node,
    ) -> Result<Outcome, Error> {
        let (name, options) = (scope.name(), DrainOptions::openshift());
        let drained = match self.drainer.drain(&name, node, options, scope.waker()).await? {
            DrainOutcome::Drained(drained) => drained,
            DrainOutcome::Draining { obstacles, again, .. } => {
                let pods = drain::describe(&obstacles);
                self.report_deletion(scope, Some(Err(pods.clone()))).await?;
                // A drain that is over at once needs no event for its beginning.
                if !std::mem::replace(&mut state.drain_reported, true) {
                    let text = "Node drain proceeds";
                    self.events.normal(scope.object.as_ref(), "DrainProceeds", text).await;
                }
                let blocked: Vec<_> = obstacles
                    .iter()
                    .filter(|obstacle| matches!(obstacle.reason, drain::ObstacleReason::DisruptionBudget(_)))
                    .map(drain::refused_eviction)
                    .collect();
                if !blocked.is_empty() {
                    let text = format!("Node drain requeued: {}", blocked.join(", "));
                    self.events.normal(scope.object.as_ref(), "DrainRequeued", text).await;
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
}

/// Whether the proof comes from a drain, so that the condition says so.
pub fn was_drained(drained: &Drained) -> bool {
    match drained.reason() {
        drain::Reason::Empty | drain::Reason::TimedOut { .. } => true,
        drain::Reason::NotNeeded(reason) => *reason == drain::NotNeeded::Recorded,
    }
}
