//! Cluster API machines on vSphere.

pub mod domain;
pub mod plan;
