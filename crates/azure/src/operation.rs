//! Long-running operations as a small value. A controller can write it into a status, and another process can read it
//! and continue to poll.
//!
//! [`Operation::answered`] is a pure step: the next poll follows from the operation and one answer alone. So an
//! operation that is interrupted at any poll has the same outcome when another process continues to poll.

use crate::compute::COMPUTE;
use crate::error::null_is_empty;
use crate::model::ProvisioningState;
use crate::{ArmError, Error, ResourceId};
use bytes::Bytes;
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Between two polls, where Azure names no interval.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

/// Azure may answer `Retry-After: 0`: never spin.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// The address at which the outcome can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Follow {
    /// `Azure-AsyncOperation`: a status body.
    Status(String),
    /// `Location`: 202 while it runs, then the result.
    Location(String),
    /// Neither header: the resource's own `provisioningState`.
    Resource,
}

/// An operation under way at Azure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// The request that started it: `PUT`, `PATCH`, `POST` or `DELETE`.
    pub method: String,
    /// The resource's path and api-version.
    pub resource: String,
    pub follow: Follow,
    /// The next poll is allowed from here on.
    pub not_before: jiff::Timestamp,
}

/// The outcome of one poll.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// Poll again after this long.
    Running(Duration),
    /// It succeeded; the result, where the answer carried one.
    Done(Option<serde_json::Value>),
}

#[derive(Deserialize)]
struct StatusBody {
    status: String,
    error: Option<ArmError>,
    properties: Option<StatusProperties>,
}

#[derive(Deserialize)]
struct StatusProperties {
    output: Option<serde_json::Value>,
}

#[derive(Deserialize, Default)]
struct StateBody {
    #[serde(default, deserialize_with = "null_is_empty")]
    properties: StateProperties,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct StateProperties {
    provisioning_state: Option<String>,
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .filter(|value| !value.is_empty())
}

/// `Retry-After` in seconds or as a date, or its finer form in milliseconds.
pub fn retry_after(headers: &HeaderMap, now: jiff::Timestamp) -> Option<Duration> {
    let millis = ["x-ms-retry-after-ms", "retry-after-ms"]
        .iter()
        .find_map(|name| header(headers, name)?.parse().ok())
        .map(Duration::from_millis);
    millis.or_else(|| {
        let text = header(headers, "retry-after")?.trim();
        text.parse().ok().map(Duration::from_secs).or_else(|| until(text, now))
    })
}

/// Returns the time until an HTTP date; zero for a date in the past.
fn until(date: &str, now: jiff::Timestamp) -> Option<Duration> {
    let date = jiff::fmt::rfc2822::parse(date).ok()?.timestamp();
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

fn provisioning_state(body: &[u8]) -> Option<ProvisioningState> {
    let body: StateBody = serde_json::from_slice(body).ok()?;
    Some(ProvisioningState::from(body.properties.provisioning_state?.as_str()))
}

impl Operation {
    /// The operation that this successful answer started, if it is not over already.
    pub fn started(
        method: &str,
        resource: &str,
        status: u16,
        headers: &HeaderMap,
        body: &[u8],
        now: jiff::Timestamp,
    ) -> Option<Self> {
        let state = provisioning_state(body);
        let changes = matches!(method, "PUT" | "PATCH");
        if changes && state.as_ref().is_some_and(ProvisioningState::is_final) {
            return None;
        }
        let follow = if let Some(url) = header(headers, "azure-asyncoperation") {
            Follow::Status(url.to_owned())
        } else if let Some(url) = header(headers, "location").filter(|_| status == 202) {
            Follow::Location(url.to_owned())
        } else if status == 202 || (changes && state.is_some()) {
            Follow::Resource
        } else {
            return None;
        };
        let mut operation = Self {
            method: method.to_owned(),
            resource: resource.to_owned(),
            follow,
            not_before: jiff::Timestamp::MIN,
        };
        operation.pause(interval(headers, now), now);
        Some(operation)
    }

    /// Follows a virtual machine itself, where no operation is known: its `provisioningState` shows when it is done.
    pub fn of_vm(method: &str, id: &ResourceId, not_before: jiff::Timestamp) -> Self {
        Self {
            method: method.to_owned(),
            resource: format!("{id}?api-version={COMPUTE}"),
            follow: Follow::Resource,
            not_before,
        }
    }

    fn pause(&mut self, after: Duration, now: jiff::Timestamp) {
        self.not_before = now.checked_add(after).unwrap_or(jiff::Timestamp::MAX);
    }

    /// Returns the time until the next poll is due.
    pub fn due_in(&self, now: jiff::Timestamp) -> Duration {
        Duration::try_from(self.not_before.duration_since(now)).unwrap_or(Duration::ZERO)
    }

    /// Returns the address to poll: a full address, or the resource's path.
    pub fn address(&self) -> &str {
        match &self.follow {
            Follow::Status(url) | Follow::Location(url) => url,
            Follow::Resource => &self.resource,
        }
    }

    /// Takes in the answer to one poll.
    pub fn answered(
        &mut self,
        status: u16,
        headers: &HeaderMap,
        body: &Bytes,
        now: jiff::Timestamp,
    ) -> Result<Progress, Error> {
        let after = interval(headers, now);
        let refusal = || ArmError::parse(status, body, retry_after(headers, now));
        let progress = match (&self.follow, status) {
            (_, 429 | 500.. | 408 | 401) => Err(self.failed(refusal())),
            (Follow::Status(_), 200..=299) => self.status_body(body, after),
            (Follow::Location(_), 202) => Ok(Progress::Running(after)),
            (Follow::Location(_), 200..=299) => Ok(Progress::Done(serde_json::from_slice(body).ok())),
            (Follow::Resource, 200..=299) => self.resource_body(body, after),
            (Follow::Resource | Follow::Location(_), 404) if self.method == "DELETE" => Ok(Progress::Done(None)),
            // Azure forgets operations after a while, and a role may not allow to read one: the resource itself still knows.
            // A status reports a failure in its body, never by its code; a Location answers with the outcome itself.
            (Follow::Status(_), _) | (Follow::Location(_), 404) => {
                self.follow = Follow::Resource;
                Ok(Progress::Running(SHORTEST_INTERVAL))
            }
            // A refused read does not reveal the state of the operation.
            (Follow::Resource, 400..=403 | 405..=499) => Err(Error::StatusUnknown {
                call: self.call(),
                error: Box::new(refusal()),
            }),
            _ => Err(self.failed(refusal())),
        };
        if let Ok(Progress::Running(after)) = &progress {
            self.pause(*after, now);
        }
        progress
    }

    fn call(&self) -> String {
        let path = self.resource.split('?').next().unwrap_or_default();
        format!("{} {path}", self.method)
    }

    fn failed(&self, error: ArmError) -> Error {
        Error::Arm {
            call: self.call(),
            error: Box::new(error),
        }
    }

    fn status_body(&self, body: &[u8], after: Duration) -> Result<Progress, Error> {
        let parsed: StatusBody = serde_json::from_slice(body).map_err(|source| Error::Answer {
            call: format!("operation of {}", self.resource),
            source,
        })?;
        match ProvisioningState::from(parsed.status.as_str()) {
            ProvisioningState::Succeeded => Ok(Progress::Done(
                parsed.properties.and_then(|properties| properties.output),
            )),
            ProvisioningState::Failed | ProvisioningState::Canceled => Err(self.failed(
                parsed
                    .error
                    .filter(|error| !error.code.is_empty())
                    .unwrap_or_else(|| ArmError {
                        // As the resource itself reports it. The next attempt brings the reason.
                        code: format!("Provisioning{}", parsed.status),
                        message: "the operation did not succeed".into(),
                        ..ArmError::default()
                    }),
            )),
            _ => Ok(Progress::Running(after)),
        }
    }

    fn resource_body(&self, body: &[u8], after: Duration) -> Result<Progress, Error> {
        let answered = provisioning_state(body);
        let deletes = self.method == "DELETE";
        let state = match answered {
            None if deletes => return Ok(Progress::Running(after)),
            answered => answered.unwrap_or(ProvisioningState::Succeeded),
        };
        if !state.is_final() {
            return Ok(Progress::Running(after));
        }
        if deletes {
            return Err(self.failed(ArmError {
                code: "DeletionNotCarriedOut".to_owned(),
                message: format!("the resource is still there, its provisioning state is {state}"),
                ..ArmError::default()
            }));
        }
        if state == ProvisioningState::Succeeded {
            return Ok(Progress::Done(serde_json::from_slice(body).ok()));
        }
        let message = "the resource's provisioning did not succeed".to_owned();
        Err(self.failed(ArmError {
            code: format!("Provisioning{state}"),
            message,
            ..ArmError::default()
        }))
    }
}

fn interval(headers: &HeaderMap, now: jiff::Timestamp) -> Duration {
    retry_after(headers, now)
        .unwrap_or(DEFAULT_INTERVAL)
        .max(SHORTEST_INTERVAL)
}

#[cfg(test)]
mod tests;
