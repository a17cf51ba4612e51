//! Drains the nodes of machines that are deleted or updated.
//!
//! Invariant: only `capstan_core::drain` makes a proof that a node is drained. A node that the cache lacks counts as missing
//! only when a list of the cluster itself lacks it, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use capstan_api::capi::{CoreCondition, DrainRuleMachines, EXCLUDE_DRAIN_ANNOTATION, PRE_DRAIN_HOOK_PREFIX};
use capstan_core::clock::Clock;
use capstan_core::drain::{
    Assessment, Drained, DrainedElsewhere, NodeState as Presence, ObstacleReason, Options, Request, assess, describe,
};
use capstan_core::pool::Drain;
use capstan_kube::capi::{Machine, MachineDrainRule};
use capstan_kube::drain::{Outcome, Wake};
use capstan_kube::grant::selects;
use capstan_kube::workload::Cluster;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;

use super::member::{Member, NodeState};

/// How far a drain is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub drain: Drain,
    /// Whether it waits for more than pods that are terminating.
    pub stuck: bool,
    /// When to check it again at the latest.
    pub again: Duration,
}

impl Progress {
    fn done(proof: Drained) -> Self {
        Self {
            drain: Drain::Done(proof),
            stuck: false,
            again: Duration::MAX,
        }
    }

    fn waiting(why: String, deadline: Option<Timestamp>, now: Timestamp) -> Self {
        let left = deadline.and_then(|deadline| Duration::try_from(deadline.duration_since(now)).ok());
        Self {
            drain: Drain::Running { why },
            stuck: true,
            again: left.map_or(RECHECK, |left| left.min(RECHECK)),
        }
    }
}

/// While the cluster does not answer, nobody wakes us for certain.
const RECHECK: Duration = Duration::from_secs(15);
/// The reasons of the Machine's Deleting condition once core has drained the node and its volumes are gone.
const AFTER_DRAIN: [&str; 3] = [
    "WaitingForInfrastructureDeletion",
    "WaitingForBootstrapDeletion",
    "DeletionCompleted",
];

/// A core before v1beta2 sets this condition once it has drained the node.
const OLD_DRAINED: &str = "DrainingSucceeded";

/// How and until when to drain.
pub struct Terms {
    pub timeout: Option<Duration>,
    /// Whether the whole cluster is deleted: pods have nowhere to go.
    pub cluster_deleted: bool,
    pub wake: Wake,
    pub clock: Clock,
}

/// Cordons a machine's node and evicts its pods, counted from `since`.
pub async fn run(member: &Member, cluster: &Cluster, terms: &Terms, since: Timestamp) -> Progress {
    let of_machine = member.owner.as_ref().and_then(|owner| owner.spec.drain_timeout());
    let timeout = of_machine.or(terms.timeout);
    let deadline = timeout.and_then(|timeout| since.checked_add(timeout).ok());
    let assessed = |node: Presence| {
        let request = Request {
            cluster_deleted: terms.cluster_deleted,
            deadline,
            ..Request::new(member.id(), node)
        };
        assess(&request, terms.clock.now())
    };
    let assessment = match &member.node {
        NodeState::Missing => assessed(Presence::Missing),
        NodeState::Unknown(why) => assessed(Presence::Unknown(why.clone())),
        NodeState::Ready(node) | NodeState::NotReady(node) => match assessed(Presence::Present) {
            Assessment::Drain => match drain(member.id(), node, cluster, terms, deadline).await {
                Ok(progress) => return progress,
                Err(why) => assessed(Presence::Unknown(why)),
            },
            other => other,
        },
    };
    match assessment {
        Assessment::Drained(proof) => Progress::done(proof),
        Assessment::Wait(why) => Progress::waiting(why, deadline, terms.clock.now()),
        Assessment::Drain => Progress::waiting("its node is not drained yet".to_owned(), deadline, terms.clock.now()),
    }
}

/// Does one step of a node's drain. The error says why the cluster does not do it.
async fn drain(
    id: &str,
    node: &Node,
    cluster: &Cluster,
    terms: &Terms,
    deadline: Option<Timestamp>,
) -> Result<Progress, String> {
    let connection = cluster.connection().await.map_err(|error| error.to_string())?;
    let options = Options {
        deadline,
        ..Options::default()
    };
    let drain = connection.drainer.drain(id, node, options, terms.wake.clone());
    match drain.await.map_err(|error| error.to_string())? {
        Outcome::Drained(proof) => Ok(Progress::done(proof)),
        Outcome::Draining { obstacles, again, .. } => Ok(Progress {
            drain: Drain::Running {
                why: describe(&obstacles),
            },
            stuck: obstacles
                .iter()
                .any(|obstacle| obstacle.reason != ObstacleReason::Terminating),
            again,
        }),
    }
}

/// Returns the provider ids of all nodes of a cluster, and the names of those without one, past its cache; or why the cluster does not list them.
pub async fn listed(cluster: &Cluster) -> Result<BTreeSet<String>, String> {
    cluster.live_provider_ids().await.map_err(|error| error.to_string())
}

/// Returns why a node that the cache lacks may exist all the same.
pub fn not_missing(
    provider_id: &str,
    name: Option<&String>,
    listed: &Result<BTreeSet<String>, String>,
) -> Option<String> {
    match listed {
        Ok(ids) if ids.contains(&provider_id.to_ascii_lowercase()) || name.is_some_and(|name| ids.contains(name)) => {
            Some("its node has joined, and our watch does not show it yet".to_owned())
        }
        Ok(_) => None,
        Err(why) => Some(why.clone()),
    }
}

/// Returns how far Cluster API's core is with the drain of a Machine that is deleted. Where core skips the drain, we drain.
///
/// `object_deleted`: when the infrastructure object of the Machine was deleted.
pub fn by_cluster_api(id: &str, owner: &Arc<Machine>, object_deleted: Option<Timestamp>, now: Timestamp) -> Drain {
    if !core_is_done(owner, object_deleted) {
        let why = format!("Machine {} is being drained by Cluster API", owner.name_any());
        let why = core_message(owner).map_or(why.clone(), |message| format!("{why}: {message}"));
        return Drain::Running { why };
    }
    if core_did_not_drain(owner) {
        return Drain::NotRun;
    }
    let request = Request {
        elsewhere: DrainedElsewhere::Done,
        ..Request::new(id, Presence::Present)
    };
    match assess(&request, now) {
        Assessment::Drained(proof) => Drain::Done(proof),
        Assessment::Wait(why) => Drain::Running { why },
        Assessment::Drain => Drain::NotRun,
    }
}

/// Whether a drain rule is about a Machine of a cluster with these labels. One that cannot be read is about all.
pub fn is_about(rule: &MachineDrainRule, machine: &Machine, cluster: &BTreeMap<String, String>) -> bool {
    let fits = |selector: &Option<LabelSelector>, labels: &BTreeMap<String, String>| {
        let selector = selector.as_ref();
        selector.is_none_or(|selector| selects(selector, labels).unwrap_or(true))
    };
    let machines = &rule.spec.machines;
    let selected =
        |some: &DrainRuleMachines| fits(&some.selector, machine.labels()) && fits(&some.cluster_selector, cluster);
    machines.is_empty() || machines.iter().any(selected)
}

/// Whether only core may drain the node of a Machine: somebody's hook comes first, or the user wants no drain. An old core shows
/// that it has drained only if it is the one that deletes the object.
pub fn is_guarded(owner: &Machine) -> bool {
    let mut annotations = owner.metadata.annotations.iter().flatten().map(|(name, _)| name);
    let guards = |name: &String| name.starts_with(PRE_DRAIN_HOOK_PREFIX) || name == EXCLUDE_DRAIN_ANNOTATION;
    is_old(owner) || annotations.any(guards)
}

/// Whether core has left the draining to us: it skips nodes of clusters whose control plane it does not see, and of
/// machines whose node it never found. A user who wants no drain says so on the Machine.
fn core_did_not_drain(owner: &Machine) -> bool {
    let deletion = owner.status.as_ref().and_then(|status| status.deletion.as_ref());
    let began = deletion.is_some_and(|deletion| deletion.node_drain_start_time.is_some());
    let drained = began || condition(owner, OLD_DRAINED).is_some();
    let excluded = owner.metadata.annotations.as_ref();
    !drained && !excluded.is_some_and(|notes| notes.contains_key(EXCLUDE_DRAIN_ANNOTATION))
}

/// Returns a condition that is true. A core that serves v1beta1 keeps those of v1beta2 in a place of their own.
fn condition<'a>(owner: &'a Machine, type_: &str) -> Option<&'a CoreCondition> {
    let status = owner.status.iter();
    let mut conditions = status.flat_map(|status| {
        let later = status.v1beta2.iter().flat_map(|later| &later.conditions);
        status.conditions.iter().chain(later)
    });
    conditions.find(|condition| condition.type_ == type_ && condition.status == "True")
}

/// Whether Cluster API's core is done with the Machine but for the infrastructure. An old core has no such condition: it
/// deletes the infrastructure object once it has drained the node.
fn core_is_done(owner: &Machine, object_deleted: Option<Timestamp>) -> bool {
    match condition(owner, "Deleting") {
        Some(condition) => condition
            .reason
            .as_deref()
            .is_some_and(|reason| AFTER_DRAIN.contains(&reason)),
        None => {
            let deleted = owner.metadata.deletion_timestamp.as_ref().map(|time| time.0);
            let by_core = deleted.zip(object_deleted).is_some_and(|(own, object)| object > own);
            condition(owner, OLD_DRAINED).is_some() || (is_old(owner) && by_core)
        }
    }
}

/// Whether core wrote conditions, and none of those that a newer core writes.
fn is_old(owner: &Machine) -> bool {
    let status = owner.status.as_ref();
    status.is_some_and(|status| !status.conditions.is_empty() && status.v1beta2.is_none())
        && status.is_some_and(|status| {
            status
                .conditions
                .iter()
                .all(|c| c.type_ != "Deleting" && c.type_ != "Available")
        })
}

/// Whether core's drain waits for more than pods that are terminating: it names pods that it cannot evict.
pub fn is_held_up(owner: &Machine) -> bool {
    core_message(owner).is_some_and(|message| message.contains("cannot evict"))
}

/// Returns core's message about pods and disruption budgets.
fn core_message(owner: &Machine) -> Option<String> {
    let condition = condition(owner, "Deleting");
    let condition = condition.filter(|condition| condition.reason.as_deref() == Some("DrainingNode"))?;
    let message = condition.message.as_deref().unwrap_or_default();
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    (!lines.is_empty()).then(|| lines.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::not_listed(Ok(BTreeSet::from(["azure:///b".to_owned()])), None)]
    #[case::listed_in_another_case(Ok(BTreeSet::from(["azure:///a".to_owned()])), Some("has joined"))]
    #[case::listed_without_a_provider_id(Ok(BTreeSet::from(["np000001".to_owned()])), Some("has joined"))]
    #[case::no_list(Err("connection refused".to_owned()), Some("connection refused"))]
    fn a_node_is_missing_only_when_the_cluster_itself_says_so(
        #[case] listed: Result<BTreeSet<String>, String>,
        #[case] why: Option<&str>,
    ) {
        let reason = not_missing("azure:///A", Some(&"np000001".to_owned()), &listed);
        assert_eq!(reason.is_some(), why.is_some(), "{reason:?}");
        assert!(reason.unwrap_or_default().contains(why.unwrap_or_default()));
    }

    fn deleted(reason: &str, message: &str, drain_began: bool, annotations: Value) -> Machine {
        let deletion = match drain_began {
            true => json!({ "nodeDrainStartTime": "2026-01-01T00:00:00Z" }),
            false => json!({}),
        };
        serde_json::from_value(json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine",
            "metadata": { "name": "m", "annotations": annotations },
            "spec": { "clusterName": "c", "bootstrap": {}, "infrastructureRef": { "apiGroup": "g", "kind": "k", "name": "n" } },
            "status": {
                "deletion": deletion,
                "conditions": [{
                    "type": "Deleting", "status": "True", "reason": reason, "message": message,
                    "lastTransitionTime": "2026-01-01T00:00:00Z"
                }]
            }
        }))
        .unwrap()
    }

    fn drained_by_core(reason: &str, message: &str, drain_began: bool, annotations: Value) -> Drain {
        let machine = deleted(reason, message, drain_began, annotations);
        by_cluster_api("7", &Arc::new(machine), None, Timestamp::UNIX_EPOCH)
    }

    #[rstest]
    #[case::by_a_budget(
        "DrainingNode",
        "* Pod default/db: cannot evict pod as it would violate the pod's disruption budget",
        true
    )]
    #[case::by_pods_that_end(
        "DrainingNode",
        "* Pod default/db: deletionTimestamp set, but still not removed from the Node",
        false
    )]
    #[case::by_nothing("WaitingForInfrastructureDeletion", "", false)]
    fn a_drain_by_cluster_api_is_held_up(#[case] reason: &str, #[case] message: &str, #[case] expected: bool) {
        assert_eq!(is_held_up(&deleted(reason, message, true, json!({}))), expected);
    }

    /// A Machine of a core that serves v1beta1, deleted at 10 s.
    fn drained_by_old_core(status: Value, object_deleted: i64) -> Drain {
        let machine: Machine = serde_json::from_value(json!({
            "apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "Machine",
            "metadata": { "name": "m", "deletionTimestamp": "1970-01-01T00:00:10Z" },
            "spec": { "clusterName": "c", "bootstrap": {}, "infrastructureRef": { "apiVersion": "g/v1", "kind": "k", "name": "n" } },
            "status": status
        }))
        .unwrap();
        let deleted = Timestamp::from_second(object_deleted).unwrap();
        by_cluster_api("7", &Arc::new(machine), Some(deleted), Timestamp::UNIX_EPOCH)
    }

    #[rstest]
    #[case::in_the_place_for_later_conditions(
        json!({ "conditions": [{ "type": "Ready", "status": "True" }], "deletion": { "nodeDrainStartTime": "x" },
                "v1beta2": { "conditions": [{ "type": "Deleting", "status": "True", "reason": "WaitingForInfrastructureDeletion" }] } }),
        5, "done"
    )]
    #[case::still_draining(
        json!({ "v1beta2": { "conditions": [{ "type": "Deleting", "status": "True", "reason": "DrainingNode" }] } }), 5, "running"
    )]
    #[case::drained_by_a_core_without_them(json!({ "conditions": [{ "type": "DrainingSucceeded", "status": "True" }] }), 5, "done")]
    #[case::draining_by_a_core_without_them(json!({ "conditions": [{ "type": "DrainingSucceeded", "status": "False" }] }), 5, "running")]
    #[case::object_deleted_by_a_core_that_skipped_the_drain(json!({ "conditions": [{ "type": "Ready", "status": "False" }] }), 11, "ours")]
    #[case::no_word_of_core_yet(json!({}), 11, "running")]
    fn cores_that_serve_v1beta1_are_waited_for_and_not_for_ever(
        #[case] status: Value,
        #[case] object_deleted: i64,
        #[case] expected: &str,
    ) {
        let drain = drained_by_old_core(status, object_deleted);
        let drain = match drain {
            Drain::Running { .. } => "running",
            Drain::Done(_) => "done",
            Drain::NotRun => "ours",
        };
        assert_eq!(drain, expected);
    }

    #[rstest]
    #[case::by_nothing(json!({}), json!({}), false)]
    #[case::by_a_hook(json!({ "pre-drain.delete.hook.machine.cluster.x-k8s.io/backup": "x" }), json!({}), true)]
    #[case::not_by_a_later_hook(json!({ "pre-terminate.delete.hook.machine.cluster.x-k8s.io/x": "" }), json!({}), false)]
    #[case::by_its_user(json!({ EXCLUDE_DRAIN_ANNOTATION: "" }), json!({}), true)]
    #[case::by_an_old_core(json!({}), json!({ "conditions": [{ "type": "Ready", "status": "True" }] }), true)]
    #[case::not_by_a_newer_core(json!({}), json!({ "conditions": [{ "type": "Available", "status": "True" }] }), false)]
    fn a_drain_that_only_cluster_api_may_do(#[case] annotations: Value, #[case] status: Value, #[case] expected: bool) {
        let mut machine = deleted("", "", false, annotations);
        machine.0.status = serde_json::from_value(status).unwrap();
        assert_eq!(is_guarded(&machine), expected);
    }

    #[rstest]
    #[case::without_selectors(json!({}), true)]
    #[case::of_all(json!({ "machines": [{}] }), true)]
    #[case::of_this_one(json!({ "machines": [{ "selector": { "matchLabels": { "pool": "a" } } }] }), true)]
    #[case::of_another_one(json!({ "machines": [{ "selector": { "matchLabels": { "pool": "b" } } }] }), false)]
    #[case::of_one_of_two(json!({ "machines": [{ "selector": { "matchLabels": { "pool": "b" } } },
        { "selector": { "matchExpressions": [{ "key": "pool", "operator": "Exists" }] } }] }), true)]
    #[case::of_this_cluster(json!({ "machines": [{ "clusterSelector": { "matchLabels": { "stage": "prod" } } }] }), true)]
    #[case::of_this_one_in_another_cluster(json!({ "machines": [{ "selector": { "matchLabels": { "pool": "a" } },
        "clusterSelector": { "matchLabels": { "stage": "test" } } }] }), false)]
    #[case::that_cannot_be_read(json!({ "machines": [{ "selector": { "matchExpressions": [
        { "key": "pool", "operator": "Resembles" }] } }] }), true)]
    fn a_rule_is_about_the_machines_that_it_selects(#[case] spec: Value, #[case] expected: bool) {
        let rule = serde_json::from_value(json!({ "metadata": { "name": "r" }, "spec": spec })).unwrap();
        let mut machine = deleted("", "", false, json!({}));
        machine.0.metadata.labels = Some(BTreeMap::from([("pool".to_owned(), "a".to_owned())]));
        let cluster = BTreeMap::from([("stage".to_owned(), "prod".to_owned())]);
        assert_eq!(is_about(&MachineDrainRule(rule), &machine, &cluster), expected);
    }

    #[test]
    fn the_wait_for_cluster_api_names_the_pod_and_its_budget() {
        let message = "Drain not completed yet:\n* Pod default/db: cannot evict pod as it would violate the pod's disruption budget";
        let Drain::Running { why } = drained_by_core("DrainingNode", message, true, json!({})) else {
            panic!("not draining")
        };
        assert!(
            why.starts_with("Machine m is being drained by Cluster API: Drain not completed yet"),
            "{why}"
        );
        assert!(why.contains("Pod default/db: cannot evict"), "{why}");
    }

    #[test]
    fn cluster_apis_drain_is_a_proof_and_a_drain_that_it_skipped_is_none() {
        let done = "WaitingForInfrastructureDeletion";
        let proof = drained_by_core(done, "", true, json!({}));
        assert!(
            matches!(proof, Drain::Done(ref proof) if proof.machine() == "7"),
            "{proof:?}"
        );
        assert_eq!(drained_by_core(done, "", false, json!({})), Drain::NotRun);
        let excluded = drained_by_core(done, "", false, json!({ EXCLUDE_DRAIN_ANNOTATION: "" }));
        assert!(matches!(excluded, Drain::Done(_)), "{excluded:?}");
    }
}
