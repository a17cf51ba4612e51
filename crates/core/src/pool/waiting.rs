//! One sentence about what a pool waits for, for the condition that people read.

use super::joining::not_joined;
use super::{Activity, Drain, Health, Machine, Observed, Plan, Step};

/// How many machines are named before the rest is only counted.
const NAMED: usize = 3;

pub(super) fn reason(observed: &Observed, plan: &Plan) -> Option<String> {
    let existing: Vec<&Machine> = observed.machines.iter().filter(|m| m.exists()).collect();
    let blocked = existing
        .iter()
        .find_map(|machine| match (&machine.activity, &machine.drain) {
            (Activity::Draining | Activity::Updating(_), Drain::Running { why }) => {
                Some(format!("waiting for machine {}: {why}", machine.name))
            }
            (_, _) => None,
        });
    if blocked.is_some() {
        return blocked;
    }
    let late = not_joined(observed);
    if late.is_some() {
        return late;
    }
    type Belongs = fn(&Machine) -> bool;
    let groups: [(&str, Belongs); 7] = [
        ("to be deleted", |m| m.activity == Activity::Deleting),
        ("to be drained", |m| m.activity == Activity::Draining),
        ("to be updated", |m| matches!(m.activity, Activity::Updating(_))),
        ("to become ready", |m| {
            m.idle() && m.health == Health::Creating && !m.failed
        }),
        ("whose cluster does not answer", |m| {
            m.idle() && m.health == Health::Unknown
        }),
        ("to become ready again", |m| m.idle() && m.health == Health::NotReady),
        ("to take pods again: uncordon the node or remove its taint", |m| {
            m.idle() && m.health == Health::Unschedulable
        }),
    ];
    for (what, belongs) in groups {
        let names: Vec<&str> = existing
            .iter()
            .filter(|m| belongs(m))
            .map(|m| m.name.as_str())
            .collect();
        if !names.is_empty() {
            return Some(format!("waiting for {} {what}", list(names)));
        }
    }
    let asked = plan.steps.iter().find_map(|step| match step {
        Step::ApplyScaleSet { capacity, .. } => Some(*capacity),
        _ => None,
    });
    let asked = asked.or(observed.scale_set.map(|set| set.capacity)).unwrap_or_default();
    (asked > existing.len()).then(|| {
        format!(
            "waiting for {} of {asked} instances that Azure has not made yet",
            asked - existing.len()
        )
    })
}

/// Names the first few machines and counts the rest.
pub(super) fn list(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    let (noun, more) = (
        if names.len() == 1 { "machine" } else { "machines" },
        names.len().saturating_sub(NAMED),
    );
    names.truncate(NAMED);
    match more {
        0 => format!("{noun} {}", names.join(", ")),
        more => format!("{noun} {} and {more} more", names.join(", ")),
    }
}
