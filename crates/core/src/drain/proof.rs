//! Whether a machine's node has to be drained before the machine may be deleted or reimaged, and the proof that nothing
//! stands against it.
//!
//! Invariant: a [`Drained`] says that a live list showed the node empty, that no drain is needed, or that the drain's deadline has
//! passed. A cluster that does not answer is none of these before the deadline.

use std::fmt;

use jiff::Timestamp;

use super::obstacle::{Obstacle, describe};

/// Proof that one machine may be deleted or reimaged as far as its node's pods are concerned. Nothing outside of
/// [`crate::drain`] can make one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it is what the deletion of the machine needs"]
pub struct Drained {
    machine: String,
    reason: Reason,
}

/// Why a machine counts as drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A live list, read after the node was cordoned, shows no pod that has to go.
    Empty,
    NotNeeded(NotNeeded),
    /// The deadline has passed. These pods are still there, as far as the cluster answers.
    TimedOut {
        obstacles: Vec<Obstacle>,
    },
}

/// Why a machine needs no drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotNeeded {
    /// The machine has no Node: a read of the cluster itself says so.
    NoNode,
    /// The user excluded the machine from draining.
    Excluded,
    /// The whole cluster is being deleted: its pods cannot move anywhere.
    ClusterDeleted,
    /// Cluster API's core has drained the node, or somebody has deleted the infrastructure object without it.
    DrainedElsewhere,
    /// An earlier reconcile drained the node and recorded it on the object.
    Recorded,
}

impl Drained {
    /// The machine that this proof is for, by the name that [`Request::machine`] gave it.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// Whether pods may be left, because there was no more time for them.
    pub fn is_timed_out(&self) -> bool {
        matches!(self.reason, Reason::TimedOut { .. })
    }

    /// Returns the proof once `deadline` has passed, and nothing before.
    pub fn timed_out(
        machine: &str,
        deadline: Option<Timestamp>,
        now: Timestamp,
        obstacles: Vec<Obstacle>,
    ) -> Option<Self> {
        deadline.is_some_and(|deadline| now >= deadline).then(|| Self {
            machine: machine.to_owned(),
            reason: Reason::TimedOut { obstacles },
        })
    }

    /// Returns the proof for a machine whose infrastructure object is marked as deleted, and nothing before. Cluster API
    /// deletes that object once it has drained the node; a user who deletes it by hand asks for no drain.
    pub fn by_cluster_api(machine: &str, deleted: Option<Timestamp>) -> Option<Self> {
        deleted.map(|_| Self::not_needed(machine, NotNeeded::DrainedElsewhere))
    }

    /// Whether nobody drained the node. An event reports that.
    pub fn is_skipped(&self) -> bool {
        matches!(self.reason, Reason::NotNeeded(NotNeeded::Excluded | NotNeeded::NoNode))
    }

    pub(super) fn empty(machine: &str) -> Self {
        Self {
            machine: machine.to_owned(),
            reason: Reason::Empty,
        }
    }

    fn not_needed(machine: &str, reason: NotNeeded) -> Self {
        Self {
            machine: machine.to_owned(),
            reason: Reason::NotNeeded(reason),
        }
    }
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Reason::Empty => f.write_str("the node is drained"),
            Reason::NotNeeded(NotNeeded::NoNode) => f.write_str("the machine has no node"),
            Reason::NotNeeded(NotNeeded::Excluded) => f.write_str("the machine is excluded from draining"),
            Reason::NotNeeded(NotNeeded::ClusterDeleted) => f.write_str("the cluster is being deleted"),
            Reason::NotNeeded(NotNeeded::DrainedElsewhere) => f.write_str("Cluster API has drained the node"),
            Reason::NotNeeded(NotNeeded::Recorded) => f.write_str("the node was drained before"),
            Reason::TimedOut { obstacles } if obstacles.is_empty() => f.write_str("the drain timeout has passed"),
            Reason::TimedOut { obstacles } => write!(f, "the drain timeout has passed: {}", describe(obstacles)),
        }
    }
}

/// Everything that decides whether a machine's node has to be drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The machine, by the name with which it is deleted: an instance id or the name of its object.
    pub machine: String,
    pub node: NodeState,
    /// Whether Cluster API's core drains the node.
    pub elsewhere: DrainedElsewhere,
    /// Whether the user excluded the machine from draining.
    pub excluded: bool,
    /// Whether the whole cluster is being deleted.
    pub cluster_deleted: bool,
    /// Whether the object has it on record that the node is drained.
    pub recorded: bool,
    /// When the drain times out.
    pub deadline: Option<Timestamp>,
}

impl Request {
    /// A request without an exception and without a deadline.
    pub fn new(machine: impl Into<String>, node: NodeState) -> Self {
        Self {
            machine: machine.into(),
            node,
            elsewhere: DrainedElsewhere::No,
            excluded: false,
            cluster_deleted: false,
            recorded: false,
            deadline: None,
        }
    }
}

/// The Node of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    Present,
    /// A read of the cluster itself, past any cache, shows no such Node.
    Missing,
    /// The cluster does not answer, for this reason.
    Unknown(String),
}

/// Whether somebody else drains the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrainedElsewhere {
    No,
    /// The reason says who.
    InProgress(String),
    Done,
}

/// What a machine's drain needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assessment {
    Drained(Drained),
    /// Wait for somebody else, for this reason.
    Wait(String),
    /// Drain the node.
    Drain,
}

/// Decides what a machine's drain needs next.
pub fn assess(request: &Request, now: Timestamp) -> Assessment {
    let not_needed = |reason| Assessment::Drained(Drained::not_needed(&request.machine, reason));
    match &request.elsewhere {
        DrainedElsewhere::InProgress(reason) => return Assessment::Wait(reason.clone()),
        DrainedElsewhere::Done => return not_needed(NotNeeded::DrainedElsewhere),
        DrainedElsewhere::No => {}
    }
    if request.cluster_deleted {
        return not_needed(NotNeeded::ClusterDeleted);
    }
    if request.excluded {
        return not_needed(NotNeeded::Excluded);
    }
    if request.recorded {
        return not_needed(NotNeeded::Recorded);
    }
    match &request.node {
        NodeState::Present => Assessment::Drain,
        NodeState::Missing => not_needed(NotNeeded::NoNode),
        NodeState::Unknown(reason) => {
            let late = Drained::timed_out(&request.machine, request.deadline, now, Vec::new());
            late.map_or_else(|| Assessment::Wait(reason.clone()), Assessment::Drained)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::time::Duration;

    const NOW: Timestamp = Timestamp::constant(1_000_000, 0);

    fn request(node: NodeState, change: impl FnOnce(&mut Request)) -> Request {
        let mut request = Request::new("m", node);
        change(&mut request);
        request
    }

    fn unknown() -> NodeState {
        NodeState::Unknown("no answer".to_owned())
    }

    fn drained(reason: NotNeeded) -> Assessment {
        Assessment::Drained(Drained::not_needed("m", reason))
    }

    fn late() -> Assessment {
        Assessment::Drained(Drained::timed_out("m", Some(NOW), NOW, Vec::new()).unwrap())
    }

    #[rstest]
    #[case::node(request(NodeState::Present, |_| ()), Assessment::Drain)]
    #[case::node_at_the_deadline(request(NodeState::Present, |r| r.deadline = Some(NOW)), Assessment::Drain)]
    #[case::no_node(request(NodeState::Missing, |_| ()), drained(NotNeeded::NoNode))]
    #[case::no_answer(request(unknown(), |_| ()), Assessment::Wait("no answer".to_owned()))]
    #[case::no_answer_before_the_deadline(
        request(unknown(), |r| r.deadline = Some(NOW + Duration::from_secs(1))),
        Assessment::Wait("no answer".to_owned())
    )]
    #[case::no_answer_after_the_deadline(request(unknown(), |r| r.deadline = Some(NOW)), late())]
    #[case::excluded(request(NodeState::Present, |r| r.excluded = true), drained(NotNeeded::Excluded))]
    #[case::excluded_without_an_answer(request(unknown(), |r| r.excluded = true), drained(NotNeeded::Excluded))]
    #[case::recorded(request(NodeState::Present, |r| r.recorded = true), drained(NotNeeded::Recorded))]
    #[case::cluster_deleted(request(NodeState::Present, |r| r.cluster_deleted = true), drained(NotNeeded::ClusterDeleted))]
    #[case::core_drains(
        request(NodeState::Present, |r| {
            r.elsewhere = DrainedElsewhere::InProgress("core".to_owned());
            r.excluded = true;
        }),
        Assessment::Wait("core".to_owned())
    )]
    #[case::core_has_drained(
        request(NodeState::Present, |r| r.elsewhere = DrainedElsewhere::Done),
        drained(NotNeeded::DrainedElsewhere)
    )]
    fn a_machine_is_drained_waited_for_or_needs_no_drain(#[case] request: Request, #[case] expected: Assessment) {
        assert_eq!(assess(&request, NOW), expected);
    }

    #[test]
    fn a_proof_names_its_machine_and_its_reason() {
        let Assessment::Drained(proof) = drained(NotNeeded::NoNode) else {
            panic!("not drained")
        };
        assert_eq!(
            (proof.machine(), proof.to_string().as_str()),
            ("m", "the machine has no node")
        );
        assert_eq!(Drained::timed_out("m", None, NOW, Vec::new()), None);
        assert_eq!(Drained::by_cluster_api("m", None), None);
        assert!(Drained::by_cluster_api("m", Some(NOW)).is_some_and(|proof| proof.machine() == "m"));
    }

    #[rstest]
    #[case(NotNeeded::NoNode, true)]
    #[case(NotNeeded::Excluded, true)]
    #[case(NotNeeded::ClusterDeleted, false)]
    #[case(NotNeeded::DrainedElsewhere, false)]
    #[case(NotNeeded::Recorded, false)]
    fn a_drain_is_skipped_for_the_machines_own_sake(#[case] reason: NotNeeded, #[case] skipped: bool) {
        assert_eq!(Drained::not_needed("m", reason).is_skipped(), skipped);
    }
}
