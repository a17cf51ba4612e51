//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod azure_json;
mod benchmark;
mod beside_core;
mod costs;
mod crashes;
mod edges;
mod failures;
mod harness;
mod identities;
mod in_place;
mod joining;
mod limits;
mod others;
mod plan;
mod pools;
mod promises;
mod role;
mod slow;
mod still;
mod surroundings;
mod takeover;
mod troubles;
mod upgrade;
mod waiting;
