//! Decides how a machine is torn down.
//!
//! Invariant: nothing that is not the machine's own is destroyed with it. A disk that is a first-class object, or that lies
//! outside the machine's own folder and was not made for it, is detached first and survives. A machine whose configuration
//! vCenter cannot read is neither destroyed nor released. A VM is destroyed only with a [`Drained`].

use std::time::Duration;

use jiff::Timestamp;

use super::MoRef;
use super::types::{ObservedVm, PowerOff, PowerState, Recorded};
use crate::drain::Drained;

/// The next step of a teardown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TeardownStep {
    /// vCenter cannot read the configuration of the VM, for this reason: which disks are its own is not known.
    Unreadable(String),
    /// Ask the guest to shut down.
    ShutDownGuest(MoRef),
    /// The guest was asked to shut down. Give it until then, or any time that it needs.
    AwaitShutdown {
        vm: MoRef,
        until: Option<Timestamp>,
    },
    /// The guest cannot be asked to shut down, and the spec does not allow to power it off.
    CannotShutDown,
    PowerOff(MoRef),
    /// Detach the disks with these keys: they are not the machine's own.
    Detach {
        vm: MoRef,
        disks: Vec<i32>,
    },
    Destroy {
        vm: MoRef,
        drained: Drained,
    },
    /// vCenter does not have the VM: remove the finalizer.
    Release,
}

/// How a VM is to be powered off.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shutdown {
    pub mode: PowerOff,
    /// How long the guest has for it.
    pub timeout: Duration,
    /// When the guest was asked.
    pub asked: Option<Timestamp>,
}

/// Returns the next step of a teardown. `deleted` is when the object of the VM was deleted: before that nothing is torn down.
pub fn teardown(
    observed: Option<&ObservedVm>,
    recorded: &Recorded,
    shutdown: Shutdown,
    deleted: Option<Timestamp>,
    now: Timestamp,
) -> Option<TeardownStep> {
    let name = observed.map_or_else(String::new, |vm| vm.reference.to_string());
    let drained = Drained::by_cluster_api(&name, deleted)?;
    Some(next(observed, recorded, shutdown, drained, now))
}

fn next(
    observed: Option<&ObservedVm>,
    recorded: &Recorded,
    shutdown: Shutdown,
    drained: Drained,
    now: Timestamp,
) -> TeardownStep {
    let Some(observed) = observed else {
        return TeardownStep::Release;
    };
    if let Some(reason) = &observed.unreadable {
        return TeardownStep::Unreadable(reason.clone());
    }
    let vm = observed.reference.clone();
    match observed.power {
        PowerState::On => return power_off(observed, shutdown, now),
        // vCenter neither detaches the disks of a suspended VM nor destroys it.
        PowerState::Suspended => return TeardownStep::PowerOff(vm),
        PowerState::Off => {}
    }
    let disks = foreign_disks(observed, recorded);
    if disks.is_empty() {
        TeardownStep::Destroy { vm, drained }
    } else {
        TeardownStep::Detach { vm, disks }
    }
}

fn power_off(observed: &ObservedVm, shutdown: Shutdown, now: Timestamp) -> TeardownStep {
    let Shutdown { mode, timeout, asked } = shutdown;
    let vm = observed.reference.clone();
    let deadline = asked.and_then(|asked| asked.checked_add(timeout).ok());
    match (mode, asked) {
        (PowerOff::Hard, _) => TeardownStep::PowerOff(vm),
        (PowerOff::Soft, Some(_)) => TeardownStep::AwaitShutdown { vm, until: None },
        (PowerOff::TrySoft, Some(_)) => match deadline {
            Some(until) if until > now => TeardownStep::AwaitShutdown { vm, until: Some(until) },
            _ => TeardownStep::PowerOff(vm),
        },
        (PowerOff::Soft | PowerOff::TrySoft, None) if observed.tools_running => TeardownStep::ShutDownGuest(vm),
        (PowerOff::TrySoft, None) => TeardownStep::PowerOff(vm),
        (PowerOff::Soft, None) => TeardownStep::CannotShutDown,
    }
}

/// Returns the keys of the disks that survive the machine.
pub fn foreign_disks(observed: &ObservedVm, recorded: &Recorded) -> Vec<i32> {
    let home = folder(&observed.vmx_path);
    observed
        .hardware
        .devices
        .iter()
        .filter_map(|device| {
            let disk = device.disk.as_ref()?;
            if observed.volumes.contains(&device.key) {
                return Some(device.key);
            }
            let own_folder = home.is_some() && folder(&disk.path) == home;
            let ours = recorded.placements.iter().any(|p| {
                observed
                    .hardware
                    .disk_at(p.kind, p.bus, p.unit)
                    .is_some_and(|found| found.key == device.key)
            });
            let primary = observed
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
