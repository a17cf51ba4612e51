//! Data disks: what they are called, where they are attached, what becomes of them, and how a guest finds them.

pub mod azure;
pub mod init;
pub mod vsphere;
