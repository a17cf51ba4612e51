//! Why a node is not drained yet, pod by pod.

use std::fmt;

use super::pods::PodName;

/// A message names this many pods, and then how many more there are.
const NAMED: usize = 5;

/// Why a pod is still on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObstacleReason {
    /// It is being deleted and is not gone yet.
    Terminating,
    /// Its label says that it is not evicted but waited for.
    Completing,
    /// Its eviction would violate this disruption budget.
    DisruptionBudget(String),
    /// More than one budget covers it: the eviction API refuses such a pod until one of them is changed.
    SeveralDisruptionBudgets,
    /// Its namespace is being deleted, and the pod with it.
    NamespaceTerminating,
    /// It is evicted in a later reconcile.
    Queued,
    /// The API server refused the eviction for another reason.
    Refused(String),
}

/// A pod that keeps a node from being drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    pub pod: PodName,
    pub reason: ObstacleReason,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {} ", self.pod)?;
        match &self.reason {
            ObstacleReason::Terminating => f.write_str("is terminating"),
            ObstacleReason::Completing => {
                f.write_str("runs until it completes, because of its label cluster.x-k8s.io/drain")
            }
            ObstacleReason::DisruptionBudget(budget) => write!(f, "is blocked by budget {budget}"),
            ObstacleReason::SeveralDisruptionBudgets => {
                f.write_str("is covered by more than one disruption budget: leave it only one")
            }
            ObstacleReason::NamespaceTerminating => f.write_str("goes with its terminating namespace"),
            ObstacleReason::Queued => f.write_str("is evicted next"),
            ObstacleReason::Refused(reason) => write!(f, "cannot be evicted: {reason}"),
        }
    }
}

/// Returns the refusal of an eviction in the words of `kubectl drain`, which tools look for in events.
pub fn refused_eviction(obstacle: &Obstacle) -> String {
    let PodName { namespace, name } = &obstacle.pod;
    format!("error when evicting pods/\"{name}\" -n \"{namespace}\": {obstacle}")
}

/// Returns the obstacles as one part of a sentence, the blocked pods first.
pub fn describe(obstacles: &[Obstacle]) -> String {
    let rank = |obstacle: &&Obstacle| match obstacle.reason {
        ObstacleReason::SeveralDisruptionBudgets | ObstacleReason::Refused(_) => 0,
        ObstacleReason::DisruptionBudget(_) => 1,
        ObstacleReason::NamespaceTerminating => 2,
        ObstacleReason::Completing => 3,
        ObstacleReason::Terminating => 4,
        ObstacleReason::Queued => 5,
    };
    let mut sorted: Vec<&Obstacle> = obstacles.iter().collect();
    sorted.sort_by_key(|obstacle| (rank(obstacle), obstacle.pod.clone()));
    let named = sorted.iter().take(NAMED).map(ToString::to_string);
    let mut text = named.collect::<Vec<_>>().join("; ");
    if sorted.len() > NAMED {
        text.push_str(&format!("; and {} more", sorted.len() - NAMED));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_blocked_pods_first() {
        let obstacle = |name: &str, reason| Obstacle {
            pod: PodName {
                namespace: "ns".into(),
                name: name.into(),
            },
            reason,
        };
        let mut all = vec![
            obstacle("a", ObstacleReason::Terminating),
            obstacle("b", ObstacleReason::DisruptionBudget("ns/web".into())),
        ];
        assert_eq!(
            describe(&all),
            "pod ns/b is blocked by budget ns/web; pod ns/a is terminating"
        );
        assert_eq!(
            refused_eviction(&all[1]),
            "error when evicting pods/\"b\" -n \"ns\": pod ns/b is blocked by budget ns/web"
        );
        all.extend((0..5).map(|i| obstacle(&format!("z{i}"), ObstacleReason::Queued)));
        assert!(describe(&all).ends_with("; and 2 more"));
    }
}
