//! Draining the node of a machine: whether it is needed, which pods go, and the proof that it is over.
//!
//! Invariant: to delete or reimage a machine takes a [`Drained`] by value, and only this module makes one.
//!
//! How a controller uses it:
//! 1. It fills in a [`Request`] from what it observed and calls [`assess`] in its plan.
//!    [`Assessment::Drained`] carries the proof: no drain is needed, or there is no more time for it.
//!    [`Assessment::Wait`] is a reason for the condition. [`Assessment::Drain`] is a step.
//! 2. It carries that step out with `capstan_kube::drain::Drainer::drain`, which answers `Outcome::Drained(Drained)`
//!    once a live list shows an empty node, and `Outcome::Draining` with the obstacles before.
//! 3. The step that deletes or reimages holds the [`Drained`] and takes the machine from it ([`Drained::machine`]), so
//!    that the proof for one machine cannot be used for another.

mod obstacle;
mod pods;
mod proof;

pub use obstacle::{Obstacle, ObstacleReason, describe, refused_eviction};
pub use pods::{
    EVICTIONS_PER_RECONCILE, Eviction, Label, Options, Owner, Plan, Pod, PodAction, PodName, Refusal, Source,
    UNREACHABLE_PATIENCE, Warning, decide, plan,
};
pub use proof::{Assessment, Drained, DrainedElsewhere, NodeState, NotNeeded, Reason, Request, assess};
