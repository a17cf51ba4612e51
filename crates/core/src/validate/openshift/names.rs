//! Names and ids of Azure resources in a provider spec.

use capstan_api::openshift::AzureMachineProviderSpec;

use super::FieldError;
use crate::azure_names::{self, AzureName};

/// Checks every name and id that becomes part of a request's URL, or that Azure resolves to a resource.
pub fn validate(machine_name: &str, spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let mut check = |path: &str, given: Option<&str>, rule: &dyn Fn(&str) -> Result<(), String>| {
        let given = given.unwrap_or_default();
        if let (false, Err(detail)) = (given.is_empty(), rule(given)) {
            errors.push(FieldError::invalid(path, given, detail));
        }
    };
    let name = |kind: AzureName| move |given: &str| kind.check(given).map_err(|error| error.reason());
    // A name stands for a resource in the machine's own group; an id for a resource anywhere.
    let name_or_id = |kind: AzureName| {
        move |given: &str| match given.starts_with('/') {
            true => check_id(given),
            false => name(kind)(given),
        }
    };
    check("metadata.name", Some(machine_name), &name(AzureName::VirtualMachine));
    let group = name(AzureName::ResourceGroup);
    check("providerSpec.resourceGroup", spec.resource_group.as_deref(), &group);
    check(
        "providerSpec.networkResourceGroup",
        spec.network_resource_group.as_deref(),
        &group,
    );
    check("providerSpec.location", spec.location.as_deref(), &check_location);
    check(
        "providerSpec.vnet",
        spec.vnet.as_deref(),
        &name(AzureName::VirtualNetwork),
    );
    check("providerSpec.subnet", Some(&spec.subnet), &name(AzureName::Subnet));
    let balancer = name(AzureName::LoadBalancer);
    check(
        "providerSpec.publicLoadBalancer",
        spec.public_load_balancer.as_deref(),
        &balancer,
    );
    check(
        "providerSpec.internalLoadBalancer",
        spec.internal_load_balancer.as_deref(),
        &balancer,
    );
    check(
        "providerSpec.availabilitySet",
        spec.availability_set.as_deref(),
        &name_or_id(AzureName::AvailabilitySet),
    );
    check(
        "providerSpec.securityGroup",
        spec.security_group.as_deref(),
        &name_or_id(AzureName::SecurityGroup),
    );
    for (index, group) in spec.application_security_groups.iter().enumerate() {
        let path = format!("providerSpec.applicationSecurityGroups[{index}]");
        check(&path, Some(group), &name_or_id(AzureName::SecurityGroup));
    }
    check(
        "providerSpec.managedIdentity",
        spec.managed_identity.as_deref(),
        &name_or_id(AzureName::Resource),
    );
    check(
        "providerSpec.capacityReservationGroupID",
        spec.capacity_reservation_group_id.as_deref(),
        &check_reservation,
    );
    check(
        "providerSpec.image.resourceID",
        Some(&spec.image.resource_id),
        &check_id,
    );
    let managed = &spec.os_disk.managed_disk;
    let os_disk = managed.disk_encryption_set.as_ref().and_then(|set| set.id.as_deref());
    check(
        "providerSpec.osDisk.managedDisk.diskEncryptionSet.id",
        os_disk,
        &check_id,
    );
    check(
        "providerSpec.osDisk.managedDisk.securityProfile.diskEncryptionSet.id",
        managed.security_profile.disk_encryption_set.id.as_deref(),
        &check_id,
    );
    for (index, disk) in spec.data_disks.iter().enumerate() {
        let path = format!("providerSpec.dataDisks[{index}].managedDisk.diskEncryptionSet.id");
        let set = disk.managed_disk.disk_encryption_set.as_ref();
        check(&path, set.and_then(|set| set.id.as_deref()), &check_id);
    }
}

fn check_id(id: &str) -> Result<(), String> {
    let rooted = id.starts_with('/');
    azure_names::check_id(id)
        .ok()
        .filter(|()| rooted)
        .ok_or_else(|| "not a valid resource id: use the id that Azure shows, such as /subscriptions/…".to_owned())
}

/// Checks the id of a capacity reservation group, which may be in any subscription and group.
fn check_reservation(id: &str) -> Result<(), String> {
    check_id(id)?;
    let lower = id.to_lowercase();
    let parts: Vec<&str> = lower.split('/').collect();
    match parts.as_slice() {
        [
            "",
            "subscriptions",
            _,
            "resourcegroups",
            _,
            "providers",
            "microsoft.compute",
            "capacityreservationgroups",
            _,
        ] => Ok(()),
        _ => Err(
            "not the id of a capacity reservation group: use the id that Azure shows, such as \
                  /subscriptions/…/resourceGroups/…/providers/Microsoft.Compute/capacityReservationGroups/…"
                .to_owned(),
        ),
    }
}

/// Azure takes a region by its name or by its display name.
fn check_location(location: &str) -> Result<(), String> {
    let plain = location.chars().all(|c| c.is_ascii_alphanumeric() || c == ' ');
    (plain && location.len() <= 64)
        .then_some(())
        .ok_or_else(|| "not a valid region: use letters, digits and spaces, as in westeurope".to_owned())
}
