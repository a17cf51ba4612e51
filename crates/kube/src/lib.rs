//! Everything Kubernetes that is not a decision: client profiles, trimmed shared caches, conditions, events, patches,
//! backoff, and the runtime that runs every controller.

pub mod backoff;
mod bounds;
pub mod cache;
pub mod capi;
pub mod client;
pub mod conditions;
pub mod context;
pub mod drain;
mod dropped;
pub mod error;
pub mod events;
pub mod grant;
pub mod lease;
pub mod metrics;
pub mod nodes;
pub mod objects;
mod pages;
pub mod patch;
mod rewatch;
pub mod runtime;
pub mod serve;
mod served;
#[cfg(test)]
mod stub;
pub mod webhook;
pub mod workload;

pub use cache::Cache;
pub use context::{Context, Options};
pub use drain::Drainer;
pub use error::{Classified, Error};
pub use events::Recorder;
pub use metrics::Metrics;
