//! Tables of which machines go next, and how many instances are asked for.

use rstest::rstest;

use super::*;
use crate::drain::{Assessment, DrainedElsewhere, NodeState, Request, assess};

/// A machine written as `name:state`, older ones first in a list. States: `r`eady, `c`reating, `n`ot ready, cordoned (`k`),
/// `u`nknown, `f`ailed (not ready), `F`ailed with a ready node, `x` failed before it ever ran; then any of `o`utdated,
/// `m`arked, `i`rreparable, `L`eaving (its drain goes on), `U`pdating, `D`eleting.
fn machine((age, text): (usize, &str)) -> Machine {
    let (name, flags) = text.split_once(':').unwrap();
    let (state, flags) = flags.split_at(1);
    let health = match state {
        "r" | "F" => Health::Ready,
        "c" | "x" => Health::Creating,
        "k" => Health::Unschedulable,
        "u" => Health::Unknown,
        _ => Health::NotReady,
    };
    let has = |flag: char| flags.contains(flag);
    let activity = match () {
        () if has('D') => Activity::Deleting,
        () if has('L') => Activity::Draining,
        () if has('U') => Activity::Updating(Update::Pending),
        () => Activity::Idle,
    };
    Machine {
        created: age as i64,
        health,
        failed: matches!(state, "f" | "F" | "x"),
        outdated: has('o'),
        marked: has('m'),
        irreparable: has('i'),
        object: if has('L') || has('D') {
            Object::Deleting
        } else {
            Object::Active
        },
        drain: match activity {
            Activity::Idle | Activity::Deleting => Drain::NotRun,
            Activity::Draining | Activity::Updating(_) => Drain::Running {
                why: "a pod".to_owned(),
            },
        },
        activity,
        ..Machine::ready(name)
    }
}

fn pool(desired: usize, (surge, unavailable): (usize, usize), machines: &str) -> Observed {
    let machines: Vec<Machine> = machines.split_whitespace().enumerate().map(machine).collect();
    let capacity = machines.iter().filter(|m| m.activity != Activity::Deleting).count();
    Observed {
        desired,
        budget: Budget { surge, unavailable },
        seed: 7,
        scale_set: Some(ScaleSet {
            capacity,
            quiet: true,
            confirmed: true,
            ..ScaleSet::default()
        }),
        machines,
        ..Observed::default()
    }
}

/// The pool with another scale set.
fn with(mut observed: Observed, change: impl FnOnce(&mut ScaleSet)) -> Observed {
    if let Some(set) = observed.scale_set.as_mut() {
        change(set);
    }
    observed
}

fn step(step: &Step) -> String {
    let names = |selected: &[Selected]| {
        let names: Vec<&str> = selected.iter().map(|one| one.name.as_str()).collect();
        names.join(" ")
    };
    let ids = |drained: &[Drained]| {
        let ids: Vec<&str> = drained.iter().map(Drained::machine).collect();
        ids.join(" ")
    };
    match step {
        Step::AddFinalizer => "add finalizer".to_owned(),
        Step::SetSshKey => "set ssh key".to_owned(),
        Step::CreateScaleSet { capacity } => format!("create scale set of {capacity}"),
        Step::AdoptScaleSet(all) => {
            let one = |one: &Adoption| match one {
                Adoption::CreateObject { name, has_model: true } => format!(" +{name}"),
                Adoption::CreateObject { name, has_model: false } => format!(" +{name}?"),
                Adoption::RecordModel(name) => format!(" {name}"),
            };
            let all: String = all.iter().map(one).collect();
            format!("adopt{all}")
        }
        Step::CreateObjects(names) => format!("create objects {}", names.join(" ")),
        Step::ReleaseObjects(names) => format!("release objects {}", names.join(" ")),
        Step::RecordModels(names) => format!("record models {}", names.join(" ")),
        Step::DeleteStray(name) => format!("delete stray {name}"),
        Step::DeleteOwner { name, skip_drain } => match skip_drain {
            true => format!("delete owner {name} undrained"),
            false => format!("delete owner {name}"),
        },
        Step::Drain(names) => format!("drain {}", names.join(" ")),
        Step::DeleteInstances(all) => format!("delete instances {}", ids(all)),
        Step::UpdateInstances(all) => format!("update instances {}", ids(all)),
        Step::ReimageInstances(all) => format!("reimage instances {}", ids(all)),
        Step::FinishUpdate {
            name, uncordon: true, ..
        } => format!("finish update {name}"),
        Step::FinishUpdate {
            name, uncordon: false, ..
        } => format!("finish update {name}, cordoned"),
        Step::AbandonUpdate { name, reason } => format!("abandon update {name} {reason}"),
        Step::Remove(all) => format!("delete {}", names(all)),
        Step::StartUpdate {
            machine,
            reimage: false,
        } => format!("update {}", machine.name),
        Step::StartUpdate { machine, reimage: true } => format!("update and reimage {}", machine.name),
        Step::ApplyScaleSet {
            model: true, capacity, ..
        } => format!("model, capacity {capacity}"),
        Step::ApplyScaleSet {
            model: false, capacity, ..
        } => format!("capacity {capacity}"),
        Step::RefreshBootstrap => "refresh bootstrap".to_owned(),
        Step::ApplyTags => "apply tags".to_owned(),
        Step::SetReplicas(count) => format!("replicas {count}"),
        Step::DeleteScaleSet => "delete scale set".to_owned(),
        Step::ReleasePool => "release pool".to_owned(),
    }
}

fn told(plan: &Plan) -> String {
    plan.steps.iter().map(step).collect::<Vec<_>>().join("; ")
}

#[rstest]
#[case::a_settled_pool_is_left_alone(3, (1, 0), "a:r b:r c:r", "")]
#[case::surge_comes_first_when_none_may_be_missing(3, (1, 0), "a:ro b:ro c:ro", "capacity 4")]
#[case::nothing_goes_before_the_surge_is_ready(3, (1, 0), "a:ro b:ro c:ro d:c", "")]
#[case::the_oldest_goes_once_the_surge_is_ready(3, (1, 0), "a:ro b:ro c:ro d:r", "delete a")]
#[case::a_draining_machine_still_takes_its_place(3, (1, 0), "a:roL b:ro c:ro d:r", "")]
#[case::a_deleting_instance_takes_no_place(3, (1, 0), "a:roD b:ro c:ro d:r", "capacity 4")]
#[case::nor_do_several(4, (2, 0), "a:roD b:roD c:ro d:ro e:r f:r", "capacity 6")]
#[case::nor_one_that_was_surplus(3, (1, 0), "a:rD b:r c:r d:r", "")]
#[case::the_next_surge_follows_the_delete(3, (1, 0), "b:ro c:ro d:r", "capacity 4")]
#[case::without_surge_one_is_taken_at_once(3, (0, 1), "a:ro b:ro c:ro", "delete a")]
#[case::without_surge_its_successor_does_not_wait_for_its_end(3, (0, 1), "a:roD b:ro c:ro", "capacity 3")]
#[case::but_for_its_drain(3, (0, 1), "a:roL b:ro c:ro", "")]
#[case::without_surge_it_is_made_again_when_gone(3, (0, 1), "b:ro c:ro", "capacity 3")]
#[case::both_budgets_are_used_at_once(4, (1, 1), "a:ro b:ro c:ro d:ro", "delete a; capacity 5")]
#[case::all_of_a_wide_budget(4, (2, 2), "a:ro b:ro c:ro d:ro", "delete a b; capacity 6")]
#[case::the_last_old_one_needs_no_further_surge(3, (1, 0), "c:ro d:r e:r f:r", "delete c")]
#[case::no_more_surge_than_old_machines(4, (3, 0), "a:ro b:r c:r d:r", "capacity 5")]
#[case::an_unready_old_machine_goes_first(3, (1, 0), "a:ro b:no c:ro d:r", "delete b")]
#[case::unready_ones_are_not_all_taken_at_one_blow(4, (1, 0), "a:no b:no c:no d:no", "delete a; capacity 5")]
#[case::unready_ones_in_motion_count(4, (1, 0), "a:noL b:no c:no d:no e:c", "")]
#[case::old_ones_that_never_ran_go_all(3, (1, 1), "a:ro b:co c:co", "delete b c; capacity 4")]
#[case::a_cordoned_one_does_not_count_as_available(5, (1, 0), "a:ro b:ro c:k d:ro e:ro f:r", "")]
#[case::a_cordoned_old_one_goes_first(5, (1, 0), "a:ro b:ro c:ko d:ro e:ro f:r", "delete c")]
#[case::cordoned_ones_are_not_all_taken_at_one_blow(4, (1, 0), "a:ko b:ko c:ko d:ko", "delete a; capacity 5")]
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
#[case::a_failed_machine_that_runs_nothing_goes_at_once(3, (1, 0), "a:r b:f c:r", "delete b; capacity 4")]
#[case::a_failed_machine_with_a_ready_node_waits_for_its_stand_in(3, (1, 0), "a:r b:F c:r", "capacity 4")]
#[case::and_goes_when_it_has_come(3, (1, 0), "a:r b:F c:r d:r", "delete b")]
#[case::a_failed_surge_is_no_dead_end(3, (1, 0), "a:ro b:ro c:ro d:f", "delete d")]
#[case::a_failed_one_that_drains_does_not_block_others(3, (1, 1), "a:fL b:f c:r d:r", "delete b")]
#[case::a_mark_alone_replaces_nothing(3, (1, 1), "a:r b:rm c:r", "")]
#[case::all_at_once(4, (1, 1), "a:ro b:f c:rm d:rL e:r f:r", "delete b a")]
#[case::failed_ones_that_ran_are_not_all_taken_at_one_blow(5, (1, 0), "a:f b:f c:f d:f e:f", "delete a; capacity 6")]
#[case::failed_ones_that_never_ran_are(3, (1, 0), "a:r b:x c:x", "delete b c; capacity 4")]
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
#[case::though_it_is_the_last(3, (1, 0), "a:ni b:r c:r", "delete a; capacity 4")]
#[case::and_one_that_came_back_too_late_waits_for_its_stand_in(3, (1, 0), "a:ri b:r c:r", "capacity 4")]
#[case::a_failed_machine_is_replaced(3, (0, 1), "a:fo b:ro c:ro", "delete a")]
#[case::one_that_never_ran_is_replaced(3, (0, 1), "a:ro b:ro c:co", "delete c")]
fn in_place_updates_keep_the_instances(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let pool = Observed {
        strategy: Strategy::InPlace,
        ..pool(desired, budget, machines)
    };
    assert_eq!(told(&plan(&pool)), expected);
}

#[rstest]
#[case(DeletePolicy::Oldest, "delete a b")]
#[case(DeletePolicy::Newest, "delete d c")]
#[case(DeletePolicy::Random, "delete c b")]
fn the_policy_orders_equal_candidates(#[case] policy: DeletePolicy, #[case] expected: &str) {
    let pool = Observed {
        policy,
        ..pool(2, (1, 0), "a:r b:r c:r d:r")
    };
    assert_eq!(told(&plan(&pool)), expected);
    let reversed = Observed {
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
    let mut pool = Observed {
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
    let pool = with(pool(desired, (1, 0), machines), |set| {
        (set.capacity, set.scaling) = (capacity, scaling);
    });
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
    let why = "pod default/y is blocked by budget z".to_owned();
    pool.machines[3].drain = Drain::Running { why };
    let waiting = plan(&pool).waiting.unwrap();
    assert_eq!(waiting, "waiting for machine d: pod default/y is blocked by budget z");
}

#[test]
fn capacity_is_lowered_only_once_a_second_list_agrees() {
    let observed = with(pool(2, (1, 0), "a:r b:r"), |set| {
        (set.capacity, set.confirmed) = (5, false)
    });
    assert_eq!(told(&plan(&observed)), "");
    let observed = with(observed, |set| set.confirmed = true);
    assert_eq!(told(&plan(&observed)), "capacity 2");
}

#[rstest]
#[case::no_machine_goes_for_it_before_it_lands(3, (0, 1), Model::Outdated, "a:ro b:ro c:ro", "model, capacity 3")]
#[case::its_surge_comes_with_it(3, (1, 0), Model::Outdated, "a:ro b:ro c:ro", "model, capacity 4")]
#[case::a_failed_machine_does_not_wait_for_it(3, (0, 1), Model::Outdated, "a:ro b:fo c:ro", "delete b; model, capacity 3")]
#[case::a_refused_model_rolls_nothing(3, (1, 1), Model::Refused, "a:ro b:ro c:ro", "")]
#[case::and_stops_no_scale_down(2, (1, 0), Model::Refused, "a:ro b:ro c:ro", "delete a")]
#[case::which_takes_old_ones_first(2, (1, 0), Model::Refused, "a:r b:r c:ro", "delete c")]
#[case::nor_a_scale_up(4, (1, 0), Model::Refused, "a:ro b:ro c:ro", "capacity 4")]
#[case::nor_the_replacement_of_a_failed_machine(3, (1, 0), Model::Refused, "a:ro b:fo c:ro", "delete b; capacity 4")]
#[case::a_set_of_somebody_else_is_adopted_first(3, (1, 0), Model::Unmarked, "a:ro b:ro", "adopt a b")]
fn a_model_that_has_not_landed_stops_only_itself(
    #[case] desired: usize,
    #[case] budget: (usize, usize),
    #[case] model: Model,
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let observed = with(pool(desired, budget, machines), |set| set.model = model);
    let plan = plan(&observed);
    assert_eq!(told(&plan), expected);
    assert!(plan.rolling || model == Model::Unmarked);
}

fn adopted(change: impl FnOnce(&mut Machine)) -> Observed {
    let mut observed = with(one(change), |set| set.model = Model::Unmarked);
    observed.machines.truncate(1);
    observed
}

#[rstest]
#[case::it_has_the_model(adopted(|_| ()), "adopt a")]
#[case::it_has_another(adopted(|m| m.matches_model = false), "adopt")]
#[case::it_was_to_be_replaced(adopted(|m| m.recorded_earlier = true), "adopt")]
#[case::it_has_no_object(adopted(|m| m.object = Object::Missing), "adopt +a")]
#[case::nor_the_model(adopted(|m| (m.object, m.matches_model) = (Object::Missing, false)), "adopt +a?")]
#[case::it_is_being_deleted(adopted(|m| m.activity = Activity::Deleting), "adopt")]
#[case::it_is_drained(adopted(|m| (m.object, m.activity) = (Object::Deleting, Activity::Draining)), "adopt a")]
#[case::it_has_no_instance(adopted(|m| m.instance = missing(true)), "adopt")]
fn a_machine_keeps_its_model_when_its_scale_set_is_taken_over(#[case] observed: Observed, #[case] expected: &str) {
    assert_eq!(told(&plan(&observed)), expected);
}

fn refused(refused: usize, tries: u32) -> Retry {
    Retry::Waiting { refused, tries }
}

#[rstest]
#[case::less_is_asked_for(refused(6, 1), 4, "capacity 5")]
#[case::not_once_the_pool_has_given_up(refused(5, 3), 4, "")]
#[case::which_gives_back_what_was_not_made(refused(5, 3), 6, "capacity 4")]
#[case::but_refills_what_it_had(refused(6, 3), 4, "capacity 5")]
#[case::failed_instances_are_waited_for(Retry::Paused, 4, "")]
#[case::and_give_nothing_back(Retry::Paused, 6, "")]
#[case::until_the_wait_is_over(Retry::Due, 4, "capacity 6")]
fn instances_that_the_cloud_does_not_make_are_given_up(
    #[case] retry: Retry,
    #[case] capacity: usize,
    #[case] expected: &str,
) {
    let observed = with(pool(6, (0, 1), "a:r b:r c:r d:r"), |set| {
        (set.retry, set.capacity) = (retry, capacity);
    });
    assert_eq!(told(&plan(&observed)), expected);
}

#[rstest]
#[case::a_model_lands_without_its_surge(Model::Outdated, refused(4, 1), "model, capacity 3")]
#[case::and_rolls_within_max_unavailable(Model::Current, refused(4, 1), "delete a")]
#[case::less_than_that_is_asked_for(Model::Current, refused(3, 1), "delete a")]
#[case::what_fits_is_asked_for(Model::Current, refused(5, 1), "delete a; capacity 4")]
#[case::the_surge_comes_when_there_is_room(Model::Current, Retry::NotNeeded, "delete a; capacity 4")]
#[case::a_failed_operation_is_asked_for_again(Model::Current, Retry::Due, "delete a; capacity 4")]
fn without_room_for_more_instances_the_rest_goes_on(
    #[case] model: Model,
    #[case] retry: Retry,
    #[case] expected: &str,
) {
    let observed = with(pool(3, (1, 1), "a:ro b:ro c:ro"), |set| {
        (set.model, set.retry) = (model, retry)
    });
    assert_eq!(told(&plan(&observed)), expected);
}

/// One machine `a` among ready ones, changed.
fn one(change: impl FnOnce(&mut Machine)) -> Observed {
    let mut observed = pool(3, (1, 0), "a:r b:r c:r");
    change(&mut observed.machines[0]);
    observed
}

fn missing(confirmed: bool) -> Instance {
    Instance::Missing { confirmed }
}

#[rstest]
#[case::an_instance_gets_an_object(one(|a| a.object = Object::Missing), "create objects a")]
#[case::not_when_it_goes(one(|a| (a.object, a.activity) = (Object::Missing, Activity::Deleting)), "")]
#[case::an_unknown_model_is_recorded(one(|a| a.unrecorded = true), "record models a")]
#[case::one_list_ends_no_machine(one(|a| a.instance = missing(false)), "")]
#[case::two_do(one(|a| a.instance = missing(true)), "release objects a")]
#[case::an_object_that_is_deleted_waits_for_no_second(
    one(|a| (a.instance, a.object, a.activity) = (missing(false), Object::Deleting, Activity::Draining)),
    "release objects a"
)]
fn objects_follow_instances(#[case] observed: Observed, #[case] expected: &str) {
    assert_eq!(told(&plan(&observed)), expected);
}

/// A drain that Cluster API has done.
fn done(id: &str) -> Drain {
    let request = Request {
        elsewhere: DrainedElsewhere::Done,
        ..Request::new(id, NodeState::Present)
    };
    match assess(&request, jiff::Timestamp::UNIX_EPOCH) {
        Assessment::Drained(proof) => Drain::Done(proof),
        other => panic!("{other:?}"),
    }
}

fn draining(drain: Drain) -> Observed {
    one(|a| (a.object, a.activity, a.drain) = (Object::Deleting, Activity::Draining, drain))
}

#[test]
fn an_instance_is_deleted_only_when_its_drain_is_done() {
    let not_run = plan(&draining(Drain::NotRun));
    assert_eq!(told(&not_run), "drain a");
    let running = plan(&draining(Drain::Running {
        why: "a pod".to_owned(),
    }));
    assert_eq!(told(&running), "capacity 4");
    let drained = plan(&draining(done("a")));
    assert_eq!(
        told(&drained),
        "delete instances a; capacity 3",
        "the cloud has lowered it to 2"
    );
    let anothers = plan(&draining(done("b")));
    assert_eq!(told(&anothers), "capacity 4", "the proof of another instance is none");
}

/// Whoever deletes the object of a Machine means the Machine.
#[rstest]
#[case::drained_first(Owner::Active, Health::Ready, Drain::NotRun, "drain a")]
#[case::also_when_cordoned(Owner::Active, Health::Unschedulable, Drain::NotRun, "drain a")]
#[case::while_a_pod_is_left(Owner::Active, Health::Ready, running(), "capacity 4")]
#[case::then_its_machine_goes(Owner::Active, Health::Ready, done("a"), "delete owner a; capacity 4")]
#[case::with_the_proof_of_another(Owner::Active, Health::Ready, done("b"), "capacity 4")]
#[case::undrained_after_the_timeout(Owner::Active, Health::Ready, late("a"), "delete owner a undrained; capacity 4")]
#[case::a_node_that_does_not_answer_is_cluster_apis(
    Owner::Active,
    Health::NotReady,
    Drain::NotRun,
    "delete owner a; capacity 4"
)]
#[case::so_is_one_of_a_silent_cluster(Owner::Active, Health::Unknown, Drain::NotRun, "delete owner a; capacity 4")]
#[case::hooks_and_rules_are_cluster_apis(Owner::Guarded, Health::Ready, Drain::NotRun, "delete owner a; capacity 4")]
#[case::cluster_api_has_skipped_the_drain(Owner::Deleting, Health::Ready, Drain::NotRun, "drain a")]
#[case::cluster_api_drains(Owner::Deleting, Health::Ready, running(), "capacity 4")]
#[case::cluster_api_is_done(Owner::Deleting, Health::Ready, done("a"), "delete instances a; capacity 3")]
fn a_machine_goes_before_its_instance_and_after_its_pods(
    #[case] owner: Owner,
    #[case] health: Health,
    #[case] drain: Drain,
    #[case] expected: &str,
) {
    let mut observed = draining(drain);
    (observed.machines[0].owner, observed.machines[0].health) = (owner, health);
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn what_only_cluster_api_may_drain_goes_by_its_machine() {
    let mut observed = one(|a| a.failed = true);
    let by_owner = |observed: &Observed| {
        let plan = plan(observed);
        let mut removed = plan.steps.iter().filter_map(|step| match step {
            Step::Remove(selected) => selected.first().map(|one| one.by_owner),
            _ => None,
        });
        removed.next()
    };
    observed.budget.unavailable = 1;
    assert_eq!(by_owner(&observed), Some(false));
    observed.machines[0].owner = Owner::Active;
    assert_eq!(by_owner(&observed), Some(false));
    observed.machines[0].owner = Owner::Guarded;
    assert_eq!(by_owner(&observed), Some(true));
}

fn running() -> Drain {
    Drain::Running {
        why: "a pod".to_owned(),
    }
}

/// A drain that ended because its time was over.
fn late(id: &str) -> Drain {
    let epoch = jiff::Timestamp::UNIX_EPOCH;
    Drain::Done(Drained::timed_out(id, Some(epoch), epoch, Vec::new()).unwrap())
}

#[test]
fn a_machine_whose_owner_alone_is_deleted_waits_for_cluster_api() {
    let mut observed = draining(done("a"));
    observed.machines[0].object = Object::Active;
    assert_eq!(told(&plan(&observed)), "capacity 4");
}

#[test]
fn drains_that_end_together_share_a_delete() {
    let mut observed = draining(done("a"));
    observed.machines[1].activity = Activity::Draining;
    observed.machines[1].object = Object::Deleting;
    observed.machines[1].drain = Drain::Running {
        why: "a pod".to_owned(),
    };
    let early = plan(&observed);
    assert_eq!((told(&early).as_str(), early.requeue), ("capacity 4", Some(TOGETHER)));
    observed.drained_for = TOGETHER;
    assert_eq!(told(&plan(&observed)), "delete instances a; capacity 4");
}

fn applied(ready: bool, waited: Duration) -> Update {
    let model = "m".to_owned();
    Update::Applied { model, ready, waited }
}

fn updating(update: Update, drain: Drain) -> Observed {
    one(|a| (a.activity, a.drain, a.outdated) = (Activity::Updating(update), drain, true))
}

#[rstest]
#[case::drained_first(updating(Update::Pending, Drain::NotRun), "drain a")]
#[case::then_updated(updating(Update::Pending, done("a")), "update instances a")]
#[case::once(updating(Update::Running, Drain::NotRun), "")]
#[case::finished_when_its_node_is_back(updating(applied(true, Duration::ZERO), Drain::NotRun), "finish update a")]
#[case::waited_for(updating(applied(false, Duration::ZERO), Drain::NotRun), "")]
#[case::not_for_ever(
    updating(applied(false, UPDATE_PATIENCE), Drain::NotRun),
    "abandon update a NodeDidNotComeBack"
)]
#[case::replaced_when_it_failed(
    updating(Update::Failed("UpdateFailed"), Drain::NotRun),
    "abandon update a UpdateFailed"
)]
fn an_update_in_place_goes_its_way(#[case] observed: Observed, #[case] expected: &str) {
    assert_eq!(told(&plan(&observed)), expected);
}

#[rstest]
#[case::once(true, "update a; drain a")]
#[case::and_then_no_more(false, "drain a")]
fn an_update_that_somebody_else_asked_for_begins_when_it_is_seen(#[case] undated: bool, #[case] expected: &str) {
    let mut observed = updating(Update::Pending, Drain::NotRun);
    observed.machines[0].undated = undated;
    assert_eq!(told(&plan(&observed)), expected);
}

/// An update ends with the model that the scale set has, also where it gets no newer one.
#[rstest]
#[case::drained_first(Update::Pending, Drain::NotRun, "drain a")]
#[case::then_updated(Update::Pending, done("a"), "update instances a")]
#[case::then_reimaged(Update::Upgraded, done("a"), "reimage instances a")]
#[case::then_finished(applied(true, Duration::ZERO), Drain::NotRun, "finish update a")]
fn an_update_in_place_ends_although_the_spec_is_invalid_or_its_model_refused(
    #[case] update: Update,
    #[case] drain: Drain,
    #[case] expected: &str,
) {
    let invalid = Observed {
        mode: Mode::FinishOnly,
        ..updating(update.clone(), drain.clone())
    };
    let refused = with(updating(update, drain), |set| set.model = Model::Refused);
    assert_eq!([told(&plan(&invalid)), told(&plan(&refused))], [expected, expected]);
}

#[test]
fn an_update_in_place_ends_with_the_model_of_its_instance() {
    let steps = plan(&updating(applied(true, Duration::ZERO), Drain::NotRun)).steps;
    assert!(matches!(&steps[..], [Step::FinishUpdate { model, .. }] if model == "m"));
}

#[test]
fn a_silent_cluster_ends_no_update() {
    let mut observed = updating(applied(false, UPDATE_PATIENCE), Drain::NotRun);
    observed.machines[0].health = Health::Unknown;
    assert_eq!(told(&plan(&observed)), "");
}

#[rstest]
#[case::all(Mode::Full, "delete a; capacity 3")]
#[case::nothing_new_without_the_cloud(Mode::WithoutCloud, "")]
#[case::an_invalid_spec_stops_only_itself(Mode::FinishOnly, "delete a; capacity 3")]
#[case::everything_goes(Mode::Teardown, "delete a b")]
fn a_mode_allows_a_part_of_the_plan(#[case] mode: Mode, #[case] expected: &str) {
    let observed = Observed {
        mode,
        ..pool(3, (0, 1), "a:f b:r")
    };
    assert_eq!(told(&plan(&observed)), expected);
}

#[rstest]
#[case::no_machine_goes_for_its_model(3, Model::Current, "a:ro b:ro c:ro", "")]
#[case::surplus_ones_go(2, Model::Current, "a:ro b:ro c:ro", "delete a")]
#[case::missing_ones_come(3, Model::Current, "a:ro b:ro", "capacity 3")]
#[case::a_set_that_is_not_adopted_stays(2, Model::Unmarked, "a:ro b:fo c:ro", "")]
fn a_spec_that_is_refused_stops_only_itself(
    #[case] desired: usize,
    #[case] model: Model,
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let observed = with(pool(desired, (1, 1), machines), |set| set.model = model);
    let plan = plan(&Observed {
        mode: Mode::FinishOnly,
        ..observed
    });
    assert_eq!(told(&plan), expected);
}

#[rstest]
#[case::without_the_cloud_it_is_drained(Mode::WithoutCloud, Drain::NotRun, "drain a")]
#[case::and_not_deleted(Mode::WithoutCloud, done("a"), "")]
#[case::an_invalid_spec_lets_it_go(Mode::FinishOnly, done("a"), "delete instances a; capacity 3")]
fn a_machine_that_leaves_goes_on_as_far_as_possible(#[case] mode: Mode, #[case] drain: Drain, #[case] expected: &str) {
    assert_eq!(
        told(&plan(&Observed {
            mode,
            ..draining(drain)
        })),
        expected
    );
}

#[test]
fn a_pool_is_deleted_after_its_machines() {
    let teardown = |observed: Observed| {
        told(&plan(&Observed {
            mode: Mode::Teardown,
            ..observed
        }))
    };
    assert_eq!(teardown(pool(2, (1, 0), "a:r b:c")), "delete a b");
    assert_eq!(teardown(draining(Drain::NotRun)), "delete b c; drain a");
    let mut orphan = one(|a| (a.object, a.activity) = (Object::Missing, Activity::Draining));
    orphan.machines.truncate(1);
    assert_eq!(
        teardown(orphan.clone()),
        "drain a",
        "an instance without an object is drained, too"
    );
    orphan.machines[0].drain = done("a");
    assert_eq!(teardown(orphan), "delete instances a");
    let empty = pool(2, (1, 0), "");
    assert_eq!(teardown(empty.clone()), "delete scale set");
    let late = with(empty.clone(), |set| (set.capacity, set.confirmed) = (2, false));
    assert_eq!(teardown(late), "", "an empty list alone proves nothing");
    let deleting = with(empty.clone(), |set| set.deleting = true);
    assert_eq!(teardown(deleting), "");
    let gone = Observed {
        scale_set: None,
        ..one(|a| a.instance = missing(false))
    };
    assert_eq!(teardown(gone), "release objects a b c");
    assert_eq!(
        teardown(Observed {
            scale_set: None,
            ..empty
        }),
        "release pool"
    );
}

#[test]
fn a_pool_whose_cluster_is_gone_goes_with_its_scale_set() {
    let orphaned = |observed: Observed| {
        let mode = Mode::Orphaned;
        told(&plan(&Observed { mode, ..observed }))
    };
    let observed = pool(2, (1, 0), "a:r b:c");
    assert_eq!(orphaned(observed.clone()), "delete scale set");
    assert_eq!(orphaned(with(observed.clone(), |set| set.deleting = true)), "");
    let gone = Observed {
        scale_set: None,
        ..observed
    };
    assert_eq!(orphaned(gone), "release objects a b; release pool");
}

#[rstest]
#[case(Setup::Finalizer, "add finalizer")]
#[case(Setup::SshKey, "set ssh key")]
fn nothing_is_created_before_the_object_is_complete(#[case] setup: Setup, #[case] expected: &str) {
    let observed = Observed {
        setup: Some(setup),
        scale_set: None,
        ..pool(3, (1, 0), "")
    };
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn a_scale_set_that_does_not_exist_is_created() {
    let observed = Observed {
        scale_set: None,
        ..pool(3, (1, 0), "")
    };
    assert_eq!(told(&plan(&observed)), "create scale set of 3");
}

#[rstest]
#[case::none_is_created(Mode::Full, "", "")]
#[case::machines_that_the_pool_had_stay(Mode::Full, "a:x", "")]
#[case::while_the_spec_is_invalid(Mode::FinishOnly, "a:x", "")]
#[case::a_deleted_pool_lets_go_of_its_objects(Mode::Teardown, "a:x", "release objects a")]
#[case::and_of_itself(Mode::Teardown, "", "release pool")]
#[case::also_without_its_cluster(Mode::Orphaned, "a:x", "release objects a; release pool")]
fn a_scale_set_of_somebody_else_is_left_alone(#[case] mode: Mode, #[case] machines: &str, #[case] expected: &str) {
    let observed = Observed {
        mode,
        scale_set: None,
        name_taken: true,
        ..pool(3, (1, 0), machines)
    };
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn an_update_in_place_that_would_not_bring_the_bootstrap_data_becomes_a_replacement() {
    let mut observed = pool(2, (0, 1), "a:ro b:ro");
    observed.strategy = Strategy::InPlace;
    assert_eq!(told(&plan(&observed)), "update a");
    observed.machines[0].needs_new_disk = true;
    assert_eq!(told(&plan(&observed)), "delete a");
}

#[rstest]
#[case::it_is_noted_from_the_start("a:ro b:ro", None, false, "update and reimage a")]
#[case::it_is_updated_first("a:roU b:ro", Some(Update::Pending), false, "update instances a")]
#[case::with_the_newest_data("a:roU b:ro", Some(Update::Pending), true, "refresh bootstrap")]
#[case::while_the_cloud_works_nothing_changes("a:roU b:ro", Some(Update::Running), true, "")]
#[case::then_it_is_reimaged("a:roU b:ro", Some(Update::Upgraded), false, "reimage instances a")]
#[case::also_when_there_is_newer_data_by_then("a:roU b:ro", Some(Update::Upgraded), true, "reimage instances a")]
fn an_update_to_another_image_ends_with_a_reimage(
    #[case] machines: &str,
    #[case] stage: Option<Update>,
    #[case] stale: bool,
    #[case] expected: &str,
) {
    let mut observed = with(pool(2, (0, 1), machines), |set| set.stale_bootstrap = stale);
    observed.strategy = Strategy::InPlace;
    observed.machines[0].new_image = true;
    if let Some(stage) = stage {
        (observed.machines[0].activity, observed.machines[0].drain) = (Activity::Updating(stage), done("a"));
    }
    assert_eq!(told(&plan(&observed)), expected);
}

#[rstest]
#[case::by_others(true, "a:r b:r", "refresh bootstrap")]
#[case::by_nobody_else(false, "a:r b:r", "")]
fn bootstrap_data_is_kept_fresh_where_others_scale(
    #[case] others: bool,
    #[case] machines: &str,
    #[case] expected: &str,
) {
    let observed = with(pool(2, (1, 0), machines), |set| {
        (set.stale_bootstrap, set.scaled_by_others) = (true, others);
    });
    assert_eq!(told(&plan(&observed)), expected);
}

#[rstest]
#[case::old_machines_stay("a:ro b:ro c:ro", "")]
#[case::a_failed_one_is_replaced("a:ro b:fo c:ro", "delete b; capacity 4")]
#[case::a_deleted_one_is_replaced("a:roD b:ro c:ro d:c", "")]
#[case::a_surplus_of_old_ones_goes("a:ro b:ro c:ro d:r", "delete a")]
fn on_delete_leaves_machines_of_an_older_model_alone(#[case] machines: &str, #[case] expected: &str) {
    let mut observed = pool(3, (1, 0), machines);
    observed.strategy = Strategy::OnDelete;
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn a_closed_budget_still_lets_a_pool_shrink() {
    let mut observed = pool(2, (0, 0), "a:ro b:ro c:r");
    observed.strategy = Strategy::OnDelete;
    assert_eq!(told(&plan(&observed)), "delete a");
}

#[test]
fn tags_reach_the_scale_set_and_replace_no_machine() {
    let observed = with(pool(2, (1, 0), "a:r b:r"), |set| set.stale_tags = true);
    assert_eq!(told(&plan(&observed)), "apply tags");
    let observed = with(pool(3, (1, 0), "a:r b:r"), |set| set.stale_tags = true);
    assert_eq!(told(&plan(&observed)), "capacity 3", "after the capacity");
}

#[test]
fn without_room_for_a_surge_the_missing_machines_are_asked_for() {
    let observed = with(pool(2, (1, 1), "a:ro"), |set| set.retry = refused(3, 1));
    assert_eq!(told(&plan(&observed)), "capacity 2");
}

#[test]
fn a_flexible_set_is_asked_again_for_a_capacity_that_it_has() {
    let observed = with(pool(2, (1, 0), "a:ro b:r"), |set| {
        (set.flexible, set.capacity) = (true, 3);
    });
    assert_eq!(told(&plan(&observed)), "capacity 3");
}

/// A machine whose instance has run for this long without a node.
fn joining(name: &str, seconds: u64) -> Machine {
    Machine {
        health: Health::Creating,
        joining: Some(Duration::from_secs(seconds)),
        ..Machine::ready(name)
    }
}

#[rstest]
#[case::a_moment_ago(60, Some(1200), "", Some(240), "waiting for machine b to become ready")]
#[case::for_minutes(300, Some(1200), "", Some(900), "waiting for the node of machine b")]
#[case::for_the_whole_timeout(1200, Some(1200), "delete b; capacity 4", None, "is replaced after 1200 s")]
#[case::for_a_short_timeout(60, Some(60), "delete b; capacity 4", Some(240), "is replaced after 60 s")]
#[case::without_a_timeout(90_000, None, "", None, "nodeStartupTimeout is 0")]
fn a_node_that_does_not_join_is_reported_and_its_machine_replaced(
    #[case] waited: u64,
    #[case] timeout: Option<u64>,
    #[case] steps: &str,
    #[case] requeue: Option<u64>,
    #[case] waiting: &str,
    #[values(Strategy::Replace, Strategy::InPlace, Strategy::OnDelete)] strategy: Strategy,
) {
    let mut observed = pool(3, (1, 0), "a:r b:c c:r");
    observed.machines[1] = joining("b", waited);
    observed.startup_timeout = timeout.map(Duration::from_secs);
    observed.strategy = strategy;
    let plan = plan(&observed);
    assert_eq!(told(&plan), steps);
    assert_eq!(plan.requeue, requeue.map(Duration::from_secs));
    let reason = plan.waiting.unwrap();
    assert!(reason.contains(waiting), "{reason}");
}

#[rstest]
#[case::not_all_at_one_blow((1, 0), 0, 1200, "", "delete a; capacity 5")]
#[case::as_many_as_the_budget_has((1, 1), 0, 1200, "", "delete a b; capacity 5")]
#[case::those_that_leave_count((1, 0), 0, 1200, "a", "capacity 5")]
#[case::no_more_until_a_replacement_joins((1, 0), 1, 1200, "", "")]
#[case::but_not_never((1, 0), 1, 2400, "", "delete a; capacity 5")]
#[case::ever_more_slowly((1, 0), 2, 2400, "", "")]
#[case::one_wave_counts_once((1, 1), 2, 2400, "", "delete a b; capacity 5")]
fn nodes_that_do_not_join_cost_no_whole_pool(
    #[case] budget: (usize, usize),
    #[case] unjoined: usize,
    #[case] waited: u64,
    #[case] leaves: &str,
    #[case] expected: &str,
) {
    let mut observed = pool(4, budget, "a:c b:c c:c d:c");
    for machine in &mut observed.machines {
        machine.joining = Some(Duration::from_secs(waited));
        if machine.name == leaves {
            let why = "a pod".to_owned();
            (machine.object, machine.activity, machine.drain) =
                (Object::Deleting, Activity::Draining, Drain::Running { why });
        }
    }
    (observed.startup_timeout, observed.unjoined) = (Some(STARTUP_TIMEOUT), unjoined);
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn a_surge_machine_that_never_joins_does_not_stop_a_rollout_for_good() {
    let mut observed = pool(3, (1, 0), "a:ro b:ro c:ro d:c");
    observed.startup_timeout = Some(STARTUP_TIMEOUT);
    observed.machines[3] = joining("d", 1200);
    assert_eq!(told(&plan(&observed)), "delete d");
}

#[rstest]
#[case::the_fullest_zone_goes_first("a1 b2 c2 d2", 2, "delete b c")]
#[case::then_one_of_each("a1 b1 c2 d2", 2, "delete a c")]
#[case::and_the_oldest_of_equal_ones("a1 b2 c1 d2 e1", 3, "delete a b")]
fn a_scale_down_keeps_the_zones_even(#[case] zones: &str, #[case] desired: usize, #[case] expected: &str) {
    let names: Vec<String> = zones
        .split_whitespace()
        .map(|word| format!("{}:r", &word[..1]))
        .collect();
    let mut observed = pool(desired, (1, 0), &names.join(" "));
    for (machine, word) in observed.machines.iter_mut().zip(zones.split_whitespace()) {
        machine.zone = Some(word[1..].to_owned());
    }
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn a_machine_that_has_to_go_goes_before_one_of_a_fuller_zone() {
    let mut observed = pool(3, (1, 0), "a:r b:r c:r d:rm");
    for (machine, zone) in observed.machines.iter_mut().zip(["1", "1", "1", "2"]) {
        machine.zone = Some(zone.to_owned());
    }
    assert_eq!(told(&plan(&observed)), "delete d");
}

#[rstest]
#[case(false, "finish update a")]
#[case(true, "finish update a, cordoned")]
fn a_node_that_somebody_else_had_cordoned_stays_so_after_an_update(#[case] cordoned: bool, #[case] expected: &str) {
    let mut observed = pool(2, (0, 1), "a:rU b:r");
    observed.machines[0].activity = Activity::Updating(applied(true, Duration::ZERO));
    observed.machines[0].cordoned = cordoned;
    assert_eq!(told(&plan(&observed)), expected);
}

#[test]
fn machines_go_together_for_new_ones_that_arrive_together() {
    let mut observed = pool(2, (2, 0), "a:ro b:ro c:r d:k");
    observed.arriving = Some(TOGETHER / 4);
    let early = plan(&observed);
    assert_eq!((told(&early).as_str(), early.requeue), ("", Some(TOGETHER * 3 / 4)));
    observed.arriving = Some(TOGETHER);
    assert_eq!(told(&plan(&observed)), "delete a", "not for ever");
    observed.machines[3].health = Health::Ready;
    observed.arriving = None;
    assert_eq!(told(&plan(&observed)), "delete a b");
}

#[test]
fn a_smaller_pool_waits_for_no_new_node() {
    let mut observed = pool(2, (1, 0), "a:r b:r c:r");
    observed.arriving = Some(Duration::ZERO);
    assert_eq!(told(&plan(&observed)), "delete a");
}
