//! Chooses the datastore of a clone where the spec leaves that open.
//!
//! Invariant: many machines spread over the datastores in proportion to their free space, also while nobody has read the
//! free space again; one machine gets the same datastore at every try, as long as the free space is about the same.

/// Returns the index of the datastore for a machine, among candidates with a name and free bytes. Every candidate gets a
/// number from the machine and its own name, weighted by its free space, and the smallest wins.
pub fn choose(machine: &str, candidates: &[(&str, u64)]) -> Option<usize> {
    let weighted = candidates.iter().enumerate().map(|(index, (name, free))| {
        let weight = (*free).max(1) as f64;
        (-share(machine, name).ln() / weight, *name, index)
    });
    let first = weighted.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(other.1)));
    first.map(|(_, _, index)| index)
}

/// Returns a number in 0..1 that depends on nothing but the two names (FNV-1a, then a mixer for the upper bits).
fn share(machine: &str, name: &str) -> f64 {
    let bytes = machine.bytes().chain([0]).chain(name.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    ((hash >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_spread_over_datastores_by_their_free_space() {
        let stores = [("a", 100), ("b", 100), ("c", 200), ("full", 0)];
        let mut counts = [0; 4];
        for n in 0..400 {
            counts[choose(&format!("uid-{n}"), &stores).unwrap()] += 1;
        }
        assert!(counts[0] > 60 && counts[1] > 60 && counts[2] > 140, "{counts:?}");
        assert_eq!(counts[3], 0);
    }

    #[test]
    fn a_machine_gets_the_same_datastore_again() {
        let stores = [("a", 100), ("b", 100), ("c", 100)];
        let first = choose("uid", &stores).unwrap();
        let reversed: Vec<_> = stores.iter().rev().copied().collect();
        assert_eq!(reversed[choose("uid", &reversed).unwrap()], stores[first]);
        assert_eq!(choose("uid", &[]), None);
    }
}
