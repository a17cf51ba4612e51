use super::super::ids::tests::sample;
use super::*;
use rstest::rstest;
use serde_json::{Value, json};

fn spec(over: Value) -> AzureMachineProviderSpec {
    let mut base = json!({
        "vmSize": "Standard_D4s_v3", "vnet": "v", "subnet": "s", "zone": "1",
        "image": {"resourceID": "/resourceGroups/images/x"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
    });
    for (key, value) in over.as_object().unwrap() {
        base[key] = value.clone();
    }
    AzureMachineProviderSpec::from_raw(&base).unwrap()
}

fn vm(over: Value) -> Value {
    serde_json::to_value(virtual_machine(&sample(), &spec(over), &Extras::default())).unwrap()
}

#[test]
fn a_data_disk_is_sent_as_proposed_and_unset_values_are_not_sent() {
    let disks = json!({"dataDisks": [
        {"nameSuffix": "ultrassd", "lun": 0, "diskSizeGB": 4, "cachingType": "None", "deletionPolicy": "Detach",
         "managedDisk": {"storageAccountType": "UltraSSD_LRS", "diskEncryptionSet": {"id": "/des"}}},
        {"nameSuffix": "plain", "lun": 7, "diskSizeGB": 64, "deletionPolicy": "Delete"},
    ]});
    assert_eq!(
        vm(disks)["properties"]["storageProfile"]["dataDisks"],
        json!([
            {"name": "m1_ultrassd", "lun": 0, "createOption": "Empty", "deleteOption": "Detach", "caching": "None",
             "diskSizeGB": 4, "managedDisk": {"storageAccountType": "UltraSSD_LRS", "diskEncryptionSet": {"id": "/des"}}},
            {"name": "m1_plain", "lun": 7, "createOption": "Empty", "deleteOption": "Delete", "diskSizeGB": 64},
        ])
    );
}

#[test]
fn a_disk_with_its_own_performance_is_made_first_and_attached() {
    let spec = spec(json!({"dataDisks": [
        {"nameSuffix": "fast", "lun": 1, "diskSizeGB": 100, "deletionPolicy": "Delete", "diskIOPSReadWrite": 5000,
         "diskMBpsReadWrite": 200, "managedDisk": {"storageAccountType": "PremiumV2_LRS"}},
    ]}));
    let id = "/subscriptions/SUB/resourceGroups/Group/providers/Microsoft.Compute/disks/m1_fast";
    let attached = serde_json::to_value(data_disk(&sample(), &spec.data_disks[0], &BTreeMap::new())).unwrap();
    assert_eq!(
        attached,
        json!({"name": "m1_fast", "lun": 1, "createOption": "Attach", "deleteOption": "Delete", "managedDisk": {"id": id}})
    );
    let made = serde_json::to_value(disk(&sample(), &spec, &spec.data_disks[0])).unwrap();
    assert_eq!(made["sku"]["name"], "PremiumV2_LRS");
    assert_eq!(
        made["properties"],
        json!({"creationData": {"createOption": "Empty"}, "diskSizeGB": 100, "diskIOPSReadWrite": 5000, "diskMBpsReadWrite": 200})
    );
}

#[rstest]
#[case::enabled(json!({"ultraSSDCapability": "Enabled"}), json!({"ultraSSDEnabled": true}))]
#[case::disabled(json!({"ultraSSDCapability": "Disabled"}), json!({"ultraSSDEnabled": false}))]
#[case::omitted(json!({}), Value::Null)]
#[case::omitted_with_an_ultra_disk(
    json!({"dataDisks": [{"nameSuffix": "u", "diskSizeGB": 4, "deletionPolicy": "Delete", "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}]}),
    json!({"ultraSSDEnabled": true}))]
fn the_capability_follows_the_proposals_three_cases(#[case] over: Value, #[case] expected: Value) {
    assert_eq!(vm(over)["properties"]["additionalCapabilities"], expected);
}

#[test]
fn interface_and_os_disk_go_with_the_machine() {
    let vm = vm(json!({}));
    assert_eq!(vm["properties"]["storageProfile"]["osDisk"]["deleteOption"], "Delete");
    assert_eq!(vm["properties"]["storageProfile"]["osDisk"]["name"], "m1_OSDisk");
    let nics = &vm["properties"]["networkProfile"]["networkInterfaces"];
    assert_eq!(nics[0]["properties"]["deleteOption"], "Delete");
    assert!(nics[0]["id"].as_str().unwrap().ends_with("/networkInterfaces/m1-nic"));
    assert_eq!(vm["zones"], json!(["1"]));
}

#[rstest]
#[case(json!({"image": {"resourceID": "/resourceGroups/images/x"}}), "id", "/subscriptions/SUB/resourceGroups/images/x")]
#[case(json!({"image": {"resourceID": "/subscriptions/o/x"}}), "id", "/subscriptions/o/x")]
#[case(json!({"image": {"resourceID": "/communityGalleries/x"}}), "communityGalleryImageId", "/communityGalleries/x")]
#[case(json!({"image": {"publisher": "p", "offer": "o", "sku": "s", "version": "1"}}), "publisher", "p")]
fn images_are_found_by_id_gallery_or_offer(#[case] over: Value, #[case] field: &str, #[case] value: &str) {
    assert_eq!(vm(over)["properties"]["storageProfile"]["imageReference"][field], value);
}

#[test]
fn a_spot_machine_says_what_it_pays_at_most() {
    let vm = vm(json!({"spotVMOptions": {"maxPrice": "0.5"}}));
    let properties = &vm["properties"];
    assert_eq!(
        (
            &properties["priority"],
            &properties["evictionPolicy"],
            &properties["billingProfile"]["maxPrice"]
        ),
        (&json!("Spot"), &json!("Delete"), &json!(0.5))
    );
}

#[test]
fn confidential_machines_identities_and_diagnostics_are_passed_on() {
    let vm = vm(json!({
        "managedIdentity": "me",
        "securityProfile": {"encryptionAtHost": true, "settings": {"securityType": "ConfidentialVM",
            "confidentialVM": {"uefiSettings": {"secureBoot": "Enabled", "virtualizedTrustedPlatformModule": "Enabled"}}}},
        "diagnostics": {"boot": {"storageAccountType": "AzureManaged"}},
    }));
    assert_eq!(
        vm["properties"]["securityProfile"],
        json!({"encryptionAtHost": true, "securityType": "ConfidentialVM",
               "uefiSettings": {"secureBootEnabled": true, "vTpmEnabled": true}})
    );
    assert!(
        vm["identity"]["userAssignedIdentities"]
            .as_object()
            .unwrap()
            .keys()
            .next()
            .unwrap()
            .ends_with("/me")
    );
    assert_eq!(
        vm["properties"]["diagnosticsProfile"]["bootDiagnostics"],
        json!({"enabled": true})
    );
}

#[test]
fn a_windows_machine_runs_its_user_data_at_the_first_logon() {
    let mut windows = spec(json!({"sshPublicKey": "a2V5"}));
    windows.os_disk.os_type = "Windows".into();
    let extras = Extras {
        admin_password: Some("Aa1!x".into()),
        ..Extras::default()
    };
    let vm = serde_json::to_value(virtual_machine(&sample(), &windows, &extras)).unwrap();
    let profile = &vm["properties"]["osProfile"];
    assert_eq!(profile["adminPassword"], "Aa1!x");
    let content = &profile["windowsConfiguration"]["additionalUnattendContent"];
    assert_eq!(
        (&content[0]["settingName"], &content[1]["settingName"]),
        (&json!("AutoLogon"), &json!("FirstLogonCommands"))
    );
    assert!(content[0]["content"].as_str().unwrap().contains("<Value>Aa1!x</Value>"));
    assert!(content[1]["content"].as_str().unwrap().contains(r"-File C:\init.ps1"));
    assert_eq!(profile["linuxConfiguration"], Value::Null);
}

#[test]
fn the_interface_is_placed_in_the_spec_s_network() {
    let spec = spec(
        json!({"networkResourceGroup": "net", "publicIP": true, "securityGroup": "nsg",
        "applicationSecurityGroups": ["asg"], "acceleratedNetworking": true}),
    );
    let extras = Extras {
        backend_pools: vec!["/pool".into()],
        ..Extras::default()
    };
    let nic = serde_json::to_value(nic(&sample(), &spec, &extras)).unwrap();
    let config = &nic["properties"]["ipConfigurations"][0]["properties"];
    assert_eq!(
        config["subnet"]["id"],
        "/subscriptions/SUB/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/v/subnets/s"
    );
    assert_eq!(config["loadBalancerBackendAddressPools"], json!([{"id": "/pool"}]));
    assert!(
        config["publicIPAddress"]["id"]
            .as_str()
            .unwrap()
            .ends_with("/publicIPAddresses/c-m1")
    );
    let own = "/subscriptions/SUB/resourceGroups/Group/providers/Microsoft.Network";
    assert_eq!(
        nic["properties"]["networkSecurityGroup"]["id"],
        format!("{own}/networkSecurityGroups/nsg")
    );
    assert_eq!(
        config["applicationSecurityGroups"],
        json!([{"id": format!("{own}/applicationSecurityGroups/asg")}])
    );
    assert_eq!(nic["properties"]["enableAcceleratedNetworking"], true);
}

#[test]
fn a_dual_stack_interface_has_a_second_configuration() {
    let extras = Extras {
        ipv6: true,
        backend_pools: vec!["/four".into()],
        backend_pools_v6: vec!["/six".into()],
        ..Extras::default()
    };
    let made =
        |extras: &Extras| serde_json::to_value(nic(&sample(), &spec(json!({"publicIP": true})), extras)).unwrap();
    let configs = made(&extras)["properties"]["ipConfigurations"].clone();
    let subnet = configs[0]["properties"]["subnet"].clone();
    assert_eq!(
        configs[1],
        json!({"name": "pipConfig-v6", "properties": {"primary": false, "privateIPAddressVersion": "IPv6",
            "privateIPAllocationMethod": "Dynamic", "subnet": subnet, "loadBalancerBackendAddressPools": [{"id": "/six"}]}})
    );
    let single = made(&Extras::default())["properties"]["ipConfigurations"].clone();
    assert_eq!(single.as_array().map(Vec::len), Some(1));
}

#[rstest]
#[case::no_frontends_told(json!([]), json!([{"id": "a"}, {"id": "b"}]), &["a", "b"], &[])]
#[case::one_frontend(json!([{}]), json!([{"id": "a"}, {"id": "b"}]), &["a", "b"], &[])]
#[case::ipv6_first(json!([{}]), json!([{"id": "b", "name": "ocp-v6"}, {"id": "a", "name": "ocp"}]), &["a"], &["b"])]
#[case::two(json!([{}, {}]), json!([{"id": "a"}, {"id": "b"}]), &["a", "b"], &[])]
#[case::by_version(json!([{"properties": {"privateIPAddressVersion": "IPv6"}}, {}]), json!([{"id": "a"}, {"id": "b"}]), &["b"], &["a"])]
#[case::by_name(json!([{}, {}]), json!([{"id": "a", "name": "c"}, {"id": "b", "name": "c-IPv6"}]), &["a"], &["b"])]
#[case::as_installers_name_them(json!([{}]), json!([{"id": "a", "name": "ocp"}, {"id": "b", "name": "ocp-v6"}]), &["a"], &["b"])]
fn interfaces_join_all_pools_each_with_the_address_of_its_family(
    #[case] frontends: Value,
    #[case] pools: Value,
    #[case] ipv4: &[&str],
    #[case] ipv6: &[&str],
) {
    let balancer = json!({"frontendIPConfigurations": frontends, "backendAddressPools": pools});
    let (four, six) = backend_pools(&serde_json::from_value(balancer).unwrap());
    assert_eq!(four, ipv4);
    assert_eq!(six, ipv6);
}
