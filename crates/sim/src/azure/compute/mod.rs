//! Microsoft.Compute.

pub mod defaults;
pub mod disk;
pub mod eviction;
pub mod fleet;
pub mod flexible;
pub mod instances;
pub mod quota;
pub mod rules;
pub mod scale_set;
pub mod skus;
pub mod storage;
pub mod views;
pub mod vm;
