//! A new model over an old one. Azure keeps what a PUT does not name, so that what the old model had and the new one has
//! not must be named, and as empty, off or `null`. The hash is not taken of this: it is about what is wanted.

use capstan_azure::model::{
    AdditionalCapabilities, BootDiagnostics, DiagnosticsProfile, ExtensionProfile, ManagedIdentities, ScaleSet,
    ScaleSetProperties, ScaleSetStorageProfile, ScheduledEventsProfile, TerminateNotificationProfile,
    VirtualMachineProfile,
};
use serde_json::Value;

/// Names as `null` what only the old one has.
macro_rules! end {
    ($new:expr, $old:expr, $($field:ident: $name:literal),+ $(,)?) => { $(
        if $new.$field.is_none() && $old.$field.is_some() {
            $new.rest.insert($name.to_owned(), Value::Null);
        }
    )+ };
}

/// `wanted`, as it has to be said to a scale set that is `existing` now.
pub fn replacing(mut wanted: ScaleSet, existing: &ScaleSet) -> ScaleSet {
    end!(wanted, existing, plan: "plan");
    identity(&mut wanted.identity, existing.identity.as_ref());
    if let (Some(new), Some(old)) = (wanted.properties.as_mut(), existing.properties.as_ref()) {
        properties(new, old);
    }
    wanted
}

fn identity(wanted: &mut Option<ManagedIdentities>, existing: Option<&ManagedIdentities>) {
    let Some(old) = existing.filter(|old| old.kind.as_deref().is_some_and(|kind| kind != "None")) else {
        return;
    };
    let new = wanted.get_or_insert_with(|| ManagedIdentities {
        kind: Some("None".to_owned()),
        ..Default::default()
    });
    let keeps = new.kind.as_deref().is_some_and(|kind| kind.contains("UserAssigned"));
    if !keeps {
        end!(new, old, user_assigned_identities: "userAssignedIdentities");
        return;
    }
    let assigned = new.user_assigned_identities.get_or_insert_default();
    for id in old.user_assigned_identities.iter().flat_map(|ids| ids.keys()) {
        if !assigned.keys().any(|kept| kept.eq_ignore_ascii_case(id)) {
            assigned.insert(id.clone(), Value::Null);
        }
    }
}

fn properties(new: &mut ScaleSetProperties, old: &ScaleSetProperties) {
    end!(new, old, zone_balance: "zoneBalance");
    let ultra = |properties: &ScaleSetProperties| {
        let capabilities = properties.additional_capabilities.as_ref();
        capabilities.and_then(|capabilities| capabilities.ultra_ssd_enabled)
    };
    if ultra(new).is_none() && ultra(old) == Some(true) {
        new.additional_capabilities = Some(AdditionalCapabilities {
            ultra_ssd_enabled: Some(false),
            ..Default::default()
        });
    }
    let profiles = (
        new.virtual_machine_profile.as_mut(),
        old.virtual_machine_profile.as_ref(),
    );
    if let (Some(new), Some(old)) = profiles {
        profile(new, old);
    }
}

fn profile(new: &mut VirtualMachineProfile, old: &VirtualMachineProfile) {
    if let (Some(new), Some(old)) = (new.storage_profile.as_mut(), old.storage_profile.as_ref()) {
        storage(new, old);
    }
    // Azure does not let the prefix of an existing scale set change.
    if let (Some(new), Some(old)) = (new.os_profile.as_mut(), old.os_profile.as_ref())
        && old.computer_name_prefix.is_some()
    {
        new.computer_name_prefix.clone_from(&old.computer_name_prefix);
    }
    spot(new, old);
    end!(new, old, security_profile: "securityProfile");
    if let (Some(new), Some(old)) = (new.security_profile.as_mut(), old.security_profile.as_ref()) {
        end!(new, old, encryption_at_host: "encryptionAtHost", security_type: "securityType", uefi_settings: "uefiSettings");
    }
    let boots = |profile: &VirtualMachineProfile| profile.diagnostics_profile.as_ref()?.boot_diagnostics.clone();
    match (boots(new), boots(old)) {
        (None, Some(old)) if old.enabled == Some(true) => {
            let off = BootDiagnostics {
                enabled: Some(false),
                ..Default::default()
            };
            new.diagnostics_profile = Some(diagnostics(off, &old));
        }
        (Some(boot), Some(old)) => new.diagnostics_profile = Some(diagnostics(boot, &old)),
        _ => {}
    }
    let extends = |profile: &VirtualMachineProfile| {
        let extensions = profile.extension_profile.as_ref().and_then(|p| p.extensions.as_ref());
        extensions.is_some_and(|extensions| !extensions.is_empty())
    };
    if !extends(new) && extends(old) {
        new.extension_profile = Some(ExtensionProfile {
            extensions: Some(Vec::new()),
            ..Default::default()
        });
    }
    let notifies = |profile: &VirtualMachineProfile| {
        let events = profile.scheduled_events_profile.as_ref();
        events.and_then(|events| events.terminate_notification_profile.as_ref()?.enable) == Some(true)
    };
    if !notifies(new) && notifies(old) {
        new.scheduled_events_profile = Some(ScheduledEventsProfile {
            terminate_notification_profile: Some(TerminateNotificationProfile {
                enable: Some(false),
                ..Default::default()
            }),
            ..Default::default()
        });
    }
}

fn diagnostics(mut boot: BootDiagnostics, old: &BootDiagnostics) -> DiagnosticsProfile {
    end!(boot, old, storage_uri: "storageUri");
    DiagnosticsProfile {
        boot_diagnostics: Some(boot),
        ..Default::default()
    }
}

fn spot(new: &mut VirtualMachineProfile, old: &VirtualMachineProfile) {
    if new.priority.is_none() && old.priority.as_deref() == Some("Spot") {
        new.priority = Some("Regular".to_owned());
    }
    end!(new, old, eviction_policy: "evictionPolicy", billing_profile: "billingProfile");
}

fn storage(new: &mut ScaleSetStorageProfile, old: &ScaleSetStorageProfile) {
    let carries = |storage: &ScaleSetStorageProfile| storage.data_disks.as_ref().is_some_and(|disks| !disks.is_empty());
    if !carries(new) && carries(old) {
        new.data_disks = Some(Vec::new());
    }
    // Azure refuses to rename the disks of a scale set.
    for disk in new.data_disks.iter_mut().flatten() {
        let before = old.data_disks.iter().flatten().find(|before| before.lun == disk.lun);
        if let Some(before) = before {
            disk.name.clone_from(&before.name);
        }
    }
    // Of an image's names those of another kind: the new one has all that it needs.
    if let (Some(new), Some(old)) = (new.image_reference.as_mut(), old.image_reference.as_ref()) {
        end!(new, old, id: "id", publisher: "publisher", offer: "offer", sku: "sku", version: "version",
            community_gallery_image_id: "communityGalleryImageId", shared_gallery_image_id: "sharedGalleryImageId");
    }
    if let (Some(new), Some(old)) = (new.os_disk.as_mut(), old.os_disk.as_ref()) {
        end!(new, old, caching: "caching", disk_size_gb: "diskSizeGB", diff_disk_settings: "diffDiskSettings");
        if let (Some(new), Some(old)) = (new.managed_disk.as_mut(), old.managed_disk.as_ref()) {
            end!(new, old, disk_encryption_set: "diskEncryptionSet", security_profile: "securityProfile");
        }
    }
}
