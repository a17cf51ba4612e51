//! A pool, its cloud and its cluster in miniature, driven by the planner that ships.
//!
//! The controller observes, plans, and then carries out its effects one by one while the world moves on: every effect
//! acts on a world that may have changed since the plan was made. Between any two effects the process may die.
//!
//! Worlds that differ in nothing that matters are the same world: of a machine that leaves only what the planner counts
//! is kept, and machines that leave have no order among each other. Those that stay keep theirs, which is their age.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use capstan_core::drain::{self, Assessment, NodeState, Request};
use capstan_core::pool::{
    Activity, Amount, Budget, DeletePolicy, Drain, Health, Instance as Listing, Machine, Mode, Model, Object, Observed,
    ScaleSet, Scaling, Selected, Step, Strategy, Update, plan,
};

/// The largest pool that anybody scales to.
const LARGEST: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    Idle,
    /// Drained for its deletion.
    Draining,
    Drained,
    /// Drained for an update in place.
    UpdateDraining,
    UpdateDrained,
    Updating,
    /// The instance has the model; its node is not yet seen to be back.
    Updated,
    UpdateFailed,
    Deleting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    pub outdated: bool,
    pub health: Health,
    pub failed: bool,
    /// An update in place failed.
    pub irreparable: bool,
    /// The cloud's list shows it.
    pub listed: bool,
    pub stage: Stage,
}

impl Instance {
    pub fn new(outdated: bool, health: Health) -> Self {
        Self {
            outdated,
            health,
            failed: false,
            irreparable: false,
            listed: true,
            stage: Stage::Idle,
        }
    }

    fn available(&self) -> bool {
        self.stage == Stage::Idle && self.health == Health::Ready
    }

    fn leaves(&self) -> bool {
        matches!(self.stage, Stage::Draining | Stage::Drained | Stage::Deleting)
    }

    fn unready(&self) -> bool {
        matches!(self.health, Health::NotReady | Health::Unschedulable)
    }

    /// Without what nobody asks about any more. Of one that leaves only this is asked: does it count as unready?
    fn normal(mut self) -> Self {
        if self.leaves() {
            self.health = if self.unready() {
                Health::NotReady
            } else {
                Health::Ready
            };
            (self.failed, self.outdated, self.irreparable) = (false, false, false);
        } else if self.stage == Stage::Updating {
            // The end of the update decides.
            self.outdated = false;
        }
        self
    }
}

/// What the controller set out to do. Instances are named by their place, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Effect {
    Delete(u8),
    UpdateInstance(u8),
    FinishUpdate(u8),
    AbandonUpdate(u8),
    /// Take a machine; one that was chosen because it was not available is left alone if it has become available
    /// meanwhile, because the floor was not asked.
    Remove(u8, bool),
    StartUpdate(u8, bool),
    /// Removes the object of a machine whose instance is gone.
    Release(u8),
    ScaleSet {
        model: bool,
        capacity: u8,
    },
}

impl Effect {
    /// The same effect on a machine that has another place now; nothing if it has none.
    fn aimed(self, place: impl Fn(u8) -> Option<u8>) -> Option<Self> {
        Some(match self {
            Effect::Delete(n) => Effect::Delete(place(n)?),
            Effect::UpdateInstance(n) => Effect::UpdateInstance(place(n)?),
            Effect::FinishUpdate(n) => Effect::FinishUpdate(place(n)?),
            Effect::AbandonUpdate(n) => Effect::AbandonUpdate(place(n)?),
            Effect::Remove(n, unless) => Effect::Remove(place(n)?, unless),
            Effect::StartUpdate(n, unless) => Effect::StartUpdate(place(n)?, unless),
            Effect::Release(n) => Effect::Release(place(n)?),
            Effect::ScaleSet { .. } => self,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The controller observes and plans.
    Plan,
    /// It carries out the next effect.
    Apply,
    // The world takes its course.
    Born,
    Listed,
    Ready(u8),
    DrainDone(u8),
    UpdateDone(u8),
    Gone(u8),
    CapacityReturns,
    ModelAccepted,
    // The world gets in the way.
    Die,
    Fail(u8),
    Vanish(u8),
    OutsideDrain(u8),
    NotReady(u8),
    Cordon(u8),
    UpdateFails(u8),
    Exhausted,
    /// The cloud refuses the model that is to be applied next.
    Refuse,
    /// The next list lacks every instance that nobody deletes.
    EmptyList,
    /// Somebody else sets the capacity: a lower one takes back what does not exist yet, or the newest instance.
    OutsideCapacity(u8),
    /// The user makes the spec invalid.
    Invalid,
    /// And valid again.
    Valid,
    NewModel,
    Scale(u8),
}

impl Event {
    pub fn disturbs(self) -> bool {
        match self {
            Event::Plan
            | Event::Apply
            | Event::Born
            | Event::Listed
            | Event::Ready(_)
            | Event::DrainDone(_)
            | Event::UpdateDone(_)
            | Event::Gone(_)
            | Event::CapacityReturns
            | Event::ModelAccepted
            | Event::Valid => false,
            Event::Die
            | Event::Fail(_)
            | Event::Vanish(_)
            | Event::OutsideDrain(_)
            | Event::NotReady(_)
            | Event::Cordon(_)
            | Event::UpdateFails(_)
            | Event::Exhausted
            | Event::Refuse
            | Event::EmptyList
            | Event::OutsideCapacity(_)
            | Event::Invalid
            | Event::NewModel
            | Event::Scale(_) => true,
        }
    }
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Harm {
    Floor,
    Ceiling,
    UndrainedDelete,
    UndrainedUpdate,
    CloudChoseTheVictim,
    /// The object of an instance that exists was removed.
    LostObject,
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
    /// Whether the scale set has the newest model.
    pub model: Model,
    /// The cloud will refuse it.
    pub refuses: bool,
    /// The spec is invalid: the pool goes on with the model that the scale set has.
    pub invalid: bool,
    /// The next list lacks every instance that nobody deletes.
    pub empty_list: bool,
    /// The capacity that the controller last read, when somebody else has changed it since.
    pub known_capacity: Option<u8>,
    pub queue: Vec<Effect>,
    /// Available machines lost by outside doing since the controller observed.
    pub lost: u8,
    pub harm: Option<Harm>,
    pub disturbances: u8,
}

/// All that a plan depends on.
type Sight = (u8, u8, bool, bool, Vec<Instance>, Model, bool, Option<u8>);

/// What does not change while the world runs.
pub struct Rules {
    pub surge: Amount,
    pub unavailable: Amount,
    pub strategy: Strategy,
    pub policy: DeletePolicy,
    /// The planner's earlier answers: it is a function.
    plans: Mutex<HashMap<Sight, Vec<Effect>>>,
}

impl Rules {
    pub fn new(surge: Amount, unavailable: Amount, strategy: Strategy, policy: DeletePolicy) -> Self {
        Self {
            surge,
            unavailable,
            strategy,
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
        Self {
            desired: size,
            models: 1,
            instances: vec![Instance::new(true, Health::Ready); size.into()],
            unborn: 0,
            exhausted: false,
            model: Model::Outdated,
            refuses: false,
            invalid: false,
            empty_list: false,
            known_capacity: None,
            queue: Vec::new(),
            lost: 0,
            harm: None,
            disturbances,
        }
    }

    fn available(&self) -> usize {
        self.instances.iter().filter(|i| i.available()).count()
    }

    fn live(&self) -> u8 {
        self.instances.iter().filter(|i| i.stage != Stage::Deleting).count() as u8
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
        if self.model == Model::Refused {
            events.push(Event::ModelAccepted);
        }
        if self.instances.iter().any(|i| !i.listed) {
            events.push(Event::Listed);
        }
        for (n, instance) in (0u8..).zip(&self.instances) {
            match instance.stage {
                Stage::Draining | Stage::UpdateDraining => events.push(Event::DrainDone(n)),
                Stage::Updating => events.push(Event::UpdateDone(n)),
                Stage::Deleting => events.push(Event::Gone(n)),
                Stage::Idle | Stage::Updated if instance.health != Health::Ready && !instance.failed => {
                    events.push(Event::Ready(n))
                }
                Stage::Idle | Stage::Updated | Stage::Drained | Stage::UpdateDrained | Stage::UpdateFailed => {}
            }
        }
        // Last: what is under way ends before.
        events.extend(self.invalid.then_some(Event::Valid));
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
            events.extend((!self.empty_list && !self.instances.is_empty()).then_some(Event::EmptyList));
        }
        if self.models > 0 {
            events.push(Event::NewModel);
        }
        if self.unborn > 0 && !self.exhausted {
            events.push(Event::Exhausted);
        }
        if self.model == Model::Outdated && !self.refuses {
            events.push(Event::Refuse);
        }
        let capacity = self.live() + self.unborn;
        if self.known_capacity.is_none() {
            let more = Some(capacity + 1).filter(|_| capacity <= LARGEST);
            let others = [more, capacity.checked_sub(1)];
            events.extend(others.into_iter().flatten().map(Event::OutsideCapacity));
        }
        events.extend((!self.invalid).then_some(Event::Invalid));
        for (n, instance) in (0u8..).zip(&self.instances) {
            if instance.stage == Stage::Deleting {
                continue;
            }
            events.push(Event::Vanish(n));
            // Of one that leaves it matters only if it counted as unready.
            if !instance.failed && (!instance.leaves() || instance.unready()) {
                events.push(Event::Fail(n));
            }
            if instance.stage == Stage::Idle {
                events.push(Event::OutsideDrain(n));
            }
            if instance.available() {
                events.push(Event::NotReady(n));
                events.push(Event::Cordon(n));
            }
            if instance.stage == Stage::Updating {
                events.push(Event::UpdateFails(n));
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
            Event::Plan => {
                self.queue = self.planned(rules);
                self.empty_list = false;
                // With nothing to write, the controller reads the scale set again when the instances do not fit to it.
                if self.queue.is_empty() {
                    self.known_capacity = None;
                }
            }
            Event::Apply => self.apply(rules),
            Event::Born => {
                self.unborn -= 1;
                let new = Instance {
                    listed: false,
                    ..Instance::new(self.model != Model::Current, Health::Creating)
                };
                self.instances.push(new);
            }
            Event::Listed => self.instances.iter_mut().for_each(|instance| instance.listed = true),
            Event::Ready(n) => self.at(n).health = Health::Ready,
            Event::DrainDone(n) => {
                self.at(n).stage = match self.at(n).stage {
                    Stage::UpdateDraining => Stage::UpdateDrained,
                    _ => Stage::Drained,
                }
            }
            Event::UpdateDone(n) => {
                // It has the model of the scale set, which may not be the newest.
                let outdated = self.model != Model::Current;
                let instance = self.at(n);
                (instance.stage, instance.outdated, instance.health) = (Stage::Updated, outdated, Health::NotReady);
                self.retarget();
            }
            Event::UpdateFails(n) => self.at(n).stage = Stage::UpdateFailed,
            Event::Gone(n) => self.remove(n),
            Event::Vanish(n) => {
                // The cloud lowers the capacity with it, and the scale set has another ETag.
                self.known_capacity.get_or_insert(self.live() + self.unborn);
                self.remove(n);
            }
            Event::CapacityReturns => self.exhausted = false,
            Event::ModelAccepted => {
                self.model = Model::Outdated;
                self.retarget();
            }
            Event::Die => self.queue.clear(),
            Event::Fail(n) => (self.at(n).failed, self.at(n).health) = (true, Health::NotReady),
            Event::OutsideDrain(n) => self.at(n).stage = Stage::Draining,
            Event::NotReady(n) => self.at(n).health = Health::NotReady,
            Event::Cordon(n) => self.at(n).health = Health::Unschedulable,
            Event::Exhausted => self.exhausted = true,
            Event::Refuse => self.refuses = true,
            Event::EmptyList => self.empty_list = true,
            Event::OutsideCapacity(capacity) => {
                self.known_capacity = Some(self.live() + self.unborn);
                match capacity.checked_sub(self.live()) {
                    Some(unborn) => self.unborn = unborn,
                    None => self.remove_newest(),
                }
            }
            Event::Invalid => self.invalid = true,
            Event::Valid => {
                self.invalid = false;
                self.retarget();
            }
            Event::NewModel => {
                self.models -= 1;
                self.model = Model::Outdated;
                self.instances.iter_mut().for_each(|instance| instance.outdated = true);
                self.retarget();
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
                .then_some((instance.stage, instance.health, instance.listed, meant(*n)))
        });
        let place = |old: u8| order.iter().position(|n| *n == usize::from(old)).map(|n| n as u8);
        let mut queue: Vec<Effect> = self.queue.iter().filter_map(|effect| effect.aimed(place)).collect();
        let is_delete = |effect: &Effect| matches!(effect, Effect::Delete(_));
        if let Some(first) = queue.iter().position(is_delete) {
            let count = queue[first..].iter().take_while(|effect| is_delete(effect)).count();
            queue[first..first + count].sort();
        }
        self.instances = order.iter().map(|n| self.instances[*n]).collect();
        self.queue = queue;
    }

    fn at(&mut self, n: u8) -> &mut Instance {
        &mut self.instances[usize::from(n)]
    }

    /// An update that ended with a model that the scale set is about to lose begins again.
    fn retarget(&mut self) {
        let again = |i: &&mut Instance| i.stage == Stage::Updated;
        if self.model == Model::Outdated && !self.invalid {
            let updated = self.instances.iter_mut().filter(again);
            updated.for_each(|instance| instance.stage = Stage::UpdateDraining);
        }
    }

    fn remove_newest(&mut self) {
        let stays = |i: &Instance| i.stage != Stage::Deleting;
        if let Some(newest) = self.instances.iter().rposition(stays) {
            self.remove(newest as u8);
        }
    }

    /// Whether an update in place has begun and not ended.
    pub fn updates(&self) -> bool {
        let updates = |i: &Instance| {
            matches!(
                i.stage,
                Stage::UpdateDraining | Stage::UpdateDrained | Stage::Updating | Stage::Updated | Stage::UpdateFailed
            )
        };
        self.instances.iter().any(updates)
    }

    /// Takes an instance out; effects that were meant for it find nothing, the others keep their aim.
    fn remove(&mut self, gone: u8) {
        self.instances.remove(gone.into());
        let aim = |n: u8| (n != gone).then_some(if n > gone { n - 1 } else { n });
        self.queue = self.queue.iter().filter_map(|effect| effect.aimed(aim)).collect();
    }

    /// What the controller observes.
    pub fn observe(&self, rules: &Rules) -> Observed {
        let listed = |i: &Instance| i.listed && !self.empty_list;
        let capacity = self.known_capacity.unwrap_or(self.live() + self.unborn);
        let machines = self.instances.iter().enumerate();
        let (mode, model) = match self.invalid {
            true => (Mode::FinishOnly, Model::Current),
            false => (Mode::Full, self.model),
        };
        Observed {
            mode,
            desired: self.desired.into(),
            budget: rules.budget(self.desired),
            policy: rules.policy,
            strategy: rules.strategy,
            seed: 1,
            scale_set: Some(ScaleSet {
                capacity: capacity.into(),
                model,
                scaling: if self.unborn > 0 && !self.exhausted {
                    Scaling::Running
                } else {
                    Scaling::Idle
                },
                confirmed: self.instances.iter().all(listed),
                ..ScaleSet::default()
            }),
            // An instance that was never listed has no object yet.
            machines: machines
                .filter(|(_, i)| i.listed)
                .map(|(n, i)| self.seen(n, i))
                .collect(),
            // The controller waits for no others: the cloud's delete takes any number.
            drained_for: Duration::MAX,
            ..Observed::default()
        }
    }

    fn seen(&self, n: usize, instance: &Instance) -> Machine {
        let (name, why) = (format!("m{n}"), "a pod".to_owned());
        let (activity, drain) = match instance.stage {
            Stage::Idle => (Activity::Idle, Drain::NotRun),
            Stage::Draining => (Activity::Draining, Drain::Running { why }),
            Stage::Drained => (Activity::Draining, drained(&name)),
            Stage::UpdateDraining => (Activity::Updating(Update::Pending), Drain::Running { why }),
            Stage::UpdateDrained => (Activity::Updating(Update::Pending), drained(&name)),
            Stage::Updating => (Activity::Updating(Update::Running), Drain::NotRun),
            Stage::Updated => {
                let applied = Update::Applied {
                    model: String::new(),
                    ready: instance.health == Health::Ready,
                    waited: Duration::ZERO,
                };
                (Activity::Updating(applied), Drain::NotRun)
            }
            Stage::UpdateFailed => (Activity::Updating(Update::Failed("UpdateFailed")), Drain::NotRun),
            Stage::Deleting => (Activity::Deleting, Drain::NotRun),
        };
        Machine {
            instance: match self.empty_list && instance.stage != Stage::Deleting {
                true => Listing::Missing { confirmed: false },
                false => Listing::Listed { id: name.clone() },
            },
            object: if instance.leaves() {
                Object::Deleting
            } else {
                Object::Active
            },
            created: n as i64,
            health: instance.health,
            failed: instance.failed,
            outdated: instance.outdated,
            irreparable: instance.irreparable,
            activity,
            drain,
            ..Machine::ready(&name)
        }
    }

    /// What the controller would set out to do now.
    fn planned(&self, rules: &Rules) -> Vec<Effect> {
        let sight = (
            self.desired,
            self.unborn,
            self.exhausted,
            self.invalid,
            self.instances.clone(),
            self.model,
            self.empty_list,
            self.known_capacity,
        );
        if let Some(known) = rules.plans.lock().unwrap().get(&sight) {
            return known.clone();
        }
        let plan = plan(&self.observe(rules));
        let queue: Vec<Effect> = plan.steps.iter().flat_map(effects).collect();
        rules.plans.lock().unwrap().insert(sight, queue.clone());
        queue
    }

    fn apply(&mut self, rules: &Rules) {
        let effect = self.queue.remove(0);
        let before = self.available();
        match effect {
            Effect::Delete(n) if self.at(n).stage == Stage::Drained => self.at(n).stage = Stage::Deleting,
            Effect::Delete(_) => self.harm = Some(Harm::UndrainedDelete),
            Effect::UpdateInstance(n) if self.at(n).stage == Stage::UpdateDrained => self.at(n).stage = Stage::Updating,
            Effect::UpdateInstance(_) => self.harm = Some(Harm::UndrainedUpdate),
            Effect::FinishUpdate(n) if self.at(n).stage == Stage::Updated => self.at(n).stage = Stage::Idle,
            Effect::AbandonUpdate(n) if matches!(self.at(n).stage, Stage::UpdateFailed | Stage::Updated) => {
                (self.at(n).stage, self.at(n).irreparable) = (Stage::Idle, true);
            }
            Effect::Release(n) if self.at(n).leaves() => {}
            Effect::Release(_) => self.harm = Some(Harm::LostObject),
            Effect::ScaleSet { model, capacity } => self.apply_scale_set(rules, model, capacity),
            Effect::Remove(n, unless) | Effect::StartUpdate(n, unless) if unless && self.at(n).available() => {}
            Effect::Remove(n, _) if self.at(n).stage == Stage::Idle => self.at(n).stage = Stage::Draining,
            Effect::StartUpdate(n, _) if self.at(n).stage == Stage::Idle => self.at(n).stage = Stage::UpdateDraining,
            Effect::FinishUpdate(_) | Effect::AbandonUpdate(_) | Effect::Remove(..) | Effect::StartUpdate(..) => {}
        }
        let took = self.available() < before;
        if took && self.available() + usize::from(self.lost) < rules.budget(self.desired).floor(self.desired.into()) {
            self.harm = Some(Harm::Floor);
        }
    }

    fn apply_scale_set(&mut self, rules: &Rules, model: bool, capacity: u8) {
        // The cloud refuses a write that was planned on an older read; the controller reads again.
        if self.known_capacity.take().is_some() {
            return;
        }
        if model && self.refuses {
            (self.refuses, self.model) = (false, Model::Refused);
            return;
        }
        if model && self.model == Model::Outdated {
            self.model = Model::Current;
        }
        let live = self.live();
        if capacity < live {
            self.harm = Some(Harm::CloudChoseTheVictim);
        }
        let unborn = capacity.saturating_sub(live);
        // Those that the cloud is deleting do not count.
        let total = usize::from(live + unborn);
        if unborn > self.unborn && total > rules.budget(self.desired).ceiling(self.desired.into()) {
            self.harm = Some(Harm::Ceiling);
        }
        self.unborn = unborn;
    }

    /// The pool is in its desired state, and the controller has nothing to do.
    pub fn settled(&self, rules: &Rules) -> bool {
        let good = |i: &Instance| i.available() && !i.outdated && !i.failed && !i.irreparable;
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
        // A controller that reads again sees what others did.
        if self.empty_list || self.known_capacity.is_some() || !self.planned(rules).is_empty() {
            return Some(Event::Plan);
        }
        self.course().first().copied()
    }
}

/// A drain that is over.
fn drained(id: &str) -> Drain {
    match drain::assess(&Request::new(id, NodeState::Missing), jiff::Timestamp::UNIX_EPOCH) {
        Assessment::Drained(proof) => Drain::Done(proof),
        other => panic!("{other:?}"),
    }
}

fn effects(step: &Step) -> Vec<Effect> {
    let place = |name: &str| name[1..].parse::<u8>().unwrap_or(u8::MAX);
    let chosen = |one: &Selected| (place(&one.name), one.unless_available);
    match step {
        Step::DeleteInstances(all) => all.iter().map(|one| Effect::Delete(place(one.machine()))).collect(),
        Step::UpdateInstances(all) => all
            .iter()
            .map(|one| Effect::UpdateInstance(place(one.machine())))
            .collect(),
        Step::FinishUpdate { name, .. } => vec![Effect::FinishUpdate(place(name))],
        Step::AbandonUpdate { name, .. } => vec![Effect::AbandonUpdate(place(name))],
        Step::ReleaseObjects(names) => names.iter().map(|name| Effect::Release(place(name))).collect(),
        Step::Remove(all) => all
            .iter()
            .map(chosen)
            .map(|(n, unless)| Effect::Remove(n, unless))
            .collect(),
        Step::StartUpdate { machine, .. } => {
            let (n, unless) = chosen(machine);
            vec![Effect::StartUpdate(n, unless)]
        }
        Step::ApplyScaleSet { model, capacity, .. } => vec![Effect::ScaleSet {
            model: *model,
            capacity: *capacity as u8,
        }],
        other => panic!("the model has no {other:?}"),
    }
}
