//! What becomes of a machine's disks when it goes. Pure.
//!
//! Invariant: a disk marked Detach is never doomed. The spec has the last word on the disks that it names; on those that
//! it does not name (any more) the virtual machine has it, as it stood when it was made or was last seen.

use super::build;
use super::disk_list::{Found, Listing};
use super::names::{Names, POLICY_TAG};
use capstan_api::disk::DeletionPolicy;
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_azure::model::{StorageProfile, VirtualMachine, VirtualMachineProperties, VirtualMachineUpdate};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// By how much the clocks of Azure and of the API server may differ.
const SKEW: Duration = Duration::from_secs(60);

/// Azure's ids are long and an event takes 1024 bytes: no message gets longer than this.
const MESSAGE: usize = 1000;

/// A disk that a virtual machine has, as its machine's status keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attached {
    pub name: String,
    pub deletion_policy: DeletionPolicy,
}

fn same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// The data disks of a virtual machine that bear its machine's name and lie in its group. Others, such as the volumes
/// of pods, are nobody's business here.
pub fn attached(names: &Names, vm: &VirtualMachine) -> Vec<Attached> {
    let ours = vm.data_disks().iter().filter_map(|disk| {
        let name = disk.name.clone().filter(|name| names.is_data_disk(name))?;
        let id = disk.managed_disk.as_ref().and_then(|managed| managed.id.as_deref());
        if id.is_some_and(|id| !same(id, &names.disk_id(&name).to_string())) {
            return None;
        }
        let option = disk.delete_option.as_deref().unwrap_or_default();
        Some(Attached {
            name,
            deletion_policy: policy(same(option, "Delete")),
        })
    });
    ours.collect()
}

fn policy(delete: bool) -> DeletionPolicy {
    if delete {
        DeletionPolicy::Delete
    } else {
        DeletionPolicy::Detach
    }
}

/// What is to be written down once the virtual machine is seen with these disks: those, and those that it had before.
pub fn recorded(before: &[Attached], seen: Vec<Attached>) -> Vec<Attached> {
    let gone = before
        .iter()
        .filter(|old| !seen.iter().any(|new| same(&new.name, &old.name)));
    let gone: Vec<Attached> = gone.cloned().collect();
    seen.into_iter().chain(gone).collect()
}

/// Whether a disk is there of which nobody could tell, once its virtual machine is gone, what was to become of it.
pub fn is_untold(spec: &AzureMachineProviderSpec, names: &Names, known: &[Attached], seen: &[Attached]) -> bool {
    let told = |disk: &Attached| names_it(spec, names, &disk.name) || known.contains(disk);
    !seen.iter().all(told)
}

fn names_it(spec: &AzureMachineProviderSpec, names: &Names, disk: &str) -> bool {
    spec.data_disks
        .iter()
        .any(|wanted| same(&names.data_disk(&wanted.name_suffix), disk))
}

/// What to change before the virtual machine goes, so that no disk marked Detach goes with it: the spec may have been
/// changed since it was made.
pub fn spared(spec: &AzureMachineProviderSpec, names: &Names, vm: &VirtualMachine) -> Option<VirtualMachineUpdate> {
    let kept: Vec<String> = spec
        .data_disks
        .iter()
        .filter(|disk| build::delete_option(disk) == "Detach")
        .map(|disk| names.data_disk(&disk.name_suffix))
        .collect();
    let mut disks = vm.data_disks().to_vec();
    let mut changed = false;
    for disk in &mut disks {
        let ours = disk
            .name
            .as_ref()
            .is_some_and(|name| kept.iter().any(|kept| same(kept, name)));
        if ours && disk.delete_option.as_deref() == Some("Delete") {
            disk.delete_option = Some("Detach".to_owned());
            changed = true;
        }
    }
    changed.then(|| VirtualMachineUpdate {
        properties: Some(VirtualMachineProperties {
            storage_profile: Some(StorageProfile {
                data_disks: Some(disks),
                ..StorageProfile::default()
            }),
            ..VirtualMachineProperties::default()
        }),
        tags: None,
    })
}

/// The disks of a machine whose virtual machine is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// Still there and to be deleted, with the word that events have for each.
    pub doomed: Vec<(&'static str, String)>,
    /// Ids of those that stay.
    pub kept: Vec<String>,
    /// Names of those that were to stay and are not there.
    pub missing: Vec<String>,
}

/// What is known of a machine besides its spec.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The disks that its virtual machine had.
    pub attached: &'a [Attached],
    /// A virtual machine of ours was seen at all. Where none ever was, only what bears this very machine's tag is ours:
    /// a disk that an earlier machine of the same name left on purpose is not.
    pub ours: bool,
}

impl Known<'_> {
    fn had(&self, disk: &str) -> bool {
        self.attached.iter().any(|attached| same(&attached.name, disk))
    }
}

pub fn decide(spec: &AzureMachineProviderSpec, names: &Names, listing: &Listing, known: Known) -> Fate {
    let mut fate = Fate::default();
    let found = |name: &str| listing.get(&name.to_lowercase());
    let os = names.os_disk();
    if found(&os).is_some_and(|found| known.ours || names.made(found.tags.as_ref())) {
        fate.doomed.push(("OS disk", os));
    }
    for (name, policy) in wanted(spec, names, listing, known) {
        let Some(disk) = found(&name) else {
            // A disk that was added to the spec later was never made.
            let made = known.ours && (known.attached.is_empty() || known.had(&name));
            if policy == DeletionPolicy::Detach && made {
                fate.missing.push(name);
            }
            continue;
        };
        let ours = names.made(disk.tags.as_ref()) || known.had(&name) || (known.ours && !is_older(disk, names));
        match policy {
            DeletionPolicy::Delete if ours => fate.doomed.push(("Data Disk", name)),
            _ if ours || known.ours => fate.kept.push(disk.id.clone()),
            _ => {}
        }
    }
    fate
}

/// Every disk that the machine has or had: as the spec says, else as the virtual machine said, else as its tag says.
fn wanted(
    spec: &AzureMachineProviderSpec,
    names: &Names,
    listing: &Listing,
    known: Known,
) -> Vec<(String, DeletionPolicy)> {
    let by_spec = spec.data_disks.iter().map(|disk| {
        let delete = build::delete_option(disk) == "Delete";
        (names.data_disk(&disk.name_suffix), policy(delete))
    });
    let mut all: Vec<(String, DeletionPolicy)> = by_spec.collect();
    let before = known
        .attached
        .iter()
        .map(|disk| (disk.name.clone(), disk.deletion_policy.clone()));
    let mut by_tag: Vec<_> = listing
        .values()
        .filter(|found| names.made(found.tags.as_ref()) && names.is_data_disk(&found.name))
        .map(|found| {
            let tag = found.tags.as_ref().and_then(|tags| tags.get(POLICY_TAG));
            (found.name.clone(), policy(tag.is_some_and(|tag| tag == "Delete")))
        })
        .collect();
    by_tag.sort();
    for (name, policy) in before.chain(by_tag) {
        if !all.iter().any(|(other, _)| same(other, &name)) {
            all.push((name, policy));
        }
    }
    all
}

/// Made before the machine was: by an earlier machine of the same name, which left it on purpose.
fn is_older(disk: &Found, names: &Names) -> bool {
    match (disk.created, names.born) {
        (Some(created), Some(born)) => created + SKEW < born,
        _ => false,
    }
}

/// What the machine's last events say: that it is gone, and where its disks are.
pub fn farewell(machine: &str, kept: &[String]) -> Vec<String> {
    let mut messages = vec![format!("Deleted machine {machine:?}")];
    for id in kept {
        let text = format!("; its Data Disk was detached and is kept as {id}");
        match messages.last_mut() {
            Some(last) if last.len() + text.len() <= MESSAGE => last.push_str(&text),
            _ => messages.push(format!("Deleted machine {machine:?}{text}")),
        }
    }
    messages
}

#[cfg(test)]
mod tests;
