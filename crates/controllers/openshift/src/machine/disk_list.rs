//! The disks of a resource group, listed once for all machines that are deleted at the same time.

use super::error::Error;
use capstan_azure::Client;
use capstan_core::machine::disks::{Found, Listing};
use capstan_core::{Clock, Memo};
use std::sync::Arc;
use std::time::Duration;

/// An account that may not list disks is asked for them again after this long: rights take minutes to spread.
const REFUSED: Duration = Duration::from_secs(600);

/// More groups than one cluster has machines in.
const GROUPS: usize = 100;

/// By account, subscription and group.
pub struct DiskLists {
    clock: Clock,
    /// `None`: the account may not list disks.
    lists: Memo<[String; 3], Option<Listing>>,
}

impl DiskLists {
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            lists: Memo::new(clock, GROUPS),
        }
    }

    /// Whether the account is known to have no right to list disks.
    pub fn is_refused(&self, client: &Client, group: &str) -> bool {
        let refused = |age: Duration, found: &Option<Listing>| found.is_none() && age < REFUSED;
        self.lists.has(&key(client, group), refused)
    }

    /// Returns a list that was begun after this call: what was gone by now is not in it. `None`: the account may neither list
    /// nor read disks. OpenShift's own role may delete them, and no more.
    pub async fn get(&self, client: &Client, group: &str) -> Result<Option<Listing>, Error> {
        let key = key(client, group);
        let asked = self.clock.instant();
        let fresh = |age: Duration, found: &Option<Listing>| match found {
            Some(_) => age <= self.clock.since(asked),
            None => age < REFUSED,
        };
        self.lists.get_if(&key, fresh, list(client, group)).await
    }
}

fn key(client: &Client, group: &str) -> [String; 3] {
    [client.identity(), client.subscription(), group].map(str::to_lowercase)
}

async fn list(client: &Client, group: &str) -> Result<Option<Listing>, Error> {
    let disks = match client.list_disks(group).await {
        Ok(disks) => disks,
        // A group that is not there has no disks.
        Err(error) if error.is_not_found() => Vec::new(),
        Err(error) if error.arm().is_some_and(|arm| arm.status == 403) => {
            tracing::warn!(group, %error, "the account may not list disks: they are deleted by name");
            return Ok(None);
        }
        Err(error) => return Err(Error::doing(format!("listing the disks of {group}"))(error)),
    };
    let found = disks.into_iter().filter_map(|disk| {
        let created = disk.properties.and_then(|properties| properties.time_created);
        let found = Found {
            name: disk.name?,
            id: disk.id.unwrap_or_default(),
            tags: disk.tags,
            created: created.and_then(|time| time.parse().ok()),
            managed_by: disk.managed_by.filter(|holder| !holder.is_empty()),
            zones: disk.zones.unwrap_or_default(),
            location: disk.location,
            kind: disk.sku.and_then(|sku| sku.name),
        };
        Some((found.name.to_lowercase(), found))
    });
    Ok(Some(Arc::new(found.collect())))
}
