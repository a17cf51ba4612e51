//! Drains the nodes of machines that are deleted or updated.
//!
//! Invariant: a [`Drained`] is made only when the node was seen drained or is in no list of the cluster's own, when the
//! drain timeout has passed, or when Cluster API's core has drained it. A cluster that does not answer is none of these.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use capstan_core::drain::{ObstacleReason, Options, Reason, describe};
use capstan_core::pool::{Drain, Drained};
use capstan_kube::drain::{Outcome, Wake};
use capstan_kube::workload::Cluster;
use jiff::Timestamp;

use super::member::{Member, NodeState};
use crate::error::Error;

/// How far a drain is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub drain: Drain,
    /// Whether it waits for more than pods that are terminating.
    pub stuck: bool,
    /// When to look again at the latest.
    pub again: Duration,
}

impl Progress {
    fn done(drained: Drained) -> Self {
        Self {
            drain: Drain::Done(drained),
            stuck: false,
            again: Duration::MAX,
        }
    }
}

/// While the cluster does not answer, or core drains, nobody wakes us for certain.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// Core says so in the Machine's Deleting condition once the node is drained and its volumes are gone.
const AFTER_DRAIN: [&str; 3] = [
    "WaitingForInfrastructureDeletion",
    "WaitingForBootstrapDeletion",
    "DeletionCompleted",
];

/// Keeps core from draining a Machine's node.
const EXCLUDE_DRAIN_ANNOTATION: &str = "machine.cluster.x-k8s.io/exclude-node-draining";

/// How and until when to drain.
pub struct Terms {
    pub timeout: Option<Duration>,
    /// The whole cluster is deleted: pods have nowhere to go.
    pub cluster_deleted: bool,
    pub wake: Wake,
}

/// Cordons a machine's node and evicts its pods, counted from `since`.
pub async fn run(member: &Member, cluster: &Cluster, terms: &Terms, since: Timestamp) -> Result<Progress, Error> {
    let now = Timestamp::now();
    let deadline = terms.timeout.and_then(|timeout| since.checked_add(timeout).ok());
    let late = deadline.is_some_and(|deadline| now >= deadline);
    if terms.cluster_deleted {
        return Ok(Progress::done(Drained::ClusterDeleted));
    }
    let node = match &member.node {
        NodeState::Missing => return Ok(Progress::done(Drained::NoNode)),
        NodeState::Unknown(_) if late => return Ok(Progress::done(Drained::TimedOut)),
        NodeState::Unknown(why) => return Ok(waiting(why.clone(), deadline, now)),
        NodeState::Ready(node) | NodeState::NotReady(node) => node,
    };
    let connection = match cluster.connection().await {
        Ok(connection) => connection,
        Err(_) if late => return Ok(Progress::done(Drained::TimedOut)),
        Err(error) => return Ok(waiting(error.to_string(), deadline, now)),
    };
    let options = Options {
        deadline,
        ..Options::default()
    };
    let id = member
        .instance
        .as_ref()
        .map_or(member.name.as_str(), |instance| &instance.id);
    let drain = connection.drainer.drain(id, node, options, terms.wake.clone());
    match drain.await {
        Ok(Outcome::Drained(proof)) => Ok(Progress::done(match proof.reason() {
            Reason::Empty | Reason::NotNeeded(_) => Drained::Empty,
            Reason::TimedOut { .. } => Drained::TimedOut,
        })),
        Ok(Outcome::Draining { obstacles, again, .. }) => Ok(Progress {
            drain: Drain::Running {
                why: describe(&obstacles),
            },
            stuck: obstacles
                .iter()
                .any(|obstacle| obstacle.reason != ObstacleReason::Terminating),
            again,
        }),
        Err(error) => Ok(waiting(error.to_string(), deadline, now)),
    }
}

/// The provider ids of all nodes of a cluster, past its cache; or why they cannot be told.
pub async fn listed(cluster: &Cluster) -> Result<BTreeSet<String>, String> {
    cluster.live_provider_ids().await.map_err(|error| error.to_string())
}

/// Why a node that the cache does not have may be there all the same.
pub fn not_missing(provider_id: &str, listed: &Result<BTreeSet<String>, String>) -> Option<String> {
    match listed {
        Ok(ids) if ids.contains(&provider_id.to_ascii_lowercase()) => {
            Some("its node has joined, and is not seen by our watch yet".to_owned())
        }
        Ok(_) => None,
        Err(why) => Some(why.clone()),
    }
}

fn waiting(why: String, deadline: Option<Timestamp>, now: Timestamp) -> Progress {
    let left = deadline.and_then(|deadline| Duration::try_from(deadline.duration_since(now)).ok());
    let again = left.map_or(LOOK_AGAIN, |left| left.min(LOOK_AGAIN));
    Progress {
        drain: Drain::Running { why },
        stuck: true,
        again,
    }
}

/// Whether core has left the draining to us: it skips nodes of clusters whose control plane it does not see, and of
/// machines whose node it never found. Who does not want a drain says so on the Machine.
pub fn core_did_not_drain(owner: &Arc<capstan_kube::capi::Machine>) -> bool {
    let deletion = owner.status.as_ref().and_then(|status| status.deletion.as_ref());
    let drained = deletion.is_some_and(|deletion| deletion.node_drain_start_time.is_some());
    let excluded = owner.metadata.annotations.as_ref();
    !drained && !excluded.is_some_and(|notes| notes.contains_key(EXCLUDE_DRAIN_ANNOTATION))
}

/// Whether Cluster API's core is done with the Machine but for the infrastructure.
pub fn core_is_done(owner: &Arc<capstan_kube::capi::Machine>) -> bool {
    let conditions = owner.status.iter().flat_map(|status| &status.conditions);
    let reason = |c: &&capstan_api::capi::CoreCondition| c.type_ == "Deleting" && c.status == "True";
    let mut deleting = conditions
        .filter(reason)
        .filter_map(|condition| condition.reason.as_deref());
    deleting.any(|reason| AFTER_DRAIN.contains(&reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::not_listed(Ok(BTreeSet::from(["azure:///b".to_owned()])), None)]
    #[case::listed_in_another_case(Ok(BTreeSet::from(["azure:///a".to_owned()])), Some("has joined"))]
    #[case::no_list(Err("connection refused".to_owned()), Some("connection refused"))]
    fn a_node_is_missing_only_when_the_cluster_itself_says_so(
        #[case] listed: Result<BTreeSet<String>, String>,
        #[case] why: Option<&str>,
    ) {
        let told = not_missing("azure:///A", &listed);
        assert_eq!(told.is_some(), why.is_some(), "{told:?}");
        assert!(told.unwrap_or_default().contains(why.unwrap_or_default()));
    }
}
