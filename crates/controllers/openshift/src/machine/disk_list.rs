//! The disks of a resource group, listed once for all machines that go at the same time.

use super::error::Error;
use capstan_azure::Client;
use capstan_azure::model::Tags;
use jiff::Timestamp;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What matters of a disk when its machine is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub name: String,
    pub id: String,
    pub tags: Option<Tags>,
    pub created: Option<Timestamp>,
}

/// By lower-case name.
pub type Listing = Arc<HashMap<String, Found>>;

type Slot = Arc<tokio::sync::Mutex<Option<(Instant, Listing)>>>;

#[derive(Default)]
pub struct DiskLists(Mutex<HashMap<(String, String), Slot>>);

impl DiskLists {
    /// A list that was begun after this call: what was gone by now is not in it.
    pub async fn get(&self, client: &Client, group: &str) -> Result<Listing, Error> {
        let asked = Instant::now();
        let slot = {
            let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            slots
                .entry((client.subscription().to_lowercase(), group.to_lowercase()))
                .or_default()
                .clone()
        };
        let mut slot = slot.lock().await;
        if let Some((begun, listing)) = &*slot
            && *begun >= asked
        {
            return Ok(listing.clone());
        }
        let begun = Instant::now();
        let disks = client
            .list_disks(group)
            .await
            .map_err(Error::doing(format!("listing the disks of {group}")))?;
        let found = disks.into_iter().filter_map(|disk| {
            let created = disk.properties.and_then(|properties| properties.time_created);
            let found = Found {
                name: disk.name?,
                id: disk.id.unwrap_or_default(),
                tags: disk.tags,
                created: created.and_then(|time| time.parse().ok()),
            };
            Some((found.name.to_lowercase(), found))
        });
        let listing: Listing = Arc::new(found.collect());
        *slot = Some((begun, listing.clone()));
        Ok(listing)
    }
}
