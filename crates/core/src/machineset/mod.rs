//! How many machines a MachineSet creates and which it deletes. Invariant: the same machines give the same choice,
//! whatever their order; a set never creates more than `replicas` machines and never deletes a machine below that.

pub mod capacity;
mod describe;

pub use describe::forecast;

use std::collections::BTreeMap;
use std::time::Duration;

use capstan_api::openshift::DeletePolicy;
use jiff::Timestamp;

use crate::order;
use crate::plan::Plan;

/// At most this many machines are created or deleted in one reconcile; the next one continues.
pub const BOUND: usize = 50;

/// Names one machine for good: another machine of the same name has another UID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    pub name: String,
    pub uid: String,
}

/// A machine in the set's namespace that the set's selector matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: String,
    pub uid: String,
    pub created: Timestamp,
    pub owner: Owner,
    pub deleting: bool,
    /// Whether an annotation asks for this machine to be deleted first.
    pub marked: bool,
    /// Whether it failed for good.
    pub failed: bool,
    pub has_node: bool,
    /// Since when its node is ready.
    pub ready_since: Option<Timestamp>,
    /// Whether it has all labels of the template.
    pub fully_labeled: bool,
}

impl Member {
    fn subject(&self) -> Subject {
        Subject {
            name: self.name.clone(),
            uid: self.uid.clone(),
        }
    }

    fn available_at(&self, min_ready: Duration) -> Option<Timestamp> {
        self.ready_since.map(|since| since + min_ready)
    }
}

/// Who controls a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This set.
    Set,
    Nobody,
    Other,
}

/// What the user asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    pub replicas: usize,
    pub policy: DeletePolicy,
    pub min_ready: Duration,
}

/// Everything that a plan depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    pub desired: Desired,
    pub members: Vec<Member>,
    /// Whether the API server itself said that the set is there and stays. Read only where there is a machine to adopt:
    /// a machine that a deleted set adopts would be deleted with it.
    pub set_confirmed: bool,
    /// Annotations about the capacity of its machines that the set lacks.
    pub annotations: BTreeMap<String, String>,
}

/// One effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Become the controller of these machines.
    Adopt(Vec<Subject>),
    Create(usize),
    /// Delete exactly these machines.
    Delete(Vec<Subject>),
    /// Put these annotations on the set.
    Annotate(BTreeMap<String, String>),
}

/// The counts that go into the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub replicas: usize,
    pub fully_labeled: usize,
    pub ready: usize,
    pub available: usize,
}

/// The machines that count: one that is being deleted counts as gone, whoever deletes it.
fn present(observed: &Observed) -> Vec<&Member> {
    let mut present: Vec<&Member> = observed
        .members
        .iter()
        .filter(|member| !member.deleting && member.owner != Owner::Other)
        .collect();
    present.sort_by(|a, b| a.name.cmp(&b.name));
    present
}

pub fn plan(observed: &Observed, now: Timestamp) -> Plan<Step> {
    let desired = &observed.desired;
    let mut members = present(observed);
    let adopt: Vec<_> = members
        .iter()
        .filter(|member| member.owner == Owner::Nobody && observed.set_confirmed)
        .map(|member| member.subject())
        .collect();
    let excess = members.len().saturating_sub(desired.replicas).min(BOUND);
    let create = desired.replicas.saturating_sub(members.len()).min(BOUND);
    let available_at = members
        .iter()
        .filter_map(|member| member.available_at(desired.min_ready))
        .filter(|at| *at > now)
        .min();
    members.sort_by_key(|member| (rank(member), order(member, &desired.policy), member.name.clone()));
    let delete: Vec<_> = members.iter().take(excess).map(|member| member.subject()).collect();
    let mut steps = Vec::new();
    if !adopt.is_empty() {
        steps.push(Step::Adopt(adopt));
    }
    if create > 0 {
        steps.push(Step::Create(create));
    }
    if !delete.is_empty() {
        steps.push(Step::Delete(delete));
    }
    if !observed.annotations.is_empty() {
        steps.push(Step::Annotate(observed.annotations.clone()));
    }
    let requeue = available_at.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default());
    Plan { steps, requeue }
}

/// Returns the counts for the status.
pub fn counts(observed: &Observed, now: Timestamp) -> Counts {
    let members = present(observed);
    let available = |member: &&&Member| {
        let at = member.available_at(observed.desired.min_ready);
        at.is_some_and(|at| at <= now)
    };
    Counts {
        replicas: members.len(),
        fully_labeled: members.iter().filter(|member| member.fully_labeled).count(),
        ready: members.iter().filter(|member| member.ready_since.is_some()).count(),
        available: members.iter().filter(available).count(),
    }
}

/// Which machines are deleted first, whatever the policy.
fn rank(member: &Member) -> u8 {
    match member {
        member if member.marked => 0,
        member if member.failed => 1,
        member if !member.has_node => 2,
        _ => 3,
    }
}

/// Which machines are deleted first by the policy.
fn order(member: &Member, policy: &DeletePolicy) -> i128 {
    match policy {
        DeletePolicy::Oldest => member.created.as_nanosecond(),
        DeletePolicy::Newest => -member.created.as_nanosecond(),
        DeletePolicy::Random | DeletePolicy::Other(_) => i128::from(order::random(&member.uid)),
    }
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
            owner: Owner::Set,
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

    fn observed(members: &[Member], replicas: usize, policy: DeletePolicy) -> Observed {
        Observed {
            desired: Desired {
                replicas,
                policy,
                min_ready: Duration::ZERO,
            },
            members: members.to_vec(),
            set_confirmed: true,
            annotations: BTreeMap::new(),
        }
    }

    /// What a plan does, by kind of step.
    fn effects(plan: &Plan<Step>) -> (Vec<Subject>, usize, Vec<Subject>) {
        let mut effects = (Vec::new(), 0, Vec::new());
        for step in &plan.steps {
            match step {
                Step::Adopt(machines) => effects.0.extend(machines.clone()),
                Step::Create(count) => effects.1 += count,
                Step::Delete(machines) => effects.2.extend(machines.clone()),
                Step::Annotate(_) => {}
            }
        }
        effects
    }

    fn deleted(members: &[Member], replicas: usize, policy: DeletePolicy) -> Vec<String> {
        let (_, _, deleted) = effects(&plan(&observed(members, replicas, policy), NOW));
        deleted.into_iter().map(|subject| subject.name).collect()
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
    fn a_machine_that_is_being_deleted_counts_as_gone() {
        let members = [member("a", 10, |m| m.deleting = true), member("b", 10, |_| ())];
        let observed = observed(&members, 2, DeletePolicy::Random);
        assert_eq!(plan(&observed, NOW), Plan::step(Step::Create(1)));
        assert_eq!(counts(&observed, NOW).replicas, 1);
        assert!(deleted(&members, 1, DeletePolicy::Random).is_empty());
    }

    #[test]
    fn an_orphan_is_adopted_and_counts_and_another_sets_machine_is_left_alone() {
        let members = [
            member("a", 10, |m| m.owner = Owner::Nobody),
            member("b", 10, |m| m.owner = Owner::Other),
        ];
        let mut observed = observed(&members, 2, DeletePolicy::Random);
        let adopt = Step::Adopt(vec![members[0].subject()]);
        assert_eq!(plan(&observed, NOW).steps, [adopt, Step::Create(1)]);
        observed.set_confirmed = false;
        assert_eq!(
            plan(&observed, NOW).steps,
            [Step::Create(1)],
            "a set that may be gone adopts nothing"
        );
    }

    #[test]
    fn a_machine_is_available_once_it_was_ready_for_long_enough() {
        let members = [
            member("a", 90, |m| m.ready_since = Some(NOW - Duration::from_secs(30))),
            member("b", 90, |m| m.ready_since = Some(NOW - Duration::from_secs(10))),
            member("c", 90, |m| m.ready_since = None),
        ];
        let mut observed = observed(&members, 3, DeletePolicy::Random);
        observed.desired.min_ready = Duration::from_secs(20);
        let counts = counts(&observed, NOW);
        assert_eq!((counts.ready, counts.available), (2, 1));
        assert_eq!(plan(&observed, NOW), Plan::after(Duration::from_secs(10)));
    }

    fn any_member() -> impl Strategy<Value = Member> {
        let owner = prop_oneof![4 => Just(Owner::Set), 1 => Just(Owner::Nobody), 1 => Just(Owner::Other)];
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
            let observed = observed(&members, replicas, policy);
            let (_, create, delete) = effects(&plan(&observed, NOW));
            let present = members.iter().filter(|m| !m.deleting && m.owner != Owner::Other).count();
            prop_assert_eq!(counts(&observed, NOW).replicas, present);
            prop_assert!(create == 0 || delete.is_empty());
            let after = present + create - delete.len();
            prop_assert_eq!(after, if present.abs_diff(replicas) <= BOUND { replicas } else { after });
            prop_assert!(present + create <= replicas.max(present));
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
            let (straight, turned) = (observed(&members, replicas, policy.clone()), observed(&turned, replicas, policy));
            prop_assert_eq!(plan(&straight, NOW), plan(&turned, NOW));
        }

        #[test]
        fn a_second_plan_on_the_result_deletes_nothing_more(
            members in proptest::collection::vec(any_member(), 0..30),
            replicas in 0usize..30,
            policy in any_policy(),
        ) {
            let mut observed = observed(&members, replicas, policy);
            let (_, _, first) = effects(&plan(&observed, NOW));
            for member in &mut observed.members {
                member.deleting |= first.contains(&member.subject());
            }
            let (_, _, second) = effects(&plan(&observed, NOW));
            prop_assert!(second.is_empty());
        }
    }
}
