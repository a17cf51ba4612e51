//! A local control plane from real parts, for tests, benches and `capstan up`.
//!
//! Invariants: only the requested parts are built, each once (see [`parts`]); every process that is started here ends
//! with the process that it was started for, even when that one is killed with SIGKILL (see [`process`]).

pub mod apiserver;
mod clusterapi;
pub mod controlplane;
mod files;
mod gobuild;
mod harness;
pub mod hostile;
pub mod interceptors;
pub mod manifests;
pub mod parts;
pub mod peers;
mod pki;
pub mod process;
mod shared;
pub mod tenants;
pub mod vcsim;

pub use controlplane::{ControlPlane, Options};
pub use files::{Lock, cache_dir, write_private};
pub use harness::{Harness, Objects, PATIENCE, Running, print_line, resource};
pub use vcsim::{Vcsim, vcsim};
