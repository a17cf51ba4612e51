//! Which disks go when a machine goes. Pure.
//!
//! Invariant: a disk marked Detach that was ever attached is never deleted. The spec decides about the disks that it
//! names; about others the virtual machine decides, as it was when it was made or last observed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_api::disk::DeletionPolicy;
use capstan_api::openshift::{AzureMachineProviderSpec, DataDisk};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::names::{Names, POLICY_TAG, Tags};
use crate::azure_names::AzureName;

/// By how much the clocks of Azure and of the API server may differ.
const SKEW: Duration = Duration::from_secs(60);

/// Azure's ids are long and an event takes 1024 bytes: no message gets longer than this.
const MESSAGE: usize = 1000;

/// A disk of a virtual machine, as its machine's status keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attached {
    pub name: String,
    pub deletion_policy: DeletionPolicy,
}

/// A disk that is in the resource group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub name: String,
    pub id: String,
    pub tags: Option<Tags>,
    pub created: Option<Timestamp>,
    /// The virtual machine that holds it.
    pub managed_by: Option<String>,
    pub zones: Vec<String>,
    /// Its region, as Azure writes it.
    pub location: Option<String>,
    /// Its `storageAccountType`.
    pub kind: Option<String>,
}

/// The disks of a resource group, by lower-case name.
pub type Listing = Arc<HashMap<String, Found>>;

fn same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// Returns the policy of a disk in the spec. A disk without one is kept.
pub fn policy_of(disk: &DataDisk) -> DeletionPolicy {
    policy(disk.deletion_policy == Some(DeletionPolicy::Delete))
}

pub fn policy(delete: bool) -> DeletionPolicy {
    if delete {
        DeletionPolicy::Delete
    } else {
        DeletionPolicy::Detach
    }
}

/// Returns the disks to record once the virtual machine is observed with these: those, and those that it had before.
pub fn recorded(before: &[Attached], seen: Vec<Attached>) -> Vec<Attached> {
    let gone = before
        .iter()
        .filter(|old| !seen.iter().any(|new| same(&new.name, &old.name)));
    let gone: Vec<Attached> = gone.cloned().collect();
    seen.into_iter().chain(gone).collect()
}

/// Whether there is a disk whose policy would be lost together with its virtual machine.
pub fn is_unrecorded(spec: &AzureMachineProviderSpec, names: &Names, known: &[Attached], seen: &[Attached]) -> bool {
    let recorded = |disk: &Attached| names_it(spec, names, &disk.name) || known.contains(disk);
    !seen.iter().all(recorded)
}

fn names_it(spec: &AzureMachineProviderSpec, names: &Names, disk: &str) -> bool {
    spec.data_disks
        .iter()
        .any(|wanted| same(&names.data_disk(&wanted.name_suffix), disk))
}

/// What to do with the disks of a machine whose virtual machine is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disposition {
    /// To be deleted, with the word that events have for each.
    pub delete: Vec<(&'static str, String)>,
    /// Ids of those that stay.
    pub keep: Vec<String>,
    /// Ids of those that stay by their name: the account may not read them, so nobody has seen them.
    pub keep_unseen: Vec<String>,
    /// Names of those that were to stay and are not there.
    pub missing: Vec<String>,
    /// Names of those that stay although their tag says that they go: they were made with another policy.
    pub mark_kept: Vec<String>,
}

/// What is known of a machine besides its spec.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The disks that its virtual machine had.
    pub attached: &'a [Attached],
    /// Whether a virtual machine was recorded as this machine's. Where none was, only resources with this very machine's
    /// tag are its own: a disk that an earlier machine of the same name left on purpose is not.
    pub had_vm: bool,
}

impl Known<'_> {
    fn had(&self, disk: &str) -> bool {
        self.attached.iter().any(|attached| same(&attached.name, disk))
    }
}

pub fn decide(spec: &AzureMachineProviderSpec, names: &Names, listing: &Listing, known: Known) -> Disposition {
    let mut disposition = Disposition::default();
    let found = |name: &str| listing.get(&name.to_lowercase());
    let os = names.os_disk();
    if found(&os).is_some_and(|found| known.had_vm || names.made(found.tags.as_ref())) {
        disposition.delete.push(("OS disk", os));
    }
    for (name, policy) in wanted(spec, names, listing, known) {
        let Some(disk) = found(&name) else {
            // A disk that was added to the spec later was never made.
            let made = known.had_vm && (known.attached.is_empty() || known.had(&name));
            if policy == DeletionPolicy::Detach && made {
                disposition.missing.push(name);
            }
            continue;
        };
        let made = names.made(disk.tags.as_ref());
        let made_first = policy_by_tag(disk).is_some();
        let own = made || known.had(&name) || (known.had_vm && !is_older(disk, names));
        // A disk that was made before a virtual machine that never came holds nothing: it goes whatever its policy.
        let unused = made && made_first && !known.had_vm && known.attached.is_empty();
        match policy {
            // A kept disk of an earlier machine has another name. It goes by nobody's word but the user's.
            DeletionPolicy::Delete if own && names.is_data_disk(&name) => disposition.delete.push(("Data Disk", name)),
            _ if unused => disposition.delete.push(("Data Disk", name)),
            _ if own || known.had_vm => {
                disposition.keep.push(disk.id.clone());
                if made && policy_by_tag(disk) == Some(DeletionPolicy::Delete) {
                    disposition.mark_kept.push(name);
                }
            }
            _ => {}
        }
    }
    disposition
}

/// As [`decide`], for an account that may delete disks and not list them. Disks are deleted by name, and only where a
/// virtual machine was recorded as the machine's: without tags there is no other proof.
pub fn decide_unlisted(spec: &AzureMachineProviderSpec, names: &Names, known: Known) -> Disposition {
    let mut disposition = Disposition::default();
    if !known.had_vm {
        return disposition;
    }
    disposition.delete.push(("OS disk", names.os_disk()));
    for (name, policy) in wanted(spec, names, &Listing::default(), known) {
        let had = known.attached.is_empty() || known.had(&name);
        if !had || AzureName::Disk.check(&name).is_err() {
            continue;
        }
        match policy {
            DeletionPolicy::Delete if names.is_data_disk(&name) => disposition.delete.push(("Data Disk", name)),
            // A kept disk of an earlier machine stays, whatever its policy.
            _ => disposition.keep_unseen.push(disk_id(names, &name)),
        }
    }
    disposition
}

fn disk_id(names: &Names, disk: &str) -> String {
    let Names {
        subscription, group, ..
    } = names;
    format!("/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute/disks/{disk}")
}

/// Returns every disk that the machine has or had, with its policy: the spec's, else the virtual machine's, else its tag's.
fn wanted(
    spec: &AzureMachineProviderSpec,
    names: &Names,
    listing: &Listing,
    known: Known,
) -> Vec<(String, DeletionPolicy)> {
    let by_spec = spec
        .data_disks
        .iter()
        .map(|disk| (names.data_disk(&disk.name_suffix), policy_of(disk)));
    let mut all: Vec<(String, DeletionPolicy)> = by_spec.collect();
    let before = known
        .attached
        .iter()
        .map(|disk| (disk.name.clone(), disk.deletion_policy.clone()));
    let mut by_tag: Vec<_> = listing
        .values()
        .filter(|found| names.made(found.tags.as_ref()) && names.is_data_disk(&found.name))
        .map(|found| {
            let policy = policy_by_tag(found).unwrap_or(DeletionPolicy::Detach);
            (found.name.clone(), policy)
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

/// Returns the policy that a disk's tag records. Only disks that are made before their machine have it.
fn policy_by_tag(disk: &Found) -> Option<DeletionPolicy> {
    let tag = disk.tags.as_ref()?.get(POLICY_TAG)?;
    Some(policy(tag == "Delete"))
}

/// Whether a disk was made before the machine: by an earlier machine of the same name, which left it on purpose.
fn is_older(disk: &Found, names: &Names) -> bool {
    match (disk.created, names.created) {
        (Some(made), Some(created)) => made + SKEW < created,
        _ => false,
    }
}

/// Returns the messages of the machine's last events: that it is gone, and where its disks are.
pub fn deleted_messages(machine: &str, disks: Option<&Disposition>) -> Vec<String> {
    let mut messages = vec![format!("Deleted machine {machine:?}")];
    let seen = disks.into_iter().flat_map(|disks| &disks.keep);
    let seen = seen.map(|id| format!("; its Data Disk was detached and is kept as {id}"));
    let unseen = disks.into_iter().flat_map(|disks| &disks.keep_unseen);
    let unseen = unseen.map(|id| {
        format!("; its Data Disk was detached and is kept as {id}, which the account may not read: nobody has seen it")
    });
    for text in seen.chain(unseen) {
        match messages.last_mut() {
            Some(last) if last.len() + text.len() <= MESSAGE => last.push_str(&text),
            _ => messages.push(format!("Deleted machine {machine:?}{text}")),
        }
    }
    messages
}

#[cfg(test)]
mod tests;
