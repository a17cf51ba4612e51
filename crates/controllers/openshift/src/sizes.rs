//! What the machine controller has learnt of VM sizes, for admission to warn by. Invariant: admission asks no cloud; it
//! says what is known and nothing otherwise.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// How many data disks sizes take, by location and name. Clones share what is known.
#[derive(Clone, Debug, Default)]
pub struct Sizes(Arc<RwLock<HashMap<(String, String), usize>>>);

impl Sizes {
    pub fn note(&self, location: &str, size: &str, most_data_disks: Option<u32>) {
        if let Some(most) = most_data_disks.and_then(|most| usize::try_from(most).ok()) {
            self.0
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(key(location, size), most);
        }
    }

    pub fn most_data_disks(&self, location: &str, size: &str) -> Option<usize> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key(location, size))
            .copied()
    }
}

/// Azure compares both without case, and takes `West Europe` for `westeurope`.
fn key(location: &str, size: &str) -> (String, String) {
    (
        location.replace(' ', "").to_ascii_lowercase(),
        size.to_ascii_lowercase(),
    )
}
