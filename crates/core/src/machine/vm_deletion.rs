//! What the deletion of a virtual machine needs next, by a live read right before it. Pure.
//!
//! Invariants: a virtual machine that the machine does not own is never deleted. Before it goes, the status names its disks,
//! and none of those that stay would go with it.

/// The virtual machine as Azure shows it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveVm<Proof, Change> {
    /// The proof that it is the machine's; `None` where it is not.
    pub owned: Option<Proof>,
    /// The status does not name it, or lacks a disk whose policy nothing else records.
    pub is_unrecorded: bool,
    /// The change without which a disk that stays would go with it.
    pub keep_disks: Option<Change>,
}

/// The next step of the deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmDeletion<Proof, Change> {
    /// Azure does not have it.
    Gone,
    /// Another virtual machine has its name: it stays.
    Foreign,
    /// The status names it and its disks first: once it is gone, nothing else shows that they were the machine's.
    Record,
    /// Its disks are changed first, and then it is deleted.
    KeepDisks {
        change: Change,
        owned: Proof,
    },
    Delete(Proof),
}

/// Decides what the deletion needs next.
pub fn delete_vm<Proof, Change>(live: Option<LiveVm<Proof, Change>>) -> VmDeletion<Proof, Change> {
    let Some(live) = live else {
        return VmDeletion::Gone;
    };
    let Some(owned) = live.owned else {
        return VmDeletion::Foreign;
    };
    match live.keep_disks {
        _ if live.is_unrecorded => VmDeletion::Record,
        Some(change) => VmDeletion::KeepDisks { change, owned },
        None => VmDeletion::Delete(owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const KEEP: &str = "keep";

    fn live(owned: bool, is_unrecorded: bool, keeps: bool) -> Option<LiveVm<(), &'static str>> {
        Some(LiveVm {
            owned: owned.then_some(()),
            is_unrecorded,
            keep_disks: keeps.then_some(KEEP),
        })
    }

    #[rstest]
    #[case::it_is_gone(None, VmDeletion::Gone)]
    #[case::it_is_the_machines(live(true, false, false), VmDeletion::Delete(()))]
    #[case::it_would_take_a_kept_disk_along(live(true, false, true), VmDeletion::KeepDisks { change: KEEP, owned: () })]
    #[case::nobody_wrote_its_disks_down(live(true, true, false), VmDeletion::Record)]
    #[case::which_comes_before_its_disks(live(true, true, true), VmDeletion::Record)]
    #[case::it_is_anothers(live(false, false, false), VmDeletion::Foreign)]
    #[case::whatever_is_recorded(live(false, true, true), VmDeletion::Foreign)]
    fn a_virtual_machine_is_deleted_once_nothing_is_lost_with_it(
        #[case] live: Option<LiveVm<(), &'static str>>,
        #[case] expected: VmDeletion<(), &'static str>,
    ) {
        assert_eq!(delete_vm(live), expected);
    }
}
