//! A request and what becomes of it, without waiting for it.
//!
//! Invariant: a request is sent once, and its operation is asked about no sooner than Azure said. Between two calls of
//! [`Stage::advance`] or [`Stage::finish`] nobody is held up: the caller keeps the stage, sees to something else and comes back.

use crate::client::{Client, Put};
use crate::{Error, Operation, Progress};
use capstan_core::Class;
use serde::de::DeserializeOwned;
use std::time::Duration;

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Stage<T> {
    /// Not sent yet.
    #[default]
    Ahead,
    Running(Operation),
    Done(T),
}

impl<T> Stage<T> {
    pub fn value(&self) -> Option<&T> {
        match self {
            Stage::Done(value) => Some(value),
            Stage::Ahead | Stage::Running(_) => None,
        }
    }

    async fn begun(&mut self, send: impl Future<Output = Result<Put<T>, Error>>) -> Result<(), Error> {
        if matches!(self, Stage::Ahead) {
            let Put { value, operation } = send.await?;
            *self = operation.map_or(Stage::Done(value), Stage::Running);
        }
        Ok(())
    }

    /// Asks about the operation if it may be asked about by now. A request that failed can be sent again.
    async fn asked(&mut self, client: &Client) -> Result<Asked, Error> {
        let Stage::Running(operation) = self else {
            return Ok(Asked::Nothing);
        };
        let due = operation.due_in(jiff::Timestamp::now());
        if !due.is_zero() {
            return Ok(Asked::Wait(due));
        }
        match client.poll(operation).await {
            Ok(Progress::Running(after)) => Ok(Asked::Wait(after)),
            Ok(Progress::Done(_)) => Ok(Asked::Over(operation.clone())),
            Err(error) if error.ended_operation() => {
                *self = Stage::Ahead;
                Err(error)
            }
            Err(error) => match error.class() {
                Class::Throttled(after) => Ok(Asked::Wait(after)),
                _ => Err(error),
            },
        }
    }
}

enum Asked {
    /// There was nothing to ask about.
    Nothing,
    Wait(Duration),
    Over(Operation),
}

impl<T: DeserializeOwned> Stage<T> {
    /// Goes on as far as that is possible now: how long to leave it alone, or nothing once it is done. Where Azure
    /// worked on, what came of it is read.
    pub async fn advance(
        &mut self,
        client: &Client,
        send: impl Future<Output = Result<Put<T>, Error>>,
    ) -> Result<Option<Duration>, Error> {
        self.begun(send).await?;
        match self.asked(client).await? {
            Asked::Nothing => Ok(None),
            Asked::Wait(after) => Ok(Some(after)),
            Asked::Over(operation) => {
                *self = Stage::Done(client.outcome(&operation).await?);
                Ok(None)
            }
        }
    }
}

impl Stage<()> {
    /// The same for requests whose answer is nothing but the work.
    pub async fn finish(
        &mut self,
        client: &Client,
        send: impl Future<Output = Result<Option<Operation>, Error>>,
    ) -> Result<Option<Duration>, Error> {
        let send = async { send.await.map(|operation| Put { value: (), operation }) };
        self.begun(send).await?;
        match self.asked(client).await? {
            Asked::Nothing => Ok(None),
            Asked::Wait(after) => Ok(Some(after)),
            Asked::Over(_) => {
                *self = Stage::Done(());
                Ok(None)
            }
        }
    }
}
