//! What every planner answers with.

use std::time::Duration;

/// Steps in order, and when to reconcile again if nothing changes until then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan<S> {
    pub steps: Vec<S>,
    /// `None`: not before something changes.
    pub requeue: Option<Duration>,
}

impl<S> Plan<S> {
    /// Nothing to do until something changes.
    pub fn idle() -> Self {
        Self {
            steps: Vec::new(),
            requeue: None,
        }
    }

    pub fn step(step: S) -> Self {
        Self {
            steps: vec![step],
            requeue: None,
        }
    }

    pub fn after(requeue: Duration) -> Self {
        Self {
            steps: Vec::new(),
            requeue: Some(requeue),
        }
    }
}
