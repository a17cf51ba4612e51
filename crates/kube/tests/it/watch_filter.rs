//! With a watch filter a controller reconciles objects of Cluster API with its label only; its caches hold all of them.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use capstan_kube::capi::Cluster;
use capstan_kube::runtime::Reconciler;
use capstan_kube::{Context, Options};
use capstan_testkit::ControlPlane;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::marking::{Marking, is_marked};

const PATIENCE: Duration = Duration::from_secs(120);
const LABEL: &str = "cluster.x-k8s.io/watch-filter";

#[tokio::test(flavor = "multi_thread")]
async fn only_objects_with_the_label_of_the_watch_filter_are_reconciled() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_cluster_api_crds().await?;
    let namespace = plane.namespace("filter").await?;
    let clusters: Api<Cluster> = Api::namespaced(plane.client().await?, &namespace);
    let apply = async |name: &str, labels: serde_json::Value| {
        let cluster = json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster",
            "metadata": {"name": name, "labels": labels},
            "spec": {"infrastructureRef": {"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "VSphereCluster", "name": name}},
        });
        let params = PatchParams::apply("test").force();
        clusters.patch(name, &params, &Patch::Apply(&cluster)).await
    };
    for (name, labels) in [
        ("other", json!({LABEL: "b"})),
        ("none", json!({})),
        ("own", json!({LABEL: "a"})),
    ] {
        apply(name, labels).await?;
    }
    let options = Options {
        namespace: Some(namespace.clone()),
        watch_filter: Some("a".to_owned()),
        ..Options::default()
    };
    let context = Context::new(plane.config().await?, options)?;
    let cache = context.cache::<Cluster>();
    let reconciler = Reconciler::new(&context, cache.clone());
    let trigger = reconciler.trigger();
    let running = tokio::spawn(reconciler.run(Arc::new(Marking(PhantomData))));
    let marked = async |name: &str| {
        let marked = tokio::time::timeout(PATIENCE, await_condition(clusters.clone(), name, is_marked::<Cluster>));
        marked.await.with_context(|| format!("{name} is not reconciled"))??;
        anyhow::Ok(())
    };
    marked("own").await?;
    for name in ["other", "none"] {
        ensure!(
            cache.get(Some(&namespace), name).is_some(),
            "the cache does not hold {name}"
        );
        // Nor does an event of another object lead to it.
        trigger.wake(kube::runtime::reflector::ObjectRef::new(name).within(&namespace));
    }
    // What the controller begins for these begins after the two.
    for name in ["later", "last"] {
        apply(name, json!({LABEL: "a"})).await?;
        marked(name).await?;
    }
    for name in ["other", "none"] {
        ensure!(!is_marked(Some(&clusters.get(name).await?)), "{name} is reconciled");
    }
    // The label decides at any time.
    apply("none", json!({LABEL: "a"})).await?;
    marked("none").await?;
    context.shutdown.cancel();
    running.await?;
    Ok(())
}
