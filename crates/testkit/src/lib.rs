//! A local control plane from real parts, for tests, benches and `capstan up`.
//!
//! Invariants: nothing is built that was not asked for, and nothing twice (see [`parts`]); every process started here
//! ends with whoever it was started for, even when that one is killed with SIGKILL (see [`process`]).

pub mod controlplane;
mod files;
mod gobuild;
pub mod manifests;
pub mod parts;
mod pki;
pub mod process;
mod shared;

pub use controlplane::{ControlPlane, Options};
pub use files::cache_dir;
