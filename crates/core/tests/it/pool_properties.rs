//! The planner over random pools and random orders of events: both bounds, progress, stability.

use crate::world;

use capstan_core::pool::{
    Activity, Amount, Budget, DeletePolicy, Drain, Health, Machine, Object, Observed, Plan, ScaleSet, Scaling, Step,
    Strategy as Mode, Update, plan,
};
use proptest::prelude::*;
use proptest::sample::Index;
use world::{Event, Instance, Rules, World};

fn budgets() -> impl Strategy<Value = Budget> {
    (0usize..4, 0usize..4)
        .prop_filter("both zero is refused", |(s, u)| s + u > 0)
        .prop_map(|(surge, unavailable)| Budget { surge, unavailable })
}

fn policies() -> impl Strategy<Value = DeletePolicy> {
    prop_oneof![
        Just(DeletePolicy::Oldest),
        Just(DeletePolicy::Newest),
        Just(DeletePolicy::Random)
    ]
}

fn modes() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Replace), Just(Mode::InPlace)]
}

fn healths() -> impl Strategy<Value = Health> {
    prop_oneof![
        4 => Just(Health::Ready),
        1 => Just(Health::Creating),
        1 => Just(Health::Unschedulable),
        1 => Just(Health::NotReady),
        1 => Just(Health::Unknown)
    ]
}

fn activities() -> impl Strategy<Value = Activity> {
    prop_oneof![
        6 => Just(Activity::Idle),
        1 => Just(Activity::Draining),
        1 => Just(Activity::Updating(Update::Pending)),
        1 => Just(Activity::Deleting),
    ]
}

fn machines() -> impl Strategy<Value = Vec<Machine>> {
    let one = (
        0i64..5,
        healths(),
        prop::bool::weighted(0.1),
        any::<bool>(),
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.1),
        activities(),
    );
    prop::collection::vec(one, 0..14).prop_map(|all| {
        let named = all.into_iter().enumerate();
        named
            .map(
                |(n, (created, health, failed, outdated, marked, irreparable, activity))| Machine {
                    created,
                    health,
                    failed,
                    outdated,
                    marked,
                    irreparable,
                    object: match activity {
                        Activity::Idle | Activity::Updating(_) => Object::Active,
                        Activity::Draining | Activity::Deleting => Object::Deleting,
                    },
                    activity,
                    drain: Drain::Running {
                        why: "a pod".to_owned(),
                    },
                    ..Machine::ready(&format!("m{n}"))
                },
            )
            .collect()
    })
}

fn pools() -> impl Strategy<Value = Observed> {
    (
        0usize..10,
        budgets(),
        policies(),
        modes(),
        any::<u64>(),
        0usize..3,
        machines(),
    )
        .prop_map(|(desired, budget, policy, mode, seed, unborn, machines)| {
            let live = machines.iter().filter(|m| m.activity != Activity::Deleting).count();
            let scaling = if unborn > 0 { Scaling::Running } else { Scaling::Idle };
            Observed {
                desired,
                budget,
                policy,
                strategy: mode,
                seed,
                scale_set: Some(ScaleSet {
                    capacity: live + unborn,
                    scaling,
                    confirmed: true,
                    ..ScaleSet::default()
                }),
                machines,
                ..Observed::default()
            }
        })
}

fn capacity(plan: &Plan) -> Option<usize> {
    plan.steps.iter().find_map(|step| match step {
        Step::ApplyScaleSet { capacity, .. } => Some(*capacity),
        _ => None,
    })
}

fn deleted(plan: &Plan) -> Vec<&String> {
    let steps = plan.steps.iter().filter_map(|step| match step {
        Step::Remove(all) => Some(all),
        _ => None,
    });
    steps.flatten().map(|one| &one.name).collect()
}

fn taken(plan: &Plan) -> Vec<&String> {
    let updated = plan.steps.iter().filter_map(|step| match step {
        Step::StartUpdate { machine, .. } => Some(&machine.name),
        _ => None,
    });
    deleted(plan).into_iter().chain(updated).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_keeps_both_bounds(pool in pools()) {
        let plan = plan(&pool);
        let available = pool.machines.iter().filter(|m| m.available()).count();
        let takes = pool.machines.iter().filter(|m| m.available() && taken(&plan).contains(&&m.name)).count();
        prop_assert!(takes == 0 || available - takes >= pool.budget.floor(pool.desired));
        let deleting = pool.machines.iter().filter(|m| m.activity == Activity::Deleting).count();
        if let Some(capacity) = capacity(&plan) {
            prop_assert!(capacity >= pool.machines.len() - deleting, "never below what exists");
            let ceiling = pool.budget.ceiling(pool.desired);
            prop_assert!(capacity < pool.scale_set.unwrap().capacity || capacity <= ceiling);
        }
    }

    #[test]
    fn a_plan_touches_resting_machines_once(pool in pools()) {
        let plan = plan(&pool);
        let mut seen = std::collections::HashSet::new();
        for name in taken(&plan) {
            prop_assert!(seen.insert(name));
            prop_assert!(pool.machines.iter().any(|m| m.name == *name && m.activity == Activity::Idle));
        }
    }

    #[test]
    fn a_good_machine_goes_only_when_there_are_too_many(pool in pools()) {
        let good = |m: &&Machine| {
            let stays = matches!(m.activity, Activity::Idle | Activity::Updating(_));
            let current = !m.outdated || m.activity != Activity::Idle;
            let sound = !m.failed && !m.irreparable;
            stays && current && (sound || m.activity != Activity::Idle)
        };
        let plan = plan(&pool);
        let goods = pool.machines.iter().filter(good).count();
        let gone = pool.machines.iter().filter(good).filter(|m| deleted(&plan).contains(&&m.name)).count();
        prop_assert!(gone == 0 || goods - gone >= pool.desired);
    }

    #[test]
    fn planning_again_in_another_order_picks_the_same(pool in pools()) {
        let mut shuffled = pool.clone();
        shuffled.machines.reverse();
        let (one, other) = (plan(&pool), plan(&shuffled));
        prop_assert_eq!((capacity(&one), taken(&one)), (capacity(&other), taken(&other)));
    }

    #[test]
    fn a_healthy_pool_with_work_left_never_stalls(mut pool in pools()) {
        pool.machines.retain(|m| m.activity == Activity::Idle);
        pool.machines.iter_mut().for_each(|m| m.health = Health::Ready);
        let capacity = pool.machines.len();
        pool.scale_set = pool.scale_set.map(|set| ScaleSet { capacity, scaling: Scaling::Idle, ..set });
        let plan = plan(&pool);
        let done = !plan.rolling && pool.machines.len() == pool.desired;
        prop_assert_eq!(plan.steps.is_empty(), done);
    }
}

fn instances() -> impl Strategy<Value = Vec<Instance>> {
    let one = (
        0u8..2,
        healths().prop_filter("the model knows", |h| *h != Health::Unknown),
    );
    let instance = one.prop_map(|(model, health)| Instance::new(model == 0, health));
    prop::collection::vec(instance, 0..9)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_events_keeps_the_bounds_and_then_settles(
        instances in instances(),
        desired in 0u8..7,
        budget in budgets(),
        mode in modes(),
        policy in policies(),
        choices in prop::collection::vec(any::<Index>(), 0..120),
    ) {
        let number = |n: usize| Amount::Number(n as u32);
        let rules = Rules::new(number(budget.surge), number(budget.unavailable), mode, policy);
        let mut world = World { instances, desired, ..World::outdated(0, 12) };
        let mut story: Vec<Event> = Vec::new();
        for choice in choices {
            let event = *choice.get(&world.events());
            story.push(event);
            world.happen(&rules, event);
            prop_assert_eq!(world.harm, None, "after {:?}", story);
        }
        for _ in 0..2000 {
            let Some(event) = world.calm_event(&rules) else { break };
            world.happen(&rules, event);
            prop_assert_eq!(world.harm, None);
        }
        prop_assert!(world.settled(&rules), "left at {:?} after {:?}", world, story);
    }
}
