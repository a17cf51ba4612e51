//! Decides about the objects around machines: clusters, their Secrets and cluster modules, deployment zones, identities.
//!
//! Invariants: a cluster is released only after its last machine; an object that another manager reconciles is never written;
//! only a Secret that has the shape of an identity gets an owner and a finalizer.

pub mod azure;
pub mod azure_json;
pub mod identity;
pub mod modules;
pub mod secrets;
pub mod vsphere;
pub mod zone;
