//! Tasks: watched until they end, with the reason of a failure kept word for word.

use crate::error::{Error, Fault, Result};
use crate::properties::{Object, Want};
use crate::vcenter::Vcenter;
use crate::watcher::Update;
use capstan_core::vm::MoRef;

pub(crate) const TASK_PATHS: &[&str] = &["info.state", "info.error", "info.result", "info.descriptionId"];

/// A task on a vCenter. Holds nothing there: dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct Task {
    vcenter: Vcenter,
    reference: MoRef,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskState {
    Queued,
    Running,
    Success,
    Error(Fault),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskInfo {
    pub state: TaskState,
    /// What the task made, such as the clone.
    pub result: Option<MoRef>,
    pub name: String,
}

impl Task {
    pub(crate) fn new(vcenter: Vcenter, reference: MoRef) -> Self {
        Self { vcenter, reference }
    }

    pub fn reference(&self) -> &MoRef {
        &self.reference
    }

    /// Asks vCenter once.
    pub async fn info(&self) -> Result<TaskInfo> {
        let object = self
            .vcenter
            .retrieve_one(&self.reference, TASK_PATHS)
            .await
            .map_err(|error| {
                if error.is_gone() {
                    Error::TaskGone {
                        task: self.reference.clone(),
                    }
                } else {
                    error
                }
            })?;
        Ok(TaskInfo::read(&object))
    }

    /// Waits until the task has ended, through lost sessions and restarts of vCenter; costs nothing while it waits.
    /// Gives what the task made. A failure is [`Error::TaskFailed`], a task that vCenter has dropped [`Error::TaskGone`].
    pub async fn wait(&self) -> Result<Option<MoRef>> {
        let (clock, metrics) = (self.vcenter.0.clock, &self.vcenter.0.metrics);
        let (began, _counted) = (clock.instant(), metrics.task());
        let mut interest = self.vcenter.interest(&self.reference);
        loop {
            match interest.next().await? {
                Update::Gone => {
                    return Err(Error::TaskGone {
                        task: self.reference.clone(),
                    });
                }
                Update::Object(object) => {
                    let info = TaskInfo::read(&object);
                    match info.state {
                        TaskState::Success => {
                            metrics.task_ended(&info.name, true, clock.since(began));
                            return Ok(info.result);
                        }
                        TaskState::Error(fault) => {
                            metrics.task_ended(&info.name, false, clock.since(began));
                            let task = self.reference.clone();
                            return Err(Error::TaskFailed {
                                task,
                                name: info.name,
                                fault: Box::new(fault),
                            });
                        }
                        TaskState::Queued | TaskState::Running => {}
                    }
                }
                Update::Nothing | Update::Failed(_) => {}
            }
        }
    }
}

impl TaskInfo {
    pub(crate) fn read(object: &Object) -> Self {
        let state = match object.text("info.state") {
            Some("success") => TaskState::Success,
            Some("error") => TaskState::Error(
                object
                    .get("info.error")
                    .map(Fault::localized)
                    .unwrap_or_else(|| Fault::read(None, "")),
            ),
            Some("queued") => TaskState::Queued,
            _ => TaskState::Running,
        };
        let name = object.string("info.descriptionId").unwrap_or_default();
        Self {
            state,
            result: object.moref("info.result"),
            name,
        }
    }
}

impl Vcenter {
    /// A task known by reference, such as one remembered in a status.
    pub fn task(&self, reference: MoRef) -> Task {
        Task::new(self.clone(), reference)
    }

    /// The clones of a template that vCenter is busy with.
    pub async fn running_clones(&self, template: &MoRef) -> Result<Vec<Task>> {
        let recent = self.retrieve_one(template, &["recentTask"]).await?.morefs("recentTask");
        if recent.is_empty() {
            return Ok(Vec::new());
        }
        let wants = [Want {
            kind: "Task",
            paths: TASK_PATHS,
        }];
        let tasks = self.retrieve(&wants, &recent, &[]).await?;
        let running = tasks.into_iter().filter(|task| {
            let info = TaskInfo::read(task);
            matches!(info.state, TaskState::Queued | TaskState::Running) && info.name.to_lowercase().contains("clone")
        });
        Ok(running.filter_map(|task| Some(self.task(task.reference?))).collect())
    }
}
