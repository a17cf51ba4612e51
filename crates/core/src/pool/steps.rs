//! The steps of one plan, in the order in which they are carried out.

use std::collections::BTreeSet;
use std::time::Duration;

use super::disruption::disruptions;
use super::{
    Activity, Adoption, Drain, Health, Instance, Machine, Mode, Model, Object, Observed, Plan, Retry, ScaleSet,
    Scaling, Setup, Step, Strategy, Update, joining, waiting,
};
use crate::drain::Drained;

/// Drains that end within this time of each other share one delete, and machines go together for new ones whose nodes become
/// ready within this time of each other.
pub const TOGETHER: Duration = Duration::from_secs(1);
/// An instance that was updated in place, and whose node does not come back within this time, is replaced.
pub const UPDATE_PATIENCE: Duration = Duration::from_secs(900);

/// Returns the machines with a Machine whose object the plan deletes first: Cluster API does not drain them then.
pub fn leaving_owned(observed: &Observed) -> BTreeSet<String> {
    let removed = plan(observed).steps.into_iter().filter_map(|step| match step {
        Step::Remove(machines) => Some(machines),
        _ => None,
    });
    let by_object = removed.flatten().filter(|machine| !machine.by_owner);
    let is_owned = |name: &String| observed.machines.iter().any(|m| m.name == *name && m.is_owned());
    by_object.map(|machine| machine.name).filter(is_owned).collect()
}

/// Decides the next steps of a pool.
pub fn plan(observed: &Observed) -> Plan {
    if let Some(setup) = observed.setup {
        return steps([match setup {
            Setup::Finalizer => Step::AddFinalizer,
            Setup::SshKey => Step::SetSshKey,
        }]);
    }
    let mut plan = match observed.mode {
        // Machines that the pool had may only have lost their tags.
        Mode::Full | Mode::WithoutCloud | Mode::FinishOnly if observed.name_taken => return Plan::default(),
        Mode::Full => full(observed),
        Mode::WithoutCloud => without_cloud(observed),
        Mode::FinishOnly => finish_only(observed),
        Mode::Teardown => teardown(observed),
        Mode::Orphaned => orphaned(observed),
    };
    plan.requeue = plan.requeue.into_iter().chain(joining::next(observed)).min();
    plan.waiting = waiting::reason(observed, &plan);
    plan
}

fn full(observed: &Observed) -> Plan {
    let Some(set) = &observed.scale_set else {
        let capacity = observed.desired;
        return steps([Step::CreateScaleSet { capacity }]);
    };
    if set.model == Model::Unmarked {
        return steps([Step::AdoptScaleSet(adoptions(observed))]);
    }
    let mut plan = prepare(observed);
    plan.rolling = disruptions(observed, set).rolling;
    if ends_with_drain(&plan) {
        return plan;
    }
    let deleted = delete_drained(observed, &mut plan);
    update_drained(observed, set, &mut plan);
    disrupt(&without(observed, &deleted), &mut plan);
    plan.steps.extend(observed.replicas.map(Step::SetReplicas));
    plan
}

/// Returns what the machines of a scale set get that is taken over. Those of another model than the one that is wanted get no
/// record, or keep theirs: they are replaced once the scale set is the pool's.
fn adoptions(observed: &Observed) -> Vec<Adoption> {
    let stays = |m: &&Machine| m.exists() && m.activity != Activity::Deleting;
    let adoption = |m: &Machine| match m.object {
        Object::Missing => Some(Adoption::CreateObject {
            name: m.name.clone(),
            has_model: m.matches_model,
        }),
        Object::Active | Object::Deleting => {
            (m.matches_model && !m.recorded_earlier).then(|| Adoption::RecordModel(m.name.clone()))
        }
    };
    observed.machines.iter().filter(stays).filter_map(adoption).collect()
}

/// The pool once these instances are being deleted: the cloud lowers the capacity with each of them.
fn without(observed: &Observed, deleted: &[String]) -> Observed {
    let mut after = observed.clone();
    for machine in &mut after.machines {
        if matches!(&machine.instance, Instance::Listed { id } if deleted.contains(id)) {
            machine.activity = Activity::Deleting;
        }
    }
    if let Some(set) = after.scale_set.as_mut() {
        set.capacity = set.capacity.saturating_sub(deleted.len());
    }
    after
}

fn without_cloud(observed: &Observed) -> Plan {
    let mut plan = Plan {
        rolling: true,
        ..Plan::default()
    };
    plan.steps.extend(owners(observed));
    plan.steps.extend(drain(observed));
    plan
}

/// The invalid spec stops only itself: the pool goes on with the model that its scale set has, and no machine goes for another
/// one. A scale set that is not adopted yet stays as it is.
fn finish_only(observed: &Observed) -> Plan {
    let mut plan = match &observed.scale_set {
        Some(set) if set.model != Model::Unmarked => full(&Observed {
            strategy: Strategy::OnDelete,
            ..observed.clone()
        }),
        Some(_) | None => {
            let mut plan = prepare(observed);
            if !ends_with_drain(&plan) {
                delete_drained(observed, &mut plan);
            }
            plan
        }
    };
    plan.rolling = true;
    plan
}

fn teardown(observed: &Observed) -> Plan {
    let release = |m: &&Machine| m.object != Object::Missing && (!m.exists() || observed.scale_set.is_none());
    let released = observed.machines.iter().filter(release);
    let released: Vec<String> = released.map(|m| m.name.clone()).collect();
    let mut plan = steps(some(released).map(Step::ReleaseObjects));
    let Some(set) = &observed.scale_set else {
        if plan.steps.is_empty() {
            plan.steps.push(Step::ReleasePool);
        }
        return plan;
    };
    if set.deleting {
        return plan;
    }
    let existing: Vec<&Machine> = observed.machines.iter().filter(|m| m.exists()).collect();
    if existing.is_empty() {
        // An empty list alone proves nothing.
        let empty = set.capacity == 0 || set.confirmed;
        plan.steps.extend(empty.then_some(Step::DeleteScaleSet));
        return plan;
    }
    let idle = existing.iter().filter(|m| !m.leaving() && m.object != Object::Missing);
    let idle: Vec<_> = idle
        .map(|m| super::Selected {
            name: m.name.clone(),
            unless_available: false,
            by_owner: m.is_drained_by_owner(),
        })
        .collect();
    plan.steps.extend(some(idle).map(Step::Remove));
    plan.steps.extend(owners(observed));
    let drain = drain(observed);
    if drain.is_some() {
        plan.steps.extend(drain);
        return plan;
    }
    delete_drained(observed, &mut plan);
    plan
}

/// The scale set goes with all its instances, then the objects.
fn orphaned(observed: &Observed) -> Plan {
    match &observed.scale_set {
        Some(set) if set.deleting => Plan::default(),
        Some(_) => steps([Step::DeleteScaleSet]),
        None => {
            let objects = observed.machines.iter().filter(|m| m.object != Object::Missing);
            let objects = some(objects.map(|m| m.name.clone()).collect::<Vec<_>>());
            steps(objects.map(Step::ReleaseObjects).into_iter().chain([Step::ReleasePool]))
        }
    }
}

fn ends_with_drain(plan: &Plan) -> bool {
    matches!(plan.steps.last(), Some(Step::Drain(_)))
}

fn steps(steps: impl IntoIterator<Item = Step>) -> Plan {
    Plan {
        steps: steps.into_iter().collect(),
        ..Plan::default()
    }
}

/// An object for every instance and none without, updates that ended, and drains. A drain's outcome decides the rest.
fn prepare(observed: &Observed) -> Plan {
    let mut plan = Plan::default();
    let with = |work: ObjectWork| {
        let machines = observed.machines.iter().filter(|m| object_work(m) == Some(work));
        some(machines.map(|m| m.name.clone()).collect::<Vec<_>>())
    };
    plan.steps.extend(with(ObjectWork::Create).map(Step::CreateObjects));
    plan.steps.extend(with(ObjectWork::Release).map(Step::ReleaseObjects));
    plan.steps.extend(with(ObjectWork::Record).map(Step::RecordModels));
    plan.steps.extend(observed.machines.iter().filter_map(undated_update));
    plan.steps.extend(observed.machines.iter().filter_map(ended_update));
    plan.steps
        .extend(observed.strays.iter().cloned().map(Step::DeleteStray));
    plan.steps.extend(owners(observed));
    plan.steps.extend(drain(observed));
    plan
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ObjectWork {
    Create,
    Release,
    Record,
}

fn object_work(machine: &Machine) -> Option<ObjectWork> {
    match (&machine.instance, machine.object) {
        (Instance::Listed { .. }, Object::Missing) => {
            (machine.activity != Activity::Deleting).then_some(ObjectWork::Create)
        }
        (Instance::Listed { .. }, Object::Active | Object::Deleting) => {
            (machine.unrecorded && machine.idle()).then_some(ObjectWork::Record)
        }
        (Instance::Missing { .. }, Object::Missing) => None,
        (Instance::Missing { .. }, Object::Deleting) => Some(ObjectWork::Release),
        (Instance::Missing { confirmed }, Object::Active) => confirmed.then_some(ObjectWork::Release),
    }
}

/// The list, unless it is empty.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// An update that another client asked for begins when Capstan first observes it.
fn undated_update(machine: &Machine) -> Option<Step> {
    let due = machine.undated && machine.activity == Activity::Updating(Update::Pending);
    due.then(|| Step::StartUpdate {
        machine: super::Selected {
            name: machine.name.clone(),
            unless_available: false,
            by_owner: false,
        },
        reimage: machine.new_image,
    })
}

fn ended_update(machine: &Machine) -> Option<Step> {
    let name = machine.name.clone();
    let Activity::Updating(update) = &machine.activity else {
        return None;
    };
    match update {
        Update::Failed(reason) => Some(Step::AbandonUpdate { name, reason }),
        Update::Applied { ready: true, model, .. } => Some(Step::FinishUpdate {
            name,
            model: model.clone(),
            uncordon: !machine.cordoned,
        }),
        Update::Applied { .. } if machine.failed => Some(Step::AbandonUpdate {
            name,
            reason: "InstanceFailed",
        }),
        // The workload cluster may only be silent.
        Update::Applied { waited, .. } => {
            let given_up = *waited >= UPDATE_PATIENCE && machine.health != Health::Unknown;
            given_up.then_some(Step::AbandonUpdate {
                name,
                reason: "NodeDidNotComeBack",
            })
        }
        Update::Pending | Update::Running | Update::Upgraded => None,
    }
}

/// Whoever deletes the object of a Machine means the Machine. It goes when its node is drained, or at once where Cluster API
/// drains it.
fn owners(observed: &Observed) -> impl Iterator<Item = Step> {
    let meant = |m: &&Machine| m.exists() && m.object == Object::Deleting && m.is_owned();
    let meant = observed.machines.iter().filter(meant);
    let due = |m: &&Machine| m.is_drained_by_owner() || drained(m).is_some();
    meant
        .filter(|m| m.activity == Activity::Draining)
        .filter(due)
        .map(|m| Step::DeleteOwner {
            name: m.name.clone(),
            skip_drain: drained(m).is_some_and(|proof| proof.is_timed_out()),
        })
}

/// One step for all machines that are to be drained and whose drain this reconcile has not run yet.
fn drain(observed: &Observed) -> Option<Step> {
    let due = |m: &&Machine| {
        let updates = matches!(m.activity, Activity::Updating(Update::Pending | Update::Upgraded));
        let leaves = m.activity == Activity::Draining && !m.is_drained_by_owner();
        m.exists() && (updates || leaves) && m.drain == Drain::NotRun
    };
    let names: Vec<String> = observed.machines.iter().filter(due).map(|m| m.name.clone()).collect();
    some(names).map(Step::Drain)
}

/// Deletes the instances of all machines that are drained, in one call. Returns their ids.
fn delete_drained(observed: &Observed, plan: &mut Plan) -> Vec<String> {
    // Who only deletes the Machine leaves the object to Cluster API, which deletes it when it has drained the node. A Machine
    // that nobody has deleted is deleted first: its hooks and its volumes are Cluster API's.
    let condemned = |m: &&Machine| {
        let orphan = observed.mode == Mode::Teardown && m.object == Object::Missing;
        m.activity == Activity::Draining && !m.is_owned() && (m.object == Object::Deleting || orphan)
    };
    let drained: Vec<Drained> = observed.machines.iter().filter(condemned).filter_map(drained).collect();
    if drained.is_empty() {
        return Vec::new();
    }
    let running = |m: &Machine| m.activity == Activity::Draining && matches!(m.drain, Drain::Running { .. });
    if observed.machines.iter().any(running) && observed.drained_for < TOGETHER {
        plan.requeue = Some(TOGETHER.saturating_sub(observed.drained_for));
        return Vec::new();
    }
    let ids = drained.iter().map(|proof| proof.machine().to_owned()).collect();
    plan.steps.push(Step::DeleteInstances(drained));
    ids
}

/// Updates the instances of all machines that are drained for it, in one call, once the scale set has the model and the
/// newest bootstrap data: an instance that is reimaged next gets what its model had then. Where the cloud refuses a newer
/// model, they get the one that the scale set has.
fn update_drained(observed: &Observed, set: &ScaleSet, plan: &mut Plan) {
    match set.model {
        Model::Current | Model::Refused => {}
        Model::Outdated | Model::Unmarked => return,
    }
    let at = |update: Update| drained_for(observed, update);
    plan.steps
        .extend(some(at(Update::Upgraded)).map(Step::ReimageInstances));
    if !set.stale_bootstrap {
        plan.steps.extend(some(at(Update::Pending)).map(Step::UpdateInstances));
    }
}

/// The proofs of the machines that are drained at this stage of their update.
fn drained_for(observed: &Observed, update: Update) -> Vec<Drained> {
    let waiting = |m: &&Machine| m.activity == Activity::Updating(update.clone());
    observed.machines.iter().filter(waiting).filter_map(drained).collect()
}

/// Whether the scale set is to get new bootstrap data by itself: others add instances, or updates wait for it. Newer data is a
/// newer model: an update that is under way would have to begin again.
fn refreshes_bootstrap(observed: &Observed, set: &ScaleSet) -> bool {
    let under_way = |m: &Machine| matches!(m.activity, Activity::Updating(Update::Running | Update::Upgraded));
    let needed = set.scaled_by_others || !drained_for(observed, Update::Pending).is_empty();
    let possible = set.scaling == Scaling::Idle && !observed.machines.iter().any(under_way);
    set.stale_bootstrap && needed && possible
}

/// Returns the proof that the machine's instance may go. The proof of another instance is none.
fn drained(machine: &Machine) -> Option<Drained> {
    match (&machine.instance, &machine.drain) {
        (Instance::Listed { id }, Drain::Done(proof)) => (proof.machine() == id).then(|| proof.clone()),
        (Instance::Listed { .. } | Instance::Missing { .. }, Drain::NotRun | Drain::Running { .. })
        | (Instance::Missing { .. }, Drain::Done(_)) => None,
    }
}

/// Takes machines within the budget, and gives the scale set its model and capacity.
fn disrupt(observed: &Observed, plan: &mut Plan) {
    let Some(set) = &observed.scale_set else { return };
    let disruptions = disruptions(observed, set);
    match until_arrived(observed).filter(|_| disruptions.rolling && !disruptions.remove.is_empty()) {
        Some(wait) => plan.requeue = plan.requeue.into_iter().chain([wait]).min(),
        None => plan.steps.extend(some(disruptions.remove).map(Step::Remove)),
    }
    let updates = disruptions.update.into_iter().map(|machine| {
        let new_image = |m: &Machine| m.name == machine.name && m.new_image;
        Step::StartUpdate {
            reimage: observed.machines.iter().any(new_image),
            machine,
        }
    });
    plan.steps.extend(updates);
    let capacity = disruptions.capacity.or_else(|| spare(observed, set));
    // A Flexible set keeps its capacity when a machine is deleted, and makes another one only when asked again.
    let asks = matches!(set.retry, Retry::NotNeeded | Retry::Due);
    let refills = set.flexible && set.scaling == Scaling::Idle && asks;
    let capacity = capacity.filter(|capacity| refills || *capacity != set.capacity);
    let again = set.retry == Retry::Due && set.scaling == Scaling::Idle;
    let model = set.model == Model::Outdated;
    if model || again || capacity.is_some() {
        let capacity = capacity.unwrap_or(set.capacity);
        plan.steps.push(Step::ApplyScaleSet {
            model,
            capacity,
            grows: capacity > set.capacity || again || refills && capacity == set.capacity,
            // In a rollout nobody waits for the instance but for its node, which shows when there is something to list.
            list: capacity > set.capacity && (set.flexible || !disruptions.rolling),
        });
    } else if set.stale_tags {
        plan.steps.push(Step::ApplyTags);
    } else if refreshes_bootstrap(observed, set) {
        plan.steps.push(Step::RefreshBootstrap);
    }
}

/// How long to wait for new nodes that are ready and take no pods yet. They come together and lose their first taints one by
/// one: a machine that went for each of them would cost a delete and a change of the capacity each.
fn until_arrived(observed: &Observed) -> Option<Duration> {
    let left = TOGETHER.checked_sub(observed.arriving?)?;
    (!left.is_zero()).then_some(left)
}

/// The capacity of a Flexible set once its machines are gone and nothing else is under way.
fn spare(observed: &Observed, set: &ScaleSet) -> Option<usize> {
    let count = observed.machines.iter().filter(|m| m.exists()).count();
    let leaving = observed.machines.iter().any(Machine::leaving);
    (set.flexible && set.quiet && count < set.capacity && !leaving).then_some(count)
}
