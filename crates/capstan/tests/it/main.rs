//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod alerts;
mod catalogue;
mod check;
mod cluster;
mod fence;
mod offline;
mod product;
mod program;
mod up;
