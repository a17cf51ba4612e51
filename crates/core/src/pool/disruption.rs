//! Which machines go next, and how many instances are asked for.

use std::time::Duration;

use super::select::Order;
use super::{Activity, Health, Machine, Model, Observed, ScaleSet, Scaling, Selected, Strategy};
use super::{joining, shortage};

/// The machines to take and the capacity to ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Disruptions {
    pub capacity: Option<usize>,
    pub remove: Vec<Selected>,
    pub update: Vec<Selected>,
    pub rolling: bool,
}

/// Decides over all machines. No machine goes for a model that the scale set does not have yet: the cloud may refuse it.
pub(super) fn disruptions(observed: &Observed, set: &ScaleSet) -> Disruptions {
    let all = select(observed, set, true);
    match set.model {
        Model::Current => all,
        Model::Outdated => Disruptions {
            capacity: all.capacity,
            rolling: all.rolling,
            ..select(observed, set, false)
        },
        Model::Refused | Model::Unmarked => Disruptions {
            rolling: all.rolling,
            ..select(observed, set, false)
        },
    }
}

/// What the rollout does with a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Keep,
    Update,
    Replace,
}

fn action(machine: &Machine, observed: &Observed, roll: bool) -> Action {
    if !machine.idle() {
        return Action::Keep;
    }
    // One whose update did not come back may well have the newest model.
    if machine.failed || machine.irreparable || machine.never_joined(joining::timeout(observed)) {
        return Action::Replace;
    }
    match (machine.outdated && roll, observed.strategy) {
        (false, _) | (true, Strategy::OnDelete) => Action::Keep,
        // An instance that has never run has nothing to preserve, and Azure refuses to update it meanwhile.
        (true, Strategy::InPlace) if machine.health != Health::Creating && !machine.needs_new_disk => Action::Update,
        (true, Strategy::InPlace | Strategy::Replace) => Action::Replace,
    }
}

/// Selects machines; those of an older model only to `roll` a new one out.
fn select(observed: &Observed, set: &ScaleSet, roll: bool) -> Disruptions {
    let existing: Vec<&Machine> = observed.machines.iter().filter(|m| m.exists()).collect();
    let (mut keep, mut update, mut replace) = (Vec::new(), Vec::new(), Vec::new());
    for machine in existing.iter().copied().filter(|m| !m.leaving()) {
        match action(machine, observed, roll) {
            Action::Keep => keep.push(machine),
            Action::Update => update.push(machine),
            Action::Replace => replace.push(machine),
        }
    }
    let rolling = !update.is_empty() || !replace.is_empty();
    let capacity = capacity(observed, set, &existing, keep.len(), update.len());

    let order = Order::new(observed.policy, observed.seed);
    order.sort(&mut replace);
    order.sort(&mut update);
    order.sort(&mut keep);

    let mut budget = DisruptionBudget::new(observed, &existing);
    let mut remove: Vec<&Machine> = replace.iter().copied().filter(|m| budget.try_take(m)).collect();
    let (surplus_updates, surplus_keeps) = surplus(observed, keep.len(), update.len());
    // Of machines that would have to be updated, those that are not needed afterwards are deleted instead: they sort
    // first, so that the ones to be updated are the rest.
    let (excess, in_place) = update.split_at(surplus_updates);
    remove.extend(excess.iter().copied().filter(|m| budget.try_take_surplus(m)));
    let removable = keep.iter().copied().filter(|m| m.idle()).take(surplus_keeps);
    remove.extend(removable.filter(|m| budget.try_take_surplus(m)));
    let update: Vec<&Machine> = in_place.iter().copied().filter(|m| budget.try_take(m)).collect();
    Disruptions {
        capacity,
        remove: selected(remove),
        update: selected(update),
        rolling,
    }
}

fn selected(machines: Vec<&Machine>) -> Vec<Selected> {
    let select = |machine: &Machine| Selected {
        name: machine.name.clone(),
        unless_available: machine.health != Health::Ready,
        by_owner: machine.is_drained_by_owner(),
    };
    machines.into_iter().map(select).collect()
}

/// How many machines are more than needed, once all is done: first of those to be updated, then of those to be kept.
/// While machines are updated in place, up to maxSurge extra ones stand in for them; the last old ones then go instead
/// of being updated, so that nothing is done twice.
fn surplus(observed: &Observed, keep: usize, update: usize) -> (usize, usize) {
    let desired = observed.desired;
    if keep >= desired {
        return (update, keep - desired);
    }
    let stand_ins = observed.budget.surge.min(update);
    ((keep + update).saturating_sub(desired + stand_ins), 0)
}

/// The capacity to ask for, if it differs from what was asked for.
fn capacity(observed: &Observed, set: &ScaleSet, existing: &[&Machine], keep: usize, update: usize) -> Option<usize> {
    let (desired, budget) = (observed.desired, &observed.budget);
    let deleting = existing.iter().filter(|m| m.activity == Activity::Deleting).count();
    let live = existing.len() - deleting;
    let asked = match set.flexible && set.scaling == Scaling::Idle {
        true => live,
        false => set.capacity,
    };
    let needed = (desired + budget.surge.min(update)).saturating_sub(keep + update);
    // An instance that is being deleted takes no place, as in Deployments: its successor need not wait for it. Where a
    // quota has no room for both, the cloud refuses, and the plan asks again when the delete has ended.
    let most = budget.ceiling(desired).min(shortage::most(set, desired));
    let target = (live + needed).min(most).max(live);
    if target > asked {
        return Some(target);
    }
    // Never below what exists: Azure would choose the victim. And only when nothing can still appear or go.
    let settled = set.scaling == Scaling::Idle && deleting == 0 && set.confirmed;
    (settled && target < asked).then_some(target)
}

/// How many more machines this plan may take.
struct DisruptionBudget {
    /// Available machines beyond the floor.
    headroom: usize,
    /// How many more unready machines may be taken. They cost nothing now but may only be away for a moment: when a
    /// whole pool loses its network, it must not be replaced at one blow. Nor when no node of it joins.
    unready: usize,
    startup_timeout: Option<Duration>,
}

impl DisruptionBudget {
    fn new(observed: &Observed, existing: &[&Machine]) -> Self {
        let budget = &observed.budget;
        let available = existing.iter().filter(|m| m.available()).count();
        let startup_timeout = joining::timeout(observed);
        let is_unready = |m: &Machine| m.is_unready() || m.never_joined(startup_timeout);
        let taken = existing.iter().filter(|m| !m.idle() && is_unready(m)).count();
        Self {
            headroom: available.saturating_sub(budget.floor(observed.desired)),
            unready: budget.width().saturating_sub(taken),
            startup_timeout,
        }
    }

    /// Takes a machine, if the budget allows it.
    fn try_take(&mut self, machine: &Machine) -> bool {
        if machine.is_unready() || machine.never_joined(self.startup_timeout) {
            return take(&mut self.unready);
        }
        self.try_take_surplus(machine)
    }

    /// Takes a machine that is not needed any more, if the budget allows it.
    fn try_take_surplus(&mut self, machine: &Machine) -> bool {
        !machine.counts_as_available() || take(&mut self.headroom)
    }
}

fn take(from: &mut usize) -> bool {
    let enough = *from > 0;
    *from = from.saturating_sub(1);
    enough
}
