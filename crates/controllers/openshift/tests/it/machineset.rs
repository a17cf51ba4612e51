//! MachineSets on a real API server, scaled with kubectl.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use capstan_api::openshift::{Machine, MachineSet, MachineSetStatus};
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use capstan_testkit::interceptors::StopAfter;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(180);

/// Counts machines made and writes of the set's status; on demand lets the answer to a create get lost.
#[derive(Default)]
struct Watcher {
    creates: AtomicUsize,
    deletes: AtomicUsize,
    statuses: AtomicUsize,
    lose: AtomicUsize,
    delay: AtomicUsize,
}

impl Interceptor for Watcher {
    fn before(&self, effect: &Effect) -> Verdict {
        match effect.method.as_str() {
            "POST" if effect.target.ends_with("/machines") => drop(self.creates.fetch_add(1, Ordering::SeqCst)),
            "DELETE" if effect.target.contains("/machines/") => drop(self.deletes.fetch_add(1, Ordering::SeqCst)),
            "PATCH" if effect.target.ends_with("/status") => drop(self.statuses.fetch_add(1, Ordering::SeqCst)),
            _ => {}
        }
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        let create = effect.method == "POST" && effect.target.ends_with("/machines");
        let lose = create
            && self
                .lose
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok();
        match self.delay.load(Ordering::SeqCst) {
            _ if lose => Verdict::Refuse("the answer got lost".to_owned()),
            0 => Verdict::Pass,
            millis => Verdict::Delay(Duration::from_millis(millis as u64)),
        }
    }
}

struct World {
    plane: ControlPlane,
    namespace: String,
    client: kube::Client,
    watcher: Arc<Watcher>,
    context: Context,
}

impl Drop for World {
    fn drop(&mut self) {
        self.context.shutdown.cancel();
    }
}

#[allow(clippy::unwrap_used, reason = "a test's own literal")]
fn parse<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

impl World {
    async fn new() -> Result<Self> {
        Self::with(true).await
    }

    async fn with(controller: bool) -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        plane.install_crds().await?;
        let namespace = plane.namespace("set").await?;
        let watcher = Arc::new(Watcher::default());
        let options = Options {
            interceptors: Interceptors::new(vec![watcher.clone()]),
            namespace: Some(namespace.clone()),
            ..Options::default()
        };
        let context = Context::new(plane.config().await?, options)?;
        if controller {
            tokio::spawn(capstan_openshift::machineset::run(context.clone(), nowhere(), false));
        }
        Ok(Self {
            client: plane.client().await?,
            plane,
            namespace,
            watcher,
            context,
        })
    }

    fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn sets(&self) -> Api<MachineSet> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn set(&self, replicas: i32, more: Value) -> Result<MachineSet> {
        let mut spec = json!({
            "replicas": replicas,
            "selector": {"matchLabels": {"set": "workers"}},
            "template": {
                "metadata": {"labels": {"set": "workers"}},
                "spec": {"providerSpec": {"value": {"vmSize": "Standard_D4s_v3"}}},
            },
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        Ok(self
            .sets()
            .create(&PostParams::default(), &MachineSet::new("workers", parse(spec)))
            .await?)
    }

    async fn names(&self) -> Result<Vec<String>> {
        let machines = self.machines().list(&ListParams::default()).await?.items;
        let alive = machines
            .into_iter()
            .filter(|machine| machine.metadata.deletion_timestamp.is_none());
        Ok(alive.map(|machine| machine.name_any()).collect())
    }

    async fn count(&self, expected: usize) -> Result<Vec<String>> {
        self.eventually(&format!("{expected} machines"), async || {
            let names = self.names().await.ok()?;
            (names.len() == expected).then_some(names)
        })
        .await
    }

    async fn status(&self, what: &str, holds: impl Fn(&MachineSetStatus) -> bool) -> Result<MachineSetStatus> {
        self.eventually(what, async || {
            self.sets().get("workers").await.ok()?.status.filter(&holds)
        })
        .await
    }

    /// The controller's own cache shows the machine as it should be: watches of two kinds come in any order.
    async fn shown(&self, name: &str, holds: impl Fn(&Machine) -> bool) -> Result<()> {
        let cache = self.context.cache::<Machine>();
        let shown = cache.until(Some(&self.namespace), name, |machine| machine.is_some_and(&holds));
        tokio::time::timeout(PATIENCE, shown).await.context("never shown")
    }

    async fn scale(&self, replicas: usize) -> Result<()> {
        let replicas = format!("--replicas={replicas}");
        let args = [
            "-n",
            &self.namespace,
            "scale",
            "machinesets.machine.openshift.io/workers",
            &replicas,
        ];
        self.plane.kubectl(&args).await.map(drop)
    }

    /// A ready node for a machine, as the machine controller would link it.
    async fn link(&self, machine: &str) -> Result<()> {
        let node = json!({
            "metadata": {"name": machine, "annotations": {"machine.openshift.io/machine": format!("{}/{machine}", self.namespace)}},
        });
        Api::<Node>::all(self.client.clone())
            .create(&PostParams::default(), &parse(node))
            .await?;
        let patch = Patch::Merge(json!({"status": {"nodeRef": {"kind": "Node", "name": machine}}}));
        self.machines()
            .patch_status(machine, &PatchParams::default(), &patch)
            .await?;
        Ok(())
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

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_scale_makes_and_deletes_exactly_the_difference() -> Result<()> {
    let world = World::new().await?;
    world.set(3, json!({})).await?;
    world.count(3).await?;
    world.scale(60).await?;
    world.count(60).await?;
    world.status("60 replicas", |status| status.replicas == 60).await?;
    assert_eq!(world.watcher.creates.load(Ordering::SeqCst), 60);
    world.scale(2).await?;
    world.count(2).await?;
    let status = world.status("2 replicas", |status| status.replicas == 2).await?;
    assert_eq!(status.label_selector.as_deref(), Some("set=workers"));
    assert_eq!(status.fully_labeled_replicas, Some(2));
    assert_eq!(world.watcher.deletes.load(Ordering::SeqCst), 58);
    let machine = world.machines().list(&ListParams::default()).await?.items.remove(0);
    let owner = &machine.owner_references()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.name.as_str(), owner.controller),
        ("MachineSet", "workers", Some(true))
    );
    assert!(machine.name_any().starts_with("workers-"));
    // As an autoscaler does it.
    let scale = world.sets().get_scale("workers").await?;
    let (spec, seen) = (scale.spec.unwrap_or_default(), scale.status.unwrap_or_default());
    assert_eq!(
        (spec.replicas, seen.replicas, seen.selector.as_deref()),
        (Some(2), 2, Some("set=workers"))
    );
    let three = Patch::Merge(json!({"spec": {"replicas": 3}}));
    world
        .sets()
        .patch_scale("workers", &PatchParams::default(), &three)
        .await?;
    world.count(3).await?;
    world.status("3 replicas", |status| status.replicas == 3).await?;
    let writes = world.watcher.statuses.load(Ordering::SeqCst);
    ensure!(writes <= 20, "{writes} status writes for four scalings");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        world.watcher.statuses.load(Ordering::SeqCst),
        writes,
        "a settled set writes nothing"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_effect_and_started_again_it_makes_no_machine_too_many() -> Result<()> {
    const REPLICAS: usize = 4;
    let mut points = 0;
    for effects in 1..=8 {
        let world = World::with(false).await?;
        let stop = StopAfter::new(effects);
        let options = Options {
            interceptors: Interceptors::new(vec![stop.clone()]),
            namespace: Some(world.namespace.clone()),
            ..Options::default()
        };
        let context = Context::new(world.plane.config().await?, options)?;
        world.set(REPLICAS as i32, json!({})).await?;
        let doomed = tokio::spawn(capstan_openshift::machineset::run(context.clone(), nowhere(), false));
        let done = async {
            let all = |status: &MachineSetStatus| status.replicas == REPLICAS as i32;
            let done = world.status("all replicas", all).await;
            tokio::time::sleep(Duration::from_secs(3)).await;
            done
        };
        let killed = tokio::select! {
            () = stop.stopped() => true,
            done = done => done.map(|_| false)?,
        };
        doomed.abort();
        context.shutdown.cancel();
        points += usize::from(killed);
        tokio::spawn(capstan_openshift::machineset::run(
            world.context.clone(),
            nowhere(),
            false,
        ));
        world
            .status("all replicas", |status| status.replicas == REPLICAS as i32)
            .await?;
        assert_eq!(world.names().await?.len(), REPLICAS, "killed after effect {effects}");
        if !killed {
            break;
        }
    }
    println!("{points} points at which the controller was killed");
    ensure!(points >= REPLICAS);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_never_make_a_machine_too_many() -> Result<()> {
    let world = World::new().await?;
    world.watcher.lose.store(4, Ordering::SeqCst);
    world.set(10, json!({})).await?;
    world.count(10).await?;
    world.status("10 replicas", |status| status.replicas == 10).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.names().await?.len(), 10);
    assert_eq!(world.watcher.creates.load(Ordering::SeqCst), 10);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delete_annotation_and_then_the_policy_choose_who_goes() -> Result<()> {
    let world = World::new().await?;
    world.set(3, json!({"deletePolicy": "Oldest"})).await?;
    let names = world.count(3).await?;
    for name in &names {
        world.link(name).await?;
    }
    let marked = names.last().context("no machine")?;
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"machine.openshift.io/delete-machine": "true"}}}));
    world.machines().patch(marked, &PatchParams::default(), &patch).await?;
    world
        .shown(marked, |machine| {
            machine
                .annotations()
                .contains_key("machine.openshift.io/delete-machine")
        })
        .await?;
    world.scale(2).await?;
    let left = world.count(2).await?;
    assert!(!left.contains(marked));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_adopted_and_a_template_change_touches_new_machines_only() -> Result<()> {
    let world = World::new().await?;
    let mut orphan = Machine::new("orphan", parse(json!({"providerSpec": {}})));
    orphan.labels_mut().insert("set".into(), "workers".into());
    world.machines().create(&PostParams::default(), &orphan).await?;
    world.shown("orphan", |_| true).await?;
    world.set(2, json!({})).await?;
    let names = world.count(2).await?;
    assert!(names.contains(&"orphan".to_owned()));
    world
        .eventually("the orphan is adopted", async || {
            (!world.machines().get("orphan").await.ok()?.owner_references().is_empty()).then_some(())
        })
        .await?;
    let size = json!({"template": {"spec": {"providerSpec": {"value": {"vmSize": "Standard_D8s_v3"}}}}});
    world
        .sets()
        .patch("workers", &PatchParams::default(), &Patch::Merge(json!({"spec": size})))
        .await?;
    world.scale(3).await?;
    world.count(3).await?;
    let machines = world.machines().list(&ListParams::default()).await?.items;
    let large = machines.iter().filter(|machine| {
        machine
            .spec
            .provider_spec
            .value
            .as_ref()
            .is_some_and(|value| value["vmSize"] == "Standard_D8s_v3")
    });
    assert_eq!(large.count(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_and_available_follow_the_nodes_and_min_ready_seconds() -> Result<()> {
    let world = World::new().await?;
    world.set(2, json!({"minReadySeconds": 2})).await?;
    let names = world.count(2).await?;
    world.link(&names[0]).await?;
    let status = world
        .status("one ready", |status| status.ready_replicas == Some(1))
        .await?;
    assert_eq!(status.replicas, 2);
    world
        .status("one available", |status| status.available_replicas == Some(1))
        .await?;
    Api::<Node>::all(world.client.clone())
        .delete(&names[0], &DeleteParams::default())
        .await?;
    world
        .status("none ready", |status| status.ready_replicas == Some(0))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_selector_that_misses_its_template_is_refused_in_status() -> Result<()> {
    let world = World::new().await?;
    world
        .set(
            2,
            json!({"selector": {"matchExpressions": [{"key": "other", "operator": "Exists"}]}}),
        )
        .await?;
    let status = world.status("refused", |status| status.error_reason.is_some()).await?;
    assert_eq!(status.error_reason.as_deref(), Some("InvalidConfiguration"));
    assert!(
        status
            .error_message
            .is_some_and(|message| message.starts_with("spec.selector: "))
    );
    assert_eq!(world.watcher.creates.load(Ordering::SeqCst), 0);
    Ok(())
}

/// An Azure that nobody reaches: the secrets of these sets do not exist.
fn nowhere() -> capstan_azure::Clients {
    let cloud = capstan_azure::Cloud::custom("none", "https://127.0.0.1:1", "https://127.0.0.1:1").unwrap();
    capstan_azure::Clients::new(capstan_azure::Settings::new(cloud)).unwrap()
}
