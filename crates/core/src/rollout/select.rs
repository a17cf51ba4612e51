//! The order in which machines are taken: most urgent first, then by delete policy, then by name. Never by chance.

use std::cmp::Ordering;
use std::str::FromStr;

use super::{Health, Machine};

/// Which of several equally good candidates goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeletePolicy {
    #[default]
    Oldest,
    Newest,
    /// Spread by a seed that stays with the pool, so that every pass picks the same.
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
    Ready,
}

impl Machine {
    pub(super) fn urgency(&self) -> Urgency {
        match self.health {
            _ if self.marked => Urgency::Asked,
            _ if self.failed => Urgency::Failed,
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

    pub(super) fn sort(&self, machines: &mut [&Machine], urgency: impl Fn(&Machine) -> Urgency) {
        machines.sort_by(|a, b| {
            let policy = match self.policy {
                DeletePolicy::Oldest => a.created.cmp(&b.created),
                DeletePolicy::Newest => b.created.cmp(&a.created),
                DeletePolicy::Random => spread(self.seed, &a.name).cmp(&spread(self.seed, &b.name)),
            };
            let ties = || a.name.cmp(&b.name);
            urgency(a).cmp(&urgency(b)).then(policy).then_with(ties) as Ordering
        });
    }
}

/// FNV-1a: small, and the same in every build, which std's hasher does not promise.
fn spread(seed: u64, name: &str) -> u64 {
    let bytes = seed.to_le_bytes().into_iter().chain(name.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
