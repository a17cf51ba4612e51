//! What follows the next plan of a pool: [`forecast`] plans again and again, with the effects of each plan assumed done.
//!
//! Invariant: it decides nothing. Every wave is a step of [`super::plan`] on the pool as it would be by then. It assumes
//! that drains end, that new machines become ready and that the cloud refuses nothing.

use super::{Activity, Drain, Health, Instance, Machine, Mode, Model, Object, Observed, Owner, Retry, ScaleSet};
use super::{Scaling, Step, Update, plan, steps::TOGETHER};
use crate::drain::{self, Assessment, Drained, NodeState, Request};
use crate::plan::{Describe, Forecast, Impact, Wave};

/// So many plans for each machine are more than any rollout takes.
const PLANS_PER_MACHINE: usize = 16;

/// Returns the waves in which the pool reaches its desired state. There are none before the pool's object is complete:
/// nothing else of it has been observed then.
pub fn forecast(observed: &Observed) -> Forecast {
    if observed.setup.is_some() {
        return Forecast::default();
    }
    let mut future = Future {
        pool: observed.clone(),
        born: 0,
    };
    let mut forecast = Forecast::default();
    let bound = PLANS_PER_MACHINE * (observed.machines.len() + observed.desired + 4);
    for _ in 0..bound {
        let plan = plan(&future.pool);
        let before = future.pool.clone();
        let mut wave = Wave::default();
        for step in plan.steps {
            if let Impact::Cloud(calls) = step.impact() {
                forecast.cloud_calls += calls;
            }
            future.carry_out(step, &mut wave);
        }
        if !wave.is_empty() {
            forecast.waves.push(wave);
        }
        if future.pool == before && !future.time_passes() {
            forecast.blocked = plan.waiting;
            break;
        }
        if future.is_over() {
            break;
        }
    }
    let updated = |name: &String| forecast.waves.iter().any(|wave| wave.updates.contains(name));
    let kept = future.pool.machines.iter().filter(|machine| machine.exists());
    let kept: Vec<&String> = kept.map(|machine| &machine.name).collect();
    let names = observed.machines.iter().map(|machine| machine.name.clone());
    forecast.stay = names.filter(|name| kept.contains(&name) && !updated(name)).collect();
    forecast
}

/// A pool as it would be.
struct Future {
    pool: Observed,
    /// How many machines were added.
    born: usize,
}

impl Future {
    fn is_over(&self) -> bool {
        let torn_down = matches!(self.pool.mode, Mode::Teardown | Mode::Orphaned);
        torn_down && self.pool.scale_set.is_none() && self.pool.machines.is_empty()
    }

    fn carry_out(&mut self, step: Step, wave: &mut Wave) {
        match step {
            Step::AddFinalizer | Step::SetSshKey => self.pool.setup = None,
            Step::CreateScaleSet { capacity } => {
                self.pool.scale_set = Some(ScaleSet {
                    scaling: Scaling::Running,
                    ..ScaleSet::default()
                });
                self.grow_to(capacity, wave);
            }
            Step::AdoptScaleSet(_) => self.set(|set| set.model = Model::Current),
            Step::CreateObjects(names) => self.each(&names, |machine| machine.object = Object::Active),
            Step::ReleaseObjects(names) => self.pool.machines.retain(|machine| !names.contains(&machine.name)),
            Step::RecordModels(names) => self.each(&names, |machine| machine.unrecorded = false),
            Step::DeleteStray(name) => self.pool.strays.retain(|stray| *stray != name),
            Step::DeleteOwner { name, .. } => self.each(&[name], |machine| machine.owner = Owner::Deleting),
            Step::Drain(names) => self.each(&names, |machine| machine.drain = drained(machine)),
            Step::DeleteInstances(proofs) => {
                let count = proofs.len();
                self.proven(&proofs, |machine| machine.activity = Activity::Deleting);
                self.set(|set| set.capacity = set.capacity.saturating_sub(count));
            }
            Step::UpdateInstances(proofs) => self.proven(&proofs, |machine| {
                machine.activity = Activity::Updating(Update::Running);
                machine.outdated = false;
                machine.needs_new_disk = false;
            }),
            Step::ReimageInstances(proofs) => self.proven(&proofs, |machine| {
                machine.activity = Activity::Updating(Update::Running);
                machine.new_image = false;
            }),
            Step::FinishUpdate { name, .. } => self.each(&[name], |machine| {
                machine.activity = Activity::Idle;
                machine.drain = Drain::NotRun;
            }),
            Step::AbandonUpdate { name, .. } => self.each(&[name], |machine| {
                machine.activity = Activity::Idle;
                machine.irreparable = true;
            }),
            Step::Remove(selected) => {
                let names: Vec<String> = selected.into_iter().map(|selected| selected.name).collect();
                self.each(&names, |machine| {
                    machine.activity = Activity::Draining;
                    machine.object = Object::Deleting;
                });
                wave.removes.extend(names);
            }
            Step::StartUpdate { machine, .. } => {
                let names = [machine.name];
                self.each(&names, |machine| {
                    machine.activity = Activity::Updating(Update::Pending);
                    machine.undated = false;
                });
                wave.updates.extend(names);
            }
            Step::ApplyScaleSet { model, capacity, .. } => {
                self.set(|set| {
                    set.model = if model { Model::Current } else { set.model };
                    set.retry = Retry::NotNeeded;
                    set.scaling = Scaling::Running;
                    set.stale_tags = false;
                    set.stale_bootstrap = false;
                });
                self.grow_to(capacity, wave);
            }
            Step::RefreshBootstrap => self.set(|set| set.stale_bootstrap = false),
            Step::ApplyTags => self.set(|set| set.stale_tags = false),
            Step::SetReplicas(_) => self.pool.replicas = None,
            Step::DeleteScaleSet => {
                self.pool.scale_set = None;
                for machine in &mut self.pool.machines {
                    machine.instance = Instance::Missing { confirmed: true };
                }
            }
            Step::ReleasePool => self.pool.machines.clear(),
        }
    }

    fn set(&mut self, change: impl FnOnce(&mut ScaleSet)) {
        if let Some(set) = self.pool.scale_set.as_mut() {
            change(set);
        }
    }

    fn each(&mut self, names: &[String], change: impl Fn(&mut Machine)) {
        let named = |machine: &&mut Machine| names.contains(&machine.name);
        self.pool.machines.iter_mut().filter(named).for_each(change);
    }

    /// Changes the machines whose instances these proofs are for.
    fn proven(&mut self, proofs: &[Drained], change: impl Fn(&mut Machine)) {
        let proven = |machine: &&mut Machine| match &machine.instance {
            Instance::Listed { id } => proofs.iter().any(|proof| proof.machine() == id),
            Instance::Missing { .. } => false,
        };
        self.pool.machines.iter_mut().filter(proven).for_each(change);
    }

    fn grow_to(&mut self, capacity: usize, wave: &mut Wave) {
        self.set(|set| set.capacity = capacity);
        let staying = |machine: &&Machine| machine.exists() && machine.activity != Activity::Deleting;
        let there = self.pool.machines.iter().filter(staying).count();
        for _ in there..capacity {
            self.born += 1;
            self.pool.machines.push(Machine {
                object: Object::Missing,
                created: i64::MAX,
                health: Health::Creating,
                ..Machine::ready(&format!("(new machine {})", self.born))
            });
            wave.adds += 1;
        }
    }

    /// Lets everything end that is under way. Returns whether anything was.
    fn time_passes(&mut self) -> bool {
        let before = self.pool.clone();
        self.pool.machines.retain(|machine| {
            let gone = machine.activity == Activity::Deleting;
            !gone || !machine.exists()
        });
        for machine in &mut self.pool.machines {
            if let Instance::Missing { confirmed } = &mut machine.instance {
                *confirmed = true;
            }
            if machine.health == Health::Creating {
                machine.health = Health::Ready;
                machine.joining = None;
            }
            if matches!(machine.drain, Drain::Running { .. }) {
                machine.drain = drained(machine);
            }
            // Cluster API drains the node, then deletes the object.
            if machine.activity == Activity::Draining && machine.object == Object::Active {
                machine.object = Object::Deleting;
            }
            machine.activity = match machine.activity.clone() {
                Activity::Updating(Update::Running) if machine.new_image => Activity::Updating(Update::Upgraded),
                Activity::Updating(Update::Running | Update::Applied { .. }) => Activity::Updating(Update::Applied {
                    model: String::new(),
                    ready: true,
                    waited: std::time::Duration::ZERO,
                }),
                other => other,
            };
        }
        self.set(|set| {
            (set.scaling, set.quiet, set.confirmed) = (Scaling::Idle, true, true);
            set.retry = Retry::NotNeeded;
        });
        self.pool.drained_for = TOGETHER;
        self.pool.arriving = None;
        self.pool != before
    }
}

/// Returns the drain as it would end. The proof never leaves the forecast.
fn drained(machine: &Machine) -> Drain {
    let Instance::Listed { id } = &machine.instance else {
        return machine.drain.clone();
    };
    let request = Request::new(id.clone(), NodeState::Missing);
    match drain::assess(&request, jiff::Timestamp::UNIX_EPOCH) {
        Assessment::Drained(proof) => Drain::Done(proof),
        Assessment::Wait(_) | Assessment::Drain => machine.drain.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Budget, DeletePolicy, Strategy};
    use super::*;
    use rstest::rstest;

    fn pool(outdated: &[bool], surge: usize, unavailable: usize) -> Observed {
        let machines = (0i64..).zip(outdated).map(|(n, outdated)| Machine {
            created: n,
            outdated: *outdated,
            ..Machine::ready(&format!("m{n}"))
        });
        let model = if outdated.contains(&true) {
            Model::Outdated
        } else {
            Model::Current
        };
        Observed {
            desired: outdated.len(),
            budget: Budget { surge, unavailable },
            policy: DeletePolicy::Oldest,
            machines: machines.collect(),
            scale_set: Some(ScaleSet {
                capacity: outdated.len(),
                model,
                quiet: true,
                confirmed: true,
                ..ScaleSet::default()
            }),
            ..Observed::default()
        }
    }

    fn texts(forecast: &Forecast) -> Vec<String> {
        forecast.waves.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_pool_in_its_desired_state_has_no_waves_and_keeps_its_machines() {
        let forecast = forecast(&pool(&[false, false], 1, 0));
        assert_eq!(texts(&forecast), Vec::<String>::new());
        assert_eq!(
            (forecast.stay, forecast.cloud_calls),
            (vec!["m0".to_owned(), "m1".to_owned()], 0)
        );
    }

    #[rstest]
    #[case::one_at_a_time(1, 0, &["adds 1 machine", "removes m0", "adds 1 machine", "removes m1", "adds 1 machine", "removes m2"])]
    #[case::all_at_once(3, 0, &["adds 3 machines", "removes m0, m1, m2"])]
    #[case::without_a_surge(0, 1, &["removes m0", "adds 1 machine", "removes m1", "adds 1 machine", "removes m2", "adds 1 machine"])]
    fn a_rollout_has_the_waves_of_its_budget(
        #[case] surge: usize,
        #[case] unavailable: usize,
        #[case] expected: &[&str],
    ) {
        let forecast = forecast(&pool(&[true, true, true], surge, unavailable));
        assert_eq!(texts(&forecast), expected, "{forecast:?}");
        assert_eq!(forecast.stay, Vec::<String>::new());
    }

    #[test]
    fn machines_of_the_newest_model_stay() {
        let forecast = forecast(&pool(&[false, true, false], 1, 0));
        assert_eq!(texts(&forecast), ["adds 1 machine", "removes m1"]);
        assert_eq!(forecast.stay, ["m0", "m2"]);
    }

    #[test]
    fn an_update_in_place_keeps_the_number_of_machines() {
        let mut observed = pool(&[true, true], 0, 1);
        observed.strategy = Strategy::InPlace;
        let forecast = forecast(&observed);
        assert_eq!(texts(&forecast), ["updates m0 in place", "updates m1 in place"]);
        assert!(forecast.stay.is_empty());
    }

    #[test]
    fn a_smaller_pool_removes_its_oldest_machines() {
        let mut observed = pool(&[false, false, false], 1, 0);
        observed.desired = 1;
        let forecast = forecast(&observed);
        assert_eq!(texts(&forecast), ["removes m0, m1"]);
        assert_eq!(forecast.stay, ["m2"]);
    }

    #[test]
    fn a_pool_that_is_deleted_loses_all_machines_and_its_scale_set() {
        let mut observed = pool(&[false, false], 1, 0);
        observed.mode = Mode::Teardown;
        let forecast = forecast(&observed);
        assert_eq!(texts(&forecast), ["removes m0, m1"]);
        assert_eq!(
            (forecast.stay.len(), forecast.cloud_calls),
            (0, 2),
            "one delete of instances, one of the set"
        );
    }

    #[test]
    fn a_new_pool_is_made_at_once() {
        let observed = Observed {
            desired: 2,
            budget: Budget {
                surge: 1,
                unavailable: 0,
            },
            ..Observed::default()
        };
        assert_eq!(texts(&forecast(&observed)), ["adds 2 machines"]);
    }
}
