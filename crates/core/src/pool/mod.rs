//! The next steps of an Azure machine pool: [`plan`] is the whole decision.
//!
//! Invariants:
//! * *Floor*: the plan takes no available machine while that would leave fewer than desired − maxUnavailable. A machine
//!   that is draining (whoever drains it), updating, not ready or closed to pods is not available.
//! * *Ceiling*: the plan asks for no capacity that would make more than desired + maxSurge instances exist. Those that the
//!   cloud is deleting do not count, as in Deployments and MachineDeployments; those that are drained do.
//! * An instance is deleted or updated only with a [`Drained`] of its own.
//! * A scale set of somebody else is not part of the pool: the plan neither changes nor deletes it.
//! * The cloud never chooses a victim: the plan lowers the capacity only to the number of instances that exist, after a
//!   second list has confirmed that number.
//!
//! Within them it never waits while a step is possible. Selection is stable: the same pool gives the same plan, ties are
//! broken by name, so planning again after a crash or on a late read picks the same machines.

mod budget;
mod confirm;
mod describe;
mod disruption;
mod forecast;
mod joining;
mod ownership;
mod select;
mod shortage;
mod steps;
mod waiting;

pub use budget::{Amount, Budget, BudgetError};
pub use confirm::{refused_update, still_due};
pub use forecast::forecast;
pub use joining::{JOIN_PATIENCE, STARTUP_TIMEOUT, not_joined};
pub use ownership::{CLUSTER_TAG_PREFIX, Claim, POOL_TAG};
pub use select::DeletePolicy;
pub use shortage::{Cause, NO_ROOM_RETRY, Refusal, TRIES, cause, refused, wait};
pub use steps::{TOGETHER, UPDATE_PATIENCE, leaving_owned, plan};

use std::time::Duration;

use crate::drain::Drained;

/// How much of the plan can be carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    #[default]
    Full,
    /// The cloud does not answer or asks for patience: drains go on, nothing else.
    WithoutCloud,
    /// The spec is invalid or waits for others: the pool goes on with the model that the scale set has.
    FinishOnly,
    /// The pool is deleted: machines first, then the scale set, then the object.
    Teardown,
    /// The pool is deleted and its cluster is gone: no node is left to drain, but the scale set would run on.
    Orphaned,
}

/// How machines reach a new model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// A new instance takes the old one's place.
    #[default]
    Replace,
    /// The instance is updated where it is.
    InPlace,
    /// A machine gets the new model when somebody deletes it, or when it fails.
    OnDelete,
}

/// Whether a machine's node can run pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Health {
    /// It has never been ready.
    Creating,
    NotReady,
    /// The node is ready, but cordoned or tainted so that ordinary pods stay away.
    Unschedulable,
    /// The workload cluster does not answer: the node may be ready.
    Unknown,
    Ready,
}

/// How far an update in place is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Update {
    /// The node is drained first.
    Pending,
    /// The cloud works on it.
    Running,
    /// The instance has the model, and is reimaged next.
    Upgraded,
    /// The instance has this model. Its node is ready again, or has been waited for so long.
    Applied {
        model: String,
        ready: bool,
        waited: Duration,
    },
    /// The cloud refused or failed; the text says which.
    Failed(&'static str),
}

/// What is under way with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    Idle,
    Updating(Update),
    /// Marked as deleted, by us or by anybody else; the instance is still there.
    Draining,
    /// The cloud has been asked to delete the instance.
    Deleting,
}

/// How the drain of a machine stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drain {
    /// Not checked in this reconcile.
    #[default]
    NotRun,
    Running {
        why: String,
    },
    /// Without this proof no instance is deleted or updated.
    Done(Drained),
}

/// The object that stands for an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Object {
    Missing,
    #[default]
    Active,
    Deleting,
}

/// The Cluster API Machine that owns the object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Owner {
    #[default]
    None,
    Active,
    /// Hooks, drain rules or the user's wish are in the way of a drain, and only Cluster API follows them.
    Guarded,
    Deleting,
}

/// One instance of the pool, or an object whose instance is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub name: String,
    pub instance: Instance,
    pub object: Object,
    pub owner: Owner,
    /// Seconds since the epoch; only the order matters.
    pub created: i64,
    pub health: Health,
    /// The cloud gave up on it.
    pub failed: bool,
    /// It does not run the newest model.
    pub outdated: bool,
    /// Its model is known, and its object lacks it, or a label that objects of earlier versions lack.
    pub unrecorded: bool,
    /// Its instance has the image and the size of the model that is wanted.
    pub matches_model: bool,
    /// Its object has the record of an earlier model than the scale set's: it was to be replaced.
    pub recorded_earlier: bool,
    /// Somebody asked for it to be the next to go (`cluster.x-k8s.io/delete-machine`).
    pub marked: bool,
    /// How long its instance has run without a node. `None`: it has or had a node, or the cluster does not answer.
    pub joining: Option<Duration>,
    /// An update in place was refused or did not come back: only a replacement helps.
    pub irreparable: bool,
    /// Its bootstrap data has changed: an update in place does not bring it, only a new OS disk does.
    pub needs_new_disk: bool,
    /// Its image changes. The update gives it a disk of the new image and its old bootstrap data, whose token has expired: only
    /// a reimage after it brings the newest.
    pub new_image: bool,
    /// Somebody else had cordoned its node before the update in place: it stays cordoned.
    pub cordoned: bool,
    /// Somebody else asked for its update in place, and did not write when: the timeout of its drain has no beginning.
    pub undated: bool,
    /// Its zone, where the pool keeps its zones even.
    pub zone: Option<String>,
    pub activity: Activity,
    pub drain: Drain,
}

/// Whether the cloud has an instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Instance {
    Listed {
        id: String,
    },
    /// The list lacks it. One list alone may be late or empty.
    Missing {
        confirmed: bool,
    },
}

impl Machine {
    /// An idle machine of the newest model, with its object.
    pub fn ready(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            instance: Instance::Listed { id: name.to_owned() },
            object: Object::Active,
            owner: Owner::None,
            created: 0,
            health: Health::Ready,
            failed: false,
            outdated: false,
            unrecorded: false,
            matches_model: true,
            recorded_earlier: false,
            marked: false,
            joining: None,
            irreparable: false,
            needs_new_disk: false,
            new_image: false,
            cordoned: false,
            undated: false,
            zone: None,
            activity: Activity::Idle,
            drain: Drain::NotRun,
        }
    }

    fn exists(&self) -> bool {
        matches!(self.instance, Instance::Listed { .. })
    }

    fn idle(&self) -> bool {
        self.activity == Activity::Idle
    }

    /// Whether a Machine owns it that nobody has deleted.
    fn is_owned(&self) -> bool {
        matches!(self.owner, Owner::Active | Owner::Guarded)
    }

    /// Whether its Machine is deleted first, so that Cluster API drains the node. Elsewhere the node is drained before its
    /// Machine is deleted: Cluster API, which checks a drain every 20 s, finds it done. It has other rules for nodes that do
    /// not answer.
    fn is_drained_by_owner(&self) -> bool {
        match self.owner {
            Owner::None | Owner::Deleting => false,
            Owner::Guarded => true,
            Owner::Active => !matches!(self.health, Health::Ready | Health::Unschedulable),
        }
    }

    /// Whether it counts towards the floor.
    pub fn available(&self) -> bool {
        self.exists() && self.idle() && self.health == Health::Ready
    }

    /// Gone from the pool as far as planning goes.
    fn leaving(&self) -> bool {
        matches!(self.activity, Activity::Draining | Activity::Deleting)
    }

    /// Whether taking it may cost an available machine. One that is unknown may be available.
    fn counts_as_available(&self) -> bool {
        matches!(self.health, Health::Ready | Health::Unknown)
    }

    /// Whether it ran once and runs no new pods now.
    fn is_unready(&self) -> bool {
        matches!(self.health, Health::NotReady | Health::Unschedulable)
    }
}

/// Whether the scale set may still add instances by an operation under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scaling {
    #[default]
    Idle,
    Running,
}

/// Whether the scale set has the model that is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Model {
    #[default]
    Current,
    /// The next write brings it.
    Outdated,
    /// The cloud refused it a while ago: the pool goes on with the model that it has.
    Refused,
    /// Somebody else made the scale set, or an older version of this program, and it is what is wanted.
    Unmarked,
}

/// Whether instances may be asked for after a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Retry {
    #[default]
    NotNeeded,
    /// Not yet so many, nor more: the cloud had no room for them a moment ago. After [`TRIES`] tries a pool asks for no
    /// more than it has.
    Waiting { refused: usize, tries: u32 },
    /// No more than there are: new instances have failed a moment ago, and fewer of them would fail, too.
    Paused,
    /// Now; the scale operation that failed is asked for again.
    Due,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScaleSet {
    /// The capacity that it was last asked for. The delete of an instance lowers it by itself.
    pub capacity: usize,
    pub model: Model,
    pub scaling: Scaling,
    pub retry: Retry,
    /// A Flexible set makes nothing of a capacity that it already has, and keeps it when its machines go.
    pub flexible: bool,
    /// No operation of any kind is under way.
    pub quiet: bool,
    /// Two lists agree on the instances.
    pub confirmed: bool,
    /// New and reimaged instances would start with old bootstrap data.
    pub stale_bootstrap: bool,
    /// Somebody else may ask for instances at any time.
    pub scaled_by_others: bool,
    /// Pool or cluster have other tags by now.
    pub stale_tags: bool,
    /// Its deletion is under way.
    pub deleting: bool,
}

/// What the pool's object lacks. It comes before anything is created in the cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Setup {
    Finalizer,
    /// A Linux pool without a key of its own gets one that stays the same.
    SshKey,
}

/// Everything that the plan depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    pub mode: Mode,
    pub setup: Option<Setup>,
    pub desired: usize,
    pub budget: Budget,
    pub policy: DeletePolicy,
    pub strategy: Strategy,
    /// A machine whose node does not join within this time is replaced. `None`: never.
    pub startup_timeout: Option<Duration>,
    /// How many machines were replaced because their nodes did not join, since a node last did.
    pub unjoined: usize,
    /// Makes `Random` the same for every plan of the same pool.
    pub seed: u64,
    /// `None`: it does not exist.
    pub scale_set: Option<ScaleSet>,
    /// A scale set of its name exists and is somebody else's: none is created, and a deleted pool leaves it alone.
    pub name_taken: bool,
    pub machines: Vec<Machine>,
    /// Cluster API Machines whose infrastructure object is gone.
    pub strays: Vec<String>,
    /// How long the first of the machines that are drained now has waited for others.
    pub drained_for: Duration,
    /// How long the last of the new nodes that take no pods yet has been ready. `None`: there are none.
    pub arriving: Option<Duration>,
    /// The replica count that the MachinePool should have and has not.
    pub replicas: Option<usize>,
}

/// A machine to be marked as deleted or to be updated.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selected {
    pub name: String,
    /// The machine was chosen because it was not available: should it be by now, it stays.
    pub unless_available: bool,
    /// The Machine that owns it is deleted, and not its object: Cluster API drains it.
    pub by_owner: bool,
}

/// What a machine gets when its scale set is taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adoption {
    /// An object, with the record of the model that is wanted where the instance has that one.
    CreateObject { name: String, has_model: bool },
    /// The record of the model that is wanted.
    RecordModel(String),
}

/// One effect, with its subject. Machines are named by their objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    AddFinalizer,
    SetSshKey,
    CreateScaleSet {
        capacity: usize,
    },
    /// Takes the scale set over as it is. First every machine gets its object and the record of its model: Azure's
    /// `latestModelApplied` does not help, because every new bootstrap token is a newer model.
    AdoptScaleSet(Vec<Adoption>),
    CreateObjects(Vec<String>),
    /// Removes our finalizer from objects whose instances are gone, and deletes them.
    ReleaseObjects(Vec<String>),
    /// Records on the objects which model their instances have.
    RecordModels(Vec<String>),
    DeleteStray(String),
    /// Deletes the Cluster API Machine.
    DeleteOwner {
        name: String,
        /// The timeout of the drain has passed: Cluster API does not begin another one.
        skip_drain: bool,
    },
    /// Cordons the nodes and evicts their pods. Its outcome decides the rest: it is the last step of its plan.
    Drain(Vec<String>),
    DeleteInstances(Vec<Drained>),
    UpdateInstances(Vec<Drained>),
    /// Provisions instances again that have the model.
    ReimageInstances(Vec<Drained>),
    /// The update in place is over: record the model, and uncordon the node unless somebody else had cordoned it.
    FinishUpdate {
        name: String,
        model: String,
        uncordon: bool,
    },
    /// The update in place is given up: the machine is replaced instead.
    AbandonUpdate {
        name: String,
        reason: &'static str,
    },
    /// Marks machines as deleted.
    Remove(Vec<Selected>),
    StartUpdate {
        machine: Selected,
        /// Whether the instance is reimaged once it has the model.
        reimage: bool,
    },
    /// Gives the scale set its model, its capacity, or both.
    ApplyScaleSet {
        model: bool,
        capacity: usize,
        /// New instances follow: they need fresh bootstrap data.
        grows: bool,
        /// The new instances are listed at once: somebody waits to see them.
        list: bool,
    },
    RefreshBootstrap,
    ApplyTags,
    SetReplicas(usize),
    DeleteScaleSet,
    ReleasePool,
}

/// What to do next. No steps when there is nothing to do, or nothing to do yet (`waiting` says for what).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// When to plan again although nothing has changed.
    pub requeue: Option<Duration>,
    /// Whether machines of an older model, failed or irreparable ones remain.
    pub rolling: bool,
    /// What the pool waits for, when it is not in its desired state.
    pub waiting: Option<String>,
}

#[cfg(test)]
mod tests;
