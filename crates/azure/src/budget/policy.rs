//! Azure's published limits, as a table.

/// Whether a call changes something: writes go before reads when both wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Delete,
    Write,
    Read,
}

/// A token bucket's size: what refills in a minute, and what may go at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub per_minute: u32,
    pub burst: u32,
}

impl Limit {
    pub fn per_second(self) -> f64 {
        f64::from(self.per_minute) / 60.0
    }
}

const fn limit(per_minute: u32, burst: u32) -> Limit {
    Limit { per_minute, burst }
}

/// The group of calls that share a bucket at the resource provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    VmPut,
    VmGet,
    VmList,
    Operation,
    ScaleSetCreate,
    ScaleSetUpdate,
    ScaleSetDelete,
    ScaleSetGet,
    ScaleSetList,
    InstanceUpdate,
    InstanceGet,
    DiskWrite,
    DiskRead,
    NetworkWrite,
    NetworkRead,
    Other,
}

impl Policy {
    pub const ALL: [Policy; 16] = [
        Policy::VmPut,
        Policy::VmGet,
        Policy::VmList,
        Policy::Operation,
        Policy::ScaleSetCreate,
        Policy::ScaleSetUpdate,
        Policy::ScaleSetDelete,
        Policy::ScaleSetGet,
        Policy::ScaleSetList,
        Policy::InstanceUpdate,
        Policy::InstanceGet,
        Policy::DiskWrite,
        Policy::DiskRead,
        Policy::NetworkWrite,
        Policy::NetworkRead,
        Policy::Other,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Policy::VmPut => "vm-put",
            Policy::VmGet => "vm-get",
            Policy::VmList => "vm-list",
            Policy::Operation => "operation",
            Policy::ScaleSetCreate => "scale-set-create",
            Policy::ScaleSetUpdate => "scale-set-update",
            Policy::ScaleSetDelete => "scale-set-delete",
            Policy::ScaleSetGet => "scale-set-get",
            Policy::ScaleSetList => "scale-set-list",
            Policy::InstanceUpdate => "instance-update",
            Policy::InstanceGet => "instance-get",
            Policy::DiskWrite => "disk-write",
            Policy::DiskRead => "disk-read",
            Policy::NetworkWrite => "network-write",
            Policy::NetworkRead => "network-read",
            Policy::Other => "other",
        }
    }

    /// For one resource.
    pub fn per_resource(self) -> Option<Limit> {
        match self {
            Policy::VmPut
            | Policy::ScaleSetCreate
            | Policy::ScaleSetUpdate
            | Policy::ScaleSetDelete
            | Policy::InstanceUpdate => Some(limit(4, 12)),
            Policy::VmGet | Policy::ScaleSetGet | Policy::InstanceGet => Some(limit(12, 36)),
            Policy::Operation => Some(limit(15, 45)),
            Policy::ScaleSetList => Some(limit(10, 30)),
            Policy::VmList
            | Policy::DiskWrite
            | Policy::DiskRead
            | Policy::NetworkWrite
            | Policy::NetworkRead
            | Policy::Other => None,
        }
    }

    /// For a subscription in one region.
    pub fn per_region(self) -> Option<Limit> {
        match self {
            Policy::VmPut | Policy::ScaleSetUpdate | Policy::InstanceUpdate => Some(limit(500, 1500)),
            Policy::VmGet => Some(limit(8000, 24000)),
            Policy::VmList => Some(limit(300, 900)),
            Policy::Operation => Some(limit(5000, 15000)),
            Policy::ScaleSetCreate => Some(limit(125, 375)),
            Policy::ScaleSetDelete => Some(limit(175, 525)),
            Policy::ScaleSetGet => Some(limit(800, 2400)),
            Policy::ScaleSetList => Some(limit(360, 1080)),
            Policy::InstanceGet => Some(limit(2000, 6000)),
            // Networking publishes 1,000 writes and 10,000 reads in five minutes; disks publish nothing and get
            // what virtual machines have.
            Policy::NetworkWrite => Some(limit(200, 1000)),
            Policy::NetworkRead => Some(limit(2000, 10000)),
            Policy::DiskWrite => Some(limit(500, 1500)),
            Policy::DiskRead => Some(limit(8000, 24000)),
            Policy::Other => None,
        }
    }
}

impl Kind {
    /// Resource Manager's own limit, before any resource provider sees the call.
    pub fn limit(self) -> Limit {
        match self {
            Kind::Read => limit(1500, 250),
            Kind::Write | Kind::Delete => limit(600, 200),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "reads",
            Kind::Write => "writes",
            Kind::Delete => "deletes",
        }
    }
}
