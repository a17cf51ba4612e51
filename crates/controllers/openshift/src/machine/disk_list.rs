//! The disks of a resource group, listed once for all machines that are deleted at the same time.

use super::error::Error;
use capstan_azure::Client;
use capstan_core::machine::disks::{Found, Listing};
use capstan_core::{Clock, Memo};
use std::sync::Arc;
use std::time::Duration;

/// A deletion asks for disks that the account may not read again after this long: rights change rarely, and it works without.
pub const OPTIONAL: Duration = Duration::from_secs(3600);

/// What cannot go on without the disks asks for them again after this long: rights take minutes to spread.
pub const NEEDED: Duration = Duration::from_secs(600);

/// Azure did not tell whether the account may read disks: it is not asked again for this long, as for quotas.
const UNKNOWN: Duration = Duration::from_secs(120);

/// More groups than one cluster has machines in.
const GROUPS: usize = 100;

/// Azure's last answer about the disks of a group.
#[derive(Clone)]
enum Answer {
    Known(Listing),
    /// The account may read disks; nobody has asked which there are.
    Readable,
    /// The account may neither list nor read disks.
    Refused,
    /// Azure did not answer.
    Unknown,
}

/// By account, subscription and group.
pub struct DiskLists {
    clock: Clock,
    lists: Memo<[String; 3], Answer>,
}

impl DiskLists {
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            lists: Memo::new(clock, GROUPS),
        }
    }

    /// Learns whether the account may read disks, by one that is not there, if that is not known. Deletions need not ask then.
    pub async fn learn(&self, client: &Client, group: &str, disk: &str) -> Result<(), Error> {
        let known = |age: Duration, answer: &Answer| match answer {
            Answer::Known(_) | Answer::Readable => true,
            Answer::Refused => age < NEEDED,
            Answer::Unknown => age < UNKNOWN,
        };
        let ask = async {
            Ok(match client.get_disk(group, disk).await {
                Ok(_) => Answer::Readable,
                Err(error) => refused(group, &error).unwrap_or(Answer::Unknown),
            })
        };
        self.lists.get_if(&key(client, group), known, ask).await.map(drop)
    }

    /// Returns a list that was begun after this call: what was gone by now is not in it. `None`: the account may neither list
    /// nor read disks, as of less than `refused` ago. OpenShift's own role may delete them, and no more.
    pub async fn get(&self, client: &Client, group: &str, refused: Duration) -> Result<Option<Listing>, Error> {
        let key = key(client, group);
        let asked = self.clock.instant();
        let fresh = |age: Duration, answer: &Answer| match answer {
            Answer::Known(_) => age <= self.clock.since(asked),
            Answer::Refused => age < refused,
            Answer::Readable | Answer::Unknown => false,
        };
        Ok(match self.lists.get_if(&key, fresh, list(client, group)).await? {
            Answer::Known(listing) => Some(listing),
            Answer::Readable | Answer::Refused | Answer::Unknown => None,
        })
    }
}

fn key(client: &Client, group: &str) -> [String; 3] {
    [client.identity(), client.subscription(), group].map(str::to_lowercase)
}

fn refused(group: &str, error: &capstan_azure::Error) -> Option<Answer> {
    error.arm().filter(|arm| arm.status == 403)?;
    tracing::warn!(group, %error, "the account may not read disks: they are deleted by name");
    Some(Answer::Refused)
}

async fn list(client: &Client, group: &str) -> Result<Answer, Error> {
    let disks = match client.list_disks(group).await {
        Ok(disks) => disks,
        // A group that is not there has no disks.
        Err(error) if error.is_not_found() => Vec::new(),
        Err(error) => {
            let doing = Error::doing(format!("listing the disks of {group}"));
            return refused(group, &error).ok_or_else(|| doing(error));
        }
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
    Ok(Answer::Known(Arc::new(found.collect())))
}
