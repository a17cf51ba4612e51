//! Each rule for pools, met and broken.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

/// A pool that breaks no rule, with `change` merged into its spec.
fn pool(change: Value) -> AzureMachinePool {
    let mut spec = json!({
        "location": "westus2",
        "template": { "vmSize": "Standard_D4s_v3", "osDisk": { "osType": "Linux", "diskSizeGB": 30 } }
    });
    merge(&mut spec, &change);
    let object = json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1",
        "kind": "AzureMachinePool",
        "metadata": { "name": "pool" },
        "spec": spec
    });
    serde_json::from_value(object).unwrap()
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

fn disks(disks: Value) -> Value {
    json!({ "template": { "dataDisks": disks } })
}

const KEY: &str = "c3NoLWVkMjU1MTkgQUFBQUMzTnphQzFsWkRJMU5URTVBQUFBSUFBPSBhbGV4Cg==";

#[rstest]
#[case::plain(json!({}))]
#[case::ssh_key(json!({ "template": { "sshPublicKey": KEY } }))]
#[case::no_ssh_key(json!({ "template": { "sshPublicKey": "" } }))]
#[case::percentages(json!({ "strategy": { "rollingUpdate": { "maxSurge": "0%", "maxUnavailable": "25%" } } }))]
#[case::zero_percent(json!({ "strategy": { "rollingUpdate": { "maxSurge": "0%", "maxUnavailable": 0 } } }))]
#[case::on_delete(json!({ "strategy": { "type": "OnDelete" } }))]
#[case::an_ultra_disk(disks(json!([{ "nameSuffix": "u", "diskSizeGB": 4, "lun": 0, "cachingType": "None",
    "managedDisk": { "storageAccountType": "UltraSSD_LRS" }, "diskIOPSReadWrite": 4000 }])))]
#[case::a_user_assigned_identity(json!({ "identity": "UserAssigned",
    "userAssignedIdentities": [{ "providerID": "/subscriptions/s/x" }] }))]
fn a_good_pool_is_accepted(#[case] change: Value) {
    assert_eq!(validate(&pool(change)).message(), "");
}

#[rstest]
#[case::unset(json!({}), 0)]
#[case::that_we_follow(json!({ "template": { "disableVMBootstrapExtension": true } }), 0)]
#[case::that_we_do_not_follow(json!({ "template": { "disableVMBootstrapExtension": false } }), 1)]
fn a_field_that_is_not_followed_is_a_warning(#[case] change: Value, #[case] count: usize) {
    let findings = validate(&pool(change));
    assert_eq!((findings.message().as_str(), findings.warnings.len()), ("", count));
}

#[rstest]
#[case::an_ephemeral_disk_that_would_be_deallocated(
    json!({ "template": { "spotVMOptions": { "evictionPolicy": "Deallocate" },
        "osDisk": { "diffDiskSettings": { "option": "Local" } } } }),
    "spec.template.spotVMOptions.evictionPolicy: Invalid value")]
#[case::a_subnet_that_leaves_its_address(
    json!({ "template": { "subnetName": "a/../b" } }), "spec.template.subnetName: Invalid value")]
#[case::a_subnet_of_an_interface(
    json!({ "template": { "networkInterfaces": [{ "subnetName": "a?b" }] } }),
    "spec.template.networkInterfaces[0].subnetName: Invalid value")]
#[case::both_zero(json!({ "strategy": { "rollingUpdate": { "maxSurge": 0, "maxUnavailable": 0 } } }), "both zero")]
#[case::no_percentage(json!({ "strategy": { "rollingUpdate": { "maxSurge": "many" } } }), "maxSurge: \"many\"")]
#[case::two_images(json!({ "template": { "image": { "id": "/i",
    "marketplace": { "publisher": "p", "offer": "o", "sku": "s", "version": "1" } } } }), "only one of id")]
#[case::no_image_kind(json!({ "template": { "image": {} } }), "set one of id")]
#[case::terminate_timeout(json!({ "template": { "terminateNotificationTimeout": 4 } }), "between 5 and 15")]
#[case::not_base64(json!({ "template": { "sshPublicKey": "ssh-rsa AAAA" } }), "base64 encoding")]
#[case::no_key(json!({ "template": { "sshPublicKey": "bm90IGEga2V5" } }), "not an SSH public key")]
#[case::interfaces_and_subnet(json!({ "template": { "subnetName": "s", "networkInterfaces": [{}] } }), "subnetName")]
#[case::os_disk_size(json!({ "template": { "osDisk": { "diskSizeGB": 4096 } } }), "between 1 and 2048")]
#[case::ultra_os_disk(json!({ "template": { "osDisk": { "managedDisk": { "storageAccountType": "UltraSSD_LRS" } } } }),
    "operating system disk")]
#[case::identity_without_ids(json!({ "identity": "UserAssigned" }), "at least one identity")]
#[case::ids_without_identity(json!({ "userAssignedIdentities": [{ "providerID": "/x" }] }), "only when identity")]
#[case::disk_size(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 3 }])), "between 4 and 32767")]
#[case::same_suffix(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4 }, { "nameSuffix": "a", "diskSizeGB": 4 }])),
    "dataDisks[1].nameSuffix")]
#[case::same_lun(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4, "lun": 1 },
    { "nameSuffix": "b", "diskSizeGB": 4, "lun": 1 }])), "dataDisks[1].lun")]
#[case::lun(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4, "lun": 64 }])), "between 0 and 63")]
#[case::ultra_caching(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4, "cachingType": "ReadOnly",
    "managedDisk": { "storageAccountType": "UltraSSD_LRS" } }])),
    "cachingType 'ReadOnly' is not supported when storageAccountType is 'UltraSSD_LRS'. Allowed values are: 'None'")]
#[case::iops_of_premium(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4, "diskIOPSReadWrite": 500 }])),
    "only for UltraSSD_LRS")]
#[case::ultra_switched_off(json!({ "template": { "additionalCapabilities": { "ultraSSDEnabled": false },
    "dataDisks": [{ "nameSuffix": "a", "diskSizeGB": 4, "managedDisk": { "storageAccountType": "UltraSSD_LRS" } }] } }),
    "ultraSSDEnabled")]
#[case::uefi_without_type(json!({ "template": { "securityProfile": { "uefiSettings": { "secureBootEnabled": true } } } }),
    "securityType")]
fn a_bad_pool_is_refused_by_field_and_reason(#[case] change: Value, #[case] words: &str) {
    let message = validate(&pool(change)).message();
    assert!(message.contains(words), "{message}");
}

#[test]
fn an_ultra_disk_switches_the_capability_on_unless_written() {
    let with = pool(disks(json!([{ "nameSuffix": "a", "diskSizeGB": 4,
        "managedDisk": { "storageAccountType": "UltraSSD_LRS" } }])));
    assert_eq!(ultra_enabled(&with.spec.template), Some(true));
    assert_eq!(ultra_enabled(&pool(json!({})).spec.template), None);
}
