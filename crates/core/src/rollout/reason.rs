//! Says in one sentence what a pool waits for, for the condition that people look at.

use super::{Health, Machine, Motion, Plan, Pool};

/// How many machines are named before the rest is only counted.
const NAMED: usize = 3;

pub(super) fn waiting(pool: &Pool, plan: &Plan) -> Option<String> {
    let blocked = pool.machines.iter().find_map(|machine| match &machine.motion {
        Motion::Leaving { blocked: Some(why) } | Motion::Updating { blocked: Some(why) } => {
            Some(format!("waiting for machine {}: {why}", machine.name))
        }
        _ => None,
    });
    if blocked.is_some() {
        return blocked;
    }
    type Belongs = fn(&Machine) -> bool;
    let groups: [(&str, Belongs); 6] = [
        ("to be deleted", |m| m.motion == Motion::Deleting),
        ("to be drained", |m| matches!(m.motion, Motion::Leaving { .. })),
        ("to be updated", |m| matches!(m.motion, Motion::Updating { .. })),
        ("to become ready", |m| {
            m.motion == Motion::Resting && m.health == Health::Creating && !m.failed
        }),
        ("whose cluster does not answer", |m| {
            m.motion == Motion::Resting && m.health == Health::Unknown
        }),
        ("to become ready again", |m| {
            m.motion == Motion::Resting && m.health == Health::NotReady
        }),
    ];
    for (what, belongs) in groups {
        let names: Vec<&str> = pool
            .machines
            .iter()
            .filter(|m| belongs(m))
            .map(|m| m.name.as_str())
            .collect();
        if !names.is_empty() {
            return Some(format!("waiting for {} {what}", list(names)));
        }
    }
    let asked = plan.capacity.unwrap_or(pool.capacity);
    (asked > pool.machines.len()).then(|| {
        format!(
            "waiting for {} of {asked} instances that Azure has not made yet",
            asked - pool.machines.len()
        )
    })
}

fn list(mut names: Vec<&str>) -> String {
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
