//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod finder;
mod groups;
mod hostile;
mod metrics;
mod order;
mod vcsim;
mod watching;
