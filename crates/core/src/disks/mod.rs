//! Data disks: where they are put, what they are called, and how the guest finds them again.

pub mod vsphere;
