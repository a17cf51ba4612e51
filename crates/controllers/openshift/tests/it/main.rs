//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod crashes;
mod disks;
mod drains;
mod edges;
mod failures;
mod hostile;
mod kept;
mod lifecycle;
mod machineset;
mod network;
mod refusals;
mod rights;
mod room;
mod still;
mod succession;
mod support;
mod takeover;
mod ultra;
mod upstream;
mod webhook;
