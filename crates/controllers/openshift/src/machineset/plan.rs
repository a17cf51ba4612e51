//! How many machines to make and which to delete. Invariant: with the same machines the same choice, whatever their
//! order; never more than `replicas` machines by our own doing, never a machine deleted that is not one too many.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use capstan_api::openshift::DeletePolicy;
use jiff::Timestamp;

/// At most so many machines are made or deleted in one pass; the next pass goes on.
pub const BOUND: usize = 50;

/// What about one machine of the namespace matters to a set whose selector it matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: String,
    pub uid: String,
    pub created: Timestamp,
    pub owner: Owner,
    pub deleting: bool,
    /// Somebody annotated it to be deleted first.
    pub marked: bool,
    /// It failed for good.
    pub failed: bool,
    pub has_node: bool,
    /// Since when its node is ready.
    pub ready_since: Option<Timestamp>,
    /// It has all labels of the template.
    pub fully_labeled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Us,
    Nobody,
    Other,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub replicas: usize,
    pub policy: DeletePolicy,
    pub min_ready: Duration,
}

/// The counts that go into the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub replicas: usize,
    pub fully_labeled: usize,
    pub ready: usize,
    pub available: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Make these our own.
    pub adopt: Vec<String>,
    pub create: usize,
    /// Name and UID of machines to delete, the first first.
    pub delete: Vec<(String, String)>,
    pub counts: Counts,
    /// When the next ready machine becomes available.
    pub available_at: Option<Timestamp>,
}

/// Machines that are being deleted count as gone, whoever deletes them.
pub fn plan(members: &[Member], wanted: &Wanted, now: Timestamp) -> Plan {
    let mut present: Vec<&Member> = members
        .iter()
        .filter(|member| !member.deleting && member.owner != Owner::Other)
        .collect();
    present.sort_by(|a, b| a.name.cmp(&b.name));
    let adopt = present
        .iter()
        .filter(|member| member.owner == Owner::Nobody)
        .map(|m| m.name.clone())
        .collect();
    let excess = present.len().saturating_sub(wanted.replicas).min(BOUND);
    let create = wanted.replicas.saturating_sub(present.len()).min(BOUND);
    let (counts, available_at) = count(&present, wanted.min_ready, now);
    let mut by_rank = present;
    by_rank.sort_by_key(|member| (rank(member), order(member, &wanted.policy), member.name.clone()));
    let delete = by_rank
        .iter()
        .take(excess)
        .map(|member| (member.name.clone(), member.uid.clone()))
        .collect();
    Plan {
        adopt,
        create,
        delete,
        counts,
        available_at,
    }
}

/// Who goes first, whatever the policy.
fn rank(member: &Member) -> u8 {
    match member {
        member if member.marked => 0,
        member if member.failed => 1,
        member if !member.has_node => 2,
        _ => 3,
    }
}

/// Who goes first by the policy. Random is a dice thrown once per machine, so that two passes see the same.
fn order(member: &Member, policy: &DeletePolicy) -> i128 {
    match policy {
        DeletePolicy::Oldest => member.created.as_nanosecond(),
        DeletePolicy::Newest => -member.created.as_nanosecond(),
        DeletePolicy::Random | DeletePolicy::Other(_) => {
            let mut hasher = DefaultHasher::new();
            member.uid.hash(&mut hasher);
            i128::from(hasher.finish())
        }
    }
}

fn count(present: &[&Member], min_ready: Duration, now: Timestamp) -> (Counts, Option<Timestamp>) {
    let available_at = |member: &&&Member| member.ready_since.map(|since| since + min_ready);
    let counts = Counts {
        replicas: present.len(),
        fully_labeled: present.iter().filter(|member| member.fully_labeled).count(),
        ready: present.iter().filter(|member| member.ready_since.is_some()).count(),
        available: present
            .iter()
            .filter(|member| available_at(member).is_some_and(|at| at <= now))
            .count(),
    };
    (
        counts,
        present
            .iter()
            .filter_map(|member| available_at(&member))
            .filter(|at| *at > now)
            .min(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const NOW: Timestamp = Timestamp::constant(1_000_000, 0);

    fn member(name: &str, age: i64, change: impl FnOnce(&mut Member)) -> Member {
        let mut member = Member {
            name: name.into(),
            uid: format!("uid-{name}"),
            created: NOW - Duration::from_secs(age.unsigned_abs()),
            owner: Owner::Us,
            deleting: false,
            marked: false,
            failed: false,
            has_node: true,
            ready_since: Some(NOW - Duration::from_secs(60)),
            fully_labeled: true,
        };
        change(&mut member);
        member
    }

    fn wanted(replicas: usize, policy: DeletePolicy) -> Wanted {
        Wanted {
            replicas,
            policy,
            min_ready: Duration::ZERO,
        }
    }

    fn deleted(members: &[Member], replicas: usize, policy: DeletePolicy) -> Vec<String> {
        plan(members, &wanted(replicas, policy), NOW)
            .delete
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    }

    #[rstest]
    #[case::oldest(DeletePolicy::Oldest, ["old", "mid"])]
    #[case::newest(DeletePolicy::Newest, ["new", "mid"])]
    fn the_policy_picks_by_age(#[case] policy: DeletePolicy, #[case] expected: [&str; 2]) {
        let members = [
            member("old", 30, |_| ()),
            member("mid", 20, |_| ()),
            member("new", 10, |_| ()),
        ];
        assert_eq!(deleted(&members, 1, policy), expected);
    }

    #[rstest]
    #[case(DeletePolicy::Oldest)]
    #[case(DeletePolicy::Newest)]
    #[case(DeletePolicy::Random)]
    fn marked_then_failed_then_nodeless_machines_go_first(#[case] policy: DeletePolicy) {
        let members = [
            member("a", 50, |_| ()),
            member("b", 40, |m| m.has_node = false),
            member("c", 30, |m| m.failed = true),
            member("d", 20, |m| m.marked = true),
            member("e", 10, |_| ()),
        ];
        assert_eq!(deleted(&members, 2, policy), ["d", "c", "b"]);
    }

    #[test]
    fn machines_of_equal_age_go_by_name() {
        let members = ["c", "a", "b"].map(|name| member(name, 10, |_| ()));
        assert_eq!(deleted(&members, 1, DeletePolicy::Oldest), ["a", "b"]);
        assert_eq!(deleted(&members, 1, DeletePolicy::Newest), ["a", "b"]);
    }

    #[test]
    fn what_is_being_deleted_counts_as_gone() {
        let members = [member("a", 10, |m| m.deleting = true), member("b", 10, |_| ())];
        let plan = plan(&members, &wanted(2, DeletePolicy::Random), NOW);
        assert_eq!((plan.create, plan.delete.len(), plan.counts.replicas), (1, 0, 1));
        assert!(deleted(&members, 1, DeletePolicy::Random).is_empty());
    }

    #[test]
    fn an_orphan_is_adopted_and_counts_and_another_sets_machine_is_left_alone() {
        let members = [
            member("a", 10, |m| m.owner = Owner::Nobody),
            member("b", 10, |m| m.owner = Owner::Other),
        ];
        let plan = plan(&members, &wanted(2, DeletePolicy::Random), NOW);
        assert_eq!((plan.adopt.as_slice(), plan.create), (["a".to_owned()].as_slice(), 1));
    }

    #[test]
    fn a_machine_is_available_once_it_was_ready_for_long_enough() {
        let members = [
            member("a", 90, |m| m.ready_since = Some(NOW - Duration::from_secs(30))),
            member("b", 90, |m| m.ready_since = Some(NOW - Duration::from_secs(10))),
            member("c", 90, |m| m.ready_since = None),
        ];
        let wanted = Wanted {
            min_ready: Duration::from_secs(20),
            ..wanted(3, DeletePolicy::Random)
        };
        let plan = plan(&members, &wanted, NOW);
        assert_eq!((plan.counts.ready, plan.counts.available), (2, 1));
        assert_eq!(plan.available_at, Some(NOW + Duration::from_secs(10)));
    }

    fn any_member() -> impl Strategy<Value = Member> {
        let owner = prop_oneof![4 => Just(Owner::Us), 1 => Just(Owner::Nobody), 1 => Just(Owner::Other)];
        (0u16..2000, 0i64..50, owner, any::<[bool; 4]>()).prop_map(
            |(id, age, owner, [deleting, marked, failed, node])| {
                member(&format!("m{id}"), age, |member| {
                    member.owner = owner;
                    member.deleting = deleting;
                    member.marked = marked;
                    member.failed = failed;
                    member.has_node = node;
                })
            },
        )
    }

    fn any_policy() -> impl Strategy<Value = DeletePolicy> {
        prop_oneof![
            Just(DeletePolicy::Random),
            Just(DeletePolicy::Newest),
            Just(DeletePolicy::Oldest)
        ]
    }

    proptest! {
        #[test]
        fn carrying_out_the_plan_gives_the_replicas_within_the_bound(
            members in proptest::collection::vec(any_member(), 0..40),
            replicas in 0usize..60,
            policy in any_policy(),
        ) {
            let plan = plan(&members, &wanted(replicas, policy), NOW);
            let present = members.iter().filter(|m| !m.deleting && m.owner != Owner::Other).count();
            prop_assert_eq!(plan.counts.replicas, present);
            prop_assert!(plan.create == 0 || plan.delete.is_empty());
            let after = present + plan.create - plan.delete.len();
            prop_assert_eq!(after, if present.abs_diff(replicas) <= BOUND { replicas } else { after });
            prop_assert!(present + plan.create <= replicas.max(present));
        }

        #[test]
        fn the_choice_does_not_depend_on_the_order(
            mut members in proptest::collection::vec(any_member(), 0..30),
            replicas in 0usize..20,
            policy in any_policy(),
            turn in 0usize..30,
        ) {
            members.sort_by(|a, b| a.name.cmp(&b.name));
            members.dedup_by(|a, b| a.name == b.name);
            let mut turned = members.clone();
            if !turned.is_empty() {
                let by = turn % turned.len();
                turned.rotate_left(by);
            }
            let wanted = wanted(replicas, policy);
            prop_assert_eq!(plan(&members, &wanted, NOW), plan(&turned, &wanted, NOW));
        }

        #[test]
        fn a_second_pass_on_the_result_finds_nothing_more_to_delete(
            members in proptest::collection::vec(any_member(), 0..30),
            replicas in 0usize..30,
            policy in any_policy(),
        ) {
            let wanted = wanted(replicas, policy);
            let first = plan(&members, &wanted, NOW);
            let mut after = members;
            for member in &mut after {
                member.deleting |= first.delete.iter().any(|(name, uid)| *name == member.name && *uid == member.uid);
            }
            let second = plan(&after, &wanted, NOW);
            prop_assert!(second.delete.is_empty());
        }
    }
}
