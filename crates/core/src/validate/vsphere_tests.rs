use super::*;
use rstest::rstest;
use serde_json::json;

fn spec(extra: Value) -> VSphereMachineSpec {
    let mut value = json!({"template": "ubuntu", "network": {"devices": [{"networkName": "net", "dhcp4": true}]}});
    for (key, field) in extra.as_object().unwrap() {
        value[key] = field.clone();
    }
    serde_json::from_value(value).unwrap()
}

#[rstest]
#[case::plain(json!({}), &[])]
#[case::no_template(json!({"template": " "}), &["spec.template: Required value: name or path of the template to clone"])]
#[case::negative(json!({"numCPUs": -1, "additionalDisksGiB": [1, -2]}), &[
    "spec.numCPUs: Invalid value: -1: must not be negative",
    "spec.additionalDisksGiB[1]: Invalid value: -2: must not be negative",
])]
#[case::address(json!({"network": {"devices": [{"networkName": "n", "ipAddrs": ["10.0.0.1/24", "10.0.0.1", "fd00::1/129"]}]}}), &[
    "spec.network.devices[0].ipAddrs[1]: Invalid value: \"10.0.0.1\": ip addresses should be in the CIDR format",
    "spec.network.devices[0].ipAddrs[2]: Invalid value: \"fd00::1/129\": ip addresses should be in the CIDR format",
])]
#[case::hardware(json!({"hardwareVersion": "17"}), &[
    "spec.hardwareVersion: Invalid value: \"17\": should be a valid VM hardware version, example vmx-17",
])]
#[case::pci(json!({"pciDevices": [{"deviceId": 1, "vendorId": 2}, {"vGPUProfile": "p"}, {"deviceId": 1}]}), &[
    "spec.pciDevices[2]: Invalid value: {\"deviceId\":1}: should have either deviceId + vendorId or vGPUProfile set",
])]
#[case::misspelt_mode(json!({"dataDisks": [{"name": "a", "sizeGiB": 1, "provisioningType": "Thin"}]}), &[
    "spec.dataDisks[0].provisioningType: Forbidden: there is no such field: use provisioningMode: Thin",
])]
#[case::disk(json!({"dataDisks": [{"name": "a", "sizeGiB": 0, "provisioningMode": "Fat", "controller": {"type": "SAS"}}]}), &[
    "spec.dataDisks[0].sizeGiB: Invalid value: 0: must be at least 1",
    "spec.dataDisks[0].provisioningMode: Invalid value: \"Fat\": supported values: \"Thin\", \"Thick\", \"EagerlyZeroed\"",
    "spec.dataDisks[0].controller.type: Invalid value: \"SAS\": supported values: \"PVSCSI\", \"LSILogic\", \"LSILogicSAS\", \"BusLogic\", \"SATA\", \"NVMe\", \"IDE\"",
])]
#[case::same_unit(json!({"dataDisks": [{"sizeGiB": 1, "unitNumber": 3}, {"sizeGiB": 1, "unitNumber": 3}]}), &[
    "spec.dataDisks[1].unitNumber: Invalid value: 3: dataDisks[0] has the same unit of the same controller: choose another",
])]
#[case::key(json!({"cryptoKeyID": "k"}), &[
    "spec.cryptoKeyID: Forbidden: machines are encrypted by their storage policy alone: leave this out and give an encrypting storagePolicyName",
])]
#[case::timeout(json!({"powerOffMode": "hard", "guestSoftPowerOffTimeout": "5m"}), &[
    "spec.guestSoftPowerOffTimeout: Forbidden: should not be set in templates unless the powerOffMode is trySoft (it is \"hard\")",
])]
#[case::timeout_with_try(json!({"powerOffMode": "trySoft", "guestSoftPowerOffTimeout": "5m"}), &[])]
fn every_fault_is_named_with_its_field(#[case] extra: Value, #[case] expected: &[&str]) {
    let errors: Vec<String> = machine(&spec(extra)).errors.iter().map(ToString::to_string).collect();
    assert_eq!(errors, expected);
}

#[rstest]
#[case::as_many_as_any_takes(json!({}), 63, &[])]
#[case::more_than_any_takes(json!({}), 64, &["spec.dataDisks[63]: Invalid value: \"d63\": whatever the template: PVSCSI controller 0 has no free unit"])]
#[case::on_its_own_controller(json!({"controller": {"type": "LSILogic", "bus": 1}}), 15, &[])]
#[case::too_many_on_it(
    json!({"controller": {"type": "LSILogic", "bus": 1}}),
    16,
    &["spec.dataDisks[15]: Invalid value: \"d15\": whatever the template: LSI Logic SCSI controller 1 has no free unit"],
)]
#[case::own_unit_of_some(json!({"unitNumber": 7}), 1, &[])]
#[case::own_unit(json!({"unitNumber": 7, "controller": {"type": "PVSCSI"}}), 1, &["spec.dataDisks[0]: Invalid value: \"d0\": whatever the template: unitNumber 7 of PVSCSI"])]
#[case::no_such_unit(json!({"unitNumber": 5, "controller": {"type": "IDE"}}), 1, &["spec.dataDisks[0]: Invalid value: \"d0\": whatever the template: unitNumber 5 does not exist"])]
#[case::no_such_bus(json!({"controller": {"type": "IDE", "bus": 3}}), 1, &["spec.dataDisks[0]: Invalid value: \"d0\": whatever the template: controller bus 3 does not exist"])]
fn disks_that_no_template_has_room_for_are_refused(
    #[case] disk: Value,
    #[case] count: usize,
    #[case] expected: &[&str],
) {
    let disks: Vec<Value> = (0..count)
        .map(|n| {
            let mut disk = disk.clone();
            disk["name"] = json!(format!("d{n}"));
            disk["sizeGiB"] = json!(1);
            disk
        })
        .collect();
    let errors = machine(&spec(json!({"dataDisks": disks}))).errors;
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(errors.len(), expected.len(), "{errors:?}");
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_field_without_effect_is_told_of() {
    let network = json!({"devices": [{"networkName": "n", "dhcp4": true}], "preferredAPIServerCidr": "10.0.0.0/8"});
    let warnings = machine(&spec(json!({"network": network}))).warnings;
    assert!(
        warnings[0].starts_with("spec.network.preferredAPIServerCidr: \"10.0.0.0/8\" has no effect"),
        "{warnings:?}"
    );
}

#[test]
fn a_template_has_neither_identity_nor_addresses() {
    let inner = json!({
        "template": "t", "providerID": "vsphere://x",
        "network": {"devices": [{"networkName": "n", "ipAddrs": ["10.0.0.1/24"]}]},
    });
    let template = serde_json::from_value(json!({"template": {"spec": inner}})).unwrap();
    let errors: Vec<String> = machine_template(&template)
        .errors
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        errors,
        [
            "spec.template.spec.providerID: Forbidden: cannot be set in templates",
            "spec.template.spec.network.devices.ipAddrs: Forbidden: cannot be set in templates",
        ]
    );
}

#[test]
fn disks_that_cannot_be_told_apart_and_sizes_without_effect_are_warned_of() {
    let disks = json!([{"name": "a", "sizeGiB": 1}, {"name": "a", "sizeGiB": 1}, {"sizeGiB": 1}]);
    let warnings = machine(&spec(
        json!({"dataDisks": disks, "diskGiB": 100, "cloneMode": "linkedClone"}),
    ))
    .warnings;
    assert_eq!(warnings.len(), 3);
    assert!(warnings[0].contains("\"a\" is the name of dataDisks[0] too"));
    assert!(warnings[2].contains("fullClone"));
}

#[test]
fn a_windows_name_is_short() {
    let vm: VSphereVMSpec =
        serde_json::from_value(json!({"template": "t", "os": "Windows", "network": {"devices": []}})).unwrap();
    assert!(virtual_machine("short", &vm).is_ok());
    assert_eq!(
        virtual_machine("a-name-that-is-too-long", &vm).message(),
        "name: Invalid value: \"a-name-that-is-too-long\": name has to be less than 16 characters for Windows VM"
    );
}

#[test]
fn a_failure_domain_of_host_groups_names_its_cluster_and_hosts() {
    let side = |kind: &str| json!({"name": "a", "type": kind, "tagCategory": "c"});
    let domain = serde_json::from_value(json!({
        "region": side("HostGroup"), "zone": side("HostGroup"), "topology": {"datacenter": "dc"},
    }))
    .unwrap();
    let errors: Vec<String> = failure_domain(&domain).errors.iter().map(ToString::to_string).collect();
    assert_eq!(
        errors,
        [
            "spec.region.type: Forbidden: region's Failure Domain type cannot be HostGroup",
            "spec.topology.hosts: Forbidden: cannot be nil if zone's Failure Domain type is HostGroup",
        ]
    );
}
