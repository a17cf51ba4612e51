//! The state of each VM between reconciles, so that no reconcile asks vCenter for what the last one read.
//!
//! Losing it is always safe: whatever matters is found again in the VM's status and in vCenter.

use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_api::vsphere::{CloneMode, DataDiskStatus, VSphereVMStatus};
use capstan_kube::runtime::EventNote;
use capstan_vsphere::{Device, Kept, MoRef, VmInfo, VmRuntime};

use super::turns::Turn;
use crate::ipam::Given;
use parking_lot::Mutex;

use crate::observed;
use capstan_core::vm::Changes;
use capstan_core::vm::{ObservedVm, UserData};

/// The kinds of work that a waiter follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskKind {
    Clone,
    /// Clones that another process may have started for this VM.
    OtherClones,
    /// The turn of its clone.
    Turn,
    Upgrade,
    Reconfigure(Box<Changes>),
    /// Membership of a VM group.
    Group,
    /// Membership of a VM group, of a VM that runs.
    RestoreGroup,
    PowerOn,
    Address,
    Shutdown,
    PowerOff,
    Detach,
    Destroy,
}

/// The outcome of pending work.
#[derive(Debug)]
pub enum TaskOutcome {
    Task(Result<Option<MoRef>, capstan_vsphere::Error>),
    State(Result<VmRuntime, capstan_vsphere::Error>),
    /// The clone may start.
    Turn(Turn),
}

/// The reports of a waiter.
#[derive(Debug, Default)]
pub struct WaiterReport {
    pub outcome: Option<TaskOutcome>,
    /// The work takes so long that the status should report it.
    pub slow: bool,
    /// An event was recorded for it.
    pub recorded: bool,
}

/// Pending work; the waiter ends when this value is dropped.
#[derive(Debug)]
pub struct PendingTask {
    pub kind: TaskKind,
    pub waiter: tokio::task::AbortHandle,
    pub report: Arc<Mutex<WaiterReport>>,
}

impl Drop for PendingTask {
    fn drop(&mut self) {
        self.waiter.abort();
    }
}

/// A clone that was started, for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Started {
    pub task: String,
    pub linked: bool,
    pub snapshot: Option<String>,
    pub disks: Vec<DataDiskStatus>,
}

impl Started {
    /// Writes everything but the task to the status.
    pub fn note(&self, status: &mut VSphereVMStatus) {
        let mode = if self.linked {
            CloneMode::LinkedClone
        } else {
            CloneMode::FullClone
        };
        status.clone_mode = Some(mode.as_str().to_owned());
        status.snapshot = self.snapshot.clone();
        status.data_disks = self.disks.clone();
    }
}

/// The state of one VM.
#[derive(Debug, Default)]
pub struct VmState {
    pub started: Option<Started>,
    /// Whether the task in the status has ended.
    pub task_over: bool,
    /// Whether the clone in the status has failed.
    pub clone_failed: bool,
    /// It is certain that no clone from another process is under way.
    pub alone: bool,
    /// The answer to a clone was lost: it may be under way.
    pub doubtful: bool,
    /// A clone was refused because somebody has the name.
    pub name_taken: bool,
    /// The turn of a clone that has not started.
    pub turn: Option<Turn>,
    pub reference: Option<MoRef>,
    pub observed: Option<ObservedVm>,
    /// The devices of the observation, as vCenter sent them.
    pub devices: Vec<Device>,
    /// The memory of the observation.
    pub kept: Kept,
    pub user: Option<UserData>,
    /// How often in a row something failed that another try alone will hardly change.
    pub failures: u32,
    /// vCenter refused a step, which is not retried before this time unless somebody changes the object (by this hash).
    pub retry_at: Option<(Instant, u64)>,
    /// The last reconfiguration, so that one without effect is not repeated without end.
    pub tried: Option<Box<Changes>>,
    pub tagged: bool,
    /// It is in the VM group of its failure domain.
    pub grouped: bool,
    /// The cluster module that it was put into.
    pub module: Option<String>,
    /// The addresses from pools, once all of them are there.
    pub given: Vec<Given>,
    /// When the VM was last read and found up, and how the object was marked then.
    pub read_at: Option<(Instant, u64)>,
    /// The devices that vCenter had left out and a reconfiguration added.
    pub restored: Vec<String>,
    /// Whether the guest could not be asked to shut down.
    pub guest_refuses: bool,
    /// Events for the next report.
    pub events: Vec<EventNote>,
    pub pending: Option<PendingTask>,
}

impl VmState {
    /// Keeps a VM that was read.
    pub fn found(&mut self, info: VmInfo) {
        self.observed = Some(observed::observe(&info));
        self.reference = Some(info.reference);
        self.devices = info.devices;
        self.kept = info.kept;
    }

    /// Drops the observation: the next reconcile reads the VM again.
    pub fn stale(&mut self) {
        self.observed = None;
        self.devices = Vec::new();
        self.kept = Kept::default();
    }

    /// Gives up the turn of a clone that does not start now, and the wait for it: others want to clone.
    pub fn give_up_turn(&mut self) {
        self.turn = None;
        if self
            .pending
            .as_ref()
            .is_some_and(|pending| pending.kind == TaskKind::Turn)
        {
            self.pending = None;
        }
    }

    /// Returns the time until the next retry, if nobody has changed the object since.
    pub fn retry_left(&self, version: u64, now: Instant) -> Option<Duration> {
        let (until, _) = self.retry_at.filter(|(_, by)| *by == version)?;
        until.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// Whether pending work has ended.
    pub fn has_outcome(&self) -> bool {
        let pending = self.pending.as_ref();
        pending.is_some_and(|pending| pending.report.lock().outcome.is_some())
    }

    /// Takes the outcome of pending work, which is pending no more.
    pub fn take_outcome(&mut self) -> Option<(TaskKind, TaskOutcome)> {
        let pending = self.pending.as_ref()?;
        let outcome = pending.report.lock().outcome.take()?;
        let kind = pending.kind.clone();
        self.pending = None;
        Some((kind, outcome))
    }
}

/// The end of a clone, as far as the outcome of its task says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloneEnd {
    Made(Option<MoRef>),
    /// There is none.
    Failed,
    /// Nobody knows: it may be there, it may be under way.
    Unknown,
    /// The wait has ended, the clone has not.
    UnderWay,
}

impl CloneEnd {
    pub fn of(result: &Result<Option<MoRef>, capstan_vsphere::Error>) -> Self {
        match result {
            Ok(made) => Self::Made(made.clone()),
            Err(capstan_vsphere::Error::TaskFailed { .. }) => Self::Failed,
            Err(capstan_vsphere::Error::TaskGone { .. }) => Self::Unknown,
            Err(_) => Self::UnderWay,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_vsphere::{Error, Fault};
    use rstest::rstest;

    fn fault() -> Box<Fault> {
        Box::new(Fault {
            kind: "InvalidLogin".into(),
            message: String::new(),
            subject: None,
            object: None,
        })
    }

    fn server() -> String {
        "vc".into()
    }

    #[rstest]
    #[case::made(Ok(Some(MoRef::vm("vm-1"))), CloneEnd::Made(Some(MoRef::vm("vm-1"))))]
    #[case::failed(Err(Error::TaskFailed { task: MoRef::task("task-1"), name: String::new(), fault: fault() }), CloneEnd::Failed)]
    #[case::forgotten(Err(Error::TaskGone { task: MoRef::task("task-1") }), CloneEnd::Unknown)]
    #[case::another_password(Err(Error::Closed { server: server() }), CloneEnd::UnderWay)]
    #[case::refused(Err(Error::Login { server: server(), user: String::new(), fault: fault() }), CloneEnd::UnderWay)]
    #[case::another_certificate(
        Err(Error::Thumbprint { server: server(), seen: String::new(), expected: String::new() }),
        CloneEnd::UnderWay
    )]
    #[case::away(Err(Error::Unreachable { server: server(), cause: String::new() }), CloneEnd::UnderWay)]
    fn only_the_tasks_own_end_ends_a_clone(#[case] result: Result<Option<MoRef>, Error>, #[case] end: CloneEnd) {
        assert_eq!(CloneEnd::of(&result), end);
    }

    #[test]
    fn a_failure_is_retried_after_its_time_or_after_a_change_of_the_object() {
        let now = capstan_core::clock::Clock::system().instant();
        let failed = |seconds: u64| VmState {
            retry_at: Some((now + Duration::from_secs(seconds), 1)),
            ..VmState::default()
        };
        assert!(failed(60).retry_left(1, now).is_some());
        assert!(failed(60).retry_left(2, now).is_none(), "somebody changed it");
        assert!(failed(0).retry_left(1, now).is_none());
        assert!(VmState::default().retry_left(1, now).is_none());
    }
}
