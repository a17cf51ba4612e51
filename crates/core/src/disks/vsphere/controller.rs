//! Disk controllers and their true limits.

use std::fmt;

/// The type of a disk controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ControllerKind {
    /// `ParaVirtualSCSIController`
    ParaVirtual,
    /// `VirtualLsiLogicController`
    LsiLogic,
    /// `VirtualLsiLogicSASController`
    LsiLogicSas,
    /// `VirtualBusLogicController`
    BusLogic,
    /// `VirtualAHCIController`
    Sata,
    /// `VirtualNVMEController`
    Nvme,
    /// `VirtualIDEController`
    Ide,
}

/// Controllers of one family share bus numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    Scsi,
    Sata,
    Nvme,
    Ide,
}

/// The unit that a SCSI controller takes for itself.
const SCSI_OWN_UNIT: i32 = 7;

impl ControllerKind {
    pub const ALL: [Self; 7] = [
        Self::ParaVirtual,
        Self::LsiLogic,
        Self::LsiLogicSas,
        Self::BusLogic,
        Self::Sata,
        Self::Nvme,
        Self::Ide,
    ];

    pub fn family(self) -> Family {
        match self {
            Self::ParaVirtual | Self::LsiLogic | Self::LsiLogicSas | Self::BusLogic => Family::Scsi,
            Self::Sata => Family::Sata,
            Self::Nvme => Family::Nvme,
            Self::Ide => Family::Ide,
        }
    }

    /// How many units there are, the controller's own included. What vSphere publishes is how many disks a SCSI controller
    /// takes beside itself: 15, and 64 on PVSCSI, which makes 256 on the four that a machine can have.
    pub fn units(self, hardware_version: u32) -> i32 {
        match self {
            Self::ParaVirtual if hardware_version >= 14 => 65,
            Self::ParaVirtual | Self::LsiLogic | Self::LsiLogicSas | Self::BusLogic => 16,
            Self::Sata => 30,
            Self::Nvme if hardware_version >= 21 => 64,
            Self::Nvme => 15,
            Self::Ide => 2,
        }
    }

    /// The hardware version from which there are more units than now, and how many.
    pub fn more_units_from(self, hardware_version: u32) -> Option<(u32, i32)> {
        let from = match self {
            Self::ParaVirtual => 14,
            Self::Nvme => 21,
            _ => return None,
        };
        (hardware_version < from).then(|| (from, self.units(from)))
    }

    /// How many controllers of the family a VM can have.
    pub fn buses(self) -> i32 {
        match self.family() {
            Family::Scsi | Family::Sata | Family::Nvme => 4,
            Family::Ide => 2,
        }
    }

    /// The hardware version that knows this type.
    pub fn since(self) -> u32 {
        match self {
            Self::ParaVirtual | Self::LsiLogicSas => 7,
            Self::Sata => 10,
            Self::Nvme => 13,
            Self::LsiLogic | Self::BusLogic | Self::Ide => 0,
        }
    }

    /// The unit that a new controller of this type takes for itself.
    pub fn own_unit(self) -> Option<i32> {
        (self.family() == Family::Scsi).then_some(SCSI_OWN_UNIT)
    }
}

impl fmt::Display for ControllerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ParaVirtual => "PVSCSI",
            Self::LsiLogic => "LSI Logic SCSI",
            Self::LsiLogicSas => "LSI Logic SAS",
            Self::BusLogic => "BusLogic SCSI",
            Self::Sata => "SATA",
            Self::Nvme => "NVMe",
            Self::Ide => "IDE",
        })
    }
}

/// A controller that a template or VM has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Controller {
    pub key: i32,
    pub kind: ControllerKind,
    pub bus: i32,
    /// The unit that it takes for itself, as vCenter reports it.
    pub own_unit: Option<i32>,
    /// Where it sits on the PCI bus, once vCenter has said so.
    pub pci_slot: Option<i32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(ControllerKind::LsiLogic, 19, 16)]
    #[case(ControllerKind::LsiLogicSas, 19, 16)]
    #[case(ControllerKind::BusLogic, 19, 16)]
    #[case(ControllerKind::ParaVirtual, 13, 16)]
    #[case(ControllerKind::ParaVirtual, 14, 65)]
    #[case(ControllerKind::Sata, 19, 30)]
    #[case(ControllerKind::Nvme, 20, 15)]
    #[case(ControllerKind::Nvme, 21, 64)]
    #[case(ControllerKind::Ide, 21, 2)]
    fn limits_are_those_of_the_type_and_hardware_version(
        #[case] kind: ControllerKind,
        #[case] version: u32,
        #[case] units: i32,
    ) {
        assert_eq!(kind.units(version), units);
    }
}
