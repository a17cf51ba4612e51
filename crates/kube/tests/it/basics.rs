//! Caches, the runtime, events and patches on a real API server.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use capstan_core::{Class, Classified};
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::reflector::ObjectRef;
use serde_json::json;

struct World {
    context: Context,
    namespace: String,
    maps: Api<ConfigMap>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.context.shutdown.cancel();
    }
}

impl World {
    async fn new() -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        let namespace = plane.namespace("basics").await?;
        let options = Options {
            namespace: Some(namespace.clone()),
            ..Options::default()
        };
        let context = Context::new(plane.config().await?, options)?;
        let maps = Api::namespaced(plane.client().await?, &namespace);
        Ok(Self {
            context,
            namespace,
            maps,
        })
    }

    async fn map(&self, name: &str) -> Result<ConfigMap> {
        let map = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        Ok(self.maps.create(&PostParams::default(), &map).await?)
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(Duration::from_secs(120), future)
        .await
        .with_context(|| format!("waited in vain: {what}"))
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("throttled for {0:?}")]
    Throttled(Duration),
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
}

impl Classified for Failure {
    fn class(&self) -> Class {
        match self {
            Self::Throttled(after) => Class::Throttled(*after),
            Self::Kube(error) => error.class(),
        }
    }
}

const THROTTLE: Duration = Duration::from_millis(1500);

/// Notes each reconcile of the object `throttled`, and fails the first one.
struct Throttled(Arc<Mutex<Vec<Instant>>>);

impl Reconcile for Throttled {
    type Object = ConfigMap;
    type State = ();
    type Observed = ();
    type Step = std::convert::Infallible;
    type Error = Failure;

    const NAME: &'static str = "test";
    const COMPONENT: &'static str = "test";

    async fn observe(&self, scope: &mut Scope<ConfigMap>, _: &mut ()) -> Result<Option<()>, Failure> {
        if scope.name() != "throttled" {
            return Ok(None);
        }
        let mut reconciles = self.0.lock().expect("no reconcile panics");
        reconciles.push(Instant::now());
        match reconciles.len() {
            1 => Err(Failure::Throttled(THROTTLE)),
            _ => Ok(None),
        }
    }

    fn plan(_: &(), _: Timestamp) -> Plan<Self::Step> {
        Plan::idle()
    }

    async fn apply(
        &self,
        step: Self::Step,
        _: &mut (),
        _: &mut Scope<ConfigMap>,
        _: &mut (),
    ) -> Result<Outcome, Failure> {
        match step {}
    }

    fn status(_: &ConfigMap, _: Option<&()>, _: Result<(), &Failure>, _: Timestamp) -> Report<ConfigMap> {
        Report::nothing()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_is_shared_trimmed_and_tells_of_deletions() -> Result<()> {
    let world = World::new().await?;
    world.map("a").await?;
    let (cache, again) = (world.context.cache::<ConfigMap>(), world.context.cache::<ConfigMap>());
    within("the first list", cache.ready()).await??;
    let watches = world.context.metrics.kube_requests("watch") + world.context.metrics.kube_requests("get");
    let mut changes = Box::pin(again.subscribe());
    let present = within("what is there", async {
        loop {
            let change = changes.next().await?;
            if change.object.name_any() == "a" {
                return Some(change);
            }
        }
    })
    .await?
    .context("ended")?;
    assert!(!present.gone && present.object.managed_fields().is_empty());
    world.maps.delete("a", &DeleteParams::default()).await?;
    let gone = async {
        loop {
            let change = changes.next().await?;
            if change.object.name_any() == "a" && change.gone {
                return Some(());
            }
        }
    };
    within("the deletion", gone).await?.context("ended")?;
    assert!(cache.get(Some(&world.namespace), "a").is_none());
    let now = world.context.metrics.kube_requests("watch") + world.context.metrics.kube_requests("get");
    assert!(now <= watches + 1, "a second reader costs no second watch");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_object_is_not_reconciled_early_and_a_trigger_wakes_an_idle_one() -> Result<()> {
    let world = World::new().await?;
    let reconciler = Reconciler::new(&world.context, world.context.cache::<ConfigMap>());
    let trigger = reconciler.trigger();
    let (reconciles, namespace) = (Arc::<Mutex<Vec<Instant>>>::default(), world.namespace.clone());
    let running = tokio::spawn(reconciler.run(Arc::new(Throttled(reconciles.clone()))));
    let count = || reconciles.lock().expect("no reconcile panics").len();
    let wake = || trigger.wake(ObjectRef::new("throttled").within(&namespace));
    world.map("throttled").await?;
    within("the first reconcile", async {
        while count() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await?;
    within("the retry", async {
        while count() < 2 {
            wake();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await?;
    let times = reconciles.lock().expect("no reconcile panics").clone();
    assert!(
        times[1] - times[0] >= THROTTLE,
        "a trigger does not shorten the pause that the server asked for: {times:?}"
    );
    let before = count();
    wake();
    within("the reconcile that was asked for", async {
        while count() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await?;
    world.context.shutdown.cancel();
    within("the end", running).await??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_event_is_one_object_with_a_count() -> Result<()> {
    let world = World::new().await?;
    let map = world.map("a").await?;
    let recorder = world.context.recorder("azure-controller");
    for _ in 0..4 {
        recorder.warning(&map, "FailedCreate", "no").await;
    }
    recorder.warning(&map, "FailedCreate", "other").await;
    let events: Api<Event> = Api::namespaced(world.context.client.clone(), &world.namespace);
    let selector = ListParams::default().fields("reason=FailedCreate,source=azure-controller,type=Warning");
    let mut said: Vec<_> = events
        .list(&selector)
        .await?
        .items
        .into_iter()
        .map(|e| (e.message, e.count))
        .collect();
    said.sort();
    assert_eq!(
        said,
        [(Some("no".to_owned()), Some(4)), (Some("other".to_owned()), Some(1))]
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn finalizers_and_patches_are_written_once_and_conflicts_are_seen() -> Result<()> {
    let world = World::new().await?;
    let map = world.map("a").await?;
    let held = patch::add_finalizer(&world.maps, &map, "capstan.dev/test")
        .await?
        .context("added")?;
    assert!(
        patch::add_finalizer(&world.maps, &held, "capstan.dev/test")
            .await?
            .is_none()
    );
    let stale = patch::add_finalizer(&world.maps, &map, "capstan.dev/other").await;
    assert!(stale.is_err_and(|error| error.is_conflict() && error.class() == Class::Transient));
    let mut changed = held.clone();
    changed.labels_mut().insert("a".into(), "b".into());
    let patched = patch::object(&world.maps, &held, &changed, Lock::Version)
        .await?
        .context("patched")?;
    assert!(
        patch::object(&world.maps, &patched, &patched.clone(), Lock::Version)
            .await?
            .is_none()
    );
    assert!(
        patch::object(&world.maps, &held, &changed, Lock::Version)
            .await
            .is_err_and(|error| error.is_conflict())
    );
    world.maps.delete("a", &DeleteParams::default()).await?;
    let held = world.maps.get("a").await?;
    patch::remove_finalizer(&world.maps, &held, "capstan.dev/test").await?;
    assert!(world.maps.get_opt("a").await?.is_none());
    assert!(
        patch::remove_finalizer(&world.maps, &held, "capstan.dev/test")
            .await?
            .is_none()
    );
    Ok(())
}

#[derive(kube::CustomResource, serde::Serialize, serde::Deserialize, Clone, Debug)]
#[kube(
    group = "capstan.test",
    version = "v1",
    kind = "Pruned",
    namespaced,
    status = "PrunedStatus",
    schema = "disabled"
)]
struct PrunedSpec {}

#[derive(serde::Serialize, serde::Deserialize, Clone, Debug, Default)]
struct PrunedStatus {
    known: Option<String>,
    unknown: Option<String>,
}

/// A definition that knows one of the two fields only, as another's might.
async fn install_pruned(client: &kube::Client) -> Result<()> {
    let definition = serde_json::from_value(json!({
        "metadata": {"name": "pruneds.capstan.test"},
        "spec": {"group": "capstan.test", "scope": "Namespaced",
            "names": {"plural": "pruneds", "singular": "pruned", "kind": "Pruned"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object"},
                    "status": {"type": "object", "properties": {"known": {"type": "string"}}}}}}}]}
    }))?;
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    api.create(&PostParams::default(), &definition).await?;
    let established = kube::runtime::conditions::is_crd_established();
    within(
        "established",
        kube::runtime::wait::await_condition(api, "pruneds.capstan.test", established),
    )
    .await??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_the_definition_does_not_know_is_written_once_and_not_for_ever() -> Result<()> {
    let world = World::new().await?;
    install_pruned(&world.context.client).await?;
    let api: Api<Pruned> = Api::namespaced(world.context.client.clone(), &world.namespace);
    let object = Pruned::new("foreign", PrunedSpec {});
    let create = async {
        loop {
            match api.create(&PostParams::default(), &object).await {
                // The API server serves a kind a moment after it has said so.
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                made => return made,
            }
        }
    };
    let fresh = within("created", create).await??;
    let wanting = |before: &Pruned, known: &str, unknown: &str| {
        let mut after = before.clone();
        after.status = Some(PrunedStatus {
            known: Some(known.to_owned()),
            unknown: Some(unknown.to_owned()),
        });
        after
    };
    let written = patch::status(&api, &fresh, &wanting(&fresh, "a", "x"), Lock::Open).await?;
    let written = written.context("the first write")?;
    assert_eq!(
        written.status.as_ref().and_then(|status| status.known.as_deref()),
        Some("a")
    );
    let stored = api.get("foreign").await?;
    let manager = stored.managed_fields().iter().find_map(|entry| entry.manager.clone());
    assert_eq!(
        manager.as_deref(),
        Some("capstan"),
        "audit and managedFields tell who writes"
    );
    let again = patch::status(&api, &written, &wanting(&written, "a", "x"), Lock::Open).await?;
    assert!(again.is_none(), "written again: {again:?}");
    let changed = patch::status(&api, &written, &wanting(&written, "b", "x"), Lock::Open).await?;
    assert!(changed.is_some(), "what the definition knows is written as ever");
    Ok(())
}
