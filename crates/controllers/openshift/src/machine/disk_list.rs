//! The disks of a resource group, listed once for all machines that go at the same time.

use super::error::Error;
use capstan_azure::Client;
use capstan_azure::model::Tags;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What matters of a disk when its machine is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: String,
    pub attached_to: Option<String>,
    pub tags: Option<Tags>,
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
            let attached_to = disk.managed_by.filter(|id| !id.is_empty());
            Some((
                disk.name?.to_lowercase(),
                Found {
                    id: disk.id.unwrap_or_default(),
                    attached_to,
                    tags: disk.tags,
                },
            ))
        });
        let listing: Listing = Arc::new(found.collect());
        *slot = Some((begun, listing.clone()));
        Ok(listing)
    }
}
