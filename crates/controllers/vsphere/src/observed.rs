//! Translates between the client's objects and the words of the plan: VMs into observations, changes into specs.

use std::collections::BTreeSet;

use capstan_core::disks::vsphere::{NewController, Placement, backing_flags};
use capstan_vsphere::{
    ConfigSpec, Device, DeviceChange, DeviceKind, Network, NetworkBacking, NewDisk, NewNic, NewPci, VmInfo, VmRuntime,
};

use capstan_core::vm::{Changes, DesiredVm, Nic, ObservedVm, Pci, ResolvedNames};

/// Keys of cards and PCI devices that do not exist yet.
const NEW_NIC_KEY: i32 = -100;
const NEW_PCI_KEY: i32 = -500;

/// The vCenter objects that the names in a spec stand for.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    /// In the order of the spec's network devices.
    pub networks: Vec<std::sync::Arc<Network>>,
    /// In the order of the spec's data disks: datastore and name, storage policy.
    pub disks: Vec<ResolvedDisk>,
    /// The storage policy of the VM.
    pub policy: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub struct ResolvedDisk {
    pub datastore: Option<capstan_vsphere::Datastore>,
    pub policy: Option<String>,
}

impl Resolved {
    /// Returns the part that the plan needs.
    pub fn names(&self) -> ResolvedNames {
        let networks = self.networks.iter();
        ResolvedNames {
            networks: networks.map(|network| backing_of_network(&network.backing)).collect(),
            policy: self.policy.clone(),
            disk_policies: self.disks.iter().map(|disk| disk.policy.clone()).collect(),
        }
    }
}

/// Returns the backing that a card on this network has; empty when vCenter may replace it by another.
fn backing_of_network(backing: &NetworkBacking) -> String {
    match backing {
        NetworkBacking::Standard { network, .. } => format!("network:{}", network.value()),
        NetworkBacking::Portgroup { portgroup_key, .. } => format!("portgroup:{portgroup_key}"),
        NetworkBacking::Opaque { .. } => String::new(),
    }
}

fn backing_of_nic(nic: &capstan_vsphere::Nic) -> String {
    match (&nic.portgroup_key, &nic.network) {
        (Some(key), _) => format!("portgroup:{key}"),
        (None, Some(network)) => format!("network:{}", network.value()),
        (None, None) => String::new(),
    }
}

/// Returns the observation of a VM that was read as a whole.
pub fn observe(info: &VmInfo) -> ObservedVm {
    let nics = info.devices.iter().filter_map(|device| {
        let nic = device.nic()?;
        Some(Nic {
            key: device.key,
            mac: nic.mac.clone(),
            backing: backing_of_nic(nic),
            connected: nic.connected,
        })
    });
    let volumes = info
        .devices
        .iter()
        .filter(|d| d.disk().is_some_and(|disk| disk.first_class_id.is_some()));
    let mut observed = ObservedVm {
        name: info.state.name.clone(),
        instance_uuid: info.instance_uuid.clone(),
        bios_uuid: info.bios_uuid.clone(),
        hardware: info.hardware(),
        volumes: volumes.map(|device| device.key).collect(),
        vmx_path: info.path.clone(),
        cpus: info.num_cpus,
        cores_per_socket: info.cores_per_socket,
        memory_mib: info.memory_mib,
        cpu_allocation: info.cpu_allocation,
        memory_allocation: info.memory_allocation,
        nested_hv: info.nested_hv,
        nics: nics.collect(),
        pci_devices: info
            .devices
            .iter()
            .filter(|d| matches!(d.kind, DeviceKind::PciPassthrough))
            .count(),
        extra_config: info.extra_config.iter().cloned().collect(),
        ..ObservedVm::new(info.reference.clone())
    };
    observed.unreadable = unreadable(info);
    update(&mut observed, &info.state);
    observed
}

/// Returns why vCenter cannot read the configuration of a VM. The configuration of a VM whose storage is away, or that its
/// host does not know any more, is unset.
pub fn unreadable(info: &VmInfo) -> Option<String> {
    let is_read = !info.instance_uuid.is_empty() && !info.path.is_empty();
    let connection = info.state.connection.as_str();
    let away = matches!(connection, "inaccessible" | "orphaned" | "invalid");
    (!is_read || away).then(|| {
        let why = if away {
            format!("the VM is {connection}")
        } else {
            "check that the account may read it".to_owned()
        };
        format!("vCenter cannot read the configuration of {}: {why}", info.reference)
    })
}

/// Updates the part of an observation that changes by itself.
pub fn update(observed: &mut ObservedVm, state: &VmRuntime) {
    observed.power = state.power;
    observed.tools_running = state.tools_running;
    observed.host = state.host.as_ref().map(ToString::to_string);
    observed.guest = state.nics.clone();
}

/// Returns the device changes that add controllers and disks, for clones and reconfigurations.
pub fn add_disks(
    desired: &DesiredVm,
    resolved: &Resolved,
    controllers: &[NewController],
    placements: &[Placement],
    with_policies: bool,
) -> Vec<DeviceChange> {
    let controllers = controllers.iter().map(|c| DeviceChange::AddController {
        key: c.key,
        kind: c.kind,
        bus: c.bus,
    });
    let disks = placements.iter().filter_map(|placement| {
        let disk = desired.disks.get(placement.index)?;
        let place = resolved.disks.get(placement.index).cloned().unwrap_or_default();
        let flags = backing_flags(disk.mode);
        Some(DeviceChange::AddDisk(NewDisk {
            key: placement.key,
            controller_key: placement.controller_key,
            unit: placement.unit,
            capacity_kib: disk.capacity_kib(),
            thin_provisioned: flags.thin_provisioned,
            eagerly_scrub: flags.eagerly_scrub,
            datastore: place.datastore.as_ref().map(|datastore| datastore.reference.clone()),
            datastore_name: place.datastore.as_ref().map(|datastore| datastore.name.clone()),
            storage_policy: place.policy.filter(|_| with_policies),
        }))
    });
    controllers.chain(disks).collect()
}

/// Returns the device changes that replace all network cards by those of the spec.
pub fn replace_nics<'a>(
    desired: &DesiredVm,
    resolved: &Resolved,
    old: impl Iterator<Item = &'a Device>,
) -> Vec<DeviceChange> {
    let removed = old
        .filter(|device| device.nic().is_some())
        .map(|device| DeviceChange::Remove(device.clone()));
    let added = desired
        .networks
        .iter()
        .zip(&resolved.networks)
        .zip(0..)
        .map(|((device, network), index)| {
            DeviceChange::AddNic(NewNic {
                key: NEW_NIC_KEY - index,
                backing: network.backing.clone(),
                mac: device.mac.clone(),
            })
        });
    removed.chain(added).collect()
}

fn add_pci(desired: &DesiredVm) -> Vec<DeviceChange> {
    let changes = desired.pci.iter().zip(0..).map(|(pci, index)| {
        let key = NEW_PCI_KEY - index;
        DeviceChange::AddPci(match pci {
            Pci::VGpu { profile } => NewPci::Vgpu {
                key,
                profile: profile.clone(),
            },
            Pci::Device { vendor, device, label } => NewPci::Dynamic {
                key,
                vendor_id: *vendor,
                device_id: *device,
                label: label.clone().unwrap_or_default(),
            },
        })
    });
    changes.collect()
}

/// Returns the reconfiguration that makes these changes on a VM with these devices.
pub fn reconfiguration(desired: &DesiredVm, resolved: &Resolved, changes: &Changes, devices: &[Device]) -> ConfigSpec {
    let mut all = Vec::new();
    let of = |key: i32| devices.iter().find(|device| device.key == key);
    let grown = changes.grow.iter().map(|(key, _)| *key);
    let edited: BTreeSet<i32> = grown.chain(changes.disk_policies.iter().map(|(key, _)| *key)).collect();
    for device in edited.into_iter().filter_map(of) {
        let size = changes.grow.iter().find(|(key, _)| *key == device.key);
        let policy = changes.disk_policies.iter().find(|(key, _)| *key == device.key);
        all.push(DeviceChange::EditDisk {
            device: device.clone(),
            capacity_kib: size.map(|(_, capacity_kib)| *capacity_kib),
            storage_policy: policy.map(|(_, policy)| policy.clone()),
        });
    }
    all.extend(add_disks(
        desired,
        resolved,
        &changes.add_controllers,
        &changes.add_disks,
        true,
    ));
    if !changes.add_nics.is_empty() || !changes.remove_nics.is_empty() {
        all.extend(replace_nics(desired, resolved, devices.iter()));
    }
    if changes.add_pci {
        all.extend(add_pci(desired));
    }
    let config = ConfigSpec {
        num_cpus: changes.cpus,
        cores_per_socket: changes.cores_per_socket,
        memory_mib: changes.memory_mib,
        memory_reservation_locked: changes.add_pci.then_some(true),
        disk_uuid_enabled: Some(true),
        storage_policy: changes.policy.clone(),
        devices: all,
        extra_config: changes.extra_config.clone().into_iter().collect(),
        ..ConfigSpec::default()
    };
    with_settings(desired, config)
}

/// Adds the settings that are neither devices nor extraConfig keys.
pub fn with_settings(desired: &DesiredVm, config: ConfigSpec) -> ConfigSpec {
    ConfigSpec {
        cpu_allocation: desired.cpu_allocation,
        memory_allocation: desired.memory_allocation,
        nested_hv: desired.nested_hv,
        migrate_encryption: desired.migrate_encryption.clone(),
        ft_encryption: desired.ft_encryption.clone(),
        ..config
    }
}
