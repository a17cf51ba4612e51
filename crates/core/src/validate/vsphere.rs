//! Rules for machines on vSphere beyond what the schema and its CEL rules say. All errors of an object are reported at
//! once, in the order of its fields.

use std::collections::BTreeMap;
use std::net::IpAddr;

use capstan_api::vsphere::{
    DataDisk, NetworkDeviceSpec, PciDevice, PowerOffMode, VSphereClusterSpec, VSphereDeploymentZoneSpec,
    VSphereFailureDomainSpec, VSphereMachineSpec, VSphereMachineTemplateSpec, VSphereVMSpec, VirtualMachineCloneSpec,
};
use serde_json::Value;

use super::vcenter::Server;
use super::{FieldError, Findings};
use crate::disks::vsphere::{Controller, ControllerKind, Device, Disk, Hardware, Problems, allocate, hardware_version};

/// Windows does not take longer names.
pub const LONGEST_WINDOWS_NAME: usize = 15;

const NOT_CIDR: &str = "ip addresses should be in the CIDR format";
const NOT_IN_TEMPLATES: &str = "cannot be set in templates";
const TIMEOUT_WITHOUT_TRY: &str = "should not be set in templates unless the powerOffMode is trySoft";

/// A machine of its own.
pub fn machine(spec: &VSphereMachineSpec) -> Findings {
    let mut errors = Vec::new();
    clone_spec("spec", &spec.clone_spec, &mut errors);
    addresses("spec", &spec.clone_spec.network.devices, &mut errors);
    room("spec", &spec.clone_spec.data_disks, &mut errors);
    timeout(
        "spec",
        spec.power_off_mode.as_ref(),
        spec.guest_soft_power_off_timeout.is_some(),
        &mut errors,
    );
    Findings {
        errors,
        warnings: warnings("spec", &spec.clone_spec),
    }
}

/// A virtual machine behind a machine.
pub fn virtual_machine(name: &str, spec: &VSphereVMSpec) -> Findings {
    let mut errors = Vec::new();
    let windows = spec.clone_spec.os.as_ref().is_some_and(|os| os.as_str() == "Windows");
    if windows && name.len() > LONGEST_WINDOWS_NAME {
        errors.push(FieldError::invalid(
            "name",
            name,
            "name has to be less than 16 characters for Windows VM",
        ));
    }
    clone_spec("spec", &spec.clone_spec, &mut errors);
    addresses("spec", &spec.clone_spec.network.devices, &mut errors);
    timeout(
        "spec",
        spec.power_off_mode.as_ref(),
        spec.guest_soft_power_off_timeout.is_some(),
        &mut errors,
    );
    Findings {
        errors,
        warnings: warnings("spec", &spec.clone_spec),
    }
}

/// A template that machines are made from.
pub fn machine_template(spec: &VSphereMachineTemplateSpec) -> Findings {
    let (path, inner) = ("spec.template.spec", &spec.template.spec);
    let mut errors = Vec::new();
    if inner.provider_id.is_some() {
        errors.push(FieldError::forbidden(format!("{path}.providerID"), NOT_IN_TEMPLATES));
    }
    if inner
        .clone_spec
        .network
        .devices
        .iter()
        .any(|device| !device.ip_addrs.is_empty())
    {
        errors.push(FieldError::forbidden(
            format!("{path}.network.devices.ipAddrs"),
            NOT_IN_TEMPLATES,
        ));
    }
    clone_spec(path, &inner.clone_spec, &mut errors);
    room(path, &inner.clone_spec.data_disks, &mut errors);
    timeout(
        path,
        inner.power_off_mode.as_ref(),
        inner.guest_soft_power_off_timeout.is_some(),
        &mut errors,
    );
    Findings {
        errors,
        warnings: warnings(path, &inner.clone_spec),
    }
}

/// The vSphere side of a cluster.
pub fn cluster(spec: &VSphereClusterSpec) -> Findings {
    let mut errors = Vec::new();
    server("spec.server", spec.server.as_deref(), &mut errors);
    Findings {
        errors,
        warnings: Vec::new(),
    }
}

/// A deployment zone.
pub fn deployment_zone(spec: &VSphereDeploymentZoneSpec) -> Findings {
    let mut errors = Vec::new();
    server("spec.server", spec.server.as_deref(), &mut errors);
    Findings {
        errors,
        warnings: Vec::new(),
    }
}

/// Checks that a field names a host with or without a port, and nothing else of a URL.
fn server(field: &str, value: Option<&str>, errors: &mut Vec<FieldError>) {
    let Some(value) = value.filter(|value| !value.trim().is_empty()) else {
        return;
    };
    if let Err(reason) = Server::parse(value) {
        errors.push(FieldError::invalid(field, value, reason));
    }
}

/// A failure domain.
pub fn failure_domain(spec: &VSphereFailureDomainSpec) -> Findings {
    let mut errors = Vec::new();
    let topology = &spec.topology;
    let no_cluster = topology.compute_cluster.as_deref().unwrap_or_default().is_empty();
    let (region, zone) = (spec.region.type_.as_str(), spec.zone.type_.as_str());
    let cluster = "spec.topology.computeCluster";
    if no_cluster && topology.hosts.is_some() {
        errors.push(FieldError::forbidden(cluster, "cannot be empty if Hosts is not empty"));
    }
    if region == "HostGroup" {
        errors.push(FieldError::forbidden(
            "spec.region.type",
            "region's Failure Domain type cannot be HostGroup",
        ));
    }
    if zone == "HostGroup" && topology.hosts.is_none() {
        let text = "cannot be nil if zone's Failure Domain type is HostGroup";
        errors.push(FieldError::forbidden("spec.topology.hosts", text));
    }
    for (whose, kind) in [("region", region), ("zone", zone)] {
        if no_cluster && kind == "ComputeCluster" {
            let text = format!("cannot be nil if {whose}'s Failure Domain type is ComputeCluster");
            errors.push(FieldError::forbidden(cluster, text));
        }
    }
    if !topology.networks.is_empty() && !topology.network_configurations.is_empty() {
        let text = "cannot be set if spec.topology.networkConfigurations is already set";
        errors.push(FieldError::forbidden("spec.topology.networks", text));
    }
    for (index, network) in topology.network_configurations.iter().enumerate() {
        if network.network_name.is_empty() {
            let path = format!("spec.topology.networkConfigurations[{index}].networkName");
            errors.push(FieldError::required(path, "cannot be empty"));
        }
    }
    Findings {
        errors,
        warnings: Vec::new(),
    }
}

fn timeout(path: &str, mode: Option<&PowerOffMode>, set: bool, errors: &mut Vec<FieldError>) {
    if set && mode != Some(&PowerOffMode::TrySoft) {
        let value = mode.map_or("", PowerOffMode::as_str);
        let text = format!("{TIMEOUT_WITHOUT_TRY} (it is {value:?})");
        errors.push(FieldError::forbidden(format!("{path}.guestSoftPowerOffTimeout"), text));
    }
}

fn clone_spec(path: &str, spec: &VirtualMachineCloneSpec, errors: &mut Vec<FieldError>) {
    if spec.template.trim().is_empty() {
        errors.push(FieldError::required(
            format!("{path}.template"),
            "name or path of the template to clone",
        ));
    }
    server(&format!("{path}.server"), spec.server.as_deref(), errors);
    let sizes = [
        ("numCPUs", spec.num_cpus.map(i64::from)),
        ("numCoresPerSocket", spec.num_cores_per_socket.map(i64::from)),
        ("memoryMiB", spec.memory_mib),
        ("diskGiB", spec.disk_gib.map(i64::from)),
    ];
    for (field, value) in sizes {
        if let Some(value) = value.filter(|value| *value < 0) {
            errors.push(FieldError::invalid(
                format!("{path}.{field}"),
                value,
                "must not be negative",
            ));
        }
    }
    for (index, size) in spec
        .additional_disks_gib
        .iter()
        .enumerate()
        .filter(|(_, size)| **size < 0)
    {
        let path = format!("{path}.additionalDisksGiB[{index}]");
        errors.push(FieldError::invalid(path, *size, "must not be negative"));
    }
    for (index, device) in spec.network.devices.iter().enumerate() {
        if device.network_name.is_empty() {
            let path = format!("{path}.network.devices[{index}].networkName");
            errors.push(FieldError::required(path, "name or path of a network"));
        }
    }
    pci(path, &spec.pci_devices, errors);
    if let Some(version) = spec
        .hardware_version
        .as_deref()
        .filter(|v| !v.is_empty() && hardware_version(v).is_none())
    {
        let text = "should be a valid VM hardware version, example vmx-17";
        errors.push(FieldError::invalid(format!("{path}.hardwareVersion"), version, text));
    }
    let keys = [
        ("cryptoKeyID", &spec.crypto_key_id),
        ("cryptoProfile", &spec.crypto_profile),
    ];
    for (field, value) in keys {
        if value.as_deref().is_some_and(|value| !value.is_empty()) {
            let text = "machines are encrypted by their storage policy alone: leave this out and give an encrypting storagePolicyName";
            errors.push(FieldError::forbidden(format!("{path}.{field}"), text));
        }
    }
    data_disks(path, &spec.data_disks, errors);
}

fn addresses(path: &str, devices: &[NetworkDeviceSpec], errors: &mut Vec<FieldError>) {
    for (d, device) in devices.iter().enumerate() {
        for (a, address) in device
            .ip_addrs
            .iter()
            .enumerate()
            .filter(|(_, address)| !is_cidr(address))
        {
            let path = format!("{path}.network.devices[{d}].ipAddrs[{a}]");
            errors.push(FieldError::invalid(path, address.as_str(), NOT_CIDR));
        }
    }
}

fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else {
        return false;
    };
    match (address.parse::<IpAddr>(), length.parse::<u8>()) {
        (Ok(address), Ok(length)) => length <= if address.is_ipv4() { 32 } else { 128 },
        _ => false,
    }
}

fn pci(path: &str, devices: &[PciDevice], errors: &mut Vec<FieldError>) {
    for (index, device) in devices.iter().enumerate() {
        let ids = device.device_id.is_some() && device.vendor_id.is_some();
        let some_id = device.device_id.is_some() || device.vendor_id.is_some();
        let profile = device
            .vgpu_profile
            .as_deref()
            .is_some_and(|profile| !profile.is_empty());
        if (ids && !profile) || (profile && !some_id) {
            continue;
        }
        let value = serde_json::to_value(device).unwrap_or(Value::Null);
        let text = "should have either deviceId + vendorId or vGPUProfile set";
        errors.push(FieldError::invalid(format!("{path}.pciDevices[{index}]"), value, text));
    }
}

fn data_disks(path: &str, disks: &[DataDisk], errors: &mut Vec<FieldError>) {
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for (index, disk) in disks.iter().enumerate() {
        let path = format!("{path}.dataDisks[{index}]");
        if disk.size_gib < 1 {
            errors.push(FieldError::invalid(
                format!("{path}.sizeGiB"),
                disk.size_gib,
                "must be at least 1",
            ));
        }
        if let Some(value) = &disk.provisioning_type {
            let text = format!("there is no such field: use provisioningMode: {value}");
            errors.push(FieldError::forbidden(format!("{path}.provisioningType"), text));
        }
        if let Some(mode) = disk
            .provisioning_mode
            .as_ref()
            .filter(|mode| !mode.is_known() && !mode.as_str().is_empty())
        {
            let text = "supported values: \"Thin\", \"Thick\", \"EagerlyZeroed\"";
            errors.push(FieldError::invalid(
                format!("{path}.provisioningMode"),
                mode.as_str(),
                text,
            ));
        }
        let controller = disk.controller.as_ref();
        if let Some(kind) = controller
            .and_then(|c| c.type_.as_ref())
            .filter(|kind| !kind.is_known())
        {
            let text = "supported values: \"PVSCSI\", \"LSILogic\", \"LSILogicSAS\", \"BusLogic\", \"SATA\", \"NVMe\", \"IDE\"";
            errors.push(FieldError::invalid(
                format!("{path}.controller.type"),
                kind.as_str(),
                text,
            ));
        }
        let Some(unit) = disk.unit_number else { continue };
        let place = serde_json::to_string(&(controller, unit)).unwrap_or_default();
        if let Some(first) = taken.insert(place, index) {
            let text = format!("dataDisks[{first}] has the same unit of the same controller: choose another");
            errors.push(FieldError::invalid(format!("{path}.unitNumber"), unit, text));
        }
    }
}

/// The newest hardware version that limits depend on.
const NEWEST: u32 = 21;

/// Whether there can be a template whose clones take all disks. Which template it is, is not known here; so nothing is said
/// of what fits on some, and the clone is checked against the true one.
fn room(path: &str, disks: &[DataDisk], errors: &mut Vec<FieldError>) {
    if !errors.is_empty() {
        return;
    }
    let disks: Vec<_> = disks.iter().map(Into::into).collect();
    let mut least: Option<Problems> = None;
    for kind in ControllerKind::ALL {
        match allocate(&template_on(kind), &disks) {
            Ok(_) => return,
            Err(problems) if least.as_ref().is_some_and(|least| least.0.len() <= problems.0.len()) => {}
            Err(problems) => least = Some(problems),
        }
    }
    for problem in least.into_iter().flat_map(|problems| problems.0) {
        let index = problem.index.unwrap_or_default();
        let path = format!("{path}.dataDisks[{index}]");
        let text = format!("whatever the template: {}", problem.text);
        errors.push(FieldError::invalid(path, problem.name, text));
    }
}

/// A template with one disk and nothing else but the two IDE controllers that every machine has.
fn template_on(kind: ControllerKind) -> Hardware {
    let controller = |kind: ControllerKind, bus: i32| Controller {
        key: bus + if kind == ControllerKind::Ide { 200 } else { 1000 },
        kind,
        bus,
        own_unit: kind.own_unit(),
        pci_slot: None,
    };
    let mut controllers = vec![controller(ControllerKind::Ide, 0), controller(ControllerKind::Ide, 1)];
    if kind != ControllerKind::Ide {
        controllers.push(controller(kind, 0));
    }
    let primary = Device {
        key: 2000,
        controller_key: controller(kind, 0).key,
        unit: Some(0),
        disk: Some(Disk::default()),
    };
    Hardware {
        version: NEWEST,
        controllers,
        devices: vec![primary],
    }
}

/// What is allowed but unlikely to be meant.
fn warnings(path: &str, spec: &VirtualMachineCloneSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut named: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, disk) in spec.data_disks.iter().enumerate() {
        let name = disk.name.as_deref().unwrap_or_default();
        if name.is_empty() {
            warnings.push(format!(
                "{path}.dataDisks[{index}].name: without a name the disk is hard to distinguish from others"
            ));
        } else if let Some(first) = named.insert(name, index) {
            warnings.push(format!(
                "{path}.dataDisks[{index}].name: {name:?} is the name of dataDisks[{first}] too"
            ));
        }
    }
    let linked = spec.clone_mode.as_ref().is_none_or(|mode| mode.as_str() != "fullClone");
    if linked && (spec.disk_gib.unwrap_or_default() > 0 || !spec.additional_disks_gib.is_empty()) {
        warnings.push(format!(
            "{path}.diskGiB: a linked clone keeps the sizes of its template's disks: set cloneMode to fullClone to grow them"
        ));
    }
    warnings.extend(ignored(spec).into_iter().map(|text| format!("{path}.{text}")));
    warnings
}

/// Fields that are accepted and have no effect, each with what to do instead.
pub fn ignored(spec: &VirtualMachineCloneSpec) -> Vec<String> {
    let cidr = spec.network.preferred_api_server_cidr.as_deref();
    let cidr = cidr.filter(|cidr| !cidr.is_empty());
    cidr.map(|cidr| {
        format!(
            "network.preferredAPIServerCidr: {cidr:?} has no effect: clients use the cluster's controlPlaneEndpoint"
        )
    })
    .into_iter()
    .collect()
}

#[cfg(test)]
#[path = "vsphere_tests.rs"]
mod tests;
