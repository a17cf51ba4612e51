//! Clones wait for their turn where their number is limited. Which one is next is decided in `core/vm/turns.rs`.

use std::collections::HashMap;
use std::sync::Arc;

use capstan_core::vm::{CloneLimits, CloneRequest, Turns};
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// All clones of the process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct CloneTurns {
    limits: CloneLimits,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    turns: Turns,
    waiters: HashMap<u64, oneshot::Sender<()>>,
}

impl Shared {
    fn start(&mut self) {
        for ticket in self.turns.start() {
            // A waiter that is gone leaves with its turn.
            let _ = self.waiters.remove(&ticket).map(|waiter| waiter.send(()));
        }
    }
}

/// The turn of a clone, from when it waits until it ends: until this value is dropped.
#[derive(Debug)]
pub struct Turn {
    ticket: u64,
    request: CloneRequest,
    shared: Arc<Mutex<Shared>>,
}

impl Turn {
    /// Returns what the turn is for.
    pub fn request(&self) -> &CloneRequest {
        &self.request
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut shared = self.shared.lock();
        shared.turns.leave(self.ticket);
        shared.waiters.remove(&self.ticket);
        shared.start();
    }
}

impl CloneTurns {
    pub fn new(limits: CloneLimits) -> Self {
        let shared = Shared {
            turns: Turns::new(limits),
            waiters: HashMap::new(),
        };
        Self {
            limits,
            shared: Arc::new(Mutex::new(shared)),
        }
    }

    pub fn are_limited(&self) -> bool {
        !self.limits.is_unlimited()
    }

    /// Waits until a clone may start.
    pub async fn wait(self, request: CloneRequest) -> Turn {
        let (sender, receiver) = oneshot::channel();
        let turn = {
            let mut shared = self.shared.lock();
            let ticket = shared.turns.ask(request.clone());
            shared.waiters.insert(ticket, sender);
            shared.start();
            Turn {
                ticket,
                request,
                shared: self.shared.clone(),
            }
        };
        // The sender is dropped only by this turn.
        let _ = receiver.await;
        turn
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::super::state::{PendingTask, TaskKind, TaskOutcome, VmState, WaiterReport};
    use super::*;

    fn request() -> CloneRequest {
        CloneRequest {
            vcenter: "vc".into(),
            datastore: "ds".into(),
            owner: "ns".into(),
        }
    }

    #[tokio::test]
    async fn a_vm_gives_up_its_turn_and_its_wait_for_one() {
        let limits = CloneLimits {
            per_vcenter: Some(1),
            per_datastore: None,
        };
        let turns = CloneTurns::new(limits);
        let mut state = VmState {
            turn: Some(turns.clone().wait(request()).await),
            ..VmState::default()
        };
        let mut next = Box::pin(turns.clone().wait(request()));
        assert!((&mut next).now_or_never().is_none());
        state.give_up_turn();
        let held = next.await;
        // The turn of one that waits has come, and no reconcile has taken it yet.
        let report = Arc::new(Mutex::new(WaiterReport::default()));
        report.lock().outcome = Some(TaskOutcome::Turn(held));
        state.pending = Some(PendingTask {
            kind: TaskKind::Turn,
            waiter: tokio::spawn(async {}).abort_handle(),
            report,
        });
        let mut next = Box::pin(turns.clone().wait(request()));
        assert!((&mut next).now_or_never().is_none());
        state.give_up_turn();
        assert!(next.now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_turn_ends_with_its_clone_and_with_a_waiter_that_gives_up() {
        let turns = CloneTurns::new(CloneLimits {
            per_vcenter: Some(1),
            per_datastore: None,
        });
        let first = turns.clone().wait(request()).await;
        let mut gives_up = Box::pin(turns.clone().wait(request()));
        let mut second = Box::pin(turns.clone().wait(request()));
        assert!((&mut gives_up).now_or_never().is_none());
        assert!((&mut second).now_or_never().is_none());
        drop(gives_up);
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        assert!(second.now_or_never().is_some());
    }
}
