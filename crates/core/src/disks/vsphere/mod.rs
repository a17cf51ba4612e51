//! Data disks of vSphere machines: which unit of which controller each one gets, whether vCenter did what the request said,
//! and how the guest finds them again.
//!
//! Kept here: a disk never shares a unit with anything else, never sits on a controller's own unit, and a unit that the
//! controller of that type and hardware version does not have is never given out. All of it is decided before the clone.

mod allocate;
mod compare;
mod controller;
mod from_api;
mod list;

pub use allocate::{Allocation, NewController, Placement, Problem, Problems, allocate};
pub use compare::{Deviation, compare};
pub use controller::{Controller, ControllerKind};
pub use list::{Entry, GUESTINFO_KEY, Listed, by_path, document, list, predicted_by_path, wwn};

/// KiB in a GiB.
pub const KIB_PER_GIB: i64 = 1024 * 1024;

/// How the blocks of a new disk are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProvisioningMode {
    Thin,
    Thick,
    EagerlyZeroed,
}

/// The flags of a new disk's backing; `None` is not sent, so that the storage policy decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackingFlags {
    pub thin_provisioned: Option<bool>,
    pub eagerly_scrub: Option<bool>,
}

/// The backing flags that stand for a mode.
pub fn backing_flags(mode: Option<ProvisioningMode>) -> BackingFlags {
    match mode {
        None => BackingFlags::default(),
        Some(ProvisioningMode::Thin) => BackingFlags {
            thin_provisioned: Some(true),
            eagerly_scrub: None,
        },
        Some(ProvisioningMode::Thick) => BackingFlags {
            thin_provisioned: Some(false),
            eagerly_scrub: None,
        },
        Some(ProvisioningMode::EagerlyZeroed) => BackingFlags {
            thin_provisioned: Some(false),
            eagerly_scrub: Some(true),
        },
    }
}

/// Which controller a data disk asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerChoice {
    /// Without one, the kind that the primary disk sits on.
    pub kind: Option<ControllerKind>,
    /// The bus number; without one, the first controller of that kind, or a new one on the first free bus.
    pub bus: Option<i32>,
}

/// One entry of `dataDisks`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataDisk {
    pub name: String,
    pub size_gib: i64,
    pub mode: Option<ProvisioningMode>,
    pub controller: Option<ControllerChoice>,
    pub unit: Option<i32>,
    pub datastore: Option<String>,
    pub storage_policy: Option<String>,
}

impl DataDisk {
    pub fn capacity_kib(&self) -> i64 {
        self.size_gib.saturating_mul(KIB_PER_GIB)
    }
}

/// A device that sits on a controller: a disk, or something else that takes up a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub key: i32,
    pub controller_key: i32,
    pub unit: Option<i32>,
    /// Set for disks only.
    pub disk: Option<Disk>,
}

/// What is known of a virtual disk that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub capacity_kib: i64,
    /// `[datastore] folder/name.vmdk`.
    pub path: String,
    /// The UUID that the guest sees as the disk's serial number.
    pub uuid: String,
}

/// The devices of a template or VM that matter for disks, in the order in which vCenter lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// The number in `vmx-19`.
    pub version: u32,
    pub controllers: Vec<Controller>,
    pub devices: Vec<Device>,
}

impl Hardware {
    /// The first disk: the one that the system boots from.
    pub fn primary(&self) -> Option<&Device> {
        self.devices.iter().find(|device| device.disk.is_some())
    }

    pub fn controller(&self, key: i32) -> Option<&Controller> {
        self.controllers.iter().find(|controller| controller.key == key)
    }

    /// The disk at a unit of the controller with this family and bus.
    pub fn disk_at(&self, kind: ControllerKind, bus: i32, unit: i32) -> Option<&Device> {
        let keys: Vec<i32> = self
            .controllers
            .iter()
            .filter(|c| c.kind.family() == kind.family() && c.bus == bus)
            .map(|c| c.key)
            .collect();
        self.devices
            .iter()
            .find(|d| d.disk.is_some() && keys.contains(&d.controller_key) && d.unit == Some(unit))
    }
}

/// The number in a hardware version such as `vmx-19`; nothing for anything else.
pub fn hardware_version(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("vmx-")?;
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(None, None, None)]
    #[case(Some(ProvisioningMode::Thin), Some(true), None)]
    #[case(Some(ProvisioningMode::Thick), Some(false), None)]
    #[case(Some(ProvisioningMode::EagerlyZeroed), Some(false), Some(true))]
    fn a_mode_stands_for_backing_flags(
        #[case] mode: Option<ProvisioningMode>,
        #[case] thin: Option<bool>,
        #[case] scrub: Option<bool>,
    ) {
        assert_eq!(
            backing_flags(mode),
            BackingFlags {
                thin_provisioned: thin,
                eagerly_scrub: scrub
            }
        );
    }

    #[rstest]
    #[case("vmx-19", Some(19))]
    #[case("vmx-07", Some(7))]
    #[case("vmx-", None)]
    #[case("19", None)]
    #[case("vmx-1a", None)]
    #[case("vmx--1", None)]
    #[case("vmx-99999999999999", None)]
    fn hardware_versions_are_read(#[case] text: &str, #[case] version: Option<u32>) {
        assert_eq!(hardware_version(text), version);
    }
}
