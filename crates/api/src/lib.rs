//! The custom resources that Capstan serves and reads, one module per API group, without any IO.
//!
//! Fields, names and defaults are those of the controllers that Capstan replaces, so that a manifest written
//! for them loses nothing here; what Capstan adds is optional. Nothing unset is ever written.

#[macro_use]
mod macros;

pub mod azure;
pub mod capi;
mod cel;
pub mod common;
mod crds;
pub mod disk;
pub mod duration;
pub mod openshift;
mod schema;
pub mod vsphere;

pub use common::{ApiEndpoint, ClusterFailureDomain, Condition, MachineAddress, Quantity, TemplateMeta, V1Beta2Status};
pub use crds::{crds, file_name, manifest, template_policy};
pub use duration::Duration;
