//! How a machine goes.
//!
//! Kept here: nothing that is not the machine's own is destroyed with it. A disk that is a first-class object, or that
//! lies outside the machine's own folder and was not made by us, is detached first and survives.

use std::time::Duration;

use jiff::Timestamp;

use crate::domain::{Facts, Memory, Power, PowerOff};

/// The next step of a machine's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// Ask the guest to shut down.
    ShutDownGuest,
    /// It was asked; give it until then, or for as long as it takes.
    AwaitShutdown {
        until: Option<Timestamp>,
    },
    /// The guest cannot be asked, and may not be forced.
    CannotShutDown,
    PowerOff,
    /// These devices are not ours.
    Detach(Vec<i32>),
    Destroy,
    Gone,
}

/// Decides on the next step of a machine's end. `asked` is when the guest was asked to shut down.
pub fn farewell(
    facts: Option<&Facts>,
    memory: &Memory,
    mode: PowerOff,
    timeout: Duration,
    asked: Option<Timestamp>,
    now: Timestamp,
) -> Farewell {
    let Some(facts) = facts else { return Farewell::Gone };
    if facts.power == Power::On {
        return power_off(facts, mode, timeout, asked, now);
    }
    let foreign = foreign_disks(facts, memory);
    if foreign.is_empty() {
        Farewell::Destroy
    } else {
        Farewell::Detach(foreign)
    }
}

fn power_off(facts: &Facts, mode: PowerOff, timeout: Duration, asked: Option<Timestamp>, now: Timestamp) -> Farewell {
    let deadline = asked.and_then(|asked| asked.checked_add(timeout).ok());
    match (mode, asked) {
        (PowerOff::Hard, _) => Farewell::PowerOff,
        (PowerOff::Soft, Some(_)) => Farewell::AwaitShutdown { until: None },
        (PowerOff::TrySoft, Some(_)) => match deadline {
            Some(until) if until > now => Farewell::AwaitShutdown { until: Some(until) },
            _ => Farewell::PowerOff,
        },
        (_, None) if facts.tools_running => Farewell::ShutDownGuest,
        (PowerOff::TrySoft, None) => Farewell::PowerOff,
        (PowerOff::Soft, None) => Farewell::CannotShutDown,
    }
}

/// The keys of the disks that survive the machine.
pub fn foreign_disks(facts: &Facts, memory: &Memory) -> Vec<i32> {
    let home = folder(&facts.vmx_path);
    facts
        .hardware
        .devices
        .iter()
        .filter_map(|device| {
            let disk = device.disk.as_ref()?;
            if facts.volumes.contains(&device.key) {
                return Some(device.key);
            }
            let own_folder = home.is_some() && folder(&disk.path) == home;
            let ours = memory.placements.iter().any(|p| {
                facts
                    .hardware
                    .disk_at(p.kind, p.bus, p.unit)
                    .is_some_and(|found| found.key == device.key)
            });
            let primary = facts
                .hardware
                .primary()
                .is_some_and(|primary| primary.key == device.key);
            (!own_folder && !ours && !primary && home.is_some()).then_some(device.key)
        })
        .collect()
}

/// The folder in `[datastore] folder/file`. Disks on another datastore lie in a folder of the same name there.
fn folder(path: &str) -> Option<&str> {
    let (_, inside) = path.split_once("] ")?;
    inside.rsplit_once('/').map(|(folder, _)| folder)
}
