//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod affinity;
mod clusters;
mod conversion;
mod costs;
mod crash;
mod ends;
mod faults;
mod in_use;
mod machines;
mod older_core;
mod plan;
mod pools;
mod rotation;
mod topology;
mod vcenter_rules;
mod vcenters;
mod world;
