//! Compares a fresh clone with its spec.
//!
//! A clone task that succeeded proves nothing, so every clone is compared with its spec before it is powered on for the
//! first time. One reconfiguration adds whatever is missing, together with the values that exist only after the clone: the
//! MAC addresses in the metadata and the UUIDs of the disks.

use std::collections::BTreeMap;

use crate::disks::vsphere::{
    Deviation, Device, GUESTINFO_KEY, Hardware, KIB_PER_GIB, NewController, Placement, compare, document, list,
};

use super::guestinfo;
use super::metadata;
use super::types::{DesiredVm, ObservedVm, Recorded, ResolvedNames, UserData};

/// The changes that bring a VM in line with its spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub add_controllers: Vec<NewController>,
    pub add_disks: Vec<Placement>,
    /// Device key and new capacity in KiB.
    pub grow: Vec<(i32, i64)>,
    pub remove_nics: Vec<i32>,
    /// Places in the spec's list of network devices.
    pub add_nics: Vec<usize>,
    /// Whether the PCI devices are to be added.
    pub add_pci: bool,
    pub extra_config: BTreeMap<String, String>,
    pub cpus: Option<i32>,
    pub cores_per_socket: Option<i32>,
    pub memory_mib: Option<i64>,
    /// The storage policy that the VM lacks.
    pub policy: Option<String>,
    /// Device key and the storage policy that the disk lacks.
    pub disk_policies: Vec<(i32, String)>,
    /// Reservations, limits, shares and the like that differ from the spec, each with its field and value. Every
    /// reconfiguration carries them all.
    pub settings: Vec<String>,
    /// The names of the devices that vCenter left out although its task succeeded.
    pub dropped: Vec<String>,
    /// Differences that no reconfiguration can remove.
    pub wrong: Vec<String>,
}

impl Changes {
    /// Whether a reconfiguration would change nothing.
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                dropped: self.dropped.clone(),
                wrong: self.wrong.clone(),
                ..Self::default()
            }
    }

    /// Whether the result of the reconfiguration has to be read back.
    pub fn is_read_back(&self) -> bool {
        self.touches_devices() || self.sets_policies() || !self.settings.is_empty()
    }

    /// Whether the reconfiguration sets storage policies.
    pub fn sets_policies(&self) -> bool {
        self.policy.is_some() || !self.disk_policies.is_empty()
    }

    /// Whether the reconfiguration touches devices.
    pub fn touches_devices(&self) -> bool {
        !(self.add_controllers.is_empty()
            && self.add_disks.is_empty()
            && self.grow.is_empty()
            && self.add_nics.is_empty()
            && self.remove_nics.is_empty()
            && !self.add_pci)
    }
}

/// The disks that the clone has from its template, in order.
pub fn template_disks<'a>(hardware: &'a Hardware, placements: &[Placement]) -> Vec<&'a Device> {
    let ours = |device: &Device| {
        placements.iter().any(|p| {
            hardware
                .disk_at(p.kind, p.bus, p.unit)
                .is_some_and(|found| found.key == device.key)
        })
    };
    hardware
        .devices
        .iter()
        .filter(|device| device.disk.is_some() && !ours(device))
        .collect()
}

/// What cannot be had from this template, found before anything is cloned.
pub fn check_template(desired: &DesiredVm, hardware: &Hardware, linked: bool) -> Result<(), String> {
    if linked {
        return Ok(());
    }
    let disks: Vec<&Device> = hardware.devices.iter().filter(|device| device.disk.is_some()).collect();
    if disks.is_empty() {
        return Err("Invalid disk count: 0: the template has no disk".into());
    }
    let problems: Vec<String> = sizes(desired, &disks)
        .filter(|(_, has, wants)| wants < has)
        .map(|(field, has, wants)| {
            format!("{field}: can't resize template disk down, initial capacity is larger: {has}KiB > {wants}KiB")
        })
        .collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems.join("; "))
    }
}

/// Returns the sizes of the spec that have no effect: the disks of a linked clone cannot grow.
pub fn ignored_sizes(desired: &DesiredVm, hardware: &Hardware, linked: bool) -> Vec<String> {
    let disks: Vec<&Device> = hardware.devices.iter().filter(|device| device.disk.is_some()).collect();
    let larger = sizes(desired, &disks).filter(|(_, has, wants)| linked && wants > has);
    larger
        .map(|(field, has, wants)| {
            let (has, wants) = (has / KIB_PER_GIB, wants / KIB_PER_GIB);
            format!(
                "{field}: {wants} has no effect: the disk of a linked clone keeps the template's {has} GiB; use cloneMode fullClone"
            )
        })
        .collect()
}

/// Field, capacity and desired capacity of each template disk that the spec gives a size for.
fn sizes<'a>(desired: &'a DesiredVm, disks: &'a [&Device]) -> impl Iterator<Item = (String, i64, i64)> + 'a {
    disks.iter().enumerate().filter_map(|(index, device)| {
        let has = device.disk.as_ref()?.capacity_kib;
        let (field, gib) = match index.checked_sub(1) {
            None => ("diskGiB".to_owned(), desired.primary_gib?),
            Some(more) => (
                format!("additionalDisksGiB[{more}]"),
                *desired.additional_gib.get(more)?,
            ),
        };
        (gib > 0).then(|| (field, has, gib.saturating_mul(KIB_PER_GIB)))
    })
}

/// Compares a VM that was never ready with the desired one.
pub fn changes(
    desired: &DesiredVm,
    names: &ResolvedNames,
    user: Option<&UserData>,
    recorded: &Recorded,
    observed: &ObservedVm,
) -> Changes {
    let mut changes = Changes::default();
    disks(desired, recorded, observed, &mut changes);
    if !recorded.linked {
        let own = template_disks(&observed.hardware, &recorded.placements);
        changes.grow.extend(
            sizes(desired, &own)
                .zip(&own)
                .filter_map(|((_, has, wants), device)| (wants > has).then_some((device.key, wants))),
        );
    }
    nics(desired, &names.networks, observed, &mut changes);
    policies(names, recorded, observed, &mut changes);
    changes.add_pci = observed.pci_devices < desired.pci.len();
    changes.cpus = (observed.cpus != desired.cpus).then_some(desired.cpus);
    changes.cores_per_socket = desired
        .cores_per_socket
        .filter(|cores| *cores > 0 && *cores != observed.cores_per_socket);
    changes.memory_mib = (observed.memory_mib != desired.memory_mib).then_some(desired.memory_mib);
    changes.settings = settings(desired, observed);
    changes.extra_config = extra_config(desired, user, recorded, observed, &changes);
    changes
}

/// What of the settings that no device carries is otherwise than asked for.
fn settings(desired: &DesiredVm, observed: &ObservedVm) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |field: &str, has: Option<i64>, wants: Option<i64>| {
        if let Some(wants) = wants.filter(|wants| has != Some(*wants)) {
            let has = has.map_or("unset".to_owned(), |has| has.to_string());
            found.push(format!("{field} is {has} instead of {wants}"));
        }
    };
    let (cpu, memory) = (&desired.cpu_allocation, &desired.memory_allocation);
    let (has_cpu, has_memory) = (&observed.cpu_allocation, &observed.memory_allocation);
    check("resources.requests.cpu (MHz)", has_cpu.reservation, cpu.reservation);
    check("resources.limits.cpu (MHz)", has_cpu.limit, cpu.limit);
    check(
        "resources.shares.cpu",
        has_cpu.shares.map(Into::into),
        cpu.shares.map(Into::into),
    );
    // Devices of a host need all of the memory reserved, whatever was asked for.
    let reservation = memory.reservation.filter(|_| desired.pci.is_empty());
    check("resources.requests.memory (MiB)", has_memory.reservation, reservation);
    check("resources.limits.memory (MiB)", has_memory.limit, memory.limit);
    check(
        "resources.shares.memory",
        has_memory.shares.map(Into::into),
        memory.shares.map(Into::into),
    );
    if let Some(nested) = desired.nested_hv.filter(|nested| *nested != observed.nested_hv) {
        found.push(format!("nestedHV is {} instead of {nested}", observed.nested_hv));
    }
    found
}

fn disks(desired: &DesiredVm, recorded: &Recorded, observed: &ObservedVm, changes: &mut Changes) {
    for deviation in compare(&observed.hardware, &desired.disks, &recorded.placements) {
        let Some(placement) = recorded.placements.iter().find(|p| p.index == deviation.index()) else {
            continue;
        };
        let text = deviation.describe(&desired.disks, &recorded.placements);
        let list = match deviation {
            Deviation::Larger { .. } => &mut changes.wrong,
            _ => &mut changes.dropped,
        };
        list.push(text);
        match deviation {
            Deviation::Missing { .. } => add_disk(observed, *placement, changes),
            Deviation::Smaller { index, key, .. } => {
                changes.grow.push((
                    key,
                    desired.disks.get(index).map(|d| d.capacity_kib()).unwrap_or_default(),
                ));
            }
            Deviation::Larger { .. } => {}
        }
    }
}

/// Finds storage policies that the VM or a disk lacks. vCenter refuses policies in a clone, so the reconfiguration after it
/// sets them. Disks that this reconfiguration adds get theirs with it.
fn policies(names: &ResolvedNames, recorded: &Recorded, observed: &ObservedVm, changes: &mut Changes) {
    let found = observed.policies.clone().unwrap_or_default();
    changes.policy = names
        .policy
        .clone()
        .filter(|policy| found.home.as_ref() != Some(policy));
    for device in observed.hardware.devices.iter().filter(|device| device.disk.is_some()) {
        let placement = recorded.placements.iter().find(|p| {
            let at = observed.hardware.disk_at(p.kind, p.bus, p.unit);
            at.is_some_and(|found| found.key == device.key)
        });
        let desired = match placement {
            Some(placement) => names.disk_policies.get(placement.index).cloned().flatten(),
            None => names.policy.clone(),
        };
        if let Some(policy) = desired.filter(|policy| found.disks.get(&device.key) != Some(policy)) {
            changes.disk_policies.push((device.key, policy));
        }
    }
}

/// Adds a disk on the controller that its bus has now, or on one to be made.
fn add_disk(observed: &ObservedVm, mut placement: Placement, changes: &mut Changes) {
    let there = observed
        .hardware
        .controllers
        .iter()
        .find(|c| c.kind == placement.kind && c.bus == placement.bus)
        .map(|c| c.key);
    placement.controller_key = there.unwrap_or_else(|| {
        let made = changes
            .add_controllers
            .iter()
            .find(|c| c.kind == placement.kind && c.bus == placement.bus);
        made.map(|c| c.key).unwrap_or_else(|| {
            let key = -1000 - i32::try_from(changes.add_controllers.len()).unwrap_or_default();
            changes.add_controllers.push(NewController {
                key,
                kind: placement.kind,
                bus: placement.bus,
            });
            key
        })
    });
    changes.add_disks.push(placement);
}

fn nics(desired: &DesiredVm, networks: &[String], observed: &ObservedVm, changes: &mut Changes) {
    let as_asked = observed.nics.len() == desired.networks.len()
        && observed
            .nics
            .iter()
            .zip(networks)
            .zip(&desired.networks)
            .all(|((nic, network), device)| {
                (network.is_empty() || nic.backing.is_empty() || nic.backing == *network)
                    && device.mac.as_ref().is_none_or(|mac| mac.eq_ignore_ascii_case(&nic.mac))
            });
    if as_asked {
        return;
    }
    changes.dropped.push(format!(
        "network.devices: vCenter did not set the network cards: {} instead of {}",
        observed.nics.len(),
        desired.networks.len()
    ));
    changes.remove_nics = observed.nics.iter().map(|nic| nic.key).collect();
    changes.add_nics = (0..desired.networks.len()).collect();
}

/// The keys that are missing or different. What depends on devices is left for when those are as asked for.
fn extra_config(
    desired: &DesiredVm,
    user: Option<&UserData>,
    recorded: &Recorded,
    observed: &ObservedVm,
    changes: &Changes,
) -> BTreeMap<String, String> {
    let mut keys = guestinfo::at_clone(desired, user);
    if changes.add_nics.is_empty() && changes.remove_nics.is_empty() {
        guestinfo::put(
            &mut keys,
            guestinfo::METADATA,
            metadata::render(desired, &observed.nics).as_bytes(),
        );
    }
    if !desired.disks.is_empty() && changes.add_disks.is_empty() && changes.grow.is_empty() {
        let listed = list(&observed.hardware, &desired.disks, &recorded.placements);
        keys.insert(GUESTINFO_KEY.into(), document(&listed));
    }
    keys.retain(|key, value| {
        let there = observed.extra_config.get(key);
        there != Some(value) && (there.is_some() || !value.is_empty())
    });
    keys
}
