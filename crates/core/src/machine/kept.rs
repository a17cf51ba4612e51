//! Which kept disks a machine attaches instead of new ones. Pure.
//!
//! Invariant: a machine gets a disk only if its annotation asks for one, and only one that is kept: made by the same cluster
//! for a machine of the same namespace that is gone, in the machine's group, region and zone, of the kind that the spec asks for,
//! and attached to nothing else.

use std::collections::BTreeMap;

use capstan_api::disk::DeletionPolicy;
use capstan_api::openshift::{AzureMachineProviderSpec, DataDisk};

use super::disks::{Found, Listing, policy_of};
use super::names::{MACHINE_TAG, Names, UID_TAG};
use crate::azure_names::AzureName;
use crate::disks::azure::OS_DISK_SUFFIX;

/// On a Machine or a MachineSet: the data disks of the spec, by `nameSuffix`, that are to be kept ones. `data=old_data` names
/// the disk; `data` alone stands for one that an earlier machine of this name or of this set has left, or else a new one.
pub const ATTACH_ANNOTATION: &str = "capstan.dev/attach-kept-disks";

/// The characters that the API server adds to the name of a set's machine.
const GENERATED: usize = 5;

/// One part of the annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    pub name_suffix: String,
    /// `None`: whichever fits.
    pub disk: Option<String>,
}

/// Reads the annotation for these disks of a spec.
pub fn wishes(text: &str, disks: &[DataDisk]) -> Result<Vec<Wish>, String> {
    let mut wishes: Vec<Wish> = Vec::new();
    for part in text.split([' ', ',']).filter(|part| !part.is_empty()) {
        let (suffix, named) = match part.split_once('=') {
            Some((suffix, disk)) => (suffix, Some(disk)),
            None => (part, None),
        };
        let Some(disk) = disks.iter().find(|disk| disk.name_suffix == suffix) else {
            return Err(format!("no data disk has the nameSuffix {suffix:?}"));
        };
        if policy_of(disk) != DeletionPolicy::Detach {
            return Err(format!(
                "data disk {suffix} must have the deletionPolicy Detach to be a kept disk"
            ));
        }
        if let Some(name) = named {
            let valid = AzureName::Disk.check(name);
            valid.map_err(|error| format!("disk {name:?} of {suffix}: {}", error.reason()))?;
        }
        let named = named.map(str::to_owned);
        if wishes
            .iter()
            .any(|wish| wish.name_suffix == suffix || (named.is_some() && wish.disk == named))
        {
            return Err(format!("{part} is named twice"));
        }
        wishes.push(Wish {
            name_suffix: suffix.to_owned(),
            disk: named,
        });
    }
    Ok(wishes)
}

/// What is known of the machine and its cluster.
pub struct Machine<'a> {
    pub names: &'a Names,
    pub spec: &'a AzureMachineProviderSpec,
    /// The resource id of its virtual machine, which may hold the disk already.
    pub vm: &'a str,
    /// Whether a Machine with this UID exists.
    pub exists: &'a dyn Fn(&str) -> bool,
}

/// Returns the names of the disks to attach, by `nameSuffix`. An error names the disk that cannot be attached, and why.
pub fn choose(machine: &Machine, wishes: &[Wish], listing: &Listing) -> Result<BTreeMap<String, String>, String> {
    let mut chosen: BTreeMap<String, String> = BTreeMap::new();
    for wish in wishes {
        let Some(disk) = machine
            .spec
            .data_disks
            .iter()
            .find(|disk| disk.name_suffix == wish.name_suffix)
        else {
            continue;
        };
        let own = machine.names.data_disk(&wish.name_suffix);
        let named = wish.disk.as_ref();
        let group = &machine.names.group;
        let found = match (named, listing.get(&named.unwrap_or(&own).to_lowercase())) {
            (_, Some(found)) if named.is_some() || !machine.names.made(found.tags.as_ref()) => {
                machine.check(disk, found).map_err(|why| refusal(&found.name, &why))?;
                Some(found)
            }
            (Some(name), None) => return Err(refusal(name, &format!("resource group {group} has no such disk"))),
            // The machine's own disk, made for it a moment ago, is no kept one.
            (_, Some(_)) => None,
            (None, None) => machine.of_set(disk, listing, &chosen),
        };
        if let Some(found) = found {
            chosen.insert(wish.name_suffix.clone(), found.name.clone());
        }
    }
    Ok(chosen)
}

fn refusal(disk: &str, why: &str) -> String {
    format!("annotation {ATTACH_ANNOTATION}: disk {disk} cannot be attached: {why}")
}

fn same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

impl Machine<'_> {
    /// Returns the disk that an earlier machine of the same set has left: one that the virtual machine holds already, or
    /// else the first by name.
    fn of_set<'a>(
        &self,
        disk: &DataDisk,
        listing: &'a Listing,
        chosen: &BTreeMap<String, String>,
    ) -> Option<&'a Found> {
        let set = self.names.set.as_deref()?;
        let left = |found: &&Found| {
            let rest = found.name.strip_prefix(set).and_then(|rest| rest.strip_prefix('-'));
            let generated = rest.and_then(|rest| rest.strip_suffix(&format!("_{}", disk.name_suffix)));
            generated.is_some_and(|text| text.len() == GENERATED && text.chars().all(|c| c.is_ascii_alphanumeric()))
        };
        let free = |found: &&Found| !chosen.values().any(|name| *name == found.name) && self.check(disk, found).is_ok();
        let held = |found: &Found| found.managed_by.is_some();
        let candidates = listing.values().filter(left).filter(free);
        candidates.min_by_key(|found| (!held(found), found.name.clone()))
    }

    /// Whether the machine may attach a disk.
    fn check(&self, disk: &DataDisk, found: &Found) -> Result<(), String> {
        let tag = |key: &str| found.tags.as_ref().and_then(|tags| tags.get(key));
        let machine = tag(MACHINE_TAG).map(String::as_str).unwrap_or_default();
        let namespace = machine.split_once('/').map(|(namespace, _)| namespace);
        if !self.names.is_of_cluster(found.tags.as_ref()) {
            return Err("its tags do not name this cluster".to_owned());
        }
        if namespace != Some(self.names.namespace.as_str()) {
            return Err(format!(
                "its tag {MACHINE_TAG} does not name a machine of namespace {}",
                self.names.namespace
            ));
        }
        let lives = |uid: &String| *uid != self.names.uid && (self.exists)(uid);
        if tag(UID_TAG).is_some_and(lives) {
            return Err(format!("it belongs to machine {machine}, which exists"));
        }
        let holder = found.managed_by.as_deref().filter(|holder| !holder.is_empty());
        if let Some(holder) = holder.filter(|holder| !same(holder, self.vm)) {
            return Err(format!("it is attached to {holder}"));
        }
        let os_disk = format!("_{}", OS_DISK_SUFFIX.to_lowercase());
        if found.name.to_lowercase().ends_with(&os_disk) {
            return Err("it is an OS disk".to_owned());
        }
        let kind = found.kind.as_deref().unwrap_or_default();
        let wanted = disk
            .managed_disk
            .storage_account_type
            .as_ref()
            .map(|kind| kind.as_str());
        if let Some(wanted) = wanted.filter(|wanted| !wanted.is_empty() && !same(wanted, kind)) {
            return Err(format!(
                "its storageAccountType is {kind}, and the spec asks for {wanted}"
            ));
        }
        // A resource group holds resources of all regions.
        let region = |location: &str| location.replace(' ', "").to_lowercase();
        let wanted = &self.names.location;
        if let Some(location) = found
            .location
            .as_deref()
            .filter(|found| region(found) != region(wanted))
        {
            return Err(format!("it is in location {location}, and the machine is in {wanted}"));
        }
        let zone = self.spec.zone.as_deref().filter(|zone| !zone.is_empty());
        let everywhere = found.zones.is_empty() && kind.ends_with("ZRS");
        if !everywhere && found.zones.first().map(String::as_str) != zone {
            let shown = |zone: Option<&str>| zone.map_or("no zone".to_owned(), |zone| format!("zone {zone}"));
            return Err(format!(
                "it is in {}, and the machine is in {}",
                shown(found.zones.first().map(String::as_str)),
                shown(zone)
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::names::Tags;
    use super::super::names::sample;
    use super::*;
    use rstest::rstest;
    use serde_json::json;
    use std::sync::Arc;

    const VM: &str = "/subscriptions/SUB/resourceGroups/Group/providers/Microsoft.Compute/virtualMachines/m1";

    fn spec() -> AzureMachineProviderSpec {
        AzureMachineProviderSpec::from_raw(&json!({"zone": "1", "dataDisks": [
            {"nameSuffix": "data", "lun": 0, "deletionPolicy": "Detach", "managedDisk": {"storageAccountType": "Premium_LRS"}},
            {"nameSuffix": "logs", "lun": 1, "deletionPolicy": "Detach"},
            {"nameSuffix": "gone", "lun": 2, "deletionPolicy": "Delete"},
        ]}))
        .unwrap()
    }

    fn kept(name: &str) -> Found {
        let tags = [
            ("kubernetes.io_cluster.c", "owned"),
            (MACHINE_TAG, "ns/old"),
            (UID_TAG, "u0"),
        ];
        Found {
            name: name.into(),
            id: format!("/disks/{name}"),
            tags: Some(tags.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            zones: vec!["1".into()],
            kind: Some("Premium_LRS".into()),
            location: Some("East US".into()),
            ..Found::default()
        }
    }

    fn chosen(annotation: &str, disks: Vec<Found>) -> Result<BTreeMap<String, String>, String> {
        let names = Names {
            set: Some("workers".into()),
            ..sample()
        };
        let spec = spec();
        let machine = Machine {
            names: &names,
            spec: &spec,
            vm: VM,
            exists: &|uid| uid == "alive",
        };
        let disks = disks.into_iter().map(|disk| (disk.name.to_lowercase(), disk));
        let listing: Listing = Arc::new(disks.collect());
        choose(&machine, &wishes(annotation, &spec.data_disks)?, &listing)
    }

    fn pairs(pairs: &[(&str, &str)]) -> Result<BTreeMap<String, String>, String> {
        Ok(pairs
            .iter()
            .map(|(suffix, disk)| ((*suffix).to_owned(), (*disk).to_owned()))
            .collect())
    }

    #[test]
    fn a_kept_disk_is_found_by_the_machines_own_name_by_its_set_or_by_its_name() {
        assert_eq!(
            chosen("data", vec![]),
            pairs(&[]),
            "a new disk is made where none was kept"
        );
        assert_eq!(chosen("data", vec![kept("m1_data")]), pairs(&[("data", "m1_data")]));
        let of_set = || {
            vec![
                kept("workers-zzzzz_data"),
                kept("workers-abcde_data"),
                kept("workers-abcde_logs"),
            ]
        };
        assert_eq!(chosen("data", of_set()), pairs(&[("data", "workers-abcde_data")]));
        assert_eq!(
            chosen("data logs", of_set()),
            pairs(&[("data", "workers-abcde_data"), ("logs", "workers-abcde_logs")])
        );
        for other in [
            "workers-2-abcde_data",
            "workers-abc_data",
            "other-abcde_data",
            "workers-abcde_data2",
        ] {
            assert_eq!(chosen("data", vec![kept(other)]), pairs(&[]), "{other}");
        }
        let named = chosen("data=archive, logs", vec![kept("archive"), kept("m1_logs")]);
        assert_eq!(named, pairs(&[("data", "archive"), ("logs", "m1_logs")]));
        let error = chosen("data=archive", vec![]).unwrap_err();
        assert!(
            error.contains("disk archive cannot be attached: resource group Group has no such disk"),
            "{error}"
        );
    }

    #[test]
    fn the_disk_that_the_virtual_machine_holds_already_comes_first() {
        let held = Found {
            managed_by: Some(VM.to_uppercase()),
            ..kept("workers-zzzzz_data")
        };
        let disks = vec![kept("workers-abcde_data"), held];
        assert_eq!(chosen("data", disks), pairs(&[("data", "workers-zzzzz_data")]));
    }

    fn tagged(key: &str, value: &str) -> Found {
        let mut disk = kept("m1_data");
        let tags: &mut Tags = disk.tags.get_or_insert_default();
        tags.insert(key.to_owned(), value.to_owned());
        disk
    }

    fn of_another_cluster() -> Found {
        let mut disk = tagged("kubernetes.io_cluster.other", "owned");
        disk.tags.get_or_insert_default().remove("kubernetes.io_cluster.c");
        disk
    }

    #[rstest]
    #[case::of_another_cluster(of_another_cluster(), "its tags do not name this cluster")]
    #[case::without_tags(Found { tags: None, ..kept("m1_data") }, "its tags do not name this cluster")]
    #[case::of_another_namespace(tagged(MACHINE_TAG, "tenant/m1"), "does not name a machine of namespace ns")]
    #[case::of_a_machine_that_lives(tagged(UID_TAG, "alive"), "it belongs to machine ns/old, which exists")]
    #[case::attached(Found { managed_by: Some("/vm/other".into()), ..kept("m1_data") }, "it is attached to /vm/other")]
    #[case::in_another_zone(Found { zones: vec!["2".into()], ..kept("m1_data") }, "it is in zone 2, and the machine is in zone 1")]
    #[case::in_another_region(Found { location: Some("westus".into()), ..kept("m1_data") }, "it is in location westus, and the machine is in eastus")]
    #[case::in_no_zone(Found { zones: vec![], ..kept("m1_data") }, "it is in no zone, and the machine is in zone 1")]
    #[case::of_another_kind(Found { kind: Some("UltraSSD_LRS".into()), ..kept("m1_data") }, "its storageAccountType is UltraSSD_LRS")]
    fn a_disk_that_is_not_the_machines_to_take_is_refused_with_the_reason(#[case] disk: Found, #[case] reason: &str) {
        for annotation in ["data", "data=m1_data"] {
            let error = chosen(annotation, vec![disk.clone()]).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[rstest]
    #[case::unknown("etcd", "no data disk has the nameSuffix \"etcd\"")]
    #[case::to_be_deleted("gone", "must have the deletionPolicy Detach")]
    #[case::twice("data data=x", "named twice")]
    #[case::one_disk_for_two("data=x logs=x", "named twice")]
    #[case::no_name("data=../x", "not a valid name")]
    fn a_wish_that_cannot_be_met_is_refused(#[case] annotation: &str, #[case] reason: &str) {
        let error = wishes(annotation, &spec().data_disks).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
