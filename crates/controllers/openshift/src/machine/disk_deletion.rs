//! Deletes the disks of a machine whose virtual machine is gone.
//!
//! Invariant: only disks that [`Disposition`] marks for deletion are deleted. A disk counts as deleted when Azure shows it no
//! more, or, for an account that may not read disks, when Azure took the deletion.

use super::error::Error;
use capstan_azure::{Client, Request};
use capstan_core::machine::disks::Disposition;
use capstan_core::machine::names::POLICY_TAG;
use std::collections::HashMap;
use std::time::Duration;

/// The disks of one machine.
#[derive(Clone, Debug, Default)]
pub struct Disks {
    /// Decided once, from one listing.
    pub disposition: Option<Disposition>,
    /// The account may not read disks, so nobody asks whether they are gone.
    pub unreadable: bool,
    stages: HashMap<String, Request<()>>,
    /// Azure did not let us see that they are gone.
    pub unverified: bool,
    /// All were gone before they were to be deleted: Azure had deleted them with their virtual machine.
    pub went_before: bool,
}

impl Disks {
    /// Deletes the disks that go, and sees that they are gone. Returns how long to wait, or nothing once they are.
    pub async fn delete(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let deleted = self.advance(client, group).await;
        if deleted.is_err() && !self.stages.values().any(|stage| matches!(stage, Request::Running(_))) {
            // A fresh listing decides again.
            *self = Self::default();
        }
        deleted
    }

    async fn advance(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let Some(disposition) = &mut self.disposition else {
            return Ok(None);
        };
        let (mut wait, mut failed) = (None, None);
        // What is not there is deleted without an operation.
        let first = self.stages.is_empty() && !disposition.delete.is_empty();
        // One that does not go keeps none of the others.
        for (label, name) in std::mem::take(&mut disposition.delete) {
            let stage = self.stages.entry(name.clone()).or_default();
            match delete_disk(stage, client, group, (label, &name), self.unreadable).await {
                Ok(Deleted::Verified) => drop(self.stages.remove(&name)),
                Ok(Deleted::Unverified) => {
                    self.unverified = true;
                    self.stages.remove(&name);
                }
                Ok(Deleted::Pending(after)) => {
                    wait = Some(wait.map_or(after, |wait: Duration| wait.min(after)));
                    disposition.delete.push((label, name));
                }
                Err(error) => {
                    failed = failed.or(Some(error));
                    disposition.delete.push((label, name));
                }
            }
        }
        self.went_before = first && wait.is_none() && failed.is_none();
        failed.map_or(Ok(wait), Err)
    }
}

/// Lets the tag of a disk say that it is kept: it was made with another policy, and `capstan orphans` reads the tag.
pub async fn mark_kept(client: &Client, group: &str, name: &str) -> Result<(), capstan_azure::Error> {
    let Some(mut disk) = client.get_disk(group, name).await? else {
        return Ok(());
    };
    let tags = disk.tags.get_or_insert_default();
    tags.insert(POLICY_TAG.to_owned(), "Detach".to_owned());
    client.put_disk(group, name, &disk).await?;
    Ok(())
}

enum Deleted {
    Verified,
    /// Azure took the deletion; the account may not read the disk.
    Unverified,
    Pending(Duration),
}

async fn delete_disk(
    stage: &mut Request<()>,
    client: &Client,
    group: &str,
    (label, name): (&str, &str),
    unreadable: bool,
) -> Result<Deleted, Error> {
    let doing = || Error::doing(format!("failed to delete {label}: {name}"));
    let finished = stage.finish(client, client.delete_disk(group, name)).await;
    if let Some(after) = finished.map_err(doing())? {
        return Ok(Deleted::Pending(after));
    }
    if unreadable {
        return Ok(Deleted::Unverified);
    }
    match client.get_disk(group, name).await {
        Ok(None) => Ok(Deleted::Verified),
        Ok(Some(_)) => {
            *stage = Request::NotSent;
            Err(Error::NotReady(format!(
                "failed to delete {label}: {name}: it is still there"
            )))
        }
        Err(error) if error.arm().is_some_and(|arm| arm.status == 403) => Ok(Deleted::Unverified),
        Err(error) => Err(doing()(error)),
    }
}
