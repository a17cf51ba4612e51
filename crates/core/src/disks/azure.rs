//! Data disks of Azure machines: their names, their ranges, and whether the machine needs the Ultra capability.

use capstan_api::disk::StorageAccountType;
use capstan_api::openshift::{AzureMachineProviderSpec, UltraSsdCapability};

/// Azure's limit on a managed disk's name.
pub const MAX_NAME: usize = 80;
/// LUNs of a virtual machine are below this.
pub const MAX_LUN: i32 = 64;
/// What Azure answers, word for word, to an Ultra disk on a machine that has the capability switched off.
pub const CAPABILITY_CONFLICT: &str =
    "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.";
pub const CAPABILITY_CONFLICT_TARGET: &str = "managedDisk.storageAccountType";

/// The OS disk is named as a data disk with this suffix would be.
pub const OS_DISK_SUFFIX: &str = "OSDisk";

/// The name of a machine's data disk.
pub fn disk_name(machine: &str, name_suffix: &str) -> String {
    format!("{machine}_{name_suffix}")
}

/// The first generation of sizes that attach disks by NVMe and not by SCSI.
const FIRST_WITHOUT_SCSI: u32 = 6;

/// Whether a size attaches disks by NVMe only, as far as its name shows: `Standard_D4ds_v6`. Azure's catalogue says so for
/// certain.
pub fn is_nvme_only_by_name(size: &str) -> bool {
    let generation = size.rsplit('_').next().unwrap_or_default();
    let generation = generation
        .strip_prefix(['v', 'V'])
        .and_then(|number| number.parse().ok());
    generation.is_some_and(|generation: u32| generation >= FIRST_WITHOUT_SCSI)
}

/// Starts and ends with a letter or digit; between them also `_`, `.` and `-`.
pub fn is_name_suffix(suffix: &str) -> bool {
    let bytes = suffix.as_bytes();
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    ends(bytes.first())
        && ends(bytes.last())
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(byte))
}

/// What `additionalCapabilities.ultraSSDEnabled` is to be: as asked for, or on when a data disk needs it, or not sent.
pub fn ultra_enabled(spec: &AzureMachineProviderSpec) -> Option<bool> {
    match &spec.ultra_ssd_capability {
        Some(UltraSsdCapability::Enabled) => Some(true),
        Some(UltraSsdCapability::Disabled) => Some(false),
        _ => has_ultra_disk(spec).then_some(true),
    }
}

pub fn has_ultra_disk(spec: &AzureMachineProviderSpec) -> bool {
    spec.data_disks
        .iter()
        .any(|disk| disk.managed_disk.storage_account_type.as_ref() == Some(&StorageAccountType::UltraSsdLrs))
}

/// An Ultra disk on a machine that says Disabled: Azure would refuse it, so nothing is made.
pub fn capability_conflict(spec: &AzureMachineProviderSpec) -> bool {
    ultra_enabled(spec) == Some(false) && has_ultra_disk(spec)
}

/// Said before anything is made when the size has no Ultra support in the machine's zone or region.
pub fn ultra_unsupported(vm_size: &str, location: &str) -> String {
    format!(
        "vm size {vm_size} does not support ultra disks in location {location}. select a different vm size or disable ultra disks"
    )
}

/// Sizes in GiB that Azure makes of a kind of disk, lowest and highest.
pub fn size_range(kind: &StorageAccountType) -> (i32, i32) {
    match kind {
        StorageAccountType::UltraSsdLrs => (4, 65_536),
        StorageAccountType::PremiumV2Lrs => (1, 65_536),
        _ => (1, 32_767),
    }
}

/// IOPS that a disk of this kind and size can be given, or nothing where the kind takes none.
pub fn iops_range(kind: &StorageAccountType, size_gb: i32) -> Option<(i64, i64)> {
    let size = i64::from(size_gb.max(0));
    match kind {
        StorageAccountType::UltraSsdLrs => Some((100, (1_000 * size).clamp(100, 400_000))),
        StorageAccountType::PremiumV2Lrs => Some((3_000, (500 * size).clamp(3_000, 80_000))),
        _ => None,
    }
}

/// MB/s that a disk of this kind with that many IOPS can be given. Azure allows a quarter of an MB/s per IOPS.
pub fn mbps_range(kind: &StorageAccountType, iops: i64) -> Option<(i64, i64)> {
    match kind {
        StorageAccountType::UltraSsdLrs => Some((1, (iops / 4).clamp(1, 10_000))),
        StorageAccountType::PremiumV2Lrs => Some((125, (iops / 4).clamp(125, 2_000))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_api::openshift::DataDisk;
    use rstest::rstest;

    fn spec(capability: Option<UltraSsdCapability>, kind: Option<StorageAccountType>) -> AzureMachineProviderSpec {
        let mut disk = DataDisk::default();
        disk.managed_disk.storage_account_type = kind;
        AzureMachineProviderSpec {
            ultra_ssd_capability: capability,
            data_disks: vec![DataDisk::default(), disk],
            ..Default::default()
        }
    }

    #[rstest]
    #[case(Some(UltraSsdCapability::Enabled), None, Some(true), false)]
    #[case(
        Some(UltraSsdCapability::Enabled),
        Some(StorageAccountType::UltraSsdLrs),
        Some(true),
        false
    )]
    #[case(Some(UltraSsdCapability::Disabled), None, Some(false), false)]
    #[case(
        Some(UltraSsdCapability::Disabled),
        Some(StorageAccountType::UltraSsdLrs),
        Some(false),
        true
    )]
    #[case(None, Some(StorageAccountType::UltraSsdLrs), Some(true), false)]
    #[case(None, Some(StorageAccountType::PremiumLrs), None, false)]
    #[case(None, None, None, false)]
    #[case(
        Some(UltraSsdCapability::Other(String::new())),
        Some(StorageAccountType::UltraSsdLrs),
        Some(true),
        false
    )]
    fn the_capability_follows_the_three_cases(
        #[case] capability: Option<UltraSsdCapability>,
        #[case] kind: Option<StorageAccountType>,
        #[case] enabled: Option<bool>,
        #[case] conflict: bool,
    ) {
        let spec = spec(capability, kind);
        assert_eq!((ultra_enabled(&spec), capability_conflict(&spec)), (enabled, conflict));
    }

    #[rstest]
    #[case("a", true)]
    #[case("ultra.ssd_1-x", true)]
    #[case("", false)]
    #[case("-a", false)]
    #[case("a.", false)]
    #[case("a b", false)]
    #[case("ä", false)]
    fn suffixes_follow_the_proposals_pattern(#[case] suffix: &str, #[case] ok: bool) {
        assert_eq!(is_name_suffix(suffix), ok);
    }

    #[rstest]
    #[case(StorageAccountType::UltraSsdLrs, 4, Some((100, 4_000)))]
    #[case(StorageAccountType::UltraSsdLrs, 65_536, Some((100, 400_000)))]
    #[case(StorageAccountType::PremiumV2Lrs, 4, Some((3_000, 3_000)))]
    #[case(StorageAccountType::PremiumV2Lrs, 1_024, Some((3_000, 80_000)))]
    #[case(StorageAccountType::PremiumLrs, 4, None)]
    fn iops_follow_azures_ranges(
        #[case] kind: StorageAccountType,
        #[case] size: i32,
        #[case] range: Option<(i64, i64)>,
    ) {
        assert_eq!(iops_range(&kind, size), range);
    }
}
