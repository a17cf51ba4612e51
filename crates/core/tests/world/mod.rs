//! A pool, its cloud and its cluster in miniature, driven by the planner that ships.
//!
//! The controller looks, plans, and then carries its effects out one by one while the world moves on: every effect acts
//! on a world that may have changed since the plan was made. Between any two effects the process may die.

use capstan_core::rollout::{Budget, DeletePolicy, Health, Machine, Mode, Motion, Pool, Scaling, plan};

/// The largest pool that anybody scales to.
const LARGEST: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    Resting,
    Draining,
    Drained,
    Updating,
    Deleting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    pub model: u8,
    pub health: Health,
    pub failed: bool,
    pub stage: Stage,
}

impl Instance {
    fn available(&self) -> bool {
        self.stage == Stage::Resting && self.health == Health::Ready
    }
}

/// What the controller set out to do. Instances are named by their place, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    pub model: u8,
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

/// What does not change while the world runs.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub budget: Budget,
    pub mode: Mode,
    pub policy: DeletePolicy,
}

impl World {
    /// A healthy pool of an old model, with a new one waiting.
    pub fn outdated(size: u8, disturbances: u8) -> Self {
        let old = Instance {
            model: 0,
            health: Health::Ready,
            failed: false,
            stage: Stage::Resting,
        };
        Self {
            desired: size,
            model: 1,
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
        if self.model < 2 {
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
            if !instance.failed {
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
                    model: self.model,
                    health: Health::Creating,
                    failed: false,
                    stage: Stage::Resting,
                };
                self.instances.push(new);
            }
            Event::Ready(n) => self.at(n).health = Health::Ready,
            Event::DrainDone(n) => self.at(n).stage = Stage::Drained,
            Event::UpdateDone(n) => {
                let model = self.model;
                let instance = self.at(n);
                *instance = Instance {
                    model,
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
            Event::NewModel => self.model += 1,
            Event::Scale(desired) => self.desired = desired,
        }
        match self.queue.is_empty() {
            true => self.lost = 0,
            false if event.disturbs() => self.lost += (before - self.available().min(before)) as u8,
            false => {}
        }
    }

    fn at(&mut self, n: u8) -> &mut Instance {
        &mut self.instances[usize::from(n)]
    }

    /// Takes an instance out; effects that were meant for it find nothing, the others keep their aim.
    fn remove(&mut self, gone: u8) {
        self.instances.remove(gone.into());
        let aim = |n: u8| (n != gone).then_some(if n > gone { n - 1 } else { n });
        self.queue = std::mem::take(&mut self.queue)
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Delete(n) => aim(n).map(Effect::Delete),
                Effect::Drain(n) => aim(n).map(Effect::Drain),
                Effect::Update(n) => aim(n).map(Effect::Update),
                Effect::DrainIdle(n) => aim(n).map(Effect::DrainIdle),
                Effect::UpdateIdle(n) => aim(n).map(Effect::UpdateIdle),
                Effect::Capacity(_) => Some(effect),
            })
            .collect();
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
            budget: rules.budget,
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
            outdated: instance.model != self.model,
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
        let (pool, drained) = self.observe(rules);
        let plan = plan(&pool);
        let place = |name: &String| name[1..].parse::<u8>().unwrap_or(u8::MAX);
        self.queue = drained.into_iter().map(Effect::Delete).collect();
        self.queue.extend(plan.capacity.map(|n| Effect::Capacity(n as u8)));
        for n in plan.delete.iter().map(place) {
            let available = self.at(n).available();
            self.queue.push(if available {
                Effect::Drain(n)
            } else {
                Effect::DrainIdle(n)
            });
        }
        for n in plan.update.iter().map(place) {
            let available = self.at(n).available();
            self.queue.push(if available {
                Effect::Update(n)
            } else {
                Effect::UpdateIdle(n)
            });
        }
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
        if took && self.available() + usize::from(self.lost) < rules.budget.floor(self.desired.into()) {
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
        if unborn > self.unborn && total > rules.budget.ceiling(self.desired.into()) {
            self.harm = Some(Harm::Ceiling);
        }
        self.unborn = unborn;
    }

    /// The pool is as it should be, and the controller has nothing to do.
    pub fn settled(&self, rules: &Rules) -> bool {
        let good = |i: &Instance| i.available() && i.model == self.model && !i.failed;
        let quiet = || plan(&self.observe(rules).0).is_empty();
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
        let mut planned = self.clone();
        planned.look_and_plan(rules);
        if planned.queue.is_empty() {
            self.course().first().copied()
        } else {
            Some(Event::Plan)
        }
    }
}
