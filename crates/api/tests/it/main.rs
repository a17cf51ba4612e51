//! The integration tests of this crate, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should say where"
)]

mod admission;
mod cluster_class;
mod compatibility;
mod core_objects;
mod crds;
mod examples;
mod provider_spec;
mod round_trip;
mod support;
mod upstream_manifests;
