//! The decisions: pure, synchronous, total functions. No clock, no IO, no Kubernetes client, no HTTP.

pub mod class;
pub mod disks;
pub mod drain;
pub mod interceptor;
pub mod rollout;
pub mod validate;

pub use class::Class;
