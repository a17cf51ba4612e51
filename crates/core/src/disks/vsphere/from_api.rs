//! The only place where the API's form of a data disk becomes the domain's, so that another API version is one more `From`.

use capstan_api::vsphere::{ControllerType, DataDisk as ApiDisk, ProvisioningMode as ApiMode};

use super::{ControllerChoice, ControllerKind, DataDisk, ProvisioningMode};

impl From<&ApiDisk> for DataDisk {
    fn from(disk: &ApiDisk) -> Self {
        Self {
            name: disk.name.clone().unwrap_or_default(),
            size_gib: i64::from(disk.size_gib),
            mode: disk.provisioning_mode.as_ref().and_then(mode),
            controller: disk.controller.as_ref().map(|controller| ControllerChoice {
                kind: controller.type_.as_ref().and_then(kind),
                bus: controller.bus,
            }),
            unit: disk.unit_number,
            datastore: disk.datastore.clone(),
            storage_policy: disk.storage_policy_name.clone(),
        }
    }
}

fn mode(mode: &ApiMode) -> Option<ProvisioningMode> {
    match mode {
        ApiMode::Thin => Some(ProvisioningMode::Thin),
        ApiMode::Thick => Some(ProvisioningMode::Thick),
        ApiMode::EagerlyZeroed => Some(ProvisioningMode::EagerlyZeroed),
        ApiMode::Other(_) => None,
    }
}

fn kind(kind: &ControllerType) -> Option<ControllerKind> {
    match kind {
        ControllerType::Pvscsi => Some(ControllerKind::ParaVirtual),
        ControllerType::LsiLogic => Some(ControllerKind::LsiLogic),
        ControllerType::LsiLogicSas => Some(ControllerKind::LsiLogicSas),
        ControllerType::BusLogic => Some(ControllerKind::BusLogic),
        ControllerType::Sata => Some(ControllerKind::Sata),
        ControllerType::Nvme => Some(ControllerKind::Nvme),
        ControllerType::Ide => Some(ControllerKind::Ide),
        ControllerType::Other(_) => None,
    }
}
