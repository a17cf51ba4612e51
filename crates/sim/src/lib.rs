//! Simulated clouds for tests, benchmarks and demonstrations.

pub mod azure;
