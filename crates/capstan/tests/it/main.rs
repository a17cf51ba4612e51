//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod adopt;
mod alerts;
mod azure_json;
mod catalogue;
mod charts;
mod check;
mod cluster;
mod dashboards;
mod deploy;
mod docs;
mod fence;
mod hostile;
mod image;
mod metrics;
mod offline;
mod orphans;
mod overlay;
mod peers;
mod plan;
mod product;
mod program;
mod rights;
mod templates;
mod up;
