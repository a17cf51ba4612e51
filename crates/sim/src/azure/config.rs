//! The settings that can be made before the simulator starts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::Span;

/// The durations of operations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Times {
    pub vm_create: Span,
    pub vm_update: Span,
    pub vm_delete: Span,
    /// Start, power off, restart, deallocate.
    pub vm_power: Span,
    pub instance_create: Span,
    /// Manual upgrade and reimage.
    pub instance_update: Span,
    pub instance_delete: Span,
    pub network: Span,
    pub disk: Span,
    /// From `simulateEviction` to the VM's end.
    pub eviction: Span,
    /// From an instance's creation until lists show it.
    pub listing: Span,
    /// Added to every answer.
    pub latency: Span,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            vm_create: Span::secs(20),
            vm_update: Span::secs(5),
            vm_delete: Span::secs(10),
            vm_power: Span::secs(5),
            instance_create: Span::secs(20),
            instance_update: Span::secs(20),
            instance_delete: Span::secs(5),
            network: Span::ZERO,
            disk: Span::secs(1),
            eviction: Span::secs(30),
            listing: Span::ZERO,
            latency: Span::ZERO,
        }
    }
}

impl Times {
    /// Everything is done by the time the call is answered.
    pub const INSTANT: Times = Times {
        vm_create: Span::ZERO,
        vm_update: Span::ZERO,
        vm_delete: Span::ZERO,
        vm_power: Span::ZERO,
        instance_create: Span::ZERO,
        instance_update: Span::ZERO,
        instance_delete: Span::ZERO,
        network: Span::ZERO,
        disk: Span::ZERO,
        eviction: Span::ZERO,
        listing: Span::ZERO,
        latency: Span::ZERO,
    };

    /// Real operations, but short ones.
    pub fn quick() -> Self {
        Self {
            vm_create: Span::millis(500),
            vm_update: Span::millis(200),
            vm_delete: Span::millis(300),
            vm_power: Span::millis(200),
            instance_create: Span::millis(500),
            instance_update: Span::millis(500),
            instance_delete: Span::millis(300),
            disk: Span::millis(100),
            eviction: Span::millis(300),
            ..Self::INSTANT
        }
    }
}

/// Refusals and spellings of Azure that can be switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strict {
    /// Compute's lists, and all answers about instances, spell the resource group in upper case.
    pub upper_case_groups: bool,
    /// Properties that are fixed at the creation of a scale set or availability set cannot change.
    pub fixed_properties: bool,
    /// Windows needs an administrator's password.
    pub windows_password: bool,
}

impl Strict {
    pub const ALL: Strict = Strict {
        upper_case_groups: true,
        fixed_properties: true,
        windows_password: true,
    };

    pub const NONE: Strict = Strict {
        upper_case_groups: false,
        fixed_properties: false,
        windows_password: false,
    };
}

/// A resource group with a network that is there from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub group: String,
    pub location: String,
    pub vnet: String,
    pub subnets: Vec<String>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            group: "capstan".into(),
            location: "eastus".into(),
            vnet: "capstan-vnet".into(),
            subnets: vec!["default".into(), "node-subnet".into(), "worker-subnet".into()],
        }
    }
}

#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    /// The bearer token of the admin API. Required where others than this machine can reach the listener.
    pub admin_token: Option<String>,
    /// Whether the certificate names Azure's public hosts too, for clients that a hosts file points here.
    pub public_hosts: bool,
    pub subscription: String,
    pub tenant: String,
    pub client_id: String,
    pub client_secret: String,
    pub seed: u64,
    /// The time of day at the start; the present if not given.
    pub start: Option<jiff::Timestamp>,
    pub times: Times,
    /// Off unless asked for: other programs use the simulator as well, and stumble over it.
    pub strict: Strict,
    /// The only actions that the client may take, such as `Microsoft.Compute/disks/delete`; `*` matches any text.
    /// `None` allows everything.
    pub allowed_actions: Option<Vec<String>>,
    /// Seconds in `Retry-After` of compute operations; Azure sends 10. Zero leaves the header out.
    pub retry_after: u64,
    /// The same for network operations; Azure sends 1 or 2.
    pub network_retry_after: u64,
    /// Whether calls beyond Azure's published limits are answered with 429.
    pub throttle: bool,
    /// Items in one page of a list.
    pub page_size: usize,
    /// Cores per subscription and region. A third of it per family is enforced only with `family_cores`.
    pub regional_cores: u64,
    pub family_cores: Option<u64>,
    pub token_lifetime: Duration,
    /// Calls without a valid bearer token are refused.
    pub require_token: bool,
    pub networks: Vec<Network>,
    /// Provider namespaces that must be registered before use.
    pub unregistered: Vec<String>,
    /// State is loaded from here at the start and saved here at the end.
    pub state: Option<PathBuf>,
    /// The file that gets the authority's certificate. Without it, a file of its own that is removed with the
    /// simulator.
    pub ca_file: Option<PathBuf>,
    /// Nodes of running instances join the clusters named here.
    pub joiner: Option<crate::azure::joiner::Options>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            admin_token: None,
            public_hosts: false,
            subscription: "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b".into(),
            tenant: "9d1e2f3a-4b5c-4d6e-8f70-1a2b3c4d5e6f".into(),
            client_id: "c1a2b3c4-d5e6-4f70-8a9b-0c1d2e3f4a5b".into(),
            client_secret: "simulated-secret".into(),
            seed: 1,
            start: None,
            times: Times::default(),
            strict: Strict::NONE,
            allowed_actions: None,
            retry_after: 10,
            network_retry_after: 1,
            throttle: false,
            page_size: 200,
            regional_cores: 100_000,
            family_cores: None,
            token_lifetime: Duration::from_secs(3599),
            require_token: true,
            networks: vec![Network::default()],
            unregistered: Vec::new(),
            state: None,
            ca_file: None,
            joiner: None,
        }
    }
}

impl Config {
    /// For tests: short operations and `Retry-After: 1`.
    pub fn quick() -> Self {
        Self {
            times: Times::quick(),
            retry_after: 1,
            ..Self::default()
        }
    }

    /// For tests that do not care for operations at all.
    pub fn instant() -> Self {
        Self {
            times: Times::INSTANT,
            ..Self::default()
        }
    }
}
