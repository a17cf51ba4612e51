//! A panic in the reconcile of one object stays with that object.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_core::plan::{Describe, Impact};
use capstan_core::{Class, Classified};
use capstan_kube::patch::Lock;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::ResourceExt;
use kube::api::{Api, ListParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(120);
const SEEN: &str = "capstan.dev/seen";

#[derive(Debug)]
struct Mark;

impl std::fmt::Display for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("marks the ConfigMap")
    }
}

impl Describe for Mark {
    fn impact(&self) -> Impact {
        Impact::Cluster
    }
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Error(#[from] capstan_kube::Error);

impl Classified for Error {
    fn class(&self) -> Class {
        self.0.class()
    }
}

/// Marks every ConfigMap, and panics for the one that is called `bad`.
struct Controller;

impl Reconcile for Controller {
    type Object = ConfigMap;
    type State = ();
    type Observed = bool;
    type Step = Mark;
    type Error = Error;

    const NAME: &'static str = "panics";
    const COMPONENT: &'static str = "panics-controller";

    async fn observe(&self, scope: &mut Scope<ConfigMap>, _: &mut ()) -> Result<Option<bool>, Error> {
        assert!(scope.key.name != "bad", "the test injects a panic");
        Ok(Some(scope.object.annotations().contains_key(SEEN)))
    }

    fn plan(seen: &bool, _: Timestamp) -> Plan<Mark> {
        if *seen { Plan::idle() } else { Plan::step(Mark) }
    }

    async fn apply(&self, _: Mark, _: &mut bool, scope: &mut Scope<ConfigMap>, _: &mut ()) -> Result<Outcome, Error> {
        let mut after = scope.object.as_ref().clone();
        after.annotations_mut().insert(SEEN.to_owned(), "true".to_owned());
        scope.write_object(&after, Lock::Open).await?;
        Ok(Outcome::Done)
    }

    fn status(_: &ConfigMap, _: Option<&bool>, _: Result<(), &Error>, _: Timestamp) -> Report<ConfigMap> {
        Report::nothing()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_one_reconcile_is_reported_and_no_other_object_notices() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let namespace = plane.namespace("panics").await?;
    let options = Options {
        namespace: Some(namespace.clone()),
        ..Options::default()
    };
    let context = Context::new(plane.config().await?, options)?;
    let reconciler = Reconciler::new(&context, context.cache::<ConfigMap>());
    let running = tokio::spawn(reconciler.run(Arc::new(Controller)));
    let client = plane.client().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let create = async |name: &str| {
        let map = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        maps.create(&PostParams::default(), &map).await?;
        anyhow::Ok(())
    };
    create("bad").await?;
    let events: Api<Event> = Api::namespaced(client, &namespace);
    let reported = ListParams::default().fields("reason=ReconcilePanicked,involvedObject.name=bad");
    let event = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(event) = events.list(&reported).await?.items.into_iter().next() {
                return anyhow::Ok(event);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let message = event.await.context("no event")??.message.unwrap_or_default();
    anyhow::ensure!(message.contains("the test injects a panic"), "{message}");
    create("good").await?;
    let marked = |map: Option<&ConfigMap>| map.is_some_and(|map| map.annotations().contains_key(SEEN));
    let good = tokio::time::timeout(PATIENCE, await_condition(maps.clone(), "good", marked));
    good.await.context("the other object is not reconciled")??;
    anyhow::ensure!(!running.is_finished(), "the controller ended");
    context.shutdown.cancel();
    running.await?;
    Ok(())
}
