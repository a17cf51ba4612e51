//! `infrastructure.cluster.x-k8s.io/v1beta2`, the vSphere half: the same objects as v1beta1 in another shape.
//!
//! Objects are stored as v1beta2, and Capstan requests and writes them as v1beta2. Its types have the fields of v1beta1. One table
//! says where each field is in the other version; from it follow the conversion of objects and the schema. Invariants: an object
//! that goes from one version to the other and back is the same object, and the conversion changes no metadata but annotations.

mod convert;
mod definitions;
mod fields;
mod wire;

pub use convert::{Unconvertible, convert};
pub use definitions::{CONVERT_PATH, CONVERTED, CONVERTED_LABEL, serve_v1beta2, set_service, store_as};
pub use wire::{read, write};

pub const V1BETA1: &str = "v1beta1";
pub const V1BETA2: &str = "v1beta2";
