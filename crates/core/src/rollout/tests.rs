//! Tables of which machines go next, and how many instances are asked for.

use rstest::rstest;

use super::*;

/// A machine written as `name:state`, older ones first in a list. States: `r`eady, `c`reating, `n`ot ready, `u`nknown,
/// `f`ailed (not ready), `F`ailed with a ready node; then any of `o`utdated, `m`arked, `i`rreparable, `L`eaving,
/// `U`pdating, `D`eleting.
fn machine((age, text): (usize, &str)) -> Machine {
    let (name, flags) = text.split_once(':').unwrap();
    let (state, flags) = flags.split_at(1);
    let health = match state {
        "r" | "F" => Health::Ready,
        "c" => Health::Creating,
        "u" => Health::Unknown,
        _ => Health::NotReady,
    };
    let has = |flag: char| flags.contains(flag);
    let motion = match () {
        () if has('D') => Motion::Deleting,
        () if has('L') => Motion::Leaving { blocked: None },
        () if has('U') => Motion::Updating { blocked: None },
        () => Motion::Resting,
    };
    Machine {
        name: name.to_owned(),
        created: age as i64,
        health,
        failed: matches!(state, "f" | "F"),
        outdated: has('o'),
        marked: has('m'),
        irreparable: has('i'),
        motion,
    }
}

fn pool(desired: usize, (surge, unavailable): (usize, usize), machines: &str) -> Pool {
    let machines: Vec<Machine> = machines.split_whitespace().enumerate().map(machine).collect();
    let capacity = machines.iter().filter(|m| m.motion != Motion::Deleting).count();
    Pool {
        desired,
        budget: Budget { surge, unavailable },
        policy: DeletePolicy::Oldest,
        mode: Mode::Replace,
        seed: 7,
        capacity,
        scaling: Scaling::Idle,
        machines,
    }
}

fn told(plan: &Plan) -> String {
    let capacity = plan.capacity.map(|n| format!("capacity {n}")).unwrap_or_default();
    let list = |verb: &str, names: &[String]| match names {
        [] => String::new(),
        names => format!("{verb} {}", names.join(" ")),
    };
    let parts = [capacity, list("delete", &plan.delete), list("update", &plan.update)];
    parts
        .into_iter()
        .filter(|p| !p.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}

#[rstest]
#[case::a_settled_pool_is_left_alone(3, (1, 0), "a:r b:r c:r", "")]
#[case::surge_comes_first_when_none_may_be_missing(3, (1, 0), "a:ro b:ro c:ro", "capacity 4")]
#[case::nothing_goes_before_the_surge_is_ready(3, (1, 0), "a:ro b:ro c:ro d:c", "")]
#[case::the_oldest_goes_once_the_surge_is_ready(3, (1, 0), "a:ro b:ro c:ro d:r", "delete a")]
#[case::a_draining_machine_still_takes_its_place(3, (1, 0), "a:roL b:ro c:ro d:r", "")]
#[case::a_deleting_instance_still_takes_its_place(3, (1, 0), "a:roD b:ro c:ro d:r", "")]
#[case::the_next_surge_follows_the_delete(3, (1, 0), "b:ro c:ro d:r", "capacity 4")]
#[case::without_surge_one_is_taken_at_once(3, (0, 1), "a:ro b:ro c:ro", "delete a")]
#[case::without_surge_nothing_comes_before_it_is_gone(3, (0, 1), "a:roD b:ro c:ro", "")]
#[case::without_surge_it_is_made_again_when_gone(3, (0, 1), "b:ro c:ro", "capacity 3")]
#[case::both_budgets_are_used_at_once(4, (1, 1), "a:ro b:ro c:ro d:ro", "capacity 5; delete a")]
#[case::all_of_a_wide_budget(4, (2, 2), "a:ro b:ro c:ro d:ro", "capacity 6; delete a b")]
#[case::the_last_old_one_needs_no_further_surge(3, (1, 0), "c:ro d:r e:r f:r", "delete c")]
#[case::no_more_surge_than_old_machines(4, (3, 0), "a:ro b:r c:r d:r", "capacity 5")]
#[case::an_unready_old_machine_goes_first(3, (1, 0), "a:ro b:no c:ro d:r", "delete b")]
#[case::unready_ones_are_not_all_taken_at_one_blow(4, (1, 0), "a:no b:no c:no d:no", "capacity 5; delete a")]
#[case::unready_ones_in_motion_count(4, (1, 0), "a:noL b:no c:no d:no e:c", "")]
#[case::old_ones_that_never_ran_go_all(3, (1, 1), "a:ro b:co c:co", "capacity 4; delete b c")]
#[case::unknown_machines_are_not_taken_for_missing(3, (1, 0), "a:uo b:uo c:uo d:u", "")]
fn a_new_model_rolls_through(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] machines: &str,
    #[case] expected: &str,
) {
    assert_eq!(told(&plan(&pool(desired, budget, machines))), expected);
}

#[rstest]
#[case::the_surplus_goes_at_once(2, (1, 0), "a:r b:r c:r d:r", "delete a b")]
#[case::those_leaving_are_not_forgotten(2, (1, 0), "a:rL b:rL c:r d:r", "")]
#[case::whoever_drains_them(2, (1, 0), "a:r b:r c:rL d:r", "delete a")]
#[case::a_marked_one_goes_before_an_older_one(2, (1, 0), "a:r b:rm c:r", "delete b")]
#[case::an_unready_one_goes_before_a_ready_one(2, (1, 0), "a:r b:r c:n", "delete c")]
#[case::one_still_creating_goes_first(2, (1, 0), "a:r b:n c:c d:r", "delete c b")]
#[case::an_old_one_goes_before_a_new_one(2, (1, 0), "a:r b:r c:ro", "delete c")]
#[case::to_nothing(0, (1, 0), "a:r b:c", "delete b a")]
#[case::never_through_capacity(1, (0, 1), "a:r b:r", "delete a")]
#[case::the_floor_holds_while_others_are_unready(3, (1, 0), "a:n b:n c:r d:r e:r f:r", "delete a b c")]
fn scaling_down_deletes_the_surplus(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] machines: &str,
    #[case] expected: &str,
) {
    assert_eq!(told(&plan(&pool(desired, budget, machines))), expected);
}

#[rstest]
#[case::missing_instances_are_asked_for(5, (1, 0), "a:r b:r", "capacity 5")]
#[case::even_without_surge(5, (0, 1), "a:r b:r", "capacity 5")]
#[case::an_outside_deletion_is_replaced_by_surge_at_once(3, (1, 0), "a:rL b:r c:r", "capacity 4")]
#[case::or_when_it_is_gone(3, (0, 1), "a:rL b:r c:r", "")]
#[case::a_failed_machine_that_runs_nothing_goes_at_once(3, (1, 0), "a:r b:f c:r", "capacity 4; delete b")]
#[case::a_failed_machine_with_a_ready_node_waits_for_its_stand_in(3, (1, 0), "a:r b:F c:r", "capacity 4")]
#[case::and_goes_when_it_has_come(3, (1, 0), "a:r b:F c:r d:r", "delete b")]
#[case::a_failed_surge_is_no_dead_end(3, (1, 0), "a:ro b:ro c:ro d:f", "delete d")]
#[case::a_failed_one_that_drains_does_not_block_others(3, (1, 1), "a:fL b:f c:r d:r", "delete b")]
#[case::a_marked_machine_is_replaced_within_the_budget(3, (1, 0), "a:r b:rm c:r", "capacity 4")]
#[case::a_marked_machine_goes_when_one_may_be_missing(3, (0, 1), "a:r b:rm c:r", "delete b")]
#[case::all_at_once(4, (1, 1), "a:ro b:f c:rm d:rL e:r f:r", "delete c b")]
fn machines_are_replaced(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] machines: &str,
    #[case] expected: &str,
) {
    assert_eq!(told(&plan(&pool(desired, budget, machines))), expected);
}

#[rstest]
#[case::one_by_one_within_the_budget(3, (0, 1), "a:ro b:ro c:ro", "update a")]
#[case::an_updating_machine_is_unavailable(3, (0, 1), "a:roU b:ro c:ro", "")]
#[case::surge_stands_in(3, (1, 0), "a:ro b:ro c:ro", "capacity 4")]
#[case::then_one_is_updated(3, (1, 0), "a:ro b:ro c:ro d:r", "update a")]
#[case::the_last_old_one_is_not_needed_any_more(3, (1, 0), "a:r b:r c:ro d:r", "delete c")]
#[case::the_surplus_of_a_scale_down_is_deleted_not_updated(2, (0, 1), "a:ro b:ro c:ro d:ro", "delete a b; update c")]
#[case::a_refused_update_becomes_a_replacement(3, (0, 1), "a:roi b:ro c:ro", "delete a")]
#[case::so_does_one_whose_node_did_not_come_back(3, (0, 1), "a:ni b:ro c:ro", "delete a")]
#[case::though_it_is_the_last(3, (1, 0), "a:ni b:r c:r", "capacity 4; delete a")]
#[case::and_one_that_came_back_too_late_waits_for_its_stand_in(3, (1, 0), "a:ri b:r c:r", "capacity 4")]
#[case::a_failed_machine_is_replaced(3, (0, 1), "a:fo b:ro c:ro", "delete a")]
#[case::one_that_never_ran_is_replaced(3, (0, 1), "a:ro b:ro c:co", "delete c")]
fn in_place_updates_keep_the_instances(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let pool = Pool {
        mode: Mode::InPlace,
        ..pool(desired, budget, machines)
    };
    assert_eq!(told(&plan(&pool)), expected);
}

#[rstest]
#[case(DeletePolicy::Oldest, "delete a b")]
#[case(DeletePolicy::Newest, "delete d c")]
#[case(DeletePolicy::Random, "delete b c")]
fn the_policy_orders_equal_candidates(#[case] policy: DeletePolicy, #[case] expected: &str) {
    let pool = Pool {
        policy,
        ..pool(2, (1, 0), "a:r b:r c:r d:r")
    };
    assert_eq!(told(&plan(&pool)), expected);
    let reversed = Pool {
        machines: pool.machines.iter().rev().cloned().collect(),
        ..pool
    };
    assert_eq!(
        told(&plan(&reversed)),
        expected,
        "the order of the list does not matter"
    );
}

#[rstest]
fn machines_of_the_same_age_go_by_name(#[values(DeletePolicy::Oldest, DeletePolicy::Newest)] policy: DeletePolicy) {
    let mut pool = Pool {
        policy,
        ..pool(2, (1, 0), "d:r b:r c:r a:r")
    };
    pool.machines.iter_mut().for_each(|m| m.created = 0);
    assert_eq!(told(&plan(&pool)), "delete a b");
}

#[rstest]
#[case::an_instance_on_its_way_is_not_asked_for_twice(3, 4, Scaling::Running, "a:ro b:ro c:ro", "")]
#[case::capacity_that_nothing_needs_is_given_back(3, 4, Scaling::Idle, "a:r b:r c:r", "capacity 3")]
#[case::but_not_while_an_instance_may_still_appear(3, 4, Scaling::Running, "a:r b:r c:r", "")]
#[case::nor_while_one_is_being_deleted(3, 4, Scaling::Idle, "a:r b:r c:r d:rD", "")]
#[case::nor_below_what_exists(1, 3, Scaling::Idle, "a:rL b:rL c:r", "")]
fn capacity_follows_the_instances(
    #[case] desired: usize,
    #[case] capacity: usize,
    #[case] scaling: Scaling,
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let pool = Pool {
        capacity,
        scaling,
        ..pool(desired, (1, 0), machines)
    };
    assert_eq!(told(&plan(&pool)), expected);
}

#[rstest]
#[case("a:ro b:ro c:ro d:c", Some("waiting for machine d to become ready"))]
#[case("a:r b:r c:r", None)]
#[case("a:roD b:ro c:r d:r", Some("waiting for machine a to be deleted"))]
#[case(
    "a:uo b:uo c:uo d:u",
    Some("waiting for machines a, b, c and 1 more whose cluster does not answer")
)]
fn a_pool_says_what_it_waits_for(#[case] machines: &str, #[case] expected: Option<&str>) {
    assert_eq!(plan(&pool(3, (1, 0), machines)).waiting.as_deref(), expected);
}

#[test]
fn a_blocked_drain_is_named_before_anything_else() {
    let mut pool = pool(3, (1, 0), "a:ro b:ro c:ro d:rL");
    pool.machines[3].motion = Motion::Leaving {
        blocked: Some("pod default/y is blocked by budget z".to_owned()),
    };
    let waiting = plan(&pool).waiting.unwrap();
    assert_eq!(waiting, "waiting for machine d: pod default/y is blocked by budget z");
}
