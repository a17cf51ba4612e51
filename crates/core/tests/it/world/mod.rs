//! A pool, its cloud and its cluster in miniature, driven by the planner that ships.
//!
//! The controller looks, plans, and then carries its effects out one by one while the world moves on: every effect acts
//! on a world that may have changed since the plan was made. Between any two effects the process may die.
//!
//! Worlds that differ in nothing that matters are the same world: of a machine that leaves only what the planner counts
//! is kept, and machines that leave have no order among each other. Those that stay keep theirs, which is their age.

use std::collections::HashMap;
use std::sync::Mutex;

use capstan_core::rollout::{Amount, Budget, DeletePolicy, Health, Machine, Mode, Motion, Pool, Scaling, plan};

/// The largest pool that anybody scales to.
const LARGEST: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    Resting,
    Draining,
    Drained,
    Updating,
    Deleting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    pub outdated: bool,
    pub health: Health,
    pub failed: bool,
    pub stage: Stage,
}

impl Instance {
    fn available(&self) -> bool {
        self.stage == Stage::Resting && self.health == Health::Ready
    }

    fn leaves(&self) -> bool {
        matches!(self.stage, Stage::Draining | Stage::Drained | Stage::Deleting)
    }

    /// Without what nobody asks about any more. Of one that leaves only this is asked: does it count as unready?
    fn normal(mut self) -> Self {
        if self.leaves() {
            let unready = self.health == Health::NotReady && !self.failed;
            self.health = if unready { Health::NotReady } else { Health::Ready };
            (self.failed, self.outdated) = (false, false);
        } else if self.stage == Stage::Updating {
            self.outdated = false;
        }
        self
    }
}

/// What the controller set out to do. Instances are named by their place, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Effect {
    Delete(u8),
    Capacity(u8),
    /// Take an available machine.
    Drain(u8),
    Update(u8),
    /// The same for one that was not available when it was chosen: left alone if it has become available meanwhile,
    /// because the floor was not asked.
    DrainIdle(u8),
    UpdateIdle(u8),
}

impl Effect {
    /// The same effect on a machine that has another place now; nothing if it has none.
    fn aimed(self, place: impl Fn(u8) -> Option<u8>) -> Option<Self> {
        match self {
            Effect::Delete(n) => place(n).map(Effect::Delete),
            Effect::Drain(n) => place(n).map(Effect::Drain),
            Effect::Update(n) => place(n).map(Effect::Update),
            Effect::DrainIdle(n) => place(n).map(Effect::DrainIdle),
            Effect::UpdateIdle(n) => place(n).map(Effect::UpdateIdle),
            Effect::Capacity(_) => Some(self),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The controller looks and plans.
    Plan,
    /// It carries out the next effect.
    Apply,
    // The world takes its course.
    Born,
    Ready(u8),
    DrainDone(u8),
    UpdateDone(u8),
    Gone(u8),
    CapacityReturns,
    // The world gets in the way.
    Die,
    Fail(u8),
    Vanish(u8),
    OutsideDrain(u8),
    NotReady(u8),
    Exhausted,
    NewModel,
    Scale(u8),
}

impl Event {
    pub fn disturbs(self) -> bool {
        use Event::{Die, Exhausted, Fail, NewModel, NotReady, OutsideDrain, Scale, Vanish};
        matches!(
            self,
            Die | Fail(_) | Vanish(_) | OutsideDrain(_) | NotReady(_) | Exhausted | NewModel | Scale(_)
        )
    }
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Harm {
    Floor,
    Ceiling,
    UndrainedDelete,
    CloudChoseTheVictim,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub desired: u8,
    /// How many more times the model may change.
    pub models: u8,
    pub instances: Vec<Instance>,
    /// Instances asked for that do not exist yet.
    pub unborn: u8,
    /// The cloud has no room for them now.
    pub exhausted: bool,
    pub queue: Vec<Effect>,
    /// Available machines lost by outside doing since the controller looked.
    pub lost: u8,
    pub harm: Option<Harm>,
    pub disturbances: u8,
}

/// All that a plan depends on.
type Sight = (u8, u8, bool, Vec<Instance>);

/// What does not change while the world runs.
pub struct Rules {
    pub surge: Amount,
    pub unavailable: Amount,
    pub mode: Mode,
    pub policy: DeletePolicy,
    /// What the planner has answered before: it is a function.
    plans: Mutex<HashMap<Sight, Vec<Effect>>>,
}

impl Rules {
    pub fn new(surge: Amount, unavailable: Amount, mode: Mode, policy: DeletePolicy) -> Self {
        Self {
            surge,
            unavailable,
            mode,
            policy,
            plans: Mutex::default(),
        }
    }

    fn budget(&self, desired: u8) -> Budget {
        Budget::resolve(self.surge, self.unavailable, desired.into()).unwrap()
    }
}

impl World {
    /// A healthy pool of an old model, with a new one waiting.
    pub fn outdated(size: u8, disturbances: u8) -> Self {
        let old = Instance {
            outdated: true,
            health: Health::Ready,
            failed: false,
            stage: Stage::Resting,
        };
        Self {
            desired: size,
            models: 1,
            instances: vec![old; size.into()],
            unborn: 0,
            exhausted: false,
            queue: Vec::new(),
            lost: 0,
            harm: None,
            disturbances,
        }
    }

    fn available(&self) -> usize {
        self.instances.iter().filter(|i| i.available()).count()
    }

    /// All that can happen next.
    pub fn events(&self) -> Vec<Event> {
        let mut events = vec![if self.queue.is_empty() {
            Event::Plan
        } else {
            Event::Apply
        }];
        events.extend(self.course());
        if self.disturbances > 0 {
            events.extend(self.disturbing());
        }
        events
    }

    /// What happens by itself, sooner or later.
    pub fn course(&self) -> Vec<Event> {
        let mut events = Vec::new();
        // A failed scale operation is over: it is the controller that tries again, and it does one thing at a time.
        if self.exhausted {
            events.extend(self.queue.is_empty().then_some(Event::CapacityReturns));
        } else if self.unborn > 0 {
            events.push(Event::Born);
        }
        for (n, instance) in (0u8..).zip(&self.instances) {
            match instance.stage {
                Stage::Draining => events.push(Event::DrainDone(n)),
                Stage::Updating => events.push(Event::UpdateDone(n)),
                Stage::Deleting => events.push(Event::Gone(n)),
                Stage::Resting if instance.health != Health::Ready && !instance.failed => events.push(Event::Ready(n)),
                Stage::Resting | Stage::Drained => {}
            }
        }
        events
    }

    fn disturbing(&self) -> Vec<Event> {
        let mut events = Vec::new();
        if !self.queue.is_empty() {
            events.push(Event::Die);
        } else {
            let sizes = [
                self.desired.checked_sub(1),
                Some(self.desired + 1).filter(|n| *n <= LARGEST),
            ];
            events.extend(sizes.into_iter().flatten().map(Event::Scale));
        }
        if self.models > 0 {
            events.push(Event::NewModel);
        }
        if self.unborn > 0 && !self.exhausted {
            events.push(Event::Exhausted);
        }
        for (n, instance) in (0u8..).zip(&self.instances) {
            if instance.stage == Stage::Deleting {
                continue;
            }
            events.push(Event::Vanish(n));
            // Of one that leaves it matters only if it counted as unready.
            if !instance.failed && (!instance.leaves() || instance.health == Health::NotReady) {
                events.push(Event::Fail(n));
            }
            if instance.stage == Stage::Resting {
                events.push(Event::OutsideDrain(n));
            }
            if instance.available() {
                events.push(Event::NotReady(n));
            }
        }
        events
    }

    /// Lets one event happen.
    pub fn happen(&mut self, rules: &Rules, event: Event) {
        if event.disturbs() {
            self.disturbances -= 1;
        }
        let before = self.available();
        match event {
            Event::Plan => self.look_and_plan(rules),
            Event::Apply => self.apply(rules),
            Event::Born => {
                self.unborn -= 1;
                let new = Instance {
                    outdated: false,
                    health: Health::Creating,
                    failed: false,
                    stage: Stage::Resting,
                };
                self.instances.push(new);
            }
            Event::Ready(n) => self.at(n).health = Health::Ready,
            Event::DrainDone(n) => self.at(n).stage = Stage::Drained,
            Event::UpdateDone(n) => {
                let instance = self.at(n);
                *instance = Instance {
                    outdated: false,
                    stage: Stage::Resting,
                    ..*instance
                };
            }
            Event::Gone(n) | Event::Vanish(n) => self.remove(n),
            Event::CapacityReturns => self.exhausted = false,
            Event::Die => self.queue.clear(),
            Event::Fail(n) => (self.at(n).failed, self.at(n).health) = (true, Health::NotReady),
            Event::OutsideDrain(n) => self.at(n).stage = Stage::Draining,
            Event::NotReady(n) => self.at(n).health = Health::NotReady,
            Event::Exhausted => self.exhausted = true,
            Event::NewModel => {
                self.models -= 1;
                self.instances.iter_mut().for_each(|instance| instance.outdated = true);
            }
            Event::Scale(desired) => self.desired = desired,
        }
        match self.queue.is_empty() {
            true => self.lost = 0,
            false if event.disturbs() => self.lost += (before - self.available().min(before)) as u8,
            false => {}
        }
        self.normalize();
    }

    /// Puts those that leave behind those that stay, in an order that only depends on what they are.
    fn normalize(&mut self) {
        self.instances
            .iter_mut()
            .for_each(|instance| *instance = instance.normal());
        let meant = |n: usize| self.queue.contains(&Effect::Delete(n as u8));
        let mut order: Vec<usize> = (0..self.instances.len()).collect();
        order.sort_by_key(|n| {
            let instance = &self.instances[*n];
            instance
                .leaves()
                .then_some((instance.stage, instance.health, meant(*n)))
        });
        let place = |old: u8| order.iter().position(|n| *n == usize::from(old)).map(|n| n as u8);
        let mut queue: Vec<Effect> = self.queue.iter().filter_map(|effect| effect.aimed(place)).collect();
        let deletes = queue.iter().filter(|e| matches!(e, Effect::Delete(_))).count();
        queue[..deletes].sort();
        self.instances = order.iter().map(|n| self.instances[*n]).collect();
        self.queue = queue;
    }

    fn at(&mut self, n: u8) -> &mut Instance {
        &mut self.instances[usize::from(n)]
    }

    /// Takes an instance out; effects that were meant for it find nothing, the others keep their aim.
    fn remove(&mut self, gone: u8) {
        self.instances.remove(gone.into());
        let aim = |n: u8| (n != gone).then_some(if n > gone { n - 1 } else { n });
        self.queue = self.queue.iter().filter_map(|effect| effect.aimed(aim)).collect();
    }

    /// What the controller sees, and the instances that it can delete now because they are drained.
    pub fn observe(&self, rules: &Rules) -> (Pool, Vec<u8>) {
        let drained: Vec<u8> = (0u8..)
            .zip(&self.instances)
            .filter(|(_, i)| i.stage == Stage::Drained)
            .map(|(n, _)| n)
            .collect();
        let machines: Vec<Machine> = self
            .instances
            .iter()
            .enumerate()
            .map(|(n, i)| self.seen(n, i))
            .collect();
        let live = machines.iter().filter(|m| m.motion != Motion::Deleting).count();
        let pool = Pool {
            desired: self.desired.into(),
            budget: rules.budget(self.desired),
            policy: rules.policy,
            mode: rules.mode,
            seed: 1,
            capacity: live + usize::from(self.unborn),
            scaling: if self.unborn > 0 && !self.exhausted {
                Scaling::Running
            } else {
                Scaling::Idle
            },
            machines,
        };
        (pool, drained)
    }

    fn seen(&self, n: usize, instance: &Instance) -> Machine {
        Machine {
            name: format!("m{n}"),
            created: n as i64,
            health: instance.health,
            failed: instance.failed,
            outdated: instance.outdated,
            marked: false,
            irreparable: false,
            motion: match instance.stage {
                Stage::Resting => Motion::Resting,
                Stage::Draining => Motion::Leaving { blocked: None },
                Stage::Updating => Motion::Updating { blocked: None },
                Stage::Drained | Stage::Deleting => Motion::Deleting,
            },
        }
    }

    fn look_and_plan(&mut self, rules: &Rules) {
        self.queue = self.planned(rules);
    }

    /// What the controller would set out to do now.
    fn planned(&self, rules: &Rules) -> Vec<Effect> {
        let sight = (self.desired, self.unborn, self.exhausted, self.instances.clone());
        if let Some(known) = rules.plans.lock().unwrap().get(&sight) {
            return known.clone();
        }
        let (pool, drained) = self.observe(rules);
        let plan = plan(&pool);
        let place = |name: &String| name[1..].parse::<u8>().unwrap_or(u8::MAX);
        let available = |n: u8| self.instances[usize::from(n)].available();
        let mut queue: Vec<Effect> = drained.into_iter().map(Effect::Delete).collect();
        queue.extend(plan.capacity.map(|n| Effect::Capacity(n as u8)));
        queue.extend(plan.delete.iter().map(place).map(|n| match available(n) {
            true => Effect::Drain(n),
            false => Effect::DrainIdle(n),
        }));
        queue.extend(plan.update.iter().map(place).map(|n| match available(n) {
            true => Effect::Update(n),
            false => Effect::UpdateIdle(n),
        }));
        rules.plans.lock().unwrap().insert(sight, queue.clone());
        queue
    }

    fn apply(&mut self, rules: &Rules) {
        let effect = self.queue.remove(0);
        let before = self.available();
        match effect {
            Effect::DrainIdle(n) | Effect::UpdateIdle(n) if self.at(n).available() => {}
            Effect::Delete(n) if self.at(n).stage == Stage::Drained => self.at(n).stage = Stage::Deleting,
            Effect::Delete(_) => self.harm = Some(Harm::UndrainedDelete),
            Effect::Capacity(capacity) => self.set_capacity(rules, capacity),
            Effect::Drain(n) | Effect::DrainIdle(n) if self.at(n).stage == Stage::Resting => {
                self.at(n).stage = Stage::Draining
            }
            Effect::Update(n) | Effect::UpdateIdle(n) if self.at(n).stage == Stage::Resting => {
                self.at(n).stage = Stage::Updating
            }
            Effect::Drain(_) | Effect::Update(_) | Effect::DrainIdle(_) | Effect::UpdateIdle(_) => {}
        }
        let took = self.available() < before;
        if took && self.available() + usize::from(self.lost) < rules.budget(self.desired).floor(self.desired.into()) {
            self.harm = Some(Harm::Floor);
        }
    }

    fn set_capacity(&mut self, rules: &Rules, capacity: u8) {
        let live = self.instances.iter().filter(|i| i.stage != Stage::Deleting).count() as u8;
        if capacity < live {
            self.harm = Some(Harm::CloudChoseTheVictim);
        }
        let unborn = capacity.saturating_sub(live);
        let total = self.instances.len() + usize::from(unborn);
        if unborn > self.unborn && total > rules.budget(self.desired).ceiling(self.desired.into()) {
            self.harm = Some(Harm::Ceiling);
        }
        self.unborn = unborn;
    }

    /// The pool is as it should be, and the controller has nothing to do.
    pub fn settled(&self, rules: &Rules) -> bool {
        let good = |i: &Instance| i.available() && !i.outdated && !i.failed;
        let quiet = || self.planned(rules).is_empty();
        self.unborn == 0
            && self.instances.len() == usize::from(self.desired)
            && self.instances.iter().all(good)
            && quiet()
    }

    /// The next event if nobody disturbs: the controller acts when it has something to do, else the world moves on.
    pub fn calm_event(&self, rules: &Rules) -> Option<Event> {
        if !self.queue.is_empty() {
            return Some(Event::Apply);
        }
        if self.planned(rules).is_empty() {
            self.course().first().copied()
        } else {
            Some(Event::Plan)
        }
    }
}
