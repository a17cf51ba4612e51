//! Which machines of a pool to delete or update next, and how many instances to ask for: the whole answer.
//!
//! [`plan`] is asked with what is known about a pool and answers with the next effects. It keeps two bounds:
//! * *floor*: it takes no available machine while that would leave fewer than desired − maxUnavailable. Machines that
//!   are leaving (whoever drains them), being updated or not ready are not available.
//! * *ceiling*: it never asks for capacity that would make more than desired + maxSurge instances exist, those being
//!   deleted included.
//!
//! Within them it never waits while a step is possible. Selection is stable: the same pool gives the same plan, ties are
//! broken by name, so planning again after a crash or on a late read picks the same machines.

mod budget;
mod reason;
mod select;

pub use budget::{Amount, Budget, BudgetError};
pub use select::DeletePolicy;

use select::Order;

/// How machines reach a new model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// A new instance takes the old one's place.
    #[default]
    Replace,
    /// The instance is updated where it is.
    InPlace,
}

/// What is known of a machine's fitness to run pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Health {
    /// It has never been ready.
    Creating,
    NotReady,
    /// The workload cluster does not answer: it may well be ready.
    Unknown,
    Ready,
}

/// What is under way with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Motion {
    Resting,
    /// Drained for, or undergoing, an update in place; `blocked` says what is in the way.
    Updating {
        blocked: Option<String>,
    },
    /// Marked as deleted and perhaps drained, by us or by anybody else; the instance is still there.
    Leaving {
        blocked: Option<String>,
    },
    /// The cloud has been asked to delete the instance.
    Deleting,
}

/// One instance of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    pub name: String,
    /// Seconds since the epoch; only the order matters.
    pub created: i64,
    pub health: Health,
    /// The cloud gave up on it.
    pub failed: bool,
    /// It does not run the newest model.
    pub outdated: bool,
    /// Somebody asked for it to be the next to go (`cluster.x-k8s.io/delete-machine`).
    pub marked: bool,
    /// An update in place was refused or did not come back: only a replacement helps.
    pub irreparable: bool,
    pub motion: Motion,
}

impl Machine {
    fn resting(&self) -> bool {
        self.motion == Motion::Resting
    }

    /// Whether it counts towards the floor.
    pub fn available(&self) -> bool {
        self.resting() && self.health == Health::Ready
    }

    /// Gone from the pool as far as planning goes.
    fn leaving(&self) -> bool {
        matches!(self.motion, Motion::Leaving { .. } | Motion::Deleting)
    }

    /// Whether taking it may cost an available machine. One that is unknown may be available.
    fn costs(&self) -> bool {
        matches!(self.health, Health::Ready | Health::Unknown)
    }
}

/// What the scale set is doing about its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    Idle,
    /// An operation is under way that may still add instances.
    Running,
}

/// Everything that the decision depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    pub desired: usize,
    pub budget: Budget,
    pub policy: DeletePolicy,
    pub mode: Mode,
    /// Makes `Random` the same for every pass over the same pool.
    pub seed: u64,
    /// The capacity that the scale set has been asked for. An instance delete lowers it by itself.
    pub capacity: usize,
    pub scaling: Scaling,
    pub machines: Vec<Machine>,
}

/// What to do next. Empty when there is nothing to do, or nothing to do yet (`waiting` says for what).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Set the scale set's capacity to this.
    pub capacity: Option<usize>,
    /// Drain and delete these machines.
    pub delete: Vec<String>,
    /// Drain and update these machines in place.
    pub update: Vec<String>,
    /// Whether machines of an older model, failed, irreparable or marked ones remain.
    pub rolling: bool,
    /// What the pool waits for, when it is not where it should be.
    pub waiting: Option<String>,
}

impl Plan {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.capacity.is_none() && self.delete.is_empty() && self.update.is_empty()
    }
}

/// What is to become of a machine in the end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Keep,
    Update,
    Replace,
}

fn fate(machine: &Machine, mode: Mode) -> Fate {
    if !machine.resting() {
        return Fate::Keep;
    }
    // One whose update did not come back may well say that it has the newest model.
    if machine.marked || machine.failed || machine.irreparable {
        return Fate::Replace;
    }
    match (machine.outdated, mode) {
        (false, _) => Fate::Keep,
        // An instance that has never run has nothing to preserve, and Azure refuses to update it meanwhile.
        (true, Mode::InPlace) if machine.health != Health::Creating => Fate::Update,
        (true, _) => Fate::Replace,
    }
}

/// Decides the next steps of a pool.
pub fn plan(pool: &Pool) -> Plan {
    let staying: Vec<&Machine> = pool.machines.iter().filter(|m| !m.leaving()).collect();
    let (mut keep, mut update, mut replace) = (Vec::new(), Vec::new(), Vec::new());
    for machine in staying {
        match fate(machine, pool.mode) {
            Fate::Keep => keep.push(machine),
            Fate::Update => update.push(machine),
            Fate::Replace => replace.push(machine),
        }
    }
    let rolling = !update.is_empty() || !replace.is_empty();
    let capacity = capacity(pool, keep.len(), update.len());

    let order = Order::new(pool.policy, pool.seed);
    order.sort(&mut replace, Machine::urgency);
    order.sort(&mut update, Machine::urgency);
    order.sort(&mut keep, Machine::urgency);

    let mut purse = Purse::of(pool);
    let mut delete: Vec<&Machine> = replace.iter().copied().filter(|m| purse.pay(m)).collect();
    let (surplus_updates, surplus_keeps) = surplus(pool, keep.len(), update.len());
    // Of machines that would have to be updated, those that are not needed afterwards are deleted instead: they sort
    // first, so that the ones to be updated are the rest.
    let (excess, in_place) = update.split_at(surplus_updates);
    delete.extend(excess.iter().copied().filter(|m| purse.pay_surplus(m)));
    let removable = keep.iter().copied().filter(|m| m.resting()).take(surplus_keeps);
    delete.extend(removable.filter(|m| purse.pay_surplus(m)));
    let update: Vec<&Machine> = in_place.iter().copied().filter(|m| purse.pay(m)).collect();

    let names = |machines: Vec<&Machine>| machines.into_iter().map(|m| m.name.clone()).collect::<Vec<_>>();
    let mut plan = Plan {
        capacity,
        delete: names(delete),
        update: names(update),
        rolling,
        waiting: None,
    };
    plan.waiting = reason::waiting(pool, &plan);
    plan
}

/// How many machines are more than needed, once all is done: first of those to be updated, then of those to be kept.
/// While machines are updated in place, up to maxSurge extra ones stand in for them; the last old ones then go instead
/// of being updated, so that nothing is done twice.
fn surplus(pool: &Pool, keep: usize, update: usize) -> (usize, usize) {
    if keep >= pool.desired {
        return (update, keep - pool.desired);
    }
    (
        (keep + update).saturating_sub(pool.desired + pool.budget.surge.min(update)),
        0,
    )
}

/// The capacity to ask for, if it differs from what was asked for.
fn capacity(pool: &Pool, keep: usize, update: usize) -> Option<usize> {
    let deleting = pool.machines.iter().filter(|m| m.motion == Motion::Deleting).count();
    let live = pool.machines.len() - deleting;
    let needed = (pool.desired + pool.budget.surge.min(update)).saturating_sub(keep + update);
    let most = pool.budget.ceiling(pool.desired).saturating_sub(deleting);
    let target = (live + needed).min(most).max(live);
    if target > pool.capacity {
        return Some(target);
    }
    // Never below what exists: Azure would choose the victim. And only when nothing can still appear or go.
    let settled = pool.scaling == Scaling::Idle && deleting == 0;
    (settled && target < pool.capacity).then_some(target)
}

/// What may still be spent in this pass.
struct Purse {
    /// Available machines beyond the floor.
    headroom: usize,
    /// How many more unready machines may be taken. They cost nothing now but may only be away for a moment: when a
    /// whole pool loses its network, it must not be replaced at one blow.
    unready: usize,
}

impl Purse {
    fn of(pool: &Pool) -> Self {
        let available = pool.machines.iter().filter(|m| m.available()).count();
        let moving = |m: &&Machine| !m.resting() && m.health == Health::NotReady && !m.failed;
        let width = (pool.budget.surge + pool.budget.unavailable).max(1);
        Self {
            headroom: available.saturating_sub(pool.budget.floor(pool.desired)),
            unready: width.saturating_sub(pool.machines.iter().filter(moving).count()),
        }
    }

    /// Takes the price of a machine, if there is enough.
    fn pay(&mut self, machine: &Machine) -> bool {
        if machine.health == Health::NotReady && !machine.failed {
            return take(&mut self.unready);
        }
        self.pay_surplus(machine)
    }

    /// As [`Purse::pay`], for a machine that is not needed any more.
    fn pay_surplus(&mut self, machine: &Machine) -> bool {
        !machine.costs() || take(&mut self.headroom)
    }
}

fn take(from: &mut usize) -> bool {
    let enough = *from > 0;
    *from = from.saturating_sub(1);
    enough
}

#[cfg(test)]
mod tests;
