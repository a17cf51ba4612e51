//! Enums of Azure disks that machines and pools share.

string_enum! {
    /// The host caching of a disk.
    pub enum CachingType {
        None = "None",
        ReadOnly = "ReadOnly",
        ReadWrite = "ReadWrite",
    }
}

string_enum! {
    /// The storage account type of a managed disk. Azure adds types from time to time, so the schema allows any name.
    pub open enum StorageAccountType {
        StandardLrs = "Standard_LRS",
        StandardSsdLrs = "StandardSSD_LRS",
        StandardSsdZrs = "StandardSSD_ZRS",
        PremiumLrs = "Premium_LRS",
        PremiumZrs = "Premium_ZRS",
        PremiumV2Lrs = "PremiumV2_LRS",
        UltraSsdLrs = "UltraSSD_LRS",
    }
}

string_enum! {
    /// The action on a data disk when its machine is deleted.
    pub enum DeletionPolicy {
        Delete = "Delete",
        Detach = "Detach",
    }
}

impl StorageAccountType {
    /// Whether the disk is Ultra or Premium SSD v2. These take their own IOPS and MB/s, and no host caching.
    pub fn is_provisioned(&self) -> bool {
        matches!(self, Self::UltraSsdLrs | Self::PremiumV2Lrs)
    }
}
