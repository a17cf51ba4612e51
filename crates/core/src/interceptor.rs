//! Interceptors: every request that Capstan sends to another system passes them.
//!
//! The Kubernetes client and each cloud client call their [`Interceptors`] directly before a request is sent and after
//! its answer arrived. In production the lease fence is an interceptor: it rejects writes once the lease has expired. In
//! tests an interceptor counts, delays, rejects or stops at the n-th effect, so a crash test is a loop over n.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::sleep;

/// The system that a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum System {
    /// A Kubernetes API server: the management cluster's or a workload cluster's.
    Kube,
    /// Azure Resource Manager.
    Azure,
    /// A vCenter.
    Vsphere,
}

/// One request that is about to be sent, or whose answer just arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub system: System,
    /// HTTP method, or the vim25 method's name.
    pub method: String,
    /// URL path without host and query, or the managed object's reference.
    pub target: String,
    /// Whether the request changes the other system (an effect) or only reads from it.
    pub write: bool,
}

/// What an interceptor does with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    /// Wait this long, then pass.
    Delay(Duration),
    /// Reject the request with this reason; the client reports a transient error.
    Refuse(String),
    /// Never answer: the process is as good as dead from here on.
    Hang,
}

impl Verdict {
    /// Waits for as long as the verdict asks. The error is the reason of a rejection.
    pub async fn enforce(self) -> Result<(), String> {
        match self {
            Self::Pass => Ok(()),
            Self::Delay(time) => {
                sleep(time).await;
                Ok(())
            }
            Self::Refuse(reason) => Err(reason),
            Self::Hang => std::future::pending().await,
        }
    }
}

/// Sees every request, and may delay or reject it.
pub trait Interceptor: Send + Sync {
    /// Called before the request is sent.
    fn before(&self, effect: &Effect) -> Verdict;
    /// Called after the answer arrived, before the caller gets it.
    fn after(&self, _effect: &Effect) -> Verdict {
        Verdict::Pass
    }
}

/// The interceptors of one client, called in order; the first verdict other than [`Verdict::Pass`] counts.
#[derive(Clone, Default)]
pub struct Interceptors(Vec<Arc<dyn Interceptor>>);

impl Interceptors {
    pub fn new(interceptors: Vec<Arc<dyn Interceptor>>) -> Self {
        Self(interceptors)
    }

    /// Returns these interceptors, followed by `more`.
    pub fn and(&self, more: Vec<Arc<dyn Interceptor>>) -> Self {
        Self(self.0.iter().cloned().chain(more).collect())
    }

    pub fn before(&self, effect: &Effect) -> Verdict {
        self.first(|interceptor| interceptor.before(effect))
    }

    pub fn after(&self, effect: &Effect) -> Verdict {
        self.first(|interceptor| interceptor.after(effect))
    }

    fn first(&self, ask: impl Fn(&dyn Interceptor) -> Verdict) -> Verdict {
        self.0
            .iter()
            .map(|interceptor| ask(interceptor.as_ref()))
            .find(|verdict| *verdict != Verdict::Pass)
            .unwrap_or(Verdict::Pass)
    }
}

impl std::fmt::Debug for Interceptors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Interceptors({})", self.0.len())
    }
}
