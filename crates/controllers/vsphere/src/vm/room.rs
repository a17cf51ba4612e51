//! The room that clones under way will take on their datastores. vCenter counts it as free until they end.

use std::collections::HashMap;
use std::sync::Arc;

use capstan_core::vm::choose_datastore;
use capstan_vsphere::{Datastore, MoRef};
use parking_lot::Mutex;

/// A datastore of a vCenter.
type Place = (String, MoRef);

/// The room that is reserved, for all clones of the process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Room(Arc<Mutex<HashMap<Place, u64>>>);

/// The room of one clone, until this value is dropped.
#[derive(Debug)]
pub struct Reservation {
    place: Place,
    bytes: u64,
    room: Room,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.room.0.lock();
        if let Some(left) = reserved.get_mut(&self.place) {
            *left = left.saturating_sub(self.bytes);
            if *left == 0 {
                reserved.remove(&self.place);
            }
        }
    }
}

impl Room {
    /// Chooses a datastore for a machine by the room that clones under way leave, and reserves its own. No other clone is
    /// placed between the two.
    pub fn choose(
        &self,
        vcenter: &str,
        machine: &str,
        among: &[&Datastore],
        bytes: u64,
    ) -> Option<(Datastore, Reservation)> {
        let mut reserved = self.0.lock();
        let place = |datastore: &Datastore| (vcenter.to_owned(), datastore.reference.clone());
        let left = |datastore: &Datastore| {
            let taken = reserved.get(&place(datastore)).copied().unwrap_or_default();
            let free = u64::try_from(datastore.free_bytes).unwrap_or_default();
            free.saturating_sub(taken)
        };
        let candidates: Vec<(&str, u64)> = among.iter().map(|one| (one.name.as_str(), left(one))).collect();
        let chosen = *among.get(choose_datastore(machine, &candidates)?)?;
        let place = place(chosen);
        *reserved.entry(place.clone()).or_default() += bytes;
        let reservation = Reservation {
            place,
            bytes,
            room: self.clone(),
        };
        Some((chosen.clone(), reservation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn datastore(name: &str) -> Datastore {
        Datastore {
            reference: MoRef::new("Datastore", name),
            name: name.to_owned(),
            free_bytes: 50 << 30,
            accessible: true,
            maintenance: "normal".to_owned(),
        }
    }

    #[test]
    fn a_clone_under_way_takes_room_from_the_next_one_until_it_ends() {
        let room = Room::default();
        let stores = [datastore("a"), datastore("b")];
        let stores: Vec<&Datastore> = stores.iter().collect();
        let place = |vcenter: &str, bytes: u64| room.choose(vcenter, "machine", &stores, bytes).unwrap();
        let (first, held) = place("vc", 50 * GIB);
        let (second, _held) = place("vc", GIB);
        assert_ne!(first.name, second.name, "the first clone will fill its datastore");
        assert_eq!(place("another", GIB).0.name, first.name, "another vCenter");
        drop(held);
        assert_eq!(place("vc", GIB).0.name, first.name);
    }

    #[test]
    fn every_reservation_ends() {
        let room = Room::default();
        let store = datastore("a");
        let held: Vec<_> = (0..3)
            .map(|n| room.choose("vc", &format!("m{n}"), &[&store], GIB))
            .collect();
        assert_eq!(room.0.lock().values().sum::<u64>(), 3 * GIB);
        drop(held);
        assert!(room.0.lock().is_empty());
        assert!(room.choose("vc", "m", &[], GIB).is_none());
    }
}
