//! Every reachable state of small pools, with the planner that ships: both bounds and drained-before-deleted hold in all
//! of them, and from each of them the pool reaches its desired state once nobody disturbs it.

use crate::world;

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use capstan_core::pool::Amount::{self, Number, Percent};
use capstan_core::pool::{DeletePolicy, Strategy};
use stateright::{Checker, Model, Property};
use world::{Event, Harm, Rules, World};

/// More steps than any calm pool of this size needs.
const CALM_STEPS: usize = 400;

/// Far longer than any one pool takes, on a busy computer too.
const PATIENCE: Duration = Duration::from_secs(300);

struct PoolModel {
    size: u8,
    disturbances: u8,
    rules: Rules,
    /// States that are known to settle, so that each is followed only as far as the first known one.
    settling: Mutex<HashSet<u64>>,
}

impl PoolModel {
    /// Follows the calm course of a state until the pool is as it should be.
    fn settles(&self, state: &World) -> bool {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let mut world = World {
            disturbances: 0,
            ..state.clone()
        };
        let mut path = Vec::new();
        for _ in 0..CALM_STEPS {
            let print = hasher.hash_one(&world);
            if self.settling.lock().unwrap().contains(&print) {
                self.settling.lock().unwrap().extend(path);
                return true;
            }
            path.push(print);
            match world.calm_event(&self.rules) {
                // Nothing else is left to happen, and nobody mends the spec.
                Some(Event::Valid) if world.updates() => return false,
                Some(event) => world.happen(&self.rules, event),
                None if world.settled(&self.rules) => {
                    self.settling.lock().unwrap().extend(path);
                    return true;
                }
                None => return false,
            }
        }
        false
    }
}

impl Model for PoolModel {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        vec![World::outdated(self.size, self.disturbances)]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Event>) {
        actions.extend(state.events());
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let mut next = last.clone();
        next.happen(&self.rules, event);
        (next != *last).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("never below the floor", |_, w: &World| w.harm != Some(Harm::Floor)),
            Property::always("never above the ceiling", |_, w: &World| w.harm != Some(Harm::Ceiling)),
            Property::always("drained before deleted", |_, w: &World| {
                w.harm != Some(Harm::UndrainedDelete)
            }),
            Property::always("drained before updated in place", |_, w: &World| {
                w.harm != Some(Harm::UndrainedUpdate)
            }),
            Property::always("a late list ends no machine", |_, w: &World| {
                w.harm != Some(Harm::LostObject)
            }),
            Property::always("the cloud chooses no victim", |_, w: &World| {
                w.harm != Some(Harm::CloudChoseTheVictim)
            }),
            Property::always("settles when left alone", |model: &PoolModel, w: &World| {
                model.settles(w)
            }),
            Property::sometimes("the new model is everywhere", |model: &PoolModel, w: &World| {
                w.settled(&model.rules)
            }),
        ]
    }
}

/// Both budgets as numbers, every pair of small ones, and some as percent: they change with the size of the pool.
const BUDGETS: [(Amount, Amount); 11] = [
    (Number(0), Number(1)),
    (Number(0), Number(2)),
    (Number(1), Number(0)),
    (Number(1), Number(1)),
    (Number(1), Number(2)),
    (Number(2), Number(0)),
    (Number(2), Number(1)),
    (Number(2), Number(2)),
    (Percent(25), Number(0)),
    (Number(0), Percent(50)),
    (Percent(50), Percent(50)),
];

/// How often the world gets in the way in one run, by the size of the pool: every disturbance multiplies the states. Larger
/// pools with many disturbances are covered by random orders of events.
const SIZES: [(u8, u8); 4] = [(1, 2), (2, 1), (3, 1), (4, 0)];

fn check((size, disturbances): (u8, u8), (surge, unavailable): (Amount, Amount), strategy: Strategy) -> usize {
    let model = PoolModel {
        size,
        disturbances,
        rules: Rules::new(surge, unavailable, strategy, DeletePolicy::Oldest),
        settling: Mutex::default(),
    };
    let checker = model.checker().threads(2).timeout(PATIENCE).spawn_bfs().join();
    assert!(
        checker.is_done(),
        "not all states of a pool of {size} with maxSurge {surge} and maxUnavailable {unavailable} were seen in time"
    );
    checker.assert_properties();
    checker.unique_state_count()
}

/// Past the test runner, which hides what a passing test prints.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn every_reachable_state_of_small_pools_keeps_the_promises() {
    let begun = Instant::now();
    let mut states = 0;
    for (size, disturbances) in SIZES {
        for (budgets, strategy) in BUDGETS
            .iter()
            .flat_map(|b| [(*b, Strategy::Replace), (*b, Strategy::InPlace)])
        {
            // Percentages resolve to numbers that are in the list, too, until the pool is scaled.
            let numbers = matches!(budgets, (Number(_), Number(_)));
            let disturbances = if size < 3 || numbers { disturbances } else { 0 };
            states += check((size, disturbances), budgets, strategy);
        }
        let took = begun.elapsed().as_secs_f32();
        say(&format!("pools up to {size}: {states} states so far, {took:.1} s"));
    }
    say(&format!(
        "{states} states of {} pools, all within both budgets and all settling",
        SIZES.len() * 2 * BUDGETS.len()
    ));
}
