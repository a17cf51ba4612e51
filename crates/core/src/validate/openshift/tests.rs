use super::*;
use capstan_api::disk::DeletionPolicy;
use k8s_openapi::api::core::v1::SecretReference;
use proptest::prelude::*;
use rstest::rstest;

fn good() -> AzureMachineProviderSpec {
    let secret = |name: &str| {
        Some(SecretReference {
            name: Some(name.into()),
            namespace: Some("openshift-machine-api".into()),
        })
    };
    AzureMachineProviderSpec {
        vm_size: Some("Standard_D4s_v3".into()),
        image: Image {
            resource_id: "/subscriptions/s/image".into(),
            ..Default::default()
        },
        os_disk: OsDisk {
            disk_size_gb: 128,
            ..Default::default()
        },
        user_data_secret: secret("worker-user-data"),
        credentials_secret: secret("azure-cloud-credentials"),
        data_disks: vec![disk("a", 0), disk("b", 1)],
        ..Default::default()
    }
}

fn disk(suffix: &str, lun: i32) -> DataDisk {
    let mut disk = DataDisk {
        name_suffix: suffix.into(),
        disk_size_gb: 4,
        lun,
        deletion_policy: Some(DeletionPolicy::Delete),
        ..Default::default()
    };
    disk.managed_disk.storage_account_type = Some(StorageAccountType::UltraSsdLrs);
    disk
}

fn errors(change: impl FnOnce(&mut AzureMachineProviderSpec)) -> Vec<String> {
    let mut spec = good();
    change(&mut spec);
    validate("machine", &spec)
        .errors
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn a_good_spec_has_nothing_to_complain_of() {
    assert_eq!(validate("machine", &good()), Findings::default());
}

type Change = fn(&mut DataDisk);

#[rstest]
#[case(|d: &mut DataDisk| d.name_suffix = "x".repeat(73), "nameSuffix: Invalid value: \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\": too long, the overall disk name must not exceed 80 chars")]
#[case(|d: &mut DataDisk| d.name_suffix = "a b".into(), "nameSuffix: Invalid value: \"a b\": nameSuffix must be provided, must start and finish with an alphanumeric character and can only contain letters, numbers, underscores, periods or hyphens")]
#[case(|d: &mut DataDisk| d.name_suffix = "a".into(), "nameSuffix: Invalid value: \"a\": each Data Disk must have a unique nameSuffix")]
#[case(|d: &mut DataDisk| d.disk_size_gb = 3, "diskSizeGB: Invalid value: 3: diskSizeGB must be provided and at least 4GB in size")]
#[case(|d: &mut DataDisk| d.disk_size_gb = 65_537, "diskSizeGB: Invalid value: 65537: diskSizeGB must be at most 65536 for storageAccountType \"UltraSSD_LRS\"")]
#[case(|d: &mut DataDisk| d.lun = 64, "lun: Invalid value: 64: must be greater than or equal to 0 and less than 64")]
#[case(|d: &mut DataDisk| d.lun = -1, "lun: Invalid value: -1: must be greater than or equal to 0 and less than 64")]
#[case(|d: &mut DataDisk| d.lun = 0, "lun: Invalid value: 0: each Data Disk must have a unique lun")]
#[case(|d: &mut DataDisk| d.deletion_policy = None, "deletionPolicy: Required value: deletionPolicy must be provided and must be either Delete or Detach")]
#[case(|d: &mut DataDisk| d.deletion_policy = Some("Keep".into()), "deletionPolicy: Invalid value: \"Keep\": must be either Delete or Detach")]
#[case(|d: &mut DataDisk| d.caching_type = Some(CachingType::ReadWrite), "cachingType: Invalid value: \"ReadWrite\": must be \"None\" or omitted when storageAccountType is \"UltraSSD_LRS\"")]
#[case(|d: &mut DataDisk| d.managed_disk.storage_account_type = Some("Fast_LRS".into()), "managedDisk.storageAccountType: Invalid value: \"Fast_LRS\": must be one of Standard_LRS, StandardSSD_LRS, StandardSSD_ZRS, Premium_LRS, Premium_ZRS, PremiumV2_LRS, UltraSSD_LRS")]
#[case(|d: &mut DataDisk| { d.managed_disk.storage_account_type = None; d.caching_type = Some("Fast".into()) }, "cachingType: Invalid value: \"Fast\": must be one of None, ReadOnly, ReadWrite or omitted")]
#[case(|d: &mut DataDisk| d.disk_iops_read_write = Some(4_001), "diskIOPSReadWrite: Invalid value: 4001: must be from 100 to 4000 for 4 GiB")]
#[case(|d: &mut DataDisk| { d.disk_iops_read_write = Some(400); d.disk_mbps_read_write = Some(101) }, "diskMBpsReadWrite: Invalid value: 101: must be from 1 to 100 with 400 IOPS")]
#[case(|d: &mut DataDisk| { d.managed_disk.storage_account_type = None; d.disk_mbps_read_write = Some(1) }, "diskMBpsReadWrite: Invalid value: 1: can be set only when storageAccountType is UltraSSD_LRS or PremiumV2_LRS")]
fn each_rule_of_a_data_disk_names_field_value_and_remedy(#[case] change: Change, #[case] expected: &str) {
    assert_eq!(
        errors(|spec| change(&mut spec.data_disks[1])),
        [format!("providerSpec.dataDisks[1].{expected}")]
    );
}

type SpecChange = fn(&mut AzureMachineProviderSpec);

#[rstest]
#[case(|s: &mut AzureMachineProviderSpec| s.vm_size = None, "providerSpec.vmSize: Required value: vmSize should be set to one of the supported Azure VM sizes")]
#[case(|s: &mut AzureMachineProviderSpec| s.vnet = Some("v".into()), "providerSpec.subnet: Required value: must provide a subnet when a virtual network is specified")]
#[case(|s: &mut AzureMachineProviderSpec| s.subnet = "s".into(), "providerSpec.vnet: Required value: must provide a virtual network when supplying subnets")]
#[case(|s: &mut AzureMachineProviderSpec| s.image = Image::default(), "providerSpec.image: Required value: an image reference must be provided")]
#[case(|s: &mut AzureMachineProviderSpec| s.user_data_secret = None, "providerSpec.userDataSecret: Required value: userDataSecret must be provided")]
#[case(|s: &mut AzureMachineProviderSpec| s.os_disk.disk_size_gb = 0, "providerSpec.osDisk.diskSizeGB: Invalid value: 0: diskSizeGB must be greater than zero and less than 32768")]
#[case(|s: &mut AzureMachineProviderSpec| s.ultra_ssd_capability = Some("On".into()), "providerSpec.ultraSSDCapability: Invalid value: \"On\": ultraSSDCapability can be only Enabled, Disabled or omitted")]
fn each_rule_of_the_spec_names_field_value_and_remedy(#[case] change: SpecChange, #[case] expected: &str) {
    assert_eq!(errors(change), [expected]);
}

#[rstest]
#[case("resourceGroup", |s: &mut AzureMachineProviderSpec, v: &str| s.resource_group = Some(v.into()))]
#[case("networkResourceGroup", |s: &mut AzureMachineProviderSpec, v: &str| s.network_resource_group = Some(v.into()))]
#[case("location", |s: &mut AzureMachineProviderSpec, v: &str| s.location = Some(v.into()))]
#[case("vnet", |s: &mut AzureMachineProviderSpec, v: &str| { s.vnet = Some(v.into()); s.subnet = "s".into() })]
#[case("subnet", |s: &mut AzureMachineProviderSpec, v: &str| { s.vnet = Some("vnet".into()); s.subnet = v.into() })]
#[case("publicLoadBalancer", |s: &mut AzureMachineProviderSpec, v: &str| s.public_load_balancer = Some(v.into()))]
#[case("internalLoadBalancer", |s: &mut AzureMachineProviderSpec, v: &str| s.internal_load_balancer = Some(v.into()))]
#[case("availabilitySet", |s: &mut AzureMachineProviderSpec, v: &str| { s.data_disks.clear(); s.availability_set = Some(v.into()) })]
#[case("securityGroup", |s: &mut AzureMachineProviderSpec, v: &str| s.security_group = Some(v.into()))]
#[case("applicationSecurityGroups[0]", |s: &mut AzureMachineProviderSpec, v: &str| s.application_security_groups = vec![v.into()])]
#[case("managedIdentity", |s: &mut AzureMachineProviderSpec, v: &str| s.managed_identity = Some(v.into()))]
#[case("capacityReservationGroupID", |s: &mut AzureMachineProviderSpec, v: &str| s.capacity_reservation_group_id = Some(v.into()))]
#[case("image.resourceID", |s: &mut AzureMachineProviderSpec, v: &str| s.image.resource_id = v.into())]
#[case("osDisk.managedDisk.diskEncryptionSet.id", |s: &mut AzureMachineProviderSpec, v: &str| s.os_disk.managed_disk.disk_encryption_set = serde_json::from_value(json!({"id": v})).unwrap())]
#[case("dataDisks[0].managedDisk.diskEncryptionSet.id", |s: &mut AzureMachineProviderSpec, v: &str| s.data_disks[0].managed_disk.disk_encryption_set = serde_json::from_value(json!({"id": v})).unwrap())]
fn a_name_that_leaves_its_place_in_a_url_is_refused_with_its_field(
    #[case] field: &str,
    #[case] set: fn(&mut AzureMachineProviderSpec, &str),
) {
    for hostile in [
        "prod-rg?api-version=2021-04-01&x=",
        "../prod-rg",
        "..",
        "/subscriptions/s/../t",
        "a#b",
        "a%2fb",
    ] {
        let found = errors(|spec| set(spec, hostile));
        let start = format!("providerSpec.{field}: Invalid value: {hostile:?}: not a valid ");
        assert!(
            found.len() == 1 && found[0].starts_with(&start),
            "{hostile} as {field}: {found:?}"
        );
    }
}

#[rstest]
#[case::set_and_zone(|s: &mut AzureMachineProviderSpec| { s.data_disks.clear(); s.zone = Some("1".into()); s.availability_set = Some("as".into()) }, "availabilitySet: Invalid value: \"as\": Azure takes no machine with a zone into")]
#[case::set_and_spot(|s: &mut AzureMachineProviderSpec| { s.data_disks.clear(); s.spot_vm_options = Some(Default::default()); s.availability_set = Some("as".into()) }, "availabilitySet: Invalid value: \"as\": Azure takes no machine with spotVMOptions into")]
#[case::set_and_ultra(|s: &mut AzureMachineProviderSpec| s.availability_set = Some("as".into()), "availabilitySet: Invalid value: \"as\": Azure takes no machine with Ultra disks")]
#[case::suffix_of_the_os_disk(|s: &mut AzureMachineProviderSpec| s.data_disks[0].name_suffix = "osdisk".into(), "dataDisks[0].nameSuffix: Invalid value: \"osdisk\": the OS disk has this name")]
#[case::suffixes_equal_but_for_case(|s: &mut AzureMachineProviderSpec| s.data_disks[1].name_suffix = "A".into(), "dataDisks[1].nameSuffix: Invalid value: \"A\": each Data Disk must have a unique nameSuffix")]
#[case::encryption_without_profile(|s: &mut AzureMachineProviderSpec| s.os_disk.managed_disk.security_profile.security_encryption_type = Some("VMGuestStateOnly".into()), "securityProfile: Required value: securityProfile should be set when")]
#[case::reservation_elsewhere(|s: &mut AzureMachineProviderSpec| s.capacity_reservation_group_id = Some("/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/images/i".into()), "capacityReservationGroupID: Invalid value")]
#[case::diagnostics_without_account(|s: &mut AzureMachineProviderSpec| s.diagnostics = serde_json::from_value(json!({"boot": {"storageAccountType": "CustomerManaged"}})).unwrap(), "diagnostics.boot.customerManaged.storageAccountURI: Required value: ")]
#[case::unknown_diagnostics(|s: &mut AzureMachineProviderSpec| s.diagnostics = serde_json::from_value(json!({"boot": {"storageAccountType": "Mine"}})).unwrap(), "diagnostics.boot.storageAccountType: Invalid value: \"Mine\": must be AzureManaged")]
#[case::caching_of_the_os_disk(|s: &mut AzureMachineProviderSpec| s.os_disk.caching_type = Some("Fast".into()), "osDisk.cachingType: Invalid value: \"Fast\": must be one of")]
#[case::too_many_tags(|s: &mut AzureMachineProviderSpec| s.tags = (0..47).map(|n| (n.to_string(), String::new())).collect(), "tags: Invalid value: 47: at most 46 tags")]
#[case::no_price(|s: &mut AzureMachineProviderSpec| s.spot_vm_options = serde_json::from_value(json!({"maxPrice": "cheap"})).unwrap(), "spotVMOptions.maxPrice: Invalid value: \"cheap\": must be a price")]
fn what_azure_does_not_take_together_is_refused_beforehand(#[case] change: SpecChange, #[case] expected: &str) {
    let found = errors(change);
    assert!(
        found.len() == 1 && found[0].starts_with(&format!("providerSpec.{expected}")),
        "{found:?}"
    );
}

#[test]
fn all_errors_come_at_once() {
    let found = errors(|spec| {
        spec.vm_size = None;
        spec.data_disks[0].lun = 99;
        spec.data_disks[1].deletion_policy = None;
    });
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn a_conflicting_capability_and_unknown_fields_are_warned_of() {
    let mut spec = good();
    spec.ultra_ssd_capability = Some(UltraSsdCapability::Disabled);
    spec.data_disks[0].extra.insert("lunn".into(), json!(1));
    let warnings = validate("machine", &spec).warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("dataDisks[0].lunn") && warnings[1].contains("ultraSSDEnabled is set"));
}

#[test]
fn defaults_fill_in_what_is_missing_and_nothing_else() {
    assert_eq!(
        defaults(&AzureMachineProviderSpec::default(), "ocp-x7"),
        [
            ("vmSize", json!("Standard_D4s_V3")),
            ("vnet", json!("ocp-x7-vnet")),
            ("subnet", json!("ocp-x7-worker-subnet")),
            (
                "image",
                json!({ "resourceID": "/resourceGroups/ocp-x7-rg/providers/Microsoft.Compute/galleries/gallery_ocp_x7/images/ocp-x7/versions/latest" })
            ),
            ("userDataSecret", json!({ "name": "worker-user-data" })),
            (
                "credentialsSecret",
                json!({ "name": "azure-cloud-credentials", "namespace": "openshift-machine-api" })
            ),
        ]
    );
    let spec = AzureMachineProviderSpec {
        vnet: Some("v".into()),
        subnet: "s".into(),
        ..good()
    };
    assert_eq!(defaults(&spec, "ocp-x7"), []);
}

#[test]
fn defaults_replace_an_empty_field_however_it_is_spelled() {
    let raw = json!({ "VMSize": "", "kept": 1 });
    let spec = AzureMachineProviderSpec::from_raw(&raw).unwrap();
    let filled = with_defaults(&raw, &spec, "");
    assert_eq!(filled["vmSize"], DEFAULT_VM_SIZE);
    assert_eq!((filled.get("VMSize"), &filled["kept"]), (None, &json!(1)));
}

#[test]
fn while_deleting_hooks_may_only_be_removed() {
    let hook = |name: &str| LifecycleHook {
        name: name.into(),
        owner: "me".into(),
    };
    let hooks = |names: &[&str]| LifecycleHooks {
        pre_drain: names.iter().map(|n| hook(n)).collect(),
        pre_terminate: vec![],
    };
    assert_eq!(validate_hooks_update(&hooks(&["aaa", "bbb"]), &hooks(&["aaa"])), []);
    let refused = validate_hooks_update(&hooks(&["aaa"]), &hooks(&["aaa", "bbb"]));
    assert!(
        refused[0]
            .to_string()
            .starts_with("spec.lifecycleHooks.preDrain: Forbidden: pre-drain hooks are immutable")
    );
}

proptest! {
    #[test]
    fn disks_with_distinct_luns_and_suffixes_in_range_are_accepted(luns in proptest::collection::btree_set(0i32..64, 0..64), size in 4i32..=32_767) {
        let spec = AzureMachineProviderSpec {
            data_disks: luns.iter().map(|lun| DataDisk { disk_size_gb: size, ..disk(&format!("d{lun}"), *lun) }).collect(),
            ..good()
        };
        prop_assert!(validate("machine", &spec).is_ok());
    }
}

#[test]
fn all_that_cannot_be_read_is_told_with_all_that_is_wrong_otherwise() {
    let value = json!({"dataDisks": "x", "osDisk": {"diskSizeGB": "big"}, "publicIP": [], "image": {"offer": "o"}});
    let paths = |findings: Findings| -> Vec<String> { findings.errors.into_iter().map(|error| error.path).collect() };
    let told = paths(validate_raw("m", &value, Some("c")));
    assert_eq!(
        told,
        [
            "providerSpec.value.dataDisks",
            "providerSpec.value.osDisk.diskSizeGB",
            "providerSpec.value.publicIP",
            "providerSpec.image.publisher",
            "providerSpec.image.sku",
            "providerSpec.image.version",
        ]
    );
    assert_eq!(paths(validate_raw("m", &value, None)), told);
    let unfilled = paths(validate_raw("m", &json!({}), None));
    assert!(unfilled.contains(&"providerSpec.vmSize".to_owned()), "{unfilled:?}");
    assert_eq!(paths(validate_raw("m", &json!(7), Some("c")))[0], "providerSpec.value");
    let good = validate_raw("m", &good().to_raw(), None);
    assert_eq!(good, Findings::default());
}

#[test]
fn machines_of_other_platforms_are_not_judged() {
    let other = json!({"kind": "VSphereMachineProviderSpec", "userDataSecret": {"name": "u", "namespace": "x"}});
    assert_eq!(validate_raw("m", &other, Some("c")), Findings::default());
    assert_eq!(validate_user_data("ns", &other), None);
    assert_eq!(validate_mounts(Some(&"nonsense".to_owned()), &other), None);
}

#[test]
fn user_data_comes_from_the_machines_own_namespace() {
    let value = |namespace: Value| json!({"userDataSecret": {"name": "u", "namespace": namespace}});
    for own in [json!("ns"), json!(""), Value::Null] {
        assert_eq!(validate_user_data("ns", &value(own)), None);
    }
    let refused = validate_user_data("ns", &value(json!("kube-system")))
        .unwrap()
        .to_string();
    assert!(
        refused.starts_with("providerSpec.userDataSecret.namespace: Invalid value: \"kube-system\": "),
        "{refused}"
    );
    assert!(refused.contains("copy the secret to namespace \"ns\""), "{refused}");
}

#[rstest]
#[case::none(None, None)]
#[case::good(Some("lun0:/data:xfs b:swap"), None)]
#[case::syntax(Some("lun0:/data"), Some("a format is missing"))]
#[case::no_such_disk(Some("lun7:/data:xfs"), Some("no data disk \"lun7\""))]
#[case::twice(Some("lun0:/a:xfs a:/b:xfs"), Some("both use"))]
fn mounts_are_checked_against_the_disks_of_the_spec(#[case] mounts: Option<&str>, #[case] reason: Option<&str>) {
    let value = serde_json::to_value(good()).unwrap();
    let found = validate_mounts(mounts.map(str::to_owned).as_ref(), &value);
    let found = found.map(|error| error.to_string()).unwrap_or_default();
    match reason {
        None => assert_eq!(found, ""),
        Some(reason) => {
            assert!(
                found.starts_with("metadata.annotations[capstan.dev/disk-mounts]: Invalid value: "),
                "{found}"
            );
            assert!(found.contains(reason), "{found}");
        }
    }
}
