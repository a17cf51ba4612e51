//! Changes of nodes, from all clusters to all subscribers. Invariant: each cluster has a queue of its own, and the queues
//! take turns, so a cluster with many changes delays no other; a queue that is full becomes one event for the whole
//! cluster, and for no other cluster.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use futures::Stream;
use k8s_openapi::api::core::v1::Node;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::ClusterKey;

/// A listener that has more changes of one cluster to take than this gets one event for the whole cluster instead.
pub(super) const BACKLOG: usize = 256;

/// A change of a cluster's nodes that concerns machines.
#[derive(Clone, Debug)]
pub enum NodeEvent {
    /// The node was added or removed, or its readiness, its taints, its provider id or its addresses changed.
    Node {
        cluster: ClusterKey,
        node: Arc<Node>,
        gone: bool,
    },
    /// The connection was made, lost or replaced, or many nodes changed: observe all machines of the cluster.
    Cluster(ClusterKey),
}

/// The changes of one cluster that a listener has not taken yet.
enum Queue {
    Nodes(VecDeque<(Arc<Node>, bool)>),
    All,
}

#[derive(Default)]
struct Listener {
    queues: Mutex<Queues>,
    added: Notify,
}

/// The queues, and the clusters that have one in the order of their turns.
#[derive(Default)]
struct Queues {
    turns: VecDeque<ClusterKey>,
    of: HashMap<ClusterKey, Queue>,
}

impl Queues {
    fn push(&mut self, event: NodeEvent) {
        let (cluster, node) = match event {
            NodeEvent::Node { cluster, node, gone } => (cluster, Some((node, gone))),
            NodeEvent::Cluster(cluster) => (cluster, None),
        };
        let queue = self.of.entry(cluster.clone()).or_insert_with(|| {
            self.turns.push_back(cluster);
            Queue::Nodes(VecDeque::new())
        });
        match (queue, node) {
            (Queue::Nodes(nodes), Some(node)) if nodes.len() < BACKLOG => nodes.push_back(node),
            (queue, _) => *queue = Queue::All,
        }
    }

    fn pop(&mut self) -> Option<NodeEvent> {
        let cluster = self.turns.pop_front()?;
        match self.of.remove(&cluster)? {
            Queue::All => Some(NodeEvent::Cluster(cluster)),
            Queue::Nodes(mut nodes) => {
                let (node, gone) = nodes.pop_front()?;
                if !nodes.is_empty() {
                    self.of.insert(cluster.clone(), Queue::Nodes(nodes));
                    self.turns.push_back(cluster.clone());
                }
                Some(NodeEvent::Node { cluster, node, gone })
            }
        }
    }
}

/// Hands events to all listeners. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Events(Arc<Mutex<Vec<Weak<Listener>>>>);

impl Events {
    pub(super) fn send(&self, event: &NodeEvent) {
        self.0.lock().retain(|listener| {
            let Some(listener) = listener.upgrade() else {
                return false;
            };
            listener.queues.lock().push(event.clone());
            listener.added.notify_one();
            true
        });
    }

    /// Returns every event from now on.
    pub(super) fn listen(&self) -> impl Stream<Item = NodeEvent> + Send + use<> {
        let listener = Arc::<Listener>::default();
        self.0.lock().push(Arc::downgrade(&listener));
        futures::stream::unfold(listener, |listener| async move {
            loop {
                let event = listener.queues.lock().pop();
                match event {
                    Some(event) => return Some((event, listener)),
                    None => listener.added.notified().await,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};

    fn key(name: &str) -> ClusterKey {
        ClusterKey {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
        }
    }

    fn change(name: &str) -> NodeEvent {
        NodeEvent::Node {
            cluster: key(name),
            node: Arc::default(),
            gone: false,
        }
    }

    #[tokio::test]
    async fn a_noisy_cluster_costs_the_others_nothing() {
        let events = Events::default();
        let mut heard = Box::pin(events.listen());
        for _ in 0..100 * BACKLOG {
            events.send(&change("noisy"));
        }
        events.send(&change("quiet"));
        let taken: Vec<String> = std::iter::from_fn(|| heard.next().now_or_never().flatten())
            .map(|event| match event {
                NodeEvent::Node { cluster, .. } => format!("node of {}", cluster.name),
                NodeEvent::Cluster(cluster) => format!("all of {}", cluster.name),
            })
            .collect();
        assert_eq!(taken, ["all of noisy", "node of quiet"]);
    }

    #[tokio::test]
    async fn clusters_take_turns() {
        let events = Events::default();
        let mut heard = Box::pin(events.listen());
        (0..BACKLOG).for_each(|_| events.send(&change("noisy")));
        events.send(&change("quiet"));
        heard.next().await;
        let Some(NodeEvent::Node { cluster, .. }) = heard.next().await else {
            panic!("a node has changed")
        };
        assert_eq!(cluster.name, "quiet");
    }

    #[tokio::test]
    async fn a_listener_that_is_gone_is_forgotten() {
        let events = Events::default();
        drop(events.listen());
        events.send(&change("c"));
        assert!(events.0.lock().is_empty());
    }
}
