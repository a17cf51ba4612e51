//! Drains on a real API server with real disruption budgets; kwok plays the kubelet.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use capstan_core::drain::{self, Drained, Obstacle, ObstacleReason, Reason};
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_kube::drain::Outcome;
use capstan_kube::{Context, Drainer, Options};
use capstan_testkit::ControlPlane;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Notify;

const PATIENCE: Duration = Duration::from_secs(180);
/// A refused pod is left alone at least this long.
const FIRST_RETRY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Counter {
    evictions: AtomicUsize,
    asked: Mutex<Vec<Instant>>,
    log: Mutex<Vec<String>>,
}

impl Interceptor for Counter {
    fn before(&self, effect: &Effect) -> Verdict {
        if effect.target.ends_with("/eviction") {
            self.evictions.fetch_add(1, Ordering::SeqCst);
            self.asked.lock().unwrap().push(Instant::now());
        }
        self.log
            .lock()
            .unwrap()
            .push(format!("{} {}", effect.method, effect.target));
        Verdict::Pass
    }
}

struct World {
    client: kube::Client,
    namespace: String,
    drainer: Drainer,
    counter: Arc<Counter>,
    context: Context,
    woken: Arc<Notify>,
}

fn parse<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

impl World {
    async fn new() -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        let namespace = plane.namespace("drain").await?;
        let counter = Arc::new(Counter::default());
        let interceptors = Interceptors::new(vec![counter.clone()]);
        let context = Context::new(
            plane.config().await?,
            Options {
                interceptors,
                ..Options::default()
            },
        )?;
        let drainer = Drainer::new(&context);
        Ok(Self {
            client: plane.client().await?,
            namespace,
            drainer,
            counter,
            context,
            woken: Arc::default(),
        })
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn node(&self, suffix: &str) -> Result<Node> {
        let name = format!("{}-{suffix}", self.namespace);
        let node = parse(json!({"metadata": {"name": name, "labels": {"node": name}}}));
        Ok(Api::<Node>::all(self.client.clone())
            .create(&PostParams::default(), &node)
            .await?)
    }

    async fn live(&self, node: &Node) -> Result<Node> {
        Ok(Api::<Node>::all(self.client.clone())
            .get(node.metadata.name.as_deref().unwrap())
            .await?)
    }

    async fn pod(&self, name: &str, node: &Node, more: Value) -> Result<Pod> {
        let mut pod = json!({
            "metadata": {"name": name, "labels": {"app": "web"}},
            "spec": {
                "nodeName": node.metadata.name, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": "none"}],
            },
        });
        merge(&mut pod, &more);
        let made = self.pods().create(&PostParams::default(), &parse(pod)).await?;
        self.eventually("the pod is ready", async || {
            let pod = self.pods().get(name).await.ok()?;
            let ready = pod.status?.conditions?.into_iter().find(|c| c.type_ == "Ready")?;
            (ready.status == "True" || more["spec"]["restartPolicy"] == "Never").then_some(())
        })
        .await?;
        Ok(made)
    }

    /// A DaemonSet's pod on the node; there is no scheduler, so the test binds it.
    async fn daemon(&self, node: &Node) -> Result<String> {
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.namespace);
        let daemon = json!({
            "metadata": {"name": "agent"},
            "spec": {
                "selector": {"matchLabels": {"app": "agent"}},
                "template": {
                    "metadata": {"labels": {"app": "agent"}},
                    "spec": {
                        "nodeSelector": {"node": node.metadata.name},
                        "containers": [{"name": "c", "image": "none"}],
                    },
                },
            },
        });
        api.create(&PostParams::default(), &parse(daemon)).await?;
        let pod = self
            .eventually("the DaemonSet makes its pod", async || {
                let pods = self
                    .pods()
                    .list(&ListParams::default().labels("app=agent"))
                    .await
                    .ok()?;
                pods.items.into_iter().next()?.metadata.name
            })
            .await?;
        let binding: Binding = parse(json!({
            "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node.metadata.name},
        }));
        let _: Status = self
            .pods()
            .create_subresource("binding", &pod, &PostParams::default(), &binding)
            .await?;
        Ok(pod)
    }

    async fn budget(&self, name: &str, minimum: i32) -> Result<()> {
        let api: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), &self.namespace);
        let budget = json!({
            "metadata": {"name": name},
            "spec": {"minAvailable": minimum, "selector": {"matchLabels": {"app": "web"}}},
        });
        api.create(&PostParams::default(), &parse(budget)).await?;
        self.eventually("the budget is counted", async || {
            let budget = api.get(name).await.ok()?;
            (budget.status?.observed_generation? == 1).then_some(())
        })
        .await
    }

    async fn step(&self, node: &Node, options: drain::Options) -> Result<Outcome> {
        let woken = self.woken.clone();
        let node = self.live(node).await?;
        Ok(self
            .drainer
            .drain("m", &node, options, Arc::new(move || woken.notify_one()))
            .await?)
    }

    /// Steps, each after a wake or the hint, until the node is drained.
    async fn until_drained(&self, node: &Node) -> Result<()> {
        let steps = async {
            loop {
                match self.step(node, drain::Options::default()).await? {
                    Outcome::Drained(drained) if is_timed_out(&drained) => bail!("{drained}"),
                    Outcome::Drained(_) => return Ok(()),
                    Outcome::Draining { again, .. } => {
                        let _ = tokio::time::timeout(again, self.woken.notified()).await;
                    }
                }
            }
        };
        tokio::time::timeout(PATIENCE, steps)
            .await
            .context("not drained in time")?
    }

    async fn eventually<T>(&self, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> Result<T> {
        let waiting = async {
            loop {
                if let Some(found) = look().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting)
            .await
            .with_context(|| format!("waited in vain: {what}"))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.context.shutdown.cancel();
    }
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => {
            if !from.is_null() {
                *into = from.clone();
            }
        }
    }
}

fn is_timed_out(drained: &Drained) -> bool {
    matches!(drained.reason(), Reason::TimedOut { .. })
}

fn obstacles(outcome: &Outcome) -> Vec<(String, ObstacleReason)> {
    let obstacles = match outcome {
        Outcome::Draining { obstacles, .. } => obstacles.as_slice(),
        Outcome::Drained(drained) => match drained.reason() {
            Reason::TimedOut { obstacles } => obstacles.as_slice(),
            Reason::Empty | Reason::NotNeeded(_) => &[],
        },
    };
    let named = |obstacle: &Obstacle| (obstacle.pod.name.clone(), obstacle.reason.clone());
    obstacles.iter().map(named).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn daemon_and_mirror_pods_stay_and_all_others_go_once() -> Result<()> {
    let world = World::new().await?;
    let node = world.node("a").await?;
    let agent = world.daemon(&node).await?;
    world
        .pod(
            "mirror",
            &node,
            json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}}),
        )
        .await?;
    world
        .pod(
            "scratch",
            &node,
            json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}),
        )
        .await?;
    let Outcome::Draining { warnings, .. } = world.step(&node, drain::Options::default()).await? else {
        bail!("pods had to go")
    };
    let prefix = format!("pod {}/scratch", world.namespace);
    assert!(
        warnings.contains(&format!("{prefix} loses the data in its emptyDir volumes")),
        "{warnings:?}"
    );
    assert!(warnings.contains(&format!(
        "{prefix} is not managed by a controller: no controller creates it again"
    )));
    world.until_drained(&node).await?;
    assert_eq!(
        world.live(&node).await?.spec.and_then(|spec| spec.unschedulable),
        Some(true)
    );
    assert!(world.pods().get_opt("scratch").await?.is_none());
    assert!(world.pods().get_opt("mirror").await?.is_some());
    let agent = world.pods().get(&agent).await?;
    assert!(agent.metadata.deletion_timestamp.is_none());
    let log = world.counter.log.lock().unwrap().clone();
    assert_eq!(world.counter.evictions.load(Ordering::SeqCst), 1, "{log:#?}");
    world.drainer.uncordon(&world.live(&node).await?).await?;
    assert_eq!(world.live(&node).await?.spec.and_then(|spec| spec.unschedulable), None);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_blocks_until_another_pod_is_ready_and_is_named() -> Result<()> {
    let world = World::new().await?;
    let (node, other) = (world.node("a").await?, world.node("b").await?);
    world.pod("one", &node, json!({})).await?;
    world.budget("web", 1).await?;
    let budget = format!("{}/web", world.namespace);
    let outcome = world
        .eventually("the budget refuses", async || {
            let outcome = world.step(&node, drain::Options::default()).await.ok()?;
            (obstacles(&outcome) == [("one".to_owned(), ObstacleReason::DisruptionBudget(budget.clone()))])
                .then_some(outcome)
        })
        .await?;
    let Outcome::Draining { obstacles: left, .. } = outcome else {
        bail!("{outcome:?}")
    };
    let said = drain::describe(&left);
    assert_eq!(
        said,
        format!("pod {0}/one is blocked by budget {0}/web", world.namespace)
    );
    let metrics = world.context.metrics.encode();
    assert!(metrics.contains("capstan_drain_pod_in_the_way{"), "{metrics}");
    let refused = world.counter.evictions.load(Ordering::SeqCst);
    for _ in 0..5 {
        world.step(&node, drain::Options::default()).await?;
    }
    let asked = world.counter.asked.lock().unwrap().clone();
    assert!(
        asked[refused - 1..]
            .windows(2)
            .all(|two| two[1] - two[0] >= FIRST_RETRY),
        "a refused pod is not asked about again at once: {asked:?}"
    );
    world.pod("two", &other, json!({})).await?;
    world.until_drained(&node).await?;
    assert!(!world.context.metrics.encode().contains("capstan_drain_pod_in_the_way{"));
    assert!(world.pods().get_opt("two").await?.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_budgets_on_one_pod_are_reported_and_the_deadline_ends_the_wait() -> Result<()> {
    let world = World::new().await?;
    let node = world.node("a").await?;
    world.pod("one", &node, json!({})).await?;
    world.budget("web", 1).await?;
    world.budget("web2", 1).await?;
    let outcome = world.step(&node, drain::Options::default()).await?;
    assert_eq!(
        obstacles(&outcome),
        [("one".to_owned(), ObstacleReason::SeveralDisruptionBudgets)]
    );
    let options = drain::Options {
        deadline: Some(Timestamp::now()),
        ..drain::Options::default()
    };
    let outcome = world.step(&node, options).await?;
    assert!(
        matches!(&outcome, Outcome::Drained(drained) if is_timed_out(drained)),
        "{outcome:?}"
    );
    assert_eq!(
        obstacles(&outcome),
        [("one".to_owned(), ObstacleReason::SeveralDisruptionBudgets)]
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminating_pod_is_waited_for_and_its_end_wakes_the_caller() -> Result<()> {
    let world = World::new().await?;
    let node = world.node("a").await?;
    world
        .pod("held", &node, json!({"metadata": {"finalizers": ["capstan.dev/test"]}}))
        .await?;
    world.step(&node, drain::Options::default()).await?;
    let outcome = world.step(&node, drain::Options::default()).await?;
    assert_eq!(obstacles(&outcome), [("held".to_owned(), ObstacleReason::Terminating)]);
    assert_eq!(world.counter.evictions.load(Ordering::SeqCst), 1);
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.pods().patch("held", &PatchParams::default(), &patch).await?;
    tokio::time::timeout(Duration::from_secs(120), world.woken.notified())
        .await
        .context("not woken")?;
    world.until_drained(&node).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_node_does_not_hold_up_pods_long_past_deletion() -> Result<()> {
    let world = World::new().await?;
    let node = world.node("a").await?;
    world
        .pod("held", &node, json!({"metadata": {"finalizers": ["capstan.dev/test"]}}))
        .await?;
    let options = drain::Options {
        unreachable: true,
        patience: Duration::from_secs(1),
        ..drain::Options::default()
    };
    world.step(&node, options).await?;
    let drained = world
        .eventually("the pod is skipped", async || {
            let outcome = world.step(&node, options).await.ok()?;
            matches!(outcome, Outcome::Drained(_)).then_some(())
        })
        .await;
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.pods().patch("held", &PatchParams::default(), &patch).await?;
    drained
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_gone_is_drained() -> Result<()> {
    let world = World::new().await?;
    let node = world.node("a").await?;
    let nodes: Api<Node> = Api::all(world.client.clone());
    nodes
        .delete(
            node.metadata.name.as_deref().unwrap_or_default(),
            &DeleteParams::default(),
        )
        .await?;
    let woken = world.woken.clone();
    let outcome = world
        .drainer
        .drain(
            "m",
            &node,
            drain::Options::default(),
            Arc::new(move || woken.notify_one()),
        )
        .await?;
    assert!(
        matches!(&outcome, Outcome::Drained(drained) if drained.machine() == "m"),
        "{outcome:?}"
    );
    Ok(())
}
