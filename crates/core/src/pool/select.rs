//! The order in which machines are taken: most urgent first, then by delete policy, then by name, never at random.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::str::FromStr;

use super::{Health, Machine};

/// Which of several equally good candidates goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeletePolicy {
    #[default]
    Oldest,
    Newest,
    /// Spread by a seed that stays with the pool, so that every plan picks the same.
    Random,
}

impl FromStr for DeletePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "Oldest" => Ok(Self::Oldest),
            "Newest" => Ok(Self::Newest),
            "Random" => Ok(Self::Random),
            other => Err(other.to_owned()),
        }
    }
}

/// Lower goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    Asked,
    Failed,
    Unready(Health),
    /// Ready, and of an older model.
    Outdated,
    Ready,
}

impl Machine {
    pub(super) fn urgency(&self) -> Urgency {
        match self.health {
            _ if self.marked => Urgency::Asked,
            _ if self.failed => Urgency::Failed,
            Health::Ready if self.outdated => Urgency::Outdated,
            Health::Ready => Urgency::Ready,
            unready => Urgency::Unready(unready),
        }
    }
}

/// A total order over the machines of one pool.
pub(super) struct Order {
    policy: DeletePolicy,
    seed: u64,
}

impl Order {
    pub(super) fn new(policy: DeletePolicy, seed: u64) -> Self {
        Self { policy, seed }
    }

    fn random(&self, machine: &Machine) -> u64 {
        crate::order::random(&format!("{:x}/{}", self.seed, machine.name))
    }

    pub(super) fn sort(&self, machines: &mut [&Machine]) {
        machines.sort_by(|a, b| {
            let policy = match self.policy {
                DeletePolicy::Oldest => a.created.cmp(&b.created),
                DeletePolicy::Newest => b.created.cmp(&a.created),
                DeletePolicy::Random => self.random(a).cmp(&self.random(b)),
            };
            let ties = || a.name.cmp(&b.name);
            a.urgency().cmp(&b.urgency()).then(policy).then_with(ties) as Ordering
        });
        balance(machines);
    }
}

/// Of equally urgent machines, those of the fullest zone go first, so that the zones stay even.
fn balance(machines: &mut [&Machine]) {
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    let mut depths: BTreeMap<&str, usize> = BTreeMap::new();
    for machine in machines.iter().rev() {
        if let Some(zone) = &machine.zone {
            let count = left.entry(zone).or_default();
            *count += 1;
            depths.insert(&machine.name, *count);
        }
    }
    let depth = |machine: &Machine| Reverse(depths.get(machine.name.as_str()).copied().unwrap_or_default());
    machines.sort_by_key(|machine| (machine.urgency(), depth(machine)));
}
