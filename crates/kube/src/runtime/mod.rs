//! The reconcile runtime. Every controller is an implementation of [`Reconcile`]; everything else is here, once.
//!
//! A reconcile is observe → plan → apply → status:
//!
//! - **observe** reads the caches and the cloud. It writes nothing.
//! - **plan** is pure and lives in `capstan_core`. It answers with steps that carry their subject.
//! - **apply** carries out one step at a time. It makes no decision: the process may die between any two steps, and the
//!   next reconcile observes what was done and plans the rest.
//! - **status** is pure. It answers with the object as users should see it and with events; the runtime writes the
//!   difference in one patch.
//!
//! Invariants that the runtime keeps for every controller:
//!
//! - One reconcile at a time for one object, at most [`Reconcile::CONCURRENCY`] in all.
//! - A reconcile never works on an older version of its object than the one that the API server answered our last write
//!   with, and does not start before the caches show our last writes of other objects (see [`Writes`]). It waits for
//!   them no longer than [`READ_YOUR_WRITES`], then it reads live.
//! - The state of an object lives as long as the object is in the cache. Losing it is always safe.
//! - An object that the watch filter leaves out is not reconciled, also if another object triggers it (see [`crate::Context::reconciles`]).
//! - A failed reconcile is retried by our backoff and by nothing else. A panic counts as a failure of that object alone.

mod places;
mod preview;
mod run;
mod scope;
mod writes;

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use capstan_core::Classified;
pub use capstan_core::plan::Plan;
use capstan_core::plan::{Describe, Forecast};
use jiff::Timestamp;
use serde::Serialize;

use crate::cache::Object;
use crate::events::Level;

pub use preview::{Planned, PlannedStep, Preview};
pub use run::{Reconciler, Trigger};
pub use scope::{ObjectKey, Scope, Waker};
pub use writes::{READ_YOUR_WRITES, Version, Writes};

/// Brings objects of one kind to their desired state.
pub trait Reconcile: Send + Sync + 'static {
    /// The kind.
    type Object: Object + Serialize;
    /// What is kept in memory between reconciles of one object. Losing it is always safe.
    type State: Default + Send + 'static;
    /// Everything that the plan depends on.
    type Observed: Send + Sync;
    /// One effect, with its subject and the proof that it may happen.
    type Step: Describe + Debug + Send;
    type Error: From<crate::Error> + std::error::Error + Classified + Send + Sync + 'static;

    /// The controller's name in metrics and logs.
    const NAME: &'static str;
    /// The component that events are reported by.
    const COMPONENT: &'static str;
    /// Enough reconciles at once to keep a cloud busy, few enough not to flood an API server. Each namespace has some more for
    /// itself.
    const CONCURRENCY: u16 = 32;

    /// Reads everything that the plan depends on. `None`: the object is not for this controller, or there is nothing to
    /// do for it until it changes.
    fn observe(
        &self,
        scope: &mut Scope<Self::Object>,
        state: &mut Self::State,
    ) -> impl Future<Output = Result<Option<Self::Observed>, Self::Error>> + Send;

    /// Decides. Pure: the same observation and time give the same plan.
    fn plan(observed: &Self::Observed, now: Timestamp) -> Plan<Self::Step>;

    /// Returns what follows the plan, and what is in the way, for people who ask before anything is done. Pure.
    fn forecast(_: &Self::Observed, _now: Timestamp) -> Forecast {
        Forecast::default()
    }

    /// Carries out one step.
    fn apply(
        &self,
        step: Self::Step,
        observed: &mut Self::Observed,
        scope: &mut Scope<Self::Object>,
        state: &mut Self::State,
    ) -> impl Future<Output = Result<Outcome, Self::Error>> + Send;

    /// Returns the object with the status that users should see, and the events to record. `observed` is `None` where
    /// observing itself failed. Pure; the runtime writes what differs.
    fn status(
        object: &Self::Object,
        observed: Option<&Self::Observed>,
        result: Result<(), &Self::Error>,
        now: Timestamp,
    ) -> Report<Self::Object>;

    /// Takes notice of a status that was written, for metrics.
    fn reported(&self, _before: &Self::Object, _after: &Self::Object) {}
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done: the next step of the plan follows.
    Done,
    /// The step changed what the plan depends on: observe and plan again at once.
    Observe,
    /// The rest of the plan has to wait for something: an event will come, or this much time passes.
    Wait(Option<Duration>),
}

/// What users should see of an object.
#[derive(Clone, Debug)]
pub struct Report<K> {
    /// The object with its new status. `None`: the status stays.
    pub object: Option<K>,
    pub events: Vec<EventNote>,
    /// Write the status only this long after the last write, unless the spec has changed since.
    pub pace: Option<Duration>,
}

impl<K> Report<K> {
    pub fn of(object: K) -> Self {
        Self {
            object: Some(object),
            ..Self::nothing()
        }
    }

    pub fn nothing() -> Self {
        Self {
            object: None,
            events: Vec::new(),
            pace: None,
        }
    }
}

/// An event to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventNote {
    pub level: Level,
    pub reason: &'static str,
    pub message: String,
}

impl EventNote {
    pub fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            level: Level::Normal,
            reason,
            message: message.into(),
        }
    }

    pub fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            reason,
            message: message.into(),
        }
    }
}
