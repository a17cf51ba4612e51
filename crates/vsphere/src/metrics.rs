//! The client's figures for Prometheus: calls, logins, sessions, tasks and the long poll.
//!
//! Invariant: the number of series is bounded. Tenants write the names of servers and users, and servers the names of tasks, so
//! none of them is a label.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    method: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TaskLabels {
    task: &'static str,
    outcome: &'static str,
}

/// Cheap to clone; all clones count into the same place.
#[derive(Clone, Debug)]
pub struct Metrics {
    calls: Family<CallLabels, Counter>,
    latency: Family<MethodLabels, Histogram>,
    logins: Family<OutcomeLabels, Counter>,
    sessions: Gauge,
    tasks: Gauge,
    task_time: Family<TaskLabels, Histogram>,
    polls: Gauge,
    poll_failures: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        // From a read in a vCenter nearby to a call that times out.
        let answer = || Histogram::new([0.004, 0.016, 0.064, 0.25, 1.0, 4.0, 16.0, 64.0]);
        // From a power-on to a full clone of a large template.
        let task = || Histogram::new([1.0, 4.0, 16.0, 60.0, 240.0, 900.0, 3600.0]);
        Self {
            calls: Family::default(),
            latency: Family::new_with_constructor(answer),
            logins: Family::default(),
            sessions: Gauge::default(),
            tasks: Gauge::default(),
            task_time: Family::new_with_constructor(task),
            polls: Gauge::default(),
            poll_failures: Counter::default(),
        }
    }
}

/// Counts one in a gauge for as long as it lives.
#[derive(Debug)]
pub(crate) struct Counted(Gauge);

impl Counted {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    /// Counts an answer, or an error in place of one. `method` is a name in this program.
    pub(crate) fn called<T>(&self, method: &str, result: &Result<T>, took: Duration) {
        let method = method.to_owned();
        let outcome = outcome(result);
        self.latency
            .get_or_create(&MethodLabels { method: method.clone() })
            .observe(took.as_secs_f64());
        self.calls.get_or_create(&CallLabels { method, outcome }).inc();
    }

    pub(crate) fn logged_in<T>(&self, result: &Result<T>) {
        let outcome = match result {
            Ok(_) => "ok",
            Err(Error::Login { .. }) => "refused",
            Err(_) => "failed",
        };
        self.logins.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn session(&self) -> Counted {
        Counted::new(&self.sessions)
    }

    pub(crate) fn task(&self) -> Counted {
        Counted::new(&self.tasks)
    }

    pub(crate) fn task_ended(&self, name: &str, succeeded: bool, took: Duration) {
        let outcome = if succeeded { "ok" } else { "failed" };
        let labels = TaskLabels {
            task: known_task(name),
            outcome,
        };
        self.task_time.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn poll(&self) -> Counted {
        Counted::new(&self.polls)
    }

    pub(crate) fn poll_failed(&self) {
        self.poll_failures.inc();
    }

    pub fn register(&self, registry: &mut Registry) {
        let vsphere = registry.sub_registry_with_prefix("capstan_vsphere");
        vsphere.register(
            "requests",
            "Calls to vCenters by method and outcome",
            self.calls.clone(),
        );
        vsphere.register(
            "request_duration_seconds",
            "Time until a vCenter answered, by method",
            self.latency.clone(),
        );
        vsphere.register("logins", "Logins by outcome", self.logins.clone());
        vsphere.register("sessions", "Sessions that are open", self.sessions.clone());
        vsphere.register("tasks", "Tasks that Capstan waits for", self.tasks.clone());
        vsphere.register(
            "task_duration_seconds",
            "Time that Capstan waited for a task, by its kind and outcome",
            self.task_time.clone(),
        );
        vsphere.register("polls", "Long polls for changes that are open", self.polls.clone());
        vsphere.register(
            "poll_failures",
            "Long polls that ended with an error and were opened again",
            self.poll_failures.clone(),
        );
    }
}

fn outcome<T>(result: &Result<T>) -> &'static str {
    match result {
        Ok(_) => "ok",
        Err(Error::Fault { .. }) => "fault",
        Err(Error::Http { .. }) => "http",
        Err(Error::Unreachable { .. }) => "unreachable",
        Err(_) => "error",
    }
}

/// Returns the kind of a task by vCenter's name for it, such as `VirtualMachine.clone`.
fn known_task(name: &str) -> &'static str {
    const KNOWN: [&str; 6] = ["clone", "reconfigure", "reconfig", "poweron", "poweroff", "destroy"];
    let name = name.to_lowercase();
    let last = name.rsplit('.').next().unwrap_or_default();
    let found = KNOWN.into_iter().find(|known| last.starts_with(known));
    match found {
        Some("reconfig") => "reconfigure",
        Some(known) => known,
        None => "other",
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("VirtualMachine.clone", "clone")]
    #[case("VirtualMachine.reconfigure", "reconfigure")]
    #[case("reconfigVm", "reconfigure")]
    #[case("VirtualMachine.powerOn", "poweron")]
    #[case("a name that a hostile server invents", "other")]
    #[case("", "other")]
    fn only_known_tasks_become_labels(#[case] name: &str, #[case] expected: &str) {
        assert_eq!(known_task(name), expected);
    }
}
