//! Decides which clones may start where their number is limited, for each vCenter and for each datastore.
//!
//! Invariants: no limit is exceeded; whoever has the fewest clones under way is next, then whoever has waited longest; a datastore
//! that is full of clones keeps nobody from another one.

use std::collections::BTreeMap;

/// How many clones may be under way at once; `None`: any number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloneLimits {
    pub per_vcenter: Option<usize>,
    pub per_datastore: Option<usize>,
}

impl CloneLimits {
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// A clone that wants to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneRequest {
    pub vcenter: String,
    pub datastore: String,
    /// Whose it is: turns are fair between owners.
    pub owner: String,
}

/// The clones that wait and those that are under way, by their tickets. Tickets grow, so their order is that of arrival.
#[derive(Debug, Default)]
pub struct Turns {
    limits: CloneLimits,
    waiting: BTreeMap<u64, CloneRequest>,
    running: BTreeMap<u64, CloneRequest>,
    last: u64,
}

impl Turns {
    pub fn new(limits: CloneLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Adds a clone to those that wait; returns its ticket.
    pub fn ask(&mut self, request: CloneRequest) -> u64 {
        self.last += 1;
        self.waiting.insert(self.last, request);
        self.last
    }

    /// Removes a clone that has ended, or that nobody wants any more.
    pub fn leave(&mut self, ticket: u64) {
        self.waiting.remove(&ticket);
        self.running.remove(&ticket);
    }

    /// Starts all clones whose turn it is; returns their tickets.
    pub fn start(&mut self) -> Vec<u64> {
        let mut started = Vec::new();
        while let Some(ticket) = self.next() {
            if let Some(request) = self.waiting.remove(&ticket) {
                self.running.insert(ticket, request);
                started.push(ticket);
            }
        }
        started
    }

    fn next(&self) -> Option<u64> {
        let with_room = self.waiting.iter().filter(|(_, request)| self.has_room(request));
        let first =
            with_room.min_by_key(|(ticket, request)| (self.count(|other| other.owner == request.owner), **ticket));
        first.map(|(ticket, _)| *ticket)
    }

    fn has_room(&self, request: &CloneRequest) -> bool {
        let same_vcenter = |other: &CloneRequest| other.vcenter == request.vcenter;
        let same_datastore = |other: &CloneRequest| same_vcenter(other) && other.datastore == request.datastore;
        let fits = |limit: Option<usize>, count: usize| limit.is_none_or(|limit| count < limit);
        fits(self.limits.per_vcenter, self.count(same_vcenter))
            && fits(self.limits.per_datastore, self.count(same_datastore))
    }

    fn count(&self, is_so: impl Fn(&CloneRequest) -> bool) -> usize {
        self.running.values().filter(|running| is_so(running)).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(datastore: &str, owner: &str) -> CloneRequest {
        CloneRequest {
            vcenter: "vc".into(),
            datastore: datastore.into(),
            owner: owner.into(),
        }
    }

    fn turns(per_vcenter: usize, per_datastore: usize) -> Turns {
        Turns::new(CloneLimits {
            per_vcenter: Some(per_vcenter),
            per_datastore: Some(per_datastore),
        })
    }

    #[test]
    fn a_small_owner_does_not_wait_for_a_large_one() {
        let mut turns = turns(2, 9);
        let many: Vec<u64> = (0..5).map(|_| turns.ask(request("a", "large"))).collect();
        assert_eq!(turns.start(), many[..2]);
        let small = turns.ask(request("a", "small"));
        turns.leave(many[0]);
        assert_eq!(turns.start(), [small]);
        turns.leave(many[1]);
        assert_eq!(turns.start(), [many[2]]);
    }

    #[test]
    fn a_busy_datastore_keeps_nobody_from_another() {
        let mut turns = turns(9, 1);
        let first = turns.ask(request("a", "x"));
        let second = turns.ask(request("a", "x"));
        let other = turns.ask(request("b", "x"));
        assert_eq!(turns.start(), [first, other]);
        turns.leave(second);
        turns.leave(first);
        assert_eq!(turns.start(), Vec::<u64>::new(), "nobody waits any more");
    }

    proptest! {
        #[test]
        fn limits_hold_and_everybody_gets_a_turn(
            asked in prop::collection::vec((0..3_u8, 0..3_u8), 1..40), per_vcenter in 1..5_usize, per_datastore in 1..4_usize,
        ) {
            let mut turns = turns(per_vcenter, per_datastore);
            let mut left: Vec<u64> = Vec::new();
            for (datastore, owner) in &asked {
                turns.ask(request(&datastore.to_string(), &owner.to_string()));
            }
            let mut running = Vec::new();
            while left.len() < asked.len() {
                running.extend(turns.start());
                prop_assert!(!running.is_empty() && running.len() <= per_vcenter);
                for datastore in 0..3_u8 {
                    let there = turns.count(|request| request.datastore == datastore.to_string());
                    prop_assert!(there <= per_datastore);
                }
                let ended = running.remove(0);
                turns.leave(ended);
                left.push(ended);
            }
        }
    }
}
