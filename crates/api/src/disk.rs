//! Words about Azure disks that machines and pools share.

string_enum! {
    /// How the host caches a disk.
    pub enum CachingType {
        None = "None",
        ReadOnly = "ReadOnly",
        ReadWrite = "ReadWrite",
    }
}

string_enum! {
    /// What a managed disk is made of. Azure adds kinds from time to time, so any name is let through.
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
    /// What becomes of a data disk when its machine goes.
    pub enum DeletionPolicy {
        Delete = "Delete",
        Detach = "Detach",
    }
}

impl StorageAccountType {
    /// Ultra and Premium v2 disks take IOPS and MB/s of their own, and no host caching.
    pub fn is_provisioned(&self) -> bool {
        matches!(self, Self::UltraSsdLrs | Self::PremiumV2Lrs)
    }
}
