//! What every planner answers with.

use std::fmt::Display;
use std::time::Duration;

use serde::Serialize;

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

/// What a step does to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Impact {
    /// It reads, or it writes a status.
    None,
    /// Nothing more happens before another actor does its part.
    Waits,
    /// It compares, and writes only what differs: with all writes refused it shows whether something differs.
    Ensures,
    /// It changes objects of a cluster.
    Cluster,
    /// It changes the cloud, with at least this many requests.
    Cloud(usize),
}

/// A step in words for people. `Display` completes the sentence "Capstan …".
pub trait Describe: Display {
    fn impact(&self) -> Impact;
}

impl Describe for std::convert::Infallible {
    fn impact(&self) -> Impact {
        match *self {}
    }
}

/// What follows a plan as long as everything goes well, and what is in the way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Forecast {
    /// What has to happen first, and Capstan does not do it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocked: Option<String>,
    /// In order; each waits until the one before is done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waves: Vec<Wave>,
    /// The machines that are kept as they are.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stay: Vec<String>,
    /// How many requests to the cloud the waves take at least; reads are not counted.
    pub cloud_calls: usize,
}

/// Machines that are added, removed or updated together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Wave {
    pub adds: usize,
    pub removes: Vec<String>,
    pub updates: Vec<String>,
}

impl Wave {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Display for Wave {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        if self.adds > 0 {
            parts.push(format!("adds {}", counted(self.adds)));
        }
        if !self.removes.is_empty() {
            parts.push(format!("removes {}", self.removes.join(", ")));
        }
        if !self.updates.is_empty() {
            parts.push(format!("updates {} in place", self.updates.join(", ")));
        }
        f.write_str(&parts.join("; "))
    }
}

/// Returns "1 machine" or "3 machines".
pub(crate) fn counted(machines: usize) -> String {
    match machines {
        1 => "1 machine".to_owned(),
        more => format!("{more} machines"),
    }
}
