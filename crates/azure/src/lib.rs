//! Azure Resource Manager for the controllers: small typed models, long-running operations that survive a restart, and
//! a request budget that keeps Capstan below Azure's published limits.
//!
//! Invariants kept here:
//! - one sign-in per credential until its token is about to expire, however many callers need it;
//! - no call is sent while a 429 stops its bucket, and the client retries nothing by itself;
//! - every request passes the [`capstan_core::interceptor::Interceptors`], so that tests can count, fail or stop each effect;
//! - names never change the address of a request, and only a resource that was read and proven owned is deleted;
//! - errors keep Azure's code, message and details, and are [`capstan_core::Classified`].

pub mod allowed;
pub mod assertion;
pub mod budget;
pub mod certificate;
pub mod client;
pub mod compute;
pub mod credential;
pub mod disks;
pub mod error;
pub mod id;
pub mod identities;
mod in_process;
pub mod metrics;
pub mod model;
pub mod network;
pub mod operation;
pub mod owned;
mod path;
pub mod request;
pub mod scale_sets;
pub mod settings;
pub mod skus;
mod token;
pub mod usages;

pub use allowed::{Allowed, ClientIdOf, Namespaces};
pub use capstan_core::Secret;
pub use client::{Client, Clients, Put};
pub use credential::{Credential, Identity};
pub use error::{ArmError, Error, FIXED_PROPERTY};
pub use id::ResourceId;
pub use in_process::InProcess;
pub use metrics::Metrics;
pub use operation::{Operation, Progress};
pub use owned::{Owned, Resource};
pub use request::Request;
pub use reqwest::Url;
pub use settings::{Cloud, Settings};
pub use skus::{Ability, Catalogue, Size};
