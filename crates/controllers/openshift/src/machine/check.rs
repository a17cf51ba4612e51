//! Checks of a machine before its first resource is made. Pure.

use capstan_api::openshift::{AzureMachineProviderSpec, Machine};
use capstan_azure::ArmError;
use capstan_core::disks::azure::{CAPABILITY_CONFLICT, CAPABILITY_CONFLICT_TARGET, capability_conflict, disk_name};
use capstan_core::machine::names::Names;
use capstan_core::validate::openshift::{validate, validate_annotations, validate_user_data};
use kube::ResourceExt as _;

/// Checks the spec. The error is as the event has it after `failed to create vm x: `.
pub fn spec(machine: &str, spec: &AzureMachineProviderSpec) -> Result<(), String> {
    let findings = validate(machine, spec);
    if let Some(first) = findings.errors.first() {
        let disks = "providerSpec.dataDisks[";
        let message = findings.message();
        let Some(index) = first.path.strip_prefix(disks).and_then(|rest| rest.split(']').next()) else {
            return Err(message);
        };
        let suffix = index.parse::<usize>().ok().and_then(|index| spec.data_disks.get(index));
        let disk = disk_name(
            machine,
            suffix.map(|disk| disk.name_suffix.as_str()).unwrap_or_default(),
        );
        return Err(format!(
            "failed to generate data disk spec: failed to create Data Disk: {disk} for vm {machine}. {message}"
        ));
    }
    if capability_conflict(spec) {
        let error = ArmError {
            status: 400,
            code: "InvalidParameter".into(),
            message: CAPABILITY_CONFLICT.into(),
            target: Some(CAPABILITY_CONFLICT_TARGET.into()),
            ..ArmError::default()
        };
        return Err(refused(machine, &error));
    }
    Ok(())
}

/// Checks the annotations about disks.
pub fn annotations(machine: &Machine) -> Result<(), String> {
    let value = machine.spec.provider_spec.value.as_ref();
    let annotation = |key: &str| machine.annotations().get(key);
    let wrong = value.map(|value| validate_annotations(annotation, value));
    let first = wrong.unwrap_or_default().into_iter().next();
    first.map_or(Ok(()), |error| Err(error.to_string()))
}

/// Checks where the user data comes from.
pub fn user_data(machine: &Machine, namespace: &str) -> Result<(), String> {
    let value = machine.spec.provider_spec.value.as_ref();
    let wrong = value.and_then(|value| validate_user_data(namespace, value));
    wrong.map_or(Ok(()), |error| Err(error.to_string()))
}

/// Checks that the spec or the credentials secret names a group and a region.
pub fn place(names: &Names) -> Result<(), String> {
    for (field, value) in [("resourceGroup", &names.group), ("location", &names.location)] {
        if value.is_empty() {
            return Err(format!(
                "providerSpec.{field}: Required value: {field} must be provided, here or in the credentials secret"
            ));
        }
    }
    Ok(())
}

/// Returns Azure's rejection of a machine in the words that users search for.
pub fn refused(machine: &str, error: &ArmError) -> String {
    format!(
        "failure sending request for machine {machine}: cannot create vm: \
         compute.VirtualMachinesClient#CreateOrUpdate: Failure sending request: {error}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{good, ultra};
    use capstan_api::openshift::{DataDisk, UltraSsdCapability};

    #[test]
    fn a_bad_disk_is_named_with_its_machine_and_all_that_is_wrong() {
        let mut bad = good();
        bad.data_disks = vec![DataDisk { lun: 64, ..ultra(0) }];
        let message = spec("m1", &bad).unwrap_err();
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
        let message = spec("m1", &bad).unwrap_err();
        let expected = r#"StatusCode=400 -- Original Error: Code="InvalidParameter" Message="StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set." Target="managedDisk.storageAccountType""#;
        assert!(message.ends_with(expected), "{message}");
    }
}
