//! Whether a region's quota has room for one more machine. Pure.
//!
//! Azure counts vCPUs by region and by the family of the size, and spot machines apart from all others. What Azure does
//! not mention is no reason to refuse: its own answer decides.

use std::collections::BTreeSet;

/// A quota of a subscription in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Azure's key: `cores`, `virtualMachines`, `lowPriorityCores`, or a family of sizes.
    pub name: String,
    /// As Azure's portal shows it.
    pub label: String,
    pub used: i64,
    /// Below zero: no limit.
    pub limit: i64,
}

/// What one machine takes.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    pub size: &'a str,
    pub family: &'a str,
    pub v_cpus: i64,
    pub spot: bool,
    /// The machine uses a capacity reservation, which has counted against the quota already.
    pub reserved: bool,
}

impl Need<'_> {
    /// How much of a quota the machine takes.
    fn of(&self, usage: &Usage) -> Option<i64> {
        let is = |name: &str| !name.is_empty() && usage.name.eq_ignore_ascii_case(name);
        if is("virtualMachines") {
            return Some(1);
        }
        let counted = match self.spot {
            true => is("lowPriorityCores"),
            false => is("cores") || is(self.family),
        };
        counted.then_some(self.v_cpus)
    }
}

/// The room of a region by one answer of Azure, less the machines that were let in since: their virtual machines are not in that
/// answer yet.
#[derive(Clone, Debug, Default)]
pub struct Room {
    usages: Vec<Usage>,
    /// The UIDs of the machines that were let in.
    admitted: BTreeSet<String>,
}

impl Room {
    pub fn new(usages: Vec<Usage>) -> Self {
        Self {
            usages,
            admitted: BTreeSet::new(),
        }
    }

    /// Lets a machine in, once, or returns the message about the quota that it does not fit into.
    pub fn admit(&mut self, uid: &str, need: &Need, location: &str) -> Result<(), String> {
        if need.reserved || self.admitted.contains(uid) {
            return Ok(());
        }
        if let Some(message) = exceeded(need, &self.usages, location) {
            return Err(message);
        }
        for usage in &mut self.usages {
            usage.used = usage.used.saturating_add(need.of(usage).unwrap_or_default());
        }
        self.admitted.insert(uid.to_owned());
        Ok(())
    }
}

/// Returns the message about the first quota that the machine does not fit into. `None`: there is room.
fn exceeded(need: &Need, usages: &[Usage], location: &str) -> Option<String> {
    if need.reserved {
        return None;
    }
    usages.iter().find_map(|usage| {
        let more = need.of(usage)?;
        let full = usage.limit >= 0 && usage.used.saturating_add(more) > usage.limit;
        full.then(|| message(need, usage, more, location))
    })
}

fn message(need: &Need, usage: &Usage, more: i64, location: &str) -> String {
    let Usage {
        name,
        label,
        used,
        limit,
    } = usage;
    let shown = if label.is_empty() { name } else { label };
    format!(
        "quota exceeded: {shown} ({name}) in location {location}: limit {limit}, used {used}, a machine of vm size {} needs \
         {more} more. request a higher quota in Azure's portal (Quotas, Compute), select a different vm size or location, or \
         delete machines; nothing was created, and the machine is created as soon as there is room",
        need.size
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const NEED: Need = Need {
        size: "Standard_D4s_v3",
        family: "standardDSv3Family",
        v_cpus: 4,
        spot: false,
        reserved: false,
    };
    const SPOT: Need = Need { spot: true, ..NEED };
    const RESERVED: Need = Need { reserved: true, ..NEED };
    const UNKNOWN_FAMILY: Need = Need { family: "", ..NEED };

    #[rstest]
    #[case::room(NEED, "cores", 96, 100, false)]
    #[case::region_full(NEED, "cores", 97, 100, true)]
    #[case::family_full(NEED, "STANDARDDSV3FAMILY", 8, 10, true)]
    #[case::family_without_quota(NEED, "standardDSv3Family", 0, 0, true)]
    #[case::another_family(NEED, "standardESv3Family", 10, 10, false)]
    #[case::count_of_machines(NEED, "virtualMachines", 25_000, 25_000, true)]
    #[case::one_machine_more(NEED, "virtualMachines", 24_999, 25_000, false)]
    #[case::no_limit(NEED, "cores", 5, -1, false)]
    #[case::spot_counts_apart(SPOT, "cores", 100, 100, false)]
    #[case::spot_full(SPOT, "lowPriorityCores", 10, 10, true)]
    #[case::others_do_not_count_as_spot(NEED, "lowPriorityCores", 10, 10, false)]
    #[case::reserved(RESERVED, "cores", 100, 100, false)]
    #[case::a_quota_without_a_name(UNKNOWN_FAMILY, "", 10, 10, false)]
    fn a_machine_is_refused_by_the_quota_that_it_does_not_fit_into(
        #[case] need: Need,
        #[case] name: &str,
        #[case] used: i64,
        #[case] limit: i64,
        #[case] refused: bool,
    ) {
        let usage = Usage {
            name: name.into(),
            label: String::new(),
            used,
            limit,
        };
        assert_eq!(exceeded(&need, &[usage], "eastus").is_some(), refused);
    }

    #[test]
    fn machines_that_are_let_in_take_room_from_the_next_ones_once() {
        let of = |name: &str, limit: i64| Usage {
            name: name.into(),
            label: String::new(),
            used: 0,
            limit,
        };
        let mut room = Room::new(vec![
            of("cores", 9),
            of("lowPriorityCores", 4),
            of("virtualMachines", -1),
        ]);
        let mut admits = |uid: &str, need: &Need| room.admit(uid, need, "eastus").is_ok();
        assert!(admits("a", &NEED) && admits("a", &NEED) && admits("b", &NEED));
        assert!(!admits("c", &NEED) && !admits("c", &NEED));
        assert!(admits("a", &NEED), "a machine that was let in is let in again");
        assert!(
            admits("spot", &SPOT) && !admits("spot2", &SPOT),
            "spot machines count apart"
        );
        assert!(admits("reserved", &RESERVED));
    }

    #[test]
    fn the_message_names_quota_limit_usage_need_and_remedy() {
        let usage = Usage {
            name: "standardDSv3Family".into(),
            label: "Standard DSv3 Family vCPUs".into(),
            used: 8,
            limit: 10,
        };
        let text = exceeded(&NEED, &[usage], "eastus").unwrap_or_default();
        for part in [
            "Standard DSv3 Family vCPUs (standardDSv3Family) in location eastus",
            "limit 10, used 8",
            "vm size Standard_D4s_v3 needs 4 more",
            "request a higher quota",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
