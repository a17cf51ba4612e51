//! Deletes a machine's interface and public address, once its virtual machine is gone.
//!
//! Invariant: a resource with our name that somebody else made is never deleted.

use super::Target;
use super::error::Error;
use capstan_azure::{Error as AzureError, Operation, Owned, Request};
use capstan_core::machine::names::{Names, Tags};
use std::time::Duration;

/// The facts that decide whether a part of the network is the machine's.
#[derive(Clone, Copy, Debug)]
pub struct Ownership {
    /// The machine may have a public address.
    pub public_ip: bool,
    /// Another virtual machine has the machine's name: the interface may be in use by it.
    pub foreign_vm: bool,
    /// A virtual machine was recorded as this machine's. Where none was, only resources that were made for this machine
    /// are deleted.
    pub had_vm: bool,
    /// The controller before this one worked on the machine.
    pub inherited: bool,
}

impl Ownership {
    /// Whether a part of the network with these tags goes with the machine.
    fn covers(self, names: &Names, tags: Option<&Tags>) -> bool {
        names.has_made(tags, self.inherited) || (self.had_vm && !names.is_of_another(tags))
    }
}

/// How far the deletion of the network is.
#[derive(Clone, Debug, Default)]
pub struct Network {
    nic: Request<()>,
    /// The address of today's name, and that of the name that an earlier version gave it: both may be there.
    public_ips: [Request<()>; 2],
}

impl Network {
    /// The interface has gone with its virtual machine.
    pub fn interface_went(&mut self) {
        self.nic = Request::Done(());
    }

    /// Deletes the interface, then the public address that it held. Returns how long to wait, or nothing once both are
    /// gone.
    pub async fn delete(&mut self, target: &Target, ownership: Ownership) -> Result<Option<Duration>, Error> {
        let client = &target.account.client;
        match self.nic.finish(client, delete_interface(target, ownership)).await {
            Err(error) if ownership.foreign_vm && is_in_use(&error) => {
                self.nic = Request::Done(());
                self.public_ips = [Request::Done(()), Request::Done(())];
            }
            Err(error) => {
                return Err(Error::doing(format!("failed to delete nic {}", target.names.nic()))(
                    error,
                ));
            }
            Ok(Some(after)) => return Ok(Some(after)),
            Ok(None) => {}
        }
        if !ownership.public_ip {
            return Ok(None);
        }
        let names = std::iter::once(target.names.public_ip()).chain(target.names.former_public_ip());
        let mut wait = None;
        for (name, stage) in names.zip(&mut self.public_ips) {
            let deleted = stage.finish(client, delete_address(target, &name, ownership)).await;
            let after = deleted.map_err(Error::doing(format!("failed to delete public ip {name}")))?;
            wait = wait.into_iter().chain(after).min();
        }
        Ok(wait)
    }
}

async fn delete_interface(target: &Target, ownership: Ownership) -> Result<Option<Operation>, AzureError> {
    let Target { names, account, .. } = target;
    let (client, name) = (&account.client, names.nic());
    // Most interfaces go with their virtual machine: asking costs no more than deleting in vain.
    let Some(found) = client.get_nic(&names.group, &name).await? else {
        return Ok(None);
    };
    match Owned::by_tags(&found, |tags| ownership.covers(names, Some(tags))) {
        Ok(owned) => client.delete_nic(&owned).await,
        Err(_) => Ok(None),
    }
}

async fn delete_address(target: &Target, name: &str, ownership: Ownership) -> Result<Option<Operation>, AzureError> {
    let Target { names, account, .. } = target;
    let Some(found) = account.client.get_public_ip(&names.group, name).await? else {
        return Ok(None);
    };
    match Owned::by_tags(&found, |tags| ownership.covers(names, Some(tags))) {
        Ok(owned) => account.client.delete_public_ip(&owned).await,
        Err(_) => Ok(None),
    }
}

/// Whether a virtual machine still uses the interface.
pub fn is_in_use(error: &AzureError) -> bool {
    error.arm().is_some_and(|arm| arm.has_code("NicInUse"))
}
