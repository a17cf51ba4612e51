//! The state of the simulated cloud, and what will happen to it.
//!
//! Resources are JSON documents under their lower-cased id; instances of Uniform scale sets are small structs beside their
//! set, rendered when asked for, so that ten thousand of them stay small. Everything that takes time is an [`Effect`] in one
//! queue ordered by time, so that state can be saved, loaded, and driven by a paused clock.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::clock::{Chance, Clock};
use super::compute::fleet::Fleet;
use super::config::Config;
use super::faults::Faults;
use super::operations::Operation;
use super::wire::{Answer, Call, Fail, Reply, same, text};

/// One resource.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Doc {
    pub body: Value,
    /// Counts changes; the ETag.
    pub version: u64,
    /// The parts that Azure stores but never returns, such as custom data and the power state.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub hidden: Map<String, Value>,
}

impl Doc {
    pub fn new(body: Value) -> Self {
        Self {
            body,
            version: 1,
            hidden: Map::new(),
        }
    }

    pub fn state(&self) -> &str {
        text(&self.body, "/properties/provisioningState").unwrap_or("Succeeded")
    }

    pub fn set_state(&mut self, state: &str) {
        self.body["properties"]["provisioningState"] = json!(state);
        self.version += 1;
    }

    pub fn location(&self) -> &str {
        text(&self.body, "/location").unwrap_or_default()
    }

    pub fn id(&self) -> &str {
        text(&self.body, "/id").unwrap_or_default()
    }

    pub fn name(&self) -> &str {
        text(&self.body, "/name").unwrap_or_default()
    }

    pub fn kind(&self) -> &str {
        text(&self.body, "/type").unwrap_or_default()
    }

    pub fn hidden(&self, name: &str) -> &str {
        self.hidden.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn hide(&mut self, name: &str, value: impl Into<Value>) {
        self.hidden.insert(name.into(), value.into());
    }
}

/// Something that happens at a point in time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// An operation comes to its end.
    Operation(String),
    /// A resource reaches this provisioning state.
    State(String, String),
    /// A resource disappears.
    Remove(String),
    /// A VM runs, or has failed with this error.
    VmCreated(String, Option<Fail>),
    VmUpdated(String),
    VmRemoved {
        vm: String,
        keep_disks: bool,
    },
    /// A VM, or an instance of a scale set, reaches this power state.
    VmPower(String, String),
    InstanceCreated {
        set: String,
        id: u64,
        fail: Option<Fail>,
    },
    InstanceUpgraded {
        set: String,
        id: u64,
    },
    InstanceReimaged {
        set: String,
        id: u64,
    },
    InstanceRemoved {
        set: String,
        id: u64,
    },
    InstancePower {
        set: String,
        id: u64,
        power: String,
    },
    /// Lists show the instance from now on.
    InstanceListed {
        set: String,
        id: u64,
    },
    /// Lists show the VM of a Flexible scale set from now on.
    VmListed(String),
    /// A scale set has nothing more to do, or has failed.
    SetSettled(String, Option<Fail>),
    SetRemoved(String),
    /// A spot VM or instance is evicted.
    Evict(String),
}

pub struct World {
    pub config: Config,
    pub clock: Clock,
    pub chance: Chance,
    pub docs: BTreeMap<String, Doc>,
    pub fleets: BTreeMap<String, Fleet>,
    pub operations: HashMap<String, Operation>,
    pub faults: Faults,
    pub providers: BTreeMap<String, bool>,
    pub(super) queue: BTreeMap<(Instant, u64), Effect>,
    pub(super) ticket: u64,
    pub(super) addresses: u32,
    /// Instances and VMs whose life changed since the joiner last looked.
    pub(super) touched: std::collections::BTreeSet<String>,
}

impl World {
    pub fn new(config: Config) -> Self {
        let providers = super::resources::providers(&config);
        let mut world = Self {
            clock: Clock::start(config.start),
            chance: Chance::new(config.seed),
            docs: BTreeMap::new(),
            fleets: BTreeMap::new(),
            operations: HashMap::new(),
            faults: Faults::default(),
            providers,
            queue: BTreeMap::new(),
            ticket: 0,
            addresses: 0,
            touched: Default::default(),
            config,
        };
        for network in world.config.networks.clone() {
            world.make_network(&network);
        }
        world
    }

    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Puts an effect into the queue. What takes no time happens at once.
    pub fn later(&mut self, takes: Duration, effect: Effect) {
        if takes.is_zero() {
            return self.happen(effect);
        }
        self.ticket += 1;
        self.queue.insert((self.now() + takes, self.ticket), effect);
    }

    /// Lets everything happen that is due.
    pub fn advance(&mut self) {
        let now = self.now();
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let effect = entry.remove();
            self.happen(effect);
        }
    }

    /// Returns the time of tokio's clock at the next effect.
    pub fn next_due(&self) -> Option<Instant> {
        self.queue.first_key_value().map(|((at, _), _)| self.clock.real(*at))
    }

    fn happen(&mut self, effect: Effect) {
        match effect {
            Effect::Operation(id) => self.end_operation(&id, None),
            Effect::State(key, state) => {
                if let Some(doc) = self.docs.get_mut(&key) {
                    doc.set_state(&state);
                }
            }
            Effect::Remove(key) => self.remove_resource(&key),
            Effect::VmCreated(key, fail) => self.vm_created(&key, fail),
            Effect::VmUpdated(key) => self.vm_updated(&key),
            Effect::VmRemoved { vm, keep_disks } => self.vm_removed(&vm, keep_disks),
            Effect::VmPower(key, power) => self.vm_power(&key, &power),
            Effect::InstanceCreated { set, id, fail } => self.instance_created(&set, id, fail),
            Effect::InstanceUpgraded { set, id } => self.instance_upgraded(&set, id),
            Effect::InstanceReimaged { set, id } => self.instance_reimaged(&set, id),
            Effect::InstanceRemoved { set, id } => self.instance_removed(&set, id),
            Effect::InstancePower { set, id, power } => self.instance_power(&set, id, &power),
            Effect::InstanceListed { set, id } => self.instance_listed(&set, id),
            Effect::VmListed(key) => {
                if let Some(doc) = self.docs.get_mut(&key) {
                    doc.hidden.shift_remove(UNLISTED);
                }
            }
            Effect::SetSettled(key, fail) => self.set_settled(&key, fail),
            Effect::SetRemoved(key) => self.set_removed(&key),
            Effect::Evict(key) => self.evicted(&key),
        }
    }

    /// Drops the pending effects on a resource that is deleted or about to be.
    pub fn forget(&mut self, concerns: impl Fn(&Effect) -> bool) {
        self.queue.retain(|_, effect| !concerns(effect));
    }

    pub fn get(&self, key: &str) -> Option<&Doc> {
        self.docs.get(&key.to_lowercase())
    }

    /// Checks `If-Match` and `If-None-Match` against the stored resource.
    pub fn precondition(&self, call: &Call, current: Option<u64>) -> Result<(), Fail> {
        let network = same(call.segment(5), "Microsoft.Network");
        let tag = |version: u64| etag(network, version);
        let refused = match (call.header("if-match"), call.header("if-none-match"), current) {
            (Some("*"), _, None) => true,
            (Some(wanted), _, current) if wanted != "*" => current.is_none_or(|v| unquote(wanted) != unquote(&tag(v))),
            (_, Some("*"), Some(_)) => true,
            (_, Some(unwanted), Some(v)) => unquote(unwanted) == unquote(&tag(v)),
            _ => false,
        };
        if !refused {
            return Ok(());
        }
        let wanted = call
            .header("if-match")
            .or(call.header("if-none-match"))
            .unwrap_or_default();
        Err(Fail::new(
            412,
            "PreconditionFailed",
            format!(
                "The precondition given in the request headers evaluated to false: the etag provided in the header, {wanted}, \
                 does not fit the resource {}.",
                call.path
            ),
        ))
    }

    /// One page of a list, with a link to the next.
    pub fn page(&self, call: &Call, keys: Vec<String>, render: impl Fn(&str) -> Option<Value>) -> Reply {
        let after = call.query.get("$skiptoken").cloned().unwrap_or_default();
        let size = call
            .query
            .get("$top")
            .and_then(|top| top.parse().ok())
            .unwrap_or(self.config.page_size)
            .max(1);
        let mut keys = keys.into_iter().filter(|key| key.as_str() > after.as_str());
        let mut items = Vec::new();
        let mut last = String::new();
        for key in keys.by_ref() {
            if let Some(item) = render(&key) {
                items.push(item);
                last = key;
            }
            if items.len() == size {
                break;
            }
        }
        let mut body = json!({ "value": items });
        if keys.next().is_some() {
            let others: String = call
                .query
                .iter()
                .filter(|(name, _)| !["$skiptoken", "api-version"].contains(&name.as_str()))
                .map(|(name, value)| format!("&{name}={}", super::wire::encode(value)))
                .collect();
            let token = super::wire::encode(&last);
            let version = call.api_version();
            body["nextLink"] = json!(format!(
                "{}{}?api-version={version}{others}&$skiptoken={token}",
                call.base, call.path
            ));
        }
        Ok(Answer::ok(body))
    }

    /// Keys of documents that start with `prefix`, in order.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        self.docs
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// Returns a private address that is not assigned yet.
    pub fn address(&mut self) -> u32 {
        self.addresses += 1;
        self.addresses
    }

    /// Notifies the joiner that this VM or instance was created, changed or deleted.
    pub fn touch(&mut self, id: &str) {
        self.touched.insert(id.to_lowercase());
    }
}

/// Marks a VM that lists do not show yet.
pub const UNLISTED: &str = "unlisted";

/// The IPv4 addresses of a subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    first: u32,
    bits: u32,
}

impl Default for Range {
    fn default() -> Self {
        Self {
            first: u32::from(Ipv4Addr::new(10, 0, 0, 0)),
            bits: 8,
        }
    }
}

impl Range {
    pub fn parse(prefix: &str) -> Option<Self> {
        let (first, bits) = prefix.split_once('/')?;
        let (first, bits): (Ipv4Addr, u32) = (first.parse().ok()?, bits.parse().ok()?);
        (bits <= 29).then_some(Self {
            first: u32::from(first),
            bits,
        })
    }

    /// The n-th address. Azure keeps the first four of every subnet, and the last.
    pub fn address(self, n: u32) -> String {
        let usable = (1_u64 << (32 - self.bits)) - 5;
        let offset = 4 + u64::from(n.saturating_sub(1)) % usable;
        Ipv4Addr::from(self.first.wrapping_add(offset as u32)).to_string()
    }
}

/// Compute's ETags are numbers; those of Network look like GUIDs and are weak.
pub fn etag(network: bool, version: u64) -> String {
    if network {
        format!("W/\"{version:08x}-0000-4000-8000-000000000000\"")
    } else {
        format!("\"{version}\"")
    }
}

fn unquote(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

#[cfg(test)]
mod tests {
    use super::Range;

    #[test]
    fn addresses_come_from_the_subnets_own_range() {
        let range = Range::parse("10.2.0.0/16").unwrap();
        assert_eq!(
            (range.address(1), range.address(300)),
            ("10.2.0.4".into(), "10.2.1.47".into())
        );
        let small = Range::parse("192.168.7.8/29").unwrap();
        let all: Vec<String> = (1..=4).map(|n| small.address(n)).collect();
        assert_eq!(all, ["192.168.7.12", "192.168.7.13", "192.168.7.14", "192.168.7.12"]);
        assert!(Range::parse("fd00::/64").is_none() && Range::parse("x").is_none());
    }
}
