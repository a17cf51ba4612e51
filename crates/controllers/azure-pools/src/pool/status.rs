//! The status of a pool. Pure: the runtime writes what differs.

use std::time::Duration;

use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine, AzureMachinePoolStatus, VmIdentity};
use capstan_azure::FIXED_PROPERTY;
use capstan_core::pool::{Mode, NO_ROOM_RETRY, Strategy, not_joined};
use capstan_core::validate::azure_pool;
use capstan_core::{Class, Classified};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{EventNote, Report};
use jiff::Timestamp;

use super::member::Member;
use super::observe::Observed;
use crate::error::Error;
use crate::model::zones;

const BOOTSTRAP_SUCCEEDED: &str = "BootstrapSucceeded";
const RUNNING: &str = "ScaleSetRunning";
const MODEL_UPDATED: &str = "ScaleSetModelUpdated";
const DESIRED_REPLICAS: &str = "ScaleSetDesiredReplicas";
/// The Azure provider of Cluster API assigns a role to the identity of a scale set. Capstan does not.
const ROLE_ASSIGNED: &str = "RoleAssignmentReady";
/// A field of the spec has no effect.
const FIELDS_SUPPORTED: &str = "FieldsSupported";
const SUMMED_UP: [&str; 4] = [BOOTSTRAP_SUCCEEDED, RUNNING, MODEL_UPDATED, DESIRED_REPLICAS];

/// While machines come and go, a pool's status is written no more often than this.
const PACE: Duration = Duration::from_secs(20);
/// The same while an obstacle blocks a drain: somebody may have to act.
const BLOCKED_PACE: Duration = Duration::from_secs(5);
/// The same for a settled pool: nodes may flap.
const SETTLED_PACE: Duration = Duration::from_secs(2);

/// Returns the pool as users should see it.
pub fn status(
    pool: &AzureMachinePool,
    observed: Option<&Observed>,
    result: Result<(), &Error>,
    now: Timestamp,
) -> Report<AzureMachinePool> {
    let before = pool.status.clone().unwrap_or_default();
    let mut draft = Draft {
        pool,
        status: before.clone(),
        now,
    };
    if let Some(observed) = observed {
        draft.describe(observed);
    }
    draft.role();
    draft.fields();
    let error = result
        .err()
        .or_else(|| observed.and_then(|observed| observed.error.as_ref()));
    if let Some(error) = error {
        draft.failed(error);
    }
    // What the model of the scale set makes true, an invalid spec makes false.
    conditions::keep_times(&before.conditions, &mut draft.status.conditions);
    let mut events = observed.map(|observed| observed.events.clone()).unwrap_or_default();
    let late = observed.and_then(|observed| not_joined(&observed.plan));
    events.extend(late.map(|late| EventNote::warning("NodeNotJoined", late)));
    let about_us = error.filter(|error| error.class() == Class::Terminal || error.is_about_the_identity());
    events.extend(about_us.map(|error| EventNote::warning(error.reason(), advised(error))));
    let pace = match error {
        Some(_) => None,
        None => pace(&before, &draft.status, observed),
    };
    let mut after = pool.clone();
    after.status = Some(draft.status);
    Report {
        object: Some(after),
        events,
        pace,
    }
}

/// Whether nothing is under way.
pub fn is_settled(observed: &Observed) -> bool {
    provisioning_state(observed) == "Succeeded"
}

fn outdated(observed: &Observed) -> usize {
    let set = observed.cloud.set.as_ref();
    let wanted = observed.model.as_ref().map(|model| model.hash.as_str());
    let wanted = wanted.or(set.and_then(|set| set.model.as_deref()));
    let outdated = |m: &&Member| set.and_then(|set| m.model(set)) != wanted;
    observed.existing().filter(outdated).count()
}

/// How urgent a wait is: somebody may have to act when something holds a drain up.
fn severity(observed: &Observed) -> Severity {
    match observed.existing().any(|member| member.stuck) {
        true => Severity::Warning,
        false => Severity::Info,
    }
}

fn provisioning_state(observed: &Observed) -> &'static str {
    let (cloud, count) = (&observed.cloud, observed.existing().count());
    let creating = cloud
        .set
        .as_ref()
        .is_some_and(|set| set.state.eq_ignore_ascii_case("Creating"));
    if outdated(observed) > 0 && observed.plan.strategy != Strategy::OnDelete {
        "Updating"
    } else if cloud.changing && creating {
        "Creating"
    } else if cloud.changing || count != observed.plan.desired {
        "Scaling"
    } else {
        "Succeeded"
    }
}

/// Returns how long after the last write the status may be written. `None`: at once, because others wait for the change.
fn pace(
    before: &AzureMachinePoolStatus,
    after: &AzureMachinePoolStatus,
    observed: Option<&Observed>,
) -> Option<Duration> {
    let settled = matches!(after.provisioning_state.as_deref(), None | Some("Succeeded"));
    let is = |status: &AzureMachinePoolStatus, type_: &str| conditions::is_true(&status.conditions, type_);
    let is_late = |status: &AzureMachinePoolStatus| {
        let replicas = conditions::get(&status.conditions, DESIRED_REPLICAS);
        replicas.is_some_and(|condition| condition.severity.as_deref() == Some("Warning"))
    };
    let complete = settled && is(after, DESIRED_REPLICAS) && !is(before, DESIRED_REPLICAS);
    let changed = before.ready != after.ready
        || before.provisioning_state != after.provisioning_state
        || is(before, RUNNING) != is(after, RUNNING)
        || is_late(before) != is_late(after);
    // An update that is sent twice is an outage: a new process has to find it.
    let operations = |status: &AzureMachinePoolStatus| status.long_running_operation_states.len();
    let unsaved = observed.is_some_and(|observed| observed.cloud.updating) && operations(before) != operations(after);
    if changed || complete || unsaved {
        return None;
    }
    let blocked = conditions::get(&after.conditions, MODEL_UPDATED);
    let blocked = blocked.is_some_and(|condition| condition.severity.as_deref() == Some("Warning"));
    Some(match (settled, blocked) {
        (true, _) => SETTLED_PACE,
        (false, true) => BLOCKED_PACE,
        (false, false) => PACE,
    })
}

/// Says what Azure has no room for, and what helps.
pub fn no_room(pool: &AzureMachinePool, zones: &[String], why: &str) -> String {
    let (size, location) = (&pool.spec.template.vm_size, &pool.spec.location);
    let zones = match zones {
        [] => String::new(),
        zones => format!(", zones {}", zones.join(", ")),
    };
    format!(
        "Azure has no room for more machines of size {size} in {location}{zones}, and Capstan has stopped asking for them: \
         choose another size or zone, or raise the quota. It asks again after {} minutes, and when the pool changes. {why}",
        NO_ROOM_RETRY.as_secs() / 60
    )
}

/// Returns an error with what to do about it, where Azure's words do not say that.
fn advised(error: &Error) -> String {
    let text = error.to_string();
    match text.contains(FIXED_PROPERTY) {
        true => format!(
            "{text}: Azure fixes this property when it makes the scale set (the priority of a spot pool, for example); put the \
             old value back, or make a new pool"
        ),
        false => text,
    }
}

/// A pool's status while it is worked out.
struct Draft<'a> {
    pool: &'a AzureMachinePool,
    status: AzureMachinePoolStatus,
    now: Timestamp,
}

impl Draft<'_> {
    fn mark_false(&mut self, type_: &str, severity: Severity, reason: &str, message: &str) {
        conditions::mark_false(&mut self.status.conditions, type_, severity, reason, message, self.now);
    }

    fn mark_true(&mut self, type_: &str) {
        conditions::mark_true(&mut self.status.conditions, type_, self.now);
    }

    fn summarize(&mut self) {
        conditions::summarize(&mut self.status.conditions, &SUMMED_UP, self.now);
    }

    fn describe(&mut self, observed: &Observed) {
        // A new process finds the operations under way here.
        self.status.long_running_operation_states = observed.cloud.operations.clone();
        if let Some((reason, message)) = observed.waiting_for {
            self.mark_false(BOOTSTRAP_SUCCEEDED, Severity::Info, reason, message);
        }
        if observed.is_idle() {
            return;
        }
        match observed.mode() {
            Mode::Full => self.full(observed),
            Mode::Teardown | Mode::Orphaned => self.deleting(observed),
            // A spec that is invalid or waits for others stops only itself.
            Mode::FinishOnly if observed.cloud.set.is_some() => self.machines(observed),
            Mode::WithoutCloud | Mode::FinishOnly => {}
        }
        if let Some(message) = &observed.throttled {
            self.mark_false(RUNNING, Severity::Warning, "Throttled", message);
            self.summarize();
        }
    }

    /// Says that a system-assigned identity has no role yet: without one, whatever runs on the machines is refused by Azure.
    fn role(&mut self) {
        let pool = self.pool;
        if pool.spec.identity != Some(VmIdentity::SystemAssigned) {
            conditions::remove(&mut self.status.conditions, ROLE_ASSIGNED);
            return;
        }
        let role = pool.spec.system_assigned_identity_role.as_ref();
        let wanted = role
            .and_then(|role| role.definition_id.as_deref())
            .unwrap_or("Contributor");
        let scope = role
            .and_then(|role| role.scope.as_deref())
            .unwrap_or("the subscription");
        let message = format!(
            "Capstan assigns no roles: assign {wanted} at {scope} to the identity of the scale set \
             (az vmss identity show, az role assignment create), or use identity UserAssigned"
        );
        self.mark_false(ROLE_ASSIGNED, Severity::Warning, "RoleAssignmentNotSupported", &message);
    }

    /// Says which fields of the spec Capstan does not follow.
    fn fields(&mut self) {
        let warnings = azure_pool::validate(self.pool).warnings;
        if warnings.is_empty() {
            conditions::remove(&mut self.status.conditions, FIELDS_SUPPORTED);
            return;
        }
        let message = warnings.join("; ");
        self.mark_false(FIELDS_SUPPORTED, Severity::Info, "FieldsNotSupported", &message);
    }

    fn full(&mut self, observed: &Observed) {
        let Some(model) = &observed.model else { return };
        self.mark_true(BOOTSTRAP_SUCCEEDED);
        self.status.image = Some(model.image.clone());
        self.status.infrastructure_machine_kind = Some(AzureMachinePoolMachine::KIND.to_owned());
        if observed.created {
            self.status.provisioning_state = Some("Creating".to_owned());
            let message = format!("scale set {} is being created", model.name);
            return self.mark_false(RUNNING, Severity::Info, "ScaleSetCreating", &message);
        }
        if observed.cloud.set.is_some() {
            self.machines(observed);
        }
    }

    fn deleting(&mut self, observed: &Observed) {
        self.status.ready = false;
        self.status.provisioning_state = Some("Deleting".to_owned());
        let message = match (&observed.cloud.set, observed.existing().count()) {
            (None, _) => "the scale set does not exist any more".to_owned(),
            (Some(_), 0) => "the scale set is being deleted".to_owned(),
            (Some(_), count) => {
                let waiting = observed.waiting.clone();
                waiting.unwrap_or_else(|| format!("{count} machines are to be deleted first"))
            }
        };
        self.mark_false(RUNNING, severity(observed), "Deleting", &message);
    }

    /// Reports why a reconcile could not be finished.
    fn failed(&mut self, error: &Error) {
        let severity = match error.class() {
            Class::Terminal => Severity::Error,
            Class::Transient | Class::Throttled(_) => Severity::Warning,
        };
        self.mark_false(RUNNING, severity, error.reason(), &advised(error));
        self.summarize();
    }

    fn machines(&mut self, observed: &Observed) {
        let (count, desired) = (observed.existing().count(), observed.plan.desired);
        let is_ready = |member: &&Member| member.node.is_ready() && !member.leaving();
        let ready = observed.existing().filter(is_ready).count();
        self.status.replicas = i32::try_from(ready).unwrap_or(i32::MAX);
        self.status.version = observed.owners.machine_pool.spec.template.spec.version.clone();
        self.status.provisioning_state = Some(provisioning_state(observed).to_owned());
        // Add-ons wait for it, without which no node becomes ready.
        let provisioned = observed
            .cloud
            .set
            .as_ref()
            .is_some_and(|set| set.state.eq_ignore_ascii_case("Succeeded"));
        self.status.ready = self.status.ready || ready > 0 || (provisioned && !observed.cloud.changing);
        match observed
            .cloud
            .shortage
            .as_ref()
            .filter(|_| count < desired || ready < desired)
        {
            Some(why) if observed.cloud.given_up => {
                let message = no_room(self.pool, &zones(&observed.owners.machine_pool), why);
                self.mark_false(RUNNING, Severity::Warning, "CapacityUnavailable", &message);
            }
            Some(why) => self.mark_false(RUNNING, Severity::Warning, "InstancesNotCreated", why),
            None => self.mark_true(RUNNING),
        }
        if observed.model.is_some() {
            self.progress(observed);
        }
        if ready == desired && count == desired {
            self.mark_true(DESIRED_REPLICAS);
        } else if let Some(late) = not_joined(&observed.plan) {
            self.mark_false(DESIRED_REPLICAS, Severity::Warning, "NodeNotJoined", &late);
        } else {
            let reason = if count > desired {
                "ScaleSetScaleDown"
            } else {
                "ScaleSetScaleUp"
            };
            let mut message = format!("{ready} of {desired} machines are ready");
            let severity = severity(observed);
            if let Some(why) = observed.waiting.as_ref().filter(|_| severity == Severity::Warning) {
                message = format!("{message}; {why}");
            }
            self.mark_false(DESIRED_REPLICAS, severity, reason, &message);
        }
        self.summarize();
    }

    fn progress(&mut self, observed: &Observed) {
        let outdated = outdated(observed);
        if outdated == 0 {
            return self.mark_true(MODEL_UPDATED);
        }
        let text = match &observed.waiting {
            _ if observed.plan.strategy == Strategy::OnDelete => {
                format!("OnDelete: {outdated} machines get the new model when they are deleted")
            }
            None => format!("RollingUpdate: {outdated} machines to go"),
            Some(why) => format!("RollingUpdate: {why}"),
        };
        self.mark_false(MODEL_UPDATED, severity(observed), "ScaleSetModelOutOfDate", &text);
    }
}
