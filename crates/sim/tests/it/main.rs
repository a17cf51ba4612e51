//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod exposure;
mod joining;
mod machines;
mod program;
mod real_clients;
mod recorded;
mod scale_sets;
mod strict;
mod support;
mod time;
