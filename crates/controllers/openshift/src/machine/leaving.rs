//! What goes after a virtual machine: its disks, its interface, its public address.
//!
//! Invariants: what Azure has confirmed to be gone is not asked about again; nothing that somebody else made under our
//! names is deleted; and nobody waits here for Azure's work.

use super::Target;
use super::error::Error;
use super::fate::Fate;
use super::names::Names;
use capstan_azure::model::Tags;
use capstan_azure::{Client, Error as AzureError, Operation, Owned, Request};
use std::collections::HashMap;
use std::time::Duration;

/// How far a machine's things are gone. Kept between the passes that it takes.
#[derive(Clone, Debug, Default)]
pub struct Leaving {
    /// The change of the virtual machine that keeps disks from going with it.
    pub spared: Request<()>,
    pub disks: Disks,
    pub network: Network,
}

/// The disks of one machine.
#[derive(Clone, Debug, Default)]
pub struct Disks {
    /// As decided from one listing.
    pub fate: Option<Fate>,
    stages: HashMap<String, Request<()>>,
}

impl Disks {
    /// Deletes the doomed, and sees that they are gone: how long to leave them alone, or nothing once they are.
    pub async fn go(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let gone = self.advance(client, group).await;
        if gone.is_err() && !self.stages.values().any(|stage| matches!(stage, Request::Running(_))) {
            // Whatever is the matter, a fresh listing tells more.
            *self = Self::default();
        }
        gone
    }

    async fn advance(&mut self, client: &Client, group: &str) -> Result<Option<Duration>, Error> {
        let Some(fate) = &mut self.fate else {
            return Ok(None);
        };
        let (mut wait, mut trouble) = (None, None);
        // One that does not go keeps none of the others here.
        for (label, name) in std::mem::take(&mut fate.doomed) {
            let stage = self.stages.entry(name.clone()).or_default();
            match disk_gone(stage, client, group, label, &name).await {
                Ok(None) => {
                    self.stages.remove(&name);
                    continue;
                }
                Ok(Some(after)) => wait = Some(wait.map_or(after, |wait: Duration| wait.min(after))),
                Err(error) => trouble = trouble.or(Some(error)),
            }
            fate.doomed.push((label, name));
        }
        trouble.map_or(Ok(wait), Err)
    }
}

async fn disk_gone(
    stage: &mut Request<()>,
    client: &Client,
    group: &str,
    label: &str,
    name: &str,
) -> Result<Option<Duration>, Error> {
    let doing = || Error::doing(format!("failed to delete {label}: {name}"));
    if let Some(after) = stage
        .finish(client, client.delete_disk(group, name))
        .await
        .map_err(doing())?
    {
        return Ok(Some(after));
    }
    match client.get_disk(group, name).await.map_err(doing())? {
        None => Ok(None),
        Some(_) => {
            *stage = Request::NotSent;
            Err(Error::NotYet(format!(
                "failed to delete {label}: {name}: it is still there"
            )))
        }
    }
}

/// What to know of a machine's network before it goes.
#[derive(Clone, Copy, Debug)]
pub struct Ties {
    pub public_ip: bool,
    /// Its interface may be another machine's by now.
    pub lent: bool,
    /// A virtual machine of ours had it. Where none ever was, only what was made for this machine is deleted.
    pub ours: bool,
    /// The controller before this one worked on the machine.
    pub inherited: bool,
}

impl Ties {
    /// Whether a part of the network with these tags goes with the machine.
    fn own(self, names: &Names, tags: Option<&Tags>) -> bool {
        names.has_made(tags, self.inherited) || (self.ours && !names.is_of_another(tags))
    }
}

/// The network of one machine.
#[derive(Clone, Debug, Default)]
pub struct Network {
    nic: Request<()>,
    public_ip: Request<()>,
}

impl Network {
    /// The interface goes, then the public address that it held.
    pub async fn go(&mut self, target: &Target, ties: Ties) -> Result<Option<Duration>, Error> {
        let client = &target.account.client;
        match self.nic.finish(client, delete_interface(target, ties)).await {
            Err(error) if ties.lent && is_in_use(&error) => {
                (self.nic, self.public_ip) = (Request::Done(()), Request::Done(()));
            }
            Err(error) => {
                return Err(Error::doing(format!("failed to delete nic {}", target.names.nic()))(
                    error,
                ));
            }
            Ok(Some(after)) => return Ok(Some(after)),
            Ok(None) => {}
        }
        if !ties.public_ip {
            return Ok(None);
        }
        let gone = self.public_ip.finish(client, delete_address(target, ties)).await;
        gone.map_err(Error::doing(format!(
            "failed to delete public ip {}",
            target.names.public_ip()
        )))
    }
}

async fn delete_interface(target: &Target, ties: Ties) -> Result<Option<Operation>, AzureError> {
    let Target { names, account, .. } = target;
    let (client, name) = (&account.client, names.nic());
    // Most interfaces go with their virtual machine: asking costs no more than deleting in vain.
    let Some(found) = client.get_nic(&names.group, &name).await? else {
        return Ok(None);
    };
    match Owned::by_tags(&found, |tags| ties.own(names, Some(tags))) {
        Ok(owned) => client.delete_nic(&owned).await,
        Err(_) => Ok(None),
    }
}

async fn delete_address(target: &Target, ties: Ties) -> Result<Option<Operation>, AzureError> {
    let Target { names, account, .. } = target;
    let (client, name) = (&account.client, names.public_ip());
    let Some(found) = client.get_public_ip(&names.group, &name).await? else {
        return Ok(None);
    };
    match Owned::by_tags(&found, |tags| ties.own(names, Some(tags))) {
        Ok(owned) => client.delete_public_ip(&owned).await,
        Err(_) => Ok(None),
    }
}

/// A virtual machine still has the interface.
pub fn is_in_use(error: &AzureError) -> bool {
    error.arm().is_some_and(|arm| arm.has_code("NicInUse"))
}
