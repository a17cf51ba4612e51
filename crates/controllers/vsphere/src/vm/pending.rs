//! Pending work of a VM: a task of vCenter, or a change of the VM, that a waiter follows beside the reconciles.
//!
//! Invariant: a reconcile never waits for vCenter. It starts a task, leaves one waiter behind and ends; the waiter asks for
//! the next reconcile with the outcome, and once before that when the work takes long.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use capstan_core::vm::{self as plan, Nic, ObservedVm, PowerState};
use capstan_kube::runtime::{Outcome, Scope};
use capstan_vsphere::{MoRef, Task, VmRuntime, VmWatch};
use parking_lot::Mutex;
use tracing::Instrument;

use super::state::{CloneEnd, PendingTask, TaskKind, TaskOutcome, VmState, WaiterReport};
use crate::observed;

/// The status reports a step that takes longer than this while it lasts, and a shorter one when it is over.
const SLOW: Duration = Duration::from_secs(15);

/// Leaves a waiter behind for `work`.
pub fn follow(
    scope: &Scope<VSphereVM>,
    state: &mut VmState,
    kind: TaskKind,
    work: impl Future<Output = TaskOutcome> + Send + 'static,
) -> Outcome {
    let report = Arc::new(Mutex::new(WaiterReport::default()));
    let (clock, wake, shared) = (scope.context.clock, scope.waker(), report.clone());
    let waiting = async move {
        let mut work = std::pin::pin!(work);
        let outcome = tokio::select! {
            outcome = &mut work => outcome,
            () = clock.sleep(SLOW) => {
                shared.lock().slow = true;
                wake();
                work.await
            }
        };
        shared.lock().outcome = Some(outcome);
        wake();
    };
    let waiter = tokio::spawn(waiting.in_current_span());
    state.pending = Some(PendingTask {
        kind,
        waiter: waiter.abort_handle(),
        report,
    });
    Outcome::Wait(None)
}

/// Ends with the task.
pub async fn task(task: Task) -> TaskOutcome {
    TaskOutcome::Task(task.wait().await)
}

/// Ends when all of these clones have ended, however they do.
pub async fn clones(tasks: Vec<Task>) -> TaskOutcome {
    let ended = futures::future::join_all(tasks.iter().map(Task::wait)).await;
    let under_way = |result: &capstan_vsphere::Result<_>| CloneEnd::of(result) == CloneEnd::UnderWay;
    let cut_short = ended.into_iter().find(under_way);
    TaskOutcome::Task(cut_short.unwrap_or(Ok(None)))
}

/// Ends when the guest reports an address, or does not run any more.
pub async fn address(watch: VmWatch, vm: MoRef, nics: Vec<Nic>) -> TaskOutcome {
    change(watch, move |runtime| {
        let mut observed = ObservedVm {
            nics: nics.clone(),
            ..ObservedVm::new(vm.clone())
        };
        observed::update(&mut observed, runtime);
        observed.power != PowerState::On || !plan::report(&observed).addresses.is_empty()
    })
    .await
}

/// Ends when the VM is powered off.
pub async fn power_off(watch: VmWatch) -> TaskOutcome {
    change(watch, |runtime| runtime.power != PowerState::On).await
}

async fn change(mut watch: VmWatch, is_over: impl Fn(&VmRuntime) -> bool) -> TaskOutcome {
    loop {
        match watch.next().await {
            Ok(runtime) if !is_over(&runtime) => {}
            runtime => return TaskOutcome::State(runtime),
        }
    }
}
