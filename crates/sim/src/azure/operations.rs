//! Long-running operations: ARM's answers while an operation runs, and at its end.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::wire::{Answer, Call, Fail, Reply};
use super::world::{Effect, World};

/// So many operations are kept without looking at their age.
const REMEMBERED: usize = 20_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(600);

/// The form of an operation in ARM's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lane {
    Compute,
    Disk,
    Network,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Operation {
    pub lane: Lane,
    pub start: String,
    pub end: Option<String>,
    /// The resource worked on, in lower case.
    pub target: String,
    /// Ends only when a client of the admin API releases it.
    pub stalled: bool,
    /// The effects of a stalled operation after its release.
    held: Vec<Effect>,
    pub error: Option<Value>,
    /// Whether the final status carries the resource (`properties.output`) or the Location answers with it.
    pub output: bool,
    /// Decided at the start, reported at the end.
    planned: Option<Value>,
}

impl Operation {
    pub fn status(&self) -> &'static str {
        match (&self.end, &self.error) {
            (None, _) => "InProgress",
            (Some(_), None) => "Succeeded",
            (Some(_), Some(_)) => "Failed",
        }
    }
}

impl World {
    /// Starts an operation that has these effects, each after its own time, and ends with the last of them. A stalled one
    /// has no effect until it is released.
    pub fn begin(&mut self, call: &Call, lane: Lane, effects: Vec<(Duration, Effect)>, fail: Option<&Fail>) -> String {
        self.forget_operations();
        let id = self.chance.uuid();
        let takes = effects.iter().map(|(takes, _)| *takes).max().unwrap_or_default();
        let mut operation = Operation {
            lane,
            start: self.clock.stamp(),
            end: None,
            target: call.key.clone(),
            stalled: call.ordeal.stall,
            held: Vec::new(),
            error: None,
            output: lane == Lane::Disk && call.method != http::Method::DELETE,
            planned: fail.map(Fail::error),
        };
        if call.ordeal.stall {
            operation.held = effects.into_iter().map(|(_, effect)| effect).collect();
            self.operations.insert(id.clone(), operation);
            return id;
        }
        self.operations.insert(id.clone(), operation);
        for (takes, effect) in effects {
            self.later(takes, effect);
        }
        self.later(takes, Effect::Operation(id.clone()));
        id
    }

    /// Operations that ended long ago are no longer known, as in Azure.
    fn forget_operations(&mut self) {
        if self.operations.len() > REMEMBERED {
            let long_ago = self.clock.stamp_ago(REMEMBERED_FOR);
            self.operations
                .retain(|_, operation| operation.end.as_ref().is_none_or(|end| *end > long_ago));
        }
    }

    /// Lets every stalled operation complete.
    pub fn release(&mut self) -> usize {
        let stalled: Vec<String> = self
            .operations
            .iter()
            .filter(|(_, operation)| operation.stalled)
            .map(|(id, _)| id.clone())
            .collect();
        for id in &stalled {
            let held = self
                .operations
                .get_mut(id)
                .map(|operation| std::mem::take(&mut operation.held));
            for effect in held.unwrap_or_default() {
                self.later(Duration::ZERO, effect);
            }
            self.end_operation(id, None);
        }
        stalled.len()
    }

    /// Ends an operation, with an error or as it was planned.
    pub fn end_operation(&mut self, id: &str, error: Option<Value>) {
        let end = self.clock.stamp();
        if let Some(operation) = self.operations.get_mut(id).filter(|operation| operation.end.is_none()) {
            operation.end = Some(end);
            operation.stalled = false;
            operation.error = error.or(operation.planned.take());
        }
    }

    /// Adds the headers by which a client follows the operation. Finished ones need none.
    pub fn follow(&self, call: &Call, answer: Answer, id: &str, location: &str) -> Answer {
        let Some(operation) = self.operations.get(id) else {
            return answer;
        };
        if operation.end.is_some() && operation.error.is_none() {
            return answer;
        }
        let subscription = call.segment(1);
        let (provider, place, result, outcome) = match operation.lane {
            Lane::Compute => ("Microsoft.Compute", "operations", "operations", "&monitor=true"),
            Lane::Disk => ("Microsoft.Compute", "DiskOperations", "DiskOperations", "&monitor=true"),
            Lane::Network => ("Microsoft.Network", "operations", "operationResults", ""),
        };
        let url = |place: &str, more: &str| {
            format!(
                "{}/subscriptions/{subscription}/providers/{provider}/locations/{location}/{place}/{id}?p={}{more}&api-version={}",
                call.base,
                &self.config.tenant,
                call.api_version()
            )
        };
        let seconds = self.retry_after(operation.lane);
        let mut answer = answer.with("azure-asyncoperation", url(place, ""));
        let notifies = match operation.lane {
            Lane::Compute => true,
            Lane::Disk => false,
            Lane::Network => call.method != http::Method::DELETE,
        };
        if notifies {
            answer = answer.with("azure-asyncnotification", "Enabled");
        }
        if answer.status == http::StatusCode::ACCEPTED {
            answer = answer.with("location", url(result, outcome));
        }
        if seconds > 0 {
            answer.with("retry-after", seconds.to_string())
        } else {
            answer
        }
    }

    /// `GET …/operations/{id}`: the status, or with `monitor=true` the outcome itself.
    pub fn operation(&self, call: &Call, id: &str, result: bool) -> Reply {
        let unknown = || Fail::new(404, "NotFound", format!("The operation {id} was not found."));
        let operation = self.operations.get(&id.to_lowercase()).ok_or_else(unknown)?;
        let seconds = self.retry_after(operation.lane);
        let pending = |answer: Answer| {
            if seconds > 0 && operation.end.is_none() {
                answer.with("retry-after", seconds.to_string())
            } else {
                answer
            }
        };
        if result || call.query.contains_key("monitor") {
            return self.outcome(call, operation).map(pending);
        }
        let mut body = match operation.lane {
            Lane::Network => json!({ "status": operation.status() }),
            _ => json!({ "startTime": operation.start, "status": operation.status(), "name": id }),
        };
        if let (Some(end), true) = (&operation.end, operation.lane != Lane::Network) {
            body["endTime"] = json!(end);
        }
        if let Some(error) = &operation.error {
            body["error"] = error.clone();
        } else if let (true, true, Some(doc)) = (
            operation.end.is_some(),
            operation.output,
            self.docs.get(&operation.target),
        ) {
            body["properties"] = json!({ "output": doc.body });
        }
        Ok(pending(Answer::ok(body)))
    }

    fn outcome(&self, call: &Call, operation: &Operation) -> Reply {
        match (&operation.end, &operation.error) {
            (None, _) => {
                Ok(Answer::accepted().with("location", format!("{}{}?{}", call.base, call.path, self.query(call))))
            }
            (Some(_), Some(error)) => {
                let part = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
                Err(Fail::conflict(part("code"), part("message")))
            }
            (Some(_), None) => match self.docs.get(&operation.target).filter(|_| operation.output) {
                Some(doc) => Ok(Answer::ok(doc.body.clone())),
                None if operation.lane == Lane::Network => Ok(Answer::no_content()),
                None => Ok(Answer::empty()),
            },
        }
    }

    /// How long clients are told to wait; Azure says nothing about disks.
    fn retry_after(&self, lane: Lane) -> u64 {
        match lane {
            Lane::Compute => self.config.retry_after,
            Lane::Disk => 0,
            Lane::Network => self.config.network_retry_after,
        }
    }

    fn query(&self, call: &Call) -> String {
        let pairs: Vec<String> = call
            .query
            .iter()
            .map(|(name, value)| format!("{name}={}", super::wire::encode(value)))
            .collect();
        pairs.join("&")
    }
}
