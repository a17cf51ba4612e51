//! Rules and defaults for OpenShift machines on Azure. `providerSpec.value` is raw to the API server, so nothing but these
//! functions checks it. All errors of an object are reported at once, in the order of its fields.

mod combinations;
mod names;

pub use combinations::{has_premium_v2, kept_out_of_sets};

use std::collections::BTreeMap;

use capstan_api::disk::{CachingType, StorageAccountType};
use capstan_api::openshift::{
    AzureMachineProviderSpec, DataDisk, EphemeralStorageLocation, Image, LifecycleHook, LifecycleHooks, OsDisk,
    UltraSsdCapability,
};
use serde_json::{Value, json};

use super::{FieldError, Findings};
use crate::disks::azure::{
    self, MAX_LUN, MAX_NAME, OS_DISK_SUFFIX, disk_name, iops_range, is_name_suffix, mbps_range, size_range,
};
use crate::disks::init::{KnownDisk, MOUNTS_ANNOTATION, parse_requests, resolve};
use crate::machine::kept::{ATTACH_ANNOTATION, wishes};

/// The size that machines get when they name none.
pub const DEFAULT_VM_SIZE: &str = "Standard_D4s_V3";
pub const DEFAULT_USER_DATA_SECRET: &str = "worker-user-data";
pub const DEFAULT_CREDENTIALS_SECRET: &str = "azure-cloud-credentials";
pub const DEFAULT_NAMESPACE: &str = "openshift-machine-api";
/// A MachineSet's machines are named `<set>-<five characters>`.
pub const GENERATED_SUFFIX: usize = 6;

/// Everything that can be said of a provider spec without asking Azure. `machine_name` is what disks are named after.
pub fn validate(machine_name: &str, spec: &AzureMachineProviderSpec) -> Findings {
    let mut findings = Findings::default();
    let errors = &mut findings.errors;
    if spec.vm_size.as_deref().unwrap_or_default().is_empty() {
        errors.push(FieldError::required(
            "providerSpec.vmSize",
            "vmSize should be set to one of the supported Azure VM sizes",
        ));
    }
    network(spec, errors);
    names::validate(machine_name, spec, errors);
    image(&spec.image, errors);
    secrets(spec, errors);
    os_disk(&spec.os_disk, errors);
    capability(spec, errors);
    data_disks(machine_name, &spec.data_disks, errors);
    combinations::validate(spec, errors);
    findings.warnings = warnings(spec);
    findings
}

/// The same of `providerSpec.value` as it was written: all that cannot be read, and all that is wrong with the rest.
/// `cluster_id`: with the defaults that admission would fill in for a machine of this cluster.
/// Returns nothing for the machines of other platforms.
pub fn validate_raw(machine_name: &str, value: &Value, cluster_id: Option<&str>) -> Findings {
    if !is_azure(value) {
        return Findings::default();
    }
    let (mut legible, unreadable) = AzureMachineProviderSpec::legible(value);
    let spec = |value: &Value| AzureMachineProviderSpec::from_raw(value).unwrap_or_default();
    // Admission fills nothing in where something cannot be read; that is no fault of the user's.
    if let Some(cluster_id) = cluster_id.or((!unreadable.is_empty()).then_some("")) {
        legible = with_defaults(&legible, &spec(&legible), cluster_id);
    }
    let mut findings = validate(machine_name, &spec(&legible));
    for error in &unreadable {
        let path = format!("providerSpec.{}", error.field());
        // What is wrong with a field that was left out is that it cannot be read.
        findings
            .errors
            .retain(|other| other.path != path && !other.path.starts_with(&format!("{path}.")));
    }
    let unreadable = unreadable.into_iter().map(|error| {
        let found = serde_json::from_str(&error.value).unwrap_or(Value::String(error.value));
        FieldError::invalid(error.path, found, format!("must be {}", error.expected))
    });
    findings.errors = unreadable.chain(findings.errors).collect();
    findings
}

/// Whether a `providerSpec.value` is for Azure. One without a kind is.
pub fn is_azure(value: &Value) -> bool {
    let kind = value.get("kind").and_then(Value::as_str);
    kind.is_none_or(|kind| kind.is_empty() || kind == AzureMachineProviderSpec::KIND)
}

/// Refuses user data from another namespace than the machine's: whoever may create machines in one namespace could read
/// the secrets of all others with it.
pub fn validate_user_data(namespace: &str, value: &Value) -> Option<FieldError> {
    let (legible, _) = AzureMachineProviderSpec::legible(value);
    let spec = AzureMachineProviderSpec::from_raw(&legible)
        .ok()
        .filter(|_| is_azure(value))?;
    let given = spec.user_data_secret?.namespace.filter(|given| !given.is_empty())?;
    (given != namespace).then(|| {
        let detail = format!(
            "user data is read from the machine's own namespace only: copy the secret to namespace {namespace:?} and \
             leave userDataSecret.namespace out"
        );
        FieldError::invalid("providerSpec.userDataSecret.namespace", given, detail)
    })
}

/// What is wrong with the mounts that an object's annotation asks for, on the disks of its `providerSpec.value`.
fn validate_mounts(mounts: Option<&String>, value: &Value) -> Option<FieldError> {
    let text = mounts.filter(|_| is_azure(value))?;
    let (legible, _) = AzureMachineProviderSpec::legible(value);
    let spec = AzureMachineProviderSpec::from_raw(&legible).unwrap_or_default();
    let disks = spec.data_disks.iter();
    let disks: Vec<_> = disks
        .map(|disk| KnownDisk::azure(disk.lun, &disk.name_suffix))
        .collect();
    let error = parse_requests(text)
        .and_then(|requests| resolve(&requests, &disks))
        .err()?;
    let path = format!("metadata.annotations[{MOUNTS_ANNOTATION}]");
    Some(FieldError::invalid(path, text.as_str(), error.to_string()))
}

/// The annotations of a Machine, or of a MachineSet for its machines, that are about data disks.
pub const DISK_ANNOTATIONS: [&str; 2] = [MOUNTS_ANNOTATION, ATTACH_ANNOTATION];

/// What is wrong with the annotations about data disks, for the disks of this `providerSpec.value`.
pub fn validate_annotations<'a>(annotation: impl Fn(&str) -> Option<&'a String>, value: &Value) -> Vec<FieldError> {
    let kept = annotation(ATTACH_ANNOTATION)
        .filter(|_| is_azure(value))
        .and_then(|text| {
            let (legible, _) = AzureMachineProviderSpec::legible(value);
            let spec = AzureMachineProviderSpec::from_raw(&legible).unwrap_or_default();
            let why = wishes(text, &spec.data_disks).err()?;
            let path = format!("metadata.annotations[{ATTACH_ANNOTATION}]");
            Some(FieldError::invalid(path, text.as_str(), why))
        });
    validate_mounts(annotation(MOUNTS_ANNOTATION), value)
        .into_iter()
        .chain(kept)
        .collect()
}

fn network(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let vnet = spec.vnet.as_deref().unwrap_or_default();
    if vnet.is_empty() && !spec.subnet.is_empty() {
        errors.push(FieldError::required(
            "providerSpec.vnet",
            "must provide a virtual network when supplying subnets",
        ));
    }
    if !vnet.is_empty() && spec.subnet.is_empty() {
        errors.push(FieldError::required(
            "providerSpec.subnet",
            "must provide a subnet when a virtual network is specified",
        ));
    }
}

fn image(image: &Image, errors: &mut Vec<FieldError>) {
    let parts = [
        ("publisher", &image.publisher),
        ("offer", &image.offer),
        ("sku", &image.sku),
        ("version", &image.version),
    ];
    let named = parts.iter().any(|(_, value)| !value.is_empty());
    if image.resource_id.is_empty() && !named {
        errors.push(FieldError::required(
            "providerSpec.image",
            "an image reference must be provided",
        ));
    } else if !image.resource_id.is_empty() && named {
        let text =
            "resourceID is already specified, other fields such as [offer, publisher, sku, version] should not be set";
        errors.push(FieldError::invalid(
            "providerSpec.image.resourceID",
            image.resource_id.as_str(),
            text,
        ));
    } else if named {
        for (field, _) in parts.iter().filter(|(_, value)| value.is_empty()) {
            errors.push(FieldError::required(
                format!("providerSpec.image.{field}"),
                format!("{field} must be provided"),
            ));
        }
    }
}

fn secrets(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    let missing = |value: Option<&String>| value.is_none_or(|value| value.is_empty());
    let mut need = |reference: Option<Option<&String>>, path: &str, field: &str| {
        if reference.is_some_and(missing) {
            errors.push(FieldError::required(
                format!("providerSpec.{path}.{field}"),
                format!("{field} must be provided"),
            ));
        }
    };
    let user_data = spec.user_data_secret.as_ref();
    let credentials = spec.credentials_secret.as_ref();
    need(user_data.map(|secret| secret.name.as_ref()), "userDataSecret", "name");
    need(
        credentials.map(|secret| secret.namespace.as_ref()),
        "credentialsSecret",
        "namespace",
    );
    need(
        credentials.map(|secret| secret.name.as_ref()),
        "credentialsSecret",
        "name",
    );
    for (absent, path) in [
        (user_data.is_none(), "userDataSecret"),
        (credentials.is_none(), "credentialsSecret"),
    ] {
        if absent {
            errors.push(FieldError::required(
                format!("providerSpec.{path}"),
                format!("{path} must be provided"),
            ));
        }
    }
}

fn os_disk(disk: &OsDisk, errors: &mut Vec<FieldError>) {
    const PATH: &str = "providerSpec.osDisk";
    if !(1..=32_767).contains(&disk.disk_size_gb) {
        let text = "diskSizeGB must be greater than zero and less than 32768";
        errors.push(FieldError::invalid(
            format!("{PATH}.diskSizeGB"),
            disk.disk_size_gb,
            text,
        ));
    }
    if disk.managed_disk.storage_account_type == Some(StorageAccountType::UltraSsdLrs) {
        let text = "UltraSSD_LRS can be used for data disks only, choose another type for the OS disk";
        errors.push(FieldError::invalid(
            format!("{PATH}.managedDisk.storageAccountType"),
            "UltraSSD_LRS",
            text,
        ));
    }
    if let Some(CachingType::Other(value)) = &disk.caching_type
        && !value.is_empty()
    {
        let text = "must be one of None, ReadOnly, ReadWrite or omitted";
        errors.push(FieldError::invalid(format!("{PATH}.cachingType"), value.as_str(), text));
    }
    let location = disk.disk_settings.ephemeral_storage_location.as_ref();
    match location.filter(|location| !location.as_str().is_empty()) {
        Some(EphemeralStorageLocation::Local) if disk.caching_type != Some(CachingType::ReadOnly) => {
            let value = disk.caching_type.as_ref().map_or("", CachingType::as_str);
            let text = "cachingType must be \"ReadOnly\" when ephemeralStorageLocation is \"Local\"";
            errors.push(FieldError::invalid(format!("{PATH}.cachingType"), value, text));
        }
        Some(other) if !other.is_known() => {
            let path = format!("{PATH}.diskSettings.ephemeralStorageLocation");
            let text = "ephemeralStorageLocation can either be omitted or set to Local";
            errors.push(FieldError::invalid(path, other.as_str(), text));
        }
        _ => {}
    }
    let placement = disk.disk_settings.placement.as_ref();
    if let Some(placement) = placement.filter(|placement| !placement.as_str().is_empty()) {
        let text = if !placement.is_known() {
            "placement can be only CacheDisk, ResourceDisk, NvmeDisk or omitted"
        } else if location != Some(&EphemeralStorageLocation::Local) {
            "placement can be set only when ephemeralStorageLocation is \"Local\""
        } else {
            return;
        };
        let path = format!("{PATH}.diskSettings.placement");
        errors.push(FieldError::invalid(path, placement.as_str(), text));
    }
}

fn capability(spec: &AzureMachineProviderSpec, errors: &mut Vec<FieldError>) {
    if let Some(UltraSsdCapability::Other(value)) = &spec.ultra_ssd_capability
        && !value.is_empty()
    {
        let text = "ultraSSDCapability can be only Enabled, Disabled or omitted";
        errors.push(FieldError::invalid(
            "providerSpec.ultraSSDCapability",
            value.as_str(),
            text,
        ));
    }
}

fn data_disks(machine_name: &str, disks: &[DataDisk], errors: &mut Vec<FieldError>) {
    let mut suffixes: BTreeMap<String, usize> = BTreeMap::new();
    let mut luns: BTreeMap<i32, usize> = BTreeMap::new();
    for (index, disk) in disks.iter().enumerate() {
        let mut found = DiskErrors {
            path: format!("providerSpec.dataDisks[{index}]"),
            errors,
        };
        found.name(machine_name, &disk.name_suffix);
        // Azure compares names without regard to case.
        if suffixes.insert(disk.name_suffix.to_lowercase(), index).is_some() {
            found.invalid(
                "nameSuffix",
                disk.name_suffix.as_str(),
                "each Data Disk must have a unique nameSuffix",
            );
        }
        found.size(disk);
        found.lun(disk.lun);
        if luns.insert(disk.lun, index).is_some() {
            found.invalid("lun", disk.lun, "each Data Disk must have a unique lun");
        }
        found.policy(disk);
        found.kind_and_caching(disk);
        found.performance(disk);
    }
}

/// The rules for one data disk, each error with its path.
struct DiskErrors<'a> {
    path: String,
    errors: &'a mut Vec<FieldError>,
}

impl DiskErrors<'_> {
    fn invalid(&mut self, field: &str, value: impl Into<Value>, text: impl Into<String>) {
        self.errors
            .push(FieldError::invalid(format!("{}.{field}", self.path), value, text));
    }

    fn name(&mut self, machine_name: &str, suffix: &str) {
        if disk_name(machine_name, suffix).len() > MAX_NAME {
            self.invalid(
                "nameSuffix",
                suffix,
                "too long, the overall disk name must not exceed 80 chars",
            );
        }
        if suffix.eq_ignore_ascii_case(OS_DISK_SUFFIX) {
            self.invalid(
                "nameSuffix",
                suffix,
                "the OS disk has this name, choose another nameSuffix",
            );
        }
        if !is_name_suffix(suffix) {
            let text = "nameSuffix must be provided, must start and finish with an alphanumeric character and can only contain letters, numbers, underscores, periods or hyphens";
            self.invalid("nameSuffix", suffix, text);
        }
    }

    fn size(&mut self, disk: &DataDisk) {
        let (_, highest) = size_range(&kind_of(disk));
        if disk.disk_size_gb < 4 {
            self.invalid(
                "diskSizeGB",
                disk.disk_size_gb,
                "diskSizeGB must be provided and at least 4GB in size",
            );
        } else if disk.disk_size_gb > highest {
            let text = format!(
                "diskSizeGB must be at most {highest} for storageAccountType {:?}",
                kind_of(disk).as_str()
            );
            self.invalid("diskSizeGB", disk.disk_size_gb, text);
        }
    }

    fn lun(&mut self, lun: i32) {
        if !(0..MAX_LUN).contains(&lun) {
            self.invalid("lun", lun, "must be greater than or equal to 0 and less than 64");
        }
    }

    fn policy(&mut self, disk: &DataDisk) {
        let policy = disk.deletion_policy.as_ref();
        match policy.filter(|policy| !policy.as_str().is_empty()) {
            None => self.errors.push(FieldError::required(
                format!("{}.deletionPolicy", self.path),
                "deletionPolicy must be provided and must be either Delete or Detach",
            )),
            Some(policy) if !policy.is_known() => {
                self.invalid("deletionPolicy", policy.as_str(), "must be either Delete or Detach");
            }
            Some(_) => {}
        }
    }

    fn kind_and_caching(&mut self, disk: &DataDisk) {
        let kind = kind_of(disk);
        if let StorageAccountType::Other(value) = &kind
            && !value.is_empty()
        {
            let text = format!("must be one of {}", StorageAccountType::KNOWN.join(", "));
            self.invalid("managedDisk.storageAccountType", value.as_str(), text);
        }
        let Some(caching) = disk
            .caching_type
            .as_ref()
            .filter(|caching| !caching.as_str().is_empty())
        else {
            return;
        };
        if kind.is_provisioned() && *caching != CachingType::None {
            let text = format!(
                "must be \"None\" or omitted when storageAccountType is {:?}",
                kind.as_str()
            );
            self.invalid("cachingType", caching.as_str(), text);
        } else if !caching.is_known() {
            self.invalid(
                "cachingType",
                caching.as_str(),
                "must be one of None, ReadOnly, ReadWrite or omitted",
            );
        }
    }

    fn performance(&mut self, disk: &DataDisk) {
        let kind = kind_of(disk);
        if !kind.is_provisioned() {
            let fields = [
                ("diskIOPSReadWrite", disk.disk_iops_read_write),
                ("diskMBpsReadWrite", disk.disk_mbps_read_write),
            ];
            for (field, value) in fields {
                if let Some(value) = value {
                    let text = "can be set only when storageAccountType is UltraSSD_LRS or PremiumV2_LRS";
                    self.invalid(field, value, text);
                }
            }
            return;
        }
        let iops = iops_range(&kind, disk.disk_size_gb);
        self.in_range(
            "diskIOPSReadWrite",
            disk.disk_iops_read_write,
            iops,
            &format!("for {} GiB", disk.disk_size_gb),
        );
        let most_iops = disk
            .disk_iops_read_write
            .or(iops.map(|(_, most)| most))
            .unwrap_or_default();
        let mbps = mbps_range(&kind, most_iops);
        self.in_range(
            "diskMBpsReadWrite",
            disk.disk_mbps_read_write,
            mbps,
            &format!("with {most_iops} IOPS"),
        );
    }

    fn in_range(&mut self, field: &str, value: Option<i64>, range: Option<(i64, i64)>, why: &str) {
        if let (Some(value), Some((lowest, highest))) = (value, range)
            && !(lowest..=highest).contains(&value)
        {
            self.invalid(field, value, format!("must be from {lowest} to {highest} {why}"));
        }
    }
}

fn kind_of(disk: &DataDisk) -> StorageAccountType {
    disk.managed_disk.storage_account_type.clone().unwrap_or_default()
}

/// What is probably a mistake, but is no reason to refuse the object.
fn warnings(spec: &AzureMachineProviderSpec) -> Vec<String> {
    let mut warnings: Vec<String> = spec
        .extra
        .keys()
        .map(|key| format!("providerSpec.{key}: unknown field, it is kept and has no effect"))
        .collect();
    for (index, disk) in spec.data_disks.iter().enumerate() {
        let unknown =
            |key| format!("providerSpec.dataDisks[{index}].{key}: unknown field, it is kept and has no effect");
        warnings.extend(disk.extra.keys().map(unknown));
    }
    if azure::capability_conflict(spec) {
        warnings.push(format!(
            "providerSpec.ultraSSDCapability: Disabled, but a data disk is UltraSSD_LRS: the machine will fail, as Azure answers {:?}",
            azure::CAPABILITY_CONFLICT
        ));
    }
    warnings
}

/// Said at admission where the SKU catalogue knows the size, and refused by the controller.
pub fn too_many_disks(vm_size: &str, max: usize, disks: usize) -> Option<String> {
    (disks > max)
        .then(|| format!("providerSpec.dataDisks: vm size {vm_size} takes {max} data disks, the spec has {disks}"))
}

/// Top-level fields of `providerSpec.value` to fill in, where they are absent or empty.
pub fn defaults(spec: &AzureMachineProviderSpec, cluster_id: &str) -> Vec<(&'static str, Value)> {
    let mut set = Vec::new();
    if spec.vm_size.as_deref().unwrap_or_default().is_empty() {
        set.push(("vmSize", json!(DEFAULT_VM_SIZE)));
    }
    if spec.vnet.as_deref().unwrap_or_default().is_empty() && spec.subnet.is_empty() && !cluster_id.is_empty() {
        set.push(("vnet", json!(format!("{cluster_id}-vnet"))));
        set.push(("subnet", json!(format!("{cluster_id}-worker-subnet"))));
    }
    if spec.image == Image::default() && !cluster_id.is_empty() {
        set.push(("image", json!({ "resourceID": default_image(cluster_id) })));
    }
    if spec
        .user_data_secret
        .as_ref()
        .is_none_or(|secret| secret.name.as_deref().unwrap_or_default().is_empty())
    {
        let namespace = spec
            .user_data_secret
            .as_ref()
            .and_then(|secret| secret.namespace.clone());
        set.push(("userDataSecret", secret_reference(DEFAULT_USER_DATA_SECRET, namespace)));
    }
    let credentials = spec.credentials_secret.clone().unwrap_or_default();
    let present = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    if present(&credentials.name).is_none() || present(&credentials.namespace).is_none() {
        let name = present(&credentials.name).unwrap_or_else(|| DEFAULT_CREDENTIALS_SECRET.to_owned());
        let namespace = present(&credentials.namespace).unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        set.push(("credentialsSecret", secret_reference(&name, Some(namespace))));
    }
    set
}

/// Returns the image that OpenShift's installer makes for a cluster. Galleries have no dashes in their names.
fn default_image(cluster_id: &str) -> String {
    let gallery = cluster_id.replace('-', "_");
    format!(
        "/resourceGroups/{cluster_id}-rg/providers/Microsoft.Compute/galleries/gallery_{gallery}/images/{cluster_id}/versions/latest"
    )
}

/// `providerSpec.value` as admission leaves it: with the defaults filled in.
pub fn with_defaults(value: &Value, spec: &AzureMachineProviderSpec, cluster_id: &str) -> Value {
    let mut value = value.clone();
    if let Value::Object(fields) = &mut value {
        for (field, default) in defaults(spec, cluster_id) {
            fields.retain(|key, _| !key.eq_ignore_ascii_case(field));
            fields.insert(field.to_owned(), default);
        }
    }
    value
}

fn secret_reference(name: &str, namespace: Option<String>) -> Value {
    match namespace {
        Some(namespace) => json!({ "name": name, "namespace": namespace }),
        None => json!({ "name": name }),
    }
}

/// Once a machine is being deleted, hooks may be removed and nothing else.
pub fn validate_hooks_update(old: &LifecycleHooks, new: &LifecycleHooks) -> Vec<FieldError> {
    let changed = |old: &[LifecycleHook], new: &[LifecycleHook], field: &str, words: &str| {
        let names: Vec<&str> = new
            .iter()
            .filter(|hook| !old.contains(hook))
            .map(|hook| hook.name.as_str())
            .collect();
        (!names.is_empty()).then(|| {
            let text = format!(
                "{words} hooks are immutable when machine is marked for deletion: the following hooks are new or changed: [{}]",
                names.join(", ")
            );
            FieldError::forbidden(format!("spec.lifecycleHooks.{field}"), text)
        })
    };
    let pre_drain = changed(&old.pre_drain, &new.pre_drain, "preDrain", "pre-drain");
    pre_drain
        .into_iter()
        .chain(changed(
            &old.pre_terminate,
            &new.pre_terminate,
            "preTerminate",
            "pre-terminate",
        ))
        .collect()
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod upstream;
