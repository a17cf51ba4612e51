//! `providerSpec.value` is raw to the API server: it is read as Go reads it.

use capstan_api::openshift::{
    AzureMachineProviderSpec, CachingType, DeletionPolicy, StorageAccountType, UltraSsdCapability,
};
use serde_json::json;

#[test]
fn a_spec_is_read_whatever_the_case_of_its_keys() {
    let raw = json!({
        "VMSize": "Standard_D4s_v3",
        "ultrassdcapability": "Enabled",
        "DataDisks": [{ "namesuffix": "etcd", "DISKSIZEGB": 64, "Lun": 3, "deletionPolicy": "Detach",
            "manageddisk": { "storageaccounttype": "UltraSSD_LRS" }, "cachingtype": "None" }],
        "spotVMOptions": { "maxPrice": 0.5 },
    });
    let spec = AzureMachineProviderSpec::from_raw(&raw).unwrap();
    assert_eq!(spec.vm_size.as_deref(), Some("Standard_D4s_v3"));
    assert_eq!(spec.ultra_ssd_capability, Some(UltraSsdCapability::Enabled));
    let disk = &spec.data_disks[0];
    assert_eq!(
        (disk.name_suffix.as_str(), disk.disk_size_gb, disk.lun),
        ("etcd", 64, 3)
    );
    assert_eq!(
        disk.managed_disk.storage_account_type,
        Some(StorageAccountType::UltraSsdLrs)
    );
    assert_eq!(disk.caching_type, Some(CachingType::None));
    assert_eq!(disk.deletion_policy, Some(DeletionPolicy::Detach));
    assert_eq!(spec.spot_vm_options.unwrap().max_price.unwrap().0, "0.5");
}

#[test]
fn unknown_fields_survive_and_what_is_written_is_exact() {
    let raw = json!({ "vmsize": "S", "fromTheFuture": { "A": 1 }, "dataDisks": [{ "lun": 1, "colour": "red" }] });
    let written = AzureMachineProviderSpec::from_raw(&raw).unwrap().to_raw();
    assert_eq!(written["vmSize"], "S");
    assert_eq!(written["fromTheFuture"], json!({ "A": 1 }));
    assert_eq!(written["dataDisks"][0]["colour"], "red");
    assert!(written.get("vmsize").is_none());
    assert!(written.get("zone").is_none(), "nothing unset is written: {written}");
}

#[test]
fn null_and_empty_mean_unset_and_an_exact_key_wins() {
    let raw = json!({ "zone": "", "vnet": null, "osDisk": { "cachingType": "" }, "VMSIZE": "b", "vmSize": "a" });
    let spec = AzureMachineProviderSpec::from_raw(&raw).unwrap();
    assert_eq!((spec.zone, spec.vnet, spec.os_disk.caching_type), (None, None, None));
    assert_eq!(spec.vm_size.as_deref(), Some("a"));
}

#[test]
fn an_unknown_word_is_kept_for_validation_to_name() {
    let spec = AzureMachineProviderSpec::from_raw(&json!({ "ultraSSDCapability": "Maybe" })).unwrap();
    assert_eq!(spec.ultra_ssd_capability.unwrap().as_str(), "Maybe");
}

#[test]
fn a_number_where_a_word_is_wanted_is_read_as_it_is_spelled_and_written_as_a_word() {
    let raw = json!({
        "zone": 2, "tags": { "cost-centre": 4711, "spot": true, "share": 0.5 },
        "image": { "version": 413.92, "sku": 8 }, "applicationSecurityGroups": [7],
    });
    let spec = AzureMachineProviderSpec::from_raw(&raw).unwrap();
    assert_eq!(spec.zone.as_deref(), Some("2"));
    let written = spec.to_raw();
    assert_eq!(written["zone"], "2");
    assert_eq!(
        written["tags"],
        json!({ "cost-centre": "4711", "spot": "true", "share": "0.5" })
    );
    assert_eq!(written["image"]["version"], "413.92");
    assert_eq!(written["image"]["sku"], "8");
    assert_eq!(written["applicationSecurityGroups"], json!(["7"]));
}

#[test]
fn a_wrong_type_is_named_by_its_path() {
    let cases = [
        (
            json!({ "dataDisks": [{}, { "lun": "0" }] }),
            "providerSpec.value.dataDisks[1].lun: Invalid value: \"0\": must be a whole number",
        ),
        (
            json!({ "dataDisks": { "lun": 0 } }),
            "providerSpec.value.dataDisks: Invalid value: {\"lun\":0}: must be a list",
        ),
        (
            json!({ "vmSize": ["large"] }),
            "providerSpec.value.vmSize: Invalid value: [\"large\"]: must be a string",
        ),
        (
            json!({ "publicIP": "yes" }),
            "providerSpec.value.publicIP: Invalid value: \"yes\": must be true or false",
        ),
        (
            json!({ "osDisk": { "diskSizeGB": 1.5 } }),
            "providerSpec.value.osDisk.diskSizeGB: Invalid value: 1.5: must be a whole number",
        ),
        (
            json!({ "tags": { "a": {} } }),
            "providerSpec.value.tags.a: Invalid value: {}: must be a string",
        ),
        (
            json!("text"),
            "providerSpec.value: Invalid value: \"text\": must be an object",
        ),
    ];
    for (raw, expected) in cases {
        assert_eq!(
            AzureMachineProviderSpec::from_raw(&raw).unwrap_err().to_string(),
            expected
        );
    }
}
