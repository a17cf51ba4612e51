//! The planner over random pools and random orders of events: both bounds, progress, stability.

use crate::world;

use capstan_core::rollout::{Amount, Budget, DeletePolicy, Health, Machine, Mode, Motion, Plan, Pool, Scaling, plan};
use proptest::prelude::*;
use proptest::sample::Index;
use world::{Event, Instance, Rules, Stage, World};

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
        1 => Just(Health::NotReady),
        1 => Just(Health::Unknown)
    ]
}

fn motions() -> impl Strategy<Value = Motion> {
    prop_oneof![
        6 => Just(Motion::Resting),
        1 => Just(Motion::Leaving { blocked: None }),
        1 => Just(Motion::Updating { blocked: None }),
        1 => Just(Motion::Deleting),
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
        motions(),
    );
    prop::collection::vec(one, 0..14).prop_map(|all| {
        let named = all.into_iter().enumerate();
        named
            .map(
                |(n, (created, health, failed, outdated, marked, irreparable, motion))| Machine {
                    name: format!("m{n}"),
                    created,
                    health,
                    failed,
                    outdated,
                    marked,
                    irreparable,
                    motion,
                },
            )
            .collect()
    })
}

fn pools() -> impl Strategy<Value = Pool> {
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
            let live = machines.iter().filter(|m| m.motion != Motion::Deleting).count();
            let scaling = if unborn > 0 { Scaling::Running } else { Scaling::Idle };
            Pool {
                desired,
                budget,
                policy,
                mode,
                seed,
                capacity: live + unborn,
                scaling,
                machines,
            }
        })
}

fn taken(plan: &Plan) -> Vec<&String> {
    plan.delete.iter().chain(&plan.update).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_keeps_both_bounds(pool in pools()) {
        let plan = plan(&pool);
        let available = pool.machines.iter().filter(|m| m.available()).count();
        let takes = pool.machines.iter().filter(|m| m.available() && taken(&plan).contains(&&m.name)).count();
        prop_assert!(takes == 0 || available - takes >= pool.budget.floor(pool.desired));
        let deleting = pool.machines.iter().filter(|m| m.motion == Motion::Deleting).count();
        if let Some(capacity) = plan.capacity {
            prop_assert!(capacity >= pool.machines.len() - deleting, "never below what exists");
            let ceiling = pool.budget.ceiling(pool.desired);
            prop_assert!(capacity < pool.capacity || capacity + deleting <= ceiling);
        }
    }

    #[test]
    fn a_plan_touches_resting_machines_once(pool in pools()) {
        let plan = plan(&pool);
        let mut seen = std::collections::HashSet::new();
        for name in taken(&plan) {
            prop_assert!(seen.insert(name));
            prop_assert!(pool.machines.iter().any(|m| m.name == *name && m.motion == Motion::Resting));
        }
    }

    #[test]
    fn a_good_machine_goes_only_when_there_are_too_many(pool in pools()) {
        let good = |m: &&Machine| {
            let stays = matches!(m.motion, Motion::Resting | Motion::Updating { .. });
            let current = !m.outdated || m.motion != Motion::Resting;
            let sound = !m.failed && !m.marked && !m.irreparable;
            stays && current && (sound || m.motion != Motion::Resting)
        };
        let plan = plan(&pool);
        let goods = pool.machines.iter().filter(good).count();
        let gone = pool.machines.iter().filter(good).filter(|m| plan.delete.contains(&m.name)).count();
        prop_assert!(gone == 0 || goods - gone >= pool.desired);
    }

    #[test]
    fn planning_again_in_another_order_picks_the_same(pool in pools()) {
        let mut shuffled = pool.clone();
        shuffled.machines.reverse();
        let (one, other) = (plan(&pool), plan(&shuffled));
        prop_assert_eq!((one.capacity, one.delete, one.update), (other.capacity, other.delete, other.update));
    }

    #[test]
    fn a_healthy_pool_with_work_left_never_stalls(mut pool in pools()) {
        pool.machines.retain(|m| m.motion == Motion::Resting);
        pool.machines.iter_mut().for_each(|m| m.health = Health::Ready);
        (pool.capacity, pool.scaling) = (pool.machines.len(), Scaling::Idle);
        let plan = plan(&pool);
        let done = !plan.rolling && pool.machines.len() == pool.desired;
        prop_assert_eq!(plan.is_empty(), done);
    }
}

fn instances() -> impl Strategy<Value = Vec<Instance>> {
    let one = (
        0u8..2,
        healths().prop_filter("the model knows", |h| *h != Health::Unknown),
    );
    let instance = one.prop_map(|(model, health)| Instance {
        outdated: model == 0,
        health,
        failed: false,
        stage: Stage::Resting,
    });
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
