//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod basics;
mod drain;
mod example;
mod lease;
mod marking;
mod panics;
mod still;
mod stub;
mod watch_filter;
mod workload;
