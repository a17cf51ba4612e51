//! Everything that can be wrong with a machine is found before the first resource is made. Pure.

use super::names::Names;
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_azure::{ArmError, Size};
use capstan_core::disks::azure::{
    CAPABILITY_CONFLICT, CAPABILITY_CONFLICT_TARGET, capability_conflict, ultra_enabled, ultra_unsupported,
};
use capstan_core::validate::openshift::{too_many_disks, validate};

/// Why a spec cannot become a machine, as it stands in the event after `failed to create vm x: `.
pub fn spec(names: &Names, spec: &AzureMachineProviderSpec) -> Result<(), String> {
    let findings = validate(&names.machine, spec);
    if let Some(first) = findings.errors.first() {
        let disks = "providerSpec.dataDisks[";
        let message = findings.message();
        let Some(index) = first.path.strip_prefix(disks).and_then(|rest| rest.split(']').next()) else {
            return Err(message);
        };
        let suffix = index.parse::<usize>().ok().and_then(|index| spec.data_disks.get(index));
        let disk = names.data_disk(suffix.map(|disk| disk.name_suffix.as_str()).unwrap_or_default());
        return Err(format!(
            "failed to generate data disk spec: failed to create Data Disk: {disk} for vm {}. {message}",
            names.machine
        ));
    }
    for (field, value) in [("resourceGroup", &names.group), ("location", &names.location)] {
        if value.is_empty() {
            return Err(format!(
                "providerSpec.{field}: Required value: {field} must be provided, here or in the credentials secret"
            ));
        }
    }
    if capability_conflict(spec) {
        let error = ArmError {
            status: 400,
            code: "InvalidParameter".into(),
            message: CAPABILITY_CONFLICT.into(),
            target: Some(CAPABILITY_CONFLICT_TARGET.into()),
            ..ArmError::default()
        };
        return Err(refused(&names.machine, &error));
    }
    Ok(())
}

/// Azure's own refusal of a machine, in the words that users search for.
pub fn refused(machine: &str, error: &ArmError) -> String {
    format!(
        "failure sending request for machine {machine}: cannot create vm: \
         compute.VirtualMachinesClient#CreateOrUpdate: Failure sending request: {error}"
    )
}

/// What the size cannot do where the machine is to be. `None`: Azure does not have the size there.
pub fn size(names: &Names, spec: &AzureMachineProviderSpec, size: Option<&Size>) -> Result<(), String> {
    let wanted = spec.vm_size.as_deref().unwrap_or_default();
    let zone = spec.zone.as_deref().filter(|zone| !zone.is_empty());
    let location = &names.location;
    let Some(size) = size else {
        return Err(format!(
            "vm size {wanted} is not available in location {location}. select a different vm size"
        ));
    };
    if let Some(reason) = size.restrictions.first() {
        return Err(format!(
            "vm size {wanted} cannot be used in location {location}: {reason}"
        ));
    }
    if let Some(zone) = zone {
        let missing = !size.zones.is_empty() && !size.zones.contains(zone);
        if missing || size.restricted_zones.contains(zone) {
            return Err(format!(
                "vm size {wanted} is not available in zone {zone} of location {location}. select a different vm size or zone"
            ));
        }
    }
    if ultra_enabled(spec) == Some(true) && !size.supports_ultra(zone) {
        return Err(ultra_unsupported(wanted, location));
    }
    let most = size
        .max_data_disks
        .and_then(|most| usize::try_from(most).ok())
        .unwrap_or(usize::MAX);
    too_many_disks(wanted, most, spec.data_disks.len()).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::sample;
    use super::*;
    use capstan_api::disk::{DeletionPolicy, StorageAccountType};
    use capstan_api::openshift::{DataDisk, UltraSsdCapability};
    use rstest::rstest;

    fn good() -> AzureMachineProviderSpec {
        serde_json::from_value(serde_json::json!({
            "vmSize": "Standard_D4s_v3", "vnet": "v", "subnet": "s", "image": {"resourceID": "/resourceGroups/i"},
            "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
            "userDataSecret": {"name": "u"}, "credentialsSecret": {"name": "c", "namespace": "n"},
        }))
        .unwrap()
    }

    fn ultra(lun: i32) -> DataDisk {
        let mut disk = DataDisk {
            name_suffix: format!("d{lun}"),
            disk_size_gb: 4,
            lun,
            deletion_policy: Some(DeletionPolicy::Delete),
            ..DataDisk::default()
        };
        disk.managed_disk.storage_account_type = Some(StorageAccountType::UltraSsdLrs);
        disk
    }

    fn d4s() -> Size {
        Size {
            name: "Standard_D4s_v3".into(),
            zones: ["1".to_owned(), "2".to_owned()].into(),
            ultra_zones: ["1".to_owned()].into(),
            max_data_disks: Some(2),
            ..Size::default()
        }
    }

    #[test]
    fn a_bad_disk_is_named_with_its_machine_and_all_that_is_wrong() {
        let mut bad = good();
        bad.data_disks = vec![DataDisk { lun: 64, ..ultra(0) }];
        let message = spec(&sample(), &bad).unwrap_err();
        assert!(
            message.starts_with("failed to generate data disk spec: failed to create Data Disk: m1_d0 for vm m1. ")
        );
        assert!(
            message.contains("must be greater than or equal to 0 and less than 64"),
            "{message}"
        );
    }

    #[test]
    fn a_conflicting_capability_is_refused_in_azures_words() {
        let mut bad = good();
        bad.ultra_ssd_capability = Some(UltraSsdCapability::Disabled);
        bad.data_disks = vec![ultra(0)];
        let message = spec(&sample(), &bad).unwrap_err();
        let expected = r#"StatusCode=400 -- Original Error: Code="InvalidParameter" Message="StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set." Target="managedDisk.storageAccountType""#;
        assert!(message.ends_with(expected), "{message}");
    }

    #[rstest]
    #[case::fits(Some("1"), 2, None)]
    #[case::zone_without_ultra(
        Some("2"),
        1,
        Some("does not support ultra disks in location eastus. select a different vm size or disable ultra disks")
    )]
    #[case::no_zone(None, 1, Some("does not support ultra disks in location eastus"))]
    #[case::no_ultra_needed(None, 0, None)]
    #[case::zone_without_size(Some("3"), 0, Some("is not available in zone 3"))]
    #[case::too_many(Some("1"), 3, Some("takes 2 data disks, the spec has 3"))]
    fn the_size_must_carry_what_the_spec_asks(
        #[case] zone: Option<&str>,
        #[case] disks: i32,
        #[case] refusal: Option<&str>,
    ) {
        let mut wanted = good();
        wanted.zone = zone.map(ToOwned::to_owned);
        wanted.data_disks = (0..disks).map(ultra).collect();
        let result = size(&sample(), &wanted, Some(&d4s()));
        match refusal {
            None => assert_eq!(result, Ok(())),
            Some(text) => assert!(
                result.as_ref().is_err_and(|message| message.contains(text)),
                "{result:?}"
            ),
        }
    }

    #[test]
    fn a_size_that_azure_does_not_have_is_refused() {
        assert!(
            size(&sample(), &good(), None)
                .unwrap_err()
                .contains("Standard_D4s_v3 is not available in location eastus")
        );
    }
}
