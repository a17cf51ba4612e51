//! A request and its operation, advanced without waiting.
//!
//! Invariant: a request is sent once, and its operation is polled no sooner than Azure's `Retry-After` allows. The caller
//! keeps the request between reconciles; a process that lost it resumes the [`Operation`] with [`Request::Running`].

use crate::client::{Client, Put};
use crate::{Error, Operation, Progress};
use capstan_core::{Class, Classified};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// One request that changes a resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Request<T> {
    #[default]
    NotSent,
    /// Azure works on it.
    Running(Operation),
    Done(T),
}

impl<T> Request<T> {
    pub fn value(&self) -> Option<&T> {
        match self {
            Request::Done(value) => Some(value),
            Request::NotSent | Request::Running(_) => None,
        }
    }

    async fn send(&mut self, send: impl Future<Output = Result<Put<T>, Error>>) -> Result<(), Error> {
        if matches!(self, Request::NotSent) {
            let Put { value, operation } = send.await?;
            *self = operation.map_or(Request::Done(value), Request::Running);
        }
        Ok(())
    }

    /// Polls the operation if that is allowed by now. A request that failed can be sent again.
    async fn poll(&mut self, client: &Client) -> Result<Polled, Error> {
        let Request::Running(operation) = self else {
            return Ok(Polled::Nothing);
        };
        let due = operation.due_in(client.clock().now());
        if !due.is_zero() {
            return Ok(Polled::Wait(due));
        }
        match client.poll(operation).await {
            Ok(Progress::Running(after)) => Ok(Polled::Wait(after)),
            Ok(Progress::Done(_)) => Ok(Polled::Over(operation.clone())),
            Err(error) if error.ended_operation() => {
                *self = Request::NotSent;
                Err(error)
            }
            Err(error) => match error.class() {
                Class::Throttled(after) => Ok(Polled::Wait(after)),
                _ => Err(error),
            },
        }
    }
}

enum Polled {
    /// There was no operation to poll.
    Nothing,
    Wait(Duration),
    Over(Operation),
}

impl<T: DeserializeOwned> Request<T> {
    /// Sends the request or polls its operation. Returns the time until the next poll, or nothing once the request is done;
    /// after an operation the resource is read once more.
    pub async fn advance(
        &mut self,
        client: &Client,
        send: impl Future<Output = Result<Put<T>, Error>>,
    ) -> Result<Option<Duration>, Error> {
        self.send(send).await?;
        match self.poll(client).await? {
            Polled::Nothing => Ok(None),
            Polled::Wait(after) => Ok(Some(after)),
            Polled::Over(operation) => {
                *self = Request::Done(client.outcome(&operation).await?);
                Ok(None)
            }
        }
    }
}

impl Request<()> {
    /// The same for requests whose answer has no resource.
    pub async fn finish(
        &mut self,
        client: &Client,
        send: impl Future<Output = Result<Option<Operation>, Error>>,
    ) -> Result<Option<Duration>, Error> {
        let send = async { send.await.map(|operation| Put { value: (), operation }) };
        self.send(send).await?;
        match self.poll(client).await? {
            Polled::Nothing => Ok(None),
            Polled::Wait(after) => Ok(Some(after)),
            Polled::Over(_) => {
                *self = Request::Done(());
                Ok(None)
            }
        }
    }
}
