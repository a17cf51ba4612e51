//! Decides whose a virtual machine is, and whose a Node.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use capstan_api::vsphere::VSphereVM;

use super::guestinfo::{BOOTSTRAP, METADATA};

/// A virtual machine, as far as it shows whose it is.
#[derive(Clone, Copy, Debug)]
pub struct FoundVm<'a> {
    pub name: &'a str,
    pub instance_uuid: &'a str,
    pub bios_uuid: &'a str,
    pub extra_config: &'a [(String, String)],
}

/// Whether a virtual machine is this object's: it was cloned for it, or for the object that this one was before it was moved
/// to another management cluster or restored. Such an object has a new UID and keeps its BIOS UUID.
///
/// Anybody who may write VSphereVMs can write a BIOS UUID. So it counts only for a VM of the same name that was started with
/// bootstrap data of that name, and only if no other VSphereVM has a better claim; `is_claimed` returns whether one of the known
/// objects does.
pub fn is_owner(
    vm: &VSphereVM,
    found: &FoundVm<'_>,
    is_claimed: impl FnOnce(&dyn Fn(&VSphereVM) -> bool) -> bool,
) -> bool {
    if was_cloned_for(vm, found) {
        return true;
    }
    names(vm, found) && was_started_as(vm, found) && !is_claimed(&|other| has_better_claim(other, vm, found))
}

/// Whether a Node of the machine's name is the machine's own, by the provider ids of both. A Node gets its id from a cloud
/// controller, after it has joined. A machine without an id never ran.
pub fn is_node_of(machine: Option<&str>, node: Option<&str>) -> bool {
    match (machine, node) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(machine), Some(node)) => same(Some(machine), node),
    }
}

fn was_cloned_for(vm: &VSphereVM, found: &FoundVm<'_>) -> bool {
    same(vm.metadata.uid.as_deref(), found.instance_uuid)
}

/// Whether an object has the name and the BIOS UUID of a VM.
fn names(vm: &VSphereVM, found: &FoundVm<'_>) -> bool {
    same(vm.spec.bios_uuid.as_deref(), found.bios_uuid) && vm.metadata.name.as_deref() == Some(found.name)
}

/// Of two objects with the same name and BIOS UUID the VM is the one's that it was cloned for, else the older one's.
fn has_better_claim(other: &VSphereVM, vm: &VSphereVM, found: &FoundVm<'_>) -> bool {
    let age = |vm: &VSphereVM| {
        let created = vm.metadata.creation_timestamp.as_ref();
        (created.map(|created| created.0), vm.metadata.uid.clone())
    };
    other.metadata.uid != vm.metadata.uid
        && (was_cloned_for(other, found) || names(other, found) && age(other) < age(vm))
}

/// Whether a VM was started with bootstrap data, and not with those of another name.
fn was_started_as(vm: &VSphereVM, found: &FoundVm<'_>) -> bool {
    let mut keys = found.extra_config.iter().map(|(key, _)| key.as_str());
    let is_bootstrapped = keys.any(|key| BOOTSTRAP.iter().any(|prefix| key.starts_with(prefix)));
    let metadata = found.extra_config.iter().find(|(key, _)| key == METADATA);
    let instance = metadata.and_then(|(_, value)| instance_id(value));
    is_bootstrapped && instance.is_none_or(|instance| Some(instance) == vm.metadata.name)
}

/// Returns the instance that a metadata document is for.
fn instance_id(encoded: &str) -> Option<String> {
    let document = String::from_utf8(STANDARD.decode(encoded).ok()?).ok()?;
    let line = document.lines().find_map(|line| line.strip_prefix("instance-id:"))?;
    Some(line.trim().trim_matches('"').to_owned())
}

fn same(one: Option<&str>, other: &str) -> bool {
    one.is_some_and(|one| !one.is_empty() && one.eq_ignore_ascii_case(other))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use rstest::rstest;

    use super::*;

    fn object(name: &str, uid: &str, bios: &str, age: i64) -> VSphereVM {
        let mut vm = VSphereVM::new(name, Default::default());
        vm.metadata.uid = Some(uid.into());
        vm.metadata.creation_timestamp = Some(Time(jiff::Timestamp::from_second(1_000_000 - age).unwrap()));
        vm.spec.bios_uuid = Some(bios.into());
        vm
    }

    fn started_as(name: &str) -> Vec<(String, String)> {
        let document = format!("\ninstance-id: \"{name}\"\nlocal-hostname: \"{name}\"\n");
        vec![(METADATA.to_owned(), STANDARD.encode(document))]
    }

    #[rstest]
    #[case::cloned_for_it("vm", "u1", "", "u1", None, true)]
    #[case::cloned_for_it_and_named_by_another("vm", "u1", "b", "u1", Some(("u2", "b", 99)), true)]
    #[case::moved("vm", "u1", "B", "old", None, true)]
    #[case::another_name("other", "u1", "b", "old", None, false)]
    #[case::another_bios_uuid("vm", "u1", "c", "old", None, false)]
    #[case::cloned_for_another("vm", "u1", "b", "u2", Some(("u2", "b", 0)), false)]
    #[case::cloned_for_another_that_does_not_know_it("vm", "u1", "b", "u2", Some(("u2", "", 0)), false)]
    #[case::moved_with_an_older_object("vm", "u1", "b", "old", Some(("u2", "b", 99)), false)]
    #[case::moved_before_a_younger_object("vm", "u1", "b", "old", Some(("u2", "b", 0)), true)]
    #[case::beside_one_of_another_vm("vm", "u1", "b", "old", Some(("u2", "c", 99)), true)]
    fn a_vm_belongs_to_one_object(
        #[case] name: &str,
        #[case] uid: &str,
        #[case] bios: &str,
        #[case] instance: &str,
        #[case] other: Option<(&str, &str, i64)>,
        #[case] expected: bool,
    ) {
        let extra_config = started_as("vm");
        let found = FoundVm {
            name: "vm",
            instance_uuid: instance,
            bios_uuid: "b",
            extra_config: &extra_config,
        };
        let own = object(name, uid, bios, 10);
        let others: Vec<_> = other
            .map(|(uid, bios, age)| object("vm", uid, bios, age))
            .into_iter()
            .collect();
        let all = [vec![own.clone()], others].concat();
        assert_eq!(is_owner(&own, &found, |claims| all.iter().any(claims)), expected);
    }

    #[rstest]
    #[case::its_own(Some("vsphere://u1"), Some("vsphere://U1"), true)]
    #[case::its_own_before_it_has_an_id(Some("vsphere://u1"), None, true)]
    #[case::of_a_later_machine_of_the_name(Some("vsphere://u1"), Some("vsphere://u2"), false)]
    #[case::the_machine_never_ran(None, Some("vsphere://u2"), false)]
    #[case::neither_has_an_id(None, None, false)]
    #[case::empty_ids(Some(""), Some(""), false)]
    fn a_node_belongs_to_the_machine_with_its_provider_id(
        #[case] machine: Option<&str>,
        #[case] node: Option<&str>,
        #[case] expected: bool,
    ) {
        assert_eq!(is_node_of(machine, node), expected);
    }

    #[test]
    fn a_vm_that_was_started_without_bootstrap_data_or_as_another_is_foreign() {
        let own = object("vm", "u1", "b", 10);
        let ignition = vec![("guestinfo.ignition.config.data".to_owned(), String::new())];
        let cases = [
            (started_as("vm"), true),
            (ignition, true),
            (started_as("other"), false),
            (Vec::new(), false),
        ];
        for (extra_config, expected) in cases {
            let found = FoundVm {
                name: "vm",
                instance_uuid: "old",
                bios_uuid: "b",
                extra_config: &extra_config,
            };
            assert_eq!(is_owner(&own, &found, |_| false), expected, "{extra_config:?}");
        }
    }
}
