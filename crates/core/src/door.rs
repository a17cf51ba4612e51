//! The one door through which every effect on the outside world goes.
//!
//! The Kubernetes client and each cloud client ask their [`Doors`] before a request is sent and after its answer came.
//! In production a door is the lease fence (no cloud write once the lease is lost) or a counter for metrics; in tests it
//! counts, delays, fails or kills at the n-th effect, so that a crash test is a loop over n.

use std::sync::Arc;
use std::time::Duration;

/// Which outside world a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum World {
    /// A Kubernetes API server, the management cluster's or a workload cluster's.
    Kube,
    /// Azure Resource Manager.
    Azure,
    /// A vCenter.
    Vsphere,
}

/// One request about to be sent, or just answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub world: World,
    /// HTTP method, or the vim25 method's name.
    pub method: String,
    /// URL path without host and query, or the managed object's reference.
    pub target: String,
    /// Whether it changes the outside world (and so counts as an effect rather than a read).
    pub write: bool,
}

/// What a door says to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    /// Wait this long, then pass.
    Delay(Duration),
    /// Refuse it with this reason; the client reports it as a transient error.
    Refuse(String),
    /// Never answer: the process is as good as dead from here on.
    Hang,
}

/// A place where effects can be seen and stopped.
pub trait Door: Send + Sync {
    /// Asked before the request is sent.
    fn enter(&self, effect: &Effect) -> Verdict;
    /// Told after the answer came, before the caller sees it.
    fn leave(&self, _effect: &Effect) -> Verdict {
        Verdict::Pass
    }
}

/// All doors of one client, asked in order; the first that does not pass wins.
#[derive(Clone, Default)]
pub struct Doors(Vec<Arc<dyn Door>>);

impl Doors {
    pub fn new(doors: Vec<Arc<dyn Door>>) -> Self {
        Self(doors)
    }

    pub fn enter(&self, effect: &Effect) -> Verdict {
        self.first(|door| door.enter(effect))
    }

    pub fn leave(&self, effect: &Effect) -> Verdict {
        self.first(|door| door.leave(effect))
    }

    fn first(&self, ask: impl Fn(&dyn Door) -> Verdict) -> Verdict {
        self.0
            .iter()
            .map(|door| ask(door.as_ref()))
            .find(|verdict| *verdict != Verdict::Pass)
            .unwrap_or(Verdict::Pass)
    }
}

impl std::fmt::Debug for Doors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Doors({})", self.0.len())
    }
}
