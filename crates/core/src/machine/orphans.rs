//! Resources of a cluster in Azure whose machine is gone. Pure.
//!
//! Invariant: a resource is an orphan only if its tags name this cluster, nothing uses it, and the machine that it was made
//! for does not exist. A resource that names no machine is none, availability sets apart: they belong to a set of machines.
//! The machines are those of the cluster that the tags name, and a disk that may hold data to keep goes only by its name.

use std::collections::BTreeSet;

use super::names::{MACHINE_TAG, POLICY_TAG, Tags, UID_TAG, availability_set_names, is_tag_of};
use crate::disks::azure::{OS_DISK_SUFFIX, disk_name};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Comes first: it may use an address.
    Interface,
    Address,
    Disk,
    AvailabilitySet,
}

impl Kind {
    pub fn noun(self) -> &'static str {
        match self {
            Kind::Interface => "interface",
            Kind::Address => "address",
            Kind::Disk => "disk",
            Kind::AvailabilitySet => "availability-set",
        }
    }
}

/// A resource as Azure shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    pub kind: Kind,
    pub group: String,
    pub name: String,
    pub id: String,
    pub tags: Option<Tags>,
    /// The resource that uses it.
    pub used_by: Option<String>,
}

impl Resource {
    /// Returns the deletion policy that a disk was made with, where its tags record it.
    pub fn deletion_policy(&self) -> Option<&str> {
        self.tags.as_ref()?.get(POLICY_TAG).map(String::as_str)
    }

    /// Whether a disk holds nothing to keep: it is its machine's OS disk, or its tag says that it goes with its machine. Azure
    /// makes most data disks together with their virtual machine, whose tags do not record what was asked for each of them.
    fn goes_with_machine(&self) -> bool {
        let machine = self.tags.as_ref().and_then(|tags| tags.get(MACHINE_TAG));
        let machine = machine.and_then(|owner| owner.split_once('/'));
        let os_disk = machine.map(|(_, machine)| disk_name(machine, OS_DISK_SUFFIX));
        os_disk.is_some_and(|os_disk| os_disk.eq_ignore_ascii_case(&self.name))
            || self.deletion_policy() == Some("Delete")
    }
}

/// What the user wants deleted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Whatever is no disk.
    pub others: bool,
    /// Disks that hold nothing to keep.
    pub disks: bool,
    /// The names of other disks.
    pub kept_disks: BTreeSet<String>,
}

impl Wanted {
    pub fn includes(&self, orphan: &Resource) -> bool {
        match orphan.kind {
            Kind::Disk if orphan.goes_with_machine() => self.disks,
            Kind::Disk => self.kept_disks.contains(&orphan.name),
            Kind::Interface | Kind::Address | Kind::AvailabilitySet => self.others,
        }
    }
}

/// Returns the name of the cluster in its tags. `found` is the name by the cluster itself: the machines of one cluster do not
/// tell which resources of another are orphans.
pub fn cluster_name(asked: Option<&str>, found: Option<&str>) -> Result<String, String> {
    match (asked, found) {
        (Some(asked), Some(found)) if asked != found => Err(format!(
            "--cluster {asked} is not the cluster of the kubeconfig, whose infrastructureName is {found}: use the kubeconfig \
             of {asked}"
        )),
        (Some(name), _) | (None, Some(name)) => Ok(name.to_owned()),
        (None, None) => Err("no Infrastructure object names the cluster: give --cluster".to_owned()),
    }
}

/// What exists in the cluster. It is read after the resources, so that no new machine is missed.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub cluster: String,
    pub uids: BTreeSet<String>,
    /// `namespace/name` of every machine.
    pub machines: BTreeSet<String>,
    /// Names of all sets of machines.
    pub sets: BTreeSet<String>,
}

impl Known {
    /// Returns why a resource that nothing uses is an orphan.
    pub fn reason(&self, kind: Kind, name: &str, tags: Option<&Tags>) -> Option<String> {
        let tags = tags?;
        if !tags.keys().any(|tag| is_tag_of(tag, &self.cluster)) {
            return None;
        }
        let Some(machine) = tags.get(MACHINE_TAG) else {
            return self.reason_of_set(kind, name);
        };
        let exists = match tags.get(UID_TAG) {
            Some(uid) => self.uids.contains(uid),
            None => self.machines.contains(machine),
        };
        (!exists).then(|| format!("machine {machine} does not exist"))
    }

    fn reason_of_set(&self, kind: Kind, name: &str) -> Option<String> {
        let of_set = kind == Kind::AvailabilitySet && name.ends_with("-as");
        let of = |set: &String| {
            availability_set_names(&self.cluster, set)
                .iter()
                .any(|known| known == name)
        };
        (of_set && !self.sets.iter().any(of)).then(|| "it is empty, and no MachineSet has it".to_owned())
    }
}

/// Returns the orphans among the resources, with the reason, in the order in which they can be deleted.
pub fn orphans(resources: &[Resource], known: &Known) -> Vec<(Resource, String)> {
    let found = |resource: &Resource| {
        let reason = known.reason(resource.kind, &resource.name, resource.tags.as_ref())?;
        Some((resource.clone(), reason))
    };
    let unused = resources.iter().filter(|resource| resource.used_by.is_none());
    let mut orphans: Vec<(Resource, String)> = unused.filter_map(found).collect();
    let interfaces: Vec<String> = orphans
        .iter()
        .filter(|(resource, _)| resource.kind == Kind::Interface)
        .map(|(resource, _)| format!("{}/", resource.id.to_lowercase()))
        .collect();
    // An address of an orphaned interface goes after it.
    let used = resources.iter().filter(|resource| {
        let user = resource.used_by.as_deref().map(str::to_lowercase).unwrap_or_default();
        resource.kind == Kind::Address && interfaces.iter().any(|interface| user.starts_with(interface))
    });
    orphans.extend(used.filter_map(found));
    orphans.sort_by(|(one, _), (other, _)| {
        (one.kind, &one.group, &one.name).cmp(&(other.kind, &other.group, &other.name))
    });
    orphans
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn known() -> Known {
        Known {
            cluster: "c".into(),
            uids: ["u1".to_owned()].into(),
            machines: ["ns/m1".to_owned()].into(),
            sets: ["workers".to_owned()].into(),
        }
    }

    fn tags(pairs: &[(&str, &str)]) -> Option<Tags> {
        Some(
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }

    const OURS: (&str, &str) = ("kubernetes.io_cluster.c", "owned");

    #[rstest]
    #[case::machine_exists(Kind::Interface, "m1-nic", tags(&[OURS, (MACHINE_TAG, "ns/m1"), (UID_TAG, "u1")]), false)]
    #[case::earlier_machine_of_the_name(Kind::Interface, "m1-nic", tags(&[OURS, (MACHINE_TAG, "ns/m1"), (UID_TAG, "u0")]), true)]
    #[case::machine_without_uid(Kind::Address, "c-m1", tags(&[OURS, (MACHINE_TAG, "ns/m1")]), false)]
    #[case::gone(Kind::Disk, "m2_data", tags(&[OURS, (MACHINE_TAG, "ns/m2"), (UID_TAG, "u2")]), true)]
    #[case::earlier_spelling(Kind::Disk, "m2_data", tags(&[("kubernetes.io-cluster-c", "owned"), (MACHINE_TAG, "ns/m2")]), true)]
    #[case::another_cluster(Kind::Disk, "m2_data", tags(&[("kubernetes.io_cluster.other", "owned"), (MACHINE_TAG, "ns/m2")]), false)]
    #[case::a_cluster_that_begins_alike(Kind::Disk, "m2_data", tags(&[("kubernetes.io_cluster.c2", "owned"), (MACHINE_TAG, "ns/m2")]), false)]
    #[case::names_no_machine(Kind::Address, "c-pip-v4", tags(&[OURS]), false)]
    #[case::no_tags(Kind::Disk, "pvc-1", None, false)]
    #[case::set_of_a_machine_set(Kind::AvailabilitySet, "c_workers-as", tags(&[OURS]), false)]
    #[case::set_under_its_earlier_name(Kind::AvailabilitySet, "workers-as", tags(&[OURS]), false)]
    #[case::set_of_nobody(Kind::AvailabilitySet, "c_infra-as", tags(&[OURS]), true)]
    #[case::set_of_another_kind(Kind::AvailabilitySet, "masters", tags(&[OURS]), false)]
    fn a_resource_is_an_orphan_by_its_tags_alone(
        #[case] kind: Kind,
        #[case] name: &str,
        #[case] tags: Option<Tags>,
        #[case] orphan: bool,
    ) {
        let found = known().reason(kind, name, tags.as_ref());
        assert_eq!(found.is_some(), orphan, "{found:?}");
    }

    #[rstest]
    #[case::by_itself(None, Some("c"), Ok("c"))]
    #[case::by_the_user(Some("c"), None, Ok("c"))]
    #[case::both(Some("c"), Some("c"), Ok("c"))]
    #[case::another(
        Some("d"),
        Some("c"),
        Err("--cluster d is not the cluster of the kubeconfig, whose infrastructureName is c")
    )]
    #[case::unknown(None, None, Err("give --cluster"))]
    fn the_machines_of_one_cluster_do_not_tell_of_another(
        #[case] asked: Option<&str>,
        #[case] found: Option<&str>,
        #[case] expected: Result<&str, &str>,
    ) {
        match (cluster_name(asked, found), expected) {
            (Ok(name), Ok(expected)) => assert_eq!(name, expected),
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (other, _) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_disk_that_may_hold_data_to_keep_goes_only_by_its_name() {
        let disk = |name: &str, policy: Option<&str>| {
            let mut disk = gone(Kind::Disk, name, None);
            let policy = policy.map(|policy| (POLICY_TAG.to_owned(), policy.to_owned()));
            disk.tags.get_or_insert_default().extend(policy);
            disk
        };
        let all = [
            disk("gone_data", None),
            disk("other_OSDisk", None),
            disk("GONE_osdisk", None),
            disk("scratch", Some("Delete")),
            disk("kept", Some("Detach")),
            gone(Kind::Interface, "nic", None),
        ];
        let included = |others: bool, disks: bool, kept: &[&str]| {
            let kept_disks = kept.iter().map(|name| (*name).to_owned()).collect();
            let wanted = Wanted {
                others,
                disks,
                kept_disks,
            };
            let included = all.iter().filter(|one| wanted.includes(one));
            included.map(|one| one.name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(included(false, false, &[]), Vec::<&str>::new());
        assert_eq!(included(true, false, &["scratch"]), ["nic"]);
        assert_eq!(included(true, true, &[]), ["GONE_osdisk", "scratch", "nic"]);
        assert_eq!(
            included(true, false, &["kept", "gone_data"]),
            ["gone_data", "kept", "nic"]
        );
    }

    fn gone(kind: Kind, name: &str, used_by: Option<&str>) -> Resource {
        Resource {
            kind,
            group: "g".into(),
            name: name.into(),
            id: format!("/{}/{name}", kind.noun()),
            tags: tags(&[OURS, (MACHINE_TAG, "ns/gone"), (UID_TAG, "u9")]),
            used_by: used_by.map(str::to_owned),
        }
    }

    #[test]
    fn what_is_used_is_no_orphan_unless_an_orphan_uses_it_and_interfaces_come_first() {
        let resources = [
            gone(Kind::Disk, "held", Some("/vm/x")),
            gone(Kind::Disk, "free", None),
            gone(Kind::Address, "of-orphan", Some("/INTERFACE/nic/ipConfigurations/a")),
            gone(Kind::Address, "of-other", Some("/interface/nic2/ipConfigurations/a")),
            gone(Kind::Address, "free", None),
            gone(Kind::Interface, "nic", None),
            gone(Kind::Interface, "held", Some("/vm/x")),
        ];
        let found = orphans(&resources, &known());
        let names: Vec<String> = found
            .iter()
            .map(|(one, _)| format!("{} {}", one.kind.noun(), one.name))
            .collect();
        assert_eq!(
            names,
            ["interface nic", "address free", "address of-orphan", "disk free"]
        );
    }
}
