//! A machine's data disks as its virtual machine has them. Pure.

use super::build;
use super::ids::Ids as _;
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_azure::model::{StorageProfile, VirtualMachine, VirtualMachineProperties, VirtualMachineUpdate};
use capstan_core::machine::disks::{Attached, policy};
use capstan_core::machine::names::Names;

fn same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// Returns the data disks of a virtual machine that bear its machine's name and are in its group, and the kept disks of
/// earlier machines that it was given for disks of its spec. Others, such as the volumes of pods, do not belong to the
/// machine.
pub fn attached(spec: &AzureMachineProviderSpec, names: &Names, vm: &VirtualMachine) -> Vec<Attached> {
    let kept = |name: &str, lun: Option<i32>| {
        let mut wanted = spec.data_disks.iter().filter(|disk| Some(disk.lun) == lun);
        wanted.any(|disk| {
            name.to_lowercase()
                .ends_with(&format!("_{}", disk.name_suffix.to_lowercase()))
        })
    };
    let ours = vm.data_disks().iter().filter_map(|disk| {
        let own = |name: &String| names.is_data_disk(name) || kept(name, disk.lun);
        let name = disk.name.clone().filter(own)?;
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

/// Returns the change that keeps disks marked Detach when the virtual machine is deleted: the spec may have changed since
/// it was created.
pub fn detach_before_delete(
    spec: &AzureMachineProviderSpec,
    names: &Names,
    vm: &VirtualMachine,
) -> Option<VirtualMachineUpdate> {
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

#[cfg(test)]
mod tests {
    use super::super::ids::tests::sample;
    use super::*;
    use capstan_api::disk::DeletionPolicy;
    use serde_json::json;

    fn spec() -> AzureMachineProviderSpec {
        AzureMachineProviderSpec::from_raw(&json!({"dataDisks": [
            {"nameSuffix": "kept", "lun": 0, "deletionPolicy": "Detach"},
            {"nameSuffix": "gone", "lun": 1, "deletionPolicy": "Delete"},
        ]}))
        .unwrap()
    }

    fn had(disks: &[(&str, &str)]) -> Vec<Attached> {
        let one = |(name, policy): &(&str, &str)| Attached {
            name: (*name).to_owned(),
            deletion_policy: DeletionPolicy::from(*policy),
        };
        disks.iter().map(one).collect()
    }

    fn vm(disks: serde_json::Value) -> VirtualMachine {
        serde_json::from_value(json!({"properties": {"storageProfile": {"dataDisks": disks}}})).unwrap()
    }

    #[test]
    fn a_virtual_machines_disks_are_known_by_name_and_group() {
        let names = sample();
        let id = |group: &str, name: &str| {
            format!("/subscriptions/sub/resourceGroups/{group}/providers/Microsoft.Compute/disks/{name}")
        };
        let seen = attached(
            &spec(),
            &names,
            &vm(json!([
                {"name": "M1_a", "deleteOption": "Delete", "managedDisk": {"id": id("GROUP", "m1_a")}},
                {"name": "m1_b", "managedDisk": {"id": id("group", "m1_b")}},
                {"name": "m1_c", "deleteOption": "Delete", "managedDisk": {"id": id("other", "m1_c")}},
                {"name": "pvc-1", "deleteOption": "Delete"},
                {"name": "m1_OSDisk", "deleteOption": "Delete"},
                {"name": "m10_a", "deleteOption": "Delete"},
                {"name": "old_kept", "lun": 0, "deleteOption": "Detach"},
                {"name": "old_gone", "lun": 7, "deleteOption": "Detach"},
            ])),
        );
        assert_eq!(
            seen,
            had(&[("M1_a", "Delete"), ("m1_b", "Detach"), ("old_kept", "Detach")])
        );
    }

    #[test]
    fn a_disk_that_became_detach_is_spared_before_the_machine_goes() {
        let before = vm(json!([
            {"name": "M1_kept", "lun": 0, "deleteOption": "Delete", "createOption": "Empty"},
            {"name": "m1_gone", "lun": 1, "deleteOption": "Delete"},
        ]));
        let update = detach_before_delete(&spec(), &sample(), &before).unwrap();
        let disks = serde_json::to_value(update).unwrap()["properties"]["storageProfile"]["dataDisks"].clone();
        assert_eq!(
            (&disks[0]["deleteOption"], &disks[1]["deleteOption"]),
            (&json!("Detach"), &json!("Delete"))
        );
        assert_eq!(disks[0]["createOption"], "Empty");
        let settled = vm(json!([{"name": "m1_kept", "deleteOption": "Detach"}]));
        assert!(detach_before_delete(&spec(), &sample(), &settled).is_none());
    }
}
