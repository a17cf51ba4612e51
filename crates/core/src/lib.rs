//! The decisions: pure, synchronous, total functions. No IO, no Kubernetes client, no HTTP.
//!
//! Beside them are the few parts that every client and controller shares: error classes, interceptors, the clock,
//! backoff, memos, turns, memory and secrets.

pub mod adopt;
pub mod azure_names;
pub mod backoff;
pub mod class;
pub mod clock;
pub mod cluster;
pub mod disks;
pub mod drain;
pub mod interceptor;
pub mod machine;
pub mod machineset;
pub mod memo;
pub mod memory;
pub mod order;
pub mod plan;
pub mod pool;
pub mod secret;
pub mod turns;
pub mod validate;
pub mod vm;

pub use class::{Class, Classified};
pub use clock::Clock;
pub use memo::Memo;
pub use memory::Memory;
pub use secret::Secret;
