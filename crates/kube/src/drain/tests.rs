use super::evict::Answer;
use super::node::{FALLBACK, SHOWN};
use super::*;
use capstan_core::drain::{ObstacleReason, PodName};

/// Nothing listens there: these are about the state between two steps.
fn drainer() -> Drainer {
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    Drainer::new(&Context::new(nowhere, crate::Options::default()).unwrap())
}

fn named(name: &str) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod.metadata.namespace = Some("ns".to_owned());
    pod
}

fn blocked() -> Answer {
    Answer::Blocked {
        budget: "ns/web".to_owned(),
        after: None,
    }
}

#[tokio::test]
async fn an_evicted_pod_is_not_evicted_again_while_the_cache_lags() {
    let drainer = drainer();
    let draining = drainer.start("node", Arc::new(|| ()));
    let pods = ["blocked", "going", "gone"].map(named);
    let options = Options::default();
    let first = drainer
        .plan(&draining, pods.iter(), Source::Cache, &options)
        .await
        .unwrap();
    assert_eq!(first.evict.len(), 3);
    let answers = [blocked(), Answer::Evicted, Answer::Gone];
    for (eviction, answer) in first.evict.iter().zip(answers) {
        draining.record(eviction, answer);
    }
    let second = drainer
        .plan(&draining, pods.iter(), Source::Cache, &options)
        .await
        .unwrap();
    assert_eq!(second.evict, []);
    assert_eq!(second.refused, ["uid-blocked"]);
    assert_eq!(second.terminating.len(), 2);
    assert!(!second.is_empty());
}

#[tokio::test]
async fn a_refused_pod_that_may_stay_after_all_causes_no_further_step() {
    let drainer = drainer();
    let draining = drainer.start("node", Arc::new(|| ()));
    let options = Options::default();
    let mut pods = ["refused", "going"].map(named);
    let first = drainer
        .plan(&draining, pods.iter(), Source::Cache, &options)
        .await
        .unwrap();
    for (eviction, answer) in first.evict.iter().zip([Answer::Evicted, blocked()]) {
        draining.record(eviction, answer);
    }
    draining.retry_all_now();
    let skip = ("cluster.x-k8s.io/drain".to_owned(), "skip".to_owned());
    pods[0].labels_mut().extend([skip]);
    let second = drainer
        .plan(&draining, pods.iter(), Source::Cache, &options)
        .await
        .unwrap();
    assert_eq!((second.evict.len(), second.terminating.len()), (0, 1));
    assert_eq!(draining.again(&second, &options, drainer.0.clock.now()), FALLBACK);
}

#[tokio::test]
async fn a_stopped_drain_reports_no_obstacle_and_watches_no_pods() {
    let drainer = drainer();
    let draining = drainer.start("node", Arc::new(|| ()));
    drainer.0.nodes.lock().insert("node".to_owned(), draining.clone());
    let pod = PodName {
        namespace: "ns".to_owned(),
        name: "a".to_owned(),
    };
    let reason = ObstacleReason::SeveralDisruptionBudgets;
    draining.report("node", &[Obstacle { pod, reason }]);
    let shown = || drainer.0.metrics.encode().contains("capstan_drain_pod_in_the_way{");
    assert!(shown());
    let watching = Arc::downgrade(&draining);
    drop(draining);
    drainer.stop("node");
    assert!(!shown() && watching.upgrade().is_none());
}

#[tokio::test]
async fn a_node_has_a_bounded_number_of_pods_in_the_metrics() {
    let drainer = drainer();
    let draining = drainer.start("node", Arc::new(|| ()));
    let obstacles: Vec<_> = (0..MAX_PODS)
        .map(|n| Obstacle {
            pod: PodName {
                namespace: "ns".to_owned(),
                name: n.to_string(),
            },
            reason: ObstacleReason::SeveralDisruptionBudgets,
        })
        .collect();
    draining.report("node", &obstacles);
    let text = drainer.0.metrics.encode();
    assert_eq!(text.matches("capstan_drain_pod_in_the_way{").count(), SHOWN);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_no_caller_asks_about_ends_by_itself() {
    let drainer = drainer();
    let draining = drainer.start("node", Arc::new(|| ()));
    let watching = Arc::downgrade(&draining);
    drainer.0.nodes.lock().insert("node".to_owned(), draining);
    tokio::time::sleep(ABANDONED / 2).await;
    if let Some(draining) = watching.upgrade() {
        draining.asked_now(Arc::new(|| ()));
    }
    tokio::time::sleep(ABANDONED - FALLBACK).await;
    assert!(watching.upgrade().is_some(), "the caller asked about it");
    tokio::time::sleep(ABANDONED).await;
    assert!(watching.upgrade().is_none() && drainer.0.nodes.lock().is_empty());
}

#[tokio::test]
async fn a_cluster_that_does_not_answer_holds_a_machine_until_the_deadline_only() {
    let drainer = drainer();
    let mut node = Node::default();
    node.metadata.name = Some("node".to_owned());
    let drain = async |deadline| {
        let options = Options {
            deadline,
            ..Options::default()
        };
        drainer.drain("m", &node, options, Arc::new(|| ())).await
    };
    let now = drainer.0.clock.now();
    assert!(drain(None).await.is_err());
    assert!(drain(Some(now + Duration::from_secs(3600))).await.is_err());
    let Ok(Outcome::Drained(drained)) = drain(Some(now)).await else {
        panic!("the deadline has passed")
    };
    assert_eq!(drained.machine(), "m");
    assert!(matches!(drained.reason(), drain::Reason::TimedOut { .. }));
}
