//! The status of a pool.

use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine, AzureMachinePoolStatus};
use capstan_core::pool::Plan;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::patch;
use jiff::Timestamp;
use kube::ResourceExt;

use super::Actor;
use super::member::Member;
use super::state::{Kind, State};
use crate::Controller;
use crate::error::Error;
use crate::model::Model;

const BOOTSTRAP_SUCCEEDED: &str = "BootstrapSucceeded";
const RUNNING: &str = "ScaleSetRunning";
const MODEL_UPDATED: &str = "ScaleSetModelUpdated";
const DESIRED_REPLICAS: &str = "ScaleSetDesiredReplicas";
const SUMMED_UP: [&str; 4] = [BOOTSTRAP_SUCCEEDED, RUNNING, MODEL_UPDATED, DESIRED_REPLICAS];

/// A pool's status while a reconcile works it out.
pub struct Draft {
    before: AzureMachinePool,
    status: AzureMachinePoolStatus,
    now: Timestamp,
}

impl Draft {
    pub fn new(pool: &AzureMachinePool) -> Self {
        let status = pool.status.clone().unwrap_or_default();
        Self {
            before: pool.clone(),
            status,
            now: Timestamp::now(),
        }
    }

    fn mark_false(&mut self, type_: &str, severity: Severity, reason: &str, message: &str) {
        conditions::mark_false(&mut self.status.conditions, type_, severity, reason, message, self.now);
    }

    fn mark_true(&mut self, type_: &str) {
        conditions::mark_true(&mut self.status.conditions, type_, self.now);
    }

    /// Reports that something is missing which others bring.
    pub fn waiting_for(&mut self, reason: &str, message: &str) {
        self.mark_false(BOOTSTRAP_SUCCEEDED, Severity::Info, reason, message);
    }

    pub fn bootstrapped(&mut self, model: &Model) {
        self.mark_true(BOOTSTRAP_SUCCEEDED);
        self.status.image = Some(model.image.clone());
        self.status.infrastructure_machine_kind = Some(AzureMachinePoolMachine::KIND.to_owned());
    }

    pub fn creating(&mut self, model: &Model) {
        self.status.provisioning_state = Some("Creating".to_owned());
        self.mark_false(
            RUNNING,
            Severity::Info,
            "ScaleSetCreating",
            &format!("scale set {} is created", model.name),
        );
    }

    pub fn deleting(&mut self, message: &str) {
        self.status.ready = false;
        self.status.provisioning_state = Some("Deleting".to_owned());
        self.mark_false(RUNNING, Severity::Info, "Deleting", message);
    }

    /// Reports why a reconcile could not be finished.
    pub fn trouble(&mut self, error: &Error) {
        let severity = match error.class() {
            capstan_core::Class::Terminal => Severity::Error,
            _ => Severity::Warning,
        };
        self.mark_false(RUNNING, severity, error.reason(), &error.to_string());
        conditions::summarize(&mut self.status.conditions, &SUMMED_UP, self.now);
    }

    /// Describes the pool as it was observed.
    pub fn observed(&mut self, actor: &Actor<'_>, members: &[Member], plan: &Plan, model: &Model) {
        let Some(set) = actor.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref()) else {
            return;
        };
        let ready = members
            .iter()
            .filter(|member| member.node.is_ready() && !member.leaving())
            .count();
        let desired = actor.desired();
        let current = |m: &&Member| m.model(set) == Some(&model.hash);
        let outdated = members.len() - members.iter().filter(current).count();
        self.status.replicas = i32::try_from(ready).unwrap_or(i32::MAX);
        self.status.version = actor.owners.machine_pool.spec.template.spec.version.clone();
        let busy = actor.state.busy(Kind::Change);
        let state = match () {
            () if outdated > 0 => "Updating",
            () if busy && set.state.eq_ignore_ascii_case("Creating") => "Creating",
            () if busy || members.len() != desired => "Scaling",
            () => "Succeeded",
        };
        self.status.provisioning_state = Some(state.to_owned());
        self.status.ready = self.status.ready || ready > 0 || (desired == 0 && !busy);
        let why = plan.waiting.clone().unwrap_or_default();
        if let Some(failed) = actor
            .state
            .retry
            .why
            .clone()
            .filter(|_| members.len() < desired || ready < desired)
        {
            self.mark_false(RUNNING, Severity::Warning, "InstancesNotCreated", &failed);
        } else {
            self.mark_true(RUNNING);
        }
        self.update_progress(outdated, &why, members);
        if ready == desired && members.len() == desired {
            self.mark_true(DESIRED_REPLICAS);
        } else {
            let reason = if members.len() > desired {
                "ScaleSetScaleDown"
            } else {
                "ScaleSetScaleUp"
            };
            let message = format!("{ready} of {desired} machines are ready");
            self.mark_false(DESIRED_REPLICAS, Severity::Info, reason, &message);
        }
        conditions::summarize(&mut self.status.conditions, &SUMMED_UP, self.now);
    }

    fn update_progress(&mut self, outdated: usize, why: &str, members: &[Member]) {
        if outdated == 0 {
            return self.mark_true(MODEL_UPDATED);
        }
        let blocked = members.iter().any(|member| member.stuck);
        let severity = if blocked { Severity::Warning } else { Severity::Info };
        let text = match why {
            "" => format!("RollingUpdate: {outdated} machines to go"),
            why => format!("RollingUpdate: {why}"),
        };
        self.mark_false(MODEL_UPDATED, severity, "ScaleSetModelOutOfDate", &text);
    }

    /// Keeps the operations under way, where a new process finds them.
    pub fn operations(&mut self, state: &State, group: &str) {
        let name = self.before.name_any();
        self.status.long_running_operation_states = state
            .operations
            .iter()
            .map(|tracked| tracked.persist(group, &name))
            .collect();
    }

    /// Whether the status has changed.
    pub fn differs(&self) -> bool {
        self.before.status.as_ref() != Some(&self.status)
    }

    /// Whether a rollout is held up by something that needs more than a moment.
    pub fn is_stuck(&self) -> bool {
        let condition = conditions::get(&self.status.conditions, MODEL_UPDATED);
        condition.is_some_and(|condition| condition.severity.as_deref() == Some("Warning"))
    }

    /// Whether nothing is under way.
    pub fn at_rest(&self) -> bool {
        matches!(self.status.provisioning_state.as_deref(), None | Some("Succeeded"))
    }

    /// Whether others wait for the change: readiness and provisioning state.
    pub fn is_urgent(&self) -> bool {
        let before = self.before.status.clone().unwrap_or_default();
        let runs = |status: &AzureMachinePoolStatus| conditions::is_true(&status.conditions, RUNNING);
        let same = before.ready == self.status.ready
            && before.provisioning_state == self.status.provisioning_state
            && runs(&before) == runs(&self.status);
        let complete = |status: &AzureMachinePoolStatus| conditions::is_true(&status.conditions, DESIRED_REPLICAS);
        let arrived = self.at_rest() && complete(&self.status) && !complete(&before);
        !same || arrived
    }

    /// Writes the status, if it differs. Whether it did.
    pub async fn write(&self, controller: &Controller) -> Result<bool, Error> {
        let mut after = self.before.clone();
        after.status = Some(self.status.clone());
        let api = controller
            .context
            .api::<AzureMachinePool>(&self.before.namespace().unwrap_or_default());
        match patch::status(&api, &self.before, &after, patch::Lock::Open).await {
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error.into()),
            Ok(written) => {
                controller.wrote(&self.before, written.as_ref());
                Ok(written.is_some())
            }
        }
    }
}
