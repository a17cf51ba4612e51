//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod benchmark;
mod beside_core;
mod crashes;
mod failures;
mod harness;
mod pools;
mod slow;
mod surroundings;
mod troubles;
