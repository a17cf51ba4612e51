//! A panic in the reconcile of one object stays with that object.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_kube::runtime::Reconciler;
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{Api, ListParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::marking::{Marking, PANICS, is_marked};

const PATIENCE: Duration = Duration::from_secs(120);

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
    let running = tokio::spawn(reconciler.run(Arc::new(Marking(PhantomData))));
    let client = plane.client().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let create = async |name: &str| {
        let map = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        maps.create(&PostParams::default(), &map).await?;
        anyhow::Ok(())
    };
    create(PANICS).await?;
    let events: Api<Event> = Api::namespaced(client, &namespace);
    let reported = ListParams::default().fields(&format!("reason=ReconcilePanicked,involvedObject.name={PANICS}"));
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
    let good = tokio::time::timeout(PATIENCE, await_condition(maps.clone(), "good", is_marked::<ConfigMap>));
    good.await.context("the other object is not reconciled")??;
    anyhow::ensure!(!running.is_finished(), "the controller ended");
    context.shutdown.cancel();
    running.await?;
    Ok(())
}
