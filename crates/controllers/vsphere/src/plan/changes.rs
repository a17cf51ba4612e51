//! What of a fresh clone is not as asked for.
//!
//! A clone task that succeeded proves nothing, so every clone is compared with what was asked for before it is powered
//! on for the first time; what is missing is put right in one reconfiguration, together with what can only be known after
//! the clone: the MAC addresses in the metadata and the UUIDs of the disks.

use std::collections::BTreeMap;

use capstan_core::disks::vsphere::{
    Deviation, Device, GUESTINFO_KEY, Hardware, KIB_PER_GIB, NewController, Placement, compare, document, list,
};

use super::guestinfo;
use super::metadata;
use crate::domain::{Facts, Memory, UserData, Wanted};

/// What to change on a VM.
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
    /// Reservations, limits, shares and the like that are not as asked for, each with its field and value. Every
    /// reconfiguration carries them all.
    pub settings: Vec<String>,
    /// What vCenter left out although its task succeeded, each with its name.
    pub dropped: Vec<String>,
    /// What no reconfiguration can put right.
    pub wrong: Vec<String>,
}

impl Changes {
    /// Whether there is nothing to change. What cannot be mended is not a change.
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                dropped: self.dropped.clone(),
                wrong: self.wrong.clone(),
                ..Self::default()
            }
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
pub fn check_template(wanted: &Wanted, hardware: &Hardware, linked: bool) -> Result<(), String> {
    if linked {
        return Ok(());
    }
    let disks: Vec<&Device> = hardware.devices.iter().filter(|device| device.disk.is_some()).collect();
    if disks.is_empty() {
        return Err("Invalid disk count: 0: the template has no disk".into());
    }
    let problems: Vec<String> = sizes(wanted, &disks)
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

/// Field, capacity and wanted capacity of each template disk that the spec gives a size for.
fn sizes<'a>(wanted: &'a Wanted, disks: &'a [&Device]) -> impl Iterator<Item = (String, i64, i64)> + 'a {
    disks.iter().enumerate().filter_map(|(index, device)| {
        let has = device.disk.as_ref()?.capacity_kib;
        let (field, gib) = match index.checked_sub(1) {
            None => ("diskGiB".to_owned(), wanted.primary_gib?),
            Some(more) => (format!("additionalDisksGiB[{more}]"), *wanted.additional_gib.get(more)?),
        };
        (gib > 0).then(|| (field, has, gib.saturating_mul(KIB_PER_GIB)))
    })
}

/// Compares a VM that was never ready with what was asked for. `networks` are the resolved backings of its cards.
pub fn changes(
    wanted: &Wanted,
    networks: &[String],
    user: Option<&UserData>,
    memory: &Memory,
    facts: &Facts,
) -> Changes {
    let mut changes = Changes::default();
    disks(wanted, memory, facts, &mut changes);
    if !memory.linked {
        let own = template_disks(&facts.hardware, &memory.placements);
        changes.grow.extend(
            sizes(wanted, &own)
                .zip(&own)
                .filter_map(|((_, has, wants), device)| (wants > has).then_some((device.key, wants))),
        );
    }
    nics(wanted, networks, facts, &mut changes);
    changes.add_pci = facts.pci_devices < wanted.pci.len();
    changes.cpus = (facts.cpus != wanted.cpus).then_some(wanted.cpus);
    changes.cores_per_socket = wanted
        .cores_per_socket
        .filter(|cores| *cores > 0 && *cores != facts.cores_per_socket);
    changes.memory_mib = (facts.memory_mib != wanted.memory_mib).then_some(wanted.memory_mib);
    changes.settings = settings(wanted, facts);
    changes.extra_config = extra_config(wanted, user, memory, facts, &changes);
    changes
}

/// What of the settings that no device carries is otherwise than asked for.
fn settings(wanted: &Wanted, facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |field: &str, has: Option<i64>, wants: Option<i64>| {
        if let Some(wants) = wants.filter(|wants| has != Some(*wants)) {
            let has = has.map_or("unset".to_owned(), |has| has.to_string());
            found.push(format!("{field} is {has} instead of {wants}"));
        }
    };
    let (cpu, memory) = (&wanted.cpu_allocation, &wanted.memory_allocation);
    let (has_cpu, has_memory) = (&facts.cpu_allocation, &facts.memory_allocation);
    check("resources.requests.cpu (MHz)", has_cpu.reservation, cpu.reservation);
    check("resources.limits.cpu (MHz)", has_cpu.limit, cpu.limit);
    check(
        "resources.shares.cpu",
        has_cpu.shares.map(Into::into),
        cpu.shares.map(Into::into),
    );
    // Devices of a host need all of the memory reserved, whatever was asked for.
    let reservation = memory.reservation.filter(|_| wanted.pci.is_empty());
    check("resources.requests.memory (MiB)", has_memory.reservation, reservation);
    check("resources.limits.memory (MiB)", has_memory.limit, memory.limit);
    check(
        "resources.shares.memory",
        has_memory.shares.map(Into::into),
        memory.shares.map(Into::into),
    );
    if let Some(nested) = wanted.nested_hv.filter(|nested| *nested != facts.nested_hv) {
        found.push(format!("nestedHV is {} instead of {nested}", facts.nested_hv));
    }
    found
}

fn disks(wanted: &Wanted, memory: &Memory, facts: &Facts, changes: &mut Changes) {
    for deviation in compare(&facts.hardware, &wanted.disks, &memory.placements) {
        let Some(placement) = memory.placements.iter().find(|p| p.index == deviation.index()) else {
            continue;
        };
        let text = deviation.describe(&wanted.disks, &memory.placements);
        let list = match deviation {
            Deviation::Larger { .. } => &mut changes.wrong,
            _ => &mut changes.dropped,
        };
        list.push(text);
        match deviation {
            Deviation::Missing { .. } => add_disk(facts, *placement, changes),
            Deviation::Smaller { index, key, .. } => {
                changes.grow.push((
                    key,
                    wanted.disks.get(index).map(|d| d.capacity_kib()).unwrap_or_default(),
                ));
            }
            Deviation::Larger { .. } => {}
        }
    }
}

/// Adds a disk on the controller that its bus has now, or on one to be made.
fn add_disk(facts: &Facts, mut placement: Placement, changes: &mut Changes) {
    let there = facts
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

fn nics(wanted: &Wanted, networks: &[String], facts: &Facts, changes: &mut Changes) {
    let as_asked = facts.nics.len() == wanted.networks.len()
        && facts
            .nics
            .iter()
            .zip(networks)
            .zip(&wanted.networks)
            .all(|((nic, network), device)| {
                (network.is_empty() || nic.backing.is_empty() || nic.backing == *network)
                    && device.mac.as_ref().is_none_or(|mac| mac.eq_ignore_ascii_case(&nic.mac))
            });
    if as_asked {
        return;
    }
    changes.dropped.push(format!(
        "network.devices: vCenter did not set the network cards: {} instead of {}",
        facts.nics.len(),
        wanted.networks.len()
    ));
    changes.remove_nics = facts.nics.iter().map(|nic| nic.key).collect();
    changes.add_nics = (0..wanted.networks.len()).collect();
}

/// The keys that are missing or different. What depends on devices is left for when those are as asked for.
fn extra_config(
    wanted: &Wanted,
    user: Option<&UserData>,
    memory: &Memory,
    facts: &Facts,
    changes: &Changes,
) -> BTreeMap<String, String> {
    let mut keys = guestinfo::at_clone(wanted, user);
    if changes.add_nics.is_empty() && changes.remove_nics.is_empty() {
        guestinfo::put(
            &mut keys,
            guestinfo::METADATA,
            metadata::render(wanted, &facts.nics).as_bytes(),
        );
    }
    if !wanted.disks.is_empty() && changes.add_disks.is_empty() && changes.grow.is_empty() {
        let listed = list(&facts.hardware, &wanted.disks, &memory.placements);
        keys.insert(GUESTINFO_KEY.into(), document(&listed));
    }
    keys.retain(|key, value| {
        let there = facts.extra_config.get(key);
        there != Some(value) && (there.is_some() || !value.is_empty())
    });
    keys
}
