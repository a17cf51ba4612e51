//! The state of a machine that this process keeps between reconciles. Losing it costs a few calls, never a machine:
//! everything in it can be read again from the API server or from Azure.

use super::dependencies::Dependencies;
use super::teardown::Teardown;
use capstan_api::openshift::Machine;
use capstan_azure::Operation;
use capstan_core::drain::Drained;
use kube::ResourceExt as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

/// A machine whose Node is not ready or gone is observed this often: the virtual machine may be stopped or gone.
const UNWELL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub struct State {
    /// The operation on the virtual machine that runs in Azure.
    pub operation: Option<Operation>,
    /// The operation in the status is over, and came to nothing.
    pub operation_over: bool,
    observation: Option<Observation>,
    /// Azure refused to create the virtual machine because there is one.
    pub may_exist: bool,
    /// While Azure works on them. Boxed: few machines are created at a time.
    pub dependencies: Option<Box<Dependencies>>,
    /// The user data as the request has it, from the checks until the request.
    pub user_data: Option<UserData>,
    /// Disks of others that an attempt to create the machine ran into.
    pub conflicting_disks: Vec<String>,
    /// The proof that the drain of this process has made.
    pub drained: Option<Drained>,
    /// An event says that the drain has begun.
    pub drain_reported: bool,
    /// An event says that there is no drain.
    pub skip_reported: bool,
    pub teardown: Option<Box<Teardown>>,
}

/// User data; it holds keys of the cluster, so it is never shown.
pub struct UserData(pub String);

impl std::fmt::Debug for UserData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UserData")
    }
}

#[derive(Clone, Copy, Debug)]
struct Observation {
    at: Instant,
    fingerprint: u64,
}

impl State {
    /// Azure runs this operation from now on, or none.
    pub fn follow(&mut self, operation: Option<Operation>) {
        self.operation = operation;
        self.operation_over = false;
    }

    /// The virtual machine came after all: a request for it was carried out late.
    pub fn begin_teardown_anew(&mut self) {
        self.teardown = None;
        self.operation = None;
        self.operation_over = true;
    }

    /// The virtual machine was observed.
    pub fn observed(&mut self, machine: &Machine, now: Instant) {
        self.observation = Some(Observation {
            at: now,
            fingerprint: fingerprint(machine),
        });
    }

    /// We wrote the machine ourselves: no reason to ask Azure.
    pub fn wrote(&mut self, machine: &Machine) {
        if let Some(observation) = self.observation.as_mut() {
            observation.fingerprint = fingerprint(machine);
        }
    }

    /// Returns how long until Azure ought to be asked about the machine again. Machines that this process has not
    /// observed yet are spread over the first interval, so that a restart does not ask about all of them at once.
    pub fn next_observation(&mut self, machine: &Machine, every: Duration, unwell: bool, now: Instant) -> Duration {
        let Some(observation) = self.observation else {
            let spread = every.mul_f64(share(machine));
            let at = now.checked_sub(spread).unwrap_or(now);
            self.observed(machine, at);
            return if unwell {
                Duration::ZERO
            } else {
                every.saturating_sub(spread)
            };
        };
        if observation.fingerprint != fingerprint(machine) {
            return Duration::ZERO;
        }
        let every = if unwell { UNWELL.min(every) } else { every };
        every.saturating_sub(now.saturating_duration_since(observation.at))
    }
}

/// Somewhere in 0..0.9, the same for the same machine.
fn share(machine: &Machine) -> f64 {
    let mut hasher = DefaultHasher::new();
    machine.metadata.uid.hash(&mut hasher);
    (hasher.finish() % 900) as f64 / 1000.0
}

/// Returns a hash of everything that users change.
fn fingerprint(machine: &Machine) -> u64 {
    let mut hasher = DefaultHasher::new();
    (machine.metadata.generation, machine.labels(), machine.annotations()).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_core::Clock;

    #[test]
    fn azure_is_asked_after_a_change_by_the_user_and_not_after_one_of_ours() {
        let (mut state, hour, now) = (State::default(), Duration::from_secs(3600), Clock::system().instant());
        let mut machine = Machine::new("m", Default::default());
        state.observed(&machine, now);
        assert_eq!(state.next_observation(&machine, hour, false, now), hour);
        machine.annotations_mut().insert("a".into(), "b".into());
        assert_eq!(state.next_observation(&machine, hour, false, now), Duration::ZERO);
        state.wrote(&machine);
        assert_eq!(state.next_observation(&machine, hour, false, now), hour);
        assert_eq!(state.next_observation(&machine, hour, true, now), UNWELL);
    }
}
