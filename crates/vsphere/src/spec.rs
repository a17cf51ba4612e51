//! What a clone or a reconfiguration asks for. Elements are written in the order that vim25 declares them.

use capstan_core::disks::vsphere::ControllerKind;

use crate::device::{Device, controller_type};
use crate::inventory::NetworkBacking;
use crate::xml::{Element, Writer};
use capstan_core::vm::{Allocation, MoRef};

/// How the disks of a clone relate to those of its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskMove {
    /// Full copies, without backing chain.
    #[default]
    Full,
    /// Deltas on the source's snapshot.
    Linked,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloneSpec {
    pub datastore: Option<MoRef>,
    pub disk_move: DiskMove,
    pub pool: Option<MoRef>,
    pub host: Option<MoRef>,
    /// Where single disks go, by key, when not to `datastore`.
    pub disk_locations: Vec<DiskLocation>,
    pub snapshot: Option<MoRef>,
    pub config: ConfigSpec,
    pub power_on: bool,
    pub template: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskLocation {
    pub key: i32,
    pub datastore: MoRef,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigSpec {
    pub name: Option<String>,
    pub version: Option<String>,
    pub bios_uuid: Option<String>,
    pub instance_uuid: Option<String>,
    pub guest_id: Option<String>,
    pub annotation: Option<String>,
    /// Whether the guest sees disk UUIDs as serial numbers.
    pub disk_uuid_enabled: Option<bool>,
    pub num_cpus: Option<i32>,
    pub cores_per_socket: Option<i32>,
    pub memory_mib: Option<i64>,
    pub memory_reservation_locked: Option<bool>,
    /// In MHz.
    pub cpu_allocation: Allocation,
    /// In MiB.
    pub memory_allocation: Allocation,
    pub nested_hv: Option<bool>,
    pub migrate_encryption: Option<String>,
    pub ft_encryption: Option<String>,
    /// Takes away what an OVF left behind, which a guest may prefer to its guestinfo.
    pub vapp_config_removed: Option<bool>,
    pub devices: Vec<DeviceChange>,
    pub extra_config: Vec<(String, String)>,
    pub storage_policy: Option<String>,
}

pub(crate) fn read_allocation(element: &Element) -> Allocation {
    Allocation {
        reservation: element.number_at("reservation"),
        limit: element.number_at("limit"),
        shares: element.number_at("shares.shares"),
    }
}

fn write_allocation(w: &mut Writer, name: &str, allocation: &Allocation) {
    if *allocation == Allocation::default() {
        return;
    }
    w.nest(name, |w| {
        w.opt("reservation", allocation.reservation)
            .opt("limit", allocation.limit);
        if let Some(shares) = allocation.shares {
            w.nest("shares", |w| {
                w.value("shares", shares).text("level", "custom");
            });
        }
    });
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    AddDisk(NewDisk),
    /// A disk that exists already, by its path (`[datastore] folder/name.vmdk`).
    AttachDisk {
        key: i32,
        controller_key: i32,
        unit: i32,
        path: String,
    },
    /// A disk that exists, with another size or another storage policy.
    EditDisk {
        device: Device,
        capacity_kib: Option<i64>,
        storage_policy: Option<String>,
    },
    AddController {
        key: i32,
        kind: ControllerKind,
        bus: i32,
    },
    AddNic(NewNic),
    /// A PCI device of the host, by its ids, or a vGPU by its profile.
    AddPci(NewPci),
    /// Takes a device away; files stay (a detached disk lives on).
    Remove(Device),
    /// Takes a disk away and deletes its files.
    RemoveAndDelete(Device),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewDisk {
    /// Negative: vCenter gives the true one.
    pub key: i32,
    pub controller_key: i32,
    pub unit: i32,
    pub capacity_kib: i64,
    pub thin_provisioned: Option<bool>,
    pub eagerly_scrub: Option<bool>,
    /// `None`: with the machine.
    pub datastore: Option<MoRef>,
    /// The name of `datastore`, which the file name needs (`[name] `).
    pub datastore_name: Option<String>,
    pub storage_policy: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewNic {
    pub key: i32,
    pub backing: NetworkBacking,
    /// `None`: generated.
    pub mac: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewPci {
    Dynamic {
        key: i32,
        vendor_id: i32,
        device_id: i32,
        label: String,
    },
    Vgpu {
        key: i32,
        profile: String,
    },
}

impl CloneSpec {
    pub(crate) fn write(&self, w: &mut Writer) {
        w.nest("spec", |w| {
            w.nest("location", |w| self.write_location(w));
            w.value("template", self.template);
            if self.config != ConfigSpec::default() {
                self.config.write(w, "config");
            }
            w.value("powerOn", self.power_on)
                .opt_moref("snapshot", self.snapshot.as_ref());
        });
    }

    fn write_location(&self, w: &mut Writer) {
        let disk_move = match self.disk_move {
            DiskMove::Full => "moveAllDiskBackingsAndConsolidate",
            DiskMove::Linked => "createNewChildDiskBacking",
        };
        w.opt_moref("datastore", self.datastore.as_ref())
            .text("diskMoveType", disk_move);
        w.opt_moref("pool", self.pool.as_ref())
            .opt_moref("host", self.host.as_ref());
        for disk in &self.disk_locations {
            w.nest("disk", |w| {
                // What a disk's own entry leaves out does not come from the whole's: it would be copied.
                w.value("diskId", disk.key)
                    .moref("datastore", &disk.datastore)
                    .text("diskMoveType", disk_move);
            });
        }
    }
}

impl ConfigSpec {
    pub(crate) fn write(&self, w: &mut Writer, name: &str) {
        w.nest(name, |w| {
            w.opt("name", self.name.as_ref())
                .opt("version", self.version.as_ref())
                .opt("uuid", self.bios_uuid.as_ref())
                .opt("instanceUuid", self.instance_uuid.as_ref())
                .opt("guestId", self.guest_id.as_ref())
                .opt("annotation", self.annotation.as_ref());
            if let Some(enabled) = self.disk_uuid_enabled {
                w.nest("flags", |w| {
                    w.value("diskUuidEnabled", enabled);
                });
            }
            w.opt("numCPUs", self.num_cpus)
                .opt("numCoresPerSocket", self.cores_per_socket)
                .opt("memoryMB", self.memory_mib);
            for change in &self.devices {
                change.write(w);
            }
            write_allocation(w, "cpuAllocation", &self.cpu_allocation);
            write_allocation(w, "memoryAllocation", &self.memory_allocation);
            for (key, value) in &self.extra_config {
                w.nest_as("extraConfig", "OptionValue", |w| {
                    w.text("key", key).typed_text("value", "string", value);
                });
            }
            w.opt("vAppConfigRemoved", self.vapp_config_removed)
                .opt("memoryReservationLockedToMax", self.memory_reservation_locked)
                .opt("nestedHVEnabled", self.nested_hv);
            write_profile(w, "vmProfile", self.storage_policy.as_deref());
            w.opt("migrateEncryption", self.migrate_encryption.as_ref())
                .opt("ftEncryptionMode", self.ft_encryption.as_ref());
        });
    }
}

fn write_profile(w: &mut Writer, name: &str, policy: Option<&str>) {
    if let Some(policy) = policy {
        w.nest_as(name, "VirtualMachineDefinedProfileSpec", |w| {
            w.text("profileId", policy);
        });
    }
}

impl DeviceChange {
    fn write(&self, w: &mut Writer) {
        w.nest_as("deviceChange", "VirtualDeviceConfigSpec", |w| match self {
            Self::AddDisk(disk) => {
                w.text("operation", "add").text("fileOperation", "create");
                disk.write(w);
                write_profile(w, "profile", disk.storage_policy.as_deref());
            }
            Self::AttachDisk {
                key,
                controller_key,
                unit,
                path,
            } => {
                w.text("operation", "add").nest_as("device", "VirtualDisk", |w| {
                    w.value("key", key)
                        .nest_as("backing", "VirtualDiskFlatVer2BackingInfo", |w| {
                            w.text("fileName", path).text("diskMode", "independent_persistent");
                        })
                        .value("controllerKey", controller_key)
                        .value("unitNumber", unit)
                        .value("capacityInKB", 0);
                });
            }
            Self::EditDisk {
                device,
                capacity_kib,
                storage_policy,
            } => {
                w.text("operation", "edit")
                    .element_named("device", &resized(&device.raw, *capacity_kib));
                write_profile(w, "profile", storage_policy.as_deref());
            }
            Self::AddController { key, kind, bus } => {
                w.text("operation", "add");
                write_controller(w, *key, *kind, *bus);
            }
            Self::AddNic(nic) => {
                w.text("operation", "add");
                nic.write(w);
            }
            Self::AddPci(pci) => {
                w.text("operation", "add");
                pci.write(w);
            }
            Self::Remove(device) => {
                w.text("operation", "remove").element_named("device", &device.raw);
            }
            Self::RemoveAndDelete(device) => {
                w.text("operation", "remove")
                    .text("fileOperation", "destroy")
                    .element_named("device", &device.raw);
            }
        });
    }
}

/// The device as vCenter reported it, with another capacity.
fn resized(raw: &Element, capacity_kib: Option<i64>) -> Element {
    let mut device = raw.clone();
    let Some(capacity_kib) = capacity_kib else {
        return device;
    };
    for child in &mut device.children {
        match child.name.as_str() {
            "capacityInKB" => child.text = capacity_kib.to_string(),
            "capacityInBytes" => child.text = capacity_kib.saturating_mul(1024).to_string(),
            _ => {}
        }
    }
    device
}

impl NewDisk {
    fn write(&self, w: &mut Writer) {
        w.nest_as("device", "VirtualDisk", |w| {
            w.value("key", self.key);
            w.nest_as("backing", "VirtualDiskFlatVer2BackingInfo", |w| {
                let file = self
                    .datastore_name
                    .as_ref()
                    .map(|name| format!("[{name}]"))
                    .unwrap_or_default();
                w.text("fileName", file)
                    .opt_moref("datastore", self.datastore.as_ref())
                    .text("diskMode", "persistent")
                    .opt("thinProvisioned", self.thin_provisioned)
                    .opt("eagerlyScrub", self.eagerly_scrub);
            });
            w.value("controllerKey", self.controller_key)
                .value("unitNumber", self.unit)
                .value("capacityInKB", self.capacity_kib);
        });
    }
}

fn write_controller(w: &mut Writer, key: i32, kind: ControllerKind, bus: i32) {
    w.nest_as("device", controller_type(kind), |w| {
        w.value("key", key).value("busNumber", bus);
        if let Some(own) = kind.own_unit() {
            w.value("hotAddRemove", true)
                .text("sharedBus", "noSharing")
                .value("scsiCtlrUnitNumber", own);
        }
    });
}

impl NewNic {
    fn write(&self, w: &mut Writer) {
        w.nest_as("device", "VirtualVmxnet3", |w| {
            w.value("key", self.key);
            self.backing.write(w);
            w.nest("connectable", |w| {
                w.value("startConnected", true)
                    .value("allowGuestControl", true)
                    .value("connected", true);
            });
            w.text("addressType", if self.mac.is_some() { "manual" } else { "generated" });
            w.opt("macAddress", self.mac.as_ref());
        });
    }
}

impl NewPci {
    fn write(&self, w: &mut Writer) {
        let key = match self {
            Self::Dynamic { key, .. } | Self::Vgpu { key, .. } => *key,
        };
        w.nest_as("device", "VirtualPCIPassthrough", |w| {
            w.value("key", key);
            match self {
                Self::Dynamic {
                    vendor_id,
                    device_id,
                    label,
                    ..
                } => {
                    w.nest_as("backing", "VirtualPCIPassthroughDynamicBackingInfo", |w| {
                        w.text("deviceName", "").nest("allowedDevice", |w| {
                            w.value("vendorId", vendor_id).value("deviceId", device_id);
                        });
                        if !label.is_empty() {
                            w.text("customLabel", label);
                        }
                    });
                }
                Self::Vgpu { profile, .. } => {
                    w.nest_as("backing", "VirtualPCIPassthroughVmiopBackingInfo", |w| {
                        w.text("vgpu", profile);
                    });
                }
            }
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(DiskMove::Linked, "createNewChildDiskBacking")]
    #[case(DiskMove::Full, "moveAllDiskBackingsAndConsolidate")]
    fn every_disk_is_moved_as_the_clone_as_a_whole(#[case] disk_move: DiskMove, #[case] word: &str) {
        let store = MoRef::new("Datastore", "datastore-1");
        let spec = CloneSpec {
            datastore: Some(store.clone()),
            disk_move,
            disk_locations: [2000, 2001]
                .map(|key| DiskLocation {
                    key,
                    datastore: store.clone(),
                })
                .into(),
            ..CloneSpec::default()
        };
        let mut w = Writer::new();
        spec.write(&mut w);
        let tree = Element::parse(&w.finish()).unwrap();
        let location = tree.child("location").unwrap();
        assert_eq!(location.text_at("diskMoveType"), Some(word));
        let names = |element: &Element| element.children.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(location), ["datastore", "diskMoveType", "disk", "disk"]);
        for disk in location.all("disk") {
            assert_eq!(names(disk), ["diskId", "datastore", "diskMoveType"]);
            assert_eq!(disk.text_at("diskMoveType"), Some(word));
        }
    }

    #[test]
    fn settings_are_written_in_the_order_that_vim25_declares() {
        let config = ConfigSpec {
            num_cpus: Some(4),
            cpu_allocation: Allocation {
                reservation: Some(500),
                limit: Some(4000),
                shares: None,
            },
            memory_allocation: Allocation {
                shares: Some(2000),
                ..Allocation::default()
            },
            extra_config: vec![("a".into(), "b".into())],
            vapp_config_removed: Some(true),
            memory_reservation_locked: Some(true),
            nested_hv: Some(true),
            storage_policy: Some("p".into()),
            migrate_encryption: Some("required".into()),
            ft_encryption: Some("ftEncryptionRequired".into()),
            ..ConfigSpec::default()
        };
        let mut w = Writer::new();
        config.write(&mut w, "config");
        let tree = Element::parse(&w.finish()).unwrap();
        let names: Vec<&str> = tree.children.iter().map(|child| child.name.as_str()).collect();
        let expected = [
            "numCPUs",
            "cpuAllocation",
            "memoryAllocation",
            "extraConfig",
            "vAppConfigRemoved",
            "memoryReservationLockedToMax",
            "nestedHVEnabled",
            "vmProfile",
            "migrateEncryption",
            "ftEncryptionMode",
        ];
        assert_eq!(names, expected);
        let cpu = tree.child("cpuAllocation").unwrap();
        assert_eq!(
            (cpu.text_at("reservation"), cpu.text_at("limit")),
            (Some("500"), Some("4000"))
        );
        assert_eq!(tree.text_at("memoryAllocation.shares.level"), Some("custom"));
    }
}
