//! Machines whose node never joins the cluster: the pool reports them, and replaces them after a timeout.

use std::time::Duration;

use super::waiting::list;
use super::{Machine, Observed};
use crate::backoff::exponential;

/// A node that has not joined after this time is reported: most join within two or three minutes.
pub const JOIN_PATIENCE: Duration = Duration::from_secs(300);
/// The timeout of a pool that sets none: twice Cluster API's default for health checks, because Windows takes longer.
pub const STARTUP_TIMEOUT: Duration = Duration::from_secs(1200);

/// The timeout doubles no more often than this: after ten hours somebody may have repaired what keeps the nodes away.
const DOUBLINGS: u32 = 5;

/// Returns after how long a machine without a node is replaced. It doubles whenever as many as the budget takes at once were
/// replaced and no node has joined since: then the fault is not the machine's, and a replacement does not help.
pub(super) fn timeout(observed: &Observed) -> Option<Duration> {
    let waves = observed.unjoined.div_ceil(observed.budget.width());
    let waves = u32::try_from(waves).unwrap_or(u32::MAX);
    let timeout = observed.startup_timeout?;
    let longest = timeout.saturating_mul(1 << DOUBLINGS);
    Some(exponential(timeout, longest, waves.saturating_add(1)))
}

impl Machine {
    /// Whether its node has not joined within the timeout.
    pub(super) fn never_joined(&self, timeout: Option<Duration>) -> bool {
        let late = |(waited, timeout)| waited >= timeout;
        self.exists() && self.joining.zip(timeout).is_some_and(late)
    }

    /// Whether its node is so late that people should know.
    fn is_late(&self, timeout: Option<Duration>) -> bool {
        let patience = timeout.map_or(JOIN_PATIENCE, |timeout| timeout.min(JOIN_PATIENCE));
        self.exists() && !self.leaving() && self.joining.is_some_and(|waited| waited >= patience)
    }
}

/// Returns the sentence about machines whose nodes are late, if any are.
pub fn not_joined(observed: &Observed) -> Option<String> {
    let timeout = timeout(observed);
    let late = observed.machines.iter().filter(|machine| machine.is_late(timeout));
    let names: Vec<&str> = late.map(|machine| machine.name.as_str()).collect();
    if names.is_empty() {
        return None;
    }
    let replaced = match timeout {
        Some(timeout) => format!("is replaced after {} s (nodeStartupTimeout)", timeout.as_secs()),
        None => "stays, because nodeStartupTimeout is 0".to_owned(),
    };
    Some(format!(
        "waiting for the node of {}: the instance runs, and no node has joined the cluster; read its boot diagnostics \
         and the log of its bootstrap. A machine without a node {replaced}",
        list(names)
    ))
}

/// Returns when a machine without a node is next reported or replaced.
pub(super) fn next(observed: &Observed) -> Option<Duration> {
    let times = [Some(JOIN_PATIENCE), timeout(observed)];
    let staying = observed.machines.iter().filter(|machine| !machine.leaving());
    let waits = staying.filter_map(|machine| machine.joining);
    let left = waits.flat_map(|waited| times.into_iter().flatten().map(move |time| time.saturating_sub(waited)));
    left.filter(|left| !left.is_zero()).min()
}
