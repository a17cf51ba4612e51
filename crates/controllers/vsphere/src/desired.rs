//! Translates the API's objects into the types of the plan, and back. Nothing else knows the version of the API.

use std::time::Duration;

use capstan_api::Quantity;
use capstan_api::vsphere::{
    CloneMode, ControllerType, DataDiskControllerStatus, DataDiskStatus, DhcpOverrides as ApiOverrides,
    NetworkDeviceSpec, NetworkRouteSpec, NetworkStatus, PciDevice, PowerOffMode, VSphereVM,
};
use capstan_core::disks::vsphere::{ControllerKind, DataDisk, Listed, Placement};
use kube::ResourceExt;

use crate::quantity::in_units_of;
use capstan_core::vm::Report;
use capstan_core::vm::{Allocation, DesiredVm, DhcpOverrides, NetworkDevice, Pci, PowerOff, Recorded, Route};

/// A guest that is asked to shut down gets this long before it is powered off, unless the spec says otherwise.
const SOFT_POWER_OFF: Duration = Duration::from_secs(5 * 60);
/// A Kubernetes node needs two CPUs.
const FEWEST_CPUS: i32 = 2;
const DEFAULT_MEMORY_MIB: i64 = 2048;
const HERTZ_PER_MHZ: i64 = 1_000_000;
const BYTES_PER_MIB: i64 = 1 << 20;

/// Returns the VM that a VSphereVM with this UID describes.
pub fn desired(vm: &VSphereVM, uid: &str) -> DesiredVm {
    let spec = &vm.spec.clone_spec;
    let text = |value: &Option<String>| value.clone().filter(|text| !text.trim().is_empty());
    let cpus = spec.num_cpus.unwrap_or_default().max(FEWEST_CPUS);
    let resources = &spec.resources;
    DesiredVm {
        name: vm.name_any(),
        instance_uuid: uid.to_owned(),
        template: spec.template.clone(),
        linked: spec
            .clone_mode
            .as_ref()
            .is_none_or(|mode| *mode != CloneMode::FullClone),
        snapshot: text(&spec.snapshot),
        datacenter: text(&spec.datacenter),
        folder: text(&spec.folder),
        pool: text(&spec.resource_pool),
        datastore: text(&spec.datastore),
        storage_policy: text(&spec.storage_policy_name),
        networks: spec.network.devices.iter().map(network).collect(),
        routes: spec.network.routes.iter().map(route).collect(),
        cpus,
        cores_per_socket: spec.num_cores_per_socket.filter(|cores| *cores >= 0),
        memory_mib: spec
            .memory_mib
            .filter(|memory| *memory > 0)
            .unwrap_or(DEFAULT_MEMORY_MIB),
        cpu_allocation: Allocation {
            reservation: units(HERTZ_PER_MHZ, resources.requests.cpu.as_ref()),
            limit: units(HERTZ_PER_MHZ, resources.limits.cpu.as_ref()),
            shares: resources.shares.cpu,
        },
        memory_allocation: Allocation {
            reservation: units(BYTES_PER_MIB, resources.requests.memory.as_ref()),
            limit: units(BYTES_PER_MIB, resources.limits.memory.as_ref()),
            shares: resources.shares.memory,
        },
        nested_hv: spec.nested_hv,
        migrate_encryption: spec.migrate_encryption.as_ref().map(|mode| mode.as_str().to_owned()),
        ft_encryption: spec.ft_encryption_mode.as_ref().map(|mode| mode.as_str().to_owned()),
        primary_gib: spec.disk_gib.map(i64::from).filter(|size| *size > 0),
        additional_gib: spec.additional_disks_gib.iter().map(|size| i64::from(*size)).collect(),
        vmx: spec.custom_vmx_keys.clone(),
        tags: spec.tag_ids.clone(),
        pci: spec.pci_devices.iter().filter_map(pci).collect(),
        hardware_version: text(&spec.hardware_version),
        disks: spec.data_disks.iter().map(DataDisk::from).collect(),
        power_off: match vm.spec.power_off_mode {
            Some(PowerOffMode::Soft) => PowerOff::Soft,
            Some(PowerOffMode::TrySoft) => PowerOff::TrySoft,
            _ => PowerOff::Hard,
        },
        soft_timeout: vm.spec.guest_soft_power_off_timeout.map_or(SOFT_POWER_OFF, Into::into),
    }
}

fn units(unit: i64, quantity: Option<&Quantity>) -> Option<i64> {
    quantity.and_then(|quantity| in_units_of(unit, &quantity.0))
}

fn network(device: &NetworkDeviceSpec) -> NetworkDevice {
    NetworkDevice {
        network: device.network_name.clone(),
        device_name: device.device_name.clone().filter(|name| !name.is_empty()),
        dhcp4: device.dhcp4,
        dhcp6: device.dhcp6,
        gateway4: device.gateway4.clone().filter(|gateway| !gateway.is_empty()),
        gateway6: device.gateway6.clone().filter(|gateway| !gateway.is_empty()),
        addresses: device.ip_addrs.clone(),
        mtu: device.mtu,
        mac: device.mac_addr.clone().filter(|mac| !mac.is_empty()),
        nameservers: device.nameservers.clone(),
        search_domains: device.search_domains.clone(),
        routes: device.routes.iter().map(route).collect(),
        dhcp4_overrides: device.dhcp4_overrides.as_ref().map(overrides),
        dhcp6_overrides: device.dhcp6_overrides.as_ref().map(overrides),
        pooled: !device.addresses_from_pools.is_empty(),
        skip_allocation: device.skip_ip_allocation,
    }
}

fn route(route: &NetworkRouteSpec) -> Route {
    Route {
        to: route.to.clone(),
        via: route.via.clone(),
        metric: route.metric,
    }
}

fn overrides(set: &ApiOverrides) -> DhcpOverrides {
    DhcpOverrides {
        hostname: set.hostname.clone(),
        route_metric: set.route_metric,
        send_hostname: set.send_hostname,
        use_dns: set.use_dns,
        use_domains: set.use_domains.clone(),
        use_hostname: set.use_hostname,
        use_mtu: set.use_mtu,
        use_ntp: set.use_ntp,
        use_routes: set.use_routes.clone(),
    }
}

fn pci(device: &PciDevice) -> Option<Pci> {
    match (&device.vgpu_profile, device.vendor_id, device.device_id) {
        (Some(profile), _, _) if !profile.is_empty() => Some(Pci::VGpu {
            profile: profile.clone(),
        }),
        (_, Some(vendor), Some(id)) => Some(Pci::Device {
            vendor,
            device: id,
            label: device.custom_label.clone(),
        }),
        _ => None,
    }
}

fn controller_kind(name: &str) -> Option<ControllerKind> {
    Some(match ControllerType::from(name) {
        ControllerType::Pvscsi => ControllerKind::ParaVirtual,
        ControllerType::LsiLogic => ControllerKind::LsiLogic,
        ControllerType::LsiLogicSas => ControllerKind::LsiLogicSas,
        ControllerType::BusLogic => ControllerKind::BusLogic,
        ControllerType::Sata => ControllerKind::Sata,
        ControllerType::Nvme => ControllerKind::Nvme,
        ControllerType::Ide => ControllerKind::Ide,
        ControllerType::Other(_) => return None,
    })
}

fn controller_name(kind: ControllerKind) -> String {
    let known = match kind {
        ControllerKind::ParaVirtual => ControllerType::Pvscsi,
        ControllerKind::LsiLogic => ControllerType::LsiLogic,
        ControllerKind::LsiLogicSas => ControllerType::LsiLogicSas,
        ControllerKind::BusLogic => ControllerType::BusLogic,
        ControllerKind::Sata => ControllerType::Sata,
        ControllerKind::Nvme => ControllerType::Nvme,
        ControllerKind::Ide => ControllerType::Ide,
    };
    known.as_str().to_owned()
}

/// Returns the units in a list of data disks.
pub fn placements(disks: &[DataDiskStatus]) -> Vec<Placement> {
    let placements = disks.iter().enumerate().filter_map(|(index, disk)| {
        Some(Placement {
            index,
            key: -2000 - i32::try_from(index).ok()?,
            controller_key: disk.controller.key.unwrap_or_default(),
            kind: controller_kind(&disk.controller.type_)?,
            bus: disk.controller.bus,
            unit: disk.unit_number,
        })
    });
    placements.collect()
}

/// Returns the part of the object that an earlier reconcile wrote and the plan needs.
pub fn recorded(vm: &VSphereVM) -> Recorded {
    let status = vm.status.as_ref();
    let bios_uuid = vm.spec.bios_uuid.clone().filter(|uuid| !uuid.is_empty());
    let mode = status.and_then(|status| status.clone_mode.as_deref());
    Recorded {
        // The BIOS UUID is written when the VM is up for the first time, and outlives the status when the object is moved.
        was_ready: bios_uuid.is_some() || status.is_some_and(|status| status.ready),
        bios_uuid,
        placements: status.map(|status| placements(&status.data_disks)).unwrap_or_default(),
        linked: mode == Some(CloneMode::LinkedClone.as_str()),
    }
}

/// Returns the data disks for the status before they exist.
pub fn planned_disks(disks: &[DataDisk], placements: &[Placement]) -> Vec<DataDiskStatus> {
    placements
        .iter()
        .map(|placement| DataDiskStatus {
            name: disks
                .get(placement.index)
                .map(|disk| disk.name.clone())
                .unwrap_or_default(),
            unit_number: placement.unit,
            controller: DataDiskControllerStatus {
                type_: controller_name(placement.kind),
                bus: placement.bus,
                key: (placement.controller_key > 0).then_some(placement.controller_key),
            },
            ..DataDiskStatus::default()
        })
        .collect()
}

/// Returns the data disks as vCenter shows them, for the status.
pub fn found_disks(planned: &[DataDiskStatus], listed: &[Listed], keys: &[Option<i32>]) -> Vec<DataDiskStatus> {
    let mut disks = planned.to_vec();
    for (found, key) in listed.iter().zip(keys) {
        let Some(disk) = disks.get_mut(found.index) else {
            continue;
        };
        disk.name = found.name.clone();
        disk.controller.key = *key;
        disk.uuid = Some(found.uuid.clone()).filter(|uuid| !uuid.is_empty());
        disk.datastore_path = Some(found.path.clone()).filter(|path| !path.is_empty());
        disk.size_gib = Some(found.size_gib);
    }
    disks
}

/// Returns the network cards for the status.
pub fn network_status(report: &Report) -> Vec<NetworkStatus> {
    report
        .interfaces
        .iter()
        .map(|interface| NetworkStatus {
            connected: interface.connected,
            ip_addrs: interface.addresses.clone(),
            mac_addr: interface.mac.clone(),
            network_name: interface.network.clone().filter(|name| !name.is_empty()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_cores_per_socket_are_sent_and_unset_ones_are_not() {
        for cores in [None, Some(0), Some(2)] {
            let mut vm = VSphereVM::new("m", Default::default());
            vm.spec.clone_spec.num_cores_per_socket = cores;
            assert_eq!(desired(&vm, "u").cores_per_socket, cores);
        }
    }
}
