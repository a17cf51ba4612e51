//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod crash;
mod disks;
mod edges;
mod hostile;
mod machines;
mod machineset;
mod network;
mod support;
mod trouble;
mod webhook;
